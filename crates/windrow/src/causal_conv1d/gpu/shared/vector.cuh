// Vectors of 16 bytes along a row where positions lie next to each other.
#pragma once
#include "causal_conv1d.cuh"

constexpr int VECTOR = 16 / (int)sizeof(S);
typedef Raw<T, VECTOR> Vector;

// Elements start .. start + VECTOR of a row; 0 outside.
__device__ __forceinline__ Vector load_vector(const S *row, int start, int length, bool aligned) {
    Vector v;
    if (aligned && start >= 0 && start + VECTOR <= length) {
        v.template load<VECTOR>(row + start);
    } else {
        float f[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            int t = start + i;
            f[i] = t >= 0 && t < length ? T::to_float(row[t]) : 0.0f;
        }
        v.pack(f);
    }
    return v;
}

// Writes the elements that lie inside the row.
__device__ __forceinline__ void store_vector(S *row, int start, int length,
                                             const float (&values)[VECTOR]) {
    if (start >= 0 && start + VECTOR <= length) {
        Vector v;
        v.pack(values);
        v.template store<VECTOR>(row + start);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            int t = start + i;
            if (t >= 0 && t < length) row[t] = T::from_float(values[i]);
        }
    }
}
