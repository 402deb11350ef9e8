//! The filter's gradient as a matrix product: the im2col matrix transposed by the output's gradient,
//! summed over pixels in an order that does not depend on threads.

use super::super::gradient::{WeightGradient, with_gradient};
use super::super::method::Task;
use super::super::shared::pack::{MAX_PIXELS, PackPanels, PackRows, parts};
use super::super::shared::rows::{Rows, copy_transposed};
use super::super::shared::stencil::Stencil;
use super::super::shared::{strides4, tolerance};
use crate::cpu::gemm::{BlockedProduct, Blocking, Left, MAX_TERMS, Right, Scratch, left_stride};
use crate::cpu::{Isa, Kernel, Simd, SimdElement, dispatch};
use crate::{Result, TensorMut, TensorRef};
use std::ops::Range;

// A block of terms is packed at once.
const _: () = assert!(MAX_TERMS <= MAX_PIXELS);

/// The largest numbers of terms of the convolution and of output channels of a block.
const BLOCK: [usize; 2] = [128, 512];

/// The gradient of a forward [`Stencil`]'s filter, for one instruction set.
#[derive(Clone, Debug)]
pub(super) struct WeightProduct {
    stencil: Stencil,
    /// The same for reading its destination, with as long rows as can be.
    gradient: Stencil,
    blocking: Blocking,
    threads: usize,
}

impl WeightProduct {
    /// The weight gradient of any convolution.
    pub(super) fn prepare(task: &Task<'_>) -> Result<Option<Box<dyn WeightGradient>>> {
        let (stencil, threads) = (task.stencil.clone(), task.threads);
        let blocking = blocking(&stencil, task.isa, threads);
        let gradient = stencil.clone().with_long_rows();
        Ok(Some(Box::new(WeightProduct { stencil, gradient, blocking, threads })))
    }
}

impl WeightGradient for WeightProduct {
    fn tolerance(&self) -> f64 {
        tolerance(self.blocking.additions())
    }

    fn scratch_len(&self) -> usize {
        self.threads.min(self.blocking.tasks() * self.stencil.groups) * self.blocking.scratch_len()
    }

    fn run(
        &self,
        x: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        dw: &mut TensorMut<'_>,
        scratch: &mut [f32],
    ) {
        assert!(scratch.len() >= self.scratch_len(), "workspace");
        let strides = strides4(dw.strides());
        let (dtype, to, scratch) = (dw.dtype(), dw.as_mut_ptr(), scratch.as_mut_ptr());
        let (x, from, dy) = (x.as_ptr(), x.dtype(), dy.as_ptr());
        // SAFETY: the stencil was made for these layouts; dw is borrowed mutably; `Product` packs what the blocking gives
        // it scratch memory for.
        with_gradient!(from, dtype, (T, W) => unsafe {
            let (x, dy) = (x.cast::<T>(), dy.cast());
            let product = Product { plan: self, x, dy, dw: to.cast::<W>(), strides };
            self.blocking.run(&product, self.stencil.groups, self.threads, scratch);
        });
    }
}

/// The blocks by which threads are expected to be done first: each packs what it reads of both operands.
fn blocking(stencil: &Stencil, isa: Isa, threads: usize) -> Blocking {
    // Of a panel, in tiles that are multiplied in that time.
    const PACK_LEFT: usize = 1;
    const PACK_RIGHT: usize = 2;
    let size = [stencil.terms(), stencil.k, stencil.pixels()];
    let make = |block| Blocking::new(isa, size, block, Scratch { left: true, right: true });
    let time = |b: &Blocking| {
        let (left, right) = (b.mc / b.mr, b.nc / b.nr);
        let task = left * right + PACK_LEFT * left + PACK_RIGHT * right;
        (b.tasks() * stencil.groups).div_ceil(threads) * task
    };
    let Blocking { mr, nr, .. } = make(BLOCK);
    let [rows, cols] = [BLOCK[0] / mr, BLOCK[1] / nr].map(|most| (1..=most).rev());
    let blocks = rows.flat_map(|row| cols.clone().map(move |col| make([row * mr, col * nr])));
    // Of equals the largest.
    blocks.min_by_key(time).unwrap_or_else(|| make(BLOCK))
}

/// Rows are the terms of the convolution, columns its output channels, terms its pixels.
struct Product<'a, T, W> {
    plan: &'a WeightProduct,
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
            let room = row;
            dispatch(isa, PackRows { stencil, src, pixels, terms, to, row, room });
            Left { ptr: to, panel: mr, row: 1, step: row }
        } else {
            let (width, row) = (pixels.len().max(1), left_stride(pixels.len()));
            let panel = row * terms.len();
            dispatch(isa, PackPanels { stencil, src, pixels, terms, to, width, row, panel });
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
        let first = (group * stencil.k + cols.start) as isize * k_stride;
        for (at, channels, row, col) in parts(stencil.c, stencil.cols.len(), rows) {
            let offset = first
                + channels.start as isize * c_stride
                + stencil.rows[row].index as isize * row_stride
                + stencil.cols[col].index as isize * col_stride;
            // A filter at a time: its channels share cache lines.
            for j in 0..cols.len() {
                let to = self.dw.wrapping_offset(offset + j as isize * k_stride);
                for i in 0..channels.len() {
                    // SAFETY: an element of dw, and its sum in the tile.
                    unsafe {
                        let sum = *tile.add((at + i) * nr + j);
                        to.offset(i as isize * c_stride).write(W::from_f32(sum));
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
                        copy_transposed(s, (from.ptr, from.col), segment.len, channels, to, nr);
                    } else {
                        from.copy(s, segment.len, channels, to, nr);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::{Conv2dParams, Conv2dSpec};
    use crate::{DType, TensorDesc};

    #[test]
    fn threads_are_done_together() {
        for (c, k, side, taps) in [(3, 64, 112, 7), (64, 128, 28, 3), (256, 512, 14, 3)] {
            let desc = |shape: [usize; 4]| TensorDesc::contiguous(DType::F32, &shape).unwrap();
            let params =
                Conv2dParams { stride: [2; 2], padding: [taps / 2; 2], ..Default::default() };
            let (x, w) = (desc([4, c, side, side]), desc([k, c, taps, taps]));
            let spec = Conv2dSpec::new(x, w, &params).unwrap();
            let stencil = Stencil::forward(&spec, &spec.problem().unwrap()).unwrap();
            for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [(isa, 2), (isa, 4)])
            {
                let b = blocking(&stencil, isa, threads);
                let busiest = b.tasks().div_ceil(threads) * b.mc * b.nc;
                assert!(5 * threads * busiest <= 6 * b.rows * b.cols, "{threads} threads: {b:?}");
            }
        }
    }
}
