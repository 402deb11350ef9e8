// Sums of dy * gate * gelu'(x + bias) over the rows, in two steps: partial sums of `chunk` rows each,
// which column_sum adds in order. Deterministic.
#include "gelu.cuh"

struct Params {
    Shape shape;
    Operand<const S> x, gate;
    Operand<const B> bias;
    Operand<const S> dy;
    // [chunks, inner]
    float *partial;
    i64 chunk;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ void __launch_bounds__(128) KERNEL(const Params p) {
    wait_for_previous();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.shape.inner) return;
    float bias = bias_at(p.bias.p, p.bias.step, i);
    for (i64 c = blockIdx.y; c * p.chunk < p.shape.rows; c += gridDim.y) {
        i64 end = (c + 1) * p.chunk < p.shape.rows ? (c + 1) * p.chunk : p.shape.rows;
        // The rounding error of each addition is carried along.
        float sum = 0.0f, carry = 0.0f;
        for (i64 row = c * p.chunk; row < end; row++) {
            RowIndex at(p.shape, row);
            float g = T::to_float(at.of(p.dy)[i * p.dy.step]);
            if (GATE) g *= T::to_float(at.of(p.gate)[i * p.gate.step]);
            float v = T::to_float(at.of(p.x)[i * p.x.step]) + bias;
            float term = __fmul_rn(g, activate_gradient<ACT>(v)) - carry;
            float next = __fadd_rn(sum, term);
            float lost = __fsub_rn(__fsub_rn(next, sum), term);
            // The compensation of an infinite sum is zero.
            carry = lost == lost ? lost : 0.0f;
            sum = next;
        }
        p.partial[c * p.shape.inner + i] = sum;
    }
}
