//! Packing of blocks of the im2col matrix.

use super::rows::{Rows, zero};
use super::stencil::{Segment, Stencil, Tap};
use crate::cpu::{Kernel, Simd, SimdElement};
use std::ops::Range;

/// Most pixels of a panel.
pub(super) const MAX_PANEL: usize = 192;

/// Cuts a range of terms into runs of channels of one tap: where the run starts in the range, its
/// channels, and the filter row and column.
pub(super) fn parts(
    c: usize,
    cols: usize,
    terms: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>, usize, usize)> {
    let mut at = terms.start;
    std::iter::from_fn(move || {
        if at >= terms.end {
            return None;
        }
        let (tap, first) = (at / c, at % c);
        let channels = first..c.min(first + terms.end - at);
        let part = (at - terms.start, channels.clone(), tap / cols, tap % cols);
        at += channels.len();
        Some(part)
    })
}

/// Panels [panel, term, pixel of the panel] of the im2col matrix, with vectors over pixels.
pub(super) struct PackPanels<'a, T> {
    pub stencil: &'a Stencil,
    /// Channel 0 of the group.
    pub src: *const T,
    pub pixels: Range<usize>,
    pub terms: Range<usize>,
    pub to: *mut f32,
    /// Pixels of a panel, at most [`MAX_PANEL`]; the last panel is filled with zeros.
    pub width: usize,
    /// Distance of terms.
    pub row: usize,
}

impl<T: SimdElement> Kernel for PackPanels<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let PackPanels { stencil, width, row: to_row, .. } = self;
        let mut segments = [Segment::default(); MAX_PANEL];
        for (q, first) in self.pixels.clone().step_by(width).enumerate() {
            let pixels = first..(first + width).min(self.pixels.end);
            let mut count = 0;
            for segment in stencil.segments(pixels.clone()) {
                segments[count] = segment;
                count += 1;
            }
            let segments = &segments[..count];
            let panel = self.to.wrapping_add(q * to_row * self.terms.len());
            for (at, channels, row, col) in parts(stencil.c, stencil.cols.len(), self.terms.clone())
            {
                let (row, col) = (stencil.rows[row], stencil.cols[col]);
                let inside = |segment: &Segment| match stencil.src_row(segment.i, row) {
                    Some(_) => stencil.inside(segment.j, segment.len, col),
                    None => 0..0,
                };
                let to = panel.wrapping_add(at * to_row);
                if pixels.len() < width || segments.iter().any(|g| inside(g).len() < g.len) {
                    // SAFETY: the panel has `to_row` elements for each term.
                    unsafe { zero(s, to, channels.len() * to_row) };
                }
                for segment in segments {
                    let inside = inside(segment);
                    if inside.is_empty() {
                        continue;
                    }
                    let i = (segment.i * stencil.step[0]) as isize + row.offset;
                    let j = ((segment.j + inside.start) * stencil.step[1]) as isize + col.offset;
                    let offset = segment.n as isize * stencil.src[0]
                        + channels.start as isize * stencil.src[1]
                        + i * stencil.src[2]
                        + j * stencil.src[3];
                    let from = Rows {
                        ptr: self.src.wrapping_offset(offset),
                        row: stencil.src[1],
                        col: stencil.src[3] * stencil.step[1] as isize,
                    };
                    let to = to.wrapping_add(segment.lane + inside.start);
                    // SAFETY: the run of pixels is in the source and in the rows of the panel.
                    unsafe { from.copy(s, channels.len(), inside.len(), to, to_row) };
                }
            }
        }
    }
}

/// Rows [pixel, term] of the im2col matrix.
pub(super) struct PackRows<'a, T> {
    pub stencil: &'a Stencil,
    /// Channel 0 of the group.
    pub src: *const T,
    pub pixels: Range<usize>,
    pub terms: Range<usize>,
    pub to: *mut f32,
    /// Distance of pixels.
    pub row: usize,
}

impl<T: SimdElement> Kernel for PackRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Stencil { c, ref cols, .. } = *self.stencil;
        let merged = self.is_merged();
        for segment in self.stencil.segments(self.pixels.clone()) {
            let all = 0..segment.len;
            // SAFETY: pixels and terms that were asked for.
            unsafe {
                if !merged {
                    self.pixels(s, &segment, all, self.terms.clone());
                    continue;
                }
                // Away from the edges a row of the filter reads one run of the source.
                let inside = |tap: &Tap| self.stencil.inside(segment.j, segment.len, *tap);
                let (first, last) = (inside(&cols[0]), inside(&cols[cols.len() - 1]));
                let inner = first.start.max(last.start)..first.end.min(last.end);
                if inner.is_empty() {
                    self.pixels(s, &segment, all, self.terms.clone());
                    continue;
                }
                self.pixels(s, &segment, 0..inner.start, self.terms.clone());
                self.pixels(s, &segment, inner.end..all.end, self.terms.clone());
                for (at, run, row, _) in parts(c * cols.len(), 1, self.terms.clone()) {
                    let taps = (self.stencil.rows[row], cols[0]);
                    self.copy(s, &segment, inner.clone(), at, run, taps);
                }
            }
        }
    }
}

impl<T: SimdElement> PackRows<'_, T> {
    /// True if pixels lie next to each other in the source, and the filter's columns too.
    fn is_merged(&self) -> bool {
        let Stencil { c, ref cols, src, .. } = *self.stencil;
        let next = |taps: &[Tap]| taps[0].offset + 1 == taps[1].offset;
        src[1] == 1 && src[3] == c as isize && cols.len() > 1 && cols.windows(2).all(next)
    }

    /// The terms of some pixels of a segment.
    #[inline(always)]
    unsafe fn pixels<S: Simd>(
        &self,
        s: S,
        segment: &Segment,
        pixels: Range<usize>,
        terms: Range<usize>,
    ) {
        let Stencil { c, ref rows, ref cols, .. } = *self.stencil;
        if pixels.is_empty() {
            return;
        }
        for (at, channels, row, col) in parts(c, cols.len(), terms) {
            let inside = self.stencil.inside(segment.j, segment.len, cols[col]);
            let start = inside.start.clamp(pixels.start, pixels.end);
            let end = inside.end.clamp(start, pixels.end);
            let to = self.to.wrapping_add(segment.lane * self.row + at);
            // SAFETY: a row of `to` has space for every term; `start..end` are inside.
            unsafe {
                for pixel in (pixels.start..start).chain(end..pixels.end) {
                    zero(s, to.add(pixel * self.row), channels.len());
                }
                self.copy(s, segment, start..end, at, channels, (rows[row], cols[col]));
            }
        }
    }

    /// A run of channels of pixels that are inside of the source's columns.
    #[inline(always)]
    unsafe fn copy<S: Simd>(
        &self,
        s: S,
        segment: &Segment,
        pixels: Range<usize>,
        at: usize,
        channels: Range<usize>,
        (row, col): (Tap, Tap),
    ) {
        let stencil = self.stencil;
        let to = self.to.wrapping_add((segment.lane + pixels.start) * self.row + at);
        // SAFETY: pixels and channels are in the source; a row of `to` has space for every term.
        unsafe {
            let Some(i) = stencil.src_row(segment.i, row) else {
                for pixel in 0..pixels.len() {
                    zero(s, to.add(pixel * self.row), channels.len());
                }
                return;
            };
            let j = ((segment.j + pixels.start) * stencil.step[1]) as isize + col.offset;
            let offset = segment.n as isize * stencil.src[0]
                + channels.start as isize * stencil.src[1]
                + i as isize * stencil.src[2]
                + j * stencil.src[3];
            let from = Rows {
                ptr: self.src.wrapping_offset(offset),
                row: stencil.src[3] * stencil.step[1] as isize,
                col: stencil.src[1],
            };
            from.copy(s, pixels.len(), channels.len(), to, self.row);
        }
    }
}
