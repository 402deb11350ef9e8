//! The spec of a decoding step, and the checks that need no data.

use crate::causal_conv1d::Problem;
use crate::causal_conv1d::problem::{check_index, rank};
use crate::forms::fields;
use crate::tensor::{check_tensor, check_unique};
use crate::{Activation, Error, Result, TensorDesc};

fields! {
    /// The spec of a decoding step. It computes `y` for new tokens `x` that follow the tokens in `conv_state`, and
    /// moves the state on.
    ///
    /// A state holds the last `state_len >= width - 1` tokens of a sequence, oldest first. A step moves it on by l
    /// tokens. With `cache_seqlens` it is a ring buffer instead: token number `n` of the sequence is in slot `n %
    /// state_len`, and `cache_seqlens[i]` is the number of tokens before this step.
    ///
    /// With `conv_state_indices`, entry `i` of the batch uses state `conv_state_indices[i]` of a larger pool. An entry
    /// with a negative index is padding: its `y` is 0 and no state changes. No two entries may use the same state.
    ///
    /// Source: Dao, causal-conv1d (<https://github.com/Dao-AILab/causal-conv1d>), `causal_conv1d_update`.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    CausalConv1dUpdateSpec by fn bare {
        /// New tokens [b, d, l], f32, f16 or bf16; any strides.
        x: TensorDesc,
        /// States [b, d, state_len], or [pool, d, state_len] with `conv_state_indices`; x's type,
        /// read and written.
        conv_state: TensorDesc,
        /// Filter [d, width], f32 or x's type.
        weight: TensorDesc,
        /// Output [b, d, l] of x's type; any strides with which no two elements share memory.
        y: TensorDesc => with_output,
    }
    default {
        /// Activation, applied after the bias is added to the sum.
        activation: Activation = Activation::Identity => with_activation,
    }
    optional {
        /// Bias `[d]`, f32 or x's type.
        bias: TensorDesc => with_bias,
        /// Number of tokens of each sequence before this step, `[b]`, i32 or i64.
        cache_seqlens: TensorDesc => with_cache_seqlens,
        /// Index of each entry's state, `[b]`, i32 or i64.
        conv_state_indices: TensorDesc => with_conv_state_indices,
    }
}

impl CausalConv1dUpdateSpec {
    /// The spec of a step of `x` [b, d, l] with `conv_state` [b or pool, d, state_len] and `weight` [d, width], without
    /// bias, activation, ring buffer or indices. `y` has no gaps: it is channels-last if x is, otherwise
    /// channels-first.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::DType`], [`Error::Shape`] if channels do not match, the width is 0 or the
    /// state is too short, [`Error::SizeOverflow`].
    pub fn new(x: TensorDesc, conv_state: TensorDesc, weight: TensorDesc) -> Result<Self> {
        let problem = Problem::depthwise(&x, &weight)?;
        let y = problem.output(&x)?;
        let spec = Self::bare(x, conv_state, weight, y);
        spec.check_state(&problem)?;
        Ok(spec)
    }

    fn check_state(&self, problem: &Problem) -> Result<()> {
        let &[_, d, state_len] = self.conv_state.shape() else {
            return Err(rank("conv_state", &self.conv_state, "3: [b or pool, d, state_len]"));
        };
        if d != problem.d || state_len < problem.history() {
            let (d, history) = (problem.d, problem.history());
            let expected = format!("[b or pool, {d}, state_len] with state_len at least {history}");
            return Err(Error::shape("conv_state", self.conv_state.shape(), expected));
        }
        let shape = self.conv_state.shape();
        check_tensor("conv_state", &self.conv_state, self.x.dtype, shape)?;
        check_unique("conv_state", &self.conv_state.layout)
    }

    /// The sizes, after a check of everything that can be checked without tensor values.
    pub(in crate::causal_conv1d) fn problem(&self) -> Result<Problem> {
        let problem = Problem::depthwise(&self.x, &self.weight)?;
        self.check_state(&problem)?;
        if self.conv_state_indices.is_none() && self.conv_state.shape()[0] != problem.b {
            let expected = format!("{} states, as many as x has rows", problem.b);
            return Err(Error::shape("conv_state", self.conv_state.shape(), expected));
        }
        problem.check_output(&self.y, self.x.dtype)?;
        if let Some(bias) = &self.bias {
            problem.check_bias(bias, self.x.dtype)?;
        }
        for (name, indices) in [
            ("cache_seqlens", &self.cache_seqlens),
            ("conv_state_indices", &self.conv_state_indices),
        ] {
            if let Some(indices) = indices {
                check_index(name, indices)?;
                check_tensor(name, indices, indices.dtype, &[problem.b])?;
            }
        }
        Ok(problem)
    }
}
