// Depthwise convolution where the pixels of a channel are neighbours in memory. A block computes BLOCK_H x BLOCK_W threads'
// tiles of PLANES planes (images of a channel), whose inputs it copies to shared memory first.
//
// Constants: those of groups.cuh, TILE_W a multiple of 4; BLOCK_H, BLOCK_W, PLANES, THREADS; LANES that load a row
// together; VECTOR_OUT 0 or 1: four outputs of a row, and of
// the residual, are aligned as one.

#include "groups.cuh"

constexpr int OUT_H = BLOCK_H * TILE_H, OUT_W = BLOCK_W * TILE_W;
constexpr int COPY_H = (OUT_H - 1) * STRIDE_H + (FILTER_H - 1) * DILATION_H + 1;
constexpr int COPY_W = ((OUT_W - 1) * STRIDE_W + (FILTER_W - 1) * DILATION_W + 4) / 4 * 4;
constexpr int FILTER_PITCH = (TAPS + 3) / 4 * 4;
constexpr int READ_VECTORS = (READ_W + 3) / 4;

__device__ __forceinline__ void load_four(float* to, const float* from) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Copies inputs of this number of planes, COPIES of a thread at a time: so COPIES loads are under way.
__device__ __forceinline__ void copy_inputs(const Params& p, const Element* const* planes, float* inputs, int count,
                                            int top, int left) {
    constexpr int PARTS = (COPY_W + LANES - 1) / LANES, GROUPS = THREADS / LANES, COPIES = 8;
    constexpr int PIECES = PLANES * COPY_H * PARTS; // of rows
    const int lane = threadIdx.x % LANES;
#pragma unroll 1
    for (int first = threadIdx.x / LANES; first < PIECES; first += GROUPS * COPIES) {
        Element v[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int piece = first + i * GROUPS, row = piece / PARTS, column = piece % PARTS * LANES + lane;
            const int plane = row / COPY_H, y = row % COPY_H;
            const bool exists = piece < PIECES && plane < count && static_cast<u32>(top + y) < static_cast<u32>(p.h) &&
                                static_cast<u32>(left + column) < static_cast<u32>(p.w);
            v[i] = exists ? planes[plane][y * p.x_h + column * p.x_w] : from_float(0);
        }
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int piece = first + i * GROUPS, column = piece % PARTS * LANES + lane;
            if (piece < PIECES && column < COPY_W) inputs[piece / PARTS * COPY_W + column] = to_float(v[i]);
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    // One more row: vectors of the last one may end after it.
    __shared__ __align__(16) float inputs[PLANES * COPY_H * COPY_W + 4 * READ_VECTORS];
    __shared__ __align__(16) float filters[PLANES][FILTER_PITCH];
    __shared__ const Element* planes[PLANES];
    const int block_row = p.columns.divide(blockIdx.x), plane0 = p.rows.divide(block_row) * PLANES;
    const int i0 = (block_row - p.rows.divide(block_row) * static_cast<int>(p.rows.value)) * OUT_H;
    const int j0 = (blockIdx.x - block_row * static_cast<int>(p.columns.value)) * OUT_W;

    const auto channel_of = [&](int plane) { return plane - p.channels.divide(plane) * p.k; };
    const int top = i0 * STRIDE_H - p.pad_h, left = j0 * STRIDE_W - p.pad_w;
    if (threadIdx.x < PLANES) {
        const int plane = plane0 + threadIdx.x;
        const i64 image = p.channels.divide(plane), channel = p.group_k.divide(channel_of(plane));
        planes[threadIdx.x] = p.x + (image * p.x_n + channel * p.x_c + top * p.x_h + left * p.x_w);
    }
    __syncthreads();
    copy_inputs(p, planes, inputs, min(PLANES, p.units - plane0), top, left);
    for (int i = threadIdx.x; i < PLANES * TAPS; i += THREADS) {
        const int plane = plane0 + i / TAPS, tap = i % TAPS;
        if (plane < p.units) filters[i / TAPS][tap] = to_float(p.filter[static_cast<i64>(channel_of(plane)) * TAPS + tap]);
    }
    __syncthreads();

    const int mine = threadIdx.x / (BLOCK_H * BLOCK_W), place = threadIdx.x % (BLOCK_H * BLOCK_W);
    const int plane = plane0 + mine, i = place / BLOCK_W * TILE_H, j = place % BLOCK_W * TILE_W;
    if (mine >= PLANES || plane >= p.units || i0 + i >= p.oh || j0 + j >= p.ow) return;
    float filter[FILTER_PITCH][1];
#pragma unroll
    for (int tap = 0; tap < FILTER_PITCH; tap += 4) load_four(filter[tap], &filters[mine][tap]);
    const float(&taps)[TAPS][1] = reinterpret_cast<const float(&)[TAPS][1]>(filter);

    float sum[TILE_H][TILE_W][1] = {};
    const float* const from = inputs + (mine * COPY_H + i * STRIDE_H) * COPY_W + j * STRIDE_W;
#pragma unroll
    for (int row = 0; row < READ_H; row++) {
        if (!is_read(row)) continue;
        float v[4 * READ_VECTORS][1];
#pragma unroll
        for (int column = 0; column < 4 * READ_VECTORS; column += 4) load_four(v[column], from + row * COPY_W + column);
        add_row(sum, reinterpret_cast<const float(&)[READ_W][1]>(v), taps, row);
    }

    const int k = channel_of(plane);
    const float bias = bias_at(p, k);
    Element* to = p.y + (p.channels.divide(plane) * p.y_n + k * p.y_k + (i0 + i) * p.y_h + (j0 + j) * p.y_w);
    // All loads before the first store, as the compiler keeps their order.
#pragma unroll
    for (int t = 0; t < TILE_H; t++) {
#pragma unroll
        for (int u = 0; u < TILE_W; u += 4) {
            Raw<T, 4> added = {};
#if RESIDUAL
            const Element* const from = beside(p.residual, p.y, to) + t * p.y_h;
            const int exist = i0 + i + t < p.oh ? p.ow - (j0 + j + u) : 0;
#if VECTOR_OUT
            if (exist > 0) added.template load<4>(from + u);
#else
#pragma unroll
            for (int v = 0; v < 4; v++)
                if (v < exist) added.set_stored(v, from[(u + v) * p.y_w]);
#endif
#endif
#pragma unroll
            for (int v = 0; v < 4; v++) {
                sum[t][u + v][0] += bias;
                if (RESIDUAL) sum[t][u + v][0] += added.get(v);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILE_H; t++) {
        if (i0 + i + t >= p.oh) break;
#pragma unroll
        for (int u = 0; u < TILE_W; u += 4) {
            float out[4];
#pragma unroll
            for (int v = 0; v < 4; v++) out[v] = epilogue(sum[t][u + v][0]);
#if VECTOR_OUT
            if (j0 + j + u >= p.ow) continue;
            Raw<T, 4> raw;
            raw.pack(out);
            raw.template store<4>(to + u);
#else
#pragma unroll
            for (int v = 0; v < 4; v++)
                if (j0 + j + u + v < p.ow) to[(u + v) * p.y_w] = from_float(out[v]);
#endif
        }
        to += p.y_h;
    }
}
