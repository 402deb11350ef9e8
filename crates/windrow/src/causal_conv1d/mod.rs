//! Causal convolution over sequences: whole sequences (prefill) with gradients, one or a few new tokens at a time
//! (decoding), and many sequences with a pool of states (serving).

mod args;
mod comparison;
mod configuration;
mod cpu;
mod gpu;
mod norm;
mod plan;
mod problem;
pub(crate) mod random;
mod reference;
mod sample;
mod sequences;
pub(crate) mod serving;
mod spec;
mod split;
mod tuning;
mod update;
pub(crate) mod verify;

pub use args::{CausalConv1dArgs, CausalConv1dGrads, CausalConv1dOutputs};
pub use configuration::CausalConv1dConfiguration;
pub use norm::HeadNorm;
pub use plan::{CausalConv1d, CausalConv1dPlan, causal_conv1d};
pub(crate) use problem::Problem;
pub use serving::{
    CausalConv1dServing, CausalConv1dServingArgs, CausalConv1dServingOutputs,
    CausalConv1dServingPlan, CausalConv1dServingSpec,
};
pub use spec::{CausalConv1dAlgorithm, CausalConv1dSpec};
pub use update::{
    CausalConv1dUpdate, CausalConv1dUpdateArgs, CausalConv1dUpdatePlan, CausalConv1dUpdateSpec,
    causal_conv1d_update,
};

#[cfg(test)]
mod tests;
