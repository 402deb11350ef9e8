//! Finished sums in rows of a tile on their way to the destination.

use super::epilogue::{Bounds, Epilogue, Lanes, scatter};
use super::stencil::{Segment, Stencil};
use crate::bf16;
use crate::cpu::math::activate;
use crate::cpu::{Bf16Products, Kernel, Simd, SimdElement};
use std::ops::Range;

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

/// Memory that is about to be written: for each channel `bytes` from `at` on, `stride` bytes apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lines {
    at: *const u8,
    stride: isize,
    channels: usize,
    bytes: usize,
    /// Next byte of the first channel.
    byte: usize,
}

impl Lines {
    /// Asks for the next cache line.
    #[inline(always)]
    pub(crate) fn ask<S: Simd>(&mut self, s: S) {
        if self.channels > 0 {
            s.prefetch_write(self.at.wrapping_add(self.byte));
            self.byte += 64;
            if self.byte >= self.bytes {
                self.byte = 0;
                self.at = self.at.wrapping_offset(self.stride);
                self.channels -= 1;
            }
        }
    }
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

/// A segment whose activation has no bounds, for all kernels in one place. Only [`Store::segment_ahead`] makes it,
/// whose caller guarantees that its pointers are valid.
struct Curved<'a, T> {
    store: &'a Store<'a, T>,
    segment: &'a Segment,
}

impl<T: SimdElement> Kernel for Curved<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: promised by the caller of `segment_ahead`.
        unsafe { self.store.segment_by::<S, true>(s, self.segment, self.segment.len) };
    }
}

impl<T: SimdElement> Store<'_, T> {
    /// The place of the first channel of a segment's first pixel.
    #[inline(always)]
    fn at(&self, segment: &Segment) -> *mut T {
        let [n_stride, k_stride, row_stride, col_stride] = self.stencil.dst;
        self.dst.wrapping_offset(
            segment.n as isize * n_stride
                + segment.i as isize * row_stride
                + segment.j as isize * col_stride
                + self.channels.start as isize * k_stride,
        )
    }

    /// The memory of all channels of pixels that lie next to each other.
    #[inline(always)]
    pub(crate) fn lines(&self, segment: &Segment) -> Lines {
        Lines {
            at: self.at(segment).cast(),
            stride: self.stencil.dst[1] * size_of::<T>() as isize,
            channels: self.channels.len(),
            bytes: segment.len * size_of::<T>(),
            byte: 0,
        }
    }

    /// The place of neighbouring pixels, if sums between bounds are what belongs there.
    #[inline(always)]
    pub(crate) fn plain(&self, segment: &Segment) -> Option<(*mut T, Bounds)> {
        let is_plain = self.stencil.dst[3] == 1 && self.epilogue.residual.is_none();
        let bounds = self.epilogue.bounds().filter(|_| is_plain)?;
        Some((self.at(segment), bounds))
    }

    /// Stores all channels of neighbouring pixels.
    ///
    /// # Safety
    /// Channels and pixels are the stencil's, their sums are in the tile, and nothing else accesses the destination.
    #[inline(always)]
    pub(crate) unsafe fn segment<S: Simd>(&self, s: S, segment: &Segment) {
        // SAFETY: passed on.
        unsafe { self.segment_ahead(s, segment, segment.len) }
    }

    /// The same, if vectors may write up to `ahead` neighbouring pixels of a channel: those after the segment are
    /// written again later.
    ///
    /// # Safety
    /// As for [`Store::segment`], of `ahead` pixels; one more vector is readable after the sums.
    #[inline(always)]
    pub(crate) unsafe fn segment_ahead<S: Simd>(&self, s: S, segment: &Segment, ahead: usize) {
        if self.epilogue.bounds().is_none() {
            return s.outlined(Curved { store: self, segment });
        }
        // SAFETY: passed on.
        unsafe { self.segment_by::<S, false>(s, segment, ahead) }
    }

    /// `CURVED`: the activation has no bounds.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn segment_by<S: Simd, const CURVED: bool>(
        &self,
        s: S,
        segment: &Segment,
        ahead: usize,
    ) {
        let [_, k_stride, _, col_stride] = self.stencil.dst;
        let at = self.at(segment);
        let bias = self.epilogue.bias.wrapping_add(self.channels.start);
        let has_bias = !self.epilogue.bias.is_null();
        // SAFETY: promised by the caller.
        unsafe {
            match self.lanes {
                Lanes::Pixels => {
                    for i in 0..self.channels.len() {
                        let bias = if has_bias { s.splat(*bias.add(i)) } else { s.zero() };
                        let dst = at.offset(i as isize * k_stride);
                        let sums = self.tile.add(i * self.row + segment.lane);
                        let len = [segment.len, ahead];
                        self.store_run::<S, CURVED>(s, sums, |_, _| bias, dst, col_stride, len);
                    }
                }
                Lanes::Channels => {
                    let bias = |at: usize, len: usize| {
                        if has_bias { s.load_first(bias.add(at), len) } else { s.zero() }
                    };
                    for j in 0..segment.len {
                        let dst = at.offset(j as isize * col_stride);
                        let sums = self.tile.add((segment.lane + j) * self.row);
                        let channels = self.channels.len();
                        let len = [channels, channels];
                        self.store_run::<S, CURVED>(s, sums, bias, dst, k_stride, len);
                    }
                }
            }
        }
    }

    /// Stores all channels of the pixels of a segment that runs on from row to row, of `width`.
    ///
    /// # Safety
    /// As for [`Store::segment`].
    #[inline(always)]
    pub(crate) unsafe fn rows<S: Simd>(&self, s: S, mut segment: Segment, width: usize) {
        let len = segment.len;
        while segment.lane < len {
            segment.len = (len - segment.lane).min(width - segment.j);
            // SAFETY: passed on.
            unsafe { self.segment(s, &segment) };
            segment.lane += segment.len;
            (segment.i, segment.j) = (segment.i + 1, 0);
        }
    }

    /// Stores `len` sums `stride` apart. `bias(at, len)` is that of sums `at..at + len`. Where the stride is 1, vectors
    /// may write up to `ahead` elements. `CURVED`: the activation has no bounds.
    ///
    /// # Safety
    /// `len` sums are readable, and `len` elements are writable; or `ahead` of both, with one more vector of sums.
    #[inline(always)]
    unsafe fn store_run<S: Simd, const CURVED: bool>(
        &self,
        s: S,
        sums: *const f32,
        bias: impl Fn(usize, usize) -> S::F32,
        dst: *mut T,
        stride: isize,
        [len, ahead]: [usize; 2],
    ) {
        let mut start = 0;
        let bounds = self.epilogue.bounds().unwrap_or(Bounds::NONE);
        if stride == 1 && !CURVED {
            while start < len && start + S::LANES <= ahead {
                // SAFETY: promised by the caller.
                unsafe {
                    let sum = s.add(s.load(sums.add(start)), bias(start, S::LANES));
                    let sum = self.epilogue.residual.add(s, sum, dst.add(start), S::LANES);
                    T::store(s, dst.add(start), bounds.of(s, sum));
                }
                start += S::LANES;
            }
        }
        for at in (start..len).step_by(S::LANES) {
            let count = S::LANES.min(len - at);
            // SAFETY: promised by the caller.
            unsafe {
                let sum = if count == S::LANES {
                    s.load(sums.add(at))
                } else {
                    s.load_first(sums.add(at), count)
                };
                let sum = s.add(sum, bias(at, count));
                let to = dst.offset(at as isize * stride);
                let sum = self.epilogue.residual.add_apart(s, sum, to, stride, count);
                let y = match CURVED {
                    true => activate(s, self.epilogue.activation, sum),
                    false => bounds.of(s, sum),
                };
                if stride != 1 {
                    scatter(s, y, to, stride, count);
                } else if count == S::LANES {
                    T::store(s, dst.add(at), y);
                } else {
                    T::store_first(s, dst.add(at), y, count);
                }
            }
        }
    }
}

/// Elements of which machines with products of bf16 store two vectors at once.
pub(crate) trait StoreTwo: SimdElement {
    /// # Safety
    /// Twice `LANES` elements are writable at `to`.
    unsafe fn store_two<P: Bf16Products>(p: P, to: *mut Self, v: [<P::Simd as Simd>::F32; 2]);
}

impl StoreTwo for bf16 {
    #[inline(always)]
    unsafe fn store_two<P: Bf16Products>(p: P, to: *mut bf16, v: [<P::Simd as Simd>::F32; 2]) {
        // SAFETY: passed on.
        unsafe { p.store2(to, v) }
    }
}

impl StoreTwo for f32 {
    #[inline(always)]
    unsafe fn store_two<P: Bf16Products>(p: P, to: *mut f32, v: [<P::Simd as Simd>::F32; 2]) {
        // SAFETY: passed on.
        unsafe { Self::store2::<_, false>(p.simd(), to, v) }
    }
}

impl<T: StoreTwo> Store<'_, T> {
    /// Stores two vectors at once, as [`Store::segment_ahead`].
    ///
    /// # Safety
    /// As there, with two more vectors after the sums.
    #[inline(always)]
    pub(crate) unsafe fn segment_of_pairs<P: Bf16Products>(
        &self,
        p: P,
        segment: &Segment,
        ahead: usize,
    ) {
        let s = p.simd();
        let (lanes, both) = (P::Simd::LANES, 2 * P::Simd::LANES);
        let [_, k_stride, _, col_stride] = self.stencil.dst;
        let channels = self.channels.len();
        let fills = match self.lanes {
            Lanes::Channels => k_stride == 1 && channels.is_multiple_of(both),
            Lanes::Pixels => col_stride == 1 && segment.len.next_multiple_of(both) <= ahead,
        };
        let Some(bounds) = self.epilogue.bounds().filter(|_| fills) else {
            // SAFETY: passed on.
            return unsafe { self.segment_ahead(s, segment, ahead) };
        };
        let residual = self.epilogue.residual;
        let (at, sums) = (self.at(segment), self.tile.wrapping_add(segment.lane * self.step()));
        let bias = self.epilogue.bias.wrapping_add(self.channels.start);
        let has_bias = !self.epilogue.bias.is_null();
        // SAFETY: promised by the caller.
        unsafe {
            match self.lanes {
                Lanes::Pixels => {
                    for i in 0..channels {
                        let bias = if has_bias { s.splat(*bias.add(i)) } else { s.zero() };
                        let (dst, sums) =
                            (at.offset(i as isize * k_stride), sums.add(i * self.row));
                        for start in (0..segment.len).step_by(both) {
                            let dst = dst.add(start);
                            let sums = sums.add(start);
                            let (a, b) = (s.load(sums), s.load(sums.add(lanes)));
                            let a = residual.add(s, s.add(a, bias), dst, lanes);
                            let b = residual.add(s, s.add(b, bias), dst.add(lanes), lanes);
                            T::store_two(p, dst, [bounds.of(s, a), bounds.of(s, b)]);
                        }
                    }
                }
                Lanes::Channels => {
                    for start in (0..channels).step_by(both) {
                        let mut biases = [s.zero(); 2];
                        if has_bias {
                            biases = [s.load(bias.add(start)), s.load(bias.add(start + lanes))];
                        }
                        for j in 0..segment.len {
                            let sums = sums.add(j * self.row + start);
                            let dst = at.offset(j as isize * col_stride).add(start);
                            let (a, b) = (s.load(sums), s.load(sums.add(lanes)));
                            let a = residual.add(s, s.add(a, biases[0]), dst, lanes);
                            let b = residual.add(s, s.add(b, biases[1]), dst.add(lanes), lanes);
                            T::store_two(p, dst, [bounds.of(s, a), bounds.of(s, b)]);
                        }
                    }
                }
            }
        }
    }

    /// Elements of the tile from a pixel's sums to the next.
    fn step(&self) -> usize {
        match self.lanes {
            Lanes::Pixels => 1,
            Lanes::Channels => self.row,
        }
    }
}
