//! The inputs of an update.

use crate::TensorRef;
use crate::forms::fields;

fields! {
    /// The inputs of an update; see [`CausalConv1dUpdateSpec`](crate::CausalConv1dUpdateSpec) for shapes and types.
    #[derive(Clone, Copy, Debug)]
    CausalConv1dUpdateArgs<'a> by pub fn new {
        /// [b, d, l]
        x: TensorRef<'a>,
        /// [d, width]
        weight: TensorRef<'a>,
    }
    optional {
        /// `[d]`
        bias: TensorRef<'a> => with_bias,
        /// `[b]`
        cache_seqlens: TensorRef<'a> => with_cache_seqlens,
        /// `[b]`
        conv_state_indices: TensorRef<'a> => with_conv_state_indices,
    }
}
