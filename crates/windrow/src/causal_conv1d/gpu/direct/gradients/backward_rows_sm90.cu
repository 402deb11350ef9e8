// dx and the gradients of weight and bias, on Hopper, where positions lie next to each other in x, dy and
// dx and every row is whole 16-byte vectors; no states, one sequence per row, 2 <= WIDTH <= 9.
//
// Floor: x and dy once in, dx once out. A block walks along `rows` rows of one channel, each from its end to its start,
// TILE positions per step: what dx needs of later positions has just been computed by the next thread, or in the step
// before. The copy engine brings the next tiles meanwhile and takes dx away in pieces of 32 threads, so that registers
// hold only the arithmetic: about 27 issue slots per element, of the 48 that an H200 has per 6 bytes moved.
//
// STAGES           tiles in shared memory
// DWEIGHT, DBIAS   element types of dweight and dbias
#include "copy_engine_sm90.cuh"
#include "row.cuh"

constexpr int WARPS = THREADS / 32, VECTORS = 2, ELEMENTS = VECTORS * VECTOR;
constexpr int TILE = THREADS * ELEMENTS, PIECE = 32 * ELEMENTS;
// Steps whose terms are added one after another; then the block's threads add their sums.
constexpr int CHAIN = 128 / ELEMENTS;
// Inputs before a thread's own, read at once.
constexpr int NEAR = HALO > 4 ? 8 : HALO > 2 ? 4 : HALO;

struct RowsParams {
    Params base;
    DWEIGHT::Storage *dweight;
    DBIAS::Storage *dbias;
    i64 dweight_stride[2], dbias_stride;
    // Rows of the batch that a block takes; sums go to `partial` unless these are all of them.
    i64 rows;
};
static_assert(ROWS_PARAMS_AGREE, "as the host's structure");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) KERNEL(const RowsParams g) {
    wait_for_previous();
    const Params &p = g.base;
    constexpr unsigned ALL = 0xffffffff;
    __shared__ alignas(128) S xs[STAGES][VECTOR + TILE], dys[STAGES][TILE];
    __shared__ alignas(8) unsigned long long full[STAGES];
    // Gradients before the activation of the first positions of each warp, in the last four steps.
    constexpr int HEAD = HALO > 4 ? 8 : 4, TURN = WARPS * HEAD;
    __shared__ alignas(16) float heads[4 * TURN];
    __shared__ float sums[WARPS][WIDTH + 1];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, length = (int)p.length;
    i64 d = blockIdx.x, b = blockIdx.y * g.rows;
    int steps = (length + TILE - 1) / TILE;
    int total = (int)(g.rows < p.batch - b ? g.rows : p.batch - b) * steps;
    if (threadIdx.x == 0) barriers_init(full);
    if (threadIdx.x < HALO) heads[3 * TURN + threadIdx.x] = 0.0f;
    __syncthreads();

    // The first thread fetches tile after tile.
    const S *x = p.x + b * p.x_stride[0] + d * p.x_stride[1];
    const S *dy = p.dy + b * p.dy_stride[0] + d * p.dy_stride[1];
    int fetched = 0, next = steps - 1;
    auto fetch = [&] {
        if (fetched == total) return;
        int slot = fetched % STAGES, start = next * TILE, n = min(length - start, TILE);
        int before = start > 0 ? VECTOR : 0;
        unsigned barrier = shared_address(full + slot);
        barrier_expect(barrier, (before + 2 * n) * sizeof(S));
        unsigned to = shared_address(xs[slot] + VECTOR - before);
        copy_in(to, x + start - before, (before + n) * sizeof(S), barrier);
        copy_in(shared_address(dys[slot]), dy + start, n * sizeof(S), barrier);
        fetched++;
        if (next-- == 0) next = steps - 1, x += p.x_stride[0], dy += p.dy_stride[0];
    };
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int s = 0; s + 1 < STAGES; s++) fetch();
    }

    float weight[WIDTH][1], bias = bias_at(p, d), sum[WIDTH + 1] = {};
    weights_at(p, d, weight);
    if (lane <= WIDTH) sums[warp][lane] = 0.0f;
    // Adds the lanes' sums to the warp's.
    auto add_lanes = [&] {
        float mine = 0.0f;
#pragma unroll
        for (int k = 0; k <= WIDTH; k++) {
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) {
                sum[k] += __shfl_xor_sync(ALL, sum[k], distance);
            }
            mine = lane == k ? sum[k] : mine;
            sum[k] = 0.0f;
        }
        if (lane <= WIDTH) sums[warp][lane] += mine;
    };
    // The positions after a warp's are the next warp's, or the first one's in the step before.
    bool last = warp + 1 == WARPS;
    float *own_head = heads + warp * HEAD;
    const float *later_head = last ? heads : own_head + HEAD;
    unsigned turn = 0, later_turn = last ? 3 * TURN : 0, parity = 0;
    S *dx = p.dx + b * p.dx_stride[0] + d * p.dx_stride[1];
    int slot = 0, step = steps - 1, chain = CHAIN;
#pragma unroll 1
    for (int left = total; left > 0; left--) {
        int start = step * TILE + threadIdx.x * ELEMENTS;
        S *x_own = xs[slot] + VECTOR + threadIdx.x * ELEMENTS;
        S *dy_own = dys[slot] + threadIdx.x * ELEMENTS;
        Vector in[VECTORS] = {}, grad[VECTORS] = {};
        Raw<T, NEAR> near = {};
        barrier_wait(shared_address(full + slot), parity);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (start + v * VECTOR >= length) continue;
            in[v].template load<VECTOR>(x_own + v * VECTOR);
            grad[v].template load<VECTOR>(dy_own + v * VECTOR);
        }
        if (start > 0 && start < length) near.template load<NEAR>(x_own - NEAR);
        float window[HALO + ELEMENTS], dpre[ELEMENTS + HALO];
#pragma unroll
        for (int i = 0; i < HALO; i++) window[i] = near.get(NEAR - HALO + i);
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            window[HALO + i] = in[i / VECTOR].get(i % VECTOR);
            float pre = bias;
#pragma unroll
            for (int k = HALO; k >= 0; k--) pre = fmaf(weight[k][0], window[i + k], pre);
            dpre[i] = grad[i / VECTOR].get(i % VECTOR) * activate_gradient<ACT>(pre);
            sum[WIDTH] += dpre[i];
#pragma unroll
            for (int k = 0; k <= HALO; k++) sum[k] = fmaf(dpre[i], window[i + k], sum[k]);
        }
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < HALO; i++) own_head[turn + i] = dpre[i];
            // Of the step before, whose tile is fetched over next.
            copy_out_wait();
        }
        __syncthreads();
        if (threadIdx.x == 0) fetch();
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            float v = __shfl_down_sync(ALL, dpre[i], 1);
            dpre[ELEMENTS + i] = lane == 31 ? later_head[later_turn + i] : v;
        }
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            float out[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                out[i] = weight[HALO][0] * dpre[v * VECTOR + i];
#pragma unroll
                for (int j = 1; j <= HALO; j++) {
                    out[i] = fmaf(weight[HALO - j][0], dpre[v * VECTOR + i + j], out[i]);
                }
            }
            Vector packed;
            packed.pack(out);
            packed.template store<VECTOR>(dy_own + v * VECTOR);
        }
        copy_out_fence();
        __syncwarp();
        int piece = step * TILE + warp * PIECE;
        if (lane == 0 && piece < length) {
            unsigned from = shared_address(dys[slot] + warp * PIECE);
            copy_out(dx + piece, from, min(length - piece, PIECE) * sizeof(S));
        }
        if (--chain == 0) add_lanes(), chain = CHAIN;
        if (++slot == STAGES) slot = 0, parity ^= 1;
        if (step-- == 0) {
            // Nothing lies after the next row.
            if (threadIdx.x < HALO) heads[turn + threadIdx.x] = 0.0f;
            step = steps - 1, dx += p.dx_stride[0];
        }
        turn = (turn + TURN) % (4 * TURN), later_turn = (later_turn + TURN) % (4 * TURN);
    }
    if (lane == 0) copy_out_wait();

    add_lanes();
    __syncthreads();
    int k = threadIdx.x;
    if (k > WIDTH) return;
    float all = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += sums[w][k];
    if (g.rows < p.batch) {
        // Weights first, biases after them.
        i64 column = k == WIDTH ? p.channels * WIDTH + d : d * WIDTH + k;
        p.partial[blockIdx.y * p.channels * (WIDTH + 1) + column] = all;
    } else if (k == WIDTH) {
        if (g.dbias) g.dbias[d * g.dbias_stride] = DBIAS::from_float(all);
    } else if (g.dweight) {
        g.dweight[d * g.dweight_stride[0] + k * g.dweight_stride[1]] = DWEIGHT::from_float(all);
    }
}
