//! The parameter of leaky ReLU.

use crate::{Error, Result};
use std::fmt;

/// The slope of [`Activation::LeakyRelu`](super::Activation::LeakyRelu) for negative numbers: any finite number.
///
/// If it is negative, the activation makes negative numbers positive. If its magnitude is above 1, the activation
/// enlarges negative numbers and their errors. Slopes are compared and hashed by their bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct NegativeSlope(pub(super) u32);

impl NegativeSlope {
    /// 0.01, as in PyTorch.
    pub const DEFAULT: NegativeSlope = NegativeSlope(0.01f32.to_bits());

    /// This slope; 0 for -0.
    ///
    /// # Errors
    /// [`Error::Parameter`] if it is infinite or NaN.
    pub fn new(slope: f32) -> Result<Self> {
        match slope.is_finite() {
            true => Ok(NegativeSlope((slope + 0.0).to_bits())),
            false => Err(Error::parameter("negative_slope", slope, "a finite number in f32")),
        }
    }

    /// The slope as a number.
    pub const fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl Default for NegativeSlope {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Debug for NegativeSlope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NegativeSlope({self})")
    }
}

/// The shortest decimal number that is read as the same slope.
impl fmt::Display for NegativeSlope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn slopes_are_compared_by_their_bits() {
        let slope = |slope| NegativeSlope::new(slope).unwrap();
        assert_eq!(slope(0.01), NegativeSlope::default());
        assert_ne!(slope(0.01), slope(0.010000001));
        assert_eq!(slope(-0.0).get().to_bits(), 0);
        let set: HashSet<_> = [0.0, -0.0, 0.2, 0.2, 1.5, -0.5].map(slope).into();
        assert_eq!(set.len(), 4);
        assert_eq!(
            format!("{:?} {}", slope(0.2), slope(-1e-30)),
            format!("NegativeSlope(0.2) {}", -1e-30)
        );
    }

    #[test]
    fn slopes_are_finite() {
        for given in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let error = NegativeSlope::new(given).unwrap_err();
            assert!(matches!(&error, Error::Parameter { name: "negative_slope", .. }), "{error}");
        }
        assert_eq!(NegativeSlope::new(f32::MIN).unwrap().get(), f32::MIN);
    }
}
