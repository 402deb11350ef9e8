// Parameters of decoding.
//
// STATE_LENGTH   inputs that a state holds, where they and the taps are few; else 0
// SEQLENS        element type of cache_seqlens: int or i64
// INDICES        element type of conv_state_indices: int or i64
#pragma once
#include "parameters.cuh"

struct Params {
    S *y;
    const S *x;
    S *state;
    const W::Storage *weight;
    const void *bias;
    const SEQLENS *cache_seqlens;
    const INDICES *state_indices;
    WrongIndex *wrong;
    i64 batch, channels, length, width, state_length, pool;
    // [b, d, l], [pool, d, state_length], [d, width]
    i64 x_stride[3], y_stride[3], state_stride[3], weight_stride[2];
    i64 bias_stride, cache_seqlens_stride, state_indices_stride;
};
static_assert(PARAMS_AGREE, "as the host's structure");
