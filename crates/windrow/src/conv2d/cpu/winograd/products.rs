//! The differences between products by f32 vectors and by AMX tiles of bf16.

use super::amx as tiles;
use super::amx::AmxGemm;
use super::gemm::{self, Gemm};
use super::geometry::Geometry;
use super::{WinogradCpu, block_strides};
use crate::DType;
use crate::conv2d::cpu::amx;
use crate::conv2d::cpu::method::Task;
use crate::conv2d::{Problem, Tile};
use crate::cpu::{SIDE, dispatch, dispatch_tiles};

/// The hardware that sums the products of U and V; each kind rounds in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::conv2d::cpu) enum Products {
    Vectors,
    /// AMX tiles, on an instruction set that has them.
    Tiles,
}

/// The smallest number of input and of output channels for which Winograd's products take so much of the time that
/// splitting U and V pays.
const SPLIT_CHANNELS: usize = 256;
/// The smallest number of Winograd's tiles for which multiplying with U takes longer than reading and splitting it.
const SPLIT_TILES: usize = 192;

impl Products {
    /// The products for these sizes. Tiles only where [`amx::computes`] allows them. It does not depend on the number of
    /// threads, so that bits do not.
    /// F(2, 3) has too many products to be ahead, and the transforms of F(6, 3) take what it saves.
    pub(in crate::conv2d::cpu) fn of(task: &Task<'_>, p: &Problem, tile: Tile) -> Self {
        let pays = tile == Tile::F4
            && p.c.min(p.k) >= SPLIT_CHANNELS
            && Geometry::new(p, tile.m()).tiles() >= SPLIT_TILES;
        match pays && task.spec.x.dtype == DType::F32 && amx::computes(task) {
            true => Products::Tiles,
            false => Products::Vectors,
        }
    }
}

impl WinogradCpu {
    /// Multiplies, with [`WinogradCpu::split_len`] elements of scratch memory.
    pub(super) fn multiply(&self, gemm: Gemm<'_, '_>, scratch: *mut f32) {
        match self.products {
            Products::Vectors => dispatch(self.isa, gemm),
            Products::Tiles => {
                let (isa, lanes, scratch) = (self.isa, self.lanes, scratch.cast());
                dispatch_tiles(isa, AmxGemm { gemm, isa, lanes, scratch });
            }
        }
    }

    /// Elements of scratch memory for the products of a block.
    pub(super) fn split_len(&self) -> usize {
        let (tiles, c) = (self.blocking.tiles, self.geometry.problem.c);
        match self.products {
            Products::Vectors => 0,
            Products::Tiles => tiles::split_bytes(tiles, c) / size_of::<f32>(),
        }
    }

    /// The number of prefetches of pixels during the products of a block.
    pub(super) fn calls(&self, tiles: usize, vectors: usize) -> usize {
        let (positions, c) = (self.positions(), self.geometry.problem.c);
        match self.products {
            Products::Vectors => gemm::calls(positions, c, vectors, tiles, self.registers),
            Products::Tiles => tiles::calls(positions, c, vectors, tiles),
        }
    }

    /// Output channels that lie next to each other in M.
    pub(super) fn m_width(&self) -> usize {
        match self.products {
            Products::Vectors => self.lanes,
            Products::Tiles => SIDE,
        }
    }

    /// The strides of M for these numbers of tiles and vectors of output channels.
    pub(super) fn m_strides_of(&self, tiles: usize, vectors: usize) -> [usize; 2] {
        let tiles = match self.products {
            Products::Vectors => tiles,
            Products::Tiles => tiles::whole(tiles),
        };
        block_strides(tiles, (vectors * self.lanes).div_ceil(self.m_width()), self.m_width())
    }
}
