//! Causal convolution on GPUs: a folder for each method, with its kernels.

pub(super) mod direct;
pub(super) mod im2col;
pub(super) mod shared;
