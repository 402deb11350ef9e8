// U = G g G^t for every filter and channel, a block for each filter; zeros in the channels that pad U. Output channels
// that have not changed since the filter was last packed are skipped.
//
// Constants: ELEMENT_*, TILE, FILTER (the transform G), PARTS (f32) and EXPONENT.

#include "winograd.cuh"

constexpr float G[ALPHA][3] = FILTER;

struct Params {
    const Element* w;
    Stored* u;              // [p][k][part][c_padded]
    float* inverse;         // [k]: undoes the scale (of f16 parts)
    i64 w_k, w_c, w_r, w_s; // strides in elements
    i64 plane;              // elements of one position
    Seen seen;
    int c, c_padded;
    float shrinkage;        // of sums of split numbers
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    wait_for_previous();
    const i64 k = blockIdx.x;
    const auto load = [&](Element (&g)[9], int c) {
        const Element* w = p.w + k * p.w_k + c * p.w_c;
#pragma unroll
        for (int i = 0; i < 9; i++) g[i] = w[i / 3 * p.w_r + i % 3 * p.w_s];
    };
    const bool kept = p.seen.digests != nullptr;
    u32 largest = 0;
    Digest digest;
    if (IN_HALVES || kept) {
        for (int c = threadIdx.x; c < p.c; c += THREADS) {
            Element g[9];
            load(g, c);
            if (kept) digest.add(p.seen, c, g);
#pragma unroll
            for (int i = 0; i < 9; i++) largest = max(largest, finite_magnitude(to_float(g[i])));
        }
    }
    if (digest.is_known(p.seen, k)) return;
    float scale = 1;
#if IN_HALVES
    largest = largest_of_block(largest);
    scale = power_of_two_scale(largest, EXPONENT);
    if (threadIdx.x == 0) p.inverse[k] = power_of_two_scale(largest, EXPONENT, true);
#endif
    for (int c = threadIdx.x; c < p.c_padded; c += THREADS) {
        Element taps[9] = {};
        float g[3][3], u[ALPHA][ALPHA];
        if (c < p.c) load(taps, c);
#pragma unroll
        for (int i = 0; i < 9; i++) g[i / 3][i % 3] = to_float(taps[i]) * scale;
        transform(G, g, u);
        Stored* out = p.u + k * (PARTS * p.c_padded) + c;
#pragma unroll
        for (int i = 0; i < POSITIONS; i++)
            store_parts<true>(out + i * p.plane, p.c_padded, u[i / ALPHA][i % ALPHA], p.shrinkage);
    }
    digest.keep(p.seen, k);
}
