// Packs a filter in the order in which implicit_gemm.cu and implicit_gemm_single.cu multiply it. A unit is one group, or
// several groups that a block computes together. Terms are (r, s, c) with all input channels of the unit. They are zero
// for input channels of other groups, and where k or the terms end.
//
// f32 in three products: [k block, step of 64 terms, 16 terms, part, 16 terms x BLOCK_K channels], the last two as 8 x 8
// blocks of 128 bytes. Each output channel is scaled by a power of two, so that f16 holds it, and split in a high and a low f16 part.
// The low part also carries the factor by which tensor cores shrink sums.
//
// f16/bf16, as they are: [k block, step of 64 terms, BLOCK_K channels, 64 terms], terms 8 i to 8 i + 7 of row n
// at i ^ n % 8. With STRIP: [k block, row of the filter, 32 channels, one of 3 columns, BLOCK_K channels, 32 terms], terms
// 8 i to 8 i + 7 of row n at i ^ n / 2 % 4. f32 in one product, rounded to the nearest TF32: the same with half the terms,
// in fours.
//
// Output channels that have not changed since the filter was last packed are skipped.
//
// With FRAMES, r counts the rows of all frames of the filter.
//
// Constants: ELEMENT_*, BLOCK_K, FRAMES, TF32, STRIP; for f32 in three products FILTER_EXPONENT, SHRINKAGE.

#include "conv2d.cuh"

#ifndef STRIP
#define STRIP 0
#endif
constexpr int STEP_DEPTH = 64; // terms of a step, in three products
constexpr bool IS_SPLIT = IS_F32 && !TF32;

struct Params {
    const Element* w;
    u16* packed;
    float* inverse;         // [k], f32 in three products
    i64 w_k, w_c, w_r, w_s; // strides in elements, k and c within a group
    i64 w_group;
    Seen seen;
    int unit_k, terms, steps; // output channels of a unit
    Divisor unit_blocks;
    Divisor group_k;          // output channels of a group
    Divisor c, s;             // input channels of a unit, columns of the filter
    int group_c;
    int dense; // weights of an output channel, if they lie in one piece, else 0
    i64 w_t;         // with FRAMES: stride of a frame
    Divisor frame_r; // and its rows
};
static_assert(PARAMS_AGREE, "as the host's structure");

// One block per output channel, padded to BLOCK_K.
extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
    const int block = blockIdx.x / BLOCK_K, column = blockIdx.x % BLOCK_K, unit = p.unit_blocks.divide(block);
    const int in_unit = (block - unit * static_cast<int>(p.unit_blocks.value)) * BLOCK_K + column;
    const bool exists = in_unit < p.unit_k;
    const int k = unit * p.unit_k + in_unit, group = p.group_k.divide(k), in_group = p.group_k.divide(in_unit);
    const Element* const w = p.w + (group * p.w_group + (k - group * static_cast<int>(p.group_k.value)) * p.w_k);
    // The place of this channel in the product: see `channel_of` in implicit_gemm.cuh.
    constexpr int PAIRS = TF32 ? 2 : 4, WIDTH = 8 * PAIRS;
    const int n = column / WIDTH * WIDTH + 8 * (column % (2 * PAIRS) / 2) + 2 * (column % WIDTH / (2 * PAIRS)) + column % 2;
    const auto weight = [&](int term) -> Element {
        if (!exists || term >= p.terms) return 0;
        const int tap = p.c.divide(term), c = term - tap * static_cast<int>(p.c.value) - in_group * p.group_c;
        if (static_cast<u32>(c) >= static_cast<u32>(p.group_c)) return 0;
        const int r = p.s.divide(tap), s = tap - r * static_cast<int>(p.s.value);
        const int frame = FRAMES ? p.frame_r.divide(r) : 0;
        const Element* const at = FRAMES ? w + frame * (p.w_t - static_cast<int>(p.frame_r.value) * p.w_r) : w;
        return at[c * p.w_c + r * p.w_r + s * p.w_s];
    };

    [[maybe_unused]] u32 mine = 0;
    Digest digest;
    // In the order of memory, if the weights of an output channel are all that lies there: zeros between them change nothing.
    const int looked_at = IS_SPLIT || p.seen.digests != nullptr ? (p.dense > 0 ? (exists ? p.dense : 0) : p.terms) : 0;
#pragma unroll 2
    for (int at = 4 * threadIdx.x; at < looked_at; at += 4 * blockDim.x) {
        Element v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = p.dense == 0 ? weight(at + i) : at + i < p.dense ? w[at + i] : from_float(0);
        if (p.seen.digests != nullptr) digest.add(p.seen, at, v);
#if defined(ELEMENT_F32) && !TF32
#pragma unroll
        for (int i = 0; i < 4; i++) mine = max(mine, finite_magnitude(v[i]));
#endif
    }
    if (digest.is_known(p.seen, blockIdx.x)) return;
#if defined(ELEMENT_F32) && !TF32
    const u32 max_bits = largest_of_block(mine);
    const float scale = power_of_two_scale(max_bits, FILTER_EXPONENT);
    // Without 2^FILTER_EXPONENT, which the epilogue undoes.
    if (threadIdx.x == 0 && exists)
        p.inverse[k] = power_of_two_scale(max_bits, FILTER_EXPONENT, true) * power_of_two(FILTER_EXPONENT);

    for (int i = threadIdx.x; i < p.steps * (STEP_DEPTH / 8); i += blockDim.x) {
        const int product = i / 2, half = i % 2; // eight of 16 terms
        u32 high[4], low[4];
#pragma unroll
        for (int q = 0; q < 4; q++) {
            // A thread of the product reads four neighbouring terms at once; the tensor core takes the first two of them as
            // columns 2q and 2q + 1, the others as 2q + 8 and 2q + 9.
            const int term = 16 * product + 4 * q + 2 * half;
            const float a = weight(term) * scale, b = weight(term + 1) * scale;
            high[q] = floats_to_f16x2(a, b);
            const float2 rounded = unpack_f16x2(high[q]);
            low[q] = floats_to_f16x2(fmaf(a, SHRINKAGE, a - rounded.x), fmaf(b, SHRINKAGE, b - rounded.y));
        }
        const i64 at = static_cast<i64>(block) * p.steps * (STEP_DEPTH / 16) + product;
        u16* const to = p.packed + at * (2 * 16 * BLOCK_K) + half * (8 * BLOCK_K) + n / 8 * 64 + n % 8 * 8;
        *reinterpret_cast<uint4*>(to) = make_uint4(high[0], high[1], high[2], high[3]);
        *reinterpret_cast<uint4*>(to + 16 * BLOCK_K) = make_uint4(low[0], low[1], low[2], low[3]);
    }
#else
    constexpr int TAPS = STRIP ? 3 : 1, VECTORS = STRIP ? 4 : 8, VECTOR = 16 / sizeof(Element); // of a row of the product
    const int channels = p.c.value, of_row = STRIP ? channels / (VECTORS * VECTOR) : p.steps; // steps
    for (int i = threadIdx.x; i < p.steps * TAPS * VECTORS; i += blockDim.x) {
        const int vector = i % VECTORS, tap = i / VECTORS % TAPS, step = i / (VECTORS * TAPS), r = step / of_row;
        const int term = (r * TAPS + tap) * channels + ((step - r * of_row) * VECTORS + vector) * VECTOR;
        u32 v[4];
#pragma unroll
        for (int q = 0; q < 4; q++)
#if TF32
            v[q] = float_to_tf32(weight(term + q));
#else
            v[q] = weight(term + 2 * q) | static_cast<u32>(weight(term + 2 * q + 1)) << 16;
#endif
        const i64 row = ((static_cast<i64>(block) * p.steps + step) * TAPS + tap) * BLOCK_K + n;
        const int place = vector ^ (STRIP ? n / 2 % 4 : n % 8);
        *reinterpret_cast<uint4*>(p.packed + (row * VECTORS + place) * 8) = make_uint4(v[0], v[1], v[2], v[3]);
    }
#endif
    digest.keep(p.seen, blockIdx.x);
}
