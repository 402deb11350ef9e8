//! The method of [`Conv2dAlgorithm::Im2colGemm`] for filters with few taps (c * r * s <= 48). The filter stays in
//! registers, and f32 too is multiplied on tensor cores or AMD's matrix cores (`few_taps.cu`).

use super::general::IM2COL_GEMM;
use super::method::{About, Method};
use super::prepared::{Operands, PackTo, PackedForm, Prepared};
use super::shape::ConvShape;
use super::task::Task;
use super::{ALIGNMENT, Divisor, kernel, source, strides, with_epilogue};
use crate::conv2d::{Conv2dAlgorithm, Conv2dSpec, Problem};
use crate::dtype::not_computed;
use crate::gpu::{Feature, Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::{Accuracy, DType, Error, Result, TensorDesc};

static FEW_TAPS: Source = source!("few_taps.cu", "few_taps.cuh");
static FILTER: Source = source!("few_taps_filter.cu");

/// The largest number of taps; more do not fit in the registers.
const MAX_TAPS: usize = 48;
/// Taps of a filter are less than this apart, in rows or columns.
const MAX_REACH: usize = 1 << 15;
/// The number of pixels of a warp or wavefront, of threads of a block, and of blocks given to a multiprocessor, which
/// holds two or three at a time.
const GROUP: usize = 32;
const THREADS: usize = 128;
const BLOCKS: usize = 6;

#[derive(Debug)]
pub(crate) struct FewTaps {
    gpu: &'static Gpu,
    cores: Cores,
    spec: Conv2dSpec,
    problem: Problem,
    pack_filter: &'static Kernel,
    /// Kernels for y and a residual at addresses aligned to 16 bytes, and at any.
    kernels: [&'static Kernel; 2],
}

params! {
    struct Params: ConvShape {
        filter: *const u8,
        pixels: i32,
        groups: i32,
        image_groups: Divisor,
        ow_by: Divisor,
        filter_area: Divisor,
        filter_width: Divisor,
    }
}

params! {
    struct FilterParams {
        w: *const u8,
        out: *mut u8,
        strides as [w_k, w_c, w_r, w_s]: [i64; 4],
        k: i32,
        words: i32,
        filter_area: Divisor,
        filter_width: Divisor,
    }
}

/// The hardware that multiplies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cores {
    /// Tensor cores, which round f32 to TF32.
    Nvidia,
    /// Matrix cores, which do not.
    Amd,
}

impl Cores {
    fn of(gpu: &Gpu) -> Self {
        if gpu.has(Feature::MatrixProducts) { Cores::Nvidia } else { Cores::Amd }
    }

    fn needed(self, dtype: DType) -> Feature {
        match self {
            Cores::Nvidia => Feature::MatrixProducts,
            Cores::Amd if dtype == DType::F32 => Feature::WavefrontFloatProducts,
            Cores::Amd => Feature::WavefrontProducts,
        }
    }

    /// The number of low-precision products that make up one product of the operands.
    fn products(self, spec: &Conv2dSpec) -> usize {
        let split = self == Cores::Nvidia && spec.x.dtype == DType::F32;
        if split && spec.accuracy <= Accuracy::Fp32 { 3 } else { 1 }
    }

    /// Taps of one product.
    fn depth(self, dtype: DType) -> usize {
        if self == Cores::Nvidia && dtype == DType::F32 { 8 } else { 16 }
    }

    /// The number of tiles of 16 output channels that a warp computes. With more tiles it gathers the same input less
    /// often. Registers limit them.
    fn row_tiles(self, spec: &Conv2dSpec, p: &Problem) -> usize {
        if self == Cores::Amd || spec.x.dtype == DType::F32 || p.k <= 32 { 2 } else { 4 }
    }

    /// The maximum numbers of channels and of pixels that a thread stores together.
    fn neighbours(self, row_tiles: usize) -> [usize; 2] {
        match self {
            Cores::Nvidia => [2 * row_tiles, 8],
            // A thread has at least 8 channels.
            Cores::Amd => [8, 2],
        }
    }
}

/// The outputs that a thread stores together, as in the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Store {
    Any = 0,
    Channels = 1,
    Pixels = 2,
}

/// [`Conv2dAlgorithm::Im2colGemm`] by [`FewTaps`].
pub(super) struct FewTapsMethod;

impl Method for FewTapsMethod {
    fn about(&self) -> &'static About {
        &About {
            algorithms: &[Conv2dAlgorithm::Im2colGemm],
            domain: "computes few taps in one group",
            kernels: &[
                "few_taps.cu conv2d_few_taps_f32 PRODUCTS=3 STORE={0,1,2} cuda",
                "few_taps.cu conv2d_few_taps_f32 PRODUCTS=1 STORE={0,1,2} cuda wavefronts_f32",
                "few_taps.cu conv2d_few_taps_{f16,bf16} PRODUCTS=1 STORE={0,1,2} ROW_TILES=2 cuda wavefronts",
                "few_taps.cu conv2d_few_taps_{f16,bf16} PRODUCTS=1 STORE={0,1,2} ROW_TILES=4 cuda",
                "few_taps_filter.cu conv2d_few_taps_filter_f32 PRODUCTS=3 cuda",
                "few_taps_filter.cu conv2d_few_taps_filter_f32 PRODUCTS=1 cuda wavefronts_f32",
                "few_taps_filter.cu conv2d_few_taps_filter_{f16,bf16} PRODUCTS=1 cuda wavefronts",
            ],
            parameters: &[],
        }
    }

    fn computes(&self, task: &Task<'_>) -> bool {
        let Task { spec, problem: p, .. } = task;
        let reach = |d: usize, taps: usize| (taps - 1).checked_mul(p.dilation[d]);
        let near = |d, taps| reach(d, taps).is_some_and(|r| r < MAX_REACH);
        let extent: usize = spec.x.shape()[1..]
            .iter()
            .zip(&spec.x.strides()[1..])
            .map(|(&size, stride)| size.saturating_sub(1).saturating_mul(stride.unsigned_abs()))
            .fold(0, usize::saturating_add);
        p.groups == 1
            && task.frames.is_none()
            && (1..=MAX_TAPS).contains(&p.taps())
            && near(0, p.r)
            && near(1, p.s)
            && extent < 1 << 31
            && (p.n * (p.oh * p.ow).div_ceil(GROUP)) < 1 << 30
    }

    fn runs_on(&self, gpu: &Gpu, task: &Task<'_>) -> Result<()> {
        let (spec, cores) = (task.spec, Cores::of(gpu));
        let exact = spec.x.dtype != DType::F32 || cores == Cores::Amd;
        if gpu.has(cores.needed(spec.x.dtype)) && (exact || spec.accuracy >= Accuracy::Fp32) {
            return Ok(());
        }
        Err(Error::unsupported(
            format!("few taps in registers on {}", gpu.device()),
            "it needs tensor or matrix cores; those of NVIDIA split f32, which Exact forbids",
        ))
    }

    /// True if there are at least 8 output channels.
    fn leads(&self, task: &Task<'_>) -> bool {
        task.problem.k >= 8
    }

    /// The time of the general product, because the two are not compared by time.
    fn micros(&self, task: &Task<'_>) -> f64 {
        IM2COL_GEMM.micros(task)
    }

    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(FewTaps::new(gpu, task.spec, task.problem)?))
    }
}

impl FewTaps {
    fn new(gpu: &'static Gpu, spec: &Conv2dSpec, problem: &Problem) -> Result<Self> {
        let cores = Cores::of(gpu);
        let product = |address| product(cores, spec, problem, address);
        let [pack_filter, aligned, unaligned] = gpu.kernels([
            &filter_kernel(cores, spec, problem),
            &product(16),
            &product(spec.y.dtype.size()),
        ])?;
        Ok(FewTaps {
            gpu,
            cores,
            spec: spec.clone(),
            problem: *problem,
            pack_filter,
            kernels: [aligned, unaligned],
        })
    }

    fn filter_words(&self) -> usize {
        let dtype = self.spec.x.dtype;
        let row_tiles = self.cores.row_tiles(&self.spec, &self.problem);
        let channels = self.problem.k.next_multiple_of(16 * row_tiles);
        let taps = self.problem.taps().next_multiple_of(self.cores.depth(dtype));
        let parts = if self.cores.products(&self.spec) == 1 { 1 } else { 2 };
        channels * taps * parts * dtype.size() / 4
    }
}

impl Prepared for FewTaps {
    fn packed_bytes(&self) -> usize {
        (self.filter_words() * 4).next_multiple_of(ALIGNMENT)
    }

    fn packed_form(&self) -> PackedForm {
        PackedForm::new("few_taps", self.spec.w.dtype, self.cores.products(&self.spec), 0)
    }

    /// For f16/bf16, twice a rounding for each addition, because tensor cores truncate. Two parts of f32 carry 22 bits,
    /// one part 11.
    fn tolerance(&self) -> f64 {
        let unit = |dtype: DType| dtype.unit_roundoff();
        let products = self.cores.products(&self.spec);
        let sums = (2 * self.problem.taps() * products + 2) as f64;
        let operands = match (self.spec.x.dtype, products) {
            (DType::F32, _) if self.cores == Cores::Amd => 0.0,
            (DType::F32, 1) => 2.0 * unit(DType::F16),
            (DType::F32, _) => 4.0 * unit(DType::F16) * unit(DType::F16),
            (DType::F16 | DType::BF16 | not_computed!(), _) => 0.0,
        };
        operands + sums * unit(DType::F32)
    }

    fn explain(&self) -> String {
        "filter in registers, tensor or matrix cores".into()
    }

    unsafe fn pack(&self, stream: &Stream, w: *const u8, to: PackTo) -> Result<()> {
        let words = self.filter_words();
        let params = FilterParams {
            w,
            out: to.memory,
            strides: strides(&self.spec.w),
            k: self.problem.k as i32,
            words: words as i32,
            filter_area: Divisor::new(self.problem.r * self.problem.s),
            filter_width: Divisor::new(self.problem.s),
        };
        let launch = Launch::line(words.div_ceil(256), 256);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.pack_filter.launch(stream, launch, &params) }
    }

    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()> {
        let p = &self.problem;
        let pixels = p.oh * p.ow;
        let groups = p.n * pixels.div_ceil(GROUP);
        let params = Params {
            base: ConvShape::new(&self.spec, p, [&self.spec.x, &self.spec.y], &operands),
            filter: packed,
            pixels: pixels as i32,
            groups: groups as i32,
            image_groups: Divisor::new(pixels.div_ceil(GROUP)),
            ow_by: Divisor::new(p.ow),
            filter_area: Divisor::new(p.r * p.s),
            filter_width: Divisor::new(p.s),
        };
        let k_blocks = p.k.div_ceil(16 * self.cores.row_tiles(&self.spec, p));
        // There are as many warps as fit, because each keeps its part of the filter.
        let resident = (self.gpu.info.multiprocessors as usize * BLOCKS).div_ceil(k_blocks.max(1));
        let blocks = groups.div_ceil(THREADS / self.gpu.info.warp as usize).min(resident);
        let grid = [blocks as u32, k_blocks as u32, 1];
        let aligned = operands.is_out_aligned(16);
        let launch = Launch { grid, block: [THREADS as u32, 1, 1] };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernels[usize::from(!aligned)].launch(stream, launch, &params) }
    }
}

/// The constants of the filter for both kernels.
fn of_filter(kernel: KernelSpec, cores: Cores, spec: &Conv2dSpec, p: &Problem) -> KernelSpec {
    kernel
        .define("TAPS", p.taps())
        .define("PRODUCTS", cores.products(spec))
        .define("ROW_TILES", cores.row_tiles(spec, p))
        .needs(cores.needed(spec.x.dtype))
}

fn filter_kernel(cores: Cores, spec: &Conv2dSpec, p: &Problem) -> KernelSpec {
    of_filter(kernel(&FILTER, "few_taps_filter", spec.w.dtype), cores, spec, p)
        .params::<FilterParams>()
}

/// The product for a y whose address is a multiple of `address` bytes.
fn product(cores: Cores, spec: &Conv2dSpec, p: &Problem, address: usize) -> KernelSpec {
    let (store, vector) = store_of(&spec.y, cores.neighbours(cores.row_tiles(spec, p)), address);
    let product = of_filter(kernel(&FEW_TAPS, "few_taps", spec.x.dtype), cores, spec, p);
    with_epilogue(product, spec)
        .params::<Params>()
        .define("PADDED", i32::from(p.padding != [0, 0]))
        .define("STORE", store as i32)
        .define("VECTOR", vector)
}

/// The stores of y: the longest vectors of its channels or pixels, of which a thread has at most `most`.
fn store_of(y: &TensorDesc, most: [usize; 2], address: usize) -> (Store, usize) {
    let (shape, s) = (y.shape(), y.strides());
    let (store, neighbours, others, most) = if s[1] == 1 && shape[1] > 1 {
        (Store::Channels, shape[1], [s[0], s[2], s[3]], most[0])
    } else if s[3] == 1 && s[2] == shape[3] as isize {
        (Store::Pixels, shape[2] * shape[3], [s[0], s[1], 0], most[1])
    } else {
        return (Store::Any, 1);
    };
    let whole = |vector: usize| {
        neighbours.is_multiple_of(vector)
            && others.iter().all(|s| s.unsigned_abs().is_multiple_of(vector))
            && address.is_multiple_of(vector * y.dtype.size())
    };
    let fits = |v: &usize| v * y.dtype.size() <= 16 && *v <= most && whole(*v);
    (store, [8, 4, 2].into_iter().find(fits).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::Conv2dParams;
    use crate::gpu::compile_tests::check_compiles_in_turn;
    use crate::{Activation, Layout};

    #[test]
    fn kernels_compile_without_spills() {
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for order in [[0, 1, 2, 3], [0, 2, 3, 1]] {
                for (c, padding, accuracy) in
                    [(3, 0, Accuracy::Fp32), (5, 1, Accuracy::Fp32), (4, 1, Accuracy::Half)]
                {
                    let x = Layout::with_order(&[2, c, 12, 14], &order).unwrap();
                    let w = TensorDesc::contiguous(dtype, &[64, c, 3, 3]).unwrap();
                    let params = Conv2dParams {
                        accuracy,
                        padding: [padding; 2],
                        activation: Activation::Silu,
                        ..Conv2dParams::default()
                    };
                    let x = TensorDesc { dtype, layout: x };
                    let spec = Conv2dSpec::new(x, w, &params).unwrap();
                    let problem = spec.problem().unwrap();
                    for cores in [Cores::Nvidia, Cores::Amd] {
                        specs.push(filter_kernel(cores, &spec, &problem));
                        specs.extend([16, 1].map(|at| product(cores, &spec, &problem, at)));
                        let residual = spec.clone().with_residual(true);
                        specs.push(product(cores, &residual, &problem, 16));
                    }
                }
            }
        }
        check_compiles_in_turn(&specs);
    }

    #[test]
    fn neighbours_are_stored_together() {
        let y = |shape: &[usize; 4], order: [usize; 4]| TensorDesc {
            dtype: DType::F16,
            layout: Layout::with_order(shape, &order).unwrap(),
        };
        let nchw = [0, 1, 2, 3];
        assert_eq!(store_of(&y(&[2, 64, 10, 8], nchw), [8, 8], 16), (Store::Pixels, 8));
        assert_eq!(store_of(&y(&[2, 64, 10, 8], nchw), [8, 2], 16), (Store::Pixels, 2));
        assert_eq!(store_of(&y(&[2, 64, 110, 110], nchw), [8, 8], 16), (Store::Pixels, 4));
        assert_eq!(store_of(&y(&[2, 64, 5, 7], nchw), [8, 8], 16), (Store::Pixels, 1));
        assert_eq!(store_of(&y(&[2, 64, 10, 8], nchw), [8, 8], 4), (Store::Pixels, 2));
        assert_eq!(store_of(&y(&[2, 64, 5, 7], [0, 2, 3, 1]), [8, 8], 16), (Store::Channels, 8));
        assert_eq!(store_of(&y(&[2, 36, 5, 7], [0, 2, 3, 1]), [4, 8], 16), (Store::Channels, 4));
    }
}
