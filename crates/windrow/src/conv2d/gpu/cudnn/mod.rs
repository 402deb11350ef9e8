//! cuDNN's convolution. It is used if cuDNN is installed and expected to be faster than the other methods.

pub(super) mod nhwc;

use self::nhwc::{NhwcConversion, NhwcFilter};
use super::chips::Cudnn as Rates;
use super::facts::{has_epilogue, is_strict};
use super::general::{DenseFilter, Direction, General, Sums};
use super::method::{About, Method};
use super::prepared::{Operands, PackTo, PackedForm, Prepared};
use super::shape::Output;
use super::shared::parameters::one_thread_each;
use super::task::Task;
use super::{Divisor, Seen, kernel, source, with_epilogue};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dAlgorithm, Conv2dSpec, Problem};
use crate::gpu::{
    Choice, ConvolutionSpec, Gpu, Kernel, KernelSpec, Operation, Source, Stream, VendorConvolution,
    params,
};
use crate::try_once_lock::TryOnceLock;
use crate::{Accuracy, DType, Error, Layout, PlanOptions, Result, TensorDesc, Tuning};

static EPILOGUE: Source = source!("epilogue.cu");

/// Bytes that a thread of the epilogue takes of each tensor.
const VECTOR_BYTES: usize = 16;

#[derive(Debug)]
pub(crate) struct Cudnn {
    gpu: &'static Gpu,
    convolution: VendorConvolution,
    otherwise: Otherwise,
    filter: DenseFilter,
    nhwc_filter: Option<NhwcFilter>,
    /// NCHW tensors by a kernel for channels-last ones.
    nhwc: Option<NhwcConversion>,
    /// The kernel that adds bias and residual and applies the activation, if there is one of them and no layout
    /// changes.
    epilogue: Option<&'static Kernel>,
    spec: Conv2dSpec,
    problem: Problem,
    channels_last: bool,
    choice: Choice,
}

params! {
    struct EpilogueParams: Output {
        elements: i32,
        run: Divisor,
        channels: Divisor,
    }
}

/// The common layout of dense x and y: `true` for channels-last, `false` for NCHW; `None` for other layouts.
pub(super) fn channels_last(spec: &Conv2dSpec) -> Option<bool> {
    let dense = |t: &TensorDesc, order: &[usize]| {
        Layout::with_order(t.shape(), order).is_ok_and(|layout| layout == t.layout)
    };
    let both = |order: &[usize]| dense(&spec.x, order) && dense(&spec.y, order);
    if both(&[0, 1, 2, 3]) { Some(false) } else { both(&[0, 2, 3, 1]).then_some(true) }
}

/// True if cuDNN's kernel is one for channels-last tensors, given as such or converted.
fn by_channels(spec: &Conv2dSpec, p: &Problem) -> bool {
    channels_last(spec).unwrap_or(false) || NhwcConversion::suits(spec, p)
}

/// Relative error of a product: that of two operands rounded to TF32, whose mantissa is that of f16.
pub(super) fn operand_roundings(spec: &Conv2dSpec) -> f64 {
    let tf32 = spec.x.dtype == DType::F32 && spec.accuracy >= Accuracy::Tf32;
    if tf32 { 2.0 * DType::F16.unit_roundoff() } else { 0.0 }
}

pub(super) fn in_its_words(spec: &Conv2dSpec, p: &Problem, channels_last: bool) -> ConvolutionSpec {
    ConvolutionSpec {
        dtype: spec.x.dtype,
        channels_last,
        x: [p.n, p.c, p.h, p.w],
        w: [p.k, p.c_group(), p.r, p.s],
        y: p.y_shape(),
        stride: p.stride,
        padding: p.padding,
        dilation: p.dilation,
        tf32: spec.accuracy >= Accuracy::Tf32,
    }
}

/// The kernel for addresses that the main kernel cannot read, compiled when the first such address occurs.
#[derive(Debug)]
pub(super) struct Otherwise {
    made: TryOnceLock<General>,
    gpu: &'static Gpu,
    spec: Conv2dSpec,
    problem: Problem,
    direction: Direction,
    channels_last: bool,
}

impl Otherwise {
    pub(super) fn new(
        gpu: &'static Gpu,
        task: &Task<'_>,
        direction: Direction,
        channels_last: bool,
    ) -> Self {
        let (made, spec, problem) = (TryOnceLock::default(), task.spec.clone(), *task.problem);
        Otherwise { made, gpu, spec, problem, direction, channels_last }
    }

    pub(super) fn get(&self) -> Result<&General> {
        let Otherwise { gpu, spec, problem, direction, channels_last, .. } = self;
        let task = Task::new(gpu, spec, problem, &PlanOptions::default());
        let sums = Sums::Im2colGemm;
        self.made.get(|| General::new(gpu, &task, sums, *direction, *channels_last))
    }
}

/// [`Conv2dAlgorithm::Cudnn`].
pub(super) struct CudnnMethod;

impl Method for CudnnMethod {
    fn about(&self) -> &'static About {
        &About {
            algorithms: &[Conv2dAlgorithm::Cudnn],
            domain: "computes dense tensors of one layout",
            kernels: &[
                "epilogue.cu conv2d_epilogue_{f32,f16,bf16} cuda",
                "turn_output.cu conv2d_turn_output_{f32,f16,bf16} VECTOR={1,4} cuda",
                "turn_filter.cu conv2d_turn_filter_{f32,f16,bf16} cuda",
            ],
            parameters: &[],
        }
    }

    fn computes(&self, task: &Task<'_>) -> bool {
        let Task { spec, problem: p, .. } = task;
        let sizes = [p.n * p.c * p.h * p.w, p.n * p.k * p.oh * p.ow, p.k * p.taps()];
        task.frames.is_none()
            && channels_last(spec).is_some()
            && sizes.iter().all(|&size| size > 0 && size < 1 << 31)
    }

    /// The library chooses kernels by the number of images.
    fn is_batch_invariant(&self) -> bool {
        false
    }

    fn runs_on(&self, gpu: &Gpu, _task: &Task<'_>) -> Result<()> {
        gpu.convolution_library().map(drop).map_err(|error| {
            let what = format!("conv2d by {} on {}", Conv2dAlgorithm::Cudnn, gpu.device());
            Error::unsupported(what, error.to_string())
        })
    }

    fn confirm(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<()> {
        let (spec, p) = (task.spec, task.problem);
        VendorConvolution::check(gpu, &in_its_words(spec, p, by_channels(spec, p)))
    }

    fn micros(&self, task: &Task<'_>) -> f64 {
        micros(task)
    }

    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(Cudnn::new(gpu, task)?))
    }
}

/// The expected microseconds of cuDNN's kernel and of the pass after it.
pub(super) fn micros(task: &Task<'_>) -> f64 {
    kernel_micros(task) + pass_micros(task)
}

/// The expected microseconds of cuDNN's kernels. In strict f32, few blocks, which sum all terms, leave the GPU idle.
pub(super) fn kernel_micros(task: &Task<'_>) -> f64 {
    let Task { chip, spec, problem: p, .. } = *task;
    let rates = &chip.rates.cudnn;
    if !is_strict(spec) {
        return sums_micros(rates, spec, p);
    }
    // Of groups of 4 to 32 channels (ResNeXt-50).
    let grouped = if p.groups > 1 { 1.0 + rates.f32_group / p.k_group() as f64 } else { 1.0 };
    let few = rates.few_launch + rates.f32_term * p.taps() as f64;
    (rates.launch + rates.f32_gflop * grouped * 1e-9 * p.flops()).max(few)
}

/// The expected microseconds of the pass after cuDNN's kernel: a launch, reading and writing y, and reading the
/// residual.
fn pass_micros(task: &Task<'_>) -> f64 {
    let Task { chip, spec, problem: p, .. } = *task;
    if !has_epilogue(spec) && !NhwcConversion::suits(spec, p) {
        return 0.0;
    }
    let tensors = if spec.residual { 3 } else { 2 };
    let megabytes = 1e-6 * (tensors * p.n * p.k * p.oh * p.ow * spec.y.dtype.size()) as f64;
    let (launch, per_micro) = chip.rates.cudnn.pass;
    launch + megabytes / per_micro
}

/// The time of [`kernel_micros`] on tensor cores. It is limited by few blocks, by products (those of f16/bf16 slow if pixels
/// are not whole vectors), or by passes over x and y (more if those of f16/bf16 are not channels-last).
fn sums_micros(rates: &Rates, spec: &Conv2dSpec, p: &Problem) -> f64 {
    let is_half = spec.x.dtype != DType::F32;
    let of = if is_half { &rates.half } else { &rates.tf32 };
    let per_flop = match !is_half || p.groups > 1 || p.c.is_multiple_of(8) {
        true => of.flop * (1.0 + of.group / p.k_group().max(1) as f64),
        // Of the 3, 4 and 6 channels of first layers.
        false => rates.half_unaligned_flop,
    };
    let products = per_flop * p.flops();
    let megabytes = |elements: usize| 1e-6 * (p.n * elements * spec.x.dtype.size()) as f64;
    // A filter of one tap skips the pixels between its steps.
    let skipped = if p.r * p.s == 1 { p.stride[0] * p.stride[1] } else { 1 };
    let (x, y) = (megabytes(p.c * p.h * p.w), megabytes(p.k * p.oh * p.ow));
    let plain = p.r * p.s == 1 && p.stride == [1, 1];
    let copies = match () {
        () if !is_half || plain || is_channels_last(&spec.y.layout) => 0.0,
        () if NhwcConversion::suits(spec, p) => rates.turn.0 + rates.turn.1 * x,
        () => rates.own_turn.0 + 2.0 * (x + y) / rates.own_turn.1,
    };
    let few = of.term * p.taps() as f64;
    let bytes = (x / skipped as f64 + y) / of.megabytes;
    of.launch + few.max(products).max(bytes) + copies
}

impl Cudnn {
    fn new(gpu: &'static Gpu, task: &Task<'_>) -> Result<Self> {
        let (spec, p) = (task.spec, task.problem);
        let channels_last = by_channels(spec, p);
        let choice = match task.options.tuning {
            Tuning::Model => Choice::First,
            Tuning::Cached | Tuning::Search { .. } => Choice::Fastest,
        };
        let words = in_its_words(spec, p, channels_last);
        let convolution = VendorConvolution::new(gpu, &words, Operation::Forward, choice)?;
        let nhwc = NhwcConversion::suits(spec, p)
            .then(|| NhwcConversion::new(gpu, spec, p))
            .transpose()?;
        let needed = nhwc.is_none() && has_epilogue(spec);
        let epilogue = needed.then(|| gpu.kernel(&epilogue_kernel(spec))).transpose()?;
        let filter = DenseFilter::new(gpu, spec, p, channels_last)?;
        let nhwc_filter = match channels_last && !filter.is_packed() {
            true => NhwcFilter::new(gpu, spec, p)?,
            false => None,
        };
        let otherwise = Otherwise::new(gpu, task, Direction::Forward, channels_last);
        let (spec, problem) = (spec.clone(), *p);
        Ok(Cudnn {
            gpu,
            convolution,
            otherwise,
            filter,
            nhwc_filter,
            nhwc,
            epilogue,
            spec,
            problem,
            channels_last,
            choice,
        })
    }
}

impl Prepared for Cudnn {
    fn explain(&self) -> String {
        let version = self.gpu.convolution_library().unwrap_or_default();
        let kernel = match self.choice {
            Choice::First => "its heuristic's first kernel",
            Choice::Fastest => "the fastest of its kernels",
        };
        let nhwc = if self.nhwc.is_some() { ", tensors converted to channels-last" } else { "" };
        format!("cuDNN {version}, implicit matrix product, {kernel}{nhwc}")
    }

    fn packed_bytes(&self) -> usize {
        self.filter.bytes()
    }

    /// True if the filter at `w` can be read in place: it has the layout that its copy would have, and the alignment
    /// that cuDNN's fast kernels need.
    fn reads_in_place(&self, w: *const u8) -> bool {
        self.filter.is_packed() && (w as usize).is_multiple_of(VendorConvolution::ALIGNMENT)
    }

    fn scratch_bytes(&self) -> usize {
        let nhwc = self.nhwc.as_ref().map_or(0, NhwcConversion::scratch_bytes);
        self.convolution.workspace_bytes() + nhwc
    }

    /// Bytes of the checksums that are stored after a packed filter: see [`Seen`].
    fn seen_bytes(&self) -> usize {
        self.nhwc_filter.as_ref().map_or(0, NhwcFilter::seen_bytes)
    }

    fn packed_form(&self) -> PackedForm {
        // Each layout has its own order. A filter that is kept with checksums has another.
        let order = usize::from(self.channels_last) + 2 * usize::from(self.nhwc_filter.is_some());
        PackedForm::new("cudnn", self.spec.x.dtype, 1, order)
    }

    /// The tolerance of a sum of products; f16/bf16 are rounded once more before bias, residual and activation.
    fn tolerance(&self) -> f64 {
        let sums = (2 * self.problem.taps() + 2) as f64 * DType::F32.unit_roundoff();
        let dtype = self.spec.x.dtype;
        let stored_twice = dtype != DType::F32 && has_epilogue(&self.spec);
        let stored = if stored_twice { dtype.unit_roundoff() } else { 0.0 };
        sums + operand_roundings(&self.spec) + stored
    }

    unsafe fn pack(&self, stream: &Stream, w: *const u8, to: PackTo) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.nhwc_filter {
                Some(nhwc) => {
                    let seen = Seen::behind(to, self.packed_bytes());
                    nhwc.pack(stream, w, to.memory, seen)
                }
                None => self.filter.pack(stream, w, to.memory),
            }
        }
    }

    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()> {
        let scratch = operands.scratch;
        if let Some(nhwc) = &self.nhwc {
            let workspace = scratch.wrapping_add(nhwc.scratch_bytes());
            // SAFETY: the caller's promise.
            return unsafe {
                nhwc.run(stream, operands, |x, sums| {
                    let tensors = [packed.cast_mut(), x.cast_mut(), sums];
                    self.convolution.run(tensors, workspace, stream)
                })
            };
        }
        if !self.convolution.takes([packed, operands.x, operands.y]) {
            // SAFETY: the caller's promise; the filter is packed in the same order.
            return unsafe { self.otherwise.get()?.run(stream, packed, operands) };
        }
        // SAFETY: the caller's promise.
        unsafe {
            let tensors = [packed.cast_mut(), operands.x.cast_mut(), operands.y];
            self.convolution.run(tensors, scratch, stream)?;
        }
        let Some(kernel) = self.epilogue else { return Ok(()) };
        let p = &self.problem;
        let elements = p.y_shape().iter().product::<usize>();
        let params = EpilogueParams {
            base: Output::new(&self.spec, &self.spec.y, &operands),
            elements: elements as i32,
            run: Divisor::new(if self.channels_last { 1 } else { p.oh * p.ow }),
            channels: Divisor::new(p.k),
        };
        let launch = one_thread_each(elements.div_ceil(VECTOR_BYTES / self.spec.y.dtype.size()));
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, launch, &params) }
    }
}

fn epilogue_kernel(spec: &Conv2dSpec) -> KernelSpec {
    let named = kernel(&EPILOGUE, "epilogue", spec.x.dtype)
        .define("VECTOR_BYTES", VECTOR_BYTES)
        .params::<EpilogueParams>();
    with_epilogue(named, spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for spec in super::super::test_specs() {
            kernels.push(epilogue_kernel(&spec));
            kernels.push(epilogue_kernel(&super::super::with_largest_epilogue(spec)));
        }
        crate::gpu::compile_tests::check_compiles(&kernels);
    }

    #[test]
    fn layouts_that_cudnn_has_a_name_for() {
        let found: Vec<_> = super::super::test_specs().iter().map(channels_last).collect();
        assert_eq!(found[..2], [Some(false), Some(true)]);
        let mut spec = super::super::test_specs().remove(0);
        spec.x.layout = Layout::strided(&[2, 32, 20, 20], &[25600, 800, 40, 2]).unwrap();
        assert_eq!(channels_last(&spec), None);
    }
}
