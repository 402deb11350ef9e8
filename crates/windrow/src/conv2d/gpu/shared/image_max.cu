// The largest finite magnitude of each image of an f32 tensor.
//
// Constants: ELEMENT_F32, VECTOR: 4 if the innermost elements are aligned 16-byte vectors, otherwise 1.

#include "conv2d.cuh"

constexpr int THREADS = 256, LOADS = 8; // vectors of a thread

struct Params {
    const float* x;
    u32* x_max;                    // [n], zeroed before where an image has several blocks
    i64 x_n, outer, middle, inner; // strides of an image's three dimensions in elements, of the innermost in vectors
    int vectors;                   // of an image
    int blocks;                    // for an image
    Divisor in_outer, in_middle;   // vectors of a step of the outer and of the middle dimension
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    const int image = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks;
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int index = (block * LOADS + i) * THREADS + threadIdx.x;
        if (index >= p.vectors) break;
        const int outer = p.in_outer.divide(index), rest = index - outer * static_cast<int>(p.in_outer.value);
        const int middle = p.in_middle.divide(rest), inner = rest - middle * static_cast<int>(p.in_middle.value);
        const float* x = p.x + image * p.x_n + outer * p.outer + middle * p.middle + inner * p.inner;
        if (VECTOR == 4) {
            const float4 v = *reinterpret_cast<const float4*>(x);
            largest = max(max(largest, finite_magnitude(v.x)), finite_magnitude(v.y));
            largest = max(max(largest, finite_magnitude(v.z)), finite_magnitude(v.w));
        } else {
            largest = max(largest, finite_magnitude(*x));
        }
    }
    if (p.blocks > 1) {
        store_largest(p.x_max + image, largest);
    } else {
        largest = largest_of_block(largest);
        if (threadIdx.x == 0) p.x_max[image] = largest;
    }
}
