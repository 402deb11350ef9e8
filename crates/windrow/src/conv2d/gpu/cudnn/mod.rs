//! cuDNN's convolution, where it is installed and faster than what is here.

pub(super) mod turned;

use self::turned::{Turned, TurnedFilter};
use super::general::{DenseFilter, Direction, General, Method, one_thread_each};
use super::times::has_pass;
use super::{
    Divisor, FilterOrder, Operands, PackedForm, Seen, bias_of, kernel, source, with_epilogue,
};
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::{
    Choice, ConvolutionSpec, Gpu, Kernel, KernelSpec, Operation, Source, Stream, VendorConvolution,
    params,
};
use crate::later::Later;
use crate::{Accuracy, DType, Layout, Result, TensorDesc, Tuning};

static EPILOGUE: Source = source!("epilogue.cu");

/// Bytes that a thread of the epilogue takes of each tensor.
const VECTOR_BYTES: usize = 16;

#[derive(Debug)]
pub(crate) struct Cudnn {
    gpu: &'static Gpu,
    convolution: VendorConvolution,
    otherwise: Otherwise,
    filter: DenseFilter,
    turned_filter: Option<TurnedFilter>,
    /// NCHW tensors by a kernel for channels-last ones.
    turned: Option<Turned>,
    /// Adds bias and residual and applies the activation, if there is one of them and nothing is turned.
    epilogue: Option<&'static Kernel>,
    spec: Conv2dSpec,
    problem: Problem,
    channels_last: bool,
    choice: Choice,
}

params! {
    struct EpilogueParams {
        y: *mut u8,
        bias: *const u8,
        residual: *const u8,
        bias_stride: i64,
        bias_is_float: i32,
        elements: i32,
        run: Divisor,
        channels: Divisor,
    }
}

/// Whether x and y are dense and both channels-last (`true`) or both NCHW (`false`); `None` for other
/// layouts.
fn channels_last(spec: &Conv2dSpec) -> Option<bool> {
    let dense = |t: &TensorDesc, order: &[usize]| {
        Layout::with_order(t.shape(), order).is_ok_and(|layout| layout == t.layout)
    };
    let both = |order: &[usize]| dense(&spec.x, order) && dense(&spec.y, order);
    if both(&[0, 1, 2, 3]) { Some(false) } else { both(&[0, 2, 3, 1]).then_some(true) }
}

/// Whether cuDNN's kernel is one for channels-last tensors, with those of the spec or turned ones.
fn by_channels(spec: &Conv2dSpec, p: &Problem) -> bool {
    channels_last(spec).unwrap_or(false) || Turned::suits(spec, p)
}

/// Relative error of a product: that of two operands rounded to TF32, whose mantissa is that of f16.
fn operand_roundings(spec: &Conv2dSpec) -> f64 {
    let tf32 = spec.x.dtype == DType::F32 && spec.accuracy >= Accuracy::Tf32;
    if tf32 { 2.0 * DType::F16.unit_roundoff() } else { 0.0 }
}

fn in_its_words(spec: &Conv2dSpec, p: &Problem, channels_last: bool) -> ConvolutionSpec {
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

/// For tensors at addresses that cuDNN has no kernel for: compiled when there are such.
#[derive(Debug)]
struct Otherwise {
    made: Later<General>,
    gpu: &'static Gpu,
    spec: Conv2dSpec,
    problem: Problem,
    direction: Direction,
    channels_last: bool,
}

impl Otherwise {
    fn new(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        direction: Direction,
        channels_last: bool,
    ) -> Self {
        let (made, spec, problem) = (Later::default(), spec.clone(), *problem);
        Otherwise { made, gpu, spec, problem, direction, channels_last }
    }

    fn get(&self) -> Result<&General> {
        let Otherwise { gpu, spec, problem, direction, channels_last, .. } = self;
        let method = Method::Im2colGemm;
        self.made.get(|| General::new(gpu, spec, problem, method, *direction, *channels_last))
    }
}

/// cuDNN's weight gradient, where it can write dw as it lies.
#[derive(Debug)]
pub(super) struct CudnnWeight {
    pub(super) gradient: VendorConvolution,
    dw: TensorDesc,
    operand_roundings: f64,
}

impl CudnnWeight {
    /// `None` where cuDNN has no algorithm for it.
    pub(super) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Option<Self> {
        if !Cudnn::supports(gpu, spec, p) {
            return None;
        }
        let channels_last = channels_last(spec)?;
        let order = if channels_last { [0, 2, 3, 1] } else { [0, 1, 2, 3] };
        let layout = Layout::with_order(&[p.k, p.c_group(), p.r, p.s], &order).ok()?;
        let dw = TensorDesc { dtype: spec.x.dtype, layout };
        let words = in_its_words(spec, p, channels_last);
        let gradient =
            VendorConvolution::new(gpu, &words, Operation::BackwardFilter, Choice::First);
        gradient
            .inspect_err(|error| tracing::debug!(%error, "weight gradient without cuDNN"))
            .ok()
            .map(|gradient| CudnnWeight {
                gradient,
                dw,
                operand_roundings: operand_roundings(spec),
            })
    }

    /// Relative errors of the products.
    pub(super) fn operand_roundings(&self) -> f64 {
        self.operand_roundings
    }

    pub(super) fn writes(&self, dw: &TensorDesc) -> bool {
        self.dw == *dw
    }
}

/// cuDNN's data gradient.
#[derive(Debug)]
pub(super) struct CudnnData {
    gradient: VendorConvolution,
    otherwise: Otherwise,
    filter: DenseFilter,
    spec: Conv2dSpec,
    problem: Problem,
}

impl CudnnData {
    /// `None` where cuDNN has no algorithm for it.
    pub(super) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Result<Option<Self>> {
        let Some(channels_last) = channels_last(spec).filter(|_| Cudnn::supports(gpu, spec, p))
        else {
            return Ok(None);
        };
        let words = in_its_words(spec, p, channels_last);
        let gradient = VendorConvolution::new(gpu, &words, Operation::BackwardData, Choice::First);
        let Ok(gradient) =
            gradient.inspect_err(|error| tracing::debug!(%error, "data gradient without cuDNN"))
        else {
            return Ok(None);
        };
        let filter = DenseFilter::new(gpu, spec, p, channels_last)?;
        let otherwise = Otherwise::new(gpu, spec, p, Direction::BackwardData, channels_last);
        let (spec, problem) = (spec.clone(), *p);
        Ok(Some(CudnnData { gradient, otherwise, filter, spec, problem }))
    }

    pub(super) fn packed_bytes(&self) -> usize {
        self.filter.bytes()
    }

    pub(super) fn scratch_bytes(&self) -> usize {
        self.gradient.workspace_bytes()
    }

    /// As of a sum of products.
    pub(super) fn tolerance(&self) -> f64 {
        let terms = self.problem.k_group() * self.problem.r * self.problem.s;
        (2 * terms + 2) as f64 * DType::F32.unit_roundoff() + operand_roundings(&self.spec)
    }

    /// dx of dy, with the filter at `w` as the spec has it.
    ///
    /// # Safety
    /// As [`super::Gradients::data`].
    pub(super) unsafe fn run(
        &self,
        stream: &Stream,
        w: *const u8,
        operands: Operands,
        scratch: *mut u8,
    ) -> Result<()> {
        let aligned = (w as usize).is_multiple_of(VendorConvolution::ALIGNMENT);
        let w = if self.filter.is_packed() && aligned {
            w
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.filter.pack(stream, w, scratch)? };
            scratch.cast_const()
        };
        let (dy, dx) = (operands.x, operands.y);
        if !self.gradient.takes([w, dx, dy]) {
            // SAFETY: the caller's promise; the filter is packed in the same order.
            return unsafe { self.otherwise.get()?.run(stream, w, operands) };
        }
        let rest = scratch.wrapping_add(self.packed_bytes());
        // SAFETY: the caller's promise.
        unsafe { self.gradient.run([w.cast_mut(), dx, dy.cast_mut()], rest, stream) }
    }
}

impl Cudnn {
    pub(super) fn supports(gpu: &Gpu, spec: &Conv2dSpec, p: &Problem) -> bool {
        let sizes = [p.n * p.c * p.h * p.w, p.n * p.k * p.oh * p.ow, p.k * p.taps()];
        channels_last(spec).is_some()
            && sizes.iter().all(|&size| size > 0 && size < 1 << 31)
            && gpu.convolves().is_ok()
    }

    /// Whether cuDNN has a kernel for a spec that it supports.
    ///
    /// # Errors
    /// As [`Cudnn::new`], if it has none.
    pub(super) fn check(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Result<()> {
        VendorConvolution::check(gpu, &in_its_words(spec, p, by_channels(spec, p)))
    }

    pub(super) fn new(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        p: &Problem,
        tuning: Tuning,
    ) -> Result<Self> {
        let channels_last = by_channels(spec, p);
        let choice = match tuning {
            Tuning::Model => Choice::First,
            Tuning::Cached | Tuning::Search { .. } => Choice::Fastest,
        };
        let words = in_its_words(spec, p, channels_last);
        let convolution = VendorConvolution::new(gpu, &words, Operation::Forward, choice)?;
        let turned = Turned::suits(spec, p).then(|| Turned::new(gpu, spec, p)).transpose()?;
        let needed = turned.is_none() && has_pass(spec);
        let epilogue = needed.then(|| gpu.kernel(&epilogue_kernel(spec))).transpose()?;
        let filter = DenseFilter::new(gpu, spec, p, channels_last)?;
        let turned_filter = match channels_last && !filter.is_packed() {
            true => TurnedFilter::new(gpu, spec, p)?,
            false => None,
        };
        let otherwise = Otherwise::new(gpu, spec, p, Direction::Forward, channels_last);
        let (spec, problem) = (spec.clone(), *p);
        Ok(Cudnn {
            gpu,
            convolution,
            otherwise,
            filter,
            turned_filter,
            turned,
            epilogue,
            spec,
            problem,
            channels_last,
            choice,
        })
    }

    pub(super) fn explain(&self) -> String {
        let version = self.gpu.convolves().unwrap_or_default();
        let kernel = match self.choice {
            Choice::First => "its heuristic's first kernel",
            Choice::Fastest => "the fastest of its kernels",
        };
        let turned = if self.turned.is_some() { ", tensors turned to channels-last" } else { "" };
        format!("cuDNN {version}, implicit matrix product, {kernel}{turned}")
    }

    pub(super) fn packed_bytes(&self) -> usize {
        self.filter.bytes()
    }

    /// True if the filter at `w` can be read as it is: it lies as its copy would, and as aligned as cuDNN's
    /// fast kernels want it.
    pub(super) fn reads_in_place(&self, w: *const u8) -> bool {
        self.filter.is_packed() && (w as usize).is_multiple_of(VendorConvolution::ALIGNMENT)
    }

    pub(super) fn scratch_bytes(&self) -> usize {
        let turned = self.turned.as_ref().map_or(0, Turned::scratch_bytes);
        self.convolution.workspace_bytes() + turned
    }

    /// Bytes of what is kept behind a pack: see [`Seen`].
    pub(super) fn seen_bytes(&self) -> usize {
        self.turned_filter.as_ref().map_or(0, TurnedFilter::seen_bytes)
    }

    pub(super) fn packed_form(&self) -> PackedForm {
        // The order of the filter is another one for each layout.
        PackedForm {
            dtype: self.spec.x.dtype,
            products: usize::from(self.channels_last),
            order: match self.turned_filter {
                Some(_) => FilterOrder::Turned,
                None => FilterOrder::Usual,
            },
        }
    }

    /// As of a sum of products; halves are rounded once more before bias, residual and activation.
    pub(super) fn tolerance(&self) -> f64 {
        let sums = (2 * self.problem.taps() + 2) as f64 * DType::F32.unit_roundoff();
        let dtype = self.spec.x.dtype;
        let stored_twice = dtype != DType::F32 && has_pass(&self.spec);
        let stored = if stored_twice { dtype.unit_roundoff() } else { 0.0 };
        sums + operand_roundings(&self.spec) + stored
    }

    /// # Safety
    /// As [`super::Forward::pack`].
    pub(super) unsafe fn pack(
        &self,
        stream: &Stream,
        w: *const u8,
        packed: *mut u8,
        ticket: Option<u64>,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.turned_filter {
                Some(turned) => {
                    let seen = Seen::behind(packed, self.packed_bytes(), ticket);
                    turned.pack(stream, w, packed, seen)
                }
                None => self.filter.pack(stream, w, packed),
            }
        }
    }

    /// # Safety
    /// As [`super::Forward::run`].
    pub(super) unsafe fn run(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
        scratch: *mut u8,
    ) -> Result<()> {
        if let Some(turned) = &self.turned {
            let workspace = scratch.wrapping_add(turned.scratch_bytes());
            // SAFETY: the caller's promise.
            return unsafe {
                turned.run(stream, operands, scratch, |x, sums| {
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
        let (bias, bias_stride, bias_is_float) = bias_of(&self.spec, operands.bias);
        let params = EpilogueParams {
            y: operands.y,
            bias,
            residual: operands.residual(),
            bias_stride,
            bias_is_float,
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
