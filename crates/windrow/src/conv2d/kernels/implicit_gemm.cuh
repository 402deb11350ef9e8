// What the parts of implicit_gemm.cu share: sizes, parameters, and which outputs a block computes.

#pragma once

#include "conv2d.cuh"
#include "hopper.cuh"

constexpr int BLOCK_M = 128;  // output pixels of a block
constexpr int STEP_DEPTH = 64; // terms of a step
constexpr int STEP_PRODUCTS = STEP_DEPTH / 16;
constexpr int X_BYTES = BLOCK_M * STEP_DEPTH * 4;
constexpr int PART_BYTES = 16 * BLOCK_K * 2; // one half of 16 terms of the filter
constexpr int W_BYTES = STEP_PRODUCTS * 2 * PART_BYTES;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int CONSUMER_WARPS = 8;
constexpr int PRODUCERS = 128;
// Together 504 for each lane of a warp of the three groups. The producer's addresses of elements want many.
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;

// How x is gathered.
#define ANY 0      // element by element
#define CHANNELS 1 // vectors of four neighbouring channels
#define PIXELS 2   // vectors of four neighbouring pixels: a filter of one tap, stride 1, no padding

struct Params {
    const float* x;
    const unsigned char* w;     // [k block, step, product, part, PART_BYTES]
    const float* w_inverse;     // [k]: undoes the scale of the filter but for 2^FILTER_EXPONENT
    const void* bias;           // [k] or null
    float* y;
    i64 x_n, x_c, x_h, x_w;     // strides in elements; offsets within x fit 31 bits
    i64 y_n, y_k, y_h, y_w;
    i64 bias_stride;
    int bias_is_float;
    int pixels;                 // n * oh * ow
    int h, w_in, r;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int group_c;                // input channels of a group
    int unit_k;                 // output channels of a unit: groups that a block computes together, or one group
    int steps;                  // ceil(c * r * s / 64)
    int tiles;                  // of BLOCK_M pixels and BLOCK_K channels
    Divisor image_pixels;       // oh * ow
    Divisor ow;
    Divisor k_blocks, unit_blocks; // of y, of a unit
    Divisor group_k;            // output channels of a group
    Divisor c, s;               // input channels of a unit, columns of the filter
};
static_assert(PARAMS_AGREE, "as the host's structure");

// A term of the sums: an input channel and a tap, channels first.
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
        if (++s == static_cast<int>(p.s.value)) {
            s = 0;
            r++;
        }
    }
};

// An output pixel.
struct Pixel {
    int image, row, column;
    __device__ __forceinline__ Pixel(const Params& p, int pixel) {
        image = p.image_pixels.divide(pixel);
        const int rest = pixel - image * static_cast<int>(p.image_pixels.value);
        row = p.ow.divide(rest);
        column = rest - row * static_cast<int>(p.ow.value);
    }
};

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
