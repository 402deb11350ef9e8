// Element types and options of causal conv1d, and its weight and bias.
//
// T        element type of x and y: F32, F16 or Bf16
// W        element type of weight
// BIAS     element type of bias, if there is one
// WIDTH    number of taps; 0 takes it from the parameters
// ACT      activation, an enumerator of `Activation`
#pragma once
#include "activation.cuh"
#include "windrow.cuh"

typedef T::Storage S;

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
