//! The method of [`Conv2dAlgorithm::Direct`] for groups of one input channel (`depthwise_channels.cu`,
//! `depthwise_planes.cu`) or of a few (`few_channels.cu`).

mod form;

use self::form::Form;
use super::chips::Grouped;
use super::general::DenseFilter;
use super::method::{About, Method};
use super::prepared::{Operands, PackTo, PackedForm, Prepared};
use super::shape::ConvShape;
use super::task::Task;
use super::{Divisor, kernel, source, with_epilogue};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dAlgorithm, Conv2dSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::try_once_lock::TryOnceLock;
use crate::{DType, Result};

static CHANNELS: Source = source!("depthwise_channels.cu", "groups.cuh");
static PLANES: Source = source!("depthwise_planes.cu", "groups.cuh");
static FEW: Source = source!("few_channels.cu", "groups.cuh");

/// The filter of a channel, and a row of the inputs of a tile, are in registers.
const MAX_TAPS: usize = 49;
const MAX_FEW_TAPS: usize = 25;
const MAX_READS: usize = 24;
/// The largest number of input channels of a group.
const MAX_CHANNELS: usize = 32;

#[derive(Debug)]
pub(crate) struct Groups {
    spec: Conv2dSpec,
    problem: Problem,
    filter: DenseFilter,
    gpu: &'static Gpu,
    /// The kernel for tensors at addresses aligned to 16 bytes, and the one for any.
    aligned: (Form, &'static Kernel),
    unaligned: TryOnceLock<(Form, &'static Kernel)>,
}

params! {
    struct Params: ConvShape {
        filter: *const u8,
        units: i32,
        group_k: Divisor,
        channels: Divisor,
        rows: Divisor,
        columns: Divisor,
    }
}

/// [`Conv2dAlgorithm::Direct`] by [`Groups`].
pub(super) struct GroupedMethod;

impl Method for GroupedMethod {
    fn about(&self) -> &'static About {
        &About {
            algorithms: &[Conv2dAlgorithm::Direct],
            domain: "computes groups of few channels",
            kernels: &[
                "depthwise_channels.cu conv2d_depthwise_channels_{f32,f16,bf16} VECTOR={1,2}",
                "depthwise_planes.cu conv2d_depthwise_planes_{f32,f16,bf16} VECTOR_OUT={0,1}",
                "few_channels.cu conv2d_few_channels_{f32,f16,bf16} VECTOR={1,4} VECTOR_OUT={0,1}",
                "few_channels.cu conv2d_few_channels_{f32,f16,bf16} TILE_H={2,4,7} cuda",
            ],
            parameters: &[],
        }
    }

    fn computes(&self, task: &Task<'_>) -> bool {
        let p = task.problem;
        // The widest tile.
        let reads = |d: usize, taps: usize| {
            (taps - 1)
                .saturating_mul(p.dilation[d])
                .saturating_add(6usize.saturating_mul(p.stride[d]))
        };
        let outputs =
            [p.n, p.k, p.oh, p.ow].iter().fold(1usize, |all, &size| all.saturating_mul(size));
        let taps = if p.c_group() == 1 { MAX_TAPS } else { MAX_FEW_TAPS };
        p.groups > 1
            && task.frames.is_none()
            && (1..=MAX_CHANNELS).contains(&p.c_group())
            && p.k > 0
            && p.r * p.s <= taps
            && reads(0, p.r) < MAX_READS
            && reads(1, p.s) < MAX_READS
            && outputs < 1 << 30
            && p.n * p.c < 1 << 30
    }

    fn micros(&self, task: &Task<'_>) -> f64 {
        let Task { spec, problem: p, chip, .. } = task;
        let rates = &chip.rates.grouped;
        let gflop = 1e-9 * p.flops();
        let pixels = p.n * (p.c * p.h * p.w + p.k * p.oh * p.ow);
        let megabytes = 1e-6 * (pixels * spec.x.dtype.size()) as f64;
        match p.c_group() {
            1 => {
                let [per_megabyte, per_gflop] = rates.depthwise;
                rates.launch + per_megabyte * megabytes + per_gflop * gflop
            }
            _ => few_channels_micros(rates, spec, p, megabytes),
        }
    }

    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(Groups::new(gpu, task.spec, task.problem)?))
    }
}

/// Expected microseconds of sums in groups of some channels: a launch, terms one after the other, then tensors and products,
/// of which channels-last ones read filters more slowly.
fn few_channels_micros(rates: &Grouped, spec: &Conv2dSpec, p: &Problem, megabytes: f64) -> f64 {
    let nhwc = is_channels_last(&spec.y.layout);
    let per_gflop = if nhwc { rates.nhwc_gflop } else { rates.nchw_gflop };
    let per_gflop = per_gflop[usize::from(p.stride != [1, 1])];
    rates.launch
        + rates.term * p.taps() as f64
        + rates.megabyte * megabytes
        + per_gflop * 1e-9 * p.flops()
}

impl Groups {
    fn new(gpu: &'static Gpu, spec: &Conv2dSpec, problem: &Problem) -> Result<Self> {
        Ok(Groups {
            spec: spec.clone(),
            problem: *problem,
            filter: DenseFilter::new(gpu, spec, problem, is_filter_last(spec, problem))?,
            gpu,
            aligned: compiled(gpu, spec, problem, true)?,
            unaligned: TryOnceLock::default(),
        })
    }

    fn unaligned(&self) -> Result<(Form, &'static Kernel)> {
        self.unaligned.get(|| compiled(self.gpu, &self.spec, &self.problem, false)).copied()
    }
}

impl Prepared for Groups {
    fn packed_form(&self) -> PackedForm {
        let order = usize::from(is_filter_last(&self.spec, &self.problem));
        PackedForm::new("grouped", self.spec.x.dtype, 1, order)
    }

    fn packed_bytes(&self) -> usize {
        self.filter.bytes()
    }

    fn reads_in_place(&self, _w: *const u8) -> bool {
        self.filter.is_packed()
    }

    /// A rounding for each addition in a row.
    fn tolerance(&self) -> f64 {
        (self.problem.taps() + 2) as f64 * DType::F32.unit_roundoff()
    }

    fn explain(&self) -> String {
        match self.aligned.0 {
            Form::Channels { tile: [h, w], vector, .. } => {
                format!("{h} x {w} outputs of {vector} channels in a thread")
            }
            Form::Planes { tile: [h, w], planes, .. } => {
                format!("{h} x {w} outputs in a thread, {planes} images of a channel in a block")
            }
            Form::Few { rows, block, .. } => {
                format!("{rows} outputs of {block} channels in a thread")
            }
        }
    }

    unsafe fn pack(&self, stream: &Stream, w: *const u8, to: PackTo) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.filter.pack(stream, w, to.memory) }
    }

    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()> {
        let p = &self.problem;
        let aligned = (operands.x as usize).is_multiple_of(16) && operands.is_out_aligned(16);
        let (form, kernel) = if aligned { self.aligned } else { self.unaligned()? };
        let shape = form.shape(p);
        let params = Params {
            base: ConvShape::new(&self.spec, p, [&self.spec.x, &self.spec.y], &operands),
            filter: packed,
            units: shape.units as i32,
            group_k: Divisor::new(p.k_group()),
            channels: Divisor::new(shape.channels),
            rows: Divisor::new(shape.rows),
            columns: Divisor::new(shape.columns),
        };
        let launch = Launch::line(shape.blocks, form.threads());
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, launch, &params) }
    }
}

/// True if the filter is read as [k, r, s, c], in which it is copied; that of one channel lies alike in both orders.
fn is_filter_last(spec: &Conv2dSpec, p: &Problem) -> bool {
    p.c_group() == 1 || !spec.w.layout.is_contiguous()
}

fn compiled(
    gpu: &'static Gpu,
    spec: &Conv2dSpec,
    p: &Problem,
    aligned: bool,
) -> Result<(Form, &'static Kernel)> {
    let form = Form::choose(gpu.info.multiprocessors as usize, spec, p, aligned);
    Ok((form, gpu.kernel(&kernel_spec(spec, p, form, aligned))?))
}

fn kernel_spec(spec: &Conv2dSpec, p: &Problem, form: Form, aligned: bool) -> KernelSpec {
    let (named, [tile_h, tile_w]) = match form {
        Form::Channels { tile, vector, lanes, .. } => {
            let named = kernel(&CHANNELS, "depthwise_channels", spec.x.dtype)
                .define("VECTOR", vector)
                .define("LANES", lanes);
            (named, tile)
        }
        Form::Planes { tile, block, planes, copied } => {
            let s = spec.y.strides();
            let whole = s[3] == 1 && s[..3].iter().all(|s| s % 4 == 0) && p.ow.is_multiple_of(4);
            let named = kernel(&PLANES, "depthwise_planes", spec.x.dtype)
                .define("BLOCK_H", block[0])
                .define("BLOCK_W", block[1])
                .define("PLANES", planes)
                .define("LANES", copied[1].next_power_of_two().clamp(8, 32))
                .define("VECTOR_OUT", i32::from(aligned && whole));
            (named, tile)
        }
        Form::Few { rows, block, slots, chunk, vector, out, .. } => {
            let named = kernel(&FEW, "few_channels", spec.x.dtype)
                .define("GROUP_C", p.c_group())
                .define("GROUP_K", p.k_group())
                .define("BLOCK_K", block)
                .define("SLOTS", slots)
                .define("CHUNK", chunk)
                .define("VECTOR", vector)
                .define("VECTOR_OUT", i32::from(out))
                .define("FILTER_LAST", i32::from(is_filter_last(spec, p)));
            (named, [rows, 1])
        }
    };
    with_epilogue(named, spec)
        .define("FILTER_H", p.r)
        .define("FILTER_W", p.s)
        .define("STRIDE_H", p.stride[0])
        .define("STRIDE_W", p.stride[1])
        .define("DILATION_H", p.dilation[0])
        .define("DILATION_W", p.dilation[1])
        .define("TILE_H", tile_h)
        .define("TILE_W", tile_w)
        .define("THREADS", form.threads())
        .params::<Params>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv2d::Conv2dParams;
    use crate::gpu::compile_tests::check_spills;
    use crate::{Activation, Approximate, Layout, TensorDesc};

    /// For compute capability 10.0 the assembler spills up to six registers in some kernels of f16/bf16; which ones
    /// depends on its version.
    #[test]
    fn kernels_of_few_channels_compile_without_spills() {
        let of = |dtype, order: &[usize], [channels, outputs, size]: [usize; 3]| {
            let layout = Layout::with_order(&[64, 8 * channels, size, size], order).unwrap();
            let w = TensorDesc::contiguous(dtype, &[8 * outputs, channels, 3, 3]).unwrap();
            let params = Conv2dParams {
                padding: [1; 2],
                groups: 8,
                activation: Activation::Gelu(Approximate::None),
                ..Default::default()
            };
            let spec = Conv2dSpec::new(TensorDesc { dtype, layout }, w, &params).unwrap();
            let p = spec.problem().unwrap();
            assert!(GroupedMethod.computes(&Task::on_h200(&spec, &p)));
            for aligned in [true, false] {
                let form = Form::choose(132, &spec, &p, aligned);
                let residual = spec.clone().with_residual(true);
                for (capability, most) in [((8, 0), 0), ((9, 0), 0), ((10, 0), 24)] {
                    check_spills(&kernel_spec(&residual, &p, form, aligned), capability, most);
                }
            }
        };
        for order in [[0, 1, 2, 3], [0, 2, 3, 1]] {
            for sizes in [[2, 3, 7], [4, 4, 56], [12, 20, 28], [32, 32, 14]] {
                of(DType::F32, &order, sizes);
            }
            for dtype in [DType::F16, DType::BF16] {
                of(dtype, &order, [32, 32, 14]);
            }
        }
    }

    /// The tiles are those that were the fastest on compute capability 9.0. There one kernel spills a register by the
    /// assembler's own choice, which stops at 128 for two blocks of a multiprocessor; for 10.0 two spill more. So each
    /// kind has a limit, in bytes.
    #[test]
    fn kernels_spill_no_more_than_was_measured() {
        for (dtype, order, taps, stride, size, most) in [
            (DType::F32, [0, 2, 3, 1], 3, 1, 112, 0),
            (DType::F32, [0, 2, 3, 1], 7, 1, 56, 4),
            (DType::F32, [0, 1, 2, 3], 7, 1, 56, 0),
            (DType::F16, [0, 2, 3, 1], 7, 1, 56, 48),
            (DType::BF16, [0, 2, 3, 1], 5, 2, 56, 20),
            (DType::BF16, [0, 1, 2, 3], 3, 2, 7, 0),
        ] {
            let layout = Layout::with_order(&[64, 96, size, size], &order).unwrap();
            let w = TensorDesc::contiguous(dtype, &[96, 1, taps, taps]).unwrap();
            let params = Conv2dParams {
                stride: [stride; 2],
                padding: [taps / 2; 2],
                groups: 96,
                activation: Activation::Gelu(Approximate::None),
                ..Default::default()
            };
            let spec = Conv2dSpec::new(TensorDesc { dtype, layout }, w, &params).unwrap();
            let p = spec.problem().unwrap();
            assert!(GroupedMethod.computes(&Task::on_h200(&spec, &p)));
            for aligned in [true, false] {
                let form = Form::choose(132, &spec, &p, aligned);
                let kernel = kernel_spec(&spec, &p, form, aligned);
                for capability in [(8, 0), (9, 0), (10, 0)] {
                    check_spills(&kernel, capability, most);
                }
                let residual = spec.clone().with_residual(true);
                check_spills(&kernel_spec(&residual, &p, form, aligned), (9, 0), most);
            }
        }
    }
}
