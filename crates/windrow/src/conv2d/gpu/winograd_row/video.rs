//! Videos by the fused kernel: the frames that it reads as images, and the pieces in which copies of them are made.

use super::kernel::Piece;
use super::{WinogradRow, is_aligned};
use crate::conv2d::frame_reads::FrameReads;
use crate::conv2d::gpu::input::Input;
use crate::conv2d::gpu::prepared::Operands;
use crate::conv2d::gpu::shared::frames::{FrameMax, FrameParams};
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::{Gpu, Stream, TensorMap};
use crate::{DType, Result};

/// The frames of a video, of which the initial ones are images of their own.
#[derive(Debug)]
pub(super) struct VideoInput {
    pub(super) reads: FrameReads,
    initial: Option<Input>,
    /// For f32.
    max: Option<FrameMax>,
}

impl VideoInput {
    pub(super) fn new(
        gpu: &'static Gpu,
        (spec, p): (&Conv2dSpec, &Problem),
        reads: FrameReads,
    ) -> Result<Self> {
        let count = reads.initial_count();
        let initial = reads.initial_images(&spec.x)?.map(|x| {
            let spec = Conv2dSpec { x, ..spec.clone() };
            Input::new(gpu, &spec, p, count)
        });
        let max = (spec.x.dtype == DType::F32).then(|| FrameMax::new(gpu)).transpose()?;
        Ok(VideoInput { reads, initial: initial.transpose()?, max })
    }

    /// The spec with the frames of x as images.
    pub(super) fn spec_of_x(&self, spec: &Conv2dSpec) -> Result<Conv2dSpec> {
        Ok(Conv2dSpec { x: self.reads.images(&spec.x)?, ..spec.clone() })
    }

    /// Bytes of the copy of the initial frames.
    pub(super) fn copy_bytes(&self) -> usize {
        self.initial.as_ref().map_or(0, Input::copy_bytes)
    }

    /// True if the initial frames at this address are not copied.
    pub(super) fn reads_in_place(&self, initial: Option<*const u8>) -> bool {
        let reads = |input: &Input, at| input.in_place && is_aligned(at);
        self.initial.as_ref().zip(initial).is_none_or(|(input, at)| reads(input, at))
    }
}

impl WinogradRow {
    /// # Safety
    /// As [`Prepared::run`](super::Prepared::run).
    pub(super) unsafe fn run_video(
        &self,
        video: &VideoInput,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
    ) -> Result<()> {
        let (p, reads, size) = (&self.problem, &video.reads, self.spec.x.dtype.size());
        // The maxima of the images of y, of the initial frames and of those of x.
        let x_max = operands.scratch;
        let of_frames = x_max.wrapping_add(p.n * size_of::<u32>());
        let of_x = of_frames.wrapping_add(reads.initial_count() * size_of::<u32>());
        let sums = x_max.wrapping_add(self.sizes.max_bytes());
        let initial_copy = sums.wrapping_add(self.sizes.sums_bytes());
        let copy = initial_copy.wrapping_add(video.copy_bytes());
        let fused = self.fused(self.vectors && operands.is_out_aligned(16))?;
        let initial = match (&video.initial, operands.initial) {
            (Some(input), Some(at)) => {
                let frames = (at, reads.initial_count());
                // SAFETY: the caller's promise; all initial frames fit their copy.
                unsafe { self.map(&fused, stream, input, frames, initial_copy, of_frames)? }
            }
            _ => TensorMap::NONE,
        };
        let frames = FrameParams::new(Some(reads), operands.initial, 0);
        let images = self.images_of_a_launch(&fused, operands.x);
        for first in (0..p.n).step_by(images) {
            let n = images.min(p.n - first);
            let window = reads.window(first..first + n);
            let bytes = reads.x.wrapping_mul((window.start * size) as isize);
            let from = (operands.x.wrapping_offset(bytes), window.len());
            let frames = frames.piece(first, window.start, window.len());
            let piece = operands.after_images(&self.spec, first);
            // SAFETY: the caller's promise; the frames of the window fit the copy, and their maxima the scratch memory.
            unsafe {
                let x = self.map(&fused, stream, &self.input, from, copy, of_x)?;
                if let Some(max) = &video.max {
                    max.run(stream, of_frames, frames, (x_max, n))?;
                }
                let images = Piece { x, x_max, sums, n, video: Some((initial, frames)) };
                fused.launch(self, stream, packed, piece, images)?;
            }
        }
        Ok(())
    }
}
