//! Gradients of the dense convolution, as matrix products over blocks of tokens.
//!
//! With X the im2col matrix [n, width*d] of the tokens, W the weight as a matrix [d_out, width*d] and G the
//! gradient before the activation [n, d_out] (from `X Wᵀ`, computed again), the weight's gradient is
//! `Gᵀ X` and that of X is `G W`. Block k of the latter's row for token q belongs to position
//! `q - (width-1-k) * dilation` and to no other, so a position's gradient is the sum of its blocks, gathered
//! rather than scattered.
//!
//! Sums over tokens are those of blocks of fixed length, added in order in f64. So the result does not depend on the
//! number of threads.

use super::super::shared::{Gradients, Inputs, Operand, write};
use super::{Im2colGemm, ROWS, store_channels};
use crate::causal_conv1d::Problem;
use crate::causal_conv1d::sequences::{Run, Source};
use crate::cpu::gemm::{Gemm, Matrix};
use crate::cpu::math::activate_grad;
use crate::cpu::{Kernel, MAX_LANES, SendPtr, Simd, SimdElement, dispatch, parallel_for};
use crate::{Activation, Error, Result, TensorMut};
use std::ops::Range;

/// The smallest and the largest number of tokens of a block, unless the width needs more. Fewer tokens cost more
/// additions to the weight's gradient, more tokens have larger errors.
const TOKENS: Range<usize> = 256..4096;

/// The largest number of tokens that a product sums, if an output depends on `history` tokens before it.
pub(crate) fn most_tokens(history: usize) -> usize {
    TOKENS.end.max(history + 1)
}

/// The division of a dense convolution's gradients into products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DenseBackward {
    forward: Im2colGemm,
    /// Tokens of a block; the products have the history more.
    tokens: usize,
    /// Elements of the weight matrix, of X (and its gradient), of G, of a block's weight gradient, of
    /// the bias, of the product's scratch memory, and of the sums (in f64). Without tokens at most a
    /// row of X.
    parts: [usize; 7],
}

impl DenseBackward {
    /// The gradients of the convolution that `forward` computes.
    pub(crate) fn new(forward: Im2colGemm) -> Result<Self> {
        let Problem { b, d, d_out, l, width, .. } = forward.problem;
        let (terms, history) = (width * d, forward.problem.history());
        let tokens = (super::BLOCK / terms.max(1)).clamp(TOKENS.start, TOKENS.end);
        let tokens = tokens.max(history).min(l).max(1);
        let sizes = || {
            let rows = tokens.checked_add(history)?.min(l);
            let weight = d_out.checked_mul(terms)?;
            let scratch = [[rows, d_out], [d_out, terms], [rows, terms]]
                .map(|shape| Gemm::max_scratch_len(forward.isa, forward.threads, shape))
                .into_iter()
                .max()?;
            let sums = weight.checked_add(d_out)?.checked_mul(2)?;
            let [x, g] = [rows.checked_mul(terms)?, rows.checked_mul(d_out)?];
            Some([weight, x, g, weight, d_out, scratch, sums])
        };
        let parts = || {
            let parts = match (b, l) {
                (0, _) => [0; 7],
                // States may still have gradients.
                (_, 0) => [0, terms, 0, 0, 0, 0, 0],
                _ => sizes()?,
            };
            let parts = parts.map(|n| n.next_multiple_of(16));
            let total = parts.iter().try_fold(0usize, |sum, &n| sum.checked_add(n))?;
            (total <= isize::MAX as usize / 4).then_some(parts)
        };
        let parts = parts().ok_or_else(|| Error::SizeOverflow {
            what: "workspace",
            detail: format!("width {width} x {d} channels, {d_out} output channels"),
        })?;
        Ok(DenseBackward { forward, tokens, parts })
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        self.parts.iter().sum::<usize>() * 4
    }

    /// # Safety
    /// Operands have the problem's sizes, `dweight` [d_out, d, width] and `dbias` `[d_out]` are f32 or T. Nothing else
    /// accesses the outputs. `scratch` holds [`DenseBackward::workspace_bytes`] bytes, aligned to 64.
    pub(crate) unsafe fn run<T: SimdElement>(
        &self,
        inputs: &Inputs<'_, T>,
        gradients: &Gradients<T>,
        (dweight, dbias): (Option<TensorMut<'_>>, Option<TensorMut<'_>>),
        scratch: *mut u8,
    ) {
        let Problem { b, d, d_out, l, width, .. } = self.forward.problem;
        let (terms, history) = (width * d, self.forward.problem.history());
        let mut next = scratch.cast::<f32>();
        let [weight, x, g, product, bias, scratch, sums] = self.parts.map(|n| {
            let part = next;
            next = next.wrapping_add(n);
            part
        });
        let sums = sums.cast::<f64>();
        let wanted = (dweight.is_some(), dbias.is_some());
        let blocks = Blocks { plan: self, inputs, gradients, weight, x, g, product, bias, scratch };
        let has_terms = self.forward.problem.has_terms();
        // SAFETY: each part of the scratch memory is as long as what is written there.
        let sums = unsafe {
            if has_terms {
                self.forward.stage_parameters(&inputs.parameters, weight, bias);
                sums.write_bytes(0, d_out * terms + d_out);
            }
            for b in 0..if has_terms { b } else { 0 } {
                for first in (0..l).step_by(self.tokens) {
                    let n = self.tokens.min(l - first);
                    let seen = if gradients.dx.is_some() { history } else { 0 };
                    let rows = first..(first + n).saturating_add(seen).min(l);
                    if gradients.dx.is_some() || wanted.0 || wanted.1 {
                        blocks.gradient_before_activation(b, rows.clone(), wanted.0);
                        blocks.add_sums(n, wanted, sums);
                    }
                    if let Some(dx) = gradients.dx {
                        blocks.input_gradient(rows.len());
                        let positions = first as isize..(first + n) as isize;
                        blocks.gather((dx, b), (b, None), positions, first);
                    }
                }
            }
            if let Some(states) = gradients.dinitial_states.filter(|_| d * history > 0) {
                let sequences = &inputs.tokens.sequences;
                for row in 0..sequences.state_rows(b) {
                    let (b, run) = sequences.state_run(row, false);
                    let rows = run.start..run.start.saturating_add(history).min(l);
                    if !rows.is_empty() {
                        blocks.gradient_before_activation(b, rows.clone(), false);
                        blocks.input_gradient(rows.len());
                    }
                    let first = run.start as isize - history as isize;
                    let positions = first..run.start as isize;
                    blocks.gather((states, row), (b, Some(run)), positions, run.start);
                }
            }
            match has_terms {
                true => std::slice::from_raw_parts(sums, d_out * terms + d_out),
                false => &[],
            }
        };
        let sum = |i: usize| sums.get(i).copied().unwrap_or(0.0);
        if let Some(mut dweight) = dweight {
            for i in 0..d_out * terms {
                let (o, k, c) = (i / terms, i % terms / d, i % d);
                write(&mut dweight, &[o, c, k], sum(i));
            }
        }
        if let Some(mut dbias) = dbias {
            for o in 0..d_out {
                write(&mut dbias, &[o], sum(d_out * terms + o));
            }
        }
    }
}

/// The matrices of one block of tokens. Only [`DenseBackward::run`] makes them, and guarantees that its pointers are
/// valid.
struct Blocks<'a, T> {
    plan: &'a DenseBackward,
    inputs: &'a Inputs<'a, T>,
    gradients: &'a Gradients<T>,
    /// [d_out, width*d]
    weight: *const f32,
    /// [n, width*d]: X, then its gradient.
    x: *mut f32,
    /// [n, d_out]
    g: *mut f32,
    /// [d_out, width*d]
    product: *mut f32,
    bias: *const f32,
    scratch: *mut f32,
}

impl<T: SimdElement> Blocks<'_, T> {
    fn product(&self, shape: [usize; 3], a: Matrix, b: Matrix, c: *mut f32) {
        let Im2colGemm { isa, threads, .. } = self.plan.forward;
        let c = (c, shape[1] as isize, 1);
        // SAFETY: callers' matrices have the shape; the scratch memory is enough for any product.
        unsafe { Gemm::new(isa, shape).run(threads, a, b, c, self.scratch) }
    }

    /// Fills `g`, and `x` if `g` or (`keep`) the caller needs it, for tokens `rows` of row `b`.
    unsafe fn gradient_before_activation(&self, b: usize, rows: Range<usize>, keep: bool) {
        let Im2colGemm { problem, isa, threads, activation, .. } = self.plan.forward;
        let Problem { d, d_out, width, .. } = problem;
        let (terms, n) = (width * d, rows.len());
        let sum = activation != Activation::Identity;
        if sum || keep {
            // SAFETY: `x` holds the rows.
            unsafe { self.plan.forward.im2col(&self.inputs.tokens, b, rows.clone(), self.x) };
        }
        if sum {
            let x = Matrix { ptr: self.x, row: terms as isize, col: 1 };
            let weight = Matrix { ptr: self.weight, row: 1, col: terms as isize };
            self.product([n, d_out, terms], x, weight, self.g);
        }
        let [g, bias] = [SendPtr(self.g), SendPtr(self.bias.cast_mut())];
        let (sequences, dy) = (&self.inputs.tokens.sequences, self.gradients.dy);
        parallel_for(threads, n.div_ceil(ROWS), |i| {
            for row in i * ROWS..((i + 1) * ROWS).min(n) {
                let t = rows.start + row;
                let g = g.get().wrapping_add(row * d_out);
                if sequences.run(b, t, 0, t + 1).sequence < 0 {
                    // SAFETY: a row of g.
                    unsafe { g.write_bytes(0, d_out) };
                } else {
                    let (bias, from) = (bias.get(), dy.at(b, 0, t));
                    let dy = (from.cast_const(), dy.strides[1]);
                    dispatch(isa, BeforeActivation { activation, dy, bias, g, d_out });
                }
            }
        });
    }

    /// Adds the block's first `n` tokens to the sums for the weight, [d_out, width*d], and the bias,
    /// `[d_out]`, that follow each other.
    unsafe fn add_sums(&self, n: usize, (weight, bias): (bool, bool), sums: *mut f64) {
        let Problem { d, d_out, width, .. } = self.plan.forward.problem;
        let (terms, len) = (width * d, d_out * width * d);
        // SAFETY: `sums` holds both; the matrices have n rows.
        unsafe {
            if weight {
                let g = Matrix { ptr: self.g, row: 1, col: d_out as isize };
                let x = Matrix { ptr: self.x, row: terms as isize, col: 1 };
                self.product([d_out, terms, n], g, x, self.product);
                let sums = std::slice::from_raw_parts_mut(sums, len);
                let product = std::slice::from_raw_parts(self.product, len);
                for (sum, &product) in sums.iter_mut().zip(product) {
                    *sum += f64::from(product);
                }
            }
            if bias {
                let sums = std::slice::from_raw_parts_mut(sums.add(len), d_out);
                for row in 0..n {
                    let g = std::slice::from_raw_parts(self.g.add(row * d_out), d_out);
                    for (sum, &g) in sums.iter_mut().zip(g) {
                        *sum += f64::from(g);
                    }
                }
            }
        }
    }

    /// Replaces `n` rows of `x` by their gradient.
    fn input_gradient(&self, n: usize) {
        let Problem { d, d_out, width, .. } = self.plan.forward.problem;
        let terms = width * d;
        let g = Matrix { ptr: self.g, row: d_out as isize, col: 1 };
        let weight = Matrix { ptr: self.weight, row: terms as isize, col: 1 };
        self.product([n, terms, d_out], g, weight, self.x);
    }

    /// Writes the gradients at `positions` of row `b` to the first tokens of row `to.1`, or to those of the
    /// same number if the positions are tokens (no `state`). The first row of `x` is token
    /// `first`.
    unsafe fn gather(
        &self,
        to: (Operand<T>, usize),
        (b, state): (usize, Option<Run>),
        positions: Range<isize>,
        first: usize,
    ) {
        let Im2colGemm { problem, isa, threads, .. } = self.plan.forward;
        let x = SendPtr(self.x);
        let (tokens, history) = (&self.inputs.tokens, problem.history());
        let n = positions.end.abs_diff(positions.start);
        parallel_for(threads, n.div_ceil(ROWS), |i| {
            for i in i * ROWS..((i + 1) * ROWS).min(n) {
                let p = positions.start + i as isize;
                let (run, token) = match state {
                    Some(run) => (run, i),
                    None => {
                        (tokens.sequences.run(b, p as usize, history, p as usize + 1), p as usize)
                    }
                };
                let at = to.0.at(to.1, 0, token);
                let dfinal = self.gradients.dfinal_states.and_then(|states| {
                    let (row, j) = tokens.sequences.final_entry(b, &run, p, history)?;
                    Some((states.at(row, 0, j).cast_const(), states.strides[1]))
                });
                let sees = |q: usize| {
                    matches!(
                        tokens.sequences.source(b, &run, q as isize, history),
                        Source::Token(_)
                    )
                };
                let to = (at, to.0.strides[1]);
                let x = x.get();
                dispatch(isa, Position { problem: &problem, x, first, p, sees, dfinal, to });
            }
        });
    }
}

/// A row of g: dy times the derivative of the activation at the sum of `g` and bias.
struct BeforeActivation<T> {
    activation: Activation,
    /// First channel and distance of channels.
    dy: (*const T, isize),
    bias: *const f32,
    g: *mut f32,
    d_out: usize,
}

impl<T: SimdElement> Kernel for BeforeActivation<T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for c in (0..self.d_out).step_by(S::LANES) {
            let n = S::LANES.min(self.d_out - c);
            // SAFETY: dy, bias and the row have d_out channels.
            unsafe {
                let mut g = load_channels(s, self.dy, c, n);
                if self.activation != Activation::Identity {
                    let sum = s.load_first(self.g.add(c), n);
                    let sum = s.add(sum, s.load_first(self.bias.add(c), n));
                    g = s.mul(g, activate_grad(s, self.activation, sum));
                }
                s.store_first(self.g.add(c), g, n);
            }
        }
    }
}

/// The gradient at one position: the sum of its blocks.
struct Position<'a, T, F> {
    problem: &'a Problem,
    /// Gradient of the im2col matrix, from token `first` on.
    x: *mut f32,
    first: usize,
    p: isize,
    /// True if a token at or after the position depends on it.
    sees: F,
    /// First channel and distance of channels.
    dfinal: Option<(*const T, isize)>,
    to: (*mut T, isize),
}

impl<T: SimdElement, F: Fn(usize) -> bool> Kernel for Position<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Problem { d, l, width, dilation, .. } = *self.problem;
        let (terms, history) = (width * d, self.problem.history());
        let block = |q: usize| {
            let k = ((self.p + history as isize) as usize - q) / dilation;
            self.x.wrapping_add((q - self.first) * terms + k * d)
        };
        // The first token that may depend on the position; its block becomes the sum.
        let before = usize::try_from(self.first as isize - self.p).unwrap_or(0);
        let ahead = before.div_ceil(dilation) * dilation;
        let start = (self.p + ahead as isize) as usize;
        let end = ((self.p + history as isize + 1) as usize).min(l);
        let sum = (start < end).then(|| block(start));
        // SAFETY: the matrix holds the rows of tokens up to `end`; only this position touches its blocks.
        unsafe {
            if let Some(sum) = sum.filter(|_| !(self.sees)(start)) {
                sum.write_bytes(0, d);
            }
            for q in (start..end).step_by(dilation).skip(1) {
                if let Some(sum) = sum.filter(|_| (self.sees)(q)) {
                    let term = block(q);
                    for c in (0..d).step_by(S::LANES) {
                        let n = S::LANES.min(d - c);
                        let add = s.load_first(term.add(c), n);
                        s.store_first(sum.add(c), s.add(s.load_first(sum.add(c), n), add), n);
                    }
                }
            }
            for c in (0..d).step_by(S::LANES) {
                let n = S::LANES.min(d - c);
                let mut dx = match sum {
                    Some(sum) => s.load_first(sum.add(c), n),
                    None => s.zero(),
                };
                if let Some(dfinal) = self.dfinal {
                    dx = s.add(dx, load_channels(s, dfinal, c, n));
                }
                store_channels(s, self.to, c, dx, n);
            }
        }
    }
}

/// Channels `c..c + n` of a token.
///
/// # Safety
/// They exist, and `n <= LANES`.
#[inline(always)]
unsafe fn load_channels<S: Simd, T: SimdElement>(
    s: S,
    (from, stride): (*const T, isize),
    c: usize,
    n: usize,
) -> S::F32 {
    let from = from.wrapping_offset(c as isize * stride);
    // SAFETY: promised by the caller.
    unsafe {
        if stride == 1 {
            return T::load_first(s, from, n);
        }
        let mut lanes = [0f32; MAX_LANES];
        for (i, lane) in lanes.iter_mut().enumerate().take(n) {
            *lane = from.offset(i as isize * stride).read().to_f32();
        }
        s.load(lanes.as_ptr())
    }
}
