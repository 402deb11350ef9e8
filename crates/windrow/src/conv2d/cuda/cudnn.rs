//! cuDNN's convolution, where it is installed and faster than what is here.

use super::general::{DenseFilter, Direction, General, Method, one_thread_each};
use super::{Operands, PackedForm, bias_of, epilogue, kernel, source};
use crate::conv2d::{Conv2dSpec, Problem};
use crate::cuda::{
    CudnnConv2d, CudnnConv2dSpec, CudnnDataGrad, CudnnKernel, CudnnWeightGrad, Gpu, Kernel,
    KernelSpec, Source, Stream,
};
use crate::{Accuracy, Activation, DType, Layout, Result, TensorDesc, Tuning};
use std::sync::OnceLock;

static EPILOGUE: Source = source!("epilogue.cu");

#[derive(Debug)]
pub(crate) struct Cudnn {
    gpu: &'static Gpu,
    convolution: CudnnConv2d,
    /// For tensors at addresses that it has no kernel for: compiled when there are such.
    otherwise: OnceLock<General>,
    filter: DenseFilter,
    /// Adds the bias and applies the activation, if there is one of them.
    epilogue: Option<&'static Kernel>,
    spec: Conv2dSpec,
    problem: Problem,
    channels_last: bool,
    kernel: CudnnKernel,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct EpilogueParams {
    y: *mut u8,
    bias: *const u8,
    bias_stride: i64,
    elements: i64,
    run: i64,
    channels: i32,
    bias_is_float: i32,
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

/// Relative error of a product: that of two operands rounded to TF32, whose mantissa is that of f16.
fn operand_roundings(spec: &Conv2dSpec) -> f64 {
    let tf32 = spec.x.dtype == DType::F32 && spec.accuracy >= Accuracy::Tf32;
    if tf32 { 2.0 * DType::F16.unit_roundoff() } else { 0.0 }
}

fn in_its_words(spec: &Conv2dSpec, p: &Problem, channels_last: bool) -> CudnnConv2dSpec {
    CudnnConv2dSpec {
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

/// cuDNN's weight gradient, where it can write dw as it lies.
#[derive(Debug)]
pub(super) struct CudnnWeight {
    pub(super) gradient: CudnnWeightGrad,
    dw: TensorDesc,
    operand_roundings: f64,
}

impl CudnnWeight {
    /// `None` where cuDNN has no algorithm for it.
    pub(super) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Option<Self> {
        if !Cudnn::supports(spec, p) {
            return None;
        }
        let channels_last = channels_last(spec)?;
        let order = if channels_last { [0, 2, 3, 1] } else { [0, 1, 2, 3] };
        let layout = Layout::with_order(&[p.k, p.c_group(), p.r, p.s], &order).ok()?;
        let dw = TensorDesc { dtype: spec.x.dtype, layout };
        let gradient = CudnnWeightGrad::new(gpu, &in_its_words(spec, p, channels_last));
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
    gpu: &'static Gpu,
    gradient: CudnnDataGrad,
    /// As in [`Cudnn`].
    otherwise: OnceLock<General>,
    filter: DenseFilter,
    spec: Conv2dSpec,
    problem: Problem,
    channels_last: bool,
}

impl CudnnData {
    /// `None` where cuDNN has no algorithm for it.
    pub(super) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Result<Option<Self>> {
        let Some(channels_last) = channels_last(spec).filter(|_| Cudnn::supports(spec, p)) else {
            return Ok(None);
        };
        let gradient = CudnnDataGrad::new(gpu, &in_its_words(spec, p, channels_last));
        let Ok(gradient) =
            gradient.inspect_err(|error| tracing::debug!(%error, "data gradient without cuDNN"))
        else {
            return Ok(None);
        };
        let filter = DenseFilter::new(gpu, spec, p, channels_last)?;
        let (spec, problem, otherwise) = (spec.clone(), *p, OnceLock::new());
        Ok(Some(CudnnData { gpu, gradient, otherwise, filter, spec, problem, channels_last }))
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
        let aligned = (w as usize).is_multiple_of(CudnnConv2d::ALIGNMENT);
        let w = if self.filter.is_packed() && aligned {
            w
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.filter.pack(stream, w, scratch)? };
            scratch.cast_const()
        };
        let (dy, dx) = (operands.x, operands.y);
        if !self.gradient.takes([w, dx, dy]) {
            let otherwise = || {
                let (method, direction) = (Method::Im2colGemm, Direction::BackwardData);
                General::new(
                    self.gpu,
                    &self.spec,
                    &self.problem,
                    method,
                    direction,
                    self.channels_last,
                )
            };
            // SAFETY: the caller's promise; the filter is packed in the same order.
            return unsafe { get_or_make(&self.otherwise, otherwise)?.run(stream, w, operands) };
        }
        let rest = scratch.wrapping_add(self.packed_bytes());
        // SAFETY: the caller's promise.
        unsafe { self.gradient.run(w, dy, dx, rest, stream) }
    }
}

/// What is there, or is made now.
fn get_or_make<T>(slot: &OnceLock<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(value) = slot.get() {
        return Ok(value);
    }
    let value = make()?;
    Ok(slot.get_or_init(|| value))
}

impl Cudnn {
    pub(super) fn supports(spec: &Conv2dSpec, p: &Problem) -> bool {
        let sizes = [p.n * p.c * p.h * p.w, p.n * p.k * p.oh * p.ow, p.k * p.taps()];
        channels_last(spec).is_some()
            && sizes.iter().all(|&size| size > 0 && size < 1 << 31)
            && CudnnConv2d::available().is_ok()
    }

    /// Whether cuDNN has a kernel for a spec that it supports.
    ///
    /// # Errors
    /// As [`Cudnn::new`], if it has none.
    pub(super) fn check(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Result<()> {
        let channels_last = channels_last(spec).unwrap_or(false);
        CudnnConv2d::check(gpu, &in_its_words(spec, p, channels_last))
    }

    pub(super) fn new(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        p: &Problem,
        tuning: Tuning,
    ) -> Result<Self> {
        let channels_last = channels_last(spec).unwrap_or(false);
        let kernel = match tuning {
            Tuning::Model => CudnnKernel::First,
            Tuning::Cached | Tuning::Search { .. } => CudnnKernel::Fastest,
        };
        let convolution = CudnnConv2d::new(gpu, &in_its_words(spec, p, channels_last), kernel)?;
        let needed = spec.bias.is_some() || spec.activation != Activation::Identity;
        let epilogue = needed.then(|| gpu.kernel(&epilogue_kernel(spec))).transpose()?;
        let filter = DenseFilter::new(gpu, spec, p, channels_last)?;
        let (spec, problem, otherwise) = (spec.clone(), *p, OnceLock::new());
        Ok(Cudnn {
            gpu,
            convolution,
            otherwise,
            filter,
            epilogue,
            spec,
            problem,
            channels_last,
            kernel,
        })
    }

    pub(super) fn explain(&self) -> String {
        let version = CudnnConv2d::version().unwrap_or_default();
        let kernel = match self.kernel {
            CudnnKernel::First => "its heuristic's first kernel",
            CudnnKernel::Fastest => "the fastest of its kernels",
        };
        format!("cuDNN {version}, implicit matrix product, {kernel}")
    }

    pub(super) fn packed_bytes(&self) -> usize {
        self.filter.bytes()
    }

    /// True if the filter at `w` can be read as it is: it lies as its copy would, and as aligned as cuDNN's
    /// fast kernels want it.
    pub(super) fn reads_in_place(&self, w: *const u8) -> bool {
        self.filter.is_packed() && (w as usize).is_multiple_of(CudnnConv2d::ALIGNMENT)
    }

    pub(super) fn scratch_bytes(&self) -> usize {
        self.convolution.workspace_bytes()
    }

    pub(super) fn packed_form(&self) -> PackedForm {
        // The order of the filter is another one for each layout.
        PackedForm {
            dtype: self.spec.x.dtype,
            products: usize::from(self.channels_last),
            few_taps: false,
        }
    }

    /// As of a sum of products; halves are rounded once more before bias and activation.
    pub(super) fn tolerance(&self) -> f64 {
        let sums = (2 * self.problem.taps() + 2) as f64 * DType::F32.unit_roundoff();
        let dtype = self.spec.x.dtype;
        let stored_twice = dtype != DType::F32 && self.epilogue.is_some();
        let stored = if stored_twice { dtype.unit_roundoff() } else { 0.0 };
        sums + operand_roundings(&self.spec) + stored
    }

    /// # Safety
    /// As [`super::Engine::pack`].
    pub(super) unsafe fn pack(&self, stream: &Stream, w: *const u8, packed: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.filter.pack(stream, w, packed) }
    }

    /// # Safety
    /// As [`super::Engine::run`].
    pub(super) unsafe fn run(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
        scratch: *mut u8,
    ) -> Result<()> {
        if !self.convolution.takes([packed, operands.x, operands.y]) {
            let otherwise = || {
                let (method, direction) = (Method::Im2colGemm, Direction::Forward);
                General::new(
                    self.gpu,
                    &self.spec,
                    &self.problem,
                    method,
                    direction,
                    self.channels_last,
                )
            };
            // SAFETY: the caller's promise; the filter is packed in the same order.
            return unsafe {
                get_or_make(&self.otherwise, otherwise)?.run(stream, packed, operands)
            };
        }
        // SAFETY: the caller's promise.
        unsafe { self.convolution.run(operands.x, packed, operands.y, scratch, stream)? };
        let Some(kernel) = self.epilogue else { return Ok(()) };
        let p = &self.problem;
        let elements = p.y_shape().iter().product::<usize>();
        let (bias, bias_stride, bias_is_float) = bias_of(&self.spec, operands.bias);
        let params = EpilogueParams {
            y: operands.y,
            bias,
            bias_stride,
            elements: elements as i64,
            run: if self.channels_last { 1 } else { (p.oh * p.ow) as i64 },
            channels: p.k as i32,
            bias_is_float,
        };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, one_thread_each(elements), &params) }
    }
}

fn epilogue_kernel(spec: &Conv2dSpec) -> KernelSpec {
    kernel(&EPILOGUE, "epilogue", spec.x.dtype)
        .define("EPILOGUE", epilogue(spec.activation))
        .define("PARAMS_SIZE", size_of::<EpilogueParams>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Approximate;

    #[test]
    fn kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for spec in super::super::test_specs() {
            let activation = Activation::Gelu(Approximate::None);
            kernels.push(epilogue_kernel(&Conv2dSpec { activation, ..spec }));
        }
        crate::cuda::compile_tests::check_compiles(&kernels);
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
