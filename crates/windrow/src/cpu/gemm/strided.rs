//! Products of strided matrices in memory.

use super::{BlockedProduct, Blocking, Left, MAX_TERMS, Right, Scratch, left_stride, tile_shape};
use crate::cpu::Isa;
use std::ops::Range;

/// A strided f32 matrix in memory: element (i, j) at `ptr + i * row + j * col`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub ptr: *const f32,
    pub row: isize,
    pub col: isize,
}

impl Matrix {
    fn offset(&self, i: usize, j: usize) -> *const f32 {
        self.ptr.wrapping_offset(i as isize * self.row + j as isize * self.col)
    }

    fn transposed(self) -> Self {
        Matrix { row: self.col, col: self.row, ..self }
    }
}

/// `c = a * b` for strided f32 matrices a [rows, terms], b [terms, cols], c [rows, cols].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemm(Blocking);

impl Gemm {
    /// The maximum number of rows and of columns of a block.
    const BLOCK: usize = 256;

    pub(crate) fn new(isa: Isa, [rows, cols, terms]: [usize; 3]) -> Self {
        let scratch = Scratch { left: true, right: true };
        Gemm(Blocking::new(isa, [rows, cols, terms], [Self::BLOCK; 2], scratch))
    }

    /// The number of elements of scratch memory for `threads` threads.
    pub(crate) fn scratch_len(&self, threads: usize) -> usize {
        threads.min(self.0.tasks()) * self.0.scratch_len()
    }

    /// The number of elements of scratch memory that is enough for any product of at most these rows and columns on
    /// `threads` threads.
    pub(crate) fn max_scratch_len(isa: Isa, threads: usize, [rows, cols]: [usize; 2]) -> usize {
        let (mr, nr) = tile_shape(isa);
        // Blocks have the size of a whole number of tiles, which are smaller than half a block.
        let half = Self::BLOCK / 2;
        let threads = threads.min(rows.div_ceil(half).saturating_mul(cols.div_ceil(half)));
        let [mc, nc] = [Self::BLOCK.max(mr), Self::BLOCK.max(nr)];
        let left = (mc * left_stride(MAX_TERMS)).max(MAX_TERMS * left_stride(mc));
        threads * (left + (nc * MAX_TERMS).next_multiple_of(16) + mc * nc)
    }

    /// Computes the product on `threads` threads.
    ///
    /// # Safety
    /// All elements of the three matrices are in memory. Those of `c` do not overlap, and nothing else accesses them
    /// during the call. `scratch` holds [`Gemm::scratch_len`] elements.
    pub(crate) unsafe fn run(
        &self,
        threads: usize,
        a: Matrix,
        b: Matrix,
        (c, c_row, c_col): (*mut f32, isize, isize),
        scratch: *mut f32,
    ) {
        let operands = Strided { blocking: self.0, a, b, c, c_row, c_col };
        // SAFETY: passed on; `Strided` packs into the scratch memory that it asked for.
        unsafe { self.0.run(&operands, 1, threads, scratch) }
    }
}

struct Strided {
    blocking: Blocking,
    a: Matrix,
    b: Matrix,
    c: *mut f32,
    c_row: isize,
    c_col: isize,
}

// SAFETY: a and b are only read; c is written by `store`, by each task in its own rows and columns.
unsafe impl Sync for Strided {}

impl BlockedProduct for Strided {
    unsafe fn left(
        &self,
        _: usize,
        rows: Range<usize>,
        terms: Range<usize>,
        scratch: *mut f32,
    ) -> Left {
        let mr = self.blocking.mr;
        let first = self.a.offset(rows.start, terms.start);
        // SAFETY: the ranges are in the matrix; a panel holds mr elements a term, also row-major.
        unsafe {
            if self.a.col == 1 {
                let row = left_stride(terms.len());
                for i in 0..rows.len() {
                    let a = first.offset(i as isize * self.a.row);
                    std::ptr::copy_nonoverlapping(a, scratch.add(i * row), terms.len());
                }
                return Left { ptr: scratch, panel: mr * row, row, step: 1 };
            }
            let panel = mr * terms.len();
            for i in (0..rows.len()).step_by(mr) {
                let a = Matrix { ptr: first.offset(i as isize * self.a.row), ..self.a };
                let to = scratch.add(i / mr * panel);
                copy_panel(a.transposed(), terms.len(), mr.min(rows.len() - i), to, mr);
            }
            Left { ptr: scratch, panel, row: 1, step: mr }
        }
    }

    unsafe fn right(
        &self,
        _: usize,
        cols: Range<usize>,
        terms: Range<usize>,
        scratch: *mut f32,
    ) -> Right {
        let nr = self.blocking.nr;
        let panel = nr * terms.len();
        for (q, col) in cols.clone().step_by(nr).enumerate() {
            let b = Matrix { ptr: self.b.offset(terms.start, col), ..self.b };
            // SAFETY: the ranges are in the matrix; a panel holds nr elements a term.
            unsafe {
                copy_panel(b, terms.len(), nr.min(cols.end - col), scratch.add(q * panel), nr);
            }
        }
        Right { ptr: scratch, panel }
    }

    unsafe fn store(&self, _: usize, rows: Range<usize>, cols: Range<usize>, tile: *const f32) {
        for (i, row) in rows.enumerate() {
            // SAFETY: these are elements of c, of this tile only.
            unsafe {
                let c = self.c.offset(row as isize * self.c_row + cols.start as isize * self.c_col);
                let from = tile.add(i * self.blocking.nr);
                if self.c_col == 1 {
                    std::ptr::copy_nonoverlapping(from, c, cols.len());
                } else {
                    for j in 0..cols.len() {
                        c.offset(j as isize * self.c_col).write(*from.add(j));
                    }
                }
            }
        }
    }
}

/// Copies `rows` x `cols` elements to rows of `width` elements.
///
/// # Safety
/// The elements are in the matrix, and `to` holds `rows * width`, with `cols <= width`.
unsafe fn copy_panel(m: Matrix, rows: usize, cols: usize, to: *mut f32, width: usize) {
    for i in 0..rows {
        // SAFETY: promised by the caller.
        unsafe {
            let (from, to) = (m.offset(i, 0), to.add(i * width));
            if m.col == 1 {
                std::ptr::copy_nonoverlapping(from, to, cols);
            } else {
                for j in 0..cols {
                    to.add(j).write(*from.offset(j as isize * m.col));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn product(isa: Isa, threads: usize, size: [usize; 3], transposed: [bool; 3]) {
        let [m, n, k] = size;
        let values = |len: usize, seed: usize| -> Vec<f32> {
            (0..len).map(|i| ((i * 7 + seed) % 23) as f32 - 11.0).collect()
        };
        let (a, b) = (values(m * k, 1), values(k * n, 5));
        let strides = |t: bool, rows: usize, cols: usize| {
            if t { (1, rows as isize) } else { (cols as isize, 1) }
        };
        let (ar, ac) = strides(transposed[0], m, k);
        let (br, bc) = strides(transposed[1], k, n);
        let (cr, cc) = strides(transposed[2], m, n);
        let mut c = vec![f32::NAN; m * n];
        let gemm = Gemm::new(isa, size);
        // What an earlier use left in the scratch memory must not matter.
        let mut scratch = vec![1e30f32; gemm.scratch_len(threads)];
        let a_mat = Matrix { ptr: a.as_ptr(), row: ar, col: ac };
        let b_mat = Matrix { ptr: b.as_ptr(), row: br, col: bc };
        // SAFETY: the strides stay within the three vectors.
        unsafe { gemm.run(threads, a_mat, b_mat, (c.as_mut_ptr(), cr, cc), scratch.as_mut_ptr()) };
        for i in 0..m {
            for j in 0..n {
                let want: f32 = (0..k)
                    .map(|p| {
                        a[(i as isize * ar + p as isize * ac) as usize]
                            * b[(p as isize * br + j as isize * bc) as usize]
                    })
                    .sum();
                // Small integers: every sum is exact.
                assert_eq!(c[(i as isize * cr + j as isize * cc) as usize], want, "({i}, {j})");
            }
        }
    }

    proptest! {
        #[test]
        fn exact_for_integers(m in 0usize..70, n in 0usize..90, k in 0usize..450, threads in 1usize..4, t: [bool; 3]) {
            for isa in Isa::available() {
                product(isa, threads, [m, n, k], t);
            }
        }
    }

    #[test]
    fn several_blocks_in_each_direction() {
        for isa in Isa::available() {
            product(isa, 2, [530, 520, 400], [false; 3]);
        }
    }
}
