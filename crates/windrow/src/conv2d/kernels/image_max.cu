// The largest finite magnitude of each image of a channels-last f32 tensor whose pixels are whole 16-byte vectors.
//
// Constants: ELEMENT_F32.

#include "conv2d.cuh"

constexpr int THREADS = 256, LOADS = 8; // vectors of a thread

struct Params {
    const float* x;
    u32* x_max;        // [n], zeroed before
    i64 x_n, x_h, x_w; // strides in elements
    int vectors;       // of an image
    int blocks;        // for an image
    Divisor row;       // vectors of a row
    Divisor pixel;     // vectors of a pixel
};

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    const int image = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks;
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const int index = (block * LOADS + i) * THREADS + threadIdx.x;
        if (index >= p.vectors) break;
        const int y = p.row.divide(index), in_row = index - y * static_cast<int>(p.row.value);
        const int x = p.pixel.divide(in_row), c = (in_row - x * static_cast<int>(p.pixel.value)) * 4;
        const float4 v = *reinterpret_cast<const float4*>(p.x + image * p.x_n + y * p.x_h + x * p.x_w + c);
        largest = max(max(largest, finite_magnitude(v.x)), finite_magnitude(v.y));
        largest = max(max(largest, finite_magnitude(v.z)), finite_magnitude(v.w));
    }
    store_largest(p.x_max + image, largest);
}
