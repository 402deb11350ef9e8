// Adds the parts of a weight or bias gradient in a fixed order, with compensation, and stores it with any strides.
//
// Constants: ELEMENT_*.

#include "conv2d.cuh"

struct Params {
    const float* parts; // [parts][k, r, s, c]
    Element* out;
    i64 k_stride, c_stride, r_stride, s_stride;
    i64 elements;       // of one part
    int parts_count;
    int c, r, s;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.elements) return;
    float sum = 0, lost = 0;
    for (int part = 0; part < p.parts_count; part++) {
        const float term = p.parts[part * p.elements + i], next = sum + term, kept = next - sum;
        lost += (sum - (next - kept)) + (term - kept);
        sum = next;
    }
    // Infinite sums have no error worth adding.
    if (isfinite(lost)) sum += lost;
    const i64 c = i % p.c, s = i / p.c % p.s, r = i / p.c / p.s % p.r, k = i / p.c / p.s / p.r;
    p.out[k * p.k_stride + c * p.c_stride + r * p.r_stride + s * p.s_stride] = from_float(sum);
}
