//! Convolution on GPUs: a folder for each method, with its host code and its kernels.

mod chips;
mod choice;
mod cudnn;
mod few_taps;
mod general;
mod gradient;
mod gradients;
mod group_products;
mod grouped;
mod implicit_gemm;
mod method;
mod methods;
mod prepared;
mod shared;
mod task;
mod winograd_gemm;
mod winograd_row;

pub(crate) use self::choice::best;
pub(crate) use self::gradient::WeightOperands;
pub(crate) use self::gradients::Backward;
pub(crate) use self::methods::{
    allows, candidates, complete, micros, parameters, prepare, supported, takes, variants,
};
pub(crate) use self::prepared::{Operands, PackTo, PackedForm, Prepared};
pub(crate) use self::shared::frames::FinalFrames;
pub(crate) use self::shared::packs::Packs;
use self::shared::parameters::{Divisor, Seen, kernel, strides, with_epilogue};
use self::shared::{ALIGNMENT, facts, input, shape, source, split};
pub(crate) use self::task::Task;
#[cfg(test)]
use super::Conv2dSpec;

/// The GPU model whose measured rates the cost model uses for `gpu`; `None` if `gpu` itself was measured.
pub(crate) fn borrowed_rates(gpu: &crate::gpu::Gpu) -> Option<&'static str> {
    self::chips::Chip::borrowed(gpu)
}

/// The variants of all kernels that plans of convolutions can launch, as lines of `verify/kernels.txt`.
pub(crate) fn kernels() -> impl Iterator<Item = &'static str> {
    let methods = methods::METHODS.into_iter().flat_map(|method| method.about().kernels);
    methods.chain(shared::KERNELS).chain(gradients::kernels()).copied()
}

/// The spec with the residual and activation that take the most registers.
#[cfg(test)]
fn with_largest_epilogue(spec: Conv2dSpec) -> Conv2dSpec {
    let activation = crate::Activation::Gelu(crate::Approximate::None);
    spec.with_activation(activation).with_residual(true)
}

/// Specs whose kernels are compiled in tests: each type and layout.
#[cfg(test)]
fn test_specs() -> Vec<Conv2dSpec> {
    use crate::{DType, TensorDesc, conv2d::Conv2dParams};
    let mut specs = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for order in [[0, 1, 2, 3], [0, 2, 3, 1]] {
            let layout = crate::Layout::with_order(&[2, 32, 20, 20], &order).unwrap();
            let w = TensorDesc::contiguous(dtype, &[64, 32, 3, 3]).unwrap();
            let x = TensorDesc { dtype, layout };
            specs.push(Conv2dSpec::new(x, w, &Conv2dParams::default()).unwrap());
        }
    }
    specs
}
