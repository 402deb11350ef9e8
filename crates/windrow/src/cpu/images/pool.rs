//! Pooling.

use super::Window;
use super::pixels::{load, store};
use crate::cpu::{Kernel, Simd};
use std::ops::Range;

/// Rows of pooled pixels. `MAX`: the largest of each window, otherwise their mean.
pub(super) struct Pool<const MAX: bool> {
    pub window: Window,
    pub x: *const f32,
    pub y: *mut f32,
    /// The pitches of the image and of the result.
    pub pitches: [usize; 2],
    pub image: [usize; 2],
    pub result: [usize; 2],
    pub c: usize,
    /// Of all images together.
    pub rows: Range<usize>,
}

impl<const MAX: bool> Kernel for Pool<MAX> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.rows.start..self.rows.end {
            let (image, oh) = (row / self.result[0], row % self.result[0]);
            let (top, bottom) = self.taps(0, oh);
            for ow in 0..self.result[1] {
                let (left, right) = self.taps(1, ow);
                let at = ((image * self.image[0] + top) * self.image[1] + left) * self.pitches[0];
                // SAFETY: pixels inside the image, and a pixel of this task.
                unsafe {
                    let x = self.x.add(at);
                    let y = self.y.add((row * self.result[1] + ow) * self.pitches[1]);
                    self.pixel(s, x, y, [bottom - top, right - left]);
                }
            }
        }
    }
}

impl<const MAX: bool> Pool<MAX> {
    /// The first pixel of a window inside the image, and the one behind its last.
    #[inline(always)]
    fn taps(&self, d: usize, index: usize) -> (usize, usize) {
        let (start, padding) = (index * self.window.stride[d], self.window.padding[d]);
        let end = (start + self.window.size[d]).saturating_sub(padding).min(self.image[d]);
        (start.saturating_sub(padding), end)
    }

    /// # Safety
    /// `taps` rows and columns of pixels are readable from `x` on, and the channels of a pixel writable at `y`.
    #[inline(always)]
    unsafe fn pixel<S: Simd>(&self, s: S, x: *const f32, y: *mut f32, taps: [usize; 2]) {
        let (c, pitch) = (self.c, self.pitches[0]);
        let width = self.image[1] * pitch;
        for i in (0..c).step_by(S::LANES) {
            let n = S::LANES.min(c - i);
            let mut sum = s.splat(if MAX { f32::NEG_INFINITY } else { 0.0 });
            for row in 0..taps[0] {
                for column in 0..taps[1] {
                    // SAFETY: promised by the caller.
                    let x = unsafe { load(s, x.add(row * width + column * pitch + i), n) };
                    sum = match MAX {
                        // The second of `max` if either is NaN.
                        true => s.select(s.is_nan(sum), sum, s.max(sum, x)),
                        false => s.add(sum, x),
                    };
                }
            }
            if !MAX {
                sum = s.div(sum, s.splat((taps[0] * taps[1]) as f32));
            }
            // SAFETY: promised by the caller.
            unsafe { store(s, y.add(i), sum, n) };
        }
    }
}
