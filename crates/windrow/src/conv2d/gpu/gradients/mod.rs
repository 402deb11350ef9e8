//! The gradients on a device. All sums are formed in an order that does not depend on timing.

mod split_weight;
pub(super) mod weight_product;

use self::split_weight::SplitWeight;
use super::cudnn::{CudnnData, CudnnWeight};
use super::general::{
    BLOCK, Direction, General, IM2COL_GEMM, Im2colParams, MAX_GRID_Z, Method, THREADS,
    one_thread_each,
};
use super::grouped::Groups;
use super::implicit_gemm::data_gradient::ImplicitData;
use super::winograd_gemm::weight_gradient::WinogradWeight;
use super::{Forward, Operands, kernel, source, strides};
use super::{choice, times};
use crate::conv2d::backward::mirrored;
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::{Activation, DType, Filter, Layout, PlanOptions, Result, TensorDesc, Tuning};

static ADD_PARTS: Source = source!("im2col_gemm_sum.cu");
static BIAS: Source = source!("bias_grad.cu");

/// Blocks of a weight gradient that keep a device busy, for each multiprocessor.
const BLOCKS_PER_PROCESSOR: usize = 4;
/// The most memory for parts of a weight gradient.
const MAX_PARTS_BYTES: usize = 64 << 20;
/// Warps and lanes of a block of the bias's gradient, and rows that a warp adds.
const WARPS: usize = 8;
const LANES: usize = 32;
const ROWS_PER_WARP: usize = 8;

/// How the gradients of a convolution are computed.
#[derive(Debug)]
pub(crate) struct Backward {
    data: Data,
    gpu: &'static Gpu,
    spec: Conv2dSpec,
    problem: Problem,
    /// Taken for every dw that it can write, at addresses that it has a kernel for.
    cudnn_weight: Option<CudnnWeight>,
    weight: Weight,
    bias: &'static Kernel,
    add_parts: OutputKernels,
}

/// A kernel for each type that a gradient may have: f32, and that of x.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutputKernels {
    float: &'static Kernel,
    own: &'static Kernel,
}

impl OutputKernels {
    pub(super) fn new(
        gpu: &'static Gpu,
        own: DType,
        kernel: impl Fn(DType) -> KernelSpec,
    ) -> Result<Self> {
        Ok(OutputKernels {
            float: gpu.kernel(&kernel(DType::F32))?,
            own: gpu.kernel(&kernel(own))?,
        })
    }

    /// Of a gradient in f32 or, else, in the type of x.
    pub(super) fn of(&self, dtype: DType) -> &'static Kernel {
        if dtype == DType::F32 { self.float } else { self.own }
    }
}

/// The weight gradient.
#[derive(Debug)]
enum Weight {
    /// A product of dy and the gathered x, in parts.
    Im2colGemm(&'static Kernel),
    Winograd(Box<WinogradWeight>),
    Halves(Box<SplitWeight>),
}

/// The data gradient.
#[derive(Debug)]
enum Data {
    /// A convolution by the filter turned around.
    Mirrored(Forward),
    Cudnn(Box<CudnnData>),
    Implicit(ImplicitData),
    Transposed(General),
}

params! {
    struct PartsParams {
        parts: *const u8,
        out: *mut u8,
        strides as [k_stride, c_stride, r_stride, s_stride]: [i64; 4],
        elements: i64,
        parts_count: i32,
        c: i32,
        r: i32,
        s: i32,
    }
}

params! {
    struct BiasParams {
        dy: *const u8,
        parts: *mut u8,
        strides as [n_stride, c_stride, h_stride, w_stride]: [i64; 4],
        rows: i64,
        rows_per_part: i64,
        channels: i32,
        height: i32,
        width: i32,
    }
}

impl Backward {
    /// Compiles and loads the kernels of a plan with this algorithm. Where they are no products of transforms, the gradients are
    /// cuDNN's if it has kernels for them; with `cudnn` the weight gradient is always, and with `implicit_gemm` gradients
    /// are by products of halves.
    ///
    /// # Errors
    /// As [`Forward::new`].
    pub(crate) fn new(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        algorithm: Conv2dAlgorithm,
    ) -> Result<Self> {
        let mut data = None;
        let mirror = mirrored(spec, problem).or_else(|| mirrored_depthwise(spec, problem));
        if let Some(mirror) = mirror
            && let Ok(p) = mirror.problem()
        {
            // Gradients pack the filter on each run.
            let options =
                PlanOptions::default().with_tuning(Tuning::Model).with_filter(Filter::Changing);
            let algorithm = Forward::best(gpu, &mirror, &p, &options)?;
            let gathers =
                [Conv2dAlgorithm::Cudnn, Conv2dAlgorithm::ImplicitGemm].contains(&algorithm);
            let groups = algorithm == Conv2dAlgorithm::Direct && Groups::supports(&p);
            if algorithm.is_winograd() || gathers || groups {
                let configuration = Conv2dConfiguration::new(algorithm);
                let engine = Forward::new(gpu, &mirror, &p, &configuration, &options)?;
                data = Some(Data::Mirrored(engine));
            }
        }
        let data = match data {
            Some(data) => data,
            None if implicit_data_pays(gpu, spec, problem, algorithm) => {
                Data::Implicit(ImplicitData::new(gpu, spec, problem)?)
            }
            None => {
                let direct = problem.c_group() < 8 || problem.k_group() * problem.r * problem.s < 8;
                let cudnn = if direct { None } else { CudnnData::new(gpu, spec, problem)? };
                let method = if direct { Method::Direct } else { Method::Im2colGemm };
                let direction = Direction::BackwardData;
                match cudnn {
                    Some(cudnn) => Data::Cudnn(Box::new(cudnn)),
                    None if !direct && implicit_data_beats_im2col(gpu, spec, problem) => {
                        Data::Implicit(ImplicitData::new(gpu, spec, problem)?)
                    }
                    None => {
                        Data::Transposed(General::new(gpu, spec, problem, method, direction, true)?)
                    }
                }
            }
        };
        let weight = if algorithm == Conv2dAlgorithm::ImplicitGemm
            && SplitWeight::suits(gpu, spec, problem)
        {
            split_weight(gpu, spec, problem)?
        } else if WinogradWeight::suits(gpu, spec, problem) {
            Some(Weight::Winograd(Box::new(WinogradWeight::new(gpu, spec, problem)?)))
        } else if split_weight_pays(gpu, spec, problem) {
            split_weight(gpu, spec, problem)?
        } else {
            None
        };
        Ok(Backward {
            data,
            gpu,
            spec: spec.clone(),
            problem: *problem,
            cudnn_weight: (algorithm == Conv2dAlgorithm::Cudnn || weight.is_none())
                .then(|| CudnnWeight::new(gpu, spec, problem))
                .flatten(),
            weight: match weight {
                Some(weight) => weight,
                None => Weight::Im2colGemm(gpu.kernel(&weight_kernel(spec))?),
            },
            bias: gpu.kernel(&bias_kernel(spec))?,
            add_parts: OutputKernels::new(gpu, spec.x.dtype, parts_kernel)?,
        })
    }

    /// True if the filter of [`Backward::data`] is the turned one.
    pub(crate) fn data_is_mirrored(&self) -> bool {
        matches!(self.data, Data::Mirrored(_))
    }

    /// Outputs of a tile, where the data gradient is one of Winograd's.
    pub(crate) fn data_tile(&self) -> Option<usize> {
        match &self.data {
            Data::Mirrored(engine) => engine.tile(),
            Data::Cudnn(_) | Data::Implicit(_) | Data::Transposed(_) => None,
        }
    }

    /// The same of the weight gradient.
    pub(crate) fn weight_tile(&self) -> Option<usize> {
        match &self.weight {
            Weight::Im2colGemm(_) | Weight::Halves(_) => None,
            Weight::Winograd(winograd) => Some(winograd.tile()),
        }
    }

    fn packed_bytes(&self) -> usize {
        match &self.data {
            Data::Mirrored(engine) => engine.packed_bytes(),
            Data::Cudnn(cudnn) => cudnn.packed_bytes(),
            Data::Implicit(implicit) => implicit.packed_bytes(),
            Data::Transposed(general) => general.packed_bytes(),
        }
    }

    /// Bytes of workspace of [`Backward::data`].
    pub(crate) fn data_bytes(&self) -> usize {
        let scratch = match &self.data {
            Data::Mirrored(engine) => engine.scratch_bytes(),
            Data::Cudnn(cudnn) => cudnn.scratch_bytes(),
            Data::Implicit(implicit) => implicit.scratch_bytes(),
            Data::Transposed(_) => 0,
        };
        self.packed_bytes() + scratch
    }

    /// Bytes of workspace of [`Backward::weight`].
    pub(crate) fn weight_bytes(&self) -> usize {
        let p = &self.problem;
        let cudnn = self.cudnn_weight.as_ref().map_or(0, |c| c.gradient.workspace_bytes());
        cudnn.max(match &self.weight {
            Weight::Im2colGemm(_) => self.weight_parts() * p.k * p.taps() * size_of::<f32>(),
            Weight::Winograd(winograd) => winograd.scratch_bytes(),
            Weight::Halves(split) => split.scratch_bytes(),
        })
    }

    /// Bytes of workspace of [`Backward::bias`].
    pub(crate) fn bias_bytes(&self) -> usize {
        self.bias_parts() * self.problem.k * size_of::<f32>()
    }

    pub(crate) fn data_tolerance(&self) -> f64 {
        match &self.data {
            Data::Mirrored(engine) => engine.tolerance(),
            Data::Cudnn(cudnn) => cudnn.tolerance(),
            Data::Implicit(implicit) => implicit.tolerance(),
            Data::Transposed(general) => general.tolerance(),
        }
    }

    /// Roundings as in [`General::tolerance`]; the parts are added with compensation.
    pub(crate) fn weight_tolerance(&self) -> f64 {
        let summed = |images: usize| {
            let terms = images * self.problem.oh * self.problem.ow;
            (2 * terms + 6) as f64 * DType::F32.unit_roundoff()
        };
        let own = match &self.weight {
            Weight::Winograd(winograd) => winograd.tolerance(),
            Weight::Halves(split) => split.tolerance(),
            Weight::Im2colGemm(_) => summed(self.images_per_part()),
        };
        match &self.cudnn_weight {
            Some(cudnn) => own.max(summed(self.problem.n) + cudnn.operand_roundings()),
            None => own,
        }
    }

    /// A lane adds its columns of some rows, then come the lanes and warps of a block.
    pub(crate) fn bias_tolerance(&self) -> f64 {
        let columns =
            if self.channels_inner() { self.problem.ow } else { self.problem.ow.div_ceil(LANES) };
        (ROWS_PER_WARP * columns + 16) as f64 * DType::F32.unit_roundoff()
    }

    /// `dx` of `dy`. `w` is the filter, or the last row and column of it if
    /// [`Backward::data_is_mirrored`].
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// The tensors must have the spec's layouts and be on the stream's device, with
    /// [`Backward::data_bytes`] of scratch memory.
    pub(crate) unsafe fn data(
        &self,
        stream: &Stream,
        w: *const u8,
        dy: *const u8,
        dx: *mut u8,
        scratch: *mut u8,
    ) -> Result<()> {
        let operands = Operands { x: dy, bias: None, residual: None, y: dx };
        // SAFETY: the caller's promise.
        unsafe {
            match &self.data {
                Data::Mirrored(engine) => {
                    let packed = engine.packed(stream, w, scratch)?;
                    let rest = scratch.add(engine.packed_bytes());
                    engine.run(stream, packed, operands, rest)
                }
                Data::Cudnn(cudnn) => cudnn.run(stream, w, operands, scratch),
                Data::Implicit(implicit) => {
                    let rest = scratch.add(implicit.packed_bytes());
                    implicit.run(stream, w, operands, scratch, rest)
                }
                Data::Transposed(general) if general.reads_in_place() => {
                    general.run(stream, w, operands)
                }
                Data::Transposed(general) => {
                    general.pack(stream, w, scratch)?;
                    general.run(stream, scratch, operands)
                }
            }
        }
    }

    /// Images that a block of the weight gradient sums.
    fn images_per_part(&self) -> usize {
        let p = &self.problem;
        let blocks = p.k_group().div_ceil(BLOCK) * p.taps().div_ceil(BLOCK) * p.groups;
        let wanted = BLOCKS_PER_PROCESSOR * self.gpu.info.multiprocessors as usize;
        let most = MAX_PARTS_BYTES / (p.k * p.taps() * size_of::<f32>()).max(1);
        let parts = (wanted / blocks.max(1)).min(most).clamp(1, MAX_GRID_Z);
        p.n.div_ceil(parts).max(1)
    }

    fn weight_parts(&self) -> usize {
        self.problem.n.div_ceil(self.images_per_part())
    }

    /// `dw`, with strides and a type of its own, of `x` and `dy`.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// As [`Backward::data`], with [`Backward::weight_bytes`].
    pub(crate) unsafe fn weight(
        &self,
        stream: &Stream,
        x: *const u8,
        dy: *const u8,
        (dw, desc): (*mut u8, &TensorDesc),
        scratch: *mut u8,
    ) -> Result<()> {
        if let Some(cudnn) = &self.cudnn_weight
            && cudnn.writes(desc)
            && cudnn.gradient.takes([dw, x, dy])
        {
            // SAFETY: the caller's promise.
            return unsafe {
                cudnn.gradient.run([dw, x.cast_mut(), dy.cast_mut()], scratch, stream)
            };
        }
        let kernel = match &self.weight {
            Weight::Im2colGemm(kernel) => *kernel,
            // SAFETY: the caller's promise.
            Weight::Winograd(winograd) => unsafe {
                return winograd.run(stream, x, dy, (dw, desc), scratch);
            },
            // SAFETY: the caller's promise.
            Weight::Halves(split) => unsafe {
                return split.run(stream, x, dy, (dw, desc), scratch);
            },
        };
        let (p, parts) = (&self.problem, self.weight_parts());
        let elements = p.k * p.taps();
        let mut params = Im2colParams::new(p, &self.spec.x, &self.spec.y, p.c_group());
        (params.image, params.other, params.out) = (x, dy, scratch);
        params.image_strides = strides(&self.spec.x);
        params.other_strides = strides(&self.spec.y);
        params.rows = p.k_group() as i64;
        params.columns = p.taps() as i32;
        params.depth = (p.oh * p.ow) as i32;
        params.part = elements as i64;
        params.other_channels = p.k_group() as i32;
        params.images_per_part = self.images_per_part() as i32;
        let grid = [p.k_group().div_ceil(BLOCK), p.taps().div_ceil(BLOCK)].map(|b| b as u32);
        let at_once = MAX_GRID_Z / parts.max(1);
        for first in (0..p.groups).step_by(at_once) {
            let groups = at_once.min(p.groups - first);
            params.first_group = first as i32;
            let z = (groups * parts) as u32;
            let launch = Launch { grid: [grid[0], grid[1], z], block: [THREADS, 1, 1] };
            // SAFETY: the structure is the kernel's, and the caller's promise covers what it
            // points to.
            unsafe { kernel.launch(stream, launch, &params)? };
        }
        let params = PartsParams {
            parts: scratch,
            out: dw,
            strides: strides(desc),
            elements: elements as i64,
            parts_count: parts as i32,
            c: p.c_group() as i32,
            r: p.r as i32,
            s: p.s as i32,
        };
        // SAFETY: the parts were written into the scratch memory, dw is the caller's promise.
        unsafe { self.add_parts(stream, desc.dtype, &params) }
    }

    fn channels_inner(&self) -> bool {
        is_channels_last(&self.spec.y.layout)
    }

    fn bias_parts(&self) -> usize {
        (self.problem.n * self.problem.oh).div_ceil(WARPS * ROWS_PER_WARP)
    }

    /// `db`, with a stride and a type of its own, of `dy`.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// As [`Backward::data`], with [`Backward::bias_bytes`].
    pub(crate) unsafe fn bias(
        &self,
        stream: &Stream,
        dy: *const u8,
        (db, desc): (*mut u8, &TensorDesc),
        scratch: *mut u8,
    ) -> Result<()> {
        let (p, parts) = (&self.problem, self.bias_parts());
        let params = BiasParams {
            dy,
            parts: scratch,
            strides: strides(&self.spec.y),
            rows: (p.n * p.oh) as i64,
            rows_per_part: (WARPS * ROWS_PER_WARP) as i64,
            channels: p.k as i32,
            height: p.oh as i32,
            width: p.ow as i32,
        };
        let channels = if self.channels_inner() { p.k.div_ceil(LANES) } else { p.k };
        let blocks = (parts * channels) as u32;
        let launch = Launch { grid: [blocks, 1, 1], block: [(WARPS * LANES) as u32, 1, 1] };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.bias.launch(stream, launch, &params)? };
        let params = PartsParams {
            parts: scratch,
            out: db,
            strides: [desc.strides()[0] as i64, 0, 0, 0],
            elements: p.k as i64,
            parts_count: parts as i32,
            c: 1,
            r: 1,
            s: 1,
        };
        // SAFETY: the parts were written into the scratch memory, db is the caller's promise.
        unsafe { self.add_parts(stream, desc.dtype, &params) }
    }

    /// # Safety
    /// What the parameters point to must be on the stream's device.
    unsafe fn add_parts(&self, stream: &Stream, out: DType, params: &PartsParams) -> Result<()> {
        // SAFETY: the structure is the kernel's, the rest is the caller's promise.
        unsafe {
            self.add_parts.of(out).launch(stream, one_thread_each(params.elements as usize), params)
        }
    }
}

/// As [`mirrored`], where every channel is a group: the filter keeps its place.
fn mirrored_depthwise(spec: &Conv2dSpec, p: &Problem) -> Option<Conv2dSpec> {
    let padding =
        |d: usize| (([p.r, p.s][d] - 1).checked_mul(p.dilation[d])?).checked_sub(p.padding[d]);
    let &[k, _, r, s] = spec.w.shape() else { return None };
    let strides = spec.w.strides();
    if p.stride != [1, 1] || p.groups == 1 || p.c_group() != 1 || p.k_group() != 1 {
        return None;
    }
    let w = Layout::strided(&[k, 1, r, s], &[strides[0], strides[1], -strides[2], -strides[3]]);
    Some(Conv2dSpec {
        x: spec.y,
        w: TensorDesc { layout: w.ok()?, ..spec.w },
        y: spec.x,
        bias: None,
        padding: [padding(0)?, padding(1)?],
        activation: Activation::Identity,
        ..spec.clone()
    })
}

/// True if the data gradient by [`ImplicitData`] is expected to be the fastest, or what the plan's algorithm asks for.
fn implicit_data_pays(
    gpu: &Gpu,
    spec: &Conv2dSpec,
    p: &Problem,
    algorithm: Conv2dAlgorithm,
) -> bool {
    let asked = algorithm == Conv2dAlgorithm::ImplicitGemm;
    if !choice::allows(spec, Conv2dAlgorithm::ImplicitGemm) || !(asked || times::is_strict(spec)) {
        return false;
    }
    let micros = ImplicitData::micros(gpu, spec, p);
    micros.is_finite() && (asked || micros < 0.9 * times::gathered_data_micros(spec, p))
}

fn split_weight(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Result<Option<Weight>> {
    Ok(SplitWeight::new(gpu, spec, p)?.map(|split| Weight::Halves(Box::new(split))))
}

/// True if the weight gradient by [`SplitWeight`] is expected to be faster than cuDNN's.
fn split_weight_pays(gpu: &Gpu, spec: &Conv2dSpec, p: &Problem) -> bool {
    SplitWeight::suits(gpu, spec, p)
        && SplitWeight::micros(gpu, p) < 0.9 * times::gathered_weight_micros(p)
}

fn implicit_data_beats_im2col(gpu: &Gpu, spec: &Conv2dSpec, p: &Problem) -> bool {
    let im2col = Conv2dConfiguration::new(Conv2dAlgorithm::Im2colGemm);
    choice::allows(spec, Conv2dAlgorithm::ImplicitGemm)
        && ImplicitData::micros(gpu, spec, p) < times::cost(gpu, spec, p, &im2col)
}

fn weight_kernel(spec: &Conv2dSpec) -> KernelSpec {
    kernel(&IM2COL_GEMM, "weight_grad", spec.x.dtype)
        .define("PROBLEM", 2)
        .params::<Im2colParams>()
        .define("ALONG_ROWS", i32::from(is_channels_last(&spec.y.layout)))
        .define("EPILOGUE", 0)
}

fn bias_kernel(spec: &Conv2dSpec) -> KernelSpec {
    kernel(&BIAS, "bias_grad", spec.x.dtype)
        .define("CHANNELS_INNER", i32::from(is_channels_last(&spec.y.layout)))
        .define("WARPS", WARPS)
        .params::<BiasParams>()
}

fn parts_kernel(out: DType) -> KernelSpec {
    kernel(&ADD_PARTS, "add_parts", out).params::<PartsParams>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compile_without_spills() {
        let kernels: Vec<_> = super::super::test_specs()
            .iter()
            .flat_map(|spec| [weight_kernel(spec), bias_kernel(spec), parts_kernel(spec.x.dtype)])
            .collect();
        crate::gpu::compile_tests::check_compiles(&kernels);
    }
}
