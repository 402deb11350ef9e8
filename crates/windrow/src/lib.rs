//! Causal conv1d, Winograd conv2d and GELU: fast on CPU and GPU, with known accuracy.

mod activation;
mod buffer;
mod causal_conv1d;
pub mod conv2d;
pub mod cpu;
pub mod cuda;
mod device;
mod dtype;
mod error;
mod folder;
mod gelu;
// Without a backend nobody calls what only backends do.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, unused_imports))]
mod gpu;
mod layout;
#[cfg(feature = "cuda")]
pub mod parallel;
mod plan;
mod tensor;
pub mod tuning;
pub mod verify;

pub use activation::{Activation, Approximate};
pub use causal_conv1d::{
    CausalConv1d, CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dConfiguration,
    CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dSpec, CausalConv1dUpdate,
    CausalConv1dUpdateArgs, CausalConv1dUpdatePlan, CausalConv1dUpdateSpec, causal_conv1d,
    causal_conv1d_update,
};
pub use conv2d::{
    Conv2d, Conv2dAlgorithm, Conv2dArgs, Conv2dConfiguration, Conv2dParams, Conv2dPlan, Conv2dSpec,
    FilterCache, PackedWeights, Tile, Weights, conv2d,
};
pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use gelu::{
    Gelu, GeluAlgorithm, GeluArgs, GeluConfiguration, GeluGrads, GeluPlan, GeluSpec, HalfMath,
    geglu, gelu,
};
pub use half::{bf16, f16};
pub use layout::{Layout, MAX_RANK};
pub use plan::{
    Accuracy, Bound, Configuration, Filter, Operator, Plan, PlanOptions, Tuned, Verify, Workspace,
};
pub use tensor::{Placed, Tensor, TensorDesc, TensorMut, TensorRef};
pub use tuning::Tuning;
