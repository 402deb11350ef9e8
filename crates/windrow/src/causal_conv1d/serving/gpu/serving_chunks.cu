// Serving where sequences are long and y is not x: pieces of ROWS tokens, 2 <= TAPS <= 9.
//
// Floor: x once in, y once out.
//
// STEPS    tokens whose loads are on their way
#include "serving_pieces.cuh"

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ int found;
    Size d = (Size)(blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    bool inside = d < (Size)p.channels;
    int sequences = (int)p.sequences, tokens_of_all = (int)(given(STARTS) ? p.length : p.sequences * p.length);
    int pieces = tokens_of_all / ROWS + sequences;
    Taps taps(p, inside ? d : 0);
    for (int piece = blockIdx.y; piece < pieces; piece += gridDim.y) {
        if (threadIdx.x == 0) found = -1;
        __syncthreads();
        for (int i = threadIdx.x; i < sequences; i += blockDim.x) {
            if (first_piece(p, i) <= piece && piece < first_piece(p, i + 1)) found = i;
        }
        __syncthreads();
        int i = found;
        // No thread looks for the next piece before all have seen this one.
        __syncthreads();
        if (!inside) continue;
        if (given(STARTS)) {
            if (d == 0 && piece == 0) report_all_boundaries(p);
            clear_tail(p, d, boundary(p, sequences) + piece, pieces);
        }
        if (i < 0) continue;
        Tokens tokens = tokens_of(p, i);
        Size t = (piece - first_piece(p, i)) * ROWS;
        if (t >= tokens.count) continue;
        int count = (int)(tokens.count - t < ROWS ? tokens.count - t : ROWS);
        const S *x = p.x + place(p.x_stride, {tokens.row, tokens.start + t}, d);
        Output output = output_of(p, d);
        S *y = output.y + place(output.stride, {tokens.row, tokens.start + t}, d);
        Vector ahead[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (s < count) ahead[s].template load<VECTOR>(x + s * p.x_stride[2]);
        }
        Vector window[KEPT];
        if (t) {
#pragma unroll
            for (int j = 0; j < HALO; j++) {
                window[j].template load<VECTOR>(x + (j - HALO) * p.x_stride[2]);
            }
        }
        States states = states_of(p, i, tokens.count);
        if (states.read < 0) {
            Vector zero = {};
            for (int s = 0; s < count; s++) zero.template store<VECTOR>(y + s * output.stride[2]);
            if (states.wrong && d == 0 && !t) report_states(p, i, tokens.count);
            continue;
        }
        if (!t) {
            begin_sequence(p, i, states, d, x, tokens.count, window);
        }
        Floats before[KEPT];
#pragma unroll
        for (int j = 0; j < HALO; j++) before[j] = floats(window[j]);
        x += STEPS * p.x_stride[2];
        int s0 = 0;
#pragma unroll 1
        for (; s0 + STEPS <= count; s0 += STEPS) {
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                Floats token = floats(ahead[s]);
                if (s0 + STEPS + s < count) ahead[s].template load<VECTOR>(x);
                x += p.x_stride[2];
                taps.step(p, d, before, token).template store<VECTOR>(y);
                y += output.stride[2];
                push(before, token);
            }
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (s0 + s < count) {
                Floats token = floats(ahead[s]);
                taps.step(p, d, before, token).template store<VECTOR>(y);
                y += output.stride[2];
                push(before, token);
            }
        }
    }
}
