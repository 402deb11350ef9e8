//! The computation of a block of a product for one range of terms.

use super::tile::{Place, Tile};
use super::{BlockedProduct, Blocking, Left, Right, VECTORS};
use crate::cpu::math::{Rows, activate_rows};
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
    /// The same, if an activation that is no clamp comes before it. A tile of every kind with code for such activations
    /// would be slower, also without one.
    pub(super) curved: Option<Place>,
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
                    None if self.is_last && self.curved.is_none() => {
                        let place = operands.place(batch, rows.clone(), cols.clone());
                        place.filter(|place| place.curve.is_none())
                    }
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
                        let size = [rows.len(), cols.len()];
                        match self.curved.map(|place| place.tile(i * mr, j * nr)) {
                            Some(place) => s.outlined(Curved { place, tile: c, size }),
                            None => operands.store(batch, rows, cols, c),
                        }
                    }
                }
            }
        }
    }
}

/// The way of a finished tile to its place by biases and an activation that is no clamp. Only [`Block`], whose tiles and
/// places are valid, makes it.
struct Curved {
    place: Place,
    tile: *mut f32,
    /// Rows and columns.
    size: [usize; 2],
}

impl Kernel for Curved {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Curved { place, tile, size: [rows, cols] } = self;
        let Some(activation) = place.curve else { return };
        let width = VECTORS * S::LANES;
        // SAFETY: the tile has whole vectors, the place elements of its rows and columns, and the biases as many.
        unsafe {
            for v in (0..cols).step_by(S::LANES) {
                let col_bias = match place.col_bias.is_null() {
                    true => s.zero(),
                    false => s.load_first(place.col_bias.add(v), S::LANES.min(cols - v)),
                };
                for row in 0..rows {
                    let at = tile.add(row * width + v);
                    let mut sum = s.add(s.load(at), col_bias);
                    if !place.row_bias.is_null() {
                        sum = s.add(sum, s.splat(*place.row_bias.add(row)));
                    }
                    s.store(at, sum);
                }
            }
            let (from, to, stride) = (tile.cast_const(), place.at, place.row);
            activate_rows(s, Rows { activation, from, width, to, stride, rows, cols });
        }
    }
}
