//! Plans and runs of whole sequences.

mod backward;
mod views;

use super::cpu::backward::Backward;
use super::cpu::dense_backward::DenseBackward;
use super::cpu::im2col::{Im2colGemm, Stages};
use super::cpu::{Forward, Inputs, Operand, Parameters, Tokens};
use super::cuda;
use super::reference::Reference;
use super::sequences::Sequences;
use super::{
    CausalConv1dAlgorithm, CausalConv1dConfiguration, CausalConv1dSpec, Problem, tuning, verify,
};
use crate::cpu::{Isa, SimdElement, resolve_threads};
use crate::dtype::with_element;
use crate::tensor::check_view;
use crate::tuning::{Report, Search, announce};
use crate::verify::Comparison;
use crate::{Activation, Device, Error, PlanOptions, Result, Tensor, TensorRef, Verify, Workspace};

pub use backward::CausalConv1dGrads;
pub use views::{CausalConv1dArgs, CausalConv1dOutputs};

/// A checked [`CausalConv1dSpec`] on a device, with an algorithm.
///
/// ```
/// use windrow::{CausalConv1dArgs, CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dSpec};
/// use windrow::{PlanOptions, TensorMut, TensorRef, Workspace};
///
/// let x = [1.0f32, 2.0, 3.0, 4.0];
/// let weight = [10.0f32, 1.0]; // width 2: ten times the token before, plus the token
/// let mut y = [0.0f32; 4];
/// let args = CausalConv1dArgs::new(TensorRef::new(&x, &[1, 1, 4])?, TensorRef::new(&weight, &[1, 2])?);
///
/// let spec = CausalConv1dSpec::new(*args.x.desc(), *args.weight.desc())?;
/// let plan = CausalConv1dPlan::new(&spec, &PlanOptions::default())?;
/// let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes())?;
/// let outputs = CausalConv1dOutputs { y: TensorMut::new(&mut y, &[1, 1, 4])?, final_states: None };
/// plan.run(&args, outputs, &mut workspace)?;
/// assert_eq!(y, [1.0, 12.0, 23.0, 34.0]);
/// # Ok::<(), windrow::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CausalConv1dPlan {
    spec: CausalConv1dSpec,
    problem: Problem,
    options: PlanOptions,
    isa: Isa,
    algorithm: Algorithm,
    backward: Gradient,
}

#[derive(Clone, Debug)]
enum Algorithm {
    Direct(Forward),
    Im2colGemm(Im2colGemm),
    Cuda(Box<cuda::Direct>),
    /// With what computes the gradients of a depthwise convolution.
    CudaIm2colGemm(Box<cuda::im2col::Im2colGemm>, cuda::Gradients),
}

/// How gradients are computed.
#[derive(Clone, Debug)]
enum Gradient {
    Depthwise(Backward),
    Dense(DenseBackward),
    /// By the forward algorithm's own kernels.
    Cuda,
}

impl CausalConv1dPlan {
    /// A plan with the configuration that [`PlanOptions::tuning`] gives.
    ///
    /// # Errors
    /// What is wrong with the spec: [`Error::Rank`], [`Error::Shape`], [`Error::DType`],
    /// [`Error::OverlappingOutput`], [`Error::SizeOverflow`], [`Error::Unsupported`] if it has both
    /// `seq_idx` and `cu_seqlens`; for CUDA [`Error::NoDevice`] and [`Error::Backend`].
    pub fn new(spec: &CausalConv1dSpec, options: &PlanOptions) -> Result<Self> {
        let problem = spec.problem()?;
        if let Some(tuned) = tuning::decide(spec, options)? {
            return Self::with_configuration(spec, &tuned, options);
        }
        let algorithm = match problem.dense {
            true => CausalConv1dAlgorithm::Im2colGemm,
            false => CausalConv1dAlgorithm::Direct,
        };
        Self::with_algorithm(spec, algorithm, options)
    }

    /// A plan with this algorithm and the model's parameters.
    ///
    /// # Errors
    /// As [`CausalConv1dPlan::new`], and [`Error::Unsupported`] if the algorithm cannot compute this
    /// spec.
    pub fn with_algorithm(
        spec: &CausalConv1dSpec,
        algorithm: CausalConv1dAlgorithm,
        options: &PlanOptions,
    ) -> Result<Self> {
        Self::on_isa(spec, &CausalConv1dConfiguration::new(algorithm), options, Isa::best())
    }

    /// A plan with this configuration.
    ///
    /// # Errors
    /// As [`CausalConv1dPlan::with_algorithm`], and [`Error::Unsupported`] if the algorithm has not
    /// the parameters or cannot run with them.
    pub fn with_configuration(
        spec: &CausalConv1dSpec,
        configuration: &CausalConv1dConfiguration,
        options: &PlanOptions,
    ) -> Result<Self> {
        configuration.check(options)?;
        Self::on_isa(spec, configuration, options, Isa::best())
    }

    /// Every configuration that [`CausalConv1dPlan::tune`] measures, the model's choice first.
    ///
    /// # Errors
    /// As [`CausalConv1dPlan::new`].
    pub fn configurations(
        spec: &CausalConv1dSpec,
        options: &PlanOptions,
    ) -> Result<Vec<CausalConv1dConfiguration>> {
        tuning::configurations(spec, options)
    }

    /// Measures the configurations on dense tensors of its own, compares the fastest one's result with the oracle,
    /// and keeps it for plans with [`Tuning::Cached`](crate::Tuning::Cached). Specs with states or packed
    /// sequences are measured as one sequence without.
    ///
    /// # Errors
    /// As [`CausalConv1dPlan::new`], and what running the model's choice can give.
    pub fn tune(spec: &CausalConv1dSpec, options: &PlanOptions, search: &Search) -> Result<Report> {
        tuning::tune(spec, options, search)
    }

    /// Measures these configurations as [`CausalConv1dPlan::tune`] does, of which the first is what gains refer to.
    /// Nothing is kept.
    ///
    /// # Errors
    /// Those of making and running the first, [`Error::Parameter`] if there is none.
    pub fn measure(
        spec: &CausalConv1dSpec,
        options: &PlanOptions,
        configurations: &[CausalConv1dConfiguration],
        search: &Search,
    ) -> Result<Report> {
        tuning::measure(spec, options, configurations, search)
    }

    /// As [`CausalConv1dPlan::with_algorithm`], with the instructions of `isa`.
    pub(crate) fn on_isa(
        spec: &CausalConv1dSpec,
        configuration: &CausalConv1dConfiguration,
        options: &PlanOptions,
        isa: Isa,
    ) -> Result<Self> {
        let problem = spec.problem()?;
        let CausalConv1dConfiguration { algorithm, channels, tokens, threads } = *configuration;
        if let Device::Cuda(index) = options.device {
            if !Self::algorithms(spec, options.device).contains(&algorithm) {
                return Err(Error::unsupported(
                    format!("causal_conv1d {algorithm} of this spec on {}", options.device),
                    "on CUDA direct computes depthwise convolutions only; im2col_gemm computes both",
                ));
            }
            let direct = || Ok(Box::new(cuda::Direct::new(index, spec, &problem)?));
            let algorithm = match algorithm {
                CausalConv1dAlgorithm::Direct => Algorithm::Cuda(direct()?),
                CausalConv1dAlgorithm::Im2colGemm => {
                    let gemm = cuda::im2col::Im2colGemm::new(index, spec, &problem)?;
                    let gradients = match problem.dense {
                        true => cuda::Gradients::Dense(Box::new(
                            cuda::dense_backward::DenseBackward::new(index, spec, &problem)?,
                        )),
                        false => cuda::Gradients::Depthwise(direct()?),
                    };
                    Algorithm::CudaIm2colGemm(Box::new(gemm), gradients)
                }
            };
            let plan = CausalConv1dPlan {
                spec: spec.clone(),
                problem,
                options: *options,
                isa,
                algorithm,
                backward: Gradient::Cuda,
            };
            announce("causal_conv1d", options.device, &plan.configuration());
            return Ok(plan);
        }
        let most = resolve_threads(options.threads);
        let (threads, activation) = (threads.map_or(most, |t| t.min(most)), spec.activation);
        let gemm = || Im2colGemm::new(problem, activation, isa, threads);
        let backward = match problem.dense {
            true => Gradient::Dense(DenseBackward::new(gemm()?)?),
            false => Gradient::Depthwise(Backward::new(problem, activation, threads)?),
        };
        let algorithm = match algorithm {
            CausalConv1dAlgorithm::Direct if problem.dense => {
                return Err(Error::unsupported(
                    "causal_conv1d direct with a dense weight",
                    "it computes depthwise convolutions only; im2col_gemm computes both",
                ));
            }
            CausalConv1dAlgorithm::Direct => {
                let strides = (spec.x.strides(), spec.y.strides());
                let element = spec.x.dtype.size();
                let task = [channels, tokens];
                let direct = Forward::new(problem, activation, strides, element, threads, task)?;
                Algorithm::Direct(direct)
            }
            CausalConv1dAlgorithm::Im2colGemm => Algorithm::Im2colGemm(gemm()?),
        };
        let (spec, options) = (spec.clone(), *options);
        let plan = CausalConv1dPlan { spec, problem, options, isa, algorithm, backward };
        announce("causal_conv1d", options.device, &plan.configuration());
        Ok(plan)
    }

    /// All algorithms that can compute this spec, the fastest first. None if the spec is wrong.
    pub fn algorithms(spec: &CausalConv1dSpec, _device: Device) -> Vec<CausalConv1dAlgorithm> {
        match spec.problem() {
            Ok(problem) if problem.dense => vec![CausalConv1dAlgorithm::Im2colGemm],
            Ok(_) => CausalConv1dAlgorithm::ALL.to_vec(),
            Err(_) => Vec::new(),
        }
    }

    /// The algorithm chosen.
    pub fn algorithm(&self) -> CausalConv1dAlgorithm {
        match self.algorithm {
            Algorithm::Direct(_) | Algorithm::Cuda(_) => CausalConv1dAlgorithm::Direct,
            Algorithm::Im2colGemm(_) | Algorithm::CudaIm2colGemm(..) => {
                CausalConv1dAlgorithm::Im2colGemm
            }
        }
    }

    /// The algorithm and all of its parameters.
    pub fn configuration(&self) -> CausalConv1dConfiguration {
        let configuration = CausalConv1dConfiguration::new(self.algorithm());
        match &self.algorithm {
            Algorithm::Direct(direct) => {
                let [channels, tokens, threads] = direct.task().map(Some);
                CausalConv1dConfiguration { channels, tokens, threads, ..configuration }
            }
            _ => configuration,
        }
    }

    /// What it computes.
    pub fn spec(&self) -> &CausalConv1dSpec {
        &self.spec
    }

    /// Where it runs.
    pub fn device(&self) -> Device {
        self.options.device
    }

    /// Bytes of workspace that runs need, forward and backward.
    pub fn workspace_bytes(&self) -> usize {
        let forward = match &self.algorithm {
            Algorithm::Direct(direct) => direct.workspace_bytes(),
            Algorithm::Im2colGemm(gemm) => gemm.workspace_bytes(),
            Algorithm::Cuda(direct) => direct.workspace_bytes(),
            Algorithm::CudaIm2colGemm(gemm, gradients) => {
                gemm.workspace_bytes().max(gradients.workspace_bytes())
            }
        };
        forward.max(match &self.backward {
            Gradient::Depthwise(backward) => backward.workspace_bytes(),
            Gradient::Dense(backward) => backward.workspace_bytes(),
            Gradient::Cuda => 0,
        })
    }

    /// Algorithm, instruction set, blocking and threads, in one line.
    pub fn explain(&self) -> String {
        let how = match &self.algorithm {
            Algorithm::Direct(direct) => direct.explain(),
            Algorithm::Im2colGemm(gemm) => gemm.explain(),
            Algorithm::Cuda(direct) => {
                let device = self.options.device;
                return format!(
                    "causal_conv1d by {} on {device}: {}",
                    self.configuration(),
                    direct.explain()
                );
            }
            Algorithm::CudaIm2colGemm(gemm, _) => {
                let device = self.options.device;
                return format!(
                    "causal_conv1d by {} on {device}: {}",
                    self.configuration(),
                    gemm.explain()
                );
            }
        };
        format!("causal_conv1d by {} on {}: {how}", self.configuration(), self.isa.name())
    }

    /// Computes the outputs. They share no memory with inputs or each other.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::Shape`], [`Error::DType`] or [`Error::Strides`] if a view is not as
    /// planned, [`Error::Parameter`] if an optional one is missing or too many or the workspace is
    /// too small, [`Error::Aliasing`], [`Error::WrongDevice`], [`Error::Index`] for bad
    /// `cu_seqlens`: all before anything is written. With [`Verify::On`] [`Error::Verification`].
    pub fn run(
        &self,
        args: &CausalConv1dArgs<'_>,
        mut outputs: CausalConv1dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.check_args(args)?;
        self.check_outputs(args, &outputs)?;
        if let Algorithm::Cuda(direct) = &self.algorithm {
            direct.run(args, &outputs, workspace)?;
        } else if let Algorithm::CudaIm2colGemm(gemm, _) = &self.algorithm {
            gemm.run(args, &outputs, workspace)?;
        } else {
            let sequences = self.sequences(args)?;
            let scratch = workspace.take(self.workspace_bytes())?.as_mut_ptr();
            with_element!(self.spec.x.dtype, T => {
                self.run_as::<T>(args, sequences, &mut outputs, scratch);
            });
        }
        if self.options.verify == Verify::On {
            workspace.synchronize()?;
            let checks = verify::forward_checks(&self.reference(args)?, &outputs)?;
            verify::require(&format!("causal_conv1d {}", self.algorithm()), checks)?;
        }
        Ok(())
    }

    /// Compares `y` of a run with the f64 oracle.
    ///
    /// # Errors
    /// As [`CausalConv1dPlan::run`] for inputs and `y` that are not as planned.
    pub fn compare(&self, args: &CausalConv1dArgs<'_>, y: &TensorRef<'_>) -> Result<Comparison> {
        self.check_args(args)?;
        check_view("y", y.desc(), &self.spec.y)?;
        verify::compare_output(&self.reference(args)?, y)
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
            match &self.algorithm {
                Algorithm::Direct(direct) => direct.run(self.isa, &inputs, y, scratch),
                Algorithm::Im2colGemm(gemm) => {
                    gemm.run(&inputs, y, scratch);
                }
                Algorithm::Cuda(_) | Algorithm::CudaIm2colGemm(..) => {
                    unreachable!("runs on a device go another way")
                }
            }
            if let Some(final_states) = &mut outputs.final_states {
                let rows = final_states.shape()[0];
                inputs.tokens.copy_final_states(
                    rows,
                    self.problem.d,
                    Operand::output(final_states),
                );
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

    /// How the tokens divide into sequences, with index values checked: on the CPU.
    fn sequences<'a>(&self, args: &CausalConv1dArgs<'a>) -> Result<Sequences<'a>> {
        Sequences::new(self.problem.l, args.seq_idx, args.cu_seqlens)
    }

    /// The operands of the product that [`CausalConv1dAlgorithm::Im2colGemm`] forms on the CPU: the im2col
    /// matrices of all rows, and the weight as a matrix. On a device none where there is no row.
    pub(crate) fn stages(&self, args: &CausalConv1dArgs<'_>) -> Result<Option<Stages>> {
        if let Algorithm::CudaIm2colGemm(gemm, _) = &self.algorithm {
            if self.problem.is_empty() {
                return Ok(None);
            }
            let [im2col, weight, _] = gemm.stages(args, self.options.device)?;
            return Ok(Some((im2col, weight)));
        }
        let Algorithm::Im2colGemm(gemm) = &self.algorithm else { return Ok(None) };
        let sequences = self.sequences(args)?;
        Ok(Some(with_element!(self.spec.x.dtype, T => {
            gemm.stages(&self.inputs::<T>(args, sequences))
        })))
    }

    /// The product of those stages, [b, l, d_out], where it is kept whole.
    pub(crate) fn product(&self, args: &CausalConv1dArgs<'_>) -> Result<Option<Vec<f32>>> {
        let Algorithm::CudaIm2colGemm(gemm, _) = &self.algorithm else { return Ok(None) };
        if self.problem.is_empty() {
            return Ok(None);
        }
        let [_, _, product] = gemm.stages(args, self.options.device)?;
        Ok(Some(product))
    }

    /// The same computation in f64.
    pub(crate) fn reference(&self, args: &CausalConv1dArgs<'_>) -> Result<Reference> {
        Reference::new(self.problem, self.spec.activation, args)
    }
}

/// Causal convolution of `x` [b, d, l] with `weight` [d, width] or [d_out, d, width], and `bias`
/// `[d_out]`, on the CPU; see [`CausalConv1dSpec`].
///
/// # Errors
/// As [`CausalConv1dPlan::new`] and [`CausalConv1dPlan::run`], and [`Error::OutOfMemory`].
///
/// ```
/// use windrow::{Activation, TensorRef};
/// let x = TensorRef::new(&[1.0f32, 2.0, 3.0, 4.0], &[1, 2, 2])?;
/// let weight = TensorRef::new(&[1.0f32, 1.0, 0.0, 1.0], &[2, 2])?;
/// let y = windrow::causal_conv1d(&x, &weight, None, Activation::Identity)?;
/// assert_eq!(y.to_vec::<f32>()?, [1.0, 3.0, 3.0, 4.0]);
/// # Ok::<(), windrow::Error>(())
/// ```
pub fn causal_conv1d(
    x: &TensorRef<'_>,
    weight: &TensorRef<'_>,
    bias: Option<&TensorRef<'_>>,
    activation: Activation,
) -> Result<Tensor> {
    let spec = CausalConv1dSpec {
        bias: bias.map(|bias| *bias.desc()),
        activation,
        ..CausalConv1dSpec::new(*x.desc(), *weight.desc())?
    };
    let plan = CausalConv1dPlan::new(&spec, &PlanOptions::default())?;
    let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes())?;
    let mut y = Tensor::uninitialised(spec.y)?;
    let args = CausalConv1dArgs { bias: bias.copied(), ..CausalConv1dArgs::new(*x, *weight) };
    let outputs = CausalConv1dOutputs { y: y.as_mut(), final_states: None };
    plan.run(&args, outputs, &mut workspace)?;
    Ok(y)
}
