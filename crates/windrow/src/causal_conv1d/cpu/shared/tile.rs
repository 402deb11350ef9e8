//! Small channels-last copies of what a kernel reads and writes, for everything that is not contiguous: the first
//! tokens of sequences, states, and strides of any kind.

use super::{GROUP, Operand};
use crate::causal_conv1d::sequences::{Run, Sequences, Source};
use crate::cpu::SimdElement;

/// Channels at most this many elements apart, as in states, are copied one token at a time.
const NEAR: usize = 16;

/// [tokens, GROUP] elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<T>(pub *mut T);

/// The places of the tokens of a row, and of those before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens<'a, T> {
    pub x: Operand<T>,
    /// Initial states.
    pub states: Option<Operand<T>>,
    pub sequences: Sequences<'a>,
    /// (width - 1) * dilation
    pub history: usize,
    /// The distance of neighbouring taps. Rows of a tile are as far apart.
    pub dilation: usize,
}

impl<T: SimdElement> Tokens<'_, T> {
    /// Copies what follows each sequence as its history, rows `0..rows` of the states.
    ///
    /// # Safety
    /// `to` has `rows` rows of `d` channels and the history's tokens.
    pub(crate) unsafe fn copy_final_states(&self, rows: usize, d: usize, to: Operand<T>) {
        for row in 0..rows {
            let (b, run) = self.sequences.state_run(row, true);
            for j in 0..self.history {
                let p = (run.end + j) as isize - self.history as isize;
                let from = match self.sequences.source(b, &run, p, self.history) {
                    Source::Token(t) => Some((self.x, b, t)),
                    Source::State(row, j) => self.states.map(|states| (states, row, j)),
                    Source::Nothing => None,
                };
                for channel in 0..d {
                    let value = match from {
                        // SAFETY: a token or state that exists.
                        Some((from, row, token)) => unsafe { *from.at(row, channel, token) },
                        None => T::default(),
                    };
                    // SAFETY: promised by the caller.
                    unsafe { to.at(row, channel, j).write(value) };
                }
            }
        }
    }
}

/// The number of tokens of `n` if only each `step`th is taken, from the first on.
#[inline(always)]
pub(crate) fn each(n: usize, step: usize) -> usize {
    // A division costs as much as some tokens.
    if step == 1 { n } else { n.div_ceil(step) }
}

/// Strides of every `step`th token.
#[inline(always)]
pub(crate) fn spread([row, channel, token]: [isize; 3], step: usize) -> [isize; 3] {
    [row, channel, token.wrapping_mul(step as isize)]
}

impl<T: SimdElement> Tile<T> {
    /// Row `i` of the tile.
    ///
    /// # Safety
    /// The tile has that row.
    #[inline(always)]
    pub(crate) unsafe fn row(&self, i: usize) -> *mut T {
        // SAFETY: promised by the caller.
        unsafe { self.0.add(i * GROUP) }
    }

    /// Fills `rows` rows with positions of batch row `b` from `first` on, each `tokens.dilation` after the one before, as
    /// the tokens of `run` read them: channels `channel..channel + lanes`. Other lanes become zero.
    ///
    /// # Safety
    /// The tile has `rows` rows, the channels exist, `lanes` is at most GROUP, and the run is one of
    /// `tokens.sequences`.
    #[inline(always)]
    pub(crate) unsafe fn load(
        &self,
        tokens: &Tokens<'_, T>,
        (b, run): (usize, &Run),
        (first, rows): (isize, usize),
        (channel, lanes): (usize, usize),
    ) {
        // SAFETY: sources are tokens and states that exist.
        unsafe {
            if lanes < GROUP {
                self.0.write_bytes(0, rows * GROUP);
            }
            // Tokens of the run itself lie in memory as they are.
            let step = tokens.dilation;
            let within = |p: usize| match usize::try_from(p as isize - first) {
                Ok(ahead) => each(ahead, step).min(rows),
                Err(_) => 0,
            };
            let (from, to) = match run.sequence {
                0.. => (within(run.start), within(run.end)),
                _ => (0, 0),
            };
            for i in (0..from).chain(to.max(from)..rows) {
                let p = first + (i * step) as isize;
                let [x, y] = match tokens.sequences.source(b, run, p, tokens.history) {
                    Source::Token(t) => [Some((tokens.x, b, t)), None],
                    Source::State(row, j) => [None, tokens.states.map(|s| (s, row, j))],
                    Source::Nothing => [None, None],
                };
                match x.or(y) {
                    Some((operand, row, token)) => {
                        let at = operand.at(row, channel, token);
                        self.read(at, operand.strides, (i, 1), lanes);
                    }
                    None => self.row(i).write_bytes(0, GROUP),
                }
            }
            if from < to {
                let at = tokens.x.at(b, channel, (first + (from * step) as isize) as usize);
                self.read(at, spread(tokens.x.strides, step), (from, to - from), lanes);
            }
        }
    }

    /// Copies `rows` tokens of `lanes` channels into the tile from row `i` on.
    ///
    /// # Safety
    /// The elements from `at` on exist, and the tile has the rows.
    #[inline(always)]
    pub(crate) unsafe fn read(
        &self,
        at: *const T,
        [_, channel, token]: [isize; 3],
        (i, rows): (usize, usize),
        lanes: usize,
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            if channel == 1 {
                for r in 0..rows {
                    let from = at.offset(r as isize * token);
                    std::ptr::copy_nonoverlapping(from, self.row(i + r), lanes);
                }
            } else if lanes == GROUP && channel.unsigned_abs() <= NEAR {
                // The loop over lanes has a fixed length and is unrolled.
                for r in 0..rows {
                    let (from, to) = (at.offset(r as isize * token), self.row(i + r));
                    for lane in 0..GROUP {
                        *to.add(lane) = *from.offset(lane as isize * channel);
                    }
                }
            } else {
                // Token by token along each channel: rows a power of two apart share cache sets.
                for lane in 0..lanes {
                    let from = at.offset(lane as isize * channel);
                    for r in 0..rows {
                        *self.row(i + r).add(lane) = *from.offset(r as isize * token);
                    }
                }
            }
        }
    }

    /// Copies rows `0..rows` to `lanes` channels of tokens at `at`.
    ///
    /// # Safety
    /// As [`Tile::read`], writable.
    #[inline(always)]
    pub(crate) unsafe fn write(
        &self,
        at: *mut T,
        [_, channel, token]: [isize; 3],
        rows: usize,
        lanes: usize,
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            if channel == 1 {
                for r in 0..rows {
                    let to = at.offset(r as isize * token);
                    std::ptr::copy_nonoverlapping(self.row(r), to, lanes);
                }
            } else if lanes == GROUP && channel.unsigned_abs() <= NEAR {
                for r in 0..rows {
                    let (from, to) = (self.row(r), at.offset(r as isize * token));
                    for lane in 0..GROUP {
                        *to.offset(lane as isize * channel) = *from.add(lane);
                    }
                }
            } else {
                for lane in 0..lanes {
                    let to = at.offset(lane as isize * channel);
                    for r in 0..rows {
                        *to.offset(r as isize * token) = *self.row(r).add(lane);
                    }
                }
            }
        }
    }
}
