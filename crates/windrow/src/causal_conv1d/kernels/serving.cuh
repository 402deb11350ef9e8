// Serving: parameters, and what each sequence reads and writes. Of a sequence with a wrong index nothing is used.
//
// TAPS             number of taps
// VECTOR           channels of a thread; more than one where they lie next to each other in x and y
// ALONG_CHANNELS   channels lie next to each other in the states
// WINDOWS          the window behind each token is kept
#pragma once
#include "parameters.cuh"

struct Params {
    S *y;
    const S *x;
    S *states;
    const W::Storage *weight;
    const void *bias;
    const void *starts, *table, *accepted, *initial_block, *last_block, *first_block, *tokens_before;
    const void *slots, *next_token, *next_sibling;
    const unsigned char *flags;
    S *windows;
    void *parents;
    WrongIndex *wrong;
    i64 sequences, channels, length, state_length, pool, blocks, block_size, slot_count;
    // Most tokens of a sequence that states of drafts, windows and trees have room for.
    i64 most;
    i64 tree_columns;
    // A null index beside the negative ones; -1 if there is none.
    i64 null_index;
    // A bit for each tensor of indices that are i64, not int, in the order of `Bit`.
    i64 wide;
    // [b, d, l], [pool, d, state_length], [d, width], [sequences, blocks]
    i64 x_stride[3], y_stride[3], state_stride[3], weight_stride[2], bias_stride, table_stride[2];
    i64 starts_stride, accepted_stride, initial_stride, last_stride, first_stride, before_stride, flags_stride;
    // [slots, steps, d, columns], [sequences], [sequences, columns]
    i64 window_stride[4], slots_stride, next_stride[2], sibling_stride[2], parents_stride[2];
};
static_assert(PARAMS_AGREE, "as the host's structure");

enum Bit { STARTS, TABLE, ACCEPTED, INITIAL, LAST, FIRST, BEFORE, SLOTS, NEXT, SIBLING, PARENTS };

constexpr int HALO = TAPS - 1;
// An array has an element at least.
constexpr int KEPT = HALO ? HALO : 1;
// Loops over more taps than nine are not unrolled.
constexpr int UNROLL = WIDTH ? TAPS : 1;
typedef Raw<T, VECTOR> Vector;

__device__ __forceinline__ i64 index_at(const Params &p, const void *at, i64 i, Bit bit) {
    return p.wide >> bit & 1 ? ((const i64 *)at)[i] : (i64)((const int *)at)[i];
}

// Entry i of query_start_loc, held within 0 and the number of tokens.
__device__ __forceinline__ i64 boundary(const Params &p, i64 i) {
    i64 v = index_at(p, p.starts, i * p.starts_stride, STARTS);
    return v < 0 ? 0 : v > p.length ? p.length : v;
}

// Reports an entry of query_start_loc that is smaller than the one before or too large.
__device__ __forceinline__ void report_boundary(const Params &p, i64 i) {
    i64 given = index_at(p, p.starts, i * p.starts_stride, STARTS);
    i64 least = i ? index_at(p, p.starts, (i - 1) * p.starts_stride, STARTS) : 0;
    if (given < least || given > (i ? p.length : 0)) {
        report(p.wrong, QUERY_START_LOC, i, given, p.length);
    }
}

// Tokens of one sequence in a row of x.
struct Tokens {
    i64 row, start, count;
};

__device__ __forceinline__ Tokens tokens_of(const Params &p, i64 i) {
    if (!p.starts) return {i, 0, p.length};
    i64 start = boundary(p, i), end = boundary(p, i + 1);
    return {0, start, end > start ? end - start : 0};
}

// States of one sequence: negative ones are null.
struct States {
    i64 read, write;
    // First column of the window; negative for zeros.
    i64 column;
    // Ends of blocks: tokens before the first, how many there are, and the column of the first.
    i64 end, ends, end_column;
    // Of the windows behind tokens.
    i64 slot;
};

// Column of the table; negative if it is wrong.
__device__ __forceinline__ i64 column_of(const Params &p, const void *columns, i64 at, Bit bit, Rule rule,
                                         i64 i, bool reports) {
    if (!columns) return 0;
    i64 column = index_at(p, columns, at, bit);
    if (column >= 0 && column < p.blocks) return column;
    if (reports) report(p.wrong, rule, i, column, p.blocks);
    return -1;
}

__device__ __forceinline__ i64 state_of(const Params &p, i64 i, i64 column, bool reports) {
    if (!p.table) return i;
    i64 state = index_at(p, p.table, i * p.table_stride[0] + column * p.table_stride[1], TABLE);
    if (state == p.null_index || state < 0) return -1;
    if (state < p.pool) return state;
    if (reports) report(p.wrong, STATE_INDICES, i * p.blocks + column, state, p.pool);
    return -1;
}

// The states of sequence i, which has `tokens` tokens; one thread of all reports what is wrong.
__device__ __forceinline__ States states_of(const Params &p, i64 i, i64 tokens, bool reports) {
    States s = {-1, -1, 0, 0, 0, 0, i};
    i64 initial = column_of(p, p.initial_block, i * p.initial_stride, INITIAL, INITIAL_BLOCK, i, reports);
    i64 last = column_of(p, p.last_block, i * p.last_stride, LAST, LAST_BLOCK, i, reports);
    if (initial < 0 || last < 0) return s;
    i64 read = state_of(p, i, initial, reports);
    if (read < 0) return s;
    s.write = p.last_block || p.initial_block ? state_of(p, i, last, reports) : read;
    if (p.accepted) {
        i64 accepted = index_at(p, p.accepted, i * p.accepted_stride, ACCEPTED);
        i64 most = p.state_length - HALO + 1;
        if (accepted < 1 || accepted > most) {
            if (reports) report(p.wrong, NUM_ACCEPTED_TOKENS, i, accepted, most);
            return s;
        }
        s.column = accepted - 1;
    }
    if (tokens > p.most) {
        if (reports) report(p.wrong, QUERY_START_LOC, i + 1, tokens, p.length);
        return s;
    }
    if (p.slots) {
        s.slot = index_at(p, p.slots, i * p.slots_stride, SLOTS);
        if (s.slot < 0 || s.slot >= p.slot_count) {
            if (reports) report(p.wrong, INTERMEDIATE_INDICES, i, s.slot, p.slot_count);
            return s;
        }
    }
    if (p.flags && !p.flags[i * p.flags_stride]) s.column = -1;
    if (p.first_block) {
        i64 first = column_of(p, p.first_block, i * p.first_stride, FIRST, FIRST_BLOCK, i, reports);
        i64 before = index_at(p, p.tokens_before, i * p.before_stride, BEFORE);
        if (before < 0 && reports) report(p.wrong, TOKENS_BEFORE, i, before, 0);
        if (first > last && reports) report(p.wrong, FIRST_BLOCK, i, first, last + 1);
        if (first < 0 || first > last || before < 0) return s;
        typedef unsigned long long u64;
        i64 end = (i64)(((u64)before + (u64)tokens - 1) / (u64)p.block_size * (u64)p.block_size - (u64)before);
        if (end > 0) {
            i64 ends = (i64)(((u64)end + (u64)p.block_size - 1) / (u64)p.block_size);
            s.ends = ends < last - first ? ends : last - first;
            s.end = end - (s.ends - 1) * p.block_size;
            s.end_column = last - s.ends;
        }
    }
    s.read = read;
    return s;
}

// VECTOR channels of a column.
__device__ __forceinline__ Vector load_column(const Params &p, i64 state, i64 d, i64 column) {
    const S *from = p.states + state * p.state_stride[0] + d * p.state_stride[1] + column * p.state_stride[2];
    Vector v = {};
    if (ALONG_CHANNELS) {
        v.template load<VECTOR>(from);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) v.set_stored(i, from[i * p.state_stride[1]]);
    }
    return v;
}

__device__ __forceinline__ void store_column(const Params &p, i64 state, i64 d, i64 column, const Vector &v) {
    S *to = p.states + state * p.state_stride[0] + d * p.state_stride[1] + column * p.state_stride[2];
    if (ALONG_CHANNELS) {
        v.template store<VECTOR>(to);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) to[i * p.state_stride[1]] = v.stored(i);
    }
}

// The window of a sequence, oldest token first.
__device__ __forceinline__ void load_window(const Params &p, const States &s, i64 d, Vector (&window)[KEPT]) {
#pragma unroll UNROLL
    for (int j = 0; j < HALO; j++) {
        window[j] = Vector{};
        if (s.column >= 0) window[j] = load_column(p, s.read, d, s.column + j);
    }
}

__device__ __forceinline__ void store_window(const Params &p, i64 state, i64 d, const Vector (&window)[KEPT]) {
    if (state < 0) return;
#pragma unroll UNROLL
    for (int j = 0; j < HALO; j++) store_column(p, state, d, j, window[j]);
}

// The window behind token t, oldest token first.
__device__ __forceinline__ void keep_window(const Params &p, const States &s, i64 d, i64 t,
                                            const Vector (&window)[KEPT]) {
    S *to = p.windows + s.slot * p.window_stride[0] + t * p.window_stride[1] + d * p.window_stride[2];
#pragma unroll UNROLL
    for (int j = 0; j < HALO; j++) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            to[i * p.window_stride[2] + j * p.window_stride[3]] = window[j].stored(i);
        }
    }
}

// Tokens as numbers, for sums over many of them.
struct Floats {
    float values[VECTOR];

    __device__ __forceinline__ float get(int i) const { return values[i]; }
};

__device__ __forceinline__ Floats floats(const Vector &v) {
    Floats f;
    v.unpack(f.values);
    return f;
}

// Lets the oldest token go.
template <class V> __device__ __forceinline__ void push(V (&window)[KEPT], const V &token) {
#pragma unroll UNROLL
    for (int j = 0; j + 1 < HALO; j++) window[j] = window[j + 1];
    if (HALO) window[KEPT - 1] = token;
}

// Weights and bias of VECTOR channels.
struct Taps {
#if WIDTH
    float weight[TAPS][VECTOR];
#endif
    float bias[VECTOR];

    __device__ __forceinline__ Taps(const Params &p, i64 d) {
#if WIDTH
        weights_at(p, d, weight);
#endif
#pragma unroll
        for (int i = 0; i < VECTOR; i++) bias[i] = bias_at(p, d + i);
    }

    // y of the token behind the window.
    template <class V>
    __device__ __forceinline__ Vector step(const Params &p, i64 d, const V (&window)[KEPT],
                                           const V &token) const {
        float out[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            float sum = bias[i];
#pragma unroll UNROLL
            for (int k = 0; k < TAPS; k++) {
#if WIDTH
                float w = weight[k][i];
#else
                float w = weight_at(p, d + i, k);
#endif
                sum = fmaf(w, k < HALO ? window[k].get(i) : token.get(i), sum);
            }
            out[i] = activate<ACT, true>(sum);
        }
        Vector v = {};
        v.pack(out);
        return v;
    }
};

// Makes y zero in tokens of nobody, every `step`th from `first` on.
__device__ __forceinline__ void clear_tail(const Params &p, i64 d, i64 first, i64 step) {
    if (!p.starts) return;
    Vector zero = {};
    for (i64 t = boundary(p, p.sequences) + first; t < p.length; t += step) {
        zero.template store<VECTOR>(p.y + d * p.y_stride[1] + t * p.y_stride[2]);
    }
}
