//! What stands between convolutions of a network: the mean of an image, its product with a gate, sums of images, pooling,
//! upsampling and copies. They are no operators: the Python package computes them in one call with the convolutions
//! around them.
//!
//! Images are f32 in channels-last: the channels of a pixel follow each other, and pixels are a distance apart, the
//! *pitch*. It is larger than the number of channels where these are a part of the channels of a larger image.

mod channels_last;
mod pixels;
mod pool;

use self::channels_last::{Interleave, MOST_CHANNELS};
use self::pixels::{Copies, Gates, Scale, Sums};
use self::pool::Pool;
use super::{Isa, SendPtr, dispatch, num_threads, parallel_for};
use crate::{DType, Layout, TensorDesc};

/// An operation of an image [n, c, h, w].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageOperation {
    /// The mean of each channel: [n, c, 1, 1].
    Mean,
    /// The product with the activation of a second value [n, c, 1, 1].
    Gate(Gate),
    /// The largest element of each window. Padding is never the largest, NaN always.
    MaxPool(Window),
    /// The mean of each window, without padding.
    AveragePool(Window),
    /// The sum with a second image.
    Add,
    /// The same image elsewhere.
    Copy,
    /// The image with each row and each column repeated so many times.
    Upsample([usize; 2]),
    /// The copy of a row-major image of few channels: the columns of a channel follow each other, and so do rows.
    ChannelsLast,
}

/// The activation of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// `min(max(x + 3, 0), 6) / 6`
    HardSigmoid,
}

/// The windows of a pooling, with sizes of height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The size.
    pub size: [usize; 2],
    /// The distance of neighbours.
    pub stride: [usize; 2],
    /// The width of padding on either side.
    pub padding: [usize; 2],
}

impl Window {
    /// The number of windows along each dimension. None if there are none, or one would hold padding only.
    fn counts(&self, image: [usize; 2]) -> Option<[usize; 2]> {
        let mut counts = [0; 2];
        for d in 0..2 {
            let (size, padding) = (self.size[d], self.padding[d]);
            if padding > size / 2 {
                return None;
            }
            let starts = (image[d] + 2 * padding).checked_sub(size)?;
            counts[d] = starts.checked_div(self.stride[d])? + 1;
        }
        Some(counts)
    }
}

/// An operation of images of one size.
#[derive(Clone, Copy, Debug)]
pub struct ImageStep {
    operation: ImageOperation,
    n: usize,
    c: usize,
    /// Height and width of an image and of a result.
    image: [usize; 2],
    result: [usize; 2],
    /// The pitches of the image, the second image and the result.
    pitches: [usize; 3],
    y: TensorDesc,
}

/// The bytes of images from which threads share them: fewer are done sooner than other threads begin.
const PARALLEL_FROM: usize = 256 << 10;
/// The bytes of a task.
const TASK: usize = 64 << 10;
/// The pixels of a part of a mean, at most: each part is one sum for each channel, so that rounding errors do not grow
/// with the image. Parts do not depend on the number of threads.
const PART: usize = 1024;

impl ImageStep {
    /// None if the operation takes other tensors than those described. `second` is a gate's or a sum's. `y`: the result;
    /// without it, it has no gaps.
    pub fn new(
        operation: ImageOperation,
        x: &TensorDesc,
        second: Option<&TensorDesc>,
        y: Option<&TensorDesc>,
    ) -> Option<Self> {
        let &[n, c, h, w] = x.shape() else { return None };
        let result = match operation {
            ImageOperation::Mean => [1, 1],
            ImageOperation::Gate(_)
            | ImageOperation::Add
            | ImageOperation::Copy
            | ImageOperation::ChannelsLast => [h, w],
            ImageOperation::Upsample([down, right]) => {
                if down == 0 || right == 0 {
                    return None;
                }
                [h.checked_mul(down)?, w.checked_mul(right)?]
            }
            ImageOperation::MaxPool(window) => window.counts([h, w])?,
            ImageOperation::AveragePool(window) => {
                if window.padding != [0, 0] {
                    return None;
                }
                window.counts([h, w])?
            }
        };
        let shape = [n, c, result[0], result[1]];
        let layout = match operation {
            // PyTorch's strides.
            ImageOperation::Mean => Layout::contiguous(&shape),
            _ => Layout::with_order(&shape, &[0, 2, 3, 1]),
        };
        let y = match y {
            Some(y) if *y.shape() != shape => return None,
            Some(y) => *y,
            None => TensorDesc::new(DType::F32, layout.ok()?),
        };
        let second = match (operation, second) {
            (ImageOperation::Gate(_), Some(gate)) => {
                (gate.shape() == [n, c, 1, 1] && lies_in(gate, [c, 1, c, c])).then_some(c)
            }
            (ImageOperation::Add, Some(image)) if image.shape() == x.shape() => pitch(image),
            (ImageOperation::Gate(_) | ImageOperation::Add, _) | (_, Some(_)) => None,
            (_, None) => Some(c),
        };
        let first = match operation {
            ImageOperation::ChannelsLast => {
                let is_ours = c <= MOST_CHANNELS && lies_in(x, [c * h * w, h * w, w, 1]);
                (is_ours && pitch(&y) == Some(c)).then_some(c)
            }
            _ => pitch(x),
        };
        let pitches = [first?, second?, pitch(&y)?];
        Some(ImageStep { operation, n, c, image: [h, w], result, pitches, y })
    }

    /// The result.
    pub fn y(&self) -> &TensorDesc {
        &self.y
    }

    /// True if the result may be written over `x`.
    pub fn may_be_in_place(&self) -> bool {
        matches!(self.operation, ImageOperation::Gate(_) | ImageOperation::Add)
    }

    /// Computes on the default number of threads, with the fastest instruction set.
    ///
    /// # Safety
    /// `x`, `second` and `y` point to the elements of tensors as described to `new` (`second` is not read without one)
    /// and by [`ImageStep::y`], which no other thread writes to or, of `y`, reads. `y` overlaps neither, but may be `x`
    /// if [`ImageStep::may_be_in_place`].
    pub unsafe fn run(&self, x: *const f32, second: *const f32, y: *mut f32) {
        // SAFETY: passed on.
        unsafe { self.run_on(Isa::best(), num_threads(), x, second, y) }
    }

    /// # Safety
    /// As for [`ImageStep::run`].
    unsafe fn run_on(
        &self,
        isa: Isa,
        threads: usize,
        x: *const f32,
        second: *const f32,
        y: *mut f32,
    ) {
        let pixels = self.image[0] * self.image[1];
        let most = (self.n * pixels * self.c).max(self.y.layout.len());
        let threads = if most * size_of::<f32>() < PARALLEL_FROM { 1 } else { threads };
        if self.y.layout.is_empty() {
            return;
        }
        // SAFETY: passed on.
        unsafe {
            match self.operation {
                ImageOperation::Mean => self.mean(isa, threads, x, y),
                ImageOperation::Gate(gate) => self.gate(isa, threads, gate, x, second, y),
                ImageOperation::MaxPool(window) => self.pool::<true>(isa, threads, window, x, y),
                ImageOperation::AveragePool(window) => {
                    self.pool::<false>(isa, threads, window, x, y)
                }
                ImageOperation::ChannelsLast => self.channels_last(isa, threads, x, y),
                ImageOperation::Add => self.copies(isa, threads, [x, second], y, [1, 1]),
                ImageOperation::Copy => self.copies(isa, threads, [x, std::ptr::null()], y, [1, 1]),
                ImageOperation::Upsample(times) => {
                    self.copies(isa, threads, [x, std::ptr::null()], y, times);
                }
            }
        }
    }

    /// The pixels of a task.
    fn pixels(&self) -> usize {
        (TASK / size_of::<f32>()).div_ceil(self.c.max(1))
    }

    /// # Safety
    /// As for [`ImageStep::run`].
    unsafe fn mean(&self, isa: Isa, threads: usize, x: *const f32, y: *mut f32) {
        let (c, pixels) = (self.c, self.image[0] * self.image[1]);
        let [pitch, _, to_pitch] = self.pitches;
        let part = self.pixels().clamp(64, PART);
        let parts = pixels.div_ceil(part);
        let mut sums = vec![0f32; self.n * parts * c];
        let (x, to) = (SendPtr(x.cast_mut()), SendPtr(sums.as_mut_ptr()));
        parallel_for(threads, self.n * parts, |task| {
            let (image, first) = (task / parts, task % parts * part);
            let at = (image * pixels + first) * pitch;
            // SAFETY: a part of the image, and its own sums.
            let (x, sums) = unsafe { (x.get().add(at), to.get().add(task * c)) };
            dispatch(isa, Sums { x, pitch, sums, pixels: part.min(pixels - first), c });
        });
        for image in 0..self.n {
            for channel in 0..c {
                let part = |part| sums[(image * parts + part) * c + channel];
                let sum: f32 = (0..parts).map(part).sum();
                // SAFETY: an element of the result.
                unsafe { y.add(image * to_pitch + channel).write(sum / pixels as f32) };
            }
        }
    }

    /// # Safety
    /// As for [`ImageStep::run`].
    unsafe fn gate(
        &self,
        isa: Isa,
        threads: usize,
        gate: Gate,
        x: *const f32,
        second: *const f32,
        y: *mut f32,
    ) {
        let (c, pixels) = (self.c, self.image[0] * self.image[1]);
        let mut gates = vec![0f32; self.n * c];
        dispatch(isa, Gates { gate, from: second, to: gates.as_mut_ptr(), len: self.n * c });
        let part = self.pixels();
        let parts = pixels.div_ceil(part);
        let (x, y) = (SendPtr(x.cast_mut()), SendPtr(y));
        parallel_for(threads, self.n * parts, |task| {
            let (image, first) = (task / parts, task % parts * part);
            let (at, pixels) = (image * pixels + first, part.min(pixels - first));
            let gates = gates[image * c..].as_ptr();
            let pitches = [self.pitches[0], self.pitches[2]];
            // SAFETY: a part of both images.
            let (x, y) = unsafe { (x.get().add(at * pitches[0]), y.get().add(at * pitches[1])) };
            dispatch(isa, Scale { x, gates, y, pitches, pixels, c });
        });
    }

    /// The image, or the sum of two, with rows and columns repeated.
    ///
    /// # Safety
    /// As for [`ImageStep::run`].
    unsafe fn copies(
        &self,
        isa: Isa,
        threads: usize,
        [x, second]: [*const f32; 2],
        y: *mut f32,
        times: [usize; 2],
    ) {
        let (rows, width) = (self.n * self.result[0], self.image[1]);
        let part = self.pixels().div_ceil(self.result[1]);
        let (x, second, y) = (SendPtr(x.cast_mut()), SendPtr(second.cast_mut()), SendPtr(y));
        parallel_for(threads, rows.div_ceil(part), |task| {
            let rows = task * part..((task + 1) * part).min(rows);
            let (x, y) = ([x.get().cast_const(), second.get()], y.get());
            dispatch(isa, Copies { x, y, pitches: self.pitches, rows, width, times, c: self.c });
        });
    }

    /// # Safety
    /// As for [`ImageStep::run`].
    unsafe fn channels_last(&self, isa: Isa, threads: usize, x: *const f32, y: *mut f32) {
        let (c, pixels) = (self.c, self.image[0] * self.image[1]);
        let part = self.pixels();
        let parts = pixels.div_ceil(part);
        let (x, y) = (SendPtr(x.cast_mut()), SendPtr(y));
        parallel_for(threads, self.n * parts, |task| {
            let (image, first) = (task / parts, task % parts * part);
            let at = image * pixels * c;
            // SAFETY: a part of both images.
            let (x, y) = unsafe { (x.get().add(at + first), y.get().add(at + first * c)) };
            let len = part.min(pixels - first);
            dispatch(isa, Interleave { x, plane: pixels, y, pixels: len, c });
        });
    }

    /// # Safety
    /// As for [`ImageStep::run`].
    unsafe fn pool<const MAX: bool>(
        &self,
        isa: Isa,
        threads: usize,
        window: Window,
        x: *const f32,
        y: *mut f32,
    ) {
        let (image, result) = (self.image, self.result);
        let rows = self.n * result[0];
        let part = self.pixels().div_ceil(result[1]);
        let (x, y) = (SendPtr(x.cast_mut()), SendPtr(y));
        parallel_for(threads, rows.div_ceil(part), |task| {
            let rows = task * part..((task + 1) * part).min(rows);
            let (x, y) = (x.get().cast_const(), y.get());
            let pitches = [self.pitches[0], self.pitches[2]];
            dispatch(isa, Pool::<MAX> { window, x, y, pitches, image, result, c: self.c, rows });
        });
    }
}

/// The pitch of an image in f32 whose pixels are equally far apart.
fn pitch(desc: &TensorDesc) -> Option<usize> {
    let &[n, c, h, w] = desc.shape() else { return None };
    let counts = [n, c, h, w];
    // Of dimensions of several elements, the pixels that lie between two.
    let between = [h * w, 0, w, 1];
    let distance = |d: usize| usize::try_from(desc.strides()[d]).ok()?.checked_div(between[d]);
    let several = [3, 2, 0].into_iter().find(|&d| counts[d] > 1);
    let pitch = several.map_or(Some(c), distance)?;
    let strides = [h.checked_mul(w)?.checked_mul(pitch)?, 1, w.checked_mul(pitch)?, pitch];
    (pitch >= c && lies_in(desc, strides)).then_some(pitch)
}

/// True for an image in f32 with these strides. Those of dimensions of one element do not matter.
fn lies_in(desc: &TensorDesc, strides: [usize; 4]) -> bool {
    let lies = |d: usize| desc.shape()[d] < 2 || desc.strides()[d] == strides[d] as isize;
    desc.dtype == DType::F32 && (desc.layout.is_empty() || (0..4).all(lies))
}

#[cfg(test)]
mod tests;
