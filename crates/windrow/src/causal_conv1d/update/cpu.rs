//! Decoding: a few new tokens for each entry of a batch, and the states advanced in place.

use crate::causal_conv1d::Problem;
use crate::causal_conv1d::cpu::shared::kernel::{TOKENS, along_channels};
use crate::causal_conv1d::cpu::shared::operand::{Staged, join, split};
use crate::causal_conv1d::cpu::shared::store::Sum;
use crate::causal_conv1d::cpu::shared::{GROUP, Operand, Parameters, Tile};
use crate::causal_conv1d::sequences::Indices;
use crate::cpu::{Isa, Kernel, SendPtr, Simd, SimdElement, array, dispatch, parallel_for_workers};
use crate::{Activation, Error, Result};
use std::ops::Range;

/// Tokens that pass through a tile at once.
const TILE: usize = 16;

/// Channels that a step of one token takes at once.
const STEP: usize = 256;
/// The largest number of slots of a state that a step of one token handles channel by channel.
const SLOTS: usize = 4;

/// The division of an update into tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Update {
    problem: Problem,
    activation: Activation,
    state_len: usize,
    threads: usize,
    /// Channels of a task.
    channels: usize,
    /// Bytes of scratch memory for one thread.
    scratch: usize,
}

/// The tensors that an update reads and writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands<'a, T> {
    pub x: Operand<T>,
    pub y: Operand<T>,
    pub conv_state: Operand<T>,
    pub parameters: Parameters<'a>,
    /// Checked: not negative.
    pub cache_seqlens: Option<Indices<'a>>,
    /// Checked: below the number of states, none twice. With that number.
    pub conv_state_indices: Option<(Indices<'a>, usize)>,
}

impl Update {
    pub(crate) fn new(
        problem: Problem,
        activation: Activation,
        state_len: usize,
        threads: usize,
    ) -> Result<Self> {
        let Problem { b, d, l, width, .. } = problem;
        // A task of this many elements takes some microseconds.
        let work = b * l.max(1) * d;
        let tasks = (work / 4096).clamp(1, 4 * threads);
        let channels = d.div_ceil(tasks).next_multiple_of(GROUP);
        let threads = threads.min(d.div_ceil(channels.max(1))).max(1);
        let scratch = || {
            let staged = Parameters::staged_len(width, channels)?;
            let tiles = width.checked_add(2 * TILE)?.checked_mul(GROUP)?;
            let tiles = tiles.max((SLOTS + 2) * STEP);
            let scratch = tiles.checked_add(staged)?.checked_mul(4)?;
            scratch.checked_mul(threads).map(|_| scratch)
        };
        let overflow = || Error::SizeOverflow {
            what: "workspace",
            detail: format!("width {width}, {channels} channels"),
        };
        let scratch = if problem.is_empty() { 0 } else { scratch().ok_or_else(overflow)? };
        Ok(Update { problem, activation, state_len, threads, channels, scratch })
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        self.scratch * self.threads
    }

    /// Size of tasks and threads in words.
    pub(crate) fn explain(&self) -> String {
        format!("{} channels a task, {} threads", self.channels, self.threads)
    }

    /// # Safety
    /// Operands have the problem's sizes and checked indices. Nothing else accesses y and the states. `scratch` holds
    /// [`Update::workspace_bytes`] bytes, aligned to 64.
    pub(crate) unsafe fn run<T: SimdElement>(
        &self,
        isa: Isa,
        operands: &Operands<'_, T>,
        scratch: *mut u8,
    ) {
        if self.problem.is_empty() {
            return;
        }
        let d = self.problem.d;
        let scratch = SendPtr(scratch);
        parallel_for_workers(self.threads, d.div_ceil(self.channels), |worker, task| {
            let first = task * self.channels;
            let channels = first..(first + self.channels).min(d);
            let scratch = scratch.get().wrapping_add(worker * self.scratch).cast();
            dispatch(isa, Task { plan: self, operands, channels, scratch });
        });
    }
}

/// The batch entries of some channels. Only [`Update::run`] makes a task, and guarantees that the pointers are valid.
struct Task<'a, T> {
    plan: &'a Update,
    operands: &'a Operands<'a, T>,
    channels: Range<usize>,
    scratch: *mut f32,
}

/// A batch entry and the state that it advances.
#[derive(Clone, Copy)]
struct Entry {
    b: usize,
    state: usize,
    /// Slot of the ring buffer that the next token goes to; `None` if the state is moved instead.
    next: Option<usize>,
}

impl<T: SimdElement> Kernel for Task<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Task { plan, operands, channels, scratch } = &self;
        let problem = &plan.problem;
        let sum =
            Sum { width: problem.width, dilation: 1, activation: plan.activation, stream: false };
        let (history, l) = (problem.history(), problem.l);
        // SAFETY: the scratch memory holds the parameters and two tiles; operands have the tokens.
        unsafe {
            let staged = operands.parameters.stage(s, problem, channels.clone(), *scratch);
            let tile =
                scratch.add((2 * problem.width + 1) * channels.len().next_multiple_of(GROUP));
            if let Some(slots) = self.step_slots() {
                return self.step(s, sum, &staged, tile.cast(), slots);
            }
            let x_tile = Tile(tile.cast::<T>());
            let y_tile = Tile(x_tile.row(history + TILE));
            for b in 0..problem.b {
                let entry = self.entry(b);
                for c in (0..channels.len()).step_by(GROUP) {
                    let lanes = (channels.start + c, GROUP.min(channels.len() - c));
                    for t in (0..l).step_by(TILE) {
                        let n = TILE.min(l - t);
                        let y = operands.y.at(b, lanes.0, t);
                        if let Some(entry) = entry {
                            self.load(&x_tile, entry, (t, n), lanes);
                            let x = (x_tile.0.cast_const(), GROUP as isize);
                            let to = (y_tile.0, GROUP as isize);
                            let staged = staged.from(c);
                            if n == 1 {
                                along_channels::<S, T, 1>(s, sum, x, to, (1, GROUP), &staged);
                            } else {
                                let shape = (n, GROUP);
                                along_channels::<S, T, TOKENS>(s, sum, x, to, shape, &staged);
                            }
                        } else {
                            y_tile.0.write_bytes(0, n * GROUP);
                        }
                        y_tile.write(y, operands.y.strides, n, lanes.1);
                    }
                    if let Some(entry) = entry.filter(|_| l > 0) {
                        self.advance(&x_tile, entry, lanes);
                    }
                }
            }
        }
    }
}

/// The layout of a state's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slots {
    /// The slots of a channel together, channel after channel.
    Together,
    /// The channels of a slot together.
    Apart,
}

/// Rows of [`STEP`] channels: the tokens of the state, oldest first, the new one, and its output.
#[derive(Clone, Copy)]
struct Rows<T>(*mut T);

impl<T> Rows<T> {
    fn row(&self, i: usize) -> *mut T {
        self.0.wrapping_add(i * STEP)
    }
}

/// A step of one new token for each entry: blocks of channels at a time, if channels are neighbours.
impl<T: SimdElement> Task<'_, T> {
    /// True if [`Task::step`] can compute the task.
    #[inline(always)]
    fn step_slots(&self) -> Option<Slots> {
        let Operands { x, y, conv_state, .. } = self.operands;
        let Update { problem, state_len, .. } = *self.plan;
        let neighbours = x.strides[1] == 1 && y.strides[1] == 1;
        if problem.l != 1 || !neighbours || !(1..=SLOTS).contains(&state_len) {
            return None;
        }
        match conv_state.strides {
            [_, 1, _] => Some(Slots::Apart),
            [_, channel, 1] if channel == state_len as isize => Some(Slots::Together),
            _ => None,
        }
    }

    /// # Safety
    /// `step_slots` gave `slots`, and `tile` holds `SLOTS + 2` rows.
    #[inline(always)]
    unsafe fn step<S: Simd>(&self, s: S, sum: Sum, staged: &Staged, tile: *mut T, slots: Slots) {
        let Operands { x, y, .. } = self.operands;
        let Update { problem, state_len, .. } = *self.plan;
        let rows = Rows(tile);
        for b in 0..problem.b {
            let entry = self.entry(b);
            for c in (0..self.channels.len()).step_by(STEP) {
                let channel = self.channels.start + c;
                let n = STEP.min(self.channels.len() - c);
                let y = y.at(b, channel, 0);
                // SAFETY: n channels of x, y and the state exist; a block that is narrower than a vector
                // is computed in the rows, which are wide enough.
                unsafe {
                    let Some(entry) = entry else {
                        y.write_bytes(0, n);
                        continue;
                    };
                    self.load_slots(&rows, slots, entry, channel, n);
                    std::ptr::copy_nonoverlapping(x.at(b, channel, 0), rows.row(state_len), n);
                    let from = rows.row(state_len - problem.history()).cast_const();
                    let (from, staged) = ((from, STEP as isize), staged.from(c));
                    let output = rows.row(SLOTS + 1);
                    let (to, lanes) = if n < GROUP { (output, GROUP) } else { (y, n) };
                    let (to, shape) = ((to, 0), (1, lanes));
                    along_channels::<S, T, 1>(s, sum, from, to, shape, &staged);
                    if n < GROUP {
                        std::ptr::copy_nonoverlapping(output, y, n);
                    }
                    self.store_slots(&rows, slots, entry, channel, n);
                }
            }
        }
    }

    /// Copies the slots of `n` channels into rows, oldest token first.
    #[inline(always)]
    unsafe fn load_slots(
        &self,
        rows: &Rows<T>,
        slots: Slots,
        entry: Entry,
        channel: usize,
        n: usize,
    ) {
        let (state, state_len) = (&self.operands.conv_state, self.plan.state_len);
        // The next token's slot holds the oldest one.
        let oldest = entry.next.unwrap_or(0);
        let row = |slot: usize| rows.row((slot + state_len - oldest) % state_len);
        let from = state.at(entry.state, channel, 0);
        // SAFETY: the slots exist, and as many rows.
        unsafe {
            match (slots, state_len) {
                (Slots::Together, 2) => split::<T, 2>(from, array(row), n),
                (Slots::Together, 3) => split::<T, 3>(from, array(row), n),
                (Slots::Together, 4) => split::<T, 4>(from, array(row), n),
                _ => {
                    for slot in 0..state_len {
                        let from = state.at(entry.state, channel, slot);
                        std::ptr::copy_nonoverlapping(from, row(slot), n);
                    }
                }
            }
        }
    }

    /// Advances the slots of `n` channels by the new token.
    #[inline(always)]
    unsafe fn store_slots(
        &self,
        rows: &Rows<T>,
        slots: Slots,
        entry: Entry,
        channel: usize,
        n: usize,
    ) {
        let (state, state_len) = (&self.operands.conv_state, self.plan.state_len);
        let to = state.at(entry.state, channel, 0);
        // A state that is no ring moves by one token.
        let row = |slot: usize| rows.row(slot + 1).cast_const();
        // SAFETY: the entry's state has these channels and slots, the rows hold STEP channels, and n is at most that.
        unsafe {
            match (slots, state_len, entry.next) {
                (Slots::Together, 2, None) => join::<T, 2>(array(row), to, n),
                (Slots::Together, 3, None) => join::<T, 3>(array(row), to, n),
                (Slots::Together, 4, None) => join::<T, 4>(array(row), to, n),
                (Slots::Together, _, Some(next)) => {
                    for c in 0..n {
                        to.add(c * state_len + next).write(*rows.row(state_len).add(c));
                    }
                }
                (_, _, next) => {
                    for slot in next.map_or(0..state_len, |next| next..next + 1) {
                        let from =
                            if next.is_some() { rows.row(state_len) } else { rows.row(slot + 1) };
                        let to = state.at(entry.state, channel, slot);
                        std::ptr::copy_nonoverlapping(from, to, n);
                    }
                }
            }
        }
    }
}

impl<T: SimdElement> Task<'_, T> {
    /// The state of a batch entry; `None` for padding.
    #[inline(always)]
    fn entry(&self, b: usize) -> Option<Entry> {
        let Operands { cache_seqlens, conv_state_indices, .. } = self.operands;
        let state = match conv_state_indices {
            // Another thread of the program may have written there since they were checked.
            Some((indices, pool)) => {
                usize::try_from(indices.at([b])).ok().filter(|state| state < pool)?
            }
            None => b,
        };
        let state_len = self.plan.state_len;
        let next = cache_seqlens
            .filter(|_| state_len > 0)
            .map(|cache_seqlens| cache_seqlens.at([b]) as usize % state_len);
        Some(Entry { b, state, next })
    }

    /// Fills rows with tokens `t - history..t + n`, those before the first from the state.
    #[inline(always)]
    unsafe fn load(
        &self,
        tile: &Tile<T>,
        entry: Entry,
        (t, n): (usize, usize),
        (channel, lanes): (usize, usize),
    ) {
        let Operands { x, conv_state, .. } = self.operands;
        let (history, state_len) = (self.plan.problem.history(), self.plan.state_len);
        // SAFETY: tokens and slots exist, the tile has history + TILE rows.
        unsafe {
            if lanes < GROUP {
                tile.0.write_bytes(0, (history + n) * GROUP);
            }
            let before = history.saturating_sub(t);
            // Token `t - history + i` of the state's is this many before its end.
            let oldest = state_len + t - history;
            match entry.next {
                None if before > 0 => {
                    let at = conv_state.at(entry.state, channel, oldest);
                    tile.read(at, conv_state.strides, (0, before), lanes);
                }
                None => {}
                Some(next) => {
                    for i in 0..before {
                        let at =
                            conv_state.at(entry.state, channel, (next + oldest + i) % state_len);
                        tile.read(at, conv_state.strides, (i, 1), lanes);
                    }
                }
            }
            let at = x.at(entry.b, channel, (t + before) - history);
            tile.read(at, x.strides, (before, history + n - before), lanes);
        }
    }

    /// Puts the tokens of x after those of the state. `tile` was last filled by [`Task::load`].
    #[inline(always)]
    unsafe fn advance(&self, tile: &Tile<T>, entry: Entry, (channel, lanes): (usize, usize)) {
        let Operands { x, conv_state, .. } = self.operands;
        let Update { problem, state_len, .. } = *self.plan;
        let (l, history) = (problem.l, problem.history());
        // Older tokens are overwritten by newer ones at once.
        let kept = l.min(state_len);
        let end = history + l;
        // SAFETY: tokens, slots and rows of the tile exist.
        unsafe {
            let slots = |i| conv_state.at(entry.state, channel, i);
            // With few tokens the tile holds them all, and the newest of the state.
            match entry.next {
                None if l <= TILE && (1..=end).contains(&state_len) => {
                    let newest = Tile(tile.row(end - state_len));
                    newest.write(slots(0), conv_state.strides, state_len, lanes);
                    return;
                }
                Some(next) if l <= TILE => {
                    for i in 0..kept {
                        let slot = slots((next + l - kept + i) % state_len);
                        let token = Tile(tile.row(end - kept + i));
                        token.write(slot, conv_state.strides, 1, lanes);
                    }
                    return;
                }
                _ => {}
            }
            for channel in channel..channel + lanes {
                let slot = |i| conv_state.at(entry.state, channel, i);
                if entry.next.is_none() {
                    for i in 0..state_len - kept {
                        *slot(i) = *slot(i + kept);
                    }
                }
                for i in 0..kept {
                    let i_slot = match entry.next {
                        None => state_len - kept + i,
                        Some(next) => (next + l - kept + i) % state_len,
                    };
                    *slot(i_slot) = *x.at(entry.b, channel, l - kept + i);
                }
            }
        }
    }
}
