// The common part of causal conv1d's kernels: parameters, and one output computed in plain steps.
//
// INDEX    element type of cu_seqlens: int or i64, if there is one
// DILATED  taps are p.dilation tokens apart, not one
// ALONG_CHANNELS   the dimension that neighbouring threads follow is d instead of l
#pragma once
#include "norm.cuh"

struct Params {
    S *y;
    const S *x;
    const W::Storage *weight;
    const void *bias;
    const int *seq_idx;
    const void *cu_seqlens;
    const S *initial_states;
    S *final_states;
    // One word per position of x, made from seq_idx or cu_seqlens: see `mask_word`.
    unsigned short *mask;
    const S *dy, *dfinal_states;
    S *dx, *dinitial_states;
    // Partial sums of the gradients of weight and bias: [parts, channels, width + 1].
    float *partial;
    WrongIndex *wrong;
    i64 batch, channels, length, width, dilation, sequences;
    // Strides in elements; [b, d, l] and [sequence, d, width - 1].
    i64 x_stride[3], y_stride[3], weight_stride[2], bias_stride, seq_idx_stride[2];
    i64 cu_stride, initial_stride[3], final_stride[3];
    i64 dy_stride[3], dfinal_stride[3], dx_stride[3], dinitial_stride[3];
    // Positions that a thread or warp walks along; and the partial sums of a row.
    i64 chunk, chunks;
    // The outputs behind y: see `output_of`.
    S *further_y[2];
    i64 further_stride[2][3], further_first[2];
    // The norm of heads: see `normalise`.
    i64 norm_channels;
    float epsilon;
};
static_assert(PARAMS_AGREE, "as the host's structure");

__device__ __forceinline__ i64 width_of(const Params &p) { return WIDTH ? WIDTH : p.width; }

__device__ __forceinline__ i64 dilation_of(const Params &p) { return DILATED ? p.dilation : 1; }

// The number of positions before a sequence on which its first outputs depend.
__device__ __forceinline__ i64 history_of(const Params &p) { return (width_of(p) - 1) * dilation_of(p); }

__device__ __forceinline__ float finish(float sum) {
    return activate<ACT, true>(sum);
}

// Sequences: rows of the batch, or parts of the one row that cu_seqlens marks. Values of
// cu_seqlens are held within 0 and `length`, a sequence does not end before it starts, and it holds the
// position that it was found for, so that wrong values cannot reach outside.
struct Sequence {
    i64 row, index, start, end;
};

__device__ __forceinline__ i64 boundary(const Params &p, i64 i) {
#ifdef INDEX
    i64 v = ((const INDEX *)p.cu_seqlens)[i * p.cu_stride];
    return v < 0 ? 0 : v > p.length ? p.length : v;
#else
    return 0;
#endif
}

__device__ __forceinline__ Sequence sequence_of_index(const Params &p, i64 index) {
#ifdef INDEX
    i64 start = boundary(p, index), end = boundary(p, index + 1);
    return {0, index, start, end < start ? start : end};
#else
    return {index, index, 0, p.length};
#endif
}

// Reports the first boundary that does not rise from 0 to `length`. One kernel of each run does, by all of its
// threads along x.
__device__ __forceinline__ void report_boundaries(const Params &p) {
#ifdef INDEX
    if (blockIdx.y || blockIdx.z) return;
    i64 threads = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i <= p.sequences; i += threads) {
        const INDEX *at = (const INDEX *)p.cu_seqlens + i * p.cu_stride;
        i64 given = *at, least = i ? at[-p.cu_stride] : 0, most = i ? p.length : 0;
        if (i == p.sequences) least = p.length;
        if (given < least || given > most) report(p.wrong, CU_SEQLENS, i, given, p.length);
    }
#endif
}

// The sequence that position t of a row belongs to; empty ones are passed over.
__device__ __forceinline__ Sequence sequence_at(const Params &p, i64 row, i64 t) {
#ifdef INDEX
    i64 low = 0, high = p.sequences; // boundary(low) <= t < boundary(high)
    while (high - low > 1) {
        i64 middle = (low + high) / 2;
        if (boundary(p, middle) <= t) low = middle;
        else high = middle;
    }
    Sequence s = sequence_of_index(p, low);
    s.start = s.start < t ? s.start : t;
    s.end = s.end > t ? s.end : t + 1;
    return s;
#else
    return sequence_of_index(p, row);
#endif
}

__device__ __forceinline__ int seq_idx_at(const Params &p, i64 row, i64 t) {
    return p.seq_idx[row * p.seq_idx_stride[0] + t * p.seq_idx_stride[1]];
}

// Bit j - 1: the input j positions back belongs to the same sequence. Bit 15: padding, gives 0. Without dilation.
__device__ __forceinline__ unsigned mask_word(const Params &p, i64 row, i64 t) {
    i64 start = sequence_at(p, row, t).start;
    int own = p.seq_idx ? seq_idx_at(p, row, t) : 0;
    unsigned mask = own < 0 ? 0x8000 : 0;
    for (i64 j = 1; j < width_of(p) && t - j >= start; j++) {
        if (!p.seq_idx || seq_idx_at(p, row, t - j) == own) mask |= 1u << (j - 1);
    }
    return mask;
}

// The number that positions of a row must have so that t depends on them.
__device__ __forceinline__ int own_number(const Params &p, const Sequence &s, i64 t) {
    return p.seq_idx && s.end > s.start ? seq_idx_at(p, s.row, t) : 0;
}

// The input at position t of a sequence, from the initial state where t lies before it; 0 if it has
// another number than `own`.
__device__ __forceinline__ float input_at(const Params &p, const Sequence &s, i64 d, i64 t, int own) {
    bool numbered = p.seq_idx && s.end > s.start;
    if (t >= s.start) {
        if (numbered && seq_idx_at(p, s.row, t) != own) return 0.0f;
        return T::to_float(p.x[s.row * p.x_stride[0] + d * p.x_stride[1] + t * p.x_stride[2]]);
    }
    // The state belongs to the sequence of the first token.
    if (!p.initial_states || (numbered && seq_idx_at(p, s.row, s.start) != own)) return 0.0f;
    i64 k = history_of(p) + (t - s.start);
    return T::to_float(p.initial_states[s.index * p.initial_stride[0] + d * p.initial_stride[1] +
                                        k * p.initial_stride[2]]);
}

// What entry k of a sequence's final state hands back.
__device__ __forceinline__ float final_gradient(const Params &p, const Sequence &s, i64 d, i64 k) {
    if (!p.dfinal_states || k < 0) return 0.0f;
    return T::to_float(p.dfinal_states[s.index * p.dfinal_stride[0] + d * p.dfinal_stride[1] +
                                       k * p.dfinal_stride[2]]);
}

// Sum and bias of y[row, d, t], with every option.
__device__ __forceinline__ float before_activation(const Params &p, const Sequence &s, i64 d, i64 t,
                                                   int own) {
    i64 first = t - history_of(p), dilation = dilation_of(p);
    return sum_taps<WIDTH>(
        bias_at(p, d), p.width, [&](i64 k) { return weight_at(p, d, k); },
        [&](i64 k) { return input_at(p, s, d, first + k * dilation, own); });
}

// dy times the derivative of the activation, with every option.
__device__ __forceinline__ float gradient_before_activation(const Params &p, const Sequence &s, i64 d,
                                                            i64 t, int own) {
    float dy = T::to_float(p.dy[s.row * p.dy_stride[0] + d * p.dy_stride[1] + t * p.dy_stride[2]]);
    return dy * activate_gradient<ACT>(before_activation(p, s, d, t, own));
}

__device__ __forceinline__ void plain_output(const Params &p, const Sequence &s, i64 d, i64 t) {
    int own = own_number(p, s, t);
    float y = own < 0 ? 0.0f : finish(before_activation(p, s, d, t, own));
    Output out = output_of(p, d);
    out.y[s.row * out.stride[0] + d * out.stride[1] + t * out.stride[2]] = T::from_float(y);
}

// Every output of a grid of blocks: along x the inner dimension, along y the outer one, along z the rows. Calls f(row,
// d, t). Neighbouring threads follow d if ALONG_CHANNELS, otherwise l.
template <class F> __device__ __forceinline__ void for_each_output(const Params &p, F f) {
    i64 inner = ALONG_CHANNELS ? p.channels : p.length;
    i64 outer = ALONG_CHANNELS ? p.length : p.channels;
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= inner) return;
    for (i64 row = blockIdx.z; row < p.batch; row += gridDim.z) {
        for (i64 j = blockIdx.y; j < outer; j += gridDim.y) {
            f(row, ALONG_CHANNELS ? i : j, ALONG_CHANNELS ? j : i);
        }
    }
}

#ifdef MASK
// The value j positions away, or 0 if a position with this mask does not depend on it. Its own value always counts.
__device__ __forceinline__ float seen(float value, unsigned mask, int j) {
    return !MASK || j == 0 || mask >> (j - 1) & 1 ? value : 0.0f;
}
#endif
