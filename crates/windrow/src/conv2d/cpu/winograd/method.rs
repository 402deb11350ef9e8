//! The two methods of Winograd's algorithm: non-fused, and in one pass.

use super::super::method::{Found, Method, Task};
use super::blocking::cost;
use super::frames::FrameInput;
use super::fused::{TILE, WinogradFused};
use super::{Products, Vectors, WinogradCpu};
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Problem, Tile};
use crate::cpu::{MAX_LANES, dispatch};
use crate::{Accuracy, Filter};

/// Non-fused Winograd: transforms and products as separate steps.
pub(in crate::conv2d::cpu) struct StagedMethod;

impl Method for StagedMethod {
    fn algorithms(&self) -> &'static [Conv2dAlgorithm] {
        &[
            Conv2dAlgorithm::WinogradGemm(Tile::F2),
            Conv2dAlgorithm::WinogradGemm(Tile::F4),
            Conv2dAlgorithm::WinogradGemm(Tile::F6),
        ]
    }

    fn allows(&self, accuracy: Accuracy) -> bool {
        accuracy != Accuracy::Exact
    }

    fn cost(&self, task: &Task<'_>, algorithm: Conv2dAlgorithm, filter: Filter) -> f64 {
        let p = &task.sizes().with_frames_as_channels(MAX_LANES);
        let tile = algorithm.tile().unwrap_or(Tile::F4);
        cost(p, tile, filter, Products::of(task, p, tile))
    }

    fn parameters(&self) -> &'static [&'static str] {
        &["tiles", "vectors", "parts"]
    }

    fn candidates(&self, algorithm: Conv2dAlgorithm, threads: usize) -> Vec<Conv2dConfiguration> {
        let (base, mut all) = (Conv2dConfiguration::new(algorithm), Vec::new());
        for tiles in [12, 24, 36, 48, 72].map(Some) {
            for vectors in [2, 4, 8, 16].map(Some) {
                all.push(Conv2dConfiguration { tiles, vectors, ..base });
            }
        }
        if threads > 1 {
            let parts = [1, threads].map(Some);
            all.extend(parts.map(|parts| Conv2dConfiguration { parts, ..base }));
        }
        all
    }

    fn prepare(&self, task: &Task<'_>, configuration: &Conv2dConfiguration) -> Found {
        let &Task { problem: p, isa, threads, .. } = task;
        let Conv2dConfiguration { algorithm, tiles, parts, vectors, .. } = *configuration;
        let Some(tile) = algorithm.tile().filter(|_| p.is_winograd()) else { return Ok(None) };
        let (lanes, _) = dispatch(isa, Vectors);
        let frames = task.stencil.frames.clone().map(|taps| FrameInput { taps, c: p.c });
        let p = &p.with_frames_as_channels(lanes);
        let products = Products::of(task, &task.sizes().with_frames_as_channels(lanes), tile);
        let engine = WinogradCpu::with_isa(p, tile, threads, isa, products);
        let engine = WinogradCpu { frames, ..engine };
        Ok(Some(Box::new(engine.with_blocking([tiles, parts, vectors]))))
    }
}

/// Winograd's algorithm in one pass.
pub(in crate::conv2d::cpu) struct FusedMethod;

impl Method for FusedMethod {
    fn algorithms(&self) -> &'static [Conv2dAlgorithm] {
        &[Conv2dAlgorithm::WinogradFused(TILE)]
    }

    fn allows(&self, accuracy: Accuracy) -> bool {
        accuracy != Accuracy::Exact
    }

    /// Transformed along rows only.
    fn cost(&self, task: &Task<'_>, _: Conv2dAlgorithm, _: Filter) -> f64 {
        task.sizes().flops() / 2.0 * TILE.alpha() as f64 / (3 * TILE.m()) as f64
    }

    fn prepare(&self, task: &Task<'_>, _: &Conv2dConfiguration) -> Found {
        let &Task { problem: p, isa, threads, .. } = task;
        let supports = p.is_winograd() && task.stencil.frames.is_none();
        Ok(supports.then(|| Box::new(WinogradFused::new(p, isa, threads)) as _))
    }
}

/// The largest number of input channels for which one pass is faster than non-fused Winograd.
const FEW_CHANNELS: usize = 8;

/// True if one pass is ahead, given the most channels for which direct sums are ahead of stages. Vectors lie along the rows
/// of y, which have to fill them, and many to outweigh the stages. Over one channel direct sums take less time than the
/// transform of the output.
pub(in crate::conv2d::cpu) fn one_pass_pays(p: &Problem, direct_channels: usize) -> bool {
    let columns = if p.c <= direct_channels { 16 } else { 64 };
    (2..=FEW_CHANNELS).contains(&p.c) && p.ow >= columns
}
