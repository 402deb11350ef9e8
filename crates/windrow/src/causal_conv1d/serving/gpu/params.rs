//! The parameters of serving's kernels.

use crate::causal_conv1d::gpu::shared::{
    Further, address, broken_rule, further_addresses, norm_channels, output_address, strides,
};
use crate::causal_conv1d::serving::Sizes;
use crate::causal_conv1d::{
    CausalConv1dServingArgs, CausalConv1dServingOutputs, CausalConv1dServingSpec, HeadNorm,
};
use crate::gpu::{Gpu, params};
use crate::{Result, TensorDesc};

params! {
    /// `Params` of serving.cuh.
    #[derive(Default)]
    pub(super) struct Params {
        pub(super) y: usize,
        pub(super) x: usize,
        pub(super) states: usize,
        pub(super) weight: usize,
        pub(super) bias: usize,
        pub(super) starts: usize,
        pub(super) table: usize,
        pub(super) accepted: usize,
        pub(super) initial_block: usize,
        pub(super) last_block: usize,
        pub(super) first_block: usize,
        pub(super) tokens_before: usize,
        pub(super) slots: usize,
        pub(super) next_token: usize,
        pub(super) next_sibling: usize,
        pub(super) flags: usize,
        pub(super) windows: usize,
        pub(super) parents: usize,
        pub(super) wrong: usize,
        pub(super) sequences: usize,
        pub(super) channels: usize,
        pub(super) length: usize,
        pub(super) state_length: usize,
        pub(super) pool: usize,
        pub(super) blocks: usize,
        pub(super) block_size: usize,
        pub(super) slot_count: usize,
        pub(super) most: i64,
        pub(super) tree_columns: usize,
        pub(super) null_index: i64,
        pub(super) x_stride: [isize; 3],
        pub(super) y_stride: [isize; 3],
        pub(super) state_stride: [isize; 3],
        pub(super) weight_stride: [isize; 2],
        pub(super) bias_stride: isize,
        pub(super) table_stride: [isize; 2],
        pub(super) starts_stride: isize,
        pub(super) accepted_stride: isize,
        pub(super) initial_stride: isize,
        pub(super) last_stride: isize,
        pub(super) first_stride: isize,
        pub(super) before_stride: isize,
        pub(super) flags_stride: isize,
        pub(super) window_stride: [isize; 4],
        pub(super) slots_stride: isize,
        pub(super) next_stride: [isize; 2],
        pub(super) sibling_stride: [isize; 2],
        pub(super) parents_stride: [isize; 2],
        pub(super) further_y: [usize; 2],
        pub(super) further_stride: [[isize; 3]; 2],
        pub(super) further_first: [usize; 2],
        pub(super) norm_channels: usize,
        pub(super) epsilon: f32,
    }
}

impl Params {
    /// Sizes and strides of a spec.
    pub(super) fn of(spec: &CausalConv1dServingSpec, sizes: &Sizes) -> Self {
        let each = |desc: &Option<TensorDesc>| strides::<1>(desc.as_ref())[0];
        let tree = |desc: &Option<TensorDesc>| strides::<2>(desc.as_ref());
        let table = spec.conv_state_indices.as_ref();
        let table_stride = match table.map(|table| table.strides()) {
            Some(&[sequence, column]) => [sequence, column],
            Some(strides) => [strides[0], 0],
            None => [0; 2],
        };
        let further = Further::of(spec.outputs());
        Params {
            sequences: sizes.sequences,
            channels: sizes.problem.d,
            length: sizes.problem.l,
            state_length: sizes.state_len,
            pool: sizes.pool,
            blocks: sizes.blocks,
            block_size: spec.block_size,
            slot_count: sizes.slots,
            most: i64::try_from(sizes.most).unwrap_or(i64::MAX),
            tree_columns: spec.next_token.as_ref().map_or(0, |next| next.shape()[1]),
            null_index: spec.null_index.unwrap_or(-1),
            x_stride: strides(Some(&spec.x)),
            y_stride: strides(Some(&spec.y)),
            state_stride: strides(Some(&spec.conv_states)),
            weight_stride: strides(Some(&spec.weight)),
            bias_stride: each(&spec.bias),
            table_stride,
            starts_stride: each(&spec.query_start_loc),
            accepted_stride: each(&spec.num_accepted_tokens),
            initial_stride: each(&spec.initial_block),
            last_stride: each(&spec.last_block),
            first_stride: each(&spec.first_block),
            before_stride: each(&spec.tokens_before),
            flags_stride: each(&spec.has_initial_state),
            window_stride: strides(spec.intermediate_windows.as_ref()),
            slots_stride: each(&spec.intermediate_indices),
            next_stride: tree(&spec.next_token),
            sibling_stride: tree(&spec.next_sibling),
            parents_stride: tree(&spec.parent_token),
            further_stride: further.strides,
            further_first: further.first,
            norm_channels: norm_channels(spec.norm, spec.outputs()),
            epsilon: spec.norm.map_or(0.0, HeadNorm::epsilon),
            ..Params::default()
        }
    }

    /// The parameters with the addresses of all tensors.
    ///
    /// # Errors
    /// As [`Gpu::wrong_index`].
    pub(super) fn with_tensors(
        &self,
        gpu: &'static Gpu,
        args: &CausalConv1dServingArgs<'_>,
        outputs: &CausalConv1dServingOutputs<'_>,
    ) -> Result<Self> {
        let indices = [
            &args.query_start_loc,
            &args.conv_state_indices,
            &args.num_accepted_tokens,
            &args.intermediate_indices,
            &args.next_token,
        ];
        Ok(Params {
            y: output_address(Some(&outputs.y)),
            further_y: further_addresses(
                [outputs.y2.as_ref(), outputs.y3.as_ref()],
                &self.further_stride,
                &self.further_first,
            ),
            x: address(Some(&args.x)),
            states: output_address(Some(&outputs.conv_states)),
            weight: address(Some(&args.weight)),
            bias: address(args.bias.as_ref()),
            starts: address(args.query_start_loc.as_ref()),
            table: address(args.conv_state_indices.as_ref()),
            accepted: address(args.num_accepted_tokens.as_ref()),
            initial_block: address(args.initial_block.as_ref()),
            last_block: address(args.last_block.as_ref()),
            first_block: address(args.first_block.as_ref()),
            tokens_before: address(args.tokens_before.as_ref()),
            flags: address(args.has_initial_state.as_ref()),
            slots: address(args.intermediate_indices.as_ref()),
            next_token: address(args.next_token.as_ref()),
            next_sibling: address(args.next_sibling.as_ref()),
            windows: output_address(outputs.intermediate_windows.as_ref()),
            parents: output_address(outputs.parent_token.as_ref()),
            wrong: match indices.iter().any(|given| given.is_some()) {
                true => gpu.wrong_index(broken_rule)?,
                false => 0,
            },
            ..*self
        })
    }

    /// True if x and each output of y begin at multiples of this number of bytes.
    pub(super) fn are_aligned(&self, bytes: usize) -> bool {
        let [y2, y3] = self.further_y;
        (self.x | self.y | y2 | y3).is_multiple_of(bytes)
    }
}
