// V = T d T^t for every tile of a chunk and every channel, a thread each; zeros where V is padded with channels or tiles.
// d is a patch of SIZE x SIZE: of x with T = B^t, or, for the weight gradient, a tile of dy with T = A.
//
// Constants: ELEMENT_*, TILE, SIZE, INPUT (the transform T), CHANNELS_INNER, PARTS (f32) and EXPONENT, with two parts
// SHRINKAGE.

#include "winograd.cuh"

constexpr bool OCTETS = PARTS == 2;
#ifndef SHRINKAGE
#define SHRINKAGE 0
#endif

constexpr float T_MATRIX[ALPHA][SIZE] = INPUT;

struct Params {
    const Element* x;
    Stored* v;
    const u32* x_max;       // [n]: bits of the largest finite |x| of an image (f16 parts), or of all (octets)
    i64 x_n, x_c, x_h, x_w; // strides in elements
    i64 plane, v_tile, v_channel, v_part; // v_channel of an octet, where there are such
    Tiling tiling;
    Divisor inner;          // tiles of a chunk or padded channels, whichever neighbouring threads share
    int elements;           // of one position
    int c, h, w, pad_h, pad_w;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    const Place place = OCTETS ? Place::in_octets(p.inner) : Place(p.inner, CHANNELS_INNER);
    if (static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) >= p.elements) return;
    const TileAt at(p.tiling, place.tile);
    const bool exists = at.exists && place.channel < p.c;
    const int y0 = at.i - p.pad_h, x0 = at.j - p.pad_w;
    const Element* x = p.x + at.n * p.x_n + place.channel * p.x_c + y0 * p.x_h + x0 * p.x_w;
    float d[SIZE][SIZE], v[ALPHA][ALPHA];
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        const bool row = exists && y0 + i >= 0 && y0 + i < p.h;
#pragma unroll
        for (int j = 0; j < SIZE; j++)
            d[i][j] = row && x0 + j >= 0 && x0 + j < p.w ? to_float(x[i * p.x_h + j * p.x_w]) : 0.0f;
    }
#if IN_HALVES
    const float scale = exists ? power_of_two_scale(p.x_max[OCTETS ? 0 : at.n], EXPONENT) : 1;
#pragma unroll
    for (int i = 0; i < SIZE * SIZE; i++) d[i / SIZE][i % SIZE] *= scale;
#endif
    transform(T_MATRIX, d, v);
    const int outer = OCTETS ? place.channel / 8 : place.channel;
    Stored* out = p.v + place.tile * p.v_tile + outer * p.v_channel + (OCTETS ? place.channel % 8 : 0);
#pragma unroll
    for (int i = 0; i < POSITIONS; i++)
        store_parts<false>(out + i * p.plane, p.v_part, v[i / ALPHA][i % ALPHA], SHRINKAGE);
}
