// The output of winograd_row.cu: from the sums in a thread's registers to y.

#include "winograd_row.cuh"

// The constants of a block's output channels for the epilogue, one copy for each warp.
struct Channels {
    float scale[BLOCK_K];
    float bias[BLOCK_K];

    __device__ __forceinline__ void load(const Params& p, int k0, int lane) {
        __syncwarp();
#pragma unroll
        for (int i = lane; i < BLOCK_K; i += 32) {
            const int k = k0 + i;
            float b = 0;
            if (p.bias != nullptr && k < p.k)
                b = p.bias_is_float ? static_cast<const float*>(p.bias)[k * p.bias_stride]
                                    : to_float(static_cast<const Element*>(p.bias)[k * p.bias_stride]);
            bias[i] = b;
            scale[i] = p.u_inverse != nullptr && k < p.k ? p.u_inverse[k] : 1;
        }
        __syncwarp();
    }
};

// Tensor cores truncate when they add, so the error of a sum grows with its length. Split operands are more exact than
// that: after some steps their sums go to memory of the thread and start again.
constexpr bool FLUSHES = PRODUCTS == 3;
constexpr int FLUSHED = 8 * 2 * TILE; // pairs of sums of a thread: accumulator columns j, tiles t, outputs

struct Flush {
    float2* sums; // of this thread
    bool first, last;

    __device__ __forceinline__ Flush(const Params& p, bool first, bool last)
        : sums(p.sums + static_cast<i64>(blockIdx.x) * (FLUSHED * 256) + threadIdx.x), first(first), last(last) {}

    // Earlier sums of column j and tile t: channels e = 0, 1 of each output.
    __device__ __forceinline__ void load(float2 (&v)[TILE], int j, int t) const {
#pragma unroll
        for (int o = 0; o < TILE; o++) v[o] = first ? make_float2(0, 0) : sums[((2 * j + t) * TILE + o) * 256];
    }
};

// The product of both scales of f32 could be beyond the range of f32 if an output is not. So the transform undoes the
// exponents that operands were scaled to. The rest of the scales are powers of two next to the largest input and the
// largest tap, and their product is as large as outputs are.
#ifdef ELEMENT_F32
constexpr float SHRINK = 1.0f / (1u << (INPUT_EXPONENT + FILTER_EXPONENT));
#else
constexpr float SHRINK = 1;
#endif

// The three outputs of a tile from its five sums, before scale, bias and activation.
__device__ __forceinline__ void transform_output(float (&y)[TILE], const float (&acc)[ALPHA][32], int i) {
    // Positions 1 and 2 belong to points a and -a: sum and difference serve all rows.
    const float sum = acc[1][i] + acc[2][i], difference = acc[1][i] - acc[2][i];
#pragma unroll
    for (int o = 0; o < TILE; o++) {
        y[o] = fmaf(SHRINK * AT[o][3], acc[3][i], SHRINK * AT[o][1] * (o % 2 ? difference : sum));
        if (AT[o][0] != 0) y[o] = fmaf(SHRINK, acc[0][i], y[o]);
        if (AT[o][4] != 0) y[o] = fmaf(SHRINK, acc[4][i], y[o]);
    }
}

// As above for channel e of column j and tile t, with the flushed sums.
__device__ __forceinline__ void transform_output(float (&y)[TILE], const float (&acc)[ALPHA][32], int j, int t, int e,
                                                 const float2 (&before)[TILE]) {
    transform_output(y, acc, 4 * j + 2 * t + e);
    if (FLUSHES) {
#pragma unroll
        for (int o = 0; o < TILE; o++) y[o] += e ? before[o].y : before[o].x;
    }
}

// The loads of column j + 1 are under way while column j is stored.
__device__ __forceinline__ void flush(const float (&acc)[ALPHA][32], const Flush& flush) {
    float2 before[2][2][TILE];
    flush.load(before[0][0], 0, 0);
    flush.load(before[0][1], 0, 1);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (j < 7) {
            flush.load(before[(j + 1) % 2][0], j + 1, 0);
            flush.load(before[(j + 1) % 2][1], j + 1, 1);
        }
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float y[2][TILE];
            transform_output(y[0], acc, j, t, 0, before[j % 2][t]);
            transform_output(y[1], acc, j, t, 1, before[j % 2][t]);
#pragma unroll
            for (int o = 0; o < TILE; o++) flush.sums[((2 * j + t) * TILE + o) * 256] = make_float2(y[0][o], y[1][o]);
        }
    }
}

// Output channel of accumulator (j, e) in lane quarter q: U is packed in this order, so that the channels of a thread
// are neighbours in fours and eights.
__device__ __forceinline__ int channel_of(int q, int j, int e) {
    return 32 * (j / 4) + 8 * q + 2 * (j % 4) + e;
}

struct Place { // of a thread's pair of tiles
    i64 offset; // of its first output, channel 0
    int x;      // its column
    bool live;  // its row exists

    __device__ __forceinline__ Place(const Params& p, const Item& item, const Unit& unit, const Tiles& tiles)
        : x(unit.x0 + tiles.column), live(item.number < p.units && tiles.image < p.n && tiles.row < p.oh) {
        offset = tiles.image * p.y_n + tiles.row * p.y_h + x * p.y_w;
    }
};

// Prefetches the residual of a pair of tiles, which four lanes share, while its sums are formed, because there are no
// registers to hold it.
__device__ __forceinline__ void prefetch_residual(const Params& p, const Place& place, int k0, int q) {
    if (!place.live) return;
    const Element* const from = p.residual + place.offset + k0 * p.y_k;
    if (CHANNELS_LAST_OUT) {
#pragma unroll
        for (int x = q; x < 2 * TILE; x += 4) {
#pragma unroll
            for (int k = 0; k < BLOCK_K; k += 128 / sizeof(Element))
                if (place.x + x < p.ow && k0 + k < p.k) prefetch(from + x * p.y_w + k);
        }
    } else {
#pragma unroll 4
        for (int k = q; k < BLOCK_K; k += 4)
            if (place.x < p.ow && k0 + k < p.k) prefetch(from + k * p.y_k);
    }
}

// A thread has 8 neighbouring channels of 6 outputs: whole vectors.
__device__ __forceinline__ void store_channels_last(const Params& p, const float (&acc)[ALPHA][32], const Place& place,
                                                    int k0, int q, float x_scale, const Channels& channels,
                                                    const Flush& flush) {
    constexpr int VECTOR = 16 / sizeof(Element), COLUMNS_J = VECTOR / 2, ROUNDS = 32 / VECTOR;
    // Round i: channels from `first(i)` on (less k0 + 8 q), columns from `column(i)` on, tile i % 2.
    const auto first = [](int i) { return i / 2 * VECTOR / 8 * 32 + i / 2 * VECTOR % 8; };
    const auto column = [&](int i) { return first(i) / 32 * 4 + first(i) % 8 / 2; };
    float2 before[COLUMNS_J][TILE];
    const auto load = [&](int i) {
#pragma unroll
        for (int j = 0; j < COLUMNS_J; j++)
            if (FLUSHES) flush.load(before[j], column(i) + j, i % 2);
    };
    Element* to = p.y + place.offset + k0 + 8 * q;
    // Outputs of round i that exist.
    const auto count = [&](int i) {
        return place.live && k0 + 8 * q + first(i) < p.k ? p.ow - place.x - TILE * (i % 2) : 0;
    };
    // What is added in a round. Nothing of it is loaded ahead: all registers are taken, and it is in the second-level cache.
    Raw<T, VECTOR> added[TILE];
    const auto load_added = [&](int i) {
#pragma unroll
        for (int o = 0; o < TILE; o++) added[o] = {}; // else registers would be kept for what no load sets
#pragma unroll
        for (int o = 0; o < TILE; o++)
            if (o < count(i))
                added[o].template load<VECTOR>(beside(p.residual, p.y, to) + first(i) + (TILE * (i % 2) + o) * p.y_w);
    };
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        if (RESIDUAL) load_added(i);
        load(i);
        forget(to); // that addresses of other vectors were computed from it
        float y[VECTOR][TILE];
#pragma unroll
        for (int c = 0; c < VECTOR; c++) {
            const int channel = 8 * q + first(i) + c;
            transform_output(y[c], acc, column(i) + c / 2, i % 2, c % 2, before[c / 2]);
            const float scale = channels.scale[channel] * x_scale, bias = channels.bias[channel];
#pragma unroll
            for (int o = 0; o < TILE; o++) {
                const float sum = fmaf(y[c][o], scale, bias);
                y[c][o] = epilogue(RESIDUAL ? sum + added[o].get(c) : sum);
            }
        }
#pragma unroll
        for (int o = 0; o < TILE; o++) {
            float vector[VECTOR];
#pragma unroll
            for (int c = 0; c < VECTOR; c++) vector[c] = y[c][o];
            if (o < count(i)) store_vector(to + first(i) + (TILE * (i % 2) + o) * p.y_w, vector);
        }
    }
}

// Any strides: channels of a warp's 48 outputs go through shared memory, some at a time, so that neighbouring lanes store
// neighbouring columns, in pairs.
constexpr int COLUMN_PAIRS = 8 * TILE;         // of one channel
constexpr int STAGED_J = IS_F32 ? 1 : 2;       // of the 8 accumulator columns: 8 channels each
constexpr int STAGING_PITCH = IS_F32 ? 28 : 24; // pairs of one channel: a warp's accesses fall into different banks
typedef typename Access<2 * sizeof(Element)>::Type ElementPair;
constexpr int STAGED_PAIRS = STAGED_J * 8 * STAGING_PITCH;
constexpr int STAGING_BYTES = (RESIDUAL && IS_F32 ? 2 : 1) * STAGED_PAIRS * sizeof(ElementPair); // f32: with what is added

// Copies 4 or 8 bytes to shared memory.
template <int BYTES> __device__ __forceinline__ void copy_ahead(const void* to, const Element* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES) : "memory");
}

__device__ __forceinline__ ElementPair pack_pair(float a, float b) {
#ifdef ELEMENT_F32
    return make_uint2(__float_as_uint(a), __float_as_uint(b));
#else
    return T::pack(a, b);
#endif
}

__device__ __forceinline__ void store_strided(const Params& p, const float (&acc)[ALPHA][32], const Place& place,
                                              int k0, int lane, float x_scale, const Channels& channels,
                                              ElementPair* staging, const Flush& flush) {
    const int g = lane >> 2, q = lane & 3;
    // A lane stores pairs lane, lane + 32, lane + 64, ... of four channels that belong to different q, and so on for the
    // next four: there are three different places.
    Element* to[3];
    int from[3], channels_left[3], columns[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const int pair = (32 * i + lane) % COLUMN_PAIRS, row = (32 * i + lane) / COLUMN_PAIRS;
        const int source = pair / TILE * 4, column = pair % TILE * 2;
        const i64 offset = __shfl_sync(~0u, place.offset, source);
        const int x = __shfl_sync(~0u, place.x, source) + column;
        const bool live = __shfl_sync(~0u, static_cast<int>(place.live), source);
        const int k = k0 + channel_of(row, 0, 0);
        to[i] = p.y + offset + column * p.y_w + k * p.y_k;
        from[i] = row * STAGING_PITCH + pair;
        columns[i] = p.ow - x;
        channels_left[i] = live && columns[i] > 0 ? p.k - k : 0;
    }
    float2 before[2][TILE];
    const auto load = [&](int j) {
#pragma unroll
        for (int t = 0; t < 2; t++)
            if (FLUSHES) flush.load(before[t], j, t);
    };
    constexpr int COUNT = 6 * STAGED_J;
    // Pair n of a lane's stores of the columns from j0 on.
    const auto at = [&](int j0, int n) { return to[n % 3] + channel_of(0, j0 + n / 6, n / 3 % 2) * p.y_k; };
    const auto exists = [&](int j0, int n) { return channel_of(0, j0 + n / 6, n / 3 % 2) < channels_left[n % 3]; };
    const auto staged = [&](int n) { return staging + n / 3 * 4 * STAGING_PITCH + from[n % 3]; };
#pragma unroll
    for (int j0 = 0; j0 < 8; j0 += STAGED_J) {
#if RESIDUAL && defined(ELEMENT_F32)
        // To pairs on their way out, by copies that take no registers: they come while the sums are transformed.
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            if (!exists(j0, n)) continue;
            const ElementPair* const copied = staged(n) + STAGED_PAIRS;
            const Element* const both = beside(p.residual, p.y, at(j0, n));
            if (p.paired_out) {
                copy_ahead<8>(copied, both);
            } else {
                copy_ahead<4>(copied, both);
                if (columns[n % 3] > 1) copy_ahead<4>(reinterpret_cast<const Element*>(copied) + 1, both + p.y_w);
            }
        }
#endif
#pragma unroll
        for (int j = j0; j < j0 + STAGED_J; j++) {
#if RESIDUAL && !defined(ELEMENT_F32)
            // To the sums that the lane has: they are rounded on their way to other lanes.
            Raw<T, 2> added[2][TILE] = {};
#pragma unroll
            for (int i = 0; i < 2 * TILE; i++) {
                const int column = i % TILE * 2, k = k0 + channel_of(q, j, i / TILE);
                const int left = place.live && k < p.k ? p.ow - place.x - column : 0;
                const Element* const both = p.residual + place.offset + k * p.y_k + column * p.y_w;
                Raw<T, 2>& pair = added[i / TILE][i % TILE];
                if (p.paired_out) {
                    if (left > 0) pair.load<2>(both);
                } else {
                    if (left > 0) pair.set_stored(0, both[0]);
                    if (left > 1) pair.set_stored(1, both[p.y_w]);
                }
            }
#endif
            load(j);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int channel = channel_of(q, j, e);
                const float scale = channels.scale[channel] * x_scale, bias = channels.bias[channel];
                float y[2][TILE], of_pair[2 * TILE];
                transform_output(y[0], acc, j, 0, e, before[0]);
                transform_output(y[1], acc, j, 1, e, before[1]);
#pragma unroll
                for (int i = 0; i < 2 * TILE; i++) {
                    float& sum = of_pair[i];
                    sum = fmaf(y[i / TILE][i % TILE], scale, bias);
#if RESIDUAL && !defined(ELEMENT_F32)
                    sum += added[e][i / 2].get(i % 2);
#endif
                    if (!(RESIDUAL && IS_F32)) sum = epilogue(sum);
                }
                ElementPair* const row = staging + (4 * (2 * (j - j0) + e) + q) * STAGING_PITCH + TILE * g;
#pragma unroll
                for (int i = 0; i < TILE; i++) row[i] = pack_pair(of_pair[2 * i], of_pair[2 * i + 1]);
            }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 3; i++) forget(to[i]);
#if RESIDUAL && defined(ELEMENT_F32)
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const ElementPair sums = *staged(n), added = staged(n)[STAGED_PAIRS];
            *staged(n) = pack_pair(epilogue(__uint_as_float(sums.x) + __uint_as_float(added.x)),
                                   epilogue(__uint_as_float(sums.y) + __uint_as_float(added.y)));
        }
        __syncwarp();
#endif
        if (p.paired_out) {
#pragma unroll
            for (int n = 0; n < COUNT; n++)
                if (exists(j0, n)) *reinterpret_cast<ElementPair*>(at(j0, n)) = *staged(n);
        } else {
#pragma unroll
            for (int n = 0; n < COUNT; n++) {
                if (!exists(j0, n)) continue;
                const Element* const both = reinterpret_cast<const Element*>(staged(n));
                at(j0, n)[0] = both[0];
                if (columns[n % 3] > 1) at(j0, n)[p.y_w] = both[1];
            }
        }
        __syncwarp();
    }
}
