//! The division of the work into blocks, chosen by a model of its cost.

use super::Products;
use super::gemm::PANEL;
use super::geometry::Geometry;
use super::raw::shares_input;
use crate::Filter;
use crate::conv2d::{Problem, Tile};
use crate::cpu::{MANY_THREADS, SIDE};

/// The number of tiles for each thread below which threads share the tiles and divide the channels.
fn few_tiles(products: Products) -> usize {
    match products {
        Products::Vectors => 12,
        Products::Tiles => 128,
    }
}

/// Tiles of a block, and vectors of output channels between two output transforms, by input channels.
///
/// U is read from memory once for each block, and 36 tiles multiply it for longer than memory takes to
/// deliver it. Few vectors keep M in the second-level cache. V of many channels does not fit there: it
/// is read again for each group of vectors, and U less often if blocks are larger.
///
/// Products by tiles take a third of the time, in which memory delivers a third of U; and V of a position is split for
/// each group of vectors. So blocks are larger, though V and M then leave the second-level cache.
fn at_once(c: usize, products: Products) -> [usize; 2] {
    match products {
        Products::Tiles => [MOST_SPLIT, 32],
        Products::Vectors if c > 256 => [64, 16],
        Products::Vectors => [36, 4],
    }
}

/// The largest number of tiles of a block whose products are summed by AMX: a panel of U takes as long to arrive and to
/// be split as 40 of them to be multiplied. They fill rows of 16.
const MOST_SPLIT: usize = 224;

/// The largest number of tiles of a block of which threads share V.
fn most_shared(products: Products) -> usize {
    match products {
        Products::Vectors => 64,
        Products::Tiles => MOST_SPLIT,
    }
}

/// The size in bytes of all threads' V and M above which threads share V, so that scratch memory does not grow with
/// their number.
const OWN_BYTES: usize = 32 << 20;

/// Bytes of V that threads share at once.
const SHARED_BYTES: usize = 16 << 20;

/// The division of the work into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocking {
    /// Tiles of a block.
    pub tiles: usize,
    /// Parts of the output channels that are separate tasks.
    pub parts: usize,
    /// Vectors of output channels between two output transforms.
    pub vectors: usize,
    /// Tiles whose V all threads form together, before the tasks of its blocks and parts; 0 where each task forms that of
    /// its block.
    pub stretch: usize,
}

impl Blocking {
    /// The blocking that the cost model chooses.
    pub(super) fn choose(
        geometry: &Geometry,
        lanes: usize,
        threads: usize,
        products: Products,
    ) -> Self {
        Self::with(geometry, lanes, threads, products, [None; 3])
    }

    /// The blocking with these tiles, parts and vectors. The cost model chooses those that are `None`.
    pub(super) fn with(
        geometry: &Geometry,
        lanes: usize,
        threads: usize,
        products: Products,
        parameters: [Option<usize>; 3],
    ) -> Self {
        let vectors = geometry.problem.k.div_ceil(lanes).max(1);
        let few = geometry.tiles().max(1) < threads.saturating_mul(few_tiles(products));
        let [most, at_once] = at_once(geometry.problem.c, products);
        let own = Self::cut(geometry, vectors, threads, [most, 1, at_once]);
        let is_room = threads * own.bytes(geometry, lanes) <= OWN_BYTES;
        let [tiles, parts] = match few || threads >= MANY_THREADS || !is_room {
            true => {
                let most = [most, at_once];
                ends_first(geometry, vectors, lanes, threads, products, most, is_room)
            }
            false => [most, 1],
        };
        let model = [tiles, parts, at_once];
        let chosen = std::array::from_fn(|i| parameters[i].unwrap_or(model[i]));
        Self::cut(geometry, vectors, threads, chosen)
    }

    /// The bytes of V and M of a task that forms both.
    fn bytes(&self, geometry: &Geometry, lanes: usize) -> usize {
        let channels = geometry.problem.c + self.vectors * lanes;
        size_of::<f32>() * geometry.positions() * self.tiles * channels
    }

    /// The same blocks for some of the output channels.
    pub(super) fn within(self, vectors: usize) -> Self {
        Blocking {
            parts: self.parts.min(vectors.div_ceil(PANEL)),
            vectors: self.vectors.min(vectors),
            ..self
        }
    }

    /// Blocks of equal size, of at most `most` tiles. Parts of the channels share V; without parts there are enough
    /// blocks to occupy all threads.
    fn cut(
        geometry: &Geometry,
        vectors: usize,
        threads: usize,
        [most, parts, at_once]: [usize; 3],
    ) -> Self {
        let tiles = geometry.tiles().max(1);
        let panels = vectors.div_ceil(PANEL);
        let parts = parts.min(panels);
        let (of, stretch) = match parts {
            1 => (tiles, 0),
            _ => [tiles.div_ceil(stretches(geometry)); 2].into(),
        };
        let blocks = of.div_ceil(most);
        let blocks = if parts > 1 { blocks } else { blocks.next_multiple_of(threads.min(tiles)) };
        // Whole panels, except the last.
        let at_once = at_once.min(panels.div_ceil(parts) * PANEL).next_multiple_of(PANEL);
        Blocking { tiles: of.div_ceil(blocks), parts, vectors: at_once.min(vectors), stretch }
    }
}

/// The number of equal stretches, each with at most [`SHARED_BYTES`] of V, if tasks share it.
fn stretches(geometry: &Geometry) -> usize {
    let tile = size_of::<f32>() * geometry.positions() * geometry.problem.c;
    let tiles = geometry.tiles().max(1);
    tiles.div_ceil((SHARED_BYTES / tile.max(1)).clamp(1, tiles))
}

/// Tiles of a block, of at most `most`, and parts of the channels, where the last of the threads ends first. There is one
/// part only where each thread has room for V of its own, or nothing to part.
fn ends_first(
    geometry: &Geometry,
    vectors: usize,
    lanes: usize,
    threads: usize,
    products: Products,
    [most, at_once]: [usize; 2],
    is_room: bool,
) -> [usize; 2] {
    let (tiles, panels) = (geometry.tiles().max(1), vectors.div_ceil(PANEL));
    let c = geometry.problem.c as f64;
    let rates = Rates::of(products);
    let [read_u, read_v, share] = match threads >= MANY_THREADS {
        true => BY_MANY,
        false => [rates.read, 0.0, 0.0],
    };
    let time = |blocks: usize, parts: usize| {
        let vectors = panels.div_ceil(parts) * PANEL;
        let k = (vectors * lanes) as f64;
        // Parts of the channels share V, which all threads form, a stretch after the other.
        let stretches = if parts > 1 { stretches(geometry) } else { 1 };
        let blocks = blocks.div_ceil(stretches);
        let block = tiles.div_ceil(stretches * blocks);
        let rounds = (stretches * (blocks * parts).div_ceil(threads)) as f64;
        let (multiplied, block) = (rates.multiplied(block), block as f64);
        let (inputs, v) = match parts {
            1 => (rounds * block * TRANSFORM, 0.0),
            _ => {
                let passes = vectors.div_ceil(at_once) as f64;
                (tiles as f64 / threads as f64 * (TRANSFORM + share), block * passes)
            }
        };
        let sums = multiplied * k * c + block * k * TRANSFORM + block * rates.split * c;
        rounds * (sums + (read_u * k + read_v * v) * c) + inputs * c
    };
    let least = if is_room { 1 } else { 2.min(panels) };
    let shares = (least..=panels.min(threads)).flat_map(|parts| {
        // V that is shared is not in the second-level cache either.
        let fewest = tiles.div_ceil(if parts > 1 { most_shared(products) } else { most });
        (fewest..=tiles.min(threads.max(fewest))).map(move |blocks| (blocks, parts))
    });
    let best = shares.min_by(|a, b| time(a.0, a.1).total_cmp(&time(b.0, b.1)));
    best.map_or([most, 1], |(blocks, parts)| [tiles.div_ceil(blocks), parts])
}

/// Multiplications in the time that an element takes of U, of V that others formed, and of such to be written.
const BY_MANY: [f64; 3] = [30.0, 30.0, 100.0];
/// Operations of a transform for each element of V and M, in multiplications.
const TRANSFORM: f64 = 8.0;

/// The cost of products, in multiplications by vectors.
struct Rates {
    /// The cost of multiplying an element of U with a tile. Tiles are multiplied `rows` at a time.
    multiply: f64,
    rows: usize,
    /// The cost of reading an element of U that few threads read: the time until it arrives and, with AMX, the time to
    /// split it as far as products do not hide it.
    read: f64,
    /// The cost of splitting an element of V.
    split: f64,
}

impl Rates {
    fn of(products: Products) -> Self {
        match products {
            Products::Vectors => Rates { multiply: 1.0, rows: 1, read: 10.0, split: 0.0 },
            Products::Tiles => Rates { multiply: 0.45, rows: SIDE, read: 16.0, split: 9.0 },
        }
    }

    /// The cost of multiplying an element of U with `tiles` tiles.
    fn multiplied(&self, tiles: usize) -> f64 {
        self.multiply * tiles.next_multiple_of(self.rows) as f64
    }
}

/// The share of the time that the next larger tile may take. It has about four times the error, and a packed filter of
/// nearly twice the size.
const WORTH: f64 = 0.92;

/// The tile that should take the least time, or a smaller one that takes hardly more.
pub(crate) fn best_tile(p: &Problem, filter: Filter, products: impl Fn(Tile) -> Products) -> Tile {
    let larger = |best, tile| {
        let cost = |tile| cost(p, tile, filter, products(tile));
        let pays = cost(tile) < WORTH * cost(best);
        if pays { tile } else { best }
    };
    Tile::ALL.into_iter().reduce(larger).expect("there are tiles")
}

/// Time of a tile in multiplications: larger tiles multiply less, smaller ones waste less at
/// the border of small images and have a smaller U to pack and to read.
pub(crate) fn cost(p: &Problem, tile: Tile, filter: Filter, products: Products) -> f64 {
    // As `Rates::read`, for transforming a filter to an element of U.
    const PACK: f64 = 16.0;
    let geometry = Geometry::new(p, tile.m());
    let rates = Rates::of(products);
    // Only one pass over U counts: the others overlap with the products of their blocks.
    let u = match filter {
        Filter::Kept => rates.read,
        // U never leaves the caches.
        Filter::Changing if shares_input(&geometry) => PACK,
        Filter::Changing => rates.read + PACK,
    };
    let positions = geometry.positions() as f64;
    let multiplied = rates.multiplied(geometry.tiles());
    let (tiles, c, k) = (geometry.tiles() as f64, p.c as f64, p.k as f64);
    let transforms = tiles * (TRANSFORM * (c + k) + rates.split * c);
    positions * (multiplied * c * k + transforms + u * c * k)
}
