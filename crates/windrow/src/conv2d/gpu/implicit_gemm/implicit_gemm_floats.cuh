// Outputs in f32 of implicit_gemm.cu and implicit_gemm_single.cu: where they lie, what is added, and how they are stored.
//
// Constants: CHANNELS_LAST_OUT 0 or 1: channels are stored in vectors.

#pragma once

#include "implicit_gemm.cuh"

// A thread's rows of the product are these pixels.
struct Rows {
    float* y[2];
    bool exists[2];

    __device__ __forceinline__ Rows(const Params& p, int pixel) {
#pragma unroll
        for (int t = 0; t < 2; t++) {
            exists[t] = has_pixel(p, pixel + 8 * t);
            const Pixel at(p, exists[t] ? pixel + 8 * t : 0);
            y[t] = p.y + at.image * p.y_n + at.row * p.y_h + at.column * p.y_w;
        }
    }
};

// What is added to the outputs that `store` stores together: loaded before any are stored, which the compiler would not let
// a load pass.
template <int J> struct Added {
    float v[2][2 * J] = {}; // else registers would be kept for what no load sets

    __device__ __forceinline__ void load(const Params& p, int j0, const Rows& rows, const Columns& columns, int q) {
        if (!RESIDUAL) return;
        const int k = columns.first + channel_of(q, j0, 0);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            if (!rows.exists[t]) continue;
            const float* const from = beside(p.residual, p.y, rows.y[t]) + k * p.y_k;
#if CHANNELS_LAST_OUT
#pragma unroll
            for (int i = 0; i < 2 * J; i += 4) {
                if (k + i >= columns.end) continue;
                constexpr int N = J == 1 ? 2 : 4;
                Raw<T, N> raw;
                raw.template load<N>(from + i);
#pragma unroll
                for (int l = 0; l < N; l++) v[t][i + l] = raw.get(l);
            }
#else
#pragma unroll
            for (int i = 0; i < 2 * J; i++)
                if (k + i < columns.end) v[t][i] = from[i * p.y_k];
#endif
        }
    }
};

// Stores 2 J neighbouring channels of a pixel, from channel k on.
template <int J>
__device__ __forceinline__ void put(const Params& p, const float (&v)[2 * J], float* y, int k, const Columns& columns) {
#if CHANNELS_LAST_OUT
    float* const to = y + k;
#pragma unroll
    for (int i = 0; i < 2 * J; i += 4) {
        if (k + i >= columns.end) continue;
        if constexpr (J == 1)
            *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
        else
            *reinterpret_cast<float4*>(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    }
#else
    float* to = y + k * p.y_k;
#pragma unroll
    for (int i = 0; i < 2 * J; i++) {
        if (k + i < columns.end) *to = v[i];
        to += p.y_k;
    }
#endif
}
