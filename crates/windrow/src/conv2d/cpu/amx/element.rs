//! The requirements of AMX tiles on an element type.

use super::super::shared::epilogue::Lanes;
use super::super::shared::store::StoreTwo;
use super::copy::SlabCopy;
use super::split::SplitTile;
use super::{SIDE, TERMS};
use crate::cpu::{Isa, dispatch, dispatch_bf16};
use crate::dtype::not_computed;
use crate::{DType, bf16};

/// An element type whose sums tiles form.
pub(super) trait TileElement: StoreTwo {
    /// Numbers of bf16 that stand for one.
    const PARTS: usize;
    /// # Safety
    /// The slab's pixels are writable, the source is in memory.
    unsafe fn copy(isa: Isa, slab: SlabCopy<'_, Self>);
    /// Writes a tile of the filter: `numbers` has them as rows of [`SIDE`] channels for each of [`TERMS`]. Tiles of parts are
    /// `apart` bytes from each other.
    ///
    /// # Safety
    /// They are writable at `to`.
    unsafe fn pack(
        isa: Isa,
        lanes: Lanes,
        numbers: &[Self; TERMS * SIDE],
        to: *mut u8,
        apart: usize,
    );
}

/// Parts of an element of a type that has tiles.
pub(super) fn parts(dtype: DType) -> usize {
    match dtype {
        DType::F32 => <f32 as TileElement>::PARTS,
        DType::BF16 => <bf16 as TileElement>::PARTS,
        DType::F16 | not_computed!() => unreachable!("no tiles of {dtype}"),
    }
}

impl TileElement for bf16 {
    const PARTS: usize = 1;

    unsafe fn copy(isa: Isa, slab: SlabCopy<'_, bf16>) {
        dispatch(isa, slab);
    }

    unsafe fn pack(_: Isa, lanes: Lanes, numbers: &[bf16; TERMS * SIDE], to: *mut u8, _: usize) {
        for (term, numbers) in numbers.as_chunks::<SIDE>().0.iter().enumerate() {
            for (i, &number) in numbers.iter().enumerate() {
                let at = match lanes {
                    Lanes::Channels => (term / 2 * SIDE + i) * 2 + term % 2,
                    Lanes::Pixels => i * TERMS + term,
                };
                // SAFETY: an element of the tile.
                unsafe { to.cast::<bf16>().add(at).write(number) };
            }
        }
    }
}

impl TileElement for f32 {
    const PARTS: usize = 3;

    unsafe fn copy(isa: Isa, slab: SlabCopy<'_, f32>) {
        dispatch_bf16(isa, slab);
    }

    unsafe fn pack(
        isa: Isa,
        lanes: Lanes,
        numbers: &[f32; TERMS * SIDE],
        to: *mut u8,
        apart: usize,
    ) {
        dispatch_bf16(isa, SplitTile { lanes, numbers, to, apart });
    }
}
