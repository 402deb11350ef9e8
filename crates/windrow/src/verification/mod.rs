//! The tools for comparing results with the f64 oracles: comparisons, test data and random test cases. The public
//! module [`crate::verify`] re-exports parts of it and lists the cases of all operators.

pub(crate) mod choices;
mod comparison;
pub(crate) mod data;
pub(crate) mod random;

pub use choices::Choices;
pub use comparison::{Comparison, ulp};
pub(crate) use comparison::{Expected, compare_parts, round};
pub(crate) use data::tensor_of;
pub use data::{random, random_tensor};
pub use random::Outcome;

use crate::{DType, Result};
use std::fmt;

/// The comparison of a result, or of an intermediate stage, with the oracle's.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Check {
    /// The name of what is compared: a tensor (`y`, `dx`, ...) or an intermediate stage (`im2col`, `U`, `V`, `M`).
    pub what: &'static str,
    /// The result of the comparison.
    pub comparison: Comparison,
}

impl Check {
    /// A check named `what`, with its comparison.
    pub const fn new(what: &'static str, comparison: Comparison) -> Self {
        Check { what, comparison }
    }
}

/// Returns [`Error::Verification`](crate::Error::Verification) if a check fails, for the first one that does. The error
/// names `op` and the check.
pub(crate) fn require(op: &str, checks: Vec<Check>) -> Result<()> {
    checks
        .into_iter()
        .try_for_each(|check| check.comparison.into_result(&format!("{op} {}", check.what)))
}

/// A test case of `windrow verify`.
#[non_exhaustive]
pub struct Case {
    /// The name of the operator, for example `conv2d`.
    pub op: &'static str,
    /// The algorithm's name.
    pub algorithm: String,
    /// The element type of the input `x`.
    pub dtype: DType,
    /// The name of the memory layout, for example `channels_last`.
    pub layout: String,
    /// The shape and options that distinguish the case.
    pub name: String,
    /// The number of elements of the input `x`; 0 if it is not known.
    pub elements: usize,
    /// The function that makes the inputs, runs the operator and compares its results with the oracle.
    pub run: Box<dyn Fn() -> Result<Vec<Check>> + Send + Sync>,
}

impl Case {
    /// A case of this operator, algorithm, type, layout and name.
    pub fn new(
        op: &'static str,
        algorithm: impl Into<String>,
        dtype: DType,
        layout: impl Into<String>,
        name: impl Into<String>,
        run: impl Fn() -> Result<Vec<Check>> + Send + Sync + 'static,
    ) -> Self {
        let (algorithm, layout, name) = (algorithm.into(), layout.into(), name.into());
        Case { op, algorithm, dtype, layout, name, elements: 0, run: Box::new(run) }
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {} {}", self.op, self.algorithm, self.dtype, self.layout, self.name)
    }
}
