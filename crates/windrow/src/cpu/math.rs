//! Activations on vectors, for the epilogues of all operators.
//!
//! GELU (both forms), and SiLU of numbers below -87, are computed as `max(x, 0) - tail(|x|)`. The tail is positive, at
//! most half of `|x|`, and a product with `exp` of a negative number, so nothing cancels: the relative error stays small
//! down to the smallest normal number. The argument of `exp` goes down to -90. There a relative rounding error of the
//! argument would be multiplied by up to 90, so the argument is kept together with its rounding error.

mod memory;

use self::memory::All;
use super::{MAX_LANES, Simd, seldom};
use crate::activation::{CUBIC, SQRT_2_OVER_PI};
use crate::{Activation, Approximate};
use std::f64::consts::{LN_2, LOG2_E};

pub(crate) use memory::{Rows, activate_all, activate_rows};

/// The activation of each lane.
#[inline(always)]
pub(crate) fn activate<S: Simd>(s: S, activation: Activation, x: S::F32) -> S::F32 {
    match by_call(s, activation, false, x) {
        Some(y) => y,
        None => activated(s, activation, x),
    }
}

/// The derivative of the activation at `x`, the argument of [`activate`]. At kinks it is that of
/// [`Activation::derivative_f64`].
#[inline(always)]
pub(crate) fn activate_grad<S: Simd>(s: S, activation: Activation, x: S::F32) -> S::F32 {
    match by_call(s, activation, true, x) {
        Some(y) => y,
        None => derivative(s, activation, x),
    }
}

/// The activation or its derivative by a function call, on instruction sets whose kernels are compiled for size;
/// otherwise `None`.
#[inline(always)]
fn by_call<S: Simd>(s: S, activation: Activation, grad: bool, x: S::F32) -> Option<S::F32> {
    if !S::IS_SMALL {
        return None;
    }
    let mut lanes = [0f32; MAX_LANES];
    let at = lanes.as_mut_ptr();
    // SAFETY: a vector has at most MAX_LANES elements.
    unsafe {
        s.store(at, x);
        s.outlined(All { activation, grad, at, len: S::LANES });
        Some(s.load(at))
    }
}

#[inline(always)]
fn activated<S: Simd>(s: S, activation: Activation, x: S::F32) -> S::F32 {
    match activation {
        Activation::Identity => x,
        Activation::Relu => s.max(s.zero(), x),
        Activation::Relu6 => s.min(s.splat(6.0), s.max(s.zero(), x)),
        Activation::LeakyRelu(slope) if slope.get() == 0.0 => s.max(s.zero(), x),
        Activation::LeakyRelu(slope) => {
            s.select(s.lt(x, s.zero()), s.mul(s.splat(slope.get()), x), x)
        }
        Activation::Hardswish => {
            // The sum is exact near -3, so that nothing cancels. The factor of 3 is 1.
            let factor = s.mul(s.add(x, s.splat(3.0)), s.splat(1.0 / 6.0));
            s.mul(s.max(s.splat(-3.0), x), s.min(s.splat(1.0), s.max(s.zero(), factor)))
        }
        Activation::Silu => silu(s, x),
        Activation::Gelu(Approximate::None) => gelu(s, x),
        Activation::Gelu(Approximate::Tanh) => gelu_tanh(s, x),
    }
}

#[inline(always)]
fn derivative<S: Simd>(s: S, activation: Activation, x: S::F32) -> S::F32 {
    match activation {
        Activation::Identity => s.splat(1.0),
        Activation::Relu => {
            let step = s.select(s.lt(s.zero(), x), s.splat(1.0), s.zero());
            s.select(s.is_nan(x), x, step)
        }
        Activation::Relu6 => {
            let step = s.select(s.lt(x, s.splat(6.0)), s.splat(1.0), s.zero());
            let step = s.select(s.lt(s.zero(), x), step, s.zero());
            s.select(s.is_nan(x), x, step)
        }
        Activation::LeakyRelu(slope) => {
            let step = s.select(s.lt(s.zero(), x), s.splat(1.0), s.splat(slope.get()));
            s.select(s.is_nan(x), x, step)
        }
        Activation::Hardswish => {
            // Exactly 0 at -1.5, so that an infinite gradient gives NaN there.
            let slope = s.mul(s.add(x, s.splat(1.5)), s.splat(1.0 / 3.0));
            let slope = s.select(s.lt(x, s.splat(3.0)), slope, s.splat(1.0));
            let slope = s.select(s.lt(s.splat(-3.0), x), slope, s.zero());
            s.select(s.is_nan(x), x, slope)
        }
        Activation::Silu => silu_grad(s, x),
        Activation::Gelu(Approximate::None) => gelu_grad(s, x),
        Activation::Gelu(Approximate::Tanh) => gelu_tanh_grad(s, x),
    }
}

/// Coefficients of `2^r` for `|r| <= 1/2`, lowest first: minimax, relative error 1.9e-9.
const EXP2: [f64; 7] = [
    1.0000000005541867,
    0.6931472057371955,
    0.24022646890478372,
    0.05550328777081637,
    0.009618488973986011,
    0.001339993118161585,
    0.00015345807453247062,
];

/// [`EXP2`] as a polynomial in `q` where `r = q * scale`.
const fn exp2_scaled(scale: f64) -> [f32; 7] {
    let mut out = [0.0; 7];
    let (mut i, mut power) = (0, 1.0);
    while i < 7 {
        out[i] = (EXP2[i] * power) as f32;
        power *= scale;
        i += 1;
    }
    out
}

/// `c[0] + c[1] x + c[2] x^2 + ...`
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(s: S, x: S::F32, c: [f32; N]) -> S::F32 {
    let mut sum = s.splat(c[N - 1]);
    for &c in c[..N - 1].iter().rev() {
        sum = s.mul_add(sum, x, s.splat(c));
    }
    sum
}

/// Adding this to a number of magnitude below 2^22 rounds it to an integer and leaves that integer
/// plus [`SCALE_BITS`] in the low bits.
const MAGIC: f32 = magic(SCALE_BITS);
/// Exponentials are computed times `2^SCALE_BITS`, so that small ones stay normal numbers until the last operation.
const SCALE_BITS: u32 = 64;
const UNSCALE: f32 = 1.0 / (1u128 << SCALE_BITS) as f32;

/// The same with another number in the low bits.
const fn magic(low: u32) -> f32 {
    12_582_912.0 + low as f32
}

/// `p * 2^(n + low)`, where `magic` is `n` plus [`magic(low)`](magic), without regard to overflow.
#[inline(always)]
fn scale_by_magic<S: Simd>(s: S, p: S::F32, magic: S::F32) -> S::F32 {
    s.from_bits(s.add_i32(s.to_bits(p), s.shl_i32::<23>(s.to_bits(magic))))
}

/// The upper 16 bits of a number's mantissa: products with integers below 2^8 are exact.
const fn upper(x: f64) -> f32 {
    f32::from_bits((x as f32).to_bits() & 0xffff_ff00)
}

/// `2^SCALE_BITS exp(-a)` for `0 <= a <= 126`.
#[inline(always)]
fn exp_neg<S: Simd>(s: S, a: S::F32) -> S::F32 {
    exp_neg_times::<S, SCALE_BITS>(s, a)
}

/// `2^LOW exp(-a)`, if that is a normal number and its logarithm at most 126 ln 2.
#[inline(always)]
fn exp_neg_times<S: Simd, const LOW: u32>(s: S, a: S::F32) -> S::F32 {
    const HIGH: f32 = upper(LN_2);
    const REST: f32 = (LN_2 - HIGH as f64) as f32;
    let rounder = s.splat(const { magic(LOW) });
    let magic = s.neg_mul_add(a, s.splat(LOG2_E as f32), rounder);
    let n = s.sub(magic, rounder);
    let r = s.mul_add(n, s.splat(HIGH), a);
    let r = s.mul_add(n, s.splat(REST), r);
    scale_by_magic(s, polynomial(s, r, const { exp2_scaled(-LOG2_E) }), magic)
}

/// `2^SCALE_BITS exp(-a^2 / 2)` for `0 <= a <= 16`.
#[inline(always)]
fn exp_neg_half_square<S: Simd>(s: S, a: S::F32) -> S::F32 {
    const HIGH: f32 = upper(2.0 * LN_2);
    const LOW: f32 = (2.0 * LN_2 - HIGH as f64) as f32;
    let square = s.mul(a, a);
    let magic = s.neg_mul_add(square, s.splat((LOG2_E / 2.0) as f32), s.splat(MAGIC));
    let n = s.sub(magic, s.splat(MAGIC));
    // a^2 = r - 2 ln 2 n
    let r = s.mul_add_exact(a, a, s.mul(n, s.splat(HIGH)));
    let r = s.mul_add(n, s.splat(LOW), r);
    scale_by_magic(s, polynomial(s, r, const { exp2_scaled(-LOG2_E / 2.0) }), magic)
}

/// `2^SCALE_BITS exp(-2 sqrt(2/pi) (a + 0.044715 a^3))` for `0 <= a <= 11.5`.
#[inline(always)]
fn exp_neg_cubic<S: Simd>(s: S, a: S::F32) -> S::F32 {
    // The exponent in base 2 is a (C1 + C3 a^2). C1_HIGH is short, so that `difference` is exact.
    const C1: f64 = 2.0 * SQRT_2_OVER_PI * LOG2_E;
    const C1_HIGH: f32 = upper(C1);
    const C1_LOW: f32 = (C1 - C1_HIGH as f64) as f32;
    const C3: f32 = (C1 * CUBIC) as f32;
    const C3_LOW: f32 = (C1 * CUBIC - C3 as f64) as f32;
    let square = s.mul(a, a);
    let square_low = s.mul_add_exact(a, a, s.neg(square));
    let factor = s.mul_add_exact(s.splat(C3), square, s.splat(C1_HIGH));
    let difference = s.sub(s.splat(C1_HIGH), factor);
    let factor_low = s.mul_add_exact(s.splat(C3), square, difference);
    let factor_low = s.mul_add(s.splat(C3), square_low, factor_low);
    let factor_low = s.add(factor_low, s.mul_add(s.splat(C3_LOW), square, s.splat(C1_LOW)));
    let magic = s.neg_mul_add(a, factor, s.splat(MAGIC));
    let n = s.sub(magic, s.splat(MAGIC));
    let r = s.mul_add_exact(a, factor, n);
    let r = s.mul_add(a, factor_low, r);
    scale_by_magic(s, polynomial(s, r, const { exp2_scaled(-1.0) }), magic)
}

/// `exp(a^2 / 2) erfc(a / sqrt 2) / 2` for `0 <= a <= 16`: a quotient of polynomials with positive
/// coefficients, so that nothing cancels; relative error 6e-9 up to 14, where its product with the
/// exponential leaves the normal range.
#[inline(always)]
fn scaled_normal_tail<S: Simd>(s: S, a: S::F32) -> S::F32 {
    const P: [f32; 5] = [0.5, 0.43725255, 0.18246262, 0.040372692, 0.004077594];
    const Q: [f32; 6] = [1.0, 1.6723901, 1.1992949, 0.46743107, 0.10120614, 0.0102208825];
    s.div(polynomial(s, a, P), polynomial(s, a, Q))
}

/// `max(x, 0) - tail / 2^SCALE_BITS`. The sign of a zero or vanishing result is that of `x`, NaN
/// stays NaN.
#[inline(always)]
fn above_tail<S: Simd>(s: S, x: S::F32, tail: S::F32) -> S::F32 {
    s.neg_mul_add(tail, s.splat(UNSCALE), s.max(s.splat(-0.0), x))
}

/// `|x|`, at most `limit`; for NaN the limit.
#[inline(always)]
fn magnitude<S: Simd>(s: S, x: S::F32, limit: f32) -> S::F32 {
    s.min(s.abs(x), s.splat(limit))
}

/// `0.5 x erfc(-x / sqrt 2)`
#[inline(always)]
fn gelu<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let a = magnitude(s, x, 16.0);
    let tail = s.mul(s.mul(a, scaled_normal_tail(s, a)), exp_neg_half_square(s, a));
    above_tail(s, x, tail)
}

/// `x / (1 + exp(-2 sqrt(2/pi) (x + 0.044715 x^3)))`
#[inline(always)]
fn gelu_tanh<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let a = magnitude(s, x, 11.5);
    above_tail(s, x, logistic_tail(s, a, exp_neg_cubic(s, a)))
}

/// `x / (1 + exp(-x))`
#[inline(always)]
fn silu<S: Simd>(s: S, x: S::F32) -> S::F32 {
    // NaN stays NaN.
    let e = exp_neg_times::<S, 0>(s, s.min(s.splat(87.0), x));
    let quotient = s.div(x, s.add(s.splat(1.0), e));
    // The quotient takes four fifths of the time. Its denominator would be infinite below -88.7. A lane's bits do not
    // depend on the others.
    let is_deep = s.lt(x, s.splat(-87.0));
    if s.any(is_deep) {
        seldom();
        let a = magnitude(s, x, 126.0);
        return s.select(is_deep, above_tail(s, x, logistic_tail(s, a, exp_neg(s, a))), quotient);
    }
    quotient
}

/// `a e / (1 + e)`, with the same factor `2^SCALE_BITS` as `e`.
#[inline(always)]
fn logistic_tail<S: Simd>(s: S, a: S::F32, e: S::F32) -> S::F32 {
    s.div(s.mul(a, e), s.mul_add(e, s.splat(UNSCALE), s.splat(1.0)))
}

/// `|x|`, at most `limit`; NaN stays NaN.
#[inline(always)]
fn magnitude_or_nan<S: Simd>(s: S, x: S::F32, limit: f32) -> S::F32 {
    s.min(s.splat(limit), s.abs(x))
}

/// The derivative at `x`, given 2^SCALE_BITS times that at `-|x|`: the two sum to one.
#[inline(always)]
fn reflect<S: Simd>(s: S, x: S::F32, at_negative: S::F32) -> S::F32 {
    let low = s.mul(at_negative, s.splat(UNSCALE));
    s.select(s.lt(x, s.zero()), low, s.sub(s.splat(1.0), low))
}

/// `1 / (1 + exp(-x))`
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let e = exp_neg(s, magnitude(s, x, 126.0));
    let at_negative = s.div(e, s.mul_add(e, s.splat(UNSCALE), s.splat(1.0)));
    s.select(s.is_nan(x), x, reflect(s, x, at_negative))
}

#[inline(always)]
fn gelu_grad<S: Simd>(s: S, x: S::F32) -> S::F32 {
    const DENSITY_AT_0: f32 = (SQRT_2_OVER_PI / 2.0) as f32;
    let a = magnitude_or_nan(s, x, 16.0);
    let slope = s.neg_mul_add(a, s.splat(DENSITY_AT_0), scaled_normal_tail(s, a));
    reflect(s, x, s.mul(slope, exp_neg_half_square(s, a)))
}

#[inline(always)]
fn gelu_tanh_grad<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let a = magnitude_or_nan(s, x, 11.5);
    const SLOPE: f32 = (2.0 * SQRT_2_OVER_PI) as f32;
    const SLOPE_SQUARE: f32 = (6.0 * SQRT_2_OVER_PI * CUBIC) as f32;
    let slope = s.mul_add(s.splat(SLOPE_SQUARE), s.mul(a, a), s.splat(SLOPE));
    reflect(s, x, logistic_grad(s, s.mul(a, slope), exp_neg_cubic(s, a)))
}

#[inline(always)]
fn silu_grad<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let a = magnitude_or_nan(s, x, 126.0);
    reflect(s, x, logistic_grad(s, a, exp_neg(s, a)))
}

/// The derivative of `x / (1 + exp(-z(x)))` at `-a`, with the same factor `2^SCALE_BITS` as `e = exp(-z(a))`, where `az
/// = a z'(a)`.
#[inline(always)]
fn logistic_grad<S: Simd>(s: S, az: S::F32, e: S::F32) -> S::F32 {
    let one = s.splat(1.0);
    let complement = s.div(one, s.mul_add(e, s.splat(UNSCALE), one));
    s.mul(s.mul(e, complement), s.neg_mul_add(az, complement, one))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NegativeSlope;
    use crate::cpu::{Isa, Kernel, dispatch};

    struct Map<'a> {
        activation: Activation,
        grad: bool,
        x: &'a [f32],
    }

    impl Kernel for Map<'_> {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<f32> {
            let f = if self.grad { activate_grad::<S> } else { activate::<S> };
            let mut out = Vec::with_capacity(self.x.len());
            for part in self.x.chunks(S::LANES) {
                let mut y = [0f32; MAX_LANES];
                // SAFETY: `part` has its length; MAX_LANES elements are writable.
                unsafe {
                    let v = s.load_first(part.as_ptr(), part.len());
                    s.store(y.as_mut_ptr(), f(s, self.activation, v));
                }
                out.extend_from_slice(&y[..part.len()]);
            }
            out
        }
    }

    /// An infinite gradient gives NaN where the slope is 0, and an infinity where it is only small.
    #[test]
    fn the_slope_of_hardswish_is_0_at_its_minimum() {
        for isa in Isa::available() {
            let map = Map { activation: Activation::Hardswish, grad: true, x: &[-1.5] };
            assert_eq!(dispatch(isa, map), [0.0], "{}", isa.name());
        }
    }

    /// Every `step`-th f32 bit pattern, and the special ones.
    fn sample(step: usize) -> Vec<f32> {
        let mut x: Vec<f32> = (0..=u32::MAX).step_by(step).map(f32::from_bits).collect();
        x.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE]);
        x.extend((-20_000..20_000).map(|i| i as f32 / 1000.0));
        x
    }

    /// Relative error in multiples of f32's epsilon. Below the normal range it is computed as if f32 had no subnormal
    /// numbers (an unlimited exponent).
    fn ulps(got: f32, want: f64) -> f64 {
        if got.is_nan() || want.is_nan() {
            return if got.is_nan() && want.is_nan() { 0.0 } else { f64::INFINITY };
        }
        if got.is_infinite() || (want as f32).is_infinite() {
            return if got == want as f32 { 0.0 } else { f64::INFINITY };
        }
        let size = want.abs().max(f64::from(f32::MIN_POSITIVE));
        (f64::from(got) - want).abs() / size / f64::from(f32::EPSILON)
    }

    #[test]
    fn activations_are_within_4_ulp_of_f64() {
        let x = sample(9973);
        for isa in Isa::available() {
            for &activation in Activation::ALL {
                let y = dispatch(isa, Map { activation, grad: false, x: &x });
                let mut worst = (0.0, 0.0, 0.0);
                for (&x, &y) in x.iter().zip(&y) {
                    let want = activation.apply_f64(f64::from(x));
                    let distance = ulps(y, want);
                    if distance > worst.0 {
                        worst = (distance, x, y);
                    }
                    if x == 0.0 || want.abs() < 1e-46 {
                        let sign = want.is_sign_negative();
                        assert_eq!(y.is_sign_negative(), sign, "{} {x:e}", activation.name());
                    }
                }
                println!("{} {}: {worst:?}", isa.name(), activation.name());
                assert!(worst.0 <= 4.0, "{} {}: {worst:?}", isa.name(), activation.name());
            }
        }
    }

    /// Slopes below 0, above 1 and at the limits of f32; a slope of 0 has the limit 0 at minus infinity.
    #[test]
    fn leaky_relu_has_any_slope() {
        let x = sample(99_991);
        for isa in Isa::available() {
            for slope in [0.0, 1.0, 1.5, -0.5, -3.0, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1)]
            {
                let activation = Activation::LeakyRelu(NegativeSlope::new(slope).unwrap());
                let y = dispatch(isa, Map { activation, grad: false, x: &x });
                let dy = dispatch(isa, Map { activation, grad: true, x: &x });
                for ((&x, y), dy) in x.iter().zip(y).zip(dy) {
                    let want = activation.apply_f64(f64::from(x)) as f32;
                    let name = format!("{} {activation} {x:e}", isa.name());
                    // One rounding, to which the product in f64 may add another.
                    assert!(
                        ulps(y, f64::from(want)) <= 1.0 && y.is_nan() == x.is_nan(),
                        "{name}: {y:e}"
                    );
                    let want = activation.derivative_f64(f64::from(x));
                    assert!(f64::from(dy) == want || dy.is_nan() && want.is_nan(), "{name}: {dy}");
                }
            }
        }
    }

    /// Else the bits of an image would depend on its neighbours in a vector.
    #[test]
    fn bits_do_not_depend_on_the_other_lanes() {
        let x: Vec<f32> = (-1200..1200).map(|i| i as f32 / 13.0).collect();
        for isa in Isa::available() {
            for &activation in Activation::ALL {
                let of = |x: &[f32]| dispatch(isa, Map { activation, grad: false, x });
                let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
                let alone: Vec<f32> = x.iter().flat_map(|&x| of(&[x])).collect();
                for other in [-1e30, -100.0, -0.0, 50.0, f32::INFINITY, f32::NAN] {
                    let pairs: Vec<f32> = x.iter().flat_map(|&x| [x, other]).collect();
                    let beside: Vec<f32> = of(&pairs).into_iter().step_by(2).collect();
                    let name = activation.name();
                    assert_eq!(bits(&beside), bits(&alone), "{} {name} beside {other}", isa.name());
                }
            }
        }
    }

    #[test]
    fn derivatives_agree_with_f64() {
        let x = sample(9973);
        for isa in Isa::available() {
            for &activation in Activation::ALL {
                let y = dispatch(isa, Map { activation, grad: true, x: &x });
                for (&x, &y) in x.iter().zip(&y) {
                    let want = activation.derivative_f64(f64::from(x));
                    let ok = if want.is_nan() {
                        y.is_nan()
                    } else {
                        (f64::from(y) - want).abs() <= 5e-7
                    };
                    assert!(
                        ok,
                        "{} {} at {x:e}: {y:e}, not {want:e}",
                        isa.name(),
                        activation.name()
                    );
                }
            }
        }
    }
}
