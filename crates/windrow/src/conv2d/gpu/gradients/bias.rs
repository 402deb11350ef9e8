//! The gradient of the bias.

use crate::conv2d::gpu::shared::parts::{AddParts, PartsParams};
use crate::conv2d::gpu::{kernel, source, strides};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::{DType, Result, TensorDesc};

static BIAS: Source = source!("bias_grad.cu");

/// Variants of the kernel.
pub(super) const KERNELS: &[&str] = &[
    "bias_gradient.cu gelu_bias_gradient_{f32,f16,bf16}",
    "bias_grad.cu conv2d_bias_grad_{f32,f16,bf16} CHANNELS_INNER={0,1}",
];

/// Warps and lanes of a block, and rows that a warp adds.
const WARPS: usize = 8;
const LANES: usize = 32;
const ROWS_PER_WARP: usize = 8;

/// The gradient of the bias: sums of dy over images, rows and columns.
#[derive(Debug)]
pub(crate) struct BiasGradient {
    kernel: &'static Kernel,
    add_parts: AddParts,
    dy: TensorDesc,
    problem: Problem,
}

params! {
    struct BiasParams {
        dy: *const u8,
        parts: *mut u8,
        strides as [n_stride, c_stride, h_stride, w_stride]: [i64; 4],
        rows: i64,
        rows_per_part: i64,
        channels: i32,
        height: i32,
        width: i32,
    }
}

impl BiasGradient {
    pub(super) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, problem: &Problem) -> Result<Self> {
        Ok(BiasGradient {
            kernel: gpu.kernel(&bias_kernel(spec))?,
            add_parts: AddParts::new(gpu, spec.x.dtype)?,
            dy: spec.y,
            problem: *problem,
        })
    }

    fn channels_inner(&self) -> bool {
        is_channels_last(&self.dy.layout)
    }

    fn parts(&self) -> usize {
        (self.problem.n * self.problem.oh).div_ceil(WARPS * ROWS_PER_WARP)
    }

    pub(crate) fn scratch_bytes(&self) -> usize {
        self.parts() * self.problem.k * size_of::<f32>()
    }

    /// A lane adds its columns of some rows, then come the lanes and warps of a block.
    pub(crate) fn tolerance(&self) -> f64 {
        let columns =
            if self.channels_inner() { self.problem.ow } else { self.problem.ow.div_ceil(LANES) };
        (ROWS_PER_WARP * columns + 16) as f64 * DType::F32.unit_roundoff()
    }

    /// Computes `db`, which has its own stride and type, from `dy`.
    ///
    /// # Safety
    /// The tensors must have these layouts and be on the stream's GPU, with [`BiasGradient::scratch_bytes`] there.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        dy: *const u8,
        (db, desc): (*mut u8, &TensorDesc),
        scratch: *mut u8,
    ) -> Result<()> {
        let (p, parts) = (&self.problem, self.parts());
        let params = BiasParams {
            dy,
            parts: scratch,
            strides: strides(&self.dy),
            rows: (p.n * p.oh) as i64,
            rows_per_part: (WARPS * ROWS_PER_WARP) as i64,
            channels: p.k as i32,
            height: p.oh as i32,
            width: p.ow as i32,
        };
        let channels = if self.channels_inner() { p.k.div_ceil(LANES) } else { p.k };
        let launch = Launch::line(parts * channels, WARPS * LANES);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.kernel.launch(stream, launch, &params)? };
        let params = PartsParams {
            parts: scratch,
            out: db,
            strides: [desc.strides()[0] as i64, 0, 0, 0],
            elements: p.k as i64,
            parts_count: parts as i32,
            c: 1,
            r: 1,
            s: 1,
        };
        // SAFETY: the parts were written into the scratch memory, db is the caller's promise.
        unsafe { self.add_parts.run(stream, desc.dtype, &params) }
    }
}

pub(super) fn bias_kernel(spec: &Conv2dSpec) -> KernelSpec {
    kernel(&BIAS, "bias_grad", spec.x.dtype)
        .define("CHANNELS_INNER", i32::from(is_channels_last(&spec.y.layout)))
        .define("WARPS", WARPS)
        .params::<BiasParams>()
}
