// Depthwise convolution where channels are neighbours in memory. A lane has VECTOR channels, whose filter it keeps while it
// takes tiles of all images in turn. LANES lanes of neighbouring channels are a row of a block of THREADS.
//
// Constants: those of groups.cuh; VECTOR 1 or 2; LANES, THREADS.

#include "groups.cuh"

constexpr int CHANNELS = LANES * VECTOR; // of a block
constexpr int PITCH = CHANNELS + VECTOR; // of taps in shared memory: few stores meet in a bank
constexpr int TILES = THREADS / LANES;   // of a block at a time

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    __shared__ __align__(16) float filters[TAPS][PITCH];
    const int block = p.channels.divide(blockIdx.x), blocks = p.channels.divide(gridDim.x);
    const int k0 = (blockIdx.x - block * static_cast<int>(p.channels.value)) * CHANNELS;
#pragma unroll 8
    for (int i = threadIdx.x; i < CHANNELS * TAPS; i += THREADS) {
        const int k = i / TAPS;
        filters[i % TAPS][k] = k0 + k < p.k ? to_float(p.filter[static_cast<i64>(k0) * TAPS + i]) : 0;
    }
    __syncthreads();

    const int lane = threadIdx.x % LANES, k = k0 + lane * VECTOR;
    if (threadIdx.x >= TILES * LANES || k >= p.k) return;
    float filter[TAPS][VECTOR], bias[VECTOR];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
        for (int v = 0; v < VECTOR; v++) filter[tap][v] = filters[tap][lane * VECTOR + v];
#pragma unroll
    for (int v = 0; v < VECTOR; v++) bias[v] = bias_at(p, k + v);
    const Element* const x = p.x + p.group_k.divide(k) * p.x_c;

#pragma unroll 1
    for (int unit = block * TILES + threadIdx.x / LANES; unit < p.units; unit += blocks * TILES) {
        const int row = p.columns.divide(unit), image = p.rows.divide(row);
        const int i0 = (row - image * static_cast<int>(p.rows.value)) * TILE_H;
        const int j0 = (unit - row * static_cast<int>(p.columns.value)) * TILE_W;
        const int top = i0 * STRIDE_H - p.pad_h, left = j0 * STRIDE_W - p.pad_w;
        const Element* const from = x + (image * p.x_n + top * p.x_h + left * p.x_w);
        float sum[TILE_H][TILE_W][VECTOR] = {};
#pragma unroll
        for (int i = 0; i < READ_H; i++) {
            if (!is_read(i)) continue;
            const bool row_exists = static_cast<u32>(top + i) < static_cast<u32>(p.h);
            float v[READ_W][VECTOR];
#pragma unroll
            for (int j = 0; j < READ_W; j++)
                load_channels(v[j], from + (i * p.x_h + j * p.x_w),
                              row_exists && static_cast<u32>(left + j) < static_cast<u32>(p.w));
            add_row(sum, v, filter, i);
        }
        Element* const to = p.y + (image * p.y_n + k * p.y_k + i0 * p.y_h + j0 * p.y_w);
        const auto exists = [&](int t, int u) { return i0 + t < p.oh && j0 + u < p.ow; };
        // All loads before the first store, as the compiler keeps their order.
#pragma unroll
        for (int t = 0; t < TILE_H; t++) {
#pragma unroll
            for (int u = 0; u < TILE_W; u++) {
                float added[VECTOR];
                if (RESIDUAL) load_channels(added, beside(p.residual, p.y, to) + (t * p.y_h + u * p.y_w), exists(t, u));
#pragma unroll
                for (int v = 0; v < VECTOR; v++) {
                    sum[t][u][v] += bias[v];
                    if (RESIDUAL) sum[t][u][v] += added[v];
                }
            }
        }
#pragma unroll
        for (int t = 0; t < TILE_H; t++) {
#pragma unroll
            for (int u = 0; u < TILE_W; u++) {
                if (!exists(t, u)) continue;
                float out[VECTOR];
#pragma unroll
                for (int v = 0; v < VECTOR; v++) out[v] = epilogue(sum[t][u][v]);
                Raw<T, VECTOR> raw;
                raw.pack(out);
                raw.template store<VECTOR>(to + (t * p.y_h + u * p.y_w));
            }
        }
    }
}
