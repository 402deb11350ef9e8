//! [`Conv2dAlgorithm::Direct`] where every group has one input channel
//! (`depthwise_channels.cu`, `depthwise_planes.cu`) or some (`few_channels.cu`).

use super::chips::Grouped;
use super::general::DenseFilter;
use super::methods::{About, Method};
use super::prepared::{Operands, PackTo, PackedForm, Prepared};
use super::task::Task;
use super::{Divisor, bias_of, kernel, source, strides, with_epilogue};
use crate::conv2d::spec::is_channels_last;
use crate::conv2d::{Conv2dAlgorithm, Conv2dSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, params};
use crate::later::Later;
use crate::{DType, Result, TensorDesc};

static CHANNELS: Source = source!("depthwise_channels.cu", "groups.cuh");
static PLANES: Source = source!("depthwise_planes.cu", "groups.cuh");
static FEW: Source = source!("few_channels.cu", "groups.cuh");

/// The filter of a channel, and a row of the inputs of a tile, are in registers.
const MAX_TAPS: usize = 49;
const MAX_FEW_TAPS: usize = 25;
const MAX_READS: usize = 24;
/// The most threads of a block, and blocks for each multiprocessor of those that take tiles in turn.
const THREADS: usize = 256;
const BLOCKS: usize = 4;
/// The most planes of a block, and bytes of shared memory that their inputs take.
const MAX_PLANES: usize = 32;
const SHARED_BYTES: usize = 44_000;
/// Of some channels: the most input channels of a group and output channels of a thread, threads of a block, and blocks of
/// channels beside each other.
const MAX_CHANNELS: usize = 32;
const BLOCK_K: usize = 8;
const FEW_THREADS: usize = 128;
const MAX_SLOTS: usize = 8;

#[derive(Debug)]
pub(crate) struct Groups {
    spec: Conv2dSpec,
    problem: Problem,
    filter: DenseFilter,
    gpu: &'static Gpu,
    /// For tensors at addresses aligned to 16 bytes, and at any.
    aligned: (Form, &'static Kernel),
    unaligned: Later<(Form, &'static Kernel)>,
}

/// How outputs are shared out.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// A thread takes tiles of neighbouring channels; `lanes` of them are a row of a block.
    Channels { tile: [usize; 2], vector: usize, lanes: usize, blocks: usize },
    /// Threads of a block take tiles of so many planes.
    Planes { tile: [usize; 2], block: [usize; 2], planes: usize, copied: [usize; 2] },
    /// A thread takes the outputs of so many rows of a column, of `block` channels of a group.
    Few { rows: usize, block: usize, slots: usize, vector: usize, out: bool, blocks: usize },
}

params! {
    struct Params {
        x: *const u8,
        w: *const u8,
        bias: *const u8,
        residual: *const u8,
        y: *mut u8,
        x_strides as [x_n, x_c, x_h, x_w]: [i64; 4],
        y_strides as [y_n, y_k, y_h, y_w]: [i64; 4],
        bias_stride: i64,
        bias_is_float: i32,
        k: i32,
        h: i32,
        w_in: i32,
        oh: i32,
        ow: i32,
        pad as [pad_h, pad_w]: [i32; 2],
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
            unaligned: Later::default(),
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
        let (bias, bias_stride, bias_is_float) = bias_of(&self.spec, operands.bias);
        let aligned = (operands.x as usize).is_multiple_of(16) && operands.is_out_aligned(16);
        let (form, kernel) = if aligned { self.aligned } else { self.unaligned()? };
        let shape = form.shape(p);
        let params = Params {
            x: operands.x,
            w: packed,
            bias,
            residual: operands.residual(),
            y: operands.y,
            x_strides: strides(&self.spec.x),
            y_strides: strides(&self.spec.y),
            bias_stride,
            bias_is_float,
            k: p.k as i32,
            h: p.h as i32,
            w_in: p.w as i32,
            oh: p.oh as i32,
            ow: p.ow as i32,
            pad: p.padding.map(|v| v as i32),
            units: shape.units as i32,
            group_k: Divisor::new(p.k_group()),
            channels: Divisor::new(shape.channels),
            rows: Divisor::new(shape.rows.max(1)),
            columns: Divisor::new(shape.columns.max(1)),
        };
        let launch = Launch::line(shape.blocks, form.threads());
        // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
        unsafe { kernel.launch(stream, launch, &params) }
    }
}

/// The sizes of a launch.
struct Shape {
    units: usize,
    channels: usize,
    rows: usize,
    columns: usize,
    blocks: usize,
}

impl Form {
    /// The tiles follow times of the depthwise layers of MobileNetV2, EfficientNet-B0 and ConvNeXt on an H200.
    fn choose(multiprocessors: usize, spec: &Conv2dSpec, p: &Problem, aligned: bool) -> Self {
        let busy = |outputs: usize| {
            (p.n * p.k * p.oh * p.ow).div_ceil(outputs) >= THREADS * multiprocessors
        };
        if p.c_group() > 1 {
            return Form::few(multiprocessors, spec, p, aligned);
        }
        let (taps, half, one) = (p.r * p.s, spec.x.dtype.is_half(), p.stride == [1, 1]);
        if !is_channels_last(&spec.x.layout) || !is_channels_last(&spec.y.layout) {
            let many = one && p.oh >= 28 && busy(28);
            let most = if many && taps <= 25 { 16_000 } else { SHARED_BYTES };
            return Form::planes(p, if many { 7 } else { 2 }, most);
        }
        let pairs = aligned
            && p.k_group() == 1
            && [&spec.x, &spec.y].iter().all(|t| {
                let s = t.strides();
                s[1] == 1
                    && t.shape()[1].is_multiple_of(2)
                    && [s[0], s[2], s[3]].iter().all(|s| s % 2 == 0)
            });
        let vector = if pairs && (half || taps <= 9) { 2 } else { 1 };
        let tile = match (one, taps) {
            (true, ..=9) => [7, 4],
            (true, 10..=25) if half => [2, 4],
            (true, 10..=25) => [7, 4],
            (true, _) if half => [7, 4],
            (true, _) if p.oh * p.ow >= 2000 => [4, 4],
            (true, _) => [2, 4],
            (false, ..=9) if !half => [2, 4],
            (false, _) if !half => [2, 7],
            (false, _) => [1, 4],
        };
        let tile = match () {
            () if busy(tile[0] * tile[1] * vector) => tile,
            () if taps > 25 => [2, 4],
            () => [1, 4],
        };
        let vectors = p.k.div_ceil(vector);
        let padded = |lanes: usize| vectors.div_ceil(lanes) * lanes;
        let lanes = (vectors.min(8)..=64).min_by_key(|&lanes| (padded(lanes), 64 - lanes));
        let lanes = lanes.unwrap_or(vectors);
        let mut form = Form::Channels { tile, vector, lanes, blocks: 0 };
        let shape = form.shape(p);
        let tiles = shape.units.div_ceil((THREADS / lanes).max(1));
        let most = (BLOCKS * multiprocessors / shape.channels).max(1);
        if let Form::Channels { blocks, .. } = &mut form {
            *blocks = tiles.min(most);
        }
        form
    }

    fn planes(p: &Problem, height: usize, most_bytes: usize) -> Self {
        let tile = [height, 4];
        let columns = p.ow.div_ceil(tile[1]).clamp(1, 32);
        let copied = |rows: usize| {
            let read = |d: usize, outputs: usize, taps: usize| {
                (outputs - 1) * p.stride[d] + (taps - 1) * p.dilation[d]
            };
            [read(0, rows * tile[0], p.r) + 1, (read(1, columns * tile[1], p.s) + 4) / 4 * 4]
        };
        let bytes = |rows: usize, planes: usize| {
            let [h, w] = copied(rows);
            planes * (h * w * size_of::<f32>() + 4 * MAX_TAPS + 8)
        };
        let mut rows = p.oh.div_ceil(tile[0]).clamp(1, (THREADS / columns).max(1));
        let mut planes = (128 / (rows * columns)).clamp(1, MAX_PLANES);
        while planes > 1 && bytes(rows, planes) > most_bytes {
            planes -= 1;
        }
        while rows > 1 && bytes(rows, planes) > most_bytes {
            rows -= 1;
        }
        Form::Planes { tile, block: [rows, columns], planes, copied: copied(rows) }
    }

    fn few(multiprocessors: usize, spec: &Conv2dSpec, p: &Problem, aligned: bool) -> Self {
        let last = is_channels_last(&spec.x.layout) && is_channels_last(&spec.y.layout);
        let quads = |t: &TensorDesc, channels: usize| {
            let s = t.strides();
            let whole = [s[0], s[2], s[3]].iter().all(|s| s % 4 == 0);
            aligned && s[1] == 1 && whole && channels.is_multiple_of(4)
        };
        let block = p.k_group().next_multiple_of(4).min(BLOCK_K);
        let all = p.groups * p.k_group().div_ceil(block);
        let bytes = |slots: usize| slots * block * p.taps() * size_of::<f32>();
        let mut slots = if last { all.next_power_of_two().min(MAX_SLOTS) } else { 1 };
        while slots > 1 && bytes(slots) > SHARED_BYTES {
            slots /= 2;
        }
        let threads = |rows: usize| p.n * p.oh.div_ceil(rows) * p.ow * all;
        let most = if p.stride[0] == 1 { 7 } else { 4 };
        let rows = if threads(most) >= 2 * FEW_THREADS * multiprocessors { most } else { 2 };
        let vector = if quads(&spec.x, p.c_group()) { 4 } else { 1 };
        let out = quads(&spec.y, p.k_group());
        let units = p.n * p.oh.div_ceil(rows) * p.ow;
        let most = (2 * BLOCKS * multiprocessors / all.div_ceil(slots)).max(1);
        let blocks = units.div_ceil(FEW_THREADS / slots).min(most);
        Form::Few { rows, block, slots, vector, out, blocks }
    }

    fn threads(self) -> usize {
        match self {
            Form::Few { .. } => FEW_THREADS,
            Form::Channels { lanes, .. } => (THREADS / lanes).max(1) * lanes,
            Form::Planes { block, planes, .. } => {
                (planes * block[0] * block[1]).next_multiple_of(32)
            }
        }
    }

    fn shape(self, p: &Problem) -> Shape {
        match self {
            Form::Channels { tile, vector, lanes, blocks } => {
                let (rows, columns) = (p.oh.div_ceil(tile[0]), p.ow.div_ceil(tile[1]));
                let channels = p.k.div_ceil(vector * lanes);
                let units = p.n * rows * columns;
                Shape { units, channels, rows, columns, blocks: blocks * channels }
            }
            Form::Planes { tile, block, planes, .. } => {
                let rows = p.oh.div_ceil(block[0] * tile[0]);
                let columns = p.ow.div_ceil(block[1] * tile[1]);
                let units = p.n * p.k;
                let blocks = units.div_ceil(planes) * rows * columns;
                Shape { units, channels: p.k, rows, columns, blocks }
            }
            Form::Few { rows, block, slots, blocks, .. } => {
                let channels = (p.groups * p.k_group().div_ceil(block)).div_ceil(slots);
                let (rows, columns) = (p.oh.div_ceil(rows), p.ow);
                Shape {
                    units: p.n * rows * columns,
                    channels,
                    rows,
                    columns,
                    blocks: blocks * channels,
                }
            }
        }
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
        Form::Few { rows, block, slots, vector, out, .. } => {
            let named = kernel(&FEW, "few_channels", spec.x.dtype)
                .define("GROUP_C", p.c_group())
                .define("GROUP_K", p.k_group())
                .define("BLOCK_K", block)
                .define("SLOTS", slots)
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
    use crate::{Activation, Approximate, Layout};

    /// For compute capability 10.0 the assembler spills up to six registers in kernels of halves, of its own choice: which ones
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

    #[test]
    fn blocks_of_channels_beside_each_other_fit_shared_memory() {
        let form = |order: [usize; 4], [channels, outputs]: [usize; 2], n, stride| {
            let layout = Layout::with_order(&[n, 32 * channels, 28, 28], &order).unwrap();
            let w = TensorDesc::contiguous(DType::F32, &[32 * outputs, channels, 3, 3]).unwrap();
            let params = Conv2dParams { stride: [stride; 2], groups: 32, ..Default::default() };
            let x = TensorDesc { dtype: DType::F32, layout };
            let spec = Conv2dSpec::new(x, w, &params).unwrap();
            match Form::choose(132, &spec, &spec.problem().unwrap(), true) {
                Form::Few { rows, block, slots, vector, out, .. } => {
                    (rows, block, slots, vector, out)
                }
                other => panic!("{other:?}"),
            }
        };
        let (planes, last) = ([0, 1, 2, 3], [0, 2, 3, 1]);
        assert_eq!(form(planes, [4, 4], 64, 1), (7, 4, 1, 1, false));
        assert_eq!(form(planes, [16, 16], 64, 2), (4, 8, 1, 1, false));
        assert_eq!(form(last, [4, 4], 64, 1), (7, 4, 8, 4, true));
        assert_eq!(form(last, [16, 16], 64, 1), (7, 8, 8, 4, true));
        assert_eq!(form(last, [32, 32], 64, 1), (7, 8, 4, 4, true));
        assert_eq!(form(last, [4, 4], 1, 1), (2, 4, 8, 4, true), "few threads");
        assert_eq!(form(last, [3, 6], 64, 1), (7, 8, 8, 1, false), "no whole vectors");
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
