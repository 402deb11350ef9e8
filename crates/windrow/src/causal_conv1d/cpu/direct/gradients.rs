//! Gradients of the depthwise convolution.
//!
//! Everything passes through channels-last tiles. The sum before the activation is computed again from x. Sums over
//! tokens are formed for pieces of fixed length, which are added in order at the end. So the result does not depend on
//! the number of threads.

use super::super::shared::operand::Staged;
use super::super::shared::{
    GROUP, Gradients, Inputs, Operand, Parameters, Tile, Tokens, each, spread, write,
};
use crate::causal_conv1d::Problem;
use crate::causal_conv1d::sequences::{Run, Source};
use crate::cpu::math::activate_grad;
use crate::cpu::{Isa, Kernel, SendPtr, Simd, SimdElement, dispatch, parallel_for_workers};
use crate::{Activation, Error, Result, TensorMut};
use std::ops::Range;

/// Tokens of a tile.
const TILE: usize = 64;
/// Taps whose weight gradients are summed at once.
const TAPS: usize = 4;

/// The largest number of tokens of a task.
fn most_tokens(problem: &Problem) -> usize {
    problem.width.saturating_mul(8).saturating_mul(problem.dilation).max(1024)
}

/// The largest number of additions, one after the other, that sum a task's tokens: of a tile, then of the tiles.
pub(crate) fn most_additions(problem: &Problem) -> usize {
    let (tokens, phases) = (most_tokens(problem), problem.dilation);
    TILE + phases.min(tokens).saturating_mul(tokens.div_ceil(phases).div_ceil(TILE))
}

/// The division of a convolution's gradients into tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backward {
    problem: Problem,
    activation: Activation,
    threads: usize,
    /// Tokens of a task.
    tokens: usize,
    /// Elements of f32 scratch memory for one thread, and for all partial sums.
    scratch: usize,
    partials: usize,
}

impl Backward {
    pub(crate) fn new(problem: Problem, activation: Activation, threads: usize) -> Result<Self> {
        let Problem { b, d, l, width, .. } = problem;
        let tokens = l.clamp(1, most_tokens(&problem));
        let groups = d.div_ceil(GROUP);
        let parts = b * l.div_ceil(tokens);
        // Each owns scratch memory. States have a task for each sequence, which may be a token long.
        let threads = threads.min(groups.saturating_mul(b.saturating_mul(l))).max(1);
        let sizes = || {
            let row_sums = width.checked_add(1)?.checked_mul(GROUP)?;
            let partials = row_sums.checked_mul(groups)?.checked_mul(parts)?;
            // Rows of the tiles at their widest type, and parameters.
            let rows = width.checked_mul(4)?.checked_add(4 * TILE + TAPS)?;
            let rows = rows.checked_mul(GROUP)?;
            let scratch = rows.checked_add(Parameters::staged_len(width, GROUP)?)?;
            let total = scratch.checked_mul(threads)?.checked_add(partials)?.checked_mul(4)?;
            (total <= isize::MAX as usize).then_some((scratch, partials))
        };
        let overflow = || Error::SizeOverflow {
            what: "workspace",
            detail: format!("width {width}, {groups} groups of channels, {parts} parts"),
        };
        // Without channels the width can be anything.
        let (scratch, partials) = if d == 0 { (0, 0) } else { sizes().ok_or_else(overflow)? };
        Ok(Backward { problem, activation, threads, tokens, scratch, partials })
    }

    pub(crate) fn workspace_bytes(&self) -> usize {
        (self.scratch * self.threads + self.partials) * 4
    }

    /// # Safety
    /// Operands have the problem's sizes, `dweight` [d, width] and `dbias` [d] are f32 or T. Nothing else accesses the
    /// outputs. `scratch` holds [`Backward::workspace_bytes`] bytes, aligned to 64.
    pub(crate) unsafe fn run<T: SimdElement>(
        &self,
        isa: Isa,
        inputs: &Inputs<'_, T>,
        gradients: &Gradients<T>,
        (dweight, dbias): (Option<TensorMut<'_>>, Option<TensorMut<'_>>),
        scratch: *mut u8,
    ) {
        let Problem { b, d, l, width, .. } = self.problem;
        if d == 0 {
            // No gradient has elements, and other sizes can be larger than any memory.
            return;
        }
        let groups = d.div_ceil(GROUP);
        let chunks = l.div_ceil(self.tokens);
        let row_sums = (width + 1) * GROUP;
        let scratch = SendPtr(scratch.cast::<f32>());
        let partials = SendPtr(scratch.get().wrapping_add(self.scratch * self.threads));
        let sum = dweight.is_some() || dbias.is_some();
        let lanes = |group: usize| (group * GROUP, GROUP.min(d - group * GROUP));
        if sum || gradients.dx.is_some() {
            parallel_for_workers(self.threads, b * chunks * groups, |worker, task| {
                let (b, group, chunk) =
                    (task / chunks / groups, task / chunks % groups, task % chunks);
                let first = chunk * self.tokens;
                let part = (group * self.problem.b + b) * chunks + chunk;
                let task = Task {
                    plan: self,
                    inputs,
                    gradients,
                    b,
                    lanes: lanes(group),
                    to: gradients.dx.map(|dx| (dx, b)),
                    tokens: first..(first + self.tokens).min(l),
                    state: None,
                    partials: sum.then(|| partials.get().wrapping_add(part * row_sums)),
                    scratch: scratch.get().wrapping_add(worker * self.scratch),
                };
                dispatch(isa, task);
            });
        }
        let history = self.problem.history();
        if let Some(states) = gradients.dinitial_states.filter(|_| history > 0) {
            let sequences = &inputs.tokens.sequences;
            let rows = sequences.state_rows(b);
            parallel_for_workers(self.threads, rows * groups, |worker, task| {
                let (row, group) = (task / groups, task % groups);
                let (b, run) = sequences.state_run(row, false);
                let task = Task {
                    plan: self,
                    inputs,
                    gradients,
                    b,
                    lanes: lanes(group),
                    to: Some((states, row)),
                    tokens: 0..history,
                    state: Some((run, run.start as isize - history as isize)),
                    partials: None,
                    scratch: scratch.get().wrapping_add(worker * self.scratch),
                };
                dispatch(isa, task);
            });
        }
        let total = |channel: usize, k: usize| {
            let (group, lane) = (channel / GROUP, channel % GROUP);
            let parts = b * chunks;
            let sums = (0..parts).map(|part| {
                let i = (group * parts + part) * row_sums + k * GROUP + lane;
                // SAFETY: every part has been written above.
                f64::from(unsafe { *partials.get().add(i) })
            });
            sums.sum::<f64>()
        };
        if let Some(mut dweight) = dweight {
            for channel in 0..d {
                for k in 0..width {
                    write(&mut dweight, &[channel, k], total(channel, k));
                }
            }
        }
        if let Some(mut dbias) = dbias {
            for channel in 0..d {
                write(&mut dbias, &[channel], total(channel, width));
            }
        }
    }
}

/// The gradients at some positions of one row and group of channels. Only [`Backward::run`] makes it, and guarantees
/// that its pointers are valid.
struct Task<'a, T> {
    plan: &'a Backward,
    inputs: &'a Inputs<'a, T>,
    gradients: &'a Gradients<T>,
    b: usize,
    /// First channel and how many.
    lanes: (usize, usize),
    /// The destination of the gradients, and the tokens of it.
    to: Option<(Operand<T>, usize)>,
    tokens: Range<usize>,
    /// The run of all positions, if they are those of a state, and the position of the state's
    /// first token.
    state: Option<(Run, isize)>,
    /// The destination of the sums for dweight and dbias.
    partials: Option<*mut f32>,
    scratch: *mut f32,
}

impl<T: SimdElement> Kernel for Task<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (problem, tokens) = (&self.plan.problem, &self.inputs.tokens);
        let (history, dilation) = (problem.history(), problem.dilation);
        let row_sums = (problem.width + 1) * GROUP;
        // SAFETY: the scratch memory holds parameters and tiles; outputs have the tokens.
        unsafe {
            let channels = self.lanes.0..self.lanes.0 + self.lanes.1;
            let staged = self.inputs.parameters.stage(s, problem, channels, self.scratch);
            let scratch = self.scratch.add((2 * problem.width + 1) * GROUP);
            let tiles = Tiles::new(scratch, problem.width - 1);
            if let Some(partials) = self.partials {
                partials.write_bytes(0, row_sums);
            }
            let (mut t, end) = (self.tokens.start, self.tokens.end);
            let mut run = Run::EMPTY;
            while t < end {
                let (first, piece_end) = match &self.state {
                    Some((state_run, first)) => {
                        run = *state_run;
                        (first + t as isize, end)
                    }
                    None => {
                        if t >= run.end {
                            run = tokens.sequences.run(self.b, t, history, end);
                        }
                        (t as isize, run.end)
                    }
                };
                let tokens = (TILE * dilation).min(piece_end - t);
                for phase in 0..dilation.min(tokens) {
                    let n = each(tokens - phase, dilation);
                    self.piece(s, &run, (first + phase as isize, n), &staged, &tiles);
                    if let Some((to, row)) = self.to {
                        let (at, strides) =
                            (to.at(row, self.lanes.0, t + phase), spread(to.strides, dilation));
                        tiles.dx.write(at, strides, n, self.lanes.1);
                    }
                }
                t += tokens;
            }
        }
    }
}

/// The tiles of one thread; rows are positions, with a dilation those of one phase.
struct Tiles<T> {
    /// The inputs from width - 1 before the first position to width - 1 after the last.
    x: Tile<T>,
    /// The rows from the first position to width - 1 after the last: dy, then the gradient before the activation.
    dy: Tile<T>,
    g: Tile<f32>,
    dx: Tile<T>,
}

impl<T: SimdElement> Tiles<T> {
    /// # Safety
    /// `scratch` holds `4 * (TILE + width) + TAPS` rows of f32, and `before` is `width - 1`.
    unsafe fn new(scratch: *mut f32, before: usize) -> Self {
        // SAFETY: promised by the caller; f32 is the widest type.
        unsafe {
            let x = Tile(scratch);
            let dy = Tile(x.row(TILE + 2 * before + TAPS));
            let g = Tile(dy.row(TILE + before));
            let dx = g.row(TILE + before);
            Tiles { x: Tile(x.0.cast()), dy: Tile(dy.0.cast()), g, dx: Tile(dx.cast()) }
        }
    }
}

impl<T: SimdElement> Task<'_, T> {
    /// Fills `tiles.dx` with the gradients at `n` positions of a phase from `first` on, and adds to the partial sums.
    #[inline(always)]
    unsafe fn piece<S: Simd>(
        &self,
        s: S,
        run: &Run,
        (first, n): (isize, usize),
        staged: &Staged,
        tiles: &Tiles<T>,
    ) {
        let tokens = &self.inputs.tokens;
        let (history, dilation) = (tokens.history, tokens.dilation);
        let before = self.plan.problem.width - 1;
        // SAFETY: the tiles have the rows; parameters are those of the group.
        unsafe {
            let start = first - history as isize;
            tiles.x.load(tokens, (self.b, run), (start, n + 2 * before), self.lanes);
            let dy = Tokens { x: self.gradients.dy, states: None, ..*tokens };
            tiles.dy.load(&dy, (self.b, run), (first, n + before), self.lanes);
            for r in 0..n + before {
                let p = first + (r * dilation) as isize;
                // What later tokens of other sequences, padding and states hold is not this run's.
                if run.sequence >= 0 && (run.start as isize..run.end as isize).contains(&p)
                    || matches!(tokens.sequences.source(self.b, run, p, history), Source::Token(_))
                {
                    self.before_activation(s, r, staged, tiles);
                } else {
                    tiles.g.row(r).write_bytes(0, GROUP);
                }
            }
            if let Some(partials) = self.partials {
                self.add_sums(s, n, tiles, partials);
            }
            if self.to.is_some() {
                for r in 0..n {
                    let p = first + (r * dilation) as isize;
                    self.input_gradient(s, run, p, r, staged, tiles);
                }
            }
        }
    }

    /// Row `r` of g: dy times the derivative of the activation.
    #[inline(always)]
    unsafe fn before_activation<S: Simd>(&self, s: S, r: usize, staged: &Staged, tiles: &Tiles<T>) {
        for v in (0..GROUP).step_by(S::LANES) {
            // SAFETY: rows r..r + width of x, and row r of dy and g, are in the tiles.
            unsafe {
                let mut g = T::load(s, tiles.dy.row(r).add(v));
                if self.plan.activation != Activation::Identity {
                    let mut sum = s.load(staged.bias.add(v));
                    for k in 0..self.plan.problem.width {
                        let tap = s.load(staged.weight.add(k * staged.stride + v));
                        sum = s.mul_add(tap, T::load(s, tiles.x.row(r + k).add(v)), sum);
                    }
                    g = s.mul(g, activate_grad(s, self.plan.activation, sum));
                }
                s.store(tiles.g.row(r).add(v), g);
            }
        }
    }

    /// Adds the sums of `g * x` for each tap, and of g, over `n` rows.
    #[inline(always)]
    unsafe fn add_sums<S: Simd>(&self, s: S, n: usize, tiles: &Tiles<T>, partials: *mut f32) {
        let width = self.plan.problem.width;
        for v in (0..GROUP).step_by(S::LANES) {
            // SAFETY: x has TAPS - 1 rows more than the taps need; partials has width + 1 rows.
            unsafe {
                for k in (0..width).step_by(TAPS) {
                    let mut sums = [s.zero(); TAPS];
                    for r in 0..n {
                        let g = s.load(tiles.g.row(r).add(v));
                        for (i, sum) in sums.iter_mut().enumerate() {
                            let x = T::load(s, tiles.x.row(r + k + i).add(v));
                            *sum = s.mul_add(g, x, *sum);
                        }
                    }
                    for (i, sum) in sums.into_iter().take(width - k).enumerate() {
                        let to = partials.add((k + i) * GROUP + v);
                        s.store(to, s.add(s.load(to), sum));
                    }
                }
                let mut sum = s.zero();
                for r in 0..n {
                    sum = s.add(sum, s.load(tiles.g.row(r).add(v)));
                }
                let to = partials.add(width * GROUP + v);
                s.store(to, s.add(s.load(to), sum));
            }
        }
    }

    /// Row `r` of dx, position `p`.
    #[inline(always)]
    unsafe fn input_gradient<S: Simd>(
        &self,
        s: S,
        run: &Run,
        p: isize,
        r: usize,
        staged: &Staged,
        tiles: &Tiles<T>,
    ) {
        let tokens = &self.inputs.tokens;
        let mut dfinal = [0f32; GROUP];
        if let Some(states) = self.gradients.dfinal_states
            && let Some((row, j)) = tokens.sequences.final_entry(self.b, run, p, tokens.history)
        {
            for (lane, to) in dfinal.iter_mut().enumerate().take(self.lanes.1) {
                // SAFETY: an entry of the states.
                *to = unsafe { *states.at(row, self.lanes.0 + lane, j) }.to_f32();
            }
        }
        for v in (0..GROUP).step_by(S::LANES) {
            // SAFETY: rows r..r + width of g and row r of dx are in the tiles.
            unsafe {
                let mut dx = s.load(dfinal.as_ptr().add(v));
                let width = self.plan.problem.width;
                for k in 0..width {
                    let tap = s.load(staged.weight.add(k * staged.stride + v));
                    dx = s.mul_add(tap, s.load(tiles.g.row(r + width - 1 - k).add(v)), dx);
                }
                T::store(s, tiles.dx.row(r).add(v), dx);
            }
        }
    }
}
