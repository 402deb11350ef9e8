//! The engine that computes GELU on GPUs.

use super::{Gelu, GeluPlan, first};
use crate::gelu::{GeluAlgorithm, GeluArgs, GeluConfiguration, GeluGrads, gpu};
use crate::plan::{Engine, Setup};
use crate::{Device, Result, TensorMut, TensorRef, Workspace};

/// The engine on GPUs, for CUDA and HIP.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// The compiled kernel.
    forward: gpu::Forward,
    workspace_bytes: usize,
}

impl Engine<Gelu> for Gpu {
    type Place = Device;

    fn algorithms(setup: &Setup<'_, Gelu, Device>) -> Result<Vec<GeluAlgorithm>> {
        Ok(gpu::algorithms(setup.spec))
    }

    fn choose(setup: &Setup<'_, Gelu, Device>) -> Result<GeluAlgorithm> {
        first(Self::algorithms(setup)?)
    }

    fn new(setup: &Setup<'_, Gelu, Device>, configuration: &GeluConfiguration) -> Result<Self> {
        setup.require(configuration.algorithm, &Self::algorithms(setup)?)?;
        let forward = gpu::Forward::new(setup.place, setup.spec, configuration)?;
        Ok(Gpu { forward, workspace_bytes: gpu::workspace_bytes(setup.spec) })
    }

    fn configuration(&self) -> GeluConfiguration {
        self.forward.configuration()
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    fn explain(&self, _: &GeluPlan) -> String {
        format!(": one pass, {}", self.forward.explain())
    }

    fn variants(_: &Setup<'_, Gelu, Device>, algorithm: GeluAlgorithm) -> Vec<GeluConfiguration> {
        let base = GeluConfiguration::new(algorithm);
        let blocks = [64, 256, 512, 1024].map(|n| GeluConfiguration { block: Some(n), ..base });
        let unrolls = [1, 2, 4].map(|n| GeluConfiguration { unroll: Some(n), ..base });
        [base].into_iter().chain(blocks).chain(unrolls).collect()
    }

    fn complete(
        setup: &Setup<'_, Gelu, Device>,
        configuration: &GeluConfiguration,
    ) -> Result<GeluConfiguration> {
        Ok(gpu::complete(setup.place, setup.spec, configuration))
    }

    /// The expected cost in relative units. It is higher for algorithms with narrower memory accesses.
    fn cost(setup: &Setup<'_, Gelu, Device>, configuration: &GeluConfiguration) -> Result<f64> {
        let all = Self::algorithms(setup)?;
        let rank = all.iter().position(|a| *a == configuration.algorithm).unwrap_or(0);
        Ok(1.0 + 0.2 * rank as f64)
    }
}

impl Gpu {
    /// Computes y. The caller has checked the views, and that y is x or shares no memory with an input.
    pub(super) fn run(
        &self,
        _: &GeluPlan,
        args: &GeluArgs<'_>,
        y: &TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.forward.run(args, y, workspace)
    }

    /// Computes the gradients from `dy`. The caller has made the same checks as for [`Gpu::run`].
    pub(super) fn backward(
        &self,
        plan: &GeluPlan,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        grads: &GeluGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.forward.backward(&plan.spec, args, dy, grads, workspace)
    }
}
