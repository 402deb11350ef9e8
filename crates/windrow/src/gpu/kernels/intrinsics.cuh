// Inline assembly for NVIDIA GPUs that several operators use, each piece with a portable fallback for other compilers
// and older architectures.
#pragma once

#if defined(__CUDA_ARCH__)
#define WINDROW_PTX __CUDA_ARCH__
#else
#define WINDROW_PTX 0
#endif

#ifdef __HIP__
#include "hip.cuh"
#endif

// Waits until the kernels launched before this one are done and what they wrote can be seen. For kernels
// that the host launches as `overlapped`: their blocks may start while those still run. Every such kernel
// calls it in every thread, before all but hints.
//
// EARLY   let the next kernel's blocks start as soon as there is room for them
__device__ __forceinline__ void wait_for_previous() {
#if WINDROW_PTX >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#if EARLY
    asm volatile("griddepcontrol.launch_dependents;");
#endif
#endif
}

// 2^x; relative error 2^-22, results below 2^-126 become 0.
__device__ __forceinline__ float exp2_fast(float x) {
#if WINDROW_PTX
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#elif defined(__HIP__)
    return __builtin_amdgcn_exp2f(x);
#else
    return exp2f(x);
#endif
}

// 1 / x within one unit in the last place, for 2^-126 < |x| < 2^126.
__device__ __forceinline__ float reciprocal_fast(float x) {
#if WINDROW_PTX
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#elif defined(__HIP__)
    return __builtin_amdgcn_rcpf(x);
#else
    return 1.0f / x;
#endif
}

// 1 / sqrt(x) within two units in the last place, for normal x > 0; 0 for infinity.
__device__ __forceinline__ float rsqrt_fast(float x) {
#if WINDROW_PTX
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#elif defined(__HIP__)
    return __builtin_amdgcn_rsqf(x);
#else
    return 1.0f / sqrtf(x);
#endif
}

// The larger of two numbers, NaN if either is; +0 is larger than -0.
__device__ __forceinline__ float max_nan(float a, float b) {
#if WINDROW_PTX >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#elif defined(__HIP__)
    return __builtin_isunordered(a, b) ? a + b : __builtin_fmaxf(a, b);
#else
    return a < b || b != b ? b : a;
#endif
}

// The smaller of two numbers, NaN if either is.
__device__ __forceinline__ float min_nan(float a, float b) {
    return -max_nan(-a, -b);
}

__device__ __forceinline__ float f16_to_float(unsigned short h) {
#if WINDROW_PTX
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(h));
    return y;
#else
    return (float)__builtin_bit_cast(_Float16, h);
#endif
}

// Round to nearest even; `low` in the lower half of the word.
__device__ __forceinline__ unsigned floats_to_f16x2(float low, float high) {
#if WINDROW_PTX >= 800
    unsigned y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
#elif WINDROW_PTX
    unsigned short a, b;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
    return a | (unsigned)b << 16;
#else
#ifdef __HIP__
    // Else the compiler may round a product and convert it in one instruction, which loses the sign of zero in some
    // kernels and not in others.
    asm("" : "+v"(low));
    asm("" : "+v"(high));
#endif
    return __builtin_bit_cast(unsigned short, (_Float16)low) |
           (unsigned)__builtin_bit_cast(unsigned short, (_Float16)high) << 16;
#endif
}

__device__ __forceinline__ unsigned short float_to_bf16_bits(float x) {
    unsigned bits = __float_as_uint(x);
    if (x != x) return (unsigned short)(bits >> 16 | 0x40);
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ unsigned floats_to_bf16x2(float low, float high) {
#if WINDROW_PTX >= 800
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
#else
    return float_to_bf16_bits(low) | (unsigned)float_to_bf16_bits(high) << 16;
#endif
}

// a * b + c on pairs of f16 or bf16, each rounded once.
__device__ __forceinline__ unsigned f16x2_fma(unsigned a, unsigned b, unsigned c) {
#if WINDROW_PTX
    unsigned y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
#else
    return floats_to_f16x2(
        fmaf(f16_to_float(a & 0xffff), f16_to_float(b & 0xffff), f16_to_float(c & 0xffff)),
        fmaf(f16_to_float(a >> 16), f16_to_float(b >> 16), f16_to_float(c >> 16)));
#endif
}

__device__ __forceinline__ float bf16_to_float(unsigned short h) {
    return __uint_as_float((unsigned)h << 16);
}

__device__ __forceinline__ unsigned bf16x2_fma(unsigned a, unsigned b, unsigned c) {
#if WINDROW_PTX >= 800
    unsigned y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
#else
    return floats_to_bf16x2(
        fmaf(bf16_to_float(a & 0xffff), bf16_to_float(b & 0xffff), bf16_to_float(c & 0xffff)),
        fmaf(bf16_to_float(a >> 16), bf16_to_float(b >> 16), bf16_to_float(c >> 16)));
#endif
}

// tanh; absolute error about one unit of f32 at 1.
__device__ __forceinline__ float tanh_fast(float x) {
#ifdef __HIP__
    return 1.0f - 2.0f * reciprocal_fast(1.0f + exp2_fast(2.88539008f * x));
#else
    return tanhf(x);
#endif
}

// tanh of a pair of f16 or bf16; absolute error about one unit at 1.
__device__ __forceinline__ unsigned f16x2_tanh(unsigned a) {
#if WINDROW_PTX
    unsigned y;
    asm("tanh.approx.f16x2 %0, %1;" : "=r"(y) : "r"(a));
    return y;
#else
    return floats_to_f16x2(tanh_fast(f16_to_float(a & 0xffff)), tanh_fast(f16_to_float(a >> 16)));
#endif
}

__device__ __forceinline__ unsigned bf16x2_tanh(unsigned a) {
#if WINDROW_PTX >= 900
    unsigned y;
    asm("tanh.approx.bf16x2 %0, %1;" : "=r"(y) : "r"(a));
    return y;
#else
    return floats_to_bf16x2(tanh_fast(bf16_to_float(a & 0xffff)), tanh_fast(bf16_to_float(a >> 16)));
#endif
}

// The larger of each pair, NaN if either is.
__device__ __forceinline__ unsigned f16x2_max_nan(unsigned a, unsigned b) {
#if WINDROW_PTX >= 800
    unsigned y;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#else
    return floats_to_f16x2(max_nan(f16_to_float(a & 0xffff), f16_to_float(b & 0xffff)),
                           max_nan(f16_to_float(a >> 16), f16_to_float(b >> 16)));
#endif
}

__device__ __forceinline__ unsigned bf16x2_max_nan(unsigned a, unsigned b) {
#if WINDROW_PTX >= 800
    unsigned y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
#else
    return floats_to_bf16x2(max_nan(bf16_to_float(a & 0xffff), bf16_to_float(b & 0xffff)),
                            max_nan(bf16_to_float(a >> 16), bf16_to_float(b >> 16)));
#endif
}

// A value past the first cache of the multiprocessor, which might hold what others have changed since.
__device__ __forceinline__ int load_past_l1(const int *p) {
#if WINDROW_PTX
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
#else
    return __atomic_load_n(p, __ATOMIC_RELAXED);
#endif
}

__device__ __forceinline__ long long load_past_l1(const long long *p) {
#if WINDROW_PTX
    long long v;
    asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
#else
    return __atomic_load_n(p, __ATOMIC_RELAXED);
#endif
}

// A hint that these bytes will be read.
__device__ __forceinline__ void prefetch_l2(const void *p) {
#if WINDROW_PTX
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// In one instruction, which compilers find only sometimes.
__device__ __forceinline__ long long multiply_wide(int a, int b) {
#if WINDROW_PTX
    long long v;
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(v) : "r"(a), "r"(b));
    return v;
#else
    return (long long)a * b;
#endif
}
