// y = act(C + bias), in y's layout.
//
// Floor: C once in, y once out. A block takes a tile through shared memory where positions lie next to
// each other in y, so that it reads along one dimension and writes along the other.
#include "im2col.cuh"

constexpr int TILE = 32;

extern "C" __global__ void __launch_bounds__(256, 1) KERNEL(const GemmParams g) {
    wait_for_previous();
    __shared__ float tile[TILE][TILE + 1];
    const Params &p = g.base;
    int lane = threadIdx.x % TILE, row = threadIdx.x / TILE, rows = blockDim.x / TILE;
    i64 o0 = (i64)blockIdx.y * TILE, t0 = (i64)blockIdx.x * TILE;
    for (i64 b = blockIdx.z; b < p.batch; b += gridDim.z) {
        for (int i = row; i < TILE; i += rows) {
            i64 o = o0 + lane, t = t0 + i;
            if (o >= g.outputs || t >= p.length) continue;
            float sum = g.c[(b * p.length + t) * g.outputs + o] + bias_at(p, o);
            bool padding = p.seq_idx && seq_idx_at(p, b, t) < 0;
            tile[i][lane] = padding ? 0.0f : finish(sum);
        }
        __syncthreads();
        for (int i = row; i < TILE; i += rows) {
            int at = ALONG_CHANNELS ? i : lane, output = ALONG_CHANNELS ? lane : i;
            i64 t = t0 + at, o = o0 + output;
            if (o >= g.outputs || t >= p.length) continue;
            Output out = output_of(p, o);
            out.y[b * out.stride[0] + o * out.stride[1] + t * out.stride[2]] = T::from_float(tile[at][output]);
        }
        __syncthreads();
    }
}
