// Vectors of one row where positions lie next to each other, 2 <= WIDTH <= 9.
//
// MASK   take sequences from the mask
#pragma once
#include "vector.cuh"

constexpr int HALO = WIDTH - 1;
static_assert(HALO >= 1 && HALO <= VECTOR, "the halo is part of one vector");
// Positions that the lanes of a warp take at a time.
constexpr int BLOCK = 32 * VECTOR;

// The last HALO elements of the vector before `in`: lane 31 brings that of lane 0, `before`. Whole words
// travel, the last ones of each vector.
struct Tail {
    static constexpr int KEEP = (VECTOR - HALO) * (int)sizeof(S) / 4;
    Vector last;

    __device__ __forceinline__ Tail(const Vector &in, const Vector &before) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = KEEP; i < 4; i++) {
            unsigned word = lane == 31 ? before.words[i] : in.words[i];
            last.words[i] = __shfl_sync(0xffffffff, word, (lane + 31) % 32);
        }
    }

    __device__ __forceinline__ float get(int i) const { return last.get(VECTOR - HALO + i); }
};

// A vector with the inputs before it.
__device__ __forceinline__ void fill_window(float (&window)[HALO + VECTOR], const Tail &tail,
                                            const Vector &in) {
#pragma unroll
    for (int i = 0; i < HALO; i++) window[i] = tail.get(i);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) window[HALO + i] = in.get(i);
}

// The words of positions start .. start + N; 0 outside the row.
template <int N>
__device__ __forceinline__ void load_mask(const Params &p, i64 b, int start, unsigned (&mask)[N]) {
    if (!MASK) return;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int t = start + i;
        mask[i] = t >= 0 && t < (int)p.length ? p.mask[b * p.length + t] : 0;
    }
}
