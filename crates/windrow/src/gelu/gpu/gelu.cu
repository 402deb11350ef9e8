// y = gelu(x + bias) * gate.
//
// Floor: the bytes of x, gate and y over the memory bandwidth. One access of 16 bytes per thread keeps 32 KiB in flight
// on every multiprocessor; arithmetic is about 13 (tanh) and 16 (exact) issue slots per element in f16/bf16, of the 32
// that an H200 has per 4 bytes moved.
//
// THREADS  threads of a block
// UNROLL   accesses of a thread where all elements lie in one row
// NATIVE   arithmetic in pairs of f16 or bf16; without bias and gate
#include "gelu.cuh"

struct Params {
    Shape shape;
    Operand<S> y;
    Operand<const S> x, gate;
    Operand<const B> bias;
};
static_assert(PARAMS_AGREE, "as the host's structure");

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

typedef Raw<T, VECTOR> Elements;

// x becomes y.
__device__ __forceinline__ void vector(Elements &x, const Elements &gate, const float (&bias)[VECTOR]) {
#if NATIVE
#pragma unroll
    for (int i = 0; i < Elements::WORDS; i++) x.words[i] = native_pair(x.words[i]);
#else
    float v[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = element(x.get(i), bias[i], GATE ? gate.get(i) : 1.0f);
    x.pack(v);
#endif
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
        Elements xs, gates;
        xs.template load<ACCESS>(x + start);
        if (GATE) gates.template load<ACCESS>(gate + start);
        float b[VECTOR];
        bias_vector(bias, p.bias.step, start, b);
        vector(xs, gates, b);
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

// One row of neighbours without bias, all of it aligned: nothing but the accesses.
__device__ __forceinline__ void flat(const Params &p) {
    i64 first = (i64)blockIdx.x * blockDim.x * UNROLL + threadIdx.x;
    const float none[VECTOR] = {};
    Elements xs[UNROLL], gates[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        i64 start = (first + u * blockDim.x) * VECTOR;
        if (start + VECTOR > p.shape.inner) continue;
        xs[u].template load<ACCESS>(p.x.p + start);
        if (GATE) gates[u].template load<ACCESS>(p.gate.p + start);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        i64 start = (first + u * blockDim.x) * VECTOR;
        if (start + VECTOR <= p.shape.inner) {
            vector(xs[u], gates[u], none);
            xs[u].template store<ACCESS>(p.y.p + start);
        } else if (start < p.shape.inner) {
            item(p, 0, first + u * blockDim.x);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL(const Params p) {
    wait_for_previous();
#if RANK == 0
    bool aligned = is_aligned<ACCESS>(p.x.p) && is_aligned<ACCESS>(p.y.p);
    if (GATE) aligned = aligned && is_aligned<ACCESS>(p.gate.p);
    if (NO_BIAS && p.shape.unit && aligned) {
        flat(p);
        return;
    }
    i64 first = (i64)blockIdx.x * blockDim.x * UNROLL + threadIdx.x;
#pragma unroll 1
    for (int u = 0; u < UNROLL; u++) item(p, 0, first + u * blockDim.x);
#else
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    for (i64 row = (i64)blockIdx.y * blockDim.y + threadIdx.y; row < p.shape.rows;
         row += (i64)gridDim.y * blockDim.y) {
        item(p, row, index);
    }
#endif
}
