// Serving: parameters, and what each sequence reads and writes. Of a sequence with a wrong index nothing is used.
//
// TAPS             number of taps
// VECTOR           channels of a thread; more than one where they lie next to each other in x and y, and where sizes and
//                  strides fit an int
// ALONG_CHANNELS   channels lie next to each other in the states
// DENSE            weight and bias are dense and begin at multiples of 16 bytes; with more channels than one
// GIVEN            a bit for each tensor of indices or flags that is given, in the order of `Bit`
// WIDE             a bit for each of them that is i64, not int
// LIMITED          `most` can be less than the tokens of a sequence
#pragma once
#include "norm.cuh"

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
    // The maximum number of tokens of a sequence that states of drafts, windows and trees can hold.
    i64 most;
    i64 tree_columns;
    // A null index in addition to negative ones; -1 if there is none.
    i64 null_index;
    // [b, d, l], [pool, d, state_length], [d, width], [sequences, blocks]
    i64 x_stride[3], y_stride[3], state_stride[3], weight_stride[2], bias_stride, table_stride[2];
    i64 starts_stride, accepted_stride, initial_stride, last_stride, first_stride, before_stride, flags_stride;
    // [slots, steps, d, columns], [sequences], [sequences, columns]
    i64 window_stride[4], slots_stride, next_stride[2], sibling_stride[2], parents_stride[2];
    // The outputs behind y: see `output_of`.
    S *further_y[2];
    i64 further_stride[2][3], further_first[2];
    // The norm of heads: see `normalise`.
    i64 norm_channels;
    float epsilon;
};
static_assert(PARAMS_AGREE, "as the host's structure");

enum Bit { STARTS, TABLE, ACCEPTED, INITIAL, LAST, FIRST, BEFORE, SLOTS, NEXT, SIBLING, PARENTS, FLAGS };

__device__ __forceinline__ constexpr bool given(Bit bit) { return GIVEN >> bit & 1; }

constexpr int HALO = TAPS - 1;
// An array has an element at least.
constexpr int KEPT = HALO ? HALO : 1;
// Loops over more taps than nine are not unrolled.
constexpr int UNROLL = WIDTH ? TAPS : 1;
typedef Raw<T, VECTOR> Vector;

// A number of tokens, sequences or channels, or a stride; places in memory are i64 everywhere.
#if VECTOR > 1
typedef int Size;
#else
typedef i64 Size;
#endif

__device__ __forceinline__ i64 times(Size i, i64 stride) {
#if VECTOR > 1
    return multiply_wide(i, (int)stride);
#else
    return i * stride;
#endif
}

__device__ __forceinline__ i64 index_at(const void *at, i64 i, Bit bit) {
    return WIDE >> bit & 1 ? ((const i64 *)at)[i] : (i64)((const int *)at)[i];
}

// An entry of query_start_loc, held within 0 and the number of tokens.
__device__ __forceinline__ Size within(const Params &p, i64 v) {
    return (Size)(v < 0 ? 0 : v > p.length ? p.length : v);
}

__device__ __forceinline__ Size boundary(const Params &p, Size i) {
    return within(p, index_at(p.starts, times(i, p.starts_stride), STARTS));
}

// Reports an entry of query_start_loc that is smaller than the one before or too large.
__device__ __forceinline__ void report_boundary(const Params &p, Size i) {
    i64 here = index_at(p.starts, times(i, p.starts_stride), STARTS);
    i64 least = i ? index_at(p.starts, times(i - 1, p.starts_stride), STARTS) : 0;
    if (here < least || here > (i ? p.length : 0)) report(p.wrong, QUERY_START_LOC, i, here, p.length);
}

__device__ __forceinline__ void report_boundaries(const Params &p, Size i) {
    if (i == 0) report_boundary(p, 0);
    report_boundary(p, i + 1);
}

// Tokens of one sequence in a row of x.
struct Tokens {
    Size row, start, count;
    // Its end, or its start if it is the first, is wrong.
    bool wrong;
};

__device__ __forceinline__ Tokens tokens_of(const Params &p, Size i) {
    if (!given(STARTS)) return {i, 0, (Size)p.length, false};
    i64 first = index_at(p.starts, times(i, p.starts_stride), STARTS);
    i64 last = index_at(p.starts, times(i + 1, p.starts_stride), STARTS);
    bool wrong = last < first || last > p.length || (i == 0 && first != 0);
    Size start = within(p, first), end = within(p, last);
    return {0, start, end > start ? end - start : 0, wrong};
}

// The first of VECTOR channels of a token in x or y.
__device__ __forceinline__ i64 place(const i64 (&stride)[3], const Tokens &tokens, Size d) {
    i64 channel = VECTOR > 1 ? d : times(d, stride[1]);
    return times(tokens.row, stride[0]) + channel + times(tokens.start, stride[2]);
}

// States of one sequence: negative ones are null, all of those of padding, which has no ends of blocks.
struct States {
    i64 read, write;
    // First column of the window; negative for zeros.
    i64 column;
    // Ends of blocks: tokens before the first, how many there are, and the column of the first.
    i64 end, ends, end_column;
    // Of the windows after tokens.
    i64 slot;
    // An index breaks a rule.
    bool wrong;
};

// Notes that an index breaks a rule, and tells the host if asked to: long code that nothing waits for elsewhere.
template <bool TELL>
__device__ __forceinline__ void found_wrong(const Params &p, States &s, Rule rule, i64 position, i64 index, i64 limit) {
    s.wrong = true;
    if (TELL) report(p.wrong, rule, position, index, limit);
}

// Column of the table; negative if it is wrong.
template <bool TELL>
__device__ __forceinline__ i64 column_of(const Params &p, States &s, const void *columns, i64 at, Bit bit, Rule rule,
                                         Size i) {
    if (!given(bit)) return 0;
    i64 column = index_at(columns, at, bit);
    if (column >= 0 && column < p.blocks) return column;
    found_wrong<TELL>(p, s, rule, i, column, p.blocks);
    return -1;
}

template <bool TELL> __device__ __forceinline__ i64 state_of(const Params &p, States &s, Size i, i64 column) {
    if (!given(TABLE)) return i;
    i64 state = index_at(p.table, times(i, p.table_stride[0]) + column * p.table_stride[1], TABLE);
    if (state == p.null_index || state < 0) return -1;
    if (state < p.pool) return state;
    found_wrong<TELL>(p, s, STATE_INDICES, times(i, p.blocks) + column, state, p.pool);
    return -1;
}

// The states of sequence i, which has `tokens` tokens.
template <bool TELL = false>
__device__ __forceinline__ States states_of(const Params &p, Size i, Size tokens) {
    States s = {-1, -1, -1, 0, 0, 0, i, false};
    i64 initial = column_of<TELL>(p, s, p.initial_block, times(i, p.initial_stride), INITIAL, INITIAL_BLOCK, i);
    i64 last = column_of<TELL>(p, s, p.last_block, times(i, p.last_stride), LAST, LAST_BLOCK, i);
    if (initial < 0 || last < 0) return s;
    i64 read = state_of<TELL>(p, s, i, initial);
    if (read < 0) return s;
    i64 write = given(LAST) || given(INITIAL) ? state_of<TELL>(p, s, i, last) : read, column = 0;
    if (given(ACCEPTED)) {
        i64 accepted = index_at(p.accepted, times(i, p.accepted_stride), ACCEPTED);
        i64 most = p.state_length - HALO + 1;
        if (accepted < 1 || accepted > most) {
            found_wrong<TELL>(p, s, NUM_ACCEPTED_TOKENS, i, accepted, most);
            return s;
        }
        column = accepted - 1;
    }
    if (LIMITED && tokens > p.most) {
        found_wrong<TELL>(p, s, QUERY_START_LOC, i + 1, tokens, p.length);
        return s;
    }
    if (given(SLOTS)) {
        s.slot = index_at(p.slots, times(i, p.slots_stride), SLOTS);
        if (s.slot < 0 || s.slot >= p.slot_count) {
            found_wrong<TELL>(p, s, INTERMEDIATE_INDICES, i, s.slot, p.slot_count);
            return s;
        }
    }
    if (given(FLAGS) && !p.flags[times(i, p.flags_stride)]) column = -1;
    if (given(FIRST)) {
        i64 first = column_of<TELL>(p, s, p.first_block, times(i, p.first_stride), FIRST, FIRST_BLOCK, i);
        i64 before = index_at(p.tokens_before, times(i, p.before_stride), BEFORE);
        if (before < 0) found_wrong<TELL>(p, s, TOKENS_BEFORE, i, before, 0);
        if (first > last) found_wrong<TELL>(p, s, FIRST_BLOCK, i, first, last + 1);
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
    s.read = read, s.write = write, s.column = column;
    return s;
}

// Tells what states_of found, and what is wrong with columns on the way.
__device__ __forceinline__ void report_states(const Params &p, Size i, Size tokens) {
    States s = states_of<true>(p, i, tokens);
    for (i64 k = 0; k < s.ends; k++) state_of<true>(p, s, i, s.end_column + k);
}

// The first of VECTOR channels of a column.
__device__ __forceinline__ S *column_at(const Params &p, i64 state, Size d, i64 column) {
    i64 channel = ALONG_CHANNELS ? d : times(d, p.state_stride[1]);
    return p.states + times((Size)state, p.state_stride[0]) + channel + column * p.state_stride[2];
}

__device__ __forceinline__ Vector load_column(const Params &p, const S *from) {
    Vector v = {};
    if (ALONG_CHANNELS) {
        v.template load<VECTOR>(from);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) v.set_stored(i, from[i * p.state_stride[1]]);
    }
    return v;
}

__device__ __forceinline__ void store_column(const Params &p, S *to, const Vector &v) {
    if (ALONG_CHANNELS) {
        v.template store<VECTOR>(to);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) to[i * p.state_stride[1]] = v.stored(i);
    }
}

// The window of a sequence, oldest token first.
__device__ __forceinline__ void load_window(const Params &p, const States &s, Size d, Vector (&window)[KEPT]) {
    const S *from = column_at(p, s.read, d, given(ACCEPTED) ? s.column : 0);
#pragma unroll UNROLL
    for (int j = 0; j < HALO; j++, from += p.state_stride[2]) {
        window[j] = Vector{};
        if (s.column >= 0) window[j] = load_column(p, from);
    }
}

__device__ __forceinline__ void store_window(const Params &p, i64 state, Size d, const Vector (&window)[KEPT]) {
    if (state < 0) return;
    S *to = column_at(p, state, d, 0);
#pragma unroll UNROLL
    for (int j = 0; j < HALO; j++, to += p.state_stride[2]) store_column(p, to, window[j]);
}

// The window after token t, oldest token first.
__device__ __forceinline__ void keep_window(const Params &p, const States &s, Size d, Size t,
                                            const Vector (&window)[KEPT]) {
    S *to = p.windows + s.slot * p.window_stride[0] + times(t, p.window_stride[1]) + times(d, p.window_stride[2]);
    if (VECTOR > 1 && p.window_stride[2] == HALO && p.window_stride[3] == 1 && is_aligned<VECTOR>(to)) {
        Raw<T, VECTOR * KEPT> all = {};
#pragma unroll
        for (int i = 0; i < VECTOR * HALO; i++) all.set_stored(i, window[i % KEPT].stored(i / KEPT));
        all.template store<VECTOR>(to);
        return;
    }
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

// The number of elements of the largest accesses that begin at multiples of their size.
template <class E> constexpr int access(int elements) {
    int bytes = elements * (int)sizeof(typename E::Storage);
    int most = bytes & -bytes;
    return (most < 16 ? most : 16) / (int)sizeof(typename E::Storage);
}

// Weights and bias of VECTOR channels.
struct Taps {
#if WIDTH
    float weight[TAPS][VECTOR];
#endif
    float bias[VECTOR];

    __device__ __forceinline__ Taps(const Params &p, Size d) {
#if DENSE
        // Without a branch: they come while indices do.
        Raw<W, VECTOR * TAPS> raw;
        raw.template load<access<W>(VECTOR * TAPS)>(p.weight + (i64)d * TAPS);
#pragma unroll
        for (int i = 0; i < VECTOR * TAPS; i++) weight[i % TAPS][i / TAPS] = raw.get(i);
#elif WIDTH
        weights_at(p, d, weight);
#endif
#if DENSE && defined(BIAS)
        Raw<BIAS, VECTOR> values;
        values.template load<access<BIAS>(VECTOR)>((const BIAS::Storage *)p.bias + d);
        values.unpack(bias);
#else
#pragma unroll
        for (int i = 0; i < VECTOR; i++) bias[i] = bias_at(p, d + i);
#endif
    }

    // y of the token after the window. All threads of a head call it together.
    template <class V>
    __device__ __forceinline__ Vector step(const Params &p, Size d, const V (&window)[KEPT],
                                           const V &token) const {
        float out[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const auto tap = [&](int k) {
#if WIDTH
                return weight[k][i];
#else
                return weight_at(p, d + i, k);
#endif
            };
            float sum = sum_taps<WIDTH>(
                bias[i], TAPS, tap, [&](int k) { return k < HALO ? window[k].get(i) : token.get(i); });
            out[i] = activate<ACT, true>(sum);
        }
        Vector v = {};
        v.pack(out);
        normalise(p, d, v);
        return v;
    }
};

// Makes y zero in tokens of no sequence, every `step`th from `first` on.
__device__ __forceinline__ void clear_tail(const Params &p, Size d, Size first, Size step) {
    Vector zero = {};
    Output out = output_of(p, d);
    for (Size t = first; t < (Size)p.length; t += step) {
        zero.template store<VECTOR>(out.y + place(out.stride, {0, t, 0, false}, d));
    }
}
