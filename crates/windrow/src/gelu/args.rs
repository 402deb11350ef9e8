//! The tensors of a run, by name.

use crate::forms::setters;
use crate::{TensorMut, TensorRef};

/// The inputs of a run; see [`GeluSpec`](crate::GeluSpec) for shapes and types.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct GeluArgs<'a> {
    /// The input.
    pub x: TensorRef<'a>,
    /// The bias, added to `x` along its last dimension.
    pub bias: Option<TensorRef<'a>>,
    /// The gate, which the activation is multiplied by.
    pub gate: Option<TensorRef<'a>>,
}

/// The gradients that a backward run computes: those that are given.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct GeluGrads<'a> {
    /// Gradient of `x`: its shape and type, any strides without overlap.
    pub dx: Option<TensorMut<'a>>,
    /// Gradient of `gate`: its shape and type, any strides without overlap.
    pub dgate: Option<TensorMut<'a>>,
    /// Gradient of `bias`: `[last dimension of x]`, f32 or the type of `x`. Summed in f32 with
    /// compensation and the same bits on any number of threads.
    pub dbias: Option<TensorMut<'a>>,
}

impl<'a> GeluArgs<'a> {
    /// Arguments with an input and nothing else.
    pub fn new(x: TensorRef<'a>) -> Self {
        GeluArgs { x, bias: None, gate: None }
    }
}

setters! {
    GeluArgs<'a> {
        ? with_bias(bias: TensorRef<'a>);
        ? with_gate(gate: TensorRef<'a>);
    }
}

setters! {
    GeluGrads<'a> {
        ? with_dx(dx: TensorMut<'a>);
        ? with_dgate(dgate: TensorMut<'a>);
        ? with_dbias(dbias: TensorMut<'a>);
    }
}
