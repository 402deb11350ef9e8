//! The gradients on a GPU. All sums are added in an order that does not depend on timing.

mod bias;
mod convolved_data;
mod cudnn_gradient;
mod im2col_weight;
mod implicit_data;
mod lines;
mod split_weight;
mod winograd_weight;

use self::bias::BiasGradient;
use self::convolved_data::{MirroredMethod, TransposedMethod};
use self::cudnn_gradient::{CudnnDataMethod, CudnnWeight};
use self::im2col_weight::{Im2colWeightMethod, summed};
use self::implicit_data::ImplicitDataMethod;
use self::split_weight::SplitWeightMethod;
use self::winograd_weight::WinogradWeightMethod;
use super::gradient::{DataGradient, GradientMethod, WeightGradient, WeightOperands};
use super::task::Task;
use crate::Result;
use crate::conv2d::{Conv2dAlgorithm, Problem};
use crate::gpu::{Gpu, Stream};

/// The methods for the gradient of x, the fastest first. The first that supports the task computes it.
static DATA: [&dyn GradientMethod<dyn DataGradient>; 4] =
    [&MirroredMethod, &CudnnDataMethod, &ImplicitDataMethod, &TransposedMethod];

/// The methods for the gradient of the filter, the fastest first.
static WEIGHT: [&dyn GradientMethod<dyn WeightGradient>; 3] =
    [&SplitWeightMethod, &WinogradWeightMethod, &Im2colWeightMethod];

/// Variants of the kernels of all gradients.
pub(super) fn kernels() -> impl Iterator<Item = &'static &'static str> {
    let data = DATA.into_iter().flat_map(|method| method.kernels());
    data.chain(WEIGHT.into_iter().flat_map(|method| method.kernels())).chain(bias::KERNELS)
}

/// The prepared gradients of a convolution.
#[derive(Debug)]
pub(crate) struct Backward {
    pub(crate) data: Box<dyn DataGradient>,
    /// Taken for every dw that it can write, at addresses that it has a kernel for.
    cudnn_weight: Option<CudnnWeight>,
    weight: Box<dyn WeightGradient>,
    pub(crate) bias: BiasGradient,
    problem: Problem,
}

impl Backward {
    /// Compiles and loads the kernels of a plan with the task's algorithm. Gradients that Winograd's algorithm does not
    /// compute are cuDNN's if it has kernels for them. With `cudnn` the weight gradient is always cuDNN's, and with
    /// `implicit_gemm` gradients are products of f16 or bf16.
    ///
    /// # Errors
    /// The errors of a plan.
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

    /// Bytes of workspace that are enough for each of the gradients.
    pub(crate) fn scratch_bytes(&self) -> usize {
        let weight = self.weight_bytes();
        self.data.scratch_bytes().max(weight).max(self.bias.scratch_bytes())
    }

    /// Bytes of workspace of [`Backward::weight`].
    pub(crate) fn weight_bytes(&self) -> usize {
        let cudnn = self.cudnn_weight.as_ref().map_or(0, |c| c.gradient.workspace_bytes());
        cudnn.max(self.weight.scratch_bytes())
    }

    /// The side of the output tile, if the weight gradient is computed by Winograd's algorithm.
    pub(crate) fn weight_tile(&self) -> Option<usize> {
        self.weight.tile()
    }

    /// Tolerances of the gradients of x, the filter and the bias.
    pub(crate) fn tolerances(&self) -> [f64; 3] {
        let own = self.weight.tolerance();
        let weight = self.cudnn_weight.as_ref().map_or(own, |cudnn| {
            own.max(summed(&self.problem, self.problem.n) + cudnn.operand_roundings())
        });
        [self.data.tolerance(), weight, self.bias.tolerance()]
    }

    /// Computes `dw`, which has its own strides and type, from `x` and `dy`.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// As [`WeightGradient::run`], with [`Backward::weight_bytes`].
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
}

/// The first method that supports the task, prepared for it, with its index in the list.
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
    use super::{bias, im2col_weight};
    use crate::conv2d::gpu::shared::parts;

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
