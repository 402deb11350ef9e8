// The word that the vector kernels need of each position of packed sequences.
#include "causal_conv1d.cuh"

extern "C" __global__ void __launch_bounds__(128, 1) KERNEL(const Params p) {
    wait_for_previous();
    report_boundaries(p);
    i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= p.length) return;
    for (i64 row = blockIdx.y; row < p.batch; row += gridDim.y) {
        p.mask[row * p.length + t] = mask_word(p, row, t);
    }
}
