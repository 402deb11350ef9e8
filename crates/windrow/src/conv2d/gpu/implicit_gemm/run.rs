//! The launches of the product, over images or over the frames of a video.

use super::cut::{Factors, corners, lies_like};
use super::parameters::{Params, VideoParams};
use super::product::threads;
use super::{ImplicitGemm, Input};
use crate::Result;
use crate::conv2d::gpu::input::is_aligned;
use crate::conv2d::gpu::prepared::Operands;
use crate::conv2d::gpu::shape::ConvShape;
use crate::conv2d::gpu::shared::frames::FrameParams;
use crate::conv2d::gpu::shared::video_input::VideoInput;
use crate::conv2d::gpu::{Divisor, strides};
use crate::gpu::{Kernel, Launch, Stream, TensorMap, TensorPixels};

/// Images that a launch reads.
struct Images {
    /// Images of y.
    n: usize,
    strides: [i64; 4],
    video: Option<Frames>,
}

/// The frames of a video that a launch reads.
struct Frames {
    /// Frames of x.
    count: usize,
    params: FrameParams,
    /// The initial frames, with their number.
    initial: Option<(*const u8, usize)>,
}

/// What of a video is copied to channels-last.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Copies {
    Nothing,
    InitialFrames,
    All,
}

impl ImplicitGemm {
    /// # Safety
    /// As [`Prepared::run`](super::Prepared::run).
    pub(super) unsafe fn run_images(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
    ) -> Result<()> {
        let out_aligned = operands.is_out_aligned(16);
        let strides_of_x = strides(&self.spec.x);
        let n = self.problem.n;
        let Some(input) = &self.input else {
            let kernel = self.kernel(is_aligned(operands.x) && out_aligned)?;
            let x = Images { n, strides: strides_of_x, video: None };
            // SAFETY: the caller's promise.
            return unsafe { self.launch(stream, kernel, packed, operands, x) };
        };
        let kernel = self.kernel(out_aligned)?;
        if self.copies_nothing(input) && is_aligned(operands.x) {
            let x = Images { n, strides: strides_of_x, video: None };
            // SAFETY: the caller's promise.
            return unsafe { self.launch(stream, kernel, packed, operands, x) };
        }
        let images = input.copied_images();
        for first in (0..n).step_by(images) {
            let n = images.min(n - first);
            let piece = operands.after_images(&self.spec, first);
            let copied = Operands { x: piece.scratch, ..piece };
            let x = Images { n, strides: self.copied_strides(input), video: None };
            // SAFETY: the caller's promise; `n` images fit the copy.
            unsafe {
                self.copy(stream, input, (piece.x, n), piece.scratch)?;
                self.launch(stream, kernel, packed, copied, x)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Prepared::run`](super::Prepared::run).
    pub(super) unsafe fn run_video(
        &self,
        video: &VideoInput,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
    ) -> Result<()> {
        let (n, out_aligned) = (self.problem.n, operands.is_out_aligned(16));
        let initial = operands.initial.map(|at| (at, video.reads.initial_count()));
        let copies = self.copies_of(video, operands.x, operands.initial);
        let in_place = copies == Copies::Nothing;
        let kernel = self.kernel(out_aligned && (self.input.is_some() || in_place))?;
        let copied = self.input.as_ref().filter(|_| copies == Copies::All);
        let images = if copied.is_some() { self.images } else { n };
        let copy = operands.scratch.wrapping_add(video.copy_bytes());
        // Initial frames come first in the scratch memory.
        let initial = match (&video.initial, initial) {
            (Some(input), Some(frames)) if !in_place && self.input.is_some() => {
                // SAFETY: the caller's promise; the initial frames fit their copy.
                unsafe { self.copy(stream, input, frames, operands.scratch)? };
                Some((operands.scratch.cast_const(), frames.1))
            }
            _ => initial,
        };
        for piece in video.pieces(&self.spec, n, images, operands) {
            let (at, count) = piece.x;
            let (x, strides, params) = match (&self.input, copied) {
                (_, Some(input)) => {
                    let strides = self.copied_strides(input);
                    let params = piece.frames.copied(strides, operands.scratch);
                    (copy.cast_const(), strides, params)
                }
                (Some(input), None) if !in_place => {
                    let of_initial = self.copied_strides(input);
                    let params = piece.frames.with_initial(of_initial, operands.scratch);
                    (at, strides(&self.spec.x), params)
                }
                _ => (at, strides(&self.spec.x), piece.frames),
            };
            let video = Some(Frames { count, params, initial });
            let images = Images { n: piece.images.len(), strides, video };
            let piece_operands = Operands { x, ..piece.operands };
            // SAFETY: the caller's promise; the frames of a piece fit the copy.
            unsafe {
                if let Some(input) = copied {
                    self.copy(stream, input, (at, count), copy)?;
                }
                self.launch(stream, kernel, packed, piece_operands, images)?;
            }
        }
        Ok(())
    }

    /// What is copied of x and the initial frames at these addresses. What is not is read where it lies, in three products
    /// by vectors.
    pub(super) fn copies_of(
        &self,
        video: &VideoInput,
        x: *const u8,
        initial: Option<*const u8>,
    ) -> Copies {
        let reads_x = self.input.as_ref().is_none_or(|input| self.copies_nothing(input));
        if !reads_x || !is_aligned(x) {
            return Copies::All;
        }
        let likewise = lies_like(&self.spec.x, &video.reads, self.cut.vector());
        if likewise && initial.is_none_or(is_aligned) && video.reads_in_place(initial) {
            return Copies::Nothing;
        }
        // A copy lies like this x.
        let lies_like_copy = |input| self.copied_strides(input)[1..] == strides(&self.spec.x)[1..];
        let only_initial = self.input.as_ref().is_some_and(lies_like_copy);
        if only_initial { Copies::InitialFrames } else { Copies::All }
    }

    /// # Safety
    /// `x` must be so many images of the input, and `to` memory for their copy.
    unsafe fn copy(
        &self,
        stream: &Stream,
        input: &Input,
        (x, n): (*const u8, usize),
        to: *mut u8,
    ) -> Result<()> {
        if self.problem.h * self.problem.w == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { input.copy(stream, x, n, to, std::ptr::null_mut()) }
    }

    /// The strides of a copy.
    fn copied_strides(&self, input: &Input) -> [i64; 4] {
        let p = &self.problem;
        let [c, row] = [input.channels(), input.channels() * p.w].map(|stride| stride as i64);
        [row * p.h as i64, 1, row, c]
    }

    /// # Safety
    /// As [`Prepared::run`](super::Prepared::run), for these images.
    unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: &'static Kernel,
        packed: *const u8,
        operands: Operands,
        x: Images,
    ) -> Result<()> {
        let (p, unit) = (&self.problem, self.cut.unit(&self.problem));
        let k_blocks = self.cut.k_blocks(p);
        let pixels = x.n * self.image_pixels;
        let tiles = pixels.div_ceil(self.cut.pixels) * k_blocks;
        let map = match self.cut.maps {
            true => {
                let count = x.video.as_ref().map_or(x.n, |video| video.count);
                self.map(operands.x, count, x.strides)?
            }
            false => TensorMap::NONE,
        };
        let shape = ConvShape::new(&self.spec, p, [&self.spec.x, &self.spec.y], &operands);
        let params = Params {
            base: ConvShape { x_strides: x.strides, ..shape },
            map,
            filter: packed,
            filter_inverse: packed.wrapping_add(self.filter_bytes()),
            pixels: pixels as i32,
            r: (p.frames.kt * p.r) as i32,
            group_c: p.c_group() as i32,
            unit_k: unit.k as i32,
            steps: self.cut.steps(p) as i32,
            tiles: tiles as i32,
            image_pixels: Divisor::new(self.image_pixels.max(1)),
            pitch: Divisor::new(self.cut.pitch(p).max(1)),
            k_blocks: Divisor::new(k_blocks),
            unit_blocks: Divisor::new(unit.blocks),
            group_k: Divisor::new(p.k_group()),
            c: Divisor::new(self.cut.term_channels(p)),
            s: Divisor::new(p.s),
        };
        let threads = threads(self.cut);
        // Blocks stay for all tiles. A cluster for which there is no room would begin when the others have ended.
        let clusters = match self.cut.parts {
            1 => self.gpu.info.multiprocessors as usize,
            parts => kernel.clusters(parts, threads)?,
        };
        let launch = Launch::line(self.cut.launched(clusters, tiles), threads);
        let Some(Frames { params: frames, initial, .. }) = x.video else {
            // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
            return unsafe { kernel.launch(stream, launch, &params) };
        };
        let initial_map = match initial {
            Some((at, count)) if self.cut.maps => self.map(at, count, frames.initial_strides())?,
            _ => TensorMap::NONE,
        };
        let (frame_r, all_c) = (Divisor::new(p.r), p.c as i32);
        let params = VideoParams { base: params, initial_map, frames, frame_r, all_c };
        // SAFETY: as above.
        unsafe { kernel.launch(stream, launch, &params) }
    }

    /// The copy engine's description of so many images.
    fn map(&self, address: *const u8, n: usize, strides: [i64; 4]) -> Result<TensorMap> {
        let p = &self.problem;
        let reach = self.cut.pitch(p) - p.ow;
        let [first, last] = corners(p, reach).map(|corner| corner.map(|at| at as i32));
        let pixels = TensorPixels {
            dtype: self.spec.x.dtype,
            address,
            dims: [p.c, p.w, p.h, n],
            // That of a dimension of one element is 0 here.
            strides: [strides[3], strides[2], strides[0]].map(|s| (s as usize).max(p.c)),
            first,
            last,
            step: [p.stride[1] as u32, p.stride[0] as u32],
            pixels: self.cut.step_pixels(),
            channels: self.cut.step_channels(),
            tf32: self.cut.factors == Factors::Tf32,
        };
        TensorMap::of_pixels(self.gpu, &pixels)
    }
}
