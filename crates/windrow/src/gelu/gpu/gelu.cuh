// The common part of GELU's kernels: operands with any strides, as `rows` rows of `inner` elements.
//
// T                element type: F32, F16 or Bf16
// VECTOR, ACCESS   elements of a thread, and of one memory access
// TANH             tanh form instead of the exact one
// BIAS             element type of bias, if there is one
// GATE             whether there is a gate
// RANK             number of dimensions that count the rows; 0 for one row
#pragma once
#include "activation.cuh"
#include "windrow.cuh"

typedef T::Storage S;

constexpr int DIMS = RANK ? RANK : 1;
constexpr int ACT = TANH ? GELU_TANH : GELU;
constexpr bool ACCURATE = sizeof(S) == 4;

struct Shape {
    i64 rows, inner;
    // True if the elements of a row are contiguous in every operand except the bias.
    i64 unit;
    // The dimensions that count the rows, innermost first.
    i64 size[DIMS];
};

template <class E> struct Operand {
    E *p;
    i64 step;
    i64 stride[DIMS];
};

// The index of a row along each dimension.
struct RowIndex {
    i64 at[DIMS];

    __device__ __forceinline__ RowIndex(const Shape &shape, i64 row) {
#pragma unroll
        for (int d = 0; d < DIMS; d++) {
            at[d] = row;
            if (d + 1 < RANK) {
                // 32-bit division is several times faster.
                i64 size = shape.size[d];
                i64 next = (row | size) >> 32 ? row / size : (i64)((unsigned)row / (unsigned)size);
                at[d] = row - next * size;
                row = next;
            }
        }
    }

    template <class E> __device__ __forceinline__ E *of(const Operand<E> &o) const {
        E *p = o.p;
#pragma unroll
        for (int d = 0; d < RANK; d++) p += at[d] * o.stride[d];
        return p;
    }
};

// The elements of a row that one thread computes: start .. start + VECTOR. They begin where `out` is aligned, so the
// first ones of a misaligned row reach before it.
__device__ __forceinline__ i64 item_start(const Shape &shape, const S *out, i64 item) {
    i64 start = item * VECTOR;
    if (shape.unit) start -= (i64)((unsigned long long)out / sizeof(S) % ACCESS);
    return start;
}

#ifndef BIAS
#define BIAS F32
#define NO_BIAS 1
#else
#define NO_BIAS 0
#endif
typedef BIAS::Storage B;

__device__ __forceinline__ float bias_at(const B *bias, i64 step, i64 i) {
    return NO_BIAS ? 0.0f : BIAS::to_float(bias[i * step]);
}

// The bias of VECTOR elements from `start` on.
__device__ __forceinline__ void bias_vector(const B *bias, i64 step, i64 start, float (&out)[VECTOR]) {
    constexpr int WIDE = 16 / (int)sizeof(B), STEP = VECTOR < WIDE ? VECTOR : WIDE;
    if (!NO_BIAS && step == 1 && is_aligned<STEP>(bias + start)) {
        Raw<BIAS, VECTOR> raw;
        raw.template load<STEP>(bias + start);
        raw.unpack(out);
        return;
    }
#pragma unroll
    for (int i = 0; i < VECTOR; i++) out[i] = bias_at(bias, step, start + i);
}
