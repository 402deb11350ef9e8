//! Properties of a convolution that several methods need.

use crate::conv2d::{Conv2dSpec, Problem};
use crate::dtype::not_computed;
use crate::{Accuracy, Activation, DType};

/// True for f32 with an error close to that of f32 sums: at accuracy `Exact` or `Fp32`.
pub(crate) fn is_strict(spec: &Conv2dSpec) -> bool {
    spec.x.dtype == DType::F32 && spec.accuracy <= Accuracy::Fp32
}

/// True if the channels of a pixel are whole 16-byte vectors.
pub(crate) fn has_vectors(spec: &Conv2dSpec, p: &Problem) -> bool {
    let vector = 16 / spec.x.dtype.size();
    p.c.is_multiple_of(vector) && p.k.is_multiple_of(vector)
}

/// True if sums are not yet y: a bias, a residual or an activation follows.
pub(crate) fn has_epilogue(spec: &Conv2dSpec) -> bool {
    spec.bias.is_some() || spec.residual || spec.activation != Activation::Identity
}

/// True if the accuracy allows Winograd's transforms.
pub(crate) fn may_transform(spec: &Conv2dSpec) -> bool {
    match spec.x.dtype {
        // f32 keeps an error close to that of f32 sums, with split operands too; TF32 has the mantissa of f16.
        DType::F32 => spec.accuracy >= Accuracy::Fp32,
        DType::F16 => spec.accuracy >= Accuracy::Tf32,
        DType::BF16 | not_computed!() => spec.accuracy == Accuracy::Half,
    }
}

/// The number of f16/bf16 parts that a packed filter has for an element: two for f32 at accuracy `Exact` or `Fp32`.
pub(crate) fn packed_parts(spec: &Conv2dSpec) -> usize {
    match spec.x.dtype {
        DType::F32 if is_strict(spec) => 2,
        DType::F32 | DType::F16 | DType::BF16 | not_computed!() => 1,
    }
}
