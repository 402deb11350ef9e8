//! Packing of filters as matrices, and of blocks of the im2col matrix.

use super::rows::{Rows, copy_ahead, copy_transposed, zero, zero_ahead};
use super::stencil::{Segment, Stencil, Tap};
use crate::cpu::{Isa, Kernel, MAX_LANES, SendPtr, Simd, SimdElement, dispatch, parallel_for};
use std::ops::Range;

/// Packs a filter in panels [group, panel, term, channel of the panel] of `width` channels, zeros beyond k. Terms are
/// ordered [filter frame, filter row, filter column, channel].
///
/// # Safety
/// The stencil's filter elements are readable from `filter`, and all panels writable at `packed`.
pub(in crate::conv2d::cpu) unsafe fn pack_filter<T: SimdElement>(
    stencil: &Stencil,
    isa: Isa,
    threads: usize,
    width: usize,
    filter: *const T,
    packed: *mut f32,
) {
    let panels = stencil.k.div_ceil(width);
    let panel_len = width * stencil.terms();
    let (filter, packed) = (SendPtr(filter.cast_mut()), SendPtr(packed));
    parallel_for(threads, stencil.groups * panels, |task| {
        let (group, k) = (task / panels, task % panels * width);
        // SAFETY: each task writes its own panel; the panel holds all terms of its channels.
        unsafe {
            let mut to = packed.get().add(task * panel_len);
            for frame in stencil.filter_frames() {
                let filter = filter.get().wrapping_offset(frame);
                dispatch(
                    isa,
                    PackFilter { stencil, filter, group, k, width, to, cols_last: false },
                );
                to = to.wrapping_add(width * stencil.frame_terms());
            }
        }
    });
}

/// The kernel that packs one panel [term, channel of the panel] of a frame of the filter, with zeros beyond k. Whoever
/// makes it promises what [`pack_filter`] asks for.
pub(in crate::conv2d::cpu) struct PackFilter<'a, T> {
    pub stencil: &'a Stencil,
    pub filter: *const T,
    pub group: usize,
    /// The first channel.
    pub k: usize,
    pub width: usize,
    pub to: *mut f32,
    /// True for terms in the order [filter row, channel, filter column].
    pub cols_last: bool,
}

impl<T: SimdElement> Kernel for PackFilter<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let PackFilter { stencil, group, k, width, cols_last, .. } = self;
        let [k_stride, c_stride, ..] = stencil.filter;
        let (c, len) = (stencil.c, width.min(stencil.k - k));
        let taps =
            stencil.rows.iter().flat_map(|&row| stencil.cols.iter().map(move |&col| (row, col)));
        let cols = stencil.cols.len();
        for (tap, (row, col)) in taps.enumerate() {
            let from = self.filter.wrapping_offset(stencil.filter_offset(group, k, 0, row, col));
            let (first, term) = match cols_last {
                true => (tap / cols * c * cols + tap % cols, cols * width),
                false => (tap * c, width),
            };
            let to = self.to.wrapping_add(first * width);
            // SAFETY: channels of the filter and their terms in the panel.
            unsafe {
                if len < width {
                    zero(s, to, c * width);
                }
                // Rows that are not whole vectors are written over what follows.
                let may_write_ahead = !cols_last || width.is_multiple_of(S::LANES);
                if c_stride == 1 && len == width && may_write_ahead {
                    copy_transposed(s, (from, k_stride), c, len, to, term);
                } else {
                    Rows { ptr: from, row: c_stride, col: k_stride }.copy(s, c, len, to, term);
                }
            }
        }
    }
}

/// The largest number of pixels that are packed at once.
pub(in crate::conv2d::cpu) const MAX_PIXELS: usize = 192;

/// Cuts a range of terms into runs of channels of one tap: where the run starts in the range, its
/// channels, and the filter row and column.
pub(in crate::conv2d::cpu) fn parts(
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

/// Panels [panel, term, pixel of the panel] of the im2col matrix, with vectors over pixels. A term of all
/// pixels is put together in one line, which is then cut into the panels.
pub(in crate::conv2d::cpu) struct PackPanels<'a, T> {
    pub stencil: &'a Stencil,
    /// Channel 0 of the group.
    pub src: *const T,
    /// The pixels, at most [`MAX_PIXELS`].
    pub pixels: Range<usize>,
    pub terms: Range<usize>,
    pub to: *mut f32,
    /// Pixels of a panel; anything may stand in the last one's beyond the range.
    pub width: usize,
    /// Distance of terms, at least `width` in whole vectors.
    pub row: usize,
    /// Distance of panels.
    pub panel: usize,
}

/// Pixels of a row that one tap reads: some in the padding, then some in the source.
#[derive(Clone, Copy, Default)]
struct Piece {
    segment: Segment,
    inside: [usize; 2],
    /// The offset of the first pixel inside.
    offset: isize,
}

impl<T: SimdElement> Kernel for PackPanels<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let PackPanels { stencil, width, row: to_row, panel, .. } = self;
        let len = self.pixels.len();
        assert!(len <= MAX_PIXELS, "packed line: too little memory");
        let mut line = [0f32; MAX_PIXELS + MAX_LANES];
        let mut pieces = [Piece::default(); MAX_PIXELS];
        let mut count = 0;
        for segment in stencil.segments(self.pixels.clone()) {
            pieces[count].segment = segment;
            count += 1;
        }
        let pieces = &mut pieces[..count];
        let step = stencil.src[3] * stencil.step[1] as isize;
        for (at, channels, row, col) in parts(stencil.c, stencil.cols.len(), self.terms.clone()) {
            let (row, col) = (stencil.rows[row], stencil.cols[col]);
            pieces.iter_mut().for_each(|piece| piece.read(stencil, row, col));
            let is_run = step == 1 && count == 1 && pieces[0].inside == [0, len];
            for (i, c) in channels.enumerate() {
                let from = self.src.wrapping_offset(c as isize * stencil.src[1]);
                let to = self.to.wrapping_add((at + i) * to_row);
                // SAFETY: the pieces' pixels are in the source; the line has a vector more than pixels, and a
                // panel `to_row` elements for each term.
                unsafe {
                    if is_run {
                        cut(s, from.wrapping_offset(pieces[0].offset), len, width, to, panel);
                        continue;
                    }
                    for piece in &*pieces {
                        let [start, end] = piece.inside;
                        let at = line.as_mut_ptr().add(piece.segment.lane);
                        zero_ahead(s, at, start);
                        let from = from.wrapping_offset(piece.offset);
                        copy_ahead(s, from, step, at.add(start), end - start);
                        zero_ahead(s, at.add(end), piece.segment.len - end);
                    }
                    cut(s, line.as_ptr(), len, width, to, panel);
                }
            }
        }
    }
}

impl Piece {
    /// The pixels of another tap.
    #[inline(always)]
    fn read(&mut self, stencil: &Stencil, row: Tap, col: Tap) {
        let Segment { n, i, j, len, .. } = self.segment;
        let Some(i) = stencil.src_row(i, row) else {
            self.inside = [0, 0];
            return;
        };
        let inside = stencil.inside(j, len, col);
        let j = ((j + inside.start) * stencil.step[1]) as isize + col.offset;
        // Nothing is read at the place of an empty range, which need not exist.
        self.offset = (n as isize * stencil.src[0])
            .wrapping_add(i as isize * stencil.src[2])
            .wrapping_add(j.wrapping_mul(stencil.src[3]));
        self.inside = [inside.start, inside.end];
    }
}

/// Cuts a line into panels of `width`, `panel` elements apart.
///
/// # Safety
/// `len` elements are readable at `from`, and panels of `width` in whole vectors are writable.
#[inline(always)]
unsafe fn cut<S: Simd, T: SimdElement>(
    s: S,
    from: *const T,
    len: usize,
    width: usize,
    to: *mut f32,
    panel: usize,
) {
    for (q, first) in (0..len).step_by(width).enumerate() {
        let (from, to) = (from.wrapping_add(first), to.wrapping_add(q * panel));
        // SAFETY: promised by the caller.
        unsafe { copy_ahead(s, from, 1, to, width.min(len - first)) };
    }
}

/// Rows [pixel, term] of the im2col matrix.
pub(in crate::conv2d::cpu) struct PackRows<'a, T> {
    pub stencil: &'a Stencil,
    /// Channel 0 of the group.
    pub src: *const T,
    pub pixels: Range<usize>,
    pub terms: Range<usize>,
    pub to: *mut f32,
    /// Distance of pixels.
    pub row: usize,
    /// Elements from the first term to the end of a pixel's row.
    pub room: usize,
}

impl<T: SimdElement> Kernel for PackRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Stencil { c, ref cols, .. } = *self.stencil;
        let merged = self.is_merged();
        for segment in self.stencil.segments(self.pixels.clone()) {
            let all = 0..segment.len;
            // Away from the edges a row of the filter reads one run of the source.
            let inside = |tap: &Tap| self.stencil.inside(segment.j, segment.len, *tap);
            let inner = match merged {
                true => {
                    let (first, last) = (inside(&cols[0]), inside(&cols[cols.len() - 1]));
                    first.start.max(last.start)..first.end.min(last.end)
                }
                false => 0..0,
            };
            let (edges, inner) = match inner.is_empty() {
                true => ([all, 0..0], 0..0),
                false => ([0..inner.start, inner.end..all.end], inner),
            };
            // SAFETY: pixels and terms that were asked for.
            unsafe {
                for edge in edges {
                    self.pixels(s, &segment, edge, self.terms.clone());
                }
                if inner.is_empty() {
                    continue;
                }
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
    #[inline(always)]
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
            // Whole vectors, where what they write beyond is yet to be written, or is the end of the row.
            if from.col == 1 && at + channels.len().next_multiple_of(S::LANES) <= self.room {
                for i in 0..pixels.len() {
                    let from = from.ptr.offset(i as isize * from.row);
                    copy_ahead(s, from, 1, to.add(i * self.row), channels.len());
                }
            } else {
                from.copy(s, pixels.len(), channels.len(), to, self.row);
            }
        }
    }
}
