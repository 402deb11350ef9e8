// The common part of conv2d's kernels: the element type (ELEMENT_F16, ELEMENT_BF16 or ELEMENT_F32 is defined), packed
// f16/bf16 arithmetic, vector stores, EPILOGUE, the activation (see activation.cuh), and RESIDUAL 0 or 1: a tensor laid
// out as y is added to the sums and the bias before that.

#include "windrow.cuh"
#include "activation.cuh"

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef TF32
#define TF32 0 // 1: f32 is multiplied as TF32
#endif
#if defined(ELEMENT_F32)
typedef F32 T;
#if TF32
#define MMA_TYPE "tf32"
#else
#define MMA_TYPE "f16" // of split operands
#endif
#elif defined(ELEMENT_F16)
typedef F16 T;
#define MMA_TYPE "f16"
#else
typedef Bf16 T;
#define MMA_TYPE "bf16"
#endif
typedef T::Storage Element;
constexpr bool IS_F32 = sizeof(Element) == 4;
#ifdef ELEMENT_F16
constexpr bool IS_F16 = true;
#else
constexpr bool IS_F16 = false;
#endif

__device__ __forceinline__ float to_float(Element x) { return T::to_float(x); }
__device__ __forceinline__ Element from_float(float x) { return T::from_float(x); }

#ifdef EPILOGUE
__device__ __forceinline__ float epilogue(float x) { return activate<EPILOGUE, IS_F32>(x); }
#endif

// First fields of the parameters of several kernels, as in shape.rs: the tensor that a kernel writes, and the bias and
// residual that it adds.
struct Output {
    const void* bias;        // [k] or null
    const Element* residual; // laid out as y
    Element* y;
    i64 y_n, y_k, y_h, y_w;  // strides in elements
    i64 bias_stride;
    int bias_is_float;
    int k, oh, ow;
};

// A convolution from x to y, or from dy to dx in a data gradient.
struct ConvShape : Output {
    const Element* x;
    i64 x_n, x_c, x_h, x_w;  // strides in elements
    int h, w;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

// The frames of a video that the images of y read, as in frames.rs. Kernels read them if FRAMES is 1.
#ifndef FRAMES
#define FRAMES 0
#endif
struct Frames {
    const Element* initial; // the frames before the first one
    i64 x_t;                // strides in elements
    i64 initial_t, initial_c, initial_h, initial_w;
    i64 filter_t;
    int t, kt;              // frames of x and of the filter
    int stride, padding, dilation;
    int repeats;            // frames before the first one are copies of it
    int initial_count;      // 0 if there are no initial frames

    // The frame of x that an image of y reads through a frame of the filter.
    __device__ __forceinline__ int number(int image, int tap) const { return image * stride + tap * dilation - padding; }

    // The place of a frame of x, also of one before the first or after the last one; null for zeros.
    __device__ __forceinline__ const Element* find(const Element* x, int number, bool& is_initial) const {
        is_initial = false;
        if (number >= t) return nullptr;
        if (number >= 0 || repeats) return x + max(number, 0) * x_t;
        is_initial = initial_count > 0;
        return is_initial ? initial + (initial_count + number) * initial_t : nullptr;
    }
};

// The address of the residual that is added at `to` of y.
__device__ __forceinline__ const Element* beside(const Element* residual, const Element* y, const Element* to) {
    return residual + (to - y);
}

// The bias of an output channel, 0 if there is none.
template <class P> __device__ __forceinline__ float bias_at(const P& p, i64 k) {
    if (p.bias == nullptr) return 0;
    return p.bias_is_float ? static_cast<const float*>(p.bias)[k * p.bias_stride]
                           : to_float(static_cast<const Element*>(p.bias)[k * p.bias_stride]);
}

// A 16-byte vector of neighbouring elements.
template <int N> __device__ __forceinline__ void store_vector(Element* to, const float (&v)[N]) {
    Raw<T, N> raw;
    raw.pack(v);
#if WINDROW_PTX
    // As assembly: the compiler takes stores of a structure apart.
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(raw.words[0]), "r"(raw.words[1]),
                 "r"(raw.words[2]), "r"(raw.words[3]) : "memory");
#else
    raw.template store<N>(to);
#endif
}

// Two neighbouring elements, aligned as one.
__device__ __forceinline__ void store_pair(Element* to, float2 v) {
    const float values[2] = {v.x, v.y};
    Raw<T, 2> raw;
    raw.pack(values);
    raw.store<2>(to);
}

#if WINDROW_PTX
// Asks for the line of `p` to come to the second-level cache.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Keeps the compiler from holding values that it computed from `p`, because they would take registers.
template <class P> __device__ __forceinline__ void forget(P*& p) { asm volatile("" : "+l"(p)); }
#endif

__device__ __forceinline__ float2 unpack_f16x2(u32 v) {
    return make_float2(f16_to_float(v & 0xffff), f16_to_float(v >> 16));
}

#if WINDROW_PTX
// The nearest number with TF32's mantissa, as bits.
__device__ __forceinline__ u32 float_to_tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
#endif

#ifndef ELEMENT_F32
// c * x + y on two packed elements.
__device__ __forceinline__ u32 fma_x2(float c, u32 x, u32 y) { return T::fma2(T::pack(c, c), x, y); }
#endif

#if WINDROW_PTX
__device__ __forceinline__ uint2 load_shared_v2(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}
#endif

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

// The checksums that are stored after a packed filter, so that the next packing kernel finds out what has changed.
struct Seen {
    ulonglong2* digests; // of the channels that each block packed; null if nothing is kept
    u64 ticket;          // of this memory alone, so that its content before the first packing is no valid digest
};

// A checksum of 128 bits of the taps that a block packs: a sum over channels of words in which all bits of the
// channel's taps are mixed. Only the content decides. If it is the same, the packed filter is left as it is.
struct Digest {
    u64 a = 0, b = 0;

    static __device__ __forceinline__ u64 rotate(u64 x, int bits) { return x << bits | x >> (64 - bits); }
    static __device__ __forceinline__ u64 mixed(u64 x) {
        x = (x ^ x >> 33) * 0xff51afd7ed558ccd;
        x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53;
        return x ^ x >> 33;
    }
    static __device__ __forceinline__ u64 bits(float x) { return __float_as_uint(x); }
    static __device__ __forceinline__ u64 bits(u16 x) { return x; }

    template <int N> __device__ __forceinline__ void add(const Seen& seen, int channel, const Element (&taps)[N]) {
        constexpr int IN_WORD = 8 / sizeof(Element), BITS = 8 * sizeof(Element);
        u64 x = seen.ticket + channel, y = seen.ticket ^ static_cast<u64>(channel) << 32;
#pragma unroll
        for (int i = 0; i < N; i += IN_WORD) {
            u64 word = 0;
#pragma unroll
            for (int j = 0; j < IN_WORD && i + j < N; j++) word |= bits(taps[i + j]) << (j * BITS);
            x = rotate((x ^ word) * 0x9e3779b97f4a7c15, 31);
            y = rotate((y + word) * 0xc2b2ae3d27d4eb4f, 27);
        }
        a += mixed(x);
        b += mixed(y);
    }

    // Adds the checksums of all threads of a block, which call this together. True in all of them if block `part` has
    // packed the same before.
    __device__ __forceinline__ bool is_known(const Seen& seen, i64 part) {
        if (seen.digests == nullptr) return false;
        __shared__ u64 total[2];
        if (threadIdx.x == 0) {
            total[0] = mixed(seen.ticket);
            total[1] = mixed(~seen.ticket);
        }
        __syncthreads();
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            a += __shfl_xor_sync(~0u, a, lanes);
            b += __shfl_xor_sync(~0u, b, lanes);
        }
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&total[0], a);
            atomicAdd(&total[1], b);
        }
        __syncthreads();
        a = total[0];
        b = total[1];
        const ulonglong2 before = seen.digests[part];
        return before.x == a && before.y == b;
    }

    // Once the block has packed.
    __device__ __forceinline__ void keep(const Seen& seen, i64 part) const {
        if (seen.digests == nullptr) return;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) seen.digests[part] = make_ulonglong2(a, b);
    }
};

// x as the sum of two f16 parts. Tensor cores truncate sums, so sums shrink by nearly the same factor, whatever the
// data. The low part of a filter carries this factor, relative to x.
struct Halves {
    u16 high, low;
    __device__ __forceinline__ explicit Halves(float x, float shrinkage = 0) {
        high = static_cast<u16>(floats_to_f16x2(x, 0));
        low = static_cast<u16>(floats_to_f16x2(fmaf(x, shrinkage, x - f16_to_float(high)), 0));
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
