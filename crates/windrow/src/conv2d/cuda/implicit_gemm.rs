//! Convolution in f32 as a product of matrices, gathered on the fly, on the tensor cores of compute capability 9.0
//! (`kernels/implicit_gemm.cu`).

use super::split;
use super::{
    Divisor, FilterOrder, Operands, PackedForm, Seen, bias_of, epilogue, kernel, source, strides,
};
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::{Feature, Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::{DType, Error, Result, TensorDesc};
use std::sync::OnceLock;

static PRODUCT: Source = source!("implicit_gemm.cu");
static FILTER: Source = source!("implicit_gemm_filter.cu");

/// Output pixels of a block, terms of a step.
const BLOCK_M: usize = 128;
const STEP: usize = 64;
/// Output channels of a block, and blocks of a cluster, which share the terms of a tile.
const BLOCKS: [usize; 2] = [64, 128];
const PARTS: [usize; 4] = [1, 2, 4, 8];
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
const VECTOR: usize = 4;

/// How x is gathered; the discriminant is that of the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Gather {
    Any = 0,
    Channels = 1,
    Pixels = 2,
}

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
    unaligned: OnceLock<&'static Kernel>,
}

/// How the product is cut into blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cut {
    block: usize,
    parts: usize,
}

/// Groups, with their output and input channels, and blocks that compute them.
#[derive(Clone, Copy, Debug)]
struct Unit {
    groups: usize,
    k: usize,
    c: usize,
    blocks: usize,
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
            unaligned: OnceLock::new(),
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
        if let Some(kernel) = self.unaligned.get() {
            return Ok(kernel);
        }
        let kernel = self.gpu.kernel(&product(&self.spec, &self.problem, self.cut, false))?;
        Ok(self.unaligned.get_or_init(|| kernel))
    }
}

impl Cut {
    /// What is not given by the least expected time, with that time in microseconds; `None` where no kernel has what
    /// is given.
    fn choose(
        multiprocessors: u32,
        spec: &Conv2dSpec,
        p: &Problem,
        given: &Conv2dConfiguration,
    ) -> Option<(Self, f64)> {
        let fits = |given: Option<usize>, value| given.is_none_or(|given| given == value);
        BLOCKS
            .into_iter()
            .flat_map(|block| PARTS.map(|parts| Cut { block, parts }))
            .filter(|cut| fits(given.block, cut.block) && fits(given.parts, cut.parts))
            .map(|cut| (cut, cut.micros(multiprocessors, spec, p)))
            .min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// Expected microseconds: a launch, and rounds of tiles of so many steps. Fitted to 46 layers of ResNet-50 at batch 1, 8
    /// and 64 on an H200.
    fn micros(&self, multiprocessors: u32, spec: &Conv2dSpec, p: &Problem) -> f64 {
        let (step, tile) = match (gather(spec, p, *self, true), self.block) {
            (Gather::Any, _) if spec.x.strides()[3] != 1 => (5.0, 3.0),
            (Gather::Any, 64) => (1.72, 1.2),
            (Gather::Any, _) => (1.97, 2.5),
            (Gather::Channels, 64) => (1.27, 1.4),
            (Gather::Channels, _) => (1.42, 3.0),
            (Gather::Pixels, 64) => (0.91, 1.8),
            (Gather::Pixels, _) => (1.27, 2.9),
        };
        let exchange = if self.parts > 1 { 1.8 } else { 0.0 };
        let tiles = (p.n * p.oh * p.ow).div_ceil(BLOCK_M) * self.k_blocks(p);
        let rounds = tiles as f64 / clusters(multiprocessors, self.parts) as f64;
        // Blocks that are done early go on, so that the last of many rounds need not be whole.
        let rounds = if rounds < 4.0 { rounds.ceil() } else { rounds };
        2.3 + rounds * (step * self.steps(p).div_ceil(self.parts) as f64 + tile + exchange)
    }

    fn configuration(&self) -> Conv2dConfiguration {
        Conv2dConfiguration {
            block: Some(self.block),
            parts: Some(self.parts),
            ..Conv2dConfiguration::new(Conv2dAlgorithm::ImplicitGemm)
        }
    }

    /// What blocks sum together: as many groups as fill a block, or one.
    fn unit(&self, p: &Problem) -> Unit {
        let fits =
            |groups: &usize| p.groups.is_multiple_of(*groups) && groups * p.k_group() <= self.block;
        let groups = (1..=p.groups.min(self.block)).rev().find(fits).unwrap_or(1);
        let k = groups * p.k_group();
        Unit { groups, k, c: groups * p.c_group(), blocks: k.div_ceil(self.block) }
    }

    fn k_blocks(&self, p: &Problem) -> usize {
        let unit = self.unit(p);
        p.groups / unit.groups * unit.blocks
    }

    fn steps(&self, p: &Problem) -> usize {
        (self.unit(p).c * p.r * p.s).div_ceil(STEP)
    }
}

/// Every way to cut.
pub(crate) fn configurations() -> impl Iterator<Item = Conv2dConfiguration> {
    let cuts = BLOCKS.into_iter().flat_map(|block| PARTS.map(|parts| Cut { block, parts }));
    cuts.map(|cut| cut.configuration())
}

/// True if there are kernels for these channels of a block and parts of sums, where they are given.
pub(crate) fn cuts_into(block: Option<usize>, parts: Option<usize>) -> bool {
    block.is_none_or(|b| BLOCKS.contains(&b)) && parts.is_none_or(|p| PARTS.contains(&p))
}

/// A configuration with the parameters that a plan would have.
pub(super) fn complete(
    gpu: &Gpu,
    spec: &Conv2dSpec,
    p: &Problem,
    given: &Conv2dConfiguration,
) -> Conv2dConfiguration {
    let cut = Cut::choose(gpu.info.multiprocessors, spec, p, given);
    cut.map_or(*given, |(cut, _)| cut.configuration())
}

/// Expected microseconds of a configuration, infinite for one that no kernel has.
pub(super) fn micros(
    multiprocessors: u32,
    spec: &Conv2dSpec,
    p: &Problem,
    given: &Conv2dConfiguration,
) -> f64 {
    Cut::choose(multiprocessors, spec, p, given).map_or(f64::INFINITY, |(_, micros)| micros)
}

/// Clusters of so many blocks that a device holds at a time: some of its multiprocessors are in no whole cluster.
fn clusters(multiprocessors: u32, parts: usize) -> usize {
    let whole = multiprocessors as usize / parts;
    let lost = match parts {
        1 | 2 => 0,
        _ => 2,
    };
    whole.saturating_sub(lost).max(1)
}

/// How x is gathered if its address is aligned.
fn gather(spec: &Conv2dSpec, p: &Problem, cut: Cut, aligned: bool) -> Gather {
    let s = spec.x.strides();
    let whole = |strides: &[isize]| strides.iter().all(|s| s % VECTOR as isize == 0);
    let one_tap =
        p.r * p.s == 1 && p.stride == [1, 1] && !is_padded(p) && [p.oh, p.ow] == [p.h, p.w];
    if aligned && s[1] == 1 && cut.unit(p).c.is_multiple_of(VECTOR) && whole(&[s[0], s[2], s[3]]) {
        Gather::Channels
    } else if aligned
        && one_tap
        && s[3] == 1
        && s[2] == p.w as isize
        && (p.h * p.w).is_multiple_of(VECTOR)
        && whole(&s[..2])
    {
        Gather::Pixels
    } else {
        Gather::Any
    }
}

/// Some tap lies beside the image.
fn is_padded(p: &Problem) -> bool {
    let ends = |d: usize, outputs: usize, taps: usize, size: usize| {
        let last = outputs.saturating_sub(1) * p.stride[d] + taps.saturating_sub(1) * p.dilation[d];
        p.padding[d] > 0 || last >= size
    };
    ends(0, p.oh, p.r, p.h) || ends(1, p.ow, p.s, p.w)
}

/// Vectors of channels can be stored.
fn stores_vectors(y: &TensorDesc, unit: Unit) -> bool {
    let s = y.strides();
    let whole = |s: &isize| s % VECTOR as isize == 0;
    s[1] == 1 && unit.k.is_multiple_of(VECTOR) && [s[0], s[2], s[3]].iter().all(whole)
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
    use super::*;
    use crate::conv2d::Conv2dParams;
    use crate::{Activation, Approximate, Layout};

    fn spec(x: &[usize], order: &[usize], w: &[usize], padding: usize) -> (Conv2dSpec, Problem) {
        let x = TensorDesc { dtype: DType::F32, layout: Layout::with_order(x, order).unwrap() };
        let w = TensorDesc::contiguous(DType::F32, w).unwrap();
        let activation = Activation::Gelu(Approximate::None);
        let params = Conv2dParams { padding: [padding; 2], activation, ..Default::default() };
        let spec = Conv2dSpec::new(x, w, &params).unwrap();
        let problem = spec.problem().unwrap();
        (spec, problem)
    }

    const NCHW: [usize; 4] = [0, 1, 2, 3];
    const NHWC: [usize; 4] = [0, 2, 3, 1];

    #[test]
    fn layouts_decide_how_inputs_are_gathered() {
        for (x, order, taps, padding, aligned, expected) in [
            ([2, 64, 8, 8], NHWC, 3, 1, true, Gather::Channels),
            ([2, 64, 8, 8], NHWC, 3, 1, false, Gather::Any),
            ([2, 63, 8, 8], NHWC, 3, 1, true, Gather::Any),
            ([2, 64, 8, 8], NCHW, 1, 0, true, Gather::Pixels),
            ([2, 64, 7, 7], NCHW, 1, 0, true, Gather::Any),
            ([2, 64, 8, 8], NCHW, 1, 1, true, Gather::Any),
            ([2, 64, 8, 8], NCHW, 3, 1, true, Gather::Any),
        ] {
            let (spec, problem) = spec(&x, &order, &[8, x[1], taps, taps], padding);
            let cut = Cut { block: 64, parts: 1 };
            assert_eq!(gather(&spec, &problem, cut, aligned), expected, "{x:?} {order:?} {taps}");
        }
    }

    /// They come from callers and from files.
    #[test]
    fn parameters_without_a_kernel_are_never_expected_to_win() {
        let (spec, problem) = spec(&[2, 64, 8, 8], &NCHW, &[8, 64, 3, 3], 1);
        let time = |block| {
            let base = Conv2dConfiguration::new(Conv2dAlgorithm::ImplicitGemm);
            micros(132, &spec, &problem, &Conv2dConfiguration { block: Some(block), ..base })
        };
        assert!(time(64).is_finite());
        assert_eq!(time(100), f64::INFINITY);
    }

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
