//! The frames of a video that a convolution reads: its images are the frames of the output, and each sums over the frames
//! of the filter.

use crate::Result;
use crate::conv2d::frame_reads::{Before, FrameReads};
use crate::conv2d::problem::Frames;
use crate::lists::collected;
use std::ops::Range;

/// The frames of a filter. Image `i` of the destination reads frame `i * step + offset` of the source through each.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FrameTaps {
    /// The offset of each frame of the filter.
    offsets: Vec<isize>,
    step: usize,
    /// Frames of the source.
    count: usize,
    before: Before,
    /// Strides of a frame of the source and of the filter.
    src: isize,
    filter: isize,
}

/// The place where some images read through one frame of the filter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FrameSource {
    /// True for the tensor of initial frames, in place of the source.
    pub is_initial: bool,
    /// The offset in this tensor of what the first of the images reads.
    pub offset: isize,
    /// Strides of image, channel, row, column.
    pub strides: [isize; 4],
}

impl FrameTaps {
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub(crate) fn new(reads: &FrameReads) -> Result<Self> {
        let &FrameReads { frames, before, x: src, filter } = reads;
        let Frames { t, kt, stride, padding, dilation, .. } = frames;
        let offset = |tap| (tap * dilation) as isize - padding as isize;
        let offsets = collected((0..kt).map(offset))?;
        Ok(FrameTaps { offsets, step: stride, count: t, before, src, filter })
    }

    /// Frames of the filter.
    pub(crate) fn len(&self) -> usize {
        self.offsets.len()
    }

    /// The offset of a frame in the filter.
    pub(crate) fn filter(&self, tap: usize) -> isize {
        tap as isize * self.filter
    }

    /// The numbers, among so many images, of the first one that reads no frame before the first of the source, and of the
    /// first one that reads a frame after the last.
    fn cuts(&self, tap: usize, images: usize) -> [usize; 2] {
        let offset = self.offsets[tap];
        let reach = |frame: isize| ((frame - offset).max(0) as usize).div_ceil(self.step);
        [0, self.count as isize].map(|frame| reach(frame).min(images))
    }

    /// The parts of a range of images among so many, with what each reads through a frame of the filter; `None` for
    /// zeros. `src` has the strides of channel, row and column of the source.
    pub(crate) fn sources(
        &self,
        tap: usize,
        images: usize,
        src: [isize; 3],
    ) -> [(Range<usize>, Option<FrameSource>); 3] {
        let [first, end] = self.cuts(tap, images);
        [0..first, first..end, end..images].map(|part| {
            let source = self.source(tap, part.start, src);
            (part, source)
        })
    }

    /// What an image reads through a frame of the filter, and the images after it that read in the same way.
    pub(crate) fn source(
        &self,
        tap: usize,
        image: usize,
        [channel, row, column]: [isize; 3],
    ) -> Option<FrameSource> {
        let frame = (image * self.step) as isize + self.offsets[tap];
        let (step, is_initial) = (self.step as isize, false);
        let of_source = |frame: isize, step: isize| FrameSource {
            is_initial,
            offset: frame.wrapping_mul(self.src),
            strides: [step.wrapping_mul(self.src), channel, row, column],
        };
        match self.before {
            _ if frame >= self.count as isize => None,
            _ if frame >= 0 => Some(of_source(frame, step)),
            Before::Zeros => None,
            Before::First => Some(of_source(0, 0)),
            Before::Initial(count, [stride, strides @ ..]) => {
                let [channel, row, column] = strides;
                let offset = (count as isize + frame) * stride;
                let strides = [step.wrapping_mul(stride), channel, row, column];
                Some(FrameSource { is_initial: true, offset, strides })
            }
        }
    }

    /// The ranges of images, among so many, each of which reads through every frame of the filter in one way. There is at
    /// least one, if only of no images.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub(crate) fn ranges(&self, images: usize) -> Result<Vec<Range<usize>>> {
        let cuts = (0..self.len()).flat_map(|tap| self.cuts(tap, images));
        let mut cuts = collected(cuts.chain([0, images]))?;
        cuts.sort_unstable();
        cuts.dedup();
        if cuts.len() == 1 {
            cuts.push(images);
        }
        collected(cuts.windows(2).map(|pair| pair[0]..pair[1]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every image of every convolution of few frames, by the definition.
    #[test]
    fn images_read_the_frames_of_the_definition() {
        for (t, kt, stride, padding, dilation) in
            (0..900usize).map(|i| (i % 6, i / 6 % 5 + 1, i / 30 % 3 + 1, i / 90 % 5, i / 450 + 1))
        {
            let padded = t + 2 * padding;
            let Some(rest) = padded.checked_sub((kt - 1) * dilation + 1) else { continue };
            let ot = rest / stride + 1;
            let frames = Frames { t, kt, ot, stride, padding, dilation };
            let initial = Before::Initial(padding, [7, 1, 1, 1]);
            for before in [Before::Zeros, Before::First, initial] {
                let taps =
                    FrameTaps::new(&FrameReads { frames, before, x: 10, filter: 1 }).unwrap();
                let mut covered = 0;
                for range in taps.ranges(ot).unwrap() {
                    assert_eq!(range.start, covered);
                    covered = range.end;
                    for tap in 0..kt {
                        let source = taps.source(tap, range.start, [1; 3]);
                        for image in range.clone() {
                            let step = (image - range.start) as isize;
                            let read =
                                source.map(|s| (s.is_initial, s.offset + step * s.strides[0]));
                            let frame =
                                (image * stride + tap * dilation) as isize - padding as isize;
                            let wanted = match before {
                                _ if frame >= t as isize => None,
                                _ if frame >= 0 => Some((false, frame * 10)),
                                Before::Zeros => None,
                                Before::First => Some((false, 0)),
                                Before::Initial(..) => Some((true, (frame + padding as isize) * 7)),
                            };
                            assert_eq!(read, wanted, "{frames:?} {before:?} {image} {tap}");
                        }
                    }
                }
                assert_eq!(covered, ot);
            }
        }
    }
}
