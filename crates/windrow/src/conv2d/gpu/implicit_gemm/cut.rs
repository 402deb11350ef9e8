//! The division of the matrix product of [`ImplicitGemm`](super::ImplicitGemm) into blocks (tile size and split-K), and the
//! way in which blocks gather x.

use crate::conv2d::frame_reads::{Before, FrameReads};
use crate::conv2d::gpu::task::Task;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::dtype::not_computed;
use crate::{Accuracy, DType, TensorDesc};

/// The output channels of a block (the last in one product) and, where it reads strips, and the blocks of a cluster, which
/// share the terms of a tile.
pub(super) const BLOCKS: [usize; 3] = [64, 128, 256];
pub(super) const STRIP_BLOCKS: [usize; 4] = [64, 96, 128, 192];
pub(super) const PARTS: [usize; 4] = [1, 2, 4, 8];
/// The pixels of a tile.
pub(super) const TILE: usize = 128;
/// The columns of the filter that read a strip, and the pixels that a strip has beside those of its block.
const STRIP_COLUMNS: usize = 3;
const STRIP_REACH: usize = 8;

/// The way in which x is gathered; the discriminant is the kernel's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Gather {
    Any = 0,
    Channels = 1,
    Pixels = 2,
    /// The copy engine gathers x.
    Map = 3,
}

/// The factors that tensor cores multiply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Factors {
    /// f32 as f16 parts, in three products.
    Split,
    /// f32 rounded to TF32, in one product. The copy engine brings and rounds x.
    Tf32,
    /// f16 or bf16, in one product.
    Half,
}

impl Factors {
    /// The factors of a spec's convolution, of which the copy engine reads x or not.
    fn of(spec: &Conv2dSpec, maps: bool) -> Self {
        match spec.x.dtype {
            DType::F32 if maps && spec.accuracy >= Accuracy::Tf32 => Factors::Tf32,
            DType::F32 => Factors::Split,
            DType::F16 | DType::BF16 | not_computed!() => Factors::Half,
        }
    }

    /// Bytes of an element.
    fn size(self) -> usize {
        if self == Factors::Half { 2 } else { 4 }
    }

    /// Elements of 16 bytes.
    fn vector(self) -> usize {
        16 / self.size()
    }

    /// Terms of a step of one tap.
    fn step(self) -> usize {
        if self == Factors::Tf32 { 32 } else { 64 }
    }
}

/// The division of the product into blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cut {
    pub(super) factors: Factors,
    /// x comes by the copy engine.
    pub(super) maps: bool,
    /// It comes in strips of pixels, of which all columns of the filter read.
    pub(super) strips: bool,
    /// Output pixels of a block.
    pub(super) pixels: usize,
    pub(super) block: usize,
    pub(super) parts: usize,
}

/// What decides in which order the products of an output are added: divisions with the same order give the same bits.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Order {
    factors: Factors,
    strips: bool,
    parts: usize,
    /// Of three products: groups fill up a block, and a NaN lets a block add its products in another way.
    block: Option<usize>,
}

/// Groups, with their output and input channels, and blocks that compute them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit {
    groups: usize,
    pub(super) k: usize,
    pub(super) c: usize,
    pub(super) blocks: usize,
}

impl Cut {
    /// The divisions for which a spec has kernels.
    pub(super) fn all(spec: &Conv2dSpec, p: &Problem) -> impl Iterator<Item = Self> {
        let p = *p;
        let residual = spec.residual;
        let maps = copy_engine_reads(spec, &p, false);
        let strips = copy_engine_reads(spec, &p, true).then(|| in_strips(Factors::of(spec, true)));
        let taps = of_factors(Factors::of(spec, maps), maps);
        taps.chain(strips.into_iter().flatten()).filter(move |cut| {
            // Vectors of channels lie in one group; those of the only one can be filled up.
            let whole = p.groups == 1 || p.c_group().is_multiple_of(cut.vector());
            // There are no registers for a residual beside so many sums.
            let most = if cut.factors == Factors::Tf32 { 192 } else { 256 };
            let fits = !residual || cut.pixels * cut.block <= TILE * most;
            !cut.is_single() || whole && fits
        })
    }

    /// The division with the least expected time among those with the given parameters, and that time in microseconds;
    /// `None` if no kernel has these parameters.
    pub(super) fn choose(task: &Task<'_>) -> Option<(Self, f64)> {
        let micros = |task: &Task<'_>, &order: &Order| {
            Cut::fastest(task, order).map_or(f64::INFINITY, |(_, micros)| micros)
        };
        let orders = Cut::given(task).into_iter().map(|cut| cut.order());
        Cut::fastest(task, task.least(orders, micros)?)
    }

    /// The divisions with the parameters that are given.
    fn given(task: &Task<'_>) -> Vec<Self> {
        let Conv2dConfiguration { tiles, block, parts, .. } = task.configuration;
        let fits = |given: Option<usize>, value| given.is_none_or(|given| given == value);
        let all = Cut::all(task.spec, task.problem);
        let of_tiles = all.filter(|cut| fits(tiles, cut.tiles()));
        of_tiles.filter(|cut| fits(block, cut.block) && fits(parts, cut.parts)).collect()
    }

    /// Of these, the one with the least expected time among those with this order, and that time in microseconds.
    fn fastest(task: &Task<'_>, order: Order) -> Option<(Self, f64)> {
        let cuts = Cut::given(task).into_iter().filter(|cut| cut.order() == order);
        cuts.map(|cut| (cut, cut.micros(task))).min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// True if a step is one product, else three.
    pub(super) fn is_single(&self) -> bool {
        self.factors != Factors::Split
    }

    /// What decides in which order the products of an output are added.
    fn order(&self) -> Order {
        let Cut { factors, strips, parts, .. } = *self;
        Order { factors, strips, parts, block: (!self.is_single()).then_some(self.block) }
    }

    /// Tiles of pixels of a block.
    fn tiles(&self) -> usize {
        self.pixels / TILE
    }

    pub(super) fn configuration(&self) -> Conv2dConfiguration {
        Conv2dConfiguration {
            tiles: Some(self.tiles()),
            block: Some(self.block),
            parts: Some(self.parts),
            ..Conv2dConfiguration::new(Conv2dAlgorithm::ImplicitGemm)
        }
    }

    /// The groups that a block sums together: as many as fill a block, or one. In one product always one, because only
    /// three repair the NaN that an infinity and a zero between groups make.
    pub(super) fn unit(&self, p: &Problem) -> Unit {
        let fits =
            |groups: &usize| p.groups.is_multiple_of(*groups) && groups * p.k_group() <= self.block;
        let most = if self.is_single() { 1 } else { p.groups.min(self.block) };
        let groups = (1..=most).rev().find(fits).unwrap_or(1);
        let k = groups * p.k_group();
        Unit { groups, k, c: groups * p.c_group(), blocks: k.div_ceil(self.block) }
    }

    pub(super) fn k_blocks(&self, p: &Problem) -> usize {
        let unit = self.unit(p);
        p.groups / unit.groups * unit.blocks
    }

    pub(super) fn steps(&self, p: &Problem) -> usize {
        (self.term_channels(p) * p.frames.kt * p.r * p.s).div_ceil(self.step())
    }

    /// The distance of rows of y in the product: with strips as many pixels as a row's first and last taps enclose.
    pub(super) fn pitch(&self, p: &Problem) -> usize {
        if self.strips { p.ow + strip_reach(p) } else { p.ow }
    }

    /// Pixels of y that an image takes in the product. Those of a video fill up blocks, so that a block has one image. In
    /// three products the 16 pixels of a warp have a common scale. If the bits of an image must not depend on other images, these pixels
    /// are of one image: the last ones fill up a warp.
    pub(super) fn image_pixels(&self, task: &Task<'_>) -> usize {
        const SCALED: usize = 16;
        let pixels = task.problem.oh.saturating_mul(self.pitch(task.problem));
        match () {
            () if task.problem.is_video() => pixels.next_multiple_of(self.pixels),
            () if task.options.batch_invariant && !self.is_single() => {
                pixels.next_multiple_of(SCALED)
            }
            () => pixels,
        }
    }

    /// Input channels of a unit with those that fill up vectors.
    pub(super) fn term_channels(&self, p: &Problem) -> usize {
        let c = self.unit(p).c;
        if self.is_single() { c.next_multiple_of(self.vector()) } else { c }
    }

    /// Elements of 16 bytes.
    pub(super) fn vector(&self) -> usize {
        self.factors.vector()
    }

    /// Taps of a step.
    fn taps(&self) -> usize {
        if self.strips { STRIP_COLUMNS } else { 1 }
    }

    /// Input channels of a step, unless taps have fewer.
    pub(super) fn step_channels(&self) -> usize {
        if self.strips { self.factors.step() / 2 } else { self.factors.step() }
    }

    /// Terms of a step.
    pub(super) fn step(&self) -> usize {
        self.step_channels() * self.taps()
    }

    /// Bytes of an output channel of the filter in a step. Both f16 parts of an f32 take as much as the f32.
    pub(super) fn channel_bytes(&self) -> usize {
        self.step() * self.factors.size()
    }

    /// Pixels of a step.
    pub(super) fn step_pixels(&self) -> usize {
        if self.strips { self.pixels + STRIP_REACH } else { self.pixels }
    }

    /// Bytes of the pixels and of the filter in a step.
    pub(super) fn stage_bytes(&self) -> usize {
        let pixel = self.step_channels() * self.factors.size();
        self.step_pixels() * pixel + self.block * self.channel_bytes()
    }

    /// Threads of a block that bring x: a warp, or a warpgroup, which can give its registers to consumers of many sums.
    pub(super) fn producers(&self) -> usize {
        if self.maps && !(self.strips && self.block >= 128) { 32 } else { 128 }
    }

    /// Blocks that a multiprocessor holds at a time.
    pub(super) fn resident(&self) -> usize {
        if self.maps && !self.strips && self.block == 64 && self.parts == 1 { 2 } else { 1 }
    }

    pub(super) fn stages(&self) -> usize {
        match (self.is_single(), self.block) {
            // As many as fit into the shared memory.
            (true, block) if self.strips => [7, 6, 5, 4][of_strips(block)],
            (false, 64) => 4,
            (false, _) => 3,
            (true, 64) => 8 * 128 / self.pixels / self.resident(),
            (true, 128) => 6,
            (true, _) => 4,
        }
    }

    /// Blocks of a launch on a GPU that holds so many clusters at a time.
    pub(super) fn launched(&self, clusters: usize, tiles: usize) -> usize {
        // Blocks that share sums of one product have one tile.
        match self.is_single() && self.parts > 1 {
            true => tiles * self.parts,
            false => tiles.min(self.resident() * clusters) * self.parts,
        }
    }
}

/// The possible divisions.
fn of_factors(factors: Factors, maps: bool) -> impl Iterator<Item = Cut> {
    let maps = maps && factors != Factors::Split;
    let cut = move |block, parts| {
        let cut = Cut { factors, maps, strips: false, pixels: TILE, block, parts };
        // What is gathered by threads comes more slowly than a small filter.
        let wide = cut.is_single() && !maps && block == 64 && parts == 1;
        Cut { pixels: if wide { 2 * TILE } else { TILE }, ..cut }
    };
    let all = BLOCKS.into_iter().flat_map(move |block| PARTS.map(|parts| cut(block, parts)));
    all.filter(|cut| cut.block < 256 || cut.is_single() && cut.parts == 1)
}

/// The possible divisions that read strips.
fn in_strips(factors: Factors) -> impl Iterator<Item = Cut> {
    let cut =
        move |block| Cut { factors, maps: true, strips: true, pixels: 2 * TILE, block, parts: 1 };
    STRIP_BLOCKS.into_iter().map(cut)
}

/// The number of a block that reads strips among those.
pub(super) fn of_strips(block: usize) -> usize {
    STRIP_BLOCKS.iter().take_while(|&&other| other < block).count()
}

/// The pixels between the first and the last tap of a row of y, of which the first one is not counted.
fn strip_reach(p: &Problem) -> usize {
    p.s.saturating_sub(1).saturating_mul(p.dilation[1])
}

/// The way in which x is gathered if its address is aligned.
pub(super) fn gather(spec: &Conv2dSpec, p: &Problem, cut: Cut, aligned: bool) -> Gather {
    let s = spec.x.strides();
    let whole = |strides: &[isize]| strides.iter().all(|s| s % cut.vector() as isize == 0);
    let one_tap =
        p.r * p.s == 1 && p.stride == [1, 1] && !is_padded(p) && [p.oh, p.ow] == [p.h, p.w];
    if aligned
        && s[1] == 1
        && cut.unit(p).c.is_multiple_of(cut.vector())
        && whole(&[s[0], s[2], s[3]])
    {
        Gather::Channels
    } else if aligned
        && one_tap
        && (p.frames.kt == 1 || p.c.is_multiple_of(16))
        && s[3] == 1
        && s[2] == p.w as isize
        && (p.h * p.w).is_multiple_of(cut.vector())
        && whole(&s[..2])
    {
        Gather::Pixels
    } else {
        Gather::Any
    }
}

/// True if initial frames lie like those of x: in f32 kernels read them with the same strides of rows and columns and, if
/// there are groups, of channels.
pub(super) fn rows_lie_like(x: &TensorDesc, reads: &FrameReads, groups: usize) -> bool {
    let Before::Initial(_, initial) = reads.before else { return true };
    let same = |d: usize| x.shape()[d] <= 1 || x.strides()[d] == initial[d];
    let channels = same(1) || groups == 1 && x.strides()[1] != 1;
    channels && same(2) && same(3)
}

/// True if vectors of initial frames can be read where those of x can.
pub(super) fn lies_like(x: &TensorDesc, reads: &FrameReads, vector: usize) -> bool {
    let Before::Initial(_, [frame, channel, ..]) = reads.before else { return true };
    let whole = |stride: isize| stride % vector as isize == 0;
    rows_lie_like(x, reads, 1) && whole(frame) && (x.strides()[1] == 1 || whole(channel))
}

/// True if some tap is outside the image.
pub(super) fn is_padded(p: &Problem) -> bool {
    let ends = |d: usize, outputs: usize, taps: usize, size: usize| {
        let last = outputs.saturating_sub(1) * p.stride[d] + taps.saturating_sub(1) * p.dilation[d];
        p.padding[d] > 0 || last >= size
    };
    ends(0, p.oh, p.r, p.h) || ends(1, p.ow, p.s, p.w)
}

/// Vectors of channels can be stored.
pub(super) fn stores_vectors(y: &TensorDesc, p: &Problem) -> bool {
    let (s, vector) = (y.strides(), 16 / y.dtype.size());
    let whole = |s: &isize| s % vector as isize == 0;
    // Also those of groups apart.
    s[1] == 1 && p.k_group().is_multiple_of(vector) && [s[0], s[2], s[3]].iter().all(whole)
}

/// The places, in one product, of the first tap of the first output and of the first tap of the last output, the latter
/// counted from the end of x, in w and h. With strips a row has so many pixels more.
pub(super) fn corners(p: &Problem, reach: usize) -> [[i64; 2]; 2] {
    let of = |d: usize, outputs: usize, size: usize| {
        let last = outputs.saturating_sub(1) * p.stride[d] + 1;
        [-(p.padding[d] as i64), last as i64 - (size + p.padding[d]) as i64]
    };
    let ([first_h, last_h], [first_w, last_w]) = (of(0, p.oh, p.h), of(1, p.ow, p.w));
    [[first_w, first_h], [last_w + reach as i64, last_h]]
}

/// True if the copy engine can load the taps of one product, from x or its copy, one by one or in strips.
fn copy_engine_reads(spec: &Conv2dSpec, p: &Problem, strips: bool) -> bool {
    let reach = |taps: usize, d: usize| taps.saturating_sub(1).saturating_mul(p.dilation[d]);
    let factors = Factors::of(spec, true);
    let whole = |corner: &i64| (-128..128).contains(corner);
    let fits = match strips {
        false => p.c_group().is_multiple_of(factors.step()),
        true => {
            factors != Factors::Split
                && p.c_group().is_multiple_of(factors.step() / 2)
                && p.s == STRIP_COLUMNS
                && p.stride[1] == 1
                && strip_reach(p) <= STRIP_REACH
        }
    };
    fits && ![p.n, p.h, p.w, p.oh, p.ow, p.r, p.s].contains(&0)
        && corners(p, if strips { strip_reach(p) } else { 0 }).as_flattened().iter().all(whole)
        && reach(p.r, 0) < 256
        && reach(p.s, 1) < 256
        && p.stride.iter().all(|&stride| stride <= 8)
}

/// Vectors of four pixels can be stored.
pub(super) fn stores_pixels(y: &TensorDesc) -> bool {
    let (s, shape) = (y.strides(), y.shape());
    let whole = |s: &isize| s % 4 == 0;
    let dense = s[3] == 1 && s[2] == shape[3] as isize;
    dense && (shape[2] * shape[3]).is_multiple_of(4) && s[..2].iter().all(whole)
}

#[cfg(test)]
mod tests {
    use super::super::ImplicitGemmMethod;
    use super::super::tests::{NCHW, NHWC, spec};
    use super::*;
    use crate::conv2d::gpu::method::Method;

    #[test]
    fn layouts_decide_how_inputs_are_gathered() {
        for (x, order, taps, padding, aligned, expected) in [
            ([2, 64, 8, 8], NHWC, 3, 1, true, Gather::Channels),
            ([2, 64, 8, 8], NHWC, 3, 1, false, Gather::Any),
            ([2, 63, 8, 8], NHWC, 3, 1, true, Gather::Any),
            ([2, 64, 8, 8], NCHW, 1, 0, true, Gather::Pixels),
            ([2, 64, 7, 7], NCHW, 1, 0, true, Gather::Any),
            ([2, 64, 8, 8], NCHW, 1, 1, true, Gather::Any),
            ([2, 64, 8, 8], NCHW, 3, 1, true, Gather::Any),
        ] {
            let (spec, problem) = spec(&x, &order, &[8, x[1], taps, taps], padding);
            let factors = Factors::Split;
            let cut =
                Cut { factors, maps: false, strips: false, pixels: TILE, block: 64, parts: 1 };
            assert_eq!(gather(&spec, &problem, cut, aligned), expected, "{x:?} {order:?} {taps}");
        }
    }

    #[test]
    fn the_copy_engine_brings_whole_steps_for_results_in_either_layout() {
        for (c, order, maps) in
            [(96, NHWC, false), (96, NCHW, false), (64, NHWC, true), (64, NCHW, true)]
        {
            let (mut spec, problem) = spec(&[2, c, 8, 8], &order, &[96, c, 3, 3], 1);
            for desc in [&mut spec.x, &mut spec.w, &mut spec.y] {
                desc.dtype = DType::BF16;
            }
            let (cut, _) = Cut::choose(&Task::on_h200(&spec, &problem)).unwrap();
            assert_eq!(cut.maps, maps, "{c} {order:?}");
        }
    }

    #[test]
    fn filters_of_three_columns_read_strips_of_large_images() {
        for (c, k, size, taps, expected) in [
            (96, 96, [240, 416], 3, Some(96)),
            (256, 256, [512, 512], 3, Some(128)),
            (256, 256, [512, 512], 1, None),
            // Images of few pixels fill few blocks.
            (64, 64, [8, 8], 3, None),
        ] {
            let x = [1, c, size[0], size[1]];
            let (mut spec, problem) = spec(&x, &NHWC, &[k, c, taps, taps], taps / 2);
            for desc in [&mut spec.x, &mut spec.w, &mut spec.y] {
                desc.dtype = DType::BF16;
            }
            let (cut, _) = Cut::choose(&Task::on_h200(&spec, &problem)).unwrap();
            assert_eq!(cut.strips.then_some(cut.block), expected, "{c} {size:?} {taps}");
        }
    }

    /// The parameters come from callers and from files.
    #[test]
    fn parameters_without_a_kernel_are_never_expected_to_win() {
        let (spec, problem) = spec(&[2, 64, 8, 8], &NCHW, &[8, 64, 3, 3], 1);
        let time = |block| {
            let base = Conv2dConfiguration::new(Conv2dAlgorithm::ImplicitGemm);
            let given = Conv2dConfiguration { block: Some(block), ..base };
            ImplicitGemmMethod.micros(&Task::on_h200(&spec, &problem).with(&given))
        };
        assert!(time(64).is_finite());
        assert_eq!(time(100), f64::INFINITY);
    }
}
