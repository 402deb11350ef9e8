//! Causal convolution on CUDA: launches of `kernels/*.cu`.

use super::{CausalConv1dArgs, CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Kernels, Launch, Source, params, type_name};
use crate::{Activation, DType, Device, Result, TensorDesc, TensorMut, TensorRef, Workspace};

macro_rules! header {
    ($file:literal) => {
        Source { name: $file, text: include_str!(concat!("../kernels/", $file)), includes: &[] }
    };
}

static INCLUDES: &[Source] = &[
    header!("parameters.cuh"),
    header!("causal_conv1d.cuh"),
    header!("vector.cuh"),
    header!("row.cuh"),
    header!("backward_walk.cuh"),
    header!("im2col.cuh"),
    header!("update.cuh"),
    header!("serving.cuh"),
    header!("serving_pieces.cuh"),
];

macro_rules! source {
    ($name:ident, $file:literal) => {
        static $name: Source = Source {
            name: $file,
            text: include_str!(concat!("../kernels/", $file)),
            includes: INCLUDES,
        };
    };
}

mod backward;
mod backward_rows;
pub(super) mod dense_backward;
mod form;
pub(super) mod im2col;
pub(super) mod serving;
mod taps;
pub(super) mod update;

use form::Form;

source!(PLAIN, "plain.cu");
source!(MASK, "mask.cu");
source!(STATES, "states.cu");

const THREADS: usize = 128;
/// Bytes of x up to which the next kernel had better start early: a wave of blocks or so.
const SMALL: usize = 4 << 20;
/// Largest grid along y and z.
const GRID: usize = 65535;

params! {
    /// `Params` of causal_conv1d.cuh.
    #[derive(Default)]
    struct Params {
        y: usize,
        x: usize,
        weight: usize,
        bias: usize,
        seq_idx: usize,
        cu_seqlens: usize,
        initial_states: usize,
        final_states: usize,
        mask: usize,
        dy: usize,
        dfinal_states: usize,
        dx: usize,
        dinitial_states: usize,
        partial: usize,
        wrong: usize,
        batch: usize,
        channels: usize,
        length: usize,
        width: usize,
        sequences: usize,
        x_stride: [isize; 3],
        y_stride: [isize; 3],
        weight_stride: [isize; 2],
        bias_stride: isize,
        seq_idx_stride: [isize; 2],
        cu_stride: isize,
        initial_stride: [isize; 3],
        final_stride: [isize; 3],
        dy_stride: [isize; 3],
        dfinal_stride: [isize; 3],
        dx_stride: [isize; 3],
        dinitial_stride: [isize; 3],
        chunk: usize,
        chunks: usize,
    }
}

fn strides<const N: usize>(desc: Option<&TensorDesc>) -> [isize; N] {
    desc.map_or([0; N], |desc| std::array::from_fn(|i| desc.strides()[i]))
}

fn address(view: Option<&TensorRef<'_>>) -> usize {
    view.map_or(0, |view| view.as_ptr() as usize)
}

fn output_address(view: Option<&TensorMut<'_>>) -> usize {
    view.map_or(0, |view| view.as_ptr() as usize)
}

impl Params {
    /// Sizes and strides of a spec.
    fn of(spec: &CausalConv1dSpec, problem: &Problem) -> Result<Self> {
        let states_shape = spec.states_shape()?;
        Ok(Params {
            batch: problem.b,
            channels: problem.d,
            length: problem.l,
            width: problem.width,
            sequences: states_shape[0],
            x_stride: strides(Some(&spec.x)),
            y_stride: strides(Some(&spec.y)),
            weight_stride: strides(Some(&spec.weight)),
            bias_stride: strides::<1>(spec.bias.as_ref())[0],
            seq_idx_stride: strides(spec.seq_idx.as_ref()),
            cu_stride: strides::<1>(spec.cu_seqlens.as_ref())[0],
            initial_stride: strides(spec.initial_states.as_ref()),
            final_stride: strides(spec.final_states.as_ref()),
            ..Params::default()
        })
    }

    /// With the addresses of inputs.
    ///
    /// # Errors
    /// As [`Gpu::wrong_index`].
    fn with_inputs(&self, gpu: &'static Gpu, args: &CausalConv1dArgs<'_>) -> Result<Self> {
        Ok(Params {
            x: address(Some(&args.x)),
            weight: address(Some(&args.weight)),
            bias: address(args.bias.as_ref()),
            seq_idx: address(args.seq_idx.as_ref()),
            cu_seqlens: address(args.cu_seqlens.as_ref()),
            initial_states: address(args.initial_states.as_ref()),
            wrong: if args.cu_seqlens.is_some() { gpu.wrong_index()? } else { 0 },
            ..*self
        })
    }

    /// With the addresses and strides of the outputs' gradients, and of those of inputs.
    fn with_gradients(
        &self,
        dy: &TensorRef<'_>,
        dfinal_states: Option<&TensorRef<'_>>,
        grads: &CausalConv1dGrads<'_>,
    ) -> Self {
        let (dx, dinitial_states) = (grads.dx.as_ref(), grads.dinitial_states.as_ref());
        Params {
            dy: address(Some(dy)),
            dfinal_states: address(dfinal_states),
            dx: output_address(dx),
            dinitial_states: output_address(dinitial_states),
            dy_stride: strides(Some(dy.desc())),
            dfinal_stride: strides(dfinal_states.map(TensorRef::desc)),
            dx_stride: strides(dx.map(TensorMut::desc)),
            dinitial_stride: strides(dinitial_states.map(TensorMut::desc)),
            ..*self
        }
    }
}

/// Constants that every kernel of the room takes for types and options.
pub(super) fn define_operands(
    kernel: KernelSpec,
    x: &TensorDesc,
    weight: &TensorDesc,
    bias: Option<&TensorDesc>,
    activation: Activation,
) -> KernelSpec {
    let width = weight.shape().last().copied().unwrap_or(0);
    let kernel = kernel
        .define("T", type_name(x.dtype))
        .define("W", type_name(weight.dtype))
        .define("ACT", activation.constant())
        // Loops over more taps are not unrolled.
        .define("WIDTH", if width <= 9 { width } else { 0 });
    match bias {
        Some(bias) => kernel.define("BIAS", type_name(bias.dtype)),
        None => kernel,
    }
}

/// Whether neighbouring threads follow d rather than l.
fn along_channels(strides: &[isize]) -> bool {
    strides[1].unsigned_abs() < strides[2].unsigned_abs()
}

/// Whether an activation and its derivative take few registers.
fn is_simple(activation: Activation) -> bool {
    !matches!(activation, Activation::Gelu(_))
}

/// How a plan by matrix products computes gradients.
#[derive(Clone, Debug)]
pub(super) enum GradientKernels {
    Depthwise(Box<Direct>),
    Dense(Box<dense_backward::DenseBackward>),
}

impl GradientKernels {
    pub(super) fn workspace_bytes(&self) -> usize {
        match self {
            GradientKernels::Depthwise(direct) => direct.workspace_bytes(),
            GradientKernels::Dense(dense) => dense.workspace_bytes(),
        }
    }
}

/// A depthwise plan on a device, with its kernels compiled and loaded.
#[derive(Clone, Debug)]
pub(super) struct Direct {
    gpu: &'static Gpu,
    form: Form,
    /// Bytes of an element of x.
    element: usize,
    /// Whether rows hold several sequences, which the vector kernels learn from a mask.
    packed: bool,
    params: Params,
    /// Of the partial sums of a backward run.
    partial_bytes: usize,
    main: Option<&'static Kernel>,
    /// For addresses that the main kernel cannot take.
    plain: &'static Kernel,
    mask: Option<&'static Kernel>,
    states: Option<&'static Kernel>,
    gradients: Kernels<backward::Key>,
}

/// A kernel of the room.
fn kernel_spec(source: &'static Source, name: &str, spec: &CausalConv1dSpec) -> KernelSpec {
    let entry = format!("causal_conv1d_{name}_{}", spec.x.dtype);
    let kernel = define_operands(
        KernelSpec::new(source, entry),
        &spec.x,
        &spec.weight,
        spec.bias.as_ref(),
        spec.activation,
    )
    .define("ALONG_CHANNELS", u8::from(along_channels(spec.y.strides())))
    .params::<Params>()
    .overlapped(spec.x.bytes() <= SMALL);
    match &spec.cu_seqlens {
        Some(desc) => kernel.define("INDEX", index_name(desc)),
        None => kernel,
    }
}

/// What kernels call the type of indices.
fn index_name(indices: &TensorDesc) -> &'static str {
    if indices.dtype == DType::I64 { "i64" } else { "int" }
}

fn states_kernel(spec: &CausalConv1dSpec, form: Form) -> Option<KernelSpec> {
    // The plain kernel looks into initial states itself, but the main one may be chosen as well.
    let initial = spec.initial_states.is_some() && form != Form::Plain;
    (initial || spec.final_states.is_some()).then(|| {
        kernel_spec(&STATES, "states", spec)
            .define("INITIAL", u8::from(initial))
            .define("FINAL", u8::from(spec.final_states.is_some()))
    })
}

fn mask_kernel(spec: &CausalConv1dSpec, form: Form) -> Option<KernelSpec> {
    let packed = spec.seq_idx.is_some() || spec.cu_seqlens.is_some();
    (packed && form != Form::Plain).then(|| kernel_spec(&MASK, "mask", spec))
}

impl Direct {
    pub(super) fn new(device: Device, spec: &CausalConv1dSpec, problem: &Problem) -> Result<Self> {
        let gpu = Gpu::get(device)?;
        let form = Form::of(spec, problem, |feature| gpu.has(feature));
        let load = |kernel: Option<KernelSpec>| kernel.map(|k| gpu.kernel(&k)).transpose();
        let params = Params::of(spec, problem)?;
        Ok(Direct {
            gpu,
            form,
            element: spec.x.dtype.size(),
            packed: spec.seq_idx.is_some() || spec.cu_seqlens.is_some(),
            params,
            partial_bytes: backward::partial_bytes(gpu, spec, &params),
            main: load(form.kernel(spec))?,
            plain: gpu.kernel(&kernel_spec(&PLAIN, "plain", spec))?,
            mask: load(mask_kernel(spec, form))?,
            states: load(states_kernel(spec, form))?,
            gradients: Kernels::default(),
        })
    }

    /// Blocks of the kernel, in one line.
    pub(super) fn explain(&self) -> String {
        self.form.explain()
    }

    fn mask_bytes(&self) -> usize {
        let positions = self.params.batch * self.params.length;
        if self.packed { (positions * size_of::<u16>()).next_multiple_of(256) } else { 0 }
    }

    /// Bytes for a run or a backward run.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.mask_bytes() + self.partial_bytes
    }

    /// Views have been checked. Index values cannot be without waiting for the device: boundaries
    /// outside 0..=l are held there, so that wrong ones give wrong results, touch nothing else, and are
    /// reported later.
    pub(super) fn run(
        &self,
        args: &CausalConv1dArgs<'_>,
        outputs: &CausalConv1dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let (stream, scratch) = workspace.take_on(self.gpu, self.mask_bytes())?;
        let mut params = Params {
            y: output_address(Some(&outputs.y)),
            final_states: output_address(outputs.final_states.as_ref()),
            mask: scratch as usize,
            ..self.params.with_inputs(self.gpu, args)?
        };
        let Params { batch, channels, length, sequences, .. } = params;
        // SAFETY: `Params` is the kernels' structure (they compare its size); views are valid on this
        // device for the strides in it, and the mask has one word for every position.
        unsafe {
            if batch * channels * length > 0 {
                if let Some(mask) = self.mask {
                    mask.launch(stream, rows_launch(length, batch), &params)?;
                }
                match (self.main, self.form.launch(&mut params, self.element)) {
                    (Some(main), Some(launch)) => main.launch(stream, launch, &params)?,
                    _ => self.plain.launch(stream, plain_launch(&params), &params)?,
                }
            }
            if let Some(states) = self.states {
                states.launch(stream, rows_launch(channels, sequences), &params)?;
            }
        }
        Ok(())
    }
}

impl Params {
    /// Positions that the first vector of a row may begin before it, where rows of y do not all begin at a vector.
    fn lead(&self, element: usize) -> usize {
        let [b_stride, d_stride, _] = self.y_stride;
        let in_bytes = |elements: isize| elements * element as isize;
        let begins = [self.y as isize, in_bytes(b_stride), in_bytes(d_stride)];
        if begins.into_iter().any(|bytes| bytes % 16 != 0) { 16 / element - 1 } else { 0 }
    }
}

/// A thread for each element of x or y.
fn plain_launch(params: &Params) -> Launch {
    let Params { batch, channels, length, y_stride, .. } = *params;
    let (inner, outer) = match along_channels(&y_stride) {
        true => (channels, length),
        false => (length, channels),
    };
    let Launch { grid: [x, y, _], block } = rows_launch(inner, outer);
    Launch { grid: [x, y, batch.min(GRID) as u32], block }
}

/// A thread for each element of rows, blocks of several rows along y.
pub(super) fn rows_launch(row: usize, rows: usize) -> Launch {
    Launch {
        grid: [row.div_ceil(THREADS) as u32, rows.min(GRID) as u32, 1],
        block: [THREADS as u32, 1, 1],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Approximate, Layout};

    const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    pub(super) fn spec(
        dtype: DType,
        shape: [usize; 3],
        width: usize,
        order: [usize; 3],
    ) -> CausalConv1dSpec {
        let x = TensorDesc { dtype, layout: Layout::with_order(&shape, &order).unwrap() };
        let weight = TensorDesc::contiguous(dtype, &[shape[1], width]).unwrap();
        CausalConv1dSpec::new(x, weight).unwrap()
    }

    #[test]
    fn kernels_compile_without_spills() {
        let (mut kernels, mut large) = (Vec::new(), Vec::new());
        let mut push = |spec: &CausalConv1dSpec| {
            let form = Form::of(spec, &spec.problem().unwrap(), |_| false);
            kernels.extend(form.kernel(spec));
            kernels.extend(states_kernel(spec, form));
            kernels.extend(mask_kernel(spec, form));
            kernels.push(kernel_spec(&PLAIN, "plain", spec));
            kernels.extend(backward::all_kernels(spec));
        };
        for dtype in TYPES {
            for order in [[0, 1, 2], [0, 2, 1]] {
                let bias = TensorDesc::contiguous(DType::F32, &[64]).unwrap();
                let spec = spec(dtype, [1, 64, 2048], 4, order)
                    .with_bias(bias)
                    .with_activation(Activation::Silu);
                push(&spec);
                let states = TensorDesc::contiguous(dtype, &[1, 64, 3]).unwrap();
                let seq_idx = TensorDesc::contiguous(DType::I32, &[1, 2048]).unwrap();
                let cu_seqlens = TensorDesc::contiguous(DType::I64, &[2]).unwrap();
                let spec = spec.with_initial_states(states).with_final_states(states);
                push(&spec.clone().with_seq_idx(seq_idx));
                push(&spec.with_cu_seqlens(cu_seqlens));
            }
        }
        for (order, dtype) in
            [([0, 1, 2], DType::F16), ([0, 2, 1], DType::F16), ([0, 2, 1], DType::F32)]
        {
            // As large ones, and on Hopper.
            for activation in [Activation::Silu, Activation::Gelu(Approximate::None)] {
                for width in [2, 4, 5] {
                    let spec =
                        spec(dtype, [8, 4096, 2048], width, order).with_activation(activation);
                    push(&spec);
                    let form = Form::of(&spec, &spec.problem().unwrap(), |_| true);
                    large.extend(form.kernel(&spec));
                }
            }
        }
        for width in [1, 2, 3, 5, 7, 9] {
            push(&spec(DType::F16, [1, 64, 2048], width, [0, 1, 2]));
        }
        for width in [7, 9, 16, 20, 65, 128, 256] {
            for (dtype, order) in
                TYPES.into_iter().flat_map(|t| [[0, 1, 2], [0, 2, 1]].map(|order| (t, order)))
            {
                let spec =
                    spec(dtype, [8, 4096, 2048], width, order).with_activation(Activation::Silu);
                push(&spec);
                let form = Form::of(&spec, &spec.problem().unwrap(), |_| true);
                large.extend(form.kernel(&spec));
            }
        }
        for &activation in Activation::ALL {
            push(&spec(DType::F32, [1, 64, 2048], 4, [0, 1, 2]).with_activation(activation));
        }
        kernels.extend(large);
        crate::gpu::compile_tests::check_compiles_in_turn(&kernels);
    }
}
