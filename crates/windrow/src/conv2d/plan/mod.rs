//! The plan of a convolution, its runs, its gradients and its packed filters, with an engine for the CPU and one for
//! GPUs.

mod args;
mod cache;
mod chain;
mod checksum;
mod comparison;
mod cpu;
mod gpu;
mod gradients;
mod packed;

use super::{Conv2dConfiguration, Conv2dSpec, Problem};
use crate::plan::{self, Input, Operator, Plan, Views, engine};
use crate::{PlanOptions, Result, TensorMut, TensorRef, Workspace};
pub(super) use args::filter;
pub(super) use comparison::{activated, activated_on_gpus};
pub(super) use cpu::{stored, threads};
pub(super) use gpu::with_filter;
pub(super) use packed::{PackedForm, Packing};

pub use args::{Conv2dArgs, Weights};
pub use cache::FilterCache;
pub use chain::{Conv2dChain, Conv2dLink};
pub use cpu::Cpu;
pub use gpu::Gpu;
pub use packed::PackedWeights;

/// A [`Conv2dSpec`] that was checked and bound to a device and an algorithm.
///
/// ```
/// use windrow::*;
/// let x = Tensor::from_slice(&[1f32; 16], &[1, 1, 4, 4])?;
/// let w = Tensor::from_slice(&[1f32; 9], &[1, 1, 3, 3])?;
/// let spec = Conv2dSpec::new(*x.desc(), *w.desc(), &Conv2dParams::default())?;
/// let plan = Conv2dPlan::new(&spec, &PlanOptions::default())?;
/// let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
/// let packed = plan.pack_weights(&w.as_ref(), &mut workspace)?;
/// let mut y = Tensor::uninitialised(spec.y)?;
/// let args = Conv2dArgs::new(x.as_ref(), &packed);
/// plan.run(&args, y.as_mut(), &mut workspace)?;
/// assert_eq!(y.to_vec::<f32>()?, [9.0; 4]);
/// # Ok::<(), windrow::Error>(())
/// ```
pub type Conv2dPlan = Plan<Conv2d>;

/// The operator conv2d, as a type parameter of [`Plan`].
#[derive(Clone, Copy, Debug)]
pub struct Conv2d;

impl Operator for Conv2d {
    const NAME: &'static str = "conv2d";
    const INPUTS: &'static [Input<Conv2dSpec>] = &[
        Input { name: "x", desc: |spec| Some(&spec.x) },
        Input { name: "bias", desc: |spec| spec.bias.as_ref() },
        Input { name: "residual", desc: |spec| spec.residual.then_some(&spec.y) },
        Input { name: "w", desc: |spec| Some(&spec.w) },
    ];
    type Spec = Conv2dSpec;
    type Problem = Problem;
    type Configuration = Conv2dConfiguration;
    type Args<'a> = Conv2dArgs<'a>;
    type Cpu = Cpu;
    type Gpu = Gpu;

    fn problem(spec: &Conv2dSpec) -> Result<Problem> {
        spec.problem()
    }

    fn views<'a>(args: &'a Conv2dArgs<'_>) -> Views<'a> {
        plan::views([Some(&args.x), args.bias.as_ref(), args.residual.as_ref(), args.w.view()])
    }

    fn args<'a>(views: &[Option<TensorRef<'a>>]) -> Conv2dArgs<'a> {
        let required = |i: usize| views[i].expect("every spec has x and w");
        let w = Weights::Raw(required(3));
        Conv2dArgs { x: required(0), w, bias: views[1], residual: views[2] }
    }

    /// The inputs that are tensor views. A packed filter is not a view.
    fn inputs(args: &Conv2dArgs<'_>) -> &'static [Input<Conv2dSpec>] {
        &Self::INPUTS[..3 + usize::from(args.w.view().is_some())]
    }

    fn tuned(spec: &Conv2dSpec, options: &PlanOptions) -> Result<Option<Conv2dConfiguration>> {
        // Configurations were measured without a memory limit.
        if options.memory.is_some() {
            return Ok(None);
        }
        plan::decide::<Self>(spec, options)
    }
}

/// The part of [`Plan::explain`]'s text that comes after the configuration.
fn explained(plan: &Conv2dPlan, place: &str, blocking: &str) -> String {
    let (accuracy, bytes) = (plan.spec.accuracy.name(), plan.workspace_bytes());
    format!(" on {place} at accuracy {accuracy}: {blocking}; workspace {bytes} bytes")
}

impl Conv2dPlan {
    /// The bytes of workspace that [`Conv2dPlan::run`] needs if the packed filter has memory of its own
    /// ([`Weights::Packed`] or [`Weights::Cached`]).
    pub fn packed_workspace_bytes(&self) -> usize {
        engine!(self, engine => engine.scratch_bytes())
    }

    /// The bytes of workspace that [`Conv2dPlan::run`] needs for this x and these weights: at most
    /// [`Conv2dPlan::workspace_bytes`]. With a packed or cached filter, none are needed for the packed filter. On a
    /// GPU, fewer are needed if the kernels can read x in place, which depends on its strides and its address.
    pub fn workspace_bytes_for(&self, x: &TensorRef<'_>, weights: &Weights<'_>) -> usize {
        let packed = engine!(self, engine => engine.scratch_bytes_for(x));
        match weights {
            Weights::Packed(_) | Weights::Cached(..) => packed,
            Weights::Raw(_) => self.workspace_bytes() - (self.packed_workspace_bytes() - packed),
        }
    }

    /// Runs the convolution and writes y. On a GPU it returns when the work is enqueued.
    ///
    /// # Errors
    /// - [`Error::Shape`](crate::Error::Shape), [`Error::DType`](crate::Error::DType) or
    ///   [`Error::Strides`](crate::Error::Strides) if a view does not agree with the spec;
    /// - [`Error::Parameter`](crate::Error::Parameter) if the spec has a bias or a residual and the arguments do not, or
    ///   the reverse;
    /// - [`Error::WrongDevice`](crate::Error::WrongDevice) if a tensor or the workspace is not on the plan's device;
    /// - [`Error::Aliasing`](crate::Error::Aliasing) if y shares memory with an input;
    /// - [`Error::ForeignPack`](crate::Error::ForeignPack) if [`Conv2dPlan::accepts`] is false for the packed filter;
    /// - [`Error::WorkspaceTooSmall`](crate::Error::WorkspaceTooSmall);
    /// - [`Error::OutOfMemory`](crate::Error::OutOfMemory), with [`Weights::Cached`] or
    ///   [`Verify::On`](crate::Verify::On);
    /// - [`Error::Backend`](crate::Error::Backend), on a GPU;
    /// - [`Error::Verification`](crate::Error::Verification), with [`Verify::On`](crate::Verify::On).
    pub fn run(
        &self,
        args: &Conv2dArgs<'_>,
        mut y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut checks = self.check_run(args, workspace)?;
        self.check_packed(&args.w)?;
        checks.write("y", Some(&y), Some(&self.spec.y))?;
        self.verified(
            &mut y,
            workspace,
            |_| Ok(()),
            |y, workspace| engine!(self, engine => engine.run(self, args, y, workspace)),
            |y, ()| match filter(&args.w)? {
                Some(w) if !y.layout().is_empty() => {
                    let want = self.expected(args, &w)?;
                    Ok(vec![want.check("y", &y.as_ref(), self.tolerance())?])
                }
                // A filter that was packed without `Verify::On` is known in its packed form only.
                _ => Ok(Vec::new()),
            },
        )
    }

    /// Returns [`Error::ForeignPack`](crate::Error::ForeignPack) for a filter that is not packed as this plan needs it.
    fn check_packed(&self, w: &Weights<'_>) -> Result<()> {
        match w {
            Weights::Packed(packed) => packed.check(self.packing()),
            Weights::Raw(_) | Weights::Cached(..) => Ok(()),
        }
    }
}
