//! Comparison of serving with the oracle.

use super::CausalConv1dServingOutputs;
use super::reference::{Memory, ServingReference};
use crate::causal_conv1d::comparison::{check_equal, forward_tolerance, output_checks};
use crate::causal_conv1d::{HeadNorm, Problem};
use crate::verification::{Check, Expected};
use crate::{DType, Result};

/// The oracle's result of a call.
pub(crate) struct Oracle {
    problem: Problem,
    norm: Option<HeadNorm>,
    y: Expected,
    tolerance: f64,
    memory: Memory,
}

impl Oracle {
    /// The result of a call whose outputs hold this before it.
    pub(crate) fn of(
        reference: &ServingReference,
        mut memory: Memory,
        dtype: DType,
    ) -> Result<Self> {
        let y = reference.run(&mut memory)?;
        let tolerance = forward_tolerance(&reference.problem, reference.activation, dtype);
        Ok(Oracle { problem: reference.problem, norm: reference.norm, y, tolerance, memory })
    }

    pub(crate) fn checks(self, outputs: &CausalConv1dServingOutputs<'_>) -> Result<Vec<Check>> {
        let Memory { conv_states, windows, parents } = self.memory;
        let given = [Some(&outputs.y), outputs.y2.as_ref(), outputs.y3.as_ref()];
        let mut checks = output_checks(&self.y, (&self.problem, self.norm), given, self.tolerance)?;
        let states = outputs.conv_states.as_ref();
        checks.push(check_equal("conv_states", &states, conv_states)?);
        if let Some(view) = &outputs.intermediate_windows {
            checks.push(check_equal("intermediate_windows", &view.as_ref(), windows)?);
        }
        if let Some(view) = &outputs.parent_token {
            checks.push(check_equal("parent_token", &view.as_ref(), parents)?);
        }
        Ok(checks)
    }
}
