//! The weight gradient of any convolution, as a matrix product of dy and the gathered x that is summed in parts.

use crate::conv2d::gpu::general::{BLOCK, Im2colParams, MAX_GRID_Z, PRODUCT};
use crate::conv2d::gpu::gradient::{GradientMethod, WeightGradient, WeightOperands};
use crate::conv2d::gpu::shared::parameters::THREADS;
use crate::conv2d::gpu::shared::parts::{AddParts, PartsParams};
use crate::conv2d::gpu::task::Task;
use crate::conv2d::gpu::{kernel, strides};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Stream};
use crate::{DType, Result};

/// The number of blocks per multiprocessor that keep a GPU busy.
const BLOCKS_PER_PROCESSOR: usize = 4;
/// The largest memory in bytes for parts.
const MAX_PARTS_BYTES: usize = 64 << 20;

/// The method for weight gradients that no other method computes.
pub(super) struct Im2colWeightMethod;

impl GradientMethod<dyn WeightGradient> for Im2colWeightMethod {
    fn kernels(&self) -> &'static [&'static str] {
        &[
            "im2col_gemm.cu conv2d_weight_grad_{f32,f16,bf16} PROBLEM=2 ALONG_ROWS={0,1}",
            "im2col_gemm_sum.cu conv2d_add_parts_{f32,f16,bf16}",
        ]
    }

    fn prepare(
        &self,
        gpu: &'static Gpu,
        task: &Task<'_>,
    ) -> Result<Option<Box<dyn WeightGradient>>> {
        Ok(Some(Box::new(Im2colWeight {
            kernel: gpu.kernel(&weight_kernel(task.spec))?,
            add_parts: AddParts::new(gpu, task.spec.x.dtype)?,
            gpu,
            spec: task.spec.clone(),
            problem: *task.problem,
        })))
    }
}

#[derive(Debug)]
struct Im2colWeight {
    kernel: &'static Kernel,
    add_parts: AddParts,
    gpu: &'static Gpu,
    spec: Conv2dSpec,
    problem: Problem,
}

impl Im2colWeight {
    /// Images that a block sums.
    fn images_per_part(&self) -> usize {
        let p = &self.problem;
        let blocks = p.k_group().div_ceil(BLOCK) * p.taps().div_ceil(BLOCK) * p.groups;
        let wanted = BLOCKS_PER_PROCESSOR * self.gpu.info.multiprocessors as usize;
        let most = MAX_PARTS_BYTES / (p.k * p.taps() * size_of::<f32>()).max(1);
        let parts = (wanted / blocks.max(1)).min(most).clamp(1, MAX_GRID_Z);
        p.n.div_ceil(parts).max(1)
    }

    fn parts(&self) -> usize {
        self.problem.n.div_ceil(self.images_per_part())
    }
}

impl WeightGradient for Im2colWeight {
    fn scratch_bytes(&self) -> usize {
        self.parts() * self.problem.k * self.problem.taps() * size_of::<f32>()
    }

    /// The parts are added with compensation.
    fn tolerance(&self) -> f64 {
        summed(&self.problem, self.images_per_part())
    }

    unsafe fn run(&self, stream: &Stream, operands: &WeightOperands<'_>) -> Result<()> {
        let &WeightOperands { x, dy, dw, desc, scratch } = operands;
        let (p, parts) = (&self.problem, self.parts());
        let elements = p.k * p.taps();
        let mut params = Im2colParams::new(p, &self.spec.x, &self.spec.y, p.c_group());
        (params.image, params.other, params.out) = (x, dy, scratch);
        params.image_strides = strides(&self.spec.x);
        params.other_strides = strides(&self.spec.y);
        params.rows = p.k_group() as i64;
        params.columns = p.taps() as i32;
        params.depth = (p.oh * p.ow) as i32;
        params.part = elements as i64;
        params.other_channels = p.k_group() as i32;
        params.images_per_part = self.images_per_part() as i32;
        let grid = [p.k_group().div_ceil(BLOCK), p.taps().div_ceil(BLOCK)].map(|b| b as u32);
        let at_once = MAX_GRID_Z / parts.max(1);
        for first in (0..p.groups).step_by(at_once) {
            let groups = at_once.min(p.groups - first);
            params.first_group = first as i32;
            let z = (groups * parts) as u32;
            let launch = Launch { grid: [grid[0], grid[1], z], block: [THREADS as u32, 1, 1] };
            // SAFETY: the structure is the kernel's, and the caller's promise covers what it
            // points to.
            unsafe { self.kernel.launch(stream, launch, &params)? };
        }
        let params = PartsParams {
            parts: scratch,
            out: dw,
            strides: strides(desc),
            elements: elements as i64,
            parts_count: parts as i32,
            c: p.c_group() as i32,
            r: p.r as i32,
            s: p.s as i32,
        };
        // SAFETY: the parts were written into the scratch memory, dw is the caller's promise.
        unsafe { self.add_parts.run(stream, desc.dtype, &params) }
    }
}

/// The roundings of sums over the pixels of this number of images: one for each addition, or two if tensor cores
/// truncate.
pub(super) fn summed(p: &Problem, images: usize) -> f64 {
    (2 * images * p.oh * p.ow + 6) as f64 * DType::F32.unit_roundoff()
}

pub(super) fn weight_kernel(spec: &Conv2dSpec) -> KernelSpec {
    kernel(&PRODUCT, "weight_grad", spec.x.dtype)
        .define("PROBLEM", 2)
        .params::<Im2colParams>()
        .define("ALONG_ROWS", i32::from(is_channels_last(&spec.y.layout)))
        .define("EPILOGUE", "IDENTITY")
}
