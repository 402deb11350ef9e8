//! Sums of one group's channels that are a vector and a half.
//!
//! Half a vector by itself takes as long as a whole one. So its lanes hold the sums over two source channels in turns,
//! which are added at the end: two neighbours in memory are one number of twice the length, which a load repeats in all
//! lanes. Beside the sums of the whole vector they are enough to keep the multiplier's pipeline full.

use super::{Block, Channels, Read, Stencil};
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement, array};
use std::ops::Range;

/// The reader for one group.
#[derive(Clone, Copy)]
struct WithHalf;

impl<S: Simd> Read<S> for WithHalf {
    const SINGLE: bool = false;
    const BROADCASTS: bool = true;
    const HAS_HALF: bool = true;
    #[inline(always)]
    fn first(self, _: usize) -> usize {
        0
    }
    #[inline(always)]
    unsafe fn load<T: SimdElement>(self, s: S, at: *const T, c: usize) -> S::F32 {
        // SAFETY: passed on.
        unsafe { T::splat(s, at.add(c)) }
    }
}

/// The sums of some rows of a vector and a half of a group's channels, with a filter of [`pack_with_half`]. Whoever makes
/// it promises what [`Channels::sum`] asks for, an even number of source channels, filters of three neighbouring columns,
/// a step of 1, at most one column outside of the image on either side, and at least 4 pixels in a row.
pub(in crate::conv2d::cpu) struct HalfSums<'a, T>(pub Channels<'a, T, T>, pub Range<usize>);

impl<T: SimdElement> Kernel for HalfSums<'_, T> {
    type Output = ();
    const IS_SPECIAL: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let HalfSums(channels, rows) = self;
        // SAFETY: promised by whoever has made it.
        unsafe { channels.sum(s, WithHalf, rows) };
    }
}

/// Packs the filter of a vector of `lanes` channels and half a one, from `first` on, as [filter row, pair of source
/// channels, which of three, filter column, lane]. The three are a pair's first and second channel for the vector, and
/// both in turns for the half.
///
/// # Safety
/// The stencil's filter elements are readable, and as many are writable at `to` as these channels have.
pub(in crate::conv2d::cpu) unsafe fn pack_with_half<T: SimdElement>(
    stencil: &Stencil,
    filter: *const T,
    (group, first, lanes): (usize, usize, usize),
    mut to: *mut f32,
) {
    for &row in stencil.rows.iter() {
        for c in (0..stencil.c).step_by(2) {
            for part in 0..3 {
                for &col in stencil.cols.iter() {
                    for lane in 0..lanes {
                        let (k, c) = match part {
                            2 => (first + lanes + lane / 2, c + lane % 2),
                            _ => (first + lane, c + part),
                        };
                        let at = stencil.filter_offset(group, k, c, row, col);
                        // SAFETY: an element of the filter, and its place.
                        unsafe {
                            to.write(filter.wrapping_offset(at).read().to_f32());
                            to = to.wrapping_add(1);
                        }
                    }
                }
            }
        }
    }
}

impl<T: SimdElement, D: SimdElement> Block<'_, T, D> {
    /// The sums of a vector of channels, and those of half a one in its first lanes.
    ///
    /// # Safety
    /// As [`HalfSums`].
    #[inline(always)]
    pub(super) unsafe fn window_and_half<
        S: Simd,
        const P: usize,
        const TAPS: usize,
        const STEP: usize,
        const OUTSIDE: usize,
    >(
        &self,
        s: S,
        i: usize,
    ) -> ([S::F32; P], [S::F32; P]) {
        let Channels { stencil, src, src_strides: [row_stride, col_stride], .. } = *self.all;
        let (mut acc, mut pairs) = ([s.zero(); P], [s.zero(); P]);
        let first = (self.j * STEP) as isize + stencil.cols[0].offset;
        let start = src.wrapping_offset(first.wrapping_mul(col_stride));
        let (mut filter, part) = (self.all.filter, TAPS * S::LANES);
        for &row in stencil.rows.iter() {
            let Some(row) = stencil.src_row(i, row) else {
                filter = filter.wrapping_add(stencil.c / 2 * 3 * part);
                continue;
            };
            let from = start.wrapping_offset(row as isize * row_stride);
            for c in (0..stencil.c).step_by(2) {
                let at = |col: usize| {
                    from.wrapping_offset((col as isize).wrapping_mul(col_stride)).wrapping_add(c)
                };
                let of = |part: usize| (filter.wrapping_add(part), S::LANES);
                // SAFETY: columns inside of the source, and terms of the filter.
                unsafe {
                    let x = |col| T::splat(s, at(col));
                    acc = self.by_columns::<S, P, TAPS, STEP, OUTSIDE>(s, x, of(0), acc);
                    let x = |col| T::splat(s, at(col).wrapping_add(1));
                    acc = self.by_columns::<S, P, TAPS, STEP, OUTSIDE>(s, x, of(part), acc);
                    let x = |col| {
                        let pair: [T; 2] = at(col).cast::<[T; 2]>().read_unaligned();
                        s.splat_pair([pair[0].to_f32(), pair[1].to_f32()])
                    };
                    pairs = self.by_columns::<S, P, TAPS, STEP, OUTSIDE>(s, x, of(2 * part), pairs);
                }
                filter = filter.wrapping_add(3 * part);
            }
        }
        let other: [f32; MAX_LANES] = array(|lane| f32::from_bits(lane as u32 ^ 1));
        // SAFETY: a number for each lane.
        let other = s.to_bits(unsafe { s.load(other.as_ptr()) });
        for sum in &mut pairs {
            let both = s.add(*sum, s.permute(*sum, other));
            *sum = s.even(both, both);
        }
        (acc, pairs)
    }
}
