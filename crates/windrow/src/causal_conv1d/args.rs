//! The tensors of a run, by name.

use crate::forms::setters;
use crate::{TensorMut, TensorRef};

/// The inputs of a run; see [`CausalConv1dSpec`](crate::CausalConv1dSpec) for shapes and types.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CausalConv1dArgs<'a> {
    /// [b, d, l]
    pub x: TensorRef<'a>,
    /// [d, width] or [d_out, d, width]
    pub weight: TensorRef<'a>,
    /// `[d_out]`
    pub bias: Option<TensorRef<'a>>,
    /// [b, l]
    pub seq_idx: Option<TensorRef<'a>>,
    /// [sequences + 1]
    pub cu_seqlens: Option<TensorRef<'a>>,
    /// [b or sequences, d, width-1]
    pub initial_states: Option<TensorRef<'a>>,
}

impl<'a> CausalConv1dArgs<'a> {
    /// Input and weight alone.
    pub fn new(x: TensorRef<'a>, weight: TensorRef<'a>) -> Self {
        let (bias, seq_idx, cu_seqlens, initial_states) = (None, None, None, None);
        CausalConv1dArgs { x, weight, bias, seq_idx, cu_seqlens, initial_states }
    }
}

setters! {
    CausalConv1dArgs<'a> {
        ? with_bias(bias: TensorRef<'a>);
        ? with_seq_idx(seq_idx: TensorRef<'a>);
        ? with_cu_seqlens(cu_seqlens: TensorRef<'a>);
        ? with_initial_states(initial_states: TensorRef<'a>);
    }
}

/// The outputs of a run; see [`CausalConv1dSpec`](crate::CausalConv1dSpec) for shapes and types.
#[derive(Debug)]
#[non_exhaustive]
pub struct CausalConv1dOutputs<'a> {
    /// [b, d_out, l]
    pub y: TensorMut<'a>,
    /// [b or sequences, d, width-1]; copies, bit for bit.
    pub final_states: Option<TensorMut<'a>>,
}

impl<'a> CausalConv1dOutputs<'a> {
    /// The output alone.
    pub fn new(y: TensorMut<'a>) -> Self {
        CausalConv1dOutputs { y, final_states: None }
    }
}

setters! {
    CausalConv1dOutputs<'a> {
        ? with_final_states(final_states: TensorMut<'a>);
    }
}

/// The gradients that a backward run computes: those that are given. Strides are free, without
/// overlap.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct CausalConv1dGrads<'a> {
    /// Gradient of `x`: its shape and type.
    pub dx: Option<TensorMut<'a>>,
    /// Gradient of the weight: its shape, f32 or x's type. The same bits on any number of
    /// threads.
    pub dweight: Option<TensorMut<'a>>,
    /// Gradient of the bias `[d_out]`, f32 or x's type. The same bits on any number of threads.
    pub dbias: Option<TensorMut<'a>>,
    /// Gradient of the initial states [b or sequences, d, width-1], of x's type.
    pub dinitial_states: Option<TensorMut<'a>>,
}

setters! {
    CausalConv1dGrads<'a> {
        ? with_dx(dx: TensorMut<'a>);
        ? with_dweight(dweight: TensorMut<'a>);
        ? with_dbias(dbias: TensorMut<'a>);
        ? with_dinitial_states(dinitial_states: TensorMut<'a>);
    }
}
