//! The filter's gradient as a matrix product: the im2col matrix transposed by the output's gradient,
//! summed over pixels in an order that does not depend on threads.

use super::pack::{MAX_PIXELS, PackPanels, PackRows, parts};
use super::rows::{Rows, copy_turned};
use super::stencil::Stencil;
use crate::cpu::gemm::{BlockedProduct, Blocking, Left, MAX_TERMS, Right, Scratch, left_stride};
use crate::cpu::{Isa, Kernel, Simd, SimdElement, dispatch};
use std::ops::Range;

// A block of terms is packed at once.
const _: () = assert!(MAX_TERMS <= MAX_PIXELS);

/// Most output channels of a block: the im2col matrix is packed once for each.
const CHANNELS: usize = 512;

/// The gradient of a forward [`Stencil`]'s filter, for one instruction set.
#[derive(Clone, Debug)]
pub(crate) struct WeightGrad {
    stencil: Stencil,
    /// The same for reading its destination, with as long rows as can be.
    gradient: Stencil,
    blocking: Blocking,
    threads: usize,
}

impl WeightGrad {
    pub(crate) fn new(stencil: Stencil, isa: Isa, threads: usize) -> Self {
        let size = [stencil.terms(), stencil.k, stencil.pixels()];
        let scratch = Scratch { left: true, right: true };
        let mut block = [128, CHANNELS];
        let mut blocking = Blocking::new(isa, size, block, scratch);
        // Smaller blocks where threads would be idle.
        while blocking.tasks() * stencil.groups < 2 * threads && block[0] > 16 {
            block = block.map(|b| b / 2);
            blocking = Blocking::new(isa, size, block, scratch);
        }
        let gradient = stencil.clone().with_long_rows();
        WeightGrad { stencil, gradient, blocking, threads }
    }

    /// Most additions in a row that form an element.
    pub(crate) fn additions(&self) -> usize {
        self.blocking.additions()
    }

    /// Elements of scratch memory.
    pub(crate) fn scratch_len(&self) -> usize {
        self.threads.min(self.blocking.tasks() * self.stencil.groups) * self.blocking.scratch_len()
    }

    /// `dw` has the strides of k, c, row and column that are given.
    ///
    /// # Safety
    /// Elements of x (the stencil's source) and dy (its destination) are in memory, those of dw too
    /// and touched by nobody else; `scratch` holds [`WeightGrad::scratch_len`] elements.
    pub(crate) unsafe fn run<T: SimdElement, W: SimdElement>(
        &self,
        x: *const T,
        dy: *const T,
        dw: *mut W,
        strides: [isize; 4],
        scratch: *mut f32,
    ) {
        let product = Product { plan: self, x, dy, dw, strides };
        // SAFETY: passed on; `Product` packs what the blocking gives it scratch memory for.
        unsafe { self.blocking.run(&product, self.stencil.groups, self.threads, scratch) }
    }
}

/// Rows are the terms of the convolution, columns its output channels, terms its pixels.
struct Product<'a, T, W> {
    plan: &'a WeightGrad,
    x: *const T,
    dy: *const T,
    dw: *mut W,
    strides: [isize; 4],
}

// SAFETY: x and dy are only read; each element of dw is written by one task.
unsafe impl<T, W> Sync for Product<'_, T, W> {}

impl<T: SimdElement, W: SimdElement> BlockedProduct for Product<'_, T, W> {
    unsafe fn left(
        &self,
        group: usize,
        rows: Range<usize>,
        terms: Range<usize>,
        to: *mut f32,
    ) -> Left {
        let Blocking { isa, mr, .. } = self.plan.blocking;
        let stencil = &self.plan.stencil;
        let src = self.x.wrapping_offset(stencil.src_group(group));
        let (pixels, terms) = (terms, rows);
        if stencil.src[1] == 1 {
            let row = left_stride(terms.len());
            dispatch(isa, PackRows { stencil, src, pixels, terms, to, row });
            Left { ptr: to, panel: mr, row: 1, step: row }
        } else {
            let (width, row) = (pixels.len().max(1), left_stride(pixels.len()));
            dispatch(isa, PackPanels { stencil, src, pixels, terms, to, width, row });
            Left { ptr: to, panel: mr * row, row, step: 1 }
        }
    }

    unsafe fn right(
        &self,
        group: usize,
        cols: Range<usize>,
        terms: Range<usize>,
        to: *mut f32,
    ) -> Right {
        let Blocking { isa, nr, .. } = self.plan.blocking;
        let stencil = &self.plan.gradient;
        let dy = self.dy.wrapping_offset(stencil.dst_group(group));
        let panel = nr * terms.len();
        dispatch(isa, PackGradient { stencil, dy, channels: cols, pixels: terms, to, nr });
        Right { ptr: to, panel }
    }

    unsafe fn store(&self, group: usize, rows: Range<usize>, cols: Range<usize>, tile: *const f32) {
        let (stencil, nr) = (&self.plan.stencil, self.plan.blocking.nr);
        let [k_stride, c_stride, row_stride, col_stride] = self.strides;
        for (at, channels, row, col) in parts(stencil.c, stencil.cols.len(), rows) {
            for (i, c) in channels.enumerate() {
                for (j, k) in cols.clone().enumerate() {
                    let offset = (group * stencil.k + k) as isize * k_stride
                        + c as isize * c_stride
                        + stencil.rows[row].index as isize * row_stride
                        + stencil.cols[col].index as isize * col_stride;
                    // SAFETY: an element of dw, and its sum in the tile.
                    unsafe {
                        let sum = *tile.add((at + i) * nr + j);
                        self.dw.offset(offset).write(W::from_f32(sum));
                    }
                }
            }
        }
    }
}

/// Panels [panel, pixel, channel of the panel] of the output's gradient.
struct PackGradient<'a, T> {
    stencil: &'a Stencil,
    /// Channel 0 of the group.
    dy: *const T,
    channels: Range<usize>,
    pixels: Range<usize>,
    to: *mut f32,
    nr: usize,
}

impl<T: SimdElement> Kernel for PackGradient<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let PackGradient { stencil, nr, .. } = self;
        let [n_stride, k_stride, row_stride, col_stride] = stencil.dst;
        for (q, k) in self.channels.clone().step_by(nr).enumerate() {
            let channels = nr.min(self.channels.end - k);
            let panel = self.to.wrapping_add(q * nr * self.pixels.len());
            for segment in stencil.segments(self.pixels.clone()) {
                let offset = segment.n as isize * n_stride
                    + k as isize * k_stride
                    + segment.i as isize * row_stride
                    + segment.j as isize * col_stride;
                let from =
                    Rows { ptr: self.dy.wrapping_offset(offset), row: col_stride, col: k_stride };
                let to = panel.wrapping_add(segment.lane * nr);
                // SAFETY: channels and pixels of dy, and their rows in the panel.
                unsafe {
                    if col_stride == 1 {
                        copy_turned(s, (from.ptr, from.col), segment.len, channels, to, nr);
                    } else {
                        from.copy(s, segment.len, channels, to, nr);
                    }
                }
            }
        }
    }
}
