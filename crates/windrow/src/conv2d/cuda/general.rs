//! The algorithms that compute every convolution: a product of gathered matrices, and plain sums
//! (`kernels/im2col_gemm.cu`, `kernels/direct.cu`).

use super::{Divisor, Operands, bias_of, epilogue, kernel, source, strides};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dSpec, Problem};
use crate::cuda::{Gpu, Kernel, Launch, Source, Stream};
use crate::{DType, Result};

static IM2COL_GEMM: Source = source!("im2col_gemm.cu");
static DIRECT: Source = source!("direct.cu");
static PACK_FILTER: Source = source!("pack_filter.cu");

const THREADS: u32 = 256;
/// Rows and columns of a block of the product.
const BLOCK: usize = 64;
/// Blocks of a launch in z.
const MAX_GRID_Z: usize = 65_535;
const ALIGNMENT: usize = 256;

/// A filter copied to [k, r, s, c], which both algorithms read.
#[derive(Debug)]
struct DenseFilter {
    kernel: &'static Kernel,
    dtype: DType,
    strides: [i64; 4],
    k: usize,
    c: usize,
    r: usize,
    s: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FilterParams {
    w: *const u8,
    out: *mut u8,
    strides: [i64; 4],
    elements: i64,
    c: i32,
    r: i32,
    s: i32,
}

impl DenseFilter {
    fn new(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Result<Self> {
        let dtype = spec.w.dtype;
        let kernel = gpu.kernel(&kernel(&PACK_FILTER, "pack_filter", dtype))?;
        let strides = strides(&spec.w);
        Ok(DenseFilter { kernel, dtype, strides, k: p.k, c: p.c_group(), r: p.r, s: p.s })
    }

    fn elements(&self) -> usize {
        self.k * self.c * self.r * self.s
    }

    fn bytes(&self) -> usize {
        (self.elements() * self.dtype.size()).next_multiple_of(ALIGNMENT)
    }

    /// Strides along k, c, r, s of the copy.
    fn packed_strides(&self) -> [i64; 4] {
        let (c, r, s) = (self.c as i64, self.r as i64, self.s as i64);
        [r * s * c, 1, s * c, c]
    }

    /// # Safety
    /// As [`super::Engine::pack`].
    unsafe fn pack(&self, stream: &Stream, w: *const u8, packed: *mut u8) -> Result<()> {
        let params = FilterParams {
            w,
            out: packed,
            strides: self.strides,
            elements: self.elements() as i64,
            c: self.c as i32,
            r: self.r as i32,
            s: self.s as i32,
        };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel.launch(stream, one_thread_each(self.elements()), &params) }
    }
}

fn one_thread_each(elements: usize) -> Launch {
    let blocks = elements.div_ceil(THREADS as usize) as u32;
    Launch { grid: [blocks, 1, 1], block: [THREADS, 1, 1] }
}

/// A product of the filter and of blocks of the im2col matrix, gathered on the fly.
#[derive(Debug)]
pub(crate) struct Im2colGemm {
    kernel: &'static Kernel,
    filter: DenseFilter,
    spec: Conv2dSpec,
    problem: Problem,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Im2colParams {
    image: *const u8,
    other: *const u8,
    out: *mut u8,
    bias: *const u8,
    image_strides: [i64; 4],
    other_strides: [i64; 4],
    out_strides: [i64; 4],
    bias_stride: i64,
    rows: i64,
    part: i64,
    bias_is_float: i32,
    columns: i32,
    depth: i32,
    channels: i32,
    other_channels: i32,
    n: i32,
    h: i32,
    w: i32,
    out_height: i32,
    out_width: i32,
    r: i32,
    s: i32,
    stride: [i32; 2],
    pad: [i32; 2],
    dilation: [i32; 2],
    images_per_part: i32,
    first_group: i32,
    channels_by: Divisor,
    s_by: Divisor,
    out_width_by: Divisor,
}

impl Im2colGemm {
    pub(super) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, problem: &Problem) -> Result<Self> {
        let spec_of_kernel = kernel(&IM2COL_GEMM, "im2col_gemm", spec.x.dtype)
            .define("PROBLEM", 0)
            .define("ALONG_ROWS", i32::from(!is_channels_last(&spec.x.layout)))
            .define("EPILOGUE", epilogue(spec.activation));
        Ok(Im2colGemm {
            kernel: gpu.kernel(&spec_of_kernel)?,
            filter: DenseFilter::new(gpu, spec, problem)?,
            spec: spec.clone(),
            problem: *problem,
        })
    }

    pub(super) fn packed_bytes(&self) -> usize {
        self.filter.bytes()
    }

    pub(super) fn dtype(&self) -> DType {
        self.spec.x.dtype
    }

    /// A rounding for each addition in a row; tensor cores cut off instead, which is up to twice that.
    pub(super) fn tolerance(&self) -> f64 {
        (2 * self.problem.taps() + 2) as f64 * DType::F32.unit_roundoff()
    }

    /// # Safety
    /// As [`super::Engine::pack`].
    pub(super) unsafe fn pack(&self, stream: &Stream, w: *const u8, packed: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.filter.pack(stream, w, packed) }
    }

    /// # Safety
    /// As [`super::Engine::run`].
    pub(super) unsafe fn run(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
    ) -> Result<()> {
        let p = &self.problem;
        let (bias, bias_stride, bias_is_float) = bias_of(&self.spec, operands.bias);
        let rows = p.n * p.oh * p.ow;
        let mut params = Im2colParams {
            image: operands.x,
            other: packed,
            out: operands.y,
            bias,
            image_strides: strides(&self.spec.x),
            other_strides: self.filter.packed_strides(),
            out_strides: strides(&self.spec.y),
            bias_stride,
            rows: rows as i64,
            part: 0,
            bias_is_float,
            columns: p.k_group() as i32,
            depth: p.taps() as i32,
            channels: p.c_group() as i32,
            other_channels: p.k_group() as i32,
            n: p.n as i32,
            h: p.h as i32,
            w: p.w as i32,
            out_height: p.oh as i32,
            out_width: p.ow as i32,
            r: p.r as i32,
            s: p.s as i32,
            stride: p.stride.map(|v| v as i32),
            pad: p.padding.map(|v| v as i32),
            dilation: p.dilation.map(|v| v as i32),
            images_per_part: p.n as i32,
            first_group: 0,
            channels_by: Divisor::new(p.c_group().max(1)),
            s_by: Divisor::new(p.s),
            out_width_by: Divisor::new(p.ow),
        };
        let grid = [rows.div_ceil(BLOCK) as u32, p.k_group().div_ceil(BLOCK) as u32];
        for first in (0..p.groups).step_by(MAX_GRID_Z) {
            let groups = MAX_GRID_Z.min(p.groups - first) as u32;
            params.first_group = first as i32;
            let launch = Launch { grid: [grid[0], grid[1], groups], block: [THREADS, 1, 1] };
            // SAFETY: the structure is the kernel's, and the caller's promise covers what it
            // points to.
            unsafe { self.kernel.launch(stream, launch, &params)? };
        }
        Ok(())
    }
}

/// One thread for each output.
#[derive(Debug)]
pub(crate) struct Direct {
    kernel: &'static Kernel,
    filter: DenseFilter,
    spec: Conv2dSpec,
    problem: Problem,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DirectParams {
    image: *const u8,
    filter: *const u8,
    out: *mut u8,
    bias: *const u8,
    image_strides: [i64; 4],
    /// Along k, c, r, s: the channels of y and of x.
    filter_strides: [i64; 4],
    out_strides: [i64; 4],
    bias_stride: i64,
    elements: i64,
    bias_is_float: i32,
    in_group: i32,
    out_group: i32,
    channels: i32,
    h: i32,
    w: i32,
    out_height: i32,
    out_width: i32,
    r: i32,
    s: i32,
    stride: [i32; 2],
    pad: [i32; 2],
    dilation: [i32; 2],
}

impl Direct {
    pub(super) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, problem: &Problem) -> Result<Self> {
        let spec_of_kernel = kernel(&DIRECT, "direct", spec.x.dtype)
            .define("TRANSPOSED", 0)
            .define("CHANNELS_INNER", i32::from(is_channels_last(&spec.y.layout)))
            .define("EPILOGUE", epilogue(spec.activation));
        Ok(Direct {
            kernel: gpu.kernel(&spec_of_kernel)?,
            filter: DenseFilter::new(gpu, spec, problem)?,
            spec: spec.clone(),
            problem: *problem,
        })
    }

    pub(super) fn packed_bytes(&self) -> usize {
        self.filter.bytes()
    }

    pub(super) fn dtype(&self) -> DType {
        self.spec.x.dtype
    }

    /// A rounding for each addition in a row; tensor cores cut off instead, which is up to twice that.
    pub(super) fn tolerance(&self) -> f64 {
        (2 * self.problem.taps() + 2) as f64 * DType::F32.unit_roundoff()
    }

    /// # Safety
    /// As [`super::Engine::pack`].
    pub(super) unsafe fn pack(&self, stream: &Stream, w: *const u8, packed: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.filter.pack(stream, w, packed) }
    }

    /// # Safety
    /// As [`super::Engine::run`].
    pub(super) unsafe fn run(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
    ) -> Result<()> {
        let p = &self.problem;
        let (bias, bias_stride, bias_is_float) = bias_of(&self.spec, operands.bias);
        let elements = p.y_shape().iter().product::<usize>();
        let params = DirectParams {
            image: operands.x,
            filter: packed,
            out: operands.y,
            bias,
            image_strides: strides(&self.spec.x),
            filter_strides: self.filter.packed_strides(),
            out_strides: strides(&self.spec.y),
            bias_stride,
            elements: elements as i64,
            bias_is_float,
            in_group: p.c_group() as i32,
            out_group: p.k_group() as i32,
            channels: p.k as i32,
            h: p.h as i32,
            w: p.w as i32,
            out_height: p.oh as i32,
            out_width: p.ow as i32,
            r: p.r as i32,
            s: p.s as i32,
            stride: p.stride.map(|v| v as i32),
            pad: p.padding.map(|v| v as i32),
            dilation: p.dilation.map(|v| v as i32),
        };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel.launch(stream, one_thread_each(elements), &params) }
    }
}
