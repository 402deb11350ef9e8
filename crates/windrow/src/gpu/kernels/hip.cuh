// CUDA names that HIP spells differently or lacks. Only hiprtc includes this file. The names are macros, which take
// precedence over hiprtc's own definitions. So it does not matter which of them a version has.
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

#ifdef __GFX9__
constexpr int WAVEFRONT = 64;
#else
constexpr int WAVEFRONT = 32;
#endif

// Instructions for 16x16x16 products of matrices. Those for wavefronts of 64 accept f16, bf16 and f32; those for
// wavefronts of 32 accept no f32.
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define WINDROW_MFMA 1
#elif defined(__GFX11__) || defined(__gfx1200__) || defined(__gfx1201__)
#define WINDROW_WMMA 1
#endif
#if defined(WINDROW_MFMA) || defined(WINDROW_WMMA) && !defined(ELEMENT_F32)
#define MATRIX_CORES 1
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

// The threads of a warp are one wavefront's: what it has written to shared memory before, its threads read after.
#undef __syncwarp
#define __syncwarp()                                                                                                   \
    (__builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront"), __builtin_amdgcn_wave_barrier(),                           \
     __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront"))

#ifdef MATRIX_CORES
// Of the product of a 16x16 and a 16x16 matrix a lane gives elements of row (of b: column) lane % 16, and gets sums of
// column lane % 16: so many, and where they are.
constexpr int MATRIX_SUMS = 256 / WAVEFRONT;
typedef float MatrixSums __attribute__((ext_vector_type(MATRIX_SUMS)));
#ifdef WINDROW_MFMA
constexpr int MATRIX_ELEMENTS = 4;
__device__ __forceinline__ int matrix_depth(int element) { return threadIdx.x % 64 / 16 * 4 + element; }
__device__ __forceinline__ int matrix_row(int sum) { return threadIdx.x % 64 / 16 * 4 + sum; }
#elif defined(__GFX11__) // both halves of a wavefront give the same
constexpr int MATRIX_ELEMENTS = 16;
__device__ __forceinline__ int matrix_depth(int element) { return element; }
__device__ __forceinline__ int matrix_row(int sum) { return 2 * sum + threadIdx.x % 32 / 16; }
#else
constexpr int MATRIX_ELEMENTS = 8;
__device__ __forceinline__ int matrix_depth(int element) { return element / 4 * 8 + threadIdx.x % 32 / 16 * 4 + element % 4; }
__device__ __forceinline__ int matrix_row(int sum) { return threadIdx.x % 32 / 16 * 8 + sum; }
#endif

// Adds the product.
__device__ __forceinline__ void multiply_matrices(const unsigned short (&a)[MATRIX_ELEMENTS],
                                                  const unsigned short (&b)[MATRIX_ELEMENTS], bool is_f16,
                                                  MatrixSums& sums) {
    typedef _Float16 Halves __attribute__((ext_vector_type(MATRIX_ELEMENTS)));
    typedef short Shorts __attribute__((ext_vector_type(MATRIX_ELEMENTS)));
    Shorts x, y;
#pragma unroll
    for (int i = 0; i < MATRIX_ELEMENTS; i++) x[i] = (short)a[i], y[i] = (short)b[i];
    const Halves u = __builtin_bit_cast(Halves, x), v = __builtin_bit_cast(Halves, y);
#ifdef WINDROW_MFMA
    sums = is_f16 ? __builtin_amdgcn_mfma_f32_16x16x16f16(u, v, sums, 0, 0, 0)
                  : __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, sums, 0, 0, 0);
#elif defined(__GFX11__)
    sums = is_f16 ? __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(u, v, sums)
                  : __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(x, y, sums);
#else
    sums = is_f16 ? __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(u, v, sums)
                  : __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(x, y, sums);
#endif
}
#endif

#ifdef WINDROW_MFMA
// As above in f32, four depths at a time: the order of their sums is another one, the places are the same.
__device__ __forceinline__ void multiply_matrices(const float (&a)[4], const float (&b)[4], bool, MatrixSums& sums) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums = __builtin_amdgcn_mfma_f32_16x16x4f32(a[i], b[i], sums, 0, 0, 0);
}
#endif
