// Serving: every sequence walked from its first token to its last. y may be x itself.
//
// Floor of decoding: states once in and once out, x once in, y once out. A thread takes VECTOR channels of a
// sequence, whose window stays in registers.
#include "serving.cuh"

// Left to itself, the assembler saves registers where there are many taps, and spills one.
#if VECTOR == 1
#define BOUNDS __launch_bounds__(128, 1)
#else
#define BOUNDS __launch_bounds__(128)
#endif

extern "C" __global__ void BOUNDS KERNEL(const Params p) {
    wait_for_previous();
    i64 d = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (d >= p.channels) return;
    Taps taps(p, d);
    if (p.starts && d == 0 && blockIdx.y == 0) report_boundary(p, 0);
    clear_tail(p, d, blockIdx.y, gridDim.y);
    for (i64 i = blockIdx.y; i < p.sequences; i += gridDim.y) {
        if (p.starts && d == 0) report_boundary(p, i + 1);
        Tokens tokens = tokens_of(p, i);
        if (!tokens.count) continue;
        const S *x = p.x + tokens.row * p.x_stride[0] + d * p.x_stride[1] + tokens.start * p.x_stride[2];
        S *y = p.y + tokens.row * p.y_stride[0] + d * p.y_stride[1] + tokens.start * p.y_stride[2];
        Vector next = {};
        next.template load<VECTOR>(x);
        States states = states_of(p, i, tokens.count, d == 0);
        if (states.read < 0) {
            // Padding: nothing is computed and no state changes.
            Vector zero = {};
            for (i64 t = 0; t < tokens.count; t++) zero.template store<VECTOR>(y + t * p.y_stride[2]);
            continue;
        }
        Vector window[KEPT];
        load_window(p, states, d, window);
        bool drafts = p.accepted && states.write >= 0;
        if (drafts) {
#pragma unroll UNROLL
            for (int j = 1; j < HALO; j++) store_column(p, states.write, d, j - 1, window[j]);
        }
        for (i64 t = 0; t < tokens.count; t++) {
            Vector token = next;
            x += p.x_stride[2];
            if (t + 1 < tokens.count) next.template load<VECTOR>(x);
            taps.step(p, d, window, token).template store<VECTOR>(y);
            y += p.y_stride[2];
            push(window, token);
#if WINDOWS
            keep_window(p, states, d, t, window);
#endif
            if (drafts && (HALO || t)) store_column(p, states.write, d, t + HALO - 1, token);
            if (states.ends && t + 1 == states.end) {
                store_window(p, state_of(p, i, states.end_column, d == 0), d, window);
                states.end += p.block_size, states.end_column++, states.ends--;
            }
        }
        if (!p.accepted) store_window(p, states.write, d, window);
    }
}
