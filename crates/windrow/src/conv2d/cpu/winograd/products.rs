//! What differs between products that are summed by vectors of f32 and by tiles of bf16.

use super::gemm::{self, Gemm};
use super::tiled::{self, TiledGemm};
use super::{WinogradCpu, block_strides};
use crate::cpu::{SIDE, dispatch, dispatch_tiles};

/// What sums the products of U and V, which it rounds in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Products {
    Vectors,
    /// Of an instruction set that has tiles.
    Tiles,
}

impl WinogradCpu {
    /// Multiplies, with [`WinogradCpu::split_len`] elements of scratch memory.
    pub(super) fn multiply(&self, gemm: Gemm<'_, '_>, scratch: *mut f32) {
        match self.products {
            Products::Vectors => dispatch(self.isa, gemm),
            Products::Tiles => {
                let (isa, lanes, scratch) = (self.isa, self.lanes, scratch.cast());
                dispatch_tiles(isa, TiledGemm { gemm, isa, lanes, scratch });
            }
        }
    }

    /// Elements of scratch memory for the products of a block.
    pub(super) fn split_len(&self) -> usize {
        let (tiles, c) = (self.blocking.tiles, self.geometry.problem.c);
        match self.products {
            Products::Vectors => 0,
            Products::Tiles => tiled::split_bytes(tiles, c) / size_of::<f32>(),
        }
    }

    /// How often the products of a block with vectors of output channels ask for pixels.
    pub(super) fn calls(&self, tiles: usize, vectors: usize) -> usize {
        let (positions, c) = (self.positions(), self.geometry.problem.c);
        match self.products {
            Products::Vectors => gemm::calls(positions, c, vectors, tiles, self.registers),
            Products::Tiles => tiled::calls(positions, c, vectors, tiles),
        }
    }

    /// Output channels that lie next to each other in M.
    pub(super) fn m_width(&self) -> usize {
        match self.products {
            Products::Vectors => self.lanes,
            Products::Tiles => SIDE,
        }
    }

    /// Strides of M of so many tiles and vectors of output channels.
    pub(super) fn m_strides_of(&self, tiles: usize, vectors: usize) -> [usize; 2] {
        let tiles = match self.products {
            Products::Vectors => tiles,
            Products::Tiles => tiled::whole(tiles),
        };
        block_strides(tiles, (vectors * self.lanes).div_ceil(self.m_width()), self.m_width())
    }
}
