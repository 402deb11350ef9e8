//! The spec of a serving call, and the checks that need no data.

use crate::causal_conv1d::problem::{check_index, rank};
use crate::causal_conv1d::split::split;
use crate::causal_conv1d::{HeadNorm, Problem};
use crate::forms::fields;
use crate::tensor::{check_tensor, check_unique};
use crate::{Activation, DType, Error, Result, TensorDesc};

fields! {
    /// The spec of a call from a program that serves models: new tokens of many sequences with states in a pool. A
    /// sequence may have a whole prompt, a part of one, one token, or a few draft tokens. Its state holds the window of
    /// inputs before these tokens, and the call moves the state on.
    ///
    /// Each index tensor is i32 or i64. For sequence `i` with `n` new tokens:
    ///
    /// - **Tokens**: row `i` of `x`. With `query_start_loc`, `x` has one row, and the tokens are
    ///   `query_start_loc[i]..query_start_loc[i + 1]` of it. The first entry of `query_start_loc` is 0, entries never
    ///   decrease, and the last one is at most the number of tokens. Tokens after the last entry belong to no sequence,
    ///   and their `y` is 0. With `n = 0` nothing changes, and no other index of the sequence is read.
    /// - **States**: the sequence reads and writes state `conv_state_indices[i]`, or state `i` without indices. If
    ///   `conv_state_indices` is a table [sequences, blocks], the sequence reads column `initial_block[i]` and writes
    ///   column `last_block[i]`; a column that is not given is 0. A negative index, or one equal to `null_index`, is
    ///   null. A sequence that reads a null state is padding: its `y` is 0 and no state changes. A state at a null
    ///   index is not written. No other sequence may name a state that one sequence writes.
    /// - **Window**: the `width - 1` tokens before the first new one. They are columns `0..width-1` of the state,
    ///   oldest first. With `num_accepted_tokens` they are columns `a-1..a+width-2`, where `a = num_accepted_tokens[i]`
    ///   is at least 1. They are zeros if `has_initial_state[i]` is 0.
    /// - **New state**: columns `0..width-1` take the last `width - 1` tokens of window and `x` together. With
    ///   `num_accepted_tokens`, columns `0..width-2+n` take all of window and `x` except the first token, so that a
    ///   later call can continue after any of them. Other columns do not change.
    /// - **States at block ends**: with `first_block` the state at the end of each block except the last is kept too.
    ///   Let `e` be the last multiple of `block_size` before `tokens_before[i] + n`. For `m` in
    ///   `1..=last_block[i] - first_block[i]`, column `last_block[i] - m` takes the last `width - 1` tokens up to token
    ///   number `e - (m - 1) * block_size`. Block ends up to `tokens_before[i]` are left out.
    /// - **Intermediate windows**: `intermediate_windows[s, t]`, with `s = intermediate_indices[i]` or, without
    ///   indices, `s = i`, takes the window after token `t` in columns `0..width-1`: token `t` and the `width - 2`
    ///   tokens before it, oldest first. `n` is at most the number of steps. No two sequences share a slot, and padding
    ///   has none. Other windows and columns do not change.
    /// - **Trees**: with `next_token` and `next_sibling` the tokens are a tree of drafts whose root is token 0.
    ///   `next_token[i, t]` is the first child of token `t`, and `next_sibling[i, t]` the next child of `t`'s parent;
    ///   -1 means none. Both are later tokens than `t`. If several tokens name the same one, the last of them counts.
    ///   If one token names it as child and as sibling, the sibling counts. A token that is never named is a child of
    ///   token 0. The tokens before a token are its parent, the parent's parent and so on, and before token 0 the
    ///   window. `y` and the intermediate windows follow this order. The new state does not: it takes tokens in their
    ///   order in `x`. `parent_token[i, t]` takes the parent, 0 for token 0; other columns do not change. `n` is at
    ///   most the number of columns, and at most 1024.
    ///
    /// - **Split outputs**: the channels of the output may be divided among two or three tensors, each with its own
    ///   strides: `y` has the first channels, `y2` those behind them, and `y3` those behind `y2`. Each has at least one
    ///   channel. [`with_split`](Self::with_split) sets all of them. With a `norm`, `y` and `y2` are divided by the L2
    ///   norm of their heads.
    ///
    /// Source: the calls of vLLM (<https://github.com/vllm-project/vllm>), `causal_conv1d_fn` and
    /// `causal_conv1d_update`; intermediate windows and trees are those of SGLang
    /// (<https://github.com/sgl-project/sglang>).
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    CausalConv1dServingSpec by fn bare {
        /// New tokens [b, d, l], with `query_start_loc` [1, d, tokens]; f32, f16 or bf16; any strides.
        x: TensorDesc,
        /// States [pool, d, state_len] with state_len at least width - 1; x's type, read and written.
        conv_states: TensorDesc,
        /// Filter [d, width], f32 or x's type.
        weight: TensorDesc,
        /// Output of x's shape and type; any strides with which no two elements share memory. If there is a `y2`, it has
        /// only the first channels.
        y: TensorDesc => with_output,
    }
    default {
        /// Activation, applied after the bias is added to the sum.
        activation: Activation = Activation::Identity => with_activation,
        /// The number of tokens of a block; with `first_block`.
        block_size: usize = 0 => with_block_size,
    }
    optional {
        /// Bias `[d]`, f32 or x's type.
        bias: TensorDesc => with_bias,
        /// The start of each sequence, and the end of the last one: [sequences + 1].
        query_start_loc: TensorDesc => with_query_start_loc,
        /// State of each sequence `[sequences]`, or of each of its blocks [sequences, blocks].
        conv_state_indices: TensorDesc => with_conv_state_indices,
        /// An index that is null, in addition to negative ones.
        null_index: i64 => with_null_index,
        /// A flag for each sequence that says if its state is used: `[sequences]`, u8.
        has_initial_state: TensorDesc => with_has_initial_state,
        /// The number of accepted tokens of the previous call: `[sequences]`.
        num_accepted_tokens: TensorDesc => with_num_accepted_tokens,
        /// The column of the table to read: `[sequences]`.
        initial_block: TensorDesc => with_initial_block,
        /// The column of the table that takes the state after the last token: `[sequences]`.
        last_block: TensorDesc => with_last_block,
        /// The column of the table that takes the first state at a block end: `[sequences]`.
        first_block: TensorDesc => with_first_block,
        /// The number of tokens of a sequence before this call: `[sequences]`; with `first_block`.
        tokens_before: TensorDesc => with_tokens_before,
        /// The windows after tokens [slots, steps, d, columns] with at least width - 1 columns; x's type, written.
        intermediate_windows: TensorDesc => with_intermediate_windows,
        /// Slot of each sequence in `intermediate_windows`: `[sequences]`.
        intermediate_indices: TensorDesc => with_intermediate_indices,
        /// First child of each token of a tree [sequences, columns], with at least l columns unless `query_start_loc`
        /// is given. Needs `next_sibling`, and excludes `first_block`.
        next_token: TensorDesc => with_next_token,
        /// Next child of the token's parent, in the shape of `next_token`.
        next_sibling: TensorDesc => with_next_sibling,
        /// Parent of each token, written: of the shape of `next_token`, i32 or i64.
        parent_token: TensorDesc => with_parent_token,
        /// Output of the channels behind those of `y`, [b, channels, l]; type and strides as for `y`.
        y2: TensorDesc => with_y2,
        /// Output of the channels behind those of `y2`, [b, channels, l]; needs `y2`.
        y3: TensorDesc => with_y3,
        /// Division of `y` and `y2` by the norm of their heads, whose width divides the channels of each.
        norm: HeadNorm => with_norm,
    }
}

/// The maximum number of tokens of a tree.
pub(crate) const TREE: usize = 1024;

/// The sizes of a spec that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The sizes of x.
    pub problem: Problem,
    /// The number of sequences.
    pub sequences: usize,
    /// The number of states in the pool.
    pub pool: usize,
    /// Tokens that a state holds.
    pub state_len: usize,
    /// States of a sequence in the table; 1 without a table.
    pub blocks: usize,
    /// Slots of the intermediate windows; 0 without them.
    pub slots: usize,
    /// The maximum number of tokens of a sequence that states of drafts, intermediate windows and trees can hold.
    pub most: usize,
}

impl CausalConv1dServingSpec {
    /// The spec of a call with tokens `x` [b, d, l] that follow `conv_states` [pool, d, state_len], with `weight` [d,
    /// width] and without options: sequence `i` is row `i` and has state `i`. `y` has no gaps: it is channels-last if x
    /// is, otherwise channels-first.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::DType`], [`Error::Shape`] if channels do not match, the width is 0 or states are too
    /// short, [`Error::SizeOverflow`].
    pub fn new(x: TensorDesc, conv_states: TensorDesc, weight: TensorDesc) -> Result<Self> {
        let problem = Problem::depthwise(&x, &weight)?;
        let y = problem.output(&x)?;
        let spec = Self::bare(x, conv_states, weight, y);
        spec.check_states(&problem)?;
        Ok(spec)
    }

    /// The spec with one output for each of one to three numbers of channels, which add up to `d`. No output has gaps;
    /// all are channels-last if x is, otherwise channels-first.
    ///
    /// # Errors
    /// [`Error::Parameter`] for other numbers of channels, [`Error::SizeOverflow`], and those of
    /// [`CausalConv1dServingSpec::new`], because the fields are public and may have been changed since.
    pub fn with_split(mut self, channels: &[usize]) -> Result<Self> {
        let problem = Problem::depthwise(&self.x, &self.weight)?;
        (self.y, [self.y2, self.y3]) = split(&problem, &self.x, channels)?;
        Ok(self)
    }

    /// The outputs in the order of their channels.
    pub(crate) fn outputs(&self) -> impl Iterator<Item = &TensorDesc> + Clone {
        [Some(&self.y), self.y2.as_ref(), self.y3.as_ref()].into_iter().flatten()
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

    /// The number of sequences.
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

    /// Columns of the table; 1 without a table.
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

    /// The sizes, after a check of everything that can be checked without tensor values.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        let problem = Problem::depthwise(&self.x, &self.weight)?;
        self.check_states(&problem)?;
        problem.check_outputs(&self.y, [&self.y2, &self.y3], self.x.dtype)?;
        self.norm.map_or(Ok(()), |norm| norm.check(self.outputs()))?;
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
        let [slots, steps] = self.check_windows(&problem, sequences)?;
        let columns = self.check_trees(sequences)?;
        let sizes = Sizes { problem, sequences, pool, state_len, blocks, slots, most: 0 };
        let drafts = match self.num_accepted_tokens {
            Some(_) => sizes.most_drafts(),
            None => usize::MAX,
        };
        let sizes = Sizes { most: drafts.min(steps).min(columns), ..sizes };
        if self.query_start_loc.is_none() && problem.l > sizes.most {
            return Err(self.too_many_tokens(&problem, [drafts, steps, columns]));
        }
        Ok(sizes)
    }

    /// The error for rows with more tokens than one of these limits.
    fn too_many_tokens(&self, problem: &Problem, [drafts, steps, columns]: [usize; 3]) -> Error {
        let Problem { d, l, width, .. } = *problem;
        let shape = |desc: &Option<TensorDesc>| desc.map_or(vec![], |desc| desc.shape().to_vec());
        if l > drafts {
            let least = width.saturating_add(l) - 2;
            let expected =
                format!("[pool, {d}, state_len] with state_len at least {least}, for {l} drafts");
            return Error::shape("conv_states", self.conv_states.shape(), expected);
        }
        if l > steps {
            let expected = format!("[slots, steps, {d}, columns] with at least {l} steps");
            return Error::shape(
                "intermediate_windows",
                &shape(&self.intermediate_windows),
                expected,
            );
        }
        if l > TREE {
            return Error::shape("x", self.x.shape(), format!("at most {TREE} tokens of a tree"));
        }
        debug_assert!(l > columns);
        let expected = format!("[sequences, columns] with at least {l} columns");
        Error::shape("next_token", &shape(&self.next_token), expected)
    }

    /// Slots and steps of the intermediate windows. Without them, the number of steps is not limited.
    fn check_windows(&self, problem: &Problem, sequences: usize) -> Result<[usize; 2]> {
        let [name, indices] = ["intermediate_windows", "intermediate_indices"];
        let Some(windows) = &self.intermediate_windows else {
            return match self.intermediate_indices {
                None => Ok([0, usize::MAX]),
                Some(_) => {
                    Err(Error::parameter(indices, "given", format!("none without `{name}`")))
                }
            };
        };
        let &[slots, steps, d, columns] = windows.shape() else {
            return Err(rank(name, windows, "4: [slots, steps, d, columns]"));
        };
        if d != problem.d || columns < problem.history() {
            let (d, history) = (problem.d, problem.history());
            let expected = format!("[slots, steps, {d}, columns] with at least {history} columns");
            return Err(Error::shape(name, windows.shape(), expected));
        }
        check_tensor(name, windows, self.x.dtype, windows.shape())?;
        check_unique(name, &windows.layout)?;
        match &self.intermediate_indices {
            Some(given) => {
                check_index(indices, given)?;
                check_tensor(indices, given, given.dtype, &[sequences])?;
            }
            None if slots < sequences => {
                let expected = format!("at least {sequences} slots, one for each sequence");
                return Err(Error::shape(name, windows.shape(), expected));
            }
            None => {}
        }
        Ok([slots, steps])
    }

    /// The maximum number of tokens of a tree. Without trees there is no limit.
    fn check_trees(&self, sequences: usize) -> Result<usize> {
        let Some(next) = &self.next_token else {
            for (name, given) in
                [("next_sibling", &self.next_sibling), ("parent_token", &self.parent_token)]
            {
                if given.is_some() {
                    return Err(Error::parameter(name, "given", "none without `next_token`"));
                }
            }
            return Ok(usize::MAX);
        };
        let &[_, columns] = next.shape() else {
            return Err(rank("next_token", next, "2: [sequences, columns]"));
        };
        for (name, given) in [
            ("next_token", &self.next_token),
            ("next_sibling", &self.next_sibling),
            ("parent_token", &self.parent_token),
        ] {
            let Some(given) = given else { continue };
            check_index(name, given)?;
            check_tensor(name, given, given.dtype, &[sequences, columns])?;
        }
        if self.next_sibling.is_none() {
            let expected = "a tensor, as `next_token` is given";
            return Err(Error::parameter("next_sibling", "missing", expected));
        }
        if let Some(parents) = &self.parent_token {
            check_unique("parent_token", &parents.layout)?;
        }
        if self.first_block.is_some() {
            return Err(Error::parameter("first_block", "given", "none with `next_token`"));
        }
        Ok(columns.min(TREE))
    }

    /// Checks the tensors for states at block ends.
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
    /// The maximum number of new tokens of a sequence that a state can hold, with `num_accepted_tokens`.
    pub(crate) fn most_drafts(&self) -> usize {
        self.state_len.saturating_add(2).saturating_sub(self.problem.width)
    }

    /// The largest value that `num_accepted_tokens` may have.
    pub(crate) fn most_accepted(&self) -> usize {
        self.state_len - self.problem.history() + 1
    }
}
