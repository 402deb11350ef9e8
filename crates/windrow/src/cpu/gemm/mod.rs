//! Matrix products in f32: a register-tiled micro-kernel, and a blocked loop nest that packs the operands block by
//! block. `strided.rs` multiplies matrices in memory with both.
//!
//! The loop nest gets its operands as panels from [`BlockedProduct`]. So a convolution can provide panels of an im2col
//! matrix that never exists as a whole, and can apply bias and activation to a tile while it is in the first-level
//! cache.

mod block;
mod strided;

use self::block::Block;
use super::{Isa, Kernel, SendPtr, Simd, array, dispatch, parallel_for_workers};
use crate::Activation;
use std::ops::Range;

pub(crate) use strided::{Gemm, Matrix};

/// The number of vectors in a row of a register tile.
const VECTORS: usize = 2;
/// The maximum number of terms in a block (`kc`). A right panel of 32 columns then takes 24 KiB.
pub(crate) const MAX_TERMS: usize = 192;

/// The maximum number of rows of a register tile: accumulators, one row of the right operand and one broadcast element
/// just fit in the registers.
const fn max_rows<S: Simd>() -> usize {
    (S::REGISTERS - VECTORS - 1) / VECTORS
}

/// The maximum number of rows, and the number of columns, of the register tile of an instruction set.
pub(crate) fn tile_shape(isa: Isa) -> (usize, usize) {
    struct Shape;
    impl Kernel for Shape {
        type Output = (usize, usize);
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> (usize, usize) {
            (max_rows::<S>(), VECTORS * S::LANES)
        }
    }
    dispatch(isa, Shape)
}

/// Panels of the left operand: element (i, p) of panel q, `i < mr`, is at
/// `ptr + q * panel + i * row + p * step`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    pub ptr: *const f32,
    pub panel: usize,
    pub row: usize,
    pub step: usize,
}

/// Panels of the right operand: element (p, j) of panel q, `j < nr`, is at
/// `ptr + q * panel + p * nr + j`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Right {
    pub ptr: *const f32,
    pub panel: usize,
}

/// The memory for a finished tile, whose columns are contiguous, and what is applied to the tile before it is stored:
/// biases, residual, clamp; or biases and an activation that is no clamp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub at: *mut f32,
    /// Elements from one row to the next.
    pub row: isize,
    /// A bias for each row; null if there is none.
    pub row_bias: *const f32,
    /// A bias for each column; null if there is none.
    pub col_bias: *const f32,
    /// The residual, which is added after the biases and has the destination's layout; null if there is none.
    pub residual: *const f32,
    /// The bounds to which results are clamped.
    pub low: f32,
    pub high: f32,
    /// The activation in the place of residual and clamp, if it is no clamp.
    pub curve: Option<Activation>,
}

impl Place {
    /// The destination of the tile that starts at row `i` and column `j`.
    #[inline(always)]
    fn tile(self, i: usize, j: usize) -> Self {
        let bias = |bias: *const f32, at: usize| match bias.is_null() {
            true => bias,
            false => bias.wrapping_add(at),
        };
        let at = i as isize * self.row + j as isize;
        let residual = match self.residual.is_null() {
            true => self.residual,
            false => self.residual.wrapping_offset(at),
        };
        Place {
            at: self.at.wrapping_offset(at),
            residual,
            row_bias: bias(self.row_bias, i),
            col_bias: bias(self.col_bias, j),
            ..self
        }
    }
}

/// `c[rows][nr] (+)= a[rows][terms] * b[terms][nr]`
struct Tile {
    rows: usize,
    cols: usize,
    terms: usize,
    a: Left,
    b: *const f32,
    c: *mut f32,
    accumulate: bool,
    /// The destination of the sums instead of `c`.
    place: Option<Place>,
    /// The address from which to prefetch, and the number of elements to prefetch for each term.
    ahead: (*const f32, usize),
}

impl Tile {
    /// Calls [`tile`] with the tile's number of rows as a constant.
    ///
    /// # Safety
    /// As for [`tile`], with at most the rows of an instruction set's tile.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, s: S) {
        macro_rules! rows {
            ($($r:literal)*) => {
                match self.rows {
                    // SAFETY: passed on.
                    $($r if const { $r <= max_rows::<S>() } => unsafe {
                        // Half of a narrow tile would be idle.
                        if self.cols <= S::LANES {
                            tile::<S, $r, 1>(s, self)
                        } else {
                            tile::<S, $r, VECTORS>(s, self)
                        }
                    },)*
                    rows => unreachable!("a tile of {rows} rows"),
                }
            };
        }
        rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    }
}

/// Computes a register tile of `R` rows and `V` vectors, and stores it.
///
/// # Safety
/// Panels `a` and `b` of `t.terms` terms are readable, `c` holds R rows of VECTORS vectors, and the place
/// R rows of `t.cols` elements.
#[inline(always)]
unsafe fn tile<S: Simd, const R: usize, const V: usize>(s: S, t: &Tile) {
    // SAFETY: as promised by the caller; both loops read exactly R rows and `terms` terms.
    unsafe {
        if let Some(place) = t.place {
            for i in 0..R {
                let at = i as isize * place.row;
                s.prefetch_write(place.at.wrapping_offset(at));
                if !place.residual.is_null() {
                    s.prefetch_near(place.residual.wrapping_offset(at));
                }
            }
        }
        let mut acc = [[s.zero(); V]; R];
        let (mut ahead, distance) = t.ahead;
        if t.a.row == 1 && t.a.step == R {
            // Packed: offsets within a step are constants.
            for p in 0..t.terms {
                s.prefetch_near(ahead);
                ahead = ahead.wrapping_add(distance);
                step(s, &mut acc, t.b.add(p * VECTORS * S::LANES), |i| *t.a.ptr.add(p * R + i));
            }
        } else {
            let (row, column) = (t.a.row, t.a.step);
            for p in 0..t.terms {
                s.prefetch_near(ahead);
                ahead = ahead.wrapping_add(distance);
                let a = t.a.ptr.add(p * column);
                step(s, &mut acc, t.b.add(p * VECTORS * S::LANES), |i| *a.add(i * row));
            }
        }
        if t.accumulate {
            for (i, row) in acc.iter_mut().enumerate() {
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = s.add(s.load(t.c.add((i * VECTORS + v) * S::LANES)), *sum);
                }
            }
        }
        if let Some(place) = t.place
            && t.cols == V * S::LANES
            && place.row_bias.is_null()
        {
            return put_whole(s, place, acc);
        }
        for (i, row) in acc.into_iter().enumerate() {
            for (v, sum) in row.into_iter().enumerate() {
                match t.place {
                    None => s.store(t.c.add((i * VECTORS + v) * S::LANES), sum),
                    Some(place) => put(s, place, i, v * S::LANES, t.cols, sum),
                }
            }
        }
    }
}

/// Stores the sums of a tile of whole vectors without row biases at their place. It tests once for bias and residual:
/// tests for each vector would take longer than short sums.
///
/// # Safety
/// The elements of the place are writable, the residual and the biases readable.
#[inline(always)]
unsafe fn put_whole<S: Simd, const R: usize, const V: usize>(
    s: S,
    place: Place,
    acc: [[S::F32; V]; R],
) {
    let (low, high) = (s.splat(place.low), s.splat(place.high));
    let (has_bias, adds) = (!place.col_bias.is_null(), !place.residual.is_null());
    // SAFETY: promised by the caller.
    unsafe {
        let mut bias = [s.zero(); V];
        if has_bias {
            bias = array(|v| s.load(place.col_bias.add(v * S::LANES)));
        }
        for (i, row) in acc.into_iter().enumerate() {
            let at = i as isize * place.row;
            let (to, from) = (place.at.wrapping_offset(at), place.residual.wrapping_offset(at));
            for (v, sum) in row.into_iter().enumerate() {
                let mut y = if has_bias { s.add(sum, bias[v]) } else { sum };
                if adds {
                    y = s.add(y, s.load(from.add(v * S::LANES)));
                }
                s.store(to.add(v * S::LANES), s.min(high, s.max(low, y)));
            }
        }
    }
}

/// Stores a vector of sums, at row `i` from column `j` on, at their place, which has `cols` columns.
///
/// # Safety
/// These elements are writable, and the biases readable.
#[inline(always)]
unsafe fn put<S: Simd>(s: S, place: Place, i: usize, j: usize, cols: usize, sum: S::F32) {
    let len = cols.saturating_sub(j).min(S::LANES);
    // SAFETY: promised by the caller.
    unsafe {
        let mut y = sum;
        if !place.row_bias.is_null() {
            y = s.add(y, s.splat(*place.row_bias.add(i)));
        }
        if !place.col_bias.is_null() {
            let bias = place.col_bias.wrapping_add(j);
            y = s.add(y, if len == S::LANES { s.load(bias) } else { s.load_first(bias, len) });
        }
        let at = (i as isize * place.row).wrapping_add_unsigned(j);
        if !place.residual.is_null() {
            let from = place.residual.wrapping_offset(at);
            y = s.add(y, if len == S::LANES { s.load(from) } else { s.load_first(from, len) });
        }
        let y = s.min(s.splat(place.high), s.max(s.splat(place.low), y));
        let at = place.at.wrapping_offset(at);
        if len == S::LANES { s.store(at, y) } else { s.store_first(at, y, len) }
    }
}

/// Adds one term to every sum of the tile.
///
/// # Safety
/// V vectors are readable at `b`, and `a(i)` may be called for `i < R`.
#[inline(always)]
unsafe fn step<S: Simd, const R: usize, const V: usize>(
    s: S,
    acc: &mut [[S::F32; V]; R],
    b: *const f32,
    a: impl Fn(usize) -> f32,
) {
    // SAFETY: V vectors are readable at b.
    let b: [S::F32; V] = array(|v| unsafe { s.load(b.add(v * S::LANES)) });
    for (i, row) in acc.iter_mut().enumerate() {
        let a = s.splat(a(i));
        for (v, sum) in row.iter_mut().enumerate() {
            *sum = s.mul_add(a, b[v], *sum);
        }
    }
}

/// The operands of a blocked product, and the destination of its result.
///
/// Row and column ranges start at multiples of `mr` and `nr`. The last panel of a right operand has as many columns as
/// the others. Columns beyond the matrix may have any content. Rows beyond it are not read.
pub(crate) trait BlockedProduct: Sync {
    /// Panels of the left operand, packed into `scratch` if needed.
    ///
    /// # Safety
    /// `scratch` has room for the panels of a block if [`Scratch::left`] was set for the blocking.
    unsafe fn left(
        &self,
        batch: usize,
        rows: Range<usize>,
        terms: Range<usize>,
        scratch: *mut f32,
    ) -> Left;

    /// Panels of the right operand, packed into `scratch` if needed.
    ///
    /// # Safety
    /// As for `left`, with [`Scratch::right`].
    unsafe fn right(
        &self,
        batch: usize,
        cols: Range<usize>,
        terms: Range<usize>,
        scratch: *mut f32,
    ) -> Right;

    /// The destination to which the registers of a finished tile, or of all tiles of a block, are stored. `None` if
    /// they are passed to [`BlockedProduct::store`] instead.
    fn place(&self, _: usize, _: Range<usize>, _: Range<usize>) -> Option<Place> {
        None
    }

    /// Stores a finished tile, row-major with `nr` columns.
    ///
    /// # Safety
    /// `tile` is readable; each element is stored once.
    unsafe fn store(&self, batch: usize, rows: Range<usize>, cols: Range<usize>, tile: *const f32);
}

/// The operands for which the loop nest has to provide scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scratch {
    pub left: bool,
    pub right: bool,
}

/// The division of a product into blocks and tasks. The order of a sum depends only on the number of terms, so results
/// do not depend on the number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocking {
    pub isa: Isa,
    pub rows: usize,
    pub cols: usize,
    pub terms: usize,
    /// Rows of a register tile.
    pub mr: usize,
    /// Columns of a register tile.
    pub nr: usize,
    /// Terms of a block.
    pub kc: usize,
    /// Rows of a block, a multiple of `mr`.
    pub mc: usize,
    /// Columns of a block, a multiple of `nr`.
    pub nc: usize,
    scratch: Scratch,
}

impl Blocking {
    /// The division into blocks of at most about `mc` x `nc`.
    pub(crate) fn new(
        isa: Isa,
        [rows, cols, terms]: [usize; 3],
        [mc, nc]: [usize; 2],
        scratch: Scratch,
    ) -> Self {
        let (max_rows, nr) = tile_shape(isa);
        let mr = even_part(rows, max_rows);
        let kc = even_part(terms, MAX_TERMS);
        let mc = even_part(rows.div_ceil(mr), (mc / mr).max(1)) * mr;
        let nc = even_part(cols.div_ceil(nr), (nc / nr).max(1)) * nr;
        Blocking { isa, rows, cols, terms, mr, nr, kc, mc, nc, scratch }
    }

    /// The number of blocks. Each is a task.
    pub(crate) fn tasks(&self) -> usize {
        self.rows.div_ceil(self.mc) * self.cols.div_ceil(self.nc)
    }

    /// The maximum number of consecutive additions in an element: those in a block, then those of the blocks' sums.
    pub(crate) fn additions(&self) -> usize {
        self.kc + self.terms.div_ceil(self.kc)
    }

    /// The number of elements of scratch memory for one worker.
    pub(crate) fn scratch_len(&self) -> usize {
        self.left_len() + self.right_len() + self.tiles_len()
    }

    fn left_len(&self) -> usize {
        // Row-major, whichever of rows and terms comes first.
        let len = (self.mc * left_stride(self.kc)).max(self.kc * left_stride(self.mc));
        if self.scratch.left { len } else { 0 }
    }

    fn right_len(&self) -> usize {
        if self.scratch.right { (self.nc * self.kc).next_multiple_of(16) } else { 0 }
    }

    /// The number of elements of partial sums. All tiles of a block are kept if the terms are in several blocks,
    /// otherwise one tile.
    fn tiles_len(&self) -> usize {
        let tile = self.mr * self.nr;
        if self.kc < self.terms { self.mc * self.nc } else { tile }
    }

    /// Computes `batch` products of this size on at most `threads` threads.
    ///
    /// # Safety
    /// `scratch` holds [`Blocking::scratch_len`] elements for each thread, and the operands were made for this
    /// blocking.
    pub(crate) unsafe fn run(
        &self,
        operands: &impl BlockedProduct,
        batch: usize,
        threads: usize,
        scratch: *mut f32,
    ) {
        let scratch = SendPtr(scratch);
        let tasks = self.tasks();
        parallel_for_workers(threads, batch * tasks, |worker, task| {
            // SAFETY: worker < threads; each worker has its own part of the scratch memory.
            unsafe {
                let scratch = scratch.get().add(worker * self.scratch_len());
                self.run_task(operands, task / tasks, task % tasks, scratch);
            }
        });
    }

    /// Computes all terms of one block.
    unsafe fn run_task(
        &self,
        operands: &impl BlockedProduct,
        batch: usize,
        task: usize,
        scratch: *mut f32,
    ) {
        // Columns vary fastest: neighbouring tasks share the left operand's panels.
        let col_blocks = self.cols.div_ceil(self.nc);
        let (row, col) = (task / col_blocks * self.mc, task % col_blocks * self.nc);
        let rows = row..(row + self.mc).min(self.rows);
        let cols = col..(col + self.nc).min(self.cols);
        // Without terms a single empty block writes zeros.
        let blocks = self.terms.div_ceil(self.kc).max(1);
        // SAFETY: scratch holds the three parts; operands give panels of the ranges asked for.
        unsafe {
            let right_scratch = scratch.add(self.left_len());
            let tiles = right_scratch.add(self.right_len());
            for block in 0..blocks {
                let terms = block * self.kc..((block + 1) * self.kc).min(self.terms);
                let left = operands.left(batch, rows.clone(), terms.clone(), scratch);
                let right = operands.right(batch, cols.clone(), terms.clone(), right_scratch);
                let place = match block + 1 == blocks {
                    true => operands.place(batch, rows.clone(), cols.clone()),
                    false => None,
                };
                let (curved, place) = match place {
                    Some(place) if place.curve.is_some() => (Some(place), None),
                    place => (None, place),
                };
                let (is_first, is_last) = (block == 0, block + 1 == blocks);
                let (rows, cols, terms) = (rows.clone(), cols.clone(), terms.len());
                let block = Block {
                    blocking: self,
                    operands,
                    batch,
                    rows,
                    cols,
                    terms,
                    left,
                    right,
                    tiles,
                    place,
                    curved,
                    is_first,
                    is_last,
                };
                dispatch(self.isa, block);
            }
        }
    }
}

/// The size of a part if `total` is divided into the fewest parts of at most `max`, as equal as possible; at least 1.
pub(crate) fn even_part(total: usize, max: usize) -> usize {
    total.div_ceil(total.div_ceil(max).max(1)).max(1)
}

/// The number of elements from one row to the next in a row-major left operand of `kc` terms, rounded up to whole
/// vectors. Multiples of 256 (1 KiB) are avoided, because rows would map to the same cache sets.
pub(crate) fn left_stride(kc: usize) -> usize {
    let stride = kc.next_multiple_of(16);
    if stride.is_multiple_of(256) { stride + 16 } else { stride }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;
    use crate::cpu::compiled::assert_in_registers;

    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build")]
    fn sums_stay_in_registers() {
        assert_in_registers::<Block<'static>>([0, 0]);
    }
}
