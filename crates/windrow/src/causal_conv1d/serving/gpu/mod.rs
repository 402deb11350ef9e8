//! Serving on GPUs.

mod params;

use self::params::Params;
use crate::causal_conv1d::gpu::shared::{
    GRID, NORMS, NormBehind, PARAMETERS, THREADS, define_norm, define_operands, define_outputs,
    fits_in_warp, header, is_simple, rows_launch, source,
};
use crate::causal_conv1d::serving::{Sizes, TREE};
use crate::causal_conv1d::{
    CausalConv1dServingArgs, CausalConv1dServingOutputs, CausalConv1dServingSpec,
};
use crate::gpu::{Feature, Gpu, Kernel, KernelSpec, Source};
use crate::{Activation, DType, Device, Result, TensorDesc, Workspace};

static INCLUDES: &[Source] =
    &[PARAMETERS, NORMS, header!("serving.cuh"), header!("serving_pieces.cuh")];

source!(WALK, "serving.cu", INCLUDES);
source!(STEP, "serving_step.cu", INCLUDES);
source!(CHUNKS, "serving_chunks.cu", INCLUDES);
source!(TILES, "serving_tile_sm90.cu", INCLUDES);
source!(TREES, "serving_tree.cu", INCLUDES);

/// Tokens of a piece of a long sequence.
const CHUNK: usize = 32;
/// Loads that are on their way in such a piece.
const STEPS: usize = 8;
/// Tokens of a piece that the copy engine brings.
const TILE: usize = 12;
/// Tokens whose loads are on their way where whole sequences are walked.
const AHEAD: usize = 4;
/// Channels of all sequences up to which a step is small.
const SMALL_STEP: usize = 16 << 10;

/// A serving plan on a GPU, with its kernels compiled and loaded.
#[derive(Clone, Debug)]
pub struct Serving {
    /// The kernel with one channel for each thread, for any strides and addresses.
    any: &'static Kernel,
    /// Several channels per thread.
    walks: Option<(&'static Kernel, Vectors)>,
    /// The kernel for long sequences if y is not x.
    pieces: Option<(&'static Kernel, Vectors)>,
    /// The kernel instead of `pieces` if addresses are multiples of 16 bytes.
    tiles: Option<&'static Kernel>,
    /// The norm behind kernels that do not have it.
    norm: Option<NormBehind>,
    params: Params,
}

/// Channels next to each other that a thread takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Vectors {
    channels: usize,
    along_channels: bool,
    /// True if weight and bias are dense.
    dense: bool,
    /// The alignment that addresses need.
    bytes: usize,
}

impl Vectors {
    const ONE: Vectors = Vectors { channels: 1, along_channels: false, dense: false, bytes: 1 };

    /// The vectors of `bytes` bytes.
    fn of(spec: &CausalConv1dServingSpec, bytes: usize) -> Option<Self> {
        let along_channels = spec.conv_states.strides()[1] == 1;
        let channels = bytes / spec.x.dtype.size();
        // Between rows and tokens, of which there may be one only.
        let fits = |desc: &TensorDesc| {
            let between =
                |i: usize| desc.shape()[i] <= 1 || desc.strides()[i] % channels as isize == 0;
            between(0) && between(2)
        };
        let is_row = |desc: &TensorDesc| {
            desc.strides()[1] == 1 && desc.shape()[1].is_multiple_of(channels) && fits(desc)
        };
        let fits = is_row(&spec.x)
            && spec.outputs().all(is_row)
            && (!along_channels || fits(&spec.conv_states));
        let takes = (2..=9).contains(&spec.weight.shape()[1]);
        let dense = spec.weight.layout.is_contiguous()
            && spec.bias.is_none_or(|bias| bias.layout.is_contiguous());
        (takes && fits && is_narrow(spec)).then_some(Vectors {
            channels,
            along_channels,
            dense,
            bytes,
        })
    }

    /// The vectors of threads that walk along whole sequences, measured on an H200: a small step gains from little code
    /// for each thread, a larger one from fewer threads.
    fn of_walks(spec: &CausalConv1dServingSpec, sizes: &Sizes) -> Option<Self> {
        // Heads that do not fit in a warp would take another kernel.
        let is_wide = spec.norm.is_some_and(|norm| !fits_in_warp(norm, 2));
        let widths: &[usize] = match spec.x.dtype.is_half() && spec.next_token.is_none() {
            true if is_small(sizes) && !is_wide => &[4],
            true if is_small(sizes) => &[8],
            // More taps take too many registers.
            true if spec.weight.shape()[1] <= 4 => &[16, 8],
            _ => &[8],
        };
        widths.iter().find_map(|&bytes| Self::of(spec, bytes))
    }

    fn take(&self, params: &Params) -> bool {
        let states = if self.along_channels { params.states } else { 0 };
        let operands = if self.dense { params.weight | params.bias } else { 0 };
        params.are_aligned(self.bytes)
            && states.is_multiple_of(self.bytes)
            && operands.is_multiple_of(16)
    }
}

/// True if latency bounds a step.
fn is_small(sizes: &Sizes) -> bool {
    sizes.sequences.saturating_mul(sizes.problem.d) <= SMALL_STEP
}

/// True if each sequence has one token, or a few drafts, and no other option is used: a kernel with less code. Small
/// steps of one token gain more from the guesses of the other: 1.16 us in place of 1.28 for one sequence on an H200.
/// With GELU drafts would take more registers than there are.
fn is_step(spec: &CausalConv1dServingSpec, sizes: &Sizes, vectors: Vectors) -> bool {
    let more = [
        spec.initial_block.is_some(),
        spec.last_block.is_some(),
        spec.first_block.is_some(),
        spec.has_initial_state.is_some(),
        spec.intermediate_windows.is_some(),
        spec.parent_token.is_some(),
    ];
    let few = match spec.num_accepted_tokens {
        Some(_) => (1..=AHEAD).contains(&sizes.most),
        None => spec.query_start_loc.is_none() && spec.x.shape()[2] == 1 && !is_small(sizes),
    };
    vectors.channels > 1
        && vectors.along_channels
        && vectors.dense
        && few
        && is_simple(spec.activation)
        && sizes.sequences <= GRID
        && !more.contains(&true)
}

/// True if sizes and strides fit in an i32, which is less work for each thread.
fn is_narrow(spec: &CausalConv1dServingSpec) -> bool {
    let tensors = [
        Some(&spec.x),
        Some(&spec.y),
        spec.y2.as_ref(),
        spec.y3.as_ref(),
        Some(&spec.conv_states),
        Some(&spec.weight),
        spec.bias.as_ref(),
        spec.intermediate_windows.as_ref(),
    ];
    let fits = |desc: &TensorDesc| {
        desc.shape().iter().all(|&n| i32::try_from(n).is_ok())
            && desc.strides().iter().all(|&s| i32::try_from(s).is_ok())
    };
    tensors.into_iter().chain(options(spec)).flatten().all(fits)
}

/// True if pieces of sequences are worth more threads.
fn is_long(spec: &CausalConv1dServingSpec, sizes: &Sizes) -> bool {
    let tokens = sizes.problem.b * sizes.problem.l;
    let walks = [&spec.num_accepted_tokens, &spec.intermediate_windows, &spec.next_token];
    walks.iter().all(|option| option.is_none())
        && tokens >= CHUNK / 2 * sizes.sequences.max(1)
        && i32::try_from(tokens.saturating_add(sizes.sequences)).is_ok()
}

/// True if rows of channels are whole vectors of 16 bytes, and there are few enough taps and pieces.
fn takes_tiles(spec: &CausalConv1dServingSpec, sizes: &Sizes) -> bool {
    let vector = 16 / spec.x.dtype.size();
    let is_row = |desc: &TensorDesc| {
        let is_whole = |stride: isize| stride % vector as isize == 0;
        desc.shape()[1].is_multiple_of(vector)
            && is_whole(desc.strides()[0])
            && is_whole(desc.strides()[2])
    };
    spec.x.dtype.is_half()
        && spec.weight.shape()[1] <= 5
        && is_row(&spec.x)
        && spec.outputs().all(is_row)
        && sizes.problem.b * sizes.problem.l / TILE + sizes.sequences <= GRID
}

/// The kernel that takes whole sequences.
fn walk_kernel(spec: &CausalConv1dServingSpec, sizes: &Sizes, vectors: Vectors) -> KernelSpec {
    if spec.next_token.is_some() {
        return kernel_spec(&TREES, spec, vectors).define("TREE", TREE);
    }
    let tokens = if spec.query_start_loc.is_none() { spec.x.shape()[2] } else { usize::MAX };
    if is_step(spec, sizes, vectors) {
        let drafts = spec.num_accepted_tokens.is_some();
        // As many as there are registers for.
        let blocks = match (vectors.channels, drafts) {
            (8, false) => 8,
            (8, true) => 5,
            _ => 1,
        };
        return kernel_spec(&STEP, spec, vectors)
            .define("DRAFTS", u8::from(drafts))
            .define("TOKENS", tokens.min(sizes.most))
            .define("MIN_BLOCKS", blocks);
    }
    // A step of decoding has one token, and little code.
    let ahead = if tokens == 1 { 1 } else { AHEAD };
    let guess = match vectors.channels {
        1 => 0,
        _ if is_small(sizes) => 2,
        _ => 1,
    };
    kernel_spec(&WALK, spec, vectors)
        .define("AHEAD", ahead)
        .define("SHORT", u8::from(tokens.min(sizes.most) <= ahead))
        .define("WINDOWS", u8::from(spec.intermediate_windows.is_some()))
        .define("GUESS", guess)
}

/// The optional tensors of a spec, in the order of `Bit` of serving.cuh.
fn options(spec: &CausalConv1dServingSpec) -> [Option<&TensorDesc>; 12] {
    [
        spec.query_start_loc.as_ref(),
        spec.conv_state_indices.as_ref(),
        spec.num_accepted_tokens.as_ref(),
        spec.initial_block.as_ref(),
        spec.last_block.as_ref(),
        spec.first_block.as_ref(),
        spec.tokens_before.as_ref(),
        spec.intermediate_indices.as_ref(),
        spec.next_token.as_ref(),
        spec.next_sibling.as_ref(),
        spec.parent_token.as_ref(),
        spec.has_initial_state.as_ref(),
    ]
}

fn kernel_spec(
    source: &'static Source,
    spec: &CausalConv1dServingSpec,
    vectors: Vectors,
) -> KernelSpec {
    let entry = format!("causal_conv1d_serving_{}", spec.x.dtype);
    let limited = [&spec.num_accepted_tokens, &spec.intermediate_windows, &spec.next_token];
    let bits = |has: fn(&TensorDesc) -> bool| -> usize {
        let each = options(spec).into_iter().enumerate();
        each.map(|(bit, desc)| usize::from(desc.is_some_and(has)) << bit).sum()
    };
    let kernel = KernelSpec::new(source, entry)
        .define("TAPS", spec.weight.shape()[1])
        .define("VECTOR", vectors.channels)
        .define("ALONG_CHANNELS", u8::from(vectors.along_channels))
        .define("GIVEN", bits(|_| true))
        .define("WIDE", bits(|desc| desc.dtype == DType::I64))
        .define("DENSE", u8::from(vectors.dense))
        .define("LIMITED", u8::from(limited.iter().any(|given| given.is_some())))
        .params::<Params>()
        .overlapped(true);
    let kernel = define_outputs(kernel, spec.outputs().count());
    let kernel = define_norm(kernel, spec.norm, vectors.channels);
    define_operands(kernel, &spec.x, &spec.weight, spec.bias.as_ref(), spec.activation)
}

fn chunks_kernel(spec: &CausalConv1dServingSpec, vectors: Vectors) -> KernelSpec {
    let simple = is_simple(spec.activation) && spec.weight.shape()[1] <= 4;
    kernel_spec(&CHUNKS, spec, vectors)
        .define("ROWS", CHUNK)
        .define("STEPS", STEPS)
        // More blocks of a multiprocessor hide more, where registers suffice.
        .define("MIN_BLOCKS", if simple { 4 } else { 1 })
}

fn tiles_kernel(spec: &CausalConv1dServingSpec, vectors: Vectors) -> KernelSpec {
    // As many as there are registers for. States at ends of blocks take most.
    let has_blocks = spec.initial_block.is_some() || spec.last_block.is_some();
    let blocks = match spec.activation {
        _ if has_blocks => 5,
        Activation::Silu if spec.weight.shape()[1] <= 4 => 9,
        _ => 6,
    };
    kernel_spec(&TILES, spec, vectors)
        .needs(Feature::BulkCopies)
        .define("THREADS", THREADS)
        .define("ROWS", TILE)
        .define("MIN_BLOCKS", blocks)
}

impl Serving {
    pub(in crate::causal_conv1d) fn new(
        device: Device,
        spec: &CausalConv1dServingSpec,
        sizes: &Sizes,
    ) -> Result<Self> {
        let gpu = Gpu::get(device)?;
        let any = gpu.kernel(&walk_kernel(spec, sizes, Vectors::ONE))?;
        let walks = match Vectors::of_walks(spec, sizes) {
            Some(vectors) => Some((gpu.kernel(&walk_kernel(spec, sizes, vectors))?, vectors)),
            None => None,
        };
        let pieces = match Vectors::of(spec, 8).filter(|_| is_long(spec, sizes)) {
            Some(vectors) => Some((gpu.kernel(&chunks_kernel(spec, vectors))?, vectors)),
            None => None,
        };
        let tiles = match pieces {
            Some((_, vectors)) if gpu.has(Feature::BulkCopies) && takes_tiles(spec, sizes) => {
                Some(gpu.kernel(&tiles_kernel(spec, vectors))?)
            }
            _ => None,
        };
        let params = Params::of(spec, sizes);
        let norm = NormBehind::of(gpu, spec.norm, spec.outputs())?;
        Ok(Serving { any, walks, pieces, tiles, norm, params })
    }

    /// The launch, in one line.
    pub(in crate::causal_conv1d) fn explain(&self) -> String {
        let vectors = self.pieces.or(self.walks).map_or(Vectors::ONE, |(_, vectors)| vectors);
        let channels = vectors.channels;
        let pieces = match (self.tiles, self.pieces) {
            (Some(_), _) => format!("pieces of {TILE} tokens in shared memory"),
            (None, Some(_)) => format!("pieces of {CHUNK} tokens"),
            (None, None) => "whole sequences".into(),
        };
        let norm = match &self.norm {
            None => "",
            Some(norm) if fits_in_warp(norm.norm(), channels) => ", norm in the same kernel",
            Some(_) => ", norm in a second kernel",
        };
        format!("{channels} channels a thread, {pieces}, blocks of {THREADS}{norm}")
    }

    /// Computes the outputs. The caller has checked the views. Index values cannot be checked without waiting for the
    /// GPU: a sequence with a wrong one counts as padding, and is reported later.
    pub(in crate::causal_conv1d) fn run(
        &self,
        args: &CausalConv1dServingArgs<'_>,
        outputs: &CausalConv1dServingOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let gpu = self.any.gpu();
        let (stream, _) = workspace.take_on(gpu, 0)?;
        let params = self.params.with_tensors(gpu, args, outputs)?;
        let Params { sequences, channels, length, starts, .. } = params;
        if channels == 0 || length == 0 || (sequences == 0 && starts == 0) {
            return Ok(());
        }
        // Tokens of no sequence are cleared too, even if there are no sequences.
        let rows = sequences.max(1);
        let takes = |(_, vectors): &(&Kernel, Vectors)| vectors.take(&params);
        let pieces = self.pieces.filter(|pieces| params.x != params.y && takes(pieces));
        let tiles = self.tiles.filter(|_| params.are_aligned(16));
        let (kernel, vectors, rows) = match (pieces, self.walks.filter(takes)) {
            (Some((kernel, vectors)), _) => {
                let tokens = if starts == 0 { sequences * length } else { length };
                let (kernel, piece) = tiles.map_or((kernel, CHUNK), |tiles| (tiles, TILE));
                let pieces = tokens / piece + sequences;
                (kernel, vectors, pieces.max(1))
            }
            (None, Some((kernel, vectors))) => (kernel, vectors, rows),
            (None, None) => (self.any, Vectors::ONE, rows),
        };
        let launch = rows_launch(channels / vectors.channels, rows);
        let norm = self.norm.as_ref().filter(|norm| !fits_in_warp(norm.norm(), vectors.channels));
        // SAFETY: `Params` is the kernel's structure (it compares its size), and views are valid on
        // this device for the strides in it.
        unsafe {
            kernel.launch(stream, launch, &params)?;
            match norm {
                Some(norm) => {
                    norm.run(stream, &outputs.y, [outputs.y2.as_ref(), outputs.y3.as_ref()])
                }
                None => Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests;
