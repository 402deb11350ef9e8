// y = act(A^t m A + bias + residual) for every tile of a chunk and every output channel, a thread each.
//
// Constants: ELEMENT_*, TILE, OUTPUT (the transform A^t), CHANNELS_INNER, EPILOGUE, RESIDUAL, PARTS (f32) and
// EXPONENT (of x).

#include "winograd.cuh"

constexpr float AT[TILE][ALPHA] = OUTPUT;

struct Params : Output {
    const float* m;
    const u32* x_max;       // [n] and [k], which undo the scales of V and U (of f16 parts)
    const float* u_inverse;
    i64 plane, m_tile, m_channel;
    Tiling tiling;
    Divisor inner;          // tiles of a chunk or output channels, whichever neighbouring threads share
    int elements;
    int pairs;              // two columns of y, and of the residual, are aligned as one
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    const Place place(p.inner, CHANNELS_INNER);
    if (static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) >= p.elements) return;
    const TileAt at(p.tiling, place.tile);
    if (!at.exists) return;
    const float* in = p.m + place.tile * p.m_tile + place.channel * p.m_channel;
    float m[ALPHA][ALPHA], out[TILE][TILE];
#pragma unroll
    for (int i = 0; i < POSITIONS; i++) m[i / ALPHA][i % ALPHA] = in[i * p.plane];
    Element* const y = p.y + at.n * p.y_n + place.channel * p.y_k + at.i * p.y_h + at.j * p.y_w;
#if RESIDUAL
    // On its way while the sums are transformed.
    Raw<T, 2> added[TILE][TILE / 2] = {};
#pragma unroll
    for (int i = 0; i < TILE; i++) {
        if (at.i + i >= p.oh) break;
#pragma unroll
        for (int j = 0; j < TILE; j += 2) {
            const Element* const from = beside(p.residual, p.y, y + i * p.y_h + j * p.y_w);
            Raw<T, 2>& pair = added[i][j / 2];
            if (p.pairs && at.j + j + 1 < p.ow) {
                pair.load<2>(from);
            } else {
                if (at.j + j < p.ow) pair.set_stored(0, from[0]);
                if (at.j + j + 1 < p.ow) pair.set_stored(1, from[p.y_w]);
            }
        }
    }
#endif
    transform(AT, m, out);
    float scale = 1;
#if IN_HALVES
    // Both scales are applied in two steps of half the exponent, because their product may be beyond the range of f32
    // if y is not.
    const int exponent = exponent_of(power_of_two_scale(p.x_max[at.n], EXPONENT, true)) +
                         exponent_of(p.u_inverse[place.channel]);
    const float half = power_of_two(exponent / 2);
    scale = power_of_two(exponent - exponent / 2);
#pragma unroll
    for (int i = 0; i < TILE * TILE; i++) out[i / TILE][i % TILE] *= half;
#endif
    float bias = 0;
    if (p.bias != nullptr)
        bias = p.bias_is_float ? static_cast<const float*>(p.bias)[place.channel * p.bias_stride]
                               : to_float(static_cast<const Element*>(p.bias)[place.channel * p.bias_stride]);
#pragma unroll
    for (int i = 0; i < TILE; i++) {
        if (at.i + i >= p.oh) break;
#pragma unroll
        for (int j = 0; j < TILE; j += 2) {
            float2 v = make_float2(fmaf(out[i][j], scale, bias), fmaf(out[i][j + 1], scale, bias));
#if RESIDUAL
            v = make_float2(v.x + added[i][j / 2].get(0), v.y + added[i][j / 2].get(1));
#endif
            v = make_float2(epilogue(v.x), epilogue(v.y));
            Element* to = y + i * p.y_h + j * p.y_w;
            if (p.pairs && at.j + j + 1 < p.ow) {
                store_pair(to, v);
            } else {
                if (at.j + j < p.ow) to[0] = from_float(v.x);
                if (at.j + j + 1 < p.ow) to[p.y_w] = from_float(v.y);
            }
        }
    }
}
