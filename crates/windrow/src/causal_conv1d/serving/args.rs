//! The tensors of a call, by name.

use crate::forms::setters;
use crate::{TensorMut, TensorRef};

/// The inputs of a call; see [`CausalConv1dServingSpec`](crate::CausalConv1dServingSpec) for shapes and types.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CausalConv1dServingArgs<'a> {
    /// [b, d, l] or [1, d, tokens]
    pub x: TensorRef<'a>,
    /// [d, width]
    pub weight: TensorRef<'a>,
    /// `[d]`
    pub bias: Option<TensorRef<'a>>,
    /// [sequences + 1]
    pub query_start_loc: Option<TensorRef<'a>>,
    /// `[sequences]` or [sequences, blocks]
    pub conv_state_indices: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub has_initial_state: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub num_accepted_tokens: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub initial_block: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub last_block: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub first_block: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub tokens_before: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub intermediate_indices: Option<TensorRef<'a>>,
    /// [sequences, columns]
    pub next_token: Option<TensorRef<'a>>,
    /// [sequences, columns]
    pub next_sibling: Option<TensorRef<'a>>,
}

impl<'a> CausalConv1dServingArgs<'a> {
    /// New tokens and weight alone.
    pub fn new(x: TensorRef<'a>, weight: TensorRef<'a>) -> Self {
        CausalConv1dServingArgs {
            x,
            weight,
            bias: None,
            query_start_loc: None,
            conv_state_indices: None,
            has_initial_state: None,
            num_accepted_tokens: None,
            initial_block: None,
            last_block: None,
            first_block: None,
            tokens_before: None,
            intermediate_indices: None,
            next_token: None,
            next_sibling: None,
        }
    }
}

setters! {
    CausalConv1dServingArgs<'a> {
        ? with_bias(bias: TensorRef<'a>);
        ? with_query_start_loc(query_start_loc: TensorRef<'a>);
        ? with_conv_state_indices(conv_state_indices: TensorRef<'a>);
        ? with_has_initial_state(has_initial_state: TensorRef<'a>);
        ? with_num_accepted_tokens(num_accepted_tokens: TensorRef<'a>);
        ? with_initial_block(initial_block: TensorRef<'a>);
        ? with_last_block(last_block: TensorRef<'a>);
        ? with_first_block(first_block: TensorRef<'a>);
        ? with_tokens_before(tokens_before: TensorRef<'a>);
        ? with_intermediate_indices(intermediate_indices: TensorRef<'a>);
        ? with_next_token(next_token: TensorRef<'a>);
        ? with_next_sibling(next_sibling: TensorRef<'a>);
    }
}

/// The tensors that a call writes; see [`CausalConv1dServingSpec`](crate::CausalConv1dServingSpec) for shapes and
/// types.
#[derive(Debug)]
#[non_exhaustive]
pub struct CausalConv1dServingOutputs<'a> {
    /// [pool, d, state_len], read too.
    pub conv_states: TensorMut<'a>,
    /// [b, d, l] or [1, d, tokens]; may be exactly x, but not with a tree.
    pub y: TensorMut<'a>,
    /// [slots, steps, d, columns]
    pub intermediate_windows: Option<TensorMut<'a>>,
    /// [sequences, columns]
    pub parent_token: Option<TensorMut<'a>>,
}

impl<'a> CausalConv1dServingOutputs<'a> {
    /// States and `y` alone.
    pub fn new(conv_states: TensorMut<'a>, y: TensorMut<'a>) -> Self {
        let (intermediate_windows, parent_token) = (None, None);
        CausalConv1dServingOutputs { conv_states, y, intermediate_windows, parent_token }
    }
}

setters! {
    CausalConv1dServingOutputs<'a> {
        ? with_intermediate_windows(intermediate_windows: TensorMut<'a>);
        ? with_parent_token(parent_token: TensorMut<'a>);
    }
}
