//! Vectors over pixels. The source rows that a block of destination pixels reads are copied, with
//! their padding, once for each column tap and as wide as the destination's rows. Every tap then
//! reads at a constant distance from the destination pixel, vectors run on from row to row without a
//! gap, and sums leave the registers for memory that lies in one piece.

use super::direct::{Operands, Packing, TapSums, TapUnit};
use super::method::Task;
use super::shared::Vectors;
use super::shared::axis::Axis;
use super::shared::epilogue::{Bounds, Epilogue, Lanes};
use super::shared::frames::FrameSource;
use super::shared::rows::{Rows, zero_ahead};
use super::shared::stencil::{Segment, Stencil, Tap};
use super::shared::store::{Lines, Store};
use crate::conv2d::Conv2dAlgorithm;
use crate::cpu::gemm::even_part;
use crate::cpu::{Kernel, MAX_LANES, Simd, SimdElement, dispatch};
use crate::lists::{collected, room_for};
use crate::{DType, Result};
use std::ops::Range;

/// Elements of the copied source that a block may take: they stay in the second-level cache.
pub(super) const SOURCE_LEN: usize = 64 << 10;
/// Pixels that a block of whole rows need not exceed.
const PIXELS: usize = 1024;
/// The cost of copying a pixel, in pixels that are summed in one channel.
const COPY: usize = 2;
/// Channels that may be summed at once.
pub(super) const ROWS: [usize; 6] = [8, 6, 4, 3, 2, 1];

/// The number of vectors of pixels that are summed at once for `rows` channels: the registers hold the sums, the
/// vectors and a broadcast.
const fn vectors(rows: usize, registers: usize) -> usize {
    let vectors = (registers - 1) / (rows + 1);
    if vectors < 8 { vectors } else { 8 }
}

/// The way in which blocks are copied and summed.
#[derive(Clone, Debug)]
pub(super) struct Planar {
    /// Destination channels that are summed at once.
    pub rows: usize,
    /// Pixels that are summed at once.
    pub group: usize,
    /// Channels of a group that a unit computes; a multiple of `rows`.
    channels: usize,
    /// Destination rows and columns of a block; several rows only as wide as the destination.
    pub block: [usize; 2],
    /// The way in which row taps read the copy.
    pub axis: Axis,
    /// Position in the source of what each column tap reads for column 0.
    pub cols: Vec<isize>,
    /// Elements of one source channel in the copy.
    channel_len: usize,
    /// Source channels of a group in all frames that the filter has.
    source_channels: usize,
    /// The place at which each tap reads the copy of a channel, for the block's first pixel.
    offsets: Vec<usize>,
}

impl TapSums for Planar {
    const ALGORITHM: Conv2dAlgorithm = Conv2dAlgorithm::DirectPlanar;
    const READS_FRAMES: bool = true;

    fn new(stencil: &Stencil, task: &Task<'_>) -> Result<Option<Self>> {
        let (lanes, registers) = dispatch(task.isa, Vectors);
        // A vector is loaded for each `rows` products: few rows cost more than a few idle ones.
        let rows = ROWS
            .into_iter()
            .filter(|&rows| vectors(rows, registers) > 1)
            .min_by_key(|&rows| stencil.k.max(1).next_multiple_of(rows) * (rows + 1) * 24 / rows)
            .unwrap_or(1);
        let shape = [rows, vectors(rows, registers) * lanes];
        Self::with_shape(stencil, shape, SOURCE_LEN, task.threads).map(Some)
    }

    fn explain(&self) -> String {
        format!(
            "lanes over pixels, blocks of {} x {} pixels and {} channels, {} channels of {} pixels at \
             once",
            self.block[0], self.block[1], self.channels, self.rows, self.group
        )
    }

    fn packing(&self, _: &Stencil) -> Packing {
        Packing::Panels(self.rows)
    }

    /// Blocks of all images, groups and channels.
    fn units(&self, stencil: &Stencil) -> usize {
        let [height, width] = stencil.dst_size;
        let blocks = height.div_ceil(self.block[0]) * width.div_ceil(self.block[1]);
        stencil.n * stencil.groups * stencil.k.div_ceil(self.channels) * blocks
    }

    /// The copy, which the last vectors read beyond, and the sums of a group of pixels.
    fn scratch_len(&self, _: &Stencil) -> usize {
        self.source_len() + self.rows * self.group
    }

    /// Computes one block of one image, group and part of the channels.
    unsafe fn run<T: SimdElement>(&self, unit: TapUnit<'_, T>, scratch: *mut f32) {
        let TapUnit { isa, stencil, unit, operands } = unit;
        let tile = scratch.wrapping_add(self.source_len());
        let block = self.block(stencil, unit);
        let Block { first, size, .. } = block;
        let at = [first.i, first.j];
        let frame_len = stencil.c * self.channel_len;
        for (frame, source) in stencil.sources(first.n).enumerate() {
            let to = scratch.wrapping_add(frame * frame_len);
            let Some(FrameSource { is_initial, offset, strides }) = source else {
                // SAFETY: the channels of a frame in the copy.
                unsafe { std::ptr::write_bytes(to, 0, frame_len) };
                continue;
            };
            let start = if is_initial { operands.initial } else { operands.src };
            let group = (block.group * stencil.c) as isize * strides[1];
            let src = start.wrapping_offset(offset).wrapping_offset(group);
            dispatch(isa, CopyTile { plan: self, stencil, src, strides, at, size, to });
        }
        let terms = stencil.terms();
        for (filter, bias, store) in self.panels(stencil, &block, operands, terms, tile) {
            let sums = Sums { plan: self, filter, bias };
            dispatch(isa, Panel { sums, source: scratch, tile, store, first, size });
        }
    }
}

impl Planar {
    /// The method with these numbers of channels and pixels at once, and at most `source_len` elements of the source.
    pub(super) fn with_shape(
        stencil: &Stencil,
        [rows, group]: [usize; 2],
        source_len: usize,
        threads: usize,
    ) -> Result<Self> {
        let axis = Axis::new(&stencil.rows, stencil.step[0])?;
        let channel_len = |block: [usize; 2]| {
            let (parts, span) = axis.extent(block[0]);
            parts * stencil.cols.len() * (block[0] + span) * block[1]
        };
        let source_channels = stencil.frame_count() * stencil.c;
        let fits =
            |block: [usize; 2]| source_channels.saturating_mul(channel_len(block)) <= source_len;
        // Whole rows, as many as are worth it; parts of a row where not even one fits.
        let [height, width] = stencil.dst_size.map(|size| size.max(1));
        let waste = |rows: usize| {
            let sums = (rows * width).next_multiple_of(group);
            let copies = (rows + axis.extent(rows).1) * width;
            (sums * stencil.k + copies * COPY) as f64 / rows as f64
        };
        let mut block = (1..=even_part(height, PIXELS.div_ceil(width)))
            .filter(|&rows| rows == 1 || fits([rows, width]))
            .min_by(|&a, &b| waste(a).total_cmp(&waste(b)))
            .map_or([1, width], |rows| [rows, width]);
        while block[1] > group && !fits(block) {
            block[1] = block[1].div_ceil(2);
        }
        block[1] = even_part(width, block[1]);
        let channel_len = channel_len(block);
        let axis = axis.of_blocks(&stencil.rows, block[0])?;
        let plane = (block[0] + axis.span) * block[1];
        let mut offsets = room_for(stencil.rows.len() * stencil.cols.len())?;
        for &(part, row) in &axis.taps {
            for col in 0..stencil.cols.len() {
                offsets.push((part * stencil.cols.len() + col) * plane + row * block[1]);
            }
        }
        let mut plan = Planar {
            rows,
            group,
            channels: stencil.k.max(1),
            block,
            channel_len,
            axis,
            cols: collected(stencil.cols.iter().map(|tap| tap.offset))?,
            source_channels,
            offsets,
        };
        // Channels on separate threads where pixels do not suffice: the copy is made once more.
        while threads > 1 && plan.units(stencil) < 2 * threads && plan.channels > rows {
            plan.channels = plan.channels.div_ceil(2).next_multiple_of(rows);
            if plan.channels >= stencil.k {
                break;
            }
        }
        Ok(plan)
    }

    /// The bias of a panel's channels, if any.
    fn bias(&self, bias: *const f32, channels: Range<usize>) -> [f32; ROWS[0]] {
        let mut panel = [0.0; ROWS[0]];
        if !bias.is_null() {
            // SAFETY: the epilogue has a bias for each of the group's channels.
            let all =
                unsafe { std::slice::from_raw_parts(bias.add(channels.start), channels.len()) };
            panel[..all.len()].copy_from_slice(all);
        }
        panel
    }

    fn source_len(&self) -> usize {
        (self.channel_len * self.source_channels + self.group + MAX_LANES)
            .next_multiple_of(MAX_LANES)
    }

    /// The block of a unit.
    pub(super) fn block(&self, stencil: &Stencil, unit: usize) -> Block {
        let [height, width] = stencil.dst_size;
        let col_blocks = width.div_ceil(self.block[1]);
        let blocks = height.div_ceil(self.block[0]) * col_blocks;
        let parts = stencil.k.div_ceil(self.channels);
        let (block, rest) = (unit % blocks, unit / blocks);
        let (part, rest) = (rest % parts, rest / parts);
        let (group, n) = (rest % stencil.groups, rest / stencil.groups);
        let at = [block / col_blocks * self.block[0], block % col_blocks * self.block[1]];
        let size = [self.block[0].min(height - at[0]), self.block[1].min(width - at[1])];
        let channels = part * self.channels..((part + 1) * self.channels).min(stencil.k);
        Block { first: Segment { lane: 0, len: 0, n, i: at[0], j: at[1] }, size, group, channels }
    }

    /// Filter of `terms` elements a channel, bias, and way to the destination by groups of sums at
    /// `tile`, of each panel of a block's channels.
    pub(super) fn panels<'a, T: SimdElement>(
        &'a self,
        stencil: &'a Stencil,
        block: &Block,
        operands: &'a Operands<'_, T>,
        terms: usize,
        tile: *const f32,
    ) -> impl Iterator<Item = (&'a [f32], [f32; ROWS[0]], Store<'a, T>)> {
        let panel_len = self.rows * terms;
        let before = block.group * stencil.k.div_ceil(self.rows);
        let bias = operands.epilogue.for_group(block.group, stencil.k).bias;
        let dst = operands.dst.wrapping_offset(stencil.dst_group(block.group));
        block.channels.clone().step_by(self.rows).map(move |k| {
            let filter = &operands.packed[(before + k / self.rows) * panel_len..][..panel_len];
            let channels = k..(k + self.rows).min(stencil.k);
            let store = Store {
                stencil,
                lanes: Lanes::Pixels,
                dst,
                // The sums begin with the bias.
                epilogue: Epilogue { bias: std::ptr::null(), ..operands.epilogue },
                channels: channels.clone(),
                tile,
                row: self.group,
            };
            (filter, self.bias(bias, channels), store)
        })
    }
}

/// A block of pixels and channels.
pub(super) struct Block {
    pub first: Segment,
    pub size: [usize; 2],
    group: usize,
    channels: Range<usize>,
}

impl Block {
    /// Offset of the image's source channel 0 of the group.
    pub(super) fn source(&self, stencil: &Stencil) -> isize {
        self.first.n as isize * stencil.src[0] + stencil.src_group(self.group)
    }
}

/// Copies what a block reads of the source: [c, row part, column tap, row, column], with zeros
/// for the padding.
struct CopyTile<'a, T> {
    plan: &'a Planar,
    stencil: &'a Stencil,
    /// Channel 0 of the group, in the image.
    src: *const T,
    /// Strides of image, channel, row, column.
    strides: [isize; 4],
    at: [usize; 2],
    size: [usize; 2],
    to: *mut f32,
}

impl<T: SimdElement> Kernel for CopyTile<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let CopyTile { plan, stencil, strides, at, size, .. } = self;
        let [step_rows, step_cols] = stencil.step;
        let cols = size[1];
        let mut to = self.to;
        for c in 0..stencil.c {
            for &row_part in &plan.axis.parts {
                for &col in &plan.cols {
                    let inside = stencil.inside(at[1], cols, Tap { index: 0, offset: col });
                    let first = ((at[1] + inside.start) * step_cols) as isize + col;
                    for i in 0..plan.block[0] + plan.axis.span {
                        let row = ((at[0] + i) * step_rows) as isize + row_part;
                        let used = i < size[0] + plan.axis.span;
                        let exists = row >= 0 && row < stencil.src_size[0] as isize;
                        let inside = if used && exists { inside.clone() } else { 0..0 };
                        // SAFETY: a row of the copy holds `block[1] >= cols` elements, and the copy a
                        // vector more; rows are written in order. `inside` are columns of the
                        // source.
                        unsafe {
                            zero_ahead(s, to, inside.start);
                            zero_ahead(s, to.add(inside.end), cols - inside.end);
                            if !inside.is_empty() {
                                let offset =
                                    c as isize * strides[1] + row * strides[2] + first * strides[3];
                                let col = strides[3] * step_cols as isize;
                                let from = Rows { ptr: self.src.offset(offset), row: 0, col };
                                from.copy(s, 1, inside.len(), to.add(inside.start), 0);
                            }
                            to = to.add(plan.block[1]);
                        }
                    }
                }
            }
        }
    }
}

/// The sums of a panel of channels for all pixels of a block, and their way to the destination.
struct Panel<'a, T> {
    sums: Sums<'a>,
    source: *const f32,
    /// [channel of the panel, pixel of the group]
    tile: *mut f32,
    store: Store<'a, T>,
    /// The block's first pixel.
    first: Segment,
    size: [usize; 2],
}

impl<T: SimdElement> Kernel for Panel<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Sums { plan, .. } = self.sums;
        let [_, k_stride, row_stride, col_stride] = self.store.stencil.dst;
        let [rows, width] = self.size;
        let in_one_piece = rows == 1 || row_stride == width as isize * col_stride;
        for lane in (0..rows * width).step_by(plan.group) {
            let len = plan.group.min(rows * width - lane);
            let (i, j) = (self.first.i + lane / width, self.first.j + lane % width);
            let segment = Segment { i, j, len, ..self.first };
            // Asking for memory and waiting for it took longer than the sums of few channels.
            let ahead = self.store.lines(&segment);
            let whole = in_one_piece && len == plan.group && self.store.channels.len() == plan.rows;
            let plain = self.store.plain(&segment).filter(|_| whole && T::DTYPE == DType::F32);
            let sink = match plain {
                Some((to, bounds)) => Sink { to: to.cast(), row: k_stride, bounds },
                None => Sink { to: self.tile, row: plan.group as isize, bounds: Bounds::NONE },
            };
            // SAFETY: pixels of the stencil; their sums are where they belong or in the tile.
            unsafe {
                self.sums.of(s, self.source.add(lane), sink, ahead);
                if plain.is_none() {
                    self.store.rows(s, segment, if in_one_piece { usize::MAX } else { width });
                }
            }
        }
    }
}

/// The sums of a panel of channels over all taps and source channels.
struct Sums<'a> {
    plan: &'a Planar,
    filter: &'a [f32],
    bias: [f32; ROWS[0]],
}

/// The destination of sums: rows of a group of pixels, `row` elements apart.
#[derive(Clone, Copy)]
struct Sink {
    to: *mut f32,
    row: isize,
    bounds: Bounds,
}

impl Sums<'_> {
    /// The sums of the group of pixels that reads from `source` on.
    ///
    /// # Safety
    /// `source` is in a copy, and the sink holds a group for each channel of the panel.
    #[inline(always)]
    unsafe fn of<S: Simd>(&self, s: S, source: *const f32, sink: Sink, ahead: Lines) {
        macro_rules! shapes {
            ($($rows:literal $vectors:literal,)*) => {
                match self.plan.rows {
                    // SAFETY: passed on.
                    $($rows if const { $vectors == vectors($rows, S::REGISTERS) } => unsafe {
                        self.register_tile::<S, $rows, $vectors>(s, source, sink, ahead)
                    },)*
                    rows => unreachable!("{rows} channels at once"),
                }
            };
        }
        // With 32 registers, 16 and 8.
        shapes!(8 3, 6 4, 4 6, 3 7, 2 8, 1 8, 6 2, 4 3, 3 3, 2 5, 1 7, 2 2, 1 3,)
    }

    /// # Safety
    /// As for [`Sums::of`].
    #[inline(always)]
    unsafe fn register_tile<S: Simd, const R: usize, const V: usize>(
        &self,
        s: S,
        mut source: *const f32,
        sink: Sink,
        mut ahead: Lines,
    ) {
        let mut acc = [[s.zero(); V]; R];
        for (i, sums) in acc.iter_mut().enumerate() {
            *sums = [s.splat(self.bias[i]); V];
        }
        let mut filter = self.filter.as_ptr();
        // SAFETY: promised by the caller; the filter has R elements for each tap and channel, and
        // the copy a group beyond what the last tap reads for the last pixel.
        unsafe {
            for _ in 0..self.plan.source_channels {
                for &offset in &self.plan.offsets {
                    ahead.ask(s);
                    let mut x = [s.zero(); V];
                    for (v, x) in x.iter_mut().enumerate() {
                        *x = s.load(source.add(offset + v * S::LANES));
                    }
                    for (i, sums) in acc.iter_mut().enumerate() {
                        let w = s.splat(*filter.add(i));
                        for (v, sum) in sums.iter_mut().enumerate() {
                            *sum = s.mul_add(w, x[v], *sum);
                        }
                    }
                    filter = filter.add(R);
                }
                source = source.add(self.plan.channel_len);
            }
            for (i, sums) in acc.into_iter().enumerate() {
                let to = sink.to.offset(i as isize * sink.row);
                for (v, sum) in sums.into_iter().enumerate() {
                    s.store(to.add(v * S::LANES), sink.bounds.of(s, sum));
                }
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;
    use crate::cpu::compiled::assert_in_registers;

    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build")]
    fn sums_stay_in_registers() {
        // AVX2: one of 16 registers too few for the 12 sums of four channels.
        assert_in_registers::<Panel<'static, f32>>([1, 0]);
    }
}
