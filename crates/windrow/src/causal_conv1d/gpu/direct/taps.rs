//! Any width up to [`MOST`], one sequence per row: `channel_last_taps.cu` and `channel_first_taps.cu`.

use crate::DType;
use crate::causal_conv1d::gpu::shared::{GRID, Params, THREADS, is_simple, kernel_spec, source};
use crate::causal_conv1d::{CausalConv1dSpec, Problem};
use crate::gpu::{Feature, KernelSpec, Launch};

source!(LAST, "channel_last_taps.cu");
source!(FIRST, "channel_first_taps.cu");

/// The largest number of taps.
const MOST: usize = 256;
/// The numbers of blocks and warps of these kernels above which each should walk further.
const BLOCKS: usize = 1024;
const WARPS: usize = 8192;
/// The largest number of steps of a warp along a row.
const STEPS: usize = 8;
/// Positions of a tile.
const TILE: usize = 128;

/// The kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taps {
    /// Channels-last: `vector` channels and `rows` positions for each thread, `lanes` threads along the channels.
    Last { vector: usize, rows: usize, lanes: usize },
    /// Channels-first: `tiles` tiles of positions in a step, by matrix products or in plain steps.
    First { tiles: usize, matrix: bool },
}

impl Taps {
    /// The kernel for neighbouring channels, of which `vector` are aligned wherever a row begins.
    pub(super) fn last(spec: &CausalConv1dSpec, problem: &Problem, vector: usize) -> Option<Self> {
        let Problem { b, d, width, .. } = *problem;
        // As many weights as fit in shared memory together with other blocks'.
        let most = if width <= 64 { 32 } else { 2048 / width.next_power_of_two() };
        let vector = vector.min(2);
        let lanes = d.div_ceil(vector).next_power_of_two().min(most);
        (is_for(spec, problem) && b <= GRID).then_some(Taps::Last { vector, rows: 16, lanes })
    }

    /// The kernel for neighbouring positions; `has` says which features the GPU has.
    pub(super) fn first(
        spec: &CausalConv1dSpec,
        problem: &Problem,
        has: impl Fn(Feature) -> bool,
    ) -> Option<Self> {
        let Problem { b, d, width, .. } = *problem;
        let dtype = spec.x.dtype;
        let matrix = dtype.is_half() && spec.weight.dtype == dtype && has(Feature::MatrixProducts);
        // Measured on an H200: what registers hold for many blocks.
        let tiles = if matrix && (33..=64).contains(&width) { 2 } else { 4 };
        (is_for(spec, problem) && b <= GRID && d <= GRID).then_some(Taps::First { tiles, matrix })
    }

    pub(super) fn kernel(self, spec: &CausalConv1dSpec) -> KernelSpec {
        let taps = spec.weight.shape()[1];
        match self {
            Taps::Last { vector, rows, lanes } => kernel_spec(&LAST, "channel_last_taps", spec)
                .define("TAPS", taps)
                .define("VECTOR", vector)
                .define("ROWS", rows)
                .define("LANES", lanes)
                .define("MIN_BLOCKS", 1),
            Taps::First { tiles, matrix } => {
                let blocks = if taps <= 32 { 8 } else { 1 };
                let simple = matrix && is_simple(spec.activation);
                let kernel = kernel_spec(&FIRST, "channel_first_taps", spec)
                    .define("TAPS", taps)
                    .define("TILES", tiles)
                    .define("MATRIX", u8::from(matrix))
                    .define("MIN_BLOCKS", if simple { blocks } else { 1 });
                let (name, exponent) = match spec.x.dtype {
                    DType::F16 => ("\"f16\"", "0x7c00u"),
                    _ => ("\"bf16\"", "0x7f80u"),
                };
                match matrix {
                    true => kernel
                        .needs(Feature::MatrixProducts)
                        .define("MATRIX_TYPE", name)
                        .define("EXPONENT", exponent),
                    false => kernel,
                }
            }
        }
    }

    /// The launch for elements of this number of bytes; `None` if the kernel cannot read these addresses.
    pub(super) fn launch(self, params: &mut Params, element: usize) -> Option<Launch> {
        let Params { batch, channels, length, .. } = *params;
        match self {
            Taps::Last { vector, rows, lanes } => {
                let aligned = params.are_aligned(vector * element);
                let columns = channels.div_ceil(lanes * vector);
                let steps = length.div_ceil(THREADS / lanes * rows);
                let blocks = steps.min((BLOCKS / (columns * batch)).max(1));
                aligned.then_some(Launch {
                    grid: [columns as u32, blocks as u32, batch as u32],
                    block: [THREADS as u32, 1, 1],
                })
            }
            Taps::First { tiles, .. } => {
                let steps = (length + params.lead(element)).div_ceil(TILE * tiles);
                let steps_of_warp = (batch * channels * steps / WARPS).clamp(1, STEPS);
                params.chunk = steps_of_warp * TILE * tiles;
                let warps = steps.div_ceil(steps_of_warp);
                let across = warps.next_power_of_two().min(THREADS / 32);
                let down = THREADS / 32 / across;
                Some(Launch {
                    grid: [
                        warps.div_ceil(across) as u32,
                        channels.div_ceil(down) as u32,
                        batch as u32,
                    ],
                    block: [32 * across as u32, down as u32, 1],
                })
            }
        }
    }

    /// A description of the kernel's blocks, in one line.
    pub(super) fn explain(self) -> String {
        match self {
            Taps::Last { vector, rows, .. } => {
                format!("{vector} channels of {rows} positions a thread, a window over the taps")
            }
            Taps::First { tiles, matrix: false } => {
                format!("{} positions a warp and step, a window over the taps", TILE * tiles)
            }
            Taps::First { tiles, matrix: true } => {
                format!("{} positions a warp and step, on tensor cores", TILE * tiles)
            }
        }
    }
}

/// True if the kernels support the spec's width and options, whatever its strides.
fn is_for(spec: &CausalConv1dSpec, problem: &Problem) -> bool {
    let packed = spec.seq_idx.is_some() || spec.cu_seqlens.is_some();
    // A thread for each channel computes the outputs that depend on an initial state again.
    let widest = if spec.initial_states.is_some() { 16 } else { MOST };
    !packed && (2..=widest).contains(&problem.width) && problem.l < 1 << 30
}
