// Serving where sequences are long and y is not x: pieces of CHUNK tokens beside each other, 2 <= TAPS <= 9.
//
// Floor: x once in, y once out. Sequence i has the pieces from start / CHUNK + i on: at least as many as it needs,
// found without a count of those before it. Its first piece alone looks at states, and writes them from x.
//
// CHUNK    tokens of a piece, at least TAPS - 1
// STEPS    tokens whose loads are on their way
#include "serving.cuh"

static_assert(CHUNK >= HALO, "the first piece alone sees the window");

__device__ __forceinline__ i64 first_piece(const Params &p, i64 i) {
    return (p.starts ? boundary(p, i) : i * p.length) / CHUNK + i;
}

// What is before token `end` of a sequence with this window before it.
__device__ __forceinline__ void store_state_at(const Params &p, i64 state, i64 d, const S *x, i64 end,
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

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ int found;
    i64 d = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    bool inside = d < p.channels, reports = d == 0;
    i64 tokens_of_all = p.starts ? p.length : p.sequences * p.length;
    i64 pieces = tokens_of_all / CHUNK + p.sequences;
    Taps taps(p, inside ? d : 0);
    for (i64 piece = blockIdx.y; piece < pieces; piece += gridDim.y) {
        if (threadIdx.x == 0) found = -1;
        __syncthreads();
        for (i64 i = threadIdx.x; i < p.sequences; i += blockDim.x) {
            if (first_piece(p, i) <= piece && piece < first_piece(p, i + 1)) found = (int)i;
        }
        __syncthreads();
        i64 i = found;
        // Nobody looks for the next piece before all have seen this one.
        __syncthreads();
        if (!inside) continue;
        if (reports && p.starts && piece == 0) {
            for (i64 k = 0; k <= p.sequences; k++) report_boundary(p, k);
        }
        clear_tail(p, d, piece, pieces);
        if (i < 0) continue;
        Tokens tokens = tokens_of(p, i);
        i64 t = (piece - first_piece(p, i)) * CHUNK;
        if (t >= tokens.count) continue;
        int count = (int)(tokens.count - t < CHUNK ? tokens.count - t : CHUNK);
        const S *x = p.x + tokens.row * p.x_stride[0] + d + (tokens.start + t) * p.x_stride[2];
        S *y = p.y + tokens.row * p.y_stride[0] + d + (tokens.start + t) * p.y_stride[2];
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
        States states = states_of(p, i, tokens.count, reports && !t);
        if (states.read < 0) {
            Vector zero = {};
            for (int s = 0; s < count; s++) zero.template store<VECTOR>(y + s * p.y_stride[2]);
            continue;
        }
        if (!t) {
            load_window(p, states, d, window);
            for (i64 k = 0; k < states.ends; k++) {
                i64 state = state_of(p, i, states.end_column + k, reports);
                store_state_at(p, state, d, x, states.end + k * p.block_size, window);
            }
            store_state_at(p, states.write, d, x, tokens.count, window);
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
                y += p.y_stride[2];
                push(before, token);
            }
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (s0 + s < count) {
                Floats token = floats(ahead[s]);
                taps.step(p, d, before, token).template store<VECTOR>(y);
                y += p.y_stride[2];
                push(before, token);
            }
        }
    }
}
