// y = gelu(x + bias) * gate.
//
// Floor: the bytes of x, gate and y over the memory bandwidth. One access of 16 bytes a thread keeps
// 32 KiB in flight on every multiprocessor; arithmetic is about 13 (tanh) and 16 (exact) issue slots
// an element in half types, of the 32 that an H200 has per 4 bytes moved.
//
// NATIVE   arithmetic in pairs of the half type itself; without bias and gate
#include "gelu.cuh"

struct Params {
    Shape shape;
    Operand<S> y;
    Operand<const S> x, gate;
    Operand<const B> bias;
};
static_assert(sizeof(Params) == PARAMS_SIZE, "as the host's words");

#if NATIVE
// 0.5 x (1 + tanh(x (k0 + k1 x^2))) on a pair; the exact form has constants fitted to erf, with
// an absolute error below 3e-4.
__device__ __forceinline__ unsigned native_pair(unsigned x) {
    auto constant = [](float f) { return T::pack(f, f); };
    unsigned zero = constant(-0.0f);
    x = T::max2(x, constant(-32.0f));
    unsigned half = T::fma2(x, constant(0.5f), zero), s = T::fma2(x, x, zero);
    unsigned k = T::fma2(s, constant(TANH ? 0.035677408f : 0.0347f),
                         constant(TANH ? 0.79788456f : 0.8002f));
    return T::fma2(half, T::tanh2(T::fma2(x, k, zero)), half);
}
#endif

__device__ __forceinline__ float element(float x, float bias, float gate) {
    return activate<ACT, ACCURATE>(x + bias) * gate;
}

__device__ __forceinline__ void item(const Params &p, i64 row, i64 index) {
    RowIndex at(p.shape, row);
    S *y = at.of(p.y);
    const S *x = at.of(p.x), *gate = at.of(p.gate);
    const B *bias = at.of(p.bias);
    i64 inner = p.shape.inner, start = item_start(p.shape, y, index);
    if (start >= inner) return;

    bool whole = p.shape.unit && start >= 0 && start + VECTOR <= inner &&
                 is_aligned<ACCESS>(x + start);
    if (GATE) whole = whole && is_aligned<ACCESS>(gate + start);
    if (whole) {
        Raw<T, VECTOR> xs, gates;
        xs.template load<ACCESS>(x + start);
        if (GATE) gates.template load<ACCESS>(gate + start);
#if NATIVE
#pragma unroll
        for (int i = 0; i < Raw<T, VECTOR>::WORDS; i++) xs.words[i] = native_pair(xs.words[i]);
#else
        float v[VECTOR];
        bias_vector(bias, p.bias.step, start, v);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            v[i] = element(xs.get(i), v[i], GATE ? gates.get(i) : 1.0f);
        }
        xs.pack(v);
#endif
        xs.template store<ACCESS>(y + start);
        return;
    }
    i64 end = start + VECTOR < inner ? start + VECTOR : inner;
#pragma unroll 1
    for (i64 i = start < 0 ? 0 : start; i < end; i++) {
        S in = x[i * p.x.step];
#if NATIVE
        y[i * p.y.step] = (S)native_pair(in);
#else
        float g = GATE ? T::to_float(gate[i * p.gate.step]) : 1.0f;
        y[i * p.y.step] =
            T::from_float(element(T::to_float(in), bias_at(bias, p.bias.step, i), g));
#endif
    }
}

extern "C" __global__ void __launch_bounds__(128) KERNEL(const Params p) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (RANK == 0) {
        item(p, 0, index);
        return;
    }
    for (i64 row = (i64)blockIdx.y * blockDim.y + threadIdx.y; row < p.shape.rows;
         row += (i64)gridDim.y * blockDim.y) {
        item(p, row, index);
    }
}
