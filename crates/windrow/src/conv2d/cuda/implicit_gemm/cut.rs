//! How the product of [`ImplicitGemm`](super::ImplicitGemm) is cut into blocks, how these gather x, and what that
//! is expected to take.

use crate::TensorDesc;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem};
use crate::gpu::Gpu;

/// Output pixels of a block, terms of a step.
pub(super) const BLOCK_M: usize = 128;
pub(super) const STEP: usize = 64;
/// Output channels of a block, and blocks of a cluster, which share the terms of a tile.
pub(super) const BLOCKS: [usize; 2] = [64, 128];
const PARTS: [usize; 4] = [1, 2, 4, 8];
const VECTOR: usize = 4;

/// How x is gathered; the discriminant is that of the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Gather {
    Any = 0,
    Channels = 1,
    Pixels = 2,
}

/// How the product is cut into blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cut {
    pub(super) block: usize,
    pub(super) parts: usize,
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
    /// What is not given by the least expected time, with that time in microseconds; `None` where no kernel has what
    /// is given.
    pub(super) fn choose(
        multiprocessors: u32,
        spec: &Conv2dSpec,
        p: &Problem,
        given: &Conv2dConfiguration,
    ) -> Option<(Self, f64)> {
        let fits = |given: Option<usize>, value| given.is_none_or(|given| given == value);
        BLOCKS
            .into_iter()
            .flat_map(|block| PARTS.map(|parts| Cut { block, parts }))
            .filter(|cut| fits(given.block, cut.block) && fits(given.parts, cut.parts))
            .map(|cut| (cut, cut.micros(multiprocessors, spec, p)))
            .min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// Expected microseconds: a launch, and rounds of tiles of so many steps. Fitted to 46 layers of ResNet-50 at batch 1, 8
    /// and 64 on an H200.
    fn micros(&self, multiprocessors: u32, spec: &Conv2dSpec, p: &Problem) -> f64 {
        let (step, tile) = match (gather(spec, p, *self, true), self.block) {
            (Gather::Any, _) if spec.x.strides()[3] != 1 => (5.0, 3.0),
            (Gather::Any, 64) => (1.72, 1.2),
            (Gather::Any, _) => (1.97, 2.5),
            (Gather::Channels, 64) => (1.27, 1.4),
            (Gather::Channels, _) => (1.42, 3.0),
            (Gather::Pixels, 64) => (0.91, 1.8),
            (Gather::Pixels, _) => (1.27, 2.9),
        };
        let exchange = if self.parts > 1 { 1.8 } else { 0.0 };
        let tiles = (p.n * p.oh * p.ow).div_ceil(BLOCK_M) * self.k_blocks(p);
        let rounds = tiles as f64 / clusters(multiprocessors, self.parts) as f64;
        // Blocks that are done early go on, so that the last of many rounds need not be whole.
        let rounds = if rounds < 4.0 { rounds.ceil() } else { rounds };
        2.3 + rounds * (step * self.steps(p).div_ceil(self.parts) as f64 + tile + exchange)
    }

    pub(super) fn configuration(&self) -> Conv2dConfiguration {
        Conv2dConfiguration {
            block: Some(self.block),
            parts: Some(self.parts),
            ..Conv2dConfiguration::new(Conv2dAlgorithm::ImplicitGemm)
        }
    }

    /// What blocks sum together: as many groups as fill a block, or one.
    pub(super) fn unit(&self, p: &Problem) -> Unit {
        let fits =
            |groups: &usize| p.groups.is_multiple_of(*groups) && groups * p.k_group() <= self.block;
        let groups = (1..=p.groups.min(self.block)).rev().find(fits).unwrap_or(1);
        let k = groups * p.k_group();
        Unit { groups, k, c: groups * p.c_group(), blocks: k.div_ceil(self.block) }
    }

    pub(super) fn k_blocks(&self, p: &Problem) -> usize {
        let unit = self.unit(p);
        p.groups / unit.groups * unit.blocks
    }

    pub(super) fn steps(&self, p: &Problem) -> usize {
        (self.unit(p).c * p.r * p.s).div_ceil(STEP)
    }
}

/// Every way to cut.
pub(crate) fn configurations() -> impl Iterator<Item = Conv2dConfiguration> {
    let cuts = BLOCKS.into_iter().flat_map(|block| PARTS.map(|parts| Cut { block, parts }));
    cuts.map(|cut| cut.configuration())
}

/// True if there are kernels for these channels of a block and parts of sums, where they are given.
pub(crate) fn cuts_into(block: Option<usize>, parts: Option<usize>) -> bool {
    block.is_none_or(|b| BLOCKS.contains(&b)) && parts.is_none_or(|p| PARTS.contains(&p))
}

/// A configuration with the parameters that a plan would have.
pub(in crate::conv2d::cuda) fn complete(
    gpu: &Gpu,
    spec: &Conv2dSpec,
    p: &Problem,
    given: &Conv2dConfiguration,
) -> Conv2dConfiguration {
    let cut = Cut::choose(gpu.info.multiprocessors, spec, p, given);
    cut.map_or(*given, |(cut, _)| cut.configuration())
}

/// Expected microseconds of a configuration, infinite for one that no kernel has.
pub(in crate::conv2d::cuda) fn micros(
    multiprocessors: u32,
    spec: &Conv2dSpec,
    p: &Problem,
    given: &Conv2dConfiguration,
) -> f64 {
    Cut::choose(multiprocessors, spec, p, given).map_or(f64::INFINITY, |(_, micros)| micros)
}

/// Clusters of so many blocks that a device holds at a time: some of its multiprocessors are in no whole cluster.
pub(super) fn clusters(multiprocessors: u32, parts: usize) -> usize {
    let whole = multiprocessors as usize / parts;
    let lost = match parts {
        1 | 2 => 0,
        _ => 2,
    };
    whole.saturating_sub(lost).max(1)
}

/// How x is gathered if its address is aligned.
pub(super) fn gather(spec: &Conv2dSpec, p: &Problem, cut: Cut, aligned: bool) -> Gather {
    let s = spec.x.strides();
    let whole = |strides: &[isize]| strides.iter().all(|s| s % VECTOR as isize == 0);
    let one_tap =
        p.r * p.s == 1 && p.stride == [1, 1] && !is_padded(p) && [p.oh, p.ow] == [p.h, p.w];
    if aligned && s[1] == 1 && cut.unit(p).c.is_multiple_of(VECTOR) && whole(&[s[0], s[2], s[3]]) {
        Gather::Channels
    } else if aligned
        && one_tap
        && s[3] == 1
        && s[2] == p.w as isize
        && (p.h * p.w).is_multiple_of(VECTOR)
        && whole(&s[..2])
    {
        Gather::Pixels
    } else {
        Gather::Any
    }
}

/// Some tap lies beside the image.
pub(super) fn is_padded(p: &Problem) -> bool {
    let ends = |d: usize, outputs: usize, taps: usize, size: usize| {
        let last = outputs.saturating_sub(1) * p.stride[d] + taps.saturating_sub(1) * p.dilation[d];
        p.padding[d] > 0 || last >= size
    };
    ends(0, p.oh, p.r, p.h) || ends(1, p.ow, p.s, p.w)
}

/// Vectors of channels can be stored.
pub(super) fn stores_vectors(y: &TensorDesc, unit: Unit) -> bool {
    let s = y.strides();
    let whole = |s: &isize| s % VECTOR as isize == 0;
    s[1] == 1 && unit.k.is_multiple_of(VECTOR) && [s[0], s[2], s[3]].iter().all(whole)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{NCHW, NHWC, spec};
    use super::*;

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
            let cut = Cut { block: 64, parts: 1 };
            assert_eq!(gather(&spec, &problem, cut, aligned), expected, "{x:?} {order:?} {taps}");
        }
    }

    /// They come from callers and from files.
    #[test]
    fn parameters_without_a_kernel_are_never_expected_to_win() {
        let (spec, problem) = spec(&[2, 64, 8, 8], &NCHW, &[8, 64, 3, 3], 1);
        let time = |block| {
            let base = Conv2dConfiguration::new(Conv2dAlgorithm::ImplicitGemm);
            micros(132, &spec, &problem, &Conv2dConfiguration { block: Some(block), ..base })
        };
        assert!(time(64).is_finite());
        assert_eq!(time(100), f64::INFINITY);
    }
}
