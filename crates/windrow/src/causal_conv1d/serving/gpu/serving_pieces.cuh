// Sequences in pieces of ROWS tokens side by side. Sequence i has the pieces from start / ROWS + i on: at least as many
// as it needs, found without a count of those before it. Only its first piece reads states, and writes them from x,
// which is not y.
//
// ROWS     tokens of a piece, at least TAPS - 1; the pieces' number and that of tokens fit an int
#pragma once
#include "serving.cuh"

static_assert(ROWS >= HALO, "the first piece alone sees the window");

__device__ __forceinline__ int first_piece(const Params &p, int i) {
    return (given(STARTS) ? boundary(p, i) : i * (int)p.length) / ROWS + i;
}

// One thread of all does, which takes a while where sequences are many.
__device__ __forceinline__ void report_all_boundaries(const Params &p) {
    for (int i = 0; i <= (int)p.sequences; i++) report_boundary(p, i);
}

// What is before token `end` of a sequence with this window before it.
__device__ __forceinline__ void store_state_at(const Params &p, i64 state, Size d, const S *x, i64 end,
                                               const Vector (&window)[KEPT]) {
    if (state < 0) return;
    Vector kept[KEPT];
#pragma unroll
    for (int j = 0; j < HALO; j++) kept[j] = window[j];
    for (i64 t = end < HALO ? 0 : end - HALO; t < end; t++) {
        Vector token = {};
        token.template load<VECTOR>(x + t * p.x_stride[2]);
        push(kept, token);
    }
    store_window(p, state, d, kept);
}

// The window of a sequence's first piece; writes its states.
__device__ __forceinline__ void begin_sequence(const Params &p, int i, States &states, Size d, const S *x, Size count,
                                               Vector (&window)[KEPT]) {
    load_window(p, states, d, window);
    for (i64 k = 0; k < states.ends; k++) {
        i64 state = state_of<false>(p, states, i, states.end_column + k);
        store_state_at(p, state, d, x, states.end + k * p.block_size, window);
    }
    store_state_at(p, states.write, d, x, count, window);
    if (states.wrong && d == 0) report_states(p, i, count);
}
