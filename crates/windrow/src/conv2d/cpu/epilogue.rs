//! Bias, activation and rounding of finished sums on their way to the destination.

use super::stencil::{Segment, Stencil};
use crate::Activation;
use crate::cpu::math::activate;
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement};
use std::ops::Range;

/// What lies next to each other in the destination, and so fills a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lanes {
    Pixels,
    Channels,
}

/// What is applied to sums: bias of each channel, then the activation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epilogue {
    /// Bias of channel 0, in f32; null for none.
    pub bias: *const f32,
    pub activation: Activation,
}

impl Epilogue {
    /// No bias, no activation.
    pub(crate) const NONE: Epilogue =
        Epilogue { bias: std::ptr::null(), activation: Activation::Identity };

    /// The same for the channels of a group of `k` channels.
    pub(crate) fn for_group(self, group: usize, k: usize) -> Self {
        let bias = if self.bias.is_null() { self.bias } else { self.bias.wrapping_add(group * k) };
        Epilogue { bias, ..self }
    }
}

/// Stores sums in rows of `row` elements: a row for each channel, with lanes over pixels, or the
/// other way round.
pub(crate) struct Store<'a, T> {
    pub stencil: &'a Stencil,
    pub lanes: Lanes,
    /// Channel 0 of the group, pixel 0.
    pub dst: *mut T,
    pub epilogue: Epilogue,
    pub channels: Range<usize>,
    /// The first channel's sum for the first pixel.
    pub tile: *const f32,
    pub row: usize,
}

/// Stores a tile of all the pixels in a range.
pub(crate) struct StoreTile<'a, T> {
    pub store: Store<'a, T>,
    pub pixels: Range<usize>,
}

impl<T: SimdElement> Kernel for StoreTile<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for segment in self.store.stencil.segments(self.pixels.clone()) {
            // SAFETY: whoever makes a `StoreTile` names channels and pixels of the stencil, has
            // their sums in memory, and stores each element once.
            unsafe { self.store.segment(s, &segment) };
        }
    }
}

impl<T: SimdElement> Store<'_, T> {
    /// Stores all channels of neighbouring pixels.
    ///
    /// # Safety
    /// Channels and pixels are the stencil's, their sums are in the tile, and nobody else touches
    /// the destination.
    #[inline(always)]
    pub(crate) unsafe fn segment<S: Simd>(&self, s: S, segment: &Segment) {
        let [n_stride, k_stride, row_stride, col_stride] = self.stencil.dst;
        let at = segment.n as isize * n_stride
            + segment.i as isize * row_stride
            + segment.j as isize * col_stride
            + self.channels.start as isize * k_stride;
        let bias = self.epilogue.bias.wrapping_add(self.channels.start);
        let has_bias = !self.epilogue.bias.is_null();
        // SAFETY: promised by the caller.
        unsafe {
            match self.lanes {
                Lanes::Pixels => {
                    for i in 0..self.channels.len() {
                        let bias = if has_bias { s.splat(*bias.add(i)) } else { s.zero() };
                        let dst = self.dst.offset(at + i as isize * k_stride);
                        let sums = self.tile.add(i * self.row + segment.lane);
                        self.store_run(s, sums, |_, _| bias, dst, col_stride, segment.len);
                    }
                }
                Lanes::Channels => {
                    let bias = |at: usize, len: usize| {
                        if has_bias { s.load_first(bias.add(at), len) } else { s.zero() }
                    };
                    for j in 0..segment.len {
                        let dst = self.dst.offset(at + j as isize * col_stride);
                        let sums = self.tile.add((segment.lane + j) * self.row);
                        self.store_run(s, sums, bias, dst, k_stride, self.channels.len());
                    }
                }
            }
        }
    }

    /// Stores `len` sums `stride` apart. `bias(at, len)` is that of sums `at..at + len`.
    ///
    /// # Safety
    /// `len` sums are readable, and as many elements writable.
    #[inline(always)]
    unsafe fn store_run<S: Simd>(
        &self,
        s: S,
        sums: *const f32,
        bias: impl Fn(usize, usize) -> S::F32,
        dst: *mut T,
        stride: isize,
        len: usize,
    ) {
        for at in (0..len).step_by(S::LANES) {
            let count = S::LANES.min(len - at);
            // SAFETY: promised by the caller.
            unsafe {
                let sum = if count == S::LANES {
                    s.load(sums.add(at))
                } else {
                    s.load_first(sums.add(at), count)
                };
                let y = activate(s, self.epilogue.activation, s.add(sum, bias(at, count)));
                if stride != 1 {
                    let mut lanes = [0f32; MAX_LANES];
                    s.store(lanes.as_mut_ptr(), y);
                    for (i, &y) in lanes[..count].iter().enumerate() {
                        dst.offset((at + i) as isize * stride).write(T::from_f32(y));
                    }
                } else if count == S::LANES {
                    T::store(s, dst.add(at), y);
                } else {
                    T::store_first(s, dst.add(at), y, count);
                }
            }
        }
    }
}
