//! Winograd's algorithm for few input channels, in one pass.
//!
//! With few input channels the transforms of two dimensions, and the transposition around them, take
//! longer than the products. Here F(4, 3) is applied to rows of the image only, and the filter's
//! columns are summed directly: half the multiplications of the definition, vectors over the pixels
//! of a row in every stage, and products that go from registers through the output transform into y.

use super::super::epilogue::Epilogue;
use super::super::fill_bias;
use super::super::rows::{Rows, zero_ahead};
use super::{strides4, transform};
use crate::conv2d::winograd::TAPS;
use crate::conv2d::{Problem, Tile};
use crate::cpu::math::activate;
use crate::cpu::{
    Isa, Kernel, MAX_LANES, SendPtr, Simd, SimdElement, dispatch, parallel_for_workers,
};
use crate::{Activation, DType, TensorMut, TensorRef};
use half::{bf16, f16};
use std::ops::Range;

/// Transformed along rows.
pub(crate) const TILE: Tile = Tile::F4;
/// Rows of a strip of outputs, and of its inputs.
const M: usize = TILE.m();
const ALPHA: usize = TILE.alpha();
/// Output channels that are summed at once.
const PANEL: usize = 2;
/// Columns of a block: what the products read of it stays in the first-level cache.
const COLUMNS: usize = 32;
/// Elements of a staged input row: a block, the filter's reach and what whole vectors write beyond.
const ROW: usize = COLUMNS + 3 * MAX_LANES;
/// Tasks for each thread, so that a late one does not keep the others waiting.
const TASKS_PER_THREAD: usize = 8;

/// A 3x3 convolution of stride and dilation 1 with one group.
#[derive(Clone, Debug)]
pub(crate) struct WinogradFused {
    problem: Problem,
    threads: usize,
    isa: Isa,
    /// Parts of the output channels that are separate tasks.
    parts: usize,
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

impl WinogradFused {
    /// For a problem that [`Problem::is_winograd`].
    pub(crate) fn new(problem: &Problem, isa: Isa, threads: usize) -> Self {
        debug_assert!(problem.is_winograd());
        let strips = problem.n * problem.oh.div_ceil(M);
        let parts = (threads * TASKS_PER_THREAD).div_ceil(strips.max(1));
        let parts = parts.clamp(1, problem.k.div_ceil(PANEL).max(1));
        WinogradFused {
            problem: *problem,
            threads,
            isa,
            parts: if threads == 1 { 1 } else { parts },
        }
    }

    /// Blocking in words.
    pub(crate) fn explain(&self) -> String {
        format!(
            "strips of {M} rows, {} parts of the channels, {PANEL} channels at once",
            self.parts
        )
    }

    /// Output channels that lie next to each other in a packed filter.
    pub(crate) fn packed_width(&self) -> usize {
        PANEL
    }

    /// Elements of a packed filter.
    pub(crate) fn packed_len(&self) -> usize {
        self.panels() * self.panel_len()
    }

    /// Bytes that [`WinogradFused::run`] needs.
    pub(crate) fn workspace_bytes(&self) -> usize {
        (self.bias_len() + self.threads.min(self.tasks()) * self.slot_len()) * size_of::<f32>()
    }

    /// Transforms and packs the filter `w` [k, c, 3, 3] into `packed`, of
    /// [`WinogradFused::packed_len`] elements.
    pub(crate) fn pack(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        match w.dtype() {
            DType::F32 => self.pack_from::<f32>(w, packed),
            DType::F16 => self.pack_from::<f16>(w, packed),
            DType::BF16 => self.pack_from::<bf16>(w, packed),
            other => unreachable!("a filter of {other}"),
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

    /// `y = act(conv(x, w) + bias)` with a filter packed by [`WinogradFused::pack`]. `x` [n, c, h, w]
    /// and `y` [n, k, oh, ow] have one type, `bias` [k] that or f32; `workspace` is aligned to 64.
    pub(crate) fn run(
        &self,
        packed: &[f32],
        x: &TensorRef<'_>,
        bias: Option<&TensorRef<'_>>,
        activation: Activation,
        y: &mut TensorMut<'_>,
        workspace: &mut [u8],
    ) {
        assert!(packed.len() >= self.packed_len(), "packed filter");
        assert!(workspace.len() >= self.workspace_bytes(), "workspace");
        assert_eq!(workspace.as_ptr().align_offset(64), 0, "workspace");
        let workspace = workspace.as_mut_ptr().cast::<f32>();
        // SAFETY: the workspace begins with the bias.
        let padded_bias = unsafe { std::slice::from_raw_parts_mut(workspace, self.bias_len()) };
        fill_bias(bias, padded_bias);
        let operands = Operands {
            packed,
            x,
            epilogue: Epilogue { bias: padded_bias.as_ptr(), activation },
            y_strides: strides4(y.strides()),
            y: SendPtr(y.as_mut_ptr()),
        };
        // SAFETY: the slots follow the bias.
        let slots = SendPtr(unsafe { workspace.add(self.bias_len()) });
        parallel_for_workers(self.threads, self.tasks(), |worker, task| {
            // SAFETY: each worker has a slot of its own.
            let slot = unsafe { slots.get().add(worker * self.slot_len()) };
            match x.dtype() {
                DType::F32 => self.run_task::<f32>(&operands, task, slot),
                DType::F16 => self.run_task::<f16>(&operands, task, slot),
                DType::BF16 => self.run_task::<bf16>(&operands, task, slot),
                other => unreachable!("an input of {other}"),
            }
        });
    }

    /// One strip of rows and one part of the output channels.
    fn run_task<X: SimdElement>(&self, operands: &Operands<'_>, task: usize, slot: *mut f32) {
        let (strip, part) = (task / self.parts, task % self.parts);
        let strips = self.problem.oh.div_ceil(M);
        let at = |part: usize| self.panels() * part / self.parts;
        // SAFETY: `slot_len` is the sum of these.
        let [staged, results] =
            unsafe { [slot.add(self.t_len()), slot.add(self.t_len() + STAGED)] };
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

    /// Elements of a block's transformed input.
    fn t_len(&self) -> usize {
        self.problem.c * TAPS * ALPHA * COLUMNS
    }

    fn slot_len(&self) -> usize {
        self.t_len() + STAGED + RESULTS
    }

    fn bias_len(&self) -> usize {
        self.problem.k.next_multiple_of(MAX_LANES)
    }

    fn tasks(&self) -> usize {
        self.problem.n * self.problem.oh.div_ceil(M) * self.parts
    }
}

/// Elements of the staged input rows of a channel.
const STAGED: usize = ALPHA * ROW;
/// Elements of results that are not neighbours in y.
const RESULTS: usize = PANEL * M * RESULTS_ROW;
const RESULTS_ROW: usize = 2 * MAX_LANES;

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
    /// Transformed input [c, filter column, position, COLUMNS]
    t: *mut f32,
    /// Input [ALPHA, ROW] of one channel.
    staged: *mut f32,
    /// [PANEL, M, RESULTS_ROW]
    results: *mut f32,
}

impl<X: SimdElement> Kernel for Strip<'_, X> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = &self.engine.problem;
        for column in (0..p.ow).step_by(COLUMNS) {
            let columns = COLUMNS.min(p.ow - column);
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
        let width = columns.next_multiple_of(S::LANES) + TAPS - 1;
        let first = (-left).clamp(0, width as isize) as usize;
        let end = (p.w as isize - left).clamp(first as isize, width as isize) as usize;
        for i in 0..ALPHA {
            let row = (self.row + i) as isize - p.padding[0] as isize;
            let end = if (0..p.h as isize).contains(&row) { end } else { first };
            // SAFETY: rows of ROW elements, written in order; first..end are columns of the image.
            unsafe {
                let to = self.staged.add(i * ROW);
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

    /// `B^T` over the staged rows, for each column of the filter.
    ///
    /// # Safety
    /// The channel must be staged.
    #[inline(always)]
    unsafe fn transform<S: Simd>(&self, s: S, c: usize, columns: usize) {
        for tap in 0..TAPS {
            for column in (0..columns).step_by(S::LANES) {
                // SAFETY: staged columns, and those of t.
                unsafe {
                    let mut x = [s.zero(); ALPHA];
                    for (i, x) in x.iter_mut().enumerate() {
                        *x = s.load(self.staged.add(i * ROW + column + tap));
                    }
                    let to = self.t.add((c * TAPS + tap) * ALPHA * COLUMNS + column);
                    for (i, x) in transform::input(s, x).iter().enumerate() {
                        s.store(to.add(i * COLUMNS), *x);
                    }
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
        let channels = PANEL.min(p.k - panel * PANEL);
        let rows = M.min(p.oh - self.row);
        let offset = self.n as isize * stride_n
            + (panel * PANEL) as isize * stride_k
            + self.row as isize * stride_h
            + column as isize * stride_w;
        let y = self.y.wrapping_offset(offset);
        let whole = channels == PANEL && rows == M && stride_w == 1;
        let bound = self.operands.epilogue.bound().filter(|_| whole);
        let mut at = 0;
        while at < columns {
            // The registers hold a sum for each position and channel.
            let vectors = if S::REGISTERS >= 32 && columns - at > S::LANES { 2 } else { 1 };
            let here = (vectors * S::LANES).min(columns - at);
            let y = y.wrapping_offset(at as isize * stride_w);
            // SAFETY: passed on; channels, rows and columns of y.
            unsafe {
                match bound {
                    Some(bound) => {
                        let rows = Bounded { y, strides: [stride_k, stride_h], len: here, bound };
                        for (k, i) in (0..PANEL).flat_map(|k| (0..M).map(move |i| (k, i))) {
                            s.prefetch_write(rows.row(k + 2 * PANEL, i));
                            s.prefetch_write(rows.row(k + 2 * PANEL, i).wrapping_add(S::LANES));
                        }
                        if here == vectors * S::LANES {
                            self.sums(s, panel, at, vectors, Whole(rows));
                        } else {
                            self.sums(s, panel, at, vectors, rows);
                        }
                    }
                    None => {
                        self.sums(s, panel, at, vectors, Staged(self.results));
                        for (k, i) in (0..channels).flat_map(|k| (0..rows).map(move |i| (k, i))) {
                            let results = self.results.add((k * M + i) * RESULTS_ROW);
                            let y = y.offset(k as isize * stride_k + i as isize * stride_h);
                            self.store(s, results, y, stride_w, here);
                        }
                    }
                }
            }
            at += here;
        }
    }

    /// Applies the activation to `len` results and stores them.
    ///
    /// # Safety
    /// `results` holds whole vectors, `y` reaches `len` elements.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, results: *mut f32, y: *mut X, stride: isize, len: usize) {
        for at in (0..len).step_by(S::LANES) {
            let count = S::LANES.min(len - at);
            // SAFETY: passed on.
            unsafe {
                let results = results.add(at);
                let result = activate(s, self.operands.epilogue.activation, s.load(results));
                if stride == 1 {
                    X::store_first(s, y.add(at), result, count);
                    continue;
                }
                s.store(results, result);
                for i in 0..count {
                    *y.offset((at + i) as isize * stride) = X::from_f32(*results.add(i));
                }
            }
        }
    }

    /// Gives `sink` the sums, with bias, of one or two vectors of columns.
    ///
    /// # Safety
    /// The block must be transformed, the columns in it, and the sink reach as many.
    #[inline(always)]
    unsafe fn sums<S: Simd>(&self, s: S, panel: usize, at: usize, vectors: usize, sink: impl Sink) {
        // SAFETY: passed on.
        unsafe {
            if vectors == 2 {
                self.register_tile::<S, 2>(s, panel, at, sink);
            } else {
                self.register_tile::<S, 1>(s, panel, at, sink);
            }
        }
    }

    /// # Safety
    /// As for [`Strip::sums`].
    #[inline(always)]
    unsafe fn register_tile<S: Simd, const V: usize>(
        &self,
        s: S,
        panel: usize,
        at: usize,
        sink: impl Sink,
    ) {
        let mut sums = [[[s.zero(); V]; PANEL]; ALPHA];
        let mut u = self.operands.packed[panel * self.engine.panel_len()..].as_ptr();
        // SAFETY: the filter has PANEL elements for each channel, filter column and position, t a
        // row; bias has an element for each channel of every panel.
        unsafe {
            let mut t = self.t.add(at).cast_const();
            for _ in 0..self.engine.problem.c * TAPS {
                for sums in &mut sums {
                    let mut x = [s.zero(); V];
                    for (v, x) in x.iter_mut().enumerate() {
                        *x = s.load(t.add(v * S::LANES));
                    }
                    for (k, sums) in sums.iter_mut().enumerate() {
                        let u = s.splat(*u.add(k));
                        for (sum, x) in sums.iter_mut().zip(x) {
                            *sum = s.mul_add(u, x, *sum);
                        }
                    }
                    t = t.add(COLUMNS);
                    u = u.add(PANEL);
                }
            }
            for k in 0..PANEL {
                let bias = s.splat(*self.operands.epilogue.bias.add(panel * PANEL + k));
                for v in 0..V {
                    let mut positions = [s.zero(); ALPHA];
                    for (position, sums) in positions.iter_mut().zip(&sums) {
                        *position = sums[k][v];
                    }
                    let results = transform::output(s, positions);
                    for (i, &sum) in results[..M].iter().enumerate() {
                        sink.put(s, k, i, v, s.add(sum, bias));
                    }
                }
            }
        }
    }
}

/// Where sums go.
trait Sink {
    /// A vector of a channel of the panel and a row of the strip.
    ///
    /// # Safety
    /// The sink must reach it.
    unsafe fn put<S: Simd>(&self, s: S, k: usize, i: usize, v: usize, sum: S::F32);
}

/// Rows of y whose pixels are neighbours, for an activation that is a lower bound.
struct Bounded<X> {
    y: *mut X,
    /// Distances of channels and rows.
    strides: [isize; 2],
    /// Pixels of a row.
    len: usize,
    bound: f32,
}

impl<X> Bounded<X> {
    #[inline(always)]
    fn row(&self, k: usize, i: usize) -> *mut X {
        self.y.wrapping_offset(k as isize * self.strides[0] + i as isize * self.strides[1])
    }
}

impl<X: SimdElement> Sink for Bounded<X> {
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, s: S, k: usize, i: usize, v: usize, sum: S::F32) {
        // SAFETY: passed on.
        unsafe {
            let (y, sum) = (self.row(k, i).add(v * S::LANES), s.max(s.splat(self.bound), sum));
            if self.len >= (v + 1) * S::LANES {
                X::store(s, y, sum);
            } else {
                X::store_first(s, y, sum, self.len - v * S::LANES);
            }
        }
    }
}

/// The same in whole vectors.
struct Whole<X>(Bounded<X>);

impl<X: SimdElement> Sink for Whole<X> {
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, s: S, k: usize, i: usize, v: usize, sum: S::F32) {
        let sum = s.max(s.splat(self.0.bound), sum);
        // SAFETY: passed on.
        unsafe { X::store(s, self.0.row(k, i).add(v * S::LANES), sum) };
    }
}

/// Scratch memory [PANEL, M, RESULTS_ROW].
struct Staged(*mut f32);

impl Sink for Staged {
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, s: S, k: usize, i: usize, v: usize, sum: S::F32) {
        // SAFETY: passed on.
        unsafe { s.store(self.0.add((k * M + i) * RESULTS_ROW + v * S::LANES), sum) };
    }
}
