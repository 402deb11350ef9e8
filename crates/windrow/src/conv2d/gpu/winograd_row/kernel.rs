//! The fused kernel: its constants, shared memory and launch (`winograd_row.cu`).

use super::geometry::{Geometry, PAIR_COLUMNS, PAIRS};
use super::sizes::Sizes;
use super::{
    ALPHA, BLOCK_K, INNER, LAST_POINT, TAPS, TILE, TRANSFORMS, WinogradRow, exponent, filter_kernel,
};
use crate::conv2d::gpu::input::{Input, copy_kernel};
use crate::conv2d::gpu::shape::Output;
use crate::conv2d::gpu::shared::frames::FrameParams;
use crate::conv2d::gpu::shared::matrix::{float, matrix, row};
use crate::conv2d::gpu::{Divisor, Operands, kernel, source, with_epilogue};
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::{
    Feature, Gpu, Kernel, KernelSpec, Launch, Source, Stream, TensorBoxes, TensorMap, params,
};
use crate::{DType, Error, Result};

static FUSED: Source = source!(
    "winograd_row.cu",
    "winograd_row.cuh",
    "winograd_row_input.cuh",
    "winograd_row_output.cuh"
);

const MAX_FILTER_STAGES: usize = 12;
const CONSUMER_WARPS: usize = 8;
/// Shared memory of a warp for the constants of its output channels, and for outputs of any strides on their way. In
/// f32 the residual takes as much again.
const CHANNEL_BYTES: usize = 2 * BLOCK_K * 4;
const OUTPUT_BYTES: usize = 1792;

/// The fused kernel for one way of storing y.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fused {
    kernel: &'static Kernel,
    geometry: Geometry,
    filter_stages: usize,
    resident: bool,
}

params! {
    struct FusedParams: Output {
        x: TensorMap,
        u: *const u8,
        u_inverse: *const u8,
        x_max: *const u8,
        sums: *mut u8,
        n: i32,
        pad as [pad_h, pad_w]: [i32; 2],
        steps: i32,
        image_rows: Divisor,
        strips: Divisor,
        units: i32,
        k_blocks: Divisor,
        box_rows: i32,
        stage_bytes: i32,
        u_stages: i32,
        chunk_steps: i32,
        u_resident: i32,
        paired_out: i32,
    }

    struct VideoParams: FusedParams {
        initial: TensorMap,
        frames: FrameParams,
        frame_steps: i32,
    }
}

/// The images of a launch.
pub(super) struct Piece {
    pub(super) x: TensorMap,
    pub(super) x_max: *const u8,
    pub(super) sums: *mut u8,
    pub(super) n: usize,
    /// Of a video, the initial frames and the frames that images read.
    pub(super) video: Option<(TensorMap, FrameParams)>,
}

impl Fused {
    pub(super) fn new(
        gpu: &'static Gpu,
        (spec, p): (&Conv2dSpec, &Problem),
        sizes: &Sizes,
        vectors: bool,
    ) -> Result<Self> {
        let dtype = spec.x.dtype;
        let geometry = Geometry::choose(p.n.max(1), p.oh, p.ow, !vectors)
            .ok_or_else(|| Error::unsupported("winograd_row", "no tiling fits shared memory"))?;
        // As the kernel lays it out: input stages, filter stages, barriers (the last takes 16 bytes), constants, staging.
        let adds = spec.residual && dtype == DType::F32;
        let outputs = if vectors { 0 } else { OUTPUT_BYTES * (1 + usize::from(adds)) };
        let per_warp = CHANNEL_BYTES + outputs;
        let fixed = |input_stages| {
            2 * input_stages * (geometry.stage_bytes + 16) + CONSUMER_WARPS * per_warp + 16
        };
        let per_stage = sizes.filter_step_bytes() + 16;
        let room = |input_stages| (gpu.shared_bytes - fixed(input_stages)) / per_stage;
        let all = sizes.steps() * TAPS;
        // A filter that stays is worth more than a third stage of input.
        let input_stages =
            if dtype == DType::F32 || (all > room(3) && all <= room(2)) { 2 } else { 3 };
        let resident = all <= room(input_stages);
        let filter_stages = if resident { all } else { room(input_stages).min(MAX_FILTER_STAGES) };
        let shared = fixed(input_stages) + filter_stages * per_stage;
        let fused = fused_kernel(dtype, sizes, vectors, &geometry, input_stages)
            .shared_bytes(shared as u32);
        // Every plan needs the others, too.
        let [kernel, ..] = gpu.kernels([
            &with_epilogue(fused, spec),
            &filter_kernel(dtype, sizes),
            &copy_kernel(dtype, 1),
        ])?;
        Ok(Fused { kernel, geometry, filter_stages, resident })
    }

    /// The number of images for which products of sizes that the kernel counts in 32 bits stay below 2^30.
    pub(super) fn most_images(&self, plan: &WinogradRow) -> usize {
        let per_image = self.geometry.units(1, plan.problem.ow) * plan.sizes.k_blocks().max(PAIRS);
        ((1 << 30) / per_image.max(1)).max(1)
    }

    pub(super) fn explain(&self) -> String {
        format!(
            "strips of {} columns, {:.0} % of the tiles in use, filter {}",
            self.geometry.pairs_x * PAIR_COLUMNS,
            100.0 * self.geometry.efficiency,
            if self.resident { "resident" } else { "streamed" },
        )
    }

    pub(super) fn map_of_x(
        &self,
        plan: &WinogradRow,
        input: &Input,
        x: *const u8,
        n: usize,
    ) -> Result<TensorMap> {
        let p = &plan.problem;
        let s = input.strides();
        self.map(plan, x, [p.c, p.w, p.h, n], [s[3], s[2], s[0]].map(|s| s as usize))
    }

    pub(super) fn map_of_copy(
        &self,
        plan: &WinogradRow,
        copy: *const u8,
        n: usize,
    ) -> Result<TensorMap> {
        let (c, w, rows) = (plan.input.channels(), plan.problem.w, plan.problem.h);
        self.map(plan, copy, [c, w, rows, n], [c, c * w, c * w * rows])
    }

    fn map(
        &self,
        plan: &WinogradRow,
        at: *const u8,
        dims: [usize; 4],
        strides: [usize; 3],
    ) -> Result<TensorMap> {
        let dtype = plan.spec.x.dtype;
        let pixel = 64 / dtype.size();
        let boxes = [pixel, self.geometry.pitch, self.geometry.box_rows, 1];
        TensorMap::new(plan.gpu, &TensorBoxes { dtype, address: at, dims, strides, boxes })
    }

    /// # Safety
    /// As [`WinogradRow::run`], for the images of the piece.
    pub(super) unsafe fn launch(
        &self,
        plan: &WinogradRow,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
        Piece { x, x_max, sums, n, video }: Piece,
    ) -> Result<()> {
        let (p, g) = (&plan.problem, &self.geometry);
        let units = g.units(n, p.ow);
        let base = Output::new(&plan.spec, &plan.spec.y, &operands);
        let y_strides = base.y_strides;
        let size = plan.spec.x.dtype.size();
        let even = [y_strides[0], y_strides[1], y_strides[2]].iter().all(|s| s % 2 == 0);
        let params = FusedParams {
            base,
            x,
            u: packed,
            u_inverse: if size == 4 {
                packed.wrapping_add(plan.sizes.u_bytes())
            } else {
                std::ptr::null()
            },
            x_max,
            sums,
            n: n as i32,
            pad: p.padding.map(|v| v as i32),
            steps: plan.sizes.steps() as i32,
            image_rows: Divisor::new(g.image_rows),
            strips: Divisor::new(g.strips(p.ow)),
            units: units as i32,
            k_blocks: Divisor::new(plan.sizes.k_blocks()),
            box_rows: g.box_rows as i32,
            stage_bytes: g.stage_bytes as i32,
            u_stages: self.filter_stages as i32,
            chunk_steps: plan.sizes.chunk_steps() as i32,
            u_resident: i32::from(self.resident),
            paired_out: i32::from(
                y_strides[3] == 1 && p.ow % 2 == 0 && even && operands.is_out_aligned(2 * size),
            ),
        };
        let items = units.div_ceil(2) * plan.sizes.k_blocks();
        let mut blocks = items.min(plan.gpu.info.multiprocessors as usize);
        if self.resident && blocks < items {
            // A block keeps its output channels: its items are a whole number of rounds apart.
            blocks = (blocks / plan.sizes.k_blocks()).max(1) * plan.sizes.k_blocks();
        }
        let launch = Launch::line(blocks, 384);
        let Some((initial, frames)) = video else {
            // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
            return unsafe { self.kernel.launch(stream, launch, &params) };
        };
        let frame_steps = plan.sizes.frame_steps() as i32;
        let params = VideoParams { base: params, initial, frames, frame_steps };
        // SAFETY: as above.
        unsafe { self.kernel.launch(stream, launch, &params) }
    }
}

/// The fused kernel without its epilogue and shared memory.
fn fused_kernel(
    dtype: DType,
    sizes: &Sizes,
    vectors: bool,
    g: &Geometry,
    input_stages: usize,
) -> KernelSpec {
    let bits: Vec<_> = g.pair_bits.iter().map(usize::to_string).collect();
    let spec = kernel(&FUSED, "winograd_row", dtype);
    let mut spec = match sizes.is_video() {
        true => spec.define("FRAMES", 1).params::<VideoParams>(),
        false => spec.params::<FusedParams>(),
    };
    spec = spec
        .needs(Feature::WarpgroupProducts)
        .define("PRODUCTS", sizes.products)
        .define("CHANNELS_LAST_OUT", i32::from(vectors))
        .define("PAIRS_X", g.pairs_x)
        .define("PIXEL_PITCH", g.pitch)
        .define("PAIR_BITS", format!("{{{}}}", bits.join(",")))
        .define("INPUT_STAGES", input_stages)
        .define("INPUT_INNER", matrix(&INNER.bt, ALPHA - 1, ALPHA - 1))
        .define("INPUT_POINT", float(TRANSFORMS.at[1][LAST_POINT]))
        .define("INPUT_ROW", row(&TRANSFORMS.bt[LAST_POINT], ALPHA))
        .define("OUTPUT", matrix(&TRANSFORMS.at, TILE, ALPHA));
    if dtype == DType::F32 {
        spec = spec
            .define("INPUT_EXPONENT", exponent(&TRANSFORMS.bt, 1))
            .define("FILTER_EXPONENT", exponent(&TRANSFORMS.g, 1));
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::frame_reads::FrameReads;
    use crate::conv2d::gpu::task::Task;
    use crate::conv2d::{Conv2dParams, Conv2dSpec};
    use crate::gpu::compile_tests::check_spills;
    use crate::{Accuracy, Activation, Approximate, TensorDesc};

    /// 160 accumulators leave no register free; the most is spilled where outputs are activated. Registers taken from the
    /// producer cost more than spills do (docs/notes/conv2d-cuda.md), so each kind has a limit, in bytes, instead of none.
    #[test]
    fn kernels_spill_no_more_than_was_measured() {
        for (dtype, products, vectors, most, most_added) in [
            (DType::F16, 1, true, 200, 160),
            (DType::F16, 1, false, 40, 48),
            (DType::BF16, 1, true, 200, 160),
            (DType::BF16, 1, false, 40, 48),
            (DType::F32, 1, true, 44, 40),
            (DType::F32, 1, false, 40, 64),
            (DType::F32, 3, true, 224, 420),
            (DType::F32, 3, false, 980, 640),
        ] {
            let geometry = Geometry::choose(64, 110, 110, !vectors).unwrap();
            let stages = if dtype == DType::F32 { 2 } else { 3 };
            let x = TensorDesc::contiguous(dtype, &[1, 16, 8, 8]).unwrap();
            let w = TensorDesc::contiguous(dtype, &[16, 16, 3, 3]).unwrap();
            let accuracy = if products == 3 { Accuracy::Fp32 } else { Accuracy::Half };
            let params = Conv2dParams { accuracy, ..Conv2dParams::default() };
            let plain = Conv2dSpec::new(x, w, &params).unwrap();
            let problem = plain.problem().unwrap();
            let task = Task::on_h200(&plain, &problem);
            let videos = [None, Some(FrameReads::EXAMPLE)];
            let sizes = videos.map(|reads| Sizes::new(&task.with_frames(reads)));
            assert_eq!(sizes[0].products, products);
            let gelu = plain.clone().with_activation(Activation::Gelu(Approximate::None));
            let added = plain.clone().with_activation(Activation::Relu).with_residual(true);
            for (spec, most) in [(plain, most), (gelu, most), (added, most_added)] {
                for sizes in &sizes {
                    // The producer of a video spills one word, before its loops.
                    let most = most + 4 * u32::from(sizes.is_video());
                    let kernel = fused_kernel(dtype, sizes, vectors, &geometry, stages);
                    check_spills(&with_epilogue(kernel, &spec), (9, 0), most);
                }
            }
        }
    }
}
