//! How the work is cut, by a model of what it costs.

use super::gemm::PANEL;
use super::geometry::Geometry;
use crate::conv2d::{Problem, Tile};

/// Tiles of a block: U is read from memory once for each block, and a block of this many tiles
/// multiplies it for longer than memory takes to deliver it.
const TILES: usize = 36;
/// With fewer tiles than this for each thread, threads share the tiles and divide the channels.
const FEW_TILES: usize = 12;
/// Vectors of output channels between two output transforms, by input channels: few, so that M stays
/// in the second-level cache; more where V does not fit in it and is read again for each of them.
fn vectors_at_once(c: usize) -> usize {
    (c / 64).clamp(4, 8)
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
    /// Blocks of equal size, as many as occupy all threads.
    pub(super) fn choose(geometry: &Geometry, lanes: usize, threads: usize) -> Self {
        let vectors = geometry.problem.k.div_ceil(lanes).max(1);
        let tiles = geometry.tiles().max(1);
        let few = tiles < threads * FEW_TILES;
        let parts = if few { threads.min(vectors.div_ceil(PANEL)) } else { 1 };
        let blocks = tiles.div_ceil(TILES);
        let blocks = if few { blocks } else { blocks.next_multiple_of(threads) };
        Blocking {
            tiles: tiles.div_ceil(blocks),
            parts,
            vectors: vectors.min(vectors_at_once(geometry.problem.c)),
        }
    }
}

/// The tile that should take the least time: larger tiles multiply less, smaller ones waste less at
/// the border of small images and have a smaller U to read.
pub(crate) fn best_tile(p: &Problem) -> Tile {
    // Operations of a transform for each element of V and M, in multiplications.
    const TRANSFORM: f64 = 8.0;
    // Multiplications in the time that memory takes for an element of U. One pass over U counts: the
    // others are hidden behind the products of their blocks.
    const READ: f64 = 10.0;
    let cost = |tile: Tile| {
        let geometry = Geometry::new(p, tile.m());
        let positions = (tile.alpha() * tile.alpha()) as f64;
        let (tiles, c, k) = (geometry.tiles() as f64, p.c as f64, p.k as f64);
        positions * (tiles * (c * k + TRANSFORM * (c + k)) + READ * c * k)
    };
    Tile::ALL.into_iter().min_by(|a, b| cost(*a).total_cmp(&cost(*b))).expect("there are tiles")
}
