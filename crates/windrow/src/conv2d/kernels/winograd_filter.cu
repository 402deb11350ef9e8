// U = G g G^t for every filter and channel, a thread each; zeros in the channels that pad U.
//
// Constants: ELEMENT_*, TILE, FILTER (the transform G).

#include "winograd.cuh"

constexpr float G[ALPHA][3] = FILTER;

struct Params {
    const Element* w;
    Element* u;             // [p][k][c_padded]
    i64 w_k, w_c, w_r, w_s; // strides in elements
    i64 elements;           // of one position
    int c, c_padded;
};

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    const i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= p.elements) return;
    const i64 k = index / p.c_padded, c = index % p.c_padded;
    float g[3][3] = {}, u[ALPHA][ALPHA];
    if (c < p.c) {
        const Element* w = p.w + k * p.w_k + c * p.w_c;
#pragma unroll
        for (int r = 0; r < 3; r++)
#pragma unroll
            for (int s = 0; s < 3; s++) g[r][s] = to_float(w[r * p.w_r + s * p.w_s]);
    }
    transform(G, g, u);
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) p.u[i * p.elements + index] = from_float(u[i / ALPHA][i % ALPHA]);
}
