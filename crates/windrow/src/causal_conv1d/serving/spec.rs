//! What a call of an engine that serves models computes, and the checks that need no data.

use crate::causal_conv1d::Problem;
use crate::causal_conv1d::problem::{output_layout, rank};
use crate::forms::setters;
use crate::tensor::{check_tensor, check_unique};
use crate::{Activation, DType, Error, Result, TensorDesc, TensorRef};

/// New tokens of many sequences, each any number of them: a prompt, part of one, one token or some drafts. Each follows
/// the window that its state of a pool holds, and the state is walked on.
///
/// Index tensors are i32 or i64, each of its own type. Of sequence `i` with `n` tokens:
///
/// - **Tokens** are row `i` of `x`, or with `query_start_loc` tokens `query_start_loc[i]..query_start_loc[i + 1]` of its
///   one row. Its first entry is 0, none is smaller than the one before, the last at most the number of tokens; those
///   behind it belong to nobody, and their `y` is 0. With `n = 0` everything stays as it is, and no other index of the
///   sequence is looked at.
/// - **States**: it reads and writes state `conv_state_indices[i]`, or state `i` without indices. With a table
///   [sequences, blocks] it reads column `initial_block[i]` and writes column `last_block[i]`, each column 0 where not
///   given. A negative index, and `null_index`, is null: a sequence that reads it is padding, whose `y` is 0 and whose
///   states are left alone; a state that would be written there is not. A state that one sequence writes, no other may
///   name.
/// - **Its window**, the `width - 1` tokens before its first one, is columns `0..width-1` of the state, oldest first;
///   `a-1..a+width-2` with `a = num_accepted_tokens[i]`, which is at least 1; zeros where `has_initial_state[i]` is 0.
/// - **The state after it**: columns `0..width-1` take the last `width - 1` tokens of window and `x`. With
///   `num_accepted_tokens` columns `0..width-2+n` take all of window and `x` but the first token, so that a later call
///   can go on behind any of them. Other columns stay.
/// - **Blocks on the way**: with `first_block` the state at the end of each block but the last is kept too. Let `e` be
///   the last multiple of `block_size` before `tokens_before[i] + n`; then column `last_block[i] - m` takes the last
///   `width - 1` tokens up to token number `e - (m - 1) * block_size`, for `m` in `1..=last_block[i] - first_block[i]`.
///   Ends that are not behind `tokens_before[i]` are left out.
///
/// Source: the calls of vLLM (<https://github.com/vllm-project/vllm>), `causal_conv1d_fn` and `causal_conv1d_update`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CausalConv1dServingSpec {
    /// New tokens [b, d, l], with `query_start_loc` [1, d, tokens]; f32, f16 or bf16; any strides.
    pub x: TensorDesc,
    /// States [pool, d, state_len] with state_len at least width - 1; x's type, read and written.
    pub conv_states: TensorDesc,
    /// Filter [d, width], f32 or x's type.
    pub weight: TensorDesc,
    /// Bias `[d]`, f32 or x's type.
    pub bias: Option<TensorDesc>,
    /// Output of x's shape and type; strides such that every element has its own memory.
    pub y: TensorDesc,
    /// Applied to sum and bias.
    pub activation: Activation,
    /// Where each sequence begins, and where the last one ends: [sequences + 1].
    pub query_start_loc: Option<TensorDesc>,
    /// State of each sequence `[sequences]`, or of each of its blocks [sequences, blocks].
    pub conv_state_indices: Option<TensorDesc>,
    /// An index that is null, beside the negative ones.
    pub null_index: Option<i64>,
    /// Whether a sequence's state counts: `[sequences]`, u8.
    pub has_initial_state: Option<TensorDesc>,
    /// Tokens of the call before that were accepted: `[sequences]`.
    pub num_accepted_tokens: Option<TensorDesc>,
    /// Column of the table that is read: `[sequences]`.
    pub initial_block: Option<TensorDesc>,
    /// Column of the table that takes the state after the last token: `[sequences]`.
    pub last_block: Option<TensorDesc>,
    /// Column of the table that takes the first of the states at ends of blocks: `[sequences]`.
    pub first_block: Option<TensorDesc>,
    /// Tokens of a sequence before this call: `[sequences]`; with `first_block`.
    pub tokens_before: Option<TensorDesc>,
    /// Tokens of a block; with `first_block`.
    pub block_size: usize,
}

setters! {
    CausalConv1dServingSpec {
        with_output(y: TensorDesc);
        with_activation(activation: Activation);
        with_block_size(block_size: usize);
        ? with_bias(bias: TensorDesc);
        ? with_query_start_loc(query_start_loc: TensorDesc);
        ? with_conv_state_indices(conv_state_indices: TensorDesc);
        ? with_null_index(null_index: i64);
        ? with_has_initial_state(has_initial_state: TensorDesc);
        ? with_num_accepted_tokens(num_accepted_tokens: TensorDesc);
        ? with_initial_block(initial_block: TensorDesc);
        ? with_last_block(last_block: TensorDesc);
        ? with_first_block(first_block: TensorDesc);
        ? with_tokens_before(tokens_before: TensorDesc);
    }
}

/// The sizes of a spec that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Of x.
    pub problem: Problem,
    /// Sequences that there are tokens of.
    pub sequences: usize,
    /// States that there are.
    pub pool: usize,
    /// Tokens that a state holds.
    pub state_len: usize,
    /// States of a sequence in the table; 1 without one.
    pub blocks: usize,
}

impl CausalConv1dServingSpec {
    /// Tokens `x` [b, d, l] that follow `conv_states` [pool, d, state_len], with `weight` [d, width], without any
    /// option: sequence `i` is row `i` and has state `i`. `y` is dense: channel-last if x is, else channel-first.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::DType`], [`Error::Shape`] if channels do not match, the width is 0 or states are too
    /// short, [`Error::SizeOverflow`].
    pub fn new(x: TensorDesc, conv_states: TensorDesc, weight: TensorDesc) -> Result<Self> {
        let shape = Problem::new(&x, &weight)?.y_shape();
        let y = TensorDesc { dtype: x.dtype, layout: output_layout(&x.layout, &shape)? };
        let spec = CausalConv1dServingSpec {
            x,
            conv_states,
            weight,
            bias: None,
            y,
            activation: Activation::Identity,
            query_start_loc: None,
            conv_state_indices: None,
            null_index: None,
            has_initial_state: None,
            num_accepted_tokens: None,
            initial_block: None,
            last_block: None,
            first_block: None,
            tokens_before: None,
            block_size: 0,
        };
        spec.check_states(&spec.problem_of_x()?)?;
        Ok(spec)
    }

    fn problem_of_x(&self) -> Result<Problem> {
        let problem = Problem::new(&self.x, &self.weight)?;
        if problem.dense {
            return Err(rank("weight", &self.weight, "2: [d, width]"));
        }
        Ok(problem)
    }

    fn check_states(&self, problem: &Problem) -> Result<()> {
        let states = &self.conv_states;
        let &[_, d, state_len] = states.shape() else {
            return Err(rank("conv_states", states, "3: [pool, d, state_len]"));
        };
        if d != problem.d || state_len < problem.history() {
            let (d, history) = (problem.d, problem.history());
            let expected = format!("[pool, {d}, state_len] with state_len at least {history}");
            return Err(Error::shape("conv_states", states.shape(), expected));
        }
        check_tensor("conv_states", states, self.x.dtype, states.shape())?;
        check_unique("conv_states", &states.layout)
    }

    /// How many sequences there are.
    fn sequences(&self, problem: &Problem) -> Result<usize> {
        let Some(starts) = &self.query_start_loc else { return Ok(problem.b) };
        let name = "query_start_loc";
        let &[entries] = starts.shape() else {
            return Err(rank(name, starts, "1: [sequences + 1]"));
        };
        check_index(name, starts)?;
        if problem.b != 1 {
            let expected = "b = 1 with `query_start_loc`: [1, d, tokens]";
            return Err(Error::shape("x", self.x.shape(), expected));
        }
        if entries == 0 {
            return Err(Error::shape(name, starts.shape(), "[sequences + 1], at least one entry"));
        }
        Ok(entries - 1)
    }

    /// Columns of the table; 1 without one.
    fn blocks(&self, sequences: usize, problem: &Problem) -> Result<usize> {
        let name = "conv_state_indices";
        let Some(indices) = &self.conv_state_indices else {
            if self.conv_states.shape()[0] < sequences {
                let expected = format!("at least {sequences} states, one for each sequence");
                return Err(Error::shape("conv_states", self.conv_states.shape(), expected));
            }
            return Ok(1);
        };
        check_index(name, indices)?;
        match *indices.shape() {
            [given] if given == sequences => Ok(1),
            [given, blocks] if given == sequences && (blocks > 0 || problem.is_empty()) => {
                Ok(blocks)
            }
            [_] | [_, _] => Err(Error::shape(
                name,
                indices.shape(),
                format!("[{sequences}] or [{sequences}, blocks] with at least one block"),
            )),
            _ => Err(rank(name, indices, "1: [sequences], or 2: [sequences, blocks]")),
        }
    }

    /// Every check that needs no data, and the sizes.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        let problem = self.problem_of_x()?;
        self.check_states(&problem)?;
        problem.check_output(&self.y, self.x.dtype)?;
        if let Some(bias) = &self.bias {
            problem.check_bias(bias, self.x.dtype)?;
        }
        let sequences = self.sequences(&problem)?;
        let blocks = self.blocks(sequences, &problem)?;
        if let Some(flags) = &self.has_initial_state {
            check_tensor("has_initial_state", flags, DType::U8, &[sequences])?;
        }
        for (name, columns, given) in [
            ("num_accepted_tokens", false, &self.num_accepted_tokens),
            ("initial_block", true, &self.initial_block),
            ("last_block", true, &self.last_block),
            ("first_block", true, &self.first_block),
            ("tokens_before", true, &self.tokens_before),
        ] {
            let Some(given) = given else { continue };
            check_index(name, given)?;
            check_tensor(name, given, given.dtype, &[sequences])?;
            if columns && self.conv_state_indices.is_none_or(|table| table.layout.rank() != 2) {
                let expected = "none without a table [sequences, blocks] in `conv_state_indices`";
                return Err(Error::parameter(name, "given", expected));
            }
        }
        self.check_ends()?;
        let [pool, _, state_len] = [0, 1, 2].map(|i| self.conv_states.shape()[i]);
        let sizes = Sizes { problem, sequences, pool, state_len, blocks };
        if self.query_start_loc.is_none()
            && self.num_accepted_tokens.is_some()
            && problem.l > sizes.most_drafts()
        {
            let expected = format!(
                "[pool, {}, state_len] with state_len at least {}, for {} drafts",
                problem.d,
                problem.width.saturating_add(problem.l) - 2,
                problem.l
            );
            return Err(Error::shape("conv_states", self.conv_states.shape(), expected));
        }
        Ok(sizes)
    }

    /// What states at ends of blocks need.
    fn check_ends(&self) -> Result<()> {
        let (expected, missing) = ("a tensor, as `first_block` is given", "missing");
        if self.first_block.is_none() {
            return match self.tokens_before {
                None => Ok(()),
                Some(_) => {
                    let expected = "none without `first_block`";
                    Err(Error::parameter("tokens_before", "given", expected))
                }
            };
        }
        for (name, given) in
            [("last_block", &self.last_block), ("tokens_before", &self.tokens_before)]
        {
            if given.is_none() {
                return Err(Error::parameter(name, missing, expected));
            }
        }
        if self.block_size == 0 {
            return Err(Error::parameter("block_size", 0, "at least 1 with `first_block`"));
        }
        Ok(())
    }
}

impl Sizes {
    /// Most tokens of a sequence all of which a state holds, with `num_accepted_tokens`.
    pub(crate) fn most_drafts(&self) -> usize {
        self.state_len.saturating_add(2).saturating_sub(self.problem.width)
    }

    /// The largest of `num_accepted_tokens`.
    pub(crate) fn most_accepted(&self) -> usize {
        self.state_len - self.problem.history() + 1
    }
}

fn check_index(name: &'static str, given: &TensorDesc) -> Result<()> {
    match given.dtype {
        DType::I32 | DType::I64 => Ok(()),
        other => Err(Error::dtype(name, other, "i32 or i64")),
    }
}

/// The inputs of such a call; see [`CausalConv1dServingSpec`] for shapes and types.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CausalConv1dServingArgs<'a> {
    /// [b, d, l] or [1, d, tokens]
    pub x: TensorRef<'a>,
    /// [d, width]
    pub weight: TensorRef<'a>,
    /// `[d]`
    pub bias: Option<TensorRef<'a>>,
    /// [sequences + 1]
    pub query_start_loc: Option<TensorRef<'a>>,
    /// `[sequences]` or [sequences, blocks]
    pub conv_state_indices: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub has_initial_state: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub num_accepted_tokens: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub initial_block: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub last_block: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub first_block: Option<TensorRef<'a>>,
    /// `[sequences]`
    pub tokens_before: Option<TensorRef<'a>>,
}

impl<'a> CausalConv1dServingArgs<'a> {
    /// New tokens and weight alone.
    pub fn new(x: TensorRef<'a>, weight: TensorRef<'a>) -> Self {
        CausalConv1dServingArgs {
            x,
            weight,
            bias: None,
            query_start_loc: None,
            conv_state_indices: None,
            has_initial_state: None,
            num_accepted_tokens: None,
            initial_block: None,
            last_block: None,
            first_block: None,
            tokens_before: None,
        }
    }
}

setters! {
    CausalConv1dServingArgs<'a> {
        ? with_bias(bias: TensorRef<'a>);
        ? with_query_start_loc(query_start_loc: TensorRef<'a>);
        ? with_conv_state_indices(conv_state_indices: TensorRef<'a>);
        ? with_has_initial_state(has_initial_state: TensorRef<'a>);
        ? with_num_accepted_tokens(num_accepted_tokens: TensorRef<'a>);
        ? with_initial_block(initial_block: TensorRef<'a>);
        ? with_last_block(last_block: TensorRef<'a>);
        ? with_first_block(first_block: TensorRef<'a>);
        ? with_tokens_before(tokens_before: TensorRef<'a>);
    }
}
