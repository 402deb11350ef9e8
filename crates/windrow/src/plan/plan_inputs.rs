//! Plans together with the inputs of a run, for any operator.

use super::operator::{MAX_INPUTS, Operator};
use super::planned::Plan;
use crate::verification::data::Held;
use crate::{Placed, Result, TensorDesc, TensorRef};
use std::marker::PhantomData;

/// A plan and the inputs of a run.
pub struct PlanInputs<'a, O: Operator> {
    /// The plan.
    pub plan: &'a Plan<O>,
    /// The inputs, in the order of [`Operator::INPUTS`].
    pub inputs: [Option<TensorRef<'a>>; MAX_INPUTS],
}

impl<'a, O: Operator> PlanInputs<'a, O> {
    /// A plan and tensors in the order of [`Operator::INPUTS`].
    pub fn new(plan: &'a Plan<O>, inputs: &'a [Option<Placed>]) -> Self {
        let view = |i: usize| Some(inputs.get(i)?.as_ref()?.as_ref());
        PlanInputs { plan, inputs: std::array::from_fn(view) }
    }

    /// The inputs by name.
    pub fn args(&self) -> O::Args<'a> {
        O::args(&self.inputs)
    }
}

/// The inputs of a run, with memory that this structure owns, for the listed and random test cases of `windrow verify`.
pub(crate) struct HeldInputs<O: Operator> {
    /// The tensors in the order of [`Operator::INPUTS`].
    held: Vec<Option<Held>>,
    operator: PhantomData<O>,
}

impl<O: Operator> HeldInputs<O> {
    /// Makes the inputs of a spec. `make` makes one input from its name and descriptor.
    pub(crate) fn new(
        spec: &O::Spec,
        mut make: impl FnMut(&'static str, TensorDesc) -> Result<Held>,
    ) -> Result<Self> {
        let held = O::INPUTS
            .iter()
            .map(|input| (input.desc)(spec).map(|desc| make(input.name, *desc)).transpose());
        Ok(HeldInputs { held: held.collect::<Result<_>>()?, operator: PhantomData })
    }

    /// The inputs by name.
    pub(crate) fn args(&self) -> O::Args<'_> {
        let views: Vec<_> = self.held.iter().map(|held| held.as_ref().map(Held::as_ref)).collect();
        O::args(&views)
    }

    /// The input with this name.
    ///
    /// # Panics
    /// If the spec does not have it.
    pub(crate) fn get_mut(&mut self, name: &str) -> &mut Held {
        let mut inputs = O::INPUTS.iter().zip(&mut self.held);
        let found = inputs.find(|(input, _)| input.name == name);
        found.and_then(|(_, held)| held.as_mut()).expect("an input of the spec")
    }
}
