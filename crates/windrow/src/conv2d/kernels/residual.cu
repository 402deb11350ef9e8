// y = act(y + residual) in place, for two tensors of the same strides: what a convolution leaves to do.
//
// Constants: ELEMENT_*, EPILOGUE.

#include "conv2d.cuh"

struct Params {
    Element* y;
    const Element* residual;
    i64 elements;
    i64 sizes[4];    // by falling stride; where nothing lies between elements, that of all at the end
    i64 strides[4];
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ __launch_bounds__(256) void KERNEL(const __grid_constant__ Params p) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.elements) return;
    i64 at = 0, rest = i;
#pragma unroll
    for (int d = 3; d > 0; --d) {
        if (p.sizes[d] == 1) continue;
        at += rest % p.sizes[d] * p.strides[d];
        rest /= p.sizes[d];
        if (rest == 0) break;
    }
    at += rest * p.strides[0];
    p.y[at] = from_float(epilogue(to_float(p.y[at]) + to_float(p.residual[at])));
}
