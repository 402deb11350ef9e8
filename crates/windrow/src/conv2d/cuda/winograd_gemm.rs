//! Winograd in stages on any device: filter, input and output transforms (`kernels/winograd_*.cu`)
//! around one strided-batched matrix product for all positions of the transform tile.

use super::row::matrix;
use super::stages::{
    ALIGNMENT, Blocking, InputTransform, Stage, THREADS, Tiling, input_kernel, one_thread_each,
    staged_kernel,
};
use super::{Divisor, Operands, PackedForm, bias_of, epilogue, source, strides};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::winograd::TAPS;
use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec, Problem, Tile};
use crate::cuda::{
    DeviceBuffer, DeviceTensor, Gemm, GemmCompute, GemmSpec, Gpu, Kernel, KernelSpec, Matrix,
    Source, Stream, download,
};
use crate::{Accuracy, DType, Layout, Result, TensorDesc, TensorRef};
use std::sync::Arc;

static FILTER: Source = source!("winograd_filter.cu");
static OUTPUT: Source = source!("winograd_output.cu");

/// A convolution by this algorithm. V has x's type, M is f32; both hold one chunk of tiles.
#[derive(Debug)]
pub(crate) struct WinogradGemm {
    tile: Tile,
    spec: Conv2dSpec,
    problem: Problem,
    cut: Cut,
    v: Stage,
    m: Stage,
    filter: &'static Kernel,
    input: InputTransform,
    output: &'static Kernel,
    gemm: Gemm,
}

/// How the work is cut: the parameters of a configuration.
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
fn stages(spec: &Conv2dSpec) -> [Stage; 2] {
    [Stage::of(&spec.x, spec.x.dtype), Stage::of(&spec.y, DType::F32)]
}

/// `M = U V` or, with channels of M next to each other, its transpose. U is [p][k][c].
fn product(b: &Blocking, v: &Stage, m: &Stage, compute: GemmCompute) -> GemmSpec {
    let (k, c) = (m.channels, v.padded);
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
        compute,
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FilterParams {
    w: *const u8,
    u: *mut u8,
    strides: [i64; 4],
    elements: i64,
    c: i32,
    c_padded: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct OutputParams {
    m: *const u8,
    y: *mut u8,
    bias: *const u8,
    strides: [i64; 4],
    bias_stride: i64,
    m_strides: [i64; 3],
    tiling: Tiling,
    inner: Divisor,
    elements: i32,
    oh: i32,
    ow: i32,
    bias_is_float: i32,
    pairs: i32,
}

impl WinogradGemm {
    pub(super) fn supports(problem: &Problem) -> bool {
        problem.is_winograd() && problem.c > 0 && Gemm::available().is_ok()
    }

    /// By the configuration, where it says nothing by the model.
    pub(super) fn cut(
        gpu: &Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        tile: Tile,
        configuration: &Conv2dConfiguration,
    ) -> Cut {
        let most = configuration.tiles;
        let blocking = Blocking::new(tile, problem, &stages(spec), gpu.info.l2_cache, most);
        Cut { blocking, block: configuration.block.unwrap_or(THREADS) }
    }

    pub(super) fn new(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        problem: &Problem,
        tile: Tile,
        cut: Cut,
    ) -> Result<Self> {
        let Cut { blocking, block } = cut;
        let [v, m] = stages(spec);
        let [filter, input, output] = kernels(tile, spec, block);
        Ok(WinogradGemm {
            tile,
            spec: spec.clone(),
            problem: *problem,
            cut,
            v,
            m,
            filter: gpu.kernel(&filter)?,
            input: InputTransform::new(gpu, &input, &spec.x, v, problem.padding, block)?,
            output: gpu.kernel(&output)?,
            gemm: Gemm::new(gpu, &product(&blocking, &v, &m, compute(spec)))?,
        })
    }

    pub(super) fn tile(&self) -> usize {
        self.tile.m()
    }

    pub(super) fn configuration(&self, algorithm: Conv2dAlgorithm) -> Conv2dConfiguration {
        self.cut.configuration(algorithm)
    }

    pub(super) fn packed_bytes(&self) -> usize {
        let element = self.v.dtype.size();
        (self.cut.blocking.positions * self.problem.k * self.v.padded * element)
            .next_multiple_of(ALIGNMENT)
    }

    pub(super) fn scratch_bytes(&self) -> usize {
        let b = &self.cut.blocking;
        self.v.bytes(b) + self.m.bytes(b) + self.gemm.workspace_bytes()
    }

    pub(super) fn packed_form(&self) -> PackedForm {
        PackedForm { dtype: self.spec.x.dtype, products: 1, few_taps: false }
    }

    /// U and V are rounded once each, sums of channels once for each channel, and a transform a few
    /// times. What that does to an output is bounded by the square of [`growth`], where all errors
    /// have the worst sign in both dimensions; they do not.
    pub(super) fn tolerance(&self) -> f64 {
        growth(self.tile) * roundings(&self.spec, self.problem.c)
    }

    pub(super) fn explain(&self) -> String {
        let m = self.tile.m();
        format!(
            "F({m}x{m}, 3x3), {} products of cuBLASLt at a time, {} chunks of {} tiles",
            self.cut.blocking.positions, self.cut.blocking.chunks, self.cut.blocking.tiles
        )
    }

    /// # Safety
    /// As [`super::Engine::pack`].
    pub(super) unsafe fn pack(&self, stream: &Stream, w: *const u8, packed: *mut u8) -> Result<()> {
        let elements = self.problem.k * self.v.padded;
        let params = FilterParams {
            w,
            u: packed,
            strides: strides(&self.spec.w),
            elements: elements as i64,
            c: self.problem.c as i32,
            c_padded: self.v.padded as i32,
        };
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { self.filter.launch(stream, one_thread_each(elements, self.cut.block), &params) }
    }

    /// # Safety
    /// As [`super::Engine::run`].
    pub(super) unsafe fn run(
        &self,
        stream: &Stream,
        packed: *const u8,
        operands: Operands,
        scratch: *mut u8,
    ) -> Result<()> {
        let (p, b) = (&self.problem, &self.cut.blocking);
        let v = scratch;
        let m = v.wrapping_add(self.v.bytes(b));
        let gemm_workspace = m.wrapping_add(self.m.bytes(b));
        let (u, v_in) = (packed, v.cast_const());
        let (left, right) = if self.m.channels_inner { (v_in, u) } else { (u, v_in) };
        for chunk in 0..b.chunks {
            let tiling = b.tiling(p.n, chunk);
            let output = self.output_params(tiling, m, &operands);
            // SAFETY: the structure is the kernel's, the scratch memory is as large as asked for,
            // and the caller's promise covers the rest.
            unsafe {
                self.input.run(stream, operands.x, v, b, tiling)?;
                self.gemm.run(left, right, m, gemm_workspace, stream)?;
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
    pub(super) fn stages(
        &self,
        gpu: &'static Gpu,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        let (p, b) = (&self.problem, &self.cut.blocking);
        if b.chunks > 1 {
            return Ok(None);
        }
        let index = gpu.info.index;
        let stream = Arc::new(Stream::new(index)?);
        let mut packed = DeviceBuffer::new(&stream, self.packed_bytes())?;
        let mut scratch = DeviceBuffer::new(&stream, self.scratch_bytes())?;
        let mut y = DeviceTensor::new(self.spec.y, index)?;
        let bias = self.spec.bias.map(|desc| DeviceTensor::new(desc, index)).transpose()?;
        let bias = bias.as_ref().map(|bias| bias.as_ref().as_ptr());
        let operands = Operands { x: x.as_ptr(), bias, y: y.as_mut()?.as_mut_ptr() };
        // SAFETY: the views agree with the spec, and the memory is as large as asked for.
        unsafe {
            self.pack(&stream, w.as_ptr(), packed.as_mut_ptr())?;
            self.run(&stream, packed.as_ptr(), operands, scratch.as_mut_ptr())?;
        }
        stream.synchronize()?;
        let read = |at: *const u8, dtype, [rows, columns]: [usize; 2], strides: [usize; 3]| {
            let layout =
                Layout::strided(&[b.positions, rows, columns], &strides.map(|s| s as isize))?;
            // SAFETY: a stage, which the run above has written.
            let view = unsafe {
                TensorRef::from_raw(at.cast(), TensorDesc { dtype, layout }, gpu.device())
            };
            let values = download(&view, index)?.as_ref().to_f64_vec()?;
            Ok(values.into_iter().map(|v| v as f32).collect())
        };
        let tiles = p.n * b.tiles_in_image;
        let (c, v, m) = (self.v.padded, scratch.as_ptr(), self.v.bytes(b));
        Ok(Some(Stages {
            u: read(packed.as_ptr(), self.v.dtype, [p.k, p.c], [p.k * c, c, 1])?,
            v: read(v, self.v.dtype, [tiles, p.c], self.v.strides(b.tiles))?,
            m: read(v.wrapping_add(m), DType::F32, [tiles, p.k], self.m.strides(b.tiles))?,
        }))
    }

    /// Relative errors of U and V as stored and as multiplied.
    pub(super) fn operand_roundings(&self) -> (f64, f64) {
        (self.spec.x.dtype.unit_roundoff(), operand_rounding(&self.spec))
    }

    fn output_params(&self, tiling: Tiling, m: *const u8, operands: &Operands) -> OutputParams {
        let (p, b) = (&self.problem, &self.cut.blocking);
        let (bias, bias_stride, bias_is_float) = bias_of(&self.spec, operands.bias);
        let y_strides = strides(&self.spec.y);
        let even = y_strides[..3].iter().all(|s| s % 2 == 0);
        let aligned = (operands.y as usize).is_multiple_of(2 * self.v.dtype.size());
        OutputParams {
            m,
            y: operands.y,
            bias,
            strides: y_strides,
            bias_stride,
            m_strides: self.m.strides(b.tiles).map(|s| s as i64),
            tiling,
            inner: self.m.inner(b, p.k),
            elements: (b.tiles * p.k) as i32,
            oh: p.oh as i32,
            ow: p.ow as i32,
            bias_is_float,
            pairs: i32::from(y_strides[3] == 1 && even && aligned),
        }
    }
}

/// How the products of a spec may be computed.
pub(super) fn compute(spec: &Conv2dSpec) -> GemmCompute {
    match (spec.x.dtype, spec.accuracy) {
        (DType::F32, Accuracy::Tf32 | Accuracy::Half) => GemmCompute::Tf32,
        _ => GemmCompute::F32,
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

/// Relative error of a sum of `terms` products of transformed and rounded operands.
pub(super) fn roundings(spec: &Conv2dSpec, terms: usize) -> f64 {
    2.0 * operand_rounding(spec) + (2 * terms + 16) as f64 * DType::F32.unit_roundoff()
}

/// How much one dimension of the transforms can raise errors of U and V, relative to the largest
/// input of a tile times the sum of the filter's taps: the largest row of `|A^T| (|B^T| 1 * max |G|)`.
fn growth(tile: Tile) -> f64 {
    let t = tile.transforms();
    let input = |j: usize| t.bt[j].iter().map(|b| b.to_f64().abs()).sum::<f64>();
    let filter = |j: usize| t.g[j].iter().map(|g| g.to_f64().abs()).fold(0.0, f64::max);
    let row = |i: usize| {
        (0..t.alpha).map(|j| t.at[i][j].to_f64().abs() * input(j) * filter(j)).sum::<f64>()
    };
    (0..t.m).map(row).fold(0.0, f64::max)
}

/// Of the filter, input and output transforms, in blocks of so many threads.
fn kernels(tile: Tile, spec: &Conv2dSpec, block: usize) -> [KernelSpec; 3] {
    let (t, dtype) = (tile.transforms(), spec.x.dtype);
    [
        staged_kernel(&FILTER, "filter", tile, dtype, block)
            .define("FILTER", matrix(&t.g, t.alpha, TAPS)),
        input_kernel("input", tile, &spec.x, &t.bt, t.alpha, block),
        staged_kernel(&OUTPUT, "output", tile, dtype, block)
            .define("OUTPUT", matrix(&t.at, t.m, t.alpha))
            .define("CHANNELS_INNER", i32::from(is_channels_last(&spec.y.layout)))
            .define("EPILOGUE", epilogue(spec.activation)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::cuda::test_specs;
    use crate::{Activation, Approximate};

    #[test]
    fn kernels_compile_without_spills() {
        let mut all = Vec::new();
        for tile in Tile::ALL {
            for spec in test_specs() {
                all.extend(kernels(tile, &spec, THREADS));
                let activation = Activation::Gelu(Approximate::None);
                all.push(kernels(tile, &Conv2dSpec { activation, ..spec }, THREADS)[2].clone());
            }
        }
        crate::cuda::compile_tests::check_compiles(&all);
    }

    #[test]
    fn growth_is_that_of_the_transforms() {
        let [f2, f4, f6] = Tile::ALL.map(growth);
        assert!(f2 == 4.0 && (13.0..14.0).contains(&f4) && (40.0..41.0).contains(&f6));
    }
}
