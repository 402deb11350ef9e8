//! Layers that replace those of `candle_nn`, with the same parameters under the same names.

mod activation;
mod causal_conv1d;
mod conv2d;

pub use activation::Activation;
pub use causal_conv1d::{CausalConv1d, causal_conv1d, causal_conv1d_no_bias};
pub use conv2d::{Conv2d, conv2d, conv2d_no_bias};
