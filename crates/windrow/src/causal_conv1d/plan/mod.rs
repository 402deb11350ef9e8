//! Plans for whole sequences, and their runs.

mod cpu;
mod gpu;
mod gradients;
mod only;

use super::cpu::im2col::Stages;
use super::reference::Reference;
use super::{
    CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dConfiguration, CausalConv1dOutputs,
    CausalConv1dSpec, Problem, comparison,
};
use crate::plan::{self, Backend, Operator, Plan, engine, inputs};
use crate::{Activation, Device, Error, PlanOptions, Result, Tensor, TensorRef, Workspace};

pub use cpu::Cpu;
pub use gpu::Gpu;
pub(super) use only::OnlyMethod;

/// A [`CausalConv1dSpec`] that was checked and bound to a device and an algorithm.
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
/// let outputs = CausalConv1dOutputs::new(TensorMut::new(&mut y, &[1, 1, 4])?);
/// plan.run(&args, outputs, &mut workspace)?;
/// assert_eq!(y, [1.0, 12.0, 23.0, 34.0]);
/// # Ok::<(), windrow::Error>(())
/// ```
pub type CausalConv1dPlan = Plan<CausalConv1d>;

/// The operator causal conv1d, as a type parameter of [`Plan`].
#[derive(Clone, Copy, Debug)]
pub struct CausalConv1d;

impl Operator for CausalConv1d {
    const NAME: &'static str = "causal_conv1d";
    inputs!(CausalConv1dSpec, CausalConv1dArgs: x, weight; ? bias, seq_idx, cu_seqlens, initial_states);
    type Spec = CausalConv1dSpec;
    type Problem = Problem;
    type Configuration = CausalConv1dConfiguration;
    type Args<'a> = CausalConv1dArgs<'a>;
    type Cpu = Cpu;
    type Gpu = Gpu;

    fn problem(spec: &CausalConv1dSpec) -> Result<Problem> {
        spec.problem()
    }

    /// On a GPU, weights of more than one channel are multiplied by a library that chooses its kernel by the number of
    /// tokens.
    fn check_batch_invariant(spec: &CausalConv1dSpec, device: Device) -> Result<()> {
        if device == Device::Cpu || !spec.problem()?.dense {
            return Ok(());
        }
        Err(Error::unsupported(
            format!("causal_conv1d with batch_invariant on {device}"),
            "only depthwise weights have the option there",
        ))
    }

    fn tuned(
        spec: &CausalConv1dSpec,
        options: &PlanOptions,
    ) -> Result<Option<CausalConv1dConfiguration>> {
        plan::decide::<Self>(spec, options)
    }
}

/// All algorithms, the fastest first.
fn algorithms(problem: &Problem) -> Vec<CausalConv1dAlgorithm> {
    match problem.dense {
        true => vec![CausalConv1dAlgorithm::Im2colGemm],
        false => CausalConv1dAlgorithm::ALL.to_vec(),
    }
}

/// The expected cost in relative units of memory traffic. With im2col, the matrix is written and read in addition to
/// the tensors.
fn cost(problem: &Problem, configuration: &CausalConv1dConfiguration) -> f64 {
    match configuration.algorithm {
        CausalConv1dAlgorithm::Direct => 1.0,
        CausalConv1dAlgorithm::Im2colGemm => 1.0 + problem.width as f64,
    }
}

impl CausalConv1dPlan {
    /// Computes the outputs. They must not share memory with inputs or with each other.
    ///
    /// # Errors
    /// These are returned before anything is written:
    ///
    /// - [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType) or
    ///   [`Error::Strides`](crate::Error::Strides) if a view does not agree with the spec;
    /// - [`Error::Parameter`](crate::Error::Parameter) if the spec has an optional tensor and the arguments do not, or
    ///   the reverse;
    /// - [`Error::Aliasing`](crate::Error::Aliasing), [`Error::WrongDevice`](crate::Error::WrongDevice),
    ///   [`Error::WorkspaceTooSmall`](crate::Error::WorkspaceTooSmall);
    /// - [`Error::Index`](crate::Error::Index) for invalid `cu_seqlens`. On a GPU the kernels check the values, so the
    ///   error is about an earlier run on the same GPU.
    ///
    /// Later errors are [`Error::Backend`](crate::Error::Backend) on a GPU, and with [`Verify::On`](crate::Verify::On)
    /// [`Error::Verification`](crate::Error::Verification) and [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn run(
        &self,
        args: &CausalConv1dArgs<'_>,
        mut outputs: CausalConv1dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut checks = self.check_run(args, workspace)?;
        let CausalConv1dOutputs { y, final_states, y2, y3 } = &outputs;
        checks.write("y", Some(y), Some(&self.spec.y))?;
        let planned = self.spec.final_states.as_ref();
        checks.write("final_states", final_states.as_ref(), planned)?;
        checks.write("y2", y2.as_ref(), self.spec.y2.as_ref())?;
        checks.write("y3", y3.as_ref(), self.spec.y3.as_ref())?;
        self.verified(
            &mut outputs,
            workspace,
            |_| Ok(()),
            |outputs, workspace| engine!(self, engine => engine.run(self, args, outputs, workspace)),
            |outputs, ()| comparison::forward_checks(&self.reference(args)?, outputs),
        )
    }

    /// The two operands of the matrix product of
    /// [`CausalConv1dAlgorithm::Im2colGemm`](super::CausalConv1dAlgorithm::Im2colGemm): the im2col matrices of all
    /// entries of the batch, and the weight as a matrix. `None` for other algorithms, and on a GPU also if there is
    /// nothing to compute.
    pub(crate) fn stages(&self, args: &CausalConv1dArgs<'_>) -> Result<Option<Stages>> {
        match &self.backend {
            Backend::Cpu(cpu) => cpu.stages(self, args),
            Backend::Gpu(gpu) => {
                Ok(gpu.stages(self, args)?.map(|[im2col, weight, _]| (im2col, weight)))
            }
        }
    }

    /// The product of these two operands, [b, l, d_out]. `None` on the CPU, which does not store the whole product, and
    /// for other algorithms.
    pub(crate) fn product(&self, args: &CausalConv1dArgs<'_>) -> Result<Option<Vec<f32>>> {
        match &self.backend {
            Backend::Cpu(_) => Ok(None),
            Backend::Gpu(gpu) => Ok(gpu.stages(self, args)?.map(|[_, _, product]| product)),
        }
    }

    /// The f64 oracle of this plan for these arguments.
    pub(crate) fn reference(&self, args: &CausalConv1dArgs<'_>) -> Result<Reference> {
        let reference = Reference::new(self.problem, self.spec.activation, args)?;
        Ok(Reference { norm: self.spec.norm, ..reference })
    }
}

/// The causal convolution of `x` [b, d, l] with `weight` [d, width] or [d_out, d, width], and `bias` `[d_out]`,
/// computed on the CPU in one call; see [`CausalConv1dSpec`].
///
/// # Errors
/// As [`CausalConv1dPlan::new`] and [`CausalConv1dPlan::run`], and [`Error::OutOfMemory`](crate::Error::OutOfMemory).
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
    let outputs = CausalConv1dOutputs::new(y.as_mut());
    plan.run(&args, outputs, &mut workspace)?;
    Ok(y)
}
