// Convolution whose output elements sum few products (c * r * s <= 48, as in the first layer of a network), on tensor
// cores or AMD's matrix cores. Such a layer is limited by the store of its output. One group, any stride, padding and
// dilation.
//
//     out[k, pixel] = sum over taps d of w[k, d] x[pixel + d]
//
// is a product of matrices. The left one, the filter, stays in the registers of a warp; few_taps_filter.cu packs it in
// their order. A warp, on AMD a wavefront, computes 16 * ROW_TILES output channels of 32 pixels that follow each other
// in an image, also across the ends of rows. It gathers its operands from the first-level cache. few_taps.cuh says
// which of them a lane has.
//
// Products of f16 and bf16 are exact, and their sums are f32. f32 operands are split in two TF32 parts and multiplied
// in three products, or rounded to one; AMD's matrix cores multiply them as they are.
//
// Constants: ELEMENT_*, EPILOGUE, RESIDUAL, TAPS (c * r * s), PRODUCTS 1 or 3 (f32), ROW_TILES 2 or 4, PADDED 0 or 1,
// STORE (see few_taps.cuh) and VECTOR, elements of one store.

#include "few_taps.cuh"

#if defined ELEMENT_F32 && PRODUCTS == 3
#define SPLIT 1
#else
#define SPLIT 0
#endif
constexpr int WARP_PIXELS = 32;
constexpr int THREADS = 128;

struct Params : ConvShape {
    const void* filter;   // as few_taps_filter.cu leaves it
    int pixels;           // oh * ow
    int groups;           // n * ceil(pixels / 32)
    Divisor image_groups; // ceil(pixels / 32)
    Divisor ow_by, filter_area, filter_width;
};
static_assert(PARAMS_AGREE, "as the host's structure");

// Where a lane's taps lie, relative to the first tap of an output.
struct Taps {
    int offset[LOADS]; // in elements
    int place[LOADS];  // row << 16 | column

    __device__ __forceinline__ Taps(const Params& p, const Lane& lane) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int d = min(lane.tap(i), TAPS - 1);
            const int c = p.filter_area.divide(d), rs = d - c * static_cast<int>(p.filter_area.value);
            const int r = p.filter_width.divide(rs), s = rs - r * static_cast<int>(p.filter_width.value);
            const int row = r * p.dilation_h, column = s * p.dilation_w;
            offset[i] = static_cast<int>(c * p.x_c + row * p.x_h + column * p.x_w);
            place[i] = row << 16 | column;
        }
    }
};

// The operand of one pixel: the lane's taps, zero where the input or the filter ends.
__device__ __forceinline__ void load(Element (&v)[LOADS], const Params& p, const Taps& taps, const Lane& lane,
                                     int image, int pixel) {
    const int row = p.ow_by.divide(pixel), column = pixel - row * static_cast<int>(p.ow_by.value);
    const int y = row * p.stride_h - p.pad_h, x = column * p.stride_w - p.pad_w;
    const Element* const first = p.x + image * p.x_n + y * p.x_h + x * p.x_w;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        bool exists = lane.has_tap(i);
        if (PADDED)
            exists = exists && static_cast<u32>(y + (taps.place[i] >> 16)) < static_cast<u32>(p.h) &&
                     static_cast<u32>(x + (taps.place[i] & 0xffff)) < static_cast<u32>(p.w);
        v[i] = exists ? __ldg(first + taps.offset[i]) : from_float(0);
    }
}

// Stores VECTOR neighbouring outputs, of sums that include the bias.
__device__ __forceinline__ void store(const Params& p, Element* to, float (&v)[VECTOR]) {
    Raw<T, VECTOR> raw;
    if (RESIDUAL) raw.template load<VECTOR>(beside(p.residual, p.y, to));
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = epilogue(RESIDUAL ? v[i] + raw.get(i) : v[i]);
    raw.pack(v);
    raw.template store<VECTOR>(to);
}

__device__ __forceinline__ float bias_of(const Params& p, int k) {
    if (p.bias == nullptr || k >= p.k) return 0;
    return p.bias_is_float ? static_cast<const float*>(p.bias)[k * p.bias_stride]
                           : to_float(static_cast<const Element*>(p.bias)[k * p.bias_stride]);
}

#if SPLIT
// A weight as it was before it was split, except for its last bits: see few_taps_filter.cu.
__device__ __forceinline__ float weight_at(const Params& p, int g, int channel, int d) {
    const int load = d / 4, step = load / STEP_LOADS, word = load % STEP_LOADS * 2 + channel % 2;
    const i64 first = ((blockIdx.y * STEPS + step) * ROW_TILES + channel / 2) * PARTS * 128;
    const float* const high = static_cast<const float*>(p.filter) + first + (4 * g + d % 4) * 4 + word;
    return isfinite(high[0]) ? high[0] + high[128] : high[0];
}

// Stores a lane's outputs as plain sums, if one of them would be NaN. An infinity split in two is an infinity and NaN.
__device__ __noinline__ void store_plain_sums(const Params& p, const Element* x, Element* y, int pixel0, int g, int q) {
    const int first_k = blockIdx.y * (16 * ROW_TILES) + g * CHANNELS_OF_THREAD;
    for (int i = 0; i < PIXELS_OF_THREAD * CHANNELS_OF_THREAD; i++) {
        const int channel = i % CHANNELS_OF_THREAD, k = first_k + channel;
        const int pixel = pixel0 + pixel_of(i / CHANNELS_OF_THREAD / 2, q, i / CHANNELS_OF_THREAD % 2);
        if (pixel >= p.pixels || k >= p.k) continue;
        const int row = p.ow_by.divide(pixel), column = pixel - row * static_cast<int>(p.ow_by.value);
        float sum = 0;
        for (int d = 0; d < TAPS; d++) {
            const int c = p.filter_area.divide(d), rs = d - c * static_cast<int>(p.filter_area.value);
            const int r = p.filter_width.divide(rs), s = rs - r * static_cast<int>(p.filter_width.value);
            const int at_y = row * p.stride_h - p.pad_h + r * p.dilation_h;
            const int at_x = column * p.stride_w - p.pad_w + s * p.dilation_w;
            if (static_cast<u32>(at_y) < static_cast<u32>(p.h) && static_cast<u32>(at_x) < static_cast<u32>(p.w))
                sum = fmaf(x[c * p.x_c + at_y * p.x_h + at_x * p.x_w], weight_at(p, g, channel, d), sum);
        }
        float* const to = y + k * p.y_k + row * p.y_h + column * p.y_w;
        sum += bias_of(p, k);
        *to = epilogue(RESIDUAL ? sum + *beside(p.residual, p.y, to) : sum);
    }
}
#endif

extern "C" __global__ __launch_bounds__(THREADS, 2) void KERNEL(const __grid_constant__ Params p) {
    const int warp = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, warps = gridDim.x * (THREADS / LANES);
    const Lane lane(threadIdx.x % LANES);
    const int k0 = blockIdx.y * (16 * ROW_TILES) + lane.first_channel();

    const Filter filter(p.filter, lane);
    float bias[CHANNELS_OF_THREAD];
#pragma unroll
    for (int i = 0; i < CHANNELS_OF_THREAD; i++) bias[i] = bias_of(p, k0 + i);
    const Taps taps(p, lane);

    for (int group = warp; group < p.groups; group += warps) {
        const int image = p.image_groups.divide(group);
        const int pixel0 = (group - image * static_cast<int>(p.image_groups.value)) * WARP_PIXELS;
        Sums sums;
#pragma unroll
        for (int t = 0; t < PIXEL_TILES; t++) {
            const int pixel = pixel0 + lane.gathered_pixel(t);
            Element v[LOADS];
            load(v, p, taps, lane, image, min(pixel, p.pixels - 1));
            sums.add(t, filter, v);
        }
        Element* const y = p.y + image * p.y_n;
#if STORE == CHANNELS
#pragma unroll
        for (int i = 0; i < PIXELS_OF_THREAD; i++) {
            const int pixel = pixel0 + lane.pixel(i), row = p.ow_by.divide(pixel);
            if (pixel >= p.pixels) continue;
            Element* const to = y + row * p.y_h + (pixel - row * static_cast<int>(p.ow_by.value)) * p.y_w + k0;
#pragma unroll
            for (int c = 0; c < CHANNELS_OF_THREAD; c += VECTOR) {
                float v[VECTOR];
#pragma unroll
                for (int j = 0; j < VECTOR; j++) v[j] = sums.at(i, c + j) + bias[c + j];
                if (k0 + c < p.k) store(p, to + c, v);
            }
        }
#else
#pragma unroll
        for (int c = 0; c < CHANNELS_OF_THREAD; c++) {
            if (k0 + c >= p.k) continue;
            Element* const channel = y + (k0 + c) * p.y_k;
#pragma unroll
            for (int i = 0; i < PIXELS_OF_THREAD; i += VECTOR) {
                const int pixel = pixel0 + lane.pixel(i);
                float v[VECTOR];
#pragma unroll
                for (int j = 0; j < VECTOR; j++) v[j] = sums.at(i + j, c) + bias[c];
                if (pixel >= p.pixels) continue;
                if (STORE == PIXELS) {
                    store(p, channel + pixel, v);
                } else {
                    const int row = p.ow_by.divide(pixel);
                    store(p, channel + row * p.y_h + (pixel - row * static_cast<int>(p.ow_by.value)) * p.y_w, v);
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
                for (int j = 0; j < 4; j++) is_nan |= sums.sum[t][tile][j] != sums.sum[t][tile][j];
            }
        }
        if (is_nan) store_plain_sums(p, p.x + image * p.x_n, y, pixel0, lane.g, lane.q);
#endif
    }
}
