//! The tensors of an update, by name.

use crate::TensorRef;
use crate::forms::setters;

/// The inputs of an update; see [`CausalConv1dUpdateSpec`](crate::CausalConv1dUpdateSpec) for shapes and types.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CausalConv1dUpdateArgs<'a> {
    /// [b, d, l]
    pub x: TensorRef<'a>,
    /// [d, width]
    pub weight: TensorRef<'a>,
    /// `[d]`
    pub bias: Option<TensorRef<'a>>,
    /// `[b]`
    pub cache_seqlens: Option<TensorRef<'a>>,
    /// `[b]`
    pub conv_state_indices: Option<TensorRef<'a>>,
}

impl<'a> CausalConv1dUpdateArgs<'a> {
    /// New tokens and weight alone.
    pub fn new(x: TensorRef<'a>, weight: TensorRef<'a>) -> Self {
        let (bias, cache_seqlens, conv_state_indices) = (None, None, None);
        CausalConv1dUpdateArgs { x, weight, bias, cache_seqlens, conv_state_indices }
    }
}

setters! {
    CausalConv1dUpdateArgs<'a> {
        ? with_bias(bias: TensorRef<'a>);
        ? with_cache_seqlens(cache_seqlens: TensorRef<'a>);
        ? with_conv_state_indices(conv_state_indices: TensorRef<'a>);
    }
}
