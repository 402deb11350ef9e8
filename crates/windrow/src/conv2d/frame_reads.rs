//! The frames that a convolution of videos reads, as methods see it: a convolution of images, each of which is a frame of
//! the output and sums over the frames of the filter.

use super::problem::Frames;
use crate::{Layout, Result, TensorDesc};
use std::ops::Range;

/// The frames that the images of a convolution read. Image `i` reads frame `i * stride + tap * dilation - padding` of a
/// video through each frame `tap` of the filter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FrameReads {
    pub(crate) frames: Frames,
    pub(crate) before: Before,
    /// The strides of a frame of x and of the filter, in elements.
    pub(crate) x: isize,
    pub(crate) filter: isize,
}

/// The frames before the first one. After the last one there are zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Before {
    Zeros,
    /// The first frame.
    First,
    /// So many initial frames, which lie in a tensor of their own with these strides of frame, channel, row, column.
    Initial(usize, [isize; 4]),
}

impl FrameReads {
    /// The frames that a filter of three frames reads of a video of six, for tests of kernels.
    #[cfg(test)]
    pub(crate) const EXAMPLE: Self = FrameReads {
        frames: Frames { t: 6, kt: 3, ot: 6, stride: 1, padding: 1, dilation: 1 },
        before: Before::Zeros,
        x: 1 << 20,
        filter: 9,
    };

    /// The number of initial frames.
    pub(crate) fn initial_count(&self) -> usize {
        if let Before::Initial(count, _) = self.before { count } else { 0 }
    }

    /// The frames of a video with frames that some images read: at least one.
    pub(crate) fn window(&self, images: Range<usize>) -> Range<usize> {
        let Frames { t, kt, stride, padding, dilation, .. } = self.frames;
        let last = images.end.saturating_sub(1) * stride + (kt - 1) * dilation;
        let first = (images.start * stride).saturating_sub(padding).min(t.saturating_sub(1));
        first..(last + 1).saturating_sub(padding).clamp(first + 1, t.max(first + 1))
    }

    /// The frames that are copied for so many images.
    pub(crate) fn copied(&self, images: usize) -> usize {
        (images.saturating_sub(1) * self.frames.stride + self.span()).min(self.frames.t)
    }

    /// The images for which at most so many frames are copied, but at least one.
    pub(crate) fn images_with(&self, copied: usize) -> usize {
        match copied >= self.frames.t {
            true => self.frames.ot,
            false => copied.saturating_sub(self.span()) / self.frames.stride + 1,
        }
    }

    /// The frames that one image reads, with those between them.
    pub(crate) fn span(&self) -> usize {
        (self.frames.kt - 1) * self.frames.dilation + 1
    }

    /// The frames of a video as images, for images like those of `x`.
    ///
    /// # Errors
    /// [`Error::SizeOverflow`](crate::Error::SizeOverflow).
    pub(crate) fn images(&self, x: &TensorDesc) -> Result<TensorDesc> {
        let strides = x.strides();
        of_images(x, self.frames.t, [self.x, strides[1], strides[2], strides[3]])
    }

    /// The initial frames as images of the same type and size; `None` if there are none.
    ///
    /// # Errors
    /// As [`FrameReads::images`].
    pub(crate) fn initial_images(&self, x: &TensorDesc) -> Result<Option<TensorDesc>> {
        let Before::Initial(count, strides) = self.before else { return Ok(None) };
        of_images(x, count, strides).map(Some)
    }
}

/// The tensor of so many images with these strides. A single one has the stride with which another would follow.
fn of_images(like: &TensorDesc, count: usize, mut strides: [isize; 4]) -> Result<TensorDesc> {
    let shape = [count, like.shape()[1], like.shape()[2], like.shape()[3]];
    if count == 1 {
        strides[0] =
            (1..4).map(|d| strides[d].saturating_mul(shape[d] as isize)).max().unwrap_or(0);
    }
    Ok(TensorDesc { dtype: like.dtype, layout: Layout::strided(&shape, &strides)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every window of every convolution of few frames has the frames of the video that its images read, and little else.
    #[test]
    fn windows_have_the_frames_that_images_read() {
        for (t, kt, stride, padding, dilation) in (0..900usize)
            .map(|i| (i % 5 + 1, i / 5 % 5 + 1, i / 25 % 3 + 1, i / 75 % 6, i / 450 + 1))
        {
            let Some(rest) = (t + 2 * padding).checked_sub((kt - 1) * dilation + 1) else {
                continue;
            };
            let frames = Frames { t, kt, ot: rest / stride + 1, stride, padding, dilation };
            let reads = FrameReads { frames, before: Before::Zeros, x: 1, filter: 1 };
            for images in (0..frames.ot).flat_map(|a| (a + 1..=frames.ot).map(move |b| a..b)) {
                let window = reads.window(images.clone());
                assert!(!window.is_empty() && window.end <= t, "{reads:?} {images:?}");
                let read = |image: usize, tap: usize| {
                    (image * stride + tap * dilation).checked_sub(padding).filter(|&f| f < t)
                };
                let read = images.flat_map(|image| (0..kt).filter_map(move |tap| read(image, tap)));
                let read: Vec<usize> = read.collect();
                assert!(read.iter().all(|frame| window.contains(frame)), "{reads:?} {window:?}");
                if !read.is_empty() && dilation == 1 && stride <= kt {
                    assert!(
                        window.clone().all(|frame| read.contains(&frame)),
                        "{reads:?} {window:?}"
                    );
                }
            }
        }
    }
}
