//! Plans together with the inputs of a run, for any operator.

use super::operator::{MAX_INPUTS, Operator, Tuned};
use super::planned::Plan;
use crate::{Placed, TensorRef};

/// A plan and the inputs of a run.
pub struct Bound<'a, O: Operator> {
    /// The plan.
    pub plan: &'a Plan<O>,
    /// The inputs, in the order of [`Operator::INPUTS`].
    pub inputs: [Option<TensorRef<'a>>; MAX_INPUTS],
}

impl<'a, O: Tuned> Bound<'a, O> {
    /// A plan and tensors in the order of [`Operator::INPUTS`].
    pub fn new(plan: &'a Plan<O>, inputs: &'a [Option<Placed>]) -> Self {
        let view = |i: usize| Some(inputs.get(i)?.as_ref()?.as_ref());
        Bound { plan, inputs: std::array::from_fn(view) }
    }

    /// The inputs by name.
    pub fn args(&self) -> O::Args<'a> {
        O::args(&self.inputs)
    }
}
