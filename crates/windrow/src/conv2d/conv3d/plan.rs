//! The plan of a convolution of videos and its runs, on the CPU.

use super::frames::{last, with_frames_before, write_last};
use super::video::Video;
use super::{Conv3dArgs, Conv3dOutputs, Conv3dSpec};
use crate::conv2d::cpu::{self, Prepared, Residual, Run, floats, floats_mut};
use crate::conv2d::plan::{PackedForm, Packing, activated, filter, stored, threads};
use crate::conv2d::{
    Conv2dAlgorithm, Conv2dConfiguration, PackedWeights, Problem, Tile, Weights, reference,
};
use crate::cpu::Isa;
use crate::plan::{Backend, Checks, Engine, Input, Operator, Plan, Setup, Views, views};
use crate::verification::{Check, Expected};
use crate::{Activation, Device, Error, Result, TensorMut, TensorRef, Verify, Workspace};

/// A [`Conv3dSpec`] that was checked and bound to the CPU and an algorithm.
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

    fn check_batch_invariant(_: &Conv3dSpec, device: Device) -> Result<()> {
        if device == Device::Cpu {
            return Ok(());
        }
        let what = format!("conv3d with batch_invariant on {device}");
        Err(Error::unsupported(what, "the option is available on the CPU only"))
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

/// The engine on the CPU.
#[derive(Debug)]
pub struct Cpu {
    video: Video,
    prepared: Box<dyn Prepared>,
    isa: Isa,
    threads: usize,
}

impl Engine<Conv3d> for Cpu {
    type Place = Isa;

    fn algorithms(setup: &Setup<'_, Conv3d, Isa>) -> Result<Vec<Conv2dAlgorithm>> {
        Conv3dPlan::algorithms_on(setup.spec, setup.place)
    }

    fn choose(setup: &Setup<'_, Conv3d, Isa>) -> Result<Conv2dAlgorithm> {
        let video = Video::new(setup.spec, setup.problem)?;
        let task = video.task(setup.place, setup.threads())?;
        let task = task.with_batch_invariant(setup.options.batch_invariant);
        Ok(cpu::choose(&task, setup.options.counted_filter()))
    }

    fn new(setup: &Setup<'_, Conv3d, Isa>, configuration: &Conv2dConfiguration) -> Result<Self> {
        let video = Video::new(setup.spec, setup.problem)?;
        let threads = threads(setup.threads(), configuration);
        let task = video.task(setup.place, threads)?;
        let task = task.with_batch_invariant(setup.options.batch_invariant);
        let Some(prepared) = cpu::prepare(&task, configuration)? else {
            return Err(setup.unsupported(configuration.algorithm, &cpu::supported(&task)?));
        };
        Ok(Cpu { prepared, isa: setup.place, threads, video })
    }

    fn configuration(&self) -> Conv2dConfiguration {
        let threads = Some(self.threads);
        Conv2dConfiguration { threads, ..self.prepared.configuration() }
    }

    fn workspace_bytes(&self) -> usize {
        let scratch = self.prepared.workspace_bytes();
        match self.video.runs {
            1 => self.prepared.raw_bytes().max(scratch),
            _ => self.prepared.packed_bytes() + scratch,
        }
    }

    fn explain(&self, plan: &Conv3dPlan) -> String {
        let Cpu { video, prepared, isa, .. } = self;
        let (accuracy, bytes) = (plan.spec.params.accuracy.name(), self.workspace_bytes());
        let runs = if video.runs > 1 { format!("{} runs of ", video.runs) } else { String::new() };
        let (isa, blocks) = (isa.name(), prepared.explain());
        format!(" on {isa} at accuracy {accuracy}: {runs}{blocks}; workspace {bytes} bytes")
    }
}

impl Cpu {
    fn packing(&self, p: &Problem) -> Packing {
        let form = PackedForm::Cpu { width: self.prepared.packed_width() };
        Packing::new(p, self.prepared.configuration().algorithm, form)
    }

    fn pack(&self, plan: &Conv3dPlan, w: &TensorRef<'_>) -> Result<PackedWeights> {
        let source = (plan.options.verify == Verify::On).then(|| w.to_f64_vec()).transpose()?;
        let w = self.video.filter(w);
        PackedWeights::on_cpu(self.packing(&plan.problem), self.prepared.as_ref(), &w, source)
    }

    /// Computes the outputs. The caller has checked the views, and which of them share memory.
    fn run(
        &self,
        plan: &Conv3dPlan,
        args: &Conv3dArgs<'_>,
        outputs: &mut Conv3dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let memory = workspace.take(plan.workspace_bytes_for(&args.w))?;
        if !outputs.y.layout().is_empty() {
            self.convolve(plan, args, &mut outputs.y, memory)?;
        }
        if let Some(frames) = &mut outputs.final_frames {
            write_last(&plan.spec, &plan.problem, args, frames, self.threads);
        }
        Ok(())
    }

    /// Computes y, which has elements, with [`Conv3dPlan::workspace_bytes_for`] bytes of memory.
    fn convolve(
        &self,
        plan: &Conv3dPlan,
        args: &Conv3dArgs<'_>,
        y: &mut TensorMut<'_>,
        memory: &mut [u8],
    ) -> Result<()> {
        let Cpu { video, prepared, isa, threads } = self;
        let kept;
        let (packed, scratch, raw) = match args.w {
            Weights::Raw(w) if video.runs == 1 => (None, memory, Some(video.filter(&w))),
            Weights::Raw(w) => {
                let (packed, scratch) = memory.split_at_mut(prepared.packed_bytes());
                prepared.pack(&video.filter(&w), floats_mut(packed));
                (Some(floats(packed)), scratch, None)
            }
            Weights::Cached(w, cache) => {
                let packing = self.packing(&plan.problem);
                kept = cache.get(packing, *threads, &w, || self.pack(plan, &w))?;
                (kept.elements(), memory, None)
            }
            Weights::Packed(packed) => (packed.elements(), memory, None),
        };
        let follows = cpu::follows(&video.spec);
        let activation = if follows { Activation::Identity } else { video.spec.activation };
        for run in 0..video.runs {
            let x = &video.x(&args.x, run);
            let y = &mut video.y(y, run)?;
            let residual = args.residual.as_ref().map(|residual| video.residual(residual, run));
            let (bias, residual) = (args.bias.as_ref(), Residual::new(residual.as_ref(), y));
            let initial = video.initial(args.initial_frames.as_ref(), run);
            let initial = initial.as_ref();
            let run = Run { x, initial, bias, residual, activation, y, workspace: scratch };
            match (packed, &raw) {
                (Some(packed), _) => prepared.run(packed, run),
                (None, Some(w)) => prepared.run_raw(w, run),
                (None, None) => unreachable!("it was packed on the CPU"),
            }
            if follows {
                cpu::activate(y, video.spec.activation, *isa, *threads);
            }
        }
        Ok(())
    }
}

/// The engine on GPUs, of which there is none yet.
#[derive(Clone, Copy, Debug)]
pub enum Gpu {}

impl Engine<Conv3d> for Gpu {
    type Place = Device;

    fn algorithms(_: &Setup<'_, Conv3d, Device>) -> Result<Vec<Conv2dAlgorithm>> {
        Ok(Vec::new())
    }

    fn choose(setup: &Setup<'_, Conv3d, Device>) -> Result<Conv2dAlgorithm> {
        Err(Error::unsupported(
            format!("conv3d on {}", setup.place),
            "it is computed on the CPU only",
        ))
    }

    fn new(setup: &Setup<'_, Conv3d, Device>, _: &Conv2dConfiguration) -> Result<Self> {
        Self::choose(setup).map(|_| unreachable!("it is an error"))
    }

    fn configuration(&self) -> Conv2dConfiguration {
        match *self {}
    }

    fn workspace_bytes(&self) -> usize {
        match *self {}
    }

    fn explain(&self, _: &Conv3dPlan) -> String {
        match *self {}
    }
}

impl Conv3dPlan {
    /// Packs a filter [k, c/groups, kt, r, s] of the spec's type and strides for any number of runs.
    ///
    /// # Errors
    /// As [`Conv2dPlan::pack_weights`](crate::Conv2dPlan::pack_weights).
    pub fn pack_weights(&self, w: &TensorRef<'_>) -> Result<PackedWeights> {
        Checks::new(self.device()).read("w", Some(w), Some(&self.spec.w))?;
        self.cpu().pack(self, w)
    }

    /// The bytes of workspace that [`Conv3dPlan::run`] needs for these weights: at most
    /// [`Conv3dPlan::workspace_bytes`]. With a packed or cached filter, none are needed for the packed filter.
    pub fn workspace_bytes_for(&self, weights: &Weights<'_>) -> usize {
        match weights {
            Weights::Raw(_) => self.workspace_bytes(),
            Weights::Packed(_) | Weights::Cached(..) => self.cpu().prepared.workspace_bytes(),
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
            packed.check(self.cpu().packing(&self.problem))?;
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
            |outputs, workspace| self.cpu().run(self, args, outputs, workspace),
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

    /// The engine: there is none for GPUs.
    fn cpu(&self) -> &Cpu {
        match &self.backend {
            Backend::Cpu(cpu) => cpu,
            Backend::Gpu(gpu) => match *gpu {},
        }
    }

    /// The algorithms that can compute a spec with an instruction set, whatever their accuracy.
    pub(crate) fn algorithms_on(spec: &Conv3dSpec, isa: Isa) -> Result<Vec<Conv2dAlgorithm>> {
        cpu::supported(&Video::new(spec, &spec.problem()?)?.task(isa, 1)?)
    }

    /// The oracle's y, with the scales by which [`Conv3dPlan::tolerance`] is multiplied, and its final frames.
    pub(crate) fn expected(&self, args: &Conv3dArgs<'_>, w: &[f64]) -> Result<[Expected; 2]> {
        let (x, p) = with_frames_before(&self.spec, &self.problem, args)?;
        let added = [&args.bias, &args.residual].map(Option::as_ref);
        let [bias, residual] = added.map(|view| view.map(TensorRef::to_f64_vec).transpose());
        let (bias, residual) = (bias?, residual?);
        let added = [bias.as_deref(), residual.as_deref()];
        let want = reference::forward(&p, &x, w, added, self.spec.params.activation)?;
        let tile = self.cpu().prepared.tile().map(Tile::m);
        let tiles = tile.map(|tile| reference::winograd_scale(&p, tile, &x, w));
        let count = self.spec.final_frames.map_or(0, |desc| desc.shape()[2]);
        Ok([want.widened(tiles.transpose()?), Expected::exactly(last(&x, &p, count))?])
    }

    /// The allowed error of an element, relative to its scale.
    pub(crate) fn tolerance(&self) -> f64 {
        let Cpu { prepared, video, .. } = self.cpu();
        activated(stored(prepared.tolerance(), &video.spec), video.spec.activation)
    }
}
