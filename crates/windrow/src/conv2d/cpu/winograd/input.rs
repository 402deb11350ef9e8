//! The input transform: `V = B^T d B` for a block of tiles.
//!
//! Vectors run over input channels. A strip of tiles is first staged as [row, column, channel] in
//! the first-level cache, with zeros for padding, the image's border and missing channels, so the
//! transform itself knows no edges. Channels-last data is copied there, row-major data transposed
//! in registers.

use super::geometry::{Geometry, Segment};
use super::transform;
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement};
use std::ops::Range;

/// Columns of a strip of tiles that is staged at once.
pub(super) const COLUMNS: usize = 32;

/// Columns of a staged row: a transposed square can start at any column of the strip.
pub(super) const ROW: usize = COLUMNS + MAX_LANES;

/// Elements of the staging buffer.
pub(super) const STAGING: usize = crate::conv2d::winograd::MAX_ALPHA * ROW * MAX_LANES;

/// The input transform of a block of tiles, `A` = alpha.
pub(super) struct InputTransform<'a, X, const A: usize> {
    pub geometry: &'a Geometry,
    pub x: *const X,
    /// Strides of x [n, c, h, w]
    pub strides: [isize; 4],
    /// The block.
    pub tiles: Range<usize>,
    /// [`STAGING`] elements.
    pub staging: *mut f32,
    /// V [position, c / LANES, tile, LANES]
    pub v: *mut f32,
    /// Distances between positions and between channel vectors of V.
    pub v_strides: [usize; 2],
}

impl<X: SimdElement, const A: usize> Kernel for InputTransform<'_, X, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut tile = self.tiles.start;
        while tile < self.tiles.end {
            let segment = self.geometry.segment(tile, self.tiles.end, COLUMNS - 2);
            for vector in 0..self.geometry.problem.c.div_ceil(S::LANES) {
                let offset = vector * self.v_strides[1] + (tile - self.tiles.start) * S::LANES;
                // SAFETY: the segment is inside of the problem, whose elements x reaches; staging
                // holds a strip; V holds the block's tiles.
                unsafe {
                    self.stage(s, &segment, vector * S::LANES);
                    self.transform_columns(s, segment.count * (A - 2) + 2);
                    self.transform_rows(s, segment.count, self.v.add(offset));
                }
            }
            tile += segment.count;
        }
    }
}

impl<X: SimdElement, const A: usize> InputTransform<'_, X, A> {
    /// Copies the pixels of the segment's strip, of the channels from `channel` on.
    ///
    /// # Safety
    /// x must reach the problem's elements, `staging` hold a strip.
    #[inline(always)]
    unsafe fn stage<S: Simd>(&self, s: S, segment: &Segment, channel: usize) {
        let p = &self.geometry.problem;
        let columns = segment.count * (A - 2) + 2;
        let top = (segment.row * (A - 2)) as isize - p.padding[0] as isize;
        let left = (segment.column * (A - 2)) as isize - p.padding[1] as isize;
        // The columns first..end of the strip are inside of the image.
        let first = (-left).clamp(0, columns as isize);
        let end = (p.w as isize - left).clamp(first, columns as isize);
        let channels = S::LANES.min(p.c - channel);
        let [stride_n, stride_c, stride_h, stride_w] = self.strides;
        for row in 0..A {
            // SAFETY: rows and columns of the strip; those inside of the image are in x.
            unsafe {
                let out = self.staging.add(row * ROW * S::LANES);
                let y = top + row as isize;
                if y < 0 || y >= p.h as isize || first == end {
                    std::ptr::write_bytes(out, 0, columns * S::LANES);
                    continue;
                }
                let x = self.x.offset(
                    segment.n as isize * stride_n
                        + channel as isize * stride_c
                        + y * stride_h
                        + (left + first) * stride_w,
                );
                let (first, end) = (first as usize, end as usize);
                let inside = out.add(first * S::LANES);
                if stride_c == 1 {
                    copy_pixels(s, x, stride_w, channels, end - first, inside);
                } else if stride_w == 1 && !S::IS_SMALL {
                    transpose_rows(s, x, stride_c, channels, end - first, inside);
                } else {
                    gather(x, [stride_c, stride_w], channels, end - first, inside, S::LANES);
                }
                std::ptr::write_bytes(out, 0, first * S::LANES);
                std::ptr::write_bytes(out.add(end * S::LANES), 0, (columns - end) * S::LANES);
            }
        }
    }

    /// `B^T` over the rows of each staged column, in place.
    ///
    /// # Safety
    /// `staging` must hold `columns` columns.
    #[inline(always)]
    unsafe fn transform_columns<S: Simd>(&self, s: S, columns: usize) {
        for column in 0..columns {
            // SAFETY: A rows of ROW columns, of which `columns` are in use.
            unsafe {
                let at = self.staging.add(column * S::LANES);
                let mut x = [s.zero(); A];
                for (i, x) in x.iter_mut().enumerate() {
                    *x = s.load(at.add(i * ROW * S::LANES));
                }
                for (i, x) in transform::input(s, x).iter().enumerate() {
                    s.store(at.add(i * ROW * S::LANES), *x);
                }
            }
        }
    }

    /// `B^T` over the columns of each tile, into V.
    ///
    /// # Safety
    /// `staging` must hold `tiles` tiles, and `v` must reach `tiles` tiles from where it points.
    #[inline(always)]
    unsafe fn transform_rows<S: Simd>(&self, s: S, tiles: usize, v: *mut f32) {
        // Tiles inside of rows: only A places of V are written at a time, each in turn.
        for row in 0..A {
            for tile in 0..tiles {
                // SAFETY: the tile's A columns are staged; V has A * A positions.
                unsafe {
                    let at = self.staging.add((row * ROW + tile * (A - 2)) * S::LANES);
                    let mut x = [s.zero(); A];
                    for (j, x) in x.iter_mut().enumerate() {
                        *x = s.load(at.add(j * S::LANES));
                    }
                    let v = v.add(row * A * self.v_strides[0] + tile * S::LANES);
                    for (j, x) in transform::input(s, x).iter().enumerate() {
                        s.store(v.add(j * self.v_strides[0]), *x);
                    }
                }
            }
        }
    }
}

/// Pixels whose channels are neighbours.
///
/// # Safety
/// x must reach `channels <= LANES` channels of `pixels` pixels, and `out` must hold `pixels` vectors.
#[inline(always)]
pub(super) unsafe fn copy_pixels<S: Simd, X: SimdElement>(
    s: S,
    x: *const X,
    stride_w: isize,
    channels: usize,
    pixels: usize,
    out: *mut f32,
) {
    for i in 0..pixels {
        // SAFETY: passed on.
        unsafe {
            let x = x.offset(i as isize * stride_w);
            let v =
                if channels == S::LANES { X::load(s, x) } else { X::load_first(s, x, channels) };
            s.store(out.add(i * S::LANES), v);
        }
    }
}

/// Channels whose pixels are neighbours, a square of vectors at a time. Writes up to `LANES - 1`
/// vectors more than `pixels`.
///
/// # Safety
/// x must reach `channels <= LANES` channels of `pixels` pixels, and `out` must hold `pixels + LANES - 1` vectors.
#[inline(always)]
pub(super) unsafe fn transpose_rows<S: Simd, X: SimdElement>(
    s: S,
    x: *const X,
    stride_c: isize,
    channels: usize,
    pixels: usize,
    out: *mut f32,
) {
    for first in (0..pixels).step_by(S::LANES) {
        let count = S::LANES.min(pixels - first);
        let mut square = s.zeros();
        // SAFETY: `count` pixels of each channel from `first` on.
        unsafe {
            let x = x.add(first);
            if count == S::LANES && channels == S::LANES {
                for (c, v) in square.as_mut().iter_mut().enumerate() {
                    *v = X::load(s, x.offset(c as isize * stride_c));
                }
            } else {
                for (c, v) in square.as_mut().iter_mut().enumerate() {
                    if c < channels {
                        *v = X::load_first(s, x.offset(c as isize * stride_c), count);
                    }
                }
            }
            for (i, v) in s.transpose(square).as_ref().iter().enumerate() {
                s.store(out.add((first + i) * S::LANES), *v);
            }
        }
    }
}

/// Any strides.
///
/// # Safety
/// x must reach `channels <= lanes` channels of `pixels` pixels by its strides of channel and pixel, and `out` must
/// hold `pixels` vectors of `lanes`.
#[inline(always)]
pub(super) unsafe fn gather<X: SimdElement>(
    x: *const X,
    strides: [isize; 2],
    channels: usize,
    pixels: usize,
    out: *mut f32,
    lanes: usize,
) {
    for i in 0..pixels {
        for c in 0..lanes {
            // SAFETY: only channels that exist are read.
            unsafe {
                let x = x.offset(c as isize * strides[0] + i as isize * strides[1]);
                *out.add(i * lanes + c) = if c < channels { (*x).to_f32() } else { 0.0 };
            }
        }
    }
}
