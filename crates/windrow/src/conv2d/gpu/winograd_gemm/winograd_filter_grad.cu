// dw = G^t dU G for every filter and channel, a thread each; dU is the sum of its parts, in their order.
//
// Constants: ELEMENT_* of dw, TILE, FILTER (the transform G^t).

#include "winograd.cuh"

constexpr float GT[3][ALPHA] = FILTER;

struct Params {
    const float* du;        // [part][p][k][c_padded]
    Element* dw;
    i64 w_k, w_c, w_r, w_s; // strides in elements
    i64 plane;
    i64 elements;           // k * c
    int c, c_padded, parts;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    const i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= p.elements) return;
    const i64 k = index / p.c, c = index % p.c;
    const float* in = p.du + k * p.c_padded + c;
    float u[ALPHA][ALPHA], g[3][3];
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) u[i / ALPHA][i % ALPHA] = in[i * p.plane];
    for (int part = 1; part < p.parts; part++) {
        in += POSITIONS * p.plane;
#pragma unroll
        for (int i = 0; i < POSITIONS; i++) u[i / ALPHA][i % ALPHA] += in[i * p.plane];
    }
    transform(GT, u, g);
    Element* w = p.dw + k * p.w_k + c * p.w_c;
#pragma unroll
    for (int r = 0; r < 3; r++)
#pragma unroll
        for (int s = 0; s < 3; s++) w[r * p.w_r + s * p.w_s] = from_float(g[r][s]);
}
