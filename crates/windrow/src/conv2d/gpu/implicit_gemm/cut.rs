//! The division of the matrix product of [`ImplicitGemm`](super::ImplicitGemm) into blocks (tile size and split-K), and the
//! way in which blocks gather x.

use crate::conv2d::frame_reads::{Before, FrameReads};
use crate::conv2d::gpu::task::Task;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::dtype::not_computed;
use crate::{Accuracy, DType, TensorDesc};

/// The output channels of a block (the last in one product), and the blocks of a cluster, which share the terms of a
/// tile.
pub(super) const BLOCKS: [usize; 3] = [64, 128, 256];
pub(super) const PARTS: [usize; 4] = [1, 2, 4, 8];

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

    /// Elements of 16 bytes.
    fn vector(self) -> usize {
        if self == Factors::Half { 8 } else { 4 }
    }

    /// Terms of a step.
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
    /// Output pixels of a block.
    pub(super) pixels: usize,
    pub(super) block: usize,
    pub(super) parts: usize,
}

/// What decides in which order the products of an output are added: divisions with the same order give the same bits.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Order {
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
        let maps = copy_engine_reads(spec, &p);
        let residual = spec.residual;
        of_factors(Factors::of(spec, maps), maps).filter(move |cut| {
            // Vectors of channels lie in one group; those of the only one can be filled up.
            let whole = p.groups == 1 || p.c_group().is_multiple_of(cut.vector());
            // There are no registers for a residual in f32 beside so many sums.
            let fits = cut.factors != Factors::Tf32 || cut.block < 256 || !residual;
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
        let Conv2dConfiguration { block, parts, .. } = task.configuration;
        let fits = |given: Option<usize>, value| given.is_none_or(|given| given == value);
        Cut::all(task.spec, task.problem)
            .filter(|cut| fits(block, cut.block) && fits(parts, cut.parts))
            .collect()
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
        Order { parts: self.parts, block: (!self.is_single()).then_some(self.block) }
    }

    pub(super) fn configuration(&self) -> Conv2dConfiguration {
        Conv2dConfiguration {
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

    /// Pixels of y that an image takes in the product. Those of a video fill up blocks, so that a block has one image. In
    /// three products the 16 pixels of a warp have a common scale. If the bits of an image must not depend on other images, these pixels
    /// are of one image: the last ones fill up a warp.
    pub(super) fn image_pixels(&self, task: &Task<'_>) -> usize {
        const SCALED: usize = 16;
        let pixels = task.problem.oh.saturating_mul(task.problem.ow);
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

    /// Terms of a step.
    pub(super) fn step(&self) -> usize {
        self.factors.step()
    }

    /// Bytes of a step: those of an output channel of the filter and, if it is one product, of a pixel.
    pub(super) fn row_bytes(&self) -> usize {
        if self.is_single() { 128 } else { 2 * self.step() * DType::F16.size() }
    }

    /// True if the kernel for y and a residual that are aligned, or not, takes a map of x. That of f16 and bf16 stores
    /// single outputs in another order of pixels.
    pub(super) fn has_map(&self, out_aligned: bool) -> bool {
        self.maps && (out_aligned || self.factors == Factors::Tf32)
    }

    /// Blocks that a multiprocessor holds at a time.
    pub(super) fn resident(&self) -> usize {
        if self.maps && self.block == 64 && self.parts == 1 { 2 } else { 1 }
    }

    pub(super) fn stages(&self) -> usize {
        match (self.is_single(), self.block) {
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
        let cut = Cut { factors, maps, pixels: 128, block, parts };
        // What is gathered by threads comes more slowly than a small filter.
        let wide = cut.is_single() && !maps && block == 64 && parts == 1;
        Cut { pixels: if wide { 256 } else { 128 }, ..cut }
    };
    let all = BLOCKS.into_iter().flat_map(move |block| PARTS.map(|parts| cut(block, parts)));
    all.filter(|cut| cut.block < 256 || cut.is_single() && cut.parts == 1)
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
/// counted from the end of x, in w and h.
pub(super) fn corners(p: &Problem) -> [[i64; 2]; 2] {
    let of = |d: usize, outputs: usize, size: usize| {
        let last = outputs.saturating_sub(1) * p.stride[d] + 1;
        [-(p.padding[d] as i64), last as i64 - (size + p.padding[d]) as i64]
    };
    let ([first_h, last_h], [first_w, last_w]) = (of(0, p.oh, p.h), of(1, p.ow, p.w));
    [[first_w, first_h], [last_w, last_h]]
}

/// True if the copy engine can load the taps of one product, from x or its copy. f16 and bf16 need outputs that are
/// vectors of channels or of pixels: it loads pixels in an order that single outputs cannot use.
fn copy_engine_reads(spec: &Conv2dSpec, p: &Problem) -> bool {
    let reach = |taps: usize, d: usize| taps.saturating_sub(1).saturating_mul(p.dilation[d]);
    let factors = Factors::of(spec, true);
    p.c_group().is_multiple_of(factors.step())
        && (factors != Factors::Half || stores_vectors(&spec.y, p) || stores_pixels(&spec.y))
        && ![p.n, p.h, p.w, p.oh, p.ow, p.r, p.s].contains(&0)
        && corners(p).as_flattened().iter().all(|at| (-128..128).contains(at))
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
            let cut = Cut { factors, maps: false, pixels: 128, block: 64, parts: 1 };
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
