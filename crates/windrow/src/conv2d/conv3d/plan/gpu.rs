//! The engine that computes a convolution of videos on GPUs.

use super::{Conv3d, Conv3dPlan, explained};
use crate::conv2d::conv3d::video::Video;
use crate::conv2d::conv3d::{Conv3dArgs, Conv3dOutputs};
use crate::conv2d::gpu::{self as methods, FinalFrames, Prepared};
use crate::conv2d::plan::{PackedForm, activated_on_gpus, with_filter};
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, PackedWeights};
use crate::gpu as device;
use crate::plan::{Engine, Setup};
use crate::{Device, Result, TensorRef, Workspace};

/// The engine on GPUs.
#[derive(Debug)]
pub struct Gpu {
    video: Video,
    prepared: Box<dyn Prepared>,
    gpu: &'static device::Gpu,
    algorithm: Conv2dAlgorithm,
    /// If the spec has final frames.
    last: Option<FinalFrames>,
}

impl Engine<Conv3d> for Gpu {
    type Place = Device;

    fn algorithms(setup: &Setup<'_, Conv3d, Device>) -> Result<Vec<Conv2dAlgorithm>> {
        let gpu = device::Gpu::get(setup.place)?;
        let video = Video::new(setup.spec, setup.problem)?;
        Ok(methods::supported(gpu, &video.gpu_task(gpu, setup.options)))
    }

    fn choose(setup: &Setup<'_, Conv3d, Device>) -> Result<Conv2dAlgorithm> {
        let gpu = device::Gpu::get(setup.place)?;
        let video = Video::new(setup.spec, setup.problem)?;
        methods::best(gpu, &video.gpu_task(gpu, setup.options))
    }

    fn new(setup: &Setup<'_, Conv3d, Device>, configuration: &Conv2dConfiguration) -> Result<Self> {
        let gpu = device::Gpu::get(setup.place)?;
        let video = Video::new(setup.spec, setup.problem)?;
        let task = video.gpu_task(gpu, setup.options);
        let prepared = methods::prepare(gpu, &task.with(configuration))?;
        let from = (&setup.spec.x, setup.spec.initial_frames.as_ref());
        let last = setup
            .spec
            .final_frames
            .as_ref()
            .map(|last| FinalFrames::new(gpu, setup.problem, video.before(), from, last));
        let last = last.transpose()?;
        Ok(Gpu { prepared, gpu, algorithm: configuration.algorithm, last, video })
    }

    fn configuration(&self) -> Conv2dConfiguration {
        self.prepared.configuration(self.algorithm)
    }

    fn workspace_bytes(&self) -> usize {
        self.prepared.packed_bytes() + self.prepared.scratch_bytes()
    }

    fn explain(&self, plan: &Conv3dPlan) -> String {
        let borrowed = methods::borrowed_rates(self.gpu);
        let borrowed = borrowed.map(|chip| format!(", chosen by the rates of an {chip}"));
        let blocks = self.prepared.explain() + borrowed.as_deref().unwrap_or_default();
        explained(plan, &plan.device().to_string(), self.video.runs, &blocks)
    }
}

impl Gpu {
    pub(super) fn form(&self) -> PackedForm {
        PackedForm::Cuda(self.prepared.packed_form())
    }

    /// Bytes of workspace that a run needs beside a filter that has memory of its own.
    pub(super) fn scratch_bytes_for(&self, args: &Conv3dArgs<'_>) -> usize {
        let of_run = |run| {
            let initial = self.video.initial(args.initial_frames.as_ref(), run);
            let initial = initial.as_ref().map(TensorRef::as_ptr);
            self.prepared.scratch_bytes_for(self.video.x(&args.x, run).as_ptr(), initial)
        };
        (0..self.video.runs).map(of_run).max().unwrap_or(0)
    }

    /// The same with a filter that is packed into the workspace.
    pub(super) fn raw_bytes_for(&self, args: &Conv3dArgs<'_>) -> usize {
        self.prepared.packed_bytes() + self.scratch_bytes_for(args)
    }

    /// The side of an output tile, of Winograd's algorithms.
    pub(super) fn tile(&self) -> Option<usize> {
        self.prepared.tile()
    }

    pub(super) fn tolerance(&self) -> f64 {
        let Video { spec, .. } = &self.video;
        activated_on_gpus(self.prepared.tolerance(), spec)
    }

    /// Packs a filter that agrees with the spec.
    pub(super) fn pack(
        &self,
        plan: &Conv3dPlan,
        w: &TensorRef<'_>,
        workspace: &mut Workspace,
    ) -> Result<PackedWeights> {
        let on = (&*self.prepared, self.gpu);
        PackedWeights::on_gpu(plan.packing(), on, w, plan.source(w)?, workspace)
    }

    /// Computes the outputs. The caller has checked the views, and which of them share memory.
    pub(super) fn run(
        &self,
        plan: &Conv3dPlan,
        args: &Conv3dArgs<'_>,
        outputs: &mut Conv3dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let Gpu { video, prepared, gpu, last, .. } = self;
        let (stream, memory) = workspace.take_on(gpu, plan.workspace_bytes_for(args))?;
        let Conv3dOutputs { y, final_frames } = outputs;
        if !y.layout().is_empty() {
            let run_all = |packed, scratch| {
                for run in 0..video.runs {
                    let operands = video.operands(args, y, run, scratch)?;
                    // SAFETY: the views were checked against the spec and are on the device.
                    unsafe { prepared.run(stream, packed, operands)? };
                }
                Ok(())
            };
            // SAFETY: as above; the workspace holds the packed filter and the scratch memory.
            unsafe {
                with_filter(&**prepared, gpu, stream, plan.packing(), &args.w, memory, run_all)?;
            }
        }
        if let (Some(last), Some(frames)) = (last, final_frames) {
            let initial = args.initial_frames.as_ref().map(TensorRef::as_ptr);
            // SAFETY: the views were checked against the spec, from which the kernel was made, and are on the device.
            unsafe { last.run(stream, args.x.as_ptr(), initial, frames.as_mut_ptr())? };
        }
        Ok(())
    }
}
