//! The product `M = U V` of each position by tiles of bf16: numbers of f32 are split into three of bf16 that add up to
//! them, and six of the nine products of parts are summed.
//!
//! U and V stay in memory as they are for vectors, so that filters have one packed form and nothing grows. V of a
//! position is split once for all output channels. U is read once for each block of tiles, and the bytes that it has
//! are what bounds the products: so a panel of it is split while that before it is multiplied, which leaves vectors
//! idle.

mod split;

use super::gemm::{Gemm, PANEL};
use crate::cpu::{
    Isa, ROW_BYTES, SIDE, TERMS, TILE_BYTES, TileKernel, Tiles, add_block, array, dispatch_bf16,
    load_left, load_right,
};
use split::{PARTS, SplitInput, SplitPanel};
use std::ops::Range;

/// Tiles of the output channels of a panel at most.
const COLUMNS: usize = 2;
/// Bytes of a panel's split chunk of channels: [part, tile of output channels, TILE_BYTES].
const PANEL_CHUNK: usize = PARTS * COLUMNS * TILE_BYTES;

/// The bytes of the split V of a position, and of two split panels of U, for these numbers of tiles and channels.
pub(super) const fn split_bytes(tiles: usize, c: usize) -> usize {
    c.div_ceil(TERMS) * (PARTS * whole(tiles) * ROW_BYTES + 2 * PANEL_CHUNK)
}

/// Winograd's tiles in whole rows of a tile of sums.
pub(super) const fn whole(tiles: usize) -> usize {
    tiles.next_multiple_of(SIDE)
}

/// Calls of [`Ahead::some`](super::prefetch::Ahead::some) in the products of a block.
pub(super) fn calls(positions: usize, c: usize, vectors: usize, tiles: usize) -> usize {
    positions * vectors.div_ceil(PANEL) * c.div_ceil(TERMS) * tiles.div_ceil(2 * SIDE)
}

/// The products of a [`Gemm`] whose M is [position, k / SIDE, tile, SIDE], with tiles in whole rows of [`SIDE`].
pub(super) struct AmxGemm<'a, 'b> {
    /// The product, which must not accumulate.
    pub gemm: Gemm<'a, 'b>,
    pub isa: Isa,
    pub lanes: usize,
    /// V [chunk, part, tile, TERMS] of a position, then two panels of U: [`split_bytes`].
    pub scratch: *mut u8,
}

/// The sums that are formed at once: at most two rows of tiles and a panel of output channels.
struct Block {
    left: *const u8,
    right: *const u8,
    m: *mut u8,
    /// The part of the next panel's chunks that is split meanwhile, if there is a next panel.
    next: Option<(Panel, Range<usize>)>,
    next_to: *mut u8,
}

/// A panel of U.
#[derive(Clone, Copy)]
struct Panel {
    position: usize,
    /// Its first vector of output channels.
    vector: usize,
}

impl TileKernel for AmxGemm<'_, '_> {
    #[inline(always)]
    fn run<T: Tiles>(mut self, tiles: &mut T) {
        let (chunks, rows) = (self.chunks(), self.gemm.tiles.div_ceil(SIDE));
        let split_v = self.scratch;
        let panels = split_v.wrapping_add(chunks * PARTS * rows * TILE_BYTES);
        let mut places = [panels, panels.wrapping_add(chunks * PANEL_CHUNK)];
        let mut panel = Panel { position: 0, vector: 0 };
        // SAFETY: U, V and M are as documented, and the scratch memory holds a position of V and two panels.
        unsafe {
            for chunk in 0..chunks {
                self.split_panel(panel, chunk, 0..SIDE, places[0]);
            }
            for position in 0..self.gemm.positions {
                self.split_input(position);
                for vector in (0..self.gemm.vectors).step_by(PANEL) {
                    panel = Panel { position, vector };
                    let next = self.behind(panel);
                    let blocks = rows.div_ceil(2);
                    for i in 0..blocks {
                        let share = i * SIDE / blocks..(i + 1) * SIDE / blocks;
                        let block = Block {
                            left: split_v.wrapping_add(2 * i * TILE_BYTES),
                            right: places[0],
                            m: self.m_at(panel, 2 * i),
                            next: next.map(|panel| (panel, share)),
                            next_to: places[1],
                        };
                        match (rows - 2 * i > 1, self.width(vector) > SIDE) {
                            (true, true) => self.sum::<T, 2, 2>(tiles, block),
                            (true, false) => self.sum::<T, 2, 1>(tiles, block),
                            (false, true) => self.sum::<T, 1, 2>(tiles, block),
                            (false, false) => self.sum::<T, 1, 1>(tiles, block),
                        }
                    }
                    places.swap(0, 1);
                }
            }
        }
    }
}

impl AmxGemm<'_, '_> {
    /// Tiles of input channels.
    fn chunks(&self) -> usize {
        self.gemm.c.div_ceil(TERMS)
    }

    /// Output channels of the panel from a vector on.
    fn width(&self, vector: usize) -> usize {
        PANEL.min(self.gemm.vectors - vector) * self.lanes
    }

    /// The panel that is multiplied after this one.
    fn behind(&self, Panel { position, vector }: Panel) -> Option<Panel> {
        if vector + PANEL < self.gemm.vectors {
            Some(Panel { position, vector: vector + PANEL })
        } else if position + 1 < self.gemm.positions {
            Some(Panel { position: position + 1, vector: 0 })
        } else {
            None
        }
    }

    /// The place of a panel's sums, from a row of tiles on.
    fn m_at(&self, panel: Panel, row: usize) -> *mut u8 {
        let [position, column] = self.gemm.m_strides;
        let at = panel.position * position + panel.vector * self.lanes / SIDE * column;
        self.gemm.m.wrapping_add(at).cast::<u8>().wrapping_add(row * TILE_BYTES)
    }

    /// # Safety
    /// V holds the position; the scratch memory is as documented.
    unsafe fn split_input(&mut self, position: usize) {
        let Gemm { c, tiles, v, v_strides: [stride, vector], .. } = self.gemm;
        let v = v.wrapping_add(position * stride);
        let vectors = c.div_ceil(self.lanes);
        let to = self.scratch;
        dispatch_bf16(self.isa, SplitInput { v, stride: vector, vectors, tiles, to });
    }

    /// Splits a share of the pairs of input channels of a chunk, and prefetches a few pixels.
    ///
    /// # Safety
    /// U holds the panel, and there is room for it at `to`.
    unsafe fn split_panel(&mut self, panel: Panel, chunk: usize, pairs: Range<usize>, to: *mut u8) {
        let Gemm { c, u, u_position, .. } = self.gemm;
        let width = self.width(panel.vector);
        let first = chunk * TERMS;
        let at = panel.position * u_position + panel.vector * self.lanes * c + first * width;
        let split = SplitPanel {
            u: u.wrapping_add(at),
            c: TERMS.min(c - first),
            width,
            pairs,
            to: to.wrapping_add(chunk * PANEL_CHUNK),
            ahead: &mut self.gemm.ahead,
        };
        dispatch_bf16(self.isa, split);
    }

    /// The sums of a block over all input channels.
    ///
    /// # Safety
    /// The split operands are readable, of `ROWS` and `COLS` tiles, and M is writable.
    #[inline(always)]
    unsafe fn sum<T: Tiles, const ROWS: usize, const COLS: usize>(
        &mut self,
        tiles: &mut T,
        block: Block,
    ) {
        let m = block.m;
        let column = self.gemm.m_strides[1] * size_of::<f32>();
        // SAFETY: promised by the caller.
        unsafe {
            tiles.zero::<0>();
            tiles.zero::<1>();
            tiles.zero::<2>();
            tiles.zero::<3>();
            let part = whole(self.gemm.tiles) * ROW_BYTES;
            for chunk in 0..self.chunks() {
                let left = block.left.wrapping_add(chunk * PARTS * part);
                let right = block.right.wrapping_add(chunk * PANEL_CHUNK);
                let left = |i: usize| {
                    [left.wrapping_add(i * part), left.wrapping_add(i * part + TILE_BYTES)]
                };
                let right =
                    |i: usize| array(|tile| right.wrapping_add((i * COLUMNS + tile) * TILE_BYTES));
                // Small ones first.
                load_left::<T, ROWS>(tiles, left(0), ROW_BYTES);
                load_right::<T, COLS>(tiles, right(2), ROW_BYTES);
                add_block::<T, ROWS, COLS>(tiles);
                load_right::<T, COLS>(tiles, right(1), ROW_BYTES);
                add_block::<T, ROWS, COLS>(tiles);
                load_left::<T, ROWS>(tiles, left(1), ROW_BYTES);
                add_block::<T, ROWS, COLS>(tiles);
                load_right::<T, COLS>(tiles, right(0), ROW_BYTES);
                add_block::<T, ROWS, COLS>(tiles);
                load_left::<T, ROWS>(tiles, left(2), ROW_BYTES);
                add_block::<T, ROWS, COLS>(tiles);
                load_left::<T, ROWS>(tiles, left(0), ROW_BYTES);
                add_block::<T, ROWS, COLS>(tiles);
                if let Some((panel, pairs)) = &block.next {
                    self.split_panel(*panel, chunk, pairs.clone(), block.next_to);
                }
            }
            tiles.store::<0>(m, ROW_BYTES);
            if COLS == 2 {
                tiles.store::<1>(m.wrapping_add(column), ROW_BYTES);
            }
            if ROWS == 2 {
                tiles.store::<2>(m.wrapping_add(TILE_BYTES), ROW_BYTES);
            }
            if ROWS == 2 && COLS == 2 {
                tiles.store::<3>(m.wrapping_add(column + TILE_BYTES), ROW_BYTES);
            }
        }
    }
}
