//! What the stages compute, at what accuracy, and the time that they are expected to take.

use super::{WinogradGemm, pieces};
use crate::conv2d::gpu::chips::Chip;
use crate::conv2d::gpu::facts::{is_strict, may_transform, packed_parts};
use crate::conv2d::gpu::methods::{Method, Parameter, Prepared};
use crate::conv2d::gpu::split::ImageMax;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, Tile};
use crate::dtype::not_computed;
use crate::gpu::Gpu;
use crate::{Accuracy, DType, PlanOptions, Result};

/// [`Conv2dAlgorithm::WinogradGemm`].
pub(in crate::conv2d::gpu) struct WinogradGemmMethod;

impl Method for WinogradGemmMethod {
    fn algorithms(&self) -> &'static [Conv2dAlgorithm] {
        const ALL: [Conv2dAlgorithm; 3] = [
            Conv2dAlgorithm::WinogradGemm(Tile::F2),
            Conv2dAlgorithm::WinogradGemm(Tile::F4),
            Conv2dAlgorithm::WinogradGemm(Tile::F6),
        ];
        &ALL
    }

    fn kernels(&self) -> &'static [&'static str] {
        &[
            "winograd_filter.cu conv2d_winograd_filter_f{2,4,6}_f32 PARTS={1,3}",
            "winograd_filter.cu conv2d_winograd_filter_f{2,4,6}_{f16,bf16} PARTS=0",
            "winograd_input.cu conv2d_winograd_input_f{2,4,6}_f32 PARTS={1,3} CHANNELS_INNER={0,1}",
            "winograd_input.cu conv2d_winograd_input_f{2,4,6}_{f16,bf16} PARTS=0 CHANNELS_INNER={0,1}",
            "winograd_output.cu conv2d_winograd_output_f{2,4,6}_{f32,f16,bf16} CHANNELS_INNER={0,1}",
        ]
    }

    fn domain(&self) -> &'static str {
        "computes 3x3 filters of stride and dilation 1 in one group"
    }

    fn computes(&self, spec: &Conv2dSpec, problem: &Problem) -> bool {
        let counted = spec.x.dtype != DType::F32 || ImageMax::supports(&spec.x);
        problem.is_winograd() && problem.c > 0 && counted
    }

    /// Where the library of matrix products is found.
    fn runs_on(&self, gpu: &Gpu, _spec: &Conv2dSpec) -> Result<()> {
        gpu.multiplies()
    }

    fn allows(&self, spec: &Conv2dSpec, algorithm: Conv2dAlgorithm) -> bool {
        may_transform(spec)
            && match tile_of(algorithm) {
                // Transforms in f32 throughout: a third of the tier's limit.
                Tile::F6 => is_strict(spec),
                tile => tile.m() <= largest_tile(spec).m(),
            }
    }

    fn micros(
        &self,
        chip: Chip,
        spec: &Conv2dSpec,
        problem: &Problem,
        configuration: &Conv2dConfiguration,
    ) -> f64 {
        micros(chip, spec, problem, tile_of(configuration.algorithm))
    }

    fn pair_bytes(&self, spec: &Conv2dSpec, _p: &Problem, algorithm: Conv2dAlgorithm) -> usize {
        let alpha = tile_of(algorithm).alpha();
        2 * alpha * alpha * packed_parts(spec)
    }

    fn least_bytes(
        &self,
        multiprocessors: u32,
        spec: &Conv2dSpec,
        problem: &Problem,
        algorithm: Conv2dAlgorithm,
    ) -> usize {
        pieces::least_bytes(multiprocessors, spec, problem, tile_of(algorithm))
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[
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
        ]
    }

    fn candidates(
        &self,
        _spec: &Conv2dSpec,
        algorithm: Conv2dAlgorithm,
    ) -> Vec<Conv2dConfiguration> {
        let base = Conv2dConfiguration::new(algorithm);
        let tiles = (13..19).map(|shift| Conv2dConfiguration { tiles: Some(1 << shift), ..base });
        let blocks = [64, 256, 512].map(|block| Conv2dConfiguration { block: Some(block), ..base });
        tiles.chain(blocks).collect()
    }

    fn complete(
        &self,
        gpu: &Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        configuration: &Conv2dConfiguration,
        options: &PlanOptions,
    ) -> Conv2dConfiguration {
        let cut = WinogradGemm::cut(gpu, spec, problem, configuration, options.memory);
        cut.configuration(configuration.algorithm)
    }

    fn prepare(
        &self,
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        configuration: &Conv2dConfiguration,
        options: &PlanOptions,
    ) -> Result<Box<dyn Prepared>> {
        let tile = tile_of(configuration.algorithm);
        let cut = WinogradGemm::cut(gpu, spec, problem, configuration, options.memory);
        Ok(Box::new(WinogradGemm::new(gpu, spec, problem, tile, cut)?))
    }
}

/// The tile of one of this method's algorithms.
pub(super) fn tile_of(algorithm: Conv2dAlgorithm) -> Tile {
    algorithm.tile().unwrap_or(Tile::F2)
}

/// Tiles of all images.
pub(in crate::conv2d::gpu) fn tiles(p: &Problem, tile: Tile) -> usize {
    p.n * p.oh.div_ceil(tile.m()) * p.ow.div_ceil(tile.m())
}

/// Expected microseconds of the stages: launches, passes over x, V, M and y, products.
pub(in crate::conv2d::gpu) fn micros(
    chip: Chip,
    spec: &Conv2dSpec,
    p: &Problem,
    tile: Tile,
) -> f64 {
    let rates = &chip.rates.winograd_gemm;
    // Passes over x, halves for an element of V.
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

/// F4 raises errors more than F2, which f32 can afford, and f16 if it is asked for.
pub(in crate::conv2d::gpu) fn largest_tile(spec: &Conv2dSpec) -> Tile {
    match (spec.x.dtype, spec.accuracy) {
        (DType::F32, _) | (DType::F16, Accuracy::Half) => Tile::F4,
        (DType::F16 | DType::BF16 | not_computed!(), _) => Tile::F2,
    }
}
