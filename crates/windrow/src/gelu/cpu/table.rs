//! GELU with a table of polynomials. It is the fastest way for inputs of ordinary size on CPUs whose table lookups are
//! as fast as arithmetic.
//!
//! `gelu(x) = max(x, 0) - a t(a)` with `a = |x|` and `t(a) = gelu(-a) / -a`, the probability that the input is dropped.
//! For `a` up to [`LIMIT`], `t` is computed by 32 polynomials, one for each interval of width 1/8. If a vector has a
//! larger element, the whole vector is computed with exponential functions. What remains is the rounding of `t`'s
//! constant coefficient and of two fused multiply-adds. So the relative error is smaller than with exponential
//! functions.

use crate::activation::{Activation, Approximate};
use crate::cpu::math::activate;
use crate::cpu::{Simd, SimdElement, array};
use std::sync::LazyLock;

const PIECES: usize = 32;
const WIDTH: f64 = 0.125;
/// The largest argument of the table. It is below the end of the last piece, 31.5 / 8, so that rounding cannot exceed
/// it.
const LIMIT: f32 = 3.937;

/// The largest argument for which the table is used. If the bits of an element must not depend on the others in its
/// vector, it is used for none.
pub(super) fn limit(batch_invariant: bool) -> f32 {
    if batch_invariant { -1.0 } else { LIMIT }
}

/// Adding this rounds to a multiple of [`WIDTH`] and leaves the number of the piece in the low bits.
const MAGIC: f32 = 1_572_864.0;
/// The number of coefficients for f32 (relative error 4e-8), and for f16 and bf16 (5e-5).
pub(super) const TERMS: usize = 6;
const TERMS_HALF: usize = 4;

/// Coefficients by power and piece, in the distance from the middle of the piece.
pub(super) struct Tail([[f32; PIECES]; TERMS]);

impl Tail {
    /// The table for elements of type `T`.
    pub(super) fn of<T: SimdElement>(form: Approximate) -> &'static Tail {
        // By number of terms, then by form.
        static TABLES: LazyLock<[[Tail; 2]; 2]> = LazyLock::new(|| {
            [TERMS, TERMS_HALF]
                .map(|terms| [Approximate::None, Approximate::Tanh].map(|f| Tail::fit(f, terms)))
        });
        &TABLES[usize::from(T::DTYPE.is_half())][usize::from(form == Approximate::Tanh)]
    }

    fn fit(form: Approximate, terms: usize) -> Tail {
        let t = |a: f64| match a {
            0.0 => 0.5,
            _ => Activation::Gelu(form).apply_f64(-a) / -a,
        };
        let mut table = Tail([[0.0; PIECES]; TERMS]);
        for piece in 0..PIECES {
            let middle = piece as f64 * WIDTH;
            for (k, c) in interpolate(|d| t(middle + d), terms).into_iter().enumerate() {
                table.0[k][piece] = c as f32;
            }
        }
        table
    }

    #[inline(always)]
    pub(super) fn load<S: Simd>(&'static self, s: S) -> [S::Table; TERMS] {
        array(|k| s.table(&self.0[k]))
    }
}

/// Coefficients, lowest first, of the polynomial through `f` at the Chebyshev nodes of
/// `-WIDTH / 2..WIDTH / 2`: nearly the best of its degree.
fn interpolate(f: impl Fn(f64) -> f64, terms: usize) -> Vec<f64> {
    let angle = |j: usize| std::f64::consts::PI * (j as f64 + 0.5) / terms as f64;
    let nodes: Vec<f64> = (0..terms).map(|j| WIDTH / 2.0 * angle(j).cos()).collect();
    // Newton's divided differences, then expansion of the products.
    let mut differences: Vec<f64> = nodes.iter().map(|&d| f(d)).collect();
    for order in 1..terms {
        for j in (order..terms).rev() {
            differences[j] = (differences[j] - differences[j - 1]) / (nodes[j] - nodes[j - order]);
        }
    }
    let mut coefficients = vec![0.0; terms];
    for j in (0..terms).rev() {
        for k in (1..terms).rev() {
            coefficients[k] = coefficients[k - 1] - nodes[j] * coefficients[k];
        }
        coefficients[0] = differences[j] - nodes[j] * coefficients[0];
    }
    coefficients
}

/// True if an element is NaN or larger than `limit`, or if the instruction set has no lookups: then exponentials are
/// needed.
#[inline(always)]
pub(super) fn beyond<S: Simd, const N: usize>(s: S, limit: f32, x: [S::F32; N]) -> bool {
    let mut beyond = s.not_le(s.abs(x[0]), s.splat(limit));
    for &x in &x[1..] {
        beyond = s.or_mask(beyond, s.not_le(s.abs(x), s.splat(limit)));
    }
    !S::FAST_LOOKUP || s.any(beyond)
}

/// GELU by exponentials.
#[inline(always)]
pub(super) fn exponentials<S: Simd, const TANH: bool>(s: S, x: S::F32) -> S::F32 {
    let form = if TANH { Approximate::Tanh } else { Approximate::None };
    activate(s, Activation::Gelu(form), x)
}

/// GELU where `|x| <= LIMIT`.
#[inline(always)]
pub(super) fn within<S: Simd, T: SimdElement>(
    s: S,
    table: &[S::Table; TERMS],
    x: S::F32,
) -> S::F32 {
    let a = s.abs(x);
    let shifted = s.add(a, s.splat(MAGIC));
    let piece = s.to_bits(shifted);
    let d = s.sub(a, s.sub(shifted, s.splat(MAGIC)));
    let terms = if T::DTYPE.is_half() { TERMS_HALF } else { TERMS };
    let mut t = s.lookup(table[terms - 1], piece);
    for k in (0..terms - 1).rev() {
        t = s.mul_add(t, d, s.lookup(table[k], piece));
    }
    s.neg_mul_add(a, t, s.max(s.splat(-0.0), x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpolation_reproduces_polynomials() {
        let c = interpolate(|d| 3.0 - 2.0 * d + 5.0 * d * d * d, 4);
        for (c, want) in c.into_iter().zip([3.0, -2.0, 0.0, 5.0]) {
            assert!((c - want).abs() < 1e-11, "{c} {want}");
        }
    }

    #[test]
    fn fits_are_as_good_as_stated() {
        for form in [Approximate::None, Approximate::Tanh] {
            for (terms, bound) in [(TERMS, 4e-8), (TERMS_HALF, 5e-5)] {
                let t = |a: f64| Activation::Gelu(form).apply_f64(-a) / -a;
                for piece in 0..PIECES {
                    let middle = piece as f64 * WIDTH;
                    let c = interpolate(|d| t(middle + d), terms);
                    for i in -50..=50 {
                        let d = f64::from(i) * WIDTH / 100.0 + 1e-9;
                        let value = c.iter().rev().fold(0.0, |sum, c| sum * d + c);
                        let error = (value / t(middle + d) - 1.0).abs();
                        assert!(error < bound, "{} {terms} {middle} {d}: {error}", form.name());
                    }
                }
            }
        }
    }
}
