//! The positions of a fused Winograd kernel's tiles in images and in shared memory.
//!
//! A warpgroup computes 32 pairs of tiles, each pair 6 outputs wide. These 32 pairs are a *unit*. Units lie one below
//! the other in a strip, which is `pairs_x` pairs wide and contains the rows of all images, one image after the other.
//! Either each image has a whole number of units (its rows are rounded up), or a unit may have rows of several images.
//! See `winograd_row.cu`.

use std::ops::Range;

/// Pairs of tiles of a unit.
pub(crate) const PAIRS: usize = 32;
/// Output columns of a pair.
pub(crate) const PAIR_COLUMNS: usize = 6;
/// Inputs beyond the outputs of a row of tiles, in both directions.
const HALO: usize = 2;
/// Bytes of one pixel in a stage, and after which the swizzle repeats.
pub(super) const PIXEL_BYTES: usize = 64;
const SWIZZLE_BYTES: usize = 512;
/// Larger stages leave too little shared memory for the filter.
const MAX_STAGE_BYTES: usize = 26_000;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Geometry {
    /// Width of a strip.
    pub(crate) pairs_x: usize,
    /// Pixels from one input row to the next in shared memory.
    pub(crate) pitch: usize,
    /// Bit positions of a pair's number that the bits of (8 warp + lane / 4) go to.
    pub(crate) pair_bits: [usize; 5],
    /// Rows of tiles given to an image.
    pub(crate) image_rows: usize,
    /// Input rows that one copy brings.
    pub(crate) box_rows: usize,
    /// Bytes of an input stage.
    pub(crate) stage_bytes: usize,
    /// Share of the computed outputs that exist.
    pub(crate) efficiency: f64,
}

impl Geometry {
    /// The geometry for `n` images of `oh` x `ow` outputs. `wide` prefers strips whose rows are long runs of memory in
    /// an NCHW output.
    pub(crate) fn choose(n: usize, oh: usize, ow: usize, wide: bool) -> Option<Self> {
        let candidates = [1, 2, 3, 4, 8].into_iter().flat_map(|pairs_x| {
            let unit_rows = PAIRS / pairs_x;
            let whole = PAIRS
                .is_multiple_of(pairs_x)
                .then(|| (oh.next_multiple_of(unit_rows), unit_rows + HALO));
            let shared = (whole.is_none() || !oh.is_multiple_of(unit_rows)).then_some((oh, 2));
            let columns = pairs_x * PAIR_COLUMNS + HALO;
            [whole, shared].into_iter().flatten().flat_map(move |(image_rows, box_rows)| {
                (columns..columns + 4).filter_map(move |pitch| {
                    Self::new(n, oh, ow, pairs_x, pitch, image_rows, box_rows)
                })
            })
        });
        let score = |(g, conflicts): &(Self, usize)| {
            // Short runs of outputs cost bandwidth. Copies of two rows and conflicts cost some time. Large stages cost
            // shared memory.
            let run = (g.pairs_x as f64).min(ow as f64 / PAIR_COLUMNS as f64) / 4.0;
            g.efficiency
                * if wide { (0.45 + 0.55 * run).min(1.0) } else { 1.0 }
                * if g.box_rows == 2 { 0.96 } else { 1.0 }
                * (1.0 - 0.00025 * *conflicts as f64)
                * (1.0 - 4e-6 * g.stage_bytes as f64)
        };
        candidates.max_by(|a, b| score(a).total_cmp(&score(b))).map(|(geometry, _)| geometry)
    }

    fn new(
        n: usize,
        oh: usize,
        ow: usize,
        pairs_x: usize,
        pitch: usize,
        image_rows: usize,
        box_rows: usize,
    ) -> Option<(Self, usize)> {
        let rows = stage_rows(image_rows, pairs_x, box_rows);
        let stage_bytes = (rows * pitch * PIXEL_BYTES).next_multiple_of(SWIZZLE_BYTES);
        if stage_bytes > MAX_STAGE_BYTES {
            return None;
        }
        let (conflicts, pair_bits) = fewest_conflicts(pairs_x, pitch);
        let mut geometry = Geometry {
            pairs_x,
            pitch,
            pair_bits,
            image_rows,
            box_rows,
            stage_bytes,
            efficiency: 0.0,
        };
        let computed = geometry.units(n, ow) as f64 * (PAIRS * PAIR_COLUMNS) as f64;
        geometry.efficiency = n as f64 * oh as f64 * ow as f64 / computed;
        Some((geometry, conflicts))
    }

    /// The number of strips side by side.
    pub(crate) fn strips(&self, ow: usize) -> usize {
        ow.div_ceil(self.pairs_x * PAIR_COLUMNS)
    }

    /// Units of `n` images.
    pub(crate) fn units(&self, n: usize, ow: usize) -> usize {
        (n * self.image_rows * self.pairs_x).div_ceil(PAIRS) * self.strips(ow)
    }
}

/// The largest number of input rows that a unit has in shared memory, over all rows at which units start.
fn stage_rows(image_rows: usize, pairs_x: usize, box_rows: usize) -> usize {
    if box_rows > 2 {
        return box_rows; // units do not run over the end of an image
    }
    if image_rows > 64 {
        // At most two images, each rounded up to two rows.
        return PAIRS.div_ceil(pairs_x) + 1 + 2 * (1 + HALO);
    }
    // Starts repeat after `image_rows * pairs_x` units at the latest.
    (0..image_rows * pairs_x)
        .map(|unit| {
            let first = unit * PAIRS / pairs_x;
            let last = (unit * PAIRS + PAIRS - 1) / pairs_x;
            let mut rows: Range<usize> =
                first % image_rows..first % image_rows + (last - first) + 1;
            let mut total = 0;
            while !rows.is_empty() {
                let here = rows.len().min(image_rows - rows.start);
                total += (here + HALO).next_multiple_of(box_rows);
                rows = 0..rows.len() - here;
            }
            total
        })
        .max()
        .unwrap_or(0)
}

/// The assignment of lanes to pairs whose loads collide least in shared memory, and its cost.
///
/// Eight bytes a lane, 16 lanes at a time: four pixels. A pixel is half of the 128 bytes that the banks hold, and the
/// swizzle moves the half of it that is read; so the four must differ in the parity of their number or in bit 2.
fn fewest_conflicts(pairs_x: usize, pitch: usize) -> (usize, [usize; 5]) {
    let conflicts = |bits: &[usize; 5]| {
        let pixel = |source: usize| {
            let pair: usize = (0..5).map(|i| (source >> i & 1) << bits[i]).sum();
            pair / pairs_x * pitch + pair % pairs_x * PAIR_COLUMNS
        };
        (0..8)
            .map(|quarter| {
                (0..8)
                    .map(|offset| {
                        let mut hits = [0; 4];
                        for lane in 0..4 {
                            let p = pixel(quarter * 4 + lane) + offset;
                            hits[p & 1 | (p >> 2 & 1) << 1] += 1;
                        }
                        hits.into_iter().max().unwrap_or(0) - 1
                    })
                    .sum::<usize>()
            })
            .sum::<usize>()
    };
    permutations().map(|bits| (conflicts(&bits), bits)).min().unwrap_or((0, [0, 1, 2, 3, 4]))
}

/// The permutations of five things.
fn permutations() -> impl Iterator<Item = [usize; 5]> {
    (0..120).map(|mut number| {
        let mut left = vec![0, 1, 2, 3, 4];
        std::array::from_fn(|i| {
            let at = number % (5 - i);
            number /= 5 - i;
            left.remove(at)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_images_load_without_conflicts_and_waste_little() {
        for (n, oh, ow) in [(64, 110, 110), (64, 48, 48), (128, 98, 98), (128, 6, 6), (128, 18, 24)]
        {
            let g = Geometry::choose(n, oh, ow, false).unwrap();
            assert_eq!(fewest_conflicts(g.pairs_x, g.pitch).0, 0, "{g:?}");
            assert!(g.efficiency >= 0.9, "{g:?}");
        }
    }

    #[test]
    fn every_size_has_a_geometry_that_fits() {
        for oh in [1, 2, 3, 5, 13, 31, 200] {
            for ow in [1, 2, 6, 7, 25, 300] {
                for wide in [false, true] {
                    let g = Geometry::choose(3, oh, ow, wide).unwrap();
                    assert!(g.stage_bytes <= MAX_STAGE_BYTES && g.image_rows >= oh, "{g:?}");
                    assert!(g.strips(ow) * g.pairs_x * PAIR_COLUMNS >= ow, "{g:?}");
                    assert!(g.units(3, ow) * PAIRS * PAIR_COLUMNS >= 3 * oh * ow, "{g:?}");
                    // Rows of a stage start at multiples of 128 bytes, as the copy engine requires.
                    assert!(
                        g.box_rows.is_multiple_of(2) || (g.box_rows * g.pitch).is_multiple_of(2),
                        "{g:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn permutations_are_all_different() {
        let all: std::collections::HashSet<_> = permutations().collect();
        assert_eq!(all.len(), 120);
        assert!(all.iter().all(|p| p.iter().sum::<usize>() == 10));
    }
}
