//! Inputs and outputs of a run.

use crate::forms::{fields, setters};
use crate::{TensorMut, TensorRef, Weights};

/// The inputs of a run.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Conv3dArgs<'a> {
    /// Input [n, c, t, h, w], with the spec's type, shape and strides.
    pub x: TensorRef<'a>,
    /// Filter [k, c/groups, kt, r, s].
    pub w: Weights<'a>,
    /// Bias `[k]`, if the spec has one.
    pub bias: Option<TensorRef<'a>>,
    /// The residual, if the spec has one. It has y's type, shape and strides.
    pub residual: Option<TensorRef<'a>>,
    /// The frames before the first one, if the spec has them.
    pub initial_frames: Option<TensorRef<'a>>,
}

impl<'a> Conv3dArgs<'a> {
    /// The arguments without bias, residual and initial frames.
    pub fn new(x: TensorRef<'a>, w: impl Into<Weights<'a>>) -> Self {
        Conv3dArgs { x, w: w.into(), bias: None, residual: None, initial_frames: None }
    }
}

setters! {
    Conv3dArgs<'a> {
        ? with_bias(bias: TensorRef<'a>);
        ? with_residual(residual: TensorRef<'a>);
        ? with_initial_frames(initial_frames: TensorRef<'a>);
    }
}

fields! {
    /// The outputs of a run. A [`TensorMut`] becomes outputs without final frames.
    #[derive(Debug)]
    Conv3dOutputs<'a> by pub fn new {
        /// Output [n, k, ot, oh, ow].
        y: TensorMut<'a>,
    }
    optional {
        /// The state after the last frame, if the spec has it. The values are exact copies of inputs.
        final_frames: TensorMut<'a> => with_final_frames,
    }
}

impl<'a> From<TensorMut<'a>> for Conv3dOutputs<'a> {
    fn from(y: TensorMut<'a>) -> Self {
        Self::new(y)
    }
}
