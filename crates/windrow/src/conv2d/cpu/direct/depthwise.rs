//! Vectors over channels that are groups of their own and lie next to each other.

use super::super::epilogue::Epilogue;
use super::super::stencil::{Stencil, Tap};
use super::Operands;
use crate::cpu::math::activate;
use crate::cpu::{Isa, Kernel, MAX_LANES, Simd, SimdElement, dispatch};

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
        // So many pixels at once: a vector of the filter is loaded once for all of them, and as many sums as the
        // multiplier has steps are on their way. Where one of the numbers leaves no rest, that.
        match self.stencil.dst_size[1] {
            width if width >= 8 && width % 7 != 0 => self.row::<S, 8>(s),
            7.. => self.row::<S, 7>(s),
            4..7 => self.row::<S, 4>(s),
            _ => self.row::<S, 1>(s),
        }
    }
}

impl<T: SimdElement> Row<'_, T> {
    /// Groups of P pixels and a vector of channels; the last of either may be summed once more.
    #[inline(always)]
    fn row<S: Simd, const P: usize>(&self, s: S) {
        let Stencil { groups, dst_size, .. } = *self.stencil;
        for j in (0..dst_size[1]).step_by(P) {
            let j = j.min(dst_size[1] - P);
            let inside = |tap: &Tap| self.stencil.inside(j, P, *tap).len() == P;
            let interior = self.stencil.cols.iter().all(inside);
            for channel in (0..groups).step_by(S::LANES) {
                let channel = channel.min(groups.saturating_sub(S::LANES));
                // SAFETY: channels and pixels of the stencil.
                unsafe {
                    if groups < S::LANES {
                        self.pixels::<S, P, false, false>(s, channel, j);
                    } else if interior {
                        self.pixels::<S, P, true, true>(s, channel, j);
                    } else {
                        self.pixels::<S, P, true, false>(s, channel, j);
                    }
                }
            }
        }
    }

    /// Channels of P pixels: a whole vector if `FULL`, else all; with all taps inside of the source's rows if
    /// `INTERIOR`.
    #[inline(always)]
    unsafe fn pixels<S: Simd, const P: usize, const FULL: bool, const INTERIOR: bool>(
        &self,
        s: S,
        channel: usize,
        j: usize,
    ) {
        let (stencil, operands) = (self.stencil, self.operands);
        let (n, i) = (self.unit / stencil.dst_size[0], self.unit % stencil.dst_size[0]);
        let image = operands.src.wrapping_offset(n as isize * stencil.src[0] + channel as isize);
        let count = stencil.groups;
        let mut acc = [s.zero(); P];
        let mut filter = operands.packed.as_ptr().wrapping_add(channel);
        let next = stencil.src[3].wrapping_mul(stencil.step[1] as isize);
        // SAFETY: pixels of taps in existing rows and columns are in the source; the other addresses are the
        // stencil's own elements.
        unsafe {
            let load = |p: *const T| if FULL { T::load(s, p) } else { T::load_first(s, p, count) };
            let load_f32 = |p: *const f32| if FULL { s.load(p) } else { s.load_first(p, count) };
            for &row_tap in stencil.rows.iter() {
                let Some(row) = stencil.src_row(i, row_tap) else {
                    filter = filter.wrapping_add(stencil.cols.len() * stencil.groups);
                    continue;
                };
                let row = image.wrapping_offset(row as isize * stencil.src[2]);
                for &Tap { offset, .. } in stencil.cols.iter() {
                    let w = load_f32(filter);
                    filter = filter.wrapping_add(stencil.groups);
                    let col = (j * stencil.step[1]) as isize + offset;
                    let from = row.wrapping_offset(col.wrapping_mul(stencil.src[3]));
                    for (p, sum) in acc.iter_mut().enumerate() {
                        let col = col + (p * stencil.step[1]) as isize;
                        if INTERIOR || col >= 0 && col < stencil.src_size[1] as isize {
                            let x = load(from.wrapping_offset(next.wrapping_mul(p as isize)));
                            *sum = s.mul_add(w, x, *sum);
                        }
                    }
                }
            }
            let mut sums = [0f32; 8 * MAX_LANES];
            for (p, sum) in acc.into_iter().enumerate() {
                s.store(sums.as_mut_ptr().add(p * MAX_LANES), sum);
            }
            let Epilogue { bias, activation } = operands.epilogue;
            let bias = if bias.is_null() { s.zero() } else { load_f32(bias.add(channel)) };
            let [n_stride, _, row_stride, col_stride] = stencil.dst;
            let dst = operands.dst.wrapping_offset(
                stencil.dst_offset
                    + n as isize * n_stride
                    + i as isize * row_stride
                    + channel as isize,
            );
            for p in 0..P {
                let sum = s.add(s.load(sums.as_ptr().add(p * MAX_LANES)), bias);
                let y = match operands.epilogue.bound() {
                    Some(bound) => s.max(s.splat(bound), sum),
                    None => activate(s, activation, sum),
                };
                let to = dst.offset((j + p) as isize * col_stride);
                if FULL { T::store(s, to, y) } else { T::store_first(s, to, y, count) }
            }
        }
    }
}
