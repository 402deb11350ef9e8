//! The inputs and outputs of a call.

use crate::forms::fields;
use crate::{TensorMut, TensorRef};

fields! {
    /// The inputs of a call; see [`CausalConv1dServingSpec`](crate::CausalConv1dServingSpec) for shapes and types.
    #[derive(Clone, Copy, Debug)]
    CausalConv1dServingArgs<'a> by pub fn new {
        /// [b, d, l] or [1, d, tokens]
        x: TensorRef<'a>,
        /// [d, width]
        weight: TensorRef<'a>,
    }
    optional {
        /// `[d]`
        bias: TensorRef<'a> => with_bias,
        /// [sequences + 1]
        query_start_loc: TensorRef<'a> => with_query_start_loc,
        /// `[sequences]` or [sequences, blocks]
        conv_state_indices: TensorRef<'a> => with_conv_state_indices,
        /// `[sequences]`
        has_initial_state: TensorRef<'a> => with_has_initial_state,
        /// `[sequences]`
        num_accepted_tokens: TensorRef<'a> => with_num_accepted_tokens,
        /// `[sequences]`
        initial_block: TensorRef<'a> => with_initial_block,
        /// `[sequences]`
        last_block: TensorRef<'a> => with_last_block,
        /// `[sequences]`
        first_block: TensorRef<'a> => with_first_block,
        /// `[sequences]`
        tokens_before: TensorRef<'a> => with_tokens_before,
        /// `[sequences]`
        intermediate_indices: TensorRef<'a> => with_intermediate_indices,
        /// [sequences, columns]
        next_token: TensorRef<'a> => with_next_token,
        /// [sequences, columns]
        next_sibling: TensorRef<'a> => with_next_sibling,
    }
}

fields! {
    /// The tensors that a call writes; see [`CausalConv1dServingSpec`](crate::CausalConv1dServingSpec) for shapes and
    /// types.
    #[derive(Debug)]
    CausalConv1dServingOutputs<'a> by pub fn new {
        /// [pool, d, state_len], read too.
        conv_states: TensorMut<'a>,
        /// [b, d, l] or [1, d, tokens], or the first channels if the outputs are split. It may be the same tensor as x
        /// (same address and layout), except with a tree.
        y: TensorMut<'a>,
    }
    optional {
        /// [slots, steps, d, columns]
        intermediate_windows: TensorMut<'a> => with_intermediate_windows,
        /// [sequences, columns]
        parent_token: TensorMut<'a> => with_parent_token,
        /// [b, channels, l], if the outputs are split
        y2: TensorMut<'a> => with_y2,
        /// [b, channels, l], if there are three outputs
        y3: TensorMut<'a> => with_y3,
    }
}
