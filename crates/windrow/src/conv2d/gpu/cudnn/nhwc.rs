//! Layout changes around cuDNN's channels-last kernels for NCHW tensors: a channels-last copy of x, the filter in that
//! order (kept as a packed filter), and sums that are written back in NCHW with bias, residual and activation
//! (`turn_filter.cu`, `turn_output.cu`). Without this, cuDNN converts all three on each call.

use crate::conv2d::gpu::facts::has_vectors;
use crate::conv2d::gpu::input::{Input, TILE_BYTES, TILE_PIXELS, VECTOR, most_images};
use crate::conv2d::gpu::shape::Output;
use crate::conv2d::gpu::{ALIGNMENT, Operands, Seen, kernel, source, with_epilogue};
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::{Accuracy, DType, Result};

static FILTER: Source = source!("turn_filter.cu");
static OUTPUT: Source = source!("turn_output.cu");

const THREADS: usize = 128;
/// Vectors of channels by taps that a block holds of a filter.
const MAX_TAPS: usize = 1024;

#[derive(Debug)]
pub(crate) struct NhwcConversion {
    spec: Conv2dSpec,
    problem: Problem,
    input: Input,
    /// Writes one pixel after the other, and aligned vectors of pixels.
    output: &'static Kernel,
    output_vectors: Option<&'static Kernel>,
}

params! {
    struct FilterParams {
        w: *const u8,
        packed: *mut u8,
        seen: Seen,
        c: i32,
        taps: i32,
        chunk: i32,
    }
}

params! {
    struct OutputParams: Output {
        sums: *const u8,
        pixels: i32,
        pixel_tiles: i32,
        channel_tiles: i32,
    }
}

/// A dense filter [k, c, r, s] copied to [k, r, s, c], unless the same filter was copied before.
#[derive(Debug)]
pub(crate) struct NhwcFilter {
    kernel: &'static Kernel,
    /// Elements of 16 bytes.
    vector: usize,
    problem: Problem,
}

impl NhwcFilter {
    /// `None` if a block cannot hold all taps of some channels, or if the filter lies in another order.
    pub(crate) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Result<Option<Self>> {
        let dtype = spec.w.dtype;
        if !spec.w.layout.is_contiguous() || !(1..=MAX_TAPS).contains(&(p.r * p.s)) {
            return Ok(None);
        }
        let kernel = gpu.kernel(&filter_kernel(dtype))?;
        Ok(Some(NhwcFilter { kernel, vector: 16 / dtype.size(), problem: *p }))
    }

    /// Bytes of the checksums that are stored after a packed filter: see [`Seen`].
    pub(crate) fn seen_bytes(&self) -> usize {
        self.problem.k * Seen::DIGEST
    }

    /// # Safety
    /// As [`super::Prepared::pack`], with what `seen` names.
    pub(crate) unsafe fn pack(
        &self,
        stream: &Stream,
        w: *const u8,
        packed: *mut u8,
        seen: Seen,
    ) -> Result<()> {
        let p = &self.problem;
        let params = FilterParams {
            w,
            packed,
            seen,
            c: p.c_group() as i32,
            taps: (p.r * p.s) as i32,
            chunk: (MAX_TAPS / (p.r * p.s) * self.vector) as i32,
        };
        let launch = Launch::line(p.k, 256);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel.launch(stream, launch, &params) }
    }
}

impl NhwcConversion {
    /// True for dense NCHW tensors that cuDNN would transpose, because its kernels on tensor cores, which compute one
    /// product, exist only for channels-last tensors, except for plain matrix products.
    pub(crate) fn suits(spec: &Conv2dSpec, p: &Problem) -> bool {
        let dense = spec.x.layout.is_contiguous() && spec.y.layout.is_contiguous();
        let one_product = spec.x.dtype != DType::F32 || spec.accuracy >= Accuracy::Tf32;
        let plain = p.r * p.s == 1 && p.stride == [1, 1] && p.padding == [0, 0];
        dense && one_product && !plain && has_vectors(spec, p) && most_images(spec, None) >= p.n
    }

    pub(crate) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Result<Self> {
        let output = |vector| gpu.kernel(&output_kernel(spec, vector));
        let whole = (p.oh * p.ow).is_multiple_of(VECTOR);
        Ok(NhwcConversion {
            spec: spec.clone(),
            problem: *p,
            input: Input::new(gpu, spec, p, p.n)?,
            output: output(1)?,
            output_vectors: whole.then(|| output(VECTOR)).transpose()?,
        })
    }

    /// Bytes of scratch memory of a run: the copy of x, with the magnitudes that it finds in f32, and sums.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.copy_bytes() + self.max_bytes() + self.sums_bytes()
    }

    fn copy_bytes(&self) -> usize {
        self.input.copy_bytes().next_multiple_of(ALIGNMENT)
    }

    fn max_bytes(&self) -> usize {
        let is_f32 = usize::from(self.spec.x.dtype == DType::F32);
        (is_f32 * self.problem.n * size_of::<u32>()).next_multiple_of(ALIGNMENT)
    }

    fn sums_bytes(&self) -> usize {
        let elements = self.problem.y_shape().iter().product::<usize>();
        (elements * self.spec.y.dtype.size()).next_multiple_of(ALIGNMENT)
    }

    /// Copies x to channels-last, lets `convolve` write channels-last sums of it, and transposes the sums to y.
    ///
    /// # Safety
    /// As [`super::Prepared::run`], with [`NhwcConversion::scratch_bytes`] of scratch memory; `convolve` must write all sums.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        operands: Operands,
        convolve: impl FnOnce(*const u8, *mut u8) -> Result<()>,
    ) -> Result<()> {
        let (p, scratch) = (&self.problem, operands.scratch);
        let x_max = scratch.wrapping_add(self.copy_bytes());
        let sums = x_max.wrapping_add(self.max_bytes());
        // SAFETY: the caller's promise.
        unsafe { self.input.copy(stream, operands.x, p.n, scratch, x_max)? };
        convolve(scratch, sums)?;
        let (pixels, size) = (p.oh * p.ow, self.spec.y.dtype.size());
        let pixel_tiles = pixels.div_ceil(TILE_PIXELS);
        let channel_tiles = (p.k * size).div_ceil(TILE_BYTES);
        let params = OutputParams {
            base: Output::new(&self.spec, &self.spec.y, &operands),
            sums,
            pixels: pixels as i32,
            pixel_tiles: pixel_tiles as i32,
            channel_tiles: channel_tiles as i32,
        };
        let aligned = operands.is_out_aligned(VECTOR * size);
        let kernel = self.output_vectors.filter(|_| aligned).unwrap_or(self.output);
        let launch = Launch::line(p.n * pixel_tiles * channel_tiles, THREADS);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, launch, &params) }
    }
}

fn filter_kernel(dtype: DType) -> KernelSpec {
    kernel(&FILTER, "turn_filter", dtype).params::<FilterParams>()
}

fn output_kernel(spec: &Conv2dSpec, vector: usize) -> KernelSpec {
    let named = kernel(&OUTPUT, "turn_output", spec.y.dtype)
        .define("VECTOR", vector)
        .params::<OutputParams>();
    with_epilogue(named, spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::Conv2dParams;
    use crate::conv2d::gpu::{test_specs, with_largest_epilogue};
    use crate::{Layout, TensorDesc};

    #[test]
    fn kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for spec in test_specs() {
            kernels.push(filter_kernel(spec.w.dtype));
            for vector in [1, VECTOR] {
                kernels.push(output_kernel(&spec, vector));
                kernels.push(output_kernel(&with_largest_epilogue(spec.clone()), vector));
            }
        }
        crate::gpu::compile_tests::check_compiles(&kernels);
    }

    #[test]
    fn single_products_that_are_no_plain_matrices_are_converted() {
        let suits_in = |order: &[usize], dtype, accuracy, [n, c, k, taps]: [usize; 4], stride| {
            let layout = Layout::with_order(&[n, c, 16, 16], order).unwrap();
            let x = TensorDesc { dtype, layout };
            let w = TensorDesc::contiguous(dtype, &[k, c, taps, taps]).unwrap();
            let params = Conv2dParams { accuracy, stride: [stride; 2], ..Default::default() };
            let spec = Conv2dSpec::new(x, w, &params).unwrap();
            NhwcConversion::suits(&spec, &spec.problem().unwrap())
        };
        let suits = |dtype, accuracy, sizes, stride| {
            suits_in(&[0, 1, 2, 3], dtype, accuracy, sizes, stride)
        };
        let (exact, fp32, tf32) = (Accuracy::Exact, Accuracy::Fp32, Accuracy::Tf32);
        assert!(suits(DType::BF16, fp32, [2, 64, 64, 3], 1));
        assert!(suits(DType::F16, exact, [2, 64, 64, 1], 2));
        assert!(suits(DType::F32, tf32, [2, 4, 64, 3], 1));
        for n in [1, 2] {
            assert!(!suits_in(&[0, 2, 3, 1], DType::BF16, fp32, [n, 64, 64, 3], 1), "in its order");
        }
        assert!(!suits(DType::F32, fp32, [2, 64, 64, 3], 1), "cuDNN sums it as it lies");
        assert!(!suits(DType::BF16, fp32, [2, 64, 64, 1], 1), "a product of matrices");
        assert!(!suits(DType::BF16, fp32, [2, 60, 64, 3], 1), "no whole vectors");
        assert!(!suits(DType::BF16, fp32, [1 << 15, 64, 64, 3], 1), "a copy of a GiB");
    }
}
