// out[i] = sum over rows of partial[row, i], in one fixed order, for gradients summed in several blocks.
#include "windrow.cuh"

struct Params {
    const float *partial;
    i64 rows, columns, row_stride;
    OUT::Storage *out;
    // Element i lies at (i / group) * stride[0] + (i % group) * stride[1].
    i64 group, stride[2];
};
static_assert(PARAMS_AGREE, "as the host's structure");

// A sum and what its last addition rounded away.
struct Sum {
    float sum = 0.0f, carry = 0.0f;

    __device__ __forceinline__ void add(float value) {
        float term = __fsub_rn(value, carry), next = __fadd_rn(sum, term);
        float lost = __fsub_rn(__fsub_rn(next, sum), term);
        // Of an infinite sum nothing is lost that could be given back.
        carry = lost == lost ? lost : 0.0f;
        sum = next;
    }
};

// A block takes 32 columns; each of its warps every eighth row.
extern "C" __global__ void __launch_bounds__(256) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ float shared[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 i = (i64)blockIdx.x * 32 + lane;
    Sum sum;
    if (i < p.columns) {
#pragma unroll 4
        for (i64 row = warp; row < p.rows; row += 8) sum.add(p.partial[row * p.row_stride + i]);
    }
    shared[warp][lane] = sum.sum;
    __syncthreads();
    if (warp > 0 || i >= p.columns) return;
#pragma unroll
    for (int w = 1; w < 8; w++) sum.add(shared[w][lane]);
    p.out[i / p.group * p.stride[0] + i % p.group * p.stride[1]] = OUT::from_float(sum.sum);
}
