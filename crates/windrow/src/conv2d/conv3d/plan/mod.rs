//! The plan of a convolution of videos and its runs, with an engine for the CPU and one for GPUs.

mod cpu;
mod gpu;

use super::frames::{last, with_frames_before};
use super::video::Video;
use super::{Conv3dArgs, Conv3dOutputs, Conv3dSpec};
use crate::conv2d::plan::{Packing, filter};
use crate::conv2d::{
    Conv2dAlgorithm, Conv2dConfiguration, PackedWeights, Problem, Weights, reference,
};
use crate::cpu::Isa;
use crate::plan::{Checks, Input, Operator, Plan, Views, engine, views};
use crate::tensor::check_device;
use crate::verification::{Check, Expected};
use crate::{Result, TensorRef, Verify, Workspace};

pub use cpu::Cpu;
pub use gpu::Gpu;

/// A [`Conv3dSpec`] that was checked and bound to a device and an algorithm.
///
/// ```
/// use windrow::*;
/// let x = Tensor::from_slice(&[1f32; 64], &[1, 1, 4, 4, 4])?;
/// let w = Tensor::from_slice(&[1f32; 27], &[1, 1, 3, 3, 3])?;
/// let spec = Conv3dSpec::new(*x.desc(), *w.desc(), &Conv3dParams::default())?;
/// let plan = Conv3dPlan::new(&spec, &PlanOptions::default())?;
/// let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
/// let mut y = Tensor::uninitialised(spec.y)?;
/// plan.run(&Conv3dArgs::new(x.as_ref(), w.as_ref()), y.as_mut(), &mut workspace)?;
/// assert_eq!(y.to_vec::<f32>()?, [27.0; 8]);
/// # Ok::<(), windrow::Error>(())
/// ```
pub type Conv3dPlan = Plan<Conv3d>;

/// The operator conv3d, as a type parameter of [`Plan`].
#[derive(Clone, Copy, Debug)]
pub struct Conv3d;

impl Operator for Conv3d {
    const NAME: &'static str = "conv3d";
    const INPUTS: &'static [Input<Conv3dSpec>] = &[
        Input { name: "x", desc: |spec| Some(&spec.x) },
        Input { name: "bias", desc: |spec| spec.bias.as_ref() },
        Input { name: "residual", desc: |spec| spec.residual.then_some(&spec.y) },
        Input { name: "initial_frames", desc: |spec| spec.initial_frames.as_ref() },
        Input { name: "w", desc: |spec| Some(&spec.w) },
    ];
    type Spec = Conv3dSpec;
    type Problem = Problem;
    type Configuration = Conv2dConfiguration;
    type Args<'a> = Conv3dArgs<'a>;
    type Cpu = Cpu;
    type Gpu = Gpu;

    fn problem(spec: &Conv3dSpec) -> Result<Problem> {
        spec.problem()
    }

    fn views<'a>(args: &'a Conv3dArgs<'_>) -> Views<'a> {
        let [bias, residual] = [args.bias.as_ref(), args.residual.as_ref()];
        views([Some(&args.x), bias, residual, args.initial_frames.as_ref(), args.w.view()])
    }

    fn args<'a>(views: &[Option<TensorRef<'a>>]) -> Conv3dArgs<'a> {
        let required = |i: usize| views[i].expect("every spec has x and w");
        let [bias, residual, initial_frames] = [views[1], views[2], views[3]];
        Conv3dArgs { x: required(0), w: Weights::Raw(required(4)), bias, residual, initial_frames }
    }

    /// The inputs that are tensor views. A packed filter is not a view.
    fn inputs(args: &Conv3dArgs<'_>) -> &'static [Input<Conv3dSpec>] {
        &Self::INPUTS[..4 + usize::from(args.w.view().is_some())]
    }
}

impl Conv3dPlan {
    /// Packs a filter [k, c/groups, kt, r, s] of the spec's type and strides for any number of runs. The packed filter has
    /// its own memory; the workspace's memory is not used. On a GPU the call waits for the workspace's stream.
    ///
    /// # Errors
    /// As [`Conv2dPlan::pack_weights`](crate::Conv2dPlan::pack_weights).
    pub fn pack_weights(
        &self,
        w: &TensorRef<'_>,
        workspace: &mut Workspace,
    ) -> Result<PackedWeights> {
        check_device("workspace", workspace.device(), self.device())?;
        Checks::new(self.device()).read("w", Some(w), Some(&self.spec.w))?;
        engine!(self, engine => engine.pack(self, w, workspace))
    }

    /// The original filter, if the plan verifies.
    fn source(&self, w: &TensorRef<'_>) -> Result<Option<Vec<f64>>> {
        (self.options.verify == Verify::On).then(|| w.to_f64_vec()).transpose()
    }

    fn packing(&self) -> Packing {
        let form = engine!(self, engine => engine.form());
        Packing::new(&self.problem, self.algorithm(), form)
    }

    /// The bytes of workspace that [`Conv3dPlan::run`] needs for these inputs: at most [`Conv3dPlan::workspace_bytes`].
    /// With a packed or cached filter, none are needed for the packed filter. On a GPU, fewer are needed if the kernels
    /// can read x and the initial frames in place, which depends on their strides and their addresses.
    pub fn workspace_bytes_for(&self, args: &Conv3dArgs<'_>) -> usize {
        match args.w {
            Weights::Raw(_) => engine!(self, engine => engine.raw_bytes_for(args)),
            Weights::Packed(_) | Weights::Cached(..) => {
                engine!(self, engine => engine.scratch_bytes_for(args))
            }
        }
    }

    /// Runs the convolution and writes y, and the final frames if the spec has them. These may be the memory of the initial
    /// frames, with the same strides; otherwise outputs must not share memory with inputs or each other.
    ///
    /// # Errors
    /// As [`Conv2dPlan::run`](crate::Conv2dPlan::run).
    pub fn run<'a>(
        &self,
        args: &Conv3dArgs<'_>,
        outputs: impl Into<Conv3dOutputs<'a>>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut outputs = outputs.into();
        let mut checks = self.check_run(args, workspace)?;
        if let Weights::Packed(packed) = args.w {
            packed.check(self.packing())?;
        }
        let Conv3dOutputs { y, final_frames } = &outputs;
        checks.write("y", Some(y), Some(&self.spec.y))?;
        let moves_on =
            final_frames.as_ref().zip(args.initial_frames).is_some_and(|(last, first)| {
                last.as_ptr() == first.as_ptr() && last.layout() == first.layout()
            });
        let over = moves_on.then_some("initial_frames");
        let planned = self.spec.final_frames.as_ref();
        checks.write_over("final_frames", final_frames.as_ref(), planned, over)?;
        self.verified(
            &mut outputs,
            workspace,
            |_| match filter(&args.w)? {
                Some(w) => self.expected(args, &w).map(Some),
                // A filter that was packed without `Verify::On` is known in its packed form only.
                None => Ok(None),
            },
            |outputs, workspace| engine!(self, engine => engine.run(self, args, outputs, workspace)),
            |outputs, want| want.map_or(Ok(Vec::new()), |want| self.checks(want, outputs)),
        )
    }

    /// The comparisons of the outputs with what [`Conv3dPlan::expected`] gave before the run.
    pub(crate) fn checks(
        &self,
        [y, last]: [Expected; 2],
        outputs: &Conv3dOutputs<'_>,
    ) -> Result<Vec<Check>> {
        let mut checks = vec![y.check("y", &outputs.y.as_ref(), self.tolerance())?];
        if let Some(frames) = &outputs.final_frames {
            checks.push(last.check("final_frames", &frames.as_ref(), 0.0)?);
        }
        Ok(checks)
    }

    /// The algorithms that can compute a spec with an instruction set, whatever their accuracy.
    pub(crate) fn algorithms_on(spec: &Conv3dSpec, isa: Isa) -> Result<Vec<Conv2dAlgorithm>> {
        crate::conv2d::cpu::supported(&Video::new(spec, &spec.problem()?)?.task(isa, 1)?)
    }

    /// The oracle's y, with the scales by which [`Conv3dPlan::tolerance`] is multiplied, and its final frames.
    pub(crate) fn expected(&self, args: &Conv3dArgs<'_>, w: &[f64]) -> Result<[Expected; 2]> {
        self.expected_of(self.problem.k, args, w)
    }

    /// The same for the output channels that the filter, bias and residual have, of one group or all groups.
    pub(in crate::conv2d::conv3d) fn expected_of(
        &self,
        k: usize,
        args: &Conv3dArgs<'_>,
        w: &[f64],
    ) -> Result<[Expected; 2]> {
        let (x, p) = with_frames_before(&self.spec, &Problem { k, ..self.problem }, args)?;
        let added = [&args.bias, &args.residual].map(Option::as_ref);
        let [bias, residual] = added.map(|view| view.map(TensorRef::to_f64_vec).transpose());
        let (bias, residual) = (bias?, residual?);
        let added = [bias.as_deref(), residual.as_deref()];
        let want = reference::forward(&p, &x, w, added, self.spec.params.activation)?;
        let tile = engine!(self, engine => engine.tile());
        let tiles = tile.map(|tile| reference::winograd_scale(&p, tile, &x, w));
        let count = self.spec.final_frames.map_or(0, |desc| desc.shape()[2]);
        Ok([want.widened(tiles.transpose()?), Expected::exactly(last(&x, &p, count))?])
    }

    /// The allowed error of an element, relative to its scale.
    pub(crate) fn tolerance(&self) -> f64 {
        engine!(self, engine => engine.tolerance())
    }
}

/// The part of [`Plan::explain`]'s text that comes after the configuration.
fn explained(plan: &Conv3dPlan, place: &str, runs: usize, blocks: &str) -> String {
    let (accuracy, bytes) = (plan.spec.params.accuracy.name(), plan.workspace_bytes());
    let runs = if runs > 1 { format!("{runs} runs of ") } else { String::new() };
    format!(" on {place} at accuracy {accuracy}: {runs}{blocks}; workspace {bytes} bytes")
}
