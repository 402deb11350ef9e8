// Gradients of what goes in for any strides, width and options, one thread an element.
//
// STATES   dinitial_states instead of dx
//
// dx[t] = sum_j w[width - 1 - j] dpre[t + j] and what final states hand back, where dpre is dy times the
// derivative of the activation, computed for each term: this is the kernel for what the others leave.
#include "causal_conv1d.cuh"

// The terms of positions from..to of a sequence for an input that lies `lead` taps before `from`.
__device__ __forceinline__ float terms(const Params &p, const Sequence &s, i64 d, i64 from, i64 to,
                                       i64 lead, int own) {
    float sum = 0.0f;
    for (i64 t = from; t < to; t++) {
        if (p.seq_idx && seq_idx_at(p, s.row, t) != own) continue;
        float w = weight_at(p, d, width_of(p) - 1 - lead - (t - from));
        sum = fmaf(w, gradient_before_activation(p, s, d, t, own), sum);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(128, 1) KERNEL(const Params p) {
    wait_for_previous();
    i64 history = width_of(p) - 1;
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
            if (own >= 0) sum += terms(p, s, d, s.start, end, history - k, own);
            p.dinitial_states[index * p.dinitial_stride[0] + d * p.dinitial_stride[1] +
                              k * p.dinitial_stride[2]] = T::from_float(sum);
        }
    }
#else
    for_each_output(p, [&](i64 row, i64 d, i64 t) {
        Sequence s = sequence_at(p, row, t);
        int own = own_number(p, s, t);
        i64 end = t + history + 1 < s.end ? t + history + 1 : s.end;
        float sum = own < 0 ? 0.0f : terms(p, s, d, t, end, 0, own);
        if (own >= 0 && own == own_number(p, s, s.end - 1)) {
            sum += final_gradient(p, s, d, t - (s.end - history));
        }
        p.dx[row * p.dx_stride[0] + d * p.dx_stride[1] + t * p.dx_stride[2]] = T::from_float(sum);
    });
#endif
}
