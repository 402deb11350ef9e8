//! The description of a convolution that methods answer questions about.

use super::chips::Chip;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::Gpu;
use crate::{Filter, PlanOptions, Tuning};

/// A convolution on a chip, with the algorithm and the options of its plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task<'a> {
    pub(super) chip: Chip,
    pub(super) spec: &'a Conv2dSpec,
    pub(super) problem: &'a Problem,
    /// The algorithm, and those of its parameters that are given.
    pub(super) configuration: Conv2dConfiguration,
    pub(super) options: PlanOptions,
}

impl<'a> Task<'a> {
    /// A task with an algorithm that every device has. [`Task::by`] and [`Task::with`] choose another.
    pub(crate) fn new(
        gpu: &Gpu,
        spec: &'a Conv2dSpec,
        problem: &'a Problem,
        options: &PlanOptions,
    ) -> Self {
        Self::on(Chip::of(gpu), spec, problem, options)
    }

    /// The same without a device.
    pub(super) fn on(
        chip: Chip,
        spec: &'a Conv2dSpec,
        problem: &'a Problem,
        options: &PlanOptions,
    ) -> Self {
        let configuration = Conv2dConfiguration::new(Conv2dAlgorithm::Im2colGemm);
        Task { chip, spec, problem, configuration, options: *options }
    }

    /// The task on an H200 with default options.
    #[cfg(test)]
    pub(super) fn on_h200(spec: &'a Conv2dSpec, problem: &'a Problem) -> Self {
        Self::on(Chip::h200(132), spec, problem, &PlanOptions::default())
    }

    /// The task by an algorithm whose parameters are not given.
    pub(crate) fn by(&self, algorithm: Conv2dAlgorithm) -> Self {
        self.with(&Conv2dConfiguration::new(algorithm))
    }

    /// The task with a configuration.
    pub(crate) fn with(&self, configuration: &Conv2dConfiguration) -> Self {
        Task { configuration: *configuration, ..*self }
    }

    /// Another convolution on the same chip that packs its filter on each run, as gradients do.
    pub(super) fn gradient<'b>(&self, spec: &'b Conv2dSpec, problem: &'b Problem) -> Task<'b> {
        let options =
            PlanOptions::default().with_tuning(Tuning::Model).with_filter(Filter::Changing);
        Task { chip: self.chip, spec, problem, configuration: self.configuration, options }
    }

    pub(super) fn algorithm(&self) -> Conv2dAlgorithm {
        self.configuration.algorithm
    }

    /// True if an element of dx sums few terms, or few channels share them. One thread for each element is then
    /// fastest.
    pub(super) fn is_few(&self) -> bool {
        let p = self.problem;
        p.c_group() < 8 || p.k_group() * p.r * p.s < 8
    }
}
