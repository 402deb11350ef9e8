//! The tensors of a run, by name.

use crate::forms::{fields, setters};
use crate::{TensorMut, TensorRef};

fields! {
    /// The inputs of a run; see [`GeluSpec`](crate::GeluSpec) for shapes and types.
    #[derive(Clone, Copy, Debug)]
    GeluArgs<'a> by pub fn new {
        /// The input.
        x: TensorRef<'a>,
    }
    optional {
        /// The bias, added to `x` along its last dimension.
        bias: TensorRef<'a> => with_bias,
        /// The gate, which the activation is multiplied by.
        gate: TensorRef<'a> => with_gate,
    }
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

setters! {
    GeluGrads<'a> {
        ? with_dx(dx: TensorMut<'a>);
        ? with_dgate(dgate: TensorMut<'a>);
        ? with_dbias(dbias: TensorMut<'a>);
    }
}
