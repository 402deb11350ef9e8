//! Preparation of x for kernels that read whole vectors of its channels: a channels-last copy, unless x can be read in
//! place (`pack_input.cu`), and for f32 the largest magnitude of each image.

use crate::conv2d::gpu::ALIGNMENT;
use crate::conv2d::gpu::split::ImageMax;
use crate::conv2d::gpu::{Divisor, kernel, source, strides};
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::{DType, Result};

static PACK_INPUT: Source = source!("pack_input.cu");

/// A copy is made of at most so much at a time.
const STAGING_BYTES: usize = 512 << 20;
/// The number of pixels that a thread of the copy reads together, and the pixels and bytes that a block copies.
pub(crate) const VECTOR: usize = 4;
pub(crate) const TILE_PIXELS: usize = 128;
pub(crate) const TILE_BYTES: usize = 64;
const COPY_THREADS: usize = 128;

#[derive(Debug)]
pub(crate) struct Input {
    spec: Conv2dSpec,
    problem: Problem,
    /// The layout of x lets the copy engine read it if its address is aligned.
    pub(crate) in_place: bool,
    /// Copies one pixel after the other, and aligned vectors of pixels.
    copy: &'static Kernel,
    copy_vectors: Option<&'static Kernel>,
    /// Images that are copied at a time.
    images: usize,
    /// For x in place.
    image_max: Option<ImageMax>,
}

params! {
    struct CopyParams {
        x: *const u8,
        out: *mut u8,
        x_max: *mut u8,
        strides as [x_n, x_c, x_h, x_w]: [i64; 4],
        n: i32,
        c: i32,
        h: i32,
        w: i32,
        c_out: i32,
        pixel_tiles: i32,
        channel_tiles: i32,
        w_by: Divisor,
    }
}

impl Input {
    pub(crate) fn new(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        images: usize,
    ) -> Result<Self> {
        let dtype = spec.x.dtype;
        let in_place = copy_engine_reads(spec);
        let copy = |vector: usize| gpu.kernel(&copy_kernel(dtype, vector));
        Ok(Input {
            spec: spec.clone(),
            problem: *problem,
            in_place,
            images,
            copy: copy(1)?,
            copy_vectors: pixels_are_vectors(spec).then(|| copy(VECTOR)).transpose()?,
            image_max: None,
        })
    }

    /// Finds the largest magnitudes of images that are read in place, too: those of f32 are scaled by them.
    pub(crate) fn with_max(self, gpu: &'static Gpu) -> Result<Self> {
        let finds = self.in_place && self.spec.x.dtype == DType::F32;
        let image_max = finds.then(|| ImageMax::new(gpu, &self.spec.x)).transpose()?;
        Ok(Input { image_max, ..self })
    }

    /// Channels of the copy.
    pub(crate) fn channels(&self) -> usize {
        channels(&self.spec)
    }

    /// The strides of the images.
    pub(crate) fn strides(&self) -> &[isize] {
        self.spec.x.strides()
    }

    /// Images that are copied at a time.
    pub(crate) fn copied_images(&self) -> usize {
        self.images
    }

    /// Bytes of the copy.
    pub(crate) fn copy_bytes(&self) -> usize {
        self.images * image_bytes(&self.spec)
    }

    /// Copies `n` images to channels-last order; for f32 their largest magnitudes go to `x_max` unless
    /// it is null.
    ///
    /// # Safety
    /// `x` must be images of the spec's layout, `out` memory for their copy, `x_max` `n` words for f32
    /// or null.
    pub(crate) unsafe fn copy(
        &self,
        stream: &Stream,
        x: *const u8,
        n: usize,
        out: *mut u8,
        x_max: *mut u8,
    ) -> Result<()> {
        let p = &self.problem;
        let size = self.spec.x.dtype.size();
        if self.spec.x.dtype == DType::F32 && !x_max.is_null() {
            // SAFETY: the caller's promise.
            unsafe { stream.zero(x_max, n * size_of::<u32>())? };
        }
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
        let launch = Launch::line(n * pixel_tiles * channel_tiles, COPY_THREADS);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, launch, &params) }
    }

    /// Writes the largest magnitudes of the `n` f32 images of x to `x_max`, if x is read in place.
    ///
    /// # Safety
    /// As [`ImageMax::run`].
    pub(crate) unsafe fn find_max(
        &self,
        stream: &Stream,
        x: *const u8,
        n: usize,
        x_max: *mut u8,
    ) -> Result<()> {
        let Some(image_max) = &self.image_max else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe { image_max.run(stream, x, n, x_max) }
    }
}

/// True if vectors can be read at this address.
pub(crate) fn is_aligned(x: *const u8) -> bool {
    x.addr().is_multiple_of(16)
}

/// Channels of the copy.
fn channels(spec: &Conv2dSpec) -> usize {
    spec.x.shape()[1].next_multiple_of(16 / spec.x.dtype.size())
}

/// Bytes of the copy of an image.
pub(crate) fn image_bytes(spec: &Conv2dSpec) -> usize {
    let [h, w] = [spec.x.shape()[2], spec.x.shape()[3]];
    (h * w * channels(spec) * spec.x.dtype.size()).next_multiple_of(ALIGNMENT)
}

/// The largest number of images to copy at a time within `bytes`, if that is given. If the layout allows reading x in
/// place, only an unaligned address needs the copy.
pub(crate) fn most_images(spec: &Conv2dSpec, bytes: Option<usize>) -> usize {
    if copy_engine_reads(spec) {
        return 1;
    }
    let bytes = bytes.unwrap_or(STAGING_BYTES).min(STAGING_BYTES);
    (bytes / image_bytes(spec).max(1)).clamp(1, spec.x.shape()[0].max(1))
}

/// True if the copy engine can read x in place: channels side by side, all other strides whole vectors. f32 is also read
/// for its largest magnitude.
pub(crate) fn copy_engine_reads(spec: &Conv2dSpec) -> bool {
    let (s, shape) = (spec.x.strides(), spec.x.shape());
    let vector = 16 / spec.x.dtype.size();
    let whole =
        |stride: isize| stride > 0 && (stride as usize).is_multiple_of(vector) && stride < 1 << 38;
    let readable = spec.x.dtype != DType::F32 || ImageMax::supports(&spec.x);
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

/// The kernel that copies so many elements together. Every [`Input`] has that for single ones.
pub(crate) fn copy_kernel(dtype: DType, vector: usize) -> KernelSpec {
    kernel(&PACK_INPUT, "winograd_row_input", dtype).define("VECTOR", vector).params::<CopyParams>()
}

#[cfg(test)]
pub(crate) fn kernels(dtype: DType) -> Vec<KernelSpec> {
    vec![copy_kernel(dtype, 1), copy_kernel(dtype, VECTOR)]
}
