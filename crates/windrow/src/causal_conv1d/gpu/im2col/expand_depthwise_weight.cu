// B: the weight as a matrix, one thread per element.
//
// Floor: B once out.
//
// DENSE   [outputs, channels, width]; else [channels, width] on the diagonals
#include "im2col.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) KERNEL(const GemmParams g) {
    wait_for_previous();
    const Params &p = g.base;
    i64 terms = width_of(p) * p.channels, column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= terms) return;
    i64 k = column / p.channels, c = column - k * p.channels;
    for (i64 o = blockIdx.y; o < g.outputs; o += gridDim.y) {
        bool there = DENSE || o == c;
        const W::Storage *w = p.weight + o * g.weight_stride[0] + c * g.weight_stride[1] + k * g.weight_stride[2];
        g.b[o * terms + column] = G::from_float(there ? W::to_float(*w) : 0.0f);
    }
}
