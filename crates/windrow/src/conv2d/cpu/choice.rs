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

/// Input channels up to which direct summation is faster than Winograd's algorithm in stages.
const DIRECT_CHANNELS: usize = 4;
/// Input channels up to which Winograd's algorithm in one pass is faster than in stages.
const FEW_CHANNELS: usize = 8;

/// Whether Winograd's algorithm in one pass is ahead: its vectors lie along the rows of y, which have
/// to fill them, and many to outweigh the stages. Over one channel direct sums take less time than
/// the transform of the output.
fn one_pass_pays(p: &Problem) -> bool {
    let columns = if p.c <= DIRECT_CHANNELS { 16 } else { 64 };
    (2..=FEW_CHANNELS).contains(&p.c) && p.ow >= columns
}

/// The algorithm that should be fastest within the accuracy asked for.
pub(crate) fn choose(spec: &Conv2dSpec, p: &Problem) -> Conv2dAlgorithm {
    if p.prefers_direct() {
        return Conv2dAlgorithm::Direct;
    }
    let row_major = !is_channels_last(&spec.y.layout);
    if p.is_winograd() && spec.accuracy != Accuracy::Exact {
        if row_major && one_pass_pays(p) {
            return Conv2dAlgorithm::WinogradFused(FUSED_TILE);
        }
        if !row_major || p.c > DIRECT_CHANNELS {
            return Conv2dAlgorithm::WinogradGemm(best_tile(p));
        }
    }
    // With few input channels the im2col matrix is many times the input.
    if p.c_group() <= 8 && p.r * p.s > 1 && row_major {
        return Conv2dAlgorithm::Direct;
    }
    Conv2dAlgorithm::Im2colGemm
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::Conv2dParams;
    use crate::{DType, TensorDesc};

    #[test]
    fn few_channels_go_in_one_pass_where_rows_fill_vectors() {
        let chosen = |c, w| {
            let x = TensorDesc::contiguous(DType::F32, &[2, c, 40, w]).unwrap();
            let filter = TensorDesc::contiguous(DType::F32, &[64, c, 3, 3]).unwrap();
            let spec = Conv2dSpec::new(x, filter, &Conv2dParams::default()).unwrap();
            choose(&spec, &spec.problem().unwrap())
        };
        let fused = Conv2dAlgorithm::WinogradFused(FUSED_TILE);
        for (c, w) in [(2, 18), (3, 114), (4, 34), (5, 66), (8, 114)] {
            assert_eq!(chosen(c, w), fused, "{c} {w}");
        }
        for (c, w) in [(1, 114), (2, 17), (3, 10), (4, 12)] {
            assert_eq!(chosen(c, w), Conv2dAlgorithm::Direct, "{c} {w}");
        }
        for (c, w) in [(5, 10), (8, 50), (9, 114)] {
            assert!(matches!(chosen(c, w), Conv2dAlgorithm::WinogradGemm(_)), "{c} {w}");
        }
    }
}
