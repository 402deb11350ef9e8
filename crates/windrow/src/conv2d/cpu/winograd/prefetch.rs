//! Asking for pixels ahead of time.
//!
//! A strip of tiles touches short pieces of many rows of many channels. The hardware does not foresee them, and waiting
//! for memory took up to five times as long as the transforms themselves. So the products, which leave the memory idle,
//! prefetch the pixels of the next input transform and of the output transform that follows, a few cache lines with
//! each micro-kernel call.

use super::geometry::Geometry;
use crate::cpu::Simd;
use std::ops::Range;

/// Images of more bytes than this are not found in the caches when a pass begins.
pub(super) const FAR: usize = 12 << 20;

/// Bytes of a cache line.
const LINE: usize = 64;

/// The pixels of a block of tiles, as cache lines to prefetch.
#[derive(Clone, Debug)]
pub(super) struct Prefetch<'a> {
    geometry: &'a Geometry,
    image: Image,
    tiles: Range<usize>,
    channels: Range<usize>,
    /// The number of lines to prefetch at each call of [`Prefetch::some`].
    share: usize,
    /// The number of lines that may be prefetched before the next call; negative after a piece with more lines.
    credit: isize,
    run: Run,
}

/// An image tensor to read or write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Image {
    /// The element at index 0.
    pub start: *const u8,
    pub element: usize,
    /// [n, channel, row, column], in elements.
    pub strides: [isize; 4],
    pub size: [usize; 2],
    /// Rows and columns of a tile's pixels before its first output, and in all.
    pub before: [usize; 2],
    pub side: usize,
}

/// The remaining part of the neighbouring tiles of one row of tiles: rows of pieces of contiguous cache lines.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// The next piece, and how many are left of this row.
    piece: *const u8,
    pieces: usize,
    piece_stride: isize,
    /// Lines of a piece.
    lines: usize,
    /// The next row, and how many are left.
    row: *const u8,
    rows: usize,
    row_stride: isize,
    row_pieces: usize,
}

impl Run {
    const NONE: Run = Run {
        piece: std::ptr::null(),
        pieces: 0,
        piece_stride: 0,
        lines: 0,
        row: std::ptr::null(),
        rows: 0,
        row_stride: 0,
        row_pieces: 0,
    };
}

impl<'a> Prefetch<'a> {
    /// Nothing, where all of it is in the caches.
    pub(super) fn nothing(geometry: &'a Geometry) -> Self {
        let image = Image {
            start: std::ptr::null(),
            element: 1,
            strides: [0; 4],
            size: [0; 2],
            before: [0; 2],
            side: 0,
        };
        Prefetch::new(geometry, image, 0..0, 0..0, 1)
    }

    /// The prefetches for some channels of a block, distributed over `calls` calls.
    pub(super) fn new(
        geometry: &'a Geometry,
        image: Image,
        tiles: Range<usize>,
        channels: Range<usize>,
        calls: usize,
    ) -> Self {
        // A third more than the pixels for the edges of tiles and of cache lines.
        let pixels = tiles.len() * image.side * geometry.m;
        let lines = pixels * channels.len() * image.element * 4 / (3 * LINE);
        let share = lines.div_ceil(calls.max(1)) + 1;
        Prefetch { geometry, image, tiles, channels, share, credit: 0, run: Run::NONE }
    }

    /// Calls `ask` for the next few lines, in whole pieces.
    #[inline(always)]
    pub(super) fn some(&mut self, ask: impl Fn(*const u8)) {
        self.credit += self.share as isize;
        while self.credit > 0 {
            if self.run.pieces == 0 {
                if self.run.rows == 0 {
                    if self.tiles.is_empty() {
                        self.credit = 0;
                        return;
                    }
                    self.run = self.next_run();
                    continue;
                }
                let run = &mut self.run;
                (run.piece, run.pieces) = (run.row, run.row_pieces);
                run.row = run.row.wrapping_offset(run.row_stride);
                run.rows -= 1;
            }
            let run = &mut self.run;
            for line in 0..run.lines {
                ask(run.piece.wrapping_add(line * LINE));
            }
            run.piece = run.piece.wrapping_offset(run.piece_stride);
            run.pieces -= 1;
            self.credit -= run.lines as isize;
        }
    }

    /// The next tiles of the block that are neighbours.
    fn next_run(&mut self) -> Run {
        let image = &self.image;
        let (columns, m) = (self.geometry.grid[1], self.geometry.m);
        let first = self.tiles.start;
        let count = self.tiles.len().min(columns - first % columns);
        self.tiles.start += count;
        let inside = |tile: usize, count: usize, d: usize| {
            let start = (tile * m).saturating_sub(image.before[d]);
            let end = (tile * m + (count - 1) * m + image.side).saturating_sub(image.before[d]);
            start..end.min(image.size[d]).max(start)
        };
        let grid_row = first / columns;
        let y = inside(grid_row % self.geometry.grid[0], 1, 0);
        let x = inside(first % columns, count, 1);
        let [stride_n, stride_c, stride_h, stride_w] =
            image.strides.map(|s| s * image.element as isize);
        let row = (grid_row / self.geometry.grid[0]) as isize * stride_n
            + self.channels.start as isize * stride_c
            + y.start as isize * stride_h
            + x.start as isize * stride_w;
        let (pieces, piece_stride, elements) = if image.strides[1] == 1 {
            (x.len(), stride_w, self.channels.len())
        } else {
            (self.channels.len(), stride_c, x.len())
        };
        let empty = pieces == 0 || elements == 0;
        Run {
            piece_stride,
            lines: (elements * image.element).div_ceil(LINE),
            row: image.start.wrapping_offset(row),
            rows: if empty { 0 } else { y.len() },
            row_stride: stride_h,
            row_pieces: pieces,
            ..Run::NONE
        }
    }
}

/// The pixels to prefetch during products: to be read, and to be written.
pub(super) struct Ahead<'a, 'b> {
    pub read: &'b mut Prefetch<'a>,
    pub write: Prefetch<'a>,
}

impl Ahead<'_, '_> {
    /// Asks for the next few of both.
    #[inline(always)]
    pub(super) fn some<S: Simd>(&mut self, s: S) {
        self.read.some(|p| s.prefetch(p));
        self.write.some(|p| s.prefetch_write(p));
    }
}
