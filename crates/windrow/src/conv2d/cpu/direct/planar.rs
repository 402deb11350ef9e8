//! Vectors over pixels. The source rows that a block of destination pixels reads are copied once,
//! with their padding and split by the residue of the step; then every tap reads vectors at a
//! constant distance from the destination pixel, also across rows.

use super::super::epilogue::{Lanes, Store};
use super::super::rows::{Rows, zero_ahead};
use super::super::stencil::{Segment, Stencil, Tap};
use super::Operands;
use crate::cpu::gemm::{even_part, tile_shape};
use crate::cpu::{Isa, Kernel, MAX_LANES, Simd, SimdElement, dispatch};

/// Elements of the copied source that a block may take: they stay in the second-level cache.
const SOURCE_LEN: usize = 64 << 10;
/// Pixels that a block need not exceed.
const PIXELS: usize = 512;

/// How blocks are copied and summed.
#[derive(Clone, Debug)]
pub(super) struct Planar {
    /// Destination channels that are summed at once.
    pub rows: usize,
    /// Channels of a group that a unit computes; a multiple of `rows`.
    channels: usize,
    /// Destination rows and columns of a block.
    block: [usize; 2],
    axes: [Axis; 2],
    /// Distance of rows in the copy.
    pitch: usize,
    /// Elements of one source channel in the copy.
    channel_len: usize,
    /// Source channels of a group.
    source_channels: usize,
    /// Where each tap reads in the copy of a channel, for the block's first pixel.
    offsets: Vec<usize>,
}

/// How the taps along rows or columns read the copy.
#[derive(Clone, Debug)]
struct Axis {
    /// Position in the source, relative to `step * block start`, of the first element of each part.
    parts: Vec<isize>,
    /// Part, and shift in it, that each tap reads.
    taps: Vec<(usize, usize)>,
    /// Largest shift.
    span: usize,
}

impl Axis {
    fn new(taps: &[Tap], step: usize, block: usize) -> Self {
        let step = step as isize;
        let mut parts: Vec<(isize, isize)> = Vec::new();
        for tap in taps {
            let (residue, at) = (tap.offset.rem_euclid(step), tap.offset.div_euclid(step));
            match parts.iter_mut().find(|(r, _)| *r == residue) {
                Some((_, low)) => *low = at.min(*low),
                None => parts.push((residue, at)),
            }
        }
        let shifts: Vec<(usize, usize)> = taps
            .iter()
            .map(|tap| {
                let (residue, at) = (tap.offset.rem_euclid(step), tap.offset.div_euclid(step));
                let part = parts.iter().position(|(r, _)| *r == residue).unwrap_or(0);
                (part, (at - parts[part].1) as usize)
            })
            .collect();
        let span = shifts.iter().map(|s| s.1).max().unwrap_or(0);
        if span > block * taps.len() {
            // Taps so far apart share little: one part for each.
            return Axis {
                parts: taps.iter().map(|tap| tap.offset).collect(),
                taps: (0..taps.len()).map(|i| (i, 0)).collect(),
                span: 0,
            };
        }
        let parts = parts.into_iter().map(|(residue, low)| low * step + residue).collect();
        Axis { parts, taps: shifts, span }
    }
}

impl Planar {
    pub(super) fn new(stencil: &Stencil, isa: Isa, threads: usize) -> Self {
        let (max_rows, cols) = tile_shape(isa);
        let rows = even_part(stencil.k, max_rows);
        let axes = |block: [usize; 2]| {
            [
                Axis::new(&stencil.rows, stencil.step[0], block[0]),
                Axis::new(&stencil.cols, stencil.step[1], block[1]),
            ]
        };
        let channel_len = |axes: &[Axis; 2], block: [usize; 2]| {
            let len = |d: usize| axes[d].parts.len() * (block[d] + axes[d].span);
            len(0) * len(1)
        };
        let fits = |block: [usize; 2]| {
            stencil.c.saturating_mul(channel_len(&axes(block), block)) <= SOURCE_LEN
        };
        // Whole rows, as many as are worth it; parts of a row where not even one fits.
        let [height, width] = stencil.dst_size;
        let mut block = [height.min(PIXELS.div_ceil(width.max(1))).max(1), width.max(1)];
        while block[0] > 1 && !fits(block) {
            block[0] = block[0].div_ceil(2);
        }
        while block[1] > cols && !fits(block) {
            block[1] = block[1].div_ceil(2);
        }
        let block = [even_part(height, block[0]), even_part(width, block[1])];
        let axes = axes(block);
        let pitch = block[1] + axes[1].span;
        let plane = (block[0] + axes[0].span) * pitch;
        let mut offsets = Vec::with_capacity(stencil.rows.len() * stencil.cols.len());
        for &(row_part, row) in &axes[0].taps {
            for &(col_part, col) in &axes[1].taps {
                let part = row_part * axes[1].parts.len() + col_part;
                offsets.push(part * plane + row * pitch + col);
            }
        }
        let channel_len = plane * axes[0].parts.len() * axes[1].parts.len();
        let mut plan = Planar {
            rows,
            channels: stencil.k.max(1),
            block,
            axes,
            pitch,
            channel_len,
            source_channels: stencil.c,
            offsets,
        };
        // Channels on separate threads where pixels do not suffice: the copy is made once more.
        while threads > 1 && plan.units(stencil) < 2 * threads && plan.channels > rows {
            plan.channels = plan.channels.div_ceil(2).next_multiple_of(rows);
            if plan.channels >= stencil.k {
                break;
            }
        }
        plan
    }

    pub(super) fn explain(&self) -> String {
        format!(
            "lanes over pixels, blocks of {} x {} pixels and {} channels, {} at once",
            self.block[0], self.block[1], self.channels, self.rows
        )
    }

    /// Blocks of all images, groups and channels.
    pub(super) fn units(&self, stencil: &Stencil) -> usize {
        let [height, width] = stencil.dst_size;
        let blocks = height.div_ceil(self.block[0]) * width.div_ceil(self.block[1]);
        stencil.n * stencil.groups * stencil.k.div_ceil(self.channels) * blocks
    }

    /// Pixels of a block in the copy, which has gaps between rows, in whole vectors.
    fn lanes(&self) -> usize {
        ((self.block[0] - 1) * self.pitch + self.block[1]).next_multiple_of(MAX_LANES)
    }

    /// Elements of scratch memory of one worker: the copy, which the last vectors read beyond, and sums.
    pub(super) fn scratch_len(&self) -> usize {
        self.source_len() + self.rows * self.lanes()
    }

    fn source_len(&self) -> usize {
        (self.channel_len * self.source_channels + MAX_LANES).next_multiple_of(MAX_LANES)
    }

    /// One block of one image, group and part of the channels.
    ///
    /// # Safety
    /// As for `Direct::run`, with scratch memory for one worker.
    pub(super) unsafe fn run<T: SimdElement>(
        &self,
        isa: Isa,
        stencil: &Stencil,
        unit: usize,
        operands: &Operands<'_, T>,
        scratch: *mut f32,
    ) {
        let [height, width] = stencil.dst_size;
        let col_blocks = width.div_ceil(self.block[1]);
        let blocks = height.div_ceil(self.block[0]) * col_blocks;
        let parts = stencil.k.div_ceil(self.channels);
        let (block, rest) = (unit % blocks, unit / blocks);
        let (part, rest) = (rest % parts, rest / parts);
        let (group, n) = (rest % stencil.groups, rest / stencil.groups);
        let at = [block / col_blocks * self.block[0], block % col_blocks * self.block[1]];
        let size = [self.block[0].min(height - at[0]), self.block[1].min(width - at[1])];

        let src =
            operands.src.wrapping_offset(n as isize * stencil.src[0] + stencil.src_group(group));
        dispatch(isa, Copy { plan: self, stencil, src, at, size, to: scratch });
        let panels = stencil.k.div_ceil(self.rows);
        let panel_len = self.rows * stencil.terms();
        let first = part * self.channels;
        let sums = scratch.wrapping_add(self.source_len());
        for k in (first..(first + self.channels).min(stencil.k)).step_by(self.rows) {
            let filter =
                &operands.packed[(group * panels + k / self.rows) * panel_len..][..panel_len];
            dispatch(isa, Sums { plan: self, source: scratch, filter, sums });
            let store = Store {
                stencil,
                lanes: Lanes::Pixels,
                dst: operands.dst.wrapping_offset(stencil.dst_group(group)),
                epilogue: operands.epilogue.for_group(group, stencil.k),
                channels: k..(k + self.rows).min(stencil.k),
                tile: sums,
                row: self.lanes(),
            };
            dispatch(isa, StoreBlock { store, n, at, size, pitch: self.pitch });
        }
    }
}

/// Copies what a block reads of the source: [c, row part, column part, row, column], with zeros
/// for the padding.
struct Copy<'a, T> {
    plan: &'a Planar,
    stencil: &'a Stencil,
    /// Channel 0 of the group, in the image.
    src: *const T,
    at: [usize; 2],
    size: [usize; 2],
    to: *mut f32,
}

impl<T: SimdElement> Kernel for Copy<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Copy { plan, stencil, at, size, .. } = self;
        let [step_rows, step_cols] = stencil.step;
        let cols = size[1] + plan.axes[1].span;
        let mut to = self.to;
        for c in 0..stencil.c {
            for &row_part in &plan.axes[0].parts {
                for &col_part in &plan.axes[1].parts {
                    let part = Tap { index: 0, offset: col_part };
                    let inside = stencil.inside(at[1], cols, part);
                    let first = ((at[1] + inside.start) * step_cols) as isize + col_part;
                    for i in 0..plan.block[0] + plan.axes[0].span {
                        let row = ((at[0] + i) * step_rows) as isize + row_part;
                        let used = i < size[0] + plan.axes[0].span;
                        let exists = row >= 0 && row < stencil.src_size[0] as isize;
                        let inside = if used && exists { inside.clone() } else { 0..0 };
                        // SAFETY: a row of the copy holds `pitch >= cols` elements, and the copy a
                        // vector more; rows are written in order. `inside` are columns of the
                        // source.
                        unsafe {
                            zero_ahead(s, to, inside.start);
                            zero_ahead(s, to.add(inside.end), cols - inside.end);
                            if !inside.is_empty() {
                                let offset = c as isize * stencil.src[1]
                                    + row * stencil.src[2]
                                    + first * stencil.src[3];
                                let col = stencil.src[3] * step_cols as isize;
                                let from = Rows { ptr: self.src.offset(offset), row: 0, col };
                                from.copy(s, 1, inside.len(), to.add(inside.start), 0);
                            }
                            to = to.add(plan.pitch);
                        }
                    }
                }
            }
        }
    }
}

/// Sums [channel of the panel, lane] over all taps and source channels.
struct Sums<'a> {
    plan: &'a Planar,
    source: *const f32,
    filter: &'a [f32],
    sums: *mut f32,
}

impl Kernel for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        macro_rules! rows {
            ($($rows:literal $vectors:literal,)*) => {
                match self.plan.rows {
                    $($rows if $rows <= S::REGISTERS / 2 => self.rows::<S, $rows, $vectors>(s),)*
                    rows => unreachable!("{rows} channels at once"),
                }
            };
        }
        // Enough sums to hide the latency of an addition.
        rows!(1 8, 2 4, 3 4, 4 2, 5 2, 6 2, 7 2, 8 2, 9 2, 10 2, 11 2, 12 2, 13 2, 14 2,)
    }
}

impl Sums<'_> {
    #[inline(always)]
    fn rows<S: Simd, const R: usize, const V: usize>(&self, s: S) {
        let lanes = self.plan.lanes();
        let mut lane = 0;
        // SAFETY: `lanes` is a multiple of every vector length; the copy holds a vector beyond what
        // the last tap reads for the last pixel.
        unsafe {
            while lane + V * S::LANES <= lanes {
                self.vectors::<S, R, V>(s, lane);
                lane += V * S::LANES;
            }
            if V > 4 && lane + 4 * S::LANES <= lanes {
                self.vectors::<S, R, 4>(s, lane);
                lane += 4 * S::LANES;
            }
            if V > 2 && lane + 2 * S::LANES <= lanes {
                self.vectors::<S, R, 2>(s, lane);
                lane += 2 * S::LANES;
            }
            while lane < lanes {
                self.vectors::<S, R, 1>(s, lane);
                lane += S::LANES;
            }
        }
    }

    #[inline(always)]
    unsafe fn vectors<S: Simd, const R: usize, const V: usize>(&self, s: S, lane: usize) {
        let mut acc = [[s.zero(); V]; R];
        let offsets = &self.plan.offsets;
        let mut source = self.source.wrapping_add(lane);
        let mut filter = self.filter.as_ptr();
        // SAFETY: promised by the caller; the filter has R elements for each tap and channel.
        unsafe {
            for _ in 0..self.plan.source_channels {
                for &offset in offsets {
                    let x: [S::F32; V] =
                        std::array::from_fn(|v| s.load(source.add(offset + v * S::LANES)));
                    for (i, sums) in acc.iter_mut().enumerate() {
                        let w = s.splat(*filter.add(i));
                        for (sum, x) in sums.iter_mut().zip(x) {
                            *sum = s.mul_add(w, x, *sum);
                        }
                    }
                    filter = filter.add(R);
                }
                source = source.wrapping_add(self.plan.channel_len);
            }
            for (i, sums) in acc.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    s.store(self.sums.add(i * self.plan.lanes() + lane + v * S::LANES), sum);
                }
            }
        }
    }
}

/// Stores the rows of a block.
struct StoreBlock<'a, T> {
    store: Store<'a, T>,
    n: usize,
    at: [usize; 2],
    size: [usize; 2],
    pitch: usize,
}

impl<T: SimdElement> Kernel for StoreBlock<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for i in 0..self.size[0] {
            let (lane, len) = (i * self.pitch, self.size[1]);
            let segment = Segment { lane, len, n: self.n, i: self.at[0] + i, j: self.at[1] };
            // SAFETY: pixels of the stencil; their sums are in the tile.
            unsafe { self.store.segment(s, &segment) };
        }
    }
}
