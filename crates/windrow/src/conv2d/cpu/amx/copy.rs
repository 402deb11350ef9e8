//! Copies of what a slab reads of the source.

use super::super::shared::epilogue::Lanes;
use super::super::shared::stencil::{Stencil, Tap};
use super::{Amx, TERMS};
use crate::bf16;
use crate::cpu::{Kernel, ROW_BYTES, SIDE, Simd, array};
use std::ops::Range;

/// Copies what a slab of one image reads: for each part of the rows and of the columns pixels of
/// `chunks * TERMS` terms, or `chunks * SIDE` planes of pairs of terms; zeros for the padding and beyond the terms.
pub(super) struct SlabCopy<'a, T> {
    pub plan: &'a Amx,
    pub stencil: &'a Stencil,
    /// Channel 0 of the group, in the image.
    pub src: *const T,
    pub at: [usize; 2],
    pub size: [usize; 2],
    pub to: *mut u8,
    /// Room for [`Amx::lines_len`] elements.
    pub lines: *mut bf16,
}

impl Kernel for SlabCopy<'_, bf16> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let plan = self.plan;
        let by_lines = plan.lines_len(self.stencil) > 0;
        let mut to = self.to;
        for &row_part in &plan.rows.parts {
            for reads in &plan.cols.parts {
                for row in 0..self.size[0] + plan.rows.span {
                    let source = |read: isize| self.source_row(row_part + read, row);
                    let pixel = to.wrapping_add(row * plan.width() * plan.pixel_bytes());
                    // SAFETY: whoever makes a `SlabCopy` has the pixels of a slab at `to`, and the source in memory.
                    unsafe {
                        match plan.lanes {
                            Lanes::Channels if by_lines => self.windows(source, reads, pixel),
                            Lanes::Channels => self.pixels(source, reads, pixel),
                            Lanes::Pixels if by_lines => self.planes(source, reads, pixel),
                            Lanes::Pixels => self.pairs(source, reads, pixel),
                        }
                    }
                }
                to = to.wrapping_add(plan.part_bytes());
            }
        }
    }
}

impl<T> SlabCopy<'_, T> {
    /// The place of a row of the copy in the source; `None` in the padding.
    #[inline(always)]
    pub(super) fn source_row(&self, part: isize, row: usize) -> Option<*const T> {
        let Stencil { step, src, src_size, .. } = self.stencil;
        let row = ((self.at[0] + row) * step[0]) as isize + part;
        (row >= 0 && row < src_size[0] as isize).then(|| self.src.wrapping_offset(row * src[2]))
    }

    /// Pixels of a row of the copy.
    pub(super) fn cols(&self) -> usize {
        self.size[1] + self.plan.cols.span
    }

    /// The columns that read inside a row of the source, and where the first of them reads.
    #[inline(always)]
    pub(super) fn inside(&self, row: *const T, read: isize) -> (Range<usize>, *const T) {
        let inside = self.stencil.inside(self.at[1], self.cols(), Tap { index: 0, offset: read });
        let col = ((self.at[1] + inside.start) * self.stencil.step[1]) as isize + read;
        // Nothing is read at the place of an empty range, which need not exist.
        let from = row.wrapping_offset(col.wrapping_mul(self.stencil.src[3]));
        (inside, from)
    }

    /// Elements from a pixel to the next, of those that are read.
    pub(super) fn step(&self) -> isize {
        self.stencil.src[3].wrapping_mul(self.stencil.step[1] as isize)
    }
}

impl SlabCopy<'_, bf16> {
    /// A row of pixels.
    ///
    /// # Safety
    /// It is writable at `to`; the source row is one of the stencil's.
    #[inline(always)]
    unsafe fn pixels(
        &self,
        source: impl Fn(isize) -> Option<*const bf16>,
        reads: &[isize],
        to: *mut u8,
    ) {
        let Stencil { c, src, .. } = *self.stencil;
        let (pitch, terms) = (self.plan.pitch / size_of::<bf16>(), self.plan.chunks * TERMS);
        let to = to.cast::<bf16>();
        let mut held = 0;
        // SAFETY: promised by the caller.
        unsafe {
            for &row in &self.plan.cols.rows {
                let row = source(row);
                for &offset in reads {
                    let (inside, from) =
                        row.map_or((0..0, self.src), |row| self.inside(row, offset));
                    for pixel in (0..inside.start).chain(inside.end..self.cols()) {
                        to.add(pixel * pitch + held).write_bytes(0, c);
                    }
                    let mut from = from;
                    for pixel in inside {
                        copy_line(from, src[1], to.add(pixel * pitch + held), c);
                        from = from.wrapping_offset(self.step());
                    }
                    held += c;
                }
            }
            if held < terms {
                (0..self.cols())
                    .for_each(|pixel| to.add(pixel * pitch + held).write_bytes(0, terms - held));
            }
        }
    }

    /// A row of pixels that hold columns next to each other: vectors of lines, of which what belongs to a pixel is
    /// taken.
    ///
    /// # Safety
    /// As for [`SlabCopy::pixels`], with [`Amx::lines_len`] elements at `lines`.
    #[inline(always)]
    unsafe fn windows(
        &self,
        source: impl Fn(isize) -> Option<*const bf16>,
        reads: &[isize],
        to: *mut u8,
    ) {
        let SlabCopy { plan, stencil: &Stencil { c, step, .. }, .. } = *self;
        let width = reads.len() * c;
        let line = self.lines.wrapping_add(TERMS);
        for (i, &row) in plan.cols.rows.iter().enumerate() {
            // SAFETY: promised by the caller.
            unsafe { self.fill(source(row), reads, line) };
            for chunk in 0..plan.chunks {
                // Of the chunk's terms those of this row.
                let first = (i * width) as isize - (chunk * TERMS) as isize;
                let of_row = first..first + width as isize;
                let mask: [u16; TERMS] =
                    array(|term| if of_row.contains(&(term as isize)) { u16::MAX } else { 0 });
                for pixel in 0..self.cols() {
                    let from = line.wrapping_add(pixel * step[1] * c).wrapping_offset(-first);
                    let to = to.wrapping_add(pixel * plan.pitch + chunk * ROW_BYTES);
                    let to = to.cast::<[u16; TERMS]>();
                    // SAFETY: the line has the terms of a tile more on either side; the caller's promise.
                    unsafe {
                        let mut terms = from.cast::<[u16; TERMS]>().read_unaligned();
                        for (i, term) in terms.iter_mut().enumerate() {
                            *term &= mask[i];
                        }
                        // Only a pixel of one chunk holds several rows.
                        if i > 0 {
                            let rows_before = to.read_unaligned();
                            for (i, term) in terms.iter_mut().enumerate() {
                                *term |= rows_before[i];
                            }
                        }
                        to.write_unaligned(terms);
                    }
                }
            }
        }
    }

    /// A row of all planes of pairs of pixels that hold columns next to each other. Behind its last pixel, up to
    /// [`SIDE`] of no meaning are written, where the next row comes.
    ///
    /// # Safety
    /// As for [`SlabCopy::windows`].
    #[inline(always)]
    unsafe fn planes(
        &self,
        source: impl Fn(isize) -> Option<*const bf16>,
        reads: &[isize],
        to: *mut u8,
    ) {
        let SlabCopy { plan, stencil, .. } = *self;
        let (c, step) = (stencil.c, stencil.step[1]);
        let (cols, line_len) = (self.cols().next_multiple_of(SIDE), plan.line_len(stencil));
        let line = |line: usize| self.lines.wrapping_add(line * line_len);
        let zeros = line(plan.cols.rows.len() * c);
        let terms = plan.cols.reads() * c;
        let term = |term: usize| {
            let (row, col, channel) = (term / c / reads.len(), term / c % reads.len(), term % c);
            if term < terms { line(row * c + channel).wrapping_add(col) } else { zeros }
        };
        // SAFETY: promised by the caller.
        unsafe {
            zeros.write_bytes(0, line_len);
            for (i, &row) in plan.cols.rows.iter().enumerate() {
                self.fill(source(row), reads, line(i * c));
            }
            for pair in 0..plan.chunks * SIDE {
                let to = to.wrapping_add(pair * plan.pitch).cast::<u32>();
                let [first, second] = [term(2 * pair), term(2 * pair + 1)];
                match step {
                    _ if 2 * pair >= terms => to.write_bytes(0, cols),
                    1 => interleave(first, second, 1, to, cols),
                    2 => interleave(first, second, 2, to, cols),
                    _ => interleave(first, second, step as isize, to, cols),
                }
            }
        }
    }

    /// The lines of what a row of pixels reads of a row of the source; zeros for the padding.
    ///
    /// # Safety
    /// As for [`SlabCopy::windows`].
    #[inline(always)]
    unsafe fn fill(&self, source: Option<*const bf16>, reads: &[isize], to: *mut bf16) {
        let Stencil { c, src, src_size, step, .. } = *self.stencil;
        // Lines, and channels in each.
        let (lines, unit) = match self.plan.lanes {
            Lanes::Channels => (1, c),
            Lanes::Pixels => (c, 1),
        };
        let len = (self.cols() - 1) * step[1] + reads.len();
        let start = (self.at[1] * step[1]) as isize + reads[0];
        let inside = |col: isize| col.clamp(0, src_size[1] as isize);
        let (from, end) = (inside(start), inside(start + len as isize));
        let row = source.filter(|_| from < end);
        for line in 0..lines {
            let to = to.wrapping_add(line * self.plan.line_len(self.stencil));
            // SAFETY: promised by the caller.
            unsafe {
                let Some(row) = row else {
                    to.write_bytes(0, len * unit);
                    continue;
                };
                let (before, count) = ((from - start) as usize * unit, (end - from) as usize);
                let from = row.wrapping_offset(line as isize * src[1] + from * src[3]);
                let here = to.add(before);
                to.write_bytes(0, before);
                if src[3] == unit as isize && (unit == 1 || src[1] == 1) {
                    here.copy_from_nonoverlapping(from, count * unit);
                } else {
                    for channel in 0..unit {
                        let from = from.wrapping_offset(channel as isize * src[1]);
                        for i in 0..count {
                            let element = *from.wrapping_offset((i as isize).wrapping_mul(src[3]));
                            here.add(i * unit + channel).write(element);
                        }
                    }
                }
                here.add(count * unit).write_bytes(0, len * unit - before - count * unit);
            }
        }
    }

    /// A row of all planes of pairs.
    ///
    /// # Safety
    /// As for [`SlabCopy::pixels`].
    #[inline(always)]
    unsafe fn pairs(
        &self,
        source: impl Fn(isize) -> Option<*const bf16>,
        reads: &[isize],
        to: *mut u8,
    ) {
        let Stencil { c, src, .. } = *self.stencil;
        let (cols, step) = (self.cols(), self.step());
        let line = |line: usize| {
            let row = source(*self.plan.cols.rows.get(line / c / reads.len())?)?;
            let (inside, from) = self.inside(row, reads[line / c % reads.len()]);
            Some((inside, from.wrapping_offset((line % c) as isize * src[1])))
        };
        for pair in 0..self.plan.chunks * SIDE {
            let to = to.wrapping_add(pair * self.plan.pitch).cast::<u32>();
            // SAFETY: promised by the caller.
            unsafe {
                let [first, second] = [line(2 * pair), line(2 * pair + 1)];
                match (first, second) {
                    (Some((inside, first)), Some((same, second))) if inside == same => {
                        to.write_bytes(0, inside.start);
                        let here = to.add(inside.start);
                        match step {
                            1 => interleave(first, second, 1, here, inside.len()),
                            2 => interleave(first, second, 2, here, inside.len()),
                            _ => interleave(first, second, step, here, inside.len()),
                        }
                        to.add(inside.end).write_bytes(0, cols - inside.end);
                    }
                    lines => {
                        to.write_bytes(0, cols);
                        for (half, line) in [lines.0, lines.1].into_iter().enumerate() {
                            let Some((inside, from)) = line else { continue };
                            let to = to.cast::<bf16>().add(2 * inside.start + half);
                            for i in 0..inside.len() {
                                to.add(2 * i)
                                    .write(*from.wrapping_offset((i as isize).wrapping_mul(step)));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Pairs of two rows whose elements are `step` apart.
///
/// # Safety
/// `len` elements of each row are readable, and `len` pairs are writable.
#[inline(always)]
unsafe fn interleave(
    first: *const bf16,
    second: *const bf16,
    step: isize,
    to: *mut u32,
    len: usize,
) {
    for i in 0..len {
        let at = (i as isize).wrapping_mul(step);
        // SAFETY: promised by the caller.
        unsafe {
            let bits = |row: *const bf16| u32::from((*row.wrapping_offset(at)).to_bits());
            to.add(i).write(bits(first) | bits(second) << 16);
        }
    }
}

/// Copies `len` elements `step` apart.
///
/// # Safety
/// They are readable, and `len` elements are writable at `to`.
#[inline(always)]
unsafe fn copy_line(from: *const bf16, step: isize, to: *mut bf16, len: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        if step != 1 {
            for i in 0..len {
                to.add(i).write(*from.wrapping_offset((i as isize).wrapping_mul(step)));
            }
            return;
        }
        let mut at = 0;
        while at + TERMS <= len {
            // Of known length: a vector, or two.
            to.add(at)
                .cast::<[bf16; TERMS]>()
                .write_unaligned(from.add(at).cast::<[bf16; TERMS]>().read_unaligned());
            at += TERMS;
        }
        // Mostly nothing is left, which needs no call.
        if at < len {
            to.add(at).copy_from_nonoverlapping(from.add(at), len - at);
        }
    }
}
