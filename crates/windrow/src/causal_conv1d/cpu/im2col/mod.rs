//! The convolution as a matrix product: the im2col matrix of a row (transposed and padded while it is
//! gathered) times the weight as a matrix, then bias and activation. Serves dense convolutions too.

pub(crate) mod gradients;

use super::shared::epilogue::epilogue;
use super::shared::operand::{gather, gather_as};
use super::shared::{Heads, Inputs, Outputs, Parameters, Tokens};
use crate::causal_conv1d::sequences::{Run, Source};
use crate::causal_conv1d::{HeadNorm, Problem};
use crate::cpu::gemm::{Gemm, Matrix};
use crate::cpu::{Isa, Kernel, MAX_LANES, SendPtr, Simd, SimdElement, dispatch, parallel_for};
use crate::{Activation, Error, Result, TensorRef};
use std::ops::Range;

/// The largest number of elements of the im2col matrix at a time, unless one token has more: 4 MiB.
pub(super) const BLOCK: usize = 1 << 20;
/// Tokens of a task outside the product.
pub(super) const ROWS: usize = 16;

/// The im2col matrices of all rows, [b, l, width*d], and the weight as a matrix [d_out, width*d].
pub(crate) type Stages = (Vec<f32>, Vec<f32>);

/// The division of a convolution into products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Im2colGemm {
    pub(super) problem: Problem,
    pub(super) activation: Activation,
    norm: Option<HeadNorm>,
    pub(super) isa: Isa,
    pub(super) threads: usize,
    /// Tokens of a product.
    tokens: usize,
    /// Elements of the weight matrix, the im2col matrix, the product and the bias, and scratch
    /// memory of the product.
    parts: [usize; 5],
}

impl Im2colGemm {
    pub(crate) fn new(
        problem: Problem,
        (activation, norm): (Activation, Option<HeadNorm>),
        isa: Isa,
        threads: usize,
    ) -> Result<Self> {
        let Problem { d, d_out, l, width, .. } = problem;
        let overflow = || Error::SizeOverflow {
            what: "im2col matrix",
            detail: format!("width {width} x {d} channels, {d_out} output channels"),
        };
        let terms = width.checked_mul(d).ok_or_else(overflow)?;
        let tokens = (BLOCK / terms.max(1)).clamp(1, l.max(1));
        let sizes = || {
            let weight = d_out.checked_mul(terms)?;
            let matrix = tokens.checked_mul(terms)?;
            let product = tokens.checked_mul(d_out)?;
            let whole = Gemm::new(isa, [tokens, d_out, terms]).scratch_len(threads);
            let rest = Gemm::new(isa, [l % tokens, d_out, terms]).scratch_len(threads);
            let parts = [weight, matrix, product, d_out, whole.max(rest)];
            let parts = parts.map(|n| n.next_multiple_of(16));
            let total = parts.iter().try_fold(0usize, |sum, &n| sum.checked_add(n))?;
            (total <= isize::MAX as usize / 4).then_some(parts)
        };
        let parts = if problem.is_empty() { [0; 5] } else { sizes().ok_or_else(overflow)? };
        Ok(Im2colGemm { problem, activation, norm, isa, threads, tokens, parts })
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        self.parts.iter().sum::<usize>() * 4
    }

    pub(crate) fn explain(&self) -> String {
        let Problem { d, d_out, width, .. } = self.problem;
        format!(
            "products of {} x {} by {} x {d_out}, {} threads",
            self.tokens,
            width * d,
            width * d,
            self.threads
        )
    }

    /// Computes all outputs.
    ///
    /// # Safety
    /// Operands have the problem's sizes. Nothing else accesses the outputs. `scratch` holds [`Im2colGemm::workspace_bytes`]
    /// bytes, aligned to 64.
    pub(crate) unsafe fn run<T: SimdElement>(
        &self,
        inputs: &Inputs<'_, T>,
        outputs: &Outputs<T>,
        scratch: *mut u8,
    ) {
        let Inputs { tokens, parameters } = inputs;
        let Problem { b, d, d_out, l, width, .. } = self.problem;
        if self.problem.is_empty() {
            return;
        }
        let terms = width * d;
        let mut next = scratch.cast::<f32>();
        let [expanded, matrix, product, staged_bias, gemm_scratch] = self.parts.map(|n| {
            let part = next;
            next = next.wrapping_add(n);
            part
        });
        // SAFETY: each part of the scratch memory is as long as what is written there.
        unsafe {
            self.stage_parameters(parameters, expanded, staged_bias);
            for b in 0..b {
                for first in (0..l).step_by(self.tokens) {
                    let n = self.tokens.min(l - first);
                    self.im2col(tokens, b, first..first + n, matrix);
                    let a = Matrix { ptr: matrix, row: terms as isize, col: 1 };
                    let w = Matrix { ptr: expanded, row: 1, col: terms as isize };
                    let c = (product, d_out as isize, 1);
                    Gemm::new(self.isa, [n, d_out, terms]).run(self.threads, a, w, c, gemm_scratch);
                    let [product, bias] = [SendPtr(product), SendPtr(staged_bias)];
                    parallel_for(self.threads, n.div_ceil(ROWS), |i| {
                        let rows = i * ROWS..((i + 1) * ROWS).min(n);
                        let [product, bias] = [product.get(), bias.get()];
                        let plan = self;
                        dispatch(
                            self.isa,
                            Epilogue { plan, tokens, b, first, rows, product, bias, outputs },
                        );
                    });
                }
            }
        }
    }

    /// Both operands of the product, for all rows.
    pub(crate) fn stages<T: SimdElement>(&self, inputs: &Inputs<'_, T>) -> Stages {
        let Problem { b, d, d_out, l, width, .. } = self.problem;
        let mut im2col = vec![0.0; b * l * width * d];
        let mut weight = vec![0.0; d_out * width * d];
        // SAFETY: the vectors are as long as the matrices.
        unsafe {
            self.expand_weight(&inputs.parameters.weight, weight.as_mut_ptr());
            for b in 0..b {
                let to = im2col.as_mut_ptr().add(b * l * width * d);
                self.im2col(&inputs.tokens, b, 0..l, to);
            }
        }
        (im2col, weight)
    }

    /// Writes the weight as a matrix and the bias, zero if there is none.
    ///
    /// # Safety
    /// The parameters have the problem's sizes, `weight` and `bias` hold them.
    pub(super) unsafe fn stage_parameters(
        &self,
        parameters: &Parameters<'_>,
        weight: *mut f32,
        bias: *mut f32,
    ) {
        let d_out = self.problem.d_out;
        // SAFETY: promised by the caller.
        unsafe {
            self.expand_weight(&parameters.weight, weight);
            bias.write_bytes(0, d_out);
            if let Some(view) = &parameters.bias {
                let strides = [0, view.strides()[0]];
                let from = Strided { view, first: 0, shape: [1, d_out], strides };
                dispatch(self.isa, CopyRow { from, to: bias });
            }
        }
    }

    /// Writes the weight as a matrix [d_out, width*d]: column `k*d + c` is tap `k` of input channel `c`, zero if a
    /// depthwise filter does not read it.
    ///
    /// # Safety
    /// `weight` has the problem's sizes and `to` holds the matrix.
    unsafe fn expand_weight(&self, weight: &TensorRef<'_>, to: *mut f32) {
        let Problem { d, d_out, width, dense, .. } = self.problem;
        if d == 0 {
            return; // The width of a filter without elements can be anything.
        }
        let strides = weight.strides();
        // SAFETY: rows and columns are in the matrix and in the weight.
        unsafe {
            to.write_bytes(0, d_out * width * d);
            for channel in 0..d_out {
                for k in 0..width {
                    let row = to.add((channel * width + k) * d);
                    let (first, n, step, at) = if dense {
                        let tap = channel as isize * strides[0] + k as isize * strides[2];
                        (tap, d, strides[1], 0)
                    } else {
                        (channel as isize * strides[0] + k as isize * strides[1], 1, 0, channel)
                    };
                    let (shape, strides) = ([1, n], [0, step]);
                    let from = Strided { view: weight, first, shape, strides };
                    dispatch(self.isa, CopyRow { from, to: row.add(at) });
                }
            }
        }
    }

    /// Writes rows `range` of the im2col matrix of batch row `b`: column `k*d + c` is what tap `k` of
    /// channel `c` lies on. Rows of padding are zero.
    ///
    /// # Safety
    /// `to` holds the rows.
    pub(super) unsafe fn im2col<T: SimdElement>(
        &self,
        tokens: &Tokens<'_, T>,
        b: usize,
        range: Range<usize>,
        to: *mut f32,
    ) {
        let terms = self.problem.width * self.problem.d;
        if terms == 0 {
            return;
        }
        let (to, n) = (SendPtr(to), range.len());
        parallel_for(self.threads, n.div_ceil(ROWS), |i| {
            let rows = i * ROWS..((i + 1) * ROWS).min(n);
            let to = to.get().wrapping_add(rows.start * terms);
            let range = range.start + rows.start..range.start + rows.end;
            dispatch(self.isa, Gather { problem: &self.problem, tokens, b, range, to });
        });
    }
}

/// Elements of a tensor from an offset on.
struct Strided<'a> {
    view: &'a TensorRef<'a>,
    first: isize,
    shape: [usize; 2],
    strides: [isize; 2],
}

/// A copy of elements as f32. The code that makes it guarantees that the pointers are valid.
struct CopyRow<'a> {
    from: Strided<'a>,
    to: *mut f32,
}

impl Kernel for CopyRow<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Strided { view, first, shape, strides } = self.from;
        // SAFETY: see the type.
        unsafe { gather(s, view, first, shape, strides, self.to) }
    }
}

/// Rows of the im2col matrix. Made by [`Im2colGemm::im2col`] only.
struct Gather<'a, T> {
    problem: &'a Problem,
    tokens: &'a Tokens<'a, T>,
    b: usize,
    range: Range<usize>,
    to: *mut f32,
}

impl<T: SimdElement> Kernel for Gather<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Problem { d, dilation, .. } = *self.problem;
        let history = self.problem.history();
        let sequences = &self.tokens.sequences;
        let mut to = self.to;
        let mut run = Run::EMPTY;
        for t in self.range.clone() {
            if t >= run.end {
                run = sequences.run(self.b, t, history, self.range.end);
            }
            for k in 0..self.problem.width {
                let p = (t + k * dilation) as isize - history as isize;
                let from = match sequences.source(self.b, &run, p, history) {
                    Source::Token(t) => Some((self.tokens.x, self.b, t)),
                    Source::State(row, j) => self.tokens.states.map(|states| (states, row, j)),
                    Source::Nothing => None,
                };
                // SAFETY: the source exists and has d channels, as has the block of the row.
                unsafe {
                    match from {
                        Some((operand, row, token)) => {
                            let at = operand.at(row, 0, token);
                            let strides = [0, operand.strides[1]];
                            gather_as::<S, T>(s, at, 0, [1, d], strides, to);
                        }
                        None => to.write_bytes(0, d),
                    }
                    to = to.add(d);
                }
            }
        }
    }
}

/// Bias and activation of some rows of the product, and their way to y. Made by
/// [`Im2colGemm::run`] only.
struct Epilogue<'a, T> {
    plan: &'a Im2colGemm,
    tokens: &'a Tokens<'a, T>,
    b: usize,
    /// Token of the product's first row.
    first: usize,
    rows: Range<usize>,
    product: *mut f32,
    bias: *const f32,
    outputs: &'a Outputs<T>,
}

impl<T: SimdElement> Kernel for Epilogue<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let d_out = self.plan.problem.d_out;
        for row in self.rows.clone() {
            let t = self.first + row;
            let padding = self.tokens.sequences.run(self.b, t, 0, t + 1).sequence < 0;
            // SAFETY: the row has d_out elements, as have the bias and the token of y.
            unsafe {
                let product = self.product.add(row * d_out);
                for (i, (to, channels)) in self.outputs.iter().enumerate() {
                    for c in channels.clone().step_by(S::LANES) {
                        let n = S::LANES.min(channels.end - c);
                        let sum = s.load_first(product.add(c), n);
                        let sum = s.add(sum, s.load_first(self.bias.add(c), n));
                        let y = epilogue::<S, T>(s, self.plan.activation, sum);
                        let y = if padding { s.zero() } else { y };
                        store_channels(s, (to.at(self.b, 0, t), to.strides[1]), c, y, n);
                    }
                    if let Some(norm) = self.plan.norm.filter(|_| HeadNorm::takes(i)) {
                        let (row, tokens) = (self.b, t..t + 1);
                        s.outlined(Heads { norm, y: to, row, channels, tokens });
                    }
                }
            }
        }
    }
}

/// Writes channels `c..c + n` of the token at `to.0`, whose channels are `to.1` apart.
///
/// # Safety
/// They exist, and `n <= LANES`.
#[inline(always)]
pub(super) unsafe fn store_channels<S: Simd, T: SimdElement>(
    s: S,
    (to, stride): (*mut T, isize),
    c: usize,
    v: S::F32,
    n: usize,
) {
    let to = to.wrapping_offset(c as isize * stride);
    // SAFETY: promised by the caller.
    unsafe {
        if stride == 1 {
            return T::store_first(s, to, v, n);
        }
        let mut lanes = [0f32; MAX_LANES];
        s.store(lanes.as_mut_ptr(), v);
        for (i, &lane) in lanes.iter().enumerate().take(n) {
            to.offset(i as isize * stride).write(T::from_f32(lane));
        }
    }
}
