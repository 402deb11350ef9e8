// Convolution in groups of a few channels, as plain sums. A thread computes TILE_H outputs of a column for BLOCK_K
// channels of a group. Most loads of inputs hit a cache; filters are in shared memory. Neighbouring threads have SLOTS
// neighbouring blocks of channels, then the next columns.
//
// Constants: those of groups.cuh, TILE_W 1; GROUP_C, GROUP_K: channels of a group; BLOCK_K, a multiple of 4; SLOTS, THREADS, a
// multiple of it; CHUNK 1 or 4: input channels that are summed together; VECTOR 1 or CHUNK: of them that are loaded as
// one, so that an address does not change the order of sums; VECTOR_OUT 0 or 1: four output channels, and those
// of the residual, are aligned as one; FILTER_LAST 0 or 1: the filter is [k, FILTER_H, FILTER_W, c] or [k, c, FILTER_H, FILTER_W].

#include "groups.cuh"

constexpr int GROUP_TAPS = GROUP_C * TAPS, QUADS = BLOCK_K / 4;
constexpr int BLOCKS_K = (GROUP_K + BLOCK_K - 1) / BLOCK_K; // of a group
constexpr int UNITS = THREADS / SLOTS;                      // of a block at a time

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    __shared__ __align__(16) float filters[GROUP_TAPS][QUADS][SLOTS][4];
    const int block = p.channels.divide(blockIdx.x), blocks = p.channels.divide(gridDim.x);
    const int slot0 = (blockIdx.x - block * static_cast<int>(p.channels.value)) * SLOTS;
    const int slots = p.group_k.divide(p.k) * BLOCKS_K;
#pragma unroll 4
    for (int i = threadIdx.x; i < SLOTS * BLOCK_K * GROUP_TAPS; i += THREADS) {
        const int slot = slot0 + i / (BLOCK_K * GROUP_TAPS), of_block = i / GROUP_TAPS % BLOCK_K, term = i % GROUP_TAPS;
        const int k = slot % BLOCKS_K * BLOCK_K + of_block, c = FILTER_LAST ? term % GROUP_C : term / TAPS;
        const int tap = FILTER_LAST ? term / GROUP_C : term % TAPS;
        const i64 from = static_cast<i64>(slot / BLOCKS_K * GROUP_K + k) * GROUP_TAPS + term;
        const bool exists = slot < slots && k < GROUP_K;
        filters[c * TAPS + tap][of_block / 4][slot - slot0][of_block % 4] = exists ? to_float(p.filter[from]) : 0;
    }
    __syncthreads();

    const int mine = threadIdx.x % SLOTS, slot = slot0 + mine;
    if (slot >= slots) return;
    const int group = slot / BLOCKS_K, k = slot % BLOCKS_K * BLOCK_K;
    const auto exists = [&](int i) { return GROUP_K % BLOCK_K == 0 || k + i < GROUP_K; };
    const Element* const x = p.x + group * GROUP_C * p.x_c;

#pragma unroll 1
    for (int unit = block * UNITS + threadIdx.x / SLOTS; unit < p.units; unit += blocks * UNITS) {
        const int row = p.columns.divide(unit), image = p.rows.divide(row);
        const int i0 = (row - image * static_cast<int>(p.rows.value)) * TILE_H;
        const int j0 = unit - row * static_cast<int>(p.columns.value);
        const int top = i0 * STRIDE_H - p.pad_h, left = j0 * STRIDE_W - p.pad_w;
        const Element* from = x + (image * p.x_n + top * p.x_h + left * p.x_w);
        float sum[TILE_H][BLOCK_K] = {};
#pragma unroll 1
        for (int c = 0; c < GROUP_C; c += CHUNK, from += CHUNK * p.x_c) {
            constexpr int UNROLLED = CHUNK > 1 ? 1 : FILTER_W;
#pragma unroll UNROLLED
            for (int s = 0; s < FILTER_W; s++) {
                const bool column_exists = static_cast<u32>(left + s * DILATION_W) < static_cast<u32>(p.w);
                const Element* const column = from + s * DILATION_W * p.x_w;
                float v[READ_H][CHUNK];
#pragma unroll
                for (int i = 0; i < READ_H; i++) {
                    if (!is_read(i)) continue;
                    const bool row_exists = static_cast<u32>(top + i) < static_cast<u32>(p.h);
#pragma unroll
                    for (int e = 0; e < CHUNK; e += VECTOR) {
                        float loaded[VECTOR];
                        load_channels(loaded, column + (i * p.x_h + e * p.x_c), column_exists && row_exists);
#pragma unroll
                        for (int l = 0; l < VECTOR; l++) v[i][e + l] = loaded[l];
                    }
                }
#pragma unroll
                for (int e = 0; e < CHUNK; e++) {
#pragma unroll
                    for (int r = 0; r < FILTER_H; r++) {
                        const auto* const taps = filters[(c + e) * TAPS + r * FILTER_W + s];
#pragma unroll
                        for (int q = 0; q < QUADS; q++) {
                            const float4 w = *reinterpret_cast<const float4*>(taps[q][mine]);
#pragma unroll
                            for (int t = 0; t < TILE_H; t++) {
                                const float input = v[t * STRIDE_H + r * DILATION_H][e];
                                float* const to = &sum[t][4 * q];
                                to[0] = fmaf(input, w.x, to[0]);
                                to[1] = fmaf(input, w.y, to[1]);
                                to[2] = fmaf(input, w.z, to[2]);
                                to[3] = fmaf(input, w.w, to[3]);
                            }
                        }
                    }
                }
            }
        }

        const int first = group * GROUP_K + k;
        Element* const to = p.y + (image * p.y_n + first * p.y_k + i0 * p.y_h + j0 * p.y_w);
        float bias[BLOCK_K];
#pragma unroll
        for (int i = 0; i < BLOCK_K; i++) bias[i] = exists(i) ? bias_at(p, first + i) : 0;
        // All loads before the first store, as the compiler keeps their order.
#pragma unroll
        for (int t = 0; t < TILE_H; t++) {
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                Raw<T, 4> added = {};
#if RESIDUAL
                const Element* const at = beside(p.residual, p.y, to) + (t * p.y_h + 4 * q * p.y_k);
                if (i0 + t < p.oh && exists(4 * q)) {
#if VECTOR_OUT
                    added.template load<4>(at);
#else
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (exists(4 * q + i)) added.set_stored(i, at[i * p.y_k]);
#endif
                }
#endif
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum[t][4 * q + i] += bias[4 * q + i];
                    if (RESIDUAL) sum[t][4 * q + i] += added.get(i);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < TILE_H; t++) {
            if (i0 + t >= p.oh) break;
#pragma unroll
            for (int q = 0; q < QUADS; q++) {
                if (!exists(4 * q)) continue;
                float out[4];
#pragma unroll
                for (int i = 0; i < 4; i++) out[i] = epilogue(sum[t][4 * q + i]);
                Element* const at = to + (t * p.y_h + 4 * q * p.y_k);
#if VECTOR_OUT
                Raw<T, 4> raw;
                raw.pack(out);
                raw.template store<4>(at);
#else
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (exists(4 * q + i)) at[i * p.y_k] = from_float(out[i]);
#endif
            }
        }
    }
}
