//! Sums over filter columns that are neighbours, their number known when the code is compiled.

use super::{ANY, Block, Channels, NONE, PIXELS, Read, columns};
use crate::cpu::{Simd, SimdElement};

/// The largest number of columns that the taps of neighbouring pixels read.
const WINDOW: usize = columns(PIXELS, 5, 2);

impl<T: SimdElement, D: SimdElement> Block<'_, T, D> {
    /// Sums over TAPS neighbouring columns, STEP of which lie between pixels: a row of the source is loaded once for all
    /// of its taps.
    ///
    /// # Safety
    /// As [`Channels::sum`](super::Channels::sum).
    #[inline(always)]
    pub(super) unsafe fn window<
        S: Simd,
        R: Read<S>,
        const P: usize,
        const TAPS: usize,
        const STEP: usize,
        const OUTSIDE: usize,
    >(
        &self,
        s: S,
        read: R,
        channel: usize,
        i: usize,
    ) -> [S::F32; P] {
        let Channels { stencil, src, src_strides: [row_stride, col_stride], .. } = *self.all;
        let mut acc = [s.zero(); P];
        let first = (self.j * STEP) as isize + stencil.cols[0].offset;
        let start = src.wrapping_offset(first.wrapping_mul(col_stride));
        let start = start.wrapping_add(read.first(channel));
        let planes = self.all.planes::<S, R>();
        let (mut filter, term) = self.all.terms(read, channel);
        for &row in stencil.rows.iter() {
            let Some(row) = stencil.src_row(i, row) else {
                filter = filter.wrapping_add(planes * TAPS * term);
                continue;
            };
            let from = start.wrapping_offset(row as isize * row_stride);
            let at = |c: usize| from.wrapping_offset((c as isize).wrapping_mul(col_stride));
            for plane in 0..planes {
                // SAFETY: columns inside of the source, and terms of the filter.
                let x = |c| unsafe { read.load(s, at(c), plane) };
                // SAFETY: the same.
                acc = unsafe {
                    match OUTSIDE == NONE && !R::BROADCASTS || S::REGISTERS >= 32 {
                        true => {
                            self.by_taps::<S, P, TAPS, STEP, OUTSIDE>(s, x, (filter, term), acc)
                        }
                        false => {
                            self.by_columns::<S, P, TAPS, STEP, OUTSIDE>(s, x, (filter, term), acc)
                        }
                    }
                };
                filter = filter.wrapping_add(TAPS * term);
            }
        }
        acc
    }

    /// `acc` and the products of a row of the source, each of whose columns is loaded once. Taps are a distance apart.
    #[inline(always)]
    unsafe fn by_taps<
        S: Simd,
        const P: usize,
        const TAPS: usize,
        const STEP: usize,
        const OUTSIDE: usize,
    >(
        &self,
        s: S,
        load: impl Fn(usize) -> S::F32,
        (filter, term): (*const f32, usize),
        mut acc: [S::F32; P],
    ) -> [S::F32; P] {
        let mut x = [s.zero(); WINDOW];
        for (c, x) in x.iter_mut().enumerate().take(columns(P, TAPS, STEP)) {
            if self.is_inside::<P, TAPS, STEP, OUTSIDE>(c) {
                *x = load(c);
            }
        }
        for t in 0..TAPS {
            // SAFETY: a term of the filter.
            let w = unsafe { s.load(filter.wrapping_add(t * term)) };
            for (p, sum) in acc.iter_mut().enumerate() {
                let c = p * STEP + t;
                if OUTSIDE == ANY || self.is_inside::<P, TAPS, STEP, OUTSIDE>(c) {
                    *sum = s.mul_add(w, x[c], *sum);
                }
            }
        }
        acc
    }

    /// True if a column is inside of the image.
    #[inline(always)]
    fn is_inside<const P: usize, const TAPS: usize, const STEP: usize, const OUTSIDE: usize>(
        &self,
        c: usize,
    ) -> bool {
        match OUTSIDE {
            ANY => self.inside.contains(&c),
            _ => {
                (c > 0 || OUTSIDE & 1 == 0) && (c + 1 < columns(P, TAPS, STEP) || OUTSIDE & 2 == 0)
            }
        }
    }

    /// `acc` and the products of a row of the source, column by column, in the same order. It takes fewer registers than
    /// to hold all columns, each of which exists or not. Taps are a distance apart.
    ///
    /// # Safety
    /// `filter` has so many terms.
    #[inline(always)]
    pub(super) unsafe fn by_columns<
        S: Simd,
        const P: usize,
        const TAPS: usize,
        const STEP: usize,
        const OUTSIDE: usize,
    >(
        &self,
        s: S,
        load: impl Fn(usize) -> S::F32,
        (filter, term): (*const f32, usize),
        mut acc: [S::F32; P],
    ) -> [S::F32; P] {
        const { assert!(columns(P, TAPS, STEP) <= 14 * STEP) }
        let holds = P + TAPS + 1 < S::REGISTERS;
        let mut w = [s.zero(); TAPS];
        // SAFETY: terms of the filter.
        unsafe {
            if holds {
                for (t, w) in w.iter_mut().enumerate() {
                    *w = s.load(filter.wrapping_add(t * term));
                }
            }
            // Steps by literals: the compiler does not unroll so long a loop.
            macro_rules! steps {
                ($($q:literal)*) => {$(
                    let q = $q;
                    for r in 0..STEP {
                        let c = q * STEP + r;
                        if c < columns(P, TAPS, STEP) && self.is_inside::<P, TAPS, STEP, OUTSIDE>(c) {
                            let x = load(c);
                            for u in 0..(TAPS - r).div_ceil(STEP) {
                                if u <= q && q - u < P {
                                    let t = u * STEP + r;
                                    let w = match holds {
                                        true => w[t],
                                        false => s.load(filter.wrapping_add(t * term)),
                                    };
                                    acc[q - u] = s.mul_add(w, x, acc[q - u]);
                                }
                            }
                        }
                    }
                )*};
            }
            steps!(0 1 2 3 4 5 6 7 8 9 10 11 12 13);
        }
        acc
    }
}
