//! Comparison of a result with its oracle, element by element.

use super::Check;
use crate::lists::{collected, filled};
use crate::{DType, Element, Error, Result, TensorRef, bf16, f16};
use std::fmt;
use std::ops::Range;

/// The expected values of a tensor from its oracle, in row-major order. Each value has a *scale*: usually the sum of
/// the absolute values of the terms that are summed for it. The allowed error is the tolerance times the scale, as
/// [`Comparison`] says.
#[derive(Debug, PartialEq)]
pub(crate) struct Expected {
    pub(crate) values: Vec<f64>,
    pub(crate) scale: Vec<f64>,
}

impl Expected {
    /// `len` values of zero, to which terms are added.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn zeros(len: usize) -> Result<Self> {
        Ok(Expected { values: filled(0.0, len)?, scale: filled(0.0, len)? })
    }

    /// Expected values that a result must match except for rounding to its type: all scales are 0.
    pub(crate) fn exactly(values: Vec<f64>) -> Result<Self> {
        Ok(Expected { scale: filled(0.0, values.len())?, values })
    }

    pub(crate) fn copy(&self) -> Result<Self> {
        let copy = |of: &[f64]| collected(of.iter().copied());
        Ok(Expected { values: copy(&self.values)?, scale: copy(&self.scale)? })
    }

    /// Adds a term to an element.
    pub(crate) fn add(&mut self, i: usize, term: f64) {
        self.add_sum(i, term, term.abs());
    }

    /// Adds a sum of terms to an element's value, and the sum of their absolute values to its scale.
    pub(crate) fn add_sum(&mut self, i: usize, sum: f64, scale: f64) {
        self.values[i] += sum;
        self.scale[i] += scale;
    }

    /// The same values, with `more` added to the scales. With Winograd, a scale is infinite or NaN if an input of its
    /// tile is. Such a scale is set to `f64::MAX`, which is above the range of f32, so that NaN and infinities are
    /// accepted in the result.
    pub(crate) fn widened(mut self, more: Option<Vec<f64>>) -> Self {
        let mix = |(scale, more): (&mut f64, f64)| *scale = (*scale + more).min(f64::MAX);
        self.scale.iter_mut().zip(more.into_iter().flatten()).for_each(mix);
        self
    }

    /// The values of some channels; of values with the shape [b, channels, l].
    pub(crate) fn narrow(&self, &[_, d, l]: &[usize; 3], channels: Range<usize>) -> Result<Self> {
        let narrow = |of: &[f64]| {
            let rows = of.chunks_exact((d * l).max(1));
            collected(rows.flat_map(|row| &row[channels.start * l..channels.end * l]).copied())
        };
        Ok(Expected { values: narrow(&self.values)?, scale: narrow(&self.scale)? })
    }

    /// Compares a result with these values.
    pub(crate) fn compare(&self, got: &TensorRef<'_>, tolerance: f64) -> Result<Comparison> {
        Comparison::of(got, &self.values, &self.scale, tolerance)
    }

    /// Compares as [`Expected::compare`] does, and returns a [`Check`] with a name.
    pub(crate) fn check(
        &self,
        what: &'static str,
        got: &TensorRef<'_>,
        tolerance: f64,
    ) -> Result<Check> {
        Ok(Check { what, comparison: self.compare(got, tolerance)? })
    }
}

/// Compares the first `count` and the last `count` of `n` slices of a result. If the two ranges overlap, no slice is
/// compared twice.
pub(crate) fn compare_parts(
    n: usize,
    count: usize,
    compare: impl Fn(Range<usize>) -> Result<Comparison>,
) -> Result<Comparison> {
    let first = count.min(n);
    let mut comparison = compare(0..first)?;
    let last = n.saturating_sub(count).max(first)..n;
    if !last.is_empty() {
        comparison.merge(&compare(last)?);
    }
    Ok(comparison)
}

/// The difference between a result and its f64 oracle, element by element.
///
/// An element counts as wrong if `|got - want| > tolerance * (scale + 2^-126) + ulp / 2`. `ulp` is that of the output
/// type at `want`. `scale` is the oracle's sum of absolute values of products for this element. 2^-126 is the smallest
/// normal number of f32: below it the absolute rounding error is constant. So a correct kernel passes even if the
/// products cancel. No average is taken, so a single wrong element is always found. A NaN is right if NaN is expected.
/// An infinite result is right if the expected value, moved by the tolerance, rounds to that infinity in the output
/// type. If the scale is finite but above the range of f32, intermediate sums may overflow, so NaN and infinities are
/// accepted too.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    dtype: DType,
    tolerance: f64,
    count: usize,
    errors: usize,
    max_abs: f64,
    max_rel: f64,
    square_error: f64,
    square_want: f64,
    first_error: Option<(usize, f64, f64)>,
}

impl Comparison {
    /// An empty comparison of values of type `dtype`. `tolerance` is relative to each element's scale. For a kernel
    /// that computes in f32 with up to `k` roundings one after the other, it is `k * DType::F32.unit_roundoff()`.
    pub fn new(dtype: DType, tolerance: f64) -> Self {
        Comparison {
            dtype,
            tolerance,
            count: 0,
            errors: 0,
            max_abs: 0.0,
            max_rel: 0.0,
            square_error: 0.0,
            square_want: 0.0,
            first_error: None,
        }
    }

    /// Compares a tensor with the oracle's values, and their scales, in row-major order.
    ///
    /// # Errors
    /// [`Error::Shape`] if the slices are not as long as the tensor, [`Error::WrongDevice`] for device
    /// memory.
    pub fn of(got: &TensorRef<'_>, want: &[f64], scale: &[f64], tolerance: f64) -> Result<Self> {
        let len = got.layout().len();
        if want.len() != len || scale.len() != len {
            let expected = format!("{} wanted values and {} scales", want.len(), scale.len());
            return Err(Error::shape("got", got.shape(), expected));
        }
        let mut comparison = Comparison::new(got.dtype(), tolerance);
        for ((got, &want), &scale) in got.to_f64_vec()?.into_iter().zip(want).zip(scale) {
            comparison.add(got, want, scale);
        }
        Ok(comparison)
    }

    /// Compares one more element.
    pub fn add(&mut self, got: f64, want: f64, scale: f64) {
        let error = (got - want).abs();
        let overflows = scale > f64::from(f32::MAX) && scale.is_finite();
        let ok = if overflows && !got.is_finite() {
            true
        } else if want.is_nan() || got.is_nan() {
            want.is_nan() && got.is_nan()
        } else if want.is_infinite() {
            got == want
        } else {
            let slack = self.tolerance * (scale + f64::from(f32::MIN_POSITIVE));
            got == want
                || error <= slack + 0.5 * ulp(self.dtype, want)
                || got.is_infinite() && round(self.dtype, want + slack.copysign(got)) == got
        };
        if !ok {
            self.errors += 1;
            self.first_error.get_or_insert((self.count, got, want));
        }
        self.count += 1;
        if error.is_finite() {
            self.max_abs = self.max_abs.max(error);
            if want != 0.0 {
                self.max_rel = self.max_rel.max(error / want.abs());
            }
            self.square_error += error * error;
            self.square_want += want * want;
        }
    }

    /// Adds the elements of another comparison with the same element type and tolerance.
    pub fn merge(&mut self, other: &Comparison) {
        let after = self.count;
        let first = other.first_error.map(|(index, got, want)| (after + index, got, want));
        self.first_error = self.first_error.or(first);
        self.count += other.count;
        self.errors += other.errors;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.max_rel = self.max_rel.max(other.max_rel);
        self.square_error += other.square_error;
        self.square_want += other.square_want;
    }

    /// The number of elements compared.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The number of elements outside the tolerance.
    pub fn errors(&self) -> usize {
        self.errors
    }

    /// The largest `|got - want|` that is finite.
    pub fn max_abs(&self) -> f64 {
        self.max_abs
    }

    /// The largest `|got - want| / |want|` that is finite, of elements whose `want` is not zero.
    pub fn max_rel(&self) -> f64 {
        self.max_rel
    }

    /// The root mean square of the errors divided by that of the expected values; 0 if all errors are 0.
    pub fn rms_rel(&self) -> f64 {
        if self.square_error == 0.0 { 0.0 } else { (self.square_error / self.square_want).sqrt() }
    }

    /// True if no element is outside the tolerance.
    pub fn passed(&self) -> bool {
        self.errors == 0
    }

    /// Returns [`Error::Verification`] if the comparison did not pass. `op` is the name of the operator and algorithm
    /// for the message.
    ///
    /// # Errors
    /// [`Error::Verification`] if an element is outside the tolerance.
    pub fn into_result(self, op: &str) -> Result<()> {
        if self.passed() {
            return Ok(());
        }
        Err(Error::Verification { op: op.into(), detail: self.to_string() })
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} elements differ; max abs {:.3e}, max rel {:.3e}, rms {:.3e}",
            self.errors,
            self.count,
            self.max_abs,
            self.max_rel,
            self.rms_rel()
        )?;
        if let Some((index, got, want)) = self.first_error {
            write!(f, "; first at element {index}: {got:e} instead of {want:e}")?;
        }
        Ok(())
    }
}

/// The unit in the last place (ulp) of `x` in a float type: the distance from `|x|`, rounded to the type, to the next
/// larger number. If `x` is out of range, it is the ulp of the largest finite number. 0 for integers.
pub fn ulp(dtype: DType, x: f64) -> f64 {
    let (mantissa_bits, max_exponent) = match dtype {
        DType::F32 => (23, 127),
        DType::F16 => (10, 15),
        DType::BF16 => (7, 127),
        DType::F64 => (52, 1023),
        DType::I32 | DType::I64 | DType::U8 => return 0.0,
    };
    let biased = (round(dtype, x).abs().to_bits() >> 52) as i32;
    2f64.powi((biased - 1023).clamp(1 - max_exponent, max_exponent) - mantissa_bits)
}

/// `x` rounded to the nearest value of a type.
pub(crate) fn round(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f32::from_f64(x).to_f64(),
        DType::F16 => <f16 as Element>::to_f64(<f16 as Element>::from_f64(x)),
        DType::BF16 => <bf16 as Element>::to_f64(<bf16 as Element>::from_f64(x)),
        DType::F64 => x,
        DType::I32 => i32::from_f64(x).to_f64(),
        DType::I64 => i64::from_f64(x).to_f64(),
        DType::U8 => u8::from_f64(x).to_f64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(dtype: DType, tolerance: f64, got: f64, want: f64, scale: f64) -> bool {
        let mut c = Comparison::new(dtype, tolerance);
        c.add(got, want, scale);
        assert_eq!((c.count(), c.errors() == 0), (1, c.passed()));
        c.passed()
    }

    #[test]
    fn half_a_unit_is_free_and_more_is_not() {
        assert!(compare(DType::F16, 0.0, 1.0, 1.0 + 0.49 / 1024.0, 0.0));
        assert!(!compare(DType::F16, 0.0, 1.0, 1.0 + 0.51 / 1024.0, 0.0));
        assert!(compare(DType::F16, 1e-3, 1.0, 1.0 + 1.4 / 1024.0, 1.0));
        assert!(compare(DType::F16, 0.0, 0.0, 2.9e-8, 0.0));
        assert!(!compare(DType::F16, 0.0, 0.0, 3.1e-8, 0.0));
        assert!(compare(DType::F32, 0.0, 1e-45, 0.8e-45, 0.0));
        assert!(compare(DType::F32, 1e-7, 1e-9, 0.0, 1.0));
        assert!(!compare(DType::F32, 1e-7, 1e-6, 0.0, 1.0));
        assert!(compare(DType::I32, 0.0, 7.0, 7.0, 0.0));
        assert!(!compare(DType::I32, 0.0, 7.0, 8.0, 0.0));
    }

    #[test]
    fn specials_meet_their_like() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        assert!(compare(DType::F32, 0.0, nan, nan, 1.0));
        assert!(!compare(DType::F32, 1.0, nan, 1.0, 1.0));
        assert!(!compare(DType::F32, 1.0, 1.0, nan, 1.0));
        assert!(compare(DType::F32, 0.0, inf, inf, inf));
        assert!(!compare(DType::F32, 1e-6, 1.0, inf, inf));
        assert!(!compare(DType::F32, 0.0, -inf, inf, 1.0));
        assert!(!compare(DType::F32, 0.0, inf, 1.0, 1.0));
        assert!(compare(DType::F16, 0.0, inf, 70000.0, 1.0));
        assert!(!compare(DType::F16, 0.0, 65504.0, 70000.0, 1.0));
        assert!(compare(DType::F16, 1e-3, inf, 65510.0, 65510.0));
    }

    #[test]
    fn roundings_stop_shrinking_and_sums_overflow() {
        let least = f64::from(f32::from_bits(1));
        // Four roundings of at most half of the smallest number each.
        let tolerance = 4.0 * DType::F32.unit_roundoff();
        assert!(compare(DType::F32, tolerance, 2.0 * least, 0.0, 0.0));
        assert!(!compare(DType::F32, tolerance, 3.0 * least, 0.0, 0.0));
        let (inf, nan, beyond) = (f64::INFINITY, f64::NAN, 4e38);
        for got in [inf, -inf, nan] {
            assert!(compare(DType::F32, tolerance, got, 1e38, beyond));
            assert!(!compare(DType::F32, tolerance, got, 1e38, 3e38));
        }
        assert!(!compare(DType::F32, tolerance, 1e37, 1e38, beyond));
        assert!(!compare(DType::F32, tolerance, nan, inf, inf));
    }

    #[test]
    fn one_wrong_element_is_found_and_named() {
        let got = [1.0f32, 2.0, 3.5, 4.0];
        let want = [1.0, 2.0, 3.0, 4.0];
        let t = TensorRef::new(&got, &[2, 2]).unwrap();
        let c = Comparison::of(&t, &want, &want, 1e-6).unwrap();
        assert_eq!((c.errors(), c.count(), c.max_abs()), (1, 4, 0.5));
        assert!((c.max_rel() - 0.5 / 3.0).abs() < 1e-15);
        assert!((c.rms_rel() - (0.25f64 / 30.0).sqrt()).abs() < 1e-15);
        let message = c.into_result("add cpu").unwrap_err().to_string();
        for part in ["add cpu", "1 of 4", "element 2", "3.5e0 instead of 3e0"] {
            assert!(message.contains(part), "{message}");
        }
        assert!(matches!(Comparison::of(&t, &want[1..], &want, 0.0), Err(Error::Shape { .. })));
    }

    #[test]
    fn merged_comparisons_count_as_one() {
        let values = [(1.0, 1.0), (2.5, 2.0), (3.0, 3.0), (4.0, 5.0)];
        let of = |values: &[(f64, f64)]| {
            let mut c = Comparison::new(DType::F32, 1e-6);
            values.iter().for_each(|&(got, want)| c.add(got, want, want));
            c
        };
        for split in 0..=values.len() {
            let mut merged = of(&values[..split]);
            merged.merge(&of(&values[split..]));
            assert_eq!(merged, of(&values));
        }
    }

    #[test]
    fn units_in_the_last_place() {
        assert_eq!(ulp(DType::F32, 1.0), f64::from(f32::EPSILON));
        assert_eq!(ulp(DType::F32, -3.0), 2.0 * f64::from(f32::EPSILON));
        assert_eq!(ulp(DType::F16, 0.0), 2f64.powi(-24));
        assert_eq!(ulp(DType::BF16, 1e-45), 2f64.powi(-133));
        assert_eq!(ulp(DType::I64, 5.0), 0.0);
    }

    #[test]
    fn ends_do_not_overlap() {
        let parts = |n, count| {
            let seen = std::cell::RefCell::new(Vec::new());
            let none = |part| {
                seen.borrow_mut().push(part);
                Ok(Comparison::new(DType::F32, 0.0))
            };
            compare_parts(n, count, none).unwrap();
            seen.into_inner()
        };
        assert_eq!(parts(10, 2), [0..2, 8..10]);
        assert_eq!(parts(3, 2), [0..2, 2..3]);
        assert_eq!(parts(2, 2), std::slice::from_ref(&(0..2)));
        assert_eq!(parts(0, 2), std::slice::from_ref(&(0..0)));
    }
}
