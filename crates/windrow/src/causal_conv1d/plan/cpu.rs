//! The engine that computes a causal convolution on the CPU.

use super::{CausalConv1d, CausalConv1dPlan, algorithms, cost};
use crate::causal_conv1d::cpu::direct::Forward;
use crate::causal_conv1d::cpu::direct::gradients::Backward;
use crate::causal_conv1d::cpu::im2col::gradients::DenseBackward;
use crate::causal_conv1d::cpu::im2col::{Im2colGemm, Stages};
use crate::causal_conv1d::cpu::shared::{Gradients, Inputs, Operand, Outputs, Parameters, Tokens};
use crate::causal_conv1d::sequences::Sequences;
use crate::causal_conv1d::{
    CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dConfiguration, CausalConv1dGrads,
    CausalConv1dOutputs, Problem,
};
use crate::cpu::{Isa, SimdElement};
use crate::dtype::with_element;
use crate::plan::{Engine, Setup};
use crate::{Result, TensorMut, TensorRef, Workspace};

/// The engine on the CPU.
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

/// The method that computes the gradients.
#[derive(Clone, Debug)]
enum Gradient {
    Depthwise(Backward),
    Dense(DenseBackward),
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
        let gemm = || Im2colGemm::new(problem, (activation, spec.norm), isa, threads);
        let backward = match problem.dense {
            true => Gradient::Dense(DenseBackward::new(gemm()?)?),
            false => Gradient::Depthwise(Backward::new(problem, activation, threads)?),
        };
        let forward = match algorithm {
            CausalConv1dAlgorithm::Direct => {
                Algorithm::Direct(Forward::new(spec, problem, threads, [channels, tokens])?)
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

    /// The larger of the workspaces for a forward run and for a backward run.
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
    /// Computes the outputs. The caller has checked the views, and that outputs share no memory with inputs or each
    /// other.
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
        let CausalConv1dOutputs { y, y2, y3, final_states } = outputs;
        let y = Outputs::<T>::new(y, [y2, y3]);
        // SAFETY: views, aliasing, indices and the size of the workspace have been checked.
        unsafe {
            match &self.forward {
                Algorithm::Direct(direct) => direct.run(self.isa, &inputs, &y, scratch),
                Algorithm::Im2colGemm(gemm) => {
                    gemm.run(&inputs, &y, scratch);
                }
            }
            if let Some(final_states) = final_states {
                let (rows, d) = (final_states.shape()[0], self.problem.d);
                inputs.tokens.copy_final_states(rows, d, Operand::output(final_states));
            }
        }
    }

    /// Computes the gradients from `given`, the gradients of `y` and of the final states. The caller has made the same
    /// checks as for [`Cpu::run`].
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
            dilation: self.problem.dilation,
        };
        Inputs { tokens, parameters: Parameters { weight: args.weight, bias: args.bias } }
    }

    /// The division of the tokens into sequences. The values of `cu_seqlens` are checked.
    fn sequences<'a>(&self, args: &CausalConv1dArgs<'a>) -> Result<Sequences<'a>> {
        Sequences::new(self.problem.l, args.seq_idx, args.cu_seqlens)
    }

    /// The im2col matrices of all entries of the batch, and the weight as a matrix. `None` if the algorithm is not
    /// im2col + GEMM.
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
