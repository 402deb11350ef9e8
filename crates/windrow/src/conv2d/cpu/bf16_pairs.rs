//! Sums of bf16 by instructions that multiply pairs: the blocks of [`Planar`], whose terms are taken two
//! at a time. Of what channels and column taps read, two are interleaved, and row taps read the pairs
//! at constant distances. Where one is left over, its row taps form the pairs.

use super::direct::{Packing, TapSums, TapUnit};
use super::method::Task;
use super::planar::{Block, Planar, ROWS, SOURCE_LEN};
use super::shared::stencil::{Segment, Stencil, Tap};
use super::shared::store::Store;
use crate::conv2d::Conv2dAlgorithm;
use crate::cpu::{
    Bf16Kernel, Bf16Products, Isa, MAX_LANES, Row, Simd, SimdElement, array, dispatch_bf16,
};
use crate::lists::{collected, push};
use crate::{Accuracy, DType, Result, bf16};
use std::ops::Range;

/// Channels that are summed at once.
const CHANNELS: usize = 4;
/// Vectors of pixels that are summed at once, at most.
const VECTORS: usize = 6;
/// Pixels that are rounded together.
const ROUNDED: usize = 2 * MAX_LANES;

#[derive(Clone, Debug)]
pub(super) struct Bf16Pairs {
    pub planar: Planar,
    /// Elements of a plane.
    plane: usize,
    /// Planes of pairs.
    planes: Vec<Plane>,
    pairs: Vec<Pair>,
}

/// Pairs of two lines, for the pixels of a block's rows and `reach` more.
#[derive(Clone, Debug)]
struct Plane {
    lines: [Option<Line>; 2],
    reach: usize,
}

/// The part of a source channel that a tap reads.
#[derive(Clone, Copy, Debug)]
struct Line {
    c: usize,
    /// Position in the source of what it reads for row and column 0.
    row: isize,
    col: isize,
}

/// Two terms of the sum.
#[derive(Clone, Debug)]
struct Pair {
    /// The place of the pairs for the block's first pixel among the planes of pairs.
    offset: usize,
    /// Channel, row tap and column tap of each.
    terms: [Option<[usize; 3]>; 2],
}

/// True if direct sums are formed by products of bf16. These count numbers below 2^-126 as zero, which
/// is not `Exact`. A filter of one or two output channels leaves most of the sums idle.
pub(super) fn computes(task: &Task<'_>) -> bool {
    let (spec, p) = (task.spec, task.problem);
    let bf16 = spec.x.dtype == DType::BF16 && task.isa.has_bf16_products();
    bf16 && spec.accuracy != Accuracy::Exact && p.groups == 1 && p.k > 2
}

impl TapSums for Bf16Pairs {
    const ALGORITHM: Conv2dAlgorithm = Conv2dAlgorithm::DirectBf16Pairs;

    fn new(stencil: &Stencil, task: &Task<'_>) -> Result<Option<Self>> {
        if !computes(task) {
            return Ok(None);
        }
        let threads = task.threads;
        let shape = [CHANNELS, VECTORS * MAX_LANES];
        let planar = Planar::with_shape(stencil, shape, 2 * SOURCE_LEN, threads)?;
        let ([height, width], axis) = (planar.block, &planar.axis);
        let plane = (height + axis.span) * width;
        let (mut planes, mut pairs) = (Vec::new(), Vec::new());
        for (part, &row) in axis.parts.iter().enumerate() {
            // Row taps and their shifts.
            let taps = axis.taps.iter().map(|tap| (tap.0 == part).then_some(tap.1)).enumerate();
            let taps = collected(taps.filter_map(|(tap, shift)| Some((tap, shift?))))?;
            let reach = taps.iter().map(|tap| tap.1).max().unwrap_or(0);
            let columns = || planar.cols.iter().enumerate();
            let lines = (0..stencil.c)
                .flat_map(|c| columns().map(move |(i, &col)| (i, Line { c, row, col })));
            let lines = collected(lines)?;
            let (twos, rest) = lines.as_chunks();
            for &[(first_col, first), (second_col, second)] in twos {
                for &(row, shift) in &taps {
                    let offset = planes.len() * plane + shift * width;
                    let terms = [[first.c, row, first_col], [second.c, row, second_col]];
                    push(&mut pairs, Pair { offset, terms: terms.map(Some) })?;
                }
                push(&mut planes, Plane { lines: [Some(first), Some(second)], reach })?;
            }
            for &(col, line) in rest {
                for taps in taps.chunks(2) {
                    let taps = [taps.first(), taps.get(1)];
                    let shifted = |shift: usize| (shift * stencil.step[0]) as isize;
                    let offset = planes.len() * plane;
                    let terms = taps.map(|tap| tap.map(|&(row, _)| [line.c, row, col]));
                    push(&mut pairs, Pair { offset, terms })?;
                    let lines = taps.map(|tap| {
                        tap.map(|&(_, shift)| Line { row: line.row + shifted(shift), ..line })
                    });
                    push(&mut planes, Plane { lines, reach: 0 })?;
                }
            }
        }
        Ok(Some(Bf16Pairs { planar, plane, planes, pairs }))
    }

    /// Twice the sums of vectors.
    fn rate(_: DType) -> f64 {
        2.0
    }

    fn explain(&self) -> String {
        format!("{}, {} pairs of terms", self.planar.explain(), self.pairs.len())
    }

    /// Pairs in the bits of an f32 each: [group, panel, pair, channel of the panel].
    fn packing(&self, stencil: &Stencil) -> Packing {
        let channels = stencil.groups * stencil.k.next_multiple_of(self.planar.rows);
        // More channels than lie next to each other in the other forms.
        Packing::Own { len: channels * self.pairs.len(), width: 2 * ROWS[0] }
    }

    fn units(&self, stencil: &Stencil) -> usize {
        self.planar.units(stencil)
    }

    /// The pairs, which the last vectors read beyond, rows of the source, and the sums of a group of pixels.
    fn scratch_len(&self, _: &Stencil) -> usize {
        self.pairs_len() + self.strided_len() + CHANNELS * self.planar.group
    }

    unsafe fn pack<T: SimdElement>(
        &self,
        stencil: &Stencil,
        filter: *const T,
        packed: &mut [f32],
        _: (Isa, usize),
    ) {
        let mut packed = packed.iter_mut();
        for group in 0..stencil.groups {
            for first in (0..stencil.k).step_by(CHANNELS) {
                for pair in &self.pairs {
                    for (k, to) in (first..first + CHANNELS).zip(&mut packed) {
                        let read = |[c, row, col]: [usize; 3]| {
                            let taps = [stencil.rows[row], stencil.cols[col]];
                            // SAFETY: passed on.
                            unsafe { stencil.element(filter, group, k, c, taps) }
                        };
                        let [low, high] = pair
                            .terms
                            .map(|term| bf16::from_f32(term.map_or(0.0, read)))
                            .map(|element| u32::from(element.to_bits()));
                        *to = f32::from_bits(low | high << 16);
                    }
                }
            }
        }
    }

    /// Computes one block of one image, group and part of the channels.
    unsafe fn run<T: SimdElement>(&self, unit: TapUnit<'_, T>, scratch: *mut f32) {
        let TapUnit { isa, stencil, unit, operands } = unit;
        debug_assert_eq!(T::DTYPE, DType::BF16);
        let operands = &operands.of::<bf16>();
        let strided = scratch.wrapping_add(self.pairs_len());
        let tile = strided.wrapping_add(self.strided_len());
        let block = self.planar.block(stencil, unit);
        let src = operands.src.wrapping_offset(block.source(stencil));
        let strided = strided.cast();
        dispatch_bf16(
            isa,
            Interleave { plan: self, stencil, block: &block, src, strided, to: scratch },
        );
        for (filter, bias, store) in
            self.planar.panels(stencil, &block, operands, self.pairs.len(), tile)
        {
            let Block { first, size, .. } = block;
            let pairs = scratch;
            dispatch_bf16(isa, Panel { plan: self, filter, bias, pairs, tile, store, first, size });
        }
    }
}

impl Bf16Pairs {
    /// Elements for two rows of bf16 that do not lie next to each other in the source.
    fn strided_len(&self) -> usize {
        self.planar.block[1].next_multiple_of(MAX_LANES)
    }

    fn pairs_len(&self) -> usize {
        (self.planes.len() * self.plane + self.planar.group + ROUNDED).next_multiple_of(MAX_LANES)
    }
}

/// The kernel that makes planes of pairs.
struct Interleave<'a> {
    plan: &'a Bf16Pairs,
    stencil: &'a Stencil,
    block: &'a Block,
    /// Channel 0 of the group, in the image.
    src: *const bf16,
    /// Room for two rows.
    strided: *mut bf16,
    to: *mut f32,
}

impl Bf16Kernel for Interleave<'_> {
    #[inline(always)]
    fn run<P: Bf16Products>(self, p: P) {
        let Bf16Pairs { planar, planes, plane: len, .. } = self.plan;
        let (rows, cols, width) = (self.block.size[0], self.block.size[1], planar.block[1]);
        for (i, plane) in planes.iter().enumerate() {
            let [first, second] = array(|i| plane.lines[i].map(|line| self.source(line)));
            for row in 0..rows + plane.reach {
                // SAFETY: rows of the planes, in order, and two vectors more; rows of the source.
                unsafe {
                    let to = self.to.add(i * len + row * width);
                    let first = self.row(&first, row, self.strided);
                    let second = self.row(&second, row, self.strided.add(width));
                    p.interleave(first, second, cols, to);
                }
            }
        }
    }
}

/// The pixels that a line reads for a block.
struct Source {
    /// The address for the block's first pixel.
    from: *const bf16,
    /// Columns of the block that read inside of the source, and distance between what they read.
    inside: Range<usize>,
    step: isize,
    /// The source row that the block's first row reads.
    row: isize,
}

impl Interleave<'_> {
    #[inline(always)]
    fn source(&self, line: Line) -> Source {
        let Stencil { step, src, .. } = self.stencil;
        let Segment { i, j, .. } = self.block.first;
        let row = (i * step[0]) as isize + line.row;
        let col = (j * step[1]) as isize + line.col;
        // Outside of the source positions may overflow, and are not used.
        let at = [(line.c as isize, src[1]), (row, src[2]), (col, src[3])];
        let at =
            at.iter().fold(0, |sum: isize, &(i, stride)| sum.wrapping_add(i.wrapping_mul(stride)));
        Source {
            from: self.src.wrapping_offset(at),
            inside: self.stencil.inside(j, self.block.size[1], Tap { index: 0, offset: line.col }),
            step: src[3].wrapping_mul(step[1] as isize),
            row,
        }
    }

    /// The pixels that a row of the block reads; copied to `room` if they are not contiguous.
    ///
    /// # Safety
    /// The row is in the block, or within reach of it; `room` is writable as far as a row reaches.
    #[inline(always)]
    unsafe fn row(&self, source: &Option<Source>, row: usize, room: *mut bf16) -> Row {
        let zeros = Row { ptr: self.src, start: 0, end: 0 };
        let Some(Source { from, inside, step, row: first }) = source else { return zeros };
        let Stencil { step: [step_rows, _], src, src_size, .. } = self.stencil;
        let at = first + (row * step_rows) as isize;
        if at < 0 || at >= src_size[0] as isize {
            return zeros;
        }
        let from = from.wrapping_offset(((row * step_rows) as isize).wrapping_mul(src[2]));
        let Range { start, end } = *inside;
        if *step == 1 {
            return Row { ptr: from, start, end };
        }
        for i in start..end {
            // SAFETY: an element of the source, and space for it.
            unsafe {
                room.add(i).write(from.wrapping_offset((i as isize).wrapping_mul(*step)).read())
            };
        }
        Row { ptr: room, start, end }
    }
}

/// The sums of a panel of channels for all pixels of a block, and their way to the destination.
struct Panel<'a> {
    plan: &'a Bf16Pairs,
    filter: &'a [f32],
    bias: [f32; ROWS[0]],
    pairs: *const f32,
    /// [channel of the panel, pixel of the group]
    tile: *mut f32,
    store: Store<'a, bf16>,
    /// The block's first pixel.
    first: Segment,
    size: [usize; 2],
}

impl Bf16Kernel for Panel<'_> {
    #[inline(always)]
    fn run<P: Bf16Products>(self, p: P) {
        let [_, _, row_stride, col_stride] = self.store.stencil.dst;
        let [rows, width] = self.size;
        let pixels = rows * width;
        let in_one_piece = rows == 1 || row_stride == width as isize * col_stride;
        let whole = in_one_piece && self.store.channels.len() == CHANNELS;
        let mut done = 0;
        while done < pixels {
            let left = pixels - done;
            let vectors = (left.div_ceil(ROUNDED) * 2).min(VECTORS);
            let group = vectors * P::Simd::LANES;
            // The last group may begin in the one before it.
            let lane = if whole && pixels >= group { done.min(pixels - group) } else { done };
            let len = group.min(pixels - lane);
            let segment = Segment {
                i: self.first.i + lane / width,
                j: self.first.j + lane % width,
                len,
                ..self.first
            };
            // SAFETY: pixels of the stencil, whose pairs are in memory.
            unsafe {
                match vectors {
                    2 => self.group::<P, 2>(p, lane, segment, whole, in_one_piece),
                    4 => self.group::<P, 4>(p, lane, segment, whole, in_one_piece),
                    _ => self.group::<P, VECTORS>(p, lane, segment, whole, in_one_piece),
                }
            }
            done = lane + len;
        }
    }
}

impl Panel<'_> {
    /// A group of `V` vectors of pixels.
    ///
    /// # Safety
    /// The pixels of the segment are the stencil's, and their pairs begin at `lane`.
    #[inline(always)]
    unsafe fn group<P: Bf16Products, const V: usize>(
        &self,
        p: P,
        lane: usize,
        segment: Segment,
        whole: bool,
        in_one_piece: bool,
    ) {
        let s = p.simd();
        let lanes = P::Simd::LANES;
        // Asking for memory and waiting for it took longer than the sums of few channels.
        let mut ahead = self.store.lines(&segment);
        let mut sums = [[s.zero(); V]; CHANNELS];
        for (i, sums) in sums.iter_mut().enumerate() {
            *sums = [s.splat(self.bias[i]); V];
        }
        let mut filter = self.filter.as_ptr();
        // SAFETY: promised by the caller; the filter has pairs for each channel of the panel.
        unsafe {
            let source = self.pairs.add(lane);
            for pair in &self.plan.pairs {
                ahead.ask(s);
                let mut x = [s.zero(); V];
                for (v, x) in x.iter_mut().enumerate() {
                    *x = s.load(source.add(pair.offset + v * lanes));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let w = s.splat(*filter.add(i));
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = p.mul_add_pairs(w, x[v], *sum);
                    }
                }
                filter = filter.add(CHANNELS);
            }
            let plain = self.store.plain(&segment).filter(|_| whole && segment.len == V * lanes);
            if let Some((to, bounds)) = plain {
                for (i, sums) in sums.into_iter().enumerate() {
                    let to = to.offset(i as isize * self.store.stencil.dst[1]);
                    for (v, &[a, b]) in sums.as_chunks().0.iter().enumerate() {
                        p.store2(to.add(2 * v * lanes), [bounds.of(s, a), bounds.of(s, b)]);
                    }
                }
                return;
            }
            for (i, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    s.store(self.tile.add(i * self.plan.planar.group + v * lanes), sum);
                }
            }
            self.store.rows(s, segment, if in_one_piece { usize::MAX } else { self.size[1] });
        }
    }
}
