// The L2 norm of heads. Squares are added in pairs of neighbouring channels, these sums in pairs, and so on; those of
// NORM_BLOCK channels come one after the other. So all kernels give the same bits, however many channels a thread has.
#pragma once
#include "parameters.cuh"

constexpr int NORM_BLOCK = 256;

// The sum of the squares of N channels, a power of two. No product is fused with a sum, which would change the bits.
template <int N> __device__ __forceinline__ float sum_of_squares(const float (&values)[N]) {
    float sums[N];
#pragma unroll
    for (int i = 0; i < N; i++) sums[i] = __fmul_rn(values[i], values[i]);
#pragma unroll
    for (int step = 1; step < N; step *= 2) {
#pragma unroll
        for (int i = 0; i < N; i += 2 * step) sums[i] = __fadd_rn(sums[i], sums[i + step]);
    }
    return sums[0];
}

// The sum over N neighbouring threads of a warp, a power of two, all of which call it.
template <int N> __device__ __forceinline__ float sum_of_threads(float sum) {
    unsigned first = threadIdx.x % 32 / N * N, lanes = (N < 32 ? (1u << N % 32) - 1 : ~0u) << first;
#pragma unroll
    for (int step = 1; step < N; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(lanes, sum, step));
    return sum;
}

__device__ __forceinline__ float norm_factor(float sum, float epsilon) { return rsqrt_fast(__fadd_rn(sum, epsilon)); }

// Divides N channels from d on by the norm of their head, whose channels are those of neighbouring threads, all of
// which call it. `P` has norm_channels, the number of channels that have a norm, and epsilon.
//
// HEAD   channels of a head; without it there is no norm
template <class P, int N> __device__ __forceinline__ void normalise(const P &p, i64 d, Raw<T, N> &v) {
#ifdef HEAD
    static_assert(HEAD % N == 0 && HEAD / N <= 32 && HEAD <= NORM_BLOCK && (HEAD & (HEAD - 1)) == 0, "lanes of a warp");
    if (d >= p.norm_channels) return;
    float values[N];
    v.unpack(values);
    float factor = norm_factor(sum_of_threads<HEAD / N>(sum_of_squares(values)), p.epsilon);
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = __fmul_rn(values[i], factor);
    v.pack(values);
#endif
}
