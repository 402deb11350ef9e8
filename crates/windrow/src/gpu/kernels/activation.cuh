// Activations and their derivatives in f32.
//
// GELU is computed as max(x, 0) - |x| * tail(|x|), where the tail falls from 1/2 to 0. So nothing cancels for negative
// x, and +0 and -0 keep their signs. |x| is limited to the point where the tail vanishes, so infinities give the right
// results. There are two accuracies:
//   ACCURATE   within a few units in the last place of f32, also for subnormal results, because rounding errors of
//              the argument of exp are carried along
//   otherwise  relative error about 2^-15, for f16 and bf16. The tail is computed with a factor 2^32, so that a
//              subnormal result is rounded once, at the end
#pragma once
#include "intrinsics.cuh"

enum Activation { IDENTITY, RELU, SILU, GELU, GELU_TANH, RELU6, LEAKY_RELU, HARDSWISH };

// The slope of LEAKY_RELU, not 0; kernels with other activations have none.
#ifndef NEGATIVE_SLOPE
#define NEGATIVE_SLOPE 1.0f
#endif

// x / (1 + exp(-x)). Below -87, where the denominator would become infinite, numerator and denominator are
// multiplied by 2^-32: from -109 on the result is -0 in every type.
__device__ __forceinline__ float silu(float x) {
    x = max_nan(x, -120.0f);
    bool far = x < -87.0f;
    float e = exp2_fast(fmaf(-1.44269504f, x, far ? -32.0f : 0.0f));
    return (far ? x * 0x1p-32f : x) * reciprocal_fast(1.0f + e);
}

// 1 / x within half a unit in the last place, nearly always.
__device__ __forceinline__ float reciprocal_refined(float x) {
    float r = reciprocal_fast(x);
    return fmaf(r, fmaf(-x, r, 1.0f), r);
}

// 2 sqrt(2 / pi) log2(e) and that times 0.044715, each in two parts.
#define TANH_C1 2.30220819f
#define TANH_C1_LOW 1.2948402e-08f
#define TANH_C3 0.10294324f
#define TANH_C3_LOW -2.01619844e-09f

struct Split {
    float high, low;
};

// c1 a + c3 a^3 as a rounded value and what it lacks. The intrinsics keep the compiler from fusing a
// product whose rounding is being measured.
__device__ __forceinline__ Split tanh_exponent(float a) {
    float s = __fmul_rn(a, a), v = __fmul_rn(TANH_C3, s);
    float p = __fadd_rn(TANH_C1, v), from_v = __fsub_rn(p, TANH_C1);
    float p_low = __fadd_rn(__fsub_rn(TANH_C1, __fsub_rn(p, from_v)), __fsub_rn(v, from_v));
    p_low += fmaf(TANH_C3, s, -v) + TANH_C1_LOW;
    p_low = fmaf(TANH_C3, fmaf(a, a, -s), fmaf(TANH_C3_LOW, s, p_low));
    float z = __fmul_rn(a, p);
    return {z, fmaf(a, p_low, fmaf(a, p, -z))};
}

// 2^-(high + low) of a tail. Where it comes near the smallest normal number it is formed with a factor 2^64, so that
// what is made of it is rounded once, at the end, when `unscale` is multiplied in.
struct Falling {
    float value, unscale;
};

__device__ __forceinline__ Falling exp2_negative(Split z) {
    bool far = z.high > 64.0f;
    float e = exp2_fast((far ? 64.0f : 0.0f) - z.high);
    return {fmaf(e, -0.69314718f * z.low, e), far ? 0x1p-64f : 1.0f};
}

// x / (1 + 2^-(c1 x + c3 x^3))
template <bool ACCURATE> __device__ __forceinline__ float gelu_tanh(float x) {
    float a = fminf(fabsf(x), ACCURATE ? 11.0f : 16.0f);
    float positive = max_nan(x, -0.0f);
    if constexpr (!ACCURATE) {
        float e = exp2_fast(fmaf(-a, fmaf(TANH_C3, a * a, TANH_C1), 32.0f));
        return fmaf(-(a * e), reciprocal_fast(e + 0x1p32f), positive);
    } else {
        // Far out the sum is 1.
        Falling e = exp2_negative(tanh_exponent(a));
        float r = e.unscale < 1.0f ? e.unscale : reciprocal_refined(e.value + 1.0f);
        return fmaf(-(a * e.value), r, positive);
    }
}

// 0.5 erfcx(a / sqrt 2) / t, as polynomials fitted for least relative error over 0 <= a <= 14.5:
// 2^-14.9 for t = 1 / (1 + 0.375 a), scaled by -2^-32, or 2^-24.9 for t = 1 / (1 + 0.35 a) in 1 - 2 t.
template <bool ACCURATE> struct NormalTail;

template <> struct NormalTail<false> {
    static constexpr float SLOPE = 0.375f;
    static __device__ __forceinline__ float polynomial(float t) {
        float p = 0.09031786571902087f * 0x1p-32f;
        p = fmaf(p, t, -0.1995586943443156f * 0x1p-32f);
        p = fmaf(p, t, -0.08412311879059708f * 0x1p-32f);
        p = fmaf(p, t, -0.157558456550039f * 0x1p-32f);
        return fmaf(p, t, -0.14907963738768826f * 0x1p-32f);
    }
};

template <> struct NormalTail<true> {
    static constexpr float SLOPE = 0.35f;
    static __device__ __forceinline__ float polynomial(float t) {
        float q = fmaf(-2.0f, t, 1.0f);
        float p = -0.00011389811016346391f;
        p = fmaf(p, q, -0.00021405789309620043f);
        p = fmaf(p, q, 0.0006900627653416602f);
        p = fmaf(p, q, 0.0017543811014829962f);
        p = fmaf(p, q, -0.005108741027725992f);
        p = fmaf(p, q, -0.010233857597980081f);
        p = fmaf(p, q, 0.07109894495547524f);
        p = fmaf(p, q, -0.17149580430581965f);
        return fmaf(p, q, 0.2532442767855122f);
    }
};

// exp(-a^2 / 2) for a <= 16, to f32's precision.
__device__ __forceinline__ Falling gauss(float a) {
    float s = __fmul_rn(a, a), high = __fmul_rn(s, 0.72134751f);
    float low = fmaf(s, 9.62981496e-9f, fmaf(s, 0.72134751f, -high));
    low = fmaf(fmaf(a, a, -s), 0.72134751f, low);
    return exp2_negative({high, low});
}

// x Phi(x) = max(x, 0) - |x| Phi(-|x|)
template <bool ACCURATE> __device__ __forceinline__ float gelu(float x) {
    typedef NormalTail<ACCURATE> Tail;
    float a = fminf(fabsf(x), 16.0f);
    float positive = max_nan(x, -0.0f);
    float d = fmaf(Tail::SLOPE, a, 1.0f);
    if constexpr (ACCURATE) {
        float t = reciprocal_refined(d);
        Falling e = gauss(a);
        return fmaf(-(a * t) * e.value, e.unscale * Tail::polynomial(t), positive);
    } else {
        float t = reciprocal_fast(d);
        float e = exp2_fast(fmaf(a * -0.72134752f, a, 32.0f));
        return fmaf(a * t * e, Tail::polynomial(t), positive);
    }
}

template <int ACTIVATION, bool ACCURATE> __device__ __forceinline__ float activate(float x) {
    if constexpr (ACTIVATION == RELU) return max_nan(x, 0.0f);
    if constexpr (ACTIVATION == RELU6) return min_nan(max_nan(x, 0.0f), 6.0f);
    if constexpr (ACTIVATION == LEAKY_RELU) return x < 0.0f ? NEGATIVE_SLOPE * x : x;
    // The sum is exact near -3, so that nothing cancels. The factor of 3 is 1.
    if constexpr (ACTIVATION == HARDSWISH) return max_nan(x, -3.0f) * fminf(fmaxf((x + 3.0f) * (1.0f / 6), 0.0f), 1.0f);
    if constexpr (ACTIVATION == SILU) return silu(x);
    if constexpr (ACTIVATION == GELU) return gelu<ACCURATE>(x);
    if constexpr (ACTIVATION == GELU_TANH) return gelu_tanh<ACCURATE>(x);
    return x;
}

// The derivative at x. With s the logistic function of z: d/dx x s(z(x)) = s + x s (1 - s) z'(x).
template <int ACTIVATION> __device__ __forceinline__ float activate_gradient(float x) {
    if constexpr (ACTIVATION == RELU) return x > 0.0f || x != x ? (x != x ? x : 1.0f) : 0.0f;
    if constexpr (ACTIVATION == LEAKY_RELU) return x != x ? x : x > 0.0f ? 1.0f : NEGATIVE_SLOPE;
    if constexpr (ACTIVATION == HARDSWISH) {
        float y = x > -3.0f ? (x + 1.5f) * (1.0f / 3) : 0.0f; // exactly 0 at -1.5
        return x != x ? x : x >= 3.0f ? 1.0f : y;
    }
    if constexpr (ACTIVATION == RELU6) return x != x ? x : x > 0.0f && x < 6.0f ? 1.0f : 0.0f;
    if constexpr (ACTIVATION == SILU) {
        // s (1 + x (1 - s)); an absolute error of some units in the last place of 1 is small beside that
        // of the sum before it.
        x = min_nan(max_nan(x, -120.0f), 120.0f);
        float s = reciprocal_fast(1.0f + exp2_fast(-1.44269504f * x));
        return fmaf(s, fmaf(-x, s, x), s);
    }
    if constexpr (ACTIVATION == GELU_TANH) {
        float a = fminf(fabsf(x), 16.0f), s = a * a;
        float slope = fmaf(0.2140644488f, s, 1.5957691216f);
        Falling e = exp2_negative(tanh_exponent(a));
        float r = 1.0f / fmaf(e.value, e.unscale, 1.0f);
        // At |x|: the falling part, so that a negative x does not cancel.
        float tail = e.value * r, curve = a * tail * r * slope;
        float y = x < 0.0f ? (tail - curve) * e.unscale : fmaf(curve, e.unscale, r);
        return x != x ? x : y;
    }
    if constexpr (ACTIVATION == GELU) {
        float a = fminf(fabsf(x), 16.0f);
        float t = reciprocal_refined(fmaf(NormalTail<true>::SLOPE, a, 1.0f));
        Falling density = gauss(a);
        float tail = density.value * t * NormalTail<true>::polynomial(t);
        float curve = a * density.value * 0.39894228f;
        float falling = (tail - curve) * density.unscale;
        float y = x < 0.0f ? falling : 1.0f - falling;
        return x != x ? x : y;
    }
    return 1.0f;
}
