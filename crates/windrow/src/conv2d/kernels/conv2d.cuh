// What the kernels of conv2d share: the element type (ELEMENT_F16, ELEMENT_BF16 or ELEMENT_F32 is defined), packed
// half arithmetic, vector stores, and EPILOGUE, the activation (see activation.cuh).

#include "windrow.cuh"
#include "activation.cuh"

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if defined(ELEMENT_F32)
typedef F32 T;
#define MMA_TYPE "f16" // of split operands
#elif defined(ELEMENT_F16)
typedef F16 T;
#define MMA_TYPE "f16"
#else
typedef Bf16 T;
#define MMA_TYPE "bf16"
#endif
typedef T::Storage Element;
constexpr bool IS_F32 = sizeof(Element) == 4;

__device__ __forceinline__ float to_float(Element x) { return T::to_float(x); }
__device__ __forceinline__ Element from_float(float x) { return T::from_float(x); }

#ifdef EPILOGUE
__device__ __forceinline__ float epilogue(float x) { return activate<EPILOGUE, IS_F32>(x); }
#endif

// A 16-byte vector of neighbouring elements.
template <int N> __device__ __forceinline__ void store_vector(Element* to, const float (&v)[N]) {
    Raw<T, N> raw;
    raw.pack(v);
    // As assembly: the compiler takes stores of a structure apart.
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(raw.words[0]), "r"(raw.words[1]),
                 "r"(raw.words[2]), "r"(raw.words[3]) : "memory");
}

// Two neighbouring elements, aligned as one.
__device__ __forceinline__ void store_pair(Element* to, float2 v) {
    const float values[2] = {v.x, v.y};
    Raw<T, 2> raw;
    raw.pack(values);
    raw.store<2>(to);
}

// Keeps the compiler from remembering what it computed from `p`, which would take registers.
template <class P> __device__ __forceinline__ void forget(P*& p) { asm volatile("" : "+l"(p)); }

__device__ __forceinline__ float2 unpack_f16x2(u32 v) {
    return make_float2(f16_to_float(v & 0xffff), f16_to_float(v >> 16));
}

// The nearest number with TF32's mantissa, as bits.
__device__ __forceinline__ u32 float_to_tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

#ifndef ELEMENT_F32
// c * x + y on two packed elements.
__device__ __forceinline__ u32 fma_x2(float c, u32 x, u32 y) { return T::fma2(T::pack(c, c), x, y); }
#endif

__device__ __forceinline__ uint2 load_shared_v2(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}

// The bits of |x|, 0 for infinities and NaN. Bits of magnitudes compare as the magnitudes do.
__device__ __forceinline__ u32 finite_magnitude(float x) {
    const u32 bits = __float_as_uint(x) & 0x7fffffff;
    return bits < 0x7f800000 ? bits : 0;
}

// The largest of all threads of a block. Every thread must come here.
__device__ __forceinline__ u32 largest_of_block(u32 mine) {
    __shared__ u32 largest;
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) mine = max(mine, __shfl_xor_sync(~0u, mine, lanes));
    if (threadIdx.x % 32 == 0) atomicMax(&largest, mine);
    __syncthreads();
    return largest;
}

// Raises `to` to the largest of all threads of a block. Every thread must come here.
__device__ __forceinline__ void store_largest(u32* to, u32 mine) {
    mine = largest_of_block(mine);
    if (threadIdx.x == 0) atomicMax(to, mine);
}

// x as the sum of two halves.
struct Halves {
    u16 high, low;
    __device__ __forceinline__ explicit Halves(float x) {
        high = static_cast<u16>(floats_to_f16x2(x, 0));
        low = static_cast<u16>(floats_to_f16x2(x - f16_to_float(high), 0));
    }
};

// 2^exponent for exponents of normal numbers, and back.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }
__device__ __forceinline__ int exponent_of(float power) { return (__float_as_int(power) >> 23) - 127; }

// The power of two that brings numbers up to |x|, given by its bits, below 2^(exponent + 1); or its inverse.
__device__ __forceinline__ float power_of_two_scale(u32 max_bits, int exponent, bool inverse = false) {
    if (max_bits == 0) return 1;
    int e = exponent - (static_cast<int>(max_bits >> 23) - 127);
    e = min(max(e, -126), 126);
    return power_of_two(inverse ? -e : e);
}

// Division of numbers below 2^31 by a constant: the high word of a product.
struct Divisor {
    u32 value, factor, shift;
    __device__ __forceinline__ int divide(int n) const {
        return value == 1 ? n : static_cast<int>(__umulhi(n, factor) >> shift);
    }
};
