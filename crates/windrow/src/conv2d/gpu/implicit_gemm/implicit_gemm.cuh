// What the parts of implicit_gemm.cu and implicit_gemm_single.cu share: sizes, parameters, and which outputs a block computes.

#pragma once

#include "conv2d.cuh"
#include "hopper.cuh"

// f32 in three products of f16 parts; else one product.
constexpr bool IS_SPLIT = IS_F32 && !TF32;
#if defined(ELEMENT_F32) && !TF32
#define BLOCK_M 128   // output pixels of a block
#define PRODUCERS 128 // threads that gather
#endif
// With STRIP the pixels of a step are a strip that all columns of the filter read, each some pixels further on.
#ifndef STRIP
#define STRIP 0
#endif
constexpr int TAPS = STRIP ? 3 : 1;                          // whose products a step has
constexpr int ROW_BYTES = IS_SPLIT ? 256 : STRIP ? 64 : 128; // of a pixel
constexpr int STEP_CHANNELS = ROW_BYTES / sizeof(Element);
constexpr int STEP_DEPTH = TAPS * STEP_CHANNELS; // terms of a step
constexpr int TAP_PRODUCTS = IS_SPLIT ? 4 : ROW_BYTES / 32;
constexpr int X_BYTES = (BLOCK_M + (STRIP ? 8 : 0)) * ROW_BYTES;
constexpr int PART_BYTES = 32 * BLOCK_K; // of the filter, that a product multiplies
constexpr int W_BYTES = TAPS * TAP_PRODUCTS * (IS_SPLIT ? 2 : 1) * PART_BYTES;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int CONSUMER_WARPS = 8;

// How x is gathered.
#define ANY 0      // element by element
#define CHANNELS 1 // vectors of four neighbouring channels
#define PIXELS 2   // vectors of four neighbouring pixels: a filter of one tap, stride 1, no padding
#define MAP 3      // by the copy engine, which knows where taps lie: channels of a step at a time

struct ImageParams : ConvShape {    // offsets within x, or a frame of it, fit 31 bits
    TensorMap map;                  // GATHER MAP: of x
    const unsigned char* filter;    // [k block, step, W_BYTES]
    const float* filter_inverse;    // f32: [k], undoes the scale of the filter but for 2^FILTER_EXPONENT
    int pixels;                     // n * image_pixels
    int r;                          // rows of the filter, of all its frames
    int group_c;                    // input channels of a group
    int unit_k;                     // output channels of a unit: groups that a block computes together, or one group
    int steps;                      // ceil(c * r * s / STEP_DEPTH), r as above
    int tiles;                      // of BLOCK_M pixels and BLOCK_K channels
    Divisor image_pixels;           // oh * pitch; or more, to fill up warps or blocks
    Divisor pitch;                  // of a row of y: ow, or more with STRIP
    Divisor k_blocks, unit_blocks;  // of y, of a unit
    Divisor group_k;                // output channels of a group
    Divisor c, s;                   // input channels of a unit, columns of the filter
};
#if FRAMES
// Images are frames of a video. The initial ones have the strides of x along rows and columns.
struct Params : ImageParams {
    TensorMap initial_map; // GATHER MAP: of the initial frames
    Frames frames;
    Divisor frame_r; // rows of a frame of the filter
    int all_c;       // channels of x
};
#else
struct Params : ImageParams {};
#endif
static_assert(PARAMS_AGREE, "as the host's structure");

// The row of a frame of the filter.
__device__ __forceinline__ int row_of(const Params& p, int r) {
#if FRAMES
    return r - p.frame_r.divide(r) * static_cast<int>(p.frame_r.value);
#else
    return r;
#endif
}

// What an image of y reads through a row of the filter: x with all of its images or, with FRAMES, a frame.
struct Source {
    const Element* x;
    i64 x_c;
    bool exists; // else there are zeros

    __device__ __forceinline__ Source(const Params& p, int image, int r) {
#if FRAMES
        bool is_initial;
        x = p.frames.find(p.x, p.frames.number(image, p.frame_r.divide(r)), is_initial);
        x_c = is_initial ? p.frames.initial_c : p.x_c;
        exists = x != nullptr;
#else
        x = p.x;
        x_c = p.x_c;
        exists = true;
#endif
    }
};

// A term of the sums: an input channel and a tap, channels first. Rows are counted over all frames of the filter.
struct Term {
    int c, r, s;

    __device__ __forceinline__ Term(const Params& p, int term) {
        const int tap = p.c.divide(term);
        c = term - tap * static_cast<int>(p.c.value);
        r = p.s.divide(tap);
        s = tap - r * static_cast<int>(p.s.value);
    }
    __device__ __forceinline__ bool exists(const Params& p) const { return r < p.r; }
    __device__ __forceinline__ void next_tap(const Params& p) {
        c = 0;
        if (++s == static_cast<int>(p.s.value)) next_row();
    }
    __device__ __forceinline__ void next_row() {
        c = s = 0;
        r++;
    }
};

// An output pixel.
struct Pixel {
    int image, row, column;
    __device__ __forceinline__ Pixel(const Params& p, int pixel) {
        image = p.image_pixels.divide(pixel);
        const int rest = pixel - image * static_cast<int>(p.image_pixels.value);
        row = p.pitch.divide(rest);
        column = rest - row * static_cast<int>(p.pitch.value);
    }
};

// True if a pixel exists; others fill up rows, warps or blocks.
__device__ __forceinline__ bool has_pixel(const Params& p, int pixel) {
    const Pixel at(p, pixel);
    return pixel < p.pixels && at.row < p.oh && at.column < p.ow;
}

// The pixel of a block that a row of the product is. For f16/bf16, four neighbours are in one thread once blocks of
// 8 x 8 sums are transposed (implicit_gemm_halves.cuh).
__device__ __forceinline__ int pixel_of(int row) {
    return IS_F32 || GATHER == MAP ? row : (row & ~15) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1);
}

// The output channels of a block. It sums over all input channels of their unit; where that has several groups, the filter
// has zeros between them.
struct Columns {
    int first, end; // those behind the end are another block's, or nothing's
    int unit;

    __device__ __forceinline__ Columns(const Params& p, int k_block) {
        unit = p.unit_blocks.divide(k_block);
        first = unit * p.unit_k + (k_block - unit * static_cast<int>(p.unit_blocks.value)) * BLOCK_K;
        end = (unit + 1) * p.unit_k;
    }
};

// Blocks of a cluster share the terms of a tile.
__device__ __forceinline__ int rank_in_cluster() { return SPLIT == 1 ? 0 : blockIdx.x % SPLIT; }
__device__ __forceinline__ int first_step(const Params& p, int rank) {
    return static_cast<int>(static_cast<i64>(p.steps) * rank / SPLIT);
}

// Output channel of sum (j, e) in lane quarter q: the filter is packed in this order, so that the channels of a thread are
// neighbours in eights; of TF32 in fours, so that the quarters store whole sectors together.
__device__ __forceinline__ int channel_of(int q, int j, int e) {
    constexpr int PAIRS = TF32 ? 2 : 4;
    return 8 * PAIRS * (j / PAIRS) + 2 * PAIRS * q + 2 * (j % PAIRS) + e;
}

__device__ __forceinline__ float bias_of(const Params& p, const Columns& columns, int k) {
    if (p.bias == nullptr || k >= columns.end) return 0;
    return p.bias_is_float ? static_cast<const float*>(p.bias)[k * p.bias_stride]
                           : to_float(static_cast<const Element*>(p.bias)[k * p.bias_stride]);
}

// Prefetches the residual of a tile while its sums are formed, if there are no registers to hold it. Each of the
// consumers' threads prefetches some lines.
template <bool CHANNELS_LAST>
__device__ __forceinline__ void prefetch_residual(const Params& p, int pixel0, const Columns& columns, int thread) {
    constexpr int LINE = 128 / sizeof(Element), LINES = (CHANNELS_LAST ? BLOCK_K : BLOCK_M) / LINE;
    constexpr int ROWS = CHANNELS_LAST ? BLOCK_M : BLOCK_K, THREADS = 32 * CONSUMER_WARPS;
#pragma unroll
    for (int i = thread + THREADS * rank_in_cluster(); i < LINES * ROWS; i += THREADS * SPLIT) {
        const int row = i / LINES, column = i % LINES * LINE;
        const int pixel = pixel0 + (CHANNELS_LAST ? row : column), k = columns.first + (CHANNELS_LAST ? column : row);
        if (!has_pixel(p, pixel) || k >= columns.end) continue;
        const Pixel at(p, pixel);
        prefetch(p.residual + (at.image * p.y_n + k * p.y_k + at.row * p.y_h + at.column * p.y_w));
    }
}

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 address_in(u32 address, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ float4 load_there(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}
