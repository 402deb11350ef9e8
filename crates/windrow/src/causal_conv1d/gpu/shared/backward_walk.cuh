// A walk along the positions of a few neighbouring channels, for their gradients, 2 <= WIDTH <= 5.
//
// MASK     take sequences from the mask
// VECTOR   channels of a thread
#pragma once
#include "causal_conv1d.cuh"

constexpr int HALO = WIDTH - 1;
typedef Raw<T, VECTOR> Vector;

struct Walk {
    float weight[WIDTH][VECTOR], bias[VECTOR];
    // Inputs and gradients of the positions before the present one, oldest first.
    float window[HALO][VECTOR], dpre[HALO][VECTOR];
    unsigned mask[HALO];
    float sum[WIDTH + 1][VECTOR];

    // What tap k of channel i lies on, of a position with these inputs and this mask.
    __device__ __forceinline__ float input(const float (&now)[VECTOR], unsigned m, int k, int i) const {
        if (k == HALO) return now[i];
        return !MASK || m >> (HALO - 1 - k) & 1 ? window[k][i] : 0.0f;
    }

    // Takes one position; `out` is dx of the one HALO before it. Sums only what is `inside` the chunk and
    // no padding: other inputs may be anything, and 0 times infinity is not 0.
    __device__ __forceinline__ void step(const Vector &x, const Vector &dy, unsigned m, bool inside,
                                         float (&out)[VECTOR]) {
        float now[VECTOR], g[VECTOR];
        x.unpack(now);
        bool padding = MASK && m & 0x8000;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            float pre = bias[i];
#pragma unroll
            for (int k = HALO; k >= 0; k--) pre = fmaf(weight[k][i], input(now, m, k, i), pre);
            g[i] = padding ? 0.0f : dy.get(i) * activate_gradient<ACT>(pre);
        }
        if (inside && !padding) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
#pragma unroll
                for (int k = 0; k < WIDTH; k++) {
                    sum[k][i] = fmaf(g[i], input(now, m, k, i), sum[k][i]);
                }
                sum[WIDTH][i] += g[i];
            }
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            // dx at the oldest position of the window, or here without one.
            float dx = !MASK || m >> (HALO - 1) & 1 ? weight[0][i] * g[i] : 0.0f;
#pragma unroll
            for (int j = 0; j < HALO; j++) {
                bool seen = !MASK || j == 0 || mask[j] >> (j - 1) & 1;
                dx = fmaf(weight[HALO - j][i], seen ? dpre[j][i] : 0.0f, dx);
            }
            out[i] = dx;
#pragma unroll
            for (int j = 0; j + 1 < HALO; j++) {
                window[j][i] = window[j + 1][i], dpre[j][i] = dpre[j + 1][i];
            }
            window[HALO - 1][i] = now[i], dpre[HALO - 1][i] = g[i];
        }
        if (MASK) {
#pragma unroll
            for (int j = 0; j + 1 < HALO; j++) mask[j] = mask[j + 1];
            mask[HALO - 1] = m;
        }
    }
};
