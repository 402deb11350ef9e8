//! The engine that computes a causal convolution on GPUs.

use super::{CausalConv1d, CausalConv1dPlan, algorithms, cost};
use crate::causal_conv1d::gpu::direct::Direct;
use crate::causal_conv1d::gpu::im2col::Im2colGemm;
use crate::causal_conv1d::gpu::im2col::gradients::DenseBackward;
use crate::causal_conv1d::{
    CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dConfiguration, CausalConv1dGrads,
    CausalConv1dOutputs,
};
use crate::plan::{Engine, Setup};
use crate::{Device, Result, TensorRef, Workspace};

/// The engine on GPUs.
#[derive(Clone, Debug)]
pub struct Gpu(Kernels);

#[derive(Clone, Debug)]
enum Kernels {
    /// The direct method, with its gradients.
    Direct(Box<Direct>),
    /// The method im2col + GEMM, with the method for its gradients.
    Im2colGemm(Box<Im2colGemm>, GradientKernels),
}

/// The method that computes the gradients of a plan with im2col + GEMM.
#[derive(Clone, Debug)]
enum GradientKernels {
    Depthwise(Box<Direct>),
    Dense(Box<DenseBackward>),
}

impl GradientKernels {
    fn workspace_bytes(&self) -> usize {
        match self {
            GradientKernels::Depthwise(direct) => direct.workspace_bytes(),
            GradientKernels::Dense(dense) => dense.workspace_bytes(),
        }
    }
}

impl Engine<CausalConv1d> for Gpu {
    type Place = Device;

    fn algorithms(setup: &Setup<'_, CausalConv1d, Device>) -> Result<Vec<CausalConv1dAlgorithm>> {
        Ok(algorithms(setup.problem))
    }

    fn new(
        setup: &Setup<'_, CausalConv1d, Device>,
        configuration: &CausalConv1dConfiguration,
    ) -> Result<Self> {
        setup.require(configuration.algorithm, &algorithms(setup.problem))?;
        let &Setup { spec, problem, place, options } = setup;
        let direct = || Ok(Box::new(Direct::new(place, spec, problem, options.batch_invariant)?));
        let kernels = match configuration.algorithm {
            CausalConv1dAlgorithm::Direct => Kernels::Direct(direct()?),
            CausalConv1dAlgorithm::Im2colGemm => {
                let gemm = Im2colGemm::new(place, spec, problem)?;
                let gradients = match problem.dense {
                    true => {
                        GradientKernels::Dense(Box::new(DenseBackward::new(place, spec, problem)?))
                    }
                    false => GradientKernels::Depthwise(direct()?),
                };
                Kernels::Im2colGemm(Box::new(gemm), gradients)
            }
        };
        Ok(Gpu(kernels))
    }

    fn configuration(&self) -> CausalConv1dConfiguration {
        CausalConv1dConfiguration::new(match &self.0 {
            Kernels::Direct(_) => CausalConv1dAlgorithm::Direct,
            Kernels::Im2colGemm(..) => CausalConv1dAlgorithm::Im2colGemm,
        })
    }

    fn workspace_bytes(&self) -> usize {
        match &self.0 {
            Kernels::Direct(direct) => direct.workspace_bytes(),
            Kernels::Im2colGemm(gemm, gradients) => {
                gemm.workspace_bytes().max(gradients.workspace_bytes())
            }
        }
    }

    fn explain(&self, plan: &CausalConv1dPlan) -> String {
        let how = match &self.0 {
            Kernels::Direct(direct) => direct.explain(),
            Kernels::Im2colGemm(gemm, _) => gemm.explain(),
        };
        format!(" on {}: {how}", plan.device())
    }

    /// Returns the configuration as it is: there are no parameters.
    fn complete(
        _: &Setup<'_, CausalConv1d, Device>,
        configuration: &CausalConv1dConfiguration,
    ) -> Result<CausalConv1dConfiguration> {
        Ok(*configuration)
    }

    fn cost(
        setup: &Setup<'_, CausalConv1d, Device>,
        configuration: &CausalConv1dConfiguration,
    ) -> Result<f64> {
        Ok(cost(setup.problem, configuration))
    }
}

impl Gpu {
    /// Computes the outputs. The caller has made the same checks as for [`Cpu::run`](super::Cpu::run).
    pub(super) fn run(
        &self,
        _: &CausalConv1dPlan,
        args: &CausalConv1dArgs<'_>,
        outputs: &CausalConv1dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        match &self.0 {
            Kernels::Direct(direct) => direct.run(args, outputs, workspace),
            Kernels::Im2colGemm(gemm, _) => gemm.run(args, outputs, workspace),
        }
    }

    /// Computes the gradients. The caller has made the same checks as for [`Cpu::backward`](super::Cpu::backward).
    pub(super) fn backward(
        &self,
        plan: &CausalConv1dPlan,
        args: &CausalConv1dArgs<'_>,
        given: (&TensorRef<'_>, Option<&TensorRef<'_>>),
        grads: &CausalConv1dGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        match &self.0 {
            Kernels::Direct(direct)
            | Kernels::Im2colGemm(_, GradientKernels::Depthwise(direct)) => {
                direct.backward(&plan.spec, args, given, grads, workspace)
            }
            Kernels::Im2colGemm(_, GradientKernels::Dense(dense)) => {
                dense.run(&plan.spec, args, given, grads, workspace)
            }
        }
    }

    /// The im2col matrices, the weight as a matrix, and the product of the two. `None` for other algorithms, and if
    /// there is nothing to compute.
    pub(super) fn stages(
        &self,
        plan: &CausalConv1dPlan,
        args: &CausalConv1dArgs<'_>,
    ) -> Result<Option<[Vec<f32>; 3]>> {
        match &self.0 {
            Kernels::Im2colGemm(gemm, _) if !plan.problem.is_empty() => {
                gemm.stages(args, plan.device()).map(Some)
            }
            _ => Ok(None),
        }
    }
}
