//! The frames of a video for kernels (`Frames` of `conv2d.cuh`), the maxima of those that each image reads
//! (`frame_max.cu`), and the state after the last one (`final_frames.cu`).

use super::parameters::{kernel, one_thread_each};
use super::source;
use crate::conv2d::Problem;
use crate::conv2d::frame_reads::{Before, FrameReads};
use crate::conv2d::spec::is_channels_last;
use crate::gpu::{Gpu, Kernel, KernelSpec, Source, Stream, params};
use crate::{DType, Result, TensorDesc};

static FINAL_FRAMES: Source = source!("final_frames.cu");
static FRAME_MAX: Source = source!("frame_max.cu");

/// The frames that the images of a convolution read; `Frames` of `conv2d.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameParams {
    initial: *const u8,
    x_t: i64,
    /// Of a frame, channel, row and column.
    initial_strides: [i64; 4],
    filter_t: i64,
    t: i32,
    kt: i32,
    stride: i32,
    padding: i32,
    dilation: i32,
    repeats: i32,
    initial_count: i32,
}

impl FrameParams {
    /// Those of a convolution of images, whose kernels do not read them.
    pub(crate) const NONE: Self = FrameParams {
        initial: std::ptr::null(),
        x_t: 0,
        initial_strides: [0; 4],
        filter_t: 0,
        t: 1,
        kt: 1,
        stride: 1,
        padding: 0,
        dilation: 1,
        repeats: 0,
        initial_count: 0,
    };

    /// The frames of a video, if it is one, of which the initial ones are at this address. Frames of the packed filter are
    /// `filter` elements apart.
    pub(crate) fn new(
        reads: Option<&FrameReads>,
        initial: Option<*const u8>,
        filter: usize,
    ) -> Self {
        let Some(reads) = reads else { return Self::NONE };
        let f = &reads.frames;
        let (initial, initial_count, initial_strides) = match (reads.before, initial) {
            (Before::Initial(count, strides), Some(at)) => (at, count, strides.map(|s| s as i64)),
            _ => (std::ptr::null(), 0, [0; 4]),
        };
        FrameParams {
            initial,
            x_t: reads.x as i64,
            initial_strides,
            filter_t: filter as i64,
            t: f.t as i32,
            kt: f.kt as i32,
            stride: f.stride as i32,
            padding: f.padding as i32,
            dilation: f.dilation as i32,
            repeats: i32::from(reads.before == Before::First),
            initial_count: initial_count as i32,
        }
    }

    /// The same for the images from `first` on and for the frames from `frame` on, of which there are `count`. Initial
    /// frames are read if `frame` is 0.
    pub(crate) fn piece(self, first: usize, frame: usize, count: usize) -> Self {
        let padding = self.padding - first as i32 * self.stride + frame as i32;
        FrameParams { padding, t: count as i32, ..self }
    }

    /// The same for copies of x and of the initial frames, of which the latter are at `initial`, with strides of image,
    /// channel, row and column.
    pub(crate) fn copied(self, strides: [i64; 4], initial: *const u8) -> Self {
        FrameParams { x_t: strides[0], ..self.with_initial(strides, initial) }
    }

    /// The same for a copy of the initial frames alone.
    pub(crate) fn with_initial(self, strides: [i64; 4], initial: *const u8) -> Self {
        FrameParams { initial_strides: strides, initial, ..self }
    }

    /// The strides of the initial frames, of frame, channel, row and column.
    pub(crate) fn initial_strides(&self) -> [i64; 4] {
        self.initial_strides
    }

    /// The kernel with the loop over frames, if it reads a video.
    pub(crate) fn defined(kernel: KernelSpec, reads: Option<&FrameReads>) -> KernelSpec {
        match reads {
            Some(_) => kernel.define("FRAMES", 1),
            None => kernel,
        }
    }
}

params! {
    struct FinalParams {
        x: *const u8,
        to: *mut u8,
        x_strides as [x_n, x_c, x_h, x_w]: [i64; 4],
        to_strides as [to_n, to_c, to_t, to_h, to_w]: [i64; 5],
        initial_n: i64,
        elements: i64,
        c: i32,
        h: i32,
        w: i32,
        frames: FrameParams,
    }
}

/// The kernel that writes the frames after which a video goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FinalFrames {
    kernel: &'static Kernel,
    /// [n, c, t, h, w] of x, of the initial frames and of the final ones.
    strides: [[i64; 5]; 3],
    reads: FrameReads,
    /// n, c, h, w
    shape: [usize; 4],
}

impl FinalFrames {
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend).
    pub(crate) fn new(
        gpu: &'static Gpu,
        p: &Problem,
        before: Before,
        (x, initial): (&TensorDesc, Option<&TensorDesc>),
        last: &TensorDesc,
    ) -> Result<Self> {
        let strides = |desc: &TensorDesc| std::array::from_fn(|d| desc.strides()[d] as i64);
        let reads = FrameReads { frames: p.frames, before, x: x.strides()[2], filter: 0 };
        Ok(FinalFrames {
            kernel: gpu.kernel(&final_kernel(last.dtype, is_channels_last(&last.layout)))?,
            strides: [strides(x), initial.map_or([0; 5], strides), strides(last)],
            reads,
            shape: [p.n, p.c, p.h, p.w],
        })
    }

    /// Writes the final frames to `to`, which may be the memory of the initial ones, with the same strides.
    ///
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend).
    ///
    /// # Safety
    /// The addresses must be those of tensors of these strides on the stream's GPU.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        x: *const u8,
        initial: Option<*const u8>,
        to: *mut u8,
    ) -> Result<()> {
        let [n, c, h, w] = self.shape;
        let elements = n * c * h * w;
        if elements == 0 || self.reads.frames.padding == 0 {
            return Ok(());
        }
        let [[x_n, x_c, _, x_h, x_w], [initial_n, ..], to_strides] = self.strides;
        let params = FinalParams {
            x,
            to,
            x_strides: [x_n, x_c, x_h, x_w],
            to_strides,
            initial_n,
            elements: elements as i64,
            c: c as i32,
            h: h as i32,
            w: w as i32,
            frames: FrameParams::new(Some(&self.reads), initial, 0),
        };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel.launch(stream, one_thread_each(elements), &params) }
    }
}

fn final_kernel(dtype: DType, channels_inner: bool) -> KernelSpec {
    kernel(&FINAL_FRAMES, "final_frames", dtype)
        .define("CHANNELS_INNER", i32::from(channels_inner))
        .params::<FinalParams>()
}

params! {
    struct MaxParams {
        of_frames: *const u8,
        of_images: *mut u8,
        n: i32,
        frames: FrameParams,
    }
}

/// The kernel that finds the largest magnitude of the frames that an image reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameMax(&'static Kernel);

impl FrameMax {
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend).
    pub(crate) fn new(gpu: &'static Gpu) -> Result<Self> {
        gpu.kernel(&max_kernel()).map(FrameMax)
    }

    /// Writes the maxima of `n` images. Those of the initial frames come first in `of_frames`, then those of x.
    ///
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend).
    ///
    /// # Safety
    /// The addresses must be those of so many words on the stream's GPU.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        of_frames: *const u8,
        frames: FrameParams,
        (of_images, n): (*mut u8, usize),
    ) -> Result<()> {
        let params = MaxParams { of_frames, of_images, n: n as i32, frames };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.0.launch(stream, one_thread_each(n), &params) }
    }
}

fn max_kernel() -> KernelSpec {
    kernel(&FRAME_MAX, "frame_max", DType::F32).params::<MaxParams>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compile_without_spills() {
        let types = [DType::F32, DType::F16, DType::BF16];
        let kernels = types.map(|dtype| [false, true].map(|inner| final_kernel(dtype, inner)));
        crate::gpu::compile_tests::check_compiles(kernels.as_flattened());
        crate::gpu::compile_tests::check_compiles(&[max_kernel()]);
    }
}
