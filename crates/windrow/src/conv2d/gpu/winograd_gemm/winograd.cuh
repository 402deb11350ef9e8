// The common part of the steps of non-fused Winograd: F(TILE x TILE, 3 x 3) with transformed tiles of ALPHA x ALPHA.
//
// The intermediate tensors (stages) lie in memory as matrices, one for each position p of the transformed tile:
//
//     U [p][k][c]    V [p][c][tile] or [p][tile][c]    M [p][k][tile] or [p][tile][k]
//
// with tiles innermost where the image has columns side by side, and channels where it has those. Both may be padded.
//
// PARTS, for f32: the number of f16 parts that stand for a number of U and V. The number is scaled by a power of two so
// that f16 holds it.
// - With 1 part, it is the rounded number.
// - With 3 parts, these lie side by side as more channels: high, low, high of U and low, high, high of V. So one matrix
//   product sums the three products that count, those with low parts first, because a tensor core truncates numbers
//   that it adds to a large sum.
// - With 2 parts, the low parts lie after the high ones, in octets of channels, [p][octet][tile][8], for
//   weight_product.cu.
#pragma once
#include "conv2d.cuh"

constexpr int ALPHA = TILE + 2, POSITIONS = ALPHA * ALPHA;
#ifdef PARTS
#define IN_HALVES 1
typedef u16 Stored;
#else
#define IN_HALVES 0
#define PARTS 1
typedef Element Stored;
#endif

// Stores a number of U (OF_FILTER) or V: its parts are `part` elements apart.
template <bool OF_FILTER>
__device__ __forceinline__ void store_parts(Stored* to, i64 part, float value, float shrinkage = 0) {
#if IN_HALVES
    const Halves halves(value, shrinkage);
#if PARTS == 2
    to[0] = halves.high;
    to[part] = halves.low;
    return;
#endif
    to[0] = OF_FILTER || PARTS == 1 ? halves.high : halves.low;
    if (PARTS == 1) return;
    to[part] = OF_FILTER ? halves.low : halves.high;
    to[2 * part] = halves.high;
#else
    to[0] = from_float(value);
#endif
}

// The product of a row of a transform with a vector, without the terms that are zero. All is known at compile time
// but the vector.
template <int COLUMNS>
__device__ __forceinline__ float dot(const float (&row)[COLUMNS], const float (&v)[COLUMNS]) {
    float sum = 0;
    bool first = true;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        if (row[i] == 0) continue;
        sum = first ? row[i] * v[i] : fmaf(row[i], v[i], sum);
        first = false;
    }
    return sum;
}

// T x T^t for a transform T.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void transform(const float (&t)[ROWS][COLUMNS], const float (&x)[COLUMNS][COLUMNS],
                                          float (&out)[ROWS][ROWS]) {
    float half[ROWS][COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        float column[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) column[i] = x[i][j];
#pragma unroll
        for (int i = 0; i < ROWS; i++) half[i][j] = dot(t[i], column);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < ROWS; j++) out[i][j] = dot(t[j], half[i]);
}

// A tile of a chunk, and the channel of a thread. The image's layout decides which of them neighbouring threads share.
struct Place {
    int tile, channel;
    __device__ __forceinline__ Place(const Divisor& inner, bool channels_inner) {
        const int index = blockIdx.x * blockDim.x + threadIdx.x;
        const int outer = inner.divide(index), rest = index - outer * static_cast<int>(inner.value);
        tile = channels_inner ? outer : rest;
        channel = channels_inner ? rest : outer;
    }
    // Eight channels of a tile, then the next tile; `inner` are tiles.
    static __device__ __forceinline__ Place in_octets(const Divisor& inner) {
        const int index = blockIdx.x * blockDim.x + threadIdx.x;
        const int octet = inner.divide(index / 8), tile = index / 8 - octet * static_cast<int>(inner.value);
        return Place(tile, 8 * octet + index % 8);
    }

private:
    __device__ __forceinline__ Place(int tile, int channel) : tile(tile), channel(channel) {}
};

// The places of tiles: image, and first row and column of the output.
struct Tiling {
    i64 images;       // existing ones, counted from that of the chunk's first tile
    i64 first_image;
    int first;        // of the chunk, in its image
    Divisor per_image, per_row;
};

struct TileAt {
    i64 n;
    int i, j;
    bool exists;
    __device__ __forceinline__ TileAt(const Tiling& t, int tile) {
        const int at = t.first + tile, image = t.per_image.divide(at);
        const int rest = at - image * static_cast<int>(t.per_image.value), row = t.per_row.divide(rest);
        exists = image < t.images;
        n = t.first_image + image;
        i = row * TILE;
        j = (rest - row * static_cast<int>(t.per_row.value)) * TILE;
    }
};
