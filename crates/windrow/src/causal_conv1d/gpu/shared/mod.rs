//! The code that kernels of causal convolution share: headers, parameters, constants, launches.

mod indices;
mod norm;
mod outputs;

pub(crate) use indices::broken_rule;
pub(crate) use norm::{NormBehind, define_norm, fits_in_warp, norm_channels};
pub(crate) use outputs::{Further, define_outputs, further_addresses};

use crate::causal_conv1d::{
    CausalConv1dArgs, CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dSpec, HeadNorm, Problem,
};
use crate::gpu::{Gpu, KernelSpec, Launch, Source, params, type_name};
use crate::{Activation, DType, Result, TensorDesc, TensorMut, TensorRef};

/// A header in the folder of the file that names it.
macro_rules! header {
    ($file:literal) => {
        crate::gpu::Source { name: $file, text: include_str!($file), includes: &[] }
    };
}
pub(crate) use header;

pub(crate) const PARAMETERS: Source = header!("parameters.cuh");
pub(crate) const NORMS: Source = header!("norm.cuh");

pub(crate) static INCLUDES: &[Source] = &[
    PARAMETERS,
    NORMS,
    header!("causal_conv1d.cuh"),
    header!("vector.cuh"),
    header!("row.cuh"),
    header!("backward_walk.cuh"),
    header!("im2col.cuh"),
];

/// A kernel's source in the folder of the file that names it.
macro_rules! source {
    ($name:ident, $file:literal) => {
        source!($name, $file, crate::causal_conv1d::gpu::shared::INCLUDES);
    };
    ($name:ident, $file:literal, $includes:expr) => {
        pub(crate) static $name: crate::gpu::Source =
            crate::gpu::Source { name: $file, text: include_str!($file), includes: $includes };
    };
}
pub(crate) use source;

source!(MASK, "mask.cu");
source!(STATES, "states.cu");
source!(INPUT, "backward_input.cu");

pub(crate) const THREADS: usize = 128;
/// The number of bytes of x up to which the next kernel should start early: about a wave of blocks.
pub(crate) const SMALL: usize = 4 << 20;
/// The largest grid along y and z.
pub(crate) const GRID: usize = 65535;

params! {
    /// `Params` of causal_conv1d.cuh.
    #[derive(Default)]
    pub(crate) struct Params {
        pub(crate) y: usize,
        pub(crate) x: usize,
        pub(crate) weight: usize,
        pub(crate) bias: usize,
        pub(crate) seq_idx: usize,
        pub(crate) cu_seqlens: usize,
        pub(crate) initial_states: usize,
        pub(crate) final_states: usize,
        pub(crate) mask: usize,
        pub(crate) dy: usize,
        pub(crate) dfinal_states: usize,
        pub(crate) dx: usize,
        pub(crate) dinitial_states: usize,
        pub(crate) partial: usize,
        pub(crate) wrong: usize,
        pub(crate) batch: usize,
        pub(crate) channels: usize,
        pub(crate) length: usize,
        pub(crate) width: usize,
        pub(crate) dilation: usize,
        pub(crate) sequences: usize,
        pub(crate) x_stride: [isize; 3],
        pub(crate) y_stride: [isize; 3],
        pub(crate) weight_stride: [isize; 2],
        pub(crate) bias_stride: isize,
        pub(crate) seq_idx_stride: [isize; 2],
        pub(crate) cu_stride: isize,
        pub(crate) initial_stride: [isize; 3],
        pub(crate) final_stride: [isize; 3],
        pub(crate) dy_stride: [isize; 3],
        pub(crate) dfinal_stride: [isize; 3],
        pub(crate) dx_stride: [isize; 3],
        pub(crate) dinitial_stride: [isize; 3],
        pub(crate) chunk: usize,
        pub(crate) chunks: usize,
        pub(crate) further_y: [usize; 2],
        pub(crate) further_stride: [[isize; 3]; 2],
        pub(crate) further_first: [usize; 2],
        pub(crate) norm_channels: usize,
        pub(crate) epsilon: f32,
    }
}

pub(crate) fn strides<const N: usize>(desc: Option<&TensorDesc>) -> [isize; N] {
    desc.map_or([0; N], |desc| std::array::from_fn(|i| desc.strides()[i]))
}

pub(crate) fn address(view: Option<&TensorRef<'_>>) -> usize {
    view.map_or(0, |view| view.as_ptr() as usize)
}

pub(crate) fn output_address(view: Option<&TensorMut<'_>>) -> usize {
    view.map_or(0, |view| view.as_ptr() as usize)
}

impl Params {
    /// Sizes and strides of a spec.
    pub(crate) fn of(spec: &CausalConv1dSpec, problem: &Problem) -> Result<Self> {
        let states_shape = spec.states_shape()?;
        let further = Further::of(spec.outputs());
        Ok(Params {
            batch: problem.b,
            channels: problem.d,
            length: problem.l,
            width: problem.width,
            dilation: problem.dilation,
            sequences: states_shape[0],
            x_stride: strides(Some(&spec.x)),
            y_stride: strides(Some(&spec.y)),
            weight_stride: strides(Some(&spec.weight)),
            bias_stride: strides::<1>(spec.bias.as_ref())[0],
            seq_idx_stride: strides(spec.seq_idx.as_ref()),
            cu_stride: strides::<1>(spec.cu_seqlens.as_ref())[0],
            initial_stride: strides(spec.initial_states.as_ref()),
            final_stride: strides(spec.final_states.as_ref()),
            further_stride: further.strides,
            further_first: further.first,
            norm_channels: norm_channels(spec.norm, spec.outputs()),
            epsilon: spec.norm.map_or(0.0, HeadNorm::epsilon),
            ..Params::default()
        })
    }

    /// The parameters with the addresses of inputs.
    ///
    /// # Errors
    /// As [`Gpu::wrong_index`].
    pub(crate) fn with_inputs(
        &self,
        gpu: &'static Gpu,
        args: &CausalConv1dArgs<'_>,
    ) -> Result<Self> {
        Ok(Params {
            x: address(Some(&args.x)),
            weight: address(Some(&args.weight)),
            bias: address(args.bias.as_ref()),
            seq_idx: address(args.seq_idx.as_ref()),
            cu_seqlens: address(args.cu_seqlens.as_ref()),
            initial_states: address(args.initial_states.as_ref()),
            wrong: if args.cu_seqlens.is_some() { gpu.wrong_index(broken_rule)? } else { 0 },
            ..*self
        })
    }

    /// The parameters with the addresses of outputs.
    pub(crate) fn with_outputs(&self, outputs: &CausalConv1dOutputs<'_>) -> Self {
        let CausalConv1dOutputs { y, y2, y3, final_states } = outputs;
        let further = [y2.as_ref(), y3.as_ref()];
        Params {
            y: output_address(Some(y)),
            further_y: further_addresses(further, &self.further_stride, &self.further_first),
            final_states: output_address(final_states.as_ref()),
            ..*self
        }
    }

    /// True if x and each output of y begin at multiples of this number of bytes.
    pub(crate) fn are_aligned(&self, bytes: usize) -> bool {
        let [y2, y3] = self.further_y;
        (self.x | self.y | y2 | y3).is_multiple_of(bytes)
    }

    /// The parameters with the addresses and strides of the outputs' gradients, and of those of inputs.
    pub(crate) fn with_gradients(
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

/// The constants that every kernel of causal conv1d takes for types and options.
pub(crate) fn define_operands(
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
        .define_activation("ACT", activation)
        // Loops over more taps are not unrolled.
        .define("WIDTH", if width <= 9 { width } else { 0 });
    match bias {
        Some(bias) => kernel.define("BIAS", type_name(bias.dtype)),
        None => kernel,
    }
}

/// True if neighbouring threads follow d, and not l.
pub(crate) fn along_channels(strides: &[isize]) -> bool {
    strides[1].unsigned_abs() < strides[2].unsigned_abs()
}

/// True if an activation and its derivative need few registers.
pub(crate) fn is_simple(activation: Activation) -> bool {
    !matches!(activation, Activation::Gelu(_))
}

/// A kernel of causal_conv1d.
pub(crate) fn kernel_spec(
    source: &'static Source,
    name: &str,
    spec: &CausalConv1dSpec,
) -> KernelSpec {
    let entry = format!("causal_conv1d_{name}_{}", spec.x.dtype);
    let kernel = define_operands(
        KernelSpec::new(source, entry),
        &spec.x,
        &spec.weight,
        spec.bias.as_ref(),
        spec.activation,
    )
    .define("ALONG_CHANNELS", u8::from(along_channels(spec.y.strides())))
    .define("DILATED", u8::from(spec.dilation > 1))
    .params::<Params>()
    .overlapped(spec.x.bytes() <= SMALL);
    let kernel = define_outputs(kernel, spec.outputs().count());
    match &spec.cu_seqlens {
        Some(desc) => kernel.define("INDEX", index_name(desc)),
        None => kernel,
    }
}

/// The kernels' name for the type of indices.
pub(crate) fn index_name(indices: &TensorDesc) -> &'static str {
    if indices.dtype == DType::I64 { "i64" } else { "int" }
}

/// The kernel of the states that a plan reads, if the main kernel does not, and of those that it writes.
pub(crate) fn states_kernel(spec: &CausalConv1dSpec, reads: bool) -> Option<KernelSpec> {
    let initial = reads && spec.initial_states.is_some();
    (initial || spec.final_states.is_some()).then(|| {
        kernel_spec(&STATES, "states", spec)
            .define("INITIAL", u8::from(initial))
            .define("FINAL", u8::from(spec.final_states.is_some()))
    })
}

impl Params {
    /// Positions that the first vector of a row may begin before it, where rows of y do not all begin at a vector.
    pub(crate) fn lead(&self, element: usize) -> usize {
        let in_bytes = |elements: isize| elements * element as isize;
        let is_misaligned = |y: usize, [b_stride, d_stride, _]: [isize; 3]| {
            let begins = [y as isize, in_bytes(b_stride), in_bytes(d_stride)];
            begins.into_iter().any(|bytes| bytes % 16 != 0)
        };
        let further = self.further_y.into_iter().zip(self.further_stride);
        let mut outputs = further.chain([(self.y, self.y_stride)]);
        if outputs.any(|(y, stride)| is_misaligned(y, stride)) { 16 / element - 1 } else { 0 }
    }
}

/// A thread for each element of x or y.
pub(crate) fn plain_launch(params: &Params) -> Launch {
    let Params { batch, channels, length, y_stride, .. } = *params;
    let (inner, outer) = match along_channels(&y_stride) {
        true => (channels, length),
        false => (length, channels),
    };
    let Launch { grid: [x, y, _], block } = rows_launch(inner, outer);
    Launch { grid: [x, y, batch.min(GRID) as u32], block }
}

/// A thread for each element of rows, blocks of several rows along y.
pub(crate) fn rows_launch(row: usize, rows: usize) -> Launch {
    Launch {
        grid: [row.div_ceil(THREADS) as u32, rows.min(GRID) as u32, 1],
        block: [THREADS as u32, 1, 1],
    }
}
