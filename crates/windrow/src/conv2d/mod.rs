//! Two-dimensional convolution.

pub(crate) mod cpu;
mod problem;
mod reference;
mod spec;
#[allow(dead_code, reason = "the plan does not call it yet")]
pub(crate) mod winograd;

pub(crate) use problem::Problem;
pub use spec::{Conv2dAlgorithm, Conv2dParams, Conv2dSpec, Tile};
