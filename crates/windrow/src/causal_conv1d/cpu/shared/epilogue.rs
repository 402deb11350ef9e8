//! The activation after the sum, as exact as the sum and the output type are.
//!
//! The sum of `width` products has an error of some units in the last place of its largest term, which
//! the tail of SiLU magnifies; the careful tail of [`cpu::math`](crate::cpu::math) would be lost on
//! it. So SiLU, the activation of every model with this operator, is computed here with fewer
//! operations and no division; the others are not.

use crate::cpu::math::activate;
use crate::cpu::{Simd, SimdElement, seldom};
use crate::{Activation, DType};
use std::f32::consts::LOG2_E;

/// The activation of `x`, to be rounded to `T`.
#[inline(always)]
pub(crate) fn epilogue<S: Simd, T: SimdElement>(s: S, activation: Activation, x: S::F32) -> S::F32 {
    match activation {
        Activation::Silu => silu::<S, T>(s, x),
        _ => activate(s, activation, x),
    }
}

/// SiLU of `x`, to be rounded to `T`.
#[inline(always)]
pub(crate) fn silu<S: Simd, T: SimdElement>(s: S, x: S::F32) -> S::F32 {
    if T::DTYPE == DType::F16 {
        // What is smaller than SiLU of -87 is 0 in f16.
        return quotient::<S, T, false>(s, s.max(s.splat(-87.0), x));
    }
    // Numbers below -87 are rare, and their arithmetic would cost AVX2 a fifth of the operator's time.
    if s.any(s.lt(x, s.splat(-87.0))) {
        seldom();
        return quotient::<S, T, true>(s, s.max(s.splat(-109.0), x));
    }
    quotient::<S, T, false>(s, x)
}

/// SiLU of `N` times `V` vectors, to be rounded to `T`, with one branch for all of them. With a branch for each, the
/// compiler computes the sums of later vectors behind the branches of earlier ones, from filter taps in memory.
#[inline(always)]
pub(crate) fn silu_of_all<S: Simd, T: SimdElement, const V: usize, const N: usize>(
    s: S,
    all: &mut [[S::F32; V]; N],
) {
    let mut far = s.lt(all[0][0], s.splat(-87.0));
    for vectors in all.iter() {
        for x in vectors.iter() {
            far = s.or_mask(far, s.lt(*x, s.splat(-87.0)));
        }
    }
    if T::DTYPE != DType::F16 && s.any(far) {
        seldom();
        for vectors in all.iter_mut() {
            for x in vectors.iter_mut() {
                *x = quotient::<S, T, true>(s, s.max(s.splat(-109.0), *x));
            }
        }
        return;
    }
    for vectors in all.iter_mut() {
        for x in vectors.iter_mut() {
            if T::DTYPE == DType::F16 {
                *x = s.max(s.splat(-87.0), *x);
            }
            *x = quotient::<S, T, false>(s, *x);
        }
    }
}

/// `x / (1 + exp(-x))` for `x >= -87`, with `TAIL` for `x >= -109`, where it is -0. NaN stays NaN.
#[inline(always)]
fn quotient<S: Simd, T: SimdElement, const TAIL: bool>(s: S, x: S::F32) -> S::F32 {
    if T::DTYPE.is_half() {
        let (x, d) = numerator_and_denominator::<S, 5, TAIL>(s, x, EXP2_HALF);
        return s.mul(x, s.recip14(d));
    }
    let (x, d) = numerator_and_denominator::<S, 6, TAIL>(s, x, EXP2);
    let recip = s.recip14(d);
    // A step of Newton's method, on the reciprocal: on the quotient it would make NaN of infinity.
    let error = s.neg_mul_add(d, recip, s.splat(1.0));
    s.mul(x, s.mul_add(recip, error, recip))
}

/// The largest error of [`epilogue`] for SiLU, f16 and bf16, relative to the result: the reciprocal's and the
/// polynomial's.
pub(crate) const HALF_ERROR: f64 = 6.2e-5 + 2.6e-6;

/// Coefficients of `2^r` for `|r| <= 1/2`, lowest first: minimax, relative error 7.5e-8 and 2.6e-6.
#[allow(clippy::excessive_precision)] // as fitted; the nearest f32 is meant
const EXP2: [f32; 6] = [1.0000001, 0.69314694, 0.24022119, 0.055507135, 0.0096755415, 0.0013276472];
#[allow(clippy::excessive_precision)] // as above
const EXP2_HALF: [f32; 5] = [0.99999926, 0.6931218, 0.24024744, 0.05591786, 0.009570102];

/// `x` and `1 + exp(-x)`. If `TAIL`, both are multiplied by 2^-32 below -87, where the denominator would become
/// infinite.
#[inline(always)]
fn numerator_and_denominator<S: Simd, const N: usize, const TAIL: bool>(
    s: S,
    x: S::F32,
    exp2: [f32; N],
) -> (S::F32, S::F32) {
    /// Adding this to a number of magnitude below 2^22 rounds it to an integer, which is then in the
    /// low bits.
    const MAGIC: f32 = 12_582_912.0;
    let a = s.min(s.splat(87.0), x);
    let (numerator, rounder) = if TAIL {
        let far = s.lt(x, s.splat(-87.0));
        let numerator = s.select(far, s.mul(x, s.splat(1.0 / (1u64 << 32) as f32)), x);
        (numerator, s.select(far, s.splat(MAGIC - 32.0), s.splat(MAGIC)))
    } else {
        (x, s.splat(MAGIC))
    };
    let magic = s.neg_mul_add(a, s.splat(LOG2_E), rounder);
    let minus_n = s.sub(rounder, magic);
    let r = s.neg_mul_add(a, s.splat(LOG2_E), minus_n);
    let mut p = s.splat(exp2[N - 1]);
    for &c in exp2[..N - 1].iter().rev() {
        p = s.mul_add(p, r, s.splat(c));
    }
    // Adding n to the exponent multiplies by 2^n.
    let e = s.from_bits(s.add_i32(s.to_bits(p), s.shl_i32::<23>(s.to_bits(magic))));
    (numerator, s.add(e, s.splat(1.0)))
}
