//! Sizes of the memory that a convolution by this algorithm takes, and the number of images that it copies at a time.

use super::geometry::PIXEL_BYTES;
use super::geometry::{Geometry, PAIR_COLUMNS, PAIRS};
use super::{ALIGNMENT, ALPHA, BLOCK_K, PART_BYTES, STEP_C, TAPS, TILE, stores_vectors};
use crate::DType;
use crate::conv2d::frame_reads::FrameReads;
use crate::conv2d::gpu::facts::is_strict;
use crate::conv2d::gpu::input;
use crate::conv2d::gpu::split;
use crate::conv2d::gpu::task::Task;
use crate::conv2d::{Conv2dSpec, Problem};

/// The properties on which sizes depend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    c: usize,
    k: usize,
    /// Three products of f16 parts for the accuracy of f32, otherwise one.
    pub(super) products: usize,
    multiprocessors: usize,
    /// The images whose largest magnitude is needed: those of f32.
    counted: usize,
    /// The frames of a video, and the bytes of an element.
    reads: Option<FrameReads>,
    element: usize,
}

impl Sizes {
    pub(super) fn new(task: &Task<'_>) -> Self {
        let Task { chip, problem, spec, frames: reads, .. } = *task;
        let products = if is_strict(spec) { 3 } else { 1 };
        let multiprocessors = chip.multiprocessors as usize;
        let counted = if spec.x.dtype == DType::F32 { problem.n } else { 0 };
        let (c, k, element) = (problem.c, problem.k, spec.x.dtype.size());
        Sizes { c, k, products, multiprocessors, counted, reads, element }
    }

    /// Without the copies of x and of the initial frames.
    pub(super) fn bytes(&self) -> usize {
        self.packed_bytes() + self.max_bytes() + self.sums_bytes()
    }

    /// Bytes of the largest magnitudes: of the images, and of the frames that they read.
    pub(super) fn max_bytes(&self) -> usize {
        let frames = match self.reads {
            Some(reads) if self.counted > 0 => reads.initial_count() + reads.frames.t,
            _ => 0,
        };
        ((self.counted + frames) * size_of::<u32>()).next_multiple_of(ALIGNMENT)
    }

    /// Steps of a frame of the filter; all of an image's filter. Those of a frame are whole stages.
    pub(super) fn frame_steps(&self) -> usize {
        let steps = self.c.div_ceil(STEP_C);
        match self.reads {
            Some(_) => steps.next_multiple_of(PIXEL_BYTES / self.element / STEP_C),
            None => steps,
        }
    }

    /// Frames of the filter.
    pub(super) fn frames(&self) -> usize {
        self.reads.map_or(1, |reads| reads.frames.kt)
    }

    pub(super) fn steps(&self) -> usize {
        self.frames() * self.frame_steps()
    }

    /// The images of x, or frames, that are copied for so many images of y.
    pub(super) fn copied(&self, images: usize) -> usize {
        self.reads.map_or(images, |reads| reads.copied(images))
    }

    /// True if images are the frames of a video.
    pub(super) fn is_video(&self) -> bool {
        self.reads.is_some()
    }

    pub(super) fn k_blocks(&self) -> usize {
        self.k.div_ceil(BLOCK_K)
    }

    pub(super) fn filter_step_bytes(&self) -> usize {
        ALPHA * PART_BYTES * if self.products == 1 { 1 } else { 2 }
    }

    pub(super) fn u_bytes(&self) -> usize {
        self.k_blocks() * self.steps() * TAPS * self.filter_step_bytes()
    }

    /// Steps of the product after which sums of split operands are flushed: the tensor cores' error grows with the
    /// length of a sum, that of f32 sums with its root, of which it should stay below twice. Flushing a sum of 128 or
    /// fewer channels would cost more than it is worth.
    pub(super) fn chunk_steps(&self) -> usize {
        const UNFLUSHED: usize = 8;
        let steps = self.steps();
        if self.products == 1 || steps <= UNFLUSHED {
            return steps.max(1);
        }
        let channels = (self.c * self.frames()) as f64;
        let most = (9.4 * channels.sqrt() / STEP_C as f64) as usize;
        steps.div_ceil(steps.div_ceil(most.max(UNFLUSHED)))
    }

    /// The amount by which tensor cores shrink the sums of this number of accumulations between two flushes.
    pub(super) fn shrinkage(&self) -> f64 {
        let chunks = self.steps().div_ceil(self.chunk_steps()).max(1);
        split::SHRINKAGE * (self.products * TAPS * self.steps()) as f64 / chunks as f64
    }

    /// Bytes of flushed sums: those of the 256 consumer threads of each block.
    pub(super) fn sums_bytes(&self) -> usize {
        if self.chunk_steps() >= self.steps() {
            return 0;
        }
        let of_thread = TILE * 2 * BLOCK_K / 4 * size_of::<f32>();
        self.multiprocessors * 256 * of_thread
    }

    pub(super) fn packed_bytes(&self) -> usize {
        (self.u_bytes() + self.k * size_of::<f32>()).next_multiple_of(ALIGNMENT)
    }

    /// The smallest number of bytes of packed filter and workspace together, with just enough images copied at a time
    /// that the product still fills the GPU.
    pub(super) fn least_bytes(&self, spec: &Conv2dSpec, p: &Problem) -> usize {
        let pixels = self.multiprocessors * 2 * PAIRS * PAIR_COLUMNS;
        let of_image = p.oh * p.ow * self.k_blocks();
        let images = match input::copy_engine_reads(spec) {
            true => 1,
            false => (pixels / of_image.max(1)).clamp(1, p.n.max(1)),
        };
        let initial = self.reads.map_or(0, |reads| reads.initial_count());
        self.bytes() + (self.copied(images) + initial) * input::image_bytes(spec)
    }

    /// The images to copy at a time, at most `most`, so that all pieces together take the fewest rounds of blocks.
    pub(super) fn images_of_a_piece(&self, spec: &Conv2dSpec, p: &Problem, most: usize) -> usize {
        /// The cost of a piece in addition to its rounds: launches.
        const OF_A_PIECE: f64 = 0.25;
        let n = p.n.max(1);
        if most == 1 || most >= n {
            return most.min(n);
        }
        let Some(geometry) = Geometry::choose(n, p.oh, p.ow, !stores_vectors(spec, p)) else {
            return most;
        };
        let rounds = |images: usize| {
            let items = geometry.units(images, p.ow).div_ceil(2) * self.k_blocks();
            OF_A_PIECE + items.div_ceil(self.multiprocessors) as f64
        };
        let cost = |images: usize| {
            let rest = n % images;
            (n / images) as f64 * rounds(images) + if rest > 0 { rounds(rest) } else { 0.0 }
        };
        (1..=most).min_by(|&a, &b| cost(a).total_cmp(&cost(b))).unwrap_or(most)
    }
}
