// dx and partial sums of the gradients of weight and bias where positions lie next to each other in x,
// dy and dx (stride 1 along l), 2 <= WIDTH <= 9, length < 2^30.
//
// Floor: x and dy once in, dx once out. A warp walks along `chunk` positions of one row, from their end to their start:
// what dx needs of later positions has just been computed, and of x only the last WIDTH - 1 elements before a vector
// come from elsewhere. Sums stay in registers. About 35 issue slots per element, of the 48 that an H200 has per 6 bytes
// moved.
//
// MASK    take sequences from the mask; there are no states then
// DX      whether dx is wanted
// AHEAD   blocks of x and dy that are on their way
#include "row.cuh"

// dy times the derivative of the activation, of the elements of a window's vector.
template <int N>
__device__ __forceinline__ void gradients(const float (&window)[HALO + VECTOR], const Vector &dy,
                                          const float (&weight)[WIDTH][1], float bias,
                                          const unsigned (&mask)[VECTOR + HALO], float *out) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        float pre = fmaf(weight[HALO][0], window[HALO + i], bias);
#pragma unroll
        for (int j = 1; j <= HALO; j++) {
            pre = fmaf(weight[HALO - j][0], seen(window[HALO + i - j], mask[i], j), pre);
        }
        out[i] = dy.get(i) * activate_gradient<ACT>(pre);
        if (MASK && mask[i] & 0x8000) out[i] = 0.0f;
    }
}

// The share of element i of a vector in the gradients of weight and bias. Padding has none: its inputs may
// be anything, and 0 times infinity is not 0.
__device__ __forceinline__ void add_term(const float (&window)[HALO + VECTOR],
                                         const unsigned (&mask)[VECTOR + HALO],
                                         const float (&dpre)[VECTOR + HALO], float (&sum)[WIDTH + 1],
                                         int i) {
    if (MASK && mask[i] & 0x8000) return;
    sum[WIDTH] += dpre[i];
#pragma unroll
    for (int j = 0; j <= HALO; j++) {
        sum[HALO - j] = fmaf(dpre[i], seen(window[HALO + i - j], mask[i], j), sum[HALO - j]);
    }
}

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    constexpr unsigned ALL = 0xffffffff;
    int lane = threadIdx.x % 32, length = (int)p.length;
    int part = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    i64 d = (i64)blockIdx.y * blockDim.y + threadIdx.y, b = blockIdx.z;
    if (d >= p.channels || part >= p.chunks) return;
    const S *x = p.x + b * p.x_stride[0] + d * p.x_stride[1];
    const S *dy = p.dy + b * p.dy_stride[0] + d * p.dy_stride[1];
    S *dx = DX ? p.dx + b * p.dx_stride[0] + d * p.dx_stride[1] : nullptr;
    // Vectors start where dx is aligned; the first one of a misaligned row is cut short.
    int lead = (int)((unsigned long long)(DX ? dx : x) / sizeof(S) % VECTOR);
    bool aligned_x = is_aligned<VECTOR>(x - lead), aligned_dy = is_aligned<VECTOR>(dy - lead);
    int begin = part * (int)p.chunk - lead, end = begin + (int)p.chunk;
    end = end < length ? end : length;
    int block = end > begin ? (end - begin - 1) / BLOCK : -1;

    Vector xs[AHEAD + 1], dys[AHEAD + 1];
#pragma unroll
    for (int s = 0; s <= AHEAD; s++) {
        int start = begin + (block - s) * BLOCK + lane * VECTOR;
        bool there = block >= s;
        xs[s] = load_vector(x, there ? start : length, length, aligned_x);
        dys[s] = load_vector(dy, there ? start : length, length, aligned_dy);
    }
    // The inputs before the chunk, for lane 0.
    float before[HALO];
#pragma unroll
    for (int i = 0; i < HALO; i++) {
        int t = begin - HALO + i;
        before[i] = t >= 0 && t < length ? T::to_float(x[t]) : 0.0f;
    }
    if (!MASK && p.initial_states && begin < HALO) {
        Sequence s = sequence_of_index(p, b);
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            int t = begin - HALO + i;
            if (t >= -HALO && t < 0) before[i] = input_at(p, s, d, t, 0);
        }
    }
    // The first vector after the chunk, for lane 0.
    int next_chunk = lane == 0 ? end : length;
    Vector x_after = load_vector(x, next_chunk, length, aligned_x);
    Vector dy_after = load_vector(dy, next_chunk, length, aligned_dy);
    float weight[WIDTH][1], bias = bias_at(p, d);
    weights_at(p, d, weight);
    float after[HALO];
    {
        Tail tail(x_after, xs[0]);
        float window[HALO + VECTOR];
        unsigned mask[VECTOR + HALO];
        fill_window(window, tail, x_after);
        load_mask(p, b, end, mask);
        gradients<HALO>(window, dy_after, weight, bias, mask, after);
#pragma unroll
        for (int i = 0; i < HALO; i++) after[i] = end + i < length ? after[i] : 0.0f;
    }

    float sum[WIDTH + 1] = {};
#pragma unroll 1
    for (; block >= 0; block--) {
        int start = begin + block * BLOCK + lane * VECTOR;
        Tail tail(xs[0], xs[1]);
        float window[HALO + VECTOR], dpre[VECTOR + HALO];
        fill_window(window, tail, xs[0]);
        if (block == 0 && lane == 0) {
#pragma unroll
            for (int i = 0; i < HALO; i++) window[i] = before[i];
        }
        unsigned mask[VECTOR + HALO];
        load_mask(p, b, start, mask);
        gradients<VECTOR>(window, dys[0], weight, bias, mask, dpre);
        if (start >= 0 && start + VECTOR <= length) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) add_term(window, mask, dpre, sum, i);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                bool inside = start + i >= 0 && start + i < length;
                dpre[i] = inside ? dpre[i] : 0.0f;
                if (inside) add_term(window, mask, dpre, sum, i);
            }
        }
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            float v = lane == 0 ? after[i] : dpre[i];
            dpre[VECTOR + i] = __shfl_sync(ALL, v, (lane + 1) % 32);
            after[i] = dpre[i];
        }
        if (DX) {
            float out[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                out[i] = weight[HALO][0] * dpre[i];
#pragma unroll
                for (int j = 1; j <= HALO; j++) {
                    out[i] = fmaf(weight[HALO - j][0], seen(dpre[i + j], mask[i + j], j), out[i]);
                }
            }
            if (!MASK && p.dfinal_states && start + VECTOR > length - HALO) {
                Sequence s = sequence_of_index(p, b);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) {
                    if (start + i < length) out[i] += final_gradient(p, s, d, start + i - (length - HALO));
                }
            }
            store_vector(dx, start, length, out);
        }
#pragma unroll
        for (int s = 0; s < AHEAD; s++) xs[s] = xs[s + 1], dys[s] = dys[s + 1];
        int next = block - 1 - AHEAD;
        int start_next = next >= 0 ? begin + next * BLOCK + lane * VECTOR : length;
        xs[AHEAD] = load_vector(x, start_next, length, aligned_x);
        dys[AHEAD] = load_vector(dy, start_next, length, aligned_dy);
    }

    float mine = 0.0f;
#pragma unroll
    for (int k = 0; k <= WIDTH; k++) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            sum[k] += __shfl_xor_sync(ALL, sum[k], distance);
        }
        mine = lane == k ? sum[k] : mine;
    }
    // Weights first, biases after them.
    if (lane <= WIDTH) {
        i64 column = lane == WIDTH ? p.channels * WIDTH + d : d * WIDTH + lane;
        p.partial[(b * p.chunks + part) * p.channels * (WIDTH + 1) + column] = mine;
    }
}
