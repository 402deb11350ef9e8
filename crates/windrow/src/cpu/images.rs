//! What stands between convolutions of a network: the mean of an image, its product with a gate, pooling, and before the
//! first one a copy. They are no operators: the Python package computes them in one call with the convolutions around
//! them.
//!
//! Images are f32 in channels-last without gaps: the channels of a pixel follow each other, and so do pixels.

mod channels_last;

use self::channels_last::{Interleave, MOST_CHANNELS};
use super::math::sigmoid;
use super::{Isa, Kernel, SendPtr, Simd, dispatch, num_threads, parallel_for};
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
    /// None if the operation takes other tensors than those described. `second` is that of a gate.
    pub fn new(
        operation: ImageOperation,
        x: &TensorDesc,
        second: Option<&TensorDesc>,
    ) -> Option<Self> {
        let &[n, c, h, w] = x.shape() else { return None };
        let result = match operation {
            ImageOperation::Mean => [1, 1],
            ImageOperation::Gate(_) | ImageOperation::ChannelsLast => [h, w],
            ImageOperation::MaxPool(window) => window.counts([h, w])?,
            ImageOperation::AveragePool(window) => {
                if window.padding != [0, 0] {
                    return None;
                }
                window.counts([h, w])?
            }
        };
        let fits = match (operation, second) {
            (ImageOperation::Gate(_), Some(gate)) => {
                gate.shape() == [n, c, 1, 1] && lies_in(gate, [c, 1, c, c])
            }
            (ImageOperation::Gate(_), None) | (_, Some(_)) => false,
            (_, None) => true,
        };
        let shape = [n, c, result[0], result[1]];
        let layout = match operation {
            // PyTorch's strides.
            ImageOperation::Mean => Layout::contiguous(&shape),
            _ => Layout::with_order(&shape, &[0, 2, 3, 1]),
        };
        let y = TensorDesc::new(DType::F32, layout.ok()?);
        let lies = match operation {
            ImageOperation::ChannelsLast => {
                c <= MOST_CHANNELS && lies_in(x, [c * h * w, h * w, w, 1])
            }
            _ => lies_in(x, [c * h * w, 1, w * c, c]),
        };
        (fits && lies).then_some(ImageStep { operation, n, c, image: [h, w], result, y })
    }

    /// The result.
    pub fn y(&self) -> &TensorDesc {
        &self.y
    }

    /// True if the result may be written over `x`.
    pub fn may_be_in_place(&self) -> bool {
        matches!(self.operation, ImageOperation::Gate(_))
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
        let threads =
            if self.n * pixels * self.c * size_of::<f32>() < PARALLEL_FROM { 1 } else { threads };
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
        let part = self.pixels().clamp(64, PART);
        let parts = pixels.div_ceil(part);
        let mut sums = vec![0f32; self.n * parts * c];
        let (x, to) = (SendPtr(x.cast_mut()), SendPtr(sums.as_mut_ptr()));
        parallel_for(threads, self.n * parts, |task| {
            let (image, first) = (task / parts, task % parts * part);
            // SAFETY: a part of the image, and its own sums.
            let (x, sums) =
                unsafe { (x.get().add((image * pixels + first) * c), to.get().add(task * c)) };
            dispatch(isa, Sums { x, sums, pixels: part.min(pixels - first), c });
        });
        for image in 0..self.n {
            for channel in 0..c {
                let part = |part| sums[(image * parts + part) * c + channel];
                let sum: f32 = (0..parts).map(part).sum();
                // SAFETY: an element of the result.
                unsafe { y.add(image * c + channel).write(sum / pixels as f32) };
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
            let at = (image * pixels + first) * c;
            let gates = gates[image * c..].as_ptr();
            // SAFETY: a part of both images.
            let (x, y) = unsafe { (x.get().add(at), y.get().add(at)) };
            dispatch(isa, Scale { x, gates, y, pixels: part.min(pixels - first), c });
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
            dispatch(isa, Pool::<MAX> { window, x, y, image, result, c: self.c, rows });
        });
    }
}

/// True for an image in f32 with these strides. Those of dimensions of one element do not matter.
fn lies_in(desc: &TensorDesc, strides: [usize; 4]) -> bool {
    let lies = |d: usize| desc.shape()[d] < 2 || desc.strides()[d] == strides[d] as isize;
    desc.dtype == DType::F32 && (desc.layout.is_empty() || (0..4).all(lies))
}

/// Loads `n <= LANES` elements. # Safety: they are readable.
#[inline(always)]
unsafe fn load<S: Simd>(s: S, from: *const f32, n: usize) -> S::F32 {
    // SAFETY: passed on.
    unsafe { if n < S::LANES { s.load_first(from, n) } else { s.load(from) } }
}

/// Stores `n <= LANES` elements. # Safety: they are writable.
#[inline(always)]
unsafe fn store<S: Simd>(s: S, to: *mut f32, v: S::F32, n: usize) {
    // SAFETY: passed on.
    unsafe { if n < S::LANES { s.store_first(to, v, n) } else { s.store(to, v) } }
}

/// Adds pixels to the sums of their channels.
struct Sums {
    x: *const f32,
    sums: *mut f32,
    pixels: usize,
    c: usize,
}

impl Kernel for Sums {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let c = self.c;
        let mut pixel = 0;
        while pixel < self.pixels {
            let four = self.pixels - pixel >= 4;
            // SAFETY: pixels of the part, whose sums are this task's.
            unsafe {
                let x = self.x.add(pixel * c);
                for i in (0..c).step_by(S::LANES) {
                    let (n, sums) = (S::LANES.min(c - i), self.sums.add(i));
                    let of = |pixel: usize| load(s, x.add(pixel * c + i), n);
                    let sum = match four {
                        true => s.add(s.add(of(0), of(1)), s.add(of(2), of(3))),
                        false => of(0),
                    };
                    store(s, sums, s.add(load(s, sums, n), sum), n);
                }
            }
            pixel += if four { 4 } else { 1 };
        }
    }
}

/// The activations of gates.
struct Gates {
    gate: Gate,
    from: *const f32,
    to: *mut f32,
    len: usize,
}

impl Kernel for Gates {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for i in (0..self.len).step_by(S::LANES) {
            let n = S::LANES.min(self.len - i);
            // SAFETY: elements of the gates.
            unsafe {
                let x = load(s, self.from.add(i), n);
                let y = match self.gate {
                    Gate::Sigmoid => sigmoid(s, x),
                    Gate::HardSigmoid => {
                        let clamped = s.max(s.zero(), s.add(x, s.splat(3.0)));
                        s.div(s.min(s.splat(6.0), clamped), s.splat(6.0))
                    }
                };
                store(s, self.to.add(i), y, n);
            }
        }
    }
}

/// Multiplies the channels of pixels by gates.
struct Scale {
    x: *const f32,
    gates: *const f32,
    y: *mut f32,
    pixels: usize,
    c: usize,
}

impl Kernel for Scale {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for pixel in 0..self.pixels {
            for i in (0..self.c).step_by(S::LANES) {
                let (n, at) = (S::LANES.min(self.c - i), pixel * self.c + i);
                // SAFETY: an element of both images and the gate of its channel.
                unsafe {
                    let gate = load(s, self.gates.add(i), n);
                    store(s, self.y.add(at), s.mul(load(s, self.x.add(at), n), gate), n);
                }
            }
        }
    }
}

/// Rows of pooled pixels. `MAX`: the largest of each window, otherwise their mean.
struct Pool<const MAX: bool> {
    window: Window,
    x: *const f32,
    y: *mut f32,
    image: [usize; 2],
    result: [usize; 2],
    c: usize,
    /// Of all images together.
    rows: std::ops::Range<usize>,
}

impl<const MAX: bool> Kernel for Pool<MAX> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.rows.start..self.rows.end {
            let (image, oh) = (row / self.result[0], row % self.result[0]);
            let (top, bottom) = self.taps(0, oh);
            for ow in 0..self.result[1] {
                let (left, right) = self.taps(1, ow);
                let at = ((image * self.image[0] + top) * self.image[1] + left) * self.c;
                // SAFETY: pixels inside the image, and a pixel of this task.
                unsafe {
                    let x = self.x.add(at);
                    let y = self.y.add((row * self.result[1] + ow) * self.c);
                    self.pixel(s, x, y, [bottom - top, right - left]);
                }
            }
        }
    }
}

impl<const MAX: bool> Pool<MAX> {
    /// The first pixel of a window inside the image, and the one behind its last.
    #[inline(always)]
    fn taps(&self, d: usize, index: usize) -> (usize, usize) {
        let (start, padding) = (index * self.window.stride[d], self.window.padding[d]);
        let end = (start + self.window.size[d]).saturating_sub(padding).min(self.image[d]);
        (start.saturating_sub(padding), end)
    }

    /// # Safety
    /// `taps` rows and columns of pixels are readable from `x` on, and the channels of a pixel writable at `y`.
    #[inline(always)]
    unsafe fn pixel<S: Simd>(&self, s: S, x: *const f32, y: *mut f32, taps: [usize; 2]) {
        let (c, width) = (self.c, self.image[1] * self.c);
        for i in (0..c).step_by(S::LANES) {
            let n = S::LANES.min(c - i);
            let mut sum = s.splat(if MAX { f32::NEG_INFINITY } else { 0.0 });
            for row in 0..taps[0] {
                for column in 0..taps[1] {
                    // SAFETY: promised by the caller.
                    let x = unsafe { load(s, x.add(row * width + column * c + i), n) };
                    sum = match MAX {
                        // The second of `max` if either is NaN.
                        true => s.select(s.is_nan(sum), sum, s.max(sum, x)),
                        false => s.add(sum, x),
                    };
                }
            }
            if !MAX {
                sum = s.div(sum, s.splat((taps[0] * taps[1]) as f32));
            }
            // SAFETY: promised by the caller.
            unsafe { store(s, y.add(i), sum, n) };
        }
    }
}

#[cfg(test)]
mod tests;
