//! Convolution as a matrix product whose im2col matrix is gathered on the fly, on the tensor cores of compute
//! capability 9.0: f32 as three products of f16 parts (`implicit_gemm.cu`); in one product f16, bf16 and, at accuracy
//! `Tf32` and `Half`, f32 (`implicit_gemm_single.cu`).

mod cost;
mod cut;
mod filter;
mod parameters;
mod product;
mod run;

use self::cut::{BLOCKS, Cut, Factors, Gather, PARTS, STRIP_BLOCKS, gather, rows_lie_like};
use self::filter::filter_kernel;
use self::product::product;
use self::run::Copies;
use super::input::{Input, copy_kernel, is_aligned};
use super::method::{About, Method, Parameter, needs_warpgroups};
use super::prepared::{Operands, PackTo, PackedForm, Prepared};
use super::shared::video_input::{VideoInput, images_at_once};
use super::split;
use super::task::Task;
use super::{ALIGNMENT, Seen};
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::{Gpu, Kernel, Launch, Stream};
use crate::try_once_lock::TryOnceLock;
use crate::{Accuracy, DType, Error, Result};

/// The relative error of a product of two operands that are rounded to TF32.
const TF32_ROUNDINGS: f64 = 2.0 / (1 << 11) as f64;

/// Rows and columns lie in half a word, with a row that stands for pixels that do not exist.
const MAX_EXTENT: usize = 1 << 14;

/// A convolution by this algorithm.
#[derive(Debug)]
pub(crate) struct ImplicitGemm {
    gpu: &'static Gpu,
    spec: Conv2dSpec,
    problem: Problem,
    cut: Cut,
    /// As [`Cut::image_pixels`] gives it.
    image_pixels: usize,
    /// The copy that kernels of one product read if the channels of x are not whole vectors, and the images of y of a launch
    /// that reads it.
    input: Option<Input>,
    images: usize,
    video: Option<VideoInput>,
    /// Elements from the filter of a group to that of the next.
    filter_group: isize,
    pack_filter: &'static Kernel,
    /// The kernel for tensors at addresses aligned to 16 bytes (in one product: y and the residual), and the one for any.
    aligned: &'static Kernel,
    unaligned: TryOnceLock<&'static Kernel>,
}

/// [`Conv2dAlgorithm::ImplicitGemm`].
pub(super) struct ImplicitGemmMethod;

impl Method for ImplicitGemmMethod {
    fn about(&self) -> &'static About {
        &About {
            algorithms: &[Conv2dAlgorithm::ImplicitGemm],
            domain: "computes f32, and f16 and bf16 in groups of whole vectors of channels, on compute capability 9.0",
            kernels: &[
                "implicit_gemm.cu conv2d_implicit_gemm_f32 GATHER={0,1,2} BLOCK_K={64,128} SPLIT={1,2,4,8} sm_90",
                "implicit_gemm_single.cu conv2d_implicit_gemm_single_{f32,f16,bf16} BLOCK_K={64,128} SPLIT={1,2,4,8} sm_90",
                "implicit_gemm_single.cu conv2d_implicit_gemm_single_{f32,f16,bf16} BLOCK_K=256 SPLIT=1 sm_90",
                "implicit_gemm_single.cu conv2d_implicit_gemm_single_{f32,f16,bf16} STRIP=1 BLOCK_K={64,96,128,192} sm_90",
                "implicit_gemm_single.cu conv2d_implicit_gemm_single_{f16,bf16} GATHER=1 OUT={0,1,2} sm_90",
                "implicit_gemm_single.cu conv2d_implicit_gemm_single_{f16,bf16} GATHER=3 STRIP={0,1} OUT={0,1,2} sm_90",
                "implicit_gemm_single.cu conv2d_implicit_gemm_single_f32 GATHER=3 OUT={0,1} sm_90",
                "implicit_gemm_filter.cu conv2d_implicit_gemm_filter_f32 BLOCK_K={64,128} sm_90",
                "implicit_gemm_filter.cu conv2d_implicit_gemm_filter_f32 TF32=1 BLOCK_K={64,128,256} sm_90",
                "implicit_gemm_filter.cu conv2d_implicit_gemm_filter_{f16,bf16} BLOCK_K={64,128,256} sm_90",
                "implicit_gemm_filter.cu conv2d_implicit_gemm_filter_{f32,f16,bf16} STRIP=1 BLOCK_K={64,96,128,192} sm_90",
                "implicit_gemm.cu conv2d_implicit_gemm_f32 GATHER={0,1,2} FRAMES=1 by:conv3d sm_90",
                "implicit_gemm_single.cu conv2d_implicit_gemm_single_{f16,bf16} GATHER={1,3} FRAMES=1 by:conv3d sm_90",
                "implicit_gemm_single.cu conv2d_implicit_gemm_single_f32 GATHER=3 FRAMES=1 by:conv3d sm_90",
                "implicit_gemm_single.cu conv2d_implicit_gemm_single_{f32,f16,bf16} STRIP=1 FRAMES=1 by:conv3d sm_90",
                "implicit_gemm_filter.cu conv2d_implicit_gemm_filter_{f32,f16,bf16} FRAMES=1 by:conv3d sm_90",
            ],
            parameters: &[
                Parameter {
                    name: "tiles",
                    values: "tiles of 128 pixels of a block: 1 or, in one product, 2",
                    is_valid: |tiles| matches!(tiles, 1 | 2),
                },
                Parameter {
                    name: "block",
                    values: "output channels of a block: 64, 128 or, in one product, 96, 192 or 256",
                    is_valid: |block| BLOCKS.contains(&block) || STRIP_BLOCKS.contains(&block),
                },
                Parameter {
                    name: "parts",
                    values: "parts of the sums: 1, 2, 4 or 8",
                    is_valid: |parts| PARTS.contains(&parts),
                },
            ],
        }
    }

    fn computes(&self, task: &Task<'_>) -> bool {
        let Task { spec, problem: p, frames, .. } = *task;
        let near = |size: usize, d: usize, taps: usize| {
            let reach = taps.saturating_sub(1).saturating_mul(p.dilation[d]);
            size.saturating_add(2 * p.padding[d]) < MAX_EXTENT && reach < MAX_EXTENT
        };
        // Offsets within x, also of taps outside it.
        let padded = |d: usize| match d {
            2 | 3 => spec.x.shape()[d] + 2 * p.padding[d - 2],
            _ => spec.x.shape()[d],
        };
        // Those of a video are offsets within a frame.
        let reach = (usize::from(frames.is_some())..4)
            .map(|d| padded(d).saturating_mul(spec.x.strides()[d].unsigned_abs()))
            .fold(0, usize::saturating_add);
        let image = Cut::all(spec, p).map(|cut| cut.image_pixels(task)).max();
        let pixels = p.n.saturating_mul(image.unwrap_or(0));
        let single = Cut::all(spec, p).all(|cut| cut.is_single());
        frames.is_none_or(|reads| single || rows_lie_like(&spec.x, &reads, p.groups))
            && image.is_some()
            && ![p.c, p.k, p.frames.t].contains(&0)
            && near(p.h, 0, p.r)
            && near(p.w, 1, p.s)
            && reach < 1 << 31
            && pixels < 1 << 30
            && pixels.saturating_mul(p.k) / 128 < 1 << 30
    }

    fn runs_on(&self, gpu: &Gpu, _task: &Task<'_>) -> Result<()> {
        needs_warpgroups(gpu, Conv2dAlgorithm::ImplicitGemm)
    }

    fn allows(&self, task: &Task<'_>) -> bool {
        task.spec.accuracy >= Accuracy::Fp32
    }

    fn micros(&self, task: &Task<'_>) -> f64 {
        Cut::choose(task).map_or(f64::INFINITY, |(_, micros)| micros)
    }

    fn pair_bytes(&self, task: &Task<'_>) -> usize {
        let p = task.problem;
        p.frames.kt * p.r * p.s * task.spec.x.dtype.size()
    }

    fn variants(&self, spec: &Conv2dSpec, problem: &Problem) -> Vec<Conv2dConfiguration> {
        Cut::all(spec, problem).map(|cut| cut.configuration()).collect()
    }

    fn complete(&self, task: &Task<'_>) -> Conv2dConfiguration {
        Cut::choose(task).map_or(task.configuration, |(cut, _)| cut.configuration())
    }

    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>> {
        let filter_group = task.problem.k_group() as isize * task.spec.w.strides()[0];
        Ok(Box::new(ImplicitGemm::with_groups(gpu, task, filter_group)?))
    }
}

impl ImplicitGemm {
    /// The product with a filter whose input and output channels are exchanged within each group. In memory the input
    /// channels of a group follow those of the previous group.
    pub(super) fn transposed(gpu: &'static Gpu, task: &Task<'_>) -> Result<Self> {
        let filter_group = task.problem.c_group() as isize * task.spec.w.strides()[1];
        Self::with_groups(gpu, task, filter_group)
    }

    fn with_groups(gpu: &'static Gpu, task: &Task<'_>, filter_group: isize) -> Result<Self> {
        let Task { spec, problem, frames, .. } = *task;
        let Some((cut, _)) = Cut::choose(task) else {
            return Err(Error::unsupported(
                format!("conv2d with {}", task.configuration),
                "implicit_gemm has tiles (1, in one product 2), block (64, 128, in one product 96, 192, 256) and \
                 parts (1, 2, 4, 8)",
            ));
        };
        // What is read: the images themselves, or the frames of a video.
        let x = frames.map_or(Ok(spec.x), |reads| reads.images(&spec.x))?;
        let video = match frames {
            Some(reads) if cut.is_single() => Some(VideoInput::new(gpu, (spec, problem), reads)?),
            reads => reads.map(|reads| VideoInput { reads, initial: None }),
        };
        let spec = Conv2dSpec { x, ..spec.clone() };
        let aligned = product(&spec, problem, cut, true);
        let pack_filter = filter_kernel(spec.x.dtype, cut, problem.is_video());
        let [aligned, pack_filter] = match cut.is_single() {
            true => {
                let copy = copy_kernel(spec.x.dtype, 1);
                gpu.kernels([&aligned, &pack_filter, &copy])
                    .map(|[aligned, filter, _]| [aligned, filter])
            }
            false => gpu.kernels([&aligned, &pack_filter]),
        }?;
        let images = images_at_once(&spec, frames.as_ref(), None);
        let copied = frames.map_or(images, |reads| reads.copied(images));
        let input = cut.is_single().then(|| Input::new(gpu, &spec, problem, copied)).transpose()?;
        Ok(ImplicitGemm {
            gpu,
            spec,
            problem: *problem,
            cut,
            image_pixels: cut.image_pixels(task),
            input,
            images,
            video,
            filter_group,
            pack_filter,
            aligned,
            unaligned: TryOnceLock::default(),
        })
    }

    fn filter_bytes(&self) -> usize {
        let step = self.cut.block * self.cut.channel_bytes();
        self.cut.k_blocks(&self.problem) * self.cut.steps(&self.problem) * step
    }

    /// True if the layout of x lets kernels of one product read it where it lies. Its address has to be aligned, too.
    fn copies_nothing(&self, input: &Input) -> bool {
        input.in_place && self.problem.c.is_multiple_of(self.cut.vector())
    }

    fn kernel(&self, aligned: bool) -> Result<&'static Kernel> {
        if aligned { Ok(self.aligned) } else { self.unaligned() }
    }

    fn unaligned(&self) -> Result<&'static Kernel> {
        let compile = || self.gpu.kernel(&product(&self.spec, &self.problem, self.cut, false));
        self.unaligned.get(compile).copied()
    }
}

impl Prepared for ImplicitGemm {
    fn configuration(&self, _algorithm: Conv2dAlgorithm) -> Conv2dConfiguration {
        self.cut.configuration()
    }

    fn packed_bytes(&self) -> usize {
        (self.filter_bytes() + self.problem.k * size_of::<f32>()).next_multiple_of(ALIGNMENT)
    }

    /// Bytes of the checksums that are stored after a packed filter: see [`Seen`].
    fn seen_bytes(&self) -> usize {
        self.cut.k_blocks(&self.problem) * self.cut.block * Seen::DIGEST
    }

    fn packed_form(&self) -> PackedForm {
        let products = if self.cut.is_single() { 1 } else { 3 };
        // That of a video is another one if it has one frame.
        let order = [self.cut.strips, self.video.is_some()]
            .into_iter()
            .fold(self.cut.block, |order, is| 2 * order + usize::from(is));
        PackedForm::new("implicit_gemm", self.spec.x.dtype, products, order)
    }

    fn scratch_bytes(&self) -> usize {
        let initial = self.video.as_ref().map_or(0, VideoInput::copy_bytes);
        initial + self.input.as_ref().map_or(0, Input::copy_bytes)
    }

    fn scratch_bytes_for(&self, x: *const u8, initial: Option<*const u8>) -> usize {
        let in_place = match (&self.input, &self.video) {
            (None, _) => true,
            (Some(_), Some(video)) => match self.copies_of(video, x, initial) {
                Copies::Nothing => true,
                Copies::InitialFrames => return video.copy_bytes(),
                Copies::All => false,
            },
            (Some(input), None) => self.copies_nothing(input) && is_aligned(x),
        };
        if in_place { 0 } else { self.scratch_bytes() }
    }

    /// The tolerance. In one product tensor cores truncate each addition, and TF32 rounds both operands. In three, both
    /// operands carry 22 bits, and the product of their low parts is left out. Then there are the accumulations of a step,
    /// which truncate, and the sums of steps and parts.
    fn tolerance(&self) -> f64 {
        if self.cut.is_single() {
            let operands = if self.cut.factors == Factors::Tf32 { TF32_ROUNDINGS } else { 0.0 };
            return operands + (2 * self.problem.taps() + 2) as f64 * DType::F32.unit_roundoff();
        }
        let accumulations = 2 * 3 * self.cut.step() / 16;
        let sums = accumulations + self.cut.steps(&self.problem) + self.cut.parts + 2;
        4.0 * split::rounding() + sums as f64 * DType::F32.unit_roundoff()
    }

    fn explain(&self) -> String {
        let Cut { factors, strips, pixels, block, parts, .. } = self.cut;
        let gathered = match (&self.input, gather(&self.spec, &self.problem, self.cut, true)) {
            (Some(input), _) if !self.copies_nothing(input) => "a copy in channels-last order",
            (_, Gather::Any) => "elements",
            (_, Gather::Pixels) => "vectors of pixels",
            _ if strips => "strips of pixels",
            (_, Gather::Channels | Gather::Map) => "vectors of channels",
        };
        let products = match factors {
            Factors::Split => "three products of halves",
            Factors::Tf32 => "one product of TF32",
            Factors::Half => "one product of halves",
        };
        format!(
            "{products}, {pixels} pixels x {block} channels of a block, sums in {parts} parts, {gathered} gathered"
        )
    }

    unsafe fn pack(&self, stream: &Stream, w: *const u8, to: PackTo) -> Result<()> {
        let (p, params) = (&self.problem, self.filter_params(w, to));
        let channels = self.cut.k_blocks(p) * self.cut.block;
        let launch = Launch::line(channels, 256);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.pack_filter.launch(stream, launch, &params) }
    }

    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.video {
                Some(video) => self.run_video(video, stream, packed, operands),
                None => self.run_images(stream, packed, operands),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::Conv2dParams;
    use crate::conv2d::frame_reads::FrameReads;
    use crate::{Activation, Approximate, Layout, TensorDesc};

    pub(super) fn spec(
        x: &[usize],
        order: &[usize],
        w: &[usize],
        padding: usize,
    ) -> (Conv2dSpec, Problem) {
        let x = TensorDesc { dtype: DType::F32, layout: Layout::with_order(x, order).unwrap() };
        let w = TensorDesc::contiguous(DType::F32, w).unwrap();
        let activation = Activation::Gelu(Approximate::None);
        let params = Conv2dParams { padding: [padding; 2], activation, ..Default::default() };
        let spec = Conv2dSpec::new(x, w, &params).unwrap();
        let problem = spec.problem().unwrap();
        (spec, problem)
    }

    pub(super) const NCHW: [usize; 4] = [0, 1, 2, 3];
    pub(super) const NHWC: [usize; 4] = [0, 2, 3, 1];

    #[test]
    fn kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for (dtype, accuracy) in [
            (DType::F32, Accuracy::Fp32),
            (DType::F32, Accuracy::Tf32),
            (DType::F16, Accuracy::Fp32),
        ] {
            for (order, taps, padding) in
                [(NCHW, 3, 1), (NCHW, 1, 0), (NHWC, 3, 1), (NHWC, 1, 0), (NCHW, 3, 0)]
            {
                let (mut spec, problem) =
                    spec(&[2, 64, 8, 8], &order, &[136, 64, taps, taps], padding);
                for desc in [&mut spec.x, &mut spec.w, &mut spec.y] {
                    desc.dtype = dtype;
                }
                spec.accuracy = accuracy;
                let video = Problem { frames: FrameReads::EXAMPLE.frames, ..problem };
                for residual in [false, true] {
                    let spec = spec.clone().with_residual(residual);
                    let cuts = Cut::all(&spec, &problem);
                    for cut in cuts.filter(|cut| [1, 8].contains(&cut.parts)) {
                        kernels.push(product(&spec, &problem, cut, true));
                        if residual {
                            kernels.push(product(&spec, &video, cut, true));
                        } else if taps == 3 {
                            kernels.extend([false, true].map(|v| filter_kernel(dtype, cut, v)));
                        }
                    }
                }
            }
        }
        crate::gpu::compile_tests::check_compiles(&kernels);
    }
}
