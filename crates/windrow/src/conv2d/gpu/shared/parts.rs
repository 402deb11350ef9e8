//! The sum of a gradient's partial sums, in a fixed order.

use super::parameters::one_thread_each;
use crate::conv2d::gpu::{kernel, source};
use crate::gpu::{Gpu, Kernel, KernelSpec, Source, Stream, params};
use crate::{DType, Result};

static ADD_PARTS: Source = source!("im2col_gemm_sum.cu");

/// A kernel for each type that a gradient may have: f32, and that of x.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputKernels {
    float: &'static Kernel,
    own: &'static Kernel,
}

impl OutputKernels {
    pub(crate) fn new(
        gpu: &'static Gpu,
        own: DType,
        kernel: impl Fn(DType) -> KernelSpec,
    ) -> Result<Self> {
        Ok(OutputKernels {
            float: gpu.kernel(&kernel(DType::F32))?,
            own: gpu.kernel(&kernel(own))?,
        })
    }

    /// The kernel for a gradient in f32 or in the type of x.
    pub(crate) fn of(&self, dtype: DType) -> &'static Kernel {
        if dtype == DType::F32 { self.float } else { self.own }
    }
}

params! {
    pub(crate) struct PartsParams {
        pub(crate) parts: *const u8,
        pub(crate) out: *mut u8,
        pub(crate) strides as [k_stride, c_stride, r_stride, s_stride]: [i64; 4],
        pub(crate) elements: i64,
        pub(crate) parts_count: i32,
        pub(crate) c: i32,
        pub(crate) r: i32,
        pub(crate) s: i32,
    }
}

/// Adds the parts of a gradient up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AddParts(OutputKernels);

impl AddParts {
    pub(crate) fn new(gpu: &'static Gpu, own: DType) -> Result<Self> {
        Ok(AddParts(OutputKernels::new(gpu, own, parts_kernel)?))
    }

    /// # Safety
    /// What the parameters point to must be on the stream's GPU.
    pub(crate) unsafe fn run(
        &self,
        stream: &Stream,
        out: DType,
        params: &PartsParams,
    ) -> Result<()> {
        let launch = one_thread_each(params.elements as usize);
        // SAFETY: the structure is the kernel's, the rest is the caller's promise.
        unsafe { self.0.of(out).launch(stream, launch, params) }
    }
}

pub(crate) fn parts_kernel(out: DType) -> KernelSpec {
    kernel(&ADD_PARTS, "add_parts", out).params::<PartsParams>()
}
