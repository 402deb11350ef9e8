//! Support for operators with exactly one method on each kind of device.

use crate::causal_conv1d::{CausalConv1dAlgorithm, CausalConv1dConfiguration};
use crate::plan::{Engine, Operator, Plan, Setup};
use crate::{Error, Result};

/// The interface of a method that is the only one of an operator on its kind of device. Its algorithm is
/// [`CausalConv1dAlgorithm::Direct`], without parameters.
pub trait OnlyMethod<O: Operator>: Sized {
    /// The type of [`Engine::Place`]: an instruction set of the CPU, or a GPU.
    type Place: Copy;

    fn new(setup: &Setup<'_, O, Self::Place>) -> Result<Self>;

    /// Bytes of workspace for a run.
    fn workspace_bytes(&self) -> usize {
        0
    }

    /// A description of the prepared run for [`Plan::explain`]: instruction set or GPU, block sizes, threads.
    fn explain(&self, plan: &Plan<O>) -> String;
}

impl<O, M> Engine<O> for M
where
    O: Operator<Configuration = CausalConv1dConfiguration>,
    M: OnlyMethod<O>,
{
    type Place = M::Place;

    fn algorithms(_: &Setup<'_, O, M::Place>) -> Result<Vec<CausalConv1dAlgorithm>> {
        Ok(vec![CausalConv1dAlgorithm::Direct])
    }

    fn new(
        setup: &Setup<'_, O, M::Place>,
        configuration: &CausalConv1dConfiguration,
    ) -> Result<Self> {
        setup.require(configuration.algorithm, &Self::algorithms(setup)?)?;
        if *configuration != CausalConv1dConfiguration::new(configuration.algorithm) {
            let what = format!("{} with {configuration}", O::NAME);
            return Err(Error::unsupported(what, "it has no parameters"));
        }
        M::new(setup)
    }

    fn configuration(&self) -> CausalConv1dConfiguration {
        CausalConv1dConfiguration::new(CausalConv1dAlgorithm::Direct)
    }

    fn workspace_bytes(&self) -> usize {
        M::workspace_bytes(self)
    }

    fn explain(&self, plan: &Plan<O>) -> String {
        M::explain(self, plan)
    }
}
