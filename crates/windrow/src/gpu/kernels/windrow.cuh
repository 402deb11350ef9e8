// Element types and vector accesses, without any header of CUDA.
#pragma once
#include "intrinsics.cuh"

typedef long long i64;

// Element types: how they lie in memory, and two of them in a 32-bit word.
struct F32 {
    typedef float Storage;
    static __device__ __forceinline__ float to_float(Storage s) { return s; }
    static __device__ __forceinline__ Storage from_float(float f) { return f; }
};

struct F16 {
    typedef unsigned short Storage;
    static __device__ __forceinline__ float to_float(Storage s) { return f16_to_float(s); }
    static __device__ __forceinline__ Storage from_float(float f) {
        return (Storage)floats_to_f16x2(f, 0.0f);
    }
    static __device__ __forceinline__ unsigned pack(float low, float high) {
        return floats_to_f16x2(low, high);
    }
    // On pairs, in the type itself.
    static __device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
        return f16x2_fma(a, b, c);
    }
    static __device__ __forceinline__ unsigned tanh2(unsigned a) { return f16x2_tanh(a); }
    static __device__ __forceinline__ unsigned max2(unsigned a, unsigned b) {
        return f16x2_max_nan(a, b);
    }
};

struct Bf16 {
    typedef unsigned short Storage;
    static __device__ __forceinline__ float to_float(Storage s) { return bf16_to_float(s); }
    static __device__ __forceinline__ Storage from_float(float f) {
        return (Storage)floats_to_bf16x2(f, 0.0f);
    }
    static __device__ __forceinline__ unsigned pack(float low, float high) {
        return floats_to_bf16x2(low, high);
    }
    // On pairs, in the type itself.
    static __device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
        return bf16x2_fma(a, b, c);
    }
    static __device__ __forceinline__ unsigned tanh2(unsigned a) { return bf16x2_tanh(a); }
    static __device__ __forceinline__ unsigned max2(unsigned a, unsigned b) {
        return bf16x2_max_nan(a, b);
    }
};

// A memory access of this many bytes.
template <int BYTES> struct Access;
template <> struct Access<2> { typedef unsigned short Type; };
template <> struct Access<4> { typedef unsigned Type; };
template <> struct Access<8> { typedef uint2 Type; };
template <> struct Access<16> { typedef uint4 Type; };

// N elements as they lie in memory.
template <class T, int N> struct Raw {
    static constexpr int BYTES = N * (int)sizeof(typename T::Storage);
    static constexpr int WORDS = (BYTES + 3) / 4;
    unsigned words[WORDS];

    __device__ __forceinline__ float get(int i) const {
        if constexpr (sizeof(typename T::Storage) == 4) {
            return __uint_as_float(words[i]);
        } else {
            return T::to_float((unsigned short)(words[i / 2] >> (i % 2 * 16)));
        }
    }

    // An element as it is stored.
    __device__ __forceinline__ typename T::Storage stored(int i) const {
        if constexpr (sizeof(typename T::Storage) == 4) {
            return __uint_as_float(words[i]);
        } else {
            return (unsigned short)(words[i / 2] >> (i % 2 * 16));
        }
    }

    __device__ __forceinline__ void set_stored(int i, typename T::Storage value) {
        if constexpr (sizeof(typename T::Storage) == 4) {
            words[i] = __float_as_uint(value);
        } else {
            unsigned kept = i % 2 ? words[i / 2] & 0xffff : 0;
            words[i / 2] = kept | (unsigned)value << (i % 2 * 16);
        }
    }

    __device__ __forceinline__ void unpack(float (&out)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = get(i);
    }

    __device__ __forceinline__ void pack(const float (&in)[N]) {
        if constexpr (sizeof(typename T::Storage) == 4) {
#pragma unroll
            for (int i = 0; i < N; i++) words[i] = __float_as_uint(in[i]);
        } else if constexpr (N == 1) {
            words[0] = T::from_float(in[0]);
        } else {
#pragma unroll
            for (int i = 0; i < N / 2; i++) words[i] = T::pack(in[2 * i], in[2 * i + 1]);
        }
    }

    // In accesses of A elements; `p` must be aligned to A elements.
    template <int A> __device__ __forceinline__ void load(const typename T::Storage *p) {
        constexpr int STEP = A * (int)sizeof(typename T::Storage);
        typedef typename Access<STEP>::Type Type;
        static_assert(BYTES % STEP == 0, "whole accesses");
#pragma unroll
        for (int i = 0; i < BYTES / STEP; i++) {
            Type v = ((const Type *)p)[i];
            if constexpr (STEP == 16) {
                words[4 * i] = v.x, words[4 * i + 1] = v.y;
                words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
            } else if constexpr (STEP == 8) {
                words[2 * i] = v.x, words[2 * i + 1] = v.y;
            } else if constexpr (STEP == 4) {
                words[i] = v;
            } else {
                words[i / 2] = i % 2 ? words[i / 2] | (unsigned)v << 16 : v;
            }
        }
    }

    template <int A> __device__ __forceinline__ void store(typename T::Storage *p) const {
        constexpr int STEP = A * (int)sizeof(typename T::Storage);
        typedef typename Access<STEP>::Type Type;
#pragma unroll
        for (int i = 0; i < BYTES / STEP; i++) {
            if constexpr (STEP == 16) {
                ((Type *)p)[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2],
                                            words[4 * i + 3]);
            } else if constexpr (STEP == 8) {
                ((Type *)p)[i] = make_uint2(words[2 * i], words[2 * i + 1]);
            } else if constexpr (STEP == 4) {
                ((Type *)p)[i] = words[i];
            } else {
                ((Type *)p)[i] = (Type)(words[i / 2] >> (i % 2 * 16));
            }
        }
    }
};

template <int A, class S> __device__ __forceinline__ bool is_aligned(const S *p) {
    return ((unsigned long long)p & (A * sizeof(S) - 1)) == 0;
}
