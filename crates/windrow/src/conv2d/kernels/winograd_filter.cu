// U = G g G^t for every filter and channel, a block for each filter; zeros in the channels that pad U.
//
// Constants: ELEMENT_*, TILE, FILTER (the transform G), PARTS (f32) and EXPONENT.

#include "winograd.cuh"

constexpr float G[ALPHA][3] = FILTER;

struct Params {
    const Element* w;
    Stored* u;              // [p][k][part][c_padded]
    float* inverse;         // [k]: undoes the scale (in halves)
    i64 w_k, w_c, w_r, w_s; // strides in elements
    i64 plane;              // elements of one position
    int c, c_padded;
};

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    const i64 k = blockIdx.x;
    const auto load = [&](float (&g)[3][3], int c) {
        const Element* w = p.w + k * p.w_k + c * p.w_c;
#pragma unroll
        for (int r = 0; r < 3; r++)
#pragma unroll
            for (int s = 0; s < 3; s++) g[r][s] = to_float(w[r * p.w_r + s * p.w_s]);
    };
    float scale = 1;
#if IN_HALVES
    u32 largest = 0;
    for (int c = threadIdx.x; c < p.c; c += THREADS) {
        float g[3][3];
        load(g, c);
#pragma unroll
        for (int i = 0; i < 9; i++) largest = max(largest, finite_magnitude(g[i / 3][i % 3]));
    }
    largest = largest_of_block(largest);
    scale = power_of_two_scale(largest, EXPONENT);
    if (threadIdx.x == 0) p.inverse[k] = power_of_two_scale(largest, EXPONENT, true);
#endif
    for (int c = threadIdx.x; c < p.c_padded; c += THREADS) {
        float g[3][3] = {}, u[ALPHA][ALPHA];
        if (c < p.c) load(g, c);
#pragma unroll
        for (int i = 0; i < 9; i++) g[i / 3][i % 3] *= scale;
        transform(G, g, u);
        Stored* out = p.u + k * (PARTS * p.c_padded) + c;
#pragma unroll
        for (int i = 0; i < POSITIONS; i++)
            store_parts<true>(out + i * p.plane, p.c_padded, u[i / ALPHA][i % ALPHA]);
    }
}
