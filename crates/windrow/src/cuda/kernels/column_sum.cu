// out[i] = sum over rows of partial[row, i], in order, for gradients summed in several blocks.
#include "windrow.cuh"

struct Params {
    const float *partial;
    i64 rows, columns, row_stride;
    OUT::Storage *out;
    // Element i lies at (i / group) * stride[0] + (i % group) * stride[1].
    i64 group, stride[2];
};
static_assert(sizeof(Params) == PARAMS_SIZE, "as the host's structure");

extern "C" __global__ void __launch_bounds__(128) KERNEL(const Params p) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.columns) return;
    float sum = 0.0f, carry = 0.0f;
    for (i64 row = 0; row < p.rows; row++) {
        float term = __fsub_rn(p.partial[row * p.row_stride + i], carry);
        float next = __fadd_rn(sum, term);
        carry = __fsub_rn(__fsub_rn(next, sum), term);
        sum = next;
    }
    p.out[i / p.group * p.stride[0] + i % p.group * p.stride[1]] = OUT::from_float(sum);
}
