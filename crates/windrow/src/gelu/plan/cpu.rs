//! The engine that computes GELU on the CPU.

use super::{Gelu, GeluPlan, first};
use crate::cpu::Isa;
use crate::gelu::{GeluAlgorithm, GeluArgs, GeluConfiguration, GeluGrads, HalfMath, cpu};
use crate::plan::{Engine, Setup};
use crate::{Result, TensorMut, TensorRef, Workspace};

/// The engine on the CPU.
#[derive(Clone, Debug)]
pub struct Cpu {
    isa: Isa,
    threads: usize,
    workspace_bytes: usize,
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

impl Cpu {
    /// Computes y. The caller has checked the views, and that y is x or shares no memory with an input.
    pub(super) fn run(
        &self,
        plan: &GeluPlan,
        args: &GeluArgs<'_>,
        y: &mut TensorMut<'_>,
        _: &mut Workspace,
    ) -> Result<()> {
        let batch_invariant = plan.options.batch_invariant;
        cpu::forward(self.isa, self.threads, &plan.spec, batch_invariant, args, y.reborrow());
        Ok(())
    }

    /// Computes the gradients from `dy`. The caller has made the same checks as for [`Cpu::run`].
    pub(super) fn backward(
        &self,
        plan: &GeluPlan,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        grads: &mut GeluGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let grads = GeluGrads {
            dx: grads.dx.as_mut().map(TensorMut::reborrow),
            dgate: grads.dgate.as_mut().map(TensorMut::reborrow),
            dbias: grads.dbias.as_mut().map(TensorMut::reborrow),
        };
        cpu::backward(self.isa, self.threads, &plan.spec, args, dy, grads, workspace)
    }
}
