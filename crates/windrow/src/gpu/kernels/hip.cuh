// What HIP calls otherwise than CUDA, or has not. Only hiprtc reads this; what it defines by itself gives way to macros,
// so that it does not matter how much of CUDA's names a version knows.
#pragma once

#ifndef __grid_constant__
#define __grid_constant__
#endif
#ifndef __align__
#define __align__(bytes) __attribute__((aligned(bytes)))
#endif
#undef isfinite
#define isfinite(x) __builtin_isfinite(x)
#undef __ldg
#define __ldg(address) (*(address))

// Chips with instructions for 16x16x16 products of matrices, by the wavefront of 64.
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define WINDROW_MFMA 1
#endif

// Arithmetic that is rounded as it is written, and never fused.
__device__ __forceinline__ float product_rounded(float a, float b) {
#pragma clang fp contract(off)
    return a * b;
}
__device__ __forceinline__ float sum_rounded(float a, float b) {
#pragma clang fp contract(off)
    return a + b;
}
#undef __fmul_rn
#undef __fadd_rn
#undef __fsub_rn
#define __fmul_rn(a, b) product_rounded(a, b)
#define __fadd_rn(a, b) sum_rounded(a, b)
#define __fsub_rn(a, b) sum_rounded(a, -(b))

// A warp is 32 threads, also where a wavefront has 64: then it is one of its halves.
__device__ __forceinline__ int lane_of_wavefront() {
    return static_cast<int>(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)));
}

// The value of another lane of the wavefront.
template <class V> __device__ __forceinline__ V value_of_lane(V value, int lane) {
    static_assert(sizeof(V) == 4 || sizeof(V) == 8, "whole words");
    if constexpr (sizeof(V) == 8) {
        const auto bits = __builtin_bit_cast(unsigned long long, value);
        const unsigned low = value_of_lane(static_cast<unsigned>(bits), lane);
        const unsigned high = value_of_lane(static_cast<unsigned>(bits >> 32), lane);
        return __builtin_bit_cast(V, low | static_cast<unsigned long long>(high) << 32);
    } else {
        return __builtin_bit_cast(V, __builtin_amdgcn_ds_bpermute(lane * 4, __builtin_bit_cast(int, value)));
    }
}

template <class V> __device__ __forceinline__ V value_of_warp(V value, int lane) {
    return value_of_lane(value, (lane_of_wavefront() & ~31) | (lane & 31));
}

template <class V> __device__ __forceinline__ V value_across_warp(V value, int bits) {
    return value_of_lane(value, lane_of_wavefront() ^ bits);
}

#undef __shfl_sync
#undef __shfl_xor_sync
#define __shfl_sync(mask, value, lane) value_of_warp(value, lane)
#define __shfl_xor_sync(mask, value, bits) value_across_warp(value, bits)

#ifdef WINDROW_MFMA
typedef float MatrixSums __attribute__((ext_vector_type(4)));

// Adds the product of a 16x16 and a 16x16 matrix. Lane l gives row (of b: column) l % 16 at depths l / 16 * 4 + 0..3, and
// gets the sums of rows l / 16 * 4 + 0..3 in column l % 16.
__device__ __forceinline__ void multiply_matrices(const unsigned short (&a)[4], const unsigned short (&b)[4], bool is_f16,
                                                  MatrixSums& sums) {
    typedef _Float16 Halves __attribute__((ext_vector_type(4)));
    typedef short Shorts __attribute__((ext_vector_type(4)));
    const Shorts x = {(short)a[0], (short)a[1], (short)a[2], (short)a[3]};
    const Shorts y = {(short)b[0], (short)b[1], (short)b[2], (short)b[3]};
    if (is_f16) {
        sums = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Halves, x), __builtin_bit_cast(Halves, y), sums, 0,
                                                     0, 0);
    } else {
        sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, sums, 0, 0, 0);
    }
}

// As above in f32, four depths at a time: the order of their sums is another one, the places are the same.
__device__ __forceinline__ void multiply_matrices(const float (&a)[4], const float (&b)[4], bool, MatrixSums& sums) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums = __builtin_amdgcn_mfma_f32_16x16x4f32(a[i], b[i], sums, 0, 0, 0);
}
#endif
