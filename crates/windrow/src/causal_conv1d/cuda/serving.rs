//! Serving on CUDA.

use super::{
    INCLUDES, SMALL, THREADS, address, define_operands, is_simple, output_address, rows_launch,
    strides,
};
use crate::causal_conv1d::serving::{Sizes, TREE};
use crate::causal_conv1d::{
    CausalConv1dServingArgs, CausalConv1dServingOutputs, CausalConv1dServingSpec,
};
use crate::gpu::{Gpu, Kernel, KernelSpec, Source, params};
use crate::{DType, Device, Result, TensorDesc, Workspace};

source!(WALK, "serving.cu");
source!(CHUNKS, "serving_chunks.cu");
source!(TREES, "serving_tree.cu");

/// Tokens of a piece of a long sequence.
const CHUNK: usize = 32;
/// Loads that are on their way in such a piece.
const STEPS: usize = 8;

params! {
    /// `Params` of serving.cuh.
    #[derive(Default)]
    struct Params {
        y: usize,
        x: usize,
        states: usize,
        weight: usize,
        bias: usize,
        starts: usize,
        table: usize,
        accepted: usize,
        initial_block: usize,
        last_block: usize,
        first_block: usize,
        tokens_before: usize,
        slots: usize,
        next_token: usize,
        next_sibling: usize,
        flags: usize,
        windows: usize,
        parents: usize,
        wrong: usize,
        sequences: usize,
        channels: usize,
        length: usize,
        state_length: usize,
        pool: usize,
        blocks: usize,
        block_size: usize,
        slot_count: usize,
        most: i64,
        tree_columns: usize,
        null_index: i64,
        wide: usize,
        x_stride: [isize; 3],
        y_stride: [isize; 3],
        state_stride: [isize; 3],
        weight_stride: [isize; 2],
        bias_stride: isize,
        table_stride: [isize; 2],
        starts_stride: isize,
        accepted_stride: isize,
        initial_stride: isize,
        last_stride: isize,
        first_stride: isize,
        before_stride: isize,
        flags_stride: isize,
        window_stride: [isize; 4],
        slots_stride: isize,
        next_stride: [isize; 2],
        sibling_stride: [isize; 2],
        parents_stride: [isize; 2],
    }
}

/// A serving plan on a device, with its kernels compiled and loaded.
#[derive(Clone, Debug)]
pub(in crate::causal_conv1d) struct Serving {
    /// One channel a thread, for any strides and addresses.
    any: &'static Kernel,
    /// Several channels a thread, and what addresses must be multiples of.
    vectors: Option<(&'static Kernel, Vectors)>,
    /// Where sequences are long and y is not x.
    chunks: Option<&'static Kernel>,
    params: Params,
}

/// Channels next to each other that a thread takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Vectors {
    channels: usize,
    along_channels: bool,
    /// What addresses must be multiples of.
    bytes: usize,
}

impl Vectors {
    const ONE: Vectors = Vectors { channels: 1, along_channels: false, bytes: 1 };

    fn of(spec: &CausalConv1dServingSpec) -> Option<Self> {
        let (x, y, states) = (spec.x.strides(), spec.y.strides(), spec.conv_states.strides());
        let along_channels = states[1] == 1;
        // 8 bytes of x: more channels a thread leave too few threads for a step of decoding, and cost more registers
        // than they gain.
        let bytes = 8;
        let channels = bytes / spec.x.dtype.size();
        // Between rows and tokens, of which there may be one only.
        let fits = |desc: &TensorDesc| {
            let between =
                |i: usize| desc.shape()[i] <= 1 || desc.strides()[i] % channels as isize == 0;
            between(0) && between(2)
        };
        let fits = spec.x.shape()[1].is_multiple_of(channels)
            && fits(&spec.x)
            && fits(&spec.y)
            && (!along_channels || fits(&spec.conv_states));
        let takes = x[1] == 1 && y[1] == 1 && (2..=9).contains(&spec.weight.shape()[1]);
        (takes && fits).then_some(Vectors { channels, along_channels, bytes })
    }

    fn take(&self, params: &Params) -> bool {
        let states = if self.along_channels { params.states } else { 0 };
        (params.x | params.y | states).is_multiple_of(self.bytes)
    }
}

/// Whether pieces of sequences are worth more threads.
fn is_long(spec: &CausalConv1dServingSpec, sizes: &Sizes) -> bool {
    let tokens = sizes.problem.b * sizes.problem.l;
    let walks = [&spec.num_accepted_tokens, &spec.intermediate_windows, &spec.next_token];
    walks.iter().all(|option| option.is_none())
        && tokens >= CHUNK / 2 * sizes.sequences.max(1)
        && i32::try_from(sizes.sequences).is_ok()
}

/// The kernel that takes whole sequences.
fn walk_kernel(spec: &CausalConv1dServingSpec, vectors: Vectors) -> KernelSpec {
    match spec.next_token {
        None => kernel_spec(&WALK, spec, vectors)
            .define("WINDOWS", u8::from(spec.intermediate_windows.is_some())),
        Some(_) => kernel_spec(&TREES, spec, vectors).define("TREE", TREE),
    }
}

fn kernel_spec(
    source: &'static Source,
    spec: &CausalConv1dServingSpec,
    vectors: Vectors,
) -> KernelSpec {
    let entry = format!("causal_conv1d_serving_{}", spec.x.dtype);
    let kernel = KernelSpec::new(source, entry)
        .define("TAPS", spec.weight.shape()[1])
        .define("VECTOR", vectors.channels)
        .define("ALONG_CHANNELS", u8::from(vectors.along_channels))
        .params::<Params>()
        .overlapped(spec.x.bytes() <= SMALL);
    define_operands(kernel, &spec.x, &spec.weight, spec.bias.as_ref(), spec.activation)
}

fn chunks_kernel(spec: &CausalConv1dServingSpec, vectors: Vectors) -> KernelSpec {
    let simple = is_simple(spec.activation) && spec.weight.shape()[1] <= 4;
    let blocks = match (simple, spec.x.dtype) {
        (false, _) => 1,
        (true, DType::BF16) => 4,
        (true, _) => 5,
    };
    kernel_spec(&CHUNKS, spec, vectors)
        .define("CHUNK", CHUNK)
        .define("STEPS", STEPS)
        // More blocks of a multiprocessor hide more, where registers suffice.
        .define("MIN_BLOCKS", blocks)
}

impl Serving {
    pub(in crate::causal_conv1d) fn new(
        device: Device,
        spec: &CausalConv1dServingSpec,
        sizes: &Sizes,
    ) -> Result<Self> {
        let gpu = Gpu::get(device)?;
        let vectors = Vectors::of(spec);
        let any = gpu.kernel(&walk_kernel(spec, Vectors::ONE))?;
        let chunks = match vectors.filter(|_| is_long(spec, sizes)) {
            Some(vectors) => Some(gpu.kernel(&chunks_kernel(spec, vectors))?),
            None => None,
        };
        let vectors = match vectors {
            Some(vectors) => Some((gpu.kernel(&walk_kernel(spec, vectors))?, vectors)),
            None => None,
        };
        let indices = [
            &spec.query_start_loc,
            &spec.conv_state_indices,
            &spec.num_accepted_tokens,
            &spec.initial_block,
            &spec.last_block,
            &spec.first_block,
            &spec.tokens_before,
            &spec.intermediate_indices,
            &spec.next_token,
            &spec.next_sibling,
            &spec.parent_token,
        ];
        let is_wide = |desc: &Option<TensorDesc>| desc.is_some_and(|d| d.dtype == DType::I64);
        let wide =
            indices.iter().enumerate().map(|(bit, desc)| usize::from(is_wide(desc)) << bit).sum();
        let each = |desc: &Option<TensorDesc>| strides::<1>(desc.as_ref())[0];
        let tree = |desc: &Option<TensorDesc>| strides::<2>(desc.as_ref());
        let table = spec.conv_state_indices.as_ref();
        let table_stride = match table.map(|table| table.strides()) {
            Some(&[sequence, column]) => [sequence, column],
            Some(strides) => [strides[0], 0],
            None => [0; 2],
        };
        let params = Params {
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
            wide,
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
            ..Params::default()
        };
        Ok(Serving { any, vectors, chunks, params })
    }

    /// The launch, in one line.
    pub(in crate::causal_conv1d) fn explain(&self) -> String {
        let channels = self.vectors.map_or(1, |(_, vectors)| vectors.channels);
        let pieces = match self.chunks {
            Some(_) => format!("pieces of {CHUNK} tokens"),
            None => "whole sequences".into(),
        };
        format!("{channels} channels a thread, {pieces}, blocks of {THREADS}")
    }

    /// Views have been checked. Index values cannot be without waiting for the device: a sequence with a wrong one
    /// counts as padding and is reported later.
    pub(in crate::causal_conv1d) fn run(
        &self,
        args: &CausalConv1dServingArgs<'_>,
        outputs: &CausalConv1dServingOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let gpu = self.any.gpu();
        let (stream, _) = workspace.take_on(gpu, 0)?;
        let indices = [
            &args.query_start_loc,
            &args.conv_state_indices,
            &args.num_accepted_tokens,
            &args.intermediate_indices,
            &args.next_token,
        ];
        let params = Params {
            y: output_address(Some(&outputs.y)),
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
                true => gpu.wrong_index()?,
                false => 0,
            },
            ..self.params
        };
        let Params { sequences, channels, length, starts, .. } = params;
        if channels == 0 || length == 0 || (sequences == 0 && starts == 0) {
            return Ok(());
        }
        // Tokens of nobody are cleared, too, where there are no sequences.
        let rows = sequences.max(1);
        let vectors = self.vectors.filter(|(_, vectors)| vectors.take(&params));
        let (kernel, launch) = match (vectors, self.chunks) {
            (Some((_, vectors)), Some(chunks)) if params.x != params.y => {
                let tokens = if starts == 0 { sequences * length } else { length };
                let pieces = tokens / CHUNK + sequences;
                (chunks, rows_launch(channels / vectors.channels, pieces.max(1)))
            }
            (Some((kernel, vectors)), _) => {
                (kernel, rows_launch(channels / vectors.channels, rows))
            }
            (None, _) => (self.any, rows_launch(channels, rows)),
        };
        // SAFETY: `Params` is the kernel's structure (it compares its size), and views are valid on
        // this device for the strides in it.
        unsafe { kernel.launch(stream, launch, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, Layout};

    #[test]
    fn kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for width in [4, 20] {
                let desc = |shape: &[usize]| TensorDesc::contiguous(dtype, shape).unwrap();
                let layout = |shape: &[usize]| TensorDesc {
                    dtype,
                    layout: Layout::with_order(shape, &[0, 2, 1]).unwrap(),
                };
                let (x, weight) = (layout(&[1, 64, 512]), desc(&[64, width]));
                for states in [layout(&[9, 64, width - 1]), desc(&[9, 64, width + 3])] {
                    let spec = CausalConv1dServingSpec::new(x, states, weight).unwrap();
                    kernels.push(walk_kernel(&spec, Vectors::ONE));
                    let bias = TensorDesc::contiguous(DType::F32, &[64]).unwrap();
                    let spec = spec.with_bias(bias).with_activation(Activation::Silu);
                    assert_eq!(Vectors::of(&spec).is_some(), width == 4);
                    // A step of decoding, whose strides between tokens mean nothing.
                    let row = TensorDesc {
                        dtype,
                        layout: Layout::strided(&[4, 64, 1], &[64, 1, 1]).unwrap(),
                    };
                    let step = CausalConv1dServingSpec::new(row, states, weight).unwrap();
                    let step = step.with_output(row);
                    assert_eq!(Vectors::of(&step).is_some(), width == 4);
                    if let Some(vectors) = Vectors::of(&spec) {
                        kernels.push(walk_kernel(&spec, vectors));
                        kernels.push(chunks_kernel(&spec, vectors));
                    }
                    let windows = desc(&[9, 512, 64, width - 1]);
                    let links = TensorDesc::contiguous(DType::I32, &[1, 512]).unwrap();
                    let windows = spec.with_intermediate_windows(windows);
                    let tree = windows.clone().with_next_token(links).with_next_sibling(links);
                    for spec in [windows, tree] {
                        assert!(!is_long(&spec, &spec.sizes().unwrap()));
                        let vectors = Vectors::of(&spec).into_iter().chain([Vectors::ONE]);
                        kernels.extend(vectors.map(|vectors| walk_kernel(&spec, vectors)));
                    }
                }
            }
        }
        crate::gpu::compile_tests::check_compiles(&kernels);
    }
}
