//! The L2 norm of heads, by which outputs are divided.

use crate::cpu::MAX_LANES;
use crate::lists::filled;
use crate::verification::{Expected, round};
use crate::{DType, Error, Result, TensorDesc};

/// The smallest `epsilon`. Squares below the range of f32, which are lost, are small beside it.
const LEAST: f32 = 1e-30;

/// A division of the first two outputs by the L2 norm of their heads, as queries and keys of gated delta nets have it:
///
/// `y[i] = z[i] / sqrt(sum of z[j]^2 over the channels j of i's head + epsilon)`
///
/// A head is `width` neighbouring channels of one token. `z` is what the output would be without a norm: the result of
/// the activation, rounded to the output's type. So the values are those of a separate norm behind the convolution.
/// The sum is in f32. If it is beyond the range of f32, the outputs of the head are 0.
///
/// ```
/// use windrow::{CausalConv1dSpec, DType, HeadNorm, TensorDesc};
/// let x = TensorDesc::contiguous(DType::F32, &[2, 1024, 100])?;
/// let weight = TensorDesc::contiguous(DType::F32, &[1024, 4])?;
/// let spec = CausalConv1dSpec::new(x, weight)?.with_split(&[256, 256, 512])?;
/// let spec = spec.with_norm(HeadNorm::new(128));
/// # Ok::<(), windrow::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadNorm {
    width: usize,
    /// The bits of an f32, which can be compared and hashed.
    epsilon: u32,
}

impl HeadNorm {
    /// The norm of heads of `width` channels, with an `epsilon` of 1e-6.
    pub const fn new(width: usize) -> Self {
        HeadNorm { width, epsilon: 1e-6f32.to_bits() }
    }

    /// Sets the number that is added to the sum of squares: finite, and at least 1e-30.
    #[must_use]
    pub const fn with_epsilon(self, epsilon: f32) -> Self {
        HeadNorm { epsilon: epsilon.to_bits(), ..self }
    }

    /// The number of channels of a head.
    pub const fn width(self) -> usize {
        self.width
    }

    /// The number that is added to the sum of squares.
    pub const fn epsilon(self) -> f32 {
        f32::from_bits(self.epsilon)
    }

    /// True if it divides the output with this number: all but the third one.
    pub(crate) fn takes(output: usize) -> bool {
        output < 2
    }

    /// Checks that the outputs that it divides consist of whole heads.
    pub(super) fn check<'a>(self, outputs: impl Iterator<Item = &'a TensorDesc>) -> Result<()> {
        let HeadNorm { width, .. } = self;
        if width == 0 {
            return Err(Error::parameter("norm", "heads of 0 channels", "at least 1 channel"));
        }
        if !(LEAST..=f32::MAX).contains(&self.epsilon()) {
            let given = format!("epsilon {}", self.epsilon());
            return Err(Error::parameter("norm", given, format!("finite and at least {LEAST}")));
        }
        for (i, output) in outputs.enumerate().filter(|&(i, _)| Self::takes(i)) {
            let channels = output.shape()[1];
            if channels % width != 0 {
                let name = ["y", "y2"][i];
                let expected = format!("a divisor of the {channels} channels of `{name}`");
                return Err(Error::parameter("norm", format!("heads of {width}"), expected));
            }
        }
        Ok(())
    }

    /// The number of channels of a task on the CPU: at least `channels`, and whole heads in whole groups, or all `d`.
    pub(super) fn whole(norm: Option<Self>, channels: usize, d: usize) -> usize {
        let Some(HeadNorm { width, .. }) = norm else { return channels };
        let common = (MAX_LANES.trailing_zeros()).min(width.trailing_zeros());
        let unit = width.checked_mul(MAX_LANES >> common);
        let whole = unit.and_then(|unit| channels.checked_next_multiple_of(unit));
        whole.unwrap_or(usize::MAX).min(d.max(1).next_multiple_of(MAX_LANES))
    }

    /// The expected values of an output of this type with [b, channels, l] elements, if `z` are those without a norm,
    /// up to `tolerance` of their scales. The scales of the result are bounds of its errors.
    pub(super) fn expected(
        self,
        z: &Expected,
        [b, channels, l]: [usize; 3],
        dtype: DType,
        tolerance: f64,
    ) -> Result<Expected> {
        let mut y = Expected::zeros(z.values.len())?;
        if z.values.is_empty() {
            return Ok(y);
        }
        let (unit, epsilon) = (DType::F32.unit_roundoff(), f64::from(self.epsilon()));
        let least = f64::from(f32::MIN_POSITIVE);
        // An error of the sum, of `z` and of the rounding to its type: half the smallest number at least.
        let smallest = if dtype == DType::F16 { 2f64.powi(-25) } else { least };
        let mut errors = filled(0.0, self.width)?;
        for first in (0..b * channels / self.width).flat_map(|head| {
            let start = head * self.width * l;
            start..start + l
        }) {
            let at = |c: usize| first + c * l;
            let (mut sum, mut sum_error, mut length, mut overflows) = (epsilon, 0.0, 0.0, false);
            for (c, error) in errors.iter_mut().enumerate() {
                let (value, scale) = (z.values[at(c)], z.scale[at(c)]);
                let before = tolerance * (scale + least);
                *error = before + dtype.unit_roundoff() * (value.abs() + before) + smallest;
                sum += value * value;
                sum_error += (value.abs() + *error) * *error;
                length += *error * *error;
                // Above the range of f32 sums may overflow, so that anything is accepted.
                overflows |= value.is_finite() && scale > f64::from(f32::MAX)
                    || value.is_finite() && round(dtype, value.abs() + *error).is_infinite();
            }
            overflows |= sum.is_finite() && sum + sum_error > f64::from(f32::MAX) / 2.0;
            // The norm is at least this, wherever `z` is within its errors.
            let norm = sum.sqrt();
            let low = (norm - length.sqrt()).max(epsilon.sqrt());
            // Each square, their additions one after the other in at most 16 partial sums, and `epsilon`.
            let additions = (self.width.div_ceil(16) + 10) as f64;
            let lost = self.width as f64 * least / (2.0 * epsilon);
            for (c, error) in errors.iter().enumerate() {
                let size = z.values[at(c)].abs() + error;
                let bound = error / low + size * sum_error / low.powi(3);
                // The root, the division and the product.
                let rounded = (additions / 2.0 + 6.0) * unit + lost;
                let value = z.values[at(c)] / norm;
                let bound = bound + rounded * (value.abs() + bound);
                let scale = if overflows { f64::MAX } else { bound };
                y.add_sum(at(c), value, scale);
            }
        }
        Ok(y)
    }
}
