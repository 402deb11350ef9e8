//! Channels that are groups of their own, and whose pixels lie next to each other: the pixels of a vector of channels are
//! transposed in registers, so that channels do, summed as there, and transposed back.

use super::direct::{Operands, Packing, TapSums, TapUnit};
use super::method::Task;
use super::shared::Vectors;
use super::shared::channels::{Channels, SingleSums};
use super::shared::epilogue::Epilogue;
use super::shared::rows::copy_transposed;
use super::shared::stencil::{Stencil, Tap};
use crate::Result;
use crate::conv2d::Conv2dAlgorithm;
use crate::cpu::gemm::even_part;
use crate::cpu::{Isa, Kernel, MAX_LANES, Simd, SimdElement, dispatch};

/// Elements of scratch memory that a block of rows may take, of which a quarter of a second-level cache of 1 MiB is left
/// for the caller, and those of the largest block of one row.
const BLOCK_LEN: usize = 192 << 10;
const MOST_LEN: usize = 1 << 20;

#[derive(Clone, Debug)]
pub(super) struct Transposed {
    /// Channels of a vector.
    lanes: usize,
    /// Destination rows of a block.
    block: usize,
    /// The first source row that a block reads, relative to its first row's own, and how many a block of one
    /// row reads.
    top: isize,
    span: usize,
    /// Elements of scratch memory for the source and for the destination of a block.
    len: [usize; 2],
}

impl Transposed {
    /// `None` where channels do not fill vectors, pixels do not lie next to each other, or filter rows do not follow
    /// each other.
    fn cut(stencil: &Stencil, isa: Isa) -> Option<Self> {
        let Stencil { c, k, groups, src, dst, src_size, dst_size, step, .. } = *stencil;
        let (lanes, _) = dispatch(isa, Vectors);
        let rows = &stencil.rows;
        let follow = |taps: &[Tap]| taps[0].offset + 1 == taps[1].offset;
        let fits =
            !isa.is_small() && c == 1 && k == 1 && groups >= lanes && src[3] == 1 && dst[3] == 1;
        if !fits || rows.is_empty() || dst_size.contains(&0) || !rows.windows(2).all(follow) {
            return None;
        }
        let (top, span) = (rows[0].offset, rows.len());
        let len = |block: usize| {
            let source = (block - 1).saturating_mul(step[0]).saturating_add(span);
            [source.min(src_size[0]).saturating_mul(src_size[1]), block.saturating_mul(dst_size[1])]
                .map(|pixels| pixels.saturating_mul(MAX_LANES))
        };
        let total =
            |block: usize| len(block).iter().fold(0, |sum: usize, &n| sum.saturating_add(n));
        if total(1) > MOST_LEN {
            return None;
        }
        let most = (1..=dst_size[0]).take_while(|&block| total(block) <= BLOCK_LEN).last();
        let block = even_part(dst_size[0], most.unwrap_or(1));
        Some(Transposed { lanes, block, top, span, len: len(block) })
    }

    fn blocks(&self, stencil: &Stencil) -> usize {
        stencil.dst_size[0].div_ceil(self.block)
    }
}

impl TapSums for Transposed {
    const ALGORITHM: Conv2dAlgorithm = Conv2dAlgorithm::DirectTransposed;

    fn new(stencil: &Stencil, task: &Task<'_>) -> Result<Option<Self>> {
        Ok(Self::cut(stencil, task.isa))
    }

    fn explain(&self) -> String {
        format!("lanes over channels, each its own group, {} rows transposed at once", self.block)
    }

    fn packing(&self, _: &Stencil) -> Packing {
        Packing::Channels
    }

    /// Blocks of all images and vectors of channels.
    fn units(&self, stencil: &Stencil) -> usize {
        stencil.n * stencil.groups.div_ceil(self.lanes) * self.blocks(stencil)
    }

    fn scratch_len(&self, _: &Stencil) -> usize {
        self.len[0] + self.len[1]
    }

    unsafe fn run<T: SimdElement>(&self, unit: TapUnit<'_, T>, scratch: *mut f32) {
        let TapUnit { isa, stencil, unit, operands } = unit;
        dispatch(isa, Block { plan: self, stencil, unit, operands, scratch });
    }
}

struct Block<'a, T> {
    plan: &'a Transposed,
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
        let Block { plan, stencil, unit, operands, scratch } = self;
        let Stencil { groups, src, dst, src_size, dst_size, step, .. } = *stencil;
        let blocks = plan.blocks(stencil);
        let vectors = groups.div_ceil(S::LANES);
        let (vector, first) = (unit / blocks, unit % blocks * plan.block);
        let (n, channel) = (vector / vectors, vector % vectors * S::LANES);
        let count = S::LANES.min(groups - channel);
        let rows = plan.block.min(dst_size[0] - first);
        // Source rows that exist.
        let top = (first * step[0]) as isize + plan.top;
        let bottom = top + ((rows - 1) * step[0] + plan.span) as isize;
        let inside = |row: isize| row.clamp(0, src_size[0] as isize) as usize;
        let (top, bottom) = (inside(top), inside(bottom));
        let image = operands.src.wrapping_offset(n as isize * src[0] + channel as isize * src[1]);
        let transposed = scratch.wrapping_add(plan.len[0]);
        // SAFETY: a block of the stencil, of which nobody else writes the pixels; scratch memory has room for its source
        // and its destination.
        unsafe {
            let lines = if src[2] == src_size[1] as isize { 1 } else { bottom - top };
            let len = (bottom - top) * src_size[1] / lines.max(1);
            for line in 0..lines {
                let from = image.wrapping_offset((top + line) as isize * src[2]);
                copy_transposed(
                    s,
                    (from, src[1]),
                    len,
                    count,
                    scratch.add(line * len * S::LANES),
                    S::LANES,
                );
            }
            let row = src_size[1] * S::LANES;
            let bias = operands.epilogue.bias;
            let bias = if bias.is_null() { bias } else { bias.wrapping_add(channel) };
            let channels = Channels {
                stencil,
                src: scratch.cast_const().wrapping_sub(top * row),
                src_strides: [row as isize, S::LANES as isize],
                filter: operands.packed.as_ptr().wrapping_add(channel),
                count,
                epilogue: Epilogue { bias, ..operands.epilogue.early() },
                dst: transposed,
                dst_strides: [(dst_size[1] * S::LANES) as isize, S::LANES as isize],
            };
            s.outlined(SingleSums(channels, first..first + rows));
            let to = operands.dst.wrapping_offset(
                stencil.dst_offset
                    + n as isize * dst[0]
                    + channel as isize * dst[1]
                    + first as isize * dst[2],
            );
            let lines = if dst[2] == dst_size[1] as isize { 1 } else { rows };
            let len = rows * dst_size[1] / lines;
            for line in 0..lines {
                let from = transposed.cast_const().add(line * len * S::LANES);
                let to = to.wrapping_offset(line as isize * dst[2]);
                turn_back(s, from, len, count, to, dst[1], &operands.epilogue);
            }
        }
    }
}

/// Stores `count` channels, `channel` elements apart, of `len` pixels [pixel, LANES].
///
/// # Safety
/// The pixels are readable, and the same number of elements of each channel is writable at `to`.
#[inline(always)]
unsafe fn turn_back<S: Simd, T: SimdElement>(
    s: S,
    from: *const f32,
    len: usize,
    count: usize,
    to: *mut T,
    channel: isize,
    epilogue: &Epilogue,
) {
    for pixel in (0..len).step_by(S::LANES) {
        let width = S::LANES.min(len - pixel);
        let is_whole = width == S::LANES && count == S::LANES;
        // SAFETY: promised by the caller.
        unsafe {
            let from = from.add(pixel * S::LANES);
            if is_whole && epilogue.residual.is_none() {
                // Loops of as many turns as a square has vectors, and a square of its own: it stays in registers.
                let mut square = s.zeros();
                for (p, row) in square.as_mut().iter_mut().enumerate() {
                    *row = s.load(from.add(p * S::LANES));
                }
                let to = to.wrapping_add(pixel);
                for (c, &y) in s.transpose(square).as_ref().iter().enumerate() {
                    T::store(s, to.wrapping_offset(c as isize * channel), y);
                }
                continue;
            }
            let mut square = s.zeros();
            for (p, row) in square.as_mut().iter_mut().enumerate().take(width) {
                *row = s.load(from.add(p * S::LANES));
            }
            let square = s.transpose(square);
            for (c, &y) in square.as_ref().iter().enumerate().take(count) {
                let to = to.wrapping_offset(c as isize * channel).wrapping_add(pixel);
                let y = epilogue.late(s, y, to, 1, width);
                match width == S::LANES {
                    true => T::store(s, to, y),
                    false => T::store_first(s, to, y, width),
                }
            }
        }
    }
}
