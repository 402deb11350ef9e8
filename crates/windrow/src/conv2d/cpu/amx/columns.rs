//! The way in which taps read the copy of a slab.

use super::super::shared::axis::Axis;
use super::super::shared::stencil::Stencil;
use super::TERMS;
use crate::Result;
use crate::lists::{collected, filled, room_for};

/// The way in which the taps along columns read the copy.
#[derive(Clone, Debug)]
pub(super) struct Columns {
    /// Positions in the source, relative to `step * block start`, whose channels a pixel of each part holds.
    pub parts: Vec<Vec<isize>>,
    /// Part, and shift in it, of each step.
    pub steps: Vec<(usize, usize)>,
    pub span: usize,
    /// Rows of the source whose columns a pixel holds, relative to where a part of the rows reads.
    pub rows: Vec<isize>,
}

impl Columns {
    /// The columns of blocks of `block` columns.
    pub(super) fn new(stencil: &Stencil, parts: usize, block: usize) -> Result<Self> {
        let taps = &stencil.cols;
        // Few channels leave most of a tile empty: then a pixel holds those of all taps.
        let merged = (stencil.c * taps.len()).div_ceil(TERMS);
        if parts == 1 && 4 * merged <= 3 * stencil.c.div_ceil(TERMS) * taps.len() {
            let reads = collected(taps.iter().map(|tap| tap.offset))?;
            let parts = collected([reads])?;
            let rows = if stencil.rows.len() > 1 && stencil.terms() <= TERMS {
                collected(stencil.rows.iter().map(|tap| tap.offset))?
            } else {
                filled(0, 1)?
            };
            return Ok(Columns { parts, steps: filled((0, 0), 1)?, span: 0, rows });
        }
        let axis = Axis::new(taps, stencil.step[1])?.of_blocks(taps, block)?;
        let mut parts = room_for(axis.parts.len())?;
        for part in axis.parts {
            parts.push(filled(part, 1)?);
        }
        Ok(Columns { parts, steps: axis.taps, span: axis.span, rows: filled(0, 1)? })
    }

    /// Pixels of the source whose channels a pixel holds.
    pub(super) fn reads(&self) -> usize {
        self.rows.len() * self.parts.first().map_or(0, Vec::len)
    }

    /// The way in which the taps along rows read the copy.
    pub(super) fn row_axis(&self, stencil: &Stencil) -> Result<Axis> {
        if self.rows.len() > 1 {
            return Ok(Axis { parts: filled(0, 1)?, taps: filled((0, 0), 1)?, span: 0 });
        }
        Axis::new(&stencil.rows, stencil.step[0])
    }
}
