//! The method of [`Conv2dAlgorithm::ImplicitGemm`] for channels-last images in groups of 8 to 64 channels
//! (`group_products.cu`): f16, bf16 and, at accuracy `Tf32` and `Half`, f32, on every GPU with tensor cores.

mod tile;

use self::tile::{Tile, WARPS};
use super::method::{About, Method};
use super::prepared::{Operands, PackTo, PackedForm, Prepared};
use super::shape::ConvShape;
use super::task::Task;
use super::{ALIGNMENT, Divisor, kernel, source, strides, with_epilogue};
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::{Feature, Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::try_once_lock::TryOnceLock;
use crate::{Accuracy, DType, Error, Result, TensorDesc};

static PRODUCTS: Source = source!("group_products.cu", "group_products.cuh");
static FILTER: Source = source!("group_products_filter.cu", "group_products.cuh");

/// The channels of a group that the kernels multiply: multiples of 8 up to this number.
const MAX_CHANNELS: usize = 64;
const MAX_TAPS: usize = 49;

/// A convolution by this method.
#[derive(Debug)]
pub(crate) struct GroupProducts {
    gpu: &'static Gpu,
    spec: Conv2dSpec,
    problem: Problem,
    tile: Tile,
    pack_filter: &'static Kernel,
    /// The kernel for tensors at addresses aligned to 16 bytes, and the one for any.
    aligned: &'static Kernel,
    unaligned: TryOnceLock<&'static Kernel>,
}

params! {
    struct Params: ConvShape {
        filter: *const u8,
        n: i32,
        groups: i32,
        channels: Divisor,
        rows: Divisor,
        columns: Divisor,
    }
}

params! {
    struct FilterParams {
        w: *const u8,
        out: *mut u8,
        strides as [w_k, w_c, w_r, w_s]: [i64; 4],
        words: i32,
    }
}

/// [`Conv2dAlgorithm::ImplicitGemm`] by [`GroupProducts`].
pub(super) struct GroupProductsMethod;

impl Method for GroupProductsMethod {
    fn about(&self) -> &'static About {
        &About {
            algorithms: &[Conv2dAlgorithm::ImplicitGemm],
            domain: "computes channels-last groups of 8 to 64 channels in one product",
            kernels: &[
                "group_products.cu conv2d_group_products_{f32,f16,bf16} cuda",
                "group_products_filter.cu conv2d_group_products_filter_{f32,f16,bf16} cuda",
            ],
            parameters: &[],
        }
    }

    fn computes(&self, task: &Task<'_>) -> bool {
        let Task { spec, problem: p, .. } = task;
        let few =
            |channels: usize| channels.is_multiple_of(8) && (8..=MAX_CHANNELS).contains(&channels);
        let one_product = spec.x.dtype != DType::F32 || spec.accuracy >= Accuracy::Tf32;
        let last = |t: &TensorDesc| t.strides()[1] == 1;
        p.groups > 1
            && one_product
            && task.frames.is_none()
            && task.configuration == Conv2dConfiguration::new(task.algorithm())
            && few(p.c_group())
            && few(p.k_group())
            && last(&spec.x)
            && last(&spec.y)
            && (1..=MAX_TAPS).contains(&(p.r * p.s))
            // The words of a packed filter are counted in 32 bits.
            && p.k.saturating_mul(p.taps()) < 1 << 30
            && tile(task).is_some_and(|tile| tile.blocks(p) < 1 << 30)
    }

    fn runs_on(&self, gpu: &Gpu, task: &Task<'_>) -> Result<()> {
        if gpu.has(Feature::MatrixProducts) {
            return Ok(());
        }
        Err(Error::unsupported(
            format!("conv2d by {} on {}", task.algorithm(), gpu.device()),
            "it needs products on tensor cores, which compute capability 8.0 has",
        ))
    }

    fn allows(&self, task: &Task<'_>) -> bool {
        task.spec.accuracy >= Accuracy::Fp32
    }

    /// True except for 8 channels with a stride: for other layers of ResNeXt and RegNet cuDNN took 1.1 to 11 times as
    /// long on an H200, in TF32 and bf16, with one image and with 64.
    fn leads(&self, task: &Task<'_>) -> bool {
        let p = task.problem;
        self.computes(&task.by(Conv2dAlgorithm::ImplicitGemm))
            && self.allows(task)
            && p.r * p.s == 9
            && (p.stride == [1, 1] || p.c_group() > 8)
    }

    /// A launch, the terms of a sum, the bytes and the products: blocks load and multiply at different times.
    fn micros(&self, task: &Task<'_>) -> f64 {
        let Task { spec, problem: p, chip, .. } = task;
        let rates = &chip.rates.group_products;
        let pixels = p.n * (p.c * p.h * p.w + (1 + usize::from(spec.residual)) * p.k * p.oh * p.ow);
        let megabytes = 1e-6 * (pixels * spec.x.dtype.size()) as f64;
        let per_gflop = rates.gflop[usize::from(spec.x.dtype.is_half())];
        rates.launch
            + rates.term * p.taps() as f64
            + rates.megabyte * megabytes
            + per_gflop * 1e-9 * p.flops()
    }

    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>> {
        let (spec, problem) = (task.spec, task.problem);
        let Some(tile) = tile(task) else {
            return Err(Error::unsupported("a tile of this filter", "it is too large"));
        };
        let [aligned, pack_filter] =
            gpu.kernels([&product(spec, problem, tile, true), &filter_kernel(spec, problem)])?;
        Ok(Box::new(GroupProducts {
            gpu,
            spec: spec.clone(),
            problem: *problem,
            tile,
            pack_filter,
            aligned,
            unaligned: TryOnceLock::default(),
        }))
    }
}

fn tile(task: &Task<'_>) -> Option<Tile> {
    Tile::choose(task.chip.multiprocessors as usize, task.spec, task.problem)
}

impl GroupProducts {
    fn filter_words(&self) -> usize {
        let p = &self.problem;
        let depth = if self.spec.x.dtype == DType::F32 { 8 } else { 16 };
        p.k / 8 * p.r * p.s * p.c_group().div_ceil(depth) * 64
    }

    fn kernel(&self, operands: &Operands) -> Result<&'static Kernel> {
        let aligned = (operands.x as usize).is_multiple_of(16) && operands.is_out_aligned(16);
        let compile = || self.gpu.kernel(&product(&self.spec, &self.problem, self.tile, false));
        if aligned { Ok(self.aligned) } else { self.unaligned.get(compile).copied() }
    }
}

impl Prepared for GroupProducts {
    fn packed_form(&self) -> PackedForm {
        PackedForm::new("group_products", self.spec.w.dtype, 1, 0)
    }

    fn packed_bytes(&self) -> usize {
        (self.filter_words() * 4).next_multiple_of(ALIGNMENT)
    }

    /// The tolerance: tensor cores truncate each addition, and TF32 rounds both operands.
    fn tolerance(&self) -> f64 {
        let operands = match self.spec.x.dtype {
            DType::F32 => 2.0 * DType::F16.unit_roundoff(),
            _ => 0.0,
        };
        operands + (2 * self.problem.taps() + 2) as f64 * DType::F32.unit_roundoff()
    }

    fn explain(&self) -> String {
        let Tile { images, rows, columns, groups, .. } = self.tile;
        format!("{images} x {rows} x {columns} outputs of {groups} groups in a block")
    }

    unsafe fn pack(&self, stream: &Stream, w: *const u8, to: PackTo) -> Result<()> {
        let words = self.filter_words();
        let params =
            FilterParams { w, out: to.memory, strides: strides(&self.spec.w), words: words as i32 };
        let launch = Launch::line(words.div_ceil(256), 256);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.pack_filter.launch(stream, launch, &params) }
    }

    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()> {
        let p = &self.problem;
        let [channels, rows, columns, _] = self.tile.counts(p);
        let params = Params {
            base: ConvShape::new(&self.spec, p, [&self.spec.x, &self.spec.y], &operands),
            filter: packed,
            n: p.n as i32,
            groups: p.groups as i32,
            channels: Divisor::new(channels),
            rows: Divisor::new(rows),
            columns: Divisor::new(columns),
        };
        let launch = Launch::line(self.tile.blocks(p), 32 * WARPS);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel(&operands)?.launch(stream, launch, &params) }
    }
}

/// The constants of both kernels.
fn of_groups(kernel: KernelSpec, spec: &Conv2dSpec, p: &Problem) -> KernelSpec {
    let kernel = if spec.x.dtype == DType::F32 { kernel.define("TF32", 1) } else { kernel };
    kernel
        .needs(Feature::MatrixProducts)
        .define("GROUP_C", p.c_group())
        .define("GROUP_K", p.k_group())
        .define("FILTER_H", p.r)
        .define("FILTER_W", p.s)
}

fn filter_kernel(spec: &Conv2dSpec, p: &Problem) -> KernelSpec {
    of_groups(kernel(&FILTER, "group_products_filter", spec.w.dtype), spec, p)
        .params::<FilterParams>()
}

/// The product for tensors at addresses that are aligned to 16 bytes, or any.
fn product(spec: &Conv2dSpec, p: &Problem, tile: Tile, address: bool) -> KernelSpec {
    let vector = 16 / spec.x.dtype.size() as i64;
    let whole = |t: &TensorDesc| {
        let [n, _, h, w] = strides(t);
        [n, h, w].iter().all(|stride| stride % vector == 0)
    };
    let aligned = address && whole(&spec.x) && whole(&spec.y);
    // Of a multiprocessor, by registers: those of other epilogues are too many for four.
    let blocks = if spec.activation.bounds().is_some() && !spec.residual { 4 } else { 3 };
    let product = of_groups(kernel(&PRODUCTS, "group_products", spec.x.dtype), spec, p);
    with_epilogue(product, spec)
        .define("STRIDE_H", p.stride[0])
        .define("STRIDE_W", p.stride[1])
        .define("DILATION_H", p.dilation[0])
        .define("DILATION_W", p.dilation[1])
        .define("TILE_N", tile.images)
        .define("TILE_H", tile.rows)
        .define("TILE_W", tile.columns)
        .define("GROUPS", tile.groups)
        .define("COLUMNS", tile.together)
        .define("WARPS", WARPS)
        .define("BLOCKS", blocks)
        .define("ALIGNED", i32::from(aligned))
        .shared_bytes(tile.bytes as u32)
        .params::<Params>()
}

#[cfg(test)]
mod tests;
