//! Loops over the pixels of images: sums, gates, copies.

use super::Gate;
use crate::cpu::math::sigmoid;
use crate::cpu::{Kernel, Simd};
use std::ops::Range;

/// Loads `n <= LANES` elements. # Safety: they are readable.
#[inline(always)]
pub(super) unsafe fn load<S: Simd>(s: S, from: *const f32, n: usize) -> S::F32 {
    // SAFETY: passed on.
    unsafe { if n < S::LANES { s.load_first(from, n) } else { s.load(from) } }
}

/// Stores `n <= LANES` elements. # Safety: they are writable.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(s: S, to: *mut f32, v: S::F32, n: usize) {
    // SAFETY: passed on.
    unsafe { if n < S::LANES { s.store_first(to, v, n) } else { s.store(to, v) } }
}

/// Adds pixels to the sums of their channels.
pub(super) struct Sums {
    pub x: *const f32,
    pub pitch: usize,
    pub sums: *mut f32,
    pub pixels: usize,
    pub c: usize,
}

impl Kernel for Sums {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let c = self.c;
        let mut pixel = 0;
        while pixel < self.pixels {
            let four = self.pixels - pixel >= 4;
            // SAFETY: pixels of the part, whose sums are this task's.
            unsafe {
                let x = self.x.add(pixel * self.pitch);
                for i in (0..c).step_by(S::LANES) {
                    let (n, sums) = (S::LANES.min(c - i), self.sums.add(i));
                    let of = |pixel: usize| load(s, x.add(pixel * self.pitch + i), n);
                    let sum = match four {
                        true => s.add(s.add(of(0), of(1)), s.add(of(2), of(3))),
                        false => of(0),
                    };
                    store(s, sums, s.add(load(s, sums, n), sum), n);
                }
            }
            pixel += if four { 4 } else { 1 };
        }
    }
}

/// The activations of gates.
pub(super) struct Gates {
    pub gate: Gate,
    pub from: *const f32,
    pub to: *mut f32,
    pub len: usize,
}

impl Kernel for Gates {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for i in (0..self.len).step_by(S::LANES) {
            let n = S::LANES.min(self.len - i);
            // SAFETY: elements of the gates.
            unsafe {
                let x = load(s, self.from.add(i), n);
                let y = match self.gate {
                    Gate::Sigmoid => sigmoid(s, x),
                    Gate::HardSigmoid => {
                        let clamped = s.max(s.zero(), s.add(x, s.splat(3.0)));
                        s.div(s.min(s.splat(6.0), clamped), s.splat(6.0))
                    }
                };
                store(s, self.to.add(i), y, n);
            }
        }
    }
}

/// Multiplies the channels of pixels by gates.
pub(super) struct Scale {
    pub x: *const f32,
    pub gates: *const f32,
    pub y: *mut f32,
    /// The pitches of the image and of the result.
    pub pitches: [usize; 2],
    pub pixels: usize,
    pub c: usize,
}

impl Kernel for Scale {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for pixel in 0..self.pixels {
            let [from, to] = self.pitches.map(|pitch| pixel * pitch);
            for i in (0..self.c).step_by(S::LANES) {
                let n = S::LANES.min(self.c - i);
                // SAFETY: an element of both images and the gate of its channel.
                unsafe {
                    let gate = load(s, self.gates.add(i), n);
                    let x = load(s, self.x.add(from + i), n);
                    store(s, self.y.add(to + i), s.mul(x, gate), n);
                }
            }
        }
    }
}

/// Rows of the result, each the row of the image, or the sum of two images' rows, with its pixels repeated.
pub(super) struct Copies {
    /// The image, and what is added; null for nothing.
    pub x: [*const f32; 2],
    pub y: *mut f32,
    /// The pitches of both images and of the result.
    pub pitches: [usize; 3],
    /// Of all images together.
    pub rows: Range<usize>,
    /// Pixels of a row of the image.
    pub width: usize,
    /// How often rows and columns are repeated.
    pub times: [usize; 2],
    pub c: usize,
}

impl Kernel for Copies {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Copies { x: [x, second], y, pitches, rows, width, times: [down, right], c } = self;
        for row in rows {
            for column in 0..width {
                let from = row / down * width + column;
                let to = (row * width + column) * right;
                for i in (0..c).step_by(S::LANES) {
                    let n = S::LANES.min(c - i);
                    // SAFETY: elements of a pixel of each image.
                    unsafe {
                        let mut pixel = load(s, x.add(from * pitches[0] + i), n);
                        if !second.is_null() {
                            pixel = s.add(pixel, load(s, second.add(from * pitches[1] + i), n));
                        }
                        for time in 0..right {
                            store(s, y.add((to + time) * pitches[2] + i), pixel, n);
                        }
                    }
                }
            }
        }
    }
}
