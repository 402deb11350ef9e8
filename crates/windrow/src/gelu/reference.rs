//! The oracle: GELU and its gradients in f64, in plain loops over row-major elements.

use crate::verification::Expected;
use crate::{Activation, Approximate, Result};

/// The inputs, row-major. `bias` belongs to the last dimension.
pub(crate) struct Inputs {
    pub(crate) x: Vec<f64>,
    pub(crate) bias: Option<Vec<f64>>,
    pub(crate) gate: Option<Vec<f64>>,
    pub(crate) approximate: Approximate,
}

impl Inputs {
    fn activation(&self) -> Activation {
        Activation::Gelu(self.approximate)
    }

    fn pre_activation(&self, i: usize) -> f64 {
        self.x[i] + self.bias.as_ref().map_or(0.0, |b| b[i % b.len()])
    }

    fn gate(&self, i: usize) -> f64 {
        self.gate.as_ref().map_or(1.0, |g| g[i])
    }

    /// The part of the scale for rounding errors below the normal range of f32. gelu(x) and its derivative are computed
    /// from a probability, a density and their products with x. If these are smaller than the smallest normal number,
    /// their unit in the last place is that of this number.
    fn underflow(x: f64) -> f64 {
        // For larger |x| they are zero in every type.
        const VANISHED: f64 = 64.0;
        f64::from(f32::MIN_POSITIVE) * (1.0 + x.abs().min(VANISHED))
    }

    /// The condition of `f` at `x`, `|x f'(x)|`: the factor by which a relative rounding error of `x + bias` enters the
    /// result. 0 without a bias, because nothing is rounded then.
    fn condition(&self, f: impl Fn(f64) -> f64, x: f64) -> f64 {
        const STEP: f64 = 1e-6;
        if self.bias.is_none() || !x.is_finite() {
            return 0.0;
        }
        ((f(x * (1.0 + STEP)) - f(x * (1.0 - STEP))) / (2.0 * STEP)).abs()
    }
}

/// `gelu(x + bias) * gate`
pub(crate) fn forward(inputs: &Inputs) -> Result<Expected> {
    let mut y = Expected::zeros(inputs.x.len())?;
    let f = |x| inputs.activation().apply_f64(x);
    for i in 0..inputs.x.len() {
        let pre = inputs.pre_activation(i);
        let gate = inputs.gate(i);
        y.values[i] = f(pre) * gate;
        let terms = f(pre).abs() + inputs.condition(f, pre) + Inputs::underflow(pre);
        y.scale[i] = terms * gate.abs();
    }
    Ok(y)
}

/// The gradients of `x`, `gate` and `bias` for the gradient `dy` of the output.
pub(crate) struct ExpectedGrads {
    pub(crate) dx: Expected,
    pub(crate) dgate: Expected,
    pub(crate) dbias: Expected,
}

/// The scale of `incoming * factor`. A kernel may round a `factor` below the range of f32 to zero, and infinity times
/// zero is NaN. Then the scale is `f64::MAX`, so that NaN and infinity are both accepted, as for sums that overflow.
fn scale_of_product(incoming: f64, factor: f64, terms: f64) -> f64 {
    let vanishes = incoming.is_infinite() && factor.abs() < f64::from(f32::MIN_POSITIVE);
    if vanishes { f64::MAX } else { incoming.abs() * terms }
}

/// The gradients; `last` is the length of the last dimension.
pub(crate) fn backward(inputs: &Inputs, dy: &[f64], last: usize) -> Result<ExpectedGrads> {
    let f = |x| inputs.activation().apply_f64(x);
    let slope = |x| inputs.activation().derivative_f64(x);
    let mut grads = ExpectedGrads {
        dx: Expected::zeros(dy.len())?,
        dgate: Expected::zeros(dy.len())?,
        dbias: Expected::zeros(last)?,
    };
    for (i, &dy) in dy.iter().enumerate() {
        let pre = inputs.pre_activation(i);
        let out = dy * inputs.gate(i);
        // The derivative is p(x) + x p'(x) with p = gelu(x) / x; the two terms can cancel.
        let probability = match pre {
            0.0 => 0.5,
            _ if pre.is_infinite() => f64::from(u8::from(pre > 0.0)),
            _ => (f(pre) / pre).abs(),
        };
        let underflow = Inputs::underflow(pre);
        let terms = slope(pre).abs() + 2.0 * probability + inputs.condition(slope, pre) + underflow;
        grads.dx.values[i] = out * slope(pre);
        grads.dx.scale[i] = scale_of_product(out, slope(pre), terms);
        grads.dgate.values[i] = dy * f(pre);
        let terms = f(pre).abs() + inputs.condition(f, pre) + underflow;
        grads.dgate.scale[i] = scale_of_product(dy, f(pre), terms);
        grads.dbias.values[i % last] += grads.dx.values[i];
        // Once NaN is accepted, it stays accepted. Each term has the rounding error below the normal range that an
        // element of dx has.
        let scale = &mut grads.dbias.scale[i % last];
        *scale = if [*scale, grads.dx.scale[i]].contains(&f64::MAX) {
            f64::MAX
        } else {
            *scale + grads.dx.scale[i] + f64::from(f32::MIN_POSITIVE)
        };
    }
    Ok(grads)
}
