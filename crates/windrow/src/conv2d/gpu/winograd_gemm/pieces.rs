//! The memory of the stages, and the smallest pieces in which they can work.

use super::stages;
use super::stages::Stage;
use crate::DType;
use crate::conv2d::gpu::ALIGNMENT;
use crate::conv2d::gpu::split::ImageMax;
use crate::conv2d::gpu::task::Task;
use crate::conv2d::{Conv2dSpec, Problem, Tile};

/// The outputs of a block of the product in both directions, as most of its kernels have them, and how often its blocks
/// should fill the GPU at least.
const PRODUCT_BLOCK: usize = 128;
const LEAST_ROUNDS: usize = 4;

/// The number of tiles of a chunk whose product still fills the GPU several times.
fn least_tiles(task: &Task<'_>, tile: Tile) -> usize {
    let blocks = tile.alpha() * tile.alpha() * task.problem.k.div_ceil(PRODUCT_BLOCK).max(1);
    let rounds = LEAST_ROUNDS * task.chip.multiprocessors as usize;
    rounds.div_ceil(blocks) * PRODUCT_BLOCK
}

/// The smallest number of bytes of packed filter and workspace together.
pub(super) fn least_bytes(task: &Task<'_>, tile: Tile) -> usize {
    let Task { spec, problem, .. } = *task;
    let stages = stages(spec);
    let tiles = least_tiles(task, tile);
    let all = problem.n * problem.oh.div_ceil(tile.m()) * problem.ow.div_ceil(tile.m());
    packed_bytes(tile, spec, problem)
        + ImageMax::bytes(&spec.x)
        + tiles.min(all) * tile_bytes(tile, &stages)
}

/// Tiles of a chunk of the stages that fit in `memory` bytes together with a packed filter, but at least
/// [`least_tiles`].
pub(super) fn tiles(task: &Task<'_>, tile: Tile, memory: usize) -> usize {
    let Task { spec, problem, .. } = *task;
    let rest = memory.saturating_sub(packed_bytes(tile, spec, problem) + ImageMax::bytes(&spec.x));
    (rest / tile_bytes(tile, &stages(spec))).max(least_tiles(task, tile))
}

/// The bytes of U.
pub(super) fn u_bytes(tile: Tile, v: &Stage, problem: &Problem) -> usize {
    tile.alpha() * tile.alpha() * problem.k * v.rows() * v.dtype.size()
}

/// The bytes of U, followed by the inverse scales of f32 filters.
pub(super) fn packed_bytes(tile: Tile, spec: &Conv2dSpec, problem: &Problem) -> usize {
    let [v, _] = stages(spec);
    let scales = if spec.x.dtype == DType::F32 { problem.k * size_of::<f32>() } else { 0 };
    (u_bytes(tile, &v, problem) + scales).next_multiple_of(ALIGNMENT)
}

/// The bytes of a tile in these stages.
fn tile_bytes(tile: Tile, stages: &[Stage]) -> usize {
    stages.iter().map(|stage| stage.tile_bytes(tile.alpha() * tile.alpha())).sum::<usize>().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::Conv2dParams;
    use crate::conv2d::gpu::method::Method;
    use crate::conv2d::gpu::winograd_row::WinogradRowMethod;
    use crate::{Layout, TensorDesc};

    /// The memory of the largest layers of `benchmarks/layers/cnn18.csv`.
    #[test]
    fn a_tenth_of_the_tensors_of_a_layer_is_enough_for_one_algorithm() {
        for [n, c, size, k] in [
            [64, 64, 112, 64],
            [64, 128, 112, 128],
            [64, 256, 50, 256],
            [64, 256, 50, 512],
            [64, 512, 50, 512],
        ] {
            for order in [[0, 1, 2, 3], [0, 2, 3, 1]] {
                let layout = Layout::with_order(&[n, c, size, size], &order).unwrap();
                let x = TensorDesc { dtype: DType::F32, layout };
                let w = TensorDesc::contiguous(DType::F32, &[k, c, 3, 3]).unwrap();
                let spec = Conv2dSpec::new(x, w, &Conv2dParams::default()).unwrap();
                let problem = spec.problem().unwrap();
                let tenth = (spec.x.bytes() + spec.y.bytes()) / 10;
                let task = Task::on_h200(&spec, &problem);
                let row = WinogradRowMethod.least_bytes(&task);
                assert!(row <= tenth, "{row} of {tenth}");
                for tile in Tile::ALL {
                    let least = least_bytes(&task, tile);
                    let bytes = |memory| {
                        let tiles = tiles(&task, tile, memory);
                        packed_bytes(tile, &spec, &problem)
                            + ImageMax::bytes(&spec.x)
                            + tiles * tile_bytes(tile, &stages(&spec))
                    };
                    assert!(bytes(0) == least && bytes(2 * least) <= 2 * least);
                    assert!(bytes(2 * least) > least);
                }
            }
        }
    }
}
