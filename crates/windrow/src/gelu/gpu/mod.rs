//! GELU on GPUs: one kernel for the result, one for the gradients of x and the gate, and one for the gradient of the
//! bias, whose partial sums the shared kernel `column_sum` adds.

mod backward;
mod loops;
#[cfg(test)]
mod tests;

use super::{GeluAlgorithm, GeluArgs, GeluConfiguration, GeluSpec, HalfMath};
use crate::dtype::by_type;
use crate::gpu::{Gpu, Kernel, KernelSpec, Kernels, Launch, Source, type_name};
use crate::{Approximate, DType, Device, Result, TensorMut, TensorRef, Workspace};
pub(super) use backward::workspace_bytes;
use loops::{Loops, Words, bias_strides, strides};

static INCLUDES: &[Source] =
    &[Source { name: "gelu.cuh", text: include_str!("gelu.cuh"), includes: &[] }];
static FORWARD: Source =
    Source { name: "gelu.cu", text: include_str!("gelu.cu"), includes: INCLUDES };
const THREADS: usize = 128;
/// The number of blocks per multiprocessor in a wave.
const BLOCKS: usize = 16;

/// All algorithms for a spec, sorted from fastest to slowest. Wide accesses come first if elements are contiguous;
/// otherwise one element per thread comes first.
pub(super) fn algorithms(spec: &GeluSpec) -> Vec<GeluAlgorithm> {
    use GeluAlgorithm::*;
    if is_native(spec) && (spec.bias.is_some() || spec.gate.is_some()) {
        return Vec::new();
    }
    let mut all = by_type!(
        spec.x.dtype,
        F32 => vec![F32x4, F32],
        F16 => vec![F16x8Pack, F16x8, F16x2, F16],
        BF16 => vec![Bf16x8, Bf16x2, Bf16],
    );
    if !Loops::of(spec).unit {
        all.reverse();
    }
    all
}

fn is_native(spec: &GeluSpec) -> bool {
    spec.half_math == HalfMath::Native && spec.x.dtype.is_half()
}

/// The number of elements per thread, and per memory access.
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

impl Loops<4> {
    /// The loops over the operands y, x, gate and bias.
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

/// A kernel of GELU with the constants that all kernels have.
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
        .define("RANK", loops.rank());
    let kernel = words.describe(kernel);
    match &spec.bias {
        Some(bias) => kernel.define("BIAS", type_name(bias.dtype)),
        None => kernel,
    }
}

/// True if a launch has at most one wave of blocks. Then the next kernel should start before the launch ends.
fn is_small(launch: &Launch, wave: usize) -> bool {
    launch.grid.iter().map(|&n| n as usize).product::<usize>() <= wave
}

/// A plan's forward kernel, compiled and loaded.
#[derive(Clone, Debug)]
pub(super) struct Forward {
    kernel: &'static Kernel,
    gradients: Kernels<backward::Key>,
    configuration: GeluConfiguration,
    launch: Launch,
    words: Words,
    /// The positions in `words` of the addresses of y, x, gate and bias.
    pointers: [usize; 4],
    is_empty: bool,
}

/// The number of memory accesses per thread, and whether the next kernel's blocks may start early. Measured on an H200:
/// with less than one wave of blocks, the number of threads matters most, so each thread makes one access. Above one
/// wave, two accesses per thread, in half as many blocks, are faster. In both cases the next kernel's blocks may start
/// early, which costs about a nanosecond per block. Large tensors gain from neither, except for f32 with tanh, which
/// has the longest arithmetic.
fn model_unroll(
    spec: &GeluSpec,
    loops: &Loops<4>,
    (vector, access): (usize, usize),
    wave: usize,
) -> (usize, bool) {
    // For a row that begins at a vector; any other has one item more.
    let items = loops.inner.size.div_ceil(vector);
    let wide = loops.rank() == 0 && loops.unit && access * spec.x.dtype.size() == 16;
    let long = spec.x.dtype == DType::F32 && spec.approximate == Approximate::Tanh;
    match items {
        _ if !wide => (1, false),
        _ if items <= wave * THREADS => (1, true),
        _ if items < 8 * wave * THREADS || long => (2, true),
        _ => (1, false),
    }
}

/// The configuration, with each missing parameter chosen by the cost model.
pub(super) fn complete(
    device: Device,
    spec: &GeluSpec,
    configuration: &GeluConfiguration,
) -> GeluConfiguration {
    // Without the GPU, configurations can be listed but not planned. They are those of a large GPU.
    let wave = Gpu::get(device).map_or(2048, |gpu| gpu.round_wave(BLOCKS));
    complete_for(wave, spec, configuration)
}

/// The same as [`complete`], for a GPU that runs `wave` blocks at a time.
fn complete_for(
    wave: usize,
    spec: &GeluSpec,
    configuration: &GeluConfiguration,
) -> GeluConfiguration {
    let GeluConfiguration { algorithm, block, unroll } = *configuration;
    let (model, _) = model_unroll(spec, &Loops::of(spec), widths(algorithm), wave);
    let (block, unroll) = (block.or(Some(THREADS)), unroll.or(Some(model)));
    GeluConfiguration { algorithm, block, unroll }
}

/// The forward kernel of a spec, its launch and its parameters.
fn forward(
    wave: usize,
    spec: &GeluSpec,
    configuration: &GeluConfiguration,
) -> (KernelSpec, Launch, Words, [usize; 4]) {
    let GeluConfiguration { algorithm, block, unroll } = complete_for(wave, spec, configuration);
    let loops = Loops::of(spec);
    let mut words = Words::new();
    loops.push_shape(&mut words);
    let pointers = ["y", "x", "gate", "bias"];
    let pointers =
        std::array::from_fn(|i| loops.push_operand(&mut words, pointers[i], i, std::ptr::null()));
    let widths = widths(algorithm);
    let entry = format!("gelu_{}", algorithm.name());
    let (_, early) = model_unroll(spec, &loops, widths, wave);
    let (unroll, block) = (unroll.unwrap_or(1), block.unwrap_or(THREADS));
    let launch = loops.launch(widths.0, widths.1, unroll, block);
    let kernel = kernel_spec(&FORWARD, entry, spec, &loops, widths, &words)
        .define("NATIVE", u8::from(is_native(spec)))
        .define("UNROLL", unroll)
        .define("THREADS", block)
        .overlapped(early || is_small(&launch, wave));
    (kernel, launch, words, pointers)
}

impl Forward {
    pub(super) fn new(
        device: Device,
        spec: &GeluSpec,
        configuration: &GeluConfiguration,
    ) -> Result<Self> {
        let gpu = Gpu::get(device)?;
        let wave = gpu.round_wave(BLOCKS);
        let (kernel, launch, words, pointers) = forward(wave, spec, configuration);
        let kernel = gpu.kernel(&kernel)?;
        let (configuration, is_empty) =
            (complete_for(wave, spec, configuration), spec.x.layout.is_empty());
        let gradients = Kernels::default();
        Ok(Forward { kernel, gradients, configuration, launch, words, pointers, is_empty })
    }

    pub(super) fn configuration(&self) -> GeluConfiguration {
        self.configuration
    }

    /// Computes y. The views have been compared with the plan's spec and device.
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
        unsafe { self.kernel.launch(stream, self.launch, &words) }
    }

    /// A description of the launch: the numbers of blocks and threads.
    pub(super) fn explain(&self) -> String {
        let Launch { grid, block } = self.launch;
        format!("{}x{} blocks of {}x{} threads", grid[0], grid[1], block[0], block[1])
    }
}
