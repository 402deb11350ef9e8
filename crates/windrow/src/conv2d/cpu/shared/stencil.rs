//! A convolution as a gather, which both directions are: forward reads the input at its taps, and
//! the data gradient reads the output's gradient at taps of the other sign.

use super::frames::{FrameSource, FrameTaps};
use super::strides4;
use crate::Result;
use crate::conv2d::{Conv2dSpec, Problem};
use crate::cpu::SimdElement;
use crate::lists::{collected, room_for};
use std::ops::Range;
use std::sync::Arc;

/// A row or column of the filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tap {
    /// Its index in the filter.
    pub index: usize,
    /// The position that it reads, relative to `step * (output position)`.
    pub offset: isize,
}

/// Rows or columns of the filter, which stencils share.
pub(crate) type Taps = Arc<Vec<Tap>>;

/// `dst[n, k, i, j] = sum_{row, col, c} filter[k, c, row, col] * src[n, c, i*step + row, j*step + col]`
/// for each group, with zeros outside of the source. Strides are in elements.
///
/// With [`FrameTaps`], images are the frames of a video, and terms are ordered [frame, row, column, channel]: see there.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stencil {
    pub n: usize,
    pub groups: usize,
    /// Source and destination channels of one group.
    pub c: usize,
    pub k: usize,
    pub src_size: [usize; 2],
    pub dst_size: [usize; 2],
    pub step: [usize; 2],
    pub rows: Taps,
    pub cols: Taps,
    /// `None` if each image reads one image.
    pub frames: Option<Arc<FrameTaps>>,
    /// Strides of n, c, row, column.
    pub src: [isize; 4],
    /// Strides of n, k, row, column, and the offset of the first element.
    pub dst: [isize; 4],
    pub dst_offset: isize,
    /// Strides of k, c, row, column within a group, and of groups.
    pub filter: [isize; 4],
    pub filter_group: isize,
}

impl Stencil {
    /// The convolution itself.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub(crate) fn forward(spec: &Conv2dSpec, p: &Problem) -> Result<Self> {
        let taps = |count: usize, d: usize| {
            let offset = |index| (index * p.dilation[d]) as isize - p.padding[d] as isize;
            collected((0..count).map(|index| Tap { index, offset: offset(index) })).map(Arc::new)
        };
        let filter = strides4(spec.w.strides());
        Ok(Stencil {
            n: p.n,
            groups: p.groups,
            c: p.c_group(),
            k: p.k_group(),
            src_size: [p.h, p.w],
            dst_size: [p.oh, p.ow],
            step: p.stride,
            rows: taps(p.r, 0)?,
            cols: taps(p.s, 1)?,
            frames: None,
            src: strides4(spec.x.strides()),
            dst: strides4(spec.y.strides()),
            dst_offset: 0,
            filter,
            filter_group: filter[0] * p.k_group() as isize,
        })
    }

    /// The data gradient: from `dy`, laid out as y, to `dx`, laid out as x. Input positions of the same residue modulo
    /// the stride use the same taps, so each residue is a stencil of step 1. Residues without taps are left out: if
    /// there are any, `dx` is zeroed first.
    ///
    /// # Errors
    /// As [`Stencil::forward`].
    pub(crate) fn backward_data(spec: &Conv2dSpec, p: &Problem) -> Result<Vec<Self>> {
        let (src, x) = (strides4(spec.y.strides()), strides4(spec.x.strides()));
        let w = strides4(spec.w.strides());
        // Of one position the distance to the next may overflow, and is not used.
        let step = |d: usize| x[2 + d].wrapping_mul(p.stride[d] as isize);
        let (all_rows, all_cols) = (residues(p, 0)?, residues(p, 1)?);
        let mut all = room_for(all_rows.len() * all_cols.len())?;
        for (first, rows) in &all_rows {
            for (second, cols) in &all_cols {
                all.push(Stencil {
                    n: p.n,
                    groups: p.groups,
                    c: p.k_group(),
                    k: p.c_group(),
                    src_size: [p.oh, p.ow],
                    dst_size: [
                        (p.h - first).div_ceil(p.stride[0]),
                        (p.w - second).div_ceil(p.stride[1]),
                    ],
                    step: [1, 1],
                    rows: rows.clone(),
                    cols: cols.clone(),
                    frames: None,
                    src,
                    dst: [x[0], x[1], step(0), step(1)],
                    dst_offset: *first as isize * x[2] + *second as isize * x[3],
                    filter: [w[1], w[0], w[2], w[3]],
                    filter_group: w[0] * p.k_group() as isize,
                });
            }
        }
        Ok(all)
    }

    /// Writes zeros over dx, laid out as x.
    pub(crate) fn zero(spec: &Conv2dSpec, p: &Problem) -> Self {
        Stencil {
            n: p.n,
            groups: p.groups,
            c: p.k_group(),
            k: p.c_group(),
            src_size: [p.oh, p.ow],
            dst_size: [p.h, p.w],
            step: [1, 1],
            rows: Taps::default(),
            cols: Taps::default(),
            frames: None,
            src: strides4(spec.y.strides()),
            dst: strides4(spec.x.strides()),
            dst_offset: 0,
            filter: [0; 4],
            filter_group: 0,
        }
    }

    /// The rows of the source that rows of the destination read; of none, where they would begin.
    pub(crate) fn reads(&self, rows: Range<usize>) -> Range<usize> {
        let offsets = || self.rows.iter().map(|tap| tap.offset);
        let at = |row: usize, offset: Option<isize>| {
            let row = (row * self.step[0]) as isize + offset.unwrap_or(0);
            row.clamp(0, self.src_size[0] as isize) as usize
        };
        let start = at(rows.start, offsets().min());
        start..at(rows.end.max(1) - 1, offsets().max().map(|last| last + 1)).max(start)
    }

    /// The same for some rows of the destination, of which the first one is row 0, and for the rows that they read.
    pub(crate) fn of_rows(&self, rows: Range<usize>) -> Self {
        let reads = self.reads(rows.clone());
        let moved = (rows.start * self.step[0]) as isize - reads.start as isize;
        let moved = |tap: &Tap| Tap { offset: tap.offset + moved, ..*tap };
        Stencil {
            src_size: [reads.len(), self.src_size[1]],
            dst_size: [rows.len(), self.dst_size[1]],
            rows: Arc::new(self.rows.iter().map(moved).collect()),
            ..self.clone()
        }
    }

    /// True if the filter has one tap, which reads no padding.
    pub(crate) fn is_one_tap(&self) -> bool {
        (0..2).all(|d| {
            let taps = if d == 0 { &self.rows } else { &self.cols };
            let last = self.dst_size[d].saturating_sub(1) * self.step[d];
            matches!(taps[..], [Tap { offset: 0, .. }]) && last < self.src_size[d]
        })
    }

    /// The same with as few and as long rows as the strides allow, which takes a filter of one tap. Pixels keep
    /// their numbers.
    pub(crate) fn merged(mut self) -> Self {
        let [height, width] = self.dst_size;
        if !self.is_one_tap() || self.n * height * width == 0 {
            return self;
        }
        let times = |stride: isize, count: usize| stride.checked_mul(count as isize);
        let [src_row, src_col] = [2, 3].map(|d| times(self.src[d], self.step[d - 2]));
        // Whether so many steps lead to the next of what is `stride` apart, on both sides.
        let follow = |src: Option<isize>, dst: isize, count: usize| {
            let ends =
                [src_col, Some(self.dst[3])].map(|col| col.and_then(|col| times(col, count)));
            src.is_some() && ends == [src, Some(dst)]
        };
        if height > 1 && !follow(src_row, self.dst[2], width) {
            return self;
        }
        let pixels = height * width;
        let all = self.n == 1 || follow(Some(self.src[0]), self.dst[0], pixels);
        let images = if all { self.n } else { 1 };
        self.n /= images;
        self.dst_size = [1, images * pixels];
        self.src_size = [1, (images * pixels - 1) * self.step[1] + 1];
        self
    }

    /// The same destination, of which rows that follow each other are one. For the destination alone: sources are
    /// not read in this way.
    pub(crate) fn with_long_rows(mut self) -> Self {
        let [height, width] = self.dst_size;
        if self.dst[3].checked_mul(width as isize) == Some(self.dst[2]) {
            self.dst_size = [1, height * width];
        }
        self
    }

    /// The place of the first pixel of a range, numbered as for [`Stencil::segments`], in the destination, if all
    /// others follow it at the distance of neighbours.
    #[inline(always)]
    pub(crate) fn dst_run(&self, pixels: Range<usize>) -> Option<isize> {
        let [height, width] = self.dst_size;
        let [n_stride, _, row, col] = self.dst;
        let (line, j) = (pixels.start / width, pixels.start % width);
        let (n, i) = (line / height, line % height);
        let rows_follow = || {
            i * width + j + pixels.len() <= height * width
                && col.checked_mul(width as isize) == Some(row)
        };
        (j + pixels.len() <= width || rows_follow())
            .then(|| n as isize * n_stride + i as isize * row + j as isize * col)
    }

    /// Terms of the sum for one element.
    pub(crate) fn terms(&self) -> usize {
        self.frame_count() * self.frame_terms()
    }

    /// Terms that one frame of the filter has.
    pub(crate) fn frame_terms(&self) -> usize {
        self.c * self.rows.len() * self.cols.len()
    }

    /// Frames of the filter.
    pub(crate) fn frame_count(&self) -> usize {
        self.frames.as_ref().map_or(1, |frames| frames.len())
    }

    /// What an image, and those after it that read in the same way, read through each frame of the filter; `None` for
    /// zeros.
    pub(crate) fn sources(&self, image: usize) -> impl Iterator<Item = Option<FrameSource>> {
        let [n_stride, strides @ ..] = self.src;
        (0..self.frame_count()).map(move |tap| match &self.frames {
            Some(frames) => frames.source(tap, image, strides),
            None => Some(FrameSource {
                is_initial: false,
                offset: image as isize * n_stride,
                strides: self.src,
            }),
        })
    }

    /// The offset in the filter of each of its frames.
    pub(crate) fn filter_frames(&self) -> impl Iterator<Item = isize> {
        let frames = self.frames.as_deref();
        (0..self.frame_count()).map(move |tap| frames.map_or(0, |frames| frames.filter(tap)))
    }

    /// Destination elements of one channel.
    pub(crate) fn pixels(&self) -> usize {
        self.n * self.dst_size[0] * self.dst_size[1]
    }

    /// Offset of source channel 0 of a group.
    pub(crate) fn src_group(&self, group: usize) -> isize {
        (group * self.c) as isize * self.src[1]
    }

    /// Offset of destination channel 0 of a group.
    pub(crate) fn dst_group(&self, group: usize) -> isize {
        self.dst_offset + (group * self.k) as isize * self.dst[1]
    }

    /// Offset in the filter of its element for destination channel `k` and source channel `c` of a
    /// group.
    pub(crate) fn filter_offset(
        &self,
        group: usize,
        k: usize,
        c: usize,
        row: Tap,
        col: Tap,
    ) -> isize {
        group as isize * self.filter_group
            + k as isize * self.filter[0]
            + c as isize * self.filter[1]
            + row.index as isize * self.filter[2]
            + col.index as isize * self.filter[3]
    }
}

impl Stencil {
    /// The filter's element for a channel of the destination, zero beyond the group, and one of the source.
    ///
    /// # Safety
    /// The filter's elements are readable from `filter`.
    pub(crate) unsafe fn element<T: SimdElement>(
        &self,
        filter: *const T,
        group: usize,
        k: usize,
        c: usize,
        [row, col]: [Tap; 2],
    ) -> f32 {
        if k >= self.k {
            return 0.0;
        }
        // SAFETY: the offset of one of the filter's elements.
        unsafe { filter.offset(self.filter_offset(group, k, c, row, col)).read().to_f32() }
    }
}

/// The residues modulo the stride that have taps, each with the taps through which input positions `residue + i *
/// stride` act on output positions `i + offset`.
fn residues(p: &Problem, d: usize) -> Result<Vec<(usize, Taps)>> {
    let (size, count) = ([p.h, p.w][d], [p.r, p.s][d]);
    let stride = p.stride[d] as isize;
    let taps = |first: usize| {
        collected((0..count).filter_map(|index| {
            let distance = (first + p.padding[d]) as isize - (index * p.dilation[d]) as isize;
            (distance % stride == 0).then(|| Tap { index, offset: distance / stride })
        }))
    };
    // A tap belongs to one residue, so there are few however large the stride.
    let firsts = (0..count)
        .map(|index| (index * p.dilation[d]) as isize - p.padding[d] as isize)
        .map(|position| position.rem_euclid(stride) as usize)
        .filter(|&first| first < size);
    let mut firsts = collected(firsts)?;
    firsts.sort_unstable();
    firsts.dedup();
    let mut all = room_for(firsts.len())?;
    for first in firsts {
        all.push((first, Arc::new(taps(first)?)));
    }
    Ok(all)
}

/// Output positions that lie next to each other in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Position of the first in the given range.
    pub lane: usize,
    pub len: usize,
    pub n: usize,
    pub i: usize,
    pub j: usize,
}

impl Stencil {
    /// The destination pixels of a range, numbered over [n, rows, columns], row by row.
    #[inline(always)]
    pub(crate) fn segments(&self, pixels: Range<usize>) -> impl Iterator<Item = Segment> {
        let [height, width] = self.dst_size;
        let mut lane = 0;
        std::iter::from_fn(move || {
            let pixel = pixels.start + lane;
            if pixel >= pixels.end {
                return None;
            }
            let (row, j) = (pixel / width, pixel % width);
            let len = (width - j).min(pixels.end - pixel);
            let segment = Segment { lane, len, n: row / height, i: row % height, j };
            lane += len;
            Some(segment)
        })
    }

    /// Source row that `tap` reads for destination row `i`; `None` in the padding.
    #[inline(always)]
    pub(crate) fn src_row(&self, i: usize, tap: Tap) -> Option<usize> {
        let row = (i * self.step[0]) as isize + tap.offset;
        (row >= 0 && row < self.src_size[0] as isize).then_some(row as usize)
    }

    /// The destination columns among `j..j + len` that read inside the source through `tap`.
    #[inline(always)]
    pub(crate) fn inside(&self, j: usize, len: usize, tap: Tap) -> Range<usize> {
        let (step, width) = (self.step[1] as isize, self.src_size[1] as isize);
        let first = j as isize * step + tap.offset;
        let below = |bound: isize| match bound {
            ..=0 => 0,
            // Most have step 1: spare them the division.
            _ if step == 1 => (bound as usize).min(len),
            _ => ((bound + step - 1) / step).min(len as isize) as usize,
        };
        let start = below(-first);
        start..below(width - first).max(start)
    }
}
