//! Operands for `windrow verify` and tests: made from a spec and a seed.

use super::{
    CausalConv1d, CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dSpec, CausalConv1dUpdate,
    CausalConv1dUpdateSpec, HeadNorm,
};
use crate::plan::HeldInputs;
use crate::verification::choices::Choices;
pub(crate) use crate::verification::data::Held;
use crate::verification::data::Style;
use crate::verification::random;
use crate::{Activation, DType, Device, Result, TensorDesc};

pub(super) const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Channels-first, channels-last, or any other order.
pub(super) fn desc(
    choices: &mut Choices<'_>,
    style: Style,
    dtype: DType,
    shape: &[usize],
    input: bool,
) -> Result<TensorDesc> {
    let layout = match shape.len() {
        1 => style.layout(choices, shape, &[&[0]], input)?,
        2 => style.layout(choices, shape, &[&[0, 1], &[1, 0]], input)?,
        3 => style.layout(choices, shape, &[&[0, 1, 2], &[0, 2, 1]], input)?,
        _ => style.layout(choices, shape, &[&[0, 1, 2, 3], &[0, 1, 3, 2]], input)?,
    };
    Ok(TensorDesc { dtype, layout })
}

/// Two or three numbers of channels whose sum is `d`, at least 2. Often all but the last are multiples of 8.
pub(super) fn parts(choices: &mut Choices<'_>, d: usize) -> Vec<usize> {
    let step = if d > 16 && choices.one_in(2) { 8 } else { 1 };
    let (mut parts, mut left) = (Vec::new(), d);
    for _ in 0..choices.within(1..=2) {
        let most = (left - 1) / step;
        if most > 0 {
            parts.push(choices.within(1..=most) * step);
            left -= parts[parts.len() - 1];
        }
    }
    parts.push(left);
    parts
}

/// Three numbers of channels whose sum is `d`, two if that is 2. The first ones are multiples of 8 or 4 if `d` is large
/// enough.
pub(super) fn thirds(d: usize) -> Vec<usize> {
    let third = [8, 4, 1].map(|step| d / 3 / step * step).into_iter().find(|&n| n > 0);
    match third {
        Some(third) => vec![third, third, d - 2 * third],
        None => vec![1; d],
    }
}

/// A norm of heads that these outputs consist of: as wide as kernels on GPUs divide themselves, or 3 channels.
pub(super) fn heads<'a>(outputs: impl Iterator<Item = &'a TensorDesc> + Clone) -> HeadNorm {
    let mut widths = [128, 32, 8, 4, 2, 3].into_iter().map(HeadNorm::new);
    widths.find(|norm| norm.check(outputs.clone()).is_ok()).unwrap_or(HeadNorm::new(1))
}

/// A norm of heads of any width of which these outputs consist.
pub(super) fn any_heads<'a>(
    choices: &mut Choices<'_>,
    outputs: impl Iterator<Item = &'a TensorDesc> + Clone,
) -> HeadNorm {
    let most = outputs.clone().next().map_or(1, |output| output.shape()[1].max(1));
    let fits = |&width: &usize| HeadNorm::new(width).check(outputs.clone()).is_ok();
    let widths: Vec<usize> = (1..=most).filter(fits).collect();
    HeadNorm::new(choices.of(&widths)).with_epsilon(choices.of(&[1e-6, 1e-6, 1.0, 1e-30]))
}

/// Numbers in -2..2, all different for different `what`. Multiples of 1/8 for ReLU: sums of their
/// products are exact in f32, so that kernels and oracle agree on which side of the kink they are.
fn numbers(seed: u64, what: u64, desc: &TensorDesc, activation: Activation) -> Vec<f64> {
    let mut values = random(seed.wrapping_mul(31).wrapping_add(what), desc.layout.len(), -2.0, 2.0);
    if activation.has_kinks() {
        values.iter_mut().for_each(|value| *value = (*value * 8.0).round() / 8.0);
    }
    values
}

/// Sequence numbers of rows cut into runs: mostly rising, now and then padding or a number that was
/// there before.
fn sequences(seed: u64, desc: &TensorDesc) -> Vec<f64> {
    let [b, l] = [desc.shape()[0], desc.shape()[1]];
    let random = random(seed, 2 * b * l, 0.0, 1.0);
    let mut current: f64 = 0.0;
    let numbers = random.chunks(2).enumerate().map(|(i, r)| {
        if i % l.max(1) == 0 {
            current = if r[0] < 0.1 { -1.0 } else { 0.0 };
        } else if r[0] < 0.15 {
            current = [current + 1.0, current + 1.0, (current - 1.0).max(0.0), -1.0]
                [(r[1] * 4.0) as usize];
        }
        current
    });
    numbers.collect()
}

/// Boundaries of sequences of random lengths, some of them empty.
fn boundaries(seed: u64, desc: &TensorDesc, l: usize) -> Vec<f64> {
    let entries = desc.shape()[0];
    let mut values = random(seed, entries, 0.0, l as f64 + 1.0);
    values.iter_mut().for_each(|value| *value = value.floor());
    values.sort_by(f64::total_cmp);
    values[entries - 1] = l as f64;
    values[0] = 0.0;
    values
}

/// Operands of a convolution and of its gradients.
pub(crate) struct Sample {
    pub inputs: HeldInputs<CausalConv1d>,
    pub y: Held,
    /// The outputs behind y.
    pub further: [Option<Held>; 2],
    pub final_states: Option<Held>,
    pub dy: Held,
    pub dfinal_states: Option<Held>,
    pub gradients: Gradients,
}

pub(crate) struct Gradients {
    pub dx: Held,
    pub dweight: Held,
    pub dbias: Held,
    pub dinitial_states: Held,
}

impl Sample {
    /// A sample on the CPU.
    #[cfg(test)]
    pub(crate) fn new(spec: &CausalConv1dSpec, seed: u64) -> Result<Self> {
        Self::on(spec, seed, Device::Cpu)
    }

    /// Gradients have the layout of what they are gradients of.
    pub(crate) fn on(spec: &CausalConv1dSpec, seed: u64, device: Device) -> Result<Self> {
        let hold = |desc, values: Vec<f64>| Held::at(desc, &values, 0, device);
        let make = |what, desc: TensorDesc| hold(desc, numbers(seed, what, &desc, spec.activation));
        let maybe = |what, desc: Option<TensorDesc>| desc.map(|d| make(what, d)).transpose();
        let states = TensorDesc::contiguous(spec.x.dtype, &spec.states_shape()?)?;
        let dbias = TensorDesc::contiguous(spec.weight.dtype, &spec.weight.shape()[..1])?;
        let l = spec.x.shape()[2];
        let inputs = HeldInputs::new(spec, |name, desc| match name {
            "seq_idx" => hold(desc, sequences(seed, &desc)),
            "cu_seqlens" => hold(desc, boundaries(seed, &desc, l)),
            "x" => make(1, desc),
            "weight" => make(2, desc),
            "bias" => make(3, desc),
            _ => make(4, desc),
        })?;
        Ok(Sample {
            inputs,
            y: make(7, spec.y)?,
            further: [maybe(13, spec.y2)?, maybe(14, spec.y3)?],
            final_states: maybe(8, spec.final_states)?,
            dy: make(5, spec.whole_output()?)?,
            dfinal_states: maybe(6, spec.final_states)?,
            gradients: Gradients {
                dx: make(9, spec.x)?,
                dweight: make(10, spec.weight)?,
                dbias: make(11, spec.bias.unwrap_or(dbias))?,
                dinitial_states: make(12, spec.initial_states.unwrap_or(states))?,
            },
        })
    }
}

/// The tensors of a sample that a run writes.
pub(crate) fn outputs<'a>(
    y: &'a mut Held,
    further: &'a mut [Option<Held>; 2],
    final_states: &'a mut Option<Held>,
) -> Result<CausalConv1dOutputs<'a>> {
    let view = |held: &'a mut Option<Held>| held.as_mut().map(Held::as_mut).transpose();
    let [y2, y3] = further.each_mut().map(view);
    Ok(CausalConv1dOutputs::new(y.as_mut()?)
        .with_final_states(view(final_states)?)
        .with_y2(y2?)
        .with_y3(y3?))
}

impl Gradients {
    pub(crate) fn views(&mut self) -> Result<CausalConv1dGrads<'_>> {
        Ok(CausalConv1dGrads {
            dx: Some(self.dx.as_mut()?),
            dweight: Some(self.dweight.as_mut()?),
            dbias: Some(self.dbias.as_mut()?),
            dinitial_states: Some(self.dinitial_states.as_mut()?),
        })
    }

    /// The views of those that are requested, in the order of the fields.
    pub(crate) fn some_views(&mut self, asked: [bool; 4]) -> Result<CausalConv1dGrads<'_>> {
        let [dx, dweight, dbias, dinitial_states] = asked;
        let all = self.views()?;
        Ok(CausalConv1dGrads {
            dx: all.dx.filter(|_| dx),
            dweight: all.dweight.filter(|_| dweight),
            dbias: all.dbias.filter(|_| dbias),
            dinitial_states: all.dinitial_states.filter(|_| dinitial_states),
        })
    }
}

/// Operands of an update.
pub(crate) struct UpdateSample {
    pub inputs: HeldInputs<CausalConv1dUpdate>,
    pub conv_state: Held,
    pub y: Held,
}

impl UpdateSample {
    /// A sample on the CPU.
    #[cfg(test)]
    pub(crate) fn new(spec: &CausalConv1dUpdateSpec, seed: u64) -> Result<Self> {
        Self::on(spec, seed, Device::Cpu)
    }

    /// Indices are a permutation of the pool with every fifth entry negative.
    pub(crate) fn on(spec: &CausalConv1dUpdateSpec, seed: u64, device: Device) -> Result<Self> {
        let hold = |desc, values: Vec<f64>| Held::at(desc, &values, 0, device);
        let make = |what, desc: TensorDesc| hold(desc, numbers(seed, what, &desc, spec.activation));
        let pool = spec.conv_state.shape()[0];
        let lengths = |desc: TensorDesc| {
            let lengths = random(seed, desc.layout.len(), 0.0, 100.0);
            hold(desc, lengths.into_iter().map(f64::floor).collect())
        };
        let indices = |desc: TensorDesc| {
            let mut order: Vec<_> = random(seed, pool, 0.0, 1.0).into_iter().zip(0..).collect();
            order.sort_by(|a, b| a.0.total_cmp(&b.0));
            let mut states = order.into_iter().map(|(_, state): (_, u32)| f64::from(state));
            let entries = (0..desc.layout.len() as u64).map(|i| match (i + seed) % 5 {
                0 => -1.0 - i as f64,
                _ => states.next().unwrap_or(-7.0),
            });
            hold(desc, entries.collect())
        };
        Ok(UpdateSample {
            inputs: HeldInputs::new(spec, |name, desc| match name {
                "x" => make(1, desc),
                "weight" => make(2, desc),
                "bias" => make(3, desc),
                "cache_seqlens" => lengths(desc),
                _ => indices(desc),
            })?,
            conv_state: make(4, spec.conv_state)?,
            y: make(5, spec.y)?,
        })
    }
}
