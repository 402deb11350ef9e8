//! What computes a causal convolution, on the CPU and on CUDA devices.

use super::cpu::backward::{Backward, Gradients};
use super::cpu::dense_backward::DenseBackward;
use super::cpu::im2col::{Im2colGemm, Stages};
use super::cpu::{Forward, Inputs, Operand, Parameters, Tokens};
use super::gpu;
use super::sequences::Sequences;
use super::{
    CausalConv1d, CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dConfiguration,
    CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dPlan, Problem,
};
use crate::cpu::{Isa, SimdElement};
use crate::dtype::with_element;
use crate::plan::{Engine, Operator, Setup};
use crate::{Device, Error, Result, TensorMut, TensorRef, Workspace};

/// [`Error::Unsupported`] but for the one way of an operator that is computed in one.
pub(super) fn require_direct<O: Operator<Configuration = CausalConv1dConfiguration>, P: Copy>(
    setup: &Setup<'_, O, P>,
    configuration: &CausalConv1dConfiguration,
) -> Result<()> {
    setup.require(configuration.algorithm, &[CausalConv1dAlgorithm::Direct])?;
    if *configuration == CausalConv1dConfiguration::new(CausalConv1dAlgorithm::Direct) {
        return Ok(());
    }
    Err(Error::unsupported(format!("{} with {configuration}", O::NAME), "it has no parameters"))
}

/// On the CPU.
#[derive(Clone, Debug)]
pub struct Cpu {
    isa: Isa,
    problem: Problem,
    forward: Algorithm,
    backward: Gradient,
}

#[derive(Clone, Debug)]
enum Algorithm {
    Direct(Forward),
    Im2colGemm(Im2colGemm),
}

/// How gradients are computed.
#[derive(Clone, Debug)]
enum Gradient {
    Depthwise(Backward),
    Dense(DenseBackward),
}

/// On a CUDA device.
#[derive(Clone, Debug)]
pub struct Gpu(Kernels);

#[derive(Clone, Debug)]
enum Kernels {
    /// With its gradients.
    Direct(Box<gpu::Direct>),
    /// With what computes the gradients.
    Im2colGemm(Box<gpu::im2col::Im2colGemm>, gpu::GradientKernels),
}

/// All algorithms, the fastest first.
fn algorithms(problem: &Problem) -> Vec<CausalConv1dAlgorithm> {
    match problem.dense {
        true => vec![CausalConv1dAlgorithm::Im2colGemm],
        false => CausalConv1dAlgorithm::ALL.to_vec(),
    }
}

/// Bytes: the im2col matrix is written and read besides.
fn cost(problem: &Problem, configuration: &CausalConv1dConfiguration) -> f64 {
    match configuration.algorithm {
        CausalConv1dAlgorithm::Direct => 1.0,
        CausalConv1dAlgorithm::Im2colGemm => 1.0 + problem.width as f64,
    }
}

impl Engine<CausalConv1d> for Cpu {
    type Place = Isa;

    fn algorithms(setup: &Setup<'_, CausalConv1d, Isa>) -> Result<Vec<CausalConv1dAlgorithm>> {
        Ok(algorithms(setup.problem))
    }

    fn new(
        setup: &Setup<'_, CausalConv1d, Isa>,
        configuration: &CausalConv1dConfiguration,
    ) -> Result<Self> {
        let CausalConv1dConfiguration { algorithm, channels, tokens, threads } = *configuration;
        setup.require(algorithm, &algorithms(setup.problem))?;
        let (spec, problem, isa) = (setup.spec, *setup.problem, setup.place);
        let most = setup.threads();
        let (threads, activation) = (threads.map_or(most, |t| t.min(most)), spec.activation);
        let gemm = || Im2colGemm::new(problem, activation, isa, threads);
        let backward = match problem.dense {
            true => Gradient::Dense(DenseBackward::new(gemm()?)?),
            false => Gradient::Depthwise(Backward::new(problem, activation, threads)?),
        };
        let forward = match algorithm {
            CausalConv1dAlgorithm::Direct => {
                let strides = (spec.x.strides(), spec.y.strides());
                let (element, task) = (spec.x.dtype.size(), [channels, tokens]);
                let direct = Forward::new(problem, activation, strides, element, threads, task)?;
                Algorithm::Direct(direct)
            }
            CausalConv1dAlgorithm::Im2colGemm => Algorithm::Im2colGemm(gemm()?),
        };
        Ok(Cpu { isa, problem, forward, backward })
    }

    fn configuration(&self) -> CausalConv1dConfiguration {
        match &self.forward {
            Algorithm::Direct(direct) => {
                let algorithm = CausalConv1dAlgorithm::Direct;
                let [channels, tokens, threads] = direct.task().map(Some);
                CausalConv1dConfiguration { algorithm, channels, tokens, threads }
            }
            Algorithm::Im2colGemm(_) => {
                CausalConv1dConfiguration::new(CausalConv1dAlgorithm::Im2colGemm)
            }
        }
    }

    /// Forward and backward.
    fn workspace_bytes(&self) -> usize {
        let forward = match &self.forward {
            Algorithm::Direct(direct) => direct.workspace_bytes(),
            Algorithm::Im2colGemm(gemm) => gemm.workspace_bytes(),
        };
        forward.max(match &self.backward {
            Gradient::Depthwise(backward) => backward.workspace_bytes(),
            Gradient::Dense(backward) => backward.workspace_bytes(),
        })
    }

    fn explain(&self, _: &CausalConv1dPlan) -> String {
        let how = match &self.forward {
            Algorithm::Direct(direct) => direct.explain(),
            Algorithm::Im2colGemm(gemm) => gemm.explain(),
        };
        format!(" on {}: {how}", self.isa.name())
    }

    fn variants(
        setup: &Setup<'_, CausalConv1d, Isa>,
        algorithm: CausalConv1dAlgorithm,
    ) -> Vec<CausalConv1dConfiguration> {
        let base = CausalConv1dConfiguration::new(algorithm);
        let mut all = vec![base];
        if algorithm == CausalConv1dAlgorithm::Direct {
            for channels in [16, 64, 256, 1024] {
                for tokens in [64, 256, 1024, 4096] {
                    let (channels, tokens) = (Some(channels), Some(tokens));
                    all.push(CausalConv1dConfiguration { channels, tokens, ..base });
                }
            }
            if setup.threads() > 1 {
                all.push(CausalConv1dConfiguration { threads: Some(1), ..base });
            }
        }
        all
    }

    fn cost(
        setup: &Setup<'_, CausalConv1d, Isa>,
        configuration: &CausalConv1dConfiguration,
    ) -> Result<f64> {
        Ok(cost(setup.problem, configuration))
    }
}

impl Cpu {
    /// Views and aliasing have been checked.
    pub(super) fn run(
        &self,
        plan: &CausalConv1dPlan,
        args: &CausalConv1dArgs<'_>,
        outputs: &mut CausalConv1dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let sequences = self.sequences(args)?;
        let scratch = workspace.take(self.workspace_bytes())?.as_mut_ptr();
        with_element!(plan.spec.x.dtype, T => self.run_as::<T>(args, sequences, outputs, scratch));
        Ok(())
    }

    fn run_as<T: SimdElement>(
        &self,
        args: &CausalConv1dArgs<'_>,
        sequences: Sequences<'_>,
        outputs: &mut CausalConv1dOutputs<'_>,
        scratch: *mut u8,
    ) {
        let inputs = self.inputs::<T>(args, sequences);
        let y = Operand::<T>::output(&mut outputs.y);
        // SAFETY: views, aliasing, indices and the size of the workspace have been checked.
        unsafe {
            match &self.forward {
                Algorithm::Direct(direct) => direct.run(self.isa, &inputs, y, scratch),
                Algorithm::Im2colGemm(gemm) => {
                    gemm.run(&inputs, y, scratch);
                }
            }
            if let Some(final_states) = &mut outputs.final_states {
                let (rows, d) = (final_states.shape()[0], self.problem.d);
                inputs.tokens.copy_final_states(rows, d, Operand::output(final_states));
            }
        }
    }

    /// As [`Cpu::run`], the gradients for those of `y` and of the final states.
    pub(super) fn backward(
        &self,
        plan: &CausalConv1dPlan,
        args: &CausalConv1dArgs<'_>,
        given: (&TensorRef<'_>, Option<&TensorRef<'_>>),
        grads: &mut CausalConv1dGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let sequences = self.sequences(args)?;
        let scratch = workspace.take(self.workspace_bytes())?.as_mut_ptr();
        with_element!(plan.spec.x.dtype, T => {
            self.backward_as::<T>(args, sequences, given, grads, scratch);
        });
        Ok(())
    }

    fn backward_as<T: SimdElement>(
        &self,
        args: &CausalConv1dArgs<'_>,
        sequences: Sequences<'_>,
        (dy, dfinal_states): (&TensorRef<'_>, Option<&TensorRef<'_>>),
        grads: &mut CausalConv1dGrads<'_>,
        scratch: *mut u8,
    ) {
        let gradients = Gradients::<T> {
            dy: Operand::input(dy),
            dfinal_states: dfinal_states.map(Operand::input),
            dx: grads.dx.as_mut().map(Operand::output),
            dinitial_states: grads.dinitial_states.as_mut().map(Operand::output),
        };
        let sums = (
            grads.dweight.as_mut().map(TensorMut::reborrow),
            grads.dbias.as_mut().map(TensorMut::reborrow),
        );
        let inputs = self.inputs(args, sequences);
        // SAFETY: views, aliasing, indices and the size of the workspace have been checked.
        unsafe {
            match &self.backward {
                Gradient::Depthwise(backward) => {
                    backward.run(self.isa, &inputs, &gradients, sums, scratch);
                }
                Gradient::Dense(backward) => backward.run(&inputs, &gradients, sums, scratch),
            }
        }
    }

    fn inputs<'a, T: SimdElement>(
        &self,
        args: &CausalConv1dArgs<'a>,
        sequences: Sequences<'a>,
    ) -> Inputs<'a, T> {
        let tokens = Tokens {
            x: Operand::input(&args.x),
            states: args.initial_states.as_ref().map(Operand::input),
            sequences,
            history: self.problem.history(),
        };
        Inputs { tokens, parameters: Parameters { weight: args.weight, bias: args.bias } }
    }

    /// How the tokens divide into sequences, with index values checked.
    fn sequences<'a>(&self, args: &CausalConv1dArgs<'a>) -> Result<Sequences<'a>> {
        Sequences::new(self.problem.l, args.seq_idx, args.cu_seqlens)
    }

    /// The im2col matrices of all rows and the weight as a matrix, where they are multiplied.
    pub(super) fn stages(
        &self,
        plan: &CausalConv1dPlan,
        args: &CausalConv1dArgs<'_>,
    ) -> Result<Option<Stages>> {
        let Algorithm::Im2colGemm(gemm) = &self.forward else { return Ok(None) };
        let sequences = self.sequences(args)?;
        Ok(Some(with_element!(plan.spec.x.dtype, T => {
            gemm.stages(&self.inputs::<T>(args, sequences))
        })))
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
        let &Setup { spec, problem, place, .. } = setup;
        let direct = || Ok(Box::new(gpu::Direct::new(place, spec, problem)?));
        let kernels = match configuration.algorithm {
            CausalConv1dAlgorithm::Direct => Kernels::Direct(direct()?),
            CausalConv1dAlgorithm::Im2colGemm => {
                let gemm = gpu::im2col::Im2colGemm::new(place, spec, problem)?;
                let gradients = match problem.dense {
                    true => gpu::GradientKernels::Dense(Box::new(
                        gpu::dense_backward::DenseBackward::new(place, spec, problem)?,
                    )),
                    false => gpu::GradientKernels::Depthwise(direct()?),
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

    /// There are no parameters.
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
    /// As [`Cpu::run`].
    pub(super) fn run(
        &self,
        args: &CausalConv1dArgs<'_>,
        outputs: &CausalConv1dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        match &self.0 {
            Kernels::Direct(direct) => direct.run(args, outputs, workspace),
            Kernels::Im2colGemm(gemm, _) => gemm.run(args, outputs, workspace),
        }
    }

    /// As [`Cpu::backward`].
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
            | Kernels::Im2colGemm(_, gpu::GradientKernels::Depthwise(direct)) => {
                direct.backward(&plan.spec, args, given, grads, workspace)
            }
            Kernels::Im2colGemm(_, gpu::GradientKernels::Dense(dense)) => {
                dense.run(&plan.spec, args, given, grads, workspace)
            }
        }
    }

    /// As [`Cpu::stages`], and their product.
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
