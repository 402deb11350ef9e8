//! The method of [`Conv2dAlgorithm::WinogradGemm`]: which convolutions it computes, its accuracy and its expected time.

use super::{WinogradGemm, pieces};
use crate::conv2d::gpu::facts::{is_strict, may_transform, packed_parts};
use crate::conv2d::gpu::method::{About, Method, Parameter};
use crate::conv2d::gpu::prepared::Prepared;
use crate::conv2d::gpu::split::ImageMax;
use crate::conv2d::gpu::task::Task;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, Tile};
use crate::dtype::not_computed;
use crate::gpu::Gpu;
use crate::{Accuracy, DType, Result};

/// [`Conv2dAlgorithm::WinogradGemm`].
pub(crate) struct WinogradGemmMethod;

impl Method for WinogradGemmMethod {
    fn about(&self) -> &'static About {
        &About {
            algorithms: &[
                Conv2dAlgorithm::WinogradGemm(Tile::F2),
                Conv2dAlgorithm::WinogradGemm(Tile::F4),
                Conv2dAlgorithm::WinogradGemm(Tile::F6),
            ],
            domain: "computes 3x3 filters of stride and dilation 1 in one group",
            kernels: &[
                "winograd_filter.cu conv2d_winograd_filter_f{2,4,6}_f32 PARTS={1,3}",
                "winograd_filter.cu conv2d_winograd_filter_f{2,4,6}_{f16,bf16} PARTS=0",
                "winograd_input.cu conv2d_winograd_input_f{2,4,6}_f32 PARTS={1,3} CHANNELS_INNER={0,1}",
                "winograd_input.cu conv2d_winograd_input_f{2,4,6}_{f16,bf16} PARTS=0 CHANNELS_INNER={0,1}",
                "winograd_output.cu conv2d_winograd_output_f{2,4,6}_{f32,f16,bf16} CHANNELS_INNER={0,1}",
            ],
            parameters: &[
                Parameter {
                    name: "tiles",
                    values: "most tiles of a chunk: a positive number",
                    is_valid: |tiles| tiles > 0,
                },
                Parameter {
                    name: "block",
                    values: "threads of a block of the transforms: a multiple of 32 up to 1024",
                    is_valid: |block| (1..=1024).contains(&block) && block.is_multiple_of(32),
                },
            ],
        }
    }

    fn computes(&self, task: &Task<'_>) -> bool {
        let Task { spec, problem, .. } = task;
        let counted = spec.x.dtype != DType::F32 || ImageMax::supports(&spec.x);
        problem.is_winograd() && problem.c > 0 && counted && task.frames.is_none()
    }

    /// Checks that the library of matrix products is found.
    fn runs_on(&self, gpu: &Gpu, _task: &Task<'_>) -> Result<()> {
        gpu.check_gemm()
    }

    fn allows(&self, task: &Task<'_>) -> bool {
        may_transform(task.spec)
            && match tile_of(task) {
                // Transforms in f32 throughout: a third of the tier's limit.
                Tile::F6 => is_strict(task.spec),
                tile => tile.m() <= largest_tile(task.spec).m(),
            }
    }

    fn micros(&self, task: &Task<'_>) -> f64 {
        micros(task, tile_of(task))
    }

    fn pair_bytes(&self, task: &Task<'_>) -> usize {
        let alpha = tile_of(task).alpha();
        2 * alpha * alpha * packed_parts(task.spec)
    }

    fn least_bytes(&self, task: &Task<'_>) -> usize {
        pieces::least_bytes(task, tile_of(task))
    }

    fn candidates(&self, task: &Task<'_>) -> Vec<Conv2dConfiguration> {
        let base = Conv2dConfiguration::new(task.algorithm());
        let tiles = (13..19).map(|shift| Conv2dConfiguration { tiles: Some(1 << shift), ..base });
        let blocks = [64, 256, 512].map(|block| Conv2dConfiguration { block: Some(block), ..base });
        tiles.chain(blocks).collect()
    }

    fn complete(&self, task: &Task<'_>) -> Conv2dConfiguration {
        WinogradGemm::cut(task).configuration(task.algorithm())
    }

    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(WinogradGemm::new(gpu, task)?))
    }
}

/// The tile of a task by one of this method's algorithms.
pub(super) fn tile_of(task: &Task<'_>) -> Tile {
    task.algorithm().tile().unwrap_or(Tile::F2)
}

/// Tiles of all images.
pub(crate) fn tiles(p: &Problem, tile: Tile) -> usize {
    p.n * p.oh.div_ceil(tile.m()) * p.ow.div_ceil(tile.m())
}

/// Expected microseconds of the stages: launches, passes over x, V, M and y, products.
pub(crate) fn micros(task: &Task<'_>, tile: Tile) -> f64 {
    let Task { chip, spec, problem: p, .. } = *task;
    let rates = &chip.rates.winograd_gemm;
    // Passes over x, and f16/bf16 parts of an element of V.
    let (reads, parts) = match spec.x.dtype {
        DType::F32 => (2.0, if is_strict(spec) { 3 } else { 1 }),
        DType::F16 | DType::BF16 | not_computed!() => (1.0, 1),
    };
    let elements = (tiles(p, tile) * tile.alpha() * tile.alpha()) as f64;
    let bytes = |channels: usize, pixels: usize| {
        (p.n * spec.x.dtype.size()) as f64 * channels as f64 * pixels as f64
    };
    let images = reads * bytes(p.c, p.h * p.w) + bytes(p.k, p.oh * p.ow);
    let megabytes = 1e-6 * (2.0 * elements * (2 * parts * p.c + 4 * p.k) as f64 + images);
    rates.launches
        + rates.megabyte * megabytes
        + rates.product * elements * (parts * p.c * p.k) as f64
}

/// F4 has larger errors than F2. f32 can afford them, and f16 at [`Accuracy::Half`].
pub(crate) fn largest_tile(spec: &Conv2dSpec) -> Tile {
    match (spec.x.dtype, spec.accuracy) {
        (DType::F32, _) | (DType::F16, Accuracy::Half) => Tile::F4,
        (DType::F16 | DType::BF16 | not_computed!(), _) => Tile::F2,
    }
}
