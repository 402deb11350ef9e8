//! The output transform: `Y = A^T M A` for a block of tiles, with bias and activation, into y.
//!
//! Vectors run over output channels. The pixels of a strip of tiles are staged as [row, column,
//! channel] and leave from there: channels-last as vectors, row-major transposed in registers.

use super::super::shared::epilogue::{self, Bounds, Epilogue};
use super::geometry::{Geometry, Segment};
use super::transform;
use crate::conv2d::winograd::MAX_ALPHA;
use crate::cpu::math::activate_all;
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement};
use std::ops::Range;

/// Columns of outputs of a strip of tiles: whole squares to transpose, and what lies between the two
/// passes stays in the first-level cache.
const COLUMNS: usize = 48;

/// Columns of a staged row: a transposed square can start at any column of the strip.
const ROW: usize = COLUMNS + MAX_LANES;

/// Columns of a row between the two passes: alpha for each tile of a segment.
const HALF_DONE_ROW: usize = 2 * COLUMNS;

/// Elements of the staging buffer: the tiles of a segment between the two passes, then a row of the
/// strip.
pub(super) const STAGING: usize = ((MAX_ALPHA - 2) * HALF_DONE_ROW + ROW) * MAX_LANES;

/// The output transform of a block of tiles, `A` = alpha.
pub(super) struct OutputTransform<'a, Y, const A: usize> {
    pub geometry: &'a Geometry,
    /// M [position, k / width, tile, width] from the first vector of outputs wanted
    pub m: *const f32,
    /// Distances between positions and between rows of channels of M.
    pub m_strides: [usize; 2],
    /// Channels that lie next to each other in M: whole vectors.
    pub m_width: usize,
    /// The block.
    pub tiles: Range<usize>,
    /// Output channels.
    pub channels: Range<usize>,
    /// The epilogue, with a bias for every output channel, padded with zeros to a whole vector.
    pub epilogue: Epilogue,
    /// [`STAGING`] elements.
    pub staging: *mut f32,
    pub y: *mut Y,
    /// Strides of y [n, k, oh, ow]
    pub strides: [isize; 4],
}

impl<Y: SimdElement, const A: usize> Kernel for OutputTransform<'_, Y, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut tile = self.tiles.start;
        while tile < self.tiles.end {
            let segment = self.geometry.segment(tile, self.tiles.end, COLUMNS);
            for channel in self.channels.clone().step_by(S::LANES) {
                let channel_of_m = channel - self.channels.start;
                let (row, at) = (channel_of_m / self.m_width, channel_of_m % self.m_width);
                let tile = tile - self.tiles.start;
                let offset = row * self.m_strides[1] + tile * self.m_width + at;
                // SAFETY: M holds the block's tiles, bias a vector from each channel on; the segment is
                // inside of the problem, whose elements y reaches.
                unsafe {
                    self.transform_columns(s, segment.count, self.m.add(offset));
                    let bias = s.load(self.epilogue.bias.add(channel));
                    let rows = (A - 2).min(self.geometry.problem.oh - segment.row * (A - 2));
                    for row in 0..rows {
                        self.transform_row(s, row, segment.count, bias);
                        self.unstage(s, row, &segment, channel);
                    }
                }
            }
            tile += segment.count;
        }
    }
}

impl<Y: SimdElement, const A: usize> OutputTransform<'_, Y, A> {
    /// `A^T` over the columns of each tile's positions, into the staging buffer.
    ///
    /// # Safety
    /// `m` must reach `tiles` tiles of A * A positions.
    #[inline(always)]
    unsafe fn transform_columns<S: Simd>(&self, s: S, tiles: usize, m: *const f32) {
        // Tiles inside of columns: only A places of M are read at a time, each in turn.
        for j in 0..A {
            for tile in 0..tiles {
                // SAFETY: staging holds A - 2 rows of A columns of each tile.
                unsafe {
                    let mut x = [s.zero(); A];
                    for (i, x) in x.iter_mut().enumerate() {
                        let position = (i * A + j) * self.m_strides[0];
                        *x = s.load(m.add(position + tile * self.m_width));
                    }
                    for (i, y) in transform::output(s, x)[..A - 2].iter().enumerate() {
                        s.store(self.half_done(i, tile * A + j, S::LANES), *y);
                    }
                }
            }
        }
    }

    /// `A^T` over a row of what [`Self::transform_columns`] staged, and bias and activation, into the
    /// strip.
    ///
    /// # Safety
    /// `tiles` tiles must be staged.
    #[inline(always)]
    unsafe fn transform_row<S: Simd>(&self, s: S, row: usize, tiles: usize, bias: S::F32) {
        let epilogue = self.epilogue.early();
        let bounds = epilogue.bounds();
        let range = bounds.unwrap_or(Bounds::NONE);
        for tile in 0..tiles {
            // SAFETY: staging holds A - 2 rows of A columns of each tile, the strip ROW columns.
            unsafe {
                let mut x = [s.zero(); A];
                for (j, x) in x.iter_mut().enumerate() {
                    *x = s.load(self.half_done(row, tile * A + j, S::LANES));
                }
                let results = transform::output(s, x);
                let strip = self.strip(tile * (A - 2), S::LANES);
                for (j, y) in results[..A - 2].iter().enumerate() {
                    s.store(strip.add(j * S::LANES), range.of(s, s.add(*y, bias)));
                }
            }
        }
        if bounds.is_none() {
            let strip = self.strip(0, S::LANES);
            // SAFETY: the vectors that were stored above.
            unsafe { activate_all(s, epilogue.activation, strip, tiles * (A - 2) * S::LANES) };
        }
    }

    /// The place of a vector between the two passes.
    #[inline(always)]
    fn half_done(&self, row: usize, column: usize, lanes: usize) -> *mut f32 {
        self.staging.wrapping_add((row * HALF_DONE_ROW + column) * lanes)
    }

    /// The place of a vector of the strip.
    #[inline(always)]
    fn strip(&self, column: usize, lanes: usize) -> *mut f32 {
        self.half_done(MAX_ALPHA - 2, column, lanes)
    }

    /// Writes the pixels of the staged row that are inside of the image.
    ///
    /// # Safety
    /// The row must be staged and y reach the problem's elements.
    #[inline(always)]
    unsafe fn unstage<S: Simd>(&self, s: S, row: usize, segment: &Segment, channel: usize) {
        let p = &self.geometry.problem;
        let (top, left) = (segment.row * (A - 2), segment.column * (A - 2));
        let columns = (segment.count * (A - 2)).min(p.ow - left);
        let channels = S::LANES.min(self.channels.end - channel);
        let [stride_n, stride_k, stride_h, stride_w] = self.strides;
        // SAFETY: the row and the columns of the strip that are in y.
        unsafe {
            let strip = self.strip(0, S::LANES);
            let y = self.y.offset(
                segment.n as isize * stride_n
                    + channel as isize * stride_k
                    + (top + row) as isize * stride_h
                    + left as isize * stride_w,
            );
            if stride_k == 1 {
                copy_pixels(s, strip, columns, channels, y, stride_w, &self.epilogue);
            } else if stride_w == 1 && !S::IS_SMALL {
                transpose_rows(s, strip, columns, channels, y, stride_k, &self.epilogue);
            } else {
                let strides = [stride_k, stride_w];
                scatter(s, strip, columns, channels, y, strides, &self.epilogue);
            }
        }
    }
}

/// Pixels whose channels are neighbours.
///
/// # Safety
/// `strip` must hold `pixels` vectors, and y must reach `channels <= LANES` channels of `pixels` pixels.
#[inline(always)]
unsafe fn copy_pixels<S: Simd, Y: SimdElement>(
    s: S,
    strip: *const f32,
    pixels: usize,
    channels: usize,
    y: *mut Y,
    stride_w: isize,
    epilogue: &Epilogue,
) {
    for i in 0..pixels {
        // SAFETY: passed on.
        unsafe {
            let y = y.offset(i as isize * stride_w);
            let v = epilogue.late(s, s.load(strip.add(i * S::LANES)), y, 1, channels);
            if channels == S::LANES {
                Y::store(s, y, v);
            } else {
                Y::store_first(s, y, v, channels);
            }
        }
    }
}

/// Channels whose pixels are neighbours, a square of vectors at a time.
///
/// # Safety
/// `strip` must hold `pixels` vectors and `LANES - 1` more readable ones, and y must reach `channels <= LANES` channels
/// of `pixels` pixels.
#[inline(always)]
unsafe fn transpose_rows<S: Simd, Y: SimdElement>(
    s: S,
    strip: *const f32,
    pixels: usize,
    channels: usize,
    y: *mut Y,
    stride_k: isize,
    epilogue: &Epilogue,
) {
    for first in (0..pixels).step_by(S::LANES) {
        let count = S::LANES.min(pixels - first);
        let mut square = s.zeros();
        // SAFETY: passed on; only `count` pixels of channels that exist are written.
        unsafe {
            for (i, v) in square.as_mut().iter_mut().enumerate() {
                *v = s.load(strip.add((first + i) * S::LANES));
            }
            let rows = s.transpose(square);
            let y = y.add(first);
            let is_whole = count == S::LANES && channels == S::LANES;
            if is_whole && epilogue.residual.is_none() {
                // A loop of its own, unrolled: the square stays in registers.
                for (c, v) in rows.as_ref().iter().enumerate() {
                    Y::store(s, y.offset(c as isize * stride_k), *v);
                }
                continue;
            }
            // A copy, which lies in memory because its rows are taken by index. So the square above stays in registers.
            let copy = rows;
            for (c, v) in copy.as_ref()[..channels].iter().enumerate() {
                let y = y.offset(c as isize * stride_k);
                let v = epilogue.late(s, *v, y, 1, count);
                if count == S::LANES {
                    Y::store(s, y, v);
                } else {
                    Y::store_first(s, y, v, count);
                }
            }
        }
    }
}

/// Any strides.
///
/// # Safety
/// `strip` must hold `pixels` vectors, and y must reach `channels <= LANES` channels of `pixels` pixels by its strides
/// of channel and pixel.
#[inline(always)]
unsafe fn scatter<S: Simd, Y: SimdElement>(
    s: S,
    strip: *const f32,
    pixels: usize,
    channels: usize,
    y: *mut Y,
    strides: [isize; 2],
    epilogue: &Epilogue,
) {
    for i in 0..pixels {
        // SAFETY: passed on.
        unsafe {
            let y = y.offset(i as isize * strides[1]);
            let v = epilogue.late(s, s.load(strip.add(i * S::LANES)), y, strides[0], channels);
            epilogue::scatter(s, v, y, strides[0], channels);
        }
    }
}
