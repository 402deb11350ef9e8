//! The one-dimensional Winograd F(3, 3) along rows, in one kernel, on GPUs with warpgroup matrix instructions (wgmma;
//! `winograd_row.cu`).

mod geometry;
mod kernel;
mod sizes;
mod video;

use self::geometry::Geometry;
use self::kernel::{Fused, Piece};
use self::sizes::Sizes;
use super::ALIGNMENT;
use super::facts::{has_vectors, is_strict, may_transform, packed_parts};
use super::input::{Input, is_aligned};
use super::method::{About, Method, needs_warpgroups};
use super::prepared::{Operands, PackTo, PackedForm, Prepared};
use super::shared::frames::FrameMax;
use super::shared::matrix::matrix;
use super::shared::video_input::{VideoInput, images_at_once};
use super::split::{self, exponent};
use super::task::Task;
use super::{Seen, kernel, source, strides};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::winograd::{Rational, Transforms};
use crate::conv2d::{Conv2dAlgorithm, Conv2dSpec, Problem};
use crate::dtype::not_computed;
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, TensorMap, params};
use crate::try_once_lock::TryOnceLock;
use crate::{DType, Result};

static PACK_FILTER: Source = source!("winograd_pack_filter.cu");

/// The points 0, 3/4, -3/4, 2 and infinity. Of the points that were tried, they have the least error with operands
/// rounded to f16.
const TRANSFORMS: Transforms = Transforms::from_points(&[
    Rational::new(0, 1),
    Rational::new(3, 4),
    Rational::new(-3, 4),
    Rational::new(2, 1),
]);
/// The transforms without the last finite point: see `transform_pair` in the kernel.
const INNER: Transforms =
    Transforms::from_points(&[Rational::new(0, 1), Rational::new(3, 4), Rational::new(-3, 4)]);
const LAST_POINT: usize = 3;

/// Outputs and positions of a tile, filter taps.
pub(super) const TILE: usize = 3;
const TAPS: usize = 3;
const ALPHA: usize = 5;
/// Output channels of a block, input channels of a step.
const BLOCK_K: usize = 64;
const STEP_C: usize = 16;
/// Bytes of one position, step and part of the packed filter.
const PART_BYTES: usize = STEP_C * BLOCK_K * 2;

/// A convolution by this algorithm.
#[derive(Debug)]
pub(crate) struct WinogradRow {
    gpu: &'static Gpu,
    spec: Conv2dSpec,
    problem: Problem,
    sizes: Sizes,
    /// The images of y of a launch if x is copied.
    images: usize,
    input: Input,
    video: Option<VideoInput>,
    /// Of videos in f32.
    frame_max: Option<FrameMax>,
    /// True if the layout of y allows vector stores at an aligned address.
    vectors: bool,
    pack_filter: &'static Kernel,
    /// Kernels for any y and for vector stores. The one that the layout of y allows is compiled with the plan. The
    /// other is compiled when an address of y or of a residual is not aligned, also while a stream is captured.
    fused: [TryOnceLock<Fused>; 2],
}

params! {
    struct FilterParams {
        w: *const u8,
        u: *mut u8,
        inverse: *mut u8,
        strides as [w_k, w_c, w_r, w_s]: [i64; 4],
        seen: Seen,
        k: i32,
        c: i32,
        steps: i32,
        shrinkage: f32,
        frame_stride as [w_t]: i64,
        frames: i32,
        frame_steps: i32,
    }
}

/// [`Conv2dAlgorithm::WinogradRow`].
pub(super) struct WinogradRowMethod;

impl Method for WinogradRowMethod {
    fn about(&self) -> &'static About {
        &About {
            algorithms: &[Conv2dAlgorithm::WinogradRow],
            domain: "computes 3x3 filters of stride and dilation 1 in one group, on compute capability 9.0",
            kernels: &[
                "winograd_pack_filter.cu conv2d_winograd_row_filter_f32 PRODUCTS={1,3} sm_90",
                "winograd_pack_filter.cu conv2d_winograd_row_filter_{f16,bf16} PRODUCTS=1 sm_90",
                "winograd_row.cu conv2d_winograd_row_f32 PRODUCTS={1,3} CHANNELS_LAST_OUT={0,1} sm_90",
                "winograd_row.cu conv2d_winograd_row_{f16,bf16} PRODUCTS=1 CHANNELS_LAST_OUT={0,1} sm_90",
                "winograd_pack_filter.cu conv2d_winograd_row_filter_f32 PRODUCTS={1,3} FRAMES=1 by:conv3d sm_90",
                "winograd_pack_filter.cu conv2d_winograd_row_filter_{f16,bf16} PRODUCTS=1 FRAMES=1 by:conv3d sm_90",
                "winograd_row.cu conv2d_winograd_row_f32 PRODUCTS={1,3} CHANNELS_LAST_OUT={0,1} FRAMES=1 by:conv3d sm_90",
                "winograd_row.cu conv2d_winograd_row_{f16,bf16} CHANNELS_LAST_OUT={0,1} FRAMES=1 by:conv3d sm_90",
            ],
            parameters: &[],
        }
    }

    fn computes(&self, task: &Task<'_>) -> bool {
        let p = task.problem;
        p.is_winograd() && ![p.c, p.h, p.w, p.frames.t].contains(&0)
    }

    fn runs_on(&self, gpu: &Gpu, _task: &Task<'_>) -> Result<()> {
        needs_warpgroups(gpu, Conv2dAlgorithm::WinogradRow)
    }

    fn allows(&self, task: &Task<'_>) -> bool {
        may_transform(task.spec)
    }

    fn micros(&self, task: &Task<'_>) -> f64 {
        micros(task)
    }

    fn pair_bytes(&self, task: &Task<'_>) -> usize {
        2 * TAPS * ALPHA * packed_parts(task.spec) * task.problem.frames.kt
    }

    fn least_bytes(&self, task: &Task<'_>) -> usize {
        Sizes::new(task).least_bytes(task.spec, task.problem)
    }

    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(WinogradRow::new(gpu, task)?))
    }
}

/// The number of times that the fused kernel's blocks fill the GPU. A block computes two units of 192 outputs of 64
/// channels. In strict f32, outputs outside the image count too; with 14 columns they are a fifth of all.
pub(super) fn rounds(task: &Task<'_>) -> f64 {
    let (spec, p, multiprocessors) = (task.spec, task.problem, task.chip.multiprocessors);
    let rounds = if is_strict(spec) {
        WinogradRow::work(p, !is_channels_last(&spec.y.layout), multiprocessors)
    } else {
        let blocks = (p.n * p.oh * p.ow) as f64 / 384.0 * p.k.div_ceil(64) as f64;
        blocks / f64::from(multiprocessors)
    };
    if rounds < 4.0 { rounds.ceil() } else { rounds }
}

/// Expected microseconds of the fused kernel: every round takes its steps of 16 input channels.
pub(super) fn micros(task: &Task<'_>) -> f64 {
    let Task { spec, problem: p, chip, .. } = *task;
    let rates = &chip.rates.winograd_row;
    let step = match spec.x.dtype {
        _ if is_strict(spec) => rates.split_step,
        DType::F32 => rates.f32_step,
        DType::F16 | DType::BF16 | not_computed!() => rates.half_step,
    };
    // Pixels that are not whole vectors are copied, and stored element by element.
    let slower = is_channels_last(&spec.y.layout) && !has_vectors(spec, p);
    let micros = rates.launch + step * rounds(task) * Sizes::new(task).steps() as f64;
    if slower { rates.unaligned * micros } else { micros }
}

impl WinogradRow {
    /// The share of the products of channels-last tensors that make outputs, on a GPU with this number of
    /// multiprocessors. The others belong to tiles outside the image and to a last round with too few blocks.
    pub(super) fn share_in_use(problem: &Problem, multiprocessors: u32) -> f64 {
        let Some((geometry, items)) = Self::items(problem, false) else {
            return 0.0;
        };
        let in_rounds = items.next_multiple_of(multiprocessors.max(1) as usize);
        geometry.efficiency * items as f64 / in_rounds.max(1) as f64
    }

    /// The number of times that the blocks' work, two units of 64 channels each, fills this number of multiprocessors.
    fn work(problem: &Problem, wide: bool, multiprocessors: u32) -> f64 {
        let items = Self::items(problem, wide).map_or(0, |(_, items)| items);
        items as f64 / f64::from(multiprocessors)
    }

    fn items(problem: &Problem, wide: bool) -> Option<(Geometry, usize)> {
        let geometry = Geometry::choose(problem.n.max(1), problem.oh, problem.ow, wide)?;
        let pairs = geometry.units(problem.n, problem.ow).div_ceil(2);
        Some((geometry, pairs * problem.k.div_ceil(BLOCK_K)))
    }

    /// The method; packed filter and workspace together stay within the options' memory, if that is given and is enough
    /// for one image.
    fn new(gpu: &'static Gpu, task: &Task<'_>) -> Result<Self> {
        let Task { spec, problem, frames, .. } = *task;
        let sizes = Sizes::new(task);
        let input = |reads| VideoInput::new(gpu, (spec, problem), reads)?.with_max(gpu);
        let video = frames.map(input).transpose()?;
        // What is read: the images themselves, or the frames of a video.
        let x = frames.map_or(Ok(spec.x), |reads| reads.images(&spec.x))?;
        let read = &Conv2dSpec { x, ..spec.clone() };
        let used = sizes.bytes() + video.as_ref().map_or(0, VideoInput::copy_bytes);
        let room = task.options.memory.map(|memory| memory.saturating_sub(used));
        let most = images_at_once(read, frames.as_ref(), room);
        let images = sizes.images_of_a_piece(spec, problem, most);
        let vectors = stores_vectors(spec, problem);
        let fused = [TryOnceLock::default(), TryOnceLock::default()];
        fused[usize::from(vectors)].get(|| Fused::new(gpu, (spec, problem), &sizes, vectors))?;
        Ok(WinogradRow {
            gpu,
            spec: spec.clone(),
            problem: *problem,
            sizes,
            images,
            input: Input::new(gpu, read, problem, sizes.copied(images))?.with_max(gpu)?,
            frame_max: (video.is_some() && spec.x.dtype == DType::F32)
                .then(|| FrameMax::new(gpu))
                .transpose()?,
            video,
            vectors,
            pack_filter: gpu.kernel(&filter_kernel(spec.x.dtype, &sizes))?,
            fused,
        })
    }

    /// The kernel for vector stores, or for any y.
    fn fused(&self, vectors: bool) -> Result<Fused> {
        let make = || Fused::new(self.gpu, (&self.spec, &self.problem), &self.sizes, vectors);
        self.fused[usize::from(vectors)].get(make).copied()
    }
}

impl Prepared for WinogradRow {
    fn packed_bytes(&self) -> usize {
        self.sizes.packed_bytes()
    }

    /// Bytes of the checksums that are stored after a packed filter: see [`Seen`].
    fn seen_bytes(&self) -> usize {
        self.sizes.k_blocks() * BLOCK_K * Seen::DIGEST
    }

    fn scratch_bytes(&self) -> usize {
        let initial = self.video.as_ref().map_or(0, VideoInput::copy_bytes);
        self.sizes.max_bytes() + self.sizes.sums_bytes() + initial + self.input.copy_bytes()
    }

    fn scratch_bytes_for(&self, x: *const u8, initial: Option<*const u8>) -> usize {
        let copy = if self.input.in_place && is_aligned(x) { 0 } else { self.input.copy_bytes() };
        let video = self.video.as_ref();
        let initial_copy = match video.is_none_or(|video| video.reads_in_place(initial)) {
            // Without a copy of x nothing lies behind that of the initial frames.
            true if copy == 0 => 0,
            _ => video.map_or(0, VideoInput::copy_bytes),
        };
        self.sizes.max_bytes() + self.sizes.sums_bytes() + initial_copy + copy
    }

    fn packed_form(&self) -> PackedForm {
        let order = usize::from(self.sizes.is_video());
        PackedForm::new("winograd_row", self.spec.x.dtype, self.sizes.products, order)
    }

    /// An operand is rounded to f16 or bf16 up to three times: twice in the input transform, once in the filter's. The
    /// transforms may enlarge sums by a factor of about 4. Split operands carry 22 bits, and then the truncated sums of
    /// tensor cores count, one for each product of 16 channels.
    fn tolerance(&self) -> f64 {
        const GROWTH: f64 = 4.0;
        let unit = |dtype: DType| dtype.unit_roundoff();
        let sums = self.sizes.steps() * TAPS * self.sizes.products;
        let operands = match self.spec.x.dtype {
            DType::F32 if self.sizes.products == 3 => split::rounding(),
            DType::BF16 => 3.0 * unit(DType::BF16),
            DType::F32 | DType::F16 | not_computed!() => 3.0 * unit(DType::F16),
        };
        GROWTH * (operands + 2.0 * sums as f64 * unit(DType::F32))
    }

    fn tile(&self) -> Option<usize> {
        Some(TILE)
    }

    fn explain(&self) -> String {
        let Some(fused) = self.fused[usize::from(self.vectors)].made() else {
            return String::new();
        };
        format!(
            "F(3,3) along rows, {} product{} of half precision, {}, input {}",
            self.sizes.products,
            if self.sizes.products == 1 { "" } else { "s" },
            fused.explain(),
            if self.input.in_place { "read in place" } else { "copied to channels-last" }
        )
    }

    unsafe fn pack(&self, stream: &Stream, w: *const u8, to: PackTo) -> Result<()> {
        let params = FilterParams {
            w,
            u: to.memory,
            inverse: to.memory.wrapping_add(self.sizes.u_bytes()),
            strides: strides(&self.spec.w),
            seen: Seen::behind(to, self.packed_bytes()),
            k: self.problem.k as i32,
            c: self.problem.c as i32,
            steps: self.sizes.steps() as i32,
            shrinkage: self.sizes.shrinkage() as f32,
            frame_stride: self.video.as_ref().map_or(0, |video| video.reads.filter as i64),
            frames: self.sizes.frames() as i32,
            frame_steps: self.sizes.frame_steps() as i32,
        };
        let launch = Launch::line(self.sizes.k_blocks() * BLOCK_K, 256);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.pack_filter.launch(stream, launch, &params) }
    }

    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()> {
        if let Some(video) = &self.video {
            // SAFETY: the caller's promise.
            return unsafe { self.run_video(video, stream, packed, operands) };
        }
        let p = &self.problem;
        let (x_max, sums) =
            (operands.scratch, operands.scratch.wrapping_add(self.sizes.max_bytes()));
        let copy = sums.wrapping_add(self.sizes.sums_bytes());
        let fused = self.fused(self.vectors && operands.is_out_aligned(16))?;
        for first in (0..p.n).step_by(self.images_of_a_launch(&fused, operands.x)) {
            let n = self.images_of_a_launch(&fused, operands.x).min(p.n - first);
            let piece = operands.after_images(&self.spec, first);
            let x_max = x_max.wrapping_add(first * size_of::<u32>());
            // SAFETY: the caller's promise; `n` images fit the copy. The map is of x or of its copy, both of which have
            // `n` images.
            unsafe {
                let x = self.map(&fused, stream, &self.input, (piece.x, n), copy, x_max)?;
                let images = Piece { x, x_max, sums, n, video: None };
                fused.launch(self, stream, packed, piece, images)?;
            }
        }
        Ok(())
    }
}

impl WinogradRow {
    /// The images of y that a launch computes.
    fn images_of_a_launch(&self, fused: &Fused, x: *const u8) -> usize {
        let in_place = self.input.in_place && is_aligned(x);
        if in_place { self.problem.n } else { self.images }.min(fused.most_images(self))
    }

    /// The map of `n` images at `x`, or of their copy at `copy`. For f32 their largest magnitudes go to `x_max`.
    ///
    /// # Safety
    /// `x` must be images of the input, `copy` memory for their copy if they are not read in place, `x_max` `n` words for
    /// f32.
    unsafe fn map(
        &self,
        fused: &Fused,
        stream: &Stream,
        input: &Input,
        (x, n): (*const u8, usize),
        copy: *mut u8,
        x_max: *mut u8,
    ) -> Result<TensorMap> {
        if input.in_place && is_aligned(x) {
            // SAFETY: the caller's promise; the address is aligned.
            unsafe { input.find_max(stream, x, n, x_max)? };
            return fused.map_of_x(self, input, x, n);
        }
        // SAFETY: the caller's promise.
        unsafe { input.copy(stream, x, n, copy, x_max)? };
        fused.map_of_copy(self, copy, n)
    }
}

/// Transforms the filter.
fn filter_kernel(dtype: DType, sizes: &Sizes) -> KernelSpec {
    let filter = kernel(&PACK_FILTER, "winograd_row_filter", dtype)
        .define("PRODUCTS", sizes.products)
        .define("FILTER", matrix(&TRANSFORMS.g, ALPHA, TAPS))
        .params::<FilterParams>()
        .overlapped(false);
    let filter = if sizes.is_video() { filter.define("FRAMES", 1) } else { filter };
    if dtype == DType::F32 {
        filter.define("FILTER_EXPONENT", exponent(&TRANSFORMS.g, 1))
    } else {
        filter
    }
}

/// True if 8 neighbouring channels of y are whole 16-byte vectors.
fn stores_vectors(spec: &Conv2dSpec, problem: &Problem) -> bool {
    let s = spec.y.strides();
    let vector = 16 / spec.y.dtype.size();
    problem.k.is_multiple_of(vector)
        && s[1] == 1
        && [s[0], s[2], s[3]].into_iter().all(|s| s % vector as isize == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Accuracy;
    use crate::conv2d::frame_reads::FrameReads;
    use crate::conv2d::gpu::{input, test_specs};

    #[test]
    fn kernels_of_the_operands_compile_without_spills() {
        let mut specs = Vec::new();
        for spec in test_specs() {
            let problem = spec.problem().unwrap();
            for accuracy in [Accuracy::Fp32, Accuracy::Half] {
                let spec = Conv2dSpec { accuracy, ..spec.clone() };
                for reads in [None, Some(FrameReads::EXAMPLE)] {
                    let task = Task::on_h200(&spec, &problem).with_frames(reads);
                    specs.push(filter_kernel(spec.x.dtype, &Sizes::new(&task)));
                }
            }
        }
        specs.extend([DType::F32, DType::F16, DType::BF16].into_iter().flat_map(input::kernels));
        crate::gpu::compile_tests::check_compiles(&specs);
    }
}
