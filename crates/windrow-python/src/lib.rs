//! The extension module of the `windrow` Python package: arrays in and out, everything else is in the
//! `windrow` crate.

mod access;
mod array;
mod call;
mod causal_conv1d;
mod causal_conv1d_serving;
mod conv2d;
mod conv2d_ahead;
mod conv2d_call;
mod conv2d_gradients;
mod conv2d_sequence;
mod conv3d;
mod dlpack;
mod error;
mod gelu;
mod glance;
mod image_step;
mod known_calls;
mod openmp;
mod operator;
mod output;
mod seen;
mod torch;
mod torch_memory;
mod unchanged;
mod verify;

use pyo3::prelude::*;
// The extension exports what ONNX Runtime looks for in a library of operators.
use windrow_onnxruntime as _;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::causal_conv1d::{
        causal_conv1d, causal_conv1d_backward, causal_conv1d_split, causal_conv1d_update,
        causal_conv1d_update_if_plain,
    };
    #[pymodule_export]
    use super::causal_conv1d_serving::causal_conv1d_serving;
    #[pymodule_export]
    use super::conv2d::{
        Conv2dPlan, FilterCache, PackedWeights, conv2d, conv2d_algorithm, conv2d_bytes,
        conv2d_plans,
    };
    #[pymodule_export]
    use super::conv2d_ahead::conv2d_prepare;
    #[pymodule_export]
    use super::conv2d_call::Conv2dCall;
    #[pymodule_export]
    use super::conv2d_gradients::{
        conv_transpose2d, conv_transpose2d_backward, conv_transpose2d_backward_bytes,
        conv_transpose2d_bytes, conv2d_backward, conv2d_backward_bytes,
    };
    #[pymodule_export]
    use super::conv2d_sequence::Conv2dSequence;
    #[pymodule_export]
    use super::conv3d::{conv3d, conv3d_bytes};
    #[pymodule_export]
    use super::error::NotInPlace;
    #[pymodule_export]
    use super::gelu::{gelu, gelu_backward};
    #[pymodule_export]
    use super::image_step::{ImageStep, ImageView};
    #[pymodule_export]
    use super::known_calls::{BoundCall, KnownCalls};
    #[pymodule_export]
    use super::openmp::use_openmp;
    #[pymodule_export]
    use super::operator::{Layers, ShortOperator};
    #[pymodule_export]
    use super::output::Tensor;
    #[pymodule_export]
    use super::torch::{is_only_recorded, is_plain};
    #[pymodule_export]
    use super::unchanged::{Unchanged, Words};
    #[pymodule_export]
    use super::verify::{Case, devices, verification_cases};

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
