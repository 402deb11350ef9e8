// Transforms a filter into the order in which winograd_row.cu multiplies it: [k block, step of 16 channels, row,
// position, part, 64 output x 16 input channels], the last two as 8 x 8 blocks of 128 bytes, zeros where k or c end.
//
// f32: each output channel is scaled by a power of two, so that f16 holds it, and split in a high and (PRODUCTS 3) a
// low f16 part.
//
// Output channels that have not changed since the filter was last packed are skipped.
//
// With FRAMES the steps of a frame of the filter follow those of the frame before; zeros fill up a frame's last step.
//
// Constants: ELEMENT_*, PRODUCTS, FRAMES, FILTER (the transform), FILTER_EXPONENT for f32.

#include "conv2d.cuh"

constexpr int ALPHA = 5, BLOCK_K = 64, STEP_C = 16, TAPS_H = 3;
constexpr int PARTS = PRODUCTS == 1 ? 1 : 2;
constexpr float G[ALPHA][3] = FILTER;

struct Params {
    const Element* w;
    u16* u;
    float* inverse; // [k] (f32)
    i64 w_k, w_c, w_r, w_s; // strides in elements; negative-stepped for a rotated filter
    Seen seen;
    int k, c, steps;
    float shrinkage; // of sums of split numbers
    i64 w_t;         // with FRAMES: stride of a frame
    int frames, frame_steps;
};
static_assert(PARAMS_AGREE, "as the host's structure");

// One block per output channel, padded to 64.
extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
    wait_for_previous();
    const int k = blockIdx.x, block = k / BLOCK_K, column = k % BLOCK_K;
    // The place of this channel in the product: see `channel_of` in winograd_row.cu.
    const int n = 32 * (column / 32) + 8 * (column % 8 / 2) + 2 * (column % 32 / 8) + column % 2;
    const auto tap = [&](int frame, int c, int r, int s) -> float {
        if (k >= p.k || c >= p.c) return 0;
        const Element* const w = FRAMES ? p.w + frame * p.w_t : p.w;
        return to_float(w[k * p.w_k + c * p.w_c + r * p.w_r + s * p.w_s]);
    };

    const bool kept = p.seen.digests != nullptr;
    u32 mine = 0;
    Digest digest;
    if (k < p.k && (IS_F32 || kept)) {
        const int channels = FRAMES ? p.frames * p.c : p.c; // of all frames
        for (int c = threadIdx.x; c < channels; c += blockDim.x) {
            const int frame = FRAMES ? c / p.c : 0;
            const Element* w = p.w + k * p.w_k + (FRAMES ? (c - frame * p.c) * p.w_c + frame * p.w_t : c * p.w_c);
            Element g[9];
#pragma unroll
            for (int i = 0; i < 9; i++) g[i] = w[i / 3 * p.w_r + i % 3 * p.w_s];
            if (kept) digest.add(p.seen, c, g);
#pragma unroll
            for (int i = 0; i < 9; i++) mine = max(mine, finite_magnitude(to_float(g[i])));
        }
    }
    if (digest.is_known(p.seen, k)) return;
    float scale = 1;
#ifdef ELEMENT_F32
    const u32 max_bits = largest_of_block(mine);
    scale = power_of_two_scale(max_bits, FILTER_EXPONENT);
    // Without 2^FILTER_EXPONENT, which the output transform undoes.
    if (threadIdx.x == 0 && k < p.k)
        p.inverse[k] = power_of_two_scale(max_bits, FILTER_EXPONENT, true) * power_of_two(FILTER_EXPONENT);
#endif

    for (int i = threadIdx.x; i < p.steps * TAPS_H * STEP_C; i += blockDim.x) {
        const int kk = i % STEP_C, row = i / STEP_C % TAPS_H, step = i / STEP_C / TAPS_H;
        const int frame = FRAMES ? step / p.frame_steps : 0, step_of_frame = step - (FRAMES ? frame * p.frame_steps : 0);
#ifdef ELEMENT_F32
        const int channel = step_of_frame * STEP_C + kk;
#else
        // A thread of the product reads four neighbouring channels at once; the tensor core takes the first two of
        // them as columns 2q and 2q + 1, the others as 2q + 8 and 2q + 9.
        const int channel = step_of_frame * STEP_C + (kk % 8) / 2 * 4 + kk / 8 * 2 + kk % 2;
#endif
        const float g[3] = {tap(frame, channel, row, 0), tap(frame, channel, row, 1), tap(frame, channel, row, 2)};
        const i64 at = (static_cast<i64>(block * p.steps + step) * TAPS_H + row) * ALPHA * PARTS * STEP_C * BLOCK_K +
                       kk / 8 * (8 * BLOCK_K) + n / 8 * 64 + n % 8 * 8 + kk % 8;
#pragma unroll
        for (int a = 0; a < ALPHA; a++) {
            const float u = (G[a][0] * g[0] + G[a][1] * g[1] + G[a][2] * g[2]) * scale;
            u16* to = p.u + at + a * PARTS * STEP_C * BLOCK_K;
#ifdef ELEMENT_F32
            const Halves halves(u, p.shrinkage);
            to[0] = halves.high;
            if (PRODUCTS == 3) to[STEP_C * BLOCK_K] = halves.low;
#else
            to[0] = from_float(u);
#endif
        }
    }
    digest.keep(p.seen, k);
}
