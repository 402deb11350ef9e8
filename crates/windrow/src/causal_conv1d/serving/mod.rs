//! Serving: new tokens of many sequences, and a pool of states that hold the tokens before them.

mod args;
mod comparison;
mod cpu;
mod entries;
mod gpu;
mod plan;
pub(crate) mod random;
mod reference;
mod spec;
#[cfg(test)]
mod tests;
pub(super) mod verify;

pub use args::{CausalConv1dServingArgs, CausalConv1dServingOutputs};
pub use plan::{CausalConv1dServing, CausalConv1dServingPlan};
pub use spec::CausalConv1dServingSpec;
pub(super) use spec::{Sizes, TREE};
