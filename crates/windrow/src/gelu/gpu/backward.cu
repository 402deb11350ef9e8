// dx = dy * gate * gelu'(x + bias) and dgate = dy * gelu(x + bias).
//
// Floor: the bytes of x, dy, gate, dx and dgate over the memory bandwidth.
//
// DX, DGATE   which of the two are wanted
#include "gelu.cuh"

struct Params {
    Shape shape;
    Operand<const S> x, gate;
    Operand<const B> bias;
    Operand<const S> dy;
    Operand<S> dx, dgate;
};
static_assert(PARAMS_AGREE, "as the host's structure");

__device__ __forceinline__ void item(const Params &p, i64 row, i64 index) {
    RowIndex at(p.shape, row);
    const S *x = at.of(p.x), *gate = at.of(p.gate), *dy = at.of(p.dy);
    const B *bias = at.of(p.bias);
    S *dx = at.of(p.dx), *dgate = at.of(p.dgate);
    i64 inner = p.shape.inner, start = item_start(p.shape, DX ? dx : dgate, index);
    if (start >= inner) return;

    bool whole = p.shape.unit && start >= 0 && start + VECTOR <= inner;
    whole = whole && is_aligned<ACCESS>(x + start) && is_aligned<ACCESS>(dy + start);
    if (DX) whole = whole && is_aligned<ACCESS>(dx + start);
    if (GATE) whole = whole && is_aligned<ACCESS>(gate + start);
    if (DGATE) whole = whole && is_aligned<ACCESS>(dgate + start);
    if (whole) {
        Raw<T, VECTOR> xs, dys, gates;
        xs.template load<ACCESS>(x + start);
        dys.template load<ACCESS>(dy + start);
        if (GATE) gates.template load<ACCESS>(gate + start);
        float v[VECTOR], b[VECTOR];
        bias_vector(bias, p.bias.step, start, b);
        if (DX) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                float g = GATE ? dys.get(i) * gates.get(i) : dys.get(i);
                v[i] = g * activate_gradient<ACT>(xs.get(i) + b[i]);
            }
            Raw<T, VECTOR> out;
            out.pack(v);
            out.template store<ACCESS>(dx + start);
        }
        if (DGATE) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                v[i] = dys.get(i) * activate<ACT, ACCURATE>(xs.get(i) + b[i]);
            }
            Raw<T, VECTOR> out;
            out.pack(v);
            out.template store<ACCESS>(dgate + start);
        }
        return;
    }
    i64 end = start + VECTOR < inner ? start + VECTOR : inner;
#pragma unroll 1
    for (i64 i = start < 0 ? 0 : start; i < end; i++) {
        float v = T::to_float(x[i * p.x.step]) + bias_at(bias, p.bias.step, i);
        float g = T::to_float(dy[i * p.dy.step]);
        float scaled = GATE ? g * T::to_float(gate[i * p.gate.step]) : g;
        if (DX) dx[i * p.dx.step] = T::from_float(scaled * activate_gradient<ACT>(v));
        if (DGATE) dgate[i * p.dgate.step] = T::from_float(g * activate<ACT, ACCURATE>(v));
    }
}

extern "C" __global__ void __launch_bounds__(128) KERNEL(const Params p) {
    wait_for_previous();
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    for (i64 row = (i64)blockIdx.y * blockDim.y + threadIdx.y; row < p.shape.rows;
         row += (i64)gridDim.y * blockDim.y) {
        item(p, row, index);
    }
}
