//! The filter transform: `U = G g G^T`, packed for the micro-kernel.
//!
//! Computed in f64, since it happens seldom and its error is that of every output.

use crate::conv2d::winograd::{MAX_ALPHA, TAPS, Transforms};
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement};
use std::ops::Range;

/// Output channels that are transformed at once: on most machines a panel of them.
const ROW: usize = MAX_LANES;

/// Numbers of one filter element for each of some output channels.
type Row = [f64; ROW];

/// Numbers of a position of U that are collected before they are written: some input channels of a panel. Positions
/// lie a power of two apart, as channels often are, so that their cache lines displace each other before they are full.
const STAGE: usize = 128;

/// `G` in f64.
#[derive(Clone, Copy)]
pub(super) struct Coefficients {
    alpha: usize,
    rows: [[f64; TAPS]; MAX_ALPHA],
}

impl Coefficients {
    pub(super) fn new(transforms: &Transforms) -> Self {
        let mut rows = [[0.0; TAPS]; MAX_ALPHA];
        for (row, exact) in rows.iter_mut().zip(&transforms.g).take(transforms.alpha) {
            *row = exact.map(|g| g.to_f64());
        }
        Coefficients { alpha: transforms.alpha, rows }
    }

    /// The `alpha` sums `G x`. Between the first and the last row lie pairs that differ in the sign of the second
    /// coefficient only: they share their products, without another rounding.
    #[inline(always)]
    fn apply(&self, x: [&Row; TAPS], out: &mut [Row; MAX_ALPHA]) {
        for i in [0, self.alpha - 1] {
            let k = &self.rows[i];
            for lane in 0..ROW {
                out[i][lane] = k[0] * x[0][lane] + k[1] * x[1][lane] + k[2] * x[2][lane];
            }
        }
        for i in (1..self.alpha - 1).step_by(2) {
            let k = &self.rows[i];
            for lane in 0..ROW {
                let [a, b, c] = [k[0] * x[0][lane], k[1] * x[1][lane], k[2] * x[2][lane]];
                out[i][lane] = a + b + c;
                out[i + 1][lane] = a - b + c;
            }
        }
    }
}

/// The filter transform of one panel of output channels.
pub(super) struct FilterTransform<'a, W> {
    pub coefficients: &'a Coefficients,
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
    /// Whether U is more than the caches hold.
    pub far: bool,
}

impl<W: SimdElement> Kernel for FilterTransform<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut stage = Stage([[0.0; STAGE]; MAX_ALPHA * MAX_ALPHA]);
        let at_once = STAGE / self.width;
        for first in (0..self.c).step_by(at_once) {
            let channels = first..self.c.min(first + at_once);
            for c in channels.clone() {
                for lane in (0..self.width).step_by(ROW) {
                    // SAFETY: channel c of filters that exist.
                    let g = unsafe { self.load(c, lane) };
                    self.transform(&g, &mut stage, (c - first) * self.width + lane);
                }
            }
            // SAFETY: U is as documented.
            unsafe { self.store(s, &stage, first * self.width, channels.len() * self.width) };
        }
        if self.far {
            s.stream_fence();
        }
    }
}

/// The first numbers of U [position, c, width] from some input channel on.
#[repr(align(64))]
struct Stage([[f32; STAGE]; MAX_ALPHA * MAX_ALPHA]);

impl<W: SimdElement> FilterTransform<'_, W> {
    /// Input channel `c` of a row of output channels, zeros for those that do not exist.
    ///
    /// # Safety
    /// w must reach it.
    #[inline(always)]
    unsafe fn load(&self, c: usize, first: usize) -> [[Row; TAPS]; TAPS] {
        let mut g = [[[0.0; ROW]; TAPS]; TAPS];
        let [stride_k, stride_c, stride_r, stride_s] = self.strides;
        for (lane, k) in self.channels.clone().skip(first).take(ROW).enumerate() {
            let filter = self.w.wrapping_offset(k as isize * stride_k + c as isize * stride_c);
            for (i, g) in g.iter_mut().enumerate() {
                for (j, g) in g.iter_mut().enumerate() {
                    let offset = i as isize * stride_r + j as isize * stride_s;
                    // SAFETY: passed on.
                    g[lane] = f64::from(unsafe { (*filter.offset(offset)).to_f32() });
                }
            }
        }
        g
    }

    /// Writes a row of U for every position to `at`.
    #[inline(always)]
    fn transform(&self, g: &[[Row; TAPS]; TAPS], stage: &mut Stage, at: usize) {
        let alpha = self.coefficients.alpha;
        let lanes = ROW.min(self.width);
        let mut columns = [[[0.0; ROW]; MAX_ALPHA]; TAPS];
        for (tap, column) in columns.iter_mut().enumerate() {
            self.coefficients.apply([&g[0][tap], &g[1][tap], &g[2][tap]], column);
        }
        let [first, second, third] = &columns;
        let mut rows = [[0.0; ROW]; MAX_ALPHA];
        for (i, to) in stage.0.chunks_exact_mut(alpha).enumerate().take(alpha) {
            self.coefficients.apply([&first[i], &second[i], &third[i]], &mut rows);
            for (row, to) in rows.iter().zip(to) {
                let row = row.map(|x| x as f32);
                to[at..at + lanes].copy_from_slice(&row[..lanes]);
            }
        }
    }

    /// # Safety
    /// `len` numbers of every position of U must be writable from `at` on.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, stage: &Stage, at: usize, len: usize) {
        let positions = self.coefficients.alpha * self.coefficients.alpha;
        for (position, from) in stage.0.iter().enumerate().take(positions) {
            let to = self.u.wrapping_add(position * self.u_position + at);
            // Widths of panels are whole vectors.
            for i in (0..len).step_by(S::LANES) {
                // SAFETY: passed on; vectors of U are aligned as it is.
                unsafe {
                    let v = s.load(from.as_ptr().add(i));
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
            let transforms = tile.transforms();
            for i in (1..transforms.alpha - 1).step_by(2) {
                let [[a, b, c], minus] = [i, i + 1].map(|i| transforms.g[i].map(|g| g.to_f64()));
                assert_eq!(minus, [a, -b, c]);
            }
        }
    }
}
