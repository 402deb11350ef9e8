// Brings a filter into the order in which few_taps.cu holds it in registers: [k block of 16 * ROW_TILES, step, row
// tile, part, lane, 4 words], the operand A of m16n8k16 (f16/bf16, two taps in a word) or m16n8k8 (TF32, high and low
// part). For AMD's matrix cores, whose lanes find their elements themselves, it is [k, tap]. Both are padded with zeros
// to whole blocks.
//
// Constants: ELEMENT_*, TAPS, PRODUCTS, ROW_TILES.

#include "conv2d.cuh"

constexpr int HALF_STEPS = IS_F32 ? 1 : 2; // taps in a word

struct Params {
    const Element* w;
    u32* out;
    i64 w_k, w_c, w_r, w_s; // strides in elements
    int k, words;
    Divisor filter_area, filter_width;
};
static_assert(PARAMS_AGREE, "as the host's structure");

// One thread for each word.
extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.words) return;
#if WINDROW_PTX
    constexpr int STEP_LOADS = 2 * HALF_STEPS, STEPS = (TAPS + 4 * STEP_LOADS - 1) / (4 * STEP_LOADS); // see few_taps.cuh
    constexpr int PARTS = PRODUCTS == 1 ? 1 : 2;
    const int word = index % 4, lane = index / 4 % 32, part = index / 128 % PARTS, tile = index / 128 / PARTS % ROW_TILES;
    const int step = index / 128 / PARTS / ROW_TILES % STEPS, block = index / 128 / PARTS / ROW_TILES / STEPS;
    const int k = block * 16 * ROW_TILES + lane / 4 * 2 * ROW_TILES + 2 * tile + word % 2;
    const int first = STEP_LOADS * step + HALF_STEPS * (word / 2);
    const auto tap_of = [&](int load) { return 4 * load + lane % 4; };
#else
    constexpr int DEPTH = (TAPS + 15) / 16 * 16;
    const int k = index * HALF_STEPS / DEPTH, first = index * HALF_STEPS % DEPTH;
    const auto tap_of = [](int load) { return load; };
#endif
    const auto tap = [&](int load) -> Element {
        const int d = tap_of(load);
        if (k >= p.k || d >= TAPS) return from_float(0);
        const int c = p.filter_area.divide(d), rs = d - c * static_cast<int>(p.filter_area.value);
        const int r = p.filter_width.divide(rs), s = rs - r * static_cast<int>(p.filter_width.value);
        return p.w[k * p.w_k + c * p.w_c + r * p.w_r + s * p.w_s];
    };
#ifndef ELEMENT_F32
    p.out[index] = static_cast<u32>(tap(first)) | static_cast<u32>(tap(first + 1)) << 16;
#elif WINDROW_PTX
    const u32 high = float_to_tf32(tap(first));
    p.out[index] = part == 0 ? high : __float_as_uint(tap(first) - __uint_as_float(high));
#else
    p.out[index] = __float_as_uint(tap(first));
#endif
}
