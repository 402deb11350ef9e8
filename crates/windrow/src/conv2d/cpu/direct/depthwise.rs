//! Vectors over channels that are groups of their own and lie next to each other.

use super::super::stencil::{Stencil, Tap};
use super::Operands;
use crate::cpu::math::activate;
use crate::cpu::{Isa, Kernel, Simd, SimdElement, dispatch};

/// Pixels that are summed at once, so that a vector of the filter is loaded once for all of them.
const PIXELS: usize = 4;

/// A unit is one row of the destination in one image.
#[derive(Clone, Debug)]
pub(super) struct Depthwise;

impl Depthwise {
    pub(super) fn fits(stencil: &Stencil) -> bool {
        stencil.c == 1 && stencil.k == 1 && stencil.src[1] == 1 && stencil.dst[1] == 1
    }

    pub(super) fn units(&self, stencil: &Stencil) -> usize {
        stencil.n * stencil.dst_size[0]
    }

    /// # Safety
    /// As for `Direct::run`.
    pub(super) unsafe fn run<T: SimdElement>(
        &self,
        isa: Isa,
        stencil: &Stencil,
        unit: usize,
        operands: &Operands<'_, T>,
    ) {
        dispatch(isa, Row { stencil, unit, operands });
    }
}

struct Row<'a, T> {
    stencil: &'a Stencil,
    unit: usize,
    operands: &'a Operands<'a, T>,
}

impl<T: SimdElement> Kernel for Row<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Stencil { groups, dst_size, .. } = *self.stencil;
        for j in (0..dst_size[1]).step_by(PIXELS) {
            let pixels = PIXELS.min(dst_size[1] - j);
            let inside = |tap: &Tap| self.stencil.inside(j, pixels, *tap).len() == pixels;
            // A stencil may have no taps, so the number of pixels is compared as well.
            let interior = pixels == PIXELS && self.stencil.cols.iter().all(inside);
            for channel in (0..groups).step_by(S::LANES) {
                let count = S::LANES.min(groups - channel);
                // SAFETY: channels and pixels of the stencil, each once.
                unsafe {
                    if interior && count == S::LANES {
                        self.pixels::<S, true>(s, channel, count, j, pixels);
                    } else {
                        self.pixels::<S, false>(s, channel, count, j, pixels);
                    }
                }
            }
        }
    }
}

impl<T: SimdElement> Row<'_, T> {
    /// `count` channels of `pixels` pixels; a whole vector of [`PIXELS`] pixels, all of whose taps
    /// are inside of the source's rows, if `FULL`.
    #[inline(always)]
    unsafe fn pixels<S: Simd, const FULL: bool>(
        &self,
        s: S,
        channel: usize,
        count: usize,
        j: usize,
        pixels: usize,
    ) {
        let (stencil, operands) = (self.stencil, self.operands);
        let (n, i) = (self.unit / stencil.dst_size[0], self.unit % stencil.dst_size[0]);
        let pixels = if FULL { PIXELS } else { pixels };
        let image = operands.src.wrapping_offset(n as isize * stencil.src[0] + channel as isize);
        let mut acc = [s.zero(); PIXELS];
        let mut filter = operands.packed.as_ptr().wrapping_add(channel);
        // SAFETY: `inside` pixels of taps in existing rows are in the source; the other addresses
        // are the stencil's own elements.
        unsafe {
            let load = |p: *const T| {
                if FULL || count == S::LANES { T::load(s, p) } else { T::load_first(s, p, count) }
            };
            let load_f32 = |p: *const f32| {
                if FULL || count == S::LANES { s.load(p) } else { s.load_first(p, count) }
            };
            for &row_tap in stencil.rows.iter() {
                let Some(row) = stencil.src_row(i, row_tap) else {
                    filter = filter.wrapping_add(stencil.cols.len() * stencil.groups);
                    continue;
                };
                let row = image.wrapping_offset(row as isize * stencil.src[2]);
                for &Tap { offset, .. } in stencil.cols.iter() {
                    let w = load_f32(filter);
                    filter = filter.wrapping_add(stencil.groups);
                    for (p, sum) in acc.iter_mut().enumerate().take(pixels) {
                        let col = ((j + p) * stencil.step[1]) as isize + offset;
                        if FULL || col >= 0 && col < stencil.src_size[1] as isize {
                            *sum = s.mul_add(w, load(row.offset(col * stencil.src[3])), *sum);
                        }
                    }
                }
            }
            let bias = operands.epilogue.bias;
            let bias = if bias.is_null() { s.zero() } else { load_f32(bias.add(channel)) };
            let [n_stride, _, row_stride, col_stride] = stencil.dst;
            let dst = operands.dst.wrapping_offset(
                stencil.dst_offset
                    + n as isize * n_stride
                    + i as isize * row_stride
                    + channel as isize,
            );
            for (p, sum) in acc.into_iter().enumerate().take(pixels) {
                let y = activate(s, operands.epilogue.activation, s.add(sum, bias));
                let to = dst.offset((j + p) as isize * col_stride);
                if FULL || count == S::LANES {
                    T::store(s, to, y)
                } else {
                    T::store_first(s, to, y, count)
                }
            }
        }
    }
}
