//! The inputs and outputs of a run, and the gradients of a backward run.

use crate::forms::{fields, setters};
use crate::{TensorMut, TensorRef};

fields! {
    /// The inputs of a run; see [`CausalConv1dSpec`](crate::CausalConv1dSpec) for shapes and types.
    #[derive(Clone, Copy, Debug)]
    CausalConv1dArgs<'a> by pub fn new {
        /// [b, d, l]
        x: TensorRef<'a>,
        /// [d, width] or [d_out, d, width]
        weight: TensorRef<'a>,
    }
    optional {
        /// `[d_out]`
        bias: TensorRef<'a> => with_bias,
        /// [b, l]
        seq_idx: TensorRef<'a> => with_seq_idx,
        /// [sequences + 1]
        cu_seqlens: TensorRef<'a> => with_cu_seqlens,
        /// [b or sequences, d, (width-1) * dilation]
        initial_states: TensorRef<'a> => with_initial_states,
    }
}

fields! {
    /// The outputs of a run; see [`CausalConv1dSpec`](crate::CausalConv1dSpec) for shapes and types.
    #[derive(Debug)]
    CausalConv1dOutputs<'a> by pub fn new {
        /// [b, d_out, l], or the first channels if the outputs are split
        y: TensorMut<'a>,
    }
    optional {
        /// [b or sequences, d, (width-1) * dilation]. The values are exact copies of inputs.
        final_states: TensorMut<'a> => with_final_states,
        /// [b, channels, l], if the outputs are split
        y2: TensorMut<'a> => with_y2,
        /// [b, channels, l], if there are three outputs
        y3: TensorMut<'a> => with_y3,
    }
}

/// The gradients that a backward run writes. It computes the fields that are `Some`. They may have any strides with
/// which no two elements share memory.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct CausalConv1dGrads<'a> {
    /// Gradient of `x`, of x's shape and type.
    pub dx: Option<TensorMut<'a>>,
    /// Gradient of the weight, of its shape, f32 or x's type. The result has the same bits for any number of threads.
    pub dweight: Option<TensorMut<'a>>,
    /// Gradient of the bias `[d_out]`, f32 or x's type. The result has the same bits for any number of threads.
    pub dbias: Option<TensorMut<'a>>,
    /// Gradient of the initial states, of their shape and x's type.
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
