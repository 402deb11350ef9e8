//! Vectors over the pixels of one channel that is a group of its own. Rows of the source are copied with their
//! padding, once for each residue of the column taps modulo the step, so that every tap reads whole vectors
//! at a constant distance from the destination pixel.

use super::direct::{Operands, Packing, TapSums, TapUnit};
use super::method::Task;
use super::shared::axis::Axis;
use super::shared::rows::{copy_ahead, zero_ahead};
use super::shared::stencil::{Stencil, Tap};
use crate::Result;
use crate::conv2d::Conv2dAlgorithm;
use crate::cpu::gemm::even_part;
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement, dispatch};
use crate::lists::room_for;

/// Elements of the copied source, which stay in the first-level cache, and those of the largest copy that is
/// made for a row of the destination.
const SOURCE_LEN: usize = 6 << 10;
const MOST_SOURCE_LEN: usize = 64 << 10;
/// Vectors that are summed at once.
const SUMS: usize = 8;

#[derive(Clone, Debug)]
pub(super) struct Plane {
    /// Destination rows of a block.
    block: usize,
    /// The first source row that a block reads, relative to its first row's own, and how many a block of one
    /// row reads.
    top: isize,
    span: usize,
    /// The way in which the column taps read a copied row.
    axis: Axis,
    /// Elements of a part of a copied row, and of a row.
    part: usize,
    pitch: usize,
    /// The place at which each tap reads the copy, for the block's first pixel.
    offsets: Vec<usize>,
}

impl TapSums for Plane {
    const ALGORITHM: Conv2dAlgorithm = Conv2dAlgorithm::DirectPlane;

    /// `None` where vectors would not lie along rows, or taps are far apart.
    fn new(stencil: &Stencil, task: &Task<'_>) -> Result<Option<Self>> {
        let Stencil { c, k, dst, dst_size, step, .. } = *stencil;
        let ends = |taps: &[Tap]| {
            let offsets = || taps.iter().map(|tap| tap.offset);
            Some((offsets().min()?, offsets().max()?))
        };
        let (Some(rows), Some(_)) = (ends(&stencil.rows), ends(&stencil.cols)) else {
            return Ok(None);
        };
        if task.isa.is_small() || c != 1 || k != 1 || dst[3] != 1 || dst_size[0] == 0 {
            return Ok(None);
        }
        let axis = Axis::new(&stencil.cols, step[1])?;
        let span = (rows.1 - rows.0) as usize + 1;
        let part = dst_size[1].max(MAX_LANES).saturating_add(axis.span);
        let pitch = part.saturating_mul(axis.parts.len());
        if pitch.saturating_mul(span) > MOST_SOURCE_LEN {
            return Ok(None);
        }
        // As many rows as fit, at least one.
        let more = (SOURCE_LEN / pitch).saturating_sub(span) / step[0];
        let block = even_part(dst_size[0], more + 1);
        let mut offsets = room_for(stencil.rows.len() * stencil.cols.len())?;
        for row in stencil.rows.iter() {
            for &(index, shift) in &axis.taps {
                offsets.push((row.offset - rows.0) as usize * pitch + index * part + shift);
            }
        }
        Ok(Some(Plane { block, top: rows.0, span, axis, part, pitch, offsets }))
    }

    fn explain(&self) -> String {
        format!(
            "lanes over the pixels of a channel, each its own group, {} rows at once",
            self.block
        )
    }

    fn packing(&self, _: &Stencil) -> Packing {
        Packing::Panels(1)
    }

    /// Blocks of all channels and images.
    fn units(&self, stencil: &Stencil) -> usize {
        stencil.n * stencil.groups * self.blocks(stencil)
    }

    /// The copy, which is written in whole vectors.
    fn scratch_len(&self, stencil: &Stencil) -> usize {
        ((self.block - 1) * stencil.step[0] + self.span) * self.pitch + MAX_LANES
    }

    unsafe fn run<T: SimdElement>(&self, unit: TapUnit<'_, T>, scratch: *mut f32) {
        let TapUnit { isa, stencil, unit, operands } = unit;
        dispatch(isa, Block { plane: self, stencil, unit, operands, scratch });
    }
}

impl Plane {
    fn blocks(&self, stencil: &Stencil) -> usize {
        stencil.dst_size[0].div_ceil(self.block)
    }
}

struct Block<'a, T> {
    plane: &'a Plane,
    stencil: &'a Stencil,
    unit: usize,
    operands: &'a Operands<'a, T>,
    scratch: *mut f32,
}

impl<T: SimdElement> Kernel for Block<'_, T> {
    type Output = ();
    const IS_SPECIAL: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Block { plane, stencil, unit, operands, .. } = self;
        let blocks = plane.blocks(stencil);
        let (channel, first) = (unit / blocks, unit % blocks * plane.block);
        let (n, group) = (channel / stencil.groups, channel % stencil.groups);
        let rows = plane.block.min(stencil.dst_size[0] - first);
        let [n_stride, k_stride, row, _] = stencil.dst;
        let at = stencil.dst_offset
            + n as isize * n_stride
            + group as isize * k_stride
            + first as isize * row;
        let terms = plane.offsets.len();
        let bias = operands.epilogue.bias;
        // SAFETY: a block of the stencil, of which nobody else writes the pixels.
        unsafe {
            let bias = if bias.is_null() { 0.0 } else { *bias.add(group) };
            self.copy(s, n, group, first, rows);
            let sums = Sums {
                block: &self,
                filter: operands.packed.as_ptr().add(group * terms),
                dst: operands.dst.wrapping_offset(at),
                bias,
                rows,
            };
            sums.run(s);
        }
    }
}

impl<T: SimdElement> Block<'_, T> {
    /// The source rows of a block, padded.
    #[inline(always)]
    unsafe fn copy<S: Simd>(&self, s: S, n: usize, group: usize, first: usize, rows: usize) {
        let Block { plane, stencil, operands, scratch, .. } = *self;
        let top = (first * stencil.step[0]) as isize + plane.top;
        let image = operands
            .src
            .wrapping_offset(n as isize * stencil.src[0] + group as isize * stencil.src[1]);
        for row in 0..(rows - 1) * stencil.step[0] + plane.span {
            let i = top + row as isize;
            let to = scratch.wrapping_add(row * plane.pitch);
            // SAFETY: these rows are in scratch memory, which has room for a vector behind them; what is read is
            // inside of the source.
            unsafe {
                if i < 0 || i >= stencil.src_size[0] as isize {
                    zero_ahead(s, to, plane.pitch);
                    continue;
                }
                let from = image.wrapping_offset(i * stencil.src[2]);
                for (index, &offset) in plane.axis.parts.iter().enumerate() {
                    let to = to.add(index * plane.part);
                    let inside = stencil.inside(0, plane.part, Tap { index: 0, offset });
                    let j = (inside.start * stencil.step[1]) as isize + offset;
                    let step = stencil.src[3].wrapping_mul(stencil.step[1] as isize);
                    zero_ahead(s, to, inside.start);
                    let from = from.wrapping_offset(j.wrapping_mul(stencil.src[3]));
                    copy_ahead(s, from, step, to.add(inside.start), inside.len());
                    zero_ahead(s, to.add(inside.end), plane.part - inside.end);
                }
            }
        }
    }
}

/// The sums of a block whose source has been copied.
struct Sums<'a, T> {
    block: &'a Block<'a, T>,
    filter: *const f32,
    dst: *mut T,
    bias: f32,
    rows: usize,
}

impl<T: SimdElement> Sums<'_, T> {
    /// The last vector of a row, and the last rows, may be those that were summed before, once more.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, s: S) {
        let width = self.block.stencil.dst_size[1];
        let last = width.saturating_sub(S::LANES);
        let at = |j: usize| j.min(last);
        // SAFETY: rows and columns of the block.
        unsafe {
            match self.rows {
                7.. if width <= S::LANES => self.narrow::<S, 7>(s),
                4.. if width <= S::LANES => self.narrow::<S, 4>(s),
                4.. => {
                    for i in (0..self.rows).step_by(4) {
                        let i = i.min(self.rows - 4);
                        for j in (0..width).step_by(2 * S::LANES) {
                            match j + S::LANES < width {
                                true => self.sum::<S, 4, 2>(s, i, [j, at(j + S::LANES)]),
                                false => self.sum::<S, 4, 1>(s, i, [at(j)]),
                            }
                        }
                    }
                }
                _ => {
                    for i in 0..self.rows {
                        for j in (0..width).step_by(S::LANES) {
                            self.sum::<S, 1, 1>(s, i, [at(j)]);
                        }
                    }
                }
            }
        }
    }

    /// Computes all rows, R at a time, of one vector.
    #[inline(always)]
    unsafe fn narrow<S: Simd, const R: usize>(&self, s: S) {
        for i in (0..self.rows).step_by(R) {
            // SAFETY: rows of the block.
            unsafe { self.sum::<S, R, 1>(s, i.min(self.rows - R), [0]) };
        }
    }

    /// Rows from `i` on, vectors at columns `j`.
    #[inline(always)]
    unsafe fn sum<S: Simd, const R: usize, const V: usize>(&self, s: S, i: usize, j: [usize; V]) {
        let Block { plane, stencil, operands, scratch, .. } = *self.block;
        let down = stencil.step[0] * plane.pitch;
        let mut acc = [[s.zero(); V]; R];
        let mut sums = [0f32; SUMS * MAX_LANES];
        // SAFETY: vectors that taps read are in the copy; those of the destination are in its rows, or are cut
        // off at their end.
        unsafe {
            let from = scratch.cast_const().add(i * down);
            for (t, &offset) in plane.offsets.iter().enumerate() {
                let w = s.splat(*self.filter.add(t));
                let from = from.add(offset);
                for (r, row) in acc.iter_mut().enumerate() {
                    for (v, sum) in row.iter_mut().enumerate() {
                        *sum = s.mul_add(w, s.load(from.add(r * down + j[v])), *sum);
                    }
                }
            }
            let bias = s.splat(self.bias);
            for (r, row) in acc.into_iter().enumerate() {
                for (v, sum) in row.into_iter().enumerate() {
                    s.store(sums.as_mut_ptr().add((r * V + v) * S::LANES), s.add(sum, bias));
                }
            }
            operands.epilogue.activate_all(s, sums.as_mut_ptr(), R * V * S::LANES);
            let width = stencil.dst_size[1];
            for at in 0..R * V {
                let (r, v) = (at / V, at % V);
                let sum = s.load(sums.as_ptr().add(at * S::LANES));
                let row = i + r;
                let to = self.dst.wrapping_offset(row as isize * stencil.dst[2] + j[v] as isize);
                // Short rows that follow each other are written from top to bottom, each over the next.
                let follow = stencil.dst[2] == width as isize;
                let whole = width >= S::LANES || follow && (self.rows - row) * width >= S::LANES;
                let len = if whole { S::LANES } else { width };
                operands.epilogue.store(s, sum, to, len);
            }
        }
    }
}
