//! Convolution as a matrix product whose im2col matrix is gathered on the fly, on the tensor cores of compute
//! capability 9.0: f32 as three products of f16 parts (`implicit_gemm.cu`), f16/bf16 directly
//! (`implicit_gemm_half.cu`).

mod cut;
mod product;

use self::cut::{BLOCKS, Cut, Gather, PARTS, STEP, corners, gather, image_pixels};
use self::product::{FILTER_EXPONENT, product, threads};
use super::facts::packed_parts;
use super::input::{Input, copy_kernel, is_aligned, most_images};
use super::method::{About, Method, Parameter, needs_warpgroups};
use super::prepared::{Operands, PackTo, PackedForm, Prepared};
use super::shape::ConvShape;
use super::split;
use super::task::Task;
use super::{ALIGNMENT, Divisor, Seen, kernel, source, strides};
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::dtype::not_computed;
use crate::gpu::{
    Gpu, Kernel, KernelSpec, Launch, Source, Stream, TensorMap, TensorPixels, params,
};
use crate::try_once_lock::TryOnceLock;
use crate::{Accuracy, DType, Error, Result, TensorDesc};

static FILTER: Source = source!("implicit_gemm_filter.cu");

/// The amount by which the tensor cores shrink the sum of one step, relative to it: four accumulations of the high
/// products, each of which truncates (measured on an H200 for 64 to 4608 normal terms: 8.3e-8 to 9.6e-8).
const SHRINKAGE: f64 = 8.9e-8;
/// Rows and columns lie in half a word, with a row that stands for pixels that do not exist.
const MAX_EXTENT: usize = 1 << 14;

/// A convolution by this algorithm.
#[derive(Debug)]
pub(crate) struct ImplicitGemm {
    gpu: &'static Gpu,
    spec: Conv2dSpec,
    problem: Problem,
    cut: Cut,
    /// As [`cut::image_pixels`] gives it.
    image_pixels: usize,
    /// The copy that f16/bf16 kernels read if the channels of x are not whole vectors.
    input: Option<Input>,
    /// Elements from the filter of a group to that of the next.
    filter_group: isize,
    pack_filter: &'static Kernel,
    /// The kernel for tensors at addresses aligned to 16 bytes (for f16/bf16: y and the residual), and the one for any.
    aligned: &'static Kernel,
    unaligned: TryOnceLock<&'static Kernel>,
}

params! {
    struct Params: ConvShape {
        map: TensorMap,
        filter: *const u8,
        filter_inverse: *const u8,
        pixels: i32,
        r: i32,
        group_c: i32,
        unit_k: i32,
        steps: i32,
        tiles: i32,
        image_pixels: Divisor,
        ow_by: Divisor,
        k_blocks: Divisor,
        unit_blocks: Divisor,
        group_k: Divisor,
        c: Divisor,
        s: Divisor,
    }

    struct FilterParams {
        w: *const u8,
        packed: *mut u8,
        inverse: *mut u8,
        strides as [w_k, w_c, w_r, w_s]: [i64; 4],
        w_group: i64,
        seen: Seen,
        unit_k: i32,
        terms: i32,
        steps: i32,
        unit_blocks: Divisor,
        group_k: Divisor,
        c: Divisor,
        s: Divisor,
        group_c: i32,
        dense: i32,
    }
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
                "implicit_gemm_half.cu conv2d_implicit_gemm_half_{f16,bf16} BLOCK_K={64,128} SPLIT={1,2,4,8} sm_90",
                "implicit_gemm_half.cu conv2d_implicit_gemm_half_{f16,bf16} BLOCK_K=256 SPLIT=1 sm_90",
                "implicit_gemm_half.cu conv2d_implicit_gemm_half_{f16,bf16} GATHER=1 OUT={0,1,2} sm_90",
                "implicit_gemm_half.cu conv2d_implicit_gemm_half_{f16,bf16} GATHER=3 OUT=1 sm_90",
                "implicit_gemm_filter.cu conv2d_implicit_gemm_filter_f32 BLOCK_K={64,128} sm_90",
                "implicit_gemm_filter.cu conv2d_implicit_gemm_filter_{f16,bf16} BLOCK_K={64,128,256} sm_90",
            ],
            parameters: &[
                Parameter {
                    name: "block",
                    values: "output channels of a block: 64, 128 or, of f16 and bf16, 256",
                    is_valid: |block| BLOCKS.contains(&block),
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
        let Task { spec, problem: p, .. } = *task;
        let near = |size: usize, d: usize, taps: usize| {
            let reach = taps.saturating_sub(1).saturating_mul(p.dilation[d]);
            size.saturating_add(2 * p.padding[d]) < MAX_EXTENT && reach < MAX_EXTENT
        };
        // Offsets within x, also of taps outside it.
        let padded = |d: usize| match d {
            2 | 3 => spec.x.shape()[d] + 2 * p.padding[d - 2],
            _ => spec.x.shape()[d],
        };
        let reach = (0..4)
            .map(|d| padded(d).saturating_mul(spec.x.strides()[d].unsigned_abs()))
            .fold(0, usize::saturating_add);
        let pixels = p.n.saturating_mul(image_pixels(task));
        task.frames.is_none()
            && Cut::all(spec, p).next().is_some()
            && p.c > 0
            && p.k > 0
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
        2 * task.problem.r * task.problem.s * packed_parts(task.spec)
    }

    fn variants(&self, dtype: DType) -> Vec<Conv2dConfiguration> {
        cut::of_type(dtype, false).map(|cut| cut.configuration()).collect()
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
        let Task { spec, problem, .. } = *task;
        let Some((cut, _)) = Cut::choose(task) else {
            return Err(Error::unsupported(
                format!("conv2d with {}", task.configuration),
                "implicit_gemm has block (64, 128, of halves 256) and parts (1, 2, 4, 8)",
            ));
        };
        let aligned = product(spec, problem, cut, true);
        let pack_filter = filter_kernel(spec.x.dtype, cut.block);
        let [aligned, pack_filter] = match cut.half {
            true => {
                let copy = copy_kernel(spec.x.dtype, 1);
                gpu.kernels([&aligned, &pack_filter, &copy])
                    .map(|[aligned, filter, _]| [aligned, filter])
            }
            false => gpu.kernels([&aligned, &pack_filter]),
        }?;
        Ok(ImplicitGemm {
            gpu,
            spec: spec.clone(),
            problem: *problem,
            cut,
            image_pixels: image_pixels(task),
            input: cut
                .half
                .then(|| Input::new(gpu, spec, problem, most_images(spec, None)))
                .transpose()?,
            filter_group,
            pack_filter,
            aligned,
            unaligned: TryOnceLock::default(),
        })
    }

    fn filter_bytes(&self) -> usize {
        let parts = if self.cut.half { 1 } else { 2 };
        let halves = parts * STEP * self.cut.block * DType::F16.size();
        self.cut.k_blocks(&self.problem) * self.cut.steps(&self.problem) * halves
    }

    /// True if the layout of x lets f16/bf16 kernels read it where it lies. Its address has to be aligned, too.
    fn copies_nothing(&self, input: &Input) -> bool {
        input.in_place && self.problem.c.is_multiple_of(self.cut.vector())
    }

    /// # Safety
    /// As [`Prepared::run`], for these images.
    unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: &'static Kernel,
        packed: *const u8,
        operands: Operands,
        x: Images,
    ) -> Result<()> {
        let (p, unit) = (&self.problem, self.cut.unit(&self.problem));
        let k_blocks = self.cut.k_blocks(p);
        let pixels = x.n * self.image_pixels;
        let tiles = pixels.div_ceil(self.cut.pixels) * k_blocks;
        let map = if x.maps { self.map(operands.x, &x)? } else { TensorMap::NONE };
        let shape = ConvShape::new(&self.spec, p, [&self.spec.x, &self.spec.y], &operands);
        let params = Params {
            base: ConvShape { x_strides: x.strides, ..shape },
            map,
            filter: packed,
            filter_inverse: packed.wrapping_add(self.filter_bytes()),
            pixels: pixels as i32,
            r: p.r as i32,
            group_c: p.c_group() as i32,
            unit_k: unit.k as i32,
            steps: self.cut.steps(p) as i32,
            tiles: tiles as i32,
            image_pixels: Divisor::new(self.image_pixels.max(1)),
            ow_by: Divisor::new(p.ow.max(1)),
            k_blocks: Divisor::new(k_blocks),
            unit_blocks: Divisor::new(unit.blocks),
            group_k: Divisor::new(p.k_group()),
            c: Divisor::new(self.cut.term_channels(p)),
            s: Divisor::new(p.s),
        };
        let blocks = self.cut.launched(self.gpu.info.multiprocessors, tiles);
        let launch = Launch::line(blocks, threads(x.maps));
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, launch, &params) }
    }

    /// The copy engine's description of x.
    fn map(&self, address: *const u8, x: &Images) -> Result<TensorMap> {
        let p = &self.problem;
        let [first, last] = corners(p).map(|corner| corner.map(|at| at as i32));
        let pixels = TensorPixels {
            dtype: self.spec.x.dtype,
            address,
            dims: [p.c, p.w, p.h, x.n],
            // That of a dimension of one element is 0 here.
            strides: [x.strides[3], x.strides[2], x.strides[0]].map(|s| (s as usize).max(p.c)),
            first,
            last,
            step: [p.stride[1] as u32, p.stride[0] as u32],
            pixels: self.cut.pixels,
        };
        TensorMap::of_pixels(self.gpu, &pixels)
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
        let products = if self.cut.half { 1 } else { 3 };
        PackedForm::new("implicit_gemm", self.spec.x.dtype, products, self.cut.block)
    }

    fn scratch_bytes(&self) -> usize {
        self.input.as_ref().map_or(0, Input::copy_bytes)
    }

    fn scratch_bytes_for(&self, x: *const u8, _initial: Option<*const u8>) -> usize {
        let is_copied = |input: &&Input| !(self.copies_nothing(input) && is_aligned(x));
        self.input.as_ref().filter(is_copied).map_or(0, Input::copy_bytes)
    }

    /// The tolerance. f16/bf16: tensor cores truncate each addition. f32: both operands carry 22 bits, and the product
    /// of their low parts is left out. Then there are the accumulations of a step, which truncate, and the sums of
    /// steps and parts.
    fn tolerance(&self) -> f64 {
        if self.cut.half {
            return (2 * self.problem.taps() + 2) as f64 * DType::F32.unit_roundoff();
        }
        let accumulations = 2 * 3 * STEP / 16;
        let sums = accumulations + self.cut.steps(&self.problem) + self.cut.parts + 2;
        4.0 * split::rounding() + sums as f64 * DType::F32.unit_roundoff()
    }

    fn explain(&self) -> String {
        let Cut { half, pixels, block, parts, .. } = self.cut;
        let gathered = match (&self.input, gather(&self.spec, &self.problem, self.cut, true)) {
            (Some(input), _) if !self.copies_nothing(input) => "a copy in channels-last order",
            (_, Gather::Any) => "elements",
            (_, Gather::Pixels) => "vectors of pixels",
            (_, Gather::Channels | Gather::Map) => "vectors of channels",
        };
        let products = if half { "one product" } else { "three products" };
        format!(
            "{products} of halves, {pixels} pixels x {block} channels of a block, sums in {parts} parts, {gathered} gathered"
        )
    }

    unsafe fn pack(&self, stream: &Stream, w: *const u8, to: PackTo) -> Result<()> {
        let (p, unit) = (&self.problem, self.cut.unit(&self.problem));
        let params = FilterParams {
            w,
            packed: to.memory,
            inverse: to.memory.wrapping_add(self.filter_bytes()),
            strides: strides(&self.spec.w),
            seen: Seen::behind(to, self.packed_bytes()).in_order_of(&self.spec.w),
            w_group: self.filter_group as i64,
            unit_k: unit.k as i32,
            terms: (self.cut.term_channels(p) * p.r * p.s) as i32,
            steps: self.cut.steps(p) as i32,
            unit_blocks: Divisor::new(unit.blocks),
            group_k: Divisor::new(p.k_group()),
            c: Divisor::new(self.cut.term_channels(p)),
            s: Divisor::new(p.s),
            group_c: p.c_group() as i32,
            dense: dense_weights(&self.spec.w, p) as i32,
        };
        let channels = self.cut.k_blocks(p) * self.cut.block;
        let launch = Launch::line(channels, 256);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.pack_filter.launch(stream, launch, &params) }
    }

    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()> {
        let out_aligned = operands.is_out_aligned(16);
        let strides_of_x = strides(&self.spec.x);
        let n = self.problem.n;
        let Some(input) = &self.input else {
            let kernel = self.kernel(is_aligned(operands.x) && out_aligned)?;
            let x = Images { n, strides: strides_of_x, maps: false };
            // SAFETY: the caller's promise.
            return unsafe { self.launch(stream, kernel, packed, operands, x) };
        };
        let maps = self.cut.maps && out_aligned;
        let kernel = self.kernel(out_aligned)?;
        if self.copies_nothing(input) && is_aligned(operands.x) {
            let x = Images { n, strides: strides_of_x, maps };
            // SAFETY: the caller's promise.
            return unsafe { self.launch(stream, kernel, packed, operands, x) };
        }
        let p = &self.problem;
        let [c, row] = [input.channels(), input.channels() * p.w].map(|stride| stride as i64);
        let images = input.copied_images();
        for first in (0..n).step_by(images) {
            let n = images.min(n - first);
            let piece = operands.after_images(&self.spec, first);
            let copied = Operands { x: piece.scratch, ..piece };
            // SAFETY: the caller's promise; `n` images fit the copy.
            unsafe {
                if p.h * p.w > 0 {
                    input.copy(stream, piece.x, n, piece.scratch, std::ptr::null_mut())?;
                }
                let x = Images { n, strides: [row * p.h as i64, 1, row, c], maps };
                self.launch(stream, kernel, packed, copied, x)?;
            }
        }
        Ok(())
    }
}

/// Images that a launch reads.
struct Images {
    n: usize,
    strides: [i64; 4],
    /// Their kernel takes a map of them.
    maps: bool,
}

/// The number of weights of an output channel if they are contiguous, in any order; otherwise 0.
fn dense_weights(w: &TensorDesc, p: &Problem) -> usize {
    let (shape, strides) = ([p.c_group(), p.r, p.s], &w.strides()[1..]);
    let mut order = [0, 1, 2];
    order.sort_by_key(|&d| strides[d]);
    let mut count = 1;
    for d in order {
        if shape[d] > 1 && strides[d] != count as isize {
            return 0;
        }
        count *= shape[d];
    }
    count
}

fn filter_kernel(dtype: DType, block: usize) -> KernelSpec {
    let filter = kernel(&FILTER, "implicit_gemm_filter", dtype)
        .define("BLOCK_K", block)
        .params::<FilterParams>();
    match dtype {
        DType::F32 => filter
            .define("FILTER_EXPONENT", FILTER_EXPONENT)
            .define("SHRINKAGE", format!("{:?}f", SHRINKAGE as f32)),
        DType::F16 | DType::BF16 | not_computed!() => filter,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::Conv2dParams;
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
        let types = [DType::F32, DType::F16, DType::BF16];
        let mut kernels: Vec<_> = types.map(|dtype| filter_kernel(dtype, 64)).into();
        for dtype in [DType::F32, DType::F16] {
            for (order, taps, padding) in
                [(NCHW, 3, 1), (NCHW, 1, 0), (NHWC, 3, 1), (NHWC, 1, 0), (NCHW, 3, 0)]
            {
                let (mut spec, problem) =
                    spec(&[2, 64, 8, 8], &order, &[136, 64, taps, taps], padding);
                for desc in [&mut spec.x, &mut spec.w, &mut spec.y] {
                    desc.dtype = dtype;
                }
                for cut in Cut::all(&spec, &problem).filter(|cut| [1, 8].contains(&cut.parts)) {
                    let residual = spec.clone().with_residual(true);
                    kernels.extend([&spec, &residual].map(|s| product(s, &problem, cut, true)));
                }
            }
        }
        crate::gpu::compile_tests::check_compiles(&kernels);
    }
}
