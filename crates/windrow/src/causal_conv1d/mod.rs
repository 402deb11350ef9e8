//! Causal convolution over sequences: prefill, decoding, training.

mod cpu;
mod cuda;
mod plan;
mod problem;
mod reference;
mod sample;
mod sequences;
mod spec;
mod update;
pub(crate) mod verify;

pub use plan::{
    CausalConv1dArgs, CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dPlan, causal_conv1d,
};
pub(crate) use problem::Problem;
pub use spec::{CausalConv1dAlgorithm, CausalConv1dSpec};
pub use update::{
    CausalConv1dUpdateArgs, CausalConv1dUpdatePlan, CausalConv1dUpdateSpec, causal_conv1d_update,
};

#[cfg(test)]
mod tests;
