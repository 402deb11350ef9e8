//! Comparison of results with the oracle: which sums form an element, and how large its error may be.

use super::cpu::direct::gradients::most_additions;
use super::cpu::im2col::gradients::most_tokens;
use super::cpu::shared::epilogue::HALF_ERROR;
use super::problem::OUTPUTS;
use super::reference::{Gradients, Reference, UpdateReference};
use super::split::Split;
use super::{CausalConv1dGrads, CausalConv1dOutputs, HeadNorm, Problem};
use crate::cpu::gemm::MAX_TERMS;
use crate::verification::{Check, Comparison, Expected};
use crate::{Activation, DType, Result, TensorMut, TensorRef};

/// The largest number of additions, one after the other, that form an element of a sum of `terms` products: of a matrix
/// product's block, then of the blocks.
fn additions(terms: usize) -> usize {
    terms.min(MAX_TERMS + terms.div_ceil(MAX_TERMS))
}

/// Additions of the sum before the activation.
fn forward_additions(problem: &Problem) -> usize {
    additions(if problem.dense { problem.width * problem.d } else { problem.width })
}

/// Roundings of a sum of products and a bias, in units of f32, and of the activation (4 units in the last place, which
/// are 8 roundings), whose slope is at most 1.2 unless it is hardswish's or that of leaky ReLU. For f16 and bf16, SiLU is
/// only computed to the few more bits that they need.
pub(super) fn forward_tolerance(problem: &Problem, activation: Activation, y: DType) -> f64 {
    let sum = forward_additions(problem) as f64 + 1.0;
    let sums = activation.steepest_slope().max(1.2) * sum;
    let f32_error = (sums + 8.0 * activation.most_enlarged()) * DType::F32.unit_roundoff();
    match activation {
        Activation::Silu if y.is_half() => f32_error + HALF_ERROR,
        _ => f32_error,
    }
}

/// The tolerance of [`forward_tolerance`], plus the derivative's roundings (9) and a sum of `additions` products.
fn backward_tolerance(problem: &Problem, additions: usize) -> f64 {
    ((forward_additions(problem) + additions) as f64 + 12.0) * DType::F32.unit_roundoff()
}

/// Requires equal bits, except for the sign of a zero and the bits of a NaN.
pub(super) fn check_equal(
    what: &'static str,
    got: &TensorRef<'_>,
    want: Vec<f64>,
) -> Result<Check> {
    Expected::exactly(want)?.check(what, got, 0.0)
}

/// `y` of a run.
pub(crate) fn compare_output(reference: &Reference, y: &TensorRef<'_>) -> Result<Comparison> {
    compare_with(&reference.forward()?, reference, y)
}

fn compare_with(want: &Expected, reference: &Reference, y: &TensorRef<'_>) -> Result<Comparison> {
    let tolerance = forward_tolerance(&reference.problem, reference.activation, y.dtype());
    want.compare(y, tolerance)
}

/// The outputs of a run.
pub(crate) fn forward_checks(
    reference: &Reference,
    outputs: &CausalConv1dOutputs<'_>,
) -> Result<Vec<Check>> {
    forward_checks_with(&reference.forward()?, reference, outputs)
}

pub(super) fn forward_checks_with(
    want: &Expected,
    reference: &Reference,
    outputs: &CausalConv1dOutputs<'_>,
) -> Result<Vec<Check>> {
    let CausalConv1dOutputs { y, y2, y3, .. } = outputs;
    let tolerance = forward_tolerance(&reference.problem, reference.activation, y.dtype());
    let given = [Some(y), y2.as_ref(), y3.as_ref()];
    let mut checks = output_checks(want, (&reference.problem, reference.norm), given, tolerance)?;
    if let Some(states) = &outputs.final_states {
        checks.push(check_equal("final_states", &states.as_ref(), reference.final_states()?)?);
    }
    Ok(checks)
}

/// The outputs, each with its channels of the expected values, which are those without a norm.
pub(super) fn output_checks(
    want: &Expected,
    (problem, norm): (&Problem, Option<HeadNorm>),
    outputs: [Option<&TensorMut<'_>>; OUTPUTS],
    tolerance: f64,
) -> Result<Vec<Check>> {
    let given = || outputs.into_iter().flatten();
    let channels = Split::of(given().map(|output| output.desc())).channels();
    if let ([Some(y), None, None], None) = (outputs, norm) {
        return Ok(vec![want.check("y", &y.as_ref(), tolerance)?]);
    }
    let each = given().zip(channels).zip(["y", "y2", "y3"]).enumerate();
    each.map(|(i, ((output, channels), what))| {
        let shape = [problem.b, channels.len(), problem.l];
        let want = want.narrow(&problem.y_shape(), channels)?;
        match norm.filter(|_| HeadNorm::takes(i)) {
            None => want.check(what, &output.as_ref(), tolerance),
            Some(norm) => {
                let want = norm.expected(&want, shape, output.dtype(), tolerance)?;
                want.check(what, &output.as_ref(), 1.0)
            }
        }
    })
    .collect()
}

/// The comparisons of the requested gradients with the oracle.
pub(crate) fn backward_checks(
    reference: &Reference,
    (dy, dfinal_states): (&TensorRef<'_>, Option<&TensorRef<'_>>),
    grads: &CausalConv1dGrads<'_>,
) -> Result<Vec<Check>> {
    let dfinal_states = dfinal_states.map(TensorRef::to_f64_vec).transpose()?;
    let asked = [grads.dbias.is_some(), grads.dinitial_states.is_some()];
    let want = reference.backward(&dy.to_f64_vec()?, dfinal_states.as_deref(), asked)?;
    backward_checks_with(&want, reference, grads)
}

pub(super) fn backward_checks_with(
    want: &Gradients,
    reference: &Reference,
    grads: &CausalConv1dGrads<'_>,
) -> Result<Vec<Check>> {
    let problem = &reference.problem;
    // Sums over taps, and over tokens: these go through tiles of 64 tokens and the tiles of a task in f32, or through
    // matrix products.
    let (taps, tokens) = match problem.dense {
        true => {
            (additions(problem.d_out) + problem.width, additions(most_tokens(problem.history())))
        }
        false => (problem.width + 1, most_additions(problem) + problem.width / 8),
    };
    let checks = [
        ("dx", &grads.dx, &want.dx, taps),
        ("dweight", &grads.dweight, &want.dweight, tokens),
        ("dbias", &grads.dbias, &want.dbias, tokens),
        ("dinitial_states", &grads.dinitial_states, &want.dinitial_states, taps),
    ];
    let given = checks.into_iter().filter_map(|(what, got, want, additions)| {
        let got = got.as_ref()?.as_ref();
        Some(want.check(what, &got, backward_tolerance(problem, additions)))
    });
    given.collect()
}

/// The result of an update by the oracle.
pub(crate) struct UpdateOracle {
    y: Expected,
    tolerance: f64,
    conv_state: Expected,
}

impl UpdateOracle {
    /// The oracle's result of an update that begins with the states `conv_state`.
    pub(super) fn of(
        reference: &UpdateReference,
        mut conv_state: Vec<f64>,
        dtype: DType,
    ) -> Result<Self> {
        let y = reference.run(&mut conv_state)?;
        let tolerance = forward_tolerance(&reference.problem, reference.activation, dtype);
        Ok(UpdateOracle { y, tolerance, conv_state: Expected::exactly(conv_state)? })
    }

    pub(super) fn checks(
        &self,
        conv_state: &TensorRef<'_>,
        y: &TensorRef<'_>,
    ) -> Result<Vec<Check>> {
        Ok(vec![
            self.y.check("y", y, self.tolerance)?,
            self.conv_state.check("conv_state", conv_state, 0.0)?,
        ])
    }
}
