//! Decoding: one or a few new tokens at a time, and states that hold the tokens before them.

mod args;
mod cpu;
mod gpu;
mod plan;
mod spec;

pub use args::CausalConv1dUpdateArgs;
#[cfg(test)]
pub(crate) use cpu::{Operands, Update};
pub use plan::{CausalConv1dUpdate, CausalConv1dUpdatePlan, causal_conv1d_update};
pub use spec::CausalConv1dUpdateSpec;
