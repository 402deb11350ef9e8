//! The frames of a video as images that are read in place or copied.

use super::frames::FrameParams;
use super::input::{Input, copy_engine_reads, is_aligned, most_images};
use crate::Result;
use crate::conv2d::frame_reads::FrameReads;
use crate::conv2d::gpu::Operands;
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::Gpu;
use std::ops::Range;

/// The largest number of images of y that are computed together if x is copied, within `bytes` for the copy, if that is
/// given. `spec` has what is read: images, or the frames of a video. Of these at least twice as many are copied as an image
/// reads, because pieces copy the frames that they share once each.
pub(crate) fn images_at_once(
    spec: &Conv2dSpec,
    reads: Option<&FrameReads>,
    bytes: Option<usize>,
) -> usize {
    let most = most_images(spec, bytes);
    let Some(reads) = reads else { return most };
    let least = if bytes.is_some() || copy_engine_reads(spec) { 1 } else { 2 * reads.span() };
    reads.images_with(most.max(least))
}

/// The frames of a video, of which the initial ones are images of their own.
#[derive(Debug)]
pub(crate) struct VideoInput {
    pub(crate) reads: FrameReads,
    pub(crate) initial: Option<Input>,
}

/// The images of y that are computed together, and the frames of x that they read.
pub(crate) struct VideoPiece {
    pub(crate) images: Range<usize>,
    /// The first frame and their number.
    pub(crate) x: (*const u8, usize),
    pub(crate) frames: FrameParams,
    /// Those of a run, for these images of y.
    pub(crate) operands: Operands,
}

impl VideoInput {
    pub(crate) fn new(
        gpu: &'static Gpu,
        (spec, p): (&Conv2dSpec, &Problem),
        reads: FrameReads,
    ) -> Result<Self> {
        let initial = reads.initial_images(&spec.x)?.map(|x| {
            let spec = Conv2dSpec { x, ..spec.clone() };
            Input::new(gpu, &spec, p, reads.initial_count())
        });
        Ok(VideoInput { reads, initial: initial.transpose()? })
    }

    /// As [`Input::with_max`], for initial frames.
    pub(crate) fn with_max(self, gpu: &'static Gpu) -> Result<Self> {
        let initial = self.initial.map(|input| input.with_max(gpu)).transpose()?;
        Ok(VideoInput { initial, ..self })
    }

    /// Bytes of the copy of the initial frames.
    pub(crate) fn copy_bytes(&self) -> usize {
        self.initial.as_ref().map_or(0, Input::copy_bytes)
    }

    /// True if the initial frames at this address are not copied.
    pub(crate) fn reads_in_place(&self, initial: Option<*const u8>) -> bool {
        let reads = |input: &Input, at| input.in_place && is_aligned(at);
        self.initial.as_ref().zip(initial).is_none_or(|(input, at)| reads(input, at))
    }

    /// The pieces of `n` images of y, at most `images` of them together.
    pub(crate) fn pieces(
        &self,
        spec: &Conv2dSpec,
        n: usize,
        images: usize,
        operands: Operands,
    ) -> impl Iterator<Item = VideoPiece> {
        let (reads, spec) = (self.reads, spec.clone());
        let all = FrameParams::new(Some(&reads), operands.initial, 0);
        (0..n).step_by(images).map(move |first| {
            let images = first..n.min(first + images);
            let window = reads.window(images.clone());
            let bytes = reads.x.wrapping_mul((window.start * spec.x.dtype.size()) as isize);
            VideoPiece {
                images,
                x: (operands.x.wrapping_offset(bytes), window.len()),
                frames: all.piece(first, window.start, window.len()),
                operands: operands.after_images(&spec, first),
            }
        })
    }
}
