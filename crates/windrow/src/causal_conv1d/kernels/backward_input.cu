// Gradients of what goes in, in three steps that share one source:
//
// STEP 0   dpre = dy * act'(sum + bias), in f32
// STEP 1   dx[t] = sum_j w[width - 1 - j] dpre[t + j], and what final states hand back
// STEP 2   dinitial_states likewise, one thread a channel of a sequence
//
// Floor of steps 0 and 1: x, dy and dx once and dpre twice.
#include "causal_conv1d.cuh"

__device__ __forceinline__ float dpre_at(const Params &p, i64 row, i64 d, i64 t) {
    return p.dpre[row * p.dpre_stride[0] + d * p.dpre_stride[1] + t * p.dpre_stride[2]];
}

// What entry k of a sequence's final state hands back.
__device__ __forceinline__ float final_gradient(const Params &p, const Sequence &s, i64 d, i64 k) {
    if (!p.dfinal_states || k < 0) return 0.0f;
    return T::to_float(p.dfinal_states[s.index * p.dfinal_stride[0] + d * p.dfinal_stride[1] +
                                       k * p.dfinal_stride[2]]);
}

#if STEP == 0
__device__ __forceinline__ void output(const Params &p, i64 row, i64 d, i64 t) {
    Sequence s = sequence_at(p, row, t);
    int own = own_number(p, s, t);
    float g = 0.0f;
    if (own >= 0) {
        float dy = T::to_float(
            p.dy[row * p.dy_stride[0] + d * p.dy_stride[1] + t * p.dy_stride[2]]);
        g = dy * activate_gradient<ACT>(before_activation(p, s, d, t, own));
    }
    p.dpre[row * p.dpre_stride[0] + d * p.dpre_stride[1] + t * p.dpre_stride[2]] = g;
}
#elif STEP == 1
__device__ __forceinline__ void output(const Params &p, i64 row, i64 d, i64 t) {
    Sequence s = sequence_at(p, row, t);
    int own = own_number(p, s, t);
    i64 history = width_of(p) - 1;
    float sum = 0.0f;
    for (i64 j = 0; j <= history && t + j < s.end; j++) {
        if (p.seq_idx && seq_idx_at(p, row, t + j) != own) continue;
        sum = fmaf(weight_at(p, d, history - j), dpre_at(p, row, d, t + j), sum);
    }
    if (own >= 0 && own == own_number(p, s, s.end - 1)) {
        sum += final_gradient(p, s, d, t - (s.end - history));
    }
    p.dx[row * p.dx_stride[0] + d * p.dx_stride[1] + t * p.dx_stride[2]] = T::from_float(sum);
}
#endif

extern "C" __global__ void __launch_bounds__(128, 1) KERNEL(const Params p) {
#if STEP < 2
    for_each_output(p, [&](i64 row, i64 d, i64 t) { output(p, row, d, t); });
#else
    i64 d = (i64)blockIdx.x * blockDim.x + threadIdx.x, history = width_of(p) - 1;
    if (d >= p.channels) return;
    for (i64 index = blockIdx.y; index < p.sequences; index += gridDim.y) {
        Sequence s = sequence_of_index(p, index);
        int own = own_number(p, s, s.start);
        bool kept = own >= 0 && own == own_number(p, s, s.end - 1);
        for (i64 k = 0; k < history; k++) {
            // Entry k lies history - k positions before the sequence.
            float sum = kept ? final_gradient(p, s, d, k - (s.end - s.start)) : 0.0f;
            for (i64 t = s.start; t <= s.start + k && t < s.end; t++) {
                if (p.seq_idx && seq_idx_at(p, s.row, t) != own) continue;
                sum = fmaf(weight_at(p, d, k - (t - s.start)), dpre_at(p, s.row, d, t), sum);
            }
            p.dinitial_states[index * p.dinitial_stride[0] + d * p.dinitial_stride[1] +
                              k * p.dinitial_stride[2]] = T::from_float(sum);
        }
    }
#endif
}
