//! The splitting of f32 numbers into sums of two f16 parts. Operands are brought into the range of f16 by powers of
//! two, which are computed from the largest finite magnitude of each image (`image_max.cu`) and of each filter.

use crate::conv2d::gpu::ALIGNMENT;
use crate::conv2d::gpu::{Divisor, kernel, source};
use crate::conv2d::winograd::Rational;
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::{DType, Result, TensorDesc};

static IMAGE_MAX: Source = source!("image_max.cu");

/// The amount by which an accumulation of 16 terms shrinks its sum, because it truncates. It is the same within some
/// percent for all data, except for sums of one sign, which shrink more (measured on an H200).
pub(crate) const SHRINKAGE: f64 = 1.57e-8;

/// Elements of a vector.
const VECTOR: usize = 4;
/// Vectors that a block reads.
const BLOCK_VECTORS: usize = 2048;
const THREADS: usize = 256;
/// Vectors of an image are counted in 32 bits, blocks of a launch too.
const MAX_VECTORS: usize = 1 << 30;

/// Relative error of an operand that is split: the rounding of its low part.
pub(crate) fn rounding() -> f64 {
    DType::F16.unit_roundoff() * DType::F16.unit_roundoff()
}

/// The exponent to which operands are scaled, so that transforms by this matrix, one after the other in `dimensions`
/// dimensions, stay finite in f16.
pub(crate) fn exponent<const N: usize>(rows: &[[Rational; N]], dimensions: i32) -> i32 {
    let growth =
        rows.iter().map(|r| r.iter().map(|x| x.to_f64().abs()).sum::<f64>()).fold(0.0, f64::max);
    // Numbers below 2^(exponent + 1) grow by at most `growth` in each.
    (65_000.0 / growth.powi(dimensions)).log2().floor() as i32 - 1
}

/// The largest error of an operand that is smaller than the smallest f16, relative to the largest number that is scaled
/// to `exponent` with it: half a step of 2^-24.
pub(crate) fn underflow(exponent: i32) -> f64 {
    f64::from(-25 - exponent).exp2()
}

/// The inverse of `power_of_two_scale` of `conv2d.cuh`.
pub(crate) fn inverse_scale(max_bits: u32, exponent: i32) -> f64 {
    if max_bits == 0 {
        return 1.0;
    }
    f64::from((exponent - ((max_bits >> 23) as i32 - 127)).clamp(-126, 126)).exp2().recip()
}

/// The largest finite magnitude of each image of an f32 tensor [n, c, h, w].
#[derive(Debug)]
pub(crate) struct ImageMax {
    image_stride: i64,
    /// Sizes and strides of an image's dimensions, the innermost last.
    dimensions: [(usize, isize); 3],
    scalar: &'static Kernel,
    /// The kernel for images of whole vectors at aligned addresses.
    vector: Option<&'static Kernel>,
}

params! {
    struct Params {
        x: *const u8,
        x_max: *mut u8,
        image_stride as [x_n]: i64,
        strides as [outer, middle, inner]: [i64; 3],
        vectors: i32,
        blocks: i32,
        in_outer: Divisor,
        in_middle: Divisor,
    }
}

impl ImageMax {
    /// Bytes of the magnitudes of the images of `x`; types but f32 need none.
    pub(crate) fn bytes(x: &TensorDesc) -> usize {
        let images = if x.dtype == DType::F32 { x.shape()[0] } else { 0 };
        (images * size_of::<u32>()).next_multiple_of(ALIGNMENT)
    }

    /// True if images are small enough to be counted in 32 bits.
    pub(crate) fn supports(x: &TensorDesc) -> bool {
        let sizes = &x.shape()[1..];
        let elements = sizes.iter().try_fold(1usize, |a, &b| a.checked_mul(b));
        let blocks = |elements: usize| elements.div_ceil(BLOCK_VECTORS) * x.shape()[0];
        elements.is_some_and(|e| e < MAX_VECTORS && blocks(e) < i32::MAX as usize)
    }

    pub(crate) fn new(gpu: &'static Gpu, x: &TensorDesc) -> Result<Self> {
        let dimensions = [1, 2, 3].map(|d| (x.shape()[d], x.strides()[d]));
        Self::of_images(gpu, x.strides()[0], merged(dimensions.into_iter()).unwrap_or(dimensions))
    }

    fn of_images(
        gpu: &'static Gpu,
        image_stride: isize,
        dimensions: [(usize, isize); 3],
    ) -> Result<Self> {
        let [outer, middle, (inner, step)] = dimensions;
        let whole = |stride: isize| stride.unsigned_abs().is_multiple_of(VECTOR);
        let vectors = step == 1
            && inner.is_multiple_of(VECTOR)
            && [image_stride, outer.1, middle.1].into_iter().all(whole);
        Ok(ImageMax {
            image_stride: image_stride as i64,
            dimensions,
            scalar: gpu.kernel(&image_max_kernel(1))?,
            vector: vectors.then(|| gpu.kernel(&image_max_kernel(VECTOR))).transpose()?,
        })
    }

    /// The kernel that treats all images together as one.
    pub(crate) fn of_all(gpu: &'static Gpu, x: &TensorDesc) -> Result<Self> {
        Self::of_images(gpu, 0, dimensions_of_all(x).unwrap_or([(0, 0); 3]))
    }

    /// True if [`ImageMax::of_all`] finds it: dimensions that follow each other are few, and elements not too many.
    pub(crate) fn supports_all(x: &TensorDesc) -> bool {
        dimensions_of_all(x).is_some() && x.layout.len() < MAX_VECTORS
    }

    /// Writes the bits of those of `n` images to `x_max`.
    ///
    /// # Safety
    /// `x` must be images of the tensor and `x_max` `n` words, on the stream's GPU.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        x: *const u8,
        n: usize,
        x_max: *mut u8,
    ) -> Result<()> {
        if n == 0 {
            return Ok(());
        }
        let [(outer, s0), (middle, s1), (inner, s2)] = self.dimensions;
        let aligned = (x as usize).is_multiple_of(VECTOR * size_of::<f32>());
        let (kernel, width) = match self.vector {
            Some(kernel) if aligned => (kernel, VECTOR),
            _ => (self.scalar, 1),
        };
        let inner = inner / width;
        let vectors = outer * middle * inner;
        let blocks = vectors.div_ceil(BLOCK_VECTORS);
        if blocks != 1 {
            // SAFETY: the caller's promise.
            unsafe { stream.zero(x_max, n * size_of::<u32>())? };
        }
        if vectors == 0 {
            return Ok(());
        }
        let params = Params {
            x,
            x_max,
            image_stride: self.image_stride,
            strides: [s0 as i64, s1 as i64, s2 as i64 * width as i64],
            vectors: vectors as i32,
            blocks: blocks as i32,
            in_outer: Divisor::new(middle * inner),
            in_middle: Divisor::new(inner),
        };
        let launch = Launch::line(n * blocks, THREADS);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, launch, &params) }
    }
}

fn dimensions_of_all(x: &TensorDesc) -> Option<[(usize, isize); 3]> {
    merged((0..4).map(|d| (x.shape()[d], x.strides()[d])))
}

/// Dimensions of the same elements, the longest steps first, those that follow each other without a gap as one; in front
/// of them dimensions of one element. `None` if they are more than three.
fn merged(dimensions: impl Iterator<Item = (usize, isize)>) -> Option<[(usize, isize); 3]> {
    let mut dimensions: Vec<_> = dimensions.filter(|&(size, _)| size != 1).collect();
    dimensions.sort_by_key(|&(_, stride)| stride.unsigned_abs());
    let mut merged: Vec<(usize, isize)> = Vec::new();
    for (size, stride) in dimensions {
        match merged.last_mut() {
            Some((inner, step)) if stride == *step * *inner as isize => *inner *= size,
            _ => merged.push((size, stride)),
        }
    }
    let at = |i: usize| merged.get(2 - i).copied().unwrap_or((1, 0));
    (merged.len() <= 3).then(|| std::array::from_fn(at))
}

fn image_max_kernel(vector: usize) -> KernelSpec {
    kernel(&IMAGE_MAX, "image_max", DType::F32).define("VECTOR", vector).params::<Params>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::{Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec};
    use crate::gpu::DeviceTensor;
    use crate::verification::random_tensor;
    use crate::{Device, PlanOptions, Workspace};

    #[test]
    fn images_without_gaps_are_one_dimension() {
        // NCHW and channels-last of [c, h, w] = [8, 5, 6], a gap between rows, a broadcast row, a column.
        let merged =
            |dimensions: [(usize, isize); 3]| super::merged(dimensions.into_iter()).unwrap();
        assert_eq!(merged([(8, 30), (5, 6), (6, 1)]), [(1, 0), (1, 0), (240, 1)]);
        assert_eq!(merged([(8, 1), (5, 48), (6, 8)]), [(1, 0), (1, 0), (240, 1)]);
        assert_eq!(merged([(8, 40), (5, 8), (6, 1)]), [(1, 0), (40, 8), (6, 1)]);
        assert_eq!(merged([(8, 99), (5, 8), (6, 1)]), [(8, 99), (5, 8), (6, 1)]);
        assert_eq!(merged([(8, -30), (5, -6), (6, -1)]), [(1, 0), (1, 0), (240, -1)]);
    }

    #[test]
    fn scales_keep_transforms_finite() {
        let t = crate::conv2d::Tile::F4.transforms();
        let e = exponent(&t.bt, 2);
        assert!((30.0..60.0).contains(&(65_504.0 / f64::from(e + 1).exp2())), "{e}");
        assert_eq!(inverse_scale(3.0f32.to_bits(), 4), 0.125);
        assert_eq!(inverse_scale(0, 4), 1.0);
    }

    /// Scales of f32 whose product is beyond its range. Without a GPU the test does nothing.
    #[test]
    fn tiny_and_huge_numbers_are_scaled() {
        if !crate::cuda::devices().is_ok_and(|d| !d.is_empty()) {
            return;
        }
        let options = PlanOptions { device: Device::Cuda(0), ..PlanOptions::default() };
        let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
        let (x, w) = (desc(&[2, 24, 9, 9]), desc(&[16, 24, 3, 3]));
        let spec = Conv2dSpec::new(x, w, &Conv2dParams::default()).unwrap();
        let ranges = [(1e-20, 1e-18), (1e-3, 1e-35), (1e32, 1e-34), (1e-34, 1e32)];
        let algorithms = Conv2dPlan::algorithms(&spec, options.device);
        for (algorithm, (x_range, w_range)) in algorithms
            .into_iter()
            .filter(|algorithm| algorithm.is_winograd())
            .flat_map(|algorithm| ranges.map(|range| (algorithm, range)))
        {
            let upload = |seed, desc, range: f64| {
                let host = random_tensor(seed, desc, -range, range).unwrap();
                DeviceTensor::from_host(&host.as_ref(), 0).unwrap()
            };
            let (x, w) = (upload(1, x, x_range), upload(2, w, w_range));
            let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
            let mut workspace = Workspace::new(options.device, plan.workspace_bytes()).unwrap();
            let mut y = DeviceTensor::new(spec.y, 0).unwrap();
            let args = Conv2dArgs::new(x.as_ref(), w.as_ref());
            plan.run(&args, y.as_mut().unwrap(), &mut workspace).unwrap();
            workspace.synchronize().unwrap();
            let comparison = plan.compare(&args, &y.as_ref()).unwrap();
            assert!(comparison.passed(), "{algorithm} {x_range} {w_range} {comparison:?}");
        }
    }

    #[test]
    fn kernels_compile_without_spills() {
        crate::gpu::compile_tests::check_compiles(&[1, VECTOR].map(image_max_kernel));
    }
}
