//! Plans for decoding steps, and their runs.

use super::cpu::{Operands, Update};
use super::{CausalConv1dUpdateArgs, CausalConv1dUpdateSpec, gpu};
use crate::causal_conv1d::comparison::UpdateOracle;
use crate::causal_conv1d::cpu::shared::{Operand, Parameters};
use crate::causal_conv1d::plan::OnlyMethod;
use crate::causal_conv1d::problem::rank;
use crate::causal_conv1d::reference::{UpdateReference, integers};
use crate::causal_conv1d::sequences::Indices;
use crate::causal_conv1d::{CausalConv1dConfiguration, Problem};
use crate::cpu::Isa;
use crate::dtype::with_element;
use crate::plan::{Backend, Operator, Plan, Setup, inputs};
use crate::{
    Activation, Device, Error, PlanOptions, Result, Tensor, TensorMut, TensorRef, Workspace,
};

/// A [`CausalConv1dUpdateSpec`] that was checked and bound to a device.
///
/// ```
/// use windrow::{CausalConv1dUpdateArgs, CausalConv1dUpdatePlan, CausalConv1dUpdateSpec};
/// use windrow::{PlanOptions, TensorMut, TensorRef, Workspace};
///
/// let weight = [100.0f32, 10.0, 1.0];
/// let mut state = [1.0f32, 2.0]; // the last two tokens
/// let (x, mut y) = ([3.0f32], [0.0f32]);
/// let args = CausalConv1dUpdateArgs::new(TensorRef::new(&x, &[1, 1, 1])?, TensorRef::new(&weight, &[1, 3])?);
/// let conv_state = TensorMut::new(&mut state, &[1, 1, 2])?;
///
/// let spec = CausalConv1dUpdateSpec::new(*args.x.desc(), *conv_state.desc(), *args.weight.desc())?;
/// let plan = CausalConv1dUpdatePlan::new(&spec, &PlanOptions::default())?;
/// let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes())?;
/// plan.run(&args, conv_state, TensorMut::new(&mut y, &[1, 1, 1])?, &mut workspace)?;
/// assert_eq!((y, state), ([123.0], [2.0, 3.0]));
/// # Ok::<(), windrow::Error>(())
/// ```
pub type CausalConv1dUpdatePlan = Plan<CausalConv1dUpdate>;

/// The operator of a decoding step, as a type parameter of [`Plan`].
#[derive(Clone, Copy, Debug)]
pub struct CausalConv1dUpdate;

impl Operator for CausalConv1dUpdate {
    const NAME: &'static str = "causal_conv1d_update";
    inputs!(CausalConv1dUpdateSpec, CausalConv1dUpdateArgs: x, weight; ? bias, cache_seqlens, conv_state_indices);
    type Spec = CausalConv1dUpdateSpec;
    type Problem = Problem;
    type Configuration = CausalConv1dConfiguration;
    type Args<'a> = CausalConv1dUpdateArgs<'a>;
    type Cpu = Cpu;
    type Gpu = gpu::Update;

    fn problem(spec: &CausalConv1dUpdateSpec) -> Result<Problem> {
        spec.problem()
    }
}

/// The engine on the CPU.
#[derive(Clone, Debug)]
pub struct Cpu {
    isa: Isa,
    update: Update,
    /// A bit for each state of a pool, to find indices that occur twice.
    seen_bytes: usize,
}

impl OnlyMethod<CausalConv1dUpdate> for Cpu {
    type Place = Isa;

    fn new(setup: &Setup<'_, CausalConv1dUpdate, Isa>) -> Result<Self> {
        let CausalConv1dUpdateSpec { conv_state, conv_state_indices, activation, .. } = setup.spec;
        let &[pool, _, state_len] = conv_state.shape() else {
            return Err(rank("conv_state", conv_state, "3: [b or pool, d, state_len]"));
        };
        let update = Update::new(*setup.problem, *activation, state_len, setup.threads())?;
        let seen_bytes = conv_state_indices.map_or(0, |_| pool.div_ceil(8));
        Ok(Cpu { isa: setup.place, update, seen_bytes })
    }

    fn workspace_bytes(&self) -> usize {
        self.update.workspace_bytes() + self.seen_bytes
    }

    fn explain(&self, _: &CausalConv1dUpdatePlan) -> String {
        format!(" on {}: {}", self.isa.name(), self.update.explain())
    }
}

impl Cpu {
    /// Computes `y` and the new states. The caller has checked the views, and that outputs share no memory with inputs
    /// or each other.
    fn run(
        &self,
        plan: &CausalConv1dUpdatePlan,
        args: &CausalConv1dUpdateArgs<'_>,
        [conv_state, y]: &mut [TensorMut<'_>; 2],
        workspace: &mut Workspace,
    ) -> Result<()> {
        let scratch = workspace.take(self.workspace_bytes())?;
        let (scratch, seen) = scratch.split_at_mut(self.update.workspace_bytes());
        let cache_seqlens = args.cache_seqlens.map(Indices::new);
        let conv_state_indices = args.conv_state_indices.map(Indices::new);
        if !plan.problem.is_empty() {
            Self::check_indices(plan, cache_seqlens, conv_state_indices, seen)?;
        }
        with_element!(plan.spec.x.dtype, T => {
            let operands = Operands::<T> {
                x: Operand::input(&args.x),
                y: Operand::output(y),
                conv_state: Operand::output(conv_state),
                parameters: Parameters { weight: args.weight, bias: args.bias },
                cache_seqlens,
                conv_state_indices: conv_state_indices
                    .map(|indices| (indices, plan.spec.conv_state.shape()[0])),
            };
            // SAFETY: views, aliasing, indices and the size of the workspace have been checked.
            unsafe { self.update.run(self.isa, &operands, scratch.as_mut_ptr()) }
        });
        Ok(())
    }

    fn check_indices(
        plan: &CausalConv1dUpdatePlan,
        cache_seqlens: Option<Indices<'_>>,
        conv_state_indices: Option<Indices<'_>>,
        seen: &mut [u8],
    ) -> Result<()> {
        let error = |arg, position, given, expected: String| {
            Err(Error::Index { arg, position, given, expected })
        };
        for i in 0..cache_seqlens.map_or(0, |lens| lens.len()) {
            let given = cache_seqlens.map_or(0, |lens| lens.at([i]));
            if given < 0 {
                return error("cache_seqlens", i, given, "at least 0".into());
            }
        }
        let Some(indices) = conv_state_indices else { return Ok(()) };
        let pool = plan.spec.conv_state.shape()[0];
        seen.fill(0);
        for i in 0..indices.len() {
            let given = indices.at([i]);
            let Ok(index) = usize::try_from(given) else { continue };
            if index >= pool {
                let expected = format!("below {pool}, the number of states, or negative");
                return error("conv_state_indices", i, given, expected);
            }
            let bit = 1 << (index % 8);
            if seen[index / 8] & bit != 0 {
                let expected = "a state that no other entry uses".into();
                return error("conv_state_indices", i, given, expected);
            }
            seen[index / 8] |= bit;
        }
        Ok(())
    }
}

impl OnlyMethod<CausalConv1dUpdate> for gpu::Update {
    type Place = Device;

    fn new(setup: &Setup<'_, CausalConv1dUpdate, Device>) -> Result<Self> {
        gpu::Update::new(setup.place, setup.spec, setup.problem)
    }

    fn explain(&self, plan: &CausalConv1dUpdatePlan) -> String {
        format!(" on {}: {}", plan.device(), gpu::Update::explain(self))
    }
}

impl CausalConv1dUpdatePlan {
    /// Computes `y` and moves the states on; the tokens in them are exact copies. `y` and `conv_state` must not share
    /// memory with inputs or with each other.
    ///
    /// # Errors
    /// As [`CausalConv1dPlan::run`](crate::CausalConv1dPlan::run). [`Error::Index`] is returned for a negative value of
    /// `cache_seqlens`, for an index without a state, and for an index that another entry has too, before anything is
    /// written. On a GPU it is about an earlier run on the same GPU, and an index that two entries have is not noticed.
    pub fn run(
        &self,
        args: &CausalConv1dUpdateArgs<'_>,
        conv_state: TensorMut<'_>,
        y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut checks = self.check_run(args, workspace)?;
        checks.write("conv_state", Some(&conv_state), Some(&self.spec.conv_state))?;
        checks.write("y", Some(&y), Some(&self.spec.y))?;
        self.verified(
            &mut [conv_state, y],
            workspace,
            |[conv_state, _]| self.oracle(args, conv_state),
            |written, workspace| match &self.backend {
                Backend::Cpu(cpu) => cpu.run(self, args, written, workspace),
                Backend::Gpu(update) => update.run(args, &written[0], &written[1], workspace),
            },
            |[conv_state, y], oracle| oracle.checks(&conv_state.as_ref(), &y.as_ref()),
        )
    }

    /// The f64 oracle of this plan for these arguments.
    pub(crate) fn oracle(
        &self,
        args: &CausalConv1dUpdateArgs<'_>,
        conv_state: &TensorMut<'_>,
    ) -> Result<UpdateOracle> {
        let reference = UpdateReference {
            problem: self.problem,
            activation: self.spec.activation,
            state_len: self.spec.conv_state.shape()[2],
            x: args.x.to_f64_vec()?,
            weight: args.weight.to_f64_vec()?,
            bias: args.bias.as_ref().map(TensorRef::to_f64_vec).transpose()?,
            cache_seqlens: args.cache_seqlens.as_ref().map(integers).transpose()?,
            conv_state_indices: args.conv_state_indices.as_ref().map(integers).transpose()?,
        };
        UpdateOracle::of(&reference, conv_state.as_ref().to_f64_vec()?, self.spec.x.dtype)
    }
}

/// The result of one decoding step, computed on the CPU in one call. `x` [b, d, l] follows `conv_state` [b, d,
/// state_len], which is moved on; see [`CausalConv1dUpdateSpec`].
///
/// # Errors
/// As [`CausalConv1dUpdatePlan::new`] and [`CausalConv1dUpdatePlan::run`], and
/// [`Error::OutOfMemory`].
///
/// ```
/// use windrow::{Activation, TensorMut, TensorRef};
/// let mut state = [1.0f32, 2.0];
/// let conv_state = TensorMut::new(&mut state, &[1, 1, 2])?;
/// let x = TensorRef::new(&[3.0f32], &[1, 1, 1])?;
/// let weight = TensorRef::new(&[100.0f32, 10.0, 1.0], &[1, 3])?;
/// let y = windrow::causal_conv1d_update(&x, conv_state, &weight, None, Activation::Identity)?;
/// assert_eq!((y.to_vec::<f32>()?, state), (vec![123.0], [2.0, 3.0]));
/// # Ok::<(), windrow::Error>(())
/// ```
pub fn causal_conv1d_update(
    x: &TensorRef<'_>,
    conv_state: TensorMut<'_>,
    weight: &TensorRef<'_>,
    bias: Option<&TensorRef<'_>>,
    activation: Activation,
) -> Result<Tensor> {
    let spec = CausalConv1dUpdateSpec {
        bias: bias.map(|bias| *bias.desc()),
        activation,
        ..CausalConv1dUpdateSpec::new(*x.desc(), *conv_state.desc(), *weight.desc())?
    };
    let plan = CausalConv1dUpdatePlan::new(&spec, &PlanOptions::default())?;
    let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes())?;
    let mut y = Tensor::uninitialised(spec.y)?;
    let args =
        CausalConv1dUpdateArgs { bias: bias.copied(), ..CausalConv1dUpdateArgs::new(*x, *weight) };
    plan.run(&args, conv_state, y.as_mut(), &mut workspace)?;
    Ok(y)
}
