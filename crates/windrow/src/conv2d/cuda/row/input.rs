//! What becomes of x before the fused kernel reads it: a copy in channels-last order unless the copy engine can read x
//! itself, and for f32 the largest magnitude of each image (`kernels/pack_input.cu`, `kernels/image_max.cu`).

use super::super::{Divisor, kernel, source, strides};
use super::ALIGNMENT;
use crate::conv2d::{Conv2dSpec, Problem};
use crate::cuda::{Gpu, Kernel, Launch, Source, Stream};
use crate::{DType, Result};

static PACK_INPUT: Source = source!("pack_input.cu");
static IMAGE_MAX: Source = source!("image_max.cu");

/// A copy is made of at most so much at a time.
const STAGING_BYTES: usize = 512 << 20;
/// Pixels that a thread of the copy reads together, and what a block copies.
const VECTOR: usize = 4;
const TILE_PIXELS: usize = 128;
const TILE_BYTES: usize = 64;
const COPY_THREADS: u32 = 128;
/// 16-byte vectors that a block of `image_max.cu` reads.
const MAX_VECTORS: usize = 2048;
const MAX_THREADS: u32 = 256;

#[derive(Debug)]
pub(super) struct Input {
    spec: Conv2dSpec,
    problem: Problem,
    /// The layout of x lets the copy engine read it if its address is aligned.
    pub(super) in_place: bool,
    /// Copies one pixel after the other, and aligned vectors of pixels.
    copy: &'static Kernel,
    copy_vectors: Option<&'static Kernel>,
    /// f32: for x in place.
    image_max: Option<&'static Kernel>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CopyParams {
    x: *const u8,
    out: *mut u8,
    x_max: *mut u8,
    strides: [i64; 4],
    n: i32,
    c: i32,
    h: i32,
    w: i32,
    c_out: i32,
    pixel_tiles: i32,
    channel_tiles: i32,
    w_by: Divisor,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MaxParams {
    x: *const u8,
    x_max: *mut u8,
    x_n: i64,
    x_h: i64,
    x_w: i64,
    vectors: i32,
    blocks: i32,
    row: Divisor,
    pixel: Divisor,
}

impl Input {
    pub(super) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, problem: &Problem) -> Result<Self> {
        let dtype = spec.x.dtype;
        let in_place = copy_engine_reads(spec);
        let copy = |vector: usize| {
            gpu.kernel(&kernel(&PACK_INPUT, "winograd_row_input", dtype).define("VECTOR", vector))
        };
        let max = || gpu.kernel(&kernel(&IMAGE_MAX, "winograd_row_image_max", dtype));
        Ok(Input {
            spec: spec.clone(),
            problem: *problem,
            in_place,
            copy: copy(1)?,
            copy_vectors: pixels_are_vectors(spec).then(|| copy(VECTOR)).transpose()?,
            image_max: (in_place && dtype == DType::F32).then(max).transpose()?,
        })
    }

    /// Channels of the copy.
    pub(super) fn channels(&self) -> usize {
        self.problem.c.next_multiple_of(16 / self.spec.x.dtype.size())
    }

    fn image_bytes(&self) -> usize {
        let p = &self.problem;
        (p.h * p.w * self.channels() * self.spec.x.dtype.size()).next_multiple_of(ALIGNMENT)
    }

    /// Images that are copied at a time. Where the layout allows reading x itself, only an unaligned
    /// address needs the copy.
    pub(super) fn copied_images(&self) -> usize {
        if self.in_place {
            return 1;
        }
        (STAGING_BYTES / self.image_bytes().max(1)).clamp(1, self.problem.n.max(1))
    }

    /// Bytes of the copy.
    pub(super) fn copy_bytes(&self) -> usize {
        self.copied_images() * self.image_bytes()
    }

    /// Bytes of the largest magnitudes.
    pub(super) fn max_bytes(&self) -> usize {
        if self.spec.x.dtype == DType::F32 {
            (self.problem.n * size_of::<u32>()).next_multiple_of(ALIGNMENT)
        } else {
            0
        }
    }

    /// Copies `n` images to channels-last order; for f32 their largest magnitudes go to `x_max`, which holds zeros.
    ///
    /// # Safety
    /// `x` must be images of the spec's layout, `out` memory for their copy.
    pub(super) unsafe fn copy(
        &self,
        stream: &Stream,
        x: *const u8,
        n: usize,
        out: *mut u8,
        x_max: *mut u8,
    ) -> Result<()> {
        let p = &self.problem;
        let size = self.spec.x.dtype.size();
        let pixel_tiles = (p.h * p.w).div_ceil(TILE_PIXELS);
        let channel_tiles = (self.channels() * size).div_ceil(TILE_BYTES);
        let params = CopyParams {
            x,
            out,
            x_max,
            strides: strides(&self.spec.x),
            n: n as i32,
            c: p.c as i32,
            h: p.h as i32,
            w: p.w as i32,
            c_out: self.channels() as i32,
            pixel_tiles: pixel_tiles as i32,
            channel_tiles: channel_tiles as i32,
            w_by: Divisor::new(p.w),
        };
        let aligned = (x as usize).is_multiple_of(VECTOR * size);
        let kernel = self.copy_vectors.filter(|_| aligned).unwrap_or(self.copy);
        let blocks = (n * pixel_tiles * channel_tiles) as u32;
        let launch = Launch { grid: [blocks, 1, 1], block: [COPY_THREADS, 1, 1] };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, launch, &params) }
    }

    /// For x in place: the largest magnitudes of `n` f32 images go to `x_max`, which holds zeros.
    ///
    /// # Safety
    /// `x` must be images of the spec's layout at an address aligned to 16 bytes.
    pub(super) unsafe fn find_max(
        &self,
        stream: &Stream,
        x: *const u8,
        n: usize,
        x_max: *mut u8,
    ) -> Result<()> {
        let (Some(kernel), p) = (self.image_max, &self.problem) else { return Ok(()) };
        let pixel = p.c / 4;
        let vectors = p.h * p.w * pixel;
        let blocks = vectors.div_ceil(MAX_VECTORS);
        let s = strides(&self.spec.x);
        let params = MaxParams {
            x,
            x_max,
            x_n: s[0],
            x_h: s[2],
            x_w: s[3],
            vectors: vectors as i32,
            blocks: blocks as i32,
            row: Divisor::new(p.w * pixel),
            pixel: Divisor::new(pixel),
        };
        let launch = Launch { grid: [(n * blocks) as u32, 1, 1], block: [MAX_THREADS, 1, 1] };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, launch, &params) }
    }
}

/// True if the copy engine can read x in place: channels side by side, all other strides whole vectors. f32 is also read
/// for its largest magnitude, in vectors, of which there must be fewer than 2^30 in an image.
fn copy_engine_reads(spec: &Conv2dSpec) -> bool {
    let (s, shape) = (spec.x.strides(), spec.x.shape());
    let vector = 16 / spec.x.dtype.size();
    let whole =
        |stride: isize| stride > 0 && (stride as usize).is_multiple_of(vector) && stride < 1 << 38;
    let readable = spec.x.dtype != DType::F32
        || shape[1].is_multiple_of(vector) && shape[1] / vector * shape[2] * shape[3] < 1 << 30;
    (s[1] == 1 || shape[1] == 1) && [s[0], s[2], s[3]].into_iter().all(whole) && readable
}

/// True if the pixels of a channel follow each other and are whole vectors where its address is.
fn pixels_are_vectors(spec: &Conv2dSpec) -> bool {
    let (s, shape) = (spec.x.strides(), spec.x.shape());
    let whole = |stride: isize| stride.unsigned_abs().is_multiple_of(VECTOR);
    s[3] == 1
        && s[2] == shape[3] as isize
        && (shape[2] * shape[3]).is_multiple_of(VECTOR)
        && whole(s[0])
        && whole(s[1])
}

#[cfg(test)]
pub(super) fn kernels(dtype: DType) -> Vec<crate::cuda::KernelSpec> {
    let copy = |v| kernel(&PACK_INPUT, "winograd_row_input", dtype).define("VECTOR", v);
    let mut specs = vec![copy(1), copy(VECTOR)];
    if dtype == DType::F32 {
        specs.push(kernel(&IMAGE_MAX, "winograd_row_image_max", dtype));
    }
    specs
}
