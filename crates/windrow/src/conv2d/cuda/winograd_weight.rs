//! The weight gradient in Winograd's domain: `dw = G^T [sum over tiles of (A dy A^T) (B^T x B)] G`,
//! with the sum as one strided-batched matrix product for all positions of the transform tile.

use super::gradients::OutputKernels;
use super::row::matrix;
use super::stages::{
    ALIGNMENT, Blocking, InputTransform, Stage, THREADS, input_kernel, one_thread_each,
    staged_kernel,
};
use super::winograd_gemm::roundings;
use super::{source, strides};
use crate::conv2d::winograd::{MAX_ALPHA, Rational, TAPS, Transforms};
use crate::conv2d::{Conv2dSpec, Problem, Tile};
use crate::dtype::not_computed;
use crate::gpu::{
    Gemm, GemmCompute, GemmOperands, GemmSpec, Gpu, KernelSpec, Matrix, Source, Stream, params,
};
use crate::{Accuracy, DType, Result, TensorDesc};

static FILTER_GRAD: Source = source!("winograd_filter_grad.cu");

/// F4 stays of f32 class in f32. Halves take F2, which raises neither errors nor numbers much.
const fn tile_of(dtype: DType) -> Tile {
    match dtype {
        DType::F32 => Tile::F4,
        DType::F16 | DType::BF16 | not_computed!() => Tile::F2,
    }
}

/// Few channels are summed faster as they are.
const MIN_CHANNELS: usize = 16;

#[derive(Debug)]
pub(super) struct WinogradWeight {
    tile: Tile,
    spec: Conv2dSpec,
    problem: Problem,
    blocking: Blocking,
    v: Stage,
    dm: Stage,
    x_transform: InputTransform,
    dy_transform: InputTransform,
    gemm: Gemm,
    filter_grad: OutputKernels,
}

params! {
    struct FilterGradParams {
        du: *const u8,
        dw: *mut u8,
        strides as [w_k, w_c, w_r, w_s]: [i64; 4],
        plane: i64,
        elements: i64,
        c: i32,
        c_padded: i32,
    }
}

impl WinogradWeight {
    pub(super) fn suits(gpu: &Gpu, spec: &Conv2dSpec, p: &Problem) -> bool {
        p.is_winograd()
            && p.c.min(p.k) >= MIN_CHANNELS
            && spec.accuracy
                >= if spec.x.dtype == DType::F32 { Accuracy::Fp32 } else { Accuracy::Half }
            && gpu.multiplies().is_ok()
    }

    pub(super) fn new(gpu: &'static Gpu, spec: &Conv2dSpec, p: &Problem) -> Result<Self> {
        let v = Stage::of(&spec.x, spec.x.dtype);
        let dm = Stage::of(&spec.y, spec.y.dtype);
        let tile = tile_of(spec.x.dtype);
        let blocking = Blocking::new(tile, p, &[v, dm], gpu.info.l2_cache, None);
        let du = Matrix {
            dtype: DType::F32,
            transposed: false,
            row_stride: v.padded,
            batch_stride: p.k * v.padded,
            alignment: ALIGNMENT,
        };
        let product = GemmSpec {
            m: p.k,
            n: v.padded,
            k: blocking.tiles,
            batch: blocking.positions,
            a: dm.matrix(&blocking, false),
            b: v.matrix(&blocking, true),
            c: du,
            compute: compute(spec),
        };
        let [x_kernel, dy_kernel] = kernels(spec);
        Ok(WinogradWeight {
            tile,
            spec: spec.clone(),
            problem: *p,
            blocking,
            v,
            dm,
            x_transform: InputTransform::new(gpu, &x_kernel, &spec.x, v, p.padding, THREADS)?,
            dy_transform: InputTransform::new(gpu, &dy_kernel, &spec.y, dm, [0, 0], THREADS)?,
            gemm: Gemm::new(gpu, &product)?,
            filter_grad: OutputKernels::new(gpu, spec.w.dtype, |dw| filter_grad_kernel(tile, dw))?,
        })
    }

    /// Outputs of a tile in each direction.
    pub(super) fn tile(&self) -> usize {
        self.tile.m()
    }

    fn du_bytes(&self) -> usize {
        (self.blocking.positions * self.problem.k * self.v.padded * size_of::<f32>())
            .next_multiple_of(ALIGNMENT)
    }

    pub(super) fn scratch_bytes(&self) -> usize {
        let b = &self.blocking;
        self.v.bytes(b) + self.dm.bytes(b) + self.du_bytes() + self.gemm.workspace_bytes()
    }

    /// Relative to `reference::winograd_weight_scale`, as the forward direction's tolerance.
    pub(super) fn tolerance(&self) -> f64 {
        let tiles = self.blocking.tiles + self.blocking.chunks;
        growth(&self.tile.transforms()) * roundings(operand_rounding(&self.spec), tiles)
    }

    /// # Safety
    /// As [`super::Gradients::weight`], with [`WinogradWeight::scratch_bytes`].
    pub(super) unsafe fn run(
        &self,
        stream: &Stream,
        x: *const u8,
        dy: *const u8,
        (dw, desc): (*mut u8, &TensorDesc),
        scratch: *mut u8,
    ) -> Result<()> {
        let (p, b) = (&self.problem, &self.blocking);
        let v = scratch;
        let dm = v.wrapping_add(self.v.bytes(b));
        let du = dm.wrapping_add(self.dm.bytes(b));
        let workspace = du.wrapping_add(self.du_bytes());
        let operands = GemmOperands { a: dm, b: v, c: du, workspace };
        let no_max = std::ptr::null();
        for chunk in 0..b.chunks {
            let tiling = b.tiling(p.n, chunk);
            // SAFETY: the scratch memory is as large as asked for, the rest is the caller's promise.
            unsafe {
                self.x_transform.run(stream, x, no_max, v, b, tiling)?;
                self.dy_transform.run(stream, dy, no_max, dm, b, tiling)?;
                self.gemm.run(operands, stream, chunk > 0)?;
            }
        }
        let elements = p.k * p.c;
        let params = FilterGradParams {
            du,
            dw,
            strides: strides(desc),
            plane: (p.k * self.v.padded) as i64,
            elements: elements as i64,
            c: p.c as i32,
            c_padded: self.v.padded as i32,
        };
        // SAFETY: the structure is the kernel's, du lies in the scratch memory, dw is the caller's promise.
        unsafe {
            self.filter_grad.of(desc.dtype).launch(
                stream,
                one_thread_each(elements, THREADS),
                &params,
            )
        }
    }
}

/// How the products of a spec may be computed.
fn compute(spec: &Conv2dSpec) -> GemmCompute {
    match (spec.x.dtype, spec.accuracy) {
        (DType::F32, Accuracy::Tf32 | Accuracy::Half) => GemmCompute::Tf32,
        (DType::F32, Accuracy::Exact | Accuracy::Fp32)
        | (DType::F16 | DType::BF16 | not_computed!(), _) => GemmCompute::F32,
    }
}

/// Relative error of an operand as it is multiplied.
fn operand_rounding(spec: &Conv2dSpec) -> f64 {
    match compute(spec) {
        // TF32 has the mantissa of f16.
        GemmCompute::Tf32 => DType::F16.unit_roundoff(),
        GemmCompute::F32 => spec.x.dtype.unit_roundoff(),
    }
}

fn growth(t: &Transforms) -> f64 {
    let abs = |x: Rational| x.to_f64().abs();
    let point = |j: usize| {
        let dy = (0..t.m).map(|i| abs(t.at[i][j])).fold(0.0, f64::max);
        dy * t.bt[j].iter().map(|&b| abs(b)).sum::<f64>()
    };
    let tap = |r: usize| (0..t.alpha).map(|j| abs(t.g[j][r]) * point(j)).sum::<f64>();
    (0..TAPS).map(tap).fold(0.0, f64::max)
}

/// Of the transforms of x and dy.
fn kernels(spec: &Conv2dSpec) -> [KernelSpec; 2] {
    let tile = tile_of(spec.x.dtype);
    let t = tile.transforms();
    let mut a = [t.at[0]; MAX_ALPHA];
    for (j, row) in a.iter_mut().enumerate() {
        *row = std::array::from_fn(|i| t.at[i][j]);
    }
    [
        input_kernel("input", tile, &spec.x, &t.bt, t.alpha, THREADS),
        input_kernel("output_grad", tile, &spec.y, &a, t.m, THREADS),
    ]
}

fn filter_grad_kernel(tile: Tile, dw: DType) -> KernelSpec {
    let t = tile.transforms();
    let gt: [[Rational; MAX_ALPHA]; TAPS] =
        std::array::from_fn(|r| std::array::from_fn(|j| t.g[j][r]));
    staged_kernel(&FILTER_GRAD, "filter_grad", tile, dw, THREADS)
        .define("FILTER", matrix(&gt, TAPS, t.alpha))
        .params::<FilterGradParams>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compile_without_spills() {
        let mut all: Vec<_> = crate::conv2d::cuda::test_specs().iter().flat_map(kernels).collect();
        all.extend(Tile::ALL.map(|tile| filter_grad_kernel(tile, DType::F32)));
        crate::gpu::compile_tests::check_compiles(&all);
    }

    /// The identity that the algorithm rests on, in one dimension.
    #[test]
    fn the_transforms_give_the_gradient() {
        let t = Tile::F4.transforms();
        let f = |x: Rational| x.to_f64();
        for (tap, i, position) in
            (0..TAPS).flat_map(|r| (0..t.m).flat_map(move |i| (0..t.alpha).map(move |d| (r, i, d))))
        {
            let sum: f64 =
                (0..t.alpha).map(|j| f(t.g[j][tap]) * f(t.at[i][j]) * f(t.bt[j][position])).sum();
            let want = if i + tap == position { 1.0 } else { 0.0 };
            assert!((sum - want).abs() < 1e-12);
        }
    }
}
