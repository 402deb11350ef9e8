//! Matrix products in f32: a register-tiled micro-kernel, and a blocked loop nest that packs the operands block by
//! block. `strided.rs` multiplies matrices in memory with both.
//!
//! The loop nest gets its operands as panels from [`BlockedProduct`]. So a convolution can provide panels of an im2col
//! matrix that never exists as a whole, and can apply bias and activation to a tile while it is in the first-level
//! cache.

mod block;
mod strided;
mod tile;

use self::block::Block;
use super::{Isa, Kernel, SendPtr, Simd, dispatch, parallel_for_workers};
use std::ops::Range;

pub(crate) use strided::{Gemm, Matrix};
pub(crate) use tile::Place;

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
