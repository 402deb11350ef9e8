//! Numbers of f32 as three of bf16 that add up to them.

use super::super::shared::epilogue::Lanes;
use super::super::shared::stencil::Stencil;
use super::copy::SlabCopy;
use super::{SIDE, TERMS};
use crate::bf16;
use crate::cpu::{Bf16Kernel, Bf16Products, MAX_LANES, Simd, array};
use std::ops::Range;

/// Copies as of bf16, one of each part, a plan's [`Amx::copy_of_part`](super::Amx::copy_of_part) bytes from each other.
impl Bf16Kernel for SlabCopy<'_, f32> {
    #[inline(always)]
    fn run<P: Bf16Products>(self, p: P) {
        let plan = self.plan;
        let mut to = self.to;
        for &row_part in &plan.rows.parts {
            for reads in &plan.cols.parts {
                for row in 0..self.size[0] + plan.rows.span {
                    let (inside, from) = self
                        .source_row(row_part, row)
                        .map_or((0..0, self.src), |source| self.inside(source, reads[0]));
                    let pixel = to.wrapping_add(row * plan.width() * plan.pixel_bytes());
                    // SAFETY: whoever makes a `SlabCopy` has the pixels of a slab at `to`, and the source in memory.
                    unsafe {
                        match plan.lanes {
                            Lanes::Channels => self.split_pixels(p, inside, from, pixel),
                            Lanes::Pixels => self.split_pairs(p, inside, from, pixel),
                        }
                    }
                }
                to = to.wrapping_add(plan.part_bytes());
            }
        }
    }
}

impl SlabCopy<'_, f32> {
    /// The parts' places of what belongs at `to`.
    #[inline(always)]
    fn parts(&self, to: *mut u8) -> [*mut bf16; 3] {
        let len = self.plan.copy_of_part();
        [to.cast(), to.wrapping_add(len).cast(), to.wrapping_add(2 * len).cast()]
    }

    /// A row of pixels, of which those `inside` read the source, the first of them at `from`.
    ///
    /// # Safety
    /// It is writable at `to`; the source is in memory.
    #[inline(always)]
    unsafe fn split_pixels<P: Bf16Products>(
        &self,
        p: P,
        inside: Range<usize>,
        mut from: *const f32,
        to: *mut u8,
    ) {
        let Stencil { c, src, .. } = *self.stencil;
        let (terms, lanes) = (self.plan.chunks * TERMS, P::Simd::LANES);
        let chunk_bytes = self.plan.chunk_bytes();
        // SAFETY: promised by the caller.
        unsafe {
            for pixel in (0..inside.start).chain(inside.end..self.cols()) {
                for chunk in 0..self.plan.chunks {
                    for to in self.parts(to.add(pixel * self.plan.pitch + chunk * chunk_bytes)) {
                        to.write_bytes(0, TERMS);
                    }
                }
            }
            for pixel in inside {
                let to = to.add(pixel * self.plan.pitch);
                for at in (0..terms).step_by(2 * lanes) {
                    let first = from.wrapping_offset((at as isize).wrapping_mul(src[1]));
                    let second = first.wrapping_offset((lanes as isize).wrapping_mul(src[1]));
                    let first = read(p.simd(), first, src[1], c.saturating_sub(at));
                    let second = read(p.simd(), second, src[1], c.saturating_sub(at + lanes));
                    let chunk = at / TERMS * chunk_bytes + at % TERMS * size_of::<bf16>();
                    p.split2::<false>(self.parts(to.add(chunk)), [first, second]);
                }
                from = from.wrapping_offset(self.step());
            }
        }
    }

    /// A row of all planes of pairs of channels. Behind its last pixel, up to a vector of no meaning is written, where the
    /// next row comes.
    ///
    /// # Safety
    /// As for [`SlabCopy::split_pixels`].
    #[inline(always)]
    unsafe fn split_pairs<P: Bf16Products>(
        &self,
        p: P,
        inside: Range<usize>,
        from: *const f32,
        to: *mut u8,
    ) {
        let Stencil { c, src, .. } = *self.stencil;
        let (s, step) = (p.simd(), self.step());
        for pair in 0..self.plan.chunks * SIDE {
            let to = to.wrapping_add(pair * self.plan.pitch);
            let inside = if 2 * pair < c { inside.clone() } else { 0..0 };
            let channel = |c: usize| from.wrapping_offset((c as isize).wrapping_mul(src[1]));
            let (first, second) = (channel(2 * pair), channel(2 * pair + 1));
            // SAFETY: promised by the caller.
            unsafe {
                for to in self.parts(to) {
                    to.write_bytes(0, 2 * inside.start);
                }
                for at in (0..inside.len()).step_by(P::Simd::LANES) {
                    let (len, ahead) = (inside.len() - at, (at as isize).wrapping_mul(step));
                    let low = read(s, first.wrapping_offset(ahead), step, len);
                    let has_second = 2 * pair + 1 < c;
                    let len = if has_second { len } else { 0 };
                    let high = read(s, second.wrapping_offset(ahead), step, len);
                    let to = self.parts(to.add((inside.start + at) * size_of::<f32>()));
                    p.split2::<true>(to, [low, high]);
                }
                for to in self.parts(to) {
                    to.add(2 * inside.end).write_bytes(0, 2 * (self.cols() - inside.end));
                }
            }
        }
    }
}

/// The first `len` of a vector's numbers, which are `step` apart, and zeros.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn read<S: Simd>(s: S, from: *const f32, step: isize, len: usize) -> S::F32 {
    // SAFETY: promised by the caller.
    unsafe {
        if step == 1 {
            return if len >= S::LANES { s.load(from) } else { s.load_first(from, len) };
        }
        let mut numbers = [0f32; MAX_LANES];
        for (i, number) in numbers.iter_mut().enumerate().take(len.min(S::LANES)) {
            *number = *from.wrapping_offset((i as isize).wrapping_mul(step));
        }
        s.load(numbers.as_ptr())
    }
}

/// Writes the parts of a tile of the filter.
pub(super) struct SplitTile<'a> {
    pub lanes: Lanes,
    /// [term][channel]
    pub numbers: &'a [f32; TERMS * SIDE],
    /// Room for a tile, and for those of the other parts `apart` bytes from each other.
    pub to: *mut u8,
    pub apart: usize,
}

impl Bf16Kernel for SplitTile<'_> {
    #[inline(always)]
    fn run<P: Bf16Products>(self, p: P) {
        let (s, lanes) = (p.simd(), P::Simd::LANES);
        let parts = |at: usize| {
            // In the order in which they are multiplied.
            let to = |part: usize| self.to.wrapping_add((2 - part) * self.apart).cast::<bf16>();
            array(|part| to(part).wrapping_add(at))
        };
        // SAFETY: vectors of the numbers, and of the tiles.
        unsafe {
            match self.lanes {
                Lanes::Channels => {
                    for pair in 0..SIDE {
                        for i in (0..SIDE).step_by(lanes) {
                            let numbers = self.numbers.as_ptr().add(2 * pair * SIDE + i);
                            let pairs = [s.load(numbers), s.load(numbers.add(SIDE))];
                            p.split2::<true>(parts(2 * (pair * SIDE + i)), pairs);
                        }
                    }
                }
                Lanes::Pixels => {
                    let turned: [f32; TERMS * SIDE] =
                        array(|at| self.numbers[at % TERMS * SIDE + at / TERMS]);
                    for at in (0..TERMS * SIDE).step_by(2 * lanes) {
                        let numbers = turned.as_ptr().add(at);
                        p.split2::<false>(parts(at), [s.load(numbers), s.load(numbers.add(lanes))]);
                    }
                }
            }
        }
    }
}
