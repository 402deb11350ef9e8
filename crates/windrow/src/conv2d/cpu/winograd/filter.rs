//! The filter transform: `U = G g G^T`, packed for the micro-kernel.
//!
//! Computed in f64 and rounded once, since its error is that of every output. Vectors run over output channels.

// Indices are those of the formulas; iterators over arrays of vectors are not inlined where they are long.
#![allow(clippy::needless_range_loop)]

use super::super::shared::rows::copy_transposed;
use crate::conv2d::Tile;
use crate::conv2d::winograd::{MAX_ALPHA, TAPS};
use crate::cpu::{Kernel, Simd, SimdElement};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Taps of a filter.
const ALL: usize = TAPS * TAPS;

/// Numbers of a position of U that are collected before they are written: some input channels of a panel. Positions
/// lie a power of two apart, as channels often are, so that their cache lines displace each other before they are full.
const STAGE: usize = 128;

/// The matrix `G` with the shared work of point pairs taken out: rows of a pair differ only in the sign of the second
/// coefficient.
struct Coefficients {
    /// The first row has one coefficient; the last one is 0, 0, 1.
    at_zero: f64,
    pairs: [[f64; TAPS]; (MAX_ALPHA - 2) / 2],
}

impl Coefficients {
    /// The coefficients for the tile with this `alpha`.
    const fn new(alpha: usize) -> Self {
        let t = match alpha {
            4 => Tile::F2.transforms(),
            6 => Tile::F4.transforms(),
            8 => Tile::F6.transforms(),
            _ => panic!("no tile has this alpha"),
        };
        let mut pairs = [[0.0; TAPS]; (MAX_ALPHA - 2) / 2];
        let mut q = 0;
        while 2 * q + 2 < alpha {
            let mut tap = 0;
            while tap < TAPS {
                pairs[q][tap] = t.g[1 + 2 * q][tap].to_f64();
                tap += 1;
            }
            q += 1;
        }
        Coefficients { at_zero: t.g[0][0].to_f64(), pairs }
    }
}

/// `G x`
#[inline(always)]
fn apply<S: Simd, const A: usize>(s: S, x: [S::F64; TAPS]) -> [S::F64; A] {
    let k = const { Coefficients::new(A) };
    let mut out = [x[2]; A];
    out[0] = s.mul_f64(x[0], k.at_zero);
    for q in 0..(A - 2) / 2 {
        let [a, b, c] = k.pairs[q];
        let even = s.mul_add_f64(x[2], c, s.mul_f64(x[0], a));
        out[1 + 2 * q] = s.mul_add_f64(x[1], b, even);
        out[2 + 2 * q] = s.mul_add_f64(x[1], -b, even);
    }
    out
}

/// The filter transform of one panel of output channels, `A` = alpha.
pub(super) struct FilterTransform<W, const A: usize> {
    /// Input channels.
    pub c: usize,
    pub w: *const W,
    /// Strides of w [k, c, 3, 3]
    pub strides: [isize; 4],
    /// Output channels of the panel that exist.
    pub channels: Range<usize>,
    /// Output channels of the panel: whole vectors.
    pub width: usize,
    /// U [position, c, width] of the panel, aligned to vectors if it is `far`.
    pub u: *mut f32,
    /// Distance between positions of U.
    pub u_position: usize,
    /// True if U is larger than the caches.
    pub far: bool,
}

impl<W: SimdElement, const A: usize> Kernel for FilterTransform<W, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Not zeroed, which would be a thousand stores of vectors: all that is read is written before.
        let mut stage = Stage([[MaybeUninit::uninit(); STAGE]; MAX_ALPHA * MAX_ALPHA]);
        let mut taps = [MaybeUninit::uninit(); ALL * STAGE];
        let at_once = STAGE / self.width;
        for first in (0..self.c).step_by(at_once) {
            let channels = first..self.c.min(first + at_once);
            for lane in (0..self.width).step_by(S::LANES) {
                let Self { w, strides, channels: ref output, width, .. } = self;
                let (input, to) = (channels.clone(), &mut taps);
                s.outlined(Load { w, strides, output: output.start + lane..output.end, input, to });
                let (taps, count, stage) = (&taps[..], channels.len(), &mut stage);
                s.outlined(Transform::<A> { taps, count, stage, at: lane, width });
            }
            // SAFETY: U is as documented; each vector of each of these channels has been transformed to the stage.
            unsafe { self.store(s, &stage, first * self.width, channels.len() * self.width) };
        }
        if self.far {
            s.stream_fence();
        }
    }
}

/// The first numbers of U [position, c, width] from some input channel on.
#[repr(align(64))]
struct Stage([[MaybeUninit<f32>; STAGE]; MAX_ALPHA * MAX_ALPHA]);

/// Taps [c, tap, LANES] of some input channels and a vector of output channels, zeros for those that do not exist. Made by
/// [`FilterTransform`] only, whose filter has them.
struct Load<'a, W> {
    w: *const W,
    strides: [isize; 4],
    output: Range<usize>,
    input: Range<usize>,
    to: &'a mut [MaybeUninit<f32>; ALL * STAGE],
}

impl<W: SimdElement> Kernel for Load<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Load { w, strides, output, input: channels, to } = self;
        let [stride_k, stride_c, stride_r, stride_s] = strides;
        let (first, to) = (output.start, to.as_mut_ptr().cast::<f32>());
        let count = output.end.saturating_sub(first).min(S::LANES);
        let w = w.wrapping_offset(first as isize * stride_k + channels.start as isize * stride_c);
        let taps = || (0..TAPS).flat_map(|i| (0..TAPS).map(move |j| (i, j)));
        let place = |i: usize, j: usize| i as isize * stride_r + j as isize * stride_s;
        let distance = ALL * S::LANES;
        // SAFETY: channels that exist; there is room for STAGE / LANES of the input.
        unsafe {
            if count < S::LANES {
                std::ptr::write_bytes(to, 0, channels.len() * distance);
            }
            if stride_s.abs() == 1 && stride_r == TAPS as isize * stride_s {
                let is_turned = stride_s < 0;
                let lowest =
                    if is_turned { w.wrapping_offset(place(TAPS - 1, TAPS - 1)) } else { w };
                for (c, first) in (0..channels.len())
                    .flat_map(|c| (0..ALL).step_by(S::LANES).map(move |t| (c, t)))
                {
                    let from = lowest.wrapping_offset(c as isize * stride_c).wrapping_add(first);
                    let some = S::LANES.min(ALL - first);
                    let mut square = s.zeros();
                    for (k, taps) in square.as_mut().iter_mut().enumerate().take(count) {
                        *taps = W::load_first(s, from.wrapping_offset(k as isize * stride_k), some);
                    }
                    for (i, &v) in s.transpose(square).as_ref().iter().enumerate().take(some) {
                        let tap = if is_turned { ALL - 1 - first - i } else { first + i };
                        s.store(to.add(c * distance + tap * S::LANES), v);
                    }
                }
            } else if stride_k == 1 {
                for c in 0..channels.len() {
                    for (tap, (i, j)) in taps().enumerate() {
                        let from = w.wrapping_offset(c as isize * stride_c + place(i, j));
                        s.store(
                            to.add(c * distance + tap * S::LANES),
                            W::load_first(s, from, count),
                        );
                    }
                }
            } else if stride_c == 1 {
                for (tap, (i, j)) in taps().enumerate() {
                    let from = (w.wrapping_offset(place(i, j)), stride_k);
                    copy_transposed(
                        s,
                        from,
                        channels.len(),
                        count,
                        to.add(tap * S::LANES),
                        distance,
                    );
                }
            } else {
                for (c, k) in (0..channels.len()).flat_map(|c| (0..count).map(move |k| (c, k))) {
                    let from = w.wrapping_offset(c as isize * stride_c + k as isize * stride_k);
                    for (tap, (i, j)) in taps().enumerate() {
                        let x = from.wrapping_offset(place(i, j)).read().to_f32();
                        to.add(c * distance + tap * S::LANES + k).write(x);
                    }
                }
            }
        }
    }
}

/// Vectors of U for every position, of the taps [c, tap, LANES] of `count` input channels: the first to `at`, others
/// `width` apart. Made by [`FilterTransform`] only, which has loaded these taps.
struct Transform<'a, const A: usize> {
    taps: &'a [MaybeUninit<f32>],
    count: usize,
    stage: &'a mut Stage,
    at: usize,
    width: usize,
}

impl<const A: usize> Kernel for Transform<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Transform { taps, count, stage, at, width } = self;
        for (i, g) in taps.chunks_exact(ALL * S::LANES).enumerate().take(count) {
            // SAFETY: the taps of a channel that is loaded.
            unsafe { Self::vector(s, g, stage, at + i * width) };
        }
    }
}

impl<const A: usize> Transform<'_, A> {
    /// Writes a vector of U for every position to `at`, of taps [tap, LANES].
    ///
    /// # Safety
    /// All taps are written.
    #[inline(always)]
    unsafe fn vector<S: Simd>(s: S, g: &[MaybeUninit<f32>], stage: &mut Stage, at: usize) {
        assert!(g.len() == ALL * S::LANES && at + S::LANES <= STAGE, "a vector of filters");
        let mut columns = [[s.widen(s.zero()); TAPS]; A];
        for j in 0..TAPS {
            let mut x = [s.widen(s.zero()); TAPS];
            for (i, x) in x.iter_mut().enumerate() {
                let g = g.as_ptr().cast::<f32>();
                // SAFETY: a vector for each tap, written as the caller promises.
                *x = s.widen(unsafe { s.load(g.add((i * TAPS + j) * S::LANES)) });
            }
            let column = apply::<S, A>(s, x);
            for i in 0..A {
                columns[i][j] = column[i];
            }
        }
        for i in 0..A {
            let row = apply::<S, A>(s, columns[i]);
            for j in 0..A {
                let to = stage.0[i * A + j].as_mut_ptr().cast::<f32>();
                // SAFETY: a vector of the position.
                unsafe { s.store(to.add(at), s.narrow(row[j])) };
            }
        }
    }
}

impl<W: SimdElement, const A: usize> FilterTransform<W, A> {
    /// # Safety
    /// `len` numbers of every position of U must be writable from `at` on, and those of the stage written.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, stage: &Stage, at: usize, len: usize) {
        for (position, from) in stage.0.iter().enumerate().take(A * A) {
            let to = self.u.wrapping_add(position * self.u_position + at);
            // Widths of panels are whole vectors.
            for i in (0..len).step_by(S::LANES) {
                // SAFETY: passed on; vectors of U are aligned as it is.
                unsafe {
                    let v = s.load(from.as_ptr().cast::<f32>().add(i));
                    match self.far {
                        true => s.stream(to.add(i), v),
                        false => s.store(to.add(i), v),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::conv2d::Tile;

    #[test]
    fn rows_of_g_come_in_pairs() {
        for tile in Tile::ALL {
            let t = tile.transforms();
            let row = |i: usize| t.g[i].map(|g| g.to_f64());
            assert_eq!(row(0)[1..], [0.0; 2]);
            assert_eq!(row(t.alpha - 1), [0.0, 0.0, 1.0]);
            for i in (1..t.alpha - 1).step_by(2) {
                let ([a, b, c], minus) = (row(i), row(i + 1));
                assert_eq!(minus, [a, -b, c]);
            }
        }
    }
}
