//! Videos by the fused kernel.

use super::WinogradRow;
use super::kernel::Piece;
use crate::Result;
use crate::conv2d::gpu::prepared::Operands;
use crate::conv2d::gpu::shared::video_input::VideoInput;
use crate::gpu::{Stream, TensorMap};

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
        let (p, initial_count) = (&self.problem, video.reads.initial_count());
        // The maxima of the images of y, of the initial frames and of those of x.
        let x_max = operands.scratch;
        let of_frames = x_max.wrapping_add(p.n * size_of::<u32>());
        let of_x = of_frames.wrapping_add(initial_count * size_of::<u32>());
        let sums = x_max.wrapping_add(self.sizes.max_bytes());
        let initial_copy = sums.wrapping_add(self.sizes.sums_bytes());
        let copy = initial_copy.wrapping_add(video.copy_bytes());
        let fused = self.fused(self.vectors && operands.is_out_aligned(16))?;
        let initial = match (&video.initial, operands.initial) {
            (Some(input), Some(at)) => {
                let frames = (at, initial_count);
                // SAFETY: the caller's promise; all initial frames fit their copy.
                unsafe { self.map(&fused, stream, input, frames, initial_copy, of_frames)? }
            }
            _ => TensorMap::NONE,
        };
        let images = self.images_of_a_launch(&fused, operands.x);
        for piece in video.pieces(&self.spec, p.n, images, operands) {
            let (n, frames) = (piece.images.len(), piece.frames);
            // SAFETY: the caller's promise; the frames of the piece fit the copy, and their maxima the scratch memory.
            unsafe {
                let x = self.map(&fused, stream, &self.input, piece.x, copy, of_x)?;
                if let Some(max) = &self.frame_max {
                    max.run(stream, of_frames, frames, (x_max, n))?;
                }
                let images = Piece { x, x_max, sums, n, video: Some((initial, frames)) };
                fused.launch(self, stream, packed, piece.operands, images)?;
            }
        }
        Ok(())
    }
}
