//! Winograd F(3, 3) along rows in one kernel, for compute capability 9.0 (`kernels/winograd_fused.cu`).

use super::geometry::Geometry;
use super::{Divisor, Operands, PackedForm, bias_of, epilogue, kernel, source, strides};
use crate::conv2d::winograd::{Rational, Transforms};
use crate::conv2d::{Conv2dSpec, Problem};
use crate::cuda::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, TensorMap};
use crate::{Accuracy, DType, Error, Result};
use std::sync::OnceLock;

static FUSED: Source = source!("winograd_fused.cu");
static PACK_FILTER: Source = source!("winograd_pack_filter.cu");
static PACK_INPUT: Source = source!("pack_input.cu");

/// The points 0, 3/4, -3/4, 2 and infinity: of those tried, the least error with operands rounded to half precision.
const TRANSFORMS: Transforms = Transforms::from_points(&[
    Rational::new(0, 1),
    Rational::new(3, 4),
    Rational::new(-3, 4),
    Rational::new(2, 1),
]);
/// Without the last finite point: see `transform_pair` in the kernel.
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
/// Shared memory of a block on compute capability 9.0.
const SHARED_BYTES: usize = 227 * 1024;
const MAX_FILTER_STAGES: usize = 12;
const CONSUMER_WARPS: usize = 8;
/// Input that the copy engine cannot read is copied first, at most so much at a time.
const STAGING_BYTES: usize = 512 << 20;
const ALIGNMENT: usize = 256;

/// A convolution by this algorithm.
#[derive(Debug)]
pub(crate) struct WinogradRow {
    gpu: &'static Gpu,
    spec: Conv2dSpec,
    problem: Problem,
    /// Three products of halves for f32 class, else one.
    products: usize,
    /// The filter's rows become channels: few input channels.
    fold: bool,
    /// The layout of x lets the copy engine read it if its address is aligned.
    direct: bool,
    /// The layout of y lets whole vectors be stored if its address is aligned.
    vectors: bool,
    pack_filter: &'static Kernel,
    pack_input: &'static Kernel,
    /// Kernels for vector stores and for any y, compiled when first needed.
    fused: [OnceLock<Fused>; 2],
}

/// The fused kernel for one way of storing y.
#[derive(Clone, Copy, Debug)]
struct Fused {
    kernel: &'static Kernel,
    geometry: Geometry,
    filter_stages: usize,
    resident: bool,
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct FusedParams {
    x: TensorMap,
    u: *const u8,
    u_inverse: *const u8,
    x_max: *const u8,
    bias: *const u8,
    y: *mut u8,
    y_strides: [i64; 4],
    bias_stride: i64,
    bias_is_float: i32,
    n: i32,
    k: i32,
    oh: i32,
    ow: i32,
    pad_h: i32,
    pad_w: i32,
    steps: i32,
    image_rows: Divisor,
    strips: Divisor,
    units: i32,
    k_blocks: Divisor,
    box_rows: i32,
    stage_bytes: i32,
    u_stages: i32,
    u_resident: i32,
    paired_out: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FilterParams {
    w: *const u8,
    u: *mut u8,
    inverse: *mut u8,
    strides: [i64; 4],
    k: i32,
    c: i32,
    taps_h: i32,
    fold: i32,
    steps: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct InputParams {
    x: *const u8,
    out: *mut u8,
    x_max: *mut u8,
    strides: [i64; 4],
    n: i32,
    c: i32,
    h: i32,
    w: i32,
    c_out: i32,
    rows: i32,
    pad_h: i32,
    pixel_tiles: i32,
    channel_tiles: i32,
    w_by: Divisor,
}

impl WinogradRow {
    pub(crate) fn supports(gpu: &Gpu, problem: &Problem) -> bool {
        gpu.info.compute_capability == (9, 0) && problem.is_winograd() && problem.c > 0
    }

    pub(crate) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, problem: &Problem) -> Result<Self> {
        let dtype = spec.x.dtype;
        let split = dtype == DType::F32 && spec.accuracy <= Accuracy::Fp32;
        let products = if split { 3 } else { 1 };
        let fold = TAPS * problem.c <= STEP_C;
        let mut filter = kernel(&PACK_FILTER, "winograd_row_filter", dtype)
            .define("PRODUCTS", products)
            .define("FILTER", matrix(&TRANSFORMS.g, ALPHA, TAPS));
        if dtype == DType::F32 {
            filter = filter.define("FILTER_EXPONENT", exponent(&TRANSFORMS.g));
        }
        let channels_inner = super::super::spec::is_channels_last(&spec.x.layout);
        let input = kernel(&PACK_INPUT, "winograd_row_input", dtype)
            .define("FOLD", if fold { TAPS } else { 1 })
            .define("CHANNELS_FIRST", i32::from(!channels_inner));
        let plan = WinogradRow {
            gpu,
            spec: spec.clone(),
            problem: *problem,
            products,
            fold,
            direct: dtype != DType::F32 && !fold && copy_engine_reads(spec),
            vectors: stores_vectors(spec, problem),
            pack_filter: gpu.kernel(&filter)?,
            pack_input: gpu.kernel(&input)?,
            fused: [OnceLock::new(), OnceLock::new()],
        };
        plan.fused(plan.vectors)?;
        Ok(plan)
    }

    /// The kernel for vector stores, or for any y.
    fn fused(&self, vectors: bool) -> Result<Fused> {
        let slot = &self.fused[usize::from(vectors)];
        if let Some(fused) = slot.get() {
            return Ok(*fused);
        }
        let fused = Fused::new(self, vectors)?;
        Ok(*slot.get_or_init(|| fused))
    }

    /// Filter rows that are summed as products of their own.
    fn taps_h(&self) -> usize {
        if self.fold { 1 } else { TAPS }
    }

    /// Channels of the product.
    fn channels(&self) -> usize {
        self.problem.c * if self.fold { TAPS } else { 1 }
    }

    fn steps(&self) -> usize {
        self.channels().div_ceil(STEP_C)
    }

    fn k_blocks(&self) -> usize {
        self.problem.k.div_ceil(BLOCK_K)
    }

    fn filter_step_bytes(&self) -> usize {
        ALPHA * PART_BYTES * if self.products == 1 { 1 } else { 2 }
    }

    fn u_bytes(&self) -> usize {
        self.k_blocks() * self.steps() * self.taps_h() * self.filter_step_bytes()
    }

    pub(crate) fn packed_bytes(&self) -> usize {
        (self.u_bytes() + self.problem.k * size_of::<f32>()).next_multiple_of(ALIGNMENT)
    }

    /// Rows, and bytes of one image in the copy of the input.
    fn staged_rows(&self) -> usize {
        if self.fold { self.problem.oh } else { self.problem.h }
    }

    fn staged_channels(&self) -> usize {
        self.channels().next_multiple_of(16 / self.spec.x.dtype.size())
    }

    fn staged_image_bytes(&self) -> usize {
        (self.staged_rows() * self.problem.w * self.staged_channels() * self.spec.x.dtype.size())
            .next_multiple_of(ALIGNMENT)
    }

    /// Images that are copied at a time. Where the layout allows reading x itself, only an unaligned
    /// address needs the copy.
    fn staged_images(&self) -> usize {
        if self.direct {
            return 1;
        }
        (STAGING_BYTES / self.staged_image_bytes().max(1)).clamp(1, self.problem.n.max(1))
    }

    fn x_max_bytes(&self) -> usize {
        if self.spec.x.dtype == DType::F32 {
            (self.problem.n * size_of::<u32>()).next_multiple_of(ALIGNMENT)
        } else {
            0
        }
    }

    pub(crate) fn scratch_bytes(&self) -> usize {
        self.x_max_bytes() + self.staged_images() * self.staged_image_bytes()
    }

    pub(crate) fn packed_form(&self) -> PackedForm {
        PackedForm { dtype: self.spec.x.dtype, products: self.products }
    }

    /// An operand is rounded to the half type up to three times (twice in the input transform, once
    /// in the filter's), and the transforms may grow what they sum by about 4. Split operands carry
    /// 22 bits; there the tensor cores' truncated sums count, one for each product of 16 channels.
    pub(crate) fn tolerance(&self) -> f64 {
        const GROWTH: f64 = 4.0;
        let unit = |dtype: DType| dtype.unit_roundoff();
        let sums = self.steps() * self.taps_h() * self.products;
        let operands = match self.spec.x.dtype {
            DType::F32 if self.products == 3 => unit(DType::F16) * unit(DType::F16),
            DType::BF16 => 3.0 * unit(DType::BF16),
            _ => 3.0 * unit(DType::F16),
        };
        GROWTH * (operands + 2.0 * sums as f64 * unit(DType::F32))
    }

    pub(crate) fn explain(&self) -> String {
        let Some(fused) = self.fused[usize::from(self.vectors)].get() else {
            return String::new();
        };
        let g = fused.geometry;
        format!(
            "F(3,3) along rows, {} product{} of half precision, strips of {} columns, {:.0} % of the tiles in use, filter {}, input {}",
            self.products,
            if self.products == 1 { "" } else { "s" },
            g.pairs_x * super::geometry::PAIR_COLUMNS,
            100.0 * g.efficiency,
            if fused.resident { "resident" } else { "streamed" },
            if self.direct { "read in place" } else { "copied to channels-last" }
        )
    }

    /// # Safety
    /// As [`super::Engine::pack`].
    pub(crate) unsafe fn pack(&self, stream: &Stream, w: *const u8, packed: *mut u8) -> Result<()> {
        let params = FilterParams {
            w,
            u: packed,
            inverse: packed.wrapping_add(self.u_bytes()),
            strides: strides(&self.spec.w),
            k: self.problem.k as i32,
            c: self.problem.c as i32,
            taps_h: self.taps_h() as i32,
            fold: if self.fold { TAPS as i32 } else { 1 },
            steps: self.steps() as i32,
        };
        let launch =
            Launch { grid: [(self.k_blocks() * BLOCK_K) as u32, 1, 1], block: [256, 1, 1] };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.pack_filter.launch(stream, launch, &params) }
    }

    /// # Safety
    /// As [`super::Engine::run`].
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
        scratch: *mut u8,
    ) -> Result<()> {
        let p = &self.problem;
        let size = self.spec.x.dtype.size();
        let (x_max, staged) = (scratch, scratch.wrapping_add(self.x_max_bytes()));
        if self.x_max_bytes() > 0 {
            // SAFETY: part of the scratch memory.
            unsafe { stream.zero(x_max, self.x_max_bytes())? };
        }
        let in_place = self.direct && (operands.x as usize).is_multiple_of(16);
        let fused = self.fused(self.vectors && (operands.y as usize).is_multiple_of(16))?;
        // Products of sizes that the kernel counts in 32 bits stay below 2^30.
        let per_image = fused.geometry.units(1, p.ow) * self.k_blocks().max(super::geometry::PAIRS);
        let most = ((1 << 30) / per_image.max(1)).max(1);
        let images = if in_place { p.n } else { self.staged_images() }.min(most);
        for first in (0..p.n).step_by(images) {
            let n = images.min(p.n - first);
            let byte_offset = |stride: isize| first as isize * stride * size as isize;
            let x = operands.x.wrapping_offset(byte_offset(self.spec.x.strides()[0]));
            let y = operands.y.wrapping_offset(byte_offset(self.spec.y.strides()[0]));
            let x_max = x_max.wrapping_add(first * size_of::<u32>());
            let map = if in_place {
                fused.map_of_x(self, x, n)?
            } else {
                // SAFETY: the caller's promise; `n` images fit the copy.
                unsafe { self.stage(stream, x, n, staged, x_max)? };
                fused.map_of_copy(self, staged, n)?
            };
            // SAFETY: as above.
            unsafe { fused.launch(self, stream, map, packed, operands.bias, x_max, y, n)? };
        }
        Ok(())
    }

    /// Copies `n` images to channels-last order.
    ///
    /// # Safety
    /// `x` must be images of the spec's layout, `out` memory for their copy.
    unsafe fn stage(
        &self,
        stream: &Stream,
        x: *const u8,
        n: usize,
        out: *mut u8,
        x_max: *mut u8,
    ) -> Result<()> {
        let p = &self.problem;
        let pixel_tiles = (self.staged_rows() * p.w).div_ceil(64);
        let channel_tiles = self.staged_channels().div_ceil(32);
        let params = InputParams {
            x,
            out,
            x_max,
            strides: strides(&self.spec.x),
            n: n as i32,
            c: p.c as i32,
            h: p.h as i32,
            w: p.w as i32,
            c_out: self.staged_channels() as i32,
            rows: self.staged_rows() as i32,
            pad_h: if self.fold { p.padding[0] as i32 } else { 0 },
            pixel_tiles: pixel_tiles as i32,
            channel_tiles: channel_tiles as i32,
            w_by: Divisor::new(p.w),
        };
        let blocks = (n * pixel_tiles * channel_tiles) as u32;
        let launch = Launch { grid: [blocks, 1, 1], block: [256, 1, 1] };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.pack_input.launch(stream, launch, &params) }
    }
}

impl Fused {
    fn new(plan: &WinogradRow, vectors: bool) -> Result<Self> {
        let p = &plan.problem;
        let dtype = plan.spec.x.dtype;
        let geometry = Geometry::choose(p.n.max(1), p.oh, p.ow, plan.taps_h(), !vectors)
            .ok_or_else(|| Error::unsupported("winograd_row", "no tiling fits shared memory"))?;
        // As the kernel lays it out: input stages, filter stages, barriers, constants, staging.
        let per_warp = 2 * BLOCK_K * 4 + if vectors { 0 } else { 8 * 52 * 4 };
        let fixed = |input_stages| {
            2 * input_stages * (geometry.stage_bytes + 16) + CONSUMER_WARPS * per_warp + 16
        };
        let per_stage = plan.filter_step_bytes() + 16;
        let room = |input_stages| (SHARED_BYTES - fixed(input_stages)) / per_stage;
        let all = plan.steps() * plan.taps_h();
        // A filter that stays is worth more than a third stage of input.
        let input_stages =
            if dtype == DType::F32 || (all > room(3) && all <= room(2)) { 2 } else { 3 };
        let resident = all <= room(input_stages);
        let filter_stages = if resident { all } else { room(input_stages).min(MAX_FILTER_STAGES) };
        let shared = fixed(input_stages) + filter_stages * per_stage;
        let spec =
            fused_kernel(dtype, plan.products, plan.taps_h(), vectors, &geometry, input_stages)
                .define("EPILOGUE", epilogue(plan.spec.activation))
                .shared_bytes(shared as u32);
        let kernel = plan.gpu.kernel(&spec)?;
        Ok(Fused { kernel, geometry, filter_stages, resident })
    }

    fn map_of_x(&self, plan: &WinogradRow, x: *const u8, n: usize) -> Result<TensorMap> {
        let p = &plan.problem;
        let s = plan.spec.x.strides();
        self.map(plan, x, [p.c, p.w, p.h, n], [s[3], s[2], s[0]].map(|s| s as usize))
    }

    fn map_of_copy(&self, plan: &WinogradRow, copy: *const u8, n: usize) -> Result<TensorMap> {
        let (c, w, rows) = (plan.staged_channels(), plan.problem.w, plan.staged_rows());
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
        TensorMap::new(plan.gpu, dtype, at, dims, strides, boxes)
    }

    /// # Safety
    /// As [`WinogradRow::run`], for `n` images.
    #[expect(clippy::too_many_arguments, reason = "one launch, called once")]
    unsafe fn launch(
        &self,
        plan: &WinogradRow,
        stream: &Stream,
        x: TensorMap,
        packed: *const u8,
        bias: Option<*const u8>,
        x_max: *const u8,
        y: *mut u8,
        n: usize,
    ) -> Result<()> {
        let (p, g) = (&plan.problem, &self.geometry);
        let units = g.units(n, p.ow);
        let (bias, bias_stride, bias_is_float) = bias_of(&plan.spec, bias);
        let y_strides = strides(&plan.spec.y);
        let size = plan.spec.x.dtype.size();
        let even = [y_strides[0], y_strides[1], y_strides[2]].iter().all(|s| s % 2 == 0);
        let params = FusedParams {
            x,
            u: packed,
            u_inverse: if size == 4 {
                packed.wrapping_add(plan.u_bytes())
            } else {
                std::ptr::null()
            },
            x_max,
            bias,
            y,
            y_strides,
            bias_stride,
            bias_is_float,
            n: n as i32,
            k: p.k as i32,
            oh: p.oh as i32,
            ow: p.ow as i32,
            // Padding above is in the folded copy already.
            pad_h: if plan.fold { 0 } else { p.padding[0] as i32 },
            pad_w: p.padding[1] as i32,
            steps: plan.steps() as i32,
            image_rows: Divisor::new(g.image_rows),
            strips: Divisor::new(g.strips(p.ow)),
            units: units as i32,
            k_blocks: Divisor::new(plan.k_blocks()),
            box_rows: g.box_rows as i32,
            stage_bytes: g.stage_bytes as i32,
            u_stages: self.filter_stages as i32,
            u_resident: i32::from(self.resident),
            paired_out: i32::from(
                y_strides[3] == 1 && even && (y as usize).is_multiple_of(2 * size),
            ),
        };
        let items = units.div_ceil(2) * plan.k_blocks();
        let mut blocks = items.min(plan.gpu.info.multiprocessors as usize);
        if self.resident && blocks < items {
            // A block keeps its output channels: its items are a whole number of rounds apart.
            blocks = (blocks / plan.k_blocks()).max(1) * plan.k_blocks();
        }
        let launch = Launch { grid: [blocks as u32, 1, 1], block: [384, 1, 1] };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel.launch(stream, launch, &params) }
    }
}

/// The fused kernel without its epilogue and shared memory.
fn fused_kernel(
    dtype: DType,
    products: usize,
    taps_h: usize,
    vectors: bool,
    g: &Geometry,
    input_stages: usize,
) -> KernelSpec {
    let bits: Vec<_> = g.pair_bits.iter().map(usize::to_string).collect();
    let mut spec = kernel(&FUSED, "winograd_row", dtype)
        .only_for("sm_90a")
        .define("PRODUCTS", products)
        .define("TAPS_H", taps_h)
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
        spec = spec.define("INPUT_EXPONENT", exponent(&TRANSFORMS.bt));
    }
    spec
}

fn float(x: Rational) -> String {
    format!("{:?}f", x.to_f64() as f32)
}

fn row(values: &[Rational], columns: usize) -> String {
    let values: Vec<_> = values[..columns].iter().map(|&x| float(x)).collect();
    format!("{{{}}}", values.join(","))
}

/// The first rows and columns of a transform, as an array of C.
pub(super) fn matrix<const N: usize>(
    rows: &[[Rational; N]],
    count: usize,
    columns: usize,
) -> String {
    let rows: Vec<_> = rows[..count].iter().map(|r| row(r, columns)).collect();
    format!("{{{}}}", rows.join(","))
}

/// The exponent to which operands are scaled, so that their transform by this matrix stays finite in half precision.
fn exponent<const N: usize>(rows: &[[Rational; N]]) -> i32 {
    let growth =
        rows.iter().map(|r| r.iter().map(|x| x.to_f64().abs()).sum::<f64>()).fold(0.0, f64::max);
    // Numbers below 2^(exponent + 1) grow by at most `growth`.
    (65_000.0 / growth).log2().floor() as i32 - 1
}

/// True if the copy engine can read x in place: channels side by side, all other strides whole vectors.
fn copy_engine_reads(spec: &Conv2dSpec) -> bool {
    let s = spec.x.strides();
    let shape = spec.x.shape();
    let vector = 16 / spec.x.dtype.size();
    let whole =
        |stride: isize| stride > 0 && (stride as usize).is_multiple_of(vector) && stride < 1 << 38;
    (s[1] == 1 || shape[1] == 1) && [s[0], s[2], s[3]].into_iter().all(whole)
}

/// True if 8 neighbouring channels of y are whole 16-byte vectors.
fn stores_vectors(spec: &Conv2dSpec, problem: &Problem) -> bool {
    let s = spec.y.strides();
    let vector = 16 / spec.y.dtype.size();
    problem.k.is_multiple_of(vector)
        && s[1] == 1
        && [s[0], s[2], s[3]].into_iter().all(|s| s % vector as isize == 0)
}
