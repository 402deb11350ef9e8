//! Winograd convolution on the CPU as one blocked pipeline.
//!
//! The tiles of the whole batch are cut into blocks. For each block a thread transforms the input
//! (V), multiplies with the transformed filter (U) position by position (M) and transforms the
//! output into y, so V and M are as large as a block, not as the problem. U streams through once
//! for each block. Products are summed by vectors of f32 or by tiles of bf16.
//!
//! Where that would occupy few threads, or V of all threads is large, these form V of a stretch of
//! tiles together, then take parts of its output channels.
//!
//! Of a video, images are the frames of the output, and what the frames of the filter read are channels. So frames are
//! summed before the output transform, which has no more to do than for an image.

mod amx;
mod blocking;
mod filter;
mod frames;
mod fused;
mod gemm;
mod geometry;
mod input;
mod method;
mod output;
mod pack;
mod prefetch;
mod products;
mod raw;
mod shared;
mod stages;
mod transform;
mod weight_gradient;
mod weight_stages;

use super::shared::epilogue::Epilogue;
use super::shared::{Vectors, bias_len, stage_bias, strides4};
use super::{Prepared, Run};
use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Problem, Tile};
use crate::cpu::{Isa, MAX_LANES, SendPtr, SimdElement, dispatch, parallel_for_workers};
use crate::dtype::with_element;
use crate::{Result, TensorRef};
use blocking::Blocking;
pub(super) use blocking::best_tile;
use frames::FrameInput;
pub(super) use fused::TILE as FUSED_TILE;
use gemm::Gemm;
use geometry::Geometry;
use input::InputTransform;
pub(super) use method::{FusedMethod, StagedMethod, one_pass_pays};
use output::OutputTransform;
use prefetch::{Ahead, Image, Prefetch};
pub(super) use products::Products;
use shared::SharedInput;
use stages::Block;
use std::ops::Range;
pub(super) use weight_gradient::WinogradWeight;

/// Error of Winograd's algorithm relative to its scale.
fn tolerance(tile: Tile) -> f64 {
    match tile {
        Tile::F2 => 1e-6,
        Tile::F4 => 4e-6,
        Tile::F6 => 2e-5,
    }
}

/// A 3x3 convolution of stride and dilation 1 with one group, by Winograd's algorithm.
#[derive(Clone, Debug)]
pub(super) struct WinogradCpu {
    /// The tiles; of a video, its problem has the frames of the filter as channels.
    geometry: Geometry,
    frames: Option<FrameInput>,
    tile: Tile,
    threads: usize,
    isa: Isa,
    products: Products,
    lanes: usize,
    registers: usize,
    blocking: Blocking,
}

/// Operands of a run that do not depend on the block.
struct Operands<'a> {
    packed: &'a [f32],
    x: &'a TensorRef<'a>,
    initial: Option<&'a TensorRef<'a>>,
    /// V that the tasks share.
    v: SendPtr<f32>,
    epilogue: Epilogue,
    y: SendPtr<u8>,
    y_strides: [isize; 4],
    /// True if x and y together are larger than the caches.
    far: bool,
    /// Sees every block between the products and the output transform.
    inspect: &'a (dyn Fn(&Block) + Sync),
}

// SAFETY: threads write separate elements of y.
unsafe impl Sync for Operands<'_> {}

impl Prepared for WinogradCpu {
    fn configuration(&self) -> Conv2dConfiguration {
        let Blocking { tiles, parts, vectors, .. } = self.blocking;
        let [tiles, parts, vectors] = [tiles, parts, vectors].map(Some);
        let algorithm = Conv2dAlgorithm::WinogradGemm(self.tile);
        Conv2dConfiguration { tiles, parts, vectors, ..Conv2dConfiguration::new(algorithm) }
    }

    fn explain(&self) -> String {
        let Blocking { tiles, parts, vectors, stretch } = self.blocking;
        let shared = if stretch > 0 { format!(" of {stretch} at a time") } else { String::new() };
        let by = match self.products {
            Products::Vectors => "",
            Products::Tiles => ", products by tiles of bf16, split into three parts",
        };
        format!(
            "blocks of {tiles} tiles{shared}, {parts} parts of the channels, {vectors} vectors at once{by}"
        )
    }

    fn packed_width(&self) -> usize {
        self.lanes
    }

    fn packed_len(&self) -> usize {
        self.positions() * self.u_position()
    }

    fn workspace_bytes(&self) -> usize {
        let slots = self.threads.min(self.tasks(self.at_once())) * self.slot_len();
        (bias_len(self.geometry.problem.k) + self.v_len() + slots) * size_of::<f32>()
    }

    fn raw_bytes(&self) -> usize {
        self.raw_workspace_bytes()
    }

    fn tolerance(&self) -> f64 {
        tolerance(self.tile)
    }

    fn tile(&self) -> Option<Tile> {
        Some(self.tile)
    }

    fn pack(&self, w: &TensorRef<'_>, packed: &mut [f32]) {
        with_element!(w.dtype(), T => self.pack_from::<T>(w, packed));
    }

    fn run(&self, packed: &[f32], run: Run<'_, '_>) {
        self.run_inspected(packed, run, &|_| ());
    }

    fn run_raw(&self, w: &TensorRef<'_>, run: Run<'_, '_>) {
        self.run_filter(w, run);
    }

    fn winograd_stages(
        &self,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        self.stages(w, x).map(Some)
    }
}

impl WinogradCpu {
    /// The method for a problem with [`Problem::is_winograd`].
    fn with_isa(
        problem: &Problem,
        tile: Tile,
        threads: usize,
        isa: Isa,
        products: Products,
    ) -> Self {
        debug_assert!(problem.is_winograd());
        let geometry = Geometry::new(problem, tile.m());
        let (lanes, registers) = dispatch(isa, Vectors);
        let blocking = Blocking::choose(&geometry, lanes, threads, products);
        let frames = None;
        WinogradCpu { geometry, frames, tile, threads, isa, products, lanes, registers, blocking }
    }

    /// The method with a given blocking: tiles in a block, parts of the output channels, and vectors of them between
    /// two output transforms.
    fn with_blocking(self, parameters: [Option<usize>; 3]) -> Self {
        let WinogradCpu { geometry, lanes, threads, products, .. } = &self;
        let blocking = Blocking::with(geometry, *lanes, *threads, *products, parameters);
        WinogradCpu { blocking, ..self }
    }

    fn run_inspected(&self, packed: &[f32], run: Run<'_, '_>, inspect: &(dyn Fn(&Block) + Sync)) {
        let Run { x, initial, bias, residual, activation, y, workspace } = run;
        assert!(packed.len() >= self.packed_len(), "packed filter");
        assert!(workspace.len() >= self.workspace_bytes(), "workspace");
        let (bias, slots) = stage_bias(bias, self.geometry.problem.k, workspace);
        let (v, slots) = slots.split_at_mut(self.v_len());
        let operands = Operands {
            packed,
            x,
            initial,
            v: SendPtr(v.as_mut_ptr()),
            epilogue: Epilogue { bias: bias.as_ptr(), residual, activation },
            y_strides: strides4(y.strides()),
            far: x.desc().bytes() + y.desc().bytes() > prefetch::FAR,
            y: SendPtr(y.as_mut_ptr()),
            inspect,
        };
        let slots = SendPtr(slots.as_mut_ptr());
        let all = self.geometry.tiles();
        for start in (0..all).step_by(self.at_once().max(1)) {
            let stretch = start..all.min(start + self.at_once());
            with_element!(x.dtype(), X => match self.tile {
                Tile::F2 => self.run_stretch::<X, 4>(&operands, stretch, slots),
                Tile::F4 => self.run_stretch::<X, 6>(&operands, stretch, slots),
                Tile::F6 => self.run_stretch::<X, 8>(&operands, stretch, slots),
            });
        }
    }

    /// Blocks of some tiles, of which V is formed at first if tasks share it.
    fn run_stretch<X: SimdElement, const A: usize>(
        &self,
        operands: &Operands<'_>,
        tiles: Range<usize>,
        slots: SendPtr<f32>,
    ) {
        if self.shares_input() {
            let v_strides = self.v_strides();
            let input = SharedInput {
                geometry: &self.geometry,
                frames: self.frames.as_ref(),
                isa: self.isa,
                lanes: self.lanes,
                threads: self.threads,
                tiles: &tiles,
                v: operands.v,
                v_strides,
                // SAFETY: `v_len` is the sum of V and the staging memory.
                staging: SendPtr(unsafe { operands.v.get().add(self.positions() * v_strides[0]) }),
            };
            // SAFETY: x agrees with the problem; the memory is as large as asked for.
            unsafe { input.transform::<X, A>(operands.x, operands.initial) };
        }
        parallel_for_workers(self.threads, self.tasks(tiles.len()), |worker, task| {
            // SAFETY: each worker has a slot of its own.
            let slot = unsafe { slots.get().add(worker * self.slot_len()) };
            self.run_block::<X, A>(operands, &tiles, task, slot);
        });
    }

    /// Computes one block of a stretch of tiles and one part of the output channels.
    fn run_block<X: SimdElement, const A: usize>(
        &self,
        operands: &Operands<'_>,
        stretch: &Range<usize>,
        task: usize,
        slot: *mut f32,
    ) {
        let p = &self.geometry.problem;
        let tiles = self.tiles(stretch, task / self.blocking.parts);
        let part = self.part(task % self.blocking.parts);
        // SAFETY: `slot_len` is the sum of these.
        let [staging_out, split, m, own] = unsafe {
            let split = slot.add(output::STAGING);
            let m = split.add(self.split_len());
            [slot, split, m, m.add(self.positions() * self.m_strides()[0])]
        };
        let v = if self.shares_input() {
            // SAFETY: the block's tiles of V of the stretch.
            unsafe { operands.v.get().add((tiles.start - stretch.start) * self.lanes) }
        } else {
            let transform = InputTransform::<X, A> {
                geometry: &self.geometry,
                x: operands.x.as_ptr().cast(),
                strides: strides4(operands.x.strides()),
                tiles: tiles.clone(),
                // SAFETY: behind V, by `slot_len`.
                staging: unsafe { own.add(self.positions() * self.v_strides()[0]) },
                v: own,
                v_strides: self.v_strides(),
            };
            let frames = self.frames.as_ref().map(|frames| (frames, operands.initial));
            frames::transform(self.isa, self.lanes, frames, transform);
            own
        };
        let mut read = self.prefetch_input::<X>(operands, stretch, task, part.len());
        for first in part.clone().step_by(self.blocking.vectors) {
            let vectors = self.blocking.vectors.min(part.end - first);
            let channels = first * self.lanes..p.k.min((first + vectors) * self.lanes);
            let image = Image {
                start: operands.y.get(),
                element: size_of::<X>(),
                strides: operands.y_strides,
                size: [p.oh, p.ow],
                before: [0, 0],
                side: A - 2,
            };
            let calls = self.calls(tiles.len(), vectors);
            let write =
                Prefetch::new(&self.geometry, image, tiles.clone(), channels.clone(), calls);
            let products = Gemm {
                c: p.c,
                positions: self.positions(),
                tiles: tiles.len(),
                vectors,
                u: operands.packed[first * self.lanes * p.c..].as_ptr(),
                u_position: self.u_position(),
                v,
                v_strides: self.v_strides(),
                m,
                m_strides: self.m_strides(),
                accumulate: false,
                v_is_far: self.shares_input(),
                ahead: Ahead { read: &mut read, write },
            };
            self.multiply(products, split);
            (operands.inspect)(&Block { tiles: tiles.clone(), v, channels: channels.clone(), m });
            dispatch(
                self.isa,
                OutputTransform::<X, A> {
                    geometry: &self.geometry,
                    m,
                    m_strides: self.m_strides(),
                    m_width: self.m_width(),
                    tiles: tiles.clone(),
                    channels,
                    epilogue: operands.epilogue,
                    staging: staging_out,
                    y: operands.y.get().cast(),
                    strides: operands.y_strides,
                },
            );
        }
    }

    /// The input of the task that this thread will do next if all take equally long, where it forms V of it.
    fn prefetch_input<X>(
        &self,
        operands: &Operands<'_>,
        stretch: &Range<usize>,
        task: usize,
        vectors: usize,
    ) -> Prefetch<'_> {
        let p = &self.geometry.problem;
        let image = Image {
            start: operands.x.as_ptr(),
            element: size_of::<X>(),
            strides: strides4(operands.x.strides()),
            size: [p.h, p.w],
            before: p.padding,
            side: self.tile.alpha(),
        };
        let asks = operands.far && !self.shares_input() && self.frames.is_none();
        let tiles = if asks { self.tiles(stretch, task + self.threads) } else { 0..0 };
        let calls = self.calls(self.blocking.tiles, vectors);
        Prefetch::new(&self.geometry, image, tiles, 0..p.c, calls)
    }

    /// True if all threads form V of a stretch of tiles together, and their tasks share it.
    fn shares_input(&self) -> bool {
        self.blocking.stretch > 0
    }

    /// Tiles between two waits for all threads.
    fn at_once(&self) -> usize {
        if self.shares_input() { self.blocking.stretch } else { self.geometry.tiles() }
    }

    /// Tiles of a block of a stretch; none beyond the last one.
    fn tiles(&self, stretch: &Range<usize>, block: usize) -> Range<usize> {
        let start = (stretch.start + block * self.blocking.tiles).min(stretch.end);
        start..(start + self.blocking.tiles).min(stretch.end)
    }

    fn positions(&self) -> usize {
        self.geometry.positions()
    }

    /// Vectors of output channels.
    fn vectors(&self) -> usize {
        self.geometry.problem.k.div_ceil(self.lanes)
    }

    fn u_position(&self) -> usize {
        self.vectors() * self.lanes * self.geometry.problem.c
    }

    /// Strides of V of a block, or of a stretch where tasks share it.
    fn v_strides(&self) -> [usize; 2] {
        let shared = self.shares_input();
        self.v_strides_of(if shared { self.blocking.stretch } else { self.blocking.tiles })
    }

    fn v_strides_of(&self, tiles: usize) -> [usize; 2] {
        block_strides(tiles, self.geometry.problem.c.div_ceil(self.lanes), self.lanes)
    }

    /// Elements of V that tasks share, and the staging memory of its transform.
    fn v_len(&self) -> usize {
        if self.shares_input() { self.v_len_of(self.blocking.stretch) } else { 0 }
    }

    fn v_len_of(&self, tiles: usize) -> usize {
        self.positions() * self.v_strides_of(tiles)[0] + self.threads * input::STAGING
    }

    /// Strides of M of a block.
    fn m_strides(&self) -> [usize; 2] {
        self.m_strides_of(self.blocking.tiles, self.blocking.vectors)
    }

    fn slot_len(&self) -> usize {
        let own = self.positions() * self.v_strides()[0] + input::STAGING;
        let own = if self.shares_input() { 0 } else { own };
        let m = self.positions() * self.m_strides()[0];
        let split = self.split_len();
        (output::STAGING + split + m + own).next_multiple_of(MAX_LANES)
    }

    /// The number of tasks for this number of tiles.
    fn tasks(&self, tiles: usize) -> usize {
        tiles.div_ceil(self.blocking.tiles) * self.blocking.parts
    }

    /// Vectors of output channels of a part, whole panels.
    fn part(&self, part: usize) -> Range<usize> {
        let panels = self.vectors().div_ceil(gemm::PANEL);
        let at =
            |part: usize| (panels * part / self.blocking.parts * gemm::PANEL).min(self.vectors());
        at(part)..at(part + 1)
    }
}

/// Strides of a block's matrices [position, vector, tile, LANES]: from position to position an odd
/// number of cache lines, so that the positions of a tile lie in different cache sets.
fn block_strides(tiles: usize, vectors: usize, lanes: usize) -> [usize; 2] {
    let vector = tiles * lanes;
    let lines = (vectors * vector).div_ceil(MAX_LANES);
    [(lines | 1) * MAX_LANES, vector]
}

#[cfg(test)]
mod tests;
