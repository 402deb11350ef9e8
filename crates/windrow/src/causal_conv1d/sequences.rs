//! The division of a row's tokens into sequences.

use crate::{DType, Error, Result, TensorRef};

/// A tensor of indices or flags in main memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Indices<'a>(TensorRef<'a>);

impl<'a> Indices<'a> {
    /// `tensor` is i32, i64 or u8 and in main memory: plans check both.
    pub(crate) fn new(tensor: TensorRef<'a>) -> Self {
        debug_assert!(matches!(tensor.dtype(), DType::I32 | DType::I64 | DType::U8));
        Indices(tensor)
    }

    /// The value at `index`, which must be inside the tensor.
    #[inline]
    pub(crate) fn at<const R: usize>(&self, index: [usize; R]) -> i64 {
        let layout = self.0.layout();
        assert!(index.iter().zip(layout.shape()).all(|(i, n)| i < n) && layout.rank() == R);
        let offset = layout.offset(&index);
        // SAFETY: the view promises that elements inside its shape are readable.
        unsafe {
            match self.0.dtype() {
                DType::I64 => self.0.as_ptr().cast::<i64>().offset(offset).read(),
                DType::I32 => i64::from(self.0.as_ptr().cast::<i32>().offset(offset).read()),
                DType::U8 => i64::from(self.0.as_ptr().cast::<u8>().offset(offset).read()),
                DType::F32 | DType::F16 | DType::BF16 | DType::F64 => {
                    unreachable!("specs allow i32, i64 and u8")
                }
            }
        }
    }

    /// Number of entries along the first dimension.
    pub(crate) fn len(&self) -> usize {
        self.0.shape()[0]
    }

    /// Number of entries along the last dimension.
    pub(crate) fn columns(&self) -> usize {
        self.0.shape()[self.0.shape().len() - 1]
    }
}

/// The division of all rows into sequences, with index values already checked.
///
/// Another thread of the program may write to indices after that: Python lets go of its lock during a run.
/// So every value is held in range wherever it is used: then results are wrong, and nothing outside of the
/// tensors is touched.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sequences<'a> {
    /// One sequence of this many tokens in each row.
    Whole(usize),
    /// Sequence numbers [b, l] of l > 0 tokens.
    Numbers(Indices<'a>, usize),
    /// Boundaries of one row of tokens.
    Boundaries(Boundaries<'a>),
}

/// Boundaries [sequences + 1] of `l` tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Boundaries<'a> {
    entries: Indices<'a>,
    l: usize,
}

impl Boundaries<'_> {
    /// Number of sequences.
    fn sequences(&self) -> usize {
        self.entries.len() - 1
    }

    /// Entry `i`, at most l.
    fn at(&self, i: usize) -> usize {
        usize::try_from(self.entries.at([i])).unwrap_or(0).min(self.l)
    }

    /// The sequence that holds token `t`.
    fn sequence_at(&self, t: usize) -> usize {
        // The last boundary that is at most t, found by halving.
        let (mut low, mut high) = (0, self.sequences());
        while low + 1 < high {
            let middle = (low + high) / 2;
            if self.at(middle) <= t { low = middle } else { high = middle }
        }
        low
    }

    /// Tokens of a sequence: where it starts, and one past its last one.
    fn range(&self, sequence: usize) -> (usize, usize) {
        let start = self.at(sequence);
        (start, self.at(sequence + 1).max(start))
    }
}

/// Neighbouring tokens of the same sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// First token; for a search limited by a width, at least that many tokens before the given one.
    pub start: usize,
    /// The index after the last token, or the limit of the search.
    pub end: usize,
    /// Whose tokens these are: the number, or the position between boundaries. Negative: padding.
    pub sequence: i64,
}

impl Run {
    /// The run of no token.
    pub(crate) const EMPTY: Run = Run { start: 0, end: 0, sequence: 0 };
}

/// The place of a position of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// A token of the row.
    Token(usize),
    /// Row and token of the states.
    State(usize, usize),
    /// Nowhere: zero.
    Nothing,
}

impl<'a> Sequences<'a> {
    /// # Errors
    /// [`Error::Index`] if `cu_seqlens` does not rise from 0 to `l`.
    pub(crate) fn new(
        l: usize,
        seq_idx: Option<TensorRef<'a>>,
        cu_seqlens: Option<TensorRef<'a>>,
    ) -> Result<Self> {
        if let Some(seq_idx) = seq_idx.filter(|_| l > 0) {
            return Ok(Sequences::Numbers(Indices::new(seq_idx), l));
        }
        let Some(cu_seqlens) = cu_seqlens else { return Ok(Sequences::Whole(l)) };
        let boundaries = Indices::new(cu_seqlens);
        let error = |position, expected: String| Error::Index {
            arg: "cu_seqlens",
            position,
            given: boundaries.at([position]),
            expected,
        };
        let last = boundaries.len() - 1;
        let mut previous = 0;
        for i in 0..=last {
            let value = boundaries.at([i]);
            if i == 0 && value != 0 {
                return Err(error(i, "0 as the first entry".into()));
            }
            if value < previous {
                return Err(error(i, format!("at least the entry before it, {previous}")));
            }
            previous = value;
        }
        if previous != l as i64 {
            return Err(error(last, format!("{l} as the last entry, the number of tokens")));
        }
        Ok(Sequences::Boundaries(Boundaries { entries: boundaries, l }))
    }

    /// The run that token `t` of row `b` is in. Its start is searched for among `reach` tokens
    /// before `t`, its end up to token `limit`.
    pub(crate) fn run(&self, b: usize, t: usize, reach: usize, limit: usize) -> Run {
        match self {
            Sequences::Whole(_) => Run { start: 0, end: limit, sequence: 0 },
            Sequences::Numbers(numbers, _) => {
                let sequence = numbers.at([b, t]);
                let same = |&t: &usize| numbers.at([b, t]) == sequence;
                let lowest = t.saturating_sub(reach);
                let start = (lowest..t).rev().take_while(same).last().unwrap_or(t);
                let end = (t + 1..limit).take_while(same).last().map_or(t + 1, |last| last + 1);
                Run { start, end, sequence }
            }
            Sequences::Boundaries(boundaries) => {
                let sequence = boundaries.sequence_at(t);
                let (start, end) = boundaries.range(sequence);
                let (start, end) = (start.min(t), end.min(limit).max(t + 1));
                Run { start, end, sequence: sequence as i64 }
            }
        }
    }

    /// The place from which the tokens of `run` read position `p` of row `b`. Tokens of other sequences, padding and
    /// positions after the sequence are nowhere; positions before the sequence are in its state. Exact for positions
    /// down to a history before the run's start if the run was searched with at least that reach.
    pub(crate) fn source(&self, b: usize, run: &Run, p: isize, history: usize) -> Source {
        if run.sequence < 0 {
            return Source::Nothing;
        }
        let state = |row, start: usize| {
            usize::try_from(p - start as isize + history as isize)
                .map_or(Source::Nothing, |j| Source::State(row, j))
        };
        match self {
            Sequences::Whole(l) if p < *l as isize => {
                usize::try_from(p).map_or_else(|_| state(b, 0), Source::Token)
            }
            Sequences::Numbers(numbers, l) if p < *l as isize => {
                let t = p.max(0) as usize;
                if numbers.at([b, t]) != run.sequence {
                    Source::Nothing
                } else if p < 0 {
                    state(b, 0)
                } else {
                    Source::Token(t)
                }
            }
            Sequences::Boundaries(boundaries) => {
                let row = run.sequence as usize;
                let (start, end) = boundaries.range(row);
                if p < start as isize {
                    state(row, start)
                } else if p < end as isize {
                    Source::Token(p as usize)
                } else {
                    Source::Nothing
                }
            }
            _ => Source::Nothing,
        }
    }

    /// Rows of states.
    pub(crate) fn state_rows(&self, b: usize) -> usize {
        if let Sequences::Boundaries(boundaries) = self { boundaries.sequences() } else { b }
    }

    /// The batch row of state row `row`, and the run of its last (`last`) or first token; the run
    /// is empty where the sequence is.
    pub(crate) fn state_run(&self, row: usize, last: bool) -> (usize, Run) {
        match self {
            Sequences::Whole(l) => (row, Run { start: 0, end: *l, sequence: 0 }),
            Sequences::Numbers(numbers, l) => {
                let t = if last { l - 1 } else { 0 };
                let sequence = numbers.at([row, t]);
                (row, Run { start: t, end: t + 1, sequence })
            }
            Sequences::Boundaries(boundaries) => {
                let (start, end) = boundaries.range(row);
                (0, Run { start, end, sequence: row as i64 })
            }
        }
    }

    /// The entry of the final states, row and token, that position `p` of row `b` becomes; `None` if
    /// it becomes none.
    pub(crate) fn final_entry(
        &self,
        b: usize,
        run: &Run,
        p: isize,
        history: usize,
    ) -> Option<(usize, usize)> {
        let (row, end, sequence) = match self {
            Sequences::Whole(l) => (b, *l, 0),
            Sequences::Numbers(numbers, l) => (b, *l, numbers.at([b, l - 1])),
            Sequences::Boundaries(boundaries) => {
                let row = run.sequence as usize;
                (row, boundaries.at(row + 1), run.sequence)
            }
        };
        let j = usize::try_from(p - end as isize + history as isize).ok()?;
        (run.sequence >= 0 && run.sequence == sequence && j < history).then_some((row, j))
    }
}
