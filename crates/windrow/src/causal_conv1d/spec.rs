//! The spec of a causal convolution: descriptors, options, and the checks that need no data.

use super::problem::rank;
use super::split::split;
use super::{HeadNorm, Problem};
use crate::forms::{fields, names};
use crate::tensor::{check_tensor, check_unique};
use crate::{Activation, DType, Error, Result, TensorDesc};

fields! {
    /// The spec of a causal convolution over sequences of tokens. A token is one position of `x`, with its `d`
    /// channels:
    ///
    /// `y[b,d,t] = act(bias[d] + sum_k weight[d,k] * x[b,d,t-(width-1)+k])`
    ///
    /// The `width - 1` tokens before a sequence come from its initial state; without one they are zeros. With a weight
    /// [d_out, d, width] the convolution is dense: every output channel sums over all input channels (`groups = 1`).
    /// With a `dilation`, tap `k` reads token `t - (width - 1 - k) * dilation`. The *history*, the number of tokens
    /// before a sequence on which its first outputs depend, is then `(width - 1) * dilation`.
    ///
    /// The shape of x is always [b, d, l]. For channels-last data, give the strides of that layout.
    ///
    /// # Packed sequences
    ///
    /// An entry of the batch (a *row*) may hold several sequences, one after the other. They are marked in one of two
    /// ways:
    ///
    /// - `seq_idx` [b, l], i32: the number of each token's sequence. An output depends only on tokens with the same
    ///   number. A token with a negative number is padding: its output is 0, and no other output depends on it. Its
    ///   input and the gradient of its output are ignored, even if they are NaN. Initial states belong to the sequence
    ///   of the row's first token, final states to that of its last token.
    /// - `cu_seqlens` [sequences + 1], i32 or i64, with `b = 1`: sequence `i` is the tokens
    ///   `cu_seqlens[i]..cu_seqlens[i + 1]`. Each sequence has its own initial and final state. The entries must begin
    ///   with 0, end with l and never decrease.
    ///
    /// # States
    ///
    /// `initial_states` and `final_states` are [b, d, history] ([sequences, d, history] with `cu_seqlens`) of x's type.
    /// An initial state holds the last tokens before a sequence, and a final state the last tokens of it, oldest first.
    /// If a sequence has fewer tokens, its final state begins with the end of its initial state, or with zeros if there
    /// is none. The final state of a row that ends in padding is zeros.
    ///
    /// # Split outputs
    ///
    /// The output channels may be divided among two or three tensors, each with its own strides: `y` has the first
    /// channels, `y2` those behind them, and `y3` those behind `y2`. Each has at least one channel. The values are
    /// those that one tensor would have. [`with_split`](Self::with_split) sets all of them. With a `norm`, `y` and `y2`
    /// are divided by the L2 norm of their heads.
    ///
    /// ```
    /// use windrow::{Activation, CausalConv1dSpec, DType, TensorDesc};
    /// let x = TensorDesc::contiguous(DType::F32, &[2, 64, 128])?;
    /// let weight = TensorDesc::contiguous(DType::F32, &[64, 4])?;
    /// let spec = CausalConv1dSpec::new(x, weight)?.with_activation(Activation::Silu);
    /// assert_eq!(spec.y.shape(), [2, 64, 128]);
    /// # Ok::<(), windrow::Error>(())
    /// ```
    ///
    /// Source: Dao, causal-conv1d (<https://github.com/Dao-AILab/causal-conv1d>). `seq_idx` and states have the same
    /// meaning as there.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    CausalConv1dSpec by fn bare {
        /// Input [b, d, l], f32, f16 or bf16; any strides.
        x: TensorDesc,
        /// Filter [d, width], or [d_out, d, width] for a dense convolution; f32 or x's type.
        weight: TensorDesc,
        /// Output [b, d_out, l] of x's type; any strides with which no two elements share memory. If there is a `y2`, it
        /// has only the first channels.
        y: TensorDesc => with_output,
    }
    default {
        /// Activation, applied after the bias is added to the sum.
        activation: Activation = Activation::Identity => with_activation,
        /// Distance of neighbouring taps in tokens, at least 1.
        dilation: usize = 1 => with_dilation,
    }
    optional {
        /// Bias `[d_out]`, f32 or x's type.
        bias: TensorDesc => with_bias,
        /// Sequence numbers [b, l], i32.
        seq_idx: TensorDesc => with_seq_idx,
        /// Sequence boundaries [sequences + 1], i32 or i64.
        cu_seqlens: TensorDesc => with_cu_seqlens,
        /// Last tokens before each sequence, [b or sequences, d, history], of x's type.
        initial_states: TensorDesc => with_initial_states,
        /// Output: last tokens of each sequence, [b or sequences, d, history], of x's type.
        final_states: TensorDesc => with_final_states,
        /// Output of the channels behind those of `y`, [b, channels, l]; type and strides as for `y`.
        y2: TensorDesc => with_y2,
        /// Output of the channels behind those of `y2`, [b, channels, l]; needs `y2`.
        y3: TensorDesc => with_y3,
        /// Division of `y` and `y2` by the norm of their heads, whose width divides the channels of each. There are no
        /// gradients with it.
        norm: HeadNorm => with_norm,
    }
}

impl CausalConv1dSpec {
    /// The spec of a convolution of `x` [b, d, l] with `weight` [d, width] or [d_out, d, width], without bias,
    /// activation, states or packed sequences. `y` has no gaps: it is channels-last if x is, otherwise channels-first.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::DType`], [`Error::Shape`] if channels do not match or the width is
    /// 0, [`Error::SizeOverflow`].
    pub fn new(x: TensorDesc, weight: TensorDesc) -> Result<Self> {
        let y = Problem::new(&x, &weight)?.output(&x)?;
        Ok(Self::bare(x, weight, y))
    }

    /// The spec with one output for each of one to three numbers of channels, which add up to `d_out`. No output has
    /// gaps; all are channels-last if x is, otherwise channels-first.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other numbers of channels, [`Error::SizeOverflow`], and those of
    /// [`CausalConv1dSpec::new`], because the fields are public and may have been changed since.
    ///
    /// ```
    /// # use windrow::{CausalConv1dSpec, DType, TensorDesc};
    /// # let x = TensorDesc::contiguous(DType::F32, &[2, 64, 128])?;
    /// # let weight = TensorDesc::contiguous(DType::F32, &[64, 4])?;
    /// let spec = CausalConv1dSpec::new(x, weight)?.with_split(&[16, 16, 32])?;
    /// assert_eq!(spec.y3.unwrap().shape(), [2, 32, 128]);
    /// # Ok::<(), windrow::Error>(())
    /// ```
    pub fn with_split(mut self, channels: &[usize]) -> Result<Self> {
        let problem = Problem::new(&self.x, &self.weight)?;
        (self.y, [self.y2, self.y3]) = split(&problem, &self.x, channels)?;
        Ok(self)
    }

    /// The outputs in the order of their channels.
    pub(crate) fn outputs(&self) -> impl Iterator<Item = &TensorDesc> + Clone {
        [Some(&self.y), self.y2.as_ref(), self.y3.as_ref()].into_iter().flatten()
    }

    /// The output without a split: `y`, or a tensor of all channels without gaps whose dimensions are in y's order.
    pub(crate) fn whole_output(&self) -> Result<TensorDesc> {
        match self.y2 {
            None => Ok(self.y),
            Some(_) => {
                let problem = Problem::new(&self.x, &self.weight)?;
                problem.output_like(&self.y, problem.d_out)
            }
        }
    }

    /// Shape of initial and final states: [b, d, history], or [sequences, d, history] with `cu_seqlens`. The history is
    /// `(width - 1) * dilation`.
    ///
    /// # Errors
    /// As [`CausalConv1dSpec::new`], because the fields are public and may have been changed since, and the errors of
    /// an invalid `cu_seqlens` or `dilation`.
    pub fn states_shape(&self) -> Result<[usize; 3]> {
        let problem = self.sizes()?;
        Ok([self.state_rows(&problem)?, problem.d, problem.history()])
    }

    fn sizes(&self) -> Result<Problem> {
        Problem::new(&self.x, &self.weight)?.with_dilation(self.dilation)
    }

    fn state_rows(&self, problem: &Problem) -> Result<usize> {
        let Some(cu_seqlens) = &self.cu_seqlens else { return Ok(problem.b) };
        if self.seq_idx.is_some() {
            return Err(Error::unsupported(
                "`seq_idx` together with `cu_seqlens`",
                "they are two ways to say the same; give one of them",
            ));
        }
        let &[entries] = cu_seqlens.shape() else {
            return Err(rank("cu_seqlens", cu_seqlens, "1: [sequences + 1]"));
        };
        if !matches!(cu_seqlens.dtype, DType::I32 | DType::I64) {
            return Err(Error::dtype("cu_seqlens", cu_seqlens.dtype, "i32 or i64"));
        }
        if problem.b != 1 {
            let expected = "b = 1 with `cu_seqlens`: [1, d, l]";
            return Err(Error::shape("x", self.x.shape(), expected));
        }
        // Tokens need a sequence that they belong to.
        let (least, expected) = match problem.l {
            0 => (1, "[sequences + 1], at least one entry"),
            _ => (2, "[sequences + 1], at least two entries where x has tokens"),
        };
        if entries < least {
            return Err(Error::shape("cu_seqlens", cu_seqlens.shape(), expected));
        }
        Ok(entries - 1)
    }

    /// The sizes, after a check of everything that can be checked without tensor values.
    pub(crate) fn problem(&self) -> Result<Problem> {
        let problem = self.sizes()?;
        let rows = self.state_rows(&problem)?;
        let dtype = self.x.dtype;
        problem.check_outputs(&self.y, [&self.y2, &self.y3], dtype)?;
        self.norm.map_or(Ok(()), |norm| norm.check(self.outputs()))?;
        if let Some(bias) = &self.bias {
            problem.check_bias(bias, dtype)?;
        }
        if let Some(seq_idx) = &self.seq_idx {
            check_tensor("seq_idx", seq_idx, DType::I32, &[problem.b, problem.l])?;
        }
        let states = [rows, problem.d, problem.history()];
        if let Some(initial_states) = &self.initial_states {
            check_tensor("initial_states", initial_states, dtype, &states)?;
        }
        if let Some(final_states) = &self.final_states {
            check_tensor("final_states", final_states, dtype, &states)?;
            check_unique("final_states", &final_states.layout)?;
        }
        Ok(problem)
    }
}

/// The algorithm of a causal convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CausalConv1dAlgorithm {
    /// Direct sums over the taps, for depthwise weights only. The cost model always chooses it for them.
    Direct,
    /// A matrix product of the im2col matrix [l, width*d], which is transposed and padded while it is made, with the
    /// weight as a matrix [d_out, width*d]. A depthwise weight is expanded to such a matrix. For any spec; the only
    /// algorithm for a dense weight.
    Im2colGemm,
}

names! { CausalConv1dAlgorithm, "algorithm": Direct = "direct", Im2colGemm = "im2col_gemm" }
