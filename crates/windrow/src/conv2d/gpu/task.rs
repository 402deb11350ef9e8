//! The description of a convolution that is given to methods.

use super::chips::Chip;
use crate::conv2d::frame_reads::FrameReads;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::Gpu;
use crate::{Filter, PlanOptions, Tuning};

/// A convolution on a GPU, with the algorithm and the options of its plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task<'a> {
    pub(super) chip: Chip,
    pub(super) spec: &'a Conv2dSpec,
    pub(super) problem: &'a Problem,
    /// The algorithm, and its parameters that are given.
    pub(super) configuration: Conv2dConfiguration,
    pub(super) options: PlanOptions,
    /// The frames that images read, if they are those of a video.
    pub(super) frames: Option<FrameReads>,
}

impl<'a> Task<'a> {
    /// A task with the algorithm [`Conv2dAlgorithm::Im2colGemm`], which runs on every GPU. [`Task::by`] and
    /// [`Task::with`] choose another.
    pub(crate) fn new(
        gpu: &Gpu,
        spec: &'a Conv2dSpec,
        problem: &'a Problem,
        options: &PlanOptions,
    ) -> Self {
        Self::on(Chip::of(gpu), spec, problem, options)
    }

    /// The same, from the cost model's data of a GPU.
    pub(super) fn on(
        chip: Chip,
        spec: &'a Conv2dSpec,
        problem: &'a Problem,
        options: &PlanOptions,
    ) -> Self {
        let configuration = Conv2dConfiguration::new(Conv2dAlgorithm::Im2colGemm);
        Task { chip, spec, problem, configuration, options: *options, frames: None }
    }

    /// The same over the frames of a video, if any are given.
    pub(crate) fn with_frames(self, frames: Option<FrameReads>) -> Self {
        Task { frames, ..self }
    }

    /// The task on an H200 with default options.
    #[cfg(test)]
    pub(super) fn on_h200(spec: &'a Conv2dSpec, problem: &'a Problem) -> Self {
        Self::on(Chip::h200(132), spec, problem, &PlanOptions::default())
    }

    /// The task with another algorithm, without given parameters.
    pub(crate) fn by(&self, algorithm: Conv2dAlgorithm) -> Self {
        self.with(&Conv2dConfiguration::new(algorithm))
    }

    /// The task with another configuration.
    pub(crate) fn with(&self, configuration: &Conv2dConfiguration) -> Self {
        Task { configuration: *configuration, ..*self }
    }

    /// A task for the convolution of a gradient, on the same GPU. Its filter is packed on each run.
    pub(super) fn gradient<'b>(&self, spec: &'b Conv2dSpec, problem: &'b Problem) -> Task<'b> {
        let options =
            PlanOptions::default().with_tuning(Tuning::Model).with_filter(Filter::Changing);
        let (chip, configuration) = (self.chip, self.configuration);
        Task { chip, spec, problem, configuration, options, frames: None }
    }

    pub(super) fn algorithm(&self) -> Conv2dAlgorithm {
        self.configuration.algorithm
    }

    /// True if a group has fewer than 8 input channels, or an element of dx sums fewer than 8 terms. One thread for
    /// each element is then fastest.
    pub(super) fn is_few(&self) -> bool {
        let p = self.problem;
        p.c_group() < 8 || p.k_group() * p.r * p.s < 8
    }
}
