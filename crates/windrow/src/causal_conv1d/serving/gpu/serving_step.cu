// Serving: steps of one token, and drafts, with channels next to each other everywhere.
//
// Floor: what a state and the tokens take, in and out. `serving.cu` computes the same and more; here a thread has one
// sequence, of TOKENS tokens at most, and no loop. So fewer registers hold it, more blocks run at a time, and all of
// its loads are under way before the first result.
//
// DRAFTS      tokens are drafts, of which a state keeps all; else there is one for each sequence
// TOKENS      most tokens of a sequence
// MIN_BLOCKS  so many blocks run beside each other on sm_90, where registers suffice
#include "serving.cuh"

static_assert(VECTOR > 1 && ALONG_CHANNELS && DENSE && TAPS > 1, "vectors of channels");
static_assert(DRAFTS == (GIVEN >> ACCEPTED & 1), "as their number that was accepted");
static_assert(DRAFTS || (TOKENS == 1 && !(GIVEN >> STARTS & 1)), "a token a sequence");

// Other architectures would spill registers.
#if WINDROW_PTX == 900
#define BOUNDS __launch_bounds__(128, MIN_BLOCKS)
#else
#define BOUNDS __launch_bounds__(128, 1)
#endif

__device__ __forceinline__ int index_past_l1(const void *at, i64 i, Bit bit) {
    return WIDE >> bit & 1 ? (int)load_past_l1((const i64 *)at + i) : load_past_l1((const int *)at + i);
}

// Hints at what sequence i is likely to read, by a thread for each line of the cache, from indices as they are before the
// kernel before is done: past the first cache, and checked for nothing but that they are in bounds.
__device__ __forceinline__ void guess(const Params &p, int i, int d) {
    constexpr int LINE = 128 / (int)sizeof(S);
    if (d % LINE && threadIdx.x) return;
    int state = i, start = 0, column = 0;
    if (given(TABLE)) state = index_past_l1(p.table, times(i, p.table_stride[0]), TABLE);
    if (given(STARTS)) start = index_past_l1(p.starts, times(i, p.starts_stride), STARTS);
    if (DRAFTS) column = index_past_l1(p.accepted, times(i, p.accepted_stride), ACCEPTED) - 1;
    bool inside = state >= 0 && state < p.pool && start >= 0 && (i64)start + TOKENS <= p.length && column >= 0 &&
                  column <= p.state_length - HALO;
    if (!inside) return;
    constexpr int WEIGHTS = LINE * TAPS * (int)sizeof(W::Storage) / 128;
#pragma unroll
    for (int k = 0; k < WEIGHTS; k++) prefetch_l2((const char *)(p.weight + (i64)d * TAPS) + 128 * k);
    const S *x = p.x + place(p.x_stride, {given(STARTS) ? 0 : i, start, 0, false}, d);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) prefetch_l2(x + times(t, p.x_stride[2]));
#pragma unroll
    for (int j = 0; j < HALO; j++) prefetch_l2(column_at(p, state, d, column + j));
}

extern "C" __global__ void BOUNDS KERNEL(const Params p) {
    int d = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR, i = blockIdx.y;
    bool inside = d < (int)p.channels;
    // Only where a kernel may start before the one before is done.
    if (WINDROW_PTX >= 900 && inside && i < (int)p.sequences) guess(p, i, d);
#if WINDROW_PTX >= 900 && EARLY
    // The next step's blocks come before this one may go on: 2 to 4 % less time for 64 and 256 sequences. They, too, wait
    // for this kernel's end, and so for all before it.
    if (!DRAFTS) asm volatile("griddepcontrol.launch_dependents;");
#endif
    wait_for_previous();
    if (!inside) return;
    int end_of_all = given(STARTS) ? boundary(p, (int)p.sequences) : 0;
    if (i < (int)p.sequences) {
        Tokens tokens = tokens_of(p, i);
        if (!DRAFTS) tokens.count = 1;
        i64 state = i, column = 0;
        if (given(TABLE)) state = index_at(p.table, times(i, p.table_stride[0]), TABLE);
        if (DRAFTS) column = index_at(p.accepted, times(i, p.accepted_stride), ACCEPTED) - 1;
        Vector token[TOKENS], window[KEPT];
        const S *x = p.x + place(p.x_stride, tokens, d);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (!DRAFTS || t < tokens.count) token[t].template load<VECTOR>(x + times(t, p.x_stride[2]));
        }
        Taps taps(p, d);
        // As `states_of` has it. Of padding nothing is loaded or changes.
        bool is_null = state < 0 || state == p.null_index;
        bool is_wrong = state >= p.pool;
        if (DRAFTS) is_wrong |= column < 0 || column > p.state_length - HALO || tokens.count > p.most;
        is_wrong &= !is_null;
        bool is_padding = is_null || is_wrong;
        if (is_padding) state = column = -1;
        load_window(p, {state, -1, column}, d, window);
        S *next = column_at(p, state, d, 0);
        if (!is_padding && tokens.count) {
#pragma unroll
            for (int j = 1; j < HALO; j++, next += p.state_stride[2]) store_column(p, next, window[j]);
#pragma unroll
            for (int t = 0; t < TOKENS; t++, next += p.state_stride[2]) {
                if (!DRAFTS || t < tokens.count) store_column(p, next, token[t]);
            }
        }
        Output output = output_of(p, d);
        S *y = output.y + place(output.stride, tokens, d);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            Vector out = taps.step(p, d, window, token[t]);
            if (is_padding) out = Vector{};
            if (!DRAFTS || t < tokens.count) out.template store<VECTOR>(y + times(t, output.stride[2]));
            push(window, token[t]);
        }
        // More tokens than there may be are wrong.
        for (int t = TOKENS; DRAFTS && t < tokens.count; t++) Vector{}.template store<VECTOR>(y + times(t, output.stride[2]));
        if (d == 0 && tokens.wrong) report_boundaries(p, i);
        if (d == 0 && is_wrong && tokens.count) report_states(p, i, tokens.count);
    }
    if (given(STARTS)) clear_tail(p, d, end_of_all + blockIdx.y, gridDim.y);
}
