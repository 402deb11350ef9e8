//! The kernel that computes the outputs, and its launch.

use super::taps::Taps;
use crate::TensorDesc;
use crate::causal_conv1d::gpu::shared::{
    GRID, Params, SMALL, THREADS, define_norm, fits_in_warp, is_simple, kernel_spec, source,
};
use crate::causal_conv1d::{CausalConv1dSpec, HeadNorm, Problem};
use crate::gpu::{Feature, KernelSpec, Launch};

source!(CHANNEL_FIRST, "channel_first.cu");
source!(CHANNEL_LAST, "channel_last.cu");
source!(CHANNEL_LAST_TILE, "channel_last_tile.cu");
source!(CHANNEL_LAST_SM90, "channel_last_sm90.cu");

/// The kernel that computes all outputs except those that depend on an initial state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Vectors along l; `steps` of them per thread, `across` warps of a block along a row.
    ChannelFirst { steps: usize, across: usize },
    /// Vectors along d, walking along l.
    ChannelLast { vector: usize, chunk: usize },
    /// Vectors along d, a few positions of each in a thread.
    ChannelLastTile { vector: usize, rows: usize },
    /// Tiles in shared memory, copied in bulk: these numbers of channels and positions per thread, `lanes` threads
    /// along d.
    ChannelLastShared { vector: usize, rows: usize, lanes: usize },
    /// Any width, one sequence per row.
    Taps(Taps),
    /// One output for each thread.
    Plain,
}

/// Loads of the walking kernel that are on their way.
const AHEAD: usize = 8;
/// The warps of a block of the kernel with channels-last tiles, one below the other.
const TILE_WARPS: usize = THREADS / 32;
/// The largest number of taps of the kernel with tiles in shared memory.
const SHARED_TAPS: usize = 9;

impl Form {
    /// The form for a spec; `has` says which features the GPU has.
    pub(super) fn of(
        spec: &CausalConv1dSpec,
        problem: &Problem,
        has: impl Fn(Feature) -> bool,
    ) -> Self {
        let Problem { b, d, l, width, .. } = *problem;
        if problem.dilation > 1 {
            return Form::Plain;
        }
        let x = spec.x.strides();
        // True if elements of this dimension are neighbours in all tensors.
        let neighbours = |i: usize| x[i] == 1 && spec.outputs().all(|y| y.strides()[i] == 1);
        let vector = 16 / spec.x.dtype.size();
        let plain = |taps: Option<Taps>| taps.map_or(Form::Plain, Form::Taps);
        if neighbours(2) && l < 1 << 30 {
            if !(2..=vector + 1).contains(&width) || b > GRID || d > GRID {
                return plain(Taps::first(spec, problem, has));
            }
            // Measured on an H200: long rows gain from more loads in flight, few rows from more
            // threads.
            let steps = match l {
                _ if b * d * l.div_ceil(32 * vector) < 4096 => 1,
                4096.. => 4,
                1024.. if width > 5 => 4,
                _ => 2,
            };
            let segments = l.div_ceil(32 * vector * steps);
            let across = if steps == 4 { 1 } else { segments.next_power_of_two().clamp(1, 4) };
            return Form::ChannelFirst { steps, across };
        }
        if neighbours(1) && l < 1 << 30 {
            // Measured on an H200: large tensors of f16 or bf16, whose arithmetic weighs more, gain from walking, or
            // more from shared memory; others from many short threads.
            let half = spec.x.dtype.is_half();
            let large = spec.x.bytes() > 16 << 20;
            let of_x = [d as isize, x[0], x[2]];
            let fits = |n: isize| {
                let of_output = |y: &TensorDesc| {
                    [y.shape()[1] as isize, y.strides()[0], y.strides()[2]]
                        .iter()
                        .all(|s| s % n == 0)
                };
                of_x.iter().all(|s| s % n == 0) && spec.outputs().all(of_output)
            };
            let packed = spec.seq_idx.is_some() || spec.cu_seqlens.is_some();
            if has(Feature::BulkCopies)
                && half
                && large
                && !packed
                && fits(8)
                && b <= GRID
                && let Some(form) =
                    Form::shared(problem, x[2] == d as isize && spec.y.strides()[2] == d as isize)
            {
                return form;
            }
            // As wide as every row allows; for f16 and bf16 more than 8 bytes cost more registers than they gain.
            let mut vector = 4;
            while !fits(vector as isize) {
                vector /= 2;
            }
            let taps = Taps::last(spec, problem, vector);
            if !(2..=5).contains(&width) {
                return plain(taps);
            }
            // Long sequences of few channels, which leave threads along d idle.
            if d <= 64
                && spec.x.bytes() > SMALL
                && let Some(taps) = taps
            {
                return Form::Taps(taps);
            }
            let rows = if large { 8 } else { 4 };
            let rows_fit = b <= GRID && l <= GRID * TILE_WARPS * rows;
            return match half && large || !rows_fit {
                true => Form::ChannelLast { vector, chunk: l.div_ceil(GRID).max(32) },
                false => Form::ChannelLastTile { vector, rows },
            };
        }
        Form::Plain
    }

    /// Tiles in shared memory, if they are for the width; `dense`: whether rows of channels lie one behind the other.
    fn shared(problem: &Problem, dense: bool) -> Option<Self> {
        let Problem { d, l, width, .. } = *problem;
        // Few channels share a block if they are all of its channels.
        let few = dense && d.is_power_of_two() && (8..256).contains(&d);
        // Measured on an H200: what registers hold for many blocks.
        let (vector, rows) = if width <= 5 { (4, 16) } else { (2, 32) };
        let lanes = if few { d / vector } else { THREADS };
        let fits = (2..=SHARED_TAPS).contains(&width) && l <= GRID * rows * (THREADS / lanes);
        fits.then_some(Form::ChannelLastShared { vector, rows, lanes })
    }

    /// The main kernel; `None` if that is the plain one.
    pub(super) fn kernel(self, spec: &CausalConv1dSpec) -> Option<KernelSpec> {
        let mask = u8::from(spec.seq_idx.is_some() || spec.cu_seqlens.is_some());
        let width = spec.weight.shape()[1];
        let blocks = if width == 5 { 7 } else { 8 };
        let simple = mask == 0 && is_simple(spec.activation) && width <= 4;
        let (is_half, is_split) = (spec.x.dtype.is_half(), spec.y2.is_some());
        let kernel = match self {
            Form::ChannelFirst { steps, .. } => kernel_spec(&CHANNEL_FIRST, "channel_first", spec)
                .define("STEPS", steps)
                .define("MASK", mask),
            Form::ChannelLast { vector, .. } => {
                kernel_spec(&CHANNEL_LAST, "channel_last", spec)
                    .define("STEPS", AHEAD)
                    .define("VECTOR", vector)
                    // More blocks of a multiprocessor hide more, where registers suffice.
                    .define("MIN_BLOCKS", if simple && (is_half || !is_split) { 5 } else { 1 })
                    .define("MASK", mask)
            }
            Form::ChannelLastTile { vector, rows } => {
                kernel_spec(&CHANNEL_LAST_TILE, "channel_last_tile", spec)
                    .define("ROWS", rows)
                    .define("VECTOR", vector)
                    .define("MASK", mask)
            }
            Form::ChannelLastShared { vector, rows, lanes } => {
                kernel_spec(&CHANNEL_LAST_SM90, "channel_last_sm90", spec)
                    .needs(Feature::BulkCopies)
                    .define("THREADS", THREADS)
                    .define("VECTOR", vector)
                    .define("ROWS", rows)
                    .define("LANES", lanes)
                    .define("MIN_BLOCKS", if is_simple(spec.activation) { blocks } else { 1 })
            }
            Form::Taps(taps) => taps.kernel(spec),
            Form::Plain => return None,
        };
        Some(match self.vector() {
            Some(vector) => define_norm(kernel, self.norm(spec), vector),
            None => kernel,
        })
    }

    /// Neighbouring channels of a thread, if neighbouring threads have neighbouring channels.
    fn vector(self) -> Option<usize> {
        match self {
            Form::ChannelLast { vector, .. }
            | Form::ChannelLastTile { vector, .. }
            | Form::ChannelLastShared { vector, .. } => Some(vector),
            _ => None,
        }
    }

    /// The norm, if the main kernel divides heads by it. It does not if another kernel computes outputs again that depend
    /// on an initial state.
    pub(super) fn norm(self, spec: &CausalConv1dSpec) -> Option<HeadNorm> {
        let vector = self.vector().filter(|_| spec.initial_states.is_none())?;
        spec.norm.filter(|&norm| fits_in_warp(norm, vector))
    }

    /// The launch of the main kernel for elements of this number of bytes; `None` if it cannot read these addresses.
    pub(super) fn launch(self, params: &mut Params, element: usize) -> Option<Launch> {
        let Params { batch, channels, length, .. } = *params;
        match self {
            Form::ChannelFirst { steps, across } => {
                let vector = 16 / element;
                // Rows that begin between vectors have one more.
                let reach = length + params.lead(element);
                let segments = reach.div_ceil(32 * vector * steps);
                let down = THREADS / 32 / across;
                Some(Launch {
                    grid: [
                        segments.div_ceil(across) as u32,
                        channels.div_ceil(down) as u32,
                        batch as u32,
                    ],
                    block: [32 * across as u32, down as u32, 1],
                })
            }
            Form::ChannelLast { vector, chunk } => {
                params.chunk = chunk;
                let aligned = params.are_aligned(vector * element);
                let threads = channels.div_ceil(vector);
                aligned.then(|| Launch {
                    grid: [
                        threads.div_ceil(THREADS) as u32,
                        length.div_ceil(chunk) as u32,
                        batch.min(GRID) as u32,
                    ],
                    block: [THREADS as u32, 1, 1],
                })
            }
            Form::ChannelLastTile { vector, rows } => {
                let aligned = params.are_aligned(vector * element);
                aligned.then(|| Launch {
                    grid: [
                        channels.div_ceil(32 * vector) as u32,
                        length.div_ceil(TILE_WARPS * rows) as u32,
                        batch as u32,
                    ],
                    block: [THREADS as u32, 1, 1],
                })
            }
            Form::ChannelLastShared { vector, rows, lanes } => {
                params.are_aligned(16).then(|| Launch {
                    grid: [
                        channels.div_ceil(lanes * vector) as u32,
                        length.div_ceil(THREADS / lanes * rows) as u32,
                        batch as u32,
                    ],
                    block: [THREADS as u32, 1, 1],
                })
            }
            Form::Taps(taps) => taps.launch(params, element),
            Form::Plain => None,
        }
    }

    /// A description of the kernel's blocks, in one line.
    pub(super) fn explain(self) -> String {
        match self {
            Form::ChannelFirst { steps, .. } => {
                format!("vectors along l, {steps} a thread, in one pass")
            }
            Form::ChannelLast { vector, chunk } => {
                format!("{vector} channels a thread, walking {chunk} positions, in one pass")
            }
            Form::ChannelLastTile { vector, rows } => {
                format!("{vector} channels of {rows} positions a thread, in one pass")
            }
            Form::ChannelLastShared { vector, rows, lanes } => {
                let (channels, positions) = (lanes * vector, THREADS / lanes * rows);
                format!("tiles of {channels} channels of {positions} positions in shared memory")
            }
            Form::Taps(taps) => taps.explain(),
            Form::Plain => "one output a thread".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::causal_conv1d::gpu::direct::tests::spec;

    fn form(shape: [usize; 3], width: usize, order: [usize; 3], hopper: bool) -> Form {
        let spec = spec(DType::F16, shape, width, order);
        Form::of(&spec, &spec.problem().unwrap(), |_| hopper)
    }

    #[test]
    fn forms_follow_layout_and_width() {
        let (first, last) = ([0, 1, 2], [0, 2, 1]);
        let long = Form::ChannelFirst { steps: 4, across: 1 };
        assert_eq!(form([2, 8192, 8192], 4, first, true), long);
        assert_eq!(
            form([8, 4096, 2048], 4, first, true),
            Form::ChannelFirst { steps: 2, across: 4 }
        );
        assert_eq!(form([1, 64, 2048], 4, first, true), Form::ChannelFirst { steps: 1, across: 4 });
        let taps = |tiles| Form::Taps(Taps::First { tiles, matrix: true });
        assert_eq!(form([8, 4096, 2048], 10, first, true), taps(4));
        assert_eq!(form([8, 4096, 2048], 64, first, true), taps(2));
        assert_eq!(form([8, 4096, 2048], 257, first, true), Form::Plain);
        let taps = Form::Taps(Taps::Last { vector: 2, rows: 16, lanes: 32 });
        assert_eq!(form([8, 4096, 2048], 10, last, true), taps);
        assert_eq!(form([8, 4096, 2048], 4, first, false), form([8, 4096, 2048], 4, first, true));
        let few = Form::ChannelLastShared { vector: 4, rows: 16, lanes: 4 };
        assert_eq!(form([1, 16, 1_000_000], 4, last, true), few);
        assert_eq!(form([8, 4096, 2048], 1, first, true), Form::Plain);
        assert!(matches!(
            form([8, 4096, 2048], 4, last, false),
            Form::ChannelLast { vector: 4, .. }
        ));
        assert!(matches!(
            form([8, 4098, 2048], 4, last, false),
            Form::ChannelLast { vector: 2, .. }
        ));
        assert!(matches!(
            form([8, 4095, 2048], 4, last, false),
            Form::ChannelLast { vector: 1, .. }
        ));
        assert_eq!(
            form([1, 64, 2048], 4, last, true),
            Form::ChannelLastTile { vector: 4, rows: 4 }
        );
        assert_eq!(
            form([8, 4096, 2048], 4, last, true),
            Form::ChannelLastShared { vector: 4, rows: 16, lanes: 128 }
        );
        assert!(matches!(
            form([8, 4100, 2048], 4, last, true),
            Form::ChannelLast { vector: 4, .. }
        ));
    }
}
