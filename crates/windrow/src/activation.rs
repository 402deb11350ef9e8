//! Activations that operators fuse into their epilogue.

mod names;
mod negative_slope;

pub use self::negative_slope::NegativeSlope;

use crate::forms::names;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// The error that shorter polynomials for activations of f16/bf16 add on CUDA: 2^-14.9 for the normal tail, and 2^-17
/// for an exponent near 128 rounded to f32.
pub(crate) const CUDA_HALF_POLYNOMIALS: f64 = 4e-5;

/// The form of GELU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Approximate {
    /// Exact: `0.5 x erfc(-x / sqrt 2)`.
    #[default]
    None,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    Tanh,
}

names! { Approximate, "approximate": None = "none" | "exact", Tanh = "tanh" }

/// The function that is applied to each element of an operator's result, after the bias.
///
/// SiLU and GELU are computed for every finite number, to the last numbers that are not 0 in the output's type.
/// At infinities every operator gives the limits. Where the formulas are NaN at minus infinity, these are -0 for
/// hardswish, SiLU and GELU, and 0 for leaky ReLU with a slope of 0. NaN stays NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// Nothing.
    #[default]
    Identity,
    /// `max(x, 0)`; NaN stays NaN.
    Relu,
    /// `min(max(x, 0), 6)`; NaN stays NaN.
    Relu6,
    /// `x` if it is positive, otherwise `x` times the [slope](NegativeSlope). With a slope of 0 it is ReLU.
    LeakyRelu(NegativeSlope),
    /// `x min(max(x + 3, 0), 6) / 6`; -0 up to -3.
    Hardswish,
    /// `x / (1 + exp(-x))`, also called swish.
    Silu,
    /// [GELU](Approximate).
    Gelu(Approximate),
}

impl Activation {
    /// The activation of `x` in f64: what every kernel is measured against.
    ///
    /// Both forms of GELU and SiLU are written as `x` times a probability without cancellation, so
    /// that the negative tail is exact to a few units in the last place of f64.
    pub fn apply_f64(self, x: f64) -> f64 {
        if x == f64::NEG_INFINITY && matches!(self, Activation::Silu | Activation::Gelu(_)) {
            return -0.0; // the limit; x times a probability of 0 would be NaN
        }
        match self {
            Activation::Identity => x,
            Activation::Relu if x < 0.0 => 0.0,
            Activation::Relu => x,
            Activation::Relu6 if x < 0.0 => 0.0,
            Activation::Relu6 if x > 6.0 => 6.0,
            Activation::Relu6 => x,
            Activation::LeakyRelu(slope) if x < 0.0 && slope.get() != 0.0 => {
                x * f64::from(slope.get())
            }
            Activation::LeakyRelu(_) if x < 0.0 => 0.0,
            Activation::LeakyRelu(_) => x,
            Activation::Hardswish if x <= -3.0 => -0.0,
            Activation::Hardswish if x >= 3.0 => x,
            Activation::Hardswish => x * (x + 3.0) / 6.0,
            Activation::Silu => x * sigmoid(x),
            Activation::Gelu(Approximate::None) => x * normal_cdf(x),
            Activation::Gelu(Approximate::Tanh) => x * sigmoid(tanh_argument(x)),
        }
    }

    /// Lower and upper bound, if the activation is a clamp to them.
    #[inline(always)]
    pub(crate) fn bounds(self) -> Option<[f32; 2]> {
        match self {
            Activation::Identity => Some([f32::NEG_INFINITY, f32::INFINITY]),
            Activation::Relu => Some([0.0, f32::INFINITY]),
            Activation::Relu6 => Some([0.0, 6.0]),
            Activation::LeakyRelu(_)
            | Activation::Hardswish
            | Activation::Silu
            | Activation::Gelu(_) => None,
        }
    }

    /// Largest absolute slope: the factor by which an error of the sum may grow.
    pub(crate) fn steepest_slope(self) -> f64 {
        match self {
            Activation::Identity | Activation::Relu | Activation::Relu6 => 1.0,
            Activation::LeakyRelu(slope) => f64::from(slope.get()).abs().max(1.0),
            Activation::Silu | Activation::Gelu(_) => 1.13,
            Activation::Hardswish => 1.5,
        }
    }

    /// The largest magnitude of a result, relative to that of its argument.
    pub(crate) fn most_enlarged(self) -> f64 {
        match self {
            Activation::LeakyRelu(_) => self.steepest_slope(),
            _ => 1.0,
        }
    }

    /// Error of the approximation in GPU kernels for f16 and bf16, without that of rounding.
    pub(crate) fn half_error_on_gpus(self) -> f64 {
        match self {
            Activation::Gelu(_) => CUDA_HALF_POLYNOMIALS,
            Activation::Identity
            | Activation::Relu
            | Activation::Relu6
            | Activation::LeakyRelu(_)
            | Activation::Hardswish
            | Activation::Silu => 0.0,
        }
    }

    /// The name in `activation.cuh`. A slope is not part of it.
    pub(crate) fn constant(self) -> String {
        match self {
            Activation::LeakyRelu(slope) if slope.get() == 0.0 => Activation::Relu.constant(),
            Activation::LeakyRelu(_) => "LEAKY_RELU".into(),
            _ => self.name().to_uppercase(),
        }
    }

    /// True if the slope jumps somewhere. A sum that is off by a rounding may then be on the other side of a jump.
    pub(crate) fn has_kinks(self) -> bool {
        match self {
            Activation::LeakyRelu(_) | Activation::Hardswish => true,
            _ => self != Activation::Identity && self.bounds().is_some(),
        }
    }

    /// The derivative of the activation at `x` in f64. That of ReLU at 0, and of ReLU6 at 0 and 6, is 0, that of leaky
    /// ReLU at 0 the slope. That of hardswish is 0 at -3 and 1 at 3. These are PyTorch's.
    pub fn derivative_f64(self, x: f64) -> f64 {
        // Beyond this the derivatives are exactly 0 or 1 in f64, and powers of x could overflow.
        let x = x.clamp(-1e3, 1e3);
        match self {
            Activation::Identity => 1.0,
            Activation::Relu | Activation::Relu6 if x.is_nan() => x,
            Activation::Relu => f64::from(u8::from(x > 0.0)),
            Activation::Relu6 => f64::from(u8::from(x > 0.0 && x < 6.0)),
            Activation::LeakyRelu(_) if x.is_nan() => x,
            Activation::LeakyRelu(_) if x > 0.0 => 1.0,
            Activation::LeakyRelu(slope) => slope.get().into(),
            Activation::Hardswish if x.abs() >= 3.0 => f64::from(u8::from(x > 0.0)),
            Activation::Hardswish => x / 3.0 + 0.5,
            Activation::Silu => sigmoid(x) * (1.0 + x * sigmoid(-x)),
            Activation::Gelu(Approximate::None) => {
                let density = (-0.5 * x * x).exp() * 0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
                normal_cdf(x) + x * density
            }
            Activation::Gelu(Approximate::Tanh) => {
                let z = tanh_argument(x);
                let slope = 2.0 * SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x);
                sigmoid(z) * (1.0 + x * slope * sigmoid(-z))
            }
        }
    }
}

/// `sqrt(2 / pi)`.
pub(crate) const SQRT_2_OVER_PI: f64 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
/// The cubic coefficient of GELU's tanh form.
pub(crate) const CUBIC: f64 = 0.044715;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `z` such that `0.5 (1 + tanh(z / 2)) = sigmoid(z)` is the factor of GELU's tanh form.
fn tanh_argument(x: f64) -> f64 {
    2.0 * SQRT_2_OVER_PI * (x + CUBIC * x * x * x)
}

/// The standard normal distribution function.
fn normal_cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
}

#[cfg(test)]
mod edges;

#[cfg(test)]
mod tests {
    use super::*;

    fn leaky(slope: f32) -> Activation {
        Activation::LeakyRelu(NegativeSlope::new(slope).unwrap())
    }

    #[test]
    fn known_values_and_limits() {
        let gelu = Activation::Gelu(Approximate::None);
        let tanh = Activation::Gelu(Approximate::Tanh);
        let close = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-13, "{got} {want}");
        // From mpmath with 40 digits.
        close(gelu.apply_f64(1.0), 0.8413447460685429);
        close(gelu.apply_f64(-5.5), -1.0444259356238245e-07);
        close(gelu.apply_f64(-13.0), -7.952313719414843e-38);
        close(tanh.apply_f64(1.0), 0.8411919906082767);
        close(tanh.apply_f64(-5.5), -5.9276402638802624e-09);
        close(Activation::Silu.apply_f64(-50.0), -9.643749239819589e-21);
        for a in [Activation::Silu, gelu, tanh] {
            assert_eq!(a.apply_f64(f64::INFINITY), f64::INFINITY);
            assert_eq!(a.apply_f64(f64::NEG_INFINITY).to_bits(), (-0.0f64).to_bits());
            assert_eq!(a.apply_f64(-0.0).to_bits(), (-0.0f64).to_bits());
            assert_eq!(a.apply_f64(-1e300), 0.0);
            assert_eq!(
                (a.derivative_f64(f64::INFINITY), a.derivative_f64(f64::NEG_INFINITY)),
                (1.0, 0.0)
            );
        }
        for (a, x, want) in [
            (Activation::Hardswish, f64::INFINITY, f64::INFINITY),
            (Activation::Hardswish, f64::NEG_INFINITY, -0.0),
            (Activation::Hardswish, -3.0, -0.0),
            (Activation::Hardswish, -0.0, -0.0),
            (Activation::Hardswish, -1.5, -0.375),
            (Activation::Hardswish, 1.0, 4.0 / 6.0),
            (Activation::Hardswish, 3.0, 3.0),
            (leaky(0.25), -8.0, -2.0),
            (leaky(0.25), 8.0, 8.0),
            (leaky(0.25), -0.0, -0.0),
            (leaky(0.25), f64::NEG_INFINITY, f64::NEG_INFINITY),
            (leaky(-0.5), f64::NEG_INFINITY, f64::INFINITY),
            (leaky(-0.5), -8.0, 4.0),
            (leaky(1.5), -8.0, -12.0),
            (leaky(0.0), f64::NEG_INFINITY, 0.0),
            (leaky(0.0), -8.0, 0.0),
            (leaky(0.0), f64::INFINITY, f64::INFINITY),
        ] {
            assert_eq!(a.apply_f64(x).to_bits(), want.to_bits(), "{a} of {x}");
        }
        for (a, x, want) in [
            (Activation::Hardswish, -3.0, 0.0),
            (Activation::Hardswish, 3.0, 1.0),
            (Activation::Hardswish, f64::NEG_INFINITY, 0.0),
            (Activation::Hardswish, f64::INFINITY, 1.0),
            (leaky(0.25), 0.0, 0.25),
            (leaky(0.25), -0.0, 0.25),
            (leaky(-0.5), f64::NEG_INFINITY, -0.5),
        ] {
            assert_eq!(a.derivative_f64(x), want, "{a} at {x}");
        }
        for &a in Activation::ALL {
            assert!(a.apply_f64(f64::NAN).is_nan());
            assert_eq!(a.derivative_f64(f64::NAN).is_nan(), a != Activation::Identity);
        }
    }

    /// Bounds and slopes agree with the formula.
    #[test]
    fn bounds_and_slopes_are_those_of_the_formula() {
        for a in Activation::ALL.iter().copied().chain([1.5, -0.5, -2.0, 0.0].map(leaky)) {
            for i in -800..=800 {
                let x = f64::from(i) / 80.0;
                assert!(a.derivative_f64(x).abs() <= a.steepest_slope(), "{a} at {x}");
                assert!(a.apply_f64(x).abs() <= a.most_enlarged() * x.abs(), "{a} at {x}");
                if let Some([low, high]) = a.bounds() {
                    assert_eq!(a.apply_f64(x), x.clamp(low.into(), high.into()), "{a} at {x}");
                }
            }
        }
    }

    /// The kernels know every activation by its name.
    #[test]
    fn kernels_have_every_activation() {
        let text = include_str!("gpu/kernels/activation.cuh");
        let (_, rest) = text.split_once("enum Activation {").unwrap();
        let names: Vec<_> = rest.split_once('}').unwrap().0.split(',').map(str::trim).collect();
        let mut all: Vec<_> = Activation::ALL.iter().map(|a| a.constant()).collect();
        all.dedup(); // slopes
        assert_eq!(names.len(), all.len());
        for name in all {
            assert!(names.contains(&name.as_str()), "{name}");
            // A name is no use without lines that compute the value and the derivative.
            let lines = [
                format!("ACTIVATION == {name}) return"),
                format!("if constexpr (ACTIVATION == {name}) {{"),
            ];
            let computed: usize =
                lines.iter().map(|line| text.matches(line.as_str()).count()).sum();
            assert!(name == "IDENTITY" || computed == 2, "{name}");
        }
    }

    #[test]
    fn derivatives_are_slopes() {
        for a in Activation::ALL.iter().copied().chain([1.5, -0.5, -2.0, 0.0].map(leaky)) {
            for i in -80..=80 {
                let x = f64::from(i) / 8.0 + 0.01;
                let slope = (a.apply_f64(x + 1e-5) - a.apply_f64(x - 1e-5)) / 2e-5;
                assert!((a.derivative_f64(x) - slope).abs() < 1e-8, "{} at {x}", a.name());
            }
        }
    }
}
