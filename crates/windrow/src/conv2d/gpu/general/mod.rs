//! The algorithms that compute every convolution and its data gradient: a product of gathered
//! matrices, and plain sums (`im2col_gemm.cu`, `direct.cu`).

mod filter;

pub(super) use self::filter::DenseFilter;
use super::chips::{Plain, Rates};
use super::method::{About, Method};
use super::prepared::{Operands, PackTo, PackedForm, Prepared};
use super::shape::{ConvShape, Output};
use super::shared::frames::FrameParams;
use super::shared::parameters::{THREADS, one_thread_each};
use super::task::Task;
use super::{Divisor, kernel, source, strides, with_epilogue};
use crate::conv2d::frame_reads::FrameReads;
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dAlgorithm, Conv2dSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::{DType, Result, TensorDesc};

pub(super) static PRODUCT: Source = source!("im2col_gemm.cu");
static PLAIN: Source = source!("direct.cu");

/// Rows and columns of a block of the product.
pub(super) const BLOCK: usize = 64;
/// Blocks of a launch in z.
pub(super) const MAX_GRID_Z: usize = 65_535;

/// The way in which sums are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    /// One thread for each output.
    Direct,
    /// A product of the filter and of blocks of the im2col matrix, gathered on the fly.
    Im2colGemm,
}

/// The direction: what is computed from what. The discriminant is `PROBLEM` of `im2col_gemm.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// y of x.
    Forward = 0,
    /// dx of dy.
    BackwardData = 1,
}

/// The method of [`Conv2dAlgorithm::Direct`] that computes everything.
pub(super) static DIRECT: Everything = Everything {
    sums: Sums::Direct,
    rates: |rates| &rates.direct,
    about: &About {
        algorithms: &[Conv2dAlgorithm::Direct],
        domain: "computes everything",
        kernels: &[
            "direct.cu conv2d_direct_{f32,f16,bf16} TRANSPOSED={0,1} CHANNELS_INNER={0,1}",
            "direct.cu conv2d_direct_{f32,f16,bf16} FRAMES=1 CHANNELS_INNER={0,1} by:conv3d",
        ],
        parameters: &[],
    },
};
/// The method of [`Conv2dAlgorithm::Im2colGemm`] that computes everything.
pub(super) static IM2COL_GEMM: Everything = Everything {
    sums: Sums::Im2colGemm,
    rates: |rates| &rates.im2col_gemm,
    about: &About {
        algorithms: &[Conv2dAlgorithm::Im2colGemm],
        domain: "computes everything",
        kernels: &[
            "im2col_gemm.cu conv2d_im2col_gemm_{f32,f16,bf16} PROBLEM={0,1} ALONG_ROWS={0,1}",
            "im2col_gemm.cu conv2d_im2col_gemm_{f32,f16,bf16} FRAMES=1 ALONG_ROWS={0,1} by:conv3d",
            "pack_filter.cu conv2d_pack_filter_{f32,f16,bf16}",
        ],
        parameters: &[],
    },
};

/// A method that computes every convolution on every GPU.
pub(super) struct Everything {
    sums: Sums,
    rates: fn(&Rates) -> &Plain,
    about: &'static About,
}

impl Method for Everything {
    fn about(&self) -> &'static About {
        self.about
    }

    fn computes(&self, _task: &Task<'_>) -> bool {
        true
    }

    fn micros(&self, task: &Task<'_>) -> f64 {
        let rates = (self.rates)(task.chip.rates);
        rates.launch + rates.gflop * (1e-9 * task.problem.flops())
    }

    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(General::new(gpu, task, self.sums, Direction::Forward, true)?))
    }
}

/// A convolution or its data gradient by one of these algorithms.
#[derive(Debug)]
pub(crate) struct General {
    sums: Sums,
    direction: Direction,
    kernel: &'static Kernel,
    filter: DenseFilter,
    spec: Conv2dSpec,
    problem: Problem,
    frames: Option<FrameReads>,
}

impl General {
    /// The packed filter is [k, r, s, c] or, without `channels_last`, [k, c, r, s].
    pub(super) fn new(
        gpu: &'static Gpu,
        task: &Task<'_>,
        sums: Sums,
        direction: Direction,
        channels_last: bool,
    ) -> Result<Self> {
        let Task { spec, problem, frames, .. } = *task;
        let kernel = FrameParams::defined(kernel_spec(spec, sums, direction), frames.as_ref());
        let filter = DenseFilter::new(gpu, spec, problem, channels_last)?;
        Ok(General {
            sums,
            direction,
            kernel: gpu.kernel(&kernel)?,
            filter: filter.with_frames(frames.as_ref()),
            spec: spec.clone(),
            problem: *problem,
            frames,
        })
    }

    /// The tensor that is read, the one that is written, and their channels in a group.
    fn sides(&self) -> [(&TensorDesc, usize); 2] {
        let (x, y) =
            ((&self.spec.x, self.problem.c_group()), (&self.spec.y, self.problem.k_group()));
        match self.direction {
            Direction::Forward => [x, y],
            Direction::BackwardData => [y, x],
        }
    }

    fn frame_params(&self, operands: &Operands) -> FrameParams {
        let filter = self.filter.frame_elements();
        FrameParams::new(self.frames.as_ref(), operands.initial, filter)
    }

    /// # Safety
    /// As [`Prepared::run`].
    unsafe fn run_im2col_gemm(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
    ) -> Result<()> {
        let p = &self.problem;
        let [(image, channels), (out, columns)] = self.sides();
        let rows = p.n * out.shape()[2] * out.shape()[3];
        let to = Output::new(&self.spec, out, &operands);
        let mut params = Im2colParams {
            image: operands.x,
            other: packed,
            out: operands.y,
            bias: to.bias,
            residual: to.residual,
            image_strides: strides(image),
            other_strides: self.filter.packed_strides(),
            out_strides: to.y_strides,
            bias_stride: to.bias_stride,
            rows: rows as i64,
            bias_is_float: to.bias_is_float,
            columns: columns as i32,
            depth: (channels * p.frames.kt * p.r * p.s) as i32,
            other_channels: columns as i32,
            images_per_part: p.n as i32,
            frames: self.frame_params(&operands),
            ..Im2colParams::new(p, image, out, channels)
        };
        let grid = [rows.div_ceil(BLOCK) as u32, columns.div_ceil(BLOCK) as u32];
        for first in (0..p.groups).step_by(MAX_GRID_Z) {
            let groups = MAX_GRID_Z.min(p.groups - first) as u32;
            params.first_group = first as i32;
            let launch = Launch { grid: [grid[0], grid[1], groups], block: [THREADS as u32, 1, 1] };
            // SAFETY: the structure is the kernel's, and the caller's promise covers what it
            // points to.
            unsafe { self.kernel.launch(stream, launch, &params)? };
        }
        Ok(())
    }

    /// # Safety
    /// As [`Prepared::run`].
    unsafe fn run_direct(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
    ) -> Result<()> {
        let p = &self.problem;
        let [(image, in_group), (out, out_group)] = self.sides();
        let [k, c, r, s] = self.filter.packed_strides();
        let filter_strides = match self.direction {
            Direction::Forward => [k, c, r, s],
            Direction::BackwardData => [c, k, r, s],
        };
        let elements = out.shape().iter().product::<usize>();
        let params = DirectParams {
            base: ConvShape::new(&self.spec, p, [image, out], &operands),
            filter: packed,
            filter_strides,
            elements: elements as i64,
            in_group: in_group as i32,
            out_group: out_group as i32,
            r: p.r as i32,
            s: p.s as i32,
            frames: self.frame_params(&operands),
        };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel.launch(stream, one_thread_each(elements), &params) }
    }
}

impl Prepared for General {
    fn packed_form(&self) -> PackedForm {
        let method = match self.sums {
            Sums::Direct => "direct",
            Sums::Im2colGemm => "im2col_gemm",
        };
        let order = usize::from(self.filter.channels_last);
        PackedForm::new(method, self.spec.x.dtype, 1, order)
    }

    fn packed_bytes(&self) -> usize {
        self.filter.bytes()
    }

    /// True if the filter has the layout that its copy would have.
    fn reads_in_place(&self, _w: *const u8) -> bool {
        self.filter.is_packed()
    }

    /// A rounding for each addition, one after the other. Tensor cores truncate instead, which is up to twice that.
    fn tolerance(&self) -> f64 {
        let p = &self.problem;
        let terms = match self.direction {
            Direction::Forward => p.taps(),
            Direction::BackwardData => p.k_group() * p.r * p.s,
        };
        (2 * terms + 2) as f64 * DType::F32.unit_roundoff()
    }

    fn explain(&self) -> String {
        match self.sums {
            Sums::Direct => "one thread for each output".into(),
            Sums::Im2colGemm => "64 x 64 outputs of a block, gathered operands".into(),
        }
    }

    unsafe fn pack(&self, stream: &Stream, w: *const u8, to: PackTo) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.filter.pack(stream, w, to.memory) }
    }

    /// Runs the kernel. For the data gradient x is dy, and y is dx.
    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match self.sums {
                Sums::Direct => self.run_direct(stream, packed, operands),
                Sums::Im2colGemm => self.run_im2col_gemm(stream, packed, operands),
            }
        }
    }
}

fn kernel_spec(spec: &Conv2dSpec, sums: Sums, direction: Direction) -> KernelSpec {
    let (image, out) = match direction {
        Direction::Forward => (&spec.x, &spec.y),
        Direction::BackwardData => (&spec.y, &spec.x),
    };
    let named = match sums {
        Sums::Im2colGemm => kernel(&PRODUCT, "im2col_gemm", spec.x.dtype)
            .define("PROBLEM", direction as u32)
            .params::<Im2colParams>()
            .define("ALONG_ROWS", i32::from(!is_channels_last(&image.layout))),
        Sums::Direct => kernel(&PLAIN, "direct", spec.x.dtype)
            .define("TRANSPOSED", direction as u32)
            .params::<DirectParams>()
            .define("CHANNELS_INNER", i32::from(is_channels_last(&out.layout))),
    };
    with_epilogue(named, spec)
}

params! {
    pub(super) struct Im2colParams {
        pub(super) image: *const u8,
        pub(super) other: *const u8,
        pub(super) out: *mut u8,
        bias: *const u8,
        residual: *const u8,
        pub(super) image_strides as [image_n, image_c, image_h, image_w]: [i64; 4],
        pub(super) other_strides as [other_k, other_c, other_r, other_s]: [i64; 4],
        out_strides as [out_n, out_c, out_h, out_w]: [i64; 4],
        bias_stride: i64,
        pub(super) rows: i64,
        pub(super) part: i64,
        bias_is_float: i32,
        pub(super) columns: i32,
        pub(super) depth: i32,
        channels: i32,
        pub(super) other_channels: i32,
        n: i32,
        h: i32,
        w: i32,
        out_height: i32,
        out_width: i32,
        r: i32,
        s: i32,
        stride as [stride_h, stride_w]: [i32; 2],
        pad as [pad_h, pad_w]: [i32; 2],
        dilation as [dilation_h, dilation_w]: [i32; 2],
        pub(super) images_per_part: i32,
        pub(super) first_group: i32,
        channels_by: Divisor,
        s_by: Divisor,
        out_width_by: Divisor,
        r_by: Divisor,
        frames: FrameParams,
    }
}

impl Im2colParams {
    /// The sizes: of the gathered `image`, `channels` of it in a group, and of `out`, over whose
    /// pixels rows or depth run. No addresses, nothing to compute.
    pub(super) fn new(p: &Problem, image: &TensorDesc, out: &TensorDesc, channels: usize) -> Self {
        let null = std::ptr::null_mut();
        Im2colParams {
            image: null,
            other: null,
            out: null,
            bias: null,
            residual: null,
            image_strides: [0; 4],
            other_strides: [0; 4],
            out_strides: [0; 4],
            bias_stride: 0,
            rows: 0,
            part: 0,
            bias_is_float: 0,
            columns: 0,
            depth: 0,
            channels: channels as i32,
            other_channels: 0,
            n: p.n as i32,
            h: image.shape()[2] as i32,
            w: image.shape()[3] as i32,
            out_height: out.shape()[2] as i32,
            out_width: out.shape()[3] as i32,
            r: p.r as i32,
            s: p.s as i32,
            stride: p.stride.map(|v| v as i32),
            pad: p.padding.map(|v| v as i32),
            dilation: p.dilation.map(|v| v as i32),
            images_per_part: 1,
            first_group: 0,
            channels_by: Divisor::new(channels.max(1)),
            s_by: Divisor::new(p.s),
            out_width_by: Divisor::new(out.shape()[3].max(1)),
            r_by: Divisor::new(p.r),
            frames: FrameParams::NONE,
        }
    }
}

params! {
    struct DirectParams: ConvShape {
        filter: *const u8,
        /// Along the channels of y and of x, r, s.
        filter_strides as [filter_out, filter_in, filter_r, filter_s]: [i64; 4],
        elements: i64,
        in_group: i32,
        out_group: i32,
        r: i32,
        s: i32,
        frames: FrameParams,
    }
}

#[cfg(test)]
mod tests {
    use super::filter::pack_kernel;
    use super::*;
    use crate::conv2d::gpu::{test_specs, with_largest_epilogue};

    #[test]
    fn kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for spec in test_specs() {
            let forward = with_largest_epilogue(spec.clone());
            for method in [Sums::Direct, Sums::Im2colGemm] {
                let forward = kernel_spec(&forward, method, Direction::Forward);
                kernels.push(forward.clone().define("FRAMES", 1));
                kernels.push(forward);
                kernels.push(kernel_spec(&spec, method, Direction::BackwardData));
            }
            kernels.push(pack_kernel(spec.x.dtype));
        }
        crate::gpu::compile_tests::check_compiles(&kernels);
    }
}
