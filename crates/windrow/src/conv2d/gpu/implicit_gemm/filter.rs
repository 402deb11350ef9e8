//! The packed filter of the product (`implicit_gemm_filter.cu`).

use super::ImplicitGemm;
use super::cut::{Cut, Factors};
use super::product::FILTER_EXPONENT;
use crate::conv2d::Problem;
use crate::conv2d::gpu::prepared::{PackTo, Prepared};
use crate::conv2d::gpu::{Divisor, Seen, kernel, source, strides};
use crate::gpu::{Feature, KernelSpec, Source, params};
use crate::{DType, TensorDesc};

static FILTER: Source = source!("implicit_gemm_filter.cu");

/// The amount by which the tensor cores shrink the sum of one step, relative to it: four accumulations of the high
/// products, each of which truncates (measured on an H200 for 64 to 4608 normal terms: 8.3e-8 to 9.6e-8).
const SHRINKAGE: f64 = 8.9e-8;

params! {
    pub(super) struct FilterParams {
        w: *const u8,
        packed: *mut u8,
        inverse: *mut u8,
        strides as [w_k, w_c, w_r, w_s]: [i64; 4],
        w_group: i64,
        seen: Seen,
        unit_k: i32,
        terms: i32,
        steps: i32,
        unit_blocks: Divisor,
        group_k: Divisor,
        c: Divisor,
        s: Divisor,
        group_c: i32,
        dense: i32,
        frame_stride as [w_t]: i64,
        frame_r: Divisor,
    }
}

impl ImplicitGemm {
    pub(super) fn filter_params(&self, w: *const u8, to: PackTo) -> FilterParams {
        let (p, unit) = (&self.problem, self.cut.unit(&self.problem));
        let frame = self.video.as_ref().map_or(0, |video| video.reads.filter);
        let seen = Seen::behind(to, self.packed_bytes()).in_order_of(&self.spec.w);
        FilterParams {
            w,
            packed: to.memory,
            inverse: to.memory.wrapping_add(self.filter_bytes()),
            strides: strides(&self.spec.w),
            w_group: self.filter_group as i64,
            seen: seen.with_stride(frame),
            unit_k: unit.k as i32,
            terms: (self.cut.term_channels(p) * p.frames.kt * p.r * p.s) as i32,
            steps: self.cut.steps(p) as i32,
            unit_blocks: Divisor::new(unit.blocks),
            group_k: Divisor::new(p.k_group()),
            c: Divisor::new(self.cut.term_channels(p)),
            s: Divisor::new(p.s),
            group_c: p.c_group() as i32,
            dense: dense_weights(&self.spec.w, p, frame) as i32,
            frame_stride: frame as i64,
            frame_r: Divisor::new(p.r),
        }
    }
}

/// The number of weights of an output channel if they are contiguous, in any order; otherwise 0. Frames of the filter
/// have the stride `frame`.
fn dense_weights(w: &TensorDesc, p: &Problem, frame: isize) -> usize {
    let s = w.strides();
    let mut all = [(p.c_group(), s[1]), (p.frames.kt, frame), (p.r, s[2]), (p.s, s[3])].to_vec();
    all.retain(|&(size, _)| size != 1);
    all.sort_by_key(|&(_, stride)| stride);
    let mut count = 1;
    for (size, stride) in all {
        if stride != count as isize {
            return 0;
        }
        count *= size;
    }
    count
}

/// Packs the filter of images or of a video.
pub(super) fn filter_kernel(dtype: DType, cut: Cut, is_video: bool) -> KernelSpec {
    let filter = kernel(&FILTER, "implicit_gemm_filter", dtype)
        .define("BLOCK_K", cut.block)
        .params::<FilterParams>();
    let filter = if is_video { filter.define("FRAMES", 1) } else { filter };
    let filter = match cut.factors {
        Factors::Split => filter
            .define("FILTER_EXPONENT", FILTER_EXPONENT)
            .define("SHRINKAGE", format!("{:?}f", SHRINKAGE as f32)),
        // Rounding to TF32 is an instruction of NVIDIA's.
        Factors::Tf32 => filter.define("TF32", 1).needs(Feature::WarpgroupProducts),
        Factors::Half => filter,
    };
    if cut.strips { filter.define("STRIP", 1) } else { filter }
}
