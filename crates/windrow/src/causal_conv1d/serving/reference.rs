//! The f64 oracle of serving: plain loops over the definition.

use super::{CausalConv1dServingArgs, CausalConv1dServingOutputs, CausalConv1dServingSpec};
use crate::causal_conv1d::reference::integers;
use crate::causal_conv1d::{HeadNorm, Problem};
use crate::lists::{collected, filled, room_for};
use crate::verification::Expected;
use crate::{Activation, Result, TensorMut, TensorRef};

/// The operands, all row-major, with indices that are known to be right.
#[derive(Clone, Debug)]
pub(crate) struct ServingReference {
    pub problem: Problem,
    pub activation: Activation,
    /// The norm of the outputs; [`ServingReference::run`] computes them without it.
    pub norm: Option<HeadNorm>,
    sequences: usize,
    state_len: usize,
    blocks: usize,
    block_size: i64,
    null_index: Option<i64>,
    /// [b, d, l]
    x: Vec<f64>,
    /// [d, width]
    weight: Vec<f64>,
    /// `[d]`
    bias: Option<Vec<f64>>,
    query_start_loc: Option<Vec<i64>>,
    conv_state_indices: Option<Vec<i64>>,
    has_initial_state: Option<Vec<i64>>,
    num_accepted_tokens: Option<Vec<i64>>,
    initial_block: Option<Vec<i64>>,
    last_block: Option<Vec<i64>>,
    first_block: Option<Vec<i64>>,
    tokens_before: Option<Vec<i64>>,
    intermediate_indices: Option<Vec<i64>>,
    /// First children and next siblings [sequences, columns].
    links: Option<[Vec<i64>; 2]>,
    /// Tokens that trees have links of.
    columns: usize,
    /// Tokens that a slot has windows of, and columns of one of these.
    steps: usize,
    window_len: usize,
}

/// The tensors that a call writes in addition to y, row-major: as before it, then as after it.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    /// [pool, d, state_len]
    pub conv_states: Vec<f64>,
    /// [slots, steps, d, columns]; empty if there are none.
    pub windows: Vec<f64>,
    /// [sequences, columns]; empty if there are none.
    pub parents: Vec<f64>,
}

impl Memory {
    /// The values that the outputs hold now.
    pub(crate) fn of(outputs: &CausalConv1dServingOutputs<'_>) -> Result<Self> {
        let values = |view: &Option<TensorMut<'_>>| {
            view.as_ref().map_or(Ok(vec![]), |view| view.as_ref().to_f64_vec())
        };
        Ok(Memory {
            conv_states: outputs.conv_states.as_ref().to_f64_vec()?,
            windows: values(&outputs.intermediate_windows)?,
            parents: values(&outputs.parent_token)?,
        })
    }
}

impl ServingReference {
    pub(crate) fn new(
        spec: &CausalConv1dServingSpec,
        args: &CausalConv1dServingArgs<'_>,
    ) -> Result<Self> {
        let sizes = spec.sizes()?;
        let values = |view: Option<TensorRef<'_>>| view.as_ref().map(integers).transpose();
        let links = values(args.next_token)?.zip(values(args.next_sibling)?);
        let window = spec.intermediate_windows.as_ref().map_or([0; 2], |desc| {
            let shape = desc.shape();
            [shape[1], shape[3]]
        });
        Ok(ServingReference {
            problem: sizes.problem,
            activation: spec.activation,
            norm: spec.norm,
            sequences: sizes.sequences,
            state_len: sizes.state_len,
            blocks: sizes.blocks,
            block_size: spec.block_size as i64,
            null_index: spec.null_index,
            x: args.x.to_f64_vec()?,
            weight: args.weight.to_f64_vec()?,
            bias: args.bias.as_ref().map(TensorRef::to_f64_vec).transpose()?,
            query_start_loc: values(args.query_start_loc)?,
            conv_state_indices: values(args.conv_state_indices)?,
            has_initial_state: values(args.has_initial_state)?,
            num_accepted_tokens: values(args.num_accepted_tokens)?,
            initial_block: values(args.initial_block)?,
            last_block: values(args.last_block)?,
            first_block: values(args.first_block)?,
            tokens_before: values(args.tokens_before)?,
            intermediate_indices: values(args.intermediate_indices)?,
            links: links.map(|(next, sibling)| [next, sibling]),
            columns: spec.next_token.as_ref().map_or(0, |next| next.shape()[1]),
            steps: window[0],
            window_len: window[1],
        })
    }

    /// State of sequence `i` in a column; `None` if it is null.
    fn state(&self, i: usize, column: i64) -> Option<usize> {
        let Some(table) = &self.conv_state_indices else { return Some(i) };
        let state = table[i * self.blocks + column as usize];
        usize::try_from(state).ok().filter(|_| Some(state) != self.null_index)
    }

    /// Parents of the `n` tokens of sequence `i`: the tokens before them where there is no tree.
    fn parents(&self, i: usize, n: usize) -> Result<Vec<usize>> {
        let Some([next, sibling]) = &self.links else {
            return collected((0..n).map(|t| t.saturating_sub(1)));
        };
        let mut parents = filled(0, n)?;
        for t in 0..n {
            let at = i * self.columns + t;
            if let Ok(child) = usize::try_from(next[at]) {
                parents[child] = t;
            }
            if let Ok(other) = usize::try_from(sibling[at]) {
                parents[other] = parents[t];
            }
        }
        Ok(parents)
    }

    /// `y` [b, d, l]; walks the rest on.
    pub(crate) fn run(&self, memory: &mut Memory) -> Result<Expected> {
        let p = &self.problem;
        let mut y = Expected::zeros(p.b * p.d * p.l)?;
        if p.is_empty() {
            return Ok(y);
        }
        let Memory { conv_states, windows, parents: parents_after } = memory;
        // What is read is what was there before the call.
        let before = collected(conv_states.iter().copied())?;
        let mut tokens = room_for(p.history() + p.l)?;
        let mut line = room_for(p.width)?;
        let entry = |of: &Option<Vec<i64>>, i: usize| of.as_ref().map(|of| of[i]);
        for i in 0..self.sequences {
            let (row, start, n) = match &self.query_start_loc {
                Some(starts) => (0, starts[i] as usize, (starts[i + 1] - starts[i]) as usize),
                None => (i, 0, p.l),
            };
            if n == 0 {
                continue;
            }
            let Some(read) = self.state(i, entry(&self.initial_block, i).unwrap_or(0)) else {
                continue;
            };
            let last = entry(&self.last_block, i).unwrap_or(0);
            let slot = entry(&self.intermediate_indices, i).map_or(i, |slot| slot as usize);
            let parents = self.parents(i, n)?;
            if !parents_after.is_empty() {
                for (t, &parent) in parents.iter().enumerate() {
                    parents_after[i * self.columns + t] = parent as f64;
                }
            }
            for d in 0..p.d {
                let column =
                    |state: usize, column: usize| (state * p.d + d) * self.state_len + column;
                // The window, and the new tokens after it.
                let accepted = entry(&self.num_accepted_tokens, i);
                let first = accepted.unwrap_or(1) as usize - 1;
                tokens.clear();
                tokens.extend((0..p.history()).map(|j| before[column(read, first + j)]));
                if entry(&self.has_initial_state, i) == Some(0) {
                    tokens.fill(0.0);
                }
                let at = (row * p.d + d) * p.l + start;
                tokens.extend_from_slice(&self.x[at..at + n]);
                for t in 0..n {
                    // The token and what lies before it, the newest first.
                    line.clear();
                    let mut from = Some(t);
                    let mut window = p.history();
                    while line.len() < p.width {
                        match from {
                            Some(token) => {
                                line.push(tokens[p.history() + token]);
                                from = (token > 0).then(|| parents[token]);
                            }
                            None => {
                                window -= 1;
                                line.push(tokens[window]);
                            }
                        }
                    }
                    let bias = self.bias.as_ref().map_or(0.0, |bias| bias[d]);
                    let (mut sum, mut scale) = (bias, bias.abs());
                    for (k, token) in line.iter().rev().enumerate() {
                        let term = self.weight[d * p.width + k] * token;
                        sum += term;
                        scale += term.abs();
                    }
                    y.add_sum(at + t, self.activation.apply_f64(sum), scale);
                    if !windows.is_empty() {
                        let first = ((slot * self.steps + t) * p.d + d) * self.window_len;
                        for (j, token) in line[..p.history()].iter().rev().enumerate() {
                            windows[first + j] = *token;
                        }
                    }
                }
                let mut keep = |state: Option<usize>, tokens: &[f64]| {
                    for (j, &token) in tokens.iter().enumerate() {
                        if let Some(state) = state {
                            conv_states[column(state, j)] = token;
                        }
                    }
                };
                if let Some(first) = entry(&self.first_block, i) {
                    let before = entry(&self.tokens_before, i).unwrap_or(0);
                    let mut end = 0;
                    while end + self.block_size < before + n as i64 {
                        end += self.block_size;
                    }
                    for m in (1..=last - first).rev() {
                        let seen = end - (m - 1) * self.block_size - before;
                        if seen > 0 {
                            let seen = seen as usize;
                            keep(self.state(i, last - m), &tokens[seen..seen + p.history()]);
                        }
                    }
                }
                let dropped = if accepted.is_some() { 1 } else { n };
                keep(self.state(i, last), &tokens[dropped..]);
            }
        }
        Ok(y)
    }
}
