// The ends of every sequence: outputs that depend on the initial state, and the final state. One thread per channel of
// a sequence.
//
// INITIAL   recompute the outputs of the history with the initial state
// FINAL     write the final state: the last inputs, with the initial state before them
#include "causal_conv1d.cuh"

extern "C" __global__ void __launch_bounds__(128, 1) KERNEL(const Params p) {
    wait_for_previous();
    i64 d = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (d >= p.channels) return;
    i64 history = history_of(p);
    for (i64 index = blockIdx.y; index < p.sequences; index += gridDim.y) {
        Sequence s = sequence_of_index(p, index);
        if (INITIAL) {
            i64 end = s.start + history < s.end ? s.start + history : s.end;
            for (i64 t = s.start; t < end; t++) plain_output(p, s, d, t);
        }
        if (FINAL) {
            int own = own_number(p, s, s.end - 1);
            S *out = p.final_states + index * p.final_stride[0] + d * p.final_stride[1];
            for (i64 k = 0; k < history; k++) {
                float v = own < 0 ? 0.0f : input_at(p, s, d, s.end - history + k, own);
                out[k * p.final_stride[2]] = T::from_float(v);
            }
        }
    }
}
