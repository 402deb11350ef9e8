//! U and V as parts of bf16.
//!
//! Terms of a tile come in pairs. The second term of a pair is the input channel after the first by the number of lanes
//! of a vector. So vectors are split as they lie: the left operand's along the channels of V, the right one's along the
//! output channels of U.

use super::super::prefetch::Ahead;
use super::{COLUMNS, TERMS, TILE_BYTES, whole};
use crate::bf16;
use crate::cpu::{Bf16Kernel, Bf16Products, ROW_BYTES, SIDE, Simd, array};
use std::ops::Range;

/// Numbers of bf16 that add up to one of f32.
pub(super) const PARTS: usize = 3;

/// The number of elements of U by which it is prefetched before it is split: what memory delivers in that time.
const AHEAD: usize = 4 << 10;

/// Splits V [c / LANES, tile, LANES] of a position to [chunk, part, tile, TERMS].
pub(super) struct SplitInput {
    pub v: *const f32,
    /// Distance between vectors of channels, and how many there are.
    pub stride: usize,
    pub vectors: usize,
    pub tiles: usize,
    /// Room for the parts, with tiles in whole rows.
    pub to: *mut u8,
}

impl Bf16Kernel for SplitInput {
    #[inline(always)]
    fn run<P: Bf16Products>(self, p: P) {
        let SplitInput { v, stride, vectors, tiles, to } = self;
        let (s, lanes) = (p.simd(), P::Simd::LANES);
        let part = whole(tiles) * ROW_BYTES;
        // Two vectors are a part of a row of terms, all of it where they are longest.
        for first in (0..vectors.next_multiple_of(TERMS / lanes)).step_by(2) {
            let (chunk, pair) = (first * lanes / TERMS, first * lanes % TERMS);
            let to = to.wrapping_add(chunk * PARTS * part + pair * size_of::<bf16>());
            for tile in 0..tiles {
                let from = v.wrapping_add(first * stride + tile * lanes);
                let to = to.wrapping_add(tile * ROW_BYTES);
                let to = array(|i| to.wrapping_add(i * part).cast());
                // SAFETY: whoever makes a `SplitInput` has the vectors and tiles of V, and room for their parts.
                unsafe {
                    let low = if first < vectors { s.load(from) } else { s.zero() };
                    let high =
                        if first + 1 < vectors { s.load(from.add(stride)) } else { s.zero() };
                    p.split2::<true>(to, [low, high]);
                }
            }
        }
    }
}

/// Splits some pairs of input channels of a chunk of a panel to [part, tile of output channels, pair, SIDE, 2].
pub(super) struct SplitPanel<'a, 'b, 'c> {
    /// U [c, width] of the chunk.
    pub u: *const f32,
    /// Channels that exist; the others count as zeros.
    pub c: usize,
    /// Output channels.
    pub width: usize,
    /// The range among the [`SIDE`] pairs.
    pub pairs: Range<usize>,
    pub to: *mut u8,
    /// What is prefetched meanwhile.
    pub ahead: &'c mut Ahead<'a, 'b>,
}

impl Bf16Kernel for SplitPanel<'_, '_, '_> {
    #[inline(always)]
    fn run<P: Bf16Products>(self, p: P) {
        let SplitPanel { u, c, width, pairs, to, ahead } = self;
        let (s, lanes) = (p.simd(), P::Simd::LANES);
        for pair in pairs {
            let channel = pair / lanes * 2 * lanes + pair % lanes;
            for column in (0..width).step_by(lanes) {
                let first = u.wrapping_add(channel * width + column);
                let second = first.wrapping_add(lanes * width);
                let tile = column / SIDE * TILE_BYTES + column % SIDE * 2 * size_of::<bf16>();
                let to = to.wrapping_add(tile + pair * ROW_BYTES);
                let part = COLUMNS * TILE_BYTES;
                let to = array(|i| to.wrapping_add(i * part).cast());
                // SAFETY: whoever makes a `SplitPanel` has these channels of U, and room for them.
                unsafe {
                    let low = if channel < c { s.load(first) } else { s.zero() };
                    let high = if channel + lanes < c { s.load(second) } else { s.zero() };
                    p.split2::<true>(to, [low, high]);
                }
                s.prefetch(first.wrapping_add(AHEAD));
                s.prefetch(second.wrapping_add(AHEAD));
            }
        }
        ahead.some(s);
    }
}
