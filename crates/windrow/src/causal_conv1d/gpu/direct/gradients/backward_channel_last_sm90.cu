// dx and partial sums of the gradients of weight and bias on Hopper, of f16/bf16, where channels lie next to each other
// in x, dy and dx and rows of channels are whole 16-byte vectors; no states, one sequence per row, 2 <= WIDTH <= 5.
//
// Floor: x and dy once in, dx once out. A block walks along `chunk` positions of its channels and WIDTH - 1 more, ROWS
// positions per step. The copy engine brings the next tiles meanwhile and takes dx away, which replaces dy in its tile
// and follows WIDTH - 1 positions behind. So registers hold nothing but the walk: about 32 issue slots per element, of
// the 48 that an H200 has per 6 bytes moved.
//
// STAGES   tiles in shared memory
// ROWS     positions of a tile, at most 32
#include "backward_walk.cuh"
#include "copy_engine_sm90.cuh"

constexpr int COLUMNS = THREADS * VECTOR;
extern __shared__ __align__(128) S tiles[][2][ROWS][COLUMNS];

// Takes a tile of x and dy, in whose place dx comes; `INSIDE`: all of its positions lie before `end`.
template <bool INSIDE>
__device__ __forceinline__ void tile(Walk &walk, S (&tile)[2][ROWS][COLUMNS], int at, int end, int stop) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        S *x_own = &tile[0][r][threadIdx.x * VECTOR], *dy_own = &tile[1][r][threadIdx.x * VECTOR];
        Vector in = {}, g = {};
        if (INSIDE || at + r < stop) in.template load<VECTOR>(x_own), g.template load<VECTOR>(dy_own);
        float out[VECTOR];
        walk.step(in, g, 0, INSIDE || at + r < end, out);
        Vector v;
        v.pack(out);
        v.template store<VECTOR>(dy_own);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ alignas(8) unsigned long long full[STAGES];
    int thread = threadIdx.x, length = (int)p.length;
    i64 first = (i64)blockIdx.x * COLUMNS, d = first + thread * VECTOR, b = blockIdx.z;
    int begin = blockIdx.y * (int)p.chunk, end = min(begin + (int)p.chunk, length);
    int stop = min(end + HALO, length), steps = (end + HALO - begin + ROWS - 1) / ROWS;
    unsigned bytes = (unsigned)(p.channels - first < COLUMNS ? p.channels - first : COLUMNS) * sizeof(S);
    const S *x = p.x + b * p.x_stride[0] + first + begin * p.x_stride[2];
    const S *dy = p.dy + b * p.dy_stride[0] + first + begin * p.dy_stride[2];
    S *dx = p.dx + b * p.dx_stride[0] + first + (begin - HALO) * p.dx_stride[2];
    if (thread == 0) barriers_init(full);
    __syncthreads();

    // Thread r of the first warp carries row r of each tile.
    auto fetch = [&](int step) {
        int slot = step % STAGES, row = step * ROWS + thread, rows = min(stop - begin - step * ROWS, ROWS);
        unsigned barrier = shared_address(full + slot);
        if (rows <= 0) return;
        if (thread == 0) barrier_expect(barrier, 2 * rows * bytes);
        __syncwarp();
        if (thread >= rows) return;
        copy_in(shared_address(tiles[slot][0][thread]), x + row * p.x_stride[2], bytes, barrier);
        copy_in(shared_address(tiles[slot][1][thread]), dy + row * p.dy_stride[2], bytes, barrier);
    };
    if (thread < 32) {
#pragma unroll 1
        for (int step = 0; step + 1 < STAGES && step < steps; step++) fetch(step);
    }

    bool active = d < p.channels;
    Walk walk = {};
    if (active) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) walk.bias[i] = bias_at(p, d + i);
        weights_at(p, d, walk.weight);
#pragma unroll
        for (int j = 0; j < HALO; j++) {
            Vector v = {};
            int row = j - HALO;
            if (begin + row >= 0) v.template load<VECTOR>(x + thread * VECTOR + row * p.x_stride[2]);
            v.unpack(walk.window[j]);
        }
    }
    int slot = 0;
    unsigned parity = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        int at = begin + step * ROWS;
        if (at < stop) barrier_wait(shared_address(full + slot), parity);
        if (active && at + ROWS <= end) tile<true>(walk, tiles[slot], at, end, stop);
        else if (active) tile<false>(walk, tiles[slot], at, end, stop);
        copy_out_fence();
        __syncthreads();
        if (thread < 32) {
            // The copies of the step before have read their tile, which is fetched over now.
            copy_out_wait();
            __syncwarp();
            if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);
            int t = at + thread - HALO;
            if (thread < ROWS && t >= begin && t < end) {
                copy_out(dx + (t + HALO - begin) * p.dx_stride[2], shared_address(tiles[slot][1][thread]), bytes);
            }
        }
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    if (thread < 32) copy_out_wait();
    if (!active) return;
    float *partial = p.partial + (b * p.chunks + blockIdx.y) * p.channels * (WIDTH + 1);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++) partial[(d + i) * WIDTH + k] = walk.sum[k][i];
        partial[p.channels * WIDTH + d + i] = walk.sum[WIDTH][i];
    }
}
