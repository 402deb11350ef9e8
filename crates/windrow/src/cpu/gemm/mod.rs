//! Matrix products in f32: a register-tiled micro-kernel, and a blocked driver that packs its operands
//! as it goes; `strided.rs` multiplies matrices in memory with both.
//!
//! The driver asks for its operands in panels through [`Operands`], so that a convolution can hand
//! out panels of an im2col matrix that never exists as a whole, and can apply bias and activation
//! to a tile while it is in the first-level cache.

mod strided;

use super::{Isa, Kernel, SendPtr, Simd, dispatch, parallel_for_workers};
use std::ops::Range;

pub(crate) use strided::{Gemm, Matrix};

/// Vectors in a row of a register tile.
const VECTORS: usize = 2;
/// Most terms of the sums in one block: a right panel of 32 columns then takes 24 KiB.
pub(crate) const MAX_TERMS: usize = 192;

/// Most rows of a register tile: accumulators, one row of the right operand and one broadcast
/// element fill the registers.
const fn max_rows<S: Simd>() -> usize {
    (S::REGISTERS - VECTORS - 1) / VECTORS
}

/// Rows (at most) and columns of the register tile of an instruction set.
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

/// `c[rows][nr] (+)= a[rows][terms] * b[terms][nr]`
struct Tile {
    rows: usize,
    terms: usize,
    a: Left,
    b: *const f32,
    c: *mut f32,
    accumulate: bool,
}

impl Kernel for Tile {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        macro_rules! rows {
            ($($r:literal)*) => {
                match self.rows {
                    // SAFETY: `Tile` is made by `run_task` only, where the panels are readable.
                    $($r if $r <= max_rows::<S>() => unsafe { tile::<S, $r>(s, &self) },)*
                    rows => unreachable!("a tile of {rows} rows"),
                }
            };
        }
        rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    }
}

/// # Safety
/// Panels `a` and `b` of `t.terms` terms are readable, `c` holds R rows of VECTORS vectors.
#[inline(always)]
unsafe fn tile<S: Simd, const R: usize>(s: S, t: &Tile) {
    // SAFETY: as promised by the caller; both loops read exactly R rows and `terms` terms.
    unsafe {
        let mut acc = [[s.zero(); VECTORS]; R];
        if t.a.row == 1 && t.a.step == R {
            // Packed: offsets within a step are constants.
            for p in 0..t.terms {
                step(s, &mut acc, t.b.add(p * VECTORS * S::LANES), |i| *t.a.ptr.add(p * R + i));
            }
        } else {
            let (row, column) = (t.a.row, t.a.step);
            for p in 0..t.terms {
                let a = t.a.ptr.add(p * column);
                step(s, &mut acc, t.b.add(p * VECTORS * S::LANES), |i| *a.add(i * row));
            }
        }
        for (i, row) in acc.into_iter().enumerate() {
            for (v, sum) in row.into_iter().enumerate() {
                let c = t.c.add((i * VECTORS + v) * S::LANES);
                s.store(c, if t.accumulate { s.add(s.load(c), sum) } else { sum });
            }
        }
    }
}

/// One term of every sum in the tile.
///
/// # Safety
/// `VECTORS` vectors are readable at `b`, and `a(i)` may be called for `i < R`.
#[inline(always)]
unsafe fn step<S: Simd, const R: usize>(
    s: S,
    acc: &mut [[S::F32; VECTORS]; R],
    b: *const f32,
    a: impl Fn(usize) -> f32,
) {
    // SAFETY: VECTORS vectors are readable at b.
    let b: [S::F32; VECTORS] = std::array::from_fn(|v| unsafe { s.load(b.add(v * S::LANES)) });
    for (i, row) in acc.iter_mut().enumerate() {
        let a = s.splat(a(i));
        for (sum, b) in row.iter_mut().zip(b) {
            *sum = s.mul_add(a, b, *sum);
        }
    }
}

/// What a blocked product multiplies and where the result goes.
///
/// Row and column ranges start at multiples of `mr` and `nr`; packed operands are zero (or anything
/// finite) in the rows and columns beyond the matrix that fill the last panel.
pub(crate) trait Operands: Sync {
    /// Panels of the left operand, packed into `scratch` where needed.
    ///
    /// # Safety
    /// `scratch` holds as many elements as the `left` that [`Blocking::new`] was given asks for.
    unsafe fn left(
        &self,
        batch: usize,
        rows: Range<usize>,
        terms: Range<usize>,
        scratch: *mut f32,
    ) -> Left;

    /// Panels of the right operand, packed into `scratch` where needed.
    ///
    /// # Safety
    /// As for `left`.
    unsafe fn right(
        &self,
        batch: usize,
        cols: Range<usize>,
        terms: Range<usize>,
        scratch: *mut f32,
    ) -> Right;

    /// Takes a finished tile, row-major with `nr` columns.
    ///
    /// # Safety
    /// `tile` is readable; each element is stored once.
    unsafe fn store(&self, batch: usize, rows: Range<usize>, cols: Range<usize>, tile: *const f32);
}

/// Which operand the driver has to give scratch memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scratch {
    pub left: bool,
    pub right: bool,
}

/// How a product is cut into blocks and tasks. The order in which a sum is formed depends on the
/// number of terms only, so results do not depend on threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocking {
    pub isa: Isa,
    pub rows: usize,
    pub cols: usize,
    pub terms: usize,
    /// Rows and columns of a register tile.
    pub mr: usize,
    pub nr: usize,
    /// Terms, rows and columns of a block; the last two are multiples of mr and nr.
    pub kc: usize,
    pub mc: usize,
    pub nc: usize,
    scratch: Scratch,
}

impl Blocking {
    /// Blocks of at most about `mc` x `nc`.
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

    /// Blocks, each a task.
    pub(crate) fn tasks(&self) -> usize {
        self.rows.div_ceil(self.mc) * self.cols.div_ceil(self.nc)
    }

    /// Most additions in a row that form an element: a block's sum, then the blocks'.
    pub(crate) fn additions(&self) -> usize {
        self.kc + self.terms.div_ceil(self.kc)
    }

    /// Elements of scratch memory for one worker.
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

    /// Tiles wait for their next terms; with a single block of terms one at a time is enough.
    fn tiles_len(&self) -> usize {
        let tile = self.mr * self.nr;
        if self.kc < self.terms { self.mc * self.nc } else { tile }
    }

    /// Computes `batch` products of this size on at most `threads` threads.
    ///
    /// # Safety
    /// `scratch` holds [`Blocking::scratch_len`] elements for each thread, and the operands are
    /// made for this blocking.
    pub(crate) unsafe fn run(
        &self,
        operands: &impl Operands,
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

    /// All terms of one block.
    unsafe fn run_task(
        &self,
        operands: &impl Operands,
        batch: usize,
        task: usize,
        scratch: *mut f32,
    ) {
        // Columns vary fastest: neighbouring tasks share the left operand's panels.
        let col_blocks = self.cols.div_ceil(self.nc);
        let (row, col) = (task / col_blocks * self.mc, task % col_blocks * self.nc);
        let rows = row..(row + self.mc).min(self.rows);
        let cols = col..(col + self.nc).min(self.cols);
        let (row_panels, col_panels) = (rows.len().div_ceil(self.mr), cols.len().div_ceil(self.nr));
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
                for (j, i) in (0..col_panels).flat_map(|j| (0..row_panels).map(move |i| (j, i))) {
                    let index = if blocks > 1 { j * row_panels + i } else { 0 };
                    let tile = Tile {
                        rows: self.mr,
                        terms: terms.len(),
                        a: Left { ptr: left.ptr.add(i * left.panel), ..left },
                        b: right.ptr.add(j * right.panel),
                        c: tiles.add(index * self.mr * self.nr),
                        accumulate: block > 0,
                    };
                    let c = tile.c;
                    dispatch(self.isa, tile);
                    if block + 1 == blocks {
                        let (row, col) = (row + i * self.mr, col + j * self.nr);
                        let rows = row..(row + self.mr).min(rows.end);
                        operands.store(batch, rows, col..(col + self.nr).min(cols.end), c);
                    }
                }
            }
        }
    }
}

/// `total` cut into the fewest parts of at most `max`, as even as possible: the size of a part, at
/// least 1.
pub(crate) fn even_part(total: usize, max: usize) -> usize {
    total.div_ceil(total.div_ceil(max).max(1)).max(1)
}

/// Distance of rows in a row-major left operand of `kc` terms: rounded to whole vectors, and off
/// the multiples of a page at which rows would fall into the same cache sets.
pub(crate) fn left_stride(kc: usize) -> usize {
    let stride = kc.next_multiple_of(16);
    if stride.is_multiple_of(256) { stride + 16 } else { stride }
}
