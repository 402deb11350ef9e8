// Copies a filter [k, c, r, s] of any strides to [k, r, s, c]; with dimensions renamed, to [k, c, r, s].
//
// Constants: ELEMENT_*.

#include "conv2d.cuh"

struct Params {
    const Element* w;
    Element* out;
    i64 w_k, w_c, w_r, w_s; // strides in elements
    i64 elements;
    int c, r, s;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.elements) return;
    const i64 c = i % p.c, s = i / p.c % p.s, r = i / p.c / p.s % p.r, k = i / p.c / p.s / p.r;
    p.out[i] = p.w[k * p.w_k + c * p.w_c + r * p.w_r + s * p.w_s];
}
