// Convolution whose output elements sum few products (c * r * s <= 48, as in the first layer of a network), on tensor
// cores: such a layer is bound by the store of its output. One group, any stride, padding and dilation.
//
//     out[k, pixel] = sum over taps d of w[k, d] x[pixel + d]
//
// is a product of matrices whose left one, the filter, stays in the registers of a warp (few_taps_filter.cu has it in
// that order). A warp computes 16 * ROW_TILES output channels of 32 pixels that follow each other in an image, also over
// the ends of rows, and gathers its operands from the first-level cache: tap 4 i + q is element i of lane quarter q, so
// that one load of a warp touches few rows. The order of channels and pixels within the tiles of the product is free;
// it is chosen so that the sums of a thread are neighbours in memory.
//
// f16 and bf16 products are exact, sums f32. f32 operands are split in two TF32 parts and multiplied in three products,
// or rounded to one.
//
// Constants: ELEMENT_*, EPILOGUE, TAPS (c * r * s), PRODUCTS 1 or 3 (f32), ROW_TILES 2 or 4, PADDED 0 or 1, STORE (below)
// and VECTOR, elements of one store.

#include "conv2d.cuh"

#define ANY 0      // strides of y
#define CHANNELS 1 // of y lie side by side
#define PIXELS 2   // of an image and channel of y follow each other

constexpr int PIXEL_TILES = 4;                              // of 8 pixels
constexpr int HALF_STEPS = IS_F32 ? 1 : 2;                  // taps in one register of an operand
constexpr int STEP_LOADS = 2 * HALF_STEPS;                  // of a lane for one product: 8 or 16 taps
constexpr int STEPS = (TAPS + 4 * STEP_LOADS - 1) / (4 * STEP_LOADS);
constexpr int LOADS = STEPS * STEP_LOADS;
constexpr int PARTS = PRODUCTS == 1 ? 1 : 2;
#if defined ELEMENT_F32 && PRODUCTS == 3
#define SPLIT 1
#else
#define SPLIT 0
#endif
constexpr int CHANNELS_OF_THREAD = 2 * ROW_TILES;
constexpr int THREADS = 128;

struct Params {
    const Element* x;
    const uint4* filter;    // [k block, step, row tile, part, lane]
    const void* bias;       // [k] or null
    Element* y;
    i64 x_n, x_c, x_h, x_w; // strides in elements
    i64 y_n, y_k, y_h, y_w;
    i64 bias_stride;
    int bias_is_float;
    int k, h, w;
    int pixels;             // oh * ow
    int groups;             // n * ceil(pixels / 32)
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    Divisor image_groups;   // ceil(pixels / 32)
    Divisor ow, filter_area, filter_width;
};
static_assert(PARAMS_AGREE, "as the host's structure");

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

// Column 2 q + e of tile t is this pixel: a lane's sums of its neighbouring tiles are a vector, and lanes q store their
// vectors beside each other.
constexpr int VECTOR_TILES = STORE == PIXELS && VECTOR > 2 ? VECTOR / 2 : 1;
__device__ __forceinline__ int pixel_of(int t, int q, int e) {
    return t / VECTOR_TILES * (8 * VECTOR_TILES) + q * (2 * VECTOR_TILES) + t % VECTOR_TILES * 2 + e;
}

// Where a lane's taps lie, relative to the first tap of an output.
struct Taps {
    int offset[LOADS]; // in elements
    int place[LOADS];  // row << 16 | column

    __device__ __forceinline__ Taps(const Params& p, int q) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int d = min(4 * i + q, TAPS - 1);
            const int c = p.filter_area.divide(d), rs = d - c * static_cast<int>(p.filter_area.value);
            const int r = p.filter_width.divide(rs), s = rs - r * static_cast<int>(p.filter_width.value);
            const int row = r * p.dilation_h, column = s * p.dilation_w;
            offset[i] = static_cast<int>(c * p.x_c + row * p.x_h + column * p.x_w);
            place[i] = row << 16 | column;
        }
    }
};

// The operand of one pixel: tap 4 i + q for all i, zero where the input or the filter ends.
__device__ __forceinline__ void load(Element (&v)[LOADS], const Params& p, const Taps& taps, int q, int image,
                                     int pixel) {
    const int row = p.ow.divide(pixel), column = pixel - row * static_cast<int>(p.ow.value);
    const int y = row * p.stride_h - p.pad_h, x = column * p.stride_w - p.pad_w;
    const Element* const first = p.x + image * p.x_n + y * p.x_h + x * p.x_w;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        bool exists = 4 * i + 3 < TAPS || 4 * i + q < TAPS;
        if (PADDED)
            exists = exists && static_cast<u32>(y + (taps.place[i] >> 16)) < static_cast<u32>(p.h) &&
                     static_cast<u32>(x + (taps.place[i] & 0xffff)) < static_cast<u32>(p.w);
        v[i] = exists ? __ldg(first + taps.offset[i]) : from_float(0);
    }
}

__device__ __forceinline__ void add_products(float (&sum)[ROW_TILES][4], const u32 (&a)[STEPS][ROW_TILES][PARTS][4],
                                             const Element (&v)[LOADS]) {
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
                multiply(sum[tile], a[step][tile][PARTS - 1], b[0]);
                multiply(sum[tile], a[step][tile][0], b[PARTS - 1]);
            }
            multiply(sum[tile], a[step][tile][0], b[0]);
        }
    }
}

// VECTOR neighbouring outputs.
__device__ __forceinline__ void store(Element* to, const float (&v)[VECTOR]) {
    Raw<T, VECTOR> raw;
    raw.pack(v);
    raw.template store<VECTOR>(to);
}

__device__ __forceinline__ float bias_of(const Params& p, int k) {
    if (p.bias == nullptr || k >= p.k) return 0;
    return p.bias_is_float ? static_cast<const float*>(p.bias)[k * p.bias_stride]
                           : to_float(static_cast<const Element*>(p.bias)[k * p.bias_stride]);
}

#if SPLIT
// A weight as it was before it was split, but for its last bits: see few_taps_filter.cu.
__device__ __forceinline__ float weight_at(const Params& p, int g, int channel, int d) {
    const int load = d / 4, step = load / STEP_LOADS, word = load % STEP_LOADS * 2 + channel % 2;
    const i64 first = ((blockIdx.y * STEPS + step) * ROW_TILES + channel / 2) * PARTS * 128;
    const float* const high = reinterpret_cast<const float*>(p.filter) + first + (4 * g + d % 4) * 4 + word;
    return isfinite(high[0]) ? high[0] + high[128] : high[0];
}

// A lane's outputs, of which one would be NaN, as plain sums: an infinity split in two is an infinity and NaN.
__device__ __noinline__ void store_plain_sums(const Params& p, const Element* x, Element* y, int pixel0, int g, int q) {
    const int first_k = blockIdx.y * (16 * ROW_TILES) + g * CHANNELS_OF_THREAD;
    for (int i = 0; i < 2 * PIXEL_TILES * CHANNELS_OF_THREAD; i++) {
        const int channel = i % CHANNELS_OF_THREAD, k = first_k + channel;
        const int pixel = pixel0 + pixel_of(i / CHANNELS_OF_THREAD / 2, q, i / CHANNELS_OF_THREAD % 2);
        if (pixel >= p.pixels || k >= p.k) continue;
        const int row = p.ow.divide(pixel), column = pixel - row * static_cast<int>(p.ow.value);
        float sum = 0;
        for (int d = 0; d < TAPS; d++) {
            const int c = p.filter_area.divide(d), rs = d - c * static_cast<int>(p.filter_area.value);
            const int r = p.filter_width.divide(rs), s = rs - r * static_cast<int>(p.filter_width.value);
            const int at_y = row * p.stride_h - p.pad_h + r * p.dilation_h;
            const int at_x = column * p.stride_w - p.pad_w + s * p.dilation_w;
            if (static_cast<u32>(at_y) < static_cast<u32>(p.h) && static_cast<u32>(at_x) < static_cast<u32>(p.w))
                sum = fmaf(x[c * p.x_c + at_y * p.x_h + at_x * p.x_w], weight_at(p, g, channel, d), sum);
        }
        y[k * p.y_k + row * p.y_h + column * p.y_w] = epilogue(sum + bias_of(p, k));
    }
}
#endif

extern "C" __global__ __launch_bounds__(THREADS, 2) void KERNEL(const __grid_constant__ Params p) {
    const int warp = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, warps = gridDim.x * (THREADS / 32);
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    // A thread's rows of the product are neighbouring channels.
    const int k0 = blockIdx.y * (16 * ROW_TILES) + g * CHANNELS_OF_THREAD;

    u32 a[STEPS][ROW_TILES][PARTS][4];
    const uint4* from = p.filter + blockIdx.y * (STEPS * ROW_TILES * PARTS * 32) + lane;
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
    float bias[CHANNELS_OF_THREAD];
#pragma unroll
    for (int i = 0; i < CHANNELS_OF_THREAD; i++) bias[i] = bias_of(p, k0 + i);
    const Taps taps(p, q);

    for (int group = warp; group < p.groups; group += warps) {
        const int image = p.image_groups.divide(group);
        const int pixel0 = (group - image * static_cast<int>(p.image_groups.value)) * (8 * PIXEL_TILES);
        float sum[PIXEL_TILES][ROW_TILES][4] = {};
#pragma unroll
        for (int t = 0; t < PIXEL_TILES; t++) {
            const int pixel = pixel0 + pixel_of(t, g / 2, g % 2);
            Element v[LOADS];
            load(v, p, taps, q, image, min(pixel, p.pixels - 1));
            add_products(sum[t], a, v);
        }
        Element* const y = p.y + image * p.y_n;
#if STORE == CHANNELS
#pragma unroll
        for (int i = 0; i < 2 * PIXEL_TILES; i++) {
            const int pixel = pixel0 + pixel_of(i / 2, q, i % 2), row = p.ow.divide(pixel);
            if (pixel >= p.pixels) continue;
            Element* const to = y + row * p.y_h + (pixel - row * static_cast<int>(p.ow.value)) * p.y_w + k0;
#pragma unroll
            for (int c = 0; c < CHANNELS_OF_THREAD; c += VECTOR) {
                float v[VECTOR];
#pragma unroll
                for (int j = 0; j < VECTOR; j++)
                    v[j] = epilogue(sum[i / 2][(c + j) / 2][(c + j) % 2 * 2 + i % 2] + bias[c + j]);
                if (k0 + c < p.k) store(to + c, v);
            }
        }
#else
#pragma unroll
        for (int c = 0; c < CHANNELS_OF_THREAD; c++) {
            if (k0 + c >= p.k) continue;
            Element* const channel = y + (k0 + c) * p.y_k;
#pragma unroll
            for (int i = 0; i < 2 * PIXEL_TILES; i += VECTOR) {
                const int pixel = pixel0 + pixel_of(i / 2, q, i % 2);
                float v[VECTOR];
#pragma unroll
                for (int j = 0; j < VECTOR; j++)
                    v[j] = epilogue(sum[(i + j) / 2][c / 2][c % 2 * 2 + (i + j) % 2] + bias[c]);
                if (pixel >= p.pixels) continue;
                if (STORE == PIXELS) {
                    store(channel + pixel, v);
                } else {
                    const int row = p.ow.divide(pixel);
                    store(channel + row * p.y_h + (pixel - row * static_cast<int>(p.ow.value)) * p.y_w, v);
                }
            }
        }
#endif
#if SPLIT
        bool is_nan = false;
#pragma unroll
        for (int t = 0; t < PIXEL_TILES; t++) {
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
#pragma unroll
                for (int j = 0; j < 4; j++) is_nan |= sum[t][tile][j] != sum[t][tile][j];
            }
        }
        if (is_nan) store_plain_sums(p, p.x + image * p.x_n, y, pixel0, g, q);
#endif
    }
}
