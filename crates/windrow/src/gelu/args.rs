//! The inputs of a run, and the gradients of a backward run.

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
        /// The gate, by which the result `gelu(x + bias)` is multiplied.
        gate: TensorRef<'a> => with_gate,
    }
}

/// The gradients that a backward run writes. It computes the fields that are `Some`.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct GeluGrads<'a> {
    /// Gradient of `x`, of its shape and type, with any strides with which no two elements share memory.
    pub dx: Option<TensorMut<'a>>,
    /// Gradient of `gate`, of its shape and type, with any strides with which no two elements share memory.
    pub dgate: Option<TensorMut<'a>>,
    /// Gradient of `bias`, `[last dimension of x]`, f32 or the type of `x`. It is summed in f32 with compensation
    /// (Kahan). The result has the same bits for any number of threads.
    pub dbias: Option<TensorMut<'a>>,
}

setters! {
    GeluGrads<'a> {
        ? with_dx(dx: TensorMut<'a>);
        ? with_dgate(dgate: TensorMut<'a>);
        ? with_dbias(dbias: TensorMut<'a>);
    }
}
