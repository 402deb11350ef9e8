//! The filter transform: `U = G g G^T`, packed for the micro-kernel.
//!
//! Computed in f64, since it happens once and its error is that of every output.

use super::gemm::PANEL;
use crate::conv2d::winograd::{MAX_ALPHA, TAPS, Transforms};
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement};
use std::ops::Range;

/// Numbers of one filter element for each lane.
type Row = [f64; MAX_LANES];

/// The filter transform of one vector of output channels.
pub(super) struct FilterTransform<'a, W> {
    pub transforms: &'a Transforms,
    /// Input channels.
    pub c: usize,
    pub w: *const W,
    /// Strides of w [k, c, 3, 3]
    pub strides: [isize; 4],
    /// At most a vector of output channels.
    pub channels: Range<usize>,
    /// U [position, panel, c, PANEL * LANES] at the first panel
    pub u: *mut f32,
    /// Distance between positions of U.
    pub u_position: usize,
    /// Vectors of output channels of U, and which of them this is.
    pub vectors: usize,
    pub vector: usize,
}

impl<W: SimdElement> Kernel for FilterTransform<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let panel = self.vector / PANEL * PANEL;
        let width = PANEL.min(self.vectors - panel);
        let first = (panel * self.c + self.vector - panel) * S::LANES;
        for c in 0..self.c {
            // SAFETY: channel c of filters that exist; U is as documented.
            unsafe {
                let g = self.load::<S>(c);
                self.store(s, &g, self.u.add(first + c * width * S::LANES));
            }
        }
    }
}

impl<W: SimdElement> FilterTransform<'_, W> {
    /// Channel `c` of the filters, zeros for lanes without one.
    ///
    /// # Safety
    /// w must reach it.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, c: usize) -> [[Row; TAPS]; TAPS] {
        let mut g = [[[0.0; MAX_LANES]; TAPS]; TAPS];
        for (lane, k) in self.channels.clone().enumerate().take(S::LANES) {
            for (i, g) in g.iter_mut().enumerate() {
                for (j, g) in g.iter_mut().enumerate() {
                    let [stride_k, stride_c, stride_r, stride_s] = self.strides;
                    let offset = k as isize * stride_k
                        + c as isize * stride_c
                        + i as isize * stride_r
                        + j as isize * stride_s;
                    // SAFETY: passed on.
                    g[lane] = f64::from(unsafe { (*self.w.offset(offset)).to_f32() });
                }
            }
        }
        g
    }

    /// # Safety
    /// `u` must reach a vector of every position.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, g: &[[Row; TAPS]; TAPS], u: *mut f32) {
        let alpha = self.transforms.alpha;
        let mut columns = [[[0.0; MAX_LANES]; TAPS]; MAX_ALPHA];
        for (i, column) in columns.iter_mut().enumerate().take(alpha) {
            for (tap, column) in column.iter_mut().enumerate() {
                *column = combine(&self.coefficients(i), [&g[0][tap], &g[1][tap], &g[2][tap]]);
            }
        }
        for (i, [a, b, c]) in columns.iter().enumerate().take(alpha) {
            for j in 0..alpha {
                let row = combine(&self.coefficients(j), [a, b, c]).map(|x| x as f32);
                // SAFETY: passed on; a row has at least LANES elements.
                unsafe {
                    s.store(u.add((i * alpha + j) * self.u_position), s.load(row.as_ptr()));
                }
            }
        }
    }

    #[inline(always)]
    fn coefficients(&self, row: usize) -> [f64; TAPS] {
        self.transforms.g[row].map(|g| g.to_f64())
    }
}

#[inline(always)]
fn combine(k: &[f64; TAPS], x: [&Row; TAPS]) -> Row {
    let mut sum = [0.0; MAX_LANES];
    for lane in 0..MAX_LANES {
        sum[lane] = k[0] * x[0][lane] + k[1] * x[1][lane] + k[2] * x[2][lane];
    }
    sum
}
