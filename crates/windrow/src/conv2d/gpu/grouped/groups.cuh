// The common part of depthwise_channels.cu, depthwise_planes.cu and few_channels.cu: convolution in groups of few
// channels, limited by memory bandwidth. A thread computes TILE_H x TILE_W neighbouring outputs of one or a few
// channels from inputs in registers. So each input is loaded about twice, and most loads hit a cache.
//
// Constants: ELEMENT_*, EPILOGUE, RESIDUAL, FILTER_H, FILTER_W, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, TILE_H,
// TILE_W.

#pragma once

#include "conv2d.cuh"

constexpr int TAPS = FILTER_H * FILTER_W;
// Inputs of a thread's tile.
constexpr int READ_H = (TILE_H - 1) * STRIDE_H + (FILTER_H - 1) * DILATION_H + 1;
constexpr int READ_W = (TILE_W - 1) * STRIDE_W + (FILTER_W - 1) * DILATION_W + 1;

struct Params : ConvShape {
    const Element* filter; // [k, FILTER_H, FILTER_W]; of more channels in a group see few_channels.cu
    int units;             // tiles of all images, or planes
    Divisor group_k;       // output channels of a group
    Divisor channels;      // of an image: blocks of them, or planes
    Divisor rows, columns; // of an image: tiles of threads, or of blocks
};
static_assert(PARAMS_AGREE, "as the host's structure");

// The tap at which output `i` of a tile reads input `j` of it, or one that no filter has.
__device__ __forceinline__ constexpr int tap_of(int i, int j, int stride, int dilation, int taps) {
    const int from = j - i * stride;
    return from >= 0 && from % dilation == 0 && from / dilation < taps ? from / dilation : -1;
}

// Adds the products of row `i` of the inputs to a tile.
template <int V>
__device__ __forceinline__ void add_row(float (&sum)[TILE_H][TILE_W][V], const float (&x)[READ_W][V],
                                        const float (&filter)[TAPS][V], int i) {
#pragma unroll
    for (int t = 0; t < TILE_H; t++) {
        const int r = tap_of(t, i, STRIDE_H, DILATION_H, FILTER_H);
        if (r < 0) continue;
#pragma unroll
        for (int s = 0; s < FILTER_W; s++)
#pragma unroll
            for (int u = 0; u < TILE_W; u++)
#pragma unroll
                for (int v = 0; v < V; v++)
                    sum[t][u][v] = fmaf(x[u * STRIDE_W + s * DILATION_W][v], filter[r * FILTER_W + s][v], sum[t][u][v]);
    }
}

// True if some output of a tile reads row `i` of its inputs.
__device__ __forceinline__ constexpr bool is_read(int i) {
    for (int t = 0; t < TILE_H; t++)
        if (tap_of(t, i, STRIDE_H, DILATION_H, FILTER_H) >= 0) return true;
    return false;
}

// Neighbouring channels at `from`, zeros unless they exist.
template <int V> __device__ __forceinline__ void load_channels(float (&v)[V], const Element* from, bool exist) {
    Raw<T, V> raw;
#pragma unroll
    for (int i = 0; i < Raw<T, V>::WORDS; i++) raw.words[i] = 0;
    if (exist) raw.template load<V>(from);
    raw.unpack(v);
}
