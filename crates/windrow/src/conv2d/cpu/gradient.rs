//! A gradient of the filter on the CPU, bound to a method.

use crate::conv2d::Tile;
use crate::{TensorMut, TensorRef};
use std::fmt::Debug;

/// A gradient of the filter, bound to a method.
pub(crate) trait WeightGradient: Debug + Send + Sync {
    /// The tile of a gradient in Winograd's domain.
    fn tile(&self) -> Option<Tile> {
        None
    }

    /// The allowed error of an element, relative to its scale.
    fn tolerance(&self) -> f64;

    /// Elements of scratch memory.
    fn scratch_len(&self) -> usize;

    /// The gradient into `dw` of views that agree with the spec, with [`WeightGradient::scratch_len`] elements.
    fn run(
        &self,
        x: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        dw: &mut TensorMut<'_>,
        scratch: &mut [f32],
    );
}

/// Evaluates an expression with `$T` the type of inputs and `$W` that of a gradient, which is the same or f32.
macro_rules! with_gradient {
    ($inputs:expr, $gradient:expr, ($T:ident, $W:ident) => $value:expr) => {
        $crate::dtype::with_element!($inputs, $T => match $gradient {
            $crate::DType::F32 => {
                type $W = f32;
                $value
            }
            $crate::DType::F16 | $crate::DType::BF16 | $crate::dtype::not_computed!() => {
                type $W = $T;
                $value
            }
        })
    };
}

pub(super) use with_gradient;
