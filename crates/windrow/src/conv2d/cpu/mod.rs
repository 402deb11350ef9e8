//! Convolution kernels for the CPU.

pub(crate) mod winograd;
