//! The engine that computes a convolution of videos on the CPU.

use super::{Conv3d, Conv3dPlan, explained};
use crate::conv2d::conv3d::frames::write_last;
use crate::conv2d::conv3d::video::Video;
use crate::conv2d::conv3d::{Conv3dArgs, Conv3dOutputs};
use crate::conv2d::cpu::{self, Prepared, Residual, Run, floats, floats_mut};
use crate::conv2d::plan::{PackedForm, activated, stored, threads};
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, PackedWeights, Tile, Weights};
use crate::cpu::Isa;
use crate::plan::{Engine, Setup};
use crate::{Activation, Result, TensorMut, TensorRef, Workspace};

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
        explained(plan, isa.name(), video.runs, &prepared.explain())
    }
}

impl Cpu {
    pub(super) fn form(&self) -> PackedForm {
        let method = self.prepared.configuration().algorithm;
        PackedForm::Cpu { method, width: self.prepared.packed_width() }
    }

    /// Bytes of workspace that a run needs beside a filter that has memory of its own.
    pub(super) fn scratch_bytes_for(&self, _: &Conv3dArgs<'_>) -> usize {
        self.prepared.workspace_bytes()
    }

    /// The same with a filter that is packed into the workspace.
    pub(super) fn raw_bytes_for(&self, _: &Conv3dArgs<'_>) -> usize {
        self.workspace_bytes()
    }

    /// The side of an output tile, of Winograd's algorithms.
    pub(super) fn tile(&self) -> Option<usize> {
        self.prepared.tile().map(Tile::m)
    }

    pub(super) fn tolerance(&self) -> f64 {
        let spec = &self.video.spec;
        activated(stored(self.prepared.tolerance(), spec), spec.activation)
    }

    /// Packs a filter that agrees with the spec.
    pub(super) fn pack(
        &self,
        plan: &Conv3dPlan,
        w: &TensorRef<'_>,
        _: &mut Workspace,
    ) -> Result<PackedWeights> {
        self.pack_alone(plan, w)
    }

    fn pack_alone(&self, plan: &Conv3dPlan, w: &TensorRef<'_>) -> Result<PackedWeights> {
        let source = plan.source(w)?;
        let w = self.video.filter(w);
        PackedWeights::on_cpu(plan.packing(), self.prepared.as_ref(), &w, source)
    }

    /// Computes the outputs. The caller has checked the views, and which of them share memory.
    pub(super) fn run(
        &self,
        plan: &Conv3dPlan,
        args: &Conv3dArgs<'_>,
        outputs: &mut Conv3dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let memory = workspace.take(plan.workspace_bytes_for(args))?;
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
                kept = cache.get(plan.packing(), *threads, &w, || self.pack_alone(plan, &w))?;
                (kept.elements(), memory, None)
            }
            Weights::Packed(packed) => {
                let elements = packed.elements();
                (Some(elements.ok_or_else(|| packed.elsewhere(plan.device()))?), memory, None)
            }
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
                (None, None) => unreachable!("it is packed or raw"),
            }
            if follows {
                cpu::activate(y, video.spec.activation, *isa, *threads);
            }
        }
        Ok(())
    }
}
