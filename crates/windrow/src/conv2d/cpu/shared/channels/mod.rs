//! Sums over filter taps with vectors over channels that lie next to each other.

mod half;
mod window;

pub(in crate::conv2d::cpu) use half::{HalfSums, pack_with_half};

use super::epilogue::{Bounds, Epilogue, Sums};
use super::stencil::Stencil;
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement};
use std::ops::Range;

/// Channels that are summed for all rows before the next ones: what they read stays in the first-level cache.
const CHANNELS: usize = 128;

/// The way to read a vector of channels.
pub(in crate::conv2d::cpu) trait Read<S: Simd>: Copy {
    /// True if groups have one channel.
    const SINGLE: bool;
    /// True if all lanes read the same number, which a register need not hold for long.
    const BROADCASTS: bool = false;
    /// True if the channels are a vector and a half, which are summed together.
    const HAS_HALF: bool = false;
    /// The first source channel of a vector of destination channels from `k` on.
    fn first(self, k: usize) -> usize;
    /// The filter of a vector of destination channels from `k` on, relative to that of the first channel, and the distance
    /// of its terms, if there are so many channels.
    #[inline(always)]
    fn filter(self, k: usize, channels: usize) -> (usize, usize) {
        (k, channels)
    }
    /// Channel `c` of the groups that begin at `at`.
    ///
    /// # Safety
    /// What [`Read::first`] names is readable.
    unsafe fn load<T: SimdElement>(self, s: S, at: *const T, c: usize) -> S::F32;
}

/// The reader for depthwise convolutions, where each channel is a group.
#[derive(Clone, Copy)]
pub(in crate::conv2d::cpu) struct Single;

impl<S: Simd> Read<S> for Single {
    const SINGLE: bool = true;
    #[inline(always)]
    fn first(self, k: usize) -> usize {
        k
    }
    #[inline(always)]
    unsafe fn load<T: SimdElement>(self, s: S, at: *const T, _: usize) -> S::F32 {
        // SAFETY: passed on.
        unsafe { T::load(s, at) }
    }
}

/// Channels of some rows of the destination.
pub(in crate::conv2d::cpu) struct Channels<'a, T, D> {
    pub stencil: &'a Stencil,
    /// The first channel at row 0 and column 0; rows that taps read are in memory where they are inside of the image.
    pub src: *const T,
    /// Distance of rows and of columns.
    pub src_strides: [isize; 2],
    /// The filter of the first channel. Terms are as far apart as [`Read::filter`] says, ordered by filter row, source
    /// channel of the group, and filter column.
    pub filter: *const f32,
    pub count: usize,
    /// Its bias is the first channel's.
    pub epilogue: Epilogue,
    /// The first channel of the first row's first pixel, and the distance of rows and of pixels.
    pub dst: *mut D,
    pub dst_strides: [isize; 2],
}

/// The largest number of pixels at a time, and the number in narrow images, where most pixels are near a border.
const PIXELS: usize = 8;
const FEW: usize = 4;

/// Which columns are outside of the image, of those that neighbouring pixels read: none, the first one if bit 0 is set, the
/// last one if bit 1 is, or any.
const NONE: usize = 0;
const ANY: usize = 4;

/// The number of columns that the taps of neighbouring pixels read.
const fn columns(pixels: usize, taps: usize, step: usize) -> usize {
    (pixels - 1) * step + taps
}

/// Sums of neighbouring pixels on their way to the destination, with a residual or of few channels. Only
/// [`Channels::finish`] makes it.
struct Finish<D> {
    /// [pixel, LANES]
    sums: *const f32,
    pixels: usize,
    /// Channels of a pixel.
    len: usize,
    epilogue: Epilogue,
    /// The first pixel, and the distance of pixels.
    to: *mut D,
    col: isize,
}

impl<D: SimdElement> Kernel for Finish<D> {
    type Output = ();
    const IS_SPECIAL: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Finish { sums, pixels, len, epilogue, to, col } = self;
        for p in 0..pixels {
            // SAFETY: `finish` has made it of sums in memory, and of elements of the destination.
            unsafe {
                let sum = s.load(sums.add(p * S::LANES));
                epilogue.store(s, sum, to.wrapping_offset(p as isize * col), len);
            }
        }
    }
}

/// The sums of some rows of a depthwise convolution, as a kernel that methods share. Whoever makes it promises what
/// [`Channels::sum`] asks for.
pub(in crate::conv2d::cpu) struct SingleSums<'a, T, D>(pub Channels<'a, T, D>, pub Range<usize>);

impl<T: SimdElement, D: SimdElement> Kernel for SingleSums<'_, T, D> {
    type Output = ();
    const IS_SPECIAL: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let SingleSums(channels, rows) = self;
        // SAFETY: promised by whoever has made it.
        unsafe { channels.sum(s, Single, rows) };
    }
}

impl<T: SimdElement, D: SimdElement> Channels<'_, T, D> {
    /// Computes all pixels of rows, P at a time. A vector of the filter is loaded once for all P pixels, and P sums
    /// keep the multiplier's pipeline full. P is 7 instead of 8 if that leaves no rest.
    ///
    /// # Safety
    /// All that is named is in memory, and nothing else accesses the destination.
    #[inline(always)]
    pub(in crate::conv2d::cpu) unsafe fn sum<S: Simd, R: Read<S>>(
        &self,
        s: S,
        read: R,
        rows: Range<usize>,
    ) {
        let is_scale = R::SINGLE && self.stencil.is_one_tap() && self.stencil.step == [1, 1];
        let is_plain = self.count >= S::LANES && self.epilogue.residual.is_none();
        // SAFETY: passed on.
        unsafe {
            if let Some(bounds) = self.epilogue.bounds().filter(|_| is_scale && is_plain) {
                return self.scale(s, rows, bounds);
            }
            match self.stencil.dst_size[1] {
                width if width >= 8 && width % 7 != 0 => self.by_taps::<S, R, 8>(s, read, rows),
                7.. => self.by_taps::<S, R, 7>(s, read, rows),
                4..7 => self.by_taps::<S, R, FEW>(s, read, rows),
                _ if R::HAS_HALF => unreachable!("narrow images have sums without halves"),
                _ => self.pixels::<S, R, 1, 0, 0>(s, read, rows),
            }
        }
    }

    /// Channels that are multiplied by one number each, such as in a normalisation. Memory bounds it, so it is read and
    /// written in the order in which it lies.
    #[inline(always)]
    unsafe fn scale<S: Simd>(&self, s: S, rows: Range<usize>, bounds: Bounds) {
        let Channels { stencil, count, src_strides, dst_strides, .. } = *self;
        let first = rows.start;
        for i in rows {
            for j in 0..stencil.dst_size[1] {
                let at = |i: usize, strides: [isize; 2]| {
                    (i as isize).wrapping_mul(strides[0]) + (j as isize).wrapping_mul(strides[1])
                };
                let from = self.src.wrapping_offset(at(i, src_strides));
                let to = self.dst.wrapping_offset(at(i - first, dst_strides));
                for channel in (0..count).step_by(S::LANES) {
                    let channel = channel.min(count - S::LANES);
                    // SAFETY: channels of a pixel, of the filter and of the bias.
                    unsafe {
                        let w = s.load(self.filter.add(channel));
                        let bias = self.epilogue.biases(s, channel, S::LANES);
                        let sum = s.mul_add(w, T::load(s, from.add(channel)), s.zero());
                        D::store(s, to.add(channel), bounds.of(s, s.add(sum, bias)));
                    }
                }
            }
        }
    }

    /// Usual numbers of neighbouring column taps and steps are compiled as constants.
    #[inline(always)]
    unsafe fn by_taps<S: Simd, R: Read<S>, const P: usize>(
        &self,
        s: S,
        read: R,
        rows: Range<usize>,
    ) {
        let Stencil { cols, step, .. } = self.stencil;
        let is_dense = cols.windows(2).all(|taps| taps[0].offset + 1 == taps[1].offset);
        let is_whole = self.count >= S::LANES;
        let shape = if is_dense && is_whole { (cols.len(), step[1]) } else { (0, 0) };
        // SAFETY: passed on.
        unsafe {
            match shape {
                (3, 1) => self.pixels::<S, R, P, 3, 1>(s, read, rows),
                (3, 2) if !R::HAS_HALF => self.pixels::<S, R, P, 3, 2>(s, read, rows),
                (5, 1) if R::SINGLE => self.pixels::<S, R, P, 5, 1>(s, read, rows),
                (5, 2) if R::SINGLE => self.pixels::<S, R, P, 5, 2>(s, read, rows),
                (7, 1) if R::SINGLE => self.pixels::<S, R, P, 7, 1>(s, read, rows),
                _ if R::HAS_HALF => unreachable!("other filters have sums without halves"),
                _ => self.pixels::<S, R, P, 0, 0>(s, read, rows),
            }
        }
    }

    /// Groups of P pixels and a vector of channels; the last of either may be summed once more. `TAPS` is 0 for any
    /// columns.
    #[inline(always)]
    unsafe fn pixels<S, R, const P: usize, const TAPS: usize, const STEP: usize>(
        &self,
        s: S,
        read: R,
        rows: Range<usize>,
    ) where
        S: Simd,
        R: Read<S>,
    {
        let width = self.stencil.dst_size[1];
        let blocks = self.count.div_ceil(CHANNELS);
        for block in 0..width.div_ceil(P) * blocks {
            let j = (block / blocks * P).min(width - P);
            let first = block % blocks * CHANNELS;
            let block = Block {
                all: self,
                rows: rows.clone(),
                channels: first..(first + CHANNELS).min(self.count),
                j,
                inside: if TAPS > 0 { self.inside::<P, TAPS, STEP>(j) } else { 0..0 },
            };
            // SAFETY: channels and pixels that exist.
            unsafe {
                // Separate code for blocks that touch a border: the compiler would merge it, and hold all columns in
                // registers.
                match if TAPS > 0 && P > FEW { block.outside::<P, TAPS, STEP>() } else { ANY } {
                    NONE => block.sum::<S, R, P, TAPS, STEP, NONE>(s, read),
                    1 if R::BROADCASTS => block.sum::<S, R, P, TAPS, STEP, 1>(s, read),
                    // With a step of 2 most images have no column beyond the last one that is read.
                    2 if R::BROADCASTS && STEP == 1 => block.sum::<S, R, P, TAPS, STEP, 2>(s, read),
                    3 if R::BROADCASTS && STEP == 1 => block.sum::<S, R, P, TAPS, STEP, 3>(s, read),
                    _ if R::HAS_HALF && P > FEW => unreachable!("more columns outside"),
                    _ => block.sum::<S, R, P, TAPS, STEP, ANY>(s, read),
                }
            }
        }
    }

    /// The columns inside of the image, of those that P pixels from `j` on read.
    #[inline(always)]
    fn inside<const P: usize, const TAPS: usize, const STEP: usize>(
        &self,
        j: usize,
    ) -> Range<usize> {
        let first = (j * STEP) as isize + self.stencil.cols[0].offset;
        let most = columns(P, TAPS, STEP) as isize;
        let below = |bound: isize| (bound - first).clamp(0, most) as usize;
        below(0)..below(self.stencil.src_size[1] as isize)
    }

    /// Brings the sums of `len` channels, that more than bounds follow, to their place, from `to` on. `is_plain`: whole
    /// vectors, or half ones, without a residual.
    #[inline(always)]
    unsafe fn finish<S: Simd, const P: usize>(
        &self,
        s: S,
        acc: [S::F32; P],
        (channel, len): (usize, usize),
        to: *mut D,
        is_plain: bool,
    ) {
        let col = self.dst_strides[1];
        let mut sums = Sums::<{ PIXELS * MAX_LANES }>::new();
        let sums = sums.as_mut_ptr();
        // SAFETY: P is at most PIXELS; the rest is passed on.
        unsafe {
            let bias = self.epilogue.biases(s, channel, len);
            for (p, sum) in acc.iter().enumerate() {
                s.store(sums.add(p * S::LANES), s.add(*sum, bias));
            }
            if is_plain {
                let size = [P, len];
                self.epilogue.activate_rows(s, (sums, S::LANES), (to, col), size);
            } else {
                self.epilogue.activate_all(s, sums, P * S::LANES);
                s.outlined(Finish { sums, pixels: P, len, epilogue: self.epilogue, to, col });
            }
        }
    }

    /// Source channels of a sum.
    #[inline(always)]
    fn planes<S: Simd, R: Read<S>>(&self) -> usize {
        if R::SINGLE { 1 } else { self.stencil.c }
    }

    /// The filter of a vector of channels, and the distance of its terms.
    #[inline(always)]
    fn terms<S: Simd, R: Read<S>>(&self, read: R, channel: usize) -> (*const f32, usize) {
        let (first, term) = read.filter(channel, self.stencil.groups * self.stencil.k);
        (self.filter.wrapping_add(first), term)
    }

    /// Sums over any columns.
    #[inline(always)]
    unsafe fn sums<S: Simd, R: Read<S>, const P: usize>(
        &self,
        s: S,
        read: R,
        channel: usize,
        i: usize,
        j: usize,
    ) -> [S::F32; P] {
        let (stencil, planes) = (self.stencil, self.planes::<S, R>());
        let mut acc = [s.zero(); P];
        let (mut filter, term) = self.terms(read, channel);
        let [row_stride, col_stride] = self.src_strides;
        let next = col_stride.wrapping_mul(stencil.step[1] as isize);
        let image = self.src.wrapping_add(read.first(channel));
        for &row in stencil.rows.iter() {
            let Some(row) = stencil.src_row(i, row) else {
                filter = filter.wrapping_add(planes * stencil.cols.len() * term);
                continue;
            };
            let row = image.wrapping_offset(row as isize * row_stride);
            for plane in 0..planes {
                for &tap in stencil.cols.iter() {
                    let inside = stencil.inside(j, P, tap);
                    let col = (j * stencil.step[1]) as isize + tap.offset;
                    let from = row.wrapping_offset(col.wrapping_mul(col_stride));
                    let at = |p: usize| from.wrapping_offset(next.wrapping_mul(p as isize));
                    // SAFETY: pixels of taps in existing rows and columns are in the source, terms in the filter.
                    unsafe {
                        let w = s.load(filter);
                        // Without a question for each pixel where all are inside.
                        if inside.len() == P {
                            for (p, sum) in acc.iter_mut().enumerate() {
                                *sum = s.mul_add(w, read.load(s, at(p), plane), *sum);
                            }
                        } else {
                            for (p, sum) in acc.iter_mut().enumerate() {
                                if inside.contains(&p) {
                                    *sum = s.mul_add(w, read.load(s, at(p), plane), *sum);
                                }
                            }
                        }
                    }
                    filter = filter.wrapping_add(term);
                }
            }
        }
        acc
    }

    /// Sums of all channels, where they are single ones and fill no vector.
    #[inline(always)]
    unsafe fn few<S: Simd, const P: usize>(&self, s: S, i: usize, j: usize) -> [S::F32; P] {
        let stencil = self.stencil;
        let mut acc = [s.zero(); P];
        let mut filter = self.filter;
        let [row_stride, col_stride] = self.src_strides;
        for &row in stencil.rows.iter() {
            let row = stencil.src_row(i, row);
            for &tap in stencil.cols.iter() {
                let inside = stencil.inside(j, P, tap);
                let first = (j * stencil.step[1]) as isize + tap.offset;
                // SAFETY: pixels of taps in existing rows and columns are in the source, taps in the filter.
                unsafe {
                    let w = s.load_first(filter, self.count);
                    for (p, sum) in acc.iter_mut().enumerate() {
                        let Some(row) = row.filter(|_| inside.contains(&p)) else { continue };
                        let col = first + (p * stencil.step[1]) as isize;
                        let at = row as isize * row_stride + col.wrapping_mul(col_stride);
                        let x = T::load_first(s, self.src.wrapping_offset(at), self.count);
                        *sum = s.mul_add(w, x, *sum);
                    }
                }
                filter = filter.wrapping_add(stencil.groups);
            }
        }
        acc
    }
}

/// P neighbouring pixels of some rows, and some of the channels.
struct Block<'a, T, D> {
    all: &'a Channels<'a, T, D>,
    rows: Range<usize>,
    channels: Range<usize>,
    /// The first pixel.
    j: usize,
    /// The columns inside of the image, of those that the pixels read.
    inside: Range<usize>,
}

impl<T: SimdElement, D: SimdElement> Block<'_, T, D> {
    /// The columns outside of the image.
    #[inline(always)]
    fn outside<const P: usize, const TAPS: usize, const STEP: usize>(&self) -> usize {
        match [self.inside.start, columns(P, TAPS, STEP) - self.inside.end] {
            [first @ 0..=1, last @ 0..=1] => first + 2 * last,
            _ => ANY,
        }
    }

    /// Computes the block. `OUTSIDE`: the columns outside of the image.
    ///
    /// # Safety
    /// As [`Channels::sum`].
    #[inline(always)]
    unsafe fn sum<
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
    ) {
        let Channels { count, dst, dst_strides: [row, col], .. } = *self.all;
        let last = count.saturating_sub(S::LANES);
        for i in self.rows.clone() {
            let to = (i - self.rows.start) as isize * row + self.j as isize * col;
            let to = dst.wrapping_offset(to);
            for channel in self.channels.clone().step_by(S::LANES) {
                let channel = channel.min(last);
                let to = to.wrapping_add(channel);
                // SAFETY: passed on.
                unsafe {
                    if R::HAS_HALF {
                        let (acc, half) = self.window_and_half::<S, P, TAPS, STEP, OUTSIDE>(s, i);
                        self.put(s, acc, (0, S::LANES), to);
                        self.put(s, half, (S::LANES, S::LANES / 2), to.wrapping_add(S::LANES));
                        break;
                    }
                    let acc: [S::F32; P] = match TAPS {
                        0 if R::SINGLE && count < S::LANES => self.all.few(s, i, self.j),
                        0 => self.all.sums(s, read, channel, i, self.j),
                        _ => self.window::<S, R, P, TAPS, STEP, OUTSIDE>(s, read, channel, i),
                    };
                    self.put(s, acc, (channel, S::LANES.min(count)), to);
                }
            }
        }
    }

    /// Brings the sums of `len` channels to their place, from `to` on.
    #[inline(always)]
    unsafe fn put<S: Simd, const P: usize>(
        &self,
        s: S,
        acc: [S::F32; P],
        (channel, len): (usize, usize),
        to: *mut D,
    ) {
        let Channels { count, ref epilogue, dst_strides: [_, col], .. } = *self.all;
        let is_plain = count >= S::LANES && epilogue.residual.is_none();
        // SAFETY: passed on.
        unsafe {
            let Some(bounds) = epilogue.bounds().filter(|_| is_plain) else {
                return self.all.finish(s, acc, (channel, len), to, is_plain);
            };
            let bias = epilogue.biases(s, channel, len);
            for (p, sum) in acc.iter().enumerate() {
                let (to, y) = (to.wrapping_offset(p as isize * col), s.add(*sum, bias));
                let y = bounds.of(s, y);
                if len == S::LANES { D::store(s, to, y) } else { D::store_first(s, to, y, len) }
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;
    use crate::cpu::compiled::assert_in_registers;

    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build")]
    fn sums_stay_in_registers() {
        // AVX2: as many registers are too few for the sums of some filters.
        assert_in_registers::<SingleSums<'static, f32, f32>>([13, 0]);
    }
}
