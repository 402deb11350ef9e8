//! Winograd's algorithm for few input channels, in one pass.
//!
//! With few input channels the transforms of two dimensions, and the transposition around them, take longer than the
//! products. Here F(4, 3) is applied to rows of the image only, and the filter's columns are summed directly: half the
//! multiplications of the definition, and vectors over the pixels of a row in every stage. Products go from registers
//! through the output transform into rows in the first-level cache, and from there into y in whole cache lines that
//! were prefetched.

use super::super::method::{Prepared, Run};
use super::super::shared::epilogue::{self, Bounds, Epilogue};
use super::super::shared::rows::{Rows, zero_ahead};
use super::super::shared::{bias_len, stage_bias};
use super::{strides4, tolerance, transform};
use crate::TensorRef;
use crate::conv2d::winograd::TAPS;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Problem, Tile};
use crate::cpu::gemm::even_part;
use crate::cpu::math::activate_all;
use crate::cpu::{
    Isa, Kernel, MAX_LANES, SendPtr, Simd, SimdElement, array, dispatch, parallel_for_workers,
};
use crate::dtype::with_element;
use std::ops::Range;

/// Transformed along rows.
pub(in crate::conv2d::cpu) const TILE: Tile = Tile::F4;
/// Rows of a strip of outputs, and of its inputs.
const M: usize = TILE.m();
const ALPHA: usize = TILE.alpha();
/// Output channels that are finished together.
const PANEL: usize = 4;
/// Elements of a block's transformed input and results, which stay in the first-level cache.
const BLOCK_LEN: usize = 9 << 10;
/// Tasks for each thread, so that a late one does not keep the others waiting.
const TASKS_PER_THREAD: usize = 8;

/// A 3x3 convolution of stride and dilation 1 with one group.
#[derive(Clone, Debug)]
pub(super) struct WinogradFused {
    problem: Problem,
    threads: usize,
    isa: Isa,
    /// Parts of the output channels that are separate tasks.
    parts: usize,
    /// Columns of a block: whole rows where they fit.
    columns: usize,
}

/// Operands of a run.
struct Operands<'a> {
    /// [panel, c, filter column, position, channel of the panel]
    packed: &'a [f32],
    x: &'a TensorRef<'a>,
    epilogue: Epilogue,
    y: SendPtr<u8>,
    y_strides: [isize; 4],
}

// SAFETY: threads read `bias` and write separate elements of y.
unsafe impl Sync for Operands<'_> {}

impl Prepared for WinogradFused {
    fn configuration(&self) -> Conv2dConfiguration {
        Conv2dConfiguration::new(Conv2dAlgorithm::WinogradFused(TILE))
    }

    fn explain(&self) -> String {
        format!(
            "strips of {M} x {} pixels, {} parts of the channels, {PANEL} channels at once",
            self.columns, self.parts
        )
    }

    fn packed_width(&self) -> usize {
        PANEL
    }

    fn packed_len(&self) -> usize {
        self.panels() * self.panel_len()
    }

    fn workspace_bytes(&self) -> usize {
        let slots = self.threads.min(self.tasks()) * self.slot_len();
        (bias_len(self.problem.k) + slots) * size_of::<f32>()
    }

    fn pack(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        with_element!(w.dtype(), T => self.pack_from::<T>(w, packed));
    }

    fn tolerance(&self) -> f64 {
        tolerance(TILE)
    }

    fn tile(&self) -> Option<Tile> {
        Some(TILE)
    }

    fn run(&self, packed: &[f32], run: Run<'_, '_>) {
        let Run { x, bias, residual, activation, y, workspace, .. } = run;
        assert!(packed.len() >= self.packed_len(), "packed filter");
        assert!(workspace.len() >= self.workspace_bytes(), "workspace");
        let (bias, slots) = stage_bias(bias, self.problem.k, workspace);
        let operands = Operands {
            packed,
            x,
            epilogue: Epilogue { bias: bias.as_ptr(), residual, activation },
            y_strides: strides4(y.strides()),
            y: SendPtr(y.as_mut_ptr()),
        };
        let slots = SendPtr(slots.as_mut_ptr());
        parallel_for_workers(self.threads, self.tasks(), |worker, task| {
            // SAFETY: each worker has a slot of its own.
            let slot = unsafe { slots.get().add(worker * self.slot_len()) };
            let units = task * self.units_at_once()..(task + 1) * self.units_at_once();
            for unit in units.start..units.end.min(self.units()) {
                with_element!(x.dtype(), X => self.run_unit::<X>(&operands, unit, slot));
            }
        });
    }
}

impl WinogradFused {
    /// The method for a problem with [`Problem::is_winograd`].
    pub(super) fn new(problem: &Problem, isa: Isa, threads: usize) -> Self {
        debug_assert!(problem.is_winograd());
        let strips = problem.n * problem.oh.div_ceil(M);
        let parts = (threads * TASKS_PER_THREAD).div_ceil(strips.max(1));
        let parts = parts.clamp(1, problem.k.div_ceil(PANEL).max(1));
        WinogradFused {
            problem: *problem,
            threads,
            isa,
            parts: if threads == 1 { 1 } else { parts },
            columns: block_columns(problem),
        }
    }

    fn pack_from<W: SimdElement>(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        let Problem { c, k, .. } = self.problem;
        let transforms = TILE.transforms();
        let [stride_k, stride_c, stride_r, stride_s] = strides4(w.strides());
        let from = w.as_ptr().cast::<W>();
        let mut packed = packed.iter_mut();
        for panel in 0..self.panels() {
            for (c, s) in (0..c).flat_map(|c| (0..TAPS).map(move |s| (c, s))) {
                for row in &transforms.g[..ALPHA] {
                    for k in (panel * PANEL..(panel + 1) * PANEL).map(|i| (i < k).then_some(i)) {
                        let tap = |r: usize| {
                            let Some(k) = k else { return 0.0 };
                            let offset = k as isize * stride_k
                                + c as isize * stride_c
                                + r as isize * stride_r
                                + s as isize * stride_s;
                            // SAFETY: an element of the filter.
                            row[r].to_f64() * f64::from(unsafe { (*from.offset(offset)).to_f32() })
                        };
                        *packed.next().expect("packed filter") =
                            (0..TAPS).map(tap).sum::<f64>() as f32;
                    }
                }
            }
        }
    }

    /// Computes one strip of rows and one part of the output channels.
    fn run_unit<X: SimdElement>(&self, operands: &Operands<'_>, unit: usize, slot: *mut f32) {
        let (strip, part) = (unit / self.parts, unit % self.parts);
        let strips = self.problem.oh.div_ceil(M);
        let at = |part: usize| self.panels() * part / self.parts;
        // SAFETY: `slot_len` is the sum of these.
        let [staged, results] = unsafe {
            let staged = slot.add(self.problem.c * ALPHA * self.row());
            [staged, staged.add(ALPHA * self.row())]
        };
        dispatch(
            self.isa,
            Strip::<X> {
                engine: self,
                operands,
                x: operands.x.as_ptr().cast(),
                x_strides: strides4(operands.x.strides()),
                y: operands.y.get().cast(),
                n: strip / strips,
                row: strip % strips * M,
                panels: at(part)..at(part + 1),
                t: slot,
                staged,
                results,
            },
        );
    }

    fn panels(&self) -> usize {
        self.problem.k.div_ceil(PANEL)
    }

    /// Elements of a panel of the packed filter.
    fn panel_len(&self) -> usize {
        self.problem.c * TAPS * ALPHA * PANEL
    }

    /// Elements of a row of a block's input: its columns, the filter's reach, and what whole vectors
    /// write beyond.
    fn row(&self) -> usize {
        self.columns.next_multiple_of(MAX_LANES) + 2 * MAX_LANES
    }

    fn slot_len(&self) -> usize {
        let results = PANEL * M * self.columns.next_multiple_of(MAX_LANES);
        (self.problem.c + 1) * ALPHA * self.row() + results
    }

    /// Strips of rows and parts of the output channels.
    fn units(&self) -> usize {
        self.problem.n * self.problem.oh.div_ceil(M) * self.parts
    }

    /// Units of a task, which are neighbours: threads that take turns share cache lines of y.
    fn units_at_once(&self) -> usize {
        self.units().div_ceil(self.threads * TASKS_PER_THREAD).max(1)
    }

    fn tasks(&self) -> usize {
        self.units().div_ceil(self.units_at_once())
    }
}

/// Columns of a block: even parts of a row in whole vectors.
fn block_columns(p: &Problem) -> usize {
    let vectors = p.ow.div_ceil(MAX_LANES);
    let most = BLOCK_LEN / (p.c * ALPHA + PANEL * M) / MAX_LANES;
    (even_part(vectors, most.max(1)) * MAX_LANES).min(p.ow)
}

/// A strip of output rows, of some panels of output channels.
struct Strip<'a, X> {
    engine: &'a WinogradFused,
    operands: &'a Operands<'a>,
    x: *const X,
    /// Strides of x [n, c, h, w]
    x_strides: [isize; 4],
    y: *mut X,
    n: usize,
    /// First row.
    row: usize,
    panels: Range<usize>,
    /// Transformed input [c, position, column]
    t: *mut f32,
    /// Input [ALPHA, column] of one channel.
    staged: *mut f32,
    /// Results [channel of the panel, M, column]
    results: *mut f32,
}

impl<X: SimdElement> Kernel for Strip<'_, X> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = &self.engine.problem;
        for column in (0..p.ow).step_by(self.engine.columns.max(1)) {
            let columns = self.engine.columns.min(p.ow - column);
            // SAFETY: rows, columns, channels and panels are the problem's.
            unsafe {
                for c in 0..p.c {
                    self.stage(s, c, column, columns);
                    self.transform(s, c, columns);
                }
                for panel in self.panels.clone() {
                    self.panel(s, panel, column, columns);
                }
            }
        }
    }
}

impl<X: SimdElement> Strip<'_, X> {
    /// Copies the rows that the strip reads of a channel, with zeros for the padding and beyond the
    /// block's last column.
    ///
    /// # Safety
    /// The channel and the columns must be the problem's.
    #[inline(always)]
    unsafe fn stage<S: Simd>(&self, s: S, c: usize, column: usize, columns: usize) {
        let p = &self.engine.problem;
        let [stride_n, stride_c, stride_h, stride_w] = self.x_strides;
        let left = column as isize - p.padding[1] as isize;
        let width = columns.max(S::LANES) + TAPS - 1;
        let first = (-left).clamp(0, width as isize) as usize;
        let end = (p.w as isize - left).clamp(first as isize, width as isize) as usize;
        for i in 0..ALPHA {
            let row = (self.row + i) as isize - p.padding[0] as isize;
            let end = if (0..p.h as isize).contains(&row) { end } else { first };
            // SAFETY: rows of `row()` elements, written in order; first..end are columns of the image.
            unsafe {
                let to = self.staged.add(i * self.engine.row());
                zero_ahead(s, to, first);
                if first < end {
                    let offset = self.n as isize * stride_n
                        + c as isize * stride_c
                        + row * stride_h
                        + (left + first as isize) * stride_w;
                    let from = Rows { ptr: self.x.offset(offset), row: 0, col: stride_w };
                    from.copy(s, 1, end - first, to.add(first), 0);
                }
                zero_ahead(s, to.add(end), width - end);
            }
        }
    }

    /// `B^T` over the staged rows.
    ///
    /// # Safety
    /// The channel must be staged.
    #[inline(always)]
    unsafe fn transform<S: Simd>(&self, s: S, c: usize, columns: usize) {
        let row = self.engine.row();
        for column in (0..columns.max(S::LANES) + TAPS - 1).step_by(S::LANES) {
            // SAFETY: rows of `row()` elements of the staged input and of t.
            unsafe {
                let mut x = [s.zero(); ALPHA];
                for (i, x) in x.iter_mut().enumerate() {
                    *x = s.load(self.staged.add(i * row + column));
                }
                let to = self.t.add(c * ALPHA * row + column);
                for (i, x) in transform::input(s, x).iter().enumerate() {
                    s.store(to.add(i * row), *x);
                }
            }
        }
    }

    /// A panel of output channels of the block.
    ///
    /// # Safety
    /// The block must be transformed.
    #[inline(always)]
    unsafe fn panel<S: Simd>(&self, s: S, panel: usize, column: usize, columns: usize) {
        let p = &self.engine.problem;
        let [stride_n, stride_k, stride_h, stride_w] = self.operands.y_strides;
        let offset = self.n as isize * stride_n
            + (panel * PANEL) as isize * stride_k
            + self.row as isize * stride_h
            + column as isize * stride_w;
        let y = self.y.wrapping_offset(offset);
        let channels = PANEL.min(p.k - panel * PANEL);
        let rows = M.min(p.oh - self.row);
        // What will be written next: asking and waiting took longer than the sums.
        let next = if panel + 1 < self.panels.end {
            y.wrapping_offset(PANEL as isize * stride_k)
        } else {
            let back = ((panel - self.panels.start) * PANEL) as isize * stride_k;
            y.wrapping_offset(M as isize * stride_h - back)
        };
        let row = columns.max(S::LANES);
        for at in (0..columns).step_by(S::LANES) {
            // The last vector of a row may begin in the one before it.
            let at = at.min(row - S::LANES);
            let next = next.wrapping_offset(at as isize * stride_w);
            for (k, i) in (0..PANEL).flat_map(|k| (0..M).map(move |i| (k, i))) {
                let offset = k as isize * stride_k + i as isize * stride_h;
                s.prefetch_write(next.wrapping_offset(offset));
            }
            // SAFETY: rows of `row` elements of the results; columns of t.
            unsafe {
                if S::REGISTERS >= 32 {
                    self.register_tile::<S, PANEL>(s, panel, 0, at, row);
                } else {
                    self.register_tile::<S, 2>(s, panel, 0, at, row);
                    self.register_tile::<S, 2>(s, panel, 2, at, row);
                }
            }
        }
        // Rows without a gap between them are one run.
        let in_one_piece = [stride_h, stride_w] == [columns as isize, 1] && row == columns;
        let (runs, len) = if in_one_piece { (1, rows * row) } else { (rows, columns) };
        for (k, i) in (0..channels).flat_map(|k| (0..runs).map(move |i| (k, i))) {
            // SAFETY: results, and channels, rows and columns of y.
            unsafe {
                let results = self.results.add((k * M + i) * row);
                let y = y.offset(k as isize * stride_k + i as isize * stride_h);
                self.store(s, results, y, stride_w, len);
            }
        }
    }

    /// The sums, with bias, of a vector of columns and `K` channels of a panel.
    ///
    /// # Safety
    /// The block must be transformed, the columns in it, and the results must have rows of `row`.
    #[inline(always)]
    unsafe fn register_tile<S: Simd, const K: usize>(
        &self,
        s: S,
        panel: usize,
        first: usize,
        at: usize,
        row: usize,
    ) {
        let mut sums = [[s.zero(); K]; ALPHA];
        let panel_start = panel * self.engine.panel_len();
        let mut u = self.operands.packed[panel_start..].as_ptr().wrapping_add(first);
        let t_row = self.engine.row();
        // SAFETY: the filter has PANEL elements for each channel, filter column and position, the bias one
        // for each channel of every panel.
        unsafe {
            for c in 0..self.engine.problem.c {
                for tap in 0..TAPS {
                    let mut t = self.t.add(c * ALPHA * t_row + at + tap).cast_const();
                    for sums in &mut sums {
                        let x = s.load(t);
                        for (k, sum) in sums.iter_mut().enumerate() {
                            *sum = s.mul_add(s.splat(*u.add(k)), x, *sum);
                        }
                        t = t.add(t_row);
                        u = u.wrapping_add(PANEL);
                    }
                }
            }
            // `k` is the inner index.
            #[allow(clippy::needless_range_loop)]
            for k in 0..K {
                let positions: [S::F32; ALPHA] = array(|i| sums[i][k]);
                let bias = s.splat(*self.operands.epilogue.bias.add(panel * PANEL + first + k));
                let to = self.results.add((first + k) * M * row + at);
                for (i, &sum) in transform::output(s, positions)[..M].iter().enumerate() {
                    s.store(to.add(i * row), s.add(sum, bias));
                }
            }
        }
    }

    /// Adds the residual to `len` results, applies the activation and stores them.
    ///
    /// # Safety
    /// `results` holds whole vectors, which are stored once, and `y` reaches `len` elements.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, results: *mut f32, y: *mut X, stride: isize, len: usize) {
        let epilogue = self.operands.epilogue;
        // SAFETY: passed on.
        unsafe {
            let bounds = epilogue.bounds().unwrap_or_else(|| {
                // Without a residual.
                activate_all(s, epilogue.activation, results, len);
                Bounds::NONE
            });
            if stride == 1 && len >= S::LANES {
                return in_vectors(s, y, len, |at| {
                    let sum = s.load(results.add(at));
                    bounds.of(s, epilogue.residual.add(s, sum, y.add(at), S::LANES))
                });
            }
            for at in (0..len).step_by(S::LANES) {
                let (y, len) = (y.offset(at as isize * stride), S::LANES.min(len - at));
                let sum = s.load(results.add(at));
                let sum = epilogue.residual.add_apart(s, sum, y, stride, len);
                epilogue::scatter(s, bounds.of(s, sum), y, stride, len);
            }
        }
    }
}

/// Stores `len` elements, at least a vector of them: the first and the last vector at any address,
/// those between, which overlap them, at whole ones.
///
/// # Safety
/// `len` elements are writable at `y`; `results` may be called for every `at..at + LANES` in `0..len`.
#[inline(always)]
unsafe fn in_vectors<S: Simd, X: SimdElement>(
    s: S,
    y: *mut X,
    len: usize,
    results: impl Fn(usize) -> S::F32,
) {
    let last = len - S::LANES;
    let second = (S::LANES - y.addr() / size_of::<X>() % S::LANES).min(last);
    let mut at = 0;
    // One call: at several places the closure would not be inlined into the function that enables the instructions.
    loop {
        // SAFETY: vectors that begin at `last` at most.
        unsafe { X::store(s, y.add(at), results(at)) };
        at = match at {
            _ if at == last => break,
            0 => second,
            _ => last.min(at + S::LANES),
        };
    }
}
