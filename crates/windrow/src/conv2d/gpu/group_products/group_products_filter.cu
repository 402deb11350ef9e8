// Packs a filter for group_products.cu: [group, tap, step, tile, lane, 2 words], the operand B of m16n8k8 (TF32, rounded) or
// m16n8k16 (f16/bf16, two channels in a word).
//
// Constants: those of group_products.cuh.

#include "group_products.cuh"

struct Params {
    const Element* w;
    u32* out;
    i64 w_k, w_c, w_r, w_s; // strides in elements
    int words;
};
static_assert(PARAMS_AGREE, "as the host's structure");

// One thread for each word.
extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.words) return;
    const int word = index % 2, lane = index / 2 % 32, tile = index / 64 % K_TILES;
    const int step = index / 64 / K_TILES % STEPS, tap = index / 64 / K_TILES / STEPS % TAPS;
    const int group = index / 64 / K_TILES / STEPS / TAPS;
    const int r = tap / FILTER_W, s = tap % FILTER_W, k = group * GROUP_K + channel_of(tile, lane / 4);
    const auto weight = [&](int c) -> Element {
        return c < GROUP_C ? p.w[k * p.w_k + c * p.w_c + r * p.w_r + s * p.w_s] : from_float(0);
    };
#ifdef ELEMENT_F32
    p.out[index] = float_to_tf32(weight(step * DEPTH + word * 4 + lane % 4));
#else
    const int c = step * DEPTH + word * 8 + lane % 4 * 2;
    p.out[index] = static_cast<u32>(weight(c)) | static_cast<u32>(weight(c + 1)) << 16;
#endif
}
