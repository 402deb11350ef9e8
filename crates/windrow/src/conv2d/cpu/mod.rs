//! Convolution kernels for the CPU.

#[allow(dead_code, reason = "the plan does not call it yet")]
pub(crate) mod winograd;
