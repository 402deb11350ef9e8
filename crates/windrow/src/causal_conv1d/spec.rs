//! The spec of a causal convolution: descriptors, options, and the checks that need no data.

use super::Problem;
use super::problem::rank;
use crate::forms::{fields, names};
use crate::tensor::{check_tensor, check_unique};
use crate::{Activation, DType, Error, Result, TensorDesc};

fields! {
    /// A causal convolution over sequences of tokens:
    ///
    /// `y[b,d,t] = act(bias[d] + sum_k weight[d,k] * x[b,d,t-(width-1)+k])`
    ///
    /// Tokens before a sequence are the sequence's initial state, or zeros. With a weight
    /// [d_out, d, width] every output channel sees all input channels (`groups = 1`).
    ///
    /// The logical shape is always [b, d, l]; channel-last data is given by strides.
    ///
    /// # Packed sequences
    ///
    /// Several sequences in one row are told apart in one of two ways:
    ///
    /// - `seq_idx` [b, l], i32: a token sees the tokens before it that have its own number. A token with
    ///   a negative number is padding: its output is 0 and nobody sees it; its input and the gradient of its
    ///   output may be anything, NaN included. Initial states belong to the sequence of the row's first
    ///   token, final states to that of its last token.
    /// - `cu_seqlens` [sequences + 1], i32 or i64, with `b = 1`: sequence `i` is the tokens
    ///   `cu_seqlens[i]..cu_seqlens[i + 1]`. Each sequence has its own initial and final state. The
    ///   first entry is 0, the last is l, and none is smaller than the one before.
    ///
    /// # States
    ///
    /// `initial_states` and `final_states` are [b, d, width-1] ([sequences, d, width-1] with
    /// `cu_seqlens`) of x's type: the last `width - 1` tokens before and at the end of a sequence, oldest
    /// first. Where a sequence is shorter than that, its final state begins with the tail of its initial state
    /// (zeros without one); of a row that ends in padding it is zeros.
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
    /// Source: Dao, causal-conv1d (<https://github.com/Dao-AILab/causal-conv1d>), whose meaning of
    /// `seq_idx` and states this follows.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    CausalConv1dSpec by fn bare {
        /// Input [b, d, l], f32, f16 or bf16; any strides.
        x: TensorDesc,
        /// Filter [d, width], or [d_out, d, width] for a dense convolution; f32 or x's type.
        weight: TensorDesc,
        /// Output [b, d_out, l] of x's type; strides such that every element has its own memory.
        y: TensorDesc => with_output,
    }
    default {
        /// Applied to sum and bias.
        activation: Activation = Activation::Identity => with_activation,
    }
    optional {
        /// Bias `[d_out]`, f32 or x's type.
        bias: TensorDesc => with_bias,
        /// Sequence numbers [b, l], i32.
        seq_idx: TensorDesc => with_seq_idx,
        /// Sequence boundaries [sequences + 1], i32 or i64.
        cu_seqlens: TensorDesc => with_cu_seqlens,
        /// Tokens before each sequence [b or sequences, d, width-1], of x's type.
        initial_states: TensorDesc => with_initial_states,
        /// Output: last tokens of each sequence [b or sequences, d, width-1], of x's type.
        final_states: TensorDesc => with_final_states,
    }
}

impl CausalConv1dSpec {
    /// A convolution of `x` [b, d, l] with `weight` [d, width] or [d_out, d, width], without bias,
    /// activation, states or packed sequences. `y` is dense: channel-last if x is, else
    /// channel-first.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::DType`], [`Error::Shape`] if channels do not match or the width is
    /// 0, [`Error::SizeOverflow`].
    pub fn new(x: TensorDesc, weight: TensorDesc) -> Result<Self> {
        let y = Problem::new(&x, &weight)?.output(&x)?;
        Ok(Self::bare(x, weight, y))
    }

    /// Shape of initial and final states: [b, d, width-1], or [sequences, d, width-1] with
    /// `cu_seqlens`.
    ///
    /// # Errors
    /// As [`CausalConv1dSpec::new`], since fields can have been changed since, and those of a bad
    /// `cu_seqlens`.
    pub fn states_shape(&self) -> Result<[usize; 3]> {
        let problem = Problem::new(&self.x, &self.weight)?;
        Ok([self.state_rows(&problem)?, problem.d, problem.history()])
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

    /// The sizes, after every check that needs no data.
    pub(crate) fn problem(&self) -> Result<Problem> {
        let problem = Problem::new(&self.x, &self.weight)?;
        let rows = self.state_rows(&problem)?;
        let dtype = self.x.dtype;
        problem.check_output(&self.y, dtype)?;
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
    /// Sums over the taps; depthwise only. The planner's choice there.
    Direct,
    /// A matrix product of the im2col matrix [l, width*d] (transposed and padded on the way) with the
    /// weight [d_out, width*d], into which a depthwise weight is expanded. Any spec; the only
    /// choice for a dense one.
    Im2colGemm,
}

names! { CausalConv1dAlgorithm, "algorithm": Direct = "direct", Im2colGemm = "im2col_gemm" }
