//! The gradients on a device. All sums are formed in an order that does not depend on timing.

mod bias;
mod convolved_data;
mod im2col_weight;
mod parts;
mod split_weight;
pub(super) mod weight_product;

use self::bias::BiasGradient;
use self::convolved_data::{MirroredMethod, TransposedMethod};
use self::im2col_weight::{Im2colWeightMethod, summed};
pub(super) use self::parts::OutputKernels;
use self::split_weight::SplitWeightMethod;
use super::Operands;
use super::cudnn::{CudnnDataMethod, CudnnWeight};
use super::implicit_gemm::data_gradient::ImplicitDataMethod;
use super::task::Task;
use super::winograd_gemm::weight_gradient::WinogradWeightMethod;
use crate::conv2d::{Conv2dAlgorithm, Problem};
use crate::gpu::{Gpu, Stream};
use crate::{Result, TensorDesc};
use std::fmt::Debug;

/// Every way to compute the gradient of x. The first one computes it that takes the task: each is expected to be ahead
/// of those behind it.
static DATA: [&dyn GradientMethod<dyn DataGradient>; 4] =
    [&MirroredMethod, &CudnnDataMethod, &ImplicitDataMethod, &TransposedMethod];

/// Every way to compute the gradient of the filter, in the same order.
static WEIGHT: [&dyn GradientMethod<dyn WeightGradient>; 3] =
    [&SplitWeightMethod, &WinogradWeightMethod, &Im2colWeightMethod];

/// Variants of the kernels of all gradients.
pub(super) fn kernels() -> impl Iterator<Item = &'static &'static str> {
    let data = DATA.into_iter().flat_map(|method| method.kernels());
    data.chain(WEIGHT.into_iter().flat_map(|method| method.kernels())).chain(bias::KERNELS)
}

/// A way to compute a gradient.
pub(super) trait GradientMethod<G: ?Sized>: Sync {
    /// Variants of its own kernels, as lines of `verify/kernels.txt`.
    fn kernels(&self) -> &'static [&'static str] {
        &[]
    }

    /// The gradient bound to the device; `None` if another method is expected to be faster, or there is no kernel.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Option<Box<G>>>;
}

/// A gradient of x whose kernels are loaded.
pub(super) trait DataGradient: Debug + Send + Sync {
    /// True if the filter that [`DataGradient::run`] takes is the one turned around.
    fn is_mirrored(&self) -> bool {
        false
    }

    /// Outputs of a tile, of Winograd's algorithms.
    fn tile(&self) -> Option<usize> {
        None
    }

    fn scratch_bytes(&self) -> usize;

    fn tolerance(&self) -> f64;

    /// dx, which is `y` of the operands, of dy, which is `x`.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// The filter at `w` and the operands must have the spec's layouts and be on the stream's device, with
    /// [`DataGradient::scratch_bytes`] of scratch memory.
    unsafe fn run(&self, stream: &Stream, w: *const u8, operands: Operands) -> Result<()>;
}

/// A gradient of the filter whose kernels are loaded.
pub(super) trait WeightGradient: Debug + Send + Sync {
    /// As [`DataGradient::tile`].
    fn tile(&self) -> Option<usize> {
        None
    }

    fn scratch_bytes(&self) -> usize;

    fn tolerance(&self) -> f64;

    /// `dw`, with strides and a type of its own, of `x` and `dy`.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// The tensors must have these layouts and be on the stream's device, with [`WeightGradient::scratch_bytes`] of
    /// scratch memory.
    unsafe fn run(&self, stream: &Stream, operands: &WeightOperands<'_>) -> Result<()>;
}

/// Device addresses of a run of a weight gradient.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightOperands<'a> {
    pub(crate) x: *const u8,
    pub(crate) dy: *const u8,
    pub(crate) dw: *mut u8,
    /// The strides and the type of dw.
    pub(crate) desc: &'a TensorDesc,
    pub(crate) scratch: *mut u8,
}

/// How the gradients of a convolution are computed.
#[derive(Debug)]
pub(crate) struct Backward {
    data: Box<dyn DataGradient>,
    /// Taken for every dw that it can write, at addresses that it has a kernel for.
    cudnn_weight: Option<CudnnWeight>,
    weight: Box<dyn WeightGradient>,
    bias: BiasGradient,
    problem: Problem,
}

impl Backward {
    /// Compiles and loads the kernels of a plan with the task's algorithm. Where they are no products of transforms, the gradients are
    /// cuDNN's if it has kernels for them; with `cudnn` the weight gradient is always, and with `implicit_gemm` gradients
    /// are by products of f16 or bf16.
    ///
    /// # Errors
    /// As of plans.
    pub(crate) fn new(gpu: &'static Gpu, task: &Task<'_>) -> Result<Self> {
        let (_, data) = first(&DATA, gpu, task)?;
        let (place, weight) = first(&WEIGHT, gpu, task)?;
        // The last one is the slowest.
        let cudnn = task.algorithm() == Conv2dAlgorithm::Cudnn || place + 1 == WEIGHT.len();
        Ok(Backward {
            data,
            cudnn_weight: cudnn.then(|| CudnnWeight::new(gpu, task)).flatten(),
            weight,
            bias: BiasGradient::new(gpu, task.spec, task.problem)?,
            problem: *task.problem,
        })
    }

    /// True if the filter of [`Backward::data`] is the turned one.
    pub(crate) fn data_is_mirrored(&self) -> bool {
        self.data.is_mirrored()
    }

    /// Outputs of a tile, where the data gradient is one of Winograd's.
    pub(crate) fn data_tile(&self) -> Option<usize> {
        self.data.tile()
    }

    /// The same of the weight gradient.
    pub(crate) fn weight_tile(&self) -> Option<usize> {
        self.weight.tile()
    }

    /// Bytes of workspace of [`Backward::data`].
    pub(crate) fn data_bytes(&self) -> usize {
        self.data.scratch_bytes()
    }

    /// Bytes of workspace of [`Backward::weight`].
    pub(crate) fn weight_bytes(&self) -> usize {
        let cudnn = self.cudnn_weight.as_ref().map_or(0, |c| c.gradient.workspace_bytes());
        cudnn.max(self.weight.scratch_bytes())
    }

    /// Bytes of workspace of [`Backward::bias`].
    pub(crate) fn bias_bytes(&self) -> usize {
        self.bias.scratch_bytes()
    }

    pub(crate) fn data_tolerance(&self) -> f64 {
        self.data.tolerance()
    }

    pub(crate) fn weight_tolerance(&self) -> f64 {
        let own = self.weight.tolerance();
        match &self.cudnn_weight {
            Some(cudnn) => {
                own.max(summed(&self.problem, self.problem.n) + cudnn.operand_roundings())
            }
            None => own,
        }
    }

    pub(crate) fn bias_tolerance(&self) -> f64 {
        self.bias.tolerance()
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
        let operands = Operands { x: dy, bias: None, residual: None, y: dx, scratch };
        // SAFETY: the caller's promise.
        unsafe { self.data.run(stream, w, operands) }
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
        operands: &WeightOperands<'_>,
    ) -> Result<()> {
        let &WeightOperands { x, dy, dw, desc, scratch } = operands;
        if let Some(cudnn) = &self.cudnn_weight
            && cudnn.writes(desc)
            && cudnn.gradient.takes([dw, x, dy])
        {
            let tensors = [dw, x.cast_mut(), dy.cast_mut()];
            // SAFETY: the caller's promise.
            return unsafe { cudnn.gradient.run(tensors, scratch, stream) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.weight.run(stream, operands) }
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
        db: (*mut u8, &TensorDesc),
        scratch: *mut u8,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.bias.run(stream, dy, db, scratch) }
    }
}

/// What the first method that takes the task makes of it, with its place in the list.
fn first<G: ?Sized>(
    methods: &[&dyn GradientMethod<G>],
    gpu: &'static Gpu,
    task: &Task<'_>,
) -> Result<(usize, Box<G>)> {
    for (place, method) in methods.iter().enumerate() {
        if let Some(gradient) = method.prepare(gpu, task)? {
            return Ok((place, gradient));
        }
    }
    Err(crate::Error::unsupported("a gradient of this convolution", "no method computes it"))
}

#[cfg(test)]
mod tests {
    use super::{bias, im2col_weight, parts};

    #[test]
    fn kernels_compile_without_spills() {
        let kernels: Vec<_> = crate::conv2d::gpu::test_specs()
            .iter()
            .flat_map(|spec| {
                [
                    im2col_weight::weight_kernel(spec),
                    bias::bias_kernel(spec),
                    parts::parts_kernel(spec.x.dtype),
                ]
            })
            .collect();
        crate::gpu::compile_tests::check_compiles(&kernels);
    }
}
