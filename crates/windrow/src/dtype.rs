//! Element types.

use crate::forms::names;
use half::{bf16, f16};
use std::fmt;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// IEEE 754 binary64; operators take it in their oracles only.
    F64,
    /// 32-bit signed integer, for indices and sequence lengths.
    I32,
    /// 64-bit signed integer, for indices and sequence lengths.
    I64,
    /// 8-bit unsigned integer, for flags: 0 is no, all else is yes.
    U8,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// True for the types that operators compute on: f32, f16, bf16.
    pub const fn is_compute(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }

    /// True for f16 and bf16.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }

    /// Relative spacing of the type: half the distance between 1 and the next larger number, so
    /// that a correctly rounded result has a relative error of at most this. Zero for integers.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            DType::F32 => 5.960464477539063e-8,
            DType::F16 => 4.8828125e-4,
            DType::BF16 => 3.90625e-3,
            DType::F64 => 1.1102230246251565e-16,
            DType::I32 | DType::I64 | DType::U8 => 0.0,
        }
    }
}

/// The pattern, in matches over element types, of those that operators do not compute on. Every match lists all types
/// without a wildcard, so a new type must be added to this pattern or to an arm of its own.
macro_rules! not_computed {
    () => {
        $crate::DType::F64 | $crate::DType::I32 | $crate::DType::I64 | $crate::DType::U8
    };
}

pub(crate) use not_computed;

/// The value for an element type: one of those that operators compute on, which specs have checked.
macro_rules! by_type {
    ($dtype:expr, F32 => $f32:expr, F16 => $f16:expr, BF16 => $bf16:expr $(,)?) => {
        match $dtype {
            $crate::DType::F32 => $f32,
            $crate::DType::F16 => $f16,
            $crate::DType::BF16 => $bf16,
            $crate::dtype::not_computed!() => unreachable!("specs allow f32, f16 and bf16"),
        }
    };
}

pub(crate) use by_type;

/// Evaluates an expression with `$t` as the element type that `$dtype` names: one of those that operators
/// compute on, which specs have checked.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $value:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $t = f32;
                $value
            }
            $crate::DType::F16 => {
                type $t = $crate::f16;
                $value
            }
            $crate::DType::BF16 => {
                type $t = $crate::bf16;
                $value
            }
            $crate::dtype::not_computed!() => unreachable!("specs allow f32, f16 and bf16"),
        }
    };
}

pub(crate) use with_element;

names! {
    DType, "dtype":
    F32 = "f32", F16 = "f16", BF16 = "bf16", F64 = "f64", I32 = "i32", I64 = "i64",
    U8 = "u8",
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is the element of a tensor.
///
/// Sealed: implemented for `f32`, `f16`, `bf16`, `f64`, `i32`, `i64` and `u8`.
pub trait Element:
    Copy + Send + Sync + fmt::Debug + PartialEq + Default + sealed::Sealed + 'static
{
    /// The corresponding [`DType`].
    const DTYPE: DType;
    /// The value as f64, exact for every type but `i64` beyond 2^53.
    fn to_f64(self) -> f64;
    /// The nearest value of this type (ties to even; integers truncate).
    fn from_f64(x: f64) -> Self;
}

macro_rules! element {
    ($t:ty, $d:expr, $to:expr, $from:expr) => {
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = $d;
            #[inline(always)]
            fn to_f64(self) -> f64 {
                $to(self)
            }
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                $from(x)
            }
        }
    };
}

element!(f32, DType::F32, f64::from, |x| x as f32);
element!(f16, DType::F16, f16::to_f64, f16::from_f64);
element!(bf16, DType::BF16, bf16::to_f64, bf16::from_f64);
element!(f64, DType::F64, |x| x, |x| x);
element!(i32, DType::I32, f64::from, |x| x as i32);
element!(i64, DType::I64, |x| x as f64, |x| x as i64);
element!(u8, DType::U8, f64::from, |x| x as u8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for &d in DType::ALL {
            assert_eq!(d.name().parse::<DType>().unwrap(), d);
        }
        let message = "fp8".parse::<DType>().unwrap_err().to_string();
        assert!(message.contains("dtype") && message.contains("fp8"), "{message}");
    }

    #[test]
    fn unit_roundoff_is_half_the_spacing_at_one() {
        assert_eq!(DType::F32.unit_roundoff(), f64::from(f32::EPSILON) / 2.0);
        assert_eq!(DType::F16.unit_roundoff(), f16::EPSILON.to_f64() / 2.0);
        assert_eq!(DType::BF16.unit_roundoff(), bf16::EPSILON.to_f64() / 2.0);
        assert_eq!(DType::F64.unit_roundoff(), f64::EPSILON / 2.0);
    }
}
