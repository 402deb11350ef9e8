//! Which algorithm the planner takes on the CPU.

use super::winograd::{FUSED_TILE, best_tile};
use crate::Accuracy;
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dAlgorithm, Conv2dSpec, Problem, Tile};

/// The algorithms that can compute a problem.
pub(crate) fn supported(p: &Problem) -> Vec<Conv2dAlgorithm> {
    let mut all = vec![Conv2dAlgorithm::Direct, Conv2dAlgorithm::Im2colGemm];
    if p.is_winograd() {
        all.extend(Tile::ALL.map(Conv2dAlgorithm::WinogradGemm));
        all.push(Conv2dAlgorithm::WinogradFused(FUSED_TILE));
    }
    all
}

/// Input channels up to which direct summation is faster than Winograd's algorithm: the sums themselves
/// take less time than the transform of the output.
const DIRECT_CHANNELS: usize = 1;
/// Input channels up to which Winograd's algorithm in one pass is faster than in stages.
const FEW_CHANNELS: usize = 8;

/// The algorithm that should be fastest within the accuracy asked for.
pub(crate) fn choose(spec: &Conv2dSpec, p: &Problem) -> Conv2dAlgorithm {
    if p.prefers_direct() {
        return Conv2dAlgorithm::Direct;
    }
    let row_major = !is_channels_last(&spec.y.layout);
    let few = p.c <= DIRECT_CHANNELS && row_major;
    if p.is_winograd() && !few && spec.accuracy != Accuracy::Exact {
        if p.c <= FEW_CHANNELS && row_major {
            return Conv2dAlgorithm::WinogradFused(FUSED_TILE);
        }
        return Conv2dAlgorithm::WinogradGemm(best_tile(p));
    }
    // With few input channels the im2col matrix is many times the input.
    if p.c_group() <= 8 && p.r * p.s > 1 && row_major {
        return Conv2dAlgorithm::Direct;
    }
    Conv2dAlgorithm::Im2colGemm
}
