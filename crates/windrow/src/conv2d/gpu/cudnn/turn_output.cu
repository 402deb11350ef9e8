// y = act(sums + bias + residual) for a dense y [n, k, pixels] and sums [n, pixels, k] whose channels are whole vectors
// of 16 bytes. This pass follows a kernel for channels-last images if y has another layout.
//
// Constants: ELEMENT_*, EPILOGUE, RESIDUAL, VECTOR: 4 if four pixels of a channel of y and of the residual are aligned
// as one, otherwise 1.

#include "turn.cuh"

typedef Raw<T, PIXELS> Row;

struct Params : Output {
    const Element* sums;
    int pixels;
    int pixel_tiles, channel_tiles;
};
static_assert(PARAMS_AGREE, "as the host's structure");

// Those of a row that exist.
__device__ __forceinline__ void load_row(Row& row, const Element* from, int exist) {
    if (VECTOR == PIXELS) {
        if (exist > 0) row.template load<PIXELS>(from);
    } else {
#pragma unroll
        for (int i = 0; i < PIXELS; i++)
            if (i < exist) row.set_stored(i, from[i]);
    }
}

__device__ __forceinline__ void store_row(const Row& row, Element* to, int exist) {
    if (VECTOR == PIXELS) {
        if (exist > 0) row.template store<PIXELS>(to);
    } else {
#pragma unroll
        for (int i = 0; i < PIXELS; i++)
            if (i < exist) to[i] = row.stored(i);
    }
}

extern "C" __global__ __launch_bounds__(CHUNKS * LANES) void KERNEL(const __grid_constant__ Params p) {
    __shared__ uint4 tile[TILE_P * CHUNKS];
    const int channel0 = blockIdx.x % p.channel_tiles * (CHUNKS * CHANNELS);
    const int pixel0 = blockIdx.x / p.channel_tiles % p.pixel_tiles * TILE_P;
    const i64 image = blockIdx.x / p.channel_tiles / p.pixel_tiles;
    const Element* const sums = p.sums + image * p.pixels * p.k;
#pragma unroll
    for (int i = 0; i < PIXELS; i++) {
        const int index = i * (CHUNKS * LANES) + threadIdx.x, chunk = index % CHUNKS;
        const int pixel = pixel0 + index / CHUNKS, channel = channel0 + chunk * CHANNELS;
        if (pixel < p.pixels && channel < p.k)
            tile[place(index / CHUNKS, chunk)] =
                *reinterpret_cast<const uint4*>(sums + (static_cast<i64>(pixel) * p.k + channel));
    }
    __syncthreads();

    const int chunk = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int channel = channel0 + chunk * CHANNELS, pixel = pixel0 + lane * PIXELS, exist = p.pixels - pixel;
    if (channel >= p.k || exist <= 0) return;
    Raw<T, CHANNELS> vectors[PIXELS];
#pragma unroll
    for (int i = 0; i < PIXELS; i++) {
        const uint4 v = tile[place(lane * PIXELS + i, chunk)];
        vectors[i].words[0] = v.x, vectors[i].words[1] = v.y, vectors[i].words[2] = v.z, vectors[i].words[3] = v.w;
    }
    const i64 at = (image * p.k + channel) * p.pixels + pixel;
    // All loads before the first store, as the compiler keeps their order.
    Row added[CHANNELS] = {};
    float bias[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) {
        bias[c] = bias_at(p, channel + c);
        if (RESIDUAL) load_row(added[c], p.residual + (at + static_cast<i64>(c) * p.pixels), exist);
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) {
        float out[PIXELS];
#pragma unroll
        for (int i = 0; i < PIXELS; i++) {
            out[i] = vectors[i].get(c) + bias[c];
            if (RESIDUAL) out[i] += added[c].get(i);
            out[i] = epilogue(out[i]);
        }
        Row row;
        row.pack(out);
        store_row(row, p.y + (at + static_cast<i64>(c) * p.pixels), exist);
    }
}
