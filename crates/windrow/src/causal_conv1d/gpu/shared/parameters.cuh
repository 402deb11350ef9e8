// Element types and options of causal conv1d, and its weight and bias.
//
// T        element type of x and y: F32, F16 or Bf16
// W        element type of weight
// BIAS     element type of bias, if there is one
// WIDTH    number of taps; 0 takes it from the parameters
// ACT      activation, an enumerator of `Activation`
// OUTPUTS  number of outputs, each of which has some of the channels
#pragma once
#include "activation.cuh"
#include "windrow.cuh"

#ifndef OUTPUTS
#define OUTPUTS 1
#endif

typedef T::Storage S;

// An output and its strides of [b, d, l]. `y` is where its channel 0 would lie if it had the channels before its own.
struct Output {
#if OUTPUTS > 1
    S *y;
    i64 stride[3];
#else
    // Read where they are used, as parameters are.
    S *const &y;
    const i64 (&stride)[3];
#endif
};

// The output that has channel d. `P` has y and y_stride, and of the further outputs further_y, further_stride and
// further_first, their first channels.
template <class P> __device__ __forceinline__ Output output_of(const P &p, i64 d) {
#if OUTPUTS > 1
    Output out = {p.y, {p.y_stride[0], p.y_stride[1], p.y_stride[2]}};
#pragma unroll
    for (int i = 0; i < OUTPUTS - 1; i++) {
        bool is_later = d >= p.further_first[i];
        out.y = is_later ? p.further_y[i] : out.y;
#pragma unroll
        for (int j = 0; j < 3; j++) out.stride[j] = is_later ? p.further_stride[i][j] : out.stride[j];
    }
    return out;
#else
    return {p.y, p.y_stride};
#endif
}

#if OUTPUTS > 1
// Calls f(output, first, last) for each output that has some of the channels begin .. end: first .. last.
template <class P, class F>
__device__ __forceinline__ void for_each_part(const P &p, i64 begin, i64 end, F f) {
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
        i64 first = i > 0 ? p.further_first[i - 1] : 0, last = i + 1 < OUTPUTS ? p.further_first[i] : p.channels;
        first = first < begin ? begin : first, last = last < end ? last : end;
        if (first < last) f(output_of(p, first), first, last);
    }
}
#endif

// The first wrong index since the host last looked, in its memory: `Record` of gpu/wrong_index.rs.
struct WrongIndex {
    // Which rule was broken, an enumerator of `Rule`; 0 if none was.
    unsigned rule;
    i64 position, given, limit;
};

enum Rule {
    BEING_WRITTEN = 1,
    CU_SEQLENS,
    CACHE_SEQLENS,
    STATE_INDICES,
    QUERY_START_LOC,
    NUM_ACCEPTED_TOKENS,
    INITIAL_BLOCK,
    LAST_BLOCK,
    FIRST_BLOCK,
    TOKENS_BEFORE,
    INTERMEDIATE_INDICES,
    NEXT_TOKEN,
    NEXT_SIBLING
};

// Only a wrong index is written to the host.
__device__ __forceinline__ void report(WrongIndex *wrong, Rule rule, i64 position, i64 given, i64 limit) {
    if (*(volatile unsigned *)&wrong->rule || atomicCAS(&wrong->rule, 0u, BEING_WRITTEN)) return;
    wrong->position = position;
    wrong->given = given;
    wrong->limit = limit;
    __threadfence_system();
    *(volatile unsigned *)&wrong->rule = rule;
}

// `P` has weight, weight_stride, bias and bias_stride.
template <class P> __device__ __forceinline__ float weight_at(const P &p, i64 d, i64 k) {
    return W::to_float(p.weight[d * p.weight_stride[0] + k * p.weight_stride[1]]);
}

template <class P> __device__ __forceinline__ float bias_at(const P &p, i64 d) {
#ifdef BIAS
    return BIAS::to_float(((const BIAS::Storage *)p.bias)[d * p.bias_stride]);
#else
    return 0.0f;
#endif
}

// The sum of a token: the bias, then N taps (or `taps` if N is 0), the oldest first. All kernels of y add in this order,
// except the products on tensor cores. So a token has the same bits in whole sequences, chunks, steps and drafts.
// `weight` and `input` are functions of a tap.
template <int N, class Weight, class Input>
__device__ __forceinline__ float sum_taps(float bias, i64 taps, Weight weight, Input input) {
    float sum = bias;
    if constexpr (N > 0) {
#pragma unroll
        for (int k = 0; k < N; k++) sum = fmaf(weight(k), input(k), sum);
    } else {
#pragma unroll 1
        for (i64 k = 0; k < taps; k++) sum = fmaf(weight(k), input(k), sum);
    }
    return sum;
}

#if WIDTH
// The weights of N channels from d on.
template <int N, class P>
__device__ __forceinline__ void weights_at(const P &p, i64 d, float (&out)[WIDTH][N]) {
    constexpr int STEP = 16 / (int)sizeof(W::Storage);
    const W::Storage *row = p.weight + d * p.weight_stride[0];
    if constexpr (N * WIDTH % STEP == 0) {
        if (p.weight_stride[0] == WIDTH && p.weight_stride[1] == 1 && is_aligned<STEP>(row)) {
            Raw<W, N * WIDTH> raw;
            raw.template load<STEP>(row);
#pragma unroll
            for (int i = 0; i < N * WIDTH; i++) out[i % WIDTH][i / WIDTH] = raw.get(i);
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < N * WIDTH; i++) {
        out[i % WIDTH][i / WIDTH] = weight_at(p, d + i / WIDTH, i % WIDTH);
    }
}
#endif
