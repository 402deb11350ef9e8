// A: transposition, causal padding and im2col in one pass.
//
// Floor: x once in, A once out, which is WIDTH times as much. A block takes TILE positions of TILE
// channels through shared memory, so that it reads along one dimension and writes along the other.
//
// SHARED   through shared memory: 1 <= WIDTH <= 9 and one sequence per row; else element by element
#include "im2col.cuh"

constexpr int TILE = 32;

extern "C" __global__ void __launch_bounds__(256, 1) KERNEL(const GemmParams g) {
    wait_for_previous();
    const Params &p = g.base;
    report_boundaries(p);
    int lane = threadIdx.x % TILE, row = threadIdx.x / TILE, rows = blockDim.x / TILE;
    i64 width = width_of(p), terms = width * p.channels;
    i64 c0 = (i64)blockIdx.y * TILE, t0 = (i64)blockIdx.x * TILE;
    for (i64 b = blockIdx.z; b < p.batch; b += gridDim.z) {
#if SHARED
        __shared__ float tile[TILE + WIDTH - 1][TILE + 1];
        Sequence s = sequence_of_index(p, b);
        for (int i = row; i < (ALONG_CHANNELS ? TILE + WIDTH - 1 : TILE); i += rows) {
            for (int j = lane; j < (ALONG_CHANNELS ? TILE : TILE + WIDTH - 1); j += TILE) {
                int at = ALONG_CHANNELS ? i : j, channel = ALONG_CHANNELS ? j : i;
                i64 t = t0 - (WIDTH - 1) + at, c = c0 + channel;
                bool inside = c < p.channels && t < p.length;
                tile[at][channel] = inside ? input_at(p, s, c, t, 0) : 0.0f;
            }
        }
        __syncthreads();
#endif
        i64 c = c0 + lane;
        for (int i = row; i < TILE; i += rows) {
            i64 t = t0 + i;
            if (c >= p.channels || t >= p.length) continue;
            G::Storage *out = g.a + (b * p.length + t) * terms + c;
#if SHARED
#pragma unroll
            for (int k = 0; k < WIDTH; k++) out[k * p.channels] = G::from_float(tile[i + k][lane]);
#else
            Sequence s = sequence_at(p, b, t);
            int own = own_number(p, s, t);
            for (i64 k = 0; k < width; k++) {
                float v = own < 0 ? 0.0f : input_at(p, s, c, t - (width - 1 - k) * dilation_of(p), own);
                out[k * p.channels] = G::from_float(v);
            }
#endif
        }
#if SHARED
        __syncthreads();
#endif
    }
}
