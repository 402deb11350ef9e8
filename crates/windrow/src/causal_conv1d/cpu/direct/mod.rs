//! The direct algorithm: each output is a sum over the taps, formed in registers.
//!
//! If tokens are neighbours in memory, a vector holds tokens of one channel ([`along_tokens`]). If channels are
//! neighbours, a vector holds channels of one token ([`along_channels`]). This kernel computes several tokens at once,
//! so that each is loaded only once. Everything else (the first tokens of a sequence, other strides, fewer
//! elements than a vector) is copied to a [`Tile`], from which [`along_channels`] computes it. With a dilation, a tile
//! holds the tokens of one *phase*: those whose distances are multiples of the dilation.

pub(crate) mod gradients;

use super::shared::kernel::{TOKENS, along_channels, along_tokens};
use super::shared::store::Sum;
use super::shared::{GROUP, Heads, Inputs, Operand, Outputs, Parameters, Tile, each, spread};
use crate::causal_conv1d::sequences::Run;
use crate::causal_conv1d::split::Split;
use crate::causal_conv1d::{CausalConv1dSpec, HeadNorm, Problem};
use crate::cpu::{
    Isa, Kernel, SendPtr, Simd, SimdElement, dispatch, last_level_cache, parallel_for_workers,
};
use crate::{Activation, Error, Result};
use std::ops::Range;

/// The number of tokens that pass through a tile at once; with a dilation, of each phase.
const TILE: usize = 32;

/// The dimension along which vectors lie. For `Staged`, elements are first copied to a tile, where vectors lie along
/// channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Tokens,
    Channels,
    Staged,
}

/// The division of a convolution into tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forward {
    problem: Problem,
    split: Split,
    activation: Activation,
    norm: Option<HeadNorm>,
    direction: Direction,
    /// True to write y around the cache, because x and y do not fit in it.
    stream: bool,
    threads: usize,
    /// The numbers of channels and tokens of a task.
    channels: usize,
    tokens: usize,
    /// Bytes of scratch memory for one thread.
    scratch: usize,
}

impl Forward {
    /// The division for a spec. `task` has the channels and tokens of a parallel task; the cost model chooses those that
    /// are `None`.
    pub(crate) fn new(
        spec: &CausalConv1dSpec,
        problem: Problem,
        threads: usize,
        task: [Option<usize>; 2],
    ) -> Result<Self> {
        let Problem { b, d, l, .. } = problem;
        let (activation, norm, element) = (spec.activation, spec.norm, spec.x.dtype.size());
        let split = Split::of(spec.outputs());
        // True if elements of this dimension are neighbours in all tensors.
        let neighbours =
            |i: usize| spec.x.strides()[i] == 1 && spec.outputs().all(|y| y.strides()[i] == 1);
        let direction = if neighbours(2) && l >= GROUP {
            Direction::Tokens
        } else if neighbours(1) && d >= GROUP {
            Direction::Channels
        } else {
            Direction::Staged
        };
        let total = b * d * l;
        // A task of 8192 elements takes some microseconds; less is not worth handing out.
        let work = (total / (8 * threads)).clamp(8192, 65536);
        let (channels, tokens) = match direction {
            Direction::Channels => {
                let channels = d.min(512).next_multiple_of(GROUP);
                (channels, (work / channels).max(4 * problem.history()).max(64))
            }
            _ => {
                let tokens = l.clamp(1, 2048.max(16 * problem.history()));
                ((work / tokens).min(d).next_multiple_of(GROUP).max(GROUP), tokens)
            }
        };
        let channels =
            task[0].map_or(channels, |most| most.min(d).next_multiple_of(GROUP).max(GROUP));
        let channels = HeadNorm::whole(norm, channels, d);
        let tokens = task[1].map_or(tokens, |most| most.clamp(1, l.max(1)));
        let tasks = b * split.blocks(channels) * l.div_ceil(tokens);
        let threads = if total <= 8192 { 1 } else { threads.min(tasks) };
        let scratch = (|| {
            let staged = Parameters::staged_len(problem.width, channels)?.checked_mul(4)?;
            let rows = problem.width.checked_add(2 * TILE - 1)?;
            rows.checked_mul(GROUP * element)?.checked_add(staged)
        })();
        let overflow = || Error::SizeOverflow {
            what: "workspace",
            detail: format!("width {}, {channels} channels", problem.width),
        };
        let scratch = if problem.is_empty() { Some(0) } else { scratch };
        let scratch = scratch.ok_or_else(overflow)?.next_multiple_of(64);
        scratch.checked_mul(threads).ok_or_else(overflow)?;
        let stream = 2 * total * element > last_level_cache();
        Ok(Forward {
            problem,
            split,
            activation,
            norm,
            direction,
            stream,
            threads,
            channels,
            tokens,
            scratch,
        })
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        self.scratch * self.threads
    }

    /// The numbers of channels and tokens of a task, and of threads.
    pub(crate) fn task(&self) -> [usize; 3] {
        [self.channels, self.tokens, self.threads]
    }

    /// The direction of vectors, the size of tasks and the number of threads, in words.
    pub(crate) fn explain(&self) -> String {
        let direction = match self.direction {
            Direction::Tokens => "vectors along tokens",
            Direction::Channels => "vectors along channels",
            Direction::Staged => "tokens staged in tiles",
        };
        let Forward { channels, tokens, threads, .. } = self;
        format!("{direction}, {channels} channels x {tokens} tokens a task, {threads} threads")
    }

    /// Computes all outputs.
    ///
    /// # Safety
    /// Operands must have the sizes and strides of the spec given to [`Forward::new`]. Nothing else may access the
    /// memory of the outputs. `scratch` must hold [`Forward::workspace_bytes`] bytes, aligned to 64.
    pub(crate) unsafe fn run<T: SimdElement>(
        &self,
        isa: Isa,
        inputs: &Inputs<'_, T>,
        outputs: &Outputs<T>,
        scratch: *mut u8,
    ) {
        let Problem { b, l, .. } = self.problem;
        if self.problem.is_empty() {
            return;
        }
        let [blocks, chunks] = [self.split.blocks(self.channels), l.div_ceil(self.tokens)];
        let scratch = SendPtr(scratch);
        parallel_for_workers(self.threads, b * blocks * chunks, |worker, task| {
            // Neighbouring tasks are neighbours in memory.
            let (b, block, chunk) = match self.direction {
                Direction::Channels => {
                    (task / blocks / chunks, task % blocks, task / blocks % chunks)
                }
                _ => (task / chunks / blocks, task / chunks % blocks, task % chunks),
            };
            let (output, channels) = self.split.block(self.channels, block);
            let token = chunk * self.tokens;
            dispatch(
                isa,
                Task {
                    plan: self,
                    inputs,
                    y: *outputs.get(output),
                    norm: self.norm.filter(|_| HeadNorm::takes(output)),
                    b,
                    channels,
                    tokens: token..(token + self.tokens).min(l),
                    scratch: scratch.get().wrapping_add(worker * self.scratch),
                },
            );
        });
    }
}

/// A range of tokens and a range of channels of one row. Only [`Forward::run`] makes such a task, and it guarantees
/// that the pointers are valid.
struct Task<'a, T> {
    plan: &'a Forward,
    inputs: &'a Inputs<'a, T>,
    y: Operand<T>,
    norm: Option<HeadNorm>,
    b: usize,
    channels: Range<usize>,
    tokens: Range<usize>,
    scratch: *mut u8,
}

impl<T: SimdElement> Kernel for Task<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let problem = &self.plan.problem;
        let sum = Sum {
            width: problem.width,
            dilation: problem.dilation,
            activation: self.plan.activation,
            // What is read again stays in the cache.
            stream: self.plan.stream && self.norm.is_none(),
        };
        let (history, dilation) = (problem.history(), problem.dilation);
        let Inputs { tokens, parameters } = self.inputs;
        // SAFETY: `Forward::run` promises operands, and scratch memory that holds the parameters and two tiles.
        unsafe {
            let staged = parameters.stage(s, problem, self.channels.clone(), self.scratch.cast());
            let rows = problem.width - 1 + 2 * TILE;
            let used = self.plan.scratch - rows * GROUP * size_of::<T>();
            let x_tile = Tile(self.scratch.add(used / 64 * 64).cast::<T>());
            let y_tile = Tile(x_tile.row(problem.width - 1 + TILE));
            // Rows of a tile are neighbouring taps apart.
            let staged_sum = Sum { dilation: 1, ..sum };
            let mut t = self.tokens.start;
            let mut run = Run::EMPTY;
            while t < self.tokens.end {
                if t >= run.end {
                    run = tokens.sequences.run(self.b, t, history, self.tokens.end);
                }
                if run.sequence < 0 {
                    self.write_zeros(t..run.end);
                    t = run.end;
                    continue;
                }
                let (direction, end) = self.piece::<S>(t, &run);
                let (n, first) = (end - t, self.channels.start);
                let ([_, x_channel, x_token], [_, y_channel, y_token]) =
                    (tokens.x.strides, self.y.strides);
                if direction == Direction::Staged {
                    for c in (0..self.channels.len()).step_by(GROUP) {
                        let lanes = GROUP.min(self.channels.len() - c);
                        let staged = staged.from(c);
                        for t in t..end.min(t + dilation) {
                            let n = each(end - t, dilation);
                            let rows = (t as isize - history as isize, problem.width - 1 + n);
                            x_tile.load(tokens, (self.b, &run), rows, (first + c, lanes));
                            let from = (x_tile.0.cast_const(), GROUP as isize);
                            let (to, shape) = ((y_tile.0, GROUP as isize), (n, GROUP));
                            along_channels::<S, T, TOKENS>(s, staged_sum, from, to, shape, &staged);
                            let y = self.y.at(self.b, first + c, t);
                            y_tile.write(y, spread(self.y.strides, dilation), n, lanes);
                        }
                    }
                } else {
                    let x = tokens.x.at(self.b, first, t - history).cast_const();
                    let (y, shape) = (self.y.at(self.b, first, t), (n, self.channels.len()));
                    if direction == Direction::Tokens {
                        let (x, y) = ((x, x_channel), (y, y_channel));
                        along_tokens(s, sum, x, y, shape, &staged);
                    } else {
                        let (x, y) = ((x, x_token), (y, y_token));
                        along_channels::<S, T, TOKENS>(s, sum, x, y, shape, &staged);
                    }
                }
                t = end;
            }
        }
        if let Some(norm) = self.norm {
            let Task { y, b: row, channels, tokens, .. } = self;
            s.outlined(Heads { norm, y: &y, row, channels, tokens });
        } else if self.plan.stream {
            s.stream_fence();
        }
    }
}

impl<T: SimdElement> Task<'_, T> {
    /// The direction of vectors for the tokens of `run` from token `t` on, and the end of the tokens for which it
    /// holds.
    #[inline(always)]
    fn piece<S: Simd>(&self, t: usize, run: &Run) -> (Direction, usize) {
        let head = (run.start + self.plan.problem.history()).min(run.end);
        let tile = t + TILE * self.plan.problem.dilation;
        let (end, n) = (run.end, run.end - t);
        let enough = match self.plan.direction {
            Direction::Tokens => n >= S::LANES,
            Direction::Channels => n >= TOKENS && self.channels.len() >= S::LANES,
            Direction::Staged => false,
        };
        if t < head {
            (Direction::Staged, head.min(tile))
        } else if enough {
            (self.plan.direction, end)
        } else {
            (Direction::Staged, end.min(tile))
        }
    }

    /// Writes zeros, the outputs of padding.
    #[inline(always)]
    unsafe fn write_zeros(&self, tokens: Range<usize>) {
        for c in self.channels.clone() {
            for t in tokens.clone() {
                // SAFETY: an element of y.
                unsafe { self.y.at(self.b, c, t).write(T::default()) };
            }
        }
    }
}
