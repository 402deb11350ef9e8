//! cuDNN's gradients, where it has kernels for them.

use super::implicit_data::ImplicitDataMethod;
use crate::conv2d::gpu::Operands;
use crate::conv2d::gpu::cudnn::{
    CudnnMethod, Otherwise, channels_last, in_its_words, operand_roundings,
};
use crate::conv2d::gpu::general::{DenseFilter, Direction};
use crate::conv2d::gpu::gradient::{DataGradient, GradientMethod};
use crate::conv2d::gpu::method::supports;
use crate::conv2d::gpu::prepared::Prepared;
use crate::conv2d::gpu::task::Task;
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::{Choice, Gpu, Operation, Stream, VendorConvolution};
use crate::{DType, Layout, Result, TensorDesc};

/// cuDNN's weight gradient, where it can write dw as it lies.
#[derive(Debug)]
pub(super) struct CudnnWeight {
    pub(super) gradient: VendorConvolution,
    dw: TensorDesc,
    operand_roundings: f64,
}

impl CudnnWeight {
    /// `None` where cuDNN has no algorithm for it.
    pub(super) fn new(gpu: &'static Gpu, task: &Task<'_>) -> Option<Self> {
        let (spec, p) = (task.spec, task.problem);
        if !supports(&CudnnMethod, gpu, task) {
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

/// cuDNN's data gradient, if it has a kernel and no method of Windrow is expected to be faster.
pub(super) struct CudnnDataMethod;

impl GradientMethod<dyn DataGradient> for CudnnDataMethod {
    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Option<Box<dyn DataGradient>>> {
        if task.is_few() || ImplicitDataMethod::leads(gpu, task) {
            return Ok(None);
        }
        let data = CudnnData::new(gpu, task)?;
        Ok(data.map(|data| Box::new(data) as Box<dyn DataGradient>))
    }
}

#[derive(Debug)]
struct CudnnData {
    gradient: VendorConvolution,
    otherwise: Otherwise,
    filter: DenseFilter,
    spec: Conv2dSpec,
    problem: Problem,
}

impl CudnnData {
    /// `None` where cuDNN has no algorithm for it.
    fn new(gpu: &'static Gpu, task: &Task<'_>) -> Result<Option<Self>> {
        let (spec, p) = (task.spec, task.problem);
        let Some(channels_last) = channels_last(spec).filter(|_| supports(&CudnnMethod, gpu, task))
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
        let otherwise = Otherwise::new(gpu, task, Direction::BackwardData, channels_last);
        let (spec, problem) = (spec.clone(), *p);
        Ok(Some(CudnnData { gradient, otherwise, filter, spec, problem }))
    }
}

impl DataGradient for CudnnData {
    fn scratch_bytes(&self) -> usize {
        self.filter.bytes() + self.gradient.workspace_bytes()
    }

    /// The tolerance of a sum of products.
    fn tolerance(&self) -> f64 {
        let terms = self.problem.k_group() * self.problem.r * self.problem.s;
        (2 * terms + 2) as f64 * DType::F32.unit_roundoff() + operand_roundings(&self.spec)
    }

    unsafe fn run(&self, stream: &Stream, w: *const u8, operands: Operands) -> Result<()> {
        let scratch = operands.scratch;
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
        let rest = scratch.wrapping_add(self.filter.bytes());
        // SAFETY: the caller's promise.
        unsafe { self.gradient.run([w.cast_mut(), dx, dy.cast_mut()], rest, stream) }
    }
}
