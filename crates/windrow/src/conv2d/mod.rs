//! Two-dimensional convolution.

pub(crate) mod cpu;
mod problem;
mod reference;
mod spec;
pub(crate) mod winograd;

pub(crate) use problem::Problem;
pub use spec::{Conv2dAlgorithm, Conv2dParams, Conv2dSpec, Tile};
