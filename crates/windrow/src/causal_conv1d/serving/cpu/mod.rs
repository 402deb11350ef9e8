//! Serving on the CPU. A task goes through the tokens of a sequence, a block of channels at a time.
//!
//! It copies window and tokens to a tile whose rows are tokens. So `y` may be x itself, and states can be copied from the
//! tile. The later tokens of a long sequence are computed in place, unless y is x.

mod block;
mod tree;

use super::CausalConv1dServingSpec;
use super::entries::{Entry, Lookup, States};
use super::spec::Sizes;
use crate::causal_conv1d::HeadNorm;
use crate::causal_conv1d::cpu::shared::kernel::{
    Step, TOKENS, along_channels, along_tokens, next_token,
};
use crate::causal_conv1d::cpu::shared::operand::Staged;
use crate::causal_conv1d::cpu::shared::store::Sum;
use crate::causal_conv1d::cpu::shared::{GROUP, Heads, Operand, Outputs, Parameters};
use crate::causal_conv1d::split::Split;
use crate::cpu::{
    Isa, Kernel, SendPtr, Simd, SimdElement, dispatch, last_level_cache, parallel_for_workers,
};
use crate::{Activation, Error, Result, TensorMut};
use block::Block;
use std::ops::Range;

/// The tokens of a tile.
const TILE: usize = 16;
/// The channels of a tile.
const LANES: usize = 256;
/// The number of tokens of a long sequence that are computed before their heads are divided by their norm.
const PIECE: usize = 64;
/// The largest number of channels of a task of long sequences, whose weights are laid out together.
const CHANNELS: usize = 1024;
/// The largest number of channels of a task of short sequences.
const SHORT_CHANNELS: usize = 2048;
/// The number of elements of short sequences that one thread computes before others would have woken up.
const FEW: usize = 4 * 4096;

/// The division of a call into tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    sizes: Sizes,
    split: Split,
    activation: Activation,
    norm: Option<HeadNorm>,
    /// True if x and y do not fit in the cache.
    stream: bool,
    threads: usize,
    /// The channels of a task.
    channels: usize,
    /// The number of parts into which the sequences are divided.
    parts: usize,
    /// The bytes of scratch memory for one thread.
    scratch: usize,
}

/// The tensors that a call reads and writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands<'a, T> {
    pub x: Operand<T>,
    pub outputs: Outputs<T>,
    pub in_place: bool,
    pub conv_states: Operand<T>,
    pub windows: Option<Windows<T>>,
    /// The parent of each token of x, if tokens are trees.
    pub parents: &'a [u16],
    pub parameters: Parameters<'a>,
    pub lookup: Lookup<'a>,
    pub entries: &'a [Entry],
    /// The number of tokens of x that belong to a sequence.
    pub tokens: usize,
}

/// The windows after tokens [slots, steps, d, columns].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows<T> {
    first: SendPtr<T>,
    strides: [isize; 4],
}

impl<T: SimdElement> Windows<T> {
    pub(crate) fn new(view: &mut TensorMut<'_>) -> Self {
        debug_assert_eq!(view.dtype(), T::DTYPE);
        let strides = std::array::from_fn(|i| view.strides()[i]);
        Windows { first: SendPtr(view.as_mut_ptr().cast()), strides }
    }

    /// The window after token `t` of a slot, from a channel on; inside the tensor if the indices are.
    #[inline(always)]
    fn at(&self, slot: usize, t: usize, channel: usize) -> Block<T> {
        let [slots, steps, channels, columns] = self.strides;
        let first = slot as isize * slots + t as isize * steps + channel as isize * channels;
        let at = self.first.get().wrapping_offset(first);
        Block { at, token: columns, channel: channels }
    }
}

/// The number of rows of a tile: the window, the window of a token of a tree, the tokens, and their y.
fn tile_rows(history: usize) -> Option<usize> {
    history.checked_mul(2)?.checked_add(2 * TILE)
}

impl Walk {
    pub(crate) fn new(
        spec: &CausalConv1dServingSpec,
        sizes: Sizes,
        threads: usize,
    ) -> Result<Self> {
        let (activation, norm, element) = (spec.activation, spec.norm, spec.x.dtype.size());
        let split = Split::of(spec.outputs());
        let problem = &sizes.problem;
        if problem.is_empty() {
            let (stream, threads, scratch) = (false, 1, 0);
            let (channels, parts) = (GROUP, 1);
            return Ok(Walk {
                sizes,
                split,
                activation,
                norm,
                stream,
                threads,
                channels,
                parts,
                scratch,
            });
        }
        let d = problem.d;
        let work = problem.b * problem.l * d;
        // Long sequences differ in length, so dividing their channels is more even. States of short sequences lie apart
        // from each other, and memory is fast along rows of channels, so sequences are divided.
        let is_short = problem.b * problem.l <= sizes.sequences.saturating_mul(TILE);
        let (tasks, across, most) = if is_short {
            let tasks = if work < FEW { 1 } else { (work / 1024).clamp(1, threads) };
            (tasks, tasks.div_ceil(sizes.sequences), SHORT_CHANNELS)
        } else {
            // A task of this number of elements takes a few microseconds.
            let tasks = (work / 4096).clamp(1, 4 * threads);
            (tasks, tasks, CHANNELS)
        };
        let across = across.min(d.div_ceil(64));
        let channels = d.div_ceil(across.max(d.div_ceil(most))).next_multiple_of(GROUP);
        let channels = HeadNorm::whole(norm, channels, d);
        let blocks = split.blocks(channels);
        // If short sequences have more blocks of channels than threads need, blocks come one after the other.
        let parts = tasks.div_ceil(if is_short { across } else { blocks });
        let parts = parts.min(sizes.sequences).max(1);
        let threads = if tasks == 1 { 1 } else { threads.min(blocks * parts) };
        let scratch = (|| {
            let staged = Parameters::staged_len(problem.width, channels)?.checked_mul(4)?;
            let rows = tile_rows(problem.history())?;
            let scratch = rows.checked_mul(LANES * element)?.checked_add(staged)?;
            let scratch = scratch.checked_next_multiple_of(64)?;
            scratch.checked_mul(threads).map(|_| scratch)
        })();
        let scratch = scratch.ok_or_else(|| Error::SizeOverflow {
            what: "workspace",
            detail: format!("width {}, {channels} channels", problem.width),
        })?;
        let stream = 2 * work * element > last_level_cache();
        Ok(Walk { sizes, split, activation, norm, stream, threads, channels, parts, scratch })
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        self.scratch * self.threads
    }

    /// The sizes of tasks and the number of threads in words.
    pub(crate) fn explain(&self) -> String {
        let Walk { channels, parts, threads, .. } = self;
        format!("{channels} channels a task, sequences in {parts} parts, {threads} threads")
    }

    /// # Safety
    /// Operands have the sizes and resolved entries. Nothing else accesses the outputs and the states; y may be x if `in_place`.
    /// `scratch` holds [`Walk::workspace_bytes`] bytes, aligned to 64.
    pub(crate) unsafe fn run<T: SimdElement>(
        &self,
        isa: Isa,
        operands: &Operands<'_, T>,
        scratch: *mut u8,
    ) {
        let (outputs, sequences) = (&operands.outputs, operands.entries.len());
        let blocks = self.split.blocks(self.channels);
        let scratch = SendPtr(scratch);
        parallel_for_workers(self.threads, blocks * self.parts, |worker, task| {
            let (part, block) = (task / blocks, task % blocks);
            let (output, channels) = self.split.block(self.channels, block);
            let y = *outputs.get(output);
            let norm = self.norm.filter(|_| HeadNorm::takes(output));
            let sequences = sequences * part / self.parts..sequences * (part + 1) / self.parts;
            let scratch = scratch.get().wrapping_add(worker * self.scratch);
            let is_last = part + 1 == self.parts;
            let task =
                Task { plan: self, operands, y, norm, channels, sequences, is_last, scratch };
            dispatch(isa, task);
        });
    }
}

/// A task: some channels of some sequences. Only [`Walk::run`] makes tasks, and guarantees that their pointers are
/// valid.
struct Task<'a, T> {
    plan: &'a Walk,
    operands: &'a Operands<'a, T>,
    /// The output that has the channels.
    y: Operand<T>,
    norm: Option<HeadNorm>,
    channels: Range<usize>,
    sequences: Range<usize>,
    /// True if it has the last sequences, and so the tokens after them.
    is_last: bool,
    scratch: *mut u8,
}

/// A sequence in some channels.
#[derive(Clone, Copy)]
struct Part<'a> {
    i: usize,
    entry: &'a Entry,
    states: &'a States,
    /// The range of channels: the first, and their number.
    channel: usize,
    lanes: usize,
    /// The norm, if the part consists of whole heads, which are divided as soon as they are computed.
    norm: Option<HeadNorm>,
}

impl<T: SimdElement> Kernel for Task<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Task { plan, operands, channels, sequences, .. } = &self;
        let problem = &plan.sizes.problem;
        let (y, first) = (&self.y, channels.start);
        // SAFETY: `Walk::run` promises operands that have the tokens, and scratch memory that holds the parameters and
        // behind them a tile.
        unsafe {
            let staged =
                operands.parameters.stage(s, problem, channels.clone(), self.scratch.cast());
            let rows = tile_rows(problem.history()).unwrap_or(0) * LANES * size_of::<T>();
            let tile = self.scratch.add((plan.scratch - rows) / 64 * 64).cast::<T>();
            for i in sequences.clone() {
                let entry = &operands.entries[i];
                let Some(states) = &entry.states else {
                    let y = Block::of(y, entry.row, first, entry.start);
                    y.clear(entry.tokens, channels.len());
                    continue;
                };
                let (channel, lanes, norm) = (first, channels.len(), None);
                let part = Part { i, entry, states, channel, lanes, norm };
                let ahead = if i + 1 < sequences.end { i + 1 } else { i };
                let stepped = self.step(s, &staged, part, &operands.entries[ahead]);
                let is_whole = |norm: &HeadNorm| stepped == 0 && LANES.is_multiple_of(norm.width());
                let norm = self.norm.filter(is_whole);
                for c in (stepped..channels.len()).step_by(LANES) {
                    let (channel, lanes) = (first + c, LANES.min(channels.len() - c));
                    let part = Part { i, entry, states, channel, lanes, norm };
                    match operands.lookup.has_trees() {
                        true => self.walk_tree(s, &staged.from(c), tile, part),
                        false => self.walk(s, &staged.from(c), tile, part),
                    }
                }
                if norm.is_none() {
                    self.normalise(s, Part { norm: self.norm, ..part }, 0..entry.tokens);
                }
            }
            // Tokens that belong to no sequence; there are none without boundaries.
            let (l, tokens) = (problem.l, operands.tokens);
            if self.is_last && tokens < l {
                Block::of(y, 0, first, tokens).clear(l - tokens, channels.len());
            }
        }
        if plan.stream {
            s.stream_fence();
        }
    }
}

impl<T: SimdElement> Task<'_, T> {
    /// True if y goes around the cache. What is read again does not.
    #[inline(always)]
    fn streams(&self) -> bool {
        self.plan.stream && !self.operands.in_place && self.norm.is_none()
    }

    /// Divides the heads of a part by their norm, if it has one.
    #[inline(always)]
    fn normalise<S: Simd>(&self, s: S, part: Part<'_>, tokens: Range<usize>) {
        let Part { entry, channel, lanes, norm: Some(norm), .. } = part else { return };
        let (channels, row) = (channel..channel + lanes, entry.row);
        let tokens = entry.start + tokens.start..entry.start + tokens.end;
        s.outlined(Heads { norm, y: &self.y, row, channels, tokens });
    }

    /// Computes a decoding step directly from state to state, if channels are neighbours in all tensors. Returns the number
    /// of channels that it computed, 0 for other calls; [`Task::walk`] computes the rest. `ahead` is the next sequence.
    ///
    /// # Safety
    /// As for [`Walk::run`].
    #[inline(always)]
    unsafe fn step<S: Simd>(&self, s: S, staged: &Staged, part: Part<'_>, ahead: &Entry) -> usize {
        let Task { plan, operands, y, .. } = self;
        let Part { entry, states, channel, lanes, .. } = part;
        let Operands { x, conv_states, windows, lookup, .. } = operands;
        let are_neighbours = [x, y, conv_states].iter().all(|of| of.strides[1] == 1);
        let is_more = windows.is_some() || lookup.has_drafts() || lookup.has_trees();
        let Some(column) = states.window else { return 0 };
        if entry.tokens != 1 || !are_neighbours || is_more || states.ends.count > 0 {
            return 0;
        }
        let stream = self.streams();
        let sum = Sum {
            width: plan.sizes.problem.width,
            dilation: 1,
            activation: plan.activation,
            stream,
        };
        let block = |state, column| Block::of(conv_states, state, channel, column);
        let window = block(states.read, column);
        let token = |entry: &Entry| x.at(entry.row, channel, entry.start).cast_const();
        let following = ahead.states.as_ref();
        let following = following.map_or(window, |of| block(of.read, of.window.unwrap_or(0)));
        let step = Step {
            window: (window.at.cast_const(), window.token),
            x: token(entry),
            y: y.at(entry.row, channel, entry.start),
            next: states.write.map(|write| block(write, 0)).map(|to| (to.at, to.token)),
            ahead: (following.at.cast_const(), token(ahead)),
        };
        // SAFETY: the token and both states exist; tokens of a state that is advanced lie before its window or in it.
        unsafe { next_token(s, sum, step, lanes, staged) }
    }

    #[inline(always)]
    unsafe fn walk<S: Simd>(&self, s: S, staged: &Staged, tile: *mut T, part: Part<'_>) {
        let Task { plan, operands, y, .. } = self;
        let Part { i, entry, states, channel, lanes, norm } = part;
        let Operands { x, conv_states, .. } = operands;
        let Entry { row, start, tokens, .. } = *entry;
        let problem = &plan.sizes.problem;
        let history = problem.history();
        let stream = self.streams();
        let sum = Sum { width: problem.width, dilation: 1, activation: plan.activation, stream };
        let state = |state: usize, column: usize| Block::of(conv_states, state, channel, column);
        let has_drafts = operands.lookup.has_drafts();
        // SAFETY: tokens, states and their columns exist; the tile has its rows of LANES.
        unsafe {
            if lanes < GROUP {
                tile.write_bytes(0, (history + TILE) * LANES);
            }
            match states.window {
                Some(column) => {
                    state(states.read, column).copy_to(s, Block::rows(tile, 0), history, lanes);
                }
                None => Block::rows(tile, 0).clear(history, lanes),
            }
            if let Some(write) = states.write.filter(|_| has_drafts) {
                let kept = history.saturating_sub(1);
                Block::rows(tile, 1).copy_to(s, state(write, 0), kept, lanes);
            }
            // The number of tokens that go through the tile: all, or those that depend on the window.
            let along_tokens_of_x = x.strides[2] == 1 && y.strides[2] == 1;
            let along_channels_of_x = x.strides[1] == 1 && y.strides[1] == 1 && lanes >= GROUP;
            let behind = tokens.saturating_sub(history);
            let is_direct = !operands.in_place
                && !has_drafts
                && operands.windows.is_none()
                && (along_tokens_of_x && behind >= S::LANES
                    || along_channels_of_x && behind >= TILE);
            let through_tile = if is_direct { history } else { tokens };
            let mut ends = Ends::of(states);
            let mut t = 0;
            while t < through_tile {
                let n = TILE.min(through_tile - t);
                let from = Block::of(x, row, channel, start + t);
                from.copy_to(s, Block::rows(tile, history), n, lanes);
                self.compute(s, sum, staged, tile, (part, t, n));
                if let Some(windows) = &operands.windows {
                    for k in 0..n {
                        let to = windows.at(states.slot, t + k, channel);
                        Block::rows(tile, k + 1).copy_to(s, to, history, lanes);
                    }
                }
                while let Some((end, column)) = ends.next_if(t + n) {
                    if let Some(write) = operands.lookup.state_at_end(i, column) {
                        Block::rows(tile, end - t).copy_to(s, state(write, 0), history, lanes);
                    }
                }
                if let Some(write) = states.write.filter(|_| has_drafts) {
                    // The first token of a filter without history is left out, as in every state of drafts.
                    let skipped = usize::from(history == 0 && t == 0);
                    let to = state(write, (history + t + skipped).saturating_sub(1));
                    Block::rows(tile, history + skipped).copy_to(s, to, n - skipped, lanes);
                }
                std::ptr::copy(tile.add(n * LANES), tile, history * LANES);
                t += n;
            }
            if is_direct {
                // A piece stays in the cache until its heads are divided. The last one is not shorter than others.
                let most = if norm.is_some() { 2 * PIECE } else { usize::MAX };
                while t < tokens {
                    let n = if tokens - t < most { tokens - t } else { PIECE };
                    let from = Block::of(x, row, channel, start + t - history);
                    let (from_at, to) =
                        (from.at.cast_const(), Block::of(y, row, channel, start + t));
                    if along_tokens_of_x {
                        let (from, to) = ((from_at, from.channel), (to.at, to.channel));
                        along_tokens(s, sum, from, to, (n, lanes), staged);
                    } else {
                        let (from, to) = ((from_at, from.token), (to.at, to.token));
                        along_channels::<S, T, TOKENS>(s, sum, from, to, (n, lanes), staged);
                    }
                    self.normalise(s, part, t..t + n);
                    t += n;
                }
                while let Some((end, column)) = ends.next_if(tokens) {
                    if let Some(write) = operands.lookup.state_at_end(i, column) {
                        let from = Block::of(x, row, channel, start + end - history);
                        from.copy_to(s, state(write, 0), history, lanes);
                    }
                }
            }
            if let Some(write) = states.write.filter(|_| !has_drafts) {
                let last = match is_direct {
                    true => Block::of(x, row, channel, start + tokens - history),
                    false => Block::rows(tile, 0),
                };
                last.copy_to(s, state(write, 0), history, lanes);
            }
        }
    }

    /// Computes `y` of the `n` tokens in the tile, the first of which is token `t` of its sequence.
    #[inline(always)]
    unsafe fn compute<S: Simd>(
        &self,
        s: S,
        sum: Sum,
        staged: &Staged,
        tile: *mut T,
        (part, t, n): (Part<'_>, usize, usize),
    ) {
        let Part { entry, channel, lanes, .. } = part;
        let history = self.plan.sizes.problem.history();
        let y = Block::of(&self.y, entry.row, channel, entry.start + t);
        let own = Block::rows(tile, history + TILE);
        // Vectors are as wide as a group at most.
        let to = if y.channel == 1 && lanes >= GROUP { y } else { own };
        let shape = (n, lanes.max(GROUP));
        let from = (tile.cast_const(), LANES as isize);
        // SAFETY: the tile has these rows, and y the tokens.
        unsafe {
            if n < TOKENS {
                along_channels::<S, T, 1>(s, sum, from, (to.at, to.token), shape, staged);
            } else {
                along_channels::<S, T, TOKENS>(s, sum, from, (to.at, to.token), shape, staged);
            }
            if to.at == own.at {
                own.copy_to(s, y, n, lanes);
            }
        }
        self.normalise(s, part, t..t + n);
    }
}

/// The block ends that are still to come.
struct Ends {
    next: usize,
    step: usize,
    column: usize,
    left: usize,
}

impl Ends {
    fn of(states: &States) -> Self {
        let super::entries::Ends { first, step, count, column } = states.ends;
        Ends { next: first, step, column, left: count }
    }

    /// The next one, if it is among the first `tokens` tokens, with its column.
    fn next_if(&mut self, tokens: usize) -> Option<(usize, usize)> {
        if self.left == 0 || self.next > tokens {
            return None;
        }
        let found = (self.next, self.column);
        (self.next, self.column, self.left) =
            (self.next + self.step, self.column + 1, self.left - 1);
        Some(found)
    }
}
