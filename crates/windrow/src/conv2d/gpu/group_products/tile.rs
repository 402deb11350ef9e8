//! The division of outputs among blocks and warps.

use crate::conv2d::{Conv2dSpec, Problem};
use std::cmp::Reverse;

/// The number of warps of a block.
pub(super) const WARPS: usize = 4;
/// The rows that a warp multiplies together, and the columns that a tile has at most.
const ROWS: usize = 16;
const MAX_COLUMNS: usize = 16;
/// The taps of a row whose filters are in registers, as in the kernel.
const TAPS_AT_ONCE: usize = 3;
/// The number of bytes of a pixel that are worth reading together.
const PIXEL_BYTES: usize = 96;
/// The bytes of shared memory with which a multiprocessor holds four blocks.
const SHARED_BYTES: usize = 54 << 10;

/// The outputs of a block: of some images, rows and columns, for some groups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tile {
    pub(super) images: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The columns of a warp.
    pub(super) together: usize,
    pub(super) groups: usize,
    /// Bytes of shared memory.
    pub(super) bytes: usize,
}

impl Tile {
    /// The largest tile that fits, or a smaller one if there are not enough blocks for all multiprocessors. `None` if no
    /// tile fits.
    pub(super) fn choose(multiprocessors: usize, spec: &Conv2dSpec, p: &Problem) -> Option<Self> {
        let group = p.c_group() * spec.x.dtype.size();
        let mut columns = columns(p);
        let mut rows = evenly(p.oh, ROWS);
        let mut images =
            if rows == p.oh && columns == p.ow { (ROWS / rows).min(p.n).max(1) } else { 1 };
        let parts = columns.div_ceil(evenly(columns, most_together(p))) * k_parts(p);
        // As many groups as are worth reading together, and as give each warp a part.
        let mut groups = evenly(p.groups, (PIXEL_BYTES / group).max(WARPS.div_ceil(parts)));
        loop {
            let least_parts = WARPS.div_ceil(groups * k_parts(p));
            let together = evenly(columns, most_together(p).min(columns.div_ceil(least_parts)));
            let bytes = bytes(p, [images, rows, columns], together, groups * group)?;
            let tile = Tile { images, rows, columns, together, groups, bytes };
            let few = tile.blocks(p) < multiprocessors;
            if bytes <= SHARED_BYTES && (!few || images * groups * columns == 1) {
                return Some(tile);
            }
            match () {
                () if few && images > 1 => images = images.div_ceil(2),
                () if groups > 1 => groups = groups.div_ceil(2),
                () if columns > 1 => columns = columns.div_ceil(2),
                () if images > 1 => images = images.div_ceil(2),
                () if rows > 1 => rows = rows.div_ceil(2),
                () => return None,
            }
        }
    }

    /// The number of blocks along the groups, the rows, the columns and the images.
    pub(super) fn counts(&self, p: &Problem) -> [usize; 4] {
        [
            p.groups.div_ceil(self.groups),
            p.oh.div_ceil(self.rows),
            p.ow.div_ceil(self.columns),
            p.n.div_ceil(self.images),
        ]
    }

    pub(super) fn blocks(&self, p: &Problem) -> usize {
        self.counts(p).into_iter().fold(1, usize::saturating_mul)
    }
}

/// The parts of a group's output channels, each for a warp.
fn k_parts(p: &Problem) -> usize {
    p.k_group().div_ceil(32)
}

/// The number of columns whose sums a warp can keep in registers.
fn most_together(p: &Problem) -> usize {
    match p.k_group() {
        ..=24 => 7,
        _ => 4,
    }
}

/// The columns of a tile with which warps compute the fewest in vain, and of these the most.
fn columns(p: &Problem) -> usize {
    let computed = |columns: usize| {
        let together = evenly(columns, most_together(p));
        p.ow.div_ceil(columns) * columns.next_multiple_of(together)
    };
    let all = 1..=p.ow.clamp(1, MAX_COLUMNS);
    all.min_by_key(|&columns| (computed(columns), Reverse(columns))).unwrap_or(1)
}

/// The least size, for at most `most` of `all` things at a time, that needs no more turns.
fn evenly(all: usize, most: usize) -> usize {
    let most = most.clamp(1, all.max(1));
    all.div_ceil(all.div_ceil(most).max(1)).max(1)
}

/// Bytes of shared memory, as in the kernel; `None` if they are more than a number can say. Warps read columns and taps
/// beyond the last ones of a tile, whose products are not stored or not computed, behind its last row.
fn bytes(
    p: &Problem,
    [images, rows, columns]: [usize; 3],
    together: usize,
    pixel: usize,
) -> Option<usize> {
    let read = |outputs: usize, d: usize, taps: usize| {
        let reach = (taps - 1).checked_mul(p.dilation[d])?;
        (outputs - 1).checked_mul(p.stride[d])?.checked_add(reach)?.checked_add(1)
    };
    let vectors = pixel / 16;
    let row = read(columns, 1, p.s)?.checked_mul(vectors)? | 1;
    let all = images.checked_mul(read(rows, 0, p.r)?)?.checked_mul(row)?;
    let more = |d: usize, all: usize, together: usize| (all.next_multiple_of(together) - all) * d;
    let beyond =
        more(p.stride[1], columns, together) + more(p.dilation[1], p.s, p.s.min(TAPS_AT_ONCE));
    all.checked_add(beyond.checked_mul(vectors)?)?.checked_mul(16)
}
