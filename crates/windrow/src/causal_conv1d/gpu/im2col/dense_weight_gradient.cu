// dweight [outputs, channels, width] from a matrix [outputs, width * channels], one thread per element.
//
// Floor: both once through memory.
#include "windrow.cuh"

struct Params {
    // None: the gradient is 0.
    const float *matrix;
    OUT::Storage *out;
    i64 outputs, channels, width, stride[3];
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ void __launch_bounds__(128, 1) KERNEL(const Params p) {
    wait_for_previous();
    i64 terms = p.width * p.channels, column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= terms) return;
    i64 k = column / p.channels, c = column - k * p.channels;
    for (i64 o = blockIdx.y; o < p.outputs; o += gridDim.y) {
        float v = p.matrix ? p.matrix[o * terms + column] : 0.0f;
        p.out[o * p.stride[0] + c * p.stride[1] + k * p.stride[2]] = OUT::from_float(v);
    }
}
