//! The copy of a row-major image to channels-last.

use crate::cpu::{Kernel, Simd};

/// The most channels for which this is fast: each has a loop of its own.
pub(super) const MOST_CHANNELS: usize = 4;

/// Writes the channels of pixels next to each other.
pub(super) struct Interleave {
    /// The first pixel of channel 0, and the distance of channels.
    pub x: *const f32,
    pub plane: usize,
    pub y: *mut f32,
    pub pixels: usize,
    /// At most [`MOST_CHANNELS`].
    pub c: usize,
}

impl Kernel for Interleave {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        // SAFETY: made of the pixels of two images.
        unsafe {
            match self.c {
                0 => {}
                1 => self.x.copy_to_nonoverlapping(self.y, self.pixels),
                2 => self.of::<2>(),
                3 => self.of::<3>(),
                MOST_CHANNELS => self.of::<MOST_CHANNELS>(),
                c => unreachable!("{c} channels"),
            }
        }
    }
}

impl Interleave {
    /// # Safety
    /// The pixels of C channels are readable and writable.
    #[inline(always)]
    unsafe fn of<const C: usize>(&self) {
        // Pointers and plain loops: with slices and closures the compiler does one element at a time.
        for pixel in 0..self.pixels {
            for c in 0..C {
                // SAFETY: promised by the caller.
                unsafe { *self.y.add(pixel * C + c) = *self.x.add(c * self.plane + pixel) };
            }
        }
    }
}
