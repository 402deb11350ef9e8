//! Convolution in f32 as a product of matrices, gathered on the fly, on the tensor cores of compute capability 9.0
//! (`kernels/implicit_gemm.cu`).

mod cut;

use self::cut::{BLOCK_M, Cut, Gather, STEP, clusters, gather, is_padded, stores_vectors};
pub(super) use self::cut::{complete, micros};
pub(crate) use self::cut::{configurations, cuts_into};
use super::split;
use super::{
    Divisor, FilterOrder, Operands, PackedForm, Seen, bias_of, epilogue, kernel, source, strides,
};
use crate::conv2d::{Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::{Feature, Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::later::Later;
use crate::{DType, Error, Result};

static PRODUCT: Source = source!("implicit_gemm.cu");
static FILTER: Source = source!("implicit_gemm_filter.cu");

/// Largest magnitudes of scaled operands are below 2^(exponent + 1): half precision holds 2^15, and pixels that come later
/// may be larger than those that set the scale.
const INPUT_EXPONENT: i32 = 8;
const FILTER_EXPONENT: i32 = 14;
/// By how much the tensor cores shrink a sum of one step, relative to it: four accumulations of the high products, each of
/// which cuts off (measured on an H200 for 64 to 4608 normal terms: 8.3e-8 to 9.6e-8).
const SHRINKAGE: f64 = 8.9e-8;
/// Rows and columns lie in half a word, with a row that stands for pixels that do not exist.
const MAX_EXTENT: usize = 1 << 14;
const CONSUMER_WARPS: usize = 8;
const ALIGNMENT: usize = 256;

/// A convolution by this algorithm.
#[derive(Debug)]
pub(crate) struct ImplicitGemm {
    gpu: &'static Gpu,
    spec: Conv2dSpec,
    problem: Problem,
    cut: Cut,
    /// Elements from the filter of a group to that of the next.
    filter_group: isize,
    pack_filter: &'static Kernel,
    /// For tensors at addresses aligned to 16 bytes, and at any.
    aligned: &'static Kernel,
    unaligned: Later<&'static Kernel>,
}

params! {
struct Params {
    x: *const u8,
    w: *const u8,
    w_inverse: *const u8,
    bias: *const u8,
    y: *mut u8,
    x_strides as [x_n, x_c, x_h, x_w]: [i64; 4],
    y_strides as [y_n, y_k, y_h, y_w]: [i64; 4],
    bias_stride: i64,
    bias_is_float: i32,
    pixels: i32,
    h: i32,
    w_in: i32,
    r: i32,
    stride as [stride_h, stride_w]: [i32; 2],
    pad as [pad_h, pad_w]: [i32; 2],
    dilation as [dilation_h, dilation_w]: [i32; 2],
    group_c: i32,
    unit_k: i32,
    steps: i32,
    tiles: i32,
    image_pixels: Divisor,
    ow: Divisor,
    k_blocks: Divisor,
    unit_blocks: Divisor,
    group_k: Divisor,
    c: Divisor,
    s: Divisor,
}
}

params! {
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
}
}

impl ImplicitGemm {
    pub(super) fn supports(gpu: &Gpu, spec: &Conv2dSpec, p: &Problem) -> bool {
        let near = |size: usize, d: usize, taps: usize| {
            let reach = taps.saturating_sub(1).saturating_mul(p.dilation[d]);
            size.saturating_add(2 * p.padding[d]) < MAX_EXTENT && reach < MAX_EXTENT
        };
        // Offsets within x, also of taps beside it.
        let padded = |d: usize| match d {
            2 | 3 => spec.x.shape()[d] + 2 * p.padding[d - 2],
            _ => spec.x.shape()[d],
        };
        let reach = (0..4)
            .map(|d| padded(d).saturating_mul(spec.x.strides()[d].unsigned_abs()))
            .fold(0, usize::saturating_add);
        let pixels = p.n.saturating_mul(p.oh).saturating_mul(p.ow);
        gpu.has(Feature::WarpgroupProducts)
            && spec.x.dtype == DType::F32
            && p.c > 0
            && p.k > 0
            && near(p.h, 0, p.r)
            && near(p.w, 1, p.s)
            && reach < 1 << 31
            && pixels < 1 << 30
            && pixels.saturating_mul(p.k) / BLOCK_M < 1 << 30
    }

    pub(super) fn new(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        configuration: &Conv2dConfiguration,
    ) -> Result<Self> {
        let filter_group = problem.k_group() as isize * spec.w.strides()[0];
        Self::with_groups(gpu, spec, problem, configuration, filter_group)
    }

    /// By a filter whose input and output channels have changed places within each group: in memory the input channels of
    /// a group follow those of the group before.
    pub(super) fn transposed(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        configuration: &Conv2dConfiguration,
    ) -> Result<Self> {
        let filter_group = problem.c_group() as isize * spec.w.strides()[1];
        Self::with_groups(gpu, spec, problem, configuration, filter_group)
    }

    fn with_groups(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        configuration: &Conv2dConfiguration,
        filter_group: isize,
    ) -> Result<Self> {
        let Some((cut, _)) = Cut::choose(gpu.info.multiprocessors, spec, problem, configuration)
        else {
            return Err(Error::unsupported(
                format!("conv2d with {configuration}"),
                "implicit_gemm has block (64, 128) and parts (1, 2, 4, 8)",
            ));
        };
        let aligned = gpu.kernel(&product(spec, problem, cut, true))?;
        Ok(ImplicitGemm {
            gpu,
            spec: spec.clone(),
            problem: *problem,
            cut,
            filter_group,
            pack_filter: gpu.kernel(&filter_kernel(cut.block))?,
            aligned,
            unaligned: Later::default(),
        })
    }

    pub(super) fn configuration(&self) -> Conv2dConfiguration {
        self.cut.configuration()
    }

    fn filter_bytes(&self) -> usize {
        let halves = 2 * STEP * self.cut.block * DType::F16.size();
        self.cut.k_blocks(&self.problem) * self.cut.steps(&self.problem) * halves
    }

    pub(super) fn packed_bytes(&self) -> usize {
        (self.filter_bytes() + self.problem.k * size_of::<f32>()).next_multiple_of(ALIGNMENT)
    }

    /// Bytes of what is kept behind a pack: see [`Seen`].
    pub(super) fn seen_bytes(&self) -> usize {
        self.cut.k_blocks(&self.problem) * self.cut.block * Seen::DIGEST
    }

    pub(super) fn packed_form(&self) -> PackedForm {
        PackedForm { dtype: DType::F32, products: 3, order: FilterOrder::Blocks(self.cut.block) }
    }

    /// Both operands carry 22 bits and the product of their low halves is left out. Then there are the accumulations of a
    /// step, which cut off, and the sums of steps and parts.
    pub(super) fn tolerance(&self) -> f64 {
        let accumulations = 2 * 3 * STEP / 16;
        let sums = accumulations + self.cut.steps(&self.problem) + self.cut.parts + 2;
        4.0 * split::rounding() + sums as f64 * DType::F32.unit_roundoff()
    }

    pub(super) fn explain(&self) -> String {
        let Cut { block, parts } = self.cut;
        let gathered = match gather(&self.spec, &self.problem, self.cut, true) {
            Gather::Any => "elements",
            Gather::Channels => "vectors of channels",
            Gather::Pixels => "vectors of pixels",
        };
        format!(
            "three products of halves, {BLOCK_M} pixels x {block} channels of a block, sums in {parts} parts, {gathered} gathered"
        )
    }

    /// # Safety
    /// As [`super::Engine::pack`].
    pub(super) unsafe fn pack(
        &self,
        stream: &Stream,
        w: *const u8,
        packed: *mut u8,
        ticket: Option<u64>,
    ) -> Result<()> {
        let (p, unit) = (&self.problem, self.cut.unit(&self.problem));
        let params = FilterParams {
            w,
            packed,
            inverse: packed.wrapping_add(self.filter_bytes()),
            strides: strides(&self.spec.w),
            seen: Seen::behind(packed, self.packed_bytes(), ticket),
            w_group: self.filter_group as i64,
            unit_k: unit.k as i32,
            terms: (unit.c * p.r * p.s) as i32,
            steps: self.cut.steps(p) as i32,
            unit_blocks: Divisor::new(unit.blocks),
            group_k: Divisor::new(p.k_group()),
            c: Divisor::new(unit.c),
            s: Divisor::new(p.s),
            group_c: p.c_group() as i32,
        };
        let channels = self.cut.k_blocks(p) * self.cut.block;
        let launch = Launch { grid: [channels as u32, 1, 1], block: [256, 1, 1] };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.pack_filter.launch(stream, launch, &params) }
    }

    /// # Safety
    /// As [`super::Engine::run`].
    pub(super) unsafe fn run(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
    ) -> Result<()> {
        let (p, unit) = (&self.problem, self.cut.unit(&self.problem));
        let (bias, bias_stride, bias_is_float) = bias_of(&self.spec, operands.bias);
        let k_blocks = self.cut.k_blocks(p);
        let tiles = (p.n * p.oh * p.ow).div_ceil(BLOCK_M) * k_blocks;
        let params = Params {
            x: operands.x,
            w: packed,
            w_inverse: packed.wrapping_add(self.filter_bytes()),
            bias,
            y: operands.y,
            x_strides: strides(&self.spec.x),
            y_strides: strides(&self.spec.y),
            bias_stride,
            bias_is_float,
            pixels: (p.n * p.oh * p.ow) as i32,
            h: p.h as i32,
            w_in: p.w as i32,
            r: p.r as i32,
            stride: p.stride.map(|v| v as i32),
            pad: p.padding.map(|v| v as i32),
            dilation: p.dilation.map(|v| v as i32),
            group_c: p.c_group() as i32,
            unit_k: unit.k as i32,
            steps: self.cut.steps(p) as i32,
            tiles: tiles as i32,
            image_pixels: Divisor::new((p.oh * p.ow).max(1)),
            ow: Divisor::new(p.ow.max(1)),
            k_blocks: Divisor::new(k_blocks),
            unit_blocks: Divisor::new(unit.blocks),
            group_k: Divisor::new(p.k_group()),
            c: Divisor::new(unit.c),
            s: Divisor::new(p.s),
        };
        let clusters = tiles.min(clusters(self.gpu.info.multiprocessors, self.cut.parts));
        let launch =
            Launch { grid: [(clusters * self.cut.parts) as u32, 1, 1], block: [384, 1, 1] };
        let addresses = operands.x as usize | operands.y as usize;
        let kernel = if addresses.is_multiple_of(16) { self.aligned } else { self.unaligned()? };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, launch, &params) }
    }

    fn unaligned(&self) -> Result<&'static Kernel> {
        let compile = || self.gpu.kernel(&product(&self.spec, &self.problem, self.cut, false));
        self.unaligned.get(compile).copied()
    }
}

/// The product for addresses aligned to 16 bytes, or any.
fn product(spec: &Conv2dSpec, p: &Problem, cut: Cut, aligned: bool) -> KernelSpec {
    let stage = STEP * (BLOCK_M * size_of::<f32>() + cut.block * 2 * DType::F16.size());
    let stages = if cut.block == 64 { 4 } else { 3 };
    // Behind the stages: rows of the tile, for each warp constants of its channels and a scale, barriers.
    let of_warps = CONSUMER_WARPS * (2 * cut.block * size_of::<f32>() + 16);
    let shared = stages * (stage + 16) + BLOCK_M * 8 + of_warps + 16;
    kernel(&PRODUCT, "implicit_gemm", DType::F32)
        .needs(Feature::WarpgroupProducts)
        .define("EPILOGUE", epilogue(spec.activation))
        .define("GATHER", gather(spec, p, cut, aligned) as i32)
        .define("PADDED", i32::from(is_padded(p)))
        .define("BLOCK_K", cut.block)
        .define("SPLIT", cut.parts)
        .define("STAGES", stages)
        .define("CHANNELS_LAST_OUT", i32::from(aligned && stores_vectors(&spec.y, cut.unit(p))))
        .define("INPUT_EXPONENT", INPUT_EXPONENT)
        .define("FILTER_EXPONENT", FILTER_EXPONENT)
        .params::<Params>()
        .shared_bytes(shared as u32)
}

fn filter_kernel(block: usize) -> KernelSpec {
    kernel(&FILTER, "implicit_gemm_filter", DType::F32)
        .define("BLOCK_K", block)
        .define("FILTER_EXPONENT", FILTER_EXPONENT)
        .define("SHRINKAGE", format!("{:?}f", SHRINKAGE as f32))
        .params::<FilterParams>()
}

#[cfg(test)]
mod tests {
    use super::cut::BLOCKS;
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
        let mut kernels = BLOCKS.map(filter_kernel).to_vec();
        for (order, taps, padding) in
            [(NCHW, 3, 1), (NCHW, 1, 0), (NHWC, 3, 1), (NHWC, 1, 0), (NCHW, 3, 0)]
        {
            let (spec, problem) = spec(&[2, 64, 8, 8], &order, &[132, 64, taps, taps], padding);
            for block in BLOCKS {
                for parts in [1, 8] {
                    kernels.push(product(&spec, &problem, Cut { block, parts }, true));
                }
            }
        }
        crate::gpu::compile_tests::check_compiles(&kernels);
    }
}
