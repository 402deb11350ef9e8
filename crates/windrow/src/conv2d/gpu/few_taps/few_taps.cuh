// The product of few_taps.cu: the elements of filter, input and sums that a lane holds, on tensor cores and on AMD's
// matrix cores. The order of channels, pixels and taps within the tiles of a product is free; it is chosen so that the
// sums of a lane are neighbours in memory.
//
// Constants: ELEMENT_*, TAPS, PRODUCTS, ROW_TILES, STORE, VECTOR: see there.
#pragma once

#include "conv2d.cuh"

#define ANY 0      // strides of y
#define CHANNELS 1 // of y lie side by side
#define PIXELS 2   // of an image and channel of y follow each other

#if WINDROW_PTX

constexpr int LANES = 32;                                   // that multiply together
constexpr int PIXEL_TILES = 4;                              // of 8 pixels
constexpr int HALF_STEPS = IS_F32 ? 1 : 2;                  // taps in one register of an operand
constexpr int STEP_LOADS = 2 * HALF_STEPS;                  // of a lane for one product: 8 or 16 taps
constexpr int STEPS = (TAPS + 4 * STEP_LOADS - 1) / (4 * STEP_LOADS);
constexpr int LOADS = STEPS * STEP_LOADS;
constexpr int PARTS = PRODUCTS == 1 ? 1 : 2;
constexpr int CHANNELS_OF_THREAD = 2 * ROW_TILES;
constexpr int PIXELS_OF_THREAD = 2 * PIXEL_TILES;

// Column 2 q + e of tile t is this pixel: a lane's sums of its neighbouring tiles are a vector, and lanes q store their
// vectors side by side.
constexpr int VECTOR_TILES = STORE == PIXELS && VECTOR > 2 ? VECTOR / 2 : 1;
__device__ __forceinline__ int pixel_of(int t, int q, int e) {
    return t / VECTOR_TILES * (8 * VECTOR_TILES) + q * (2 * VECTOR_TILES) + t % VECTOR_TILES * 2 + e;
}

struct Lane {
    int number, g, q;

    __device__ __forceinline__ explicit Lane(int number) : number(number), g(number / 4), q(number % 4) {}
    // Of its sums.
    __device__ __forceinline__ int first_channel() const { return g * CHANNELS_OF_THREAD; }
    __device__ __forceinline__ int pixel(int i) const { return pixel_of(i / 2, q, i % 2); }
    // Whose operand of tile t it loads.
    __device__ __forceinline__ int gathered_pixel(int t) const { return pixel_of(t, g / 2, g % 2); }
    // Of load i: one load of a warp touches few rows.
    __device__ __forceinline__ int tap(int i) const { return 4 * i + q; }
    __device__ __forceinline__ bool has_tap(int i) const { return 4 * i + 3 < TAPS || tap(i) < TAPS; }
};

// Operand A of all products.
struct Filter {
    u32 a[STEPS][ROW_TILES][PARTS][4];

    __device__ __forceinline__ Filter(const void* filter, const Lane& lane) {
        const uint4* from =
            static_cast<const uint4*>(filter) + blockIdx.y * (STEPS * ROW_TILES * PARTS * 32) + lane.number;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const uint4 v = __ldg(from);
                    a[step][tile][part][0] = v.x, a[step][tile][part][1] = v.y;
                    a[step][tile][part][2] = v.z, a[step][tile][part][3] = v.w;
                    from += 32;
                }
            }
        }
    }
};

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef ELEMENT_F32
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE ".f32 "
#endif
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

struct Sums {
    float sum[PIXEL_TILES][ROW_TILES][4] = {};

    __device__ __forceinline__ float at(int pixel, int channel) const {
        return sum[pixel / 2][channel / 2][channel % 2 * 2 + pixel % 2];
    }

    // The products of a tile of pixels, of which a lane has loaded `v`.
    __device__ __forceinline__ void add(int pixel_tile, const Filter& filter, const Element (&v)[LOADS]) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 b[PARTS][2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = STEP_LOADS * step + HALF_STEPS * half;
#ifdef ELEMENT_F32
                b[0][half] = float_to_tf32(v[i]);
                if (PRODUCTS == 3) b[PARTS - 1][half] = __float_as_uint(v[i] - __uint_as_float(b[0][half]));
#else
                b[0][half] = static_cast<u32>(v[i]) | static_cast<u32>(v[i + 1]) << 16;
#endif
            }
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
                if (PRODUCTS == 3) { // low-order terms first
                    multiply(sum[pixel_tile][tile], filter.a[step][tile][PARTS - 1], b[0]);
                    multiply(sum[pixel_tile][tile], filter.a[step][tile][0], b[PARTS - 1]);
                }
                multiply(sum[pixel_tile][tile], filter.a[step][tile][0], b[0]);
            }
        }
    }
};

#elif defined(MATRIX_CORES)

// The filter is a, whose rows are channels: a lane's sums are channels of one pixel for each tile of pixels.
constexpr int LANES = WAVEFRONT;
constexpr int PIXEL_TILES = 2; // of 16 pixels
constexpr int STEPS = (TAPS + 15) / 16;
constexpr int LOADS = STEPS * MATRIX_ELEMENTS;
constexpr int CHANNELS_OF_THREAD = MATRIX_SUMS * ROW_TILES;
constexpr int PIXELS_OF_THREAD = PIXEL_TILES;

struct Lane {
    int column, part;

    __device__ __forceinline__ explicit Lane(int number) : column(number % 16), part(number / 16) {}
    __device__ __forceinline__ int first_channel() const { return part * CHANNELS_OF_THREAD; }
    __device__ __forceinline__ int pixel(int i) const { return column * PIXEL_TILES + i; }
    __device__ __forceinline__ int gathered_pixel(int t) const { return pixel(t); }
    __device__ __forceinline__ int tap(int i) const {
        return i / MATRIX_ELEMENTS * 16 + matrix_depth(i % MATRIX_ELEMENTS);
    }
    __device__ __forceinline__ bool has_tap(int i) const {
        return i / MATRIX_ELEMENTS * 16 + 15 < TAPS || tap(i) < TAPS;
    }
};

// The channel, of the first tile's, whose filter is a row: the inverse of `matrix_row`.
__device__ __forceinline__ int channel_of_row(int row) {
#ifdef __GFX11__
    return row % 2 * CHANNELS_OF_THREAD + row / 2;
#else
    return row / MATRIX_SUMS * CHANNELS_OF_THREAD + row % MATRIX_SUMS;
#endif
}

struct Filter {
    Element a[STEPS][ROW_TILES][MATRIX_ELEMENTS];

    __device__ __forceinline__ Filter(const void* filter, const Lane& lane) {
        const int k = blockIdx.y * (16 * ROW_TILES) + channel_of_row(lane.column);
        const Element* const row = static_cast<const Element*>(filter) + k * (16 * STEPS);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
#pragma unroll
                for (int j = 0; j < MATRIX_ELEMENTS; j++)
                    a[step][tile][j] = row[(MATRIX_SUMS * tile * STEPS + step) * 16 + matrix_depth(j)];
            }
        }
    }
};

struct Sums {
    MatrixSums sum[PIXEL_TILES][ROW_TILES] = {};

    __device__ __forceinline__ float at(int pixel, int channel) const {
        return sum[pixel][channel / MATRIX_SUMS][channel % MATRIX_SUMS];
    }

    __device__ __forceinline__ void add(int pixel_tile, const Filter& filter, const Element (&v)[LOADS]) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Element b[MATRIX_ELEMENTS];
#pragma unroll
            for (int j = 0; j < MATRIX_ELEMENTS; j++) b[j] = v[MATRIX_ELEMENTS * step + j];
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++)
                multiply_matrices(filter.a[step][tile], b, IS_F16, sum[pixel_tile][tile]);
        }
    }
};

#endif
