//! The f64 oracle: plain loops over the definition.

use super::{CausalConv1dArgs, HeadNorm, Problem};
use crate::lists::{collected, filled, room_for};
use crate::verification::Expected;
use crate::{Activation, Result, TensorRef};

/// A convolution with all operands row-major in f64.
#[derive(Clone, Debug)]
pub(crate) struct Reference {
    pub problem: Problem,
    pub activation: Activation,
    /// The norm of the outputs; [`Reference::forward`] computes them without it.
    pub norm: Option<HeadNorm>,
    /// [b, d, l]
    pub x: Vec<f64>,
    /// [d, width], or [d_out, d, width] if dense.
    pub weight: Vec<f64>,
    /// `[d_out]`
    pub bias: Option<Vec<f64>>,
    /// [b, l]
    pub seq_idx: Option<Vec<i64>>,
    /// [sequences + 1]
    pub cu_seqlens: Option<Vec<i64>>,
    /// [b or sequences, d, history]
    pub initial_states: Option<Vec<f64>>,
}

/// Gradients of a convolution; the states' also without initial states.
#[derive(Debug)]
pub(crate) struct Gradients {
    pub dx: Expected,
    pub dweight: Expected,
    pub dbias: Expected,
    pub dinitial_states: Expected,
}

/// The input under a tap of the filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// A token of the row.
    Token(usize),
    /// Row and token of the initial states.
    State(usize, usize),
    Zero,
}

impl Reference {
    /// The operands of a run in f64.
    pub(crate) fn new(
        problem: Problem,
        activation: Activation,
        args: &CausalConv1dArgs<'_>,
    ) -> Result<Self> {
        Ok(Reference {
            problem,
            activation,
            norm: None,
            x: args.x.to_f64_vec()?,
            weight: args.weight.to_f64_vec()?,
            bias: args.bias.as_ref().map(TensorRef::to_f64_vec).transpose()?,
            seq_idx: args.seq_idx.as_ref().map(integers).transpose()?,
            cu_seqlens: args.cu_seqlens.as_ref().map(integers).transpose()?,
            initial_states: args.initial_states.as_ref().map(TensorRef::to_f64_vec).transpose()?,
        })
    }

    /// The input at distance `back` before token `t` of row `b`; `None` if the token is padding. `t = l` is allowed, as
    /// one more token of the last one's sequence.
    fn source(&self, b: usize, t: usize, back: usize) -> Option<Source> {
        let p = &self.problem;
        if let Some(cu_seqlens) = &self.cu_seqlens {
            // Empty sequences have no tokens; of those that start at or before t, the first at 0, the
            // last has t. There may be as many sequences as tokens.
            let sequence = cu_seqlens.partition_point(|&start| start <= t as i64) - 1;
            return Some(self.in_sequence(sequence, cu_seqlens[sequence] as usize, t, back));
        }
        let Some(seq_idx) = &self.seq_idx else {
            return Some(self.in_sequence(b, 0, t, back));
        };
        let number = |t: usize| seq_idx[b * p.l + t];
        if p.l == 0 {
            return Some(self.in_sequence(b, 0, t, back));
        }
        let own = number(t.min(p.l - 1));
        if own < 0 {
            return None;
        }
        let source = self.in_sequence(b, 0, t, back);
        let seen = match source {
            Source::Token(t) => number(t) == own,
            _ => number(0) == own,
        };
        Some(if seen { source } else { Source::Zero })
    }

    /// The input as by `source`, in a sequence that starts at token `start` and has states in row `row`.
    fn in_sequence(&self, row: usize, start: usize, t: usize, back: usize) -> Source {
        if t >= start + back {
            return Source::Token(t - back);
        }
        // Without initial states these are zeros, which have gradients too.
        Source::State(row, self.problem.history() + t - start - back)
    }

    fn value(&self, b: usize, channel: usize, source: Source) -> f64 {
        let p = &self.problem;
        match (source, &self.initial_states) {
            (Source::Token(t), _) => self.x[(b * p.d + channel) * p.l + t],
            (Source::State(row, j), Some(states)) => {
                states[(row * p.d + channel) * p.history() + j]
            }
            _ => 0.0,
        }
    }

    /// Calls `f(tap, input channel, weight index)` for every term of output channel `channel`.
    fn for_each_tap(&self, channel: usize, mut f: impl FnMut(usize, usize, usize)) {
        let p = &self.problem;
        for k in 0..p.width {
            if p.dense {
                for c in 0..p.d {
                    f(k, c, (channel * p.d + c) * p.width + k);
                }
            } else {
                f(k, channel, channel * p.width + k);
            }
        }
    }

    /// The inputs under the taps of every token of row `b`, [l, width]; `None` for padding.
    fn row(&self, b: usize) -> Result<Vec<Option<Source>>> {
        let p = &self.problem;
        let taps = 0..p.l * p.width;
        let back = |k: usize| (p.width - 1 - k) * p.dilation;
        collected(taps.map(|tap| self.source(b, tap / p.width, back(tap % p.width))))
    }

    /// Sum and bias of one output whose taps lie on `taps`, with its scale; `None` for padding.
    fn before_activation(
        &self,
        taps: &[Option<Source>],
        b: usize,
        channel: usize,
    ) -> Option<(f64, f64)> {
        taps[0]?;
        let bias = self.bias.as_ref().map_or(0.0, |bias| bias[channel]);
        let (mut sum, mut scale) = (bias, bias.abs());
        self.for_each_tap(channel, |k, c, w| {
            let term = self.weight[w] * self.value(b, c, taps[k].unwrap_or(Source::Zero));
            sum += term;
            scale += term.abs();
        });
        Some((sum, scale))
    }

    /// Rows of the batch; none if y is empty, as there may be more of them than can be counted through.
    fn rows(&self) -> usize {
        if self.problem.is_empty() { 0 } else { self.problem.b }
    }

    /// `y` [b, d_out, l].
    pub(crate) fn forward(&self) -> Result<Expected> {
        let p = &self.problem;
        let mut y = Expected::zeros(self.rows() * p.d_out * p.l)?;
        for b in 0..self.rows() {
            let row = self.row(b)?;
            for channel in 0..p.d_out {
                for (t, taps) in row.chunks(p.width).enumerate() {
                    if let Some((sum, scale)) = self.before_activation(taps, b, channel) {
                        let i = (b * p.d_out + channel) * p.l + t;
                        y.add_sum(i, self.activation.apply_f64(sum), scale);
                    }
                }
            }
        }
        Ok(y)
    }

    /// Rows of the states, and the batch row, end and number of each; none if they have no elements,
    /// as there may be more of them than memory holds.
    fn state_rows(&self) -> Result<Vec<(usize, usize, usize)>> {
        if [self.problem.d, self.problem.history()].contains(&0) {
            return Ok(Vec::new());
        }
        match &self.cu_seqlens {
            Some(cu) => {
                collected((0..cu.len() - 1).map(|s| (0, cu[s] as usize, cu[s + 1] as usize)))
            }
            None => collected((0..self.problem.b).map(|b| (b, 0, self.problem.l))),
        }
    }

    /// The input in entry `j` of a final state.
    fn final_source(&self, row: usize, (b, start, end): (usize, usize, usize), j: usize) -> Source {
        let back = self.problem.history() - j;
        match &self.cu_seqlens {
            Some(_) => self.in_sequence(row, start, end, back),
            None => self.source(b, end, back).unwrap_or(Source::Zero),
        }
    }

    /// Final states [b or sequences, d, history].
    pub(crate) fn final_states(&self) -> Result<Vec<f64>> {
        let p = &self.problem;
        let rows = self.state_rows()?;
        let mut out = room_for(rows.len() * p.d * p.history())?;
        for (row, range) in rows.into_iter().enumerate() {
            for channel in 0..p.d {
                for j in 0..p.history() {
                    out.push(self.value(range.0, channel, self.final_source(row, range, j)));
                }
            }
        }
        Ok(out)
    }

    /// Gradients for `dy` [b, d_out, l] and those of the final states. If y is empty, those of the bias and of the
    /// initial states have elements only if they are requested: there may be no memory for them.
    pub(crate) fn backward(
        &self,
        dy: &[f64],
        dfinal_states: Option<&[f64]>,
        [bias, states]: [bool; 2],
    ) -> Result<Gradients> {
        let p = &self.problem;
        let batch = self.rows();
        let states = states || dfinal_states.is_some() || batch > 0;
        let rows = if states { self.state_rows()? } else { Vec::new() };
        let mut out = Gradients {
            dx: Expected::zeros(self.x.len())?,
            dweight: Expected::zeros(self.weight.len())?,
            dbias: Expected::zeros(if bias || batch > 0 { p.d_out } else { 0 })?,
            dinitial_states: Expected::zeros(rows.len() * p.d * p.history())?,
        };
        for b in 0..batch {
            let row = self.row(b)?;
            for channel in 0..p.d_out {
                for (t, taps) in row.chunks(p.width).enumerate() {
                    let Some((sum, scale)) = self.before_activation(taps, b, channel) else {
                        continue;
                    };
                    let dy = dy[(b * p.d_out + channel) * p.l + t];
                    let g = dy * self.activation.derivative_f64(sum);
                    // Derivatives are at most 1.2, but for the steep ones, and their own slope is at most 1. Beyond
                    // all numbers they are exact.
                    let steepest = self.activation.steepest_slope().max(1.2);
                    let g_scale = dy.abs() * (steepest + if sum.is_finite() { scale } else { 0.0 });
                    out.dbias.add_sum(channel, g, g_scale);
                    self.for_each_tap(channel, |k, c, w| {
                        let source = taps[k].unwrap_or(Source::Zero);
                        let x = self.value(b, c, source);
                        out.dweight.add_sum(w, g * x, g_scale * x.abs());
                        let weight = self.weight[w];
                        self.add_to(&mut out, b, c, source, g * weight, g_scale * weight.abs());
                    });
                }
            }
        }
        for (row, range) in rows.into_iter().enumerate() {
            let Some(dfinal) = dfinal_states else { break };
            for channel in 0..p.d {
                for j in 0..p.history() {
                    let d = dfinal[(row * p.d + channel) * p.history() + j];
                    let source = self.final_source(row, range, j);
                    self.add_to(&mut out, range.0, channel, source, d, d.abs());
                }
            }
        }
        Ok(out)
    }

    fn add_to(
        &self,
        out: &mut Gradients,
        b: usize,
        channel: usize,
        source: Source,
        term: f64,
        scale: f64,
    ) {
        let p = &self.problem;
        match source {
            Source::Token(t) => out.dx.add_sum((b * p.d + channel) * p.l + t, term, scale),
            Source::State(row, j) => {
                let i = (row * p.d + channel) * p.history() + j;
                out.dinitial_states.add_sum(i, term, scale);
            }
            Source::Zero => {}
        }
    }

    /// The im2col matrices of all rows, [b, l, width*d]: column `k*d + c` is what tap `k` of channel `c` lies on.
    pub(crate) fn im2col(&self) -> Result<Vec<f64>> {
        let p = &self.problem;
        let mut out = room_for(p.b * p.l * p.width * p.d)?;
        for b in 0..p.b {
            for tap in self.row(b)? {
                let source = tap.unwrap_or(Source::Zero);
                out.extend((0..p.d).map(|c| self.value(b, c, source)));
            }
        }
        Ok(out)
    }

    /// Sums without bias and activation, [b, l, d_out]: the product of those two matrices.
    pub(crate) fn product(&self) -> Result<Expected> {
        let p = &self.problem;
        let mut out = Expected::zeros(p.b * p.l * p.d_out)?;
        for b in 0..p.b {
            let row = self.row(b)?;
            for (t, taps) in row.chunks(p.width).enumerate() {
                for channel in 0..p.d_out {
                    let Some((sum, scale)) = self.before_activation(taps, b, channel) else {
                        continue;
                    };
                    let bias = self.bias.as_ref().map_or(0.0, |bias| bias[channel]);
                    out.add_sum((b * p.l + t) * p.d_out + channel, sum - bias, scale);
                }
            }
        }
        Ok(out)
    }

    /// The weight as a matrix [d_out, width*d].
    pub(crate) fn expanded_weight(&self) -> Result<Vec<f64>> {
        let p = &self.problem;
        let mut out = filled(0.0, p.d_out * p.width * p.d)?;
        for channel in 0..p.d_out {
            self.for_each_tap(channel, |k, c, w| {
                out[(channel * p.width + k) * p.d + c] = self.weight[w];
            });
        }
        Ok(out)
    }
}

/// Indices and lengths are exact in f64.
pub(crate) fn integers(view: &TensorRef<'_>) -> Result<Vec<i64>> {
    Ok(view.to_f64_vec()?.into_iter().map(|value| value as i64).collect())
}

/// A decoding step with all operands row-major in f64.
#[derive(Clone, Debug)]
pub(crate) struct UpdateReference {
    /// Sizes; `b` and `l` are those of x.
    pub problem: Problem,
    pub activation: Activation,
    /// Tokens that a state holds.
    pub state_len: usize,
    /// [b, d, l]
    pub x: Vec<f64>,
    /// [d, width]
    pub weight: Vec<f64>,
    /// `[d]`
    pub bias: Option<Vec<f64>>,
    /// `[b]`
    pub cache_seqlens: Option<Vec<i64>>,
    /// `[b]`
    pub conv_state_indices: Option<Vec<i64>>,
}

impl UpdateReference {
    /// `y` [b, d, l]; advances `conv_state` [pool, d, state_len].
    pub(crate) fn run(&self, conv_state: &mut [f64]) -> Result<Expected> {
        let p = &self.problem;
        let mut y = Expected::zeros(p.b * p.d * p.l)?;
        let mut tokens = room_for(self.state_len + p.l)?;
        for b in 0..p.b {
            let entry = self.conv_state_indices.as_ref().map_or(b as i64, |indices| indices[b]);
            let Ok(entry) = usize::try_from(entry) else { continue };
            for d in 0..p.d {
                let state = (entry * p.d + d) * self.state_len;
                let state = &mut conv_state[state..state + self.state_len];
                let first = self.cache_seqlens.as_ref().map_or(0, |len| len[b] as usize);
                // The ring buffer's next slot; without one the state is a ring that starts at its
                // oldest token and is turned back afterwards.
                let next = if self.state_len == 0 { 0 } else { first % self.state_len };
                state.rotate_left(next);
                tokens.clear();
                tokens.extend_from_slice(state);
                tokens.extend_from_slice(&self.x[(b * p.d + d) * p.l..][..p.l]);
                for t in 0..p.l {
                    let bias = self.bias.as_ref().map_or(0.0, |bias| bias[d]);
                    let (mut sum, mut scale) = (bias, bias.abs());
                    for k in 0..p.width {
                        let token = tokens[self.state_len + t + k - p.history()];
                        let term = self.weight[d * p.width + k] * token;
                        sum += term;
                        scale += term.abs();
                    }
                    y.add_sum((b * p.d + d) * p.l + t, self.activation.apply_f64(sum), scale);
                }
                state.copy_from_slice(&tokens[p.l..]);
                if self.cache_seqlens.is_some() && self.state_len > 0 {
                    // Token i was written to slot (first + i) % state_len.
                    state.rotate_right((next + p.l) % self.state_len);
                }
            }
        }
        Ok(y)
    }
}
