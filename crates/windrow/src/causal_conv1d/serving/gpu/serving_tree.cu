// Serving of trees of drafts: every token after its ancestors, before the first of which is the window. y is not x.
//
// TREE    most tokens of a tree
#include "serving.cuh"

// First child and next sibling of each token, -1 where there is none, and its parent.
struct Links {
    short next[TREE], sibling[TREE], parent[TREE];
    bool wrong;
};

// A link of token t, given in that tensor; one that is wrong is reported.
__device__ __forceinline__ short link_of(const Params &p, i64 i, i64 t, i64 count, i64 given, Rule rule,
                                         Links &links) {
    if (given == -1 || (given > t && given < count)) return (short)given;
    links.wrong = true;
    if (blockIdx.x == 0) report(p.wrong, rule, i * p.tree_columns + t, given, count);
    return -1;
}

// Finds the parents of a tree with `count` tokens, by all threads of the block; false where a link is wrong.
__device__ __forceinline__ bool find_parents(const Params &p, i64 i, i64 count, Links &links) {
    for (i64 t = threadIdx.x; t < count; t += blockDim.x) {
        i64 next = index_at(p.next_token, i * p.next_stride[0] + t * p.next_stride[1], NEXT);
        i64 sibling = index_at(p.next_sibling, i * p.sibling_stride[0] + t * p.sibling_stride[1], SIBLING);
        links.next[t] = link_of(p, i, t, count, next, NEXT_TOKEN, links);
        links.sibling[t] = link_of(p, i, t, count, sibling, NEXT_SIBLING, links);
        links.parent[t] = 0;
    }
    __syncthreads();
    bool wrong = links.wrong;
    if (threadIdx.x == 0) {
        for (int t = 0; t < count; t++) {
            if (links.next[t] >= 0) links.parent[links.next[t]] = (short)t;
            if (links.sibling[t] >= 0) links.parent[links.sibling[t]] = links.parent[t];
        }
    }
    __syncthreads();
    // All threads have read it; the next sequence begins after another barrier.
    if (threadIdx.x == 0) links.wrong = false;
    return !wrong;
}

// VECTOR channels of token t; what is before token 0 is in the state, as it was before this call.
__device__ __forceinline__ Vector token_at(const Params &p, const States &s, Size d, const S *x, i64 t) {
    Vector v = {};
    if (t >= 0) v.template load<VECTOR>(x + t * p.x_stride[2]);
    else if (s.column >= 0) v = load_column(p, column_at(p, s.read, d, s.column + HALO + t));
    return v;
}

// Left to itself, the assembler saves registers, and spills some.
extern "C" __global__ void __launch_bounds__(128, 1) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ Links links;
    Size d = (Size)(blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    bool inside = d < (Size)p.channels;
    if (threadIdx.x == 0) links.wrong = false;
    Taps taps(p, inside ? d : 0);
    if (given(STARTS) && inside) clear_tail(p, d, boundary(p, (Size)p.sequences) + blockIdx.y, gridDim.y);
    for (Size i = blockIdx.y; i < (Size)p.sequences; i += gridDim.y) {
        Tokens tokens = tokens_of(p, i);
        if (tokens.wrong && d == 0) report_boundaries(p, i);
        if (!tokens.count) continue;
        States states = states_of(p, i, tokens.count);
        if (states.wrong && d == 0) report_states(p, i, tokens.count);
        // No thread writes links before all have read those of the sequence before.
        __syncthreads();
        bool is_padding = states.read < 0 || !find_parents(p, i, tokens.count, links);
        if (!is_padding && given(PARENTS) && blockIdx.x == 0) {
            for (i64 t = threadIdx.x; t < tokens.count; t += blockDim.x) {
                i64 at = i * p.parents_stride[0] + t * p.parents_stride[1];
                if (WIDE >> PARENTS & 1) ((i64 *)p.parents)[at] = links.parent[t];
                else ((int *)p.parents)[at] = links.parent[t];
            }
        }
        if (!inside) continue;
        const S *x = p.x + place(p.x_stride, tokens, d);
        Output output = output_of(p, d);
        S *y = output.y + place(output.stride, tokens, d);
        if (is_padding) {
            Vector zero = {};
            for (i64 t = 0; t < tokens.count; t++) zero.template store<VECTOR>(y + t * output.stride[2]);
            continue;
        }
        for (i64 t = 0; t < tokens.count; t++) {
            Vector token = token_at(p, states, d, x, t), line[KEPT];
            i64 from = t;
#pragma unroll UNROLL
            for (int j = HALO - 1; j >= 0; j--) {
                from = from > 0 ? links.parent[from] : from - 1;
                line[j] = token_at(p, states, d, x, from);
            }
            taps.step(p, d, line, token).template store<VECTOR>(y + t * output.stride[2]);
            if (p.windows) {
                push(line, token);
                keep_window(p, states, d, (Size)t, line);
            }
        }
        if (states.write < 0) continue;
        // The state takes tokens in their order. A column is overwritten only after its last read.
        i64 first = given(ACCEPTED) ? 1 - HALO : tokens.count - HALO;
        for (i64 t = first; t < tokens.count; t++) {
            store_column(p, column_at(p, states.write, d, t - first), token_at(p, states, d, x, t));
        }
    }
}
