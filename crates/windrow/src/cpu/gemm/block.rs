//! The computation of a block of a product for one range of terms.

use super::{BlockedProduct, Blocking, Left, Place, Right, Tile};
use crate::cpu::{Kernel, Simd};
use std::ops::Range;

/// A kernel that computes all tiles of a block for one range of terms.
pub(super) struct Block<'a> {
    pub(super) blocking: &'a Blocking,
    // One kernel serves all.
    pub(super) operands: &'a dyn BlockedProduct,
    pub(super) batch: usize,
    pub(super) rows: Range<usize>,
    pub(super) cols: Range<usize>,
    pub(super) terms: usize,
    pub(super) left: Left,
    pub(super) right: Right,
    pub(super) tiles: *mut f32,
    /// The destination of the whole block, if it has one.
    pub(super) place: Option<Place>,
    pub(super) is_first: bool,
    pub(super) is_last: bool,
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Block { operands, batch, terms, left, right, .. } = self;
        let Blocking { mr, nr, .. } = *self.blocking;
        let row_panels = self.rows.len().div_ceil(mr);
        // Each row of tiles asks for its part of a panel; what was packed just now is near.
        let distance = if self.blocking.scratch.right { 0 } else { nr.div_ceil(row_panels) };
        // With a single step of terms one tile is enough.
        let waits = !(self.is_first && self.is_last);
        for (j, col) in self.cols.clone().step_by(nr).enumerate() {
            let end = (col + nr).min(self.cols.end);
            // The panel that is multiplied next, also of the terms that follow these.
            let next = match end == self.cols.end {
                false => right.ptr.wrapping_add((j + 1) * right.panel),
                true => right.ptr.wrapping_add(terms * nr),
            };
            for (i, row) in self.rows.clone().step_by(mr).enumerate() {
                let (rows, cols) = (row..(row + mr).min(self.rows.end), col..end);
                let place = match self.place {
                    Some(place) => Some(place.tile(i * mr, j * nr)),
                    None if self.is_last => operands.place(batch, rows.clone(), cols.clone()),
                    None => None,
                };
                let index = if waits { j * row_panels + i } else { 0 };
                let part = i * self.terms * distance;
                // SAFETY: scratch memory holds the tiles, operands gave panels of all rows, columns and terms.
                unsafe {
                    let c = self.tiles.add(index * mr * nr);
                    let tile = Tile {
                        rows: rows.len(),
                        cols: cols.len(),
                        terms,
                        a: Left { ptr: left.ptr.add(i * left.panel), ..left },
                        b: right.ptr.add(j * right.panel),
                        c,
                        accumulate: !self.is_first,
                        place,
                        ahead: (next.wrapping_add(part), distance),
                    };
                    tile.run(s);
                    if self.is_last && place.is_none() {
                        operands.store(batch, rows, cols, c);
                    }
                }
            }
        }
    }
}
