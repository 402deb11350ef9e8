// The input of winograd_row.cu: from pixels in shared memory to operand A of the products, in a thread's registers.

#include "winograd_row.cuh"

// Two tiles that lie side by side share 2 of their 5 inputs each. With b the last point, the rows of all other
// points are those of the smaller transform without b, applied to the differences d[i+1] - b d[i]; these are shared
// between the tiles as well.
template <class T, class Fma>
__device__ __forceinline__ void transform_pair(const T (&d)[PAIR_PIXELS], T (&v)[2][ALPHA], Fma fma) {
    T w[PAIR_PIXELS - 1];
#pragma unroll
    for (int i = 0; i < PAIR_PIXELS - 1; i++) w[i] = fma(-POINT, d[i], d[i + 1]);
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int a = 0; a < ALPHA; a++) {
            // Rows are monic: the highest coefficient is 1.
            const bool last_point = a == ALPHA - 2;
            const int row = a == ALPHA - 1 ? ALPHA - 2 : a;
            const int degree = last_point ? ALPHA - 2 : a == ALPHA - 1 ? ALPHA - 2 : ALPHA - 3;
            T sum = last_point ? d[TILE * t + degree] : w[TILE * t + degree];
#pragma unroll
            for (int j = 0; j < degree; j++) {
                const float c = last_point ? LAST[j] : INNER[row][j];
                if (c != 0) sum = fma(c, last_point ? d[TILE * t + j] : w[TILE * t + j], sum);
            }
            v[t][a] = sum;
        }
    }
}

// The pair of tiles that lane group g of a warp reads. Its number in the unit has the bits of (8 warp + g) at the
// positions PAIR_BITS. The host chooses these so that a warp's loads fall into different banks.
__device__ __forceinline__ int pair_of(int warp, int g) {
    constexpr int BITS[5] = PAIR_BITS;
    const int source = warp * 8 + g;
    int pair = 0;
#pragma unroll
    for (int i = 0; i < 5; i++) pair |= (source >> i & 1) << BITS[i];
    return pair;
}

// The copy engine swizzles boxes of 64-byte pixels: 16-byte chunk j of pixel p is stored as chunk j ^ (p / 2 % 4).
// Addresses of the 8-byte piece `q` of the 8 pixels from `pixel` on; those further away are 512 bytes on.
__device__ __forceinline__ void pixel_addresses(u32 (&address)[8], u32 stages, int pixel, int q) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 p = pixel + i;
        address[i] = stages + p * PIXEL_BYTES + ((q >> 1 ^ (p >> 1 & 3)) << 4) + (q & 1) * 8;
    }
}

// A thread's operand A for every position, from 8 pixels in row `tap` of its pair.
#ifdef ELEMENT_F32

__device__ __forceinline__ void load_operands(u32 (&a)[PARTS][ALPHA][4], const u32 (&address)[8],
                                              u32 offset, int tap, float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) { // channels 0-7 and 8-15 of the step
        float d[2][PAIR_PIXELS];
#pragma unroll
        for (int i = 0; i < PAIR_PIXELS; i++) {
            const int pixel = tap * PIXEL_PITCH + i;
            const uint2 raw = load_shared_v2((address[pixel & 7] + offset ^ half * 32) + (pixel >> 3) * 512);
            d[0][i] = __uint_as_float(raw.x) * scale;
            d[1][i] = __uint_as_float(raw.y) * scale;
        }
        float v[2][2][ALPHA];
        const auto fma = [](float c, float x, float y) { return fmaf(c, x, y); };
        transform_pair(d[0], v[0], fma);
        transform_pair(d[1], v[1], fma);
#pragma unroll
        for (int t = 0; t < 2; t++) {
#pragma unroll
            for (int i = 0; i < ALPHA; i++) {
                const u32 high = floats_to_f16x2(v[0][t][i], v[1][t][i]);
                a[0][i][2 * half + t] = high;
                if (PRODUCTS == 3) {
                    const float2 rounded = unpack_f16x2(high);
                    a[PARTS - 1][i][2 * half + t] = floats_to_f16x2(v[0][t][i] - rounded.x, v[1][t][i] - rounded.y);
                }
            }
        }
    }
}

#else

__device__ __forceinline__ void load_operands(u32 (&a)[PARTS][ALPHA][4], const uint2 (&raw)[PAIR_PIXELS]) {
    const auto fma = [](float c, u32 x, u32 y) { return fma_x2(c, x, y); };
#pragma unroll
    for (int half = 0; half < 2; half++) { // channels 4q, 4q + 1, then 4q + 2, 4q + 3
        u32 d[PAIR_PIXELS], v[2][ALPHA];
#pragma unroll
        for (int i = 0; i < PAIR_PIXELS; i++) d[i] = half ? raw[i].y : raw[i].x;
        transform_pair(d, v, fma);
#pragma unroll
        for (int t = 0; t < 2; t++) {
#pragma unroll
            for (int i = 0; i < ALPHA; i++) a[0][i][2 * half + t] = v[t][i];
        }
    }
}

#endif
