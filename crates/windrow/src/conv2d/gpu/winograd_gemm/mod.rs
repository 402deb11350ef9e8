//! Non-fused Winograd on any GPU: filter, input and output transforms (`winograd_*.cu`) as separate kernels, around one
//! strided-batched matrix product for all positions of the transformed tile.
//!
//! f32 is multiplied as f16 on tensor cores. For accuracy `Fp32`, each number is split into two f16 parts, of which
//! three products are summed (`winograd.cuh`).

mod method;
mod pieces;
pub(super) mod stages;

use self::method::tile_of;
pub(super) use self::method::{WinogradGemmMethod, largest_tile, micros, tiles};
use self::pieces::{packed_bytes, u_bytes};
use self::stages::{
    Blocking, InputTransform, Stage, THREADS, Tiling, input_kernel, one_thread_each, staged_kernel,
};
use super::prepared::{Operands, PackTo, PackedForm, Prepared};
use super::shape::Output;
use super::shared::matrix::matrix;
use super::split::{self, ImageMax};
use super::task::Task;
use super::{ALIGNMENT, Divisor, Seen, source, strides, with_epilogue};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::winograd::TAPS;
use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, Tile};
use crate::dtype::not_computed;
use crate::gpu::{
    DeviceBuffer, DeviceTensor, Feature, Gemm, GemmCompute, GemmOperands, GemmSpec, Gpu, Kernel,
    KernelSpec, Launch, Matrix, Source, Stream, download, params,
};
use crate::{Accuracy, DType, Layout, Result, TensorDesc, TensorRef};
use std::sync::Arc;

static FILTER: Source = source!("winograd_filter.cu", "winograd.cuh");
static OUTPUT: Source = source!("winograd_output.cu", "winograd.cuh");

/// A convolution by this algorithm. V is f16 or bf16, M f32; both hold one chunk of tiles.
#[derive(Debug)]
pub(crate) struct WinogradGemm {
    tile: Tile,
    spec: Conv2dSpec,
    problem: Problem,
    cut: Cut,
    v: Stage,
    m: Stage,
    filter: &'static Kernel,
    /// The kernel that finds the largest magnitudes, for f32.
    image_max: Option<ImageMax>,
    input: InputTransform,
    output: &'static Kernel,
    gemm: Gemm,
}

/// The division of the work: the parameters of a configuration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    blocking: Blocking,
    /// Threads of a block of the transforms.
    block: usize,
}

impl Cut {
    pub(super) fn configuration(&self, algorithm: Conv2dAlgorithm) -> Conv2dConfiguration {
        let (tiles, block) = (Some(self.blocking.tiles), Some(self.block));
        Conv2dConfiguration { tiles, block, ..Conv2dConfiguration::new(algorithm) }
    }
}

/// V and M.
pub(super) fn stages(spec: &Conv2dSpec) -> [Stage; 2] {
    let v = match spec.x.dtype {
        DType::F32 => Stage { parts: parts(spec), ..Stage::of(&spec.x, DType::F16) },
        dtype @ (DType::F16 | DType::BF16 | not_computed!()) => Stage::of(&spec.x, dtype),
    };
    [v, Stage::of(&spec.y, DType::F32)]
}

/// The number of f16 parts that stand for an f32 number.
fn parts(spec: &Conv2dSpec) -> usize {
    if spec.accuracy <= Accuracy::Fp32 { 3 } else { 1 }
}

/// `M = U V` or, with channels of M next to each other, its transpose. U is [p][k][part, c].
fn product(b: &Blocking, v: &Stage, m: &Stage) -> GemmSpec {
    let (k, c) = (m.channels, v.rows());
    let tiles_first = m.channels_inner;
    let u = Matrix {
        dtype: v.dtype,
        transposed: tiles_first,
        row_stride: c,
        batch_stride: k * c,
        alignment: ALIGNMENT,
    };
    // A product of U on the left takes V as channels by tiles; on the right, as tiles by channels.
    let v = v.matrix(b, tiles_first);
    let (rows, columns, left, right) =
        if tiles_first { (b.tiles, k, v, u) } else { (k, b.tiles, u, v) };
    GemmSpec {
        m: rows,
        n: columns,
        k: c,
        batch: b.positions,
        a: left,
        b: right,
        c: m.matrix(b, tiles_first),
        compute: GemmCompute::F32,
    }
}

params! {
    struct FilterParams {
        w: *const u8,
        u: *mut u8,
        inverse: *mut u8,
        strides as [w_k, w_c, w_r, w_s]: [i64; 4],
        plane: i64,
        seen: Seen,
        c: i32,
        c_padded: i32,
        shrinkage: f32,
    }
}

params! {
    struct OutputParams: Output {
        m: *const u8,
        x_max: *const u8,
        u_inverse: *const u8,
        m_strides as [plane, m_tile, m_channel]: [i64; 3],
        tiling: Tiling,
        inner: Divisor,
        elements: i32,
        pairs: i32,
    }
}

impl WinogradGemm {
    /// The division by the configuration. The cost model chooses the parameters that the configuration leaves open.
    /// Packed filter and scratch memory together stay within the options' memory, if that is given.
    fn cut(task: &Task<'_>) -> Cut {
        let Task { chip, spec, problem, configuration, options, .. } = task;
        let tile = tile_of(task);
        let room = options.memory.map(|memory| pieces::tiles(task, tile, memory));
        let stages = stages(spec);
        let blocking =
            Blocking::new(tile, problem, &stages, chip.l2_cache, configuration.tiles, room);
        Cut { blocking, block: configuration.block.unwrap_or(THREADS) }
    }

    fn new(gpu: &'static Gpu, task: &Task<'_>) -> Result<Self> {
        let (spec, problem, tile) = (task.spec, task.problem, tile_of(task));
        let cut = Self::cut(task);
        let Cut { blocking, block } = cut;
        let [v, m] = stages(spec);
        let [filter, input, output] = kernels(tile, spec, block);
        let [pack_filter, _, transform_output] = gpu.kernels([&filter, &input, &output])?;
        let product = |blocking: &Blocking| product(blocking, &v, &m);
        let of_choice = || task.for_choice(|task| product(&Self::cut(task).blocking));
        let like = task.options.batch_invariant.then(of_choice);
        Ok(WinogradGemm {
            tile,
            spec: spec.clone(),
            problem: *problem,
            cut,
            v,
            m,
            filter: pack_filter,
            image_max: (spec.x.dtype == DType::F32)
                .then(|| ImageMax::new(gpu, &spec.x))
                .transpose()?,
            input: InputTransform::new(gpu, &input, &spec.x, v, problem.padding, block)?,
            output: transform_output,
            gemm: Gemm::with_order(gpu, &product(&blocking), like.as_ref())?,
        })
    }

    fn u_bytes(&self) -> usize {
        u_bytes(self.tile, &self.v, &self.problem)
    }

    fn output_params(
        &self,
        tiling: Tiling,
        m: *const u8,
        x_max: *const u8,
        packed: *const u8,
        operands: &Operands,
    ) -> OutputParams {
        let (p, b) = (&self.problem, &self.cut.blocking);
        let base = Output::new(&self.spec, &self.spec.y, operands);
        let even = base.y_strides[..3].iter().all(|s| s % 2 == 0);
        let aligned = operands.is_out_aligned(2 * self.spec.y.dtype.size());
        OutputParams {
            base,
            m,
            x_max,
            u_inverse: packed.wrapping_add(self.u_bytes()),
            m_strides: self.m.strides(b.tiles).map(|s| s as i64),
            tiling,
            inner: self.m.inner(b, p.k),
            elements: (b.tiles * p.k) as i32,
            pairs: i32::from(base.y_strides[3] == 1 && even && aligned),
        }
    }
}

impl Prepared for WinogradGemm {
    fn tile(&self) -> Option<usize> {
        Some(self.tile.m())
    }

    fn configuration(&self, algorithm: Conv2dAlgorithm) -> Conv2dConfiguration {
        self.cut.configuration(algorithm)
    }

    fn packed_bytes(&self) -> usize {
        packed_bytes(self.tile, &self.spec, &self.problem)
    }

    /// Bytes of the checksums that are stored after a packed filter: see [`Seen`].
    fn seen_bytes(&self) -> usize {
        self.problem.k * Seen::DIGEST
    }

    fn scratch_bytes(&self) -> usize {
        let b = &self.cut.blocking;
        ImageMax::bytes(&self.spec.x)
            + self.v.bytes(b)
            + self.m.bytes(b)
            + self.gemm.workspace_bytes()
    }

    fn packed_form(&self) -> PackedForm {
        PackedForm::new("winograd_gemm", self.spec.x.dtype, self.v.parts, self.tile.m())
    }

    /// U and V are rounded once each, sums of channels once for each channel, and a transform a few
    /// times. What that does to an output is bounded by the square of [`growth`], where all errors
    /// have the worst sign in both dimensions; they do not.
    fn tolerance(&self) -> f64 {
        let (_, operand) = self.operand_roundings();
        growth(self.tile) * roundings(operand, self.problem.c)
    }

    fn explain(&self) -> String {
        let m = self.tile.m();
        format!(
            "F({m}x{m}, 3x3), {} products of cuBLASLt at a time{}, {} chunks of {} tiles",
            self.cut.blocking.positions,
            if self.v.parts > 1 { " of f32 split in f16 parts" } else { "" },
            self.cut.blocking.chunks,
            self.cut.blocking.tiles
        )
    }

    unsafe fn pack(&self, stream: &Stream, w: *const u8, to: PackTo) -> Result<()> {
        let params = FilterParams {
            w,
            u: to.memory,
            inverse: to.memory.wrapping_add(self.u_bytes()),
            strides: strides(&self.spec.w),
            plane: (self.problem.k * self.v.rows()) as i64,
            seen: Seen::behind(to, self.packed_bytes()),
            c: self.problem.c as i32,
            c_padded: self.v.padded as i32,
            // The small terms, which come first, hardly lose anything.
            shrinkage: match stream.gpu().has(Feature::TruncatedSums) {
                true => (split::SHRINKAGE * self.problem.c as f64 / 16.0) as f32,
                false => 0.0,
            },
        };
        let launch = Launch::line(self.problem.k, self.cut.block);
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.filter.launch(stream, launch, &params) }
    }

    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()> {
        let (p, b) = (&self.problem, &self.cut.blocking);
        let x_max = operands.scratch;
        let v = x_max.wrapping_add(ImageMax::bytes(&self.spec.x));
        let m = v.wrapping_add(self.v.bytes(b));
        let workspace = m.wrapping_add(self.m.bytes(b));
        if let Some(image_max) = &self.image_max {
            // SAFETY: part of the scratch memory; the rest is the caller's promise.
            unsafe { image_max.run(stream, operands.x, p.n, x_max)? };
        }
        let (u, v_in) = (packed, v.cast_const());
        let (left, right) = if self.m.channels_inner { (v_in, u) } else { (u, v_in) };
        let product = GemmOperands { a: left, b: right, c: m, workspace };
        for chunk in 0..b.chunks {
            let tiling = b.tiling(p.n, chunk);
            let output = self.output_params(tiling, m, x_max, packed, &operands);
            // SAFETY: the structure is the kernel's, the scratch memory is as large as asked for,
            // and the caller's promise covers the rest.
            unsafe {
                self.input.run(stream, operands.x, x_max, v, b, tiling)?;
                self.gemm.run(product, stream, false)?;
                self.output.launch(
                    stream,
                    one_thread_each(b.tiles * p.k, self.cut.block),
                    &output,
                )?;
            }
        }
        Ok(())
    }

    /// U, V and M of one run, as the oracle orders them; `None` if there are several chunks.
    ///
    /// # Errors
    /// [`crate::Error::Backend`], [`crate::Error::OutOfMemory`].
    fn winograd_stages(
        &self,
        gpu: &'static Gpu,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        let (p, b) = (&self.problem, &self.cut.blocking);
        if b.chunks > 1 {
            return Ok(None);
        }
        let device = gpu.device();
        let stream = Arc::new(Stream::new(device)?);
        let mut packed = DeviceBuffer::new(&stream, self.packed_bytes())?;
        let mut scratch = DeviceBuffer::new(&stream, self.scratch_bytes())?;
        let mut y = DeviceTensor::new(self.spec.y, device)?;
        let bias = self.spec.bias.map(|desc| DeviceTensor::new(desc, device)).transpose()?;
        // Any content: y is not read.
        let residual =
            self.spec.residual.then(|| DeviceTensor::new(self.spec.y, device)).transpose()?;
        let [bias, residual] =
            [&bias, &residual].map(|t| t.as_ref().map(|tensor| tensor.as_ref().as_ptr()));
        let (y, scratch_at) = (y.as_mut()?.as_mut_ptr(), scratch.as_mut_ptr());
        let operands =
            Operands { x: x.as_ptr(), bias, residual, initial: None, y, scratch: scratch_at };
        // SAFETY: the views agree with the spec, and the memory is as large as asked for.
        unsafe {
            let to = PackTo { memory: packed.as_mut_ptr(), ticket: None };
            self.pack(&stream, w.as_ptr(), to)?;
            self.run(&stream, packed.as_ptr(), operands)?;
        }
        stream.synchronize()?;
        let read = |at: *const u8, dtype, shape: &[usize], strides: &[usize]| {
            let strides: Vec<_> = strides.iter().map(|&s| s as isize).collect();
            let layout = Layout::strided(shape, &strides)?;
            // SAFETY: part of a stage or of what belongs to it, which the run above has written.
            let view =
                unsafe { TensorRef::from_raw(at.cast(), TensorDesc { dtype, layout }, device) };
            download(&view)?.as_ref().to_f64_vec()
        };
        // The sum of the two parts of an operand, the first of the three that may be stored.
        let operand = |at: *const u8, shape: [usize; 3], strides: [usize; 3]| {
            let mut values = read(at, self.v.dtype, &shape, &strides)?;
            if self.v.parts > 1 {
                let part = at.wrapping_add(self.v.padded * strides[2] * self.v.dtype.size());
                let rest = read(part, self.v.dtype, &shape, &strides)?;
                values.iter_mut().zip(rest).for_each(|(value, rest)| *value += rest);
            }
            Ok(values)
        };
        let x_max = scratch.as_ptr();
        let v = x_max.wrapping_add(ImageMax::bytes(&self.spec.x));
        let m = v.wrapping_add(self.v.bytes(b));
        let (tiles, c) = (p.n * b.tiles_in_image, self.v.rows());
        let mut stages = Stages {
            u: operand(packed.as_ptr(), [b.positions, p.k, p.c], [p.k * c, c, 1])?,
            v: operand(v, [b.positions, tiles, p.c], self.v.strides(b.tiles))?,
            m: read(m, DType::F32, &[b.positions, tiles, p.k], &self.m.strides(b.tiles))?,
        };
        if self.image_max.is_some() {
            let exponent = split::exponent(&self.tile.transforms().bt, 2);
            let of_image = |max: &f64| split::inverse_scale(*max as u32, exponent);
            let x: Vec<_> = read(x_max, DType::I32, &[p.n], &[1])?.iter().map(of_image).collect();
            let inverse = packed.as_ptr().wrapping_add(self.u_bytes());
            let u = read(inverse, DType::F32, &[p.k], &[1])?;
            let image = |row: usize| x[row % tiles / b.tiles_in_image];
            stages.u.iter_mut().enumerate().for_each(|(i, value)| *value *= u[i / p.c % p.k]);
            stages.v.iter_mut().enumerate().for_each(|(i, value)| *value *= image(i / p.c));
            stages
                .m
                .iter_mut()
                .enumerate()
                .for_each(|(i, value)| *value *= image(i / p.k) * u[i % p.k]);
        }
        let f32s = |values: Vec<f64>| values.into_iter().map(|v| v as f32).collect();
        Ok(Some(Stages { u: f32s(stages.u), v: f32s(stages.v), m: f32s(stages.m) }))
    }

    /// Relative errors of U and V as stored and as multiplied.
    fn operand_roundings(&self) -> (f64, f64) {
        if self.v.parts > 1 {
            // The product of two low parts is left out.
            (split::rounding(), 1.5 * split::rounding())
        } else {
            let rounding = self.v.dtype.unit_roundoff();
            (rounding, rounding)
        }
    }

    /// Numbers with a common scale keep steps of the same size, so the smallest lose bits.
    fn underflows(&self) -> [f64; 2] {
        if self.image_max.is_none() {
            return [0.0; 2];
        }
        let t = self.tile.transforms();
        [split::exponent(&t.g, 2), split::exponent(&t.bt, 2)].map(split::underflow)
    }
}

/// Relative error of a sum of `terms` products of transformed operands with a rounding of `operand`.
pub(super) fn roundings(operand: f64, terms: usize) -> f64 {
    2.0 * operand + (2 * terms + 16) as f64 * DType::F32.unit_roundoff()
}

/// The factor by which one dimension of the transforms can raise errors of U and V, relative to the largest input of a
/// tile times the sum of the filter's taps: the largest row of `|A^T| (|B^T| 1 * max |G|)`.
fn growth(tile: Tile) -> f64 {
    let t = tile.transforms();
    let input = |j: usize| t.bt[j].iter().map(|b| b.to_f64().abs()).sum::<f64>();
    let filter = |j: usize| t.g[j].iter().map(|g| g.to_f64().abs()).fold(0.0, f64::max);
    let row = |i: usize| {
        (0..t.alpha).map(|j| t.at[i][j].to_f64().abs() * input(j) * filter(j)).sum::<f64>()
    };
    (0..t.m).map(row).fold(0.0, f64::max)
}

/// The kernels of the filter, input and output transforms, in blocks of `block` threads.
fn kernels(tile: Tile, spec: &Conv2dSpec, block: usize) -> [KernelSpec; 3] {
    let (t, dtype) = (tile.transforms(), spec.x.dtype);
    let v_exponent = split::exponent(&t.bt, 2);
    let scaled = |kernel: KernelSpec, exponent: i32| match dtype {
        DType::F32 => kernel.define("PARTS", parts(spec)).define("EXPONENT", exponent),
        DType::F16 | DType::BF16 | not_computed!() => kernel,
    };
    [
        scaled(
            staged_kernel(&FILTER, "filter", tile, dtype, block)
                .define("FILTER", matrix(&t.g, t.alpha, TAPS))
                .params::<FilterParams>()
                .overlapped(false),
            split::exponent(&t.g, 2),
        ),
        scaled(input_kernel("input", tile, &spec.x, &t.bt, t.alpha, block), v_exponent),
        scaled(
            with_epilogue(staged_kernel(&OUTPUT, "output", tile, dtype, block), spec)
                .define("OUTPUT", matrix(&t.at, t.m, t.alpha))
                .params::<OutputParams>()
                .define("CHANNELS_INNER", i32::from(is_channels_last(&spec.y.layout))),
            v_exponent,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::gpu::{test_specs, with_largest_epilogue};

    #[test]
    fn kernels_compile_without_spills() {
        let mut all = Vec::new();
        for tile in Tile::ALL {
            for spec in test_specs() {
                all.extend(kernels(tile, &spec, THREADS));
                if spec.x.dtype == DType::F32 {
                    let rounded = Conv2dSpec { accuracy: Accuracy::Tf32, ..spec.clone() };
                    all.extend(kernels(tile, &rounded, THREADS));
                }
                all.push(kernels(tile, &with_largest_epilogue(spec), THREADS)[2].clone());
            }
        }
        crate::gpu::compile_tests::check_compiles(&all);
    }

    #[test]
    fn growth_is_that_of_the_transforms() {
        let [f2, f4, f6] = Tile::ALL.map(growth);
        assert!(f2 == 4.0 && (13.0..14.0).contains(&f4) && (40.0..41.0).contains(&f6));
    }
}
