//! Two-dimensional convolution.

mod problem;
mod reference;
mod spec;

pub(crate) use problem::Problem;
pub use spec::{Conv2dAlgorithm, Conv2dParams, Conv2dSpec, Tile};
