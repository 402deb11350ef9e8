//! The weight gradient in f32 as three products of f16 parts, for any filter, stride, padding and dilation: dy and x
//! are split (`weight_split.cu`) and multiplied by [`WeightProduct`].

use super::lines::Lines;
use super::winograd_weight::WinogradWeight;
use crate::conv2d::gpu::facts::is_strict;
use crate::conv2d::gpu::gradient::{GradientMethod, WeightGradient, WeightOperands};
use crate::conv2d::gpu::shared::parameters::one_thread_each;
use crate::conv2d::gpu::shared::weight_product::{
    OCTET, OCTET_BYTES, SHRINKAGE, Shape, Side, Taps, WeightProduct,
};
use crate::conv2d::gpu::split::{self, ImageMax};
use crate::conv2d::gpu::task::Task;
use crate::conv2d::gpu::{ALIGNMENT, Divisor, kernel, source, strides};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dAlgorithm, Problem};
use crate::gpu::{Feature, Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::{DType, Result, TensorDesc};

static SPLIT: Source = source!("weight_split.cu");
static SUM: Source = source!("weight_sum.cu");

/// The largest magnitudes of operands are below 2^(exponent + 1).
const EXPONENT: i32 = 14;
const THREADS: usize = 256;
const VECTOR: usize = 4;
const MAX_GRID: usize = 65_535;

/// An operand and the kernels that split it.
#[derive(Debug)]
struct Operand {
    desc: TensorDesc,
    channels: usize,
    octets: usize,
    rows: usize,
    planes: usize,
    max: ImageMax,
    aligned: &'static Kernel,
    unaligned: &'static Kernel,
}

/// A weight gradient by this algorithm.
#[derive(Debug)]
struct SplitWeight {
    problem: Problem,
    lines: Lines,
    dy: Operand,
    x: Operand,
    product: WeightProduct,
    sum: &'static Kernel,
}

params! {
    struct SplitParams {
        x: *const u8,
        high: *mut u8,
        max: *const u8,
        low: i64,
        x_strides as [x_n, x_c, x_h, x_w]: [i64; 4],
        n: i32,
        c: i32,
        h: i32,
        w: i32,
        pad as [pad_h, pad_w]: [i32; 2],
        stride as [stride_h, stride_w]: [i32; 2],
        dilation as [dilation_h, dilation_w]: [i32; 2],
        octets: i32,
        rows: i32,
        fold: Divisor,
        pitch: Divisor,
        height: Divisor,
        planes_w: Divisor,
    }
}

params! {
    struct SumParams {
        parts: *const u8,
        out: *mut u8,
        x: *const u8,
        dy: *const u8,
        out_strides as [k_stride, c_stride, r_stride, s_stride]: [i64; 4],
        x_strides as [x_n, x_c, x_h, x_w]: [i64; 4],
        dy_strides as [dy_n, dy_k, dy_h, dy_w]: [i64; 4],
        elements: i64,
        parts_count: i32,
        c: i32,
        r: i32,
        s: i32,
        h: i32,
        w: i32,
        stride as [stride_h, stride_w]: [i32; 2],
        pad as [pad_h, pad_w]: [i32; 2],
        dilation as [dilation_h, dilation_w]: [i32; 2],
        pixels: i32,
        image_pixels: Divisor,
        ow: Divisor,
    }
}

impl Operand {
    fn new(
        gpu: &'static Gpu,
        desc: TensorDesc,
        channels: usize,
        [rows, planes]: [usize; 2],
        shrinkage: f32,
    ) -> Result<Self> {
        let (octets, strides) = (channels.div_ceil(OCTET), strides(&desc));
        let folded = channels != desc.shape()[1];
        let vectors = !folded
            && is_channels_last(&desc.layout)
            && desc.shape()[1].is_multiple_of(VECTOR)
            && [0, 2, 3].iter().all(|&d| strides[d] % VECTOR as i64 == 0);
        Ok(Operand {
            desc,
            channels,
            octets,
            rows,
            planes,
            max: ImageMax::of_all(gpu, &desc)?,
            aligned: gpu.kernel(&split_kernel(&desc, folded, vectors, shrinkage))?,
            unaligned: gpu.kernel(&split_kernel(&desc, folded, false, shrinkage))?,
        })
    }

    /// The bytes of the parts of one kind (high or low).
    fn half_bytes(&self) -> usize {
        self.planes * self.octets * self.rows * OCTET_BYTES
    }

    fn bytes(&self) -> usize {
        (2 * self.half_bytes()).next_multiple_of(ALIGNMENT)
    }

    fn side(&self, halves: *const u8, max: *const u8, out_channel: usize) -> Side {
        Side {
            low: self.half_bytes() as i64,
            octet: (self.rows * OCTET_BYTES) as i64,
            out_channel: out_channel as i64,
            ..Side::new(halves, max, self.channels, EXPONENT)
        }
    }

    /// Splits a tensor; the magnitude to scale by must be at `max`.
    ///
    /// # Safety
    /// As [`SplitWeight::run`].
    unsafe fn split(
        &self,
        stream: &Stream,
        lines: &Lines,
        problem: Option<&Problem>,
        [x, max]: [*const u8; 2],
        high: *mut u8,
    ) -> Result<()> {
        let [n, c, h, w] = std::array::from_fn(|d| self.desc.shape()[d]);
        let [padding, stride, dilation] = match problem {
            Some(p) => [p.padding, p.stride, p.dilation],
            None => [[0; 2], [1; 2], [1; 2]],
        };
        let params = SplitParams {
            x,
            high,
            max,
            low: (self.half_bytes() / DType::F16.size()) as i64,
            x_strides: strides(&self.desc),
            n: n as i32,
            c: self.channels as i32,
            h: h as i32,
            w: w as i32,
            pad: padding.map(|v| v as i32),
            stride: stride.map(|v| v as i32),
            dilation: dilation.map(|v| v as i32),
            octets: self.octets as i32,
            rows: self.rows as i32,
            fold: Divisor::new(c),
            pitch: Divisor::new(lines.pitch),
            height: Divisor::new(lines.height),
            planes_w: Divisor::new(if problem.is_some() { lines.planes[1] } else { 1 }),
        };
        let octets = octets_of_block(&self.desc, self.channels != c);
        let blocks = self.rows.div_ceil(THREADS / octets);
        let grid = [blocks, self.octets.div_ceil(octets), self.planes].map(|b| b as u32);
        let aligned = (x as usize).is_multiple_of(VECTOR * size_of::<f32>());
        let kernel = if aligned { self.aligned } else { self.unaligned };
        let launch = Launch { grid, block: [THREADS as u32, 1, 1] };
        // SAFETY: the structure is the kernel's, the rest is the caller's promise.
        unsafe { kernel.launch(stream, launch, &params) }
    }
}

/// The method [`SplitWeight`], if the plan's algorithm is [`Conv2dAlgorithm::ImplicitGemm`], or if Winograd's algorithm
/// does not compute the gradient and cuDNN's is expected to be slower or is no candidate.
pub(super) struct SplitWeightMethod;

impl GradientMethod<dyn WeightGradient> for SplitWeightMethod {
    fn kernels(&self) -> &'static [&'static str] {
        &[
            "weight_product.cu conv2d_weight_product_f32 BLOCK_N={64,128} sm_90",
            "weight_split.cu conv2d_weight_split_f32 FOLDED={0,1} CHANNELS_INNER=0 VECTOR=1 sm_90",
            "weight_split.cu conv2d_weight_split_f32 FOLDED=0 CHANNELS_INNER=1 VECTOR={1,4} sm_90",
            "weight_sum.cu conv2d_weight_sum_f32 sm_90",
        ]
    }

    fn prepare(
        &self,
        gpu: &'static Gpu,
        task: &Task<'_>,
    ) -> Result<Option<Box<dyn WeightGradient>>> {
        let asked = task.algorithm() == Conv2dAlgorithm::ImplicitGemm;
        let ahead = || {
            !WinogradWeight::suits(gpu, task)
                && (task.options.batch_invariant
                    || SplitWeight::micros(task) < 0.9 * cudnn_micros(task))
        };
        if !SplitWeight::suits(gpu, task) || !asked && !ahead() {
            return Ok(None);
        }
        let split = SplitWeight::new(gpu, task)?;
        Ok(split.map(|split| Box::new(split) as Box<dyn WeightGradient>))
    }
}

/// Expected microseconds of cuDNN's weight gradient in strict f32.
fn cudnn_micros(task: &Task<'_>) -> f64 {
    let (launch, flop) = task.chip.rates.gradients.cudnn_weight;
    launch + flop * task.problem.flops()
}

impl SplitWeight {
    fn suits(gpu: &Gpu, task: &Task<'_>) -> bool {
        let (spec, p) = (task.spec, task.problem);
        let counted = Lines::new(p).is_some_and(|lines| {
            let octets = lines.terms(p)[1].max(p.k).div_ceil(OCTET);
            octets.max(lines.all_planes()) <= MAX_GRID
        });
        is_strict(spec)
            && gpu.has(Feature::WarpgroupProducts)
            && p.groups == 1
            && [p.n, p.c, p.k, p.oh, p.ow].iter().all(|&size| size > 0)
            && p.r * p.s * p.c.div_ceil(OCTET) < MAX_GRID * OCTET
            && counted
            && [&spec.x, &spec.y].into_iter().all(ImageMax::supports_all)
    }

    fn shape(p: &Problem, lines: &Lines) -> Shape {
        let [taps, channels] = lines.terms(p);
        let octets = [p.k.div_ceil(OCTET), taps * channels.div_ceil(OCTET)];
        Shape { octets, positions: 1, rows: lines.dy }
    }

    /// Expected time.
    fn micros(task: &Task<'_>) -> f64 {
        let p = task.problem;
        let Some(lines) = Lines::new(p) else { return f64::INFINITY };
        // x and dy are read twice and written split.
        let read = p.n * (p.c * p.h * p.w + p.k * p.oh * p.ow) * 8;
        let written = (lines.terms(p)[1].div_ceil(OCTET) * lines.x * lines.all_planes()
            + p.k.div_ceil(OCTET) * lines.dy)
            * 2
            * OCTET_BYTES;
        let (launches, byte) = task.chip.rates.gradients.split;
        launches
            + byte * (read + written) as f64
            + WeightProduct::micros(task.chip, &Self::shape(p, &lines))
    }

    fn new(gpu: &'static Gpu, task: &Task<'_>) -> Result<Option<Self>> {
        let (spec, p) = (task.spec, task.problem);
        let Some(lines) = Lines::new(p) else { return Ok(None) };
        Ok(Some(SplitWeight {
            problem: *p,
            lines,
            dy: Operand::new(gpu, spec.y, p.k, [lines.dy, 1], SHRINKAGE)?,
            x: Operand::new(gpu, spec.x, lines.terms(p)[1], [lines.x, lines.all_planes()], 0.0)?,
            product: WeightProduct::new(gpu, Self::shape(p, &lines))?,
            sum: gpu.kernel(&sum_kernel())?,
        }))
    }

    fn elements(&self) -> usize {
        self.problem.k * self.problem.taps()
    }
}

impl WeightGradient for SplitWeight {
    fn scratch_bytes(&self) -> usize {
        let parts = self.product.parts() * self.elements() * size_of::<f32>();
        self.dy.bytes() + self.x.bytes() + parts + 2 * size_of::<u32>()
    }

    /// The tolerance: both operands carry 22 bits, and the product of their low parts is left out.
    fn tolerance(&self) -> f64 {
        let sums = self.product.roundings() + 4;
        4.0 * split::rounding() + sums as f64 * DType::F32.unit_roundoff()
    }

    unsafe fn run(&self, stream: &Stream, operands: &WeightOperands<'_>) -> Result<()> {
        let &WeightOperands { x, dy, dw, desc, scratch } = operands;
        let (p, lines) = (&self.problem, &self.lines);
        let split_dy = scratch;
        let split_x = split_dy.wrapping_add(self.dy.bytes());
        let dy_max = split_x.wrapping_add(self.x.bytes());
        let x_max = dy_max.wrapping_add(size_of::<u32>());
        let parts = x_max.wrapping_add(size_of::<u32>());
        let [_, channels] = lines.terms(p);
        let taps = Taps {
            s: Divisor::new(if lines.folded { 1 } else { p.s }),
            stride: p.stride.map(Divisor::new),
            period: lines.period.map(Divisor::new),
            dilation: p.dilation.map(|v| v as i32),
            planes_w: lines.planes[1] as i32,
            pitch: lines.pitch as i32,
            plane: (self.x.octets * self.x.rows * OCTET_BYTES) as i64,
        };
        let sides = [
            self.dy.side(split_dy, dy_max, p.taps()),
            Side { out_tap: channels as i64, ..self.x.side(split_x, x_max, 1) },
        ];
        let params = SumParams {
            parts,
            out: dw,
            x,
            dy,
            out_strides: strides(desc),
            x_strides: strides(&self.x.desc),
            dy_strides: strides(&self.dy.desc),
            elements: self.elements() as i64,
            parts_count: self.product.parts() as i32,
            c: p.c as i32,
            r: p.r as i32,
            s: p.s as i32,
            h: p.h as i32,
            w: p.w as i32,
            stride: p.stride.map(|v| v as i32),
            pad: p.padding.map(|v| v as i32),
            dilation: p.dilation.map(|v| v as i32),
            pixels: (p.n * p.oh * p.ow) as i32,
            image_pixels: Divisor::new(p.oh * p.ow),
            ow: Divisor::new(p.ow),
        };
        // SAFETY: the scratch memory is as large as asked for, the rest is the caller's promise.
        unsafe {
            self.dy.max.run(stream, dy, 1, dy_max)?;
            self.dy.split(stream, lines, None, [dy, dy_max], split_dy)?;
            self.x.max.run(stream, x, 1, x_max)?;
            self.x.split(stream, lines, Some(p), [x, x_max], split_x)?;
            self.product.run(stream, sides, taps, parts, [self.elements(), 0])?;
            self.sum.launch(stream, one_thread_each(self.elements()), &params)
        }
    }
}

/// Octets that neighbouring threads split.
fn octets_of_block(desc: &TensorDesc, folded: bool) -> usize {
    if is_channels_last(&desc.layout) && !folded { 4 } else { 1 }
}

fn split_kernel(desc: &TensorDesc, folded: bool, vectors: bool, shrinkage: f32) -> KernelSpec {
    kernel(&SPLIT, "weight_split", DType::F32)
        .needs(Feature::WarpgroupProducts)
        .define("FOLDED", i32::from(folded))
        .define("CHANNELS_INNER", i32::from(octets_of_block(desc, folded) > 1))
        .define("VECTOR", if vectors { VECTOR } else { 1 })
        .define("EXPONENT", EXPONENT)
        .define("SHRINKAGE", format!("{shrinkage:?}f"))
        .params::<SplitParams>()
}

fn sum_kernel() -> KernelSpec {
    kernel(&SUM, "weight_sum", DType::F32).needs(Feature::WarpgroupProducts).params::<SumParams>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_compile_without_spills() {
        let specs = crate::conv2d::gpu::test_specs();
        let floats = specs.iter().filter(|spec| spec.x.dtype == DType::F32);
        let mut kernels = vec![sum_kernel()];
        for desc in floats.map(|spec| &spec.x) {
            kernels.extend([[false, false], [false, true], [true, false]].map(
                |[folded, vectors]| {
                    let vectors = vectors && is_channels_last(&desc.layout);
                    split_kernel(desc, folded, vectors, SHRINKAGE)
                },
            ));
        }
        crate::gpu::compile_tests::check_compiles(&kernels);
    }
}
