//! Sums of a unit by tiles.

use super::super::super::epilogue::{Lanes, Store};
use super::super::super::stencil::{Segment, Stencil};
use super::super::Operands;
use super::{BLOCK, TILE, Tiled, Unit};
use crate::bf16;
use crate::cpu::{
    Bf16Kernel, Bf16Products, Isa, ROW_BYTES, SIDE, TileKernel, Tiles, dispatch_bf16,
};
use std::ops::Range;

/// Sums all channels of a unit for all of its pixels, in blocks of two tiles by two.
pub(super) struct Sums<'a> {
    pub plan: &'a Tiled,
    pub isa: Isa,
    pub stencil: &'a Stencil,
    pub unit: Unit,
    pub operands: &'a Operands<'a, bf16>,
    /// The copy, or the source from channel 0 of the group on.
    pub pixels: *const u8,
    /// Room for a block, and two vectors more.
    pub sums: *mut f32,
}

impl TileKernel for Sums<'_> {
    #[inline(always)]
    fn run<T: Tiles>(self, tiles: &mut T) {
        match self.plan.lanes {
            Lanes::Channels => self.panels::<T, true>(tiles),
            Lanes::Pixels => self.panels::<T, false>(tiles),
        }
    }
}

impl Sums<'_> {
    /// With pixels as left tiles, or as right ones.
    #[inline(always)]
    fn panels<T: Tiles, const LEFT: bool>(&self, tiles: &mut T) {
        let Sums { plan, stencil, unit, .. } = self;
        let group = unit.group * plan.packed_group_len(stencil);
        let panel_len = 2 * plan.steps() * TILE / size_of::<f32>();
        for panel in unit.panels.clone() {
            let filter = self.operands.packed[group + panel * panel_len..].as_ptr().cast::<u8>();
            let channels = panel * BLOCK..(panel * BLOCK + BLOCK).min(stencil.k);
            let two = channels.len() > SIDE;
            let store = self.store(channels);
            for (slab, n) in unit.images.clone().enumerate() {
                let first = unit.first(n);
                let [rows, cols] = unit.size;
                let len = (rows - 1) * plan.width() + cols;
                let mut pixel = 0;
                while pixel < len {
                    let more = len - pixel > SIDE;
                    let end = len.min(pixel + if more { BLOCK } else { SIDE });
                    let (from, lane) =
                        self.pixels(slab, first, pixel, if more { BLOCK } else { SIDE });
                    // SAFETY: whoever makes a `Sums` has pixels, filter and destination in memory.
                    unsafe {
                        match (more, two) {
                            (true, true) => self.block::<T, LEFT, 2, 2>(tiles, from, filter),
                            (true, false) => self.block::<T, LEFT, 2, 1>(tiles, from, filter),
                            (false, true) => self.block::<T, LEFT, 1, 2>(tiles, from, filter),
                            (false, false) => self.block::<T, LEFT, 1, 1>(tiles, from, filter),
                        }
                    }
                    let (size, width) = (unit.size, plan.width());
                    dispatch_bf16(
                        self.isa,
                        Finish { store: &store, first, size, width, pixels: pixel..end, lane },
                    );
                    pixel = end;
                }
            }
        }
    }

    fn store(&self, channels: Range<usize>) -> Store<'_, bf16> {
        let Sums { plan, stencil, unit, operands, .. } = self;
        Store {
            stencil,
            lanes: plan.lanes,
            dst: operands.dst.wrapping_offset(stencil.dst_group(unit.group)),
            epilogue: operands.epilogue.for_group(unit.group, stencil.k),
            channels,
            tile: self.sums,
            row: BLOCK,
        }
    }

    /// Where a tile, or two, that have a slab's pixel begin, and which of theirs it is. Where pixels lie, the last
    /// of a row are summed with those before them.
    #[inline(always)]
    fn pixels(
        &self,
        slab: usize,
        first: Segment,
        pixel: usize,
        count: usize,
    ) -> (*const u8, usize) {
        let Sums { plan, stencil, pixels, .. } = self;
        if !plan.in_place {
            return (pixels.wrapping_add(slab * plan.slab_bytes() + pixel * plan.pixel_bytes()), 0);
        }
        let at = (first.j + pixel).min(stencil.dst_size[1] - count);
        let row = first.n as isize * stencil.src[0]
            + (first.i * stencil.step[0]) as isize * stencil.src[2];
        let row = pixels.wrapping_offset(row * size_of::<bf16>() as isize);
        (row.wrapping_add(at * plan.pitch), first.j + pixel - at)
    }

    /// Sums of so many tiles of pixels and of channels.
    ///
    /// # Safety
    /// As many pixels as there are in the tiles are readable at `from`, for all taps and terms, the filter's tiles
    /// at `filter`.
    #[inline(always)]
    unsafe fn block<T: Tiles, const LEFT: bool, const PIXELS: usize, const CHANNELS: usize>(
        &self,
        tiles: &mut T,
        from: *const u8,
        mut filter: *const u8,
    ) {
        let plan = self.plan;
        let (pitch, sums) = (plan.pitch, self.sums.cast::<u8>());
        let (left, right) = if LEFT { (PIXELS, CHANNELS) } else { (CHANNELS, PIXELS) };
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        tiles.zero::<3>();
        // SAFETY: promised by the caller; the sums have room for two tiles by two.
        unsafe {
            for chunk in 0..plan.chunks {
                let from = from.wrapping_add(chunk * plan.chunk_bytes());
                for &offset in &plan.offsets {
                    let from = from.wrapping_add(offset);
                    for line in (0..CHANNELS * TILE).step_by(ROW_BYTES) {
                        tiles.prefetch(filter.wrapping_add(AHEAD * CHANNELS * TILE + line));
                    }
                    if LEFT {
                        tiles.load::<4>(from, pitch);
                        tiles.load::<6>(filter, ROW_BYTES);
                        if PIXELS == 2 {
                            tiles.load::<5>(from.wrapping_add(SIDE * pitch), pitch);
                        }
                        if CHANNELS == 2 {
                            tiles.load::<7>(filter.wrapping_add(TILE), ROW_BYTES);
                        }
                    } else {
                        tiles.load::<4>(filter, ROW_BYTES);
                        tiles.load::<6>(from, pitch);
                        if CHANNELS == 2 {
                            tiles.load::<5>(filter.wrapping_add(TILE), ROW_BYTES);
                        }
                        if PIXELS == 2 {
                            tiles.load::<7>(from.wrapping_add(ROW_BYTES), pitch);
                        }
                    }
                    tiles.add_products::<0, 4, 6>();
                    if right == 2 {
                        tiles.add_products::<1, 4, 7>();
                    }
                    if left == 2 {
                        tiles.add_products::<2, 5, 6>();
                    }
                    if left == 2 && right == 2 {
                        tiles.add_products::<3, 5, 7>();
                    }
                    filter = filter.wrapping_add(CHANNELS * TILE);
                }
            }
            let row = BLOCK * size_of::<f32>();
            tiles.store::<0>(sums, row);
            tiles.store::<1>(sums.wrapping_add(ROW_BYTES), row);
            tiles.store::<2>(sums.wrapping_add(SIDE * row), row);
            tiles.store::<3>(sums.wrapping_add(SIDE * row + ROW_BYTES), row);
        }
    }
}

/// Steps by which the filter is asked for before it is read: it comes from the second-level cache.
const AHEAD: usize = 1;

/// Brings finished sums of some of a slab's pixels to the destination.
struct Finish<'a> {
    store: &'a Store<'a, bf16>,
    /// The slab's first pixel, and its size; pixels of a row, of which those behind it are left out.
    first: Segment,
    size: [usize; 2],
    width: usize,
    pixels: Range<usize>,
    /// Of the first.
    lane: usize,
}

impl Bf16Kernel for Finish<'_> {
    #[inline(always)]
    fn run<P: Bf16Products>(self, p: P) {
        let Finish { store, first, size: [rows, cols], width, .. } = self;
        let Stencil { dst, dst_size, .. } = store.stencil;
        let rows_follow = cols == dst_size[1] && dst[2] == cols as isize * dst[3];
        let mut pixel = self.pixels.start;
        while pixel < self.pixels.end {
            let (i, j) = (pixel / width, pixel % width);
            if j >= cols {
                pixel += width - j;
                continue;
            }
            // Rows that follow each other on both sides are one.
            let of_row = if rows_follow && width == cols { self.pixels.end } else { cols - j };
            let len = of_row.min(self.pixels.end - pixel);
            let lane = self.lane + pixel - self.pixels.start;
            let segment = Segment { lane, len, i: first.i + i, j: first.j + j, ..first };
            // The unit writes what follows in the slab later.
            let ahead = if rows_follow { (rows - i) * cols - j } else { cols - j };
            // SAFETY: pixels of the stencil, whose sums are in the tile, with two vectors more.
            unsafe { store.segment_of_pairs(p, &segment, ahead) };
            pixel += len;
        }
    }
}
