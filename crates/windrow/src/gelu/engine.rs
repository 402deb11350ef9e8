//! The engines of GELU: CPU and GPUs.

use super::spec::HalfMath;
use super::{Gelu, GeluAlgorithm, GeluConfiguration, GeluPlan, cpu, gpu};
use crate::cpu::Isa;
use crate::plan::{Engine, Setup};
use crate::{Device, Error, Result};

/// The engine on the CPU.
#[derive(Clone, Debug)]
pub struct Cpu {
    pub(super) isa: Isa,
    pub(super) threads: usize,
    workspace_bytes: usize,
}

/// The engine on GPUs, by CUDA and HIP.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// The compiled kernel.
    pub(super) forward: gpu::Forward,
    workspace_bytes: usize,
}

/// The fastest of some algorithms.
fn first(algorithms: Vec<GeluAlgorithm>) -> Result<GeluAlgorithm> {
    algorithms.first().copied().ok_or_else(|| {
        Error::unsupported(
            "gelu with half_math native",
            "it takes f16 or bf16 on CUDA, without bias and gate",
        )
    })
}

impl Engine<Gelu> for Cpu {
    type Place = Isa;

    fn algorithms(setup: &Setup<'_, Gelu, Isa>) -> Result<Vec<GeluAlgorithm>> {
        Ok(match setup.spec.half_math {
            HalfMath::Float => vec![GeluAlgorithm::Cpu],
            HalfMath::Native => Vec::new(),
        })
    }

    fn choose(setup: &Setup<'_, Gelu, Isa>) -> Result<GeluAlgorithm> {
        first(Self::algorithms(setup)?)
    }

    fn new(setup: &Setup<'_, Gelu, Isa>, configuration: &GeluConfiguration) -> Result<Self> {
        setup.require(configuration.algorithm, &Self::algorithms(setup)?)?;
        let partition = setup.spec.bias.map(|_| cpu::Partition::new(setup.spec.x.shape()));
        let workspace_bytes = partition.map_or(0, |partition| partition.workspace_bytes());
        Ok(Cpu { isa: setup.place, threads: setup.threads(), workspace_bytes })
    }

    fn configuration(&self) -> GeluConfiguration {
        GeluConfiguration::new(GeluAlgorithm::Cpu)
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    fn explain(&self, _: &GeluPlan) -> String {
        format!(": one pass in {} vectors on {} threads", self.isa.name(), self.threads)
    }
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

    /// The bytes, and more of them the less a thread moves at once.
    fn cost(setup: &Setup<'_, Gelu, Device>, configuration: &GeluConfiguration) -> Result<f64> {
        let all = Self::algorithms(setup)?;
        let rank = all.iter().position(|a| *a == configuration.algorithm).unwrap_or(0);
        Ok(1.0 + 0.2 * rank as f64)
    }
}
