//! The weight gradient in Winograd's domain: `dw = G^T [sum over tiles of (A dy A^T) (B^T x B)] G`, with the sum as one
//! strided-batched matrix product for all positions of the transformed tile.
//!
//! f32 is multiplied as f16 parts if [`WeightProduct`] supports it.

use crate::conv2d::gpu::facts::is_strict;
use crate::conv2d::gpu::gradient::{GradientMethod, WeightGradient, WeightOperands};
use crate::conv2d::gpu::shared::matrix::matrix;
use crate::conv2d::gpu::shared::parts::OutputKernels;
use crate::conv2d::gpu::shared::weight_product::{
    OCTET_BYTES, SHRINKAGE, STEP_ROWS, Shape, Side, Taps, WeightProduct,
};
use crate::conv2d::gpu::split::{self, ImageMax};
use crate::conv2d::gpu::task::Task;
use crate::conv2d::gpu::winograd_gemm::roundings;
use crate::conv2d::gpu::winograd_gemm::stages::{
    Blocking, FILTER_GRAD, InputTransform, Stage, THREADS, input_kernel, one_thread_each,
    staged_kernel,
};
use crate::conv2d::gpu::{ALIGNMENT, strides};
use crate::conv2d::winograd::{MAX_ALPHA, Rational, TAPS, Transforms};
use crate::conv2d::{Conv2dSpec, Problem, Tile};
use crate::dtype::not_computed;
use crate::gpu::{
    Feature, Gemm, GemmCompute, GemmOperands, GemmSpec, Gpu, KernelSpec, Matrix, Stream, params,
};
use crate::{Accuracy, DType, Result, TensorDesc};

/// In f32, F4 has an error close to that of f32 sums. f16 and bf16 use F2, which enlarges neither errors nor numbers
/// much.
const fn tile_of(dtype: DType) -> Tile {
    match dtype {
        DType::F32 => Tile::F4,
        DType::F16 | DType::BF16 | not_computed!() => Tile::F2,
    }
}

/// Few channels are summed faster without a transform.
const MIN_CHANNELS: usize = 16;

#[derive(Debug)]
pub(crate) struct WinogradWeight {
    tile: Tile,
    spec: Conv2dSpec,
    problem: Problem,
    blocking: Blocking,
    v: Stage,
    dm: Stage,
    x_transform: InputTransform,
    dy_transform: InputTransform,
    product: Product,
    filter_grad: OutputKernels,
}

#[derive(Debug)]
enum Product {
    Library(Gemm),
    /// The product of f16 parts, with the kernels that find the largest magnitudes of x and dy.
    Halves(WeightProduct, [ImageMax; 2]),
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
        parts: i32,
    }
}

/// The method [`WinogradWeight`], for all gradients that it can compute.
pub(crate) struct WinogradWeightMethod;

impl GradientMethod<dyn WeightGradient> for WinogradWeightMethod {
    fn kernels(&self) -> &'static [&'static str] {
        &[
            "winograd_input.cu conv2d_winograd_input_f4_f32 PARTS=0 CHANNELS_INNER={0,1}",
            "winograd_input.cu conv2d_winograd_output_grad_f4_f32 PARTS=0 CHANNELS_INNER={0,1}",
            "winograd_input.cu conv2d_winograd_{input,output_grad}_f4_f32 PARTS=2 CHANNELS_INNER={0,1} sm_90",
            "winograd_input.cu conv2d_winograd_output_grad_f2_{f16,bf16} PARTS=0 CHANNELS_INNER={0,1}",
            "winograd_filter_grad.cu conv2d_winograd_filter_grad_f4_f32",
            "winograd_filter_grad.cu conv2d_winograd_filter_grad_f2_{f32,f16,bf16}",
        ]
    }

    fn prepare(
        &self,
        gpu: &'static Gpu,
        task: &Task<'_>,
    ) -> Result<Option<Box<dyn WeightGradient>>> {
        if !WinogradWeight::suits(gpu, task) {
            return Ok(None);
        }
        Ok(Some(Box::new(WinogradWeight::new(gpu, task)?)))
    }
}

impl WinogradWeight {
    pub(crate) fn suits(gpu: &Gpu, task: &Task<'_>) -> bool {
        let (spec, p) = (task.spec, task.problem);
        p.is_winograd()
            && p.c.min(p.k) >= MIN_CHANNELS
            && spec.accuracy
                >= if spec.x.dtype == DType::F32 { Accuracy::Fp32 } else { Accuracy::Half }
            && (in_halves(gpu, spec) || gpu.check_gemm().is_ok())
    }

    fn new(gpu: &'static Gpu, task: &Task<'_>) -> Result<Self> {
        let (spec, p) = (task.spec, task.problem);
        let halves = in_halves(gpu, spec);
        let stage = |image: &TensorDesc| match halves {
            true => Stage { parts: 2, ..Stage::of(image, DType::F16) },
            false => Stage::of(image, image.dtype),
        };
        let (v, dm, tile) = (stage(&spec.x), stage(&spec.y), tile_of(spec.x.dtype));
        let blocking = Blocking::new(tile, p, &[v, dm], gpu.info.l2_cache, None, None);
        let (blocking, product) = if halves {
            let blocking = blocking.in_steps(STEP_ROWS);
            let shape = Shape {
                octets: [dm, v].map(|stage| stage.padded * DType::F16.size() / OCTET_BYTES),
                positions: blocking.positions,
                rows: blocking.tiles,
            };
            let max = [ImageMax::of_all(gpu, &spec.x)?, ImageMax::of_all(gpu, &spec.y)?];
            (blocking, Product::Halves(WeightProduct::new(gpu, shape)?, max))
        } else {
            (blocking, Product::Library(Gemm::new(gpu, &product(spec, p, &blocking, v, dm))?))
        };
        let [x_kernel, dy_kernel] = kernels(spec, halves);
        Ok(WinogradWeight {
            tile,
            spec: spec.clone(),
            problem: *p,
            blocking,
            v,
            dm,
            x_transform: InputTransform::new(gpu, &x_kernel, &spec.x, v, p.padding, THREADS)?,
            dy_transform: InputTransform::new(gpu, &dy_kernel, &spec.y, dm, [0, 0], THREADS)?,
            product,
            filter_grad: OutputKernels::new(gpu, spec.w.dtype, |dw| filter_grad_kernel(tile, dw))?,
        })
    }

    /// Elements of a part of dU.
    fn du_elements(&self) -> usize {
        self.blocking.positions * self.problem.k * self.v.padded
    }

    /// Parts of dU. The library adds the chunks up.
    fn parts(&self) -> usize {
        match &self.product {
            Product::Library(_) => 1,
            Product::Halves(product, _) => self.blocking.chunks * product.parts(),
        }
    }

    fn du_bytes(&self) -> usize {
        (self.parts() * self.du_elements() * size_of::<f32>()).next_multiple_of(ALIGNMENT)
    }

    /// The stage of dy or x as an operand.
    fn side(&self, halves: *const u8, max: *const u8, of_dy: bool) -> Side {
        let (stage, tiles) = (if of_dy { self.dm } else { self.v }, self.blocking.tiles);
        let [dy, x] = exponents(self.tile);
        let position = tiles * stage.padded * DType::F16.size();
        Side {
            low: (self.blocking.positions * position) as i64,
            position: position as i64,
            octet: (tiles * OCTET_BYTES) as i64,
            out_channel: if of_dy { self.v.padded as i64 } else { 1 },
            ..Side::new(halves, max, stage.channels, if of_dy { dy } else { x })
        }
    }
}

impl WeightGradient for WinogradWeight {
    fn tile(&self) -> Option<usize> {
        Some(self.tile.m())
    }

    fn scratch_bytes(&self) -> usize {
        let b = &self.blocking;
        let of_product = match &self.product {
            Product::Library(gemm) => gemm.workspace_bytes(),
            Product::Halves(..) => 2 * size_of::<u32>(),
        };
        self.v.bytes(b) + self.dm.bytes(b) + self.du_bytes() + of_product
    }

    /// Relative to `reference::winograd_weight_scale`, as the forward direction's tolerance.
    fn tolerance(&self) -> f64 {
        let (operand, terms) = match &self.product {
            Product::Library(_) => {
                (operand_rounding(&self.spec), self.blocking.tiles + self.blocking.chunks)
            }
            // The product of two low parts is left out.
            Product::Halves(product, _) => {
                (1.5 * split::rounding(), product.roundings() + self.parts())
            }
        };
        growth(&self.tile.transforms()) * roundings(operand, terms)
    }

    unsafe fn run(&self, stream: &Stream, operands: &WeightOperands<'_>) -> Result<()> {
        let &WeightOperands { x, dy, dw, desc, scratch } = operands;
        let (p, b) = (&self.problem, &self.blocking);
        let v = scratch;
        let dm = v.wrapping_add(self.v.bytes(b));
        let du = dm.wrapping_add(self.dm.bytes(b));
        let workspace = du.wrapping_add(self.du_bytes());
        let (maxes, of_v) = (workspace, workspace.wrapping_add(size_of::<u32>()));
        if let Product::Halves(_, [x_max, dy_max]) = &self.product {
            // SAFETY: the scratch memory is as large as asked for, the rest is the caller's promise.
            unsafe {
                x_max.run(stream, x, 1, of_v)?;
                dy_max.run(stream, dy, 1, maxes)?;
            }
        }
        for chunk in 0..b.chunks {
            let tiling = b.tiling(p.n, chunk);
            // SAFETY: as above.
            unsafe {
                self.x_transform.run(stream, x, of_v, v, b, tiling)?;
                self.dy_transform.run(stream, dy, maxes, dm, b, tiling)?;
                match &self.product {
                    Product::Library(gemm) => {
                        let operands = GemmOperands { a: dm, b: v, c: du, workspace };
                        gemm.run(operands, stream, chunk > 0)?;
                    }
                    Product::Halves(product, _) => {
                        let position = p.k * self.v.padded;
                        let part = self.du_elements();
                        let first = chunk * product.parts() * part * size_of::<f32>();
                        let sides = [self.side(dm, maxes, true), self.side(v, of_v, false)];
                        let out = du.wrapping_add(first);
                        product.run(stream, sides, Taps::one(), out, [part, position])?;
                    }
                }
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
            parts: self.parts() as i32,
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

/// True if [`WeightProduct`] multiplies.
fn in_halves(gpu: &Gpu, spec: &Conv2dSpec) -> bool {
    is_strict(spec)
        && gpu.has(Feature::WarpgroupProducts)
        && [&spec.x, &spec.y].into_iter().all(ImageMax::supports_all)
}

/// The same by the library.
fn product(spec: &Conv2dSpec, p: &Problem, b: &Blocking, v: Stage, dm: Stage) -> GemmSpec {
    GemmSpec {
        m: p.k,
        n: v.padded,
        k: b.tiles,
        batch: b.positions,
        a: dm.matrix(b, false),
        b: v.matrix(b, true),
        c: Matrix {
            dtype: DType::F32,
            transposed: false,
            row_stride: v.padded,
            batch_stride: p.k * v.padded,
            alignment: ALIGNMENT,
        },
        compute: compute(spec),
    }
}

/// The precision of a spec's products.
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

/// The exponents that dy and x are scaled to where they are split.
fn exponents(tile: Tile) -> [i32; 2] {
    let t = tile.transforms();
    [split::exponent(&output_grad(&t), 2), split::exponent(&t.bt, 2)]
}

/// A, of alpha rows.
fn output_grad(t: &Transforms) -> [[Rational; MAX_ALPHA]; MAX_ALPHA] {
    let mut a = [t.at[0]; MAX_ALPHA];
    for (j, row) in a.iter_mut().enumerate() {
        *row = std::array::from_fn(|i| t.at[i][j]);
    }
    a
}

/// The kernels that transform x and dy.
fn kernels(spec: &Conv2dSpec, halves: bool) -> [KernelSpec; 2] {
    let tile = tile_of(spec.x.dtype);
    let (t, [dy, x]) = (tile.transforms(), exponents(tile));
    let of = |kernel: KernelSpec, exponent: i32, shrinkage: f32| match halves {
        true => kernel
            .define("PARTS", 2)
            .define("EXPONENT", exponent)
            .define("SHRINKAGE", format!("{shrinkage:?}f")),
        false => kernel,
    };
    [
        of(input_kernel("input", tile, &spec.x, &t.bt, t.alpha, THREADS), x, 0.0),
        of(
            input_kernel("output_grad", tile, &spec.y, &output_grad(&t), t.m, THREADS),
            dy,
            SHRINKAGE,
        ),
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
        let specs = crate::conv2d::gpu::test_specs();
        let mut all: Vec<_> = specs.iter().flat_map(|spec| kernels(spec, false)).collect();
        let halves = specs.iter().filter(|spec| spec.x.dtype == DType::F32);
        all.extend(halves.flat_map(|spec| kernels(spec, true)));
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
