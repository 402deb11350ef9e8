// Gradients of x or of the initial states for any strides, width and options, one thread per element.
//
// STATES   dinitial_states instead of dx
// DENSE    of a dense convolution: A holds G W, see im2col.cuh, with the share of each tap's input
//
// dx[t] = sum_j w[width - 1 - j] dpre[t + j * dilation] and what final states hand back, where dpre is dy times the
// derivative of the activation, computed for each term: this is the kernel for all cases that the others do not
// compute.
#if DENSE
#include "im2col.cuh"

typedef GemmParams Arguments;

__device__ __forceinline__ const Params &base(const Arguments &g) { return g.base; }

__device__ __forceinline__ float add_term(const Arguments &g, const Sequence &s, i64 d, i64 k, i64 t,
                                          int own, float sum) {
    const Params &p = g.base;
    if (g.outputs == 0) return sum;
    return sum + g.a[((s.row * p.length + t) * width_of(p) + k) * p.channels + d];
}
#else
#include "causal_conv1d.cuh"

typedef Params Arguments;

__device__ __forceinline__ const Params &base(const Arguments &p) { return p; }

__device__ __forceinline__ float add_term(const Arguments &p, const Sequence &s, i64 d, i64 k, i64 t,
                                          int own, float sum) {
    return fmaf(weight_at(p, d, k), gradient_before_activation(p, s, d, t, own), sum);
}
#endif

// The terms of positions from..to of a sequence for an input that lies `lead` positions before `from`.
__device__ __forceinline__ float terms(const Arguments &g, const Sequence &s, i64 d, i64 from, i64 to,
                                       i64 lead, int own) {
    const Params &p = base(g);
    float sum = 0.0f;
    i64 dilation = dilation_of(p), taps = (lead + dilation - 1) / dilation;
    for (i64 t = from + taps * dilation - lead; t < to; t += dilation, taps++) {
        if (p.seq_idx && seq_idx_at(p, s.row, t) != own) continue;
        sum = add_term(g, s, d, width_of(p) - 1 - taps, t, own, sum);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(128, 1) KERNEL(const Arguments g) {
    wait_for_previous();
    const Params &p = base(g);
    report_boundaries(p);
    i64 history = history_of(p);
#if STATES
    i64 d = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (d >= p.channels) return;
    for (i64 index = blockIdx.y; index < p.sequences; index += gridDim.y) {
        Sequence s = sequence_of_index(p, index);
        int own = own_number(p, s, s.start);
        bool kept = own >= 0 && own == own_number(p, s, s.end - 1);
        for (i64 k = 0; k < history; k++) {
            // Entry k lies history - k positions before the sequence.
            float sum = kept ? final_gradient(p, s, d, k - (s.end - s.start)) : 0.0f;
            i64 end = s.start + k + 1 < s.end ? s.start + k + 1 : s.end;
            if (own >= 0) sum += terms(g, s, d, s.start, end, history - k, own);
            p.dinitial_states[index * p.dinitial_stride[0] + d * p.dinitial_stride[1] +
                              k * p.dinitial_stride[2]] = T::from_float(sum);
        }
    }
#else
    for_each_output(p, [&](i64 row, i64 d, i64 t) {
        Sequence s = sequence_at(p, row, t);
        int own = own_number(p, s, t);
        i64 end = t + history + 1 < s.end ? t + history + 1 : s.end;
        float sum = own < 0 ? 0.0f : terms(g, s, d, t, end, 0, own);
        if (own >= 0 && own == own_number(p, s, s.end - 1)) {
            sum += final_gradient(p, s, d, t - (s.end - history));
        }
        p.dx[row * p.dx_stride[0] + d * p.dx_stride[1] + t * p.dx_stride[2]] = T::from_float(sum);
    });
#endif
}
