//! Vectors over the channels of many groups: each its own group, or groups of few channels.

use super::direct::{Operands, Packing, TapSums, TapUnit};
use super::method::Task;
use super::shared::Vectors;
use super::shared::epilogue::Epilogue;
use super::shared::stencil::Stencil;
use crate::Result;
use crate::conv2d::Conv2dAlgorithm;
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement, array, dispatch};

/// Channels lie next to each other. A unit is one row of the destination in one image.
#[derive(Clone, Debug)]
pub(super) struct Grouped {
    groups: Groups,
}

/// The source channels that a vector of destination channels reads.
#[derive(Clone, Copy, Debug)]
enum Groups {
    /// The same channels of the source.
    Single,
    /// The source channels of several small groups.
    Small,
    /// The same numbers in all lanes, of one group.
    Large,
}

impl TapSums for Grouped {
    const ALGORITHM: Conv2dAlgorithm = Conv2dAlgorithm::DirectGrouped;

    /// `None` where channels do not lie next to each other, or groups do not fill vectors.
    fn new(stencil: &Stencil, task: &Task<'_>) -> Result<Option<Self>> {
        let Stencil { c, k, groups, src, dst, .. } = *stencil;
        let (lanes, _) = dispatch(task.isa, Vectors);
        let groups = match (c, k) {
            _ if src[1] != 1 || dst[1] != 1 || task.isa.is_small() => return Ok(None),
            (1, 1) => Groups::Single,
            _ if c == k && lanes.is_multiple_of(k) && k * groups >= lanes => Groups::Small,
            _ if k > 0 && k.is_multiple_of(lanes) => Groups::Large,
            _ => return Ok(None),
        };
        Ok(Some(Grouped { groups }))
    }

    fn packing(&self, _: &Stencil) -> Packing {
        Packing::Channels
    }

    fn units(&self, stencil: &Stencil) -> usize {
        stencil.n * stencil.dst_size[0]
    }

    fn scratch_len(&self, _: &Stencil) -> usize {
        0
    }

    fn explain(&self) -> String {
        format!("lanes over channels of {:?} groups", self.groups).to_lowercase()
    }

    unsafe fn run<T: SimdElement>(&self, unit: TapUnit<'_, T>, _: *mut f32) {
        let TapUnit { isa, stencil, unit, operands } = unit;
        dispatch(isa, Row { groups: self.groups, stencil, unit, operands });
    }
}

/// The way to read a vector of channels.
pub(super) trait Read<S: Simd>: Copy {
    /// True if groups have one channel.
    const SINGLE: bool;
    /// The first source channel of a vector of destination channels from `k` on.
    fn first(self, k: usize) -> usize;
    /// Channel `c` of the groups that begin at `at`.
    ///
    /// # Safety
    /// What [`Read::first`] names is readable.
    unsafe fn load<T: SimdElement>(self, s: S, at: *const T, c: usize) -> S::F32;
}

/// The reader for depthwise convolutions, where each channel is a group.
#[derive(Clone, Copy)]
pub(super) struct Single;

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

/// Whole groups with equal numbers of source and destination channels.
#[derive(Clone, Copy)]
struct Small {
    /// The first lane of each lane's group, as bits.
    firsts: [f32; MAX_LANES],
}

impl<S: Simd> Read<S> for Small {
    const SINGLE: bool = false;
    #[inline(always)]
    fn first(self, k: usize) -> usize {
        k
    }
    #[inline(always)]
    unsafe fn load<T: SimdElement>(self, s: S, at: *const T, c: usize) -> S::F32 {
        // SAFETY: passed on; `firsts` has a number for each lane.
        unsafe {
            let firsts = s.to_bits(s.load(self.firsts.as_ptr()));
            let lanes = s.add_i32(firsts, s.to_bits(s.splat(f32::from_bits(c as u32))));
            s.permute(T::load(s, at), lanes)
        }
    }
}

/// The reader for groups with `c` source and `k` destination channels.
#[derive(Clone, Copy)]
struct Large {
    c: usize,
    k: usize,
}

impl<S: Simd> Read<S> for Large {
    const SINGLE: bool = false;
    #[inline(always)]
    fn first(self, k: usize) -> usize {
        k / self.k * self.c
    }
    #[inline(always)]
    unsafe fn load<T: SimdElement>(self, s: S, at: *const T, c: usize) -> S::F32 {
        // SAFETY: passed on.
        s.splat(unsafe { at.add(c).read() }.to_f32())
    }
}

struct Row<'a, T> {
    groups: Groups,
    stencil: &'a Stencil,
    unit: usize,
    operands: &'a Operands<'a, T>,
}

impl<T: SimdElement> Kernel for Row<'_, T> {
    type Output = ();
    const IS_SPECIAL: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Row { groups, stencil, unit, operands } = self;
        let (n, i) = (unit / stencil.dst_size[0], unit % stencil.dst_size[0]);
        let [n_stride, _, row, col] = stencil.dst;
        let at = stencil.dst_offset + n as isize * n_stride + i as isize * row;
        let first = Channels {
            stencil,
            src: operands.src.wrapping_offset(n as isize * stencil.src[0]),
            src_strides: [stencil.src[2], stencil.src[3]],
            filter: operands.packed.as_ptr(),
            count: stencil.groups * stencil.k,
            epilogue: operands.epilogue,
            dst: operands.dst.wrapping_offset(at),
            dst_col: col,
        };
        let (c, k) = (stencil.c, stencil.k);
        // SAFETY: the stencil's own channels and pixels.
        unsafe {
            match groups {
                Groups::Single => first.row(s, Single, i),
                Groups::Small => {
                    let first_lane = |lane: usize| f32::from_bits((lane / k * k) as u32);
                    first.row(s, Small { firsts: array(first_lane) }, i);
                }
                Groups::Large => first.row(s, Large { c, k }, i),
            }
        }
    }
}

/// Channels of a row of the destination.
pub(super) struct Channels<'a, T, D> {
    pub stencil: &'a Stencil,
    /// The first channel at row 0 and column 0; rows that taps read are in memory where they are inside of the image.
    pub src: *const T,
    /// Distance of rows and of columns.
    pub src_strides: [isize; 2],
    /// The filter of the first channel. Terms are as far apart as there are channels, ordered by filter row, source
    /// channel of the group, and filter column.
    pub filter: *const f32,
    pub count: usize,
    /// Its bias is the first channel's.
    pub epilogue: Epilogue,
    /// The first channel of the first pixel, and distance of pixels.
    pub dst: *mut D,
    pub dst_col: isize,
}

/// The largest number of columns that the taps of a group of pixels read: 8 pixels with 5 taps and step 2.
const WINDOW: usize = 19;

impl<T: SimdElement, D: SimdElement> Channels<'_, T, D> {
    /// Computes all pixels of row `i`, P at a time. A vector of the filter is loaded once for all P pixels, and P sums
    /// keep the multiplier's pipeline full. P is 7 instead of 8 if that leaves no rest.
    ///
    /// # Safety
    /// All that is named is in memory, and nothing else accesses the destination.
    #[inline(always)]
    pub(super) unsafe fn row<S: Simd, R: Read<S>>(&self, s: S, read: R, i: usize) {
        // SAFETY: passed on.
        unsafe {
            match self.stencil.dst_size[1] {
                width if width >= 8 && width % 7 != 0 => self.vectors::<S, R, 8>(s, read, i),
                7.. => self.vectors::<S, R, 7>(s, read, i),
                4..7 => self.vectors::<S, R, 4>(s, read, i),
                _ => self.vectors::<S, R, 1>(s, read, i),
            }
        }
    }

    /// Groups of P pixels and a vector of channels; the last of either may be summed once more.
    #[inline(always)]
    unsafe fn vectors<S: Simd, R: Read<S>, const P: usize>(&self, s: S, read: R, i: usize) {
        let Stencil { cols, step, dst_size, .. } = self.stencil;
        let is_dense = cols.windows(2).all(|taps| taps[0].offset + 1 == taps[1].offset);
        let shape = if P > 1 && is_dense { (cols.len(), step[1]) } else { (0, 0) };
        let mut sums = [0f32; 8 * MAX_LANES];
        for j in (0..dst_size[1]).step_by(P) {
            let j = j.min(dst_size[1] - P);
            for channel in (0..self.count).step_by(S::LANES) {
                let is_whole = self.count >= S::LANES;
                let channel = channel.min(self.count.saturating_sub(S::LANES));
                // SAFETY: channels and pixels that exist.
                unsafe {
                    let acc: [S::F32; P] = match shape {
                        _ if R::SINGLE && !is_whole => self.few(s, i, j),
                        (3, 1) => self.window::<S, R, P, 3, 1>(s, read, channel, i, j),
                        (3, 2) => self.window::<S, R, P, 3, 2>(s, read, channel, i, j),
                        (5, 1) if R::SINGLE => self.window::<S, R, P, 5, 1>(s, read, channel, i, j),
                        (5, 2) if R::SINGLE => self.window::<S, R, P, 5, 2>(s, read, channel, i, j),
                        (7, 1) if R::SINGLE => self.window::<S, R, P, 7, 1>(s, read, channel, i, j),
                        _ => self.sums(s, read, channel, i, j),
                    };
                    let len = if is_whole { S::LANES } else { self.count };
                    let bias = self.epilogue.biases(s, channel, len);
                    for (p, sum) in acc.into_iter().enumerate() {
                        s.store(sums.as_mut_ptr().add(p * S::LANES), s.add(sum, bias));
                    }
                    self.epilogue.activate_all(s, sums.as_mut_ptr(), P * S::LANES);
                    for p in 0..P {
                        let sum = s.load(sums.as_ptr().add(p * S::LANES));
                        let to = self.dst.offset((j + p) as isize * self.dst_col).add(channel);
                        self.epilogue.store(s, sum, to, len);
                    }
                }
            }
        }
    }

    /// Source channels of a sum.
    #[inline(always)]
    fn planes<S: Simd, R: Read<S>>(&self) -> usize {
        if R::SINGLE { 1 } else { self.stencil.c }
    }

    /// Distance of terms in the filter.
    #[inline(always)]
    fn term(&self) -> usize {
        self.stencil.groups * self.stencil.k
    }

    /// Sums over TAPS neighbouring columns, STEP of which lie between pixels: a row of the source is loaded once for all
    /// of its taps.
    #[inline(always)]
    unsafe fn window<S: Simd, R: Read<S>, const P: usize, const TAPS: usize, const STEP: usize>(
        &self,
        s: S,
        read: R,
        channel: usize,
        i: usize,
        j: usize,
    ) -> [S::F32; P] {
        let mut acc = [s.zero(); P];
        let count = (P - 1) * STEP + TAPS;
        let first = (j * STEP) as isize + self.stencil.cols[0].offset;
        let below = |bound: isize| (bound - first).clamp(0, count as isize) as usize;
        let inside = below(0)..below(self.stencil.src_size[1] as isize);
        let [row_stride, col_stride] = self.src_strides;
        let start = self.src.wrapping_offset(first.wrapping_mul(col_stride));
        let start = start.wrapping_add(read.first(channel));
        let (term, planes) = (self.term(), self.planes::<S, R>());
        let mut filter = self.filter.wrapping_add(channel);
        for &row in self.stencil.rows.iter() {
            let Some(row) = self.stencil.src_row(i, row) else {
                filter = filter.wrapping_add(planes * TAPS * term);
                continue;
            };
            let from = start.wrapping_offset(row as isize * row_stride);
            let at = |c: usize| from.wrapping_offset((c as isize).wrapping_mul(col_stride));
            for plane in 0..planes {
                let mut x = [s.zero(); WINDOW];
                // SAFETY: columns inside of the source, and terms of the filter.
                unsafe {
                    if inside.len() == count {
                        for (c, x) in x.iter_mut().enumerate().take(count) {
                            *x = read.load(s, at(c), plane);
                        }
                    } else {
                        for (c, x) in x.iter_mut().enumerate().take(count) {
                            if inside.contains(&c) {
                                *x = read.load(s, at(c), plane);
                            }
                        }
                    }
                    for t in 0..TAPS {
                        let w = s.load(filter);
                        filter = filter.wrapping_add(term);
                        for (p, sum) in acc.iter_mut().enumerate() {
                            *sum = s.mul_add(w, x[p * STEP + t], *sum);
                        }
                    }
                }
            }
        }
        acc
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
        let (stencil, term, planes) = (self.stencil, self.term(), self.planes::<S, R>());
        let mut acc = [s.zero(); P];
        let mut filter = self.filter.wrapping_add(channel);
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

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;
    use crate::cpu::compiled::assert_in_registers;

    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build")]
    fn sums_stay_in_registers() {
        // AVX2: as many registers are too few for the sums of some filters.
        assert_in_registers::<Row<'static, f32>>([13, 0]);
    }
}
