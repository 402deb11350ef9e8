//! Causal conv1d, Winograd conv2d and GELU: fast on CPU and GPU, with known accuracy.

mod activation;
mod buffer;
pub mod cpu;
mod device;
mod dtype;
mod error;
mod layout;
mod plan;
mod tensor;

pub use activation::{Activation, Approximate};
pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use half::{bf16, f16};
pub use layout::{Layout, MAX_RANK};
pub use plan::{Accuracy, PlanOptions, Verify, Workspace};
pub use tensor::{Tensor, TensorDesc, TensorMut, TensorRef};
