// Activations and their derivatives in f32.
//
// Every smooth one is written as max(x, 0) - |x| * tail(|x|), where the tail falls from 1/2 to 0:
// no cancellation for negative x, +0 and -0 kept, and with |x| held below the point where the tail
// vanishes, infinities come out right. The tail is formed with a factor 2^32 so that a subnormal
// result is rounded once, at the end. `ACCURATE` carries the rounding errors of the exponent along:
// within a few units in the last place of f32; without, relative error about 2^-16, for half types.
#pragma once
#include "intrinsics.cuh"

enum Activation { IDENTITY, RELU, SILU, GELU, GELU_TANH };

// 2^(-(high + low) + 32)
template <bool ACCURATE> __device__ __forceinline__ float scaled_exp2(float high, float low) {
    if constexpr (ACCURATE) {
        // Adding 32 is exact where it is needed, and would round smaller arguments.
        bool large = high > 16.0f;
        float e = exp2_fast((large ? 32.0f : 0.0f) - high);
        e *= large ? 1.0f : 4294967296.0f;
        return fmaf(e, -0.69314718f * low, e);
    } else {
        return exp2_fast(32.0f - high);
    }
}

// max(x, 0) - a / (1 + 2^(high + low)), where a = min(|x|, bound).
template <bool ACCURATE>
__device__ __forceinline__ float sigmoid_gate(float x, float a, float high, float low) {
    float e = scaled_exp2<ACCURATE>(high, low);
    float d = e + 4294967296.0f;
    float w = a * e;
    if constexpr (ACCURATE) return max_nan(x, -0.0f) - w / d;
    return fmaf(-w, reciprocal_fast(d), max_nan(x, -0.0f));
}

// x / (1 + exp(-x))
template <bool ACCURATE> __device__ __forceinline__ float silu(float x) {
    float a = fminf(fabsf(x), 192.0f);
    float high = a * 1.44269502f;
    float low = ACCURATE ? fmaf(a, 1.44269502f, -high) + a * 1.92596303e-8f : 0.0f;
    return sigmoid_gate<ACCURATE>(x, a, high, low);
}

// 2 sqrt(2 / pi) log2(e) and that times 0.044715, each in two parts.
#define TANH_C1 2.30220819f
#define TANH_C1_LOW 1.2948402e-8f
#define TANH_C3 0.10294324f
#define TANH_C3_LOW -2.01619844e-9f

// x / (1 + 2^-(c1 x + c3 x^3))
template <bool ACCURATE> __device__ __forceinline__ float gelu_tanh(float x) {
    float a = fminf(fabsf(x), 16.0f);
    float s = a * a;
    if constexpr (!ACCURATE) {
        return sigmoid_gate<false>(x, a, a * fmaf(TANH_C3, s, TANH_C1), 0.0f);
    } else {
        // c1 a + c3 a^3 with every product and the sum in two parts.
        float s_low = fmaf(a, a, -s);
        float q = a * s, q_low = fmaf(a, s, -q) + a * s_low;
        float u = TANH_C1 * a, u_low = fmaf(TANH_C1, a, -u) + TANH_C1_LOW * a;
        float v = TANH_C3 * q, v_low = fmaf(TANH_C3, q, -v) + (TANH_C3_LOW * q + TANH_C3 * q_low);
        float high = u + v, v_part = high - u;
        float sum_low = (u - (high - v_part)) + (v - v_part);
        return sigmoid_gate<true>(x, a, high, sum_low + (u_low + v_low));
    }
}

// 0.5 erfcx(a / sqrt 2) / t for t = 1 / (1 + 0.3 a), as a polynomial fitted for least relative
// error over 0 <= a <= 14.5: 2^-16.8 with six terms in t, 2^-28.1 with ten in 1 - 2 t.
template <bool ACCURATE> __device__ __forceinline__ float normal_tail_polynomial(float t) {
    if constexpr (!ACCURATE) {
        float p = -0.07670069340265347f;
        p = fmaf(p, t, 0.21484926031664028f);
        p = fmaf(p, t, -0.01559786404709819f);
        p = fmaf(p, t, 0.1434735217976475f);
        p = fmaf(p, t, 0.11392279600617013f);
        return fmaf(p, t, 0.12005742008169554f);
    } else {
        float q = fmaf(-2.0f, t, 1.0f);
        float p = 4.0280261660079875e-05f;
        p = fmaf(p, q, 7.667978558223918e-05f);
        p = fmaf(p, q, -0.0002806064921926361f);
        p = fmaf(p, q, -0.0005696906587567611f);
        p = fmaf(p, q, 0.00242349414865769f);
        p = fmaf(p, q, 0.0018160317834213444f);
        p = fmaf(p, q, -0.02776033669021899f);
        p = fmaf(p, q, 0.08654971009035307f);
        p = fmaf(p, q, -0.164579485418598f);
        return fmaf(p, q, 0.22197061307888227f);
    }
}

// 2^32 exp(-a^2 / 2)
template <bool ACCURATE> __device__ __forceinline__ float scaled_gauss(float a) {
    if constexpr (!ACCURATE) {
        return exp2_fast(fmaf(a * -0.72134752f, a, 32.0f));
    } else {
        float s = a * a, high = s * 0.72134751f;
        float low = fmaf(s, 0.72134751f, -high) + (s * 9.62981516e-9f + fmaf(a, a, -s) * 0.72134751f);
        return scaled_exp2<true>(high, low);
    }
}

// x Phi(x) = max(x, 0) - |x| Phi(-|x|)
template <bool ACCURATE> __device__ __forceinline__ float gelu(float x) {
    float a = fminf(fabsf(x), 16.0f);
    float d = fmaf(0.3f, a, 1.0f);
    float t = ACCURATE ? 1.0f / d : reciprocal_fast(d);
    float w = a * t * scaled_gauss<ACCURATE>(a) * normal_tail_polynomial<ACCURATE>(t);
    return fmaf(w, -0x1p-32f, max_nan(x, -0.0f));
}

template <int ACTIVATION, bool ACCURATE> __device__ __forceinline__ float activate(float x) {
    if constexpr (ACTIVATION == RELU) return max_nan(x, 0.0f);
    if constexpr (ACTIVATION == SILU) return silu<ACCURATE>(x);
    if constexpr (ACTIVATION == GELU) return gelu<ACCURATE>(x);
    if constexpr (ACTIVATION == GELU_TANH) return gelu_tanh<ACCURATE>(x);
    return x;
}

// The derivative at x. With s the logistic function of z: d/dx x s(z(x)) = s + x s (1 - s) z'(x).
template <int ACTIVATION> __device__ __forceinline__ float activate_gradient(float x) {
    if constexpr (ACTIVATION == RELU) return x > 0.0f || x != x ? (x != x ? x : 1.0f) : 0.0f;
    if constexpr (ACTIVATION == SILU || ACTIVATION == GELU_TANH) {
        constexpr bool TANH = ACTIVATION == GELU_TANH;
        float a = fminf(fabsf(x), TANH ? 16.0f : 192.0f), s = a * a;
        float high = TANH ? a * fmaf(TANH_C3, s, TANH_C1) : a * 1.44269502f;
        float slope = TANH ? fmaf(0.2140644488f, s, 1.5957691216f) : 1.0f;
        float e = exp2_full(-high), r = 1.0f / (1.0f + e);
        // At |x|: the falling part, so that a negative x does not cancel.
        float tail = e * r, curve = a * tail * r * slope;
        float y = x < 0.0f ? tail - curve : r + curve;
        return x != x ? x : y;
    }
    if constexpr (ACTIVATION == GELU) {
        float a = fminf(fabsf(x), 16.0f), t = 1.0f / fmaf(0.3f, a, 1.0f);
        float gauss = scaled_gauss<true>(a) * 0x1p-32f;
        float tail = gauss * t * normal_tail_polynomial<true>(t);
        float curve = a * gauss * 0.39894228f;
        float y = x < 0.0f ? tail - curve : 1.0f - (tail - curve);
        return x != x ? x : y;
    }
    return 1.0f;
}
