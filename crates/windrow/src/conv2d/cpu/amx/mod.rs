//! Direct sums with AMX tiles of bf16: 16 pixels or channels by 32 terms. Each f32 number is split into three bf16
//! numbers, and their products except the three smallest are summed.
//!
//! What a unit reads of the source is copied with its padding, once for each residue of row and column taps modulo the
//! step. So every tap reads pixels at one distance, also across rows. Sums that begin after the end of a row are left
//! out. If channels lie next to each other in the destination, pixels are the rows of the left tiles. Otherwise they
//! are, as pairs of channels, the columns of the right tiles. If there are few channels of bf16, a pixel of the copy
//! holds those of all column taps and, if they fit, of all row taps.

mod choice;
mod columns;
mod copy;
mod element;
mod shape;
mod split;
mod sums;

use super::direct::{Operands, Packing, TapSums, TapUnit};
use super::method::Task;
use super::shared::axis::Axis;
use super::shared::epilogue::Lanes;
use super::shared::stencil::{Segment, Stencil};
use crate::conv2d::Conv2dAlgorithm;
use crate::cpu::{
    Isa, ROW_BYTES, SIDE, SendPtr, SimdElement, TERMS, TILE_BYTES, dispatch_tiles, parallel_for,
};
use crate::dtype::not_computed;
use crate::lists::room_for;
use crate::{DType, Result, bf16};
#[cfg(test)]
pub(super) use choice::are_fast;
pub(in crate::conv2d) use choice::flushes;
pub(super) use choice::{computes, pays};
use columns::Columns;
use copy::SlabCopy;
use element::{TileElement, parts};
use std::ops::Range;
use sums::Sums;

/// Channels, and pixels, that are summed at once.
const BLOCK: usize = 2 * SIDE;
/// Sums of two blocks, and those that stand in for a block's where these are not finite.
const SUMS: usize = 3 * BLOCK * BLOCK;

#[derive(Clone, Debug)]
pub(super) struct Amx {
    lanes: Lanes,
    /// Numbers of bf16 that stand for an element.
    parts: usize,
    rows: Axis,
    cols: Columns,
    /// Terms that a pixel of the copy holds, in whole tiles.
    chunks: usize,
    /// Destination rows and columns of a slab.
    block: [usize; 2],
    /// Images, and blocks of channels, of a unit.
    images: usize,
    panels: usize,
    /// Whether pixels are multiplied where they lie.
    in_place: bool,
    /// The place of each tile of terms, in bytes from the first tile: for each chunk, all taps one after the other.
    steps: Vec<usize>,
    /// Bytes from pixel to pixel or, of pairs, from one pair to the next.
    pitch: usize,
}

/// The work of a unit.
struct Unit {
    group: usize,
    images: Range<usize>,
    panels: Range<usize>,
    /// The first pixel of its slabs, and their size.
    at: [usize; 2],
    size: [usize; 2],
}

impl TapSums for Amx {
    const ALGORITHM: Conv2dAlgorithm = Conv2dAlgorithm::DirectAmx;

    fn reshaped(stencil: &Stencil) -> Stencil {
        stencil.clone().merged()
    }

    fn new(stencil: &Stencil, task: &Task<'_>) -> Result<Option<Self>> {
        if !computes(task) {
            return Ok(None);
        }
        let lanes = if stencil.dst[1] == 1 { Lanes::Channels } else { Lanes::Pixels };
        shape::choose(stencil, lanes, parts(task.spec.x.dtype), task.threads).map(Some)
    }

    /// Sixteen times the sums of vectors, and six products for one of f32.
    fn rate(dtype: DType) -> f64 {
        match parts(dtype) {
            1 => 16.0,
            _ => 16.0 / sums::PRODUCTS as f64,
        }
    }

    fn explain(&self) -> String {
        let Amx { block: [rows, cols], images, panels, parts, .. } = self;
        let place = match parts {
            _ if self.in_place => "where they lie",
            1 => "copied",
            _ => "split into three parts",
        };
        format!(
            "tiles with lanes over {:?}, pixels {place}, {rows} x {cols} of {images} images and {} channels at once, \
             {} steps of {TERMS} terms",
            self.lanes,
            panels * BLOCK,
            self.steps()
        )
    }

    fn additions(&self, _: &Stencil) -> usize {
        // Products of a tile are summed in two rows, which are added. Those of parts that are left out are together
        // smaller than a rounding.
        let products =
            if self.parts == 1 { self.steps() } else { sums::PRODUCTS * self.steps() + 1 };
        SIDE + 1 + products
    }

    fn packing(&self, stencil: &Stencil) -> Packing {
        // More channels than lie next to each other in the other forms.
        let width = match self.lanes {
            Lanes::Channels => 2 * TERMS,
            Lanes::Pixels => TERMS,
        };
        let len = stencil.groups * self.packed_group_len(stencil);
        Packing::Own { len, width: self.parts * width }
    }

    fn units(&self, stencil: &Stencil) -> usize {
        let [rows, cols] = self.blocks(stencil);
        let parts = Self::all_panels(stencil).div_ceil(self.panels);
        rows * cols * stencil.n.div_ceil(self.images) * parts * stencil.groups
    }

    /// The copy, and sums with a vector more.
    fn scratch_len(&self, stencil: &Stencil) -> usize {
        let lines = self.lines_len(stencil) * size_of::<bf16>();
        let bytes = self.copy_bytes() + (TILE_BYTES + lines).next_multiple_of(ROW_BYTES);
        bytes / size_of::<f32>() + SUMS
    }

    unsafe fn pack<T: SimdElement>(
        &self,
        stencil: &Stencil,
        filter: *const T,
        packed: &mut [f32],
        (isa, threads): (Isa, usize),
    ) {
        // SAFETY: passed on.
        unsafe {
            match T::DTYPE {
                DType::F32 => self.pack_tiles::<f32>(isa, stencil, threads, filter.cast(), packed),
                DType::BF16 => {
                    self.pack_tiles::<bf16>(isa, stencil, threads, filter.cast(), packed);
                }
                DType::F16 | not_computed!() => unreachable!("no tiles of {}", T::DTYPE),
            }
        }
    }

    unsafe fn run<T: SimdElement>(&self, unit: TapUnit<'_, T>, scratch: *mut f32) {
        let TapUnit { isa, stencil, unit, operands } = unit;
        // SAFETY: passed on.
        unsafe {
            match T::DTYPE {
                DType::F32 => self.run_unit::<f32>(isa, stencil, unit, &operands.of(), scratch),
                DType::BF16 => self.run_unit::<bf16>(isa, stencil, unit, &operands.of(), scratch),
                DType::F16 | not_computed!() => unreachable!("no tiles of {}", T::DTYPE),
            }
        }
    }
}

impl Amx {
    /// The method for slabs with these numbers of rows and columns, and units of these numbers of slabs and blocks of
    /// channels.
    fn with_shape(
        stencil: &Stencil,
        lanes: Lanes,
        parts: usize,
        block: [usize; 2],
        [images, panels]: [usize; 2],
    ) -> Result<Self> {
        let cols = Columns::new(stencil, parts, block[1])?;
        let rows = cols.row_axis(stencil)?.of_blocks(&stencil.rows, block[0])?;
        let chunks = (stencil.c * cols.reads()).div_ceil(TERMS);
        let in_place = lanes == Lanes::Channels && is_in_place(stencil, parts);
        let steps = room_for(chunks * rows.taps.len() * cols.steps.len())?;
        let mut plan = Amx {
            lanes,
            parts,
            rows,
            cols,
            chunks,
            block,
            images,
            panels,
            in_place,
            steps,
            pitch: 0,
        };
        plan.pitch = match lanes {
            _ if in_place => {
                (stencil.src[3] * stencil.step[1] as isize) as usize * size_of::<bf16>()
            }
            // A tile lies in one piece, wherever it begins.
            Lanes::Channels if parts > 1 => ROW_BYTES,
            // An odd number of cache lines: pixels that follow each other lie in all sets of the first-level cache.
            Lanes::Channels => (chunks | 1) * ROW_BYTES,
            Lanes::Pixels => {
                let pixels = plan.part_pixels() + BLOCK;
                ((pixels * size_of::<f32>()).div_ceil(ROW_BYTES) | 1) * ROW_BYTES
            }
        };
        for chunk in 0..chunks {
            for &(row_part, row) in &plan.rows.taps {
                for &(col_part, col) in &plan.cols.steps {
                    let part = row_part * plan.cols.parts.len() + col_part;
                    let pixel = (row * plan.width() + col) * plan.pixel_bytes();
                    plan.steps.push(chunk * plan.chunk_bytes() + part * plan.part_bytes() + pixel);
                }
            }
        }
        Ok(plan)
    }

    /// Tiles of terms of a sum.
    fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Pixels of a row of the copy.
    fn width(&self) -> usize {
        self.block[1] + self.cols.span
    }

    fn part_pixels(&self) -> usize {
        (self.block[0] + self.rows.span) * self.width()
    }

    /// Bytes from a pixel to the next.
    fn pixel_bytes(&self) -> usize {
        match self.lanes {
            Lanes::Channels => self.pitch,
            Lanes::Pixels => size_of::<f32>(),
        }
    }

    /// Bytes from the terms of a tile to the next ones.
    fn chunk_bytes(&self) -> usize {
        match self.lanes {
            Lanes::Channels if self.parts > 1 => self.part_pixels() * ROW_BYTES,
            Lanes::Channels => ROW_BYTES,
            Lanes::Pixels => SIDE * self.pitch,
        }
    }

    fn part_bytes(&self) -> usize {
        match self.lanes {
            Lanes::Channels if self.parts == 1 => self.part_pixels() * self.pitch,
            Lanes::Channels | Lanes::Pixels => self.chunks * self.chunk_bytes(),
        }
    }

    fn slab_bytes(&self) -> usize {
        if self.in_place {
            0
        } else {
            self.rows.parts.len() * self.cols.parts.len() * self.part_bytes()
        }
    }

    /// Elements of the lines from which pixels that hold columns next to each other are copied: rows of the source with
    /// their padding, one for all channels or one for each, and zeros behind those. None where columns are not.
    fn lines_len(&self, stencil: &Stencil) -> usize {
        let reads = self.cols.parts.first().map_or(0, Vec::len);
        let follow = |part: &Vec<isize>| part.windows(2).all(|two| two[1] - two[0] == 1);
        if reads < 2 || !self.cols.parts.iter().all(follow) {
            return 0;
        }
        match self.lanes {
            // Room for a tile's terms on either side.
            Lanes::Channels => self.line_len(stencil) * stencil.c + (self.chunks + 2) * TERMS,
            Lanes::Pixels => (self.cols.rows.len() * stencil.c + 1) * self.line_len(stencil),
        }
    }

    /// The columns of such a line, plus the number of pixels that are copied at once.
    fn line_len(&self, stencil: &Stencil) -> usize {
        let reads = self.cols.parts.first().map_or(0, Vec::len);
        (self.block[1] + SIDE) * stencil.step[1] + reads
    }

    /// Bytes of the copies of all parts.
    fn copy_bytes(&self) -> usize {
        self.parts * self.copy_of_part()
    }

    /// Bytes of a part's copy, of which the last sums read more than there are pixels.
    fn copy_of_part(&self) -> usize {
        match self.lanes {
            _ if self.in_place => 0,
            Lanes::Channels => self.images * self.slab_bytes() + BLOCK * self.pitch,
            Lanes::Pixels => self.images * self.slab_bytes(),
        }
    }

    /// Blocks of channels of a group.
    fn all_panels(stencil: &Stencil) -> usize {
        stencil.k.div_ceil(BLOCK)
    }

    fn blocks(&self, stencil: &Stencil) -> [usize; 2] {
        [0, 1].map(|d| stencil.dst_size[d].div_ceil(self.block[d]))
    }

    fn unit(&self, stencil: &Stencil, unit: usize) -> Unit {
        let [rows, cols] = self.blocks(stencil);
        let part = |rest: usize, count: usize, size: usize| {
            let first = rest % count.div_ceil(size) * size;
            (first..(first + size).min(count), rest / count.div_ceil(size))
        };
        let (block, rest) = (unit % (rows * cols), unit / (rows * cols));
        let (images, rest) = part(rest, stencil.n, self.images);
        let (panels, group) = part(rest, Self::all_panels(stencil), self.panels);
        let at = [block / cols * self.block[0], block % cols * self.block[1]];
        let size = [0, 1].map(|d| self.block[d].min(stencil.dst_size[d] - at[d]));
        Unit { group, images, panels, at, size }
    }

    /// Elements of the packed filter of a group.
    fn packed_group_len(&self, stencil: &Stencil) -> usize {
        stencil.k.div_ceil(SIDE) * self.steps() * self.parts * TILE_BYTES / size_of::<f32>()
    }

    /// Packs the filter: [group, block of channels, terms, part, half of the block] tiles, which are
    /// [channel][term] or [pair of terms][channel][term of the pair]; zeros beyond k and the terms.
    ///
    /// # Safety
    /// The stencil's filter elements are readable from `filter`.
    unsafe fn pack_tiles<T: TileElement>(
        &self,
        isa: Isa,
        stencil: &Stencil,
        threads: usize,
        filter: *const T,
        packed: &mut [f32],
    ) {
        let group_len = self.packed_group_len(stencil);
        let (from, to) = (SendPtr(filter.cast_mut()), SendPtr(packed.as_mut_ptr()));
        let tiles = stencil.k.div_ceil(SIDE);
        parallel_for(threads, stencil.groups * tiles, |task| {
            let (group, tile) = (task / tiles, task % tiles);
            let (panel, half) = (tile / 2, tile % 2);
            let halves = (tiles - 2 * panel).min(2);
            for step in 0..self.steps() {
                let tiles = (2 * panel * self.steps() + step * halves) * self.parts + half;
                // SAFETY: tiles of the group, each written once; the caller's promise.
                unsafe {
                    let numbers = self.filter_tile(stencil, from.get(), [group, tile * SIDE, step]);
                    let to = to.get().add(group * group_len).cast::<u8>().add(tiles * TILE_BYTES);
                    T::pack(isa, self.lanes, &numbers, to, halves * TILE_BYTES);
                }
            }
        });
    }

    /// The filter's tile for the terms of a step: [`SIDE`] channels each.
    ///
    /// # Safety
    /// As for [`TapSums::pack`].
    unsafe fn filter_tile<T: TileElement>(
        &self,
        stencil: &Stencil,
        filter: *const T,
        [group, first, step]: [usize; 3],
    ) -> [T; TERMS * SIDE] {
        let mut numbers = [T::from_f32(0.0); TERMS * SIDE];
        let count = SIDE.min(stencil.k - first);
        let taps = self.steps.len() / self.chunks;
        let (chunk, tap) = (step / taps, step % taps);
        let (row, col) = (tap / self.cols.steps.len(), tap % self.cols.steps.len());
        let reads = self.cols.reads() / self.cols.rows.len();
        for (term, numbers) in numbers.as_chunks_mut::<SIDE>().0.iter_mut().enumerate() {
            // Lines of a pixel: rows and columns that it reads, channels of each.
            let line = chunk * TERMS + term;
            let (read, c) = (line / stencil.c, line % stencil.c);
            let (read_row, read_col) = (read / reads, read % reads);
            if read >= self.cols.reads() {
                break;
            }
            let (row, col) = (stencil.rows[row + read_row], stencil.cols[col + read_col]);
            let from = filter.wrapping_offset(stencil.filter_offset(group, first, c, row, col));
            for (i, number) in numbers[..count].iter_mut().enumerate() {
                // SAFETY: an element of the filter.
                *number = unsafe { from.offset(i as isize * stencil.filter[0]).read() };
            }
        }
        numbers
    }

    /// Computes one unit.
    ///
    /// # Safety
    /// As for [`TapSums::run`].
    unsafe fn run_unit<T: TileElement>(
        &self,
        isa: Isa,
        stencil: &Stencil,
        unit: usize,
        operands: &Operands<'_, T>,
        scratch: *mut f32,
    ) {
        let unit = self.unit(stencil, unit);
        let sums = scratch;
        let copy = scratch.wrapping_add(SUMS).cast::<u8>();
        let lines = copy.wrapping_add(self.copy_bytes() + TILE_BYTES).cast();
        let src = operands.src.wrapping_offset(stencil.src_group(unit.group));
        if !self.in_place {
            for (slab, n) in unit.images.clone().enumerate() {
                let src = src.wrapping_offset(n as isize * stencil.src[0]);
                let to = copy.wrapping_add(slab * self.slab_bytes());
                let (plan, at, size) = (self, unit.at, unit.size);
                // SAFETY: the slab's part of the copy; the caller's promise.
                unsafe { T::copy(isa, SlabCopy { plan, stencil, src, at, size, to, lines }) };
            }
        }
        let pixels = if self.in_place { src.cast() } else { copy.cast_const() };
        dispatch_tiles(isa, Sums { plan: self, isa, stencil, unit, operands, pixels, sums });
    }
}

/// True if pixels of the source can be rows of a tile: channels are neighbours and fill whole tiles, and a row has at
/// least the number of pixels that are summed at once.
fn is_in_place(stencil: &Stencil, parts: usize) -> bool {
    let step = stencil.src[3].checked_mul(stencil.step[1] as isize);
    parts == 1
        && stencil.is_one_tap()
        && stencil.src[1] == 1
        && stencil.c.is_multiple_of(TERMS)
        && stencil.dst_size[1] >= BLOCK
        && step
            .and_then(|step| step.checked_mul(size_of::<bf16>() as isize))
            .is_some_and(|step| step > 0)
}

impl Unit {
    /// The first pixel of an image's slab.
    fn first(&self, n: usize) -> Segment {
        Segment { lane: 0, len: 0, n, i: self.at[0], j: self.at[1] }
    }
}
