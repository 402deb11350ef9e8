//! Convolution on GPUs: a folder for each method, with its host code and its kernels.

mod chips;
mod choice;
mod cudnn;
mod few_taps;
mod general;
mod gradients;
mod grouped;
mod implicit_gemm;
mod methods;
mod prepared;
mod shared;
mod task;
mod winograd_gemm;
mod winograd_row;

use self::cudnn::CudnnMethod;
use self::few_taps::FewTapsMethod;
use self::general::{DIRECT, IM2COL_GEMM};
use self::gradients::weight_product;
pub(crate) use self::gradients::{Backward, WeightOperands};
use self::grouped::GroupedMethod;
use self::implicit_gemm::ImplicitGemmMethod;
use self::methods::Method;
pub(crate) use self::methods::{
    allows, best, candidates, complete, kernels, micros, parameters, prepare, supported, takes,
    variants,
};
pub(crate) use self::prepared::{Operands, PackTo, PackedForm, Prepared};
pub(crate) use self::shared::packs::Packs;
use self::shared::parameters::{Divisor, Seen, bias_of, kernel, strides, with_epilogue};
use self::shared::{ALIGNMENT, facts, input, source, split};
pub(crate) use self::task::Task;
use self::winograd_gemm::WinogradGemmMethod;
use self::winograd_row::WinogradRowMethod;
#[cfg(test)]
use super::Conv2dSpec;

/// The chip whose measured rates stand for those of `gpu`; `None` if they are its own.
pub(crate) fn borrowed_rates(gpu: &crate::gpu::Gpu) -> Option<&'static str> {
    self::chips::Chip::borrowed(gpu)
}

/// Every method. Of those with the same algorithm the first one that supports a problem computes it.
static METHODS: [&dyn Method; 8] = [
    &GroupedMethod,
    &DIRECT,
    &FewTapsMethod,
    &IM2COL_GEMM,
    &ImplicitGemmMethod,
    &WinogradGemmMethod,
    &WinogradRowMethod,
    &CudnnMethod,
];

/// The same with what takes the most registers on the way to y.
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
