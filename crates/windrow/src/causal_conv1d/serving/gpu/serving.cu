// Serving: every sequence walked from its first token to its last. y may be x itself.
//
// Floor of decoding: states once in and once out, x once in, y once out. A thread takes VECTOR channels of a sequence,
// whose window stays in registers. A small step is limited by latency: loads that wait for each other, and instructions
// of a single warp. So whatever a call cannot need is left out when the kernel is compiled, and nothing branches
// between loads.
//
// AHEAD    tokens whose loads are on their way
// SHORT    no sequence has more tokens than that; with one token and no starts each has one
// WINDOWS  the window behind each token is kept
// GUESS    1: what is likely to be read is brought into the cache before the kernel before is done; 2: and loaded at
//          once behind it, so that it need not wait for indices
#include "serving.cuh"

// Only where a kernel may start before the one before is done.
constexpr int GUESSES = WINDROW_PTX >= 900 ? GUESS : 0;
constexpr bool ONE = SHORT && AHEAD == 1 && !(GIVEN >> STARTS & 1);

// What the first sequence of a block is likely to read. `state` is negative if that is nothing.
struct Guess {
    Tokens tokens;
    i64 state, column;
};

__device__ __forceinline__ i64 guess_at(const void *at, i64 i, Bit bit) {
    return WIDE >> bit & 1 ? load_past_l1((const i64 *)at + i) : (i64)load_past_l1((const int *)at + i);
}

// From indices as they are before the kernel before is done: past the first cache, which would keep them, and checked
// for nothing but that they are in bounds.
__device__ __forceinline__ Guess guess(const Params &p, Size i, Size d) {
    Guess g = {{i, 0, ONE ? 1 : (Size)p.length, false}, -1, 0};
    if (i >= (Size)p.sequences || d >= (Size)p.channels) return g;
    i64 first = 0, last = ONE ? 1 : p.length, state = i;
    if (given(STARTS)) {
        first = guess_at(p.starts, times(i, p.starts_stride), STARTS);
        last = guess_at(p.starts, times(i + 1, p.starts_stride), STARTS);
        g.tokens.row = 0;
    }
    if (given(TABLE)) state = guess_at(p.table, times(i, p.table_stride[0]), TABLE);
    if (given(ACCEPTED)) g.column = guess_at(p.accepted, times(i, p.accepted_stride), ACCEPTED) - 1;
    prefetch_l2(p.weight + times(d, p.weight_stride[0]));
    bool inside = 0 <= first && first < last && last <= p.length && 0 <= state && state < p.pool && 0 <= g.column &&
                  g.column <= p.state_length - HALO;
    if (!inside) return g;
    g.tokens.start = (Size)first, g.tokens.count = (Size)(last - first), g.state = state;
    const S *x = p.x + place(p.x_stride, g.tokens, d);
#pragma unroll
    for (int t = 0; t < AHEAD; t++) {
        if (t < g.tokens.count) prefetch_l2(x + times(t, p.x_stride[2]));
    }
#pragma unroll UNROLL
    for (int j = 0; j < HALO; j++) prefetch_l2(column_at(p, state, d, g.column + j));
    return g;
}

__device__ __forceinline__ void load_ahead(const Params &p, const Tokens &tokens, Size d, Vector (&ahead)[AHEAD]) {
    const S *x = p.x + place(p.x_stride, tokens, d);
#pragma unroll
    for (int s = 0; s < AHEAD; s++) {
        if (s < tokens.count) ahead[s].template load<VECTOR>(x + times(s, p.x_stride[2]));
    }
}

// Left to itself, the assembler saves registers: it spills some, and loads the one token of a step after all that is
// computed without it. Drafts of four taps gain from the blocks that there is then room for.
#if SHORT && AHEAD > 1 && TAPS == 4 && VECTOR == 8 && !WINDOWS
#define BOUNDS __launch_bounds__(128, 4)
#else
#define BOUNDS __launch_bounds__(128, 1)
#endif

extern "C" __global__ void BOUNDS KERNEL(const Params p) {
    Size d = (Size)(blockIdx.x * blockDim.x + threadIdx.x) * VECTOR, i = blockIdx.y;
    Guess likely = {{}, -1, 0};
    if (GUESSES) likely = guess(p, i, d);
    wait_for_previous();
    if (d >= (Size)p.channels) return;
    Vector window[KEPT], ahead[AHEAD];
    bool loaded = GUESSES == 2 && likely.state >= 0;
    if (loaded) {
        load_ahead(p, likely.tokens, d, ahead);
        load_window(p, {likely.state, -1, likely.column}, d, window);
    }
    Size end_of_all = given(STARTS) ? boundary(p, (Size)p.sequences) : 0;
    for (; i < (Size)p.sequences; i += gridDim.y, loaded = false) {
        Tokens tokens = tokens_of(p, i);
        if (ONE) tokens.count = 1;
        if (tokens.wrong && d == 0) report_boundaries(p, i);
        bool same = loaded && tokens.start == likely.tokens.start && tokens.count == likely.tokens.count;
        if (!same) load_ahead(p, tokens, d, ahead);
        if (!tokens.count) continue;
        Taps taps(p, d);
        States states = states_of(p, i, tokens.count);
        // Of padding nothing is loaded or changes. What is computed all the same lets loads come before a branch.
        bool is_padding = states.read < 0;
        if (!loaded || states.read != likely.state || states.column != likely.column) {
            load_window(p, states, d, window);
        }
        // Of drafts the state takes all but the first token of the window and what follows.
        bool drafts = given(ACCEPTED) && states.write >= 0;
        S *next = column_at(p, states.write, d, 0);
        if (drafts) {
#pragma unroll UNROLL
            for (int j = 1; j < HALO; j++, next += p.state_stride[2]) store_column(p, next, window[j]);
        }
        const S *x = p.x + place(p.x_stride, tokens, d);
        Output output = output_of(p, d);
        S *y = output.y + place(output.stride, tokens, d);
        for (Size t0 = 0; t0 == 0 || (!SHORT && t0 < tokens.count); t0 += AHEAD) {
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                Size t = t0 + s;
                if (t >= tokens.count) break;
                Vector token = ahead[s];
                if (!SHORT && t + AHEAD < tokens.count) {
                    ahead[s].template load<VECTOR>(x + times(t + AHEAD, p.x_stride[2]));
                }
                Vector out = taps.step(p, d, window, token);
                if (is_padding) out = Vector{};
                out.template store<VECTOR>(y + times(t, output.stride[2]));
                push(window, token);
                if (WINDOWS && !is_padding) keep_window(p, states, d, t, window);
                if (drafts && (HALO || t)) store_column(p, next, token), next += p.state_stride[2];
                if (states.ends && t + 1 == states.end) {
                    store_window(p, state_of<false>(p, states, i, states.end_column), d, window);
                    states.end += p.block_size, states.end_column++, states.ends--;
                }
            }
        }
        if (!given(ACCEPTED)) store_window(p, states.write, d, window);
        if (states.wrong && d == 0) report_states(p, i, tokens.count);
    }
    if (given(STARTS)) clear_tail(p, d, end_of_all + blockIdx.y, gridDim.y);
}
