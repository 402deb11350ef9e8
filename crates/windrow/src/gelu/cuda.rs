//! GELU on CUDA: launches of `kernels/*.cu`.

use super::{GeluAlgorithm, GeluArgs, GeluConfiguration, GeluGrads, GeluSpec, HalfMath};
use crate::cuda::{Gpu, Kernel, KernelSpec, Launch, Source, Stream, column_sum, type_name};
use crate::{Approximate, DType, MAX_RANK, Result, TensorDesc, TensorMut, TensorRef, Workspace};

static INCLUDES: &[Source] =
    &[Source { name: "gelu.cuh", text: include_str!("kernels/gelu.cuh"), includes: &[] }];
static FORWARD: Source =
    Source { name: "gelu.cu", text: include_str!("kernels/gelu.cu"), includes: INCLUDES };
static BACKWARD: Source =
    Source { name: "backward.cu", text: include_str!("kernels/backward.cu"), includes: INCLUDES };
static BIAS_GRADIENT: Source = Source {
    name: "bias_gradient.cu",
    text: include_str!("kernels/bias_gradient.cu"),
    includes: INCLUDES,
};

const THREADS: usize = 128;
/// Blocks that a large device runs at once.
const WAVE: usize = 2048;

/// All algorithms for a spec, the fastest first: wide accesses where elements lie next to each
/// other, else one element a thread.
pub(super) fn algorithms(spec: &GeluSpec) -> Vec<GeluAlgorithm> {
    use GeluAlgorithm::*;
    if is_native(spec) && (spec.bias.is_some() || spec.gate.is_some()) {
        return Vec::new();
    }
    let mut all = match spec.x.dtype {
        DType::F16 => vec![F16x8Pack, F16x8, F16x2, F16],
        DType::BF16 => vec![Bf16x8, Bf16x2, Bf16],
        _ => vec![F32x4, F32],
    };
    if !Loops::of(spec).unit {
        all.reverse();
    }
    all
}

fn is_native(spec: &GeluSpec) -> bool {
    spec.half_math == HalfMath::Native && spec.x.dtype.is_half()
}

/// Elements of a thread, and of one memory access.
fn widths(algorithm: GeluAlgorithm) -> (usize, usize) {
    use GeluAlgorithm::*;
    match algorithm {
        Cpu | F32 | F16 | Bf16 => (1, 1),
        F32x4 => (4, 4),
        F16x2 | Bf16x2 => (2, 2),
        F16x8 => (8, 2),
        F16x8Pack | Bf16x8 => (8, 8),
    }
}

/// A dimension that operands share, with the stride of each.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Dim<const N: usize> {
    size: usize,
    strides: [isize; N],
}

/// Loops over operands of one shape: as few and as long as their strides allow, innermost first.
#[derive(Clone, Debug)]
struct Loops<const N: usize> {
    inner: Dim<N>,
    outer: Vec<Dim<N>>,
    /// Whether neighbours of the inner loop lie next to each other in the operands asked for.
    unit: bool,
}

/// Strides of a tensor of `rank` dimensions; of `None`, zeros.
fn strides(desc: Option<&TensorDesc>) -> [isize; MAX_RANK] {
    let mut out = [0; MAX_RANK];
    if let Some(desc) = desc {
        out[..desc.strides().len()].copy_from_slice(desc.strides());
    }
    out
}

/// Strides of a bias along the last of `rank` dimensions.
fn bias_strides(bias: Option<&TensorDesc>, rank: usize) -> [isize; MAX_RANK] {
    let mut out = [0; MAX_RANK];
    if let Some(bias) = bias {
        out[rank - 1] = bias.strides()[0];
    }
    out
}

impl<const N: usize> Loops<N> {
    /// The first operand decides the order. `unit[i]`: operand i counts for `unit`.
    fn new(shape: &[usize], strides: [[isize; MAX_RANK]; N], unit: [bool; N]) -> Self {
        let mut dims: Vec<Dim<N>> = (0..shape.len())
            .filter(|&d| shape[d] != 1)
            .map(|d| Dim { size: shape[d], strides: strides.map(|s| s[d]) })
            .collect();
        dims.sort_by_key(|d| d.strides[0].unsigned_abs());
        let mut merged: Vec<Dim<N>> = Vec::new();
        for dim in dims {
            match merged.last_mut() {
                Some(last)
                    if (0..N).all(|i| dim.strides[i] == last.strides[i] * last.size as isize) =>
                {
                    last.size *= dim.size;
                }
                _ => merged.push(dim),
            }
        }
        let inner =
            if merged.is_empty() { Dim { size: 1, strides: [1; N] } } else { merged.remove(0) };
        let unit = (0..N).all(|i| !unit[i] || inner.strides[i] == 1);
        Loops { inner, outer: merged, unit }
    }

    fn rows(&self) -> usize {
        self.outer.iter().map(|d| d.size).product()
    }

    fn is_empty(&self) -> bool {
        self.inner.size == 0 || self.rows() == 0
    }

    fn rank(&self) -> usize {
        self.outer.len()
    }

    /// `Shape` of gelu.cuh.
    fn push_shape(&self, words: &mut Words) {
        words.push(self.rows());
        words.push(self.inner.size);
        words.push(usize::from(self.unit));
        for d in 0..self.rank().max(1) {
            words.push(self.outer.get(d).map_or(1, |d| d.size));
        }
    }

    /// `Operand` of gelu.cuh; its pointer is the word at the position returned.
    fn push_operand(&self, words: &mut Words, i: usize, ptr: *const u8) -> usize {
        let at = words.len;
        words.push(ptr as usize);
        words.push(self.inner.strides[i] as usize);
        for d in 0..self.rank().max(1) {
            words.push(self.outer.get(d).map_or(0, |d| d.strides[i]) as usize);
        }
        at
    }

    /// One thread for every `vector` elements of a row, whose first `access` may be cut short; in one
    /// row for `unroll` times as many. `block` is the threads of a block, a power of two.
    fn launch(&self, vector: usize, access: usize, unroll: usize, block: usize) -> Launch {
        let items = self.items(vector, access).div_ceil(unroll);
        let x = if self.rank() == 0 { block } else { items.next_power_of_two().min(block) };
        let y = block / x;
        let rows = self.rows().div_ceil(y).min(65535);
        Launch { grid: [items.div_ceil(x) as u32, rows as u32, 1], block: [x as u32, y as u32, 1] }
    }

    fn items(&self, vector: usize, access: usize) -> usize {
        (self.inner.size + if self.unit { access - 1 } else { 0 }).div_ceil(vector)
    }
}

/// Whether a launch is of a wave or so, whose end the next kernel had better overlap.
fn is_small(launch: &Launch) -> bool {
    launch.grid.iter().map(|&n| n as usize).product::<usize>() <= WAVE
}

impl Loops<4> {
    /// y, x, gate, bias.
    fn of(spec: &GeluSpec) -> Self {
        let rank = spec.x.layout.rank();
        let operands = [
            strides(Some(&spec.y)),
            strides(Some(&spec.x)),
            strides(spec.gate.as_ref()),
            bias_strides(spec.bias.as_ref(), rank),
        ];
        Loops::new(spec.x.shape(), operands, [true, true, spec.gate.is_some(), false])
    }
}

/// Parameters of a kernel, word by word: their number depends on the rank.
#[derive(Clone, Copy, Debug)]
struct Words {
    words: [usize; 96],
    len: usize,
}

impl Words {
    fn new() -> Self {
        Words { words: [0; 96], len: 0 }
    }

    fn push(&mut self, word: usize) {
        self.words[self.len] = word;
        self.len += 1;
    }

    fn bytes(&self) -> usize {
        self.len * size_of::<usize>()
    }

    fn as_slice(&self) -> &[usize] {
        &self.words[..self.len]
    }
}

/// A kernel of the room with the constants that all of them take.
fn kernel_spec<const N: usize>(
    source: &'static Source,
    entry: String,
    spec: &GeluSpec,
    loops: &Loops<N>,
    widths: (usize, usize),
    words: &Words,
) -> KernelSpec {
    let (vector, access) = widths;
    let kernel = KernelSpec::new(source, entry)
        .define("T", type_name(spec.x.dtype))
        .define("VECTOR", vector)
        .define("ACCESS", access)
        .define("TANH", u8::from(spec.approximate == Approximate::Tanh))
        .define("GATE", u8::from(spec.gate.is_some()))
        .define("RANK", loops.rank())
        .define("PARAMS_SIZE", words.bytes());
    match &spec.bias {
        Some(bias) => kernel.define("BIAS", type_name(bias.dtype)),
        None => kernel,
    }
}

/// A plan's forward kernel, compiled and loaded.
#[derive(Clone, Debug)]
pub(super) struct Forward {
    kernel: &'static Kernel,
    configuration: GeluConfiguration,
    launch: Launch,
    words: Words,
    /// Where the addresses of y, x, gate and bias go.
    pointers: [usize; 4],
    is_empty: bool,
}

/// Accesses of a thread, and whether the next kernel's blocks may start early. Measured on an H200:
/// below a wave of blocks threads count most; above it twice the work in half the blocks, which may
/// then make way early (that costs a block about a nanosecond). Large tensors gain from neither, but
/// for the longest arithmetic.
fn model_unroll(
    spec: &GeluSpec,
    loops: &Loops<4>,
    (vector, access): (usize, usize),
) -> (usize, bool) {
    // Of a row that begins at a vector; any other has one more.
    let items = loops.inner.size.div_ceil(vector);
    let wide = loops.rank() == 0 && loops.unit && access * spec.x.dtype.size() == 16;
    let long = spec.x.dtype == DType::F32 && spec.approximate == Approximate::Tanh;
    match items {
        _ if !wide => (1, false),
        _ if items <= WAVE * THREADS => (1, true),
        _ if items < 8 * WAVE * THREADS || long => (2, true),
        _ => (1, false),
    }
}

/// A configuration with the parameters that the model chooses where it says nothing.
pub(super) fn complete(spec: &GeluSpec, configuration: &GeluConfiguration) -> GeluConfiguration {
    let GeluConfiguration { algorithm, block, unroll } = *configuration;
    let (model, _) = model_unroll(spec, &Loops::of(spec), widths(algorithm));
    let (block, unroll) = (block.or(Some(THREADS)), unroll.or(Some(model)));
    GeluConfiguration { algorithm, block, unroll }
}

/// The forward kernel of a spec, its launch and its parameters.
fn forward(
    spec: &GeluSpec,
    configuration: &GeluConfiguration,
) -> (KernelSpec, Launch, Words, [usize; 4]) {
    let GeluConfiguration { algorithm, block, unroll } = complete(spec, configuration);
    let loops = Loops::of(spec);
    let mut words = Words::new();
    loops.push_shape(&mut words);
    let pointers = [0, 1, 2, 3].map(|i| loops.push_operand(&mut words, i, std::ptr::null()));
    let widths = widths(algorithm);
    let entry = format!("gelu_{}", algorithm.name());
    let (_, early) = model_unroll(spec, &loops, widths);
    let (unroll, block) = (unroll.unwrap_or(1), block.unwrap_or(THREADS));
    let launch = loops.launch(widths.0, widths.1, unroll, block);
    let kernel = kernel_spec(&FORWARD, entry, spec, &loops, widths, &words)
        .define("NATIVE", u8::from(is_native(spec)))
        .define("UNROLL", unroll)
        .define("THREADS", block)
        .overlapped(early || is_small(&launch));
    (kernel, launch, words, pointers)
}

impl Forward {
    pub(super) fn new(
        index: u32,
        spec: &GeluSpec,
        configuration: &GeluConfiguration,
    ) -> Result<Self> {
        let gpu = Gpu::get(index)?;
        let (kernel, launch, words, pointers) = forward(spec, configuration);
        let kernel = gpu.kernel(&kernel)?;
        let (configuration, is_empty) = (complete(spec, configuration), spec.x.layout.is_empty());
        Ok(Forward { kernel, configuration, launch, words, pointers, is_empty })
    }

    pub(super) fn configuration(&self) -> GeluConfiguration {
        self.configuration
    }

    /// The views have been compared with the plan's spec and device.
    pub(super) fn run(
        &self,
        args: &GeluArgs<'_>,
        y: &TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        if self.is_empty {
            return Ok(());
        }
        let (stream, _) = workspace.take_on(self.kernel.gpu(), 0)?;
        let mut words = self.words;
        let address = |t: &Option<TensorRef<'_>>| t.as_ref().map_or(0, |t| t.as_ptr() as usize);
        let addresses = [
            y.as_ptr() as usize,
            args.x.as_ptr() as usize,
            address(&args.gate),
            address(&args.bias),
        ];
        for (at, address) in self.pointers.into_iter().zip(addresses) {
            words.words[at] = address;
        }
        // SAFETY: the words are the kernel's parameters (it compares their size), and the views are
        // valid on this device for the layouts that the words describe.
        unsafe { self.kernel.launch(stream, self.launch, words.as_slice()) }
    }

    /// Gradients; the kernels are compiled at the first call with such strides.
    pub(super) fn backward(
        &self,
        spec: &GeluSpec,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        grads: &GeluGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let gpu = self.kernel.gpu();
        let (stream, partial) = workspace.take_on(gpu, workspace_bytes(spec))?;
        if grads.dx.is_some() || grads.dgate.is_some() {
            elementwise(spec, args, dy, grads, gpu, stream)?;
        }
        match &grads.dbias {
            Some(dbias) => bias_gradient(spec, args, dy, dbias, gpu, stream, partial),
            None => Ok(()),
        }
    }

    /// Blocks and threads.
    pub(super) fn explain(&self) -> String {
        let Launch { grid, block } = self.launch;
        format!("{}x{} blocks of {}x{} threads", grid[0], grid[1], block[0], block[1])
    }
}

/// Rows that one partial sum of a bias gradient covers. It depends on the shape alone, so that
/// results do not depend on the device.
fn bias_chunk(rows: usize, columns: usize) -> usize {
    rows.div_ceil(((1 << 18) / columns.max(1)).max(1)).max(1)
}

/// Rows and columns of a bias gradient's sum.
fn rows_and_columns(x: &TensorDesc) -> (usize, usize) {
    let columns = x.shape().last().copied().unwrap_or(1);
    (x.shape().iter().rev().skip(1).product(), columns)
}

/// Workspace of a backward run.
pub(super) fn workspace_bytes(spec: &GeluSpec) -> usize {
    let (rows, columns) = rows_and_columns(&spec.x);
    if spec.bias.is_none() {
        return 0;
    }
    rows.div_ceil(bias_chunk(rows, columns)) * columns * size_of::<f32>()
}

fn pointer(view: Option<&TensorRef<'_>>) -> *const u8 {
    view.map_or(std::ptr::null(), TensorRef::as_ptr)
}

fn elementwise(
    spec: &GeluSpec,
    args: &GeluArgs<'_>,
    dy: &TensorRef<'_>,
    grads: &GeluGrads<'_>,
    gpu: &'static Gpu,
    stream: &Stream,
) -> Result<()> {
    let (loops, kernel, words) = backward_kernel(spec, args, dy, grads);
    if loops.is_empty() {
        return Ok(());
    }
    let vector = vector_of(spec, loops.unit);
    let launch = loops.launch(vector, vector, 1, THREADS);
    // SAFETY: as in `Forward::run`.
    unsafe { gpu.kernel(&kernel)?.launch(stream, launch, words.as_slice()) }
}

/// Elements of 16 bytes where they lie next to each other.
fn vector_of(spec: &GeluSpec, unit: bool) -> usize {
    if unit { 16 / spec.x.dtype.size() } else { 1 }
}

fn backward_kernel(
    spec: &GeluSpec,
    args: &GeluArgs<'_>,
    dy: &TensorRef<'_>,
    grads: &GeluGrads<'_>,
) -> (Loops<6>, KernelSpec, Words) {
    let rank = spec.x.layout.rank();
    let (dx, dgate) = (grads.dx.as_ref(), grads.dgate.as_ref());
    let desc = |t: Option<&TensorMut<'_>>| strides(t.map(TensorMut::desc));
    // The output that is there comes first: it decides the order.
    let first = desc(dx.or(dgate));
    let operands = [
        first,
        strides(Some(args.x.desc())),
        strides(args.gate.as_ref().map(TensorRef::desc)),
        bias_strides(spec.bias.as_ref(), rank),
        strides(Some(dy.desc())),
        desc(dgate),
    ];
    let unit = [true, true, spec.gate.is_some(), false, true, dgate.is_some()];
    let loops = Loops::new(spec.x.shape(), operands, unit);
    let mut words = Words::new();
    loops.push_shape(&mut words);
    let address = |t: Option<&TensorMut<'_>>| t.map_or(std::ptr::null(), TensorMut::as_ptr);
    loops.push_operand(&mut words, 1, args.x.as_ptr());
    loops.push_operand(&mut words, 2, pointer(args.gate.as_ref()));
    loops.push_operand(&mut words, 3, pointer(args.bias.as_ref()));
    loops.push_operand(&mut words, 4, dy.as_ptr());
    loops.push_operand(&mut words, 0, address(dx));
    loops.push_operand(&mut words, 5, address(dgate));
    let vector = vector_of(spec, loops.unit);
    let entry = format!("gelu_backward_{}", spec.x.dtype);
    let kernel = kernel_spec(&BACKWARD, entry, spec, &loops, (vector, vector), &words)
        .define("DX", u8::from(dx.is_some()))
        .define("DGATE", u8::from(dgate.is_some()))
        .overlapped(false);
    (loops, kernel, words)
}

fn bias_gradient(
    spec: &GeluSpec,
    args: &GeluArgs<'_>,
    dy: &TensorRef<'_>,
    dbias: &TensorMut<'_>,
    gpu: &'static Gpu,
    stream: &Stream,
    partial: *mut u8,
) -> Result<()> {
    let (rows, columns) = rows_and_columns(&spec.x);
    if columns == 0 {
        return Ok(());
    }
    let (kernel, words) = bias_gradient_kernel(spec, args, dy, partial);
    let chunks = rows.div_ceil(bias_chunk(rows, columns));
    let launch = Launch {
        grid: [columns.div_ceil(THREADS) as u32, chunks.min(65535) as u32, 1],
        block: [THREADS as u32, 1, 1],
    };
    // SAFETY: as in `Forward::run`; the workspace holds `chunks` rows of partial sums.
    unsafe {
        gpu.kernel(&kernel)?.launch(stream, launch, words.as_slice())?;
        column_sum(gpu, stream, partial.cast(), [chunks, columns, columns], dbias)
    }
}

fn bias_gradient_kernel(
    spec: &GeluSpec,
    args: &GeluArgs<'_>,
    dy: &TensorRef<'_>,
    partial: *const u8,
) -> (KernelSpec, Words) {
    let (rows, columns) = rows_and_columns(&spec.x);
    let rank = spec.x.layout.rank();
    let operands = [
        strides(Some(args.x.desc())),
        strides(args.gate.as_ref().map(TensorRef::desc)),
        bias_strides(spec.bias.as_ref(), rank),
        strides(Some(dy.desc())),
    ];
    // The last dimension stays apart: it is what is not summed over.
    let last = Dim { size: columns, strides: operands.map(|s| s[rank - 1]) };
    let rest = Loops::new(&spec.x.shape()[..rank - 1], operands, [false; 4]);
    let mut outer = rest.outer;
    if rank > 1 {
        outer.insert(0, rest.inner);
    }
    let loops = Loops { inner: last, outer, unit: false };
    let mut words = Words::new();
    loops.push_shape(&mut words);
    let pointers =
        [args.x.as_ptr(), pointer(args.gate.as_ref()), pointer(args.bias.as_ref()), dy.as_ptr()];
    for (i, pointer) in pointers.into_iter().enumerate() {
        loops.push_operand(&mut words, i, pointer);
    }
    words.push(partial as usize);
    words.push(bias_chunk(rows, columns));
    let entry = format!("gelu_bias_gradient_{}", spec.x.dtype);
    (kernel_spec(&BIAS_GRADIENT, entry, spec, &loops, (1, 1), &words).overlapped(false), words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Layout, Tensor};

    fn spec(dtype: DType, shape: &[usize], order: &[usize], approximate: Approximate) -> GeluSpec {
        let layout = Layout::with_order(shape, order).unwrap();
        GeluSpec::new(TensorDesc { dtype, layout }, approximate).unwrap()
    }

    const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
    const FORMS: [Approximate; 2] = [Approximate::None, Approximate::Tanh];

    #[test]
    fn loops_are_as_few_as_strides_allow() {
        let dense = spec(DType::F16, &[2, 3, 4, 5], &[0, 2, 3, 1], Approximate::None);
        let loops = Loops::of(&dense);
        assert_eq!((loops.inner.size, loops.rank(), loops.unit), (120, 0, true));
        let bias = TensorDesc::contiguous(DType::F32, &[5]).unwrap();
        let loops = Loops::of(&dense.bias(bias));
        assert_eq!((loops.inner.size, loops.inner.strides), (3, [1, 1, 0, 0]));
        assert_eq!(loops.outer[0], Dim { size: 5, strides: [3, 3, 0, 1] });
        assert_eq!((loops.rows(), loops.rank(), loops.unit), (40, 2, true));
        let gate = Layout::strided(&[2, 3, 4, 5], &[0, 0, 0, 1]).unwrap();
        let loops = Loops::of(&dense.gate(TensorDesc { dtype: DType::F16, layout: gate }));
        assert!(!loops.unit);
        let scalar = Loops::of(&spec(DType::F32, &[], &[], Approximate::None));
        assert_eq!((scalar.inner.size, scalar.rank(), scalar.unit), (1, 0, true));
        assert!(Loops::of(&spec(DType::F32, &[3, 0], &[0, 1], Approximate::None)).is_empty());
    }

    #[test]
    fn accesses_of_a_thread_follow_the_waves() {
        let unroll = |rows: usize| {
            let spec = spec(DType::F16, &[rows, 2048], &[0, 1], Approximate::None);
            complete(&spec, &GeluConfiguration::new(GeluAlgorithm::F16x8Pack)).unroll
        };
        // One wave exactly, and more.
        assert_eq!([512, 1024, 1025, 8191, 8192].map(unroll), [1, 1, 2, 2, 1].map(Some));
    }

    #[test]
    fn forward_kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for dtype in TYPES {
            for approximate in FORMS {
                let flat = spec(dtype, &[64, 48], &[0, 1], approximate);
                let bias = |d| TensorDesc::contiguous(d, &[48]).unwrap();
                for algorithm in algorithms(&flat) {
                    let configuration = GeluConfiguration::new(algorithm);
                    kernels.push(forward(&flat, &configuration).0);
                    let large = GeluConfiguration { block: Some(1024), ..configuration };
                    kernels.push(forward(&flat, &large).0);
                }
                let specs = [
                    flat.bias(bias(dtype)).gate(flat.x),
                    flat.bias(bias(DType::F32)),
                    flat.half_math(HalfMath::Native),
                ];
                kernels.extend(
                    specs.map(|spec| {
                        forward(&spec, &GeluConfiguration::new(algorithms(&spec)[0])).0
                    }),
                );
            }
        }
        let deep = Layout::strided(&[2; 8], &[256, 1, 3, 7, 17, 37, 77, 1000]).unwrap();
        let deep = TensorDesc { dtype: DType::F32, layout: deep };
        let spec = GeluSpec::new(deep, Approximate::None).unwrap();
        kernels.push(forward(&spec, &GeluConfiguration::new(GeluAlgorithm::F32)).0);
        crate::cuda::compile_tests::check_compiles(&kernels);
    }

    #[test]
    fn backward_kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for dtype in TYPES {
            for approximate in FORMS {
                let plain = spec(dtype, &[64, 48], &[0, 1], approximate);
                let bias = TensorDesc::contiguous(DType::F32, &[48]).unwrap();
                let t = || Tensor::zeros(dtype, &[64, 48]).unwrap();
                let (x, dy, mut dx, mut dgate) = (t(), t(), t(), t());
                let bias_tensor = Tensor::zeros(DType::F32, &[48]).unwrap();
                for fused in [false, true] {
                    let spec = if fused { plain.bias(bias).gate(plain.x) } else { plain };
                    let args = GeluArgs {
                        x: x.as_ref(),
                        bias: fused.then(|| bias_tensor.as_ref()),
                        gate: fused.then(|| x.as_ref()),
                    };
                    let grads = GeluGrads {
                        dx: Some(dx.as_mut()),
                        dgate: fused.then(|| dgate.as_mut()),
                        dbias: None,
                    };
                    kernels.push(backward_kernel(&spec, &args, &dy.as_ref(), &grads).1);
                    if fused {
                        let dy = dy.as_ref();
                        kernels.push(bias_gradient_kernel(&spec, &args, &dy, std::ptr::null()).0);
                    }
                }
            }
        }
        crate::cuda::compile_tests::check_compiles(&kernels);
    }

    #[test]
    fn without_a_device_a_plan_is_an_error() {
        let spec = spec(DType::F16, &[8], &[0], Approximate::None);
        assert!(matches!(
            Forward::new(4000, &spec, &GeluConfiguration::new(GeluAlgorithm::F16x8Pack)),
            Err(crate::Error::NoDevice { .. })
        ));
        let options = crate::PlanOptions { device: Device::Cpu, ..Default::default() };
        let native = spec.half_math(HalfMath::Native);
        assert!(matches!(
            crate::GeluPlan::new(&native, &options),
            Err(crate::Error::Unsupported { .. })
        ));
    }
}
