//! How the work is cut, by a model of what it costs.

use super::gemm::PANEL;
use super::geometry::Geometry;
use super::raw::shares_input;
use crate::Filter;
use crate::conv2d::{Problem, Tile};

/// With fewer tiles than this for each thread, threads share the tiles and divide the channels.
const FEW_TILES: usize = 12;

/// Tiles of a block, and vectors of output channels between two output transforms, by input channels.
///
/// U is read from memory once for each block, and 36 tiles multiply it for longer than memory takes to
/// deliver it. Few vectors keep M in the second-level cache. V of many channels does not fit there: it
/// is read again for each group of vectors, and U less often if blocks are larger.
fn at_once(c: usize) -> [usize; 2] {
    if c > 256 { [64, 16] } else { [36, 4] }
}

/// How the work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocking {
    /// Tiles of a block.
    pub tiles: usize,
    /// Parts of the output channels that are separate tasks.
    pub parts: usize,
    /// Vectors of output channels between two output transforms.
    pub vectors: usize,
}

impl Blocking {
    /// What the model takes.
    pub(super) fn choose(geometry: &Geometry, lanes: usize, threads: usize) -> Self {
        Self::with(geometry, lanes, threads, [None; 3])
    }

    /// With `None` replaced by what the model takes, of tiles, parts and vectors.
    pub(super) fn with(
        geometry: &Geometry,
        lanes: usize,
        threads: usize,
        parameters: [Option<usize>; 3],
    ) -> Self {
        let vectors = geometry.problem.k.div_ceil(lanes).max(1);
        let few = geometry.tiles().max(1) < threads.saturating_mul(FEW_TILES);
        let [most, at_once] = at_once(geometry.problem.c);
        let [tiles, parts] = match few {
            true => ends_first(geometry, vectors, lanes, threads, most),
            false => [most, 1],
        };
        let model = [tiles, parts, at_once];
        let chosen = std::array::from_fn(|i| parameters[i].unwrap_or(model[i]));
        Self::cut(geometry, vectors, threads, chosen)
    }

    /// The same blocks for some of the output channels.
    pub(super) fn within(self, vectors: usize) -> Self {
        Blocking {
            parts: self.parts.min(vectors.div_ceil(PANEL)),
            vectors: self.vectors.min(vectors),
            ..self
        }
    }

    /// Blocks of equal size, as many as occupy all threads if these do not share them, of at most
    /// `most` tiles.
    fn cut(
        geometry: &Geometry,
        vectors: usize,
        threads: usize,
        [most, parts, at_once]: [usize; 3],
    ) -> Self {
        let tiles = geometry.tiles().max(1);
        let parts = parts.min(vectors.div_ceil(PANEL));
        let blocks = tiles.div_ceil(most);
        let blocks = if parts > 1 { blocks } else { blocks.next_multiple_of(threads.min(tiles)) };
        Blocking {
            tiles: tiles.div_ceil(blocks),
            parts,
            // Whole panels, but for the last.
            vectors: at_once.min(vectors).next_multiple_of(PANEL).min(vectors),
        }
    }
}

/// Tiles of a block, of at most `most`, and parts of the channels, where the last of the threads ends first.
fn ends_first(
    geometry: &Geometry,
    vectors: usize,
    lanes: usize,
    threads: usize,
    most: usize,
) -> [usize; 2] {
    let (tiles, panels) = (geometry.tiles().max(1), vectors.div_ceil(PANEL));
    let c = geometry.problem.c as f64;
    let time = |blocks: usize, parts: usize| {
        let k = (panels.div_ceil(parts) * PANEL * lanes) as f64;
        let block = tiles.div_ceil(blocks) as f64;
        let rounds = (blocks * parts).div_ceil(threads) as f64;
        rounds * (block * (c * k + TRANSFORM * (c + k)) + READ * c * k)
    };
    let shares = (tiles.div_ceil(most)..=tiles.min(threads.max(tiles.div_ceil(most))))
        .flat_map(|blocks| (1..=panels.min(threads)).map(move |parts| (blocks, parts)));
    let best = shares.min_by(|a, b| time(a.0, a.1).total_cmp(&time(b.0, b.1)));
    best.map_or([most, 1], |(blocks, parts)| [tiles.div_ceil(blocks), parts])
}

/// Operations of a transform for each element of V and M, in multiplications.
const TRANSFORM: f64 = 8.0;
/// Multiplications in the time that memory takes for an element of U.
const READ: f64 = 10.0;

/// What the next larger tile has to save: it has about four times the error, and a packed filter of nearly twice the size.
const WORTH: f64 = 0.92;

/// The tile that should take the least time, or a smaller one that takes hardly more.
pub(crate) fn best_tile(p: &Problem, filter: Filter) -> Tile {
    let larger = |best, tile| {
        let pays = cost(p, tile, filter) < WORTH * cost(p, best, filter);
        if pays { tile } else { best }
    };
    Tile::ALL.into_iter().reduce(larger).expect("there are tiles")
}

/// Time of a tile in multiplications: larger tiles multiply less, smaller ones waste less at
/// the border of small images and have a smaller U to pack and to read.
pub(crate) fn cost(p: &Problem, tile: Tile, filter: Filter) -> f64 {
    // As READ, for transforming a filter to an element of U.
    const PACK: f64 = 16.0;
    let geometry = Geometry::new(p, tile.m());
    // One pass over U counts: the others are hidden behind the products of their blocks.
    let u = match filter {
        Filter::Kept => READ,
        // U never leaves the caches.
        Filter::Changing if shares_input(&geometry) => PACK,
        Filter::Changing => READ + PACK,
    };
    let positions = (tile.alpha() * tile.alpha()) as f64;
    let (tiles, c, k) = (geometry.tiles() as f64, p.c as f64, p.k as f64);
    positions * (tiles * (c * k + TRANSFORM * (c + k)) + u * c * k)
}
