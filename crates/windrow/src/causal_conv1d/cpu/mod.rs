//! Causal convolution on the CPU: a folder for each method.

pub(crate) mod direct;
pub(crate) mod im2col;
pub(crate) mod shared;
