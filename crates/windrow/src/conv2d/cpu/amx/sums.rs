//! Sums of a unit by tiles.

use super::super::direct::Operands;
use super::super::shared::epilogue::Lanes;
use super::super::shared::stencil::{Segment, Stencil};
use super::super::shared::store::Store;
use super::element::TileElement;
use super::{Amx, BLOCK, TILE_BYTES, Unit};
use crate::cpu::{
    Bf16Kernel, Bf16Products, Isa, Kernel, ROW_BYTES, SIDE, Simd, TileKernel, Tiles, add_block,
    dispatch, dispatch_bf16, load_left, load_right,
};
use std::ops::Range;

/// Products of parts of f32 that are summed. Left out are those of the second and third part and of both third parts, each
/// at most 2^-27 of the whole.
pub(super) const PRODUCTS: usize = 6;

/// Sums all channels of a unit for all of its pixels, in blocks of two tiles by two.
pub(super) struct Sums<'a, T> {
    pub plan: &'a Amx,
    pub isa: Isa,
    pub stencil: &'a Stencil,
    pub unit: Unit,
    pub operands: &'a Operands<'a, T>,
    /// The copy, or the source from channel 0 of the group on.
    pub pixels: *const u8,
    /// Room for [`SUMS`](super::SUMS) sums, and two vectors more.
    pub sums: *mut f32,
}

impl<E: TileElement> TileKernel for Sums<'_, E> {
    #[inline(always)]
    fn run<T: Tiles>(self, tiles: &mut T) {
        match self.plan.lanes {
            Lanes::Channels => self.panels::<T, true>(tiles),
            Lanes::Pixels => self.panels::<T, false>(tiles),
        }
    }
}

/// A block of sums on its way: some of a slab's pixels, in one panel of channels. Small, since it is moved.
struct Block {
    from: *const u8,
    filter: *const u8,
    /// The place of its sums, one of two.
    place: usize,
    channels: Range<usize>,
    /// The slab's image.
    n: usize,
    /// Pixels that are not yet at their place, and the first one's in the sums.
    pixels: Range<usize>,
    lane: usize,
    /// True if it has two tiles of pixels, and of channels.
    two: [bool; 2],
    /// True if all sums are finite; `None` until they were checked.
    finite: Option<bool>,
}

impl<E: TileElement> Sums<'_, E> {
    /// The sums with pixels as left tiles, or as right ones. While the sums of a block are stored, those of the next
    /// are formed, because tiles leave most of a core idle.
    #[inline(always)]
    fn panels<T: Tiles, const LEFT: bool>(&self, tiles: &mut T) {
        let Sums { plan, stencil, unit, .. } = self;
        let group = unit.group * plan.packed_group_len(stencil);
        let panel_len = 2 * plan.steps() * E::PARTS * TILE_BYTES / size_of::<f32>();
        let [rows, cols] = unit.size;
        let len = (rows - 1) * plan.width() + cols;
        let (mut before, mut place) = (None, 0);
        for panel in unit.panels.clone() {
            let filter = self.operands.packed[group + panel * panel_len..].as_ptr().cast::<u8>();
            let channels = panel * BLOCK..(panel * BLOCK + BLOCK).min(stencil.k);
            for (slab, n) in unit.images.clone().enumerate() {
                let mut pixel = 0;
                while pixel < len {
                    let two = [len - pixel > SIDE, channels.len() > SIDE];
                    let most = if two[0] { BLOCK } else { SIDE };
                    let (from, lane) = self.pixels(slab, unit.first(n), pixel, most);
                    let pixels = pixel..len.min(pixel + most);
                    pixel = pixels.end;
                    let (channels, finite) = (channels.clone(), None);
                    let block =
                        Block { from, filter, place, channels, n, pixels, lane, two, finite };
                    // SAFETY: whoever makes a `Sums` has pixels, filter and room for sums in memory.
                    unsafe {
                        let sums = self.place(&block);
                        match E::PARTS {
                            1 => self.sum::<T, LEFT, false>(tiles, &block, sums, &mut before),
                            _ => self.sum::<T, LEFT, true>(tiles, &block, sums, &mut before),
                        }
                    }
                    if let Some(before) = before.replace(block) {
                        self.end::<T, LEFT>(tiles, before);
                    }
                    place = 1 - place;
                }
            }
        }
        if let Some(last) = before {
            self.end::<T, LEFT>(tiles, last);
        }
    }

    /// The start of the tile, or of two, that has a slab's pixel, and the pixel's index in it. If pixels are read in
    /// place, the last pixels of a row are summed together with those before them.
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
        let row = pixels.wrapping_offset(row * size_of::<E>() as isize);
        (row.wrapping_add(at * plan.pitch), first.j + pixel - at)
    }

    /// The place of a block's sums.
    #[inline(always)]
    fn place(&self, block: &Block) -> *mut f32 {
        self.sums.wrapping_add(block.place * BLOCK * BLOCK)
    }

    /// True if the block's sums are finite. This matters if they are sums of bf16 parts.
    #[inline(always)]
    fn is_finite(&self, block: &mut Block) -> bool {
        if E::PARTS == 1 {
            return true;
        }
        if let Some(finite) = block.finite {
            return finite;
        }
        let size = match self.plan.lanes {
            Lanes::Channels => [block.pixels.len(), block.channels.len()],
            Lanes::Pixels => [block.channels.len(), block.pixels.len()],
        };
        let finite = dispatch(self.isa, AreFinite { sums: self.place(block), size });
        block.finite = Some(finite);
        finite
    }

    /// Stores the sums of this number of pixels.
    #[inline(always)]
    fn finish(&self, block: &mut Block, count: usize) {
        let Sums { plan, stencil, unit, operands, .. } = self;
        let count = count.min(block.pixels.len());
        let store = Store {
            stencil,
            lanes: plan.lanes,
            dst: operands.dst.wrapping_offset(stencil.dst_group(unit.group)),
            epilogue: operands.epilogue.for_group(unit.group, stencil.k),
            channels: block.channels.clone(),
            tile: self.place(block),
            row: BLOCK,
        };
        let (size, width, first, lane) = (unit.size, plan.width(), unit.first(block.n), block.lane);
        let pixels = block.pixels.start..block.pixels.start + count;
        dispatch_bf16(self.isa, Finish { store: &store, first, size, width, pixels, lane });
        block.pixels.start += count;
        block.lane += count;
    }

    /// Brings what is left of a block to its place.
    #[inline(always)]
    fn end<T: Tiles, const LEFT: bool>(&self, tiles: &mut T, mut block: Block) {
        if !self.is_finite(&mut block) {
            // An infinity has no parts but the first: its products with the others have no meaning.
            let (sums, firsts) = (self.place(&block), self.sums.wrapping_add(2 * BLOCK * BLOCK));
            // SAFETY: there is room for three blocks of sums.
            unsafe {
                self.sum::<T, LEFT, false>(tiles, &block, firsts, &mut None);
                for i in 0..BLOCK * BLOCK {
                    if !(*sums.add(i)).is_finite() {
                        *sums.add(i) = *firsts.add(i);
                    }
                }
            }
        }
        if !block.pixels.is_empty() {
            self.finish(&mut block, BLOCK);
        }
    }

    /// The sums of products of all parts of pixels and filters that count, or of the first ones. Meanwhile it stores
    /// some of the sums before them.
    ///
    /// # Safety
    /// As many pixels as there are in the tiles are readable, for all taps and terms, and the filter's tiles; there is room
    /// for a block at `sums`.
    #[inline(always)]
    unsafe fn sum<T: Tiles, const LEFT: bool, const ALL: bool>(
        &self,
        tiles: &mut T,
        block: &Block,
        sums: *mut f32,
        before: &mut Option<Block>,
    ) {
        // SAFETY: passed on.
        unsafe {
            match block.two {
                [true, true] => self.tiles::<T, LEFT, ALL, 2, 2>(tiles, block, sums, before),
                [true, false] => self.tiles::<T, LEFT, ALL, 2, 1>(tiles, block, sums, before),
                [false, true] => self.tiles::<T, LEFT, ALL, 1, 2>(tiles, block, sums, before),
                [false, false] => self.tiles::<T, LEFT, ALL, 1, 1>(tiles, block, sums, before),
            }
        }
    }

    /// The same for these numbers of tiles of pixels and of channels.
    ///
    /// # Safety
    /// As for [`Sums::sum`].
    #[inline(always)]
    unsafe fn tiles<
        T: Tiles,
        const LEFT: bool,
        const ALL: bool,
        const PIXELS: usize,
        const CHANNELS: usize,
    >(
        &self,
        tiles: &mut T,
        block: &Block,
        sums: *mut f32,
        before: &mut Option<Block>,
    ) {
        let plan = self.plan;
        let (from, mut filter) = (block.from, block.filter);
        // Pixels of the block before, enough for what a call takes; vectors along pixels are not cut.
        let count = match LEFT {
            true => BLOCK.div_ceil(plan.steps().max(1)).max(SIDE / 2),
            false => BLOCK,
        };
        let filter_len = E::PARTS * CHANNELS * TILE_BYTES;
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        tiles.zero::<3>();
        // SAFETY: promised by the caller; the sums have room for two tiles by two.
        unsafe {
            for &offset in &plan.steps {
                let from = from.wrapping_add(offset);
                let pixels = |part| Some(from.wrapping_add(part * plan.copy_of_part()));
                let channels =
                    |part| Some(filter.wrapping_add((E::PARTS - 1 - part) * CHANNELS * TILE_BYTES));
                macro_rules! multiply {
                    ($pixels:expr, $channels:expr) => {
                        self.multiply::<T, LEFT, PIXELS, CHANNELS>(tiles, $pixels, $channels)
                    };
                }
                if ALL {
                    // Small ones first.
                    multiply!(pixels(0), channels(2));
                    multiply!(None, channels(1));
                    multiply!(pixels(1), None);
                    multiply!(None, channels(0));
                    multiply!(pixels(2), None);
                    multiply!(pixels(0), None);
                } else {
                    multiply!(pixels(0), channels(0));
                }
                filter = filter.wrapping_add(filter_len);
                if let Some(before) = before
                    && !before.pixels.is_empty()
                    && self.is_finite(before)
                {
                    self.finish(before, count);
                }
            }
            let (row, sums) = (BLOCK * size_of::<f32>(), sums.cast::<u8>());
            tiles.store::<0>(sums, row);
            tiles.store::<1>(sums.wrapping_add(ROW_BYTES), row);
            tiles.store::<2>(sums.wrapping_add(SIDE * row), row);
            tiles.store::<3>(sums.wrapping_add(SIDE * row + ROW_BYTES), row);
        }
    }

    /// Adds the products of tiles of pixels and of channels, of which `None` are those of before.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn multiply<T: Tiles, const LEFT: bool, const PIXELS: usize, const CHANNELS: usize>(
        &self,
        tiles: &mut T,
        pixels: Option<*const u8>,
        filter: Option<*const u8>,
    ) {
        let pitch = self.plan.pitch;
        // SAFETY: promised by the caller.
        unsafe {
            if let Some(from) = pixels {
                let second = from.wrapping_add(if LEFT { SIDE * pitch } else { ROW_BYTES });
                match LEFT {
                    true => load_left::<T, PIXELS>(tiles, [from, second], pitch),
                    false => load_right::<T, PIXELS>(tiles, [from, second], pitch),
                }
            }
            if let Some(from) = filter {
                let ahead = AHEAD * E::PARTS * CHANNELS * TILE_BYTES;
                for line in (0..CHANNELS * TILE_BYTES).step_by(ROW_BYTES) {
                    tiles.prefetch(from.wrapping_add(ahead + line));
                }
                let two = [from, from.wrapping_add(TILE_BYTES)];
                match LEFT {
                    true => load_right::<T, CHANNELS>(tiles, two, ROW_BYTES),
                    false => load_left::<T, CHANNELS>(tiles, two, ROW_BYTES),
                }
            }
        }
        match LEFT {
            true => add_block::<T, PIXELS, CHANNELS>(tiles),
            false => add_block::<T, CHANNELS, PIXELS>(tiles),
        }
    }
}

/// The check that a block's sums are finite: rows, and columns of each.
struct AreFinite {
    sums: *const f32,
    size: [usize; 2],
}

impl Kernel for AreFinite {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let [rows, cols] = self.size;
        let mut zeros = [s.zero(); 2];
        for i in 0..rows {
            for at in (0..cols).step_by(S::LANES) {
                let from = self.sums.wrapping_add(i * BLOCK + at);
                // SAFETY: whoever makes one has as many sums.
                let sums = unsafe {
                    if cols - at >= S::LANES { s.load(from) } else { s.load_first(from, cols - at) }
                };
                // Zero times a number that is not finite is not a number.
                zeros[i % 2] = s.mul_add(sums, s.zero(), zeros[i % 2]);
            }
        }
        s.reduce_add(s.add(zeros[0], zeros[1])) == 0.0
    }
}

/// The number of steps by which the filter is prefetched: it comes from the second-level cache.
const AHEAD: usize = 1;

/// Brings finished sums of some of a slab's pixels to the destination.
struct Finish<'a, E> {
    store: &'a Store<'a, E>,
    /// The slab's first pixel, and its size; pixels of a row, of which those after it are left out.
    first: Segment,
    size: [usize; 2],
    width: usize,
    pixels: Range<usize>,
    /// The lane of the first.
    lane: usize,
}

impl<E: TileElement> Bf16Kernel for Finish<'_, E> {
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
