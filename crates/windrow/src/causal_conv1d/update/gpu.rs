//! Decoding on GPUs.

use crate::causal_conv1d::gpu::shared::{
    PARAMETERS, SMALL, THREADS, address, broken_rule, define_operands, header, index_name,
    output_address, rows_launch, source, strides,
};
use crate::causal_conv1d::{CausalConv1dUpdateArgs, CausalConv1dUpdateSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Launch, Source, params};
use crate::{Device, Result, TensorMut, Workspace};

static INCLUDES: &[Source] = &[PARAMETERS, header!("update.cuh")];

source!(ANY, "update.cu", INCLUDES);
source!(STEP, "update_step.cu", INCLUDES);

params! {
    /// `Params` of update.cu.
    #[derive(Default)]
    struct Params {
        y: usize,
        x: usize,
        state: usize,
        weight: usize,
        bias: usize,
        cache_seqlens: usize,
        state_indices: usize,
        wrong: usize,
        batch: usize,
        channels: usize,
        length: usize,
        width: usize,
        state_length: usize,
        pool: usize,
        x_stride: [isize; 3],
        y_stride: [isize; 3],
        state_stride: [isize; 3],
        weight_stride: [isize; 2],
        bias_stride: isize,
        cache_seqlens_stride: isize,
        state_indices_stride: isize,
    }
}

/// A decoding plan on a GPU, with its kernels compiled and loaded.
#[derive(Clone, Debug)]
pub struct Update {
    any: &'static Kernel,
    /// The kernel for one new position, with the addresses that it takes.
    step: Option<(&'static Kernel, Step)>,
    params: Params,
}

/// The division of a spec by the kernel for one new position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// Channels of a thread.
    vector: usize,
    /// True if channels are neighbours in the states; otherwise the inputs of a channel are.
    along_channels: bool,
    /// The alignment that addresses need.
    bytes: usize,
}

impl Step {
    fn of(spec: &CausalConv1dUpdateSpec) -> Option<Self> {
        let (x, y, state) = (spec.x.strides(), spec.y.strides(), spec.conv_state.strides());
        let (width, state_length) = (spec.weight.shape()[1], spec.conv_state.shape()[2]);
        let dense = state[2] == 1 && state[1] == state_length as isize;
        let along_channels = state[1] == 1;
        let takes = spec.x.shape()[2] == 1
            && spec.cache_seqlens.is_none()
            && (1..=9).contains(&width)
            && (1..=8).contains(&state_length)
            && x[1] == 1
            && y[1] == 1
            && (dense || along_channels);
        // 8 bytes of x: more channels per thread leave too few threads for a step.
        let vector = 8 / spec.x.dtype.size();
        let between = [x[0], y[0], state[0], if along_channels { state[2] } else { 0 }];
        let fits = spec.x.shape()[1].is_multiple_of(vector)
            && between.iter().all(|stride| stride % vector as isize == 0);
        (takes && fits).then_some(Step { vector, along_channels, bytes: 8 })
    }

    fn launch(&self, params: &Params) -> Option<Launch> {
        let aligned = (params.x | params.y | params.state).is_multiple_of(self.bytes);
        aligned.then(|| rows_launch(params.channels / self.vector, params.batch))
    }
}

fn kernel_spec(source: &'static Source, spec: &CausalConv1dUpdateSpec) -> KernelSpec {
    let entry = format!("causal_conv1d_update_{}", spec.x.dtype);
    let (width, state_length) = (spec.weight.shape()[1], spec.conv_state.shape()[2]);
    let few = width <= 9 && state_length <= 8;
    let kernel = KernelSpec::new(source, entry)
        .define("STATE_LENGTH", if few { state_length } else { 0 })
        .define("SEQLENS", spec.cache_seqlens.as_ref().map_or("int", index_name))
        .define("INDICES", spec.conv_state_indices.as_ref().map_or("int", index_name))
        .params::<Params>()
        .overlapped(spec.x.bytes() <= SMALL);
    define_operands(kernel, &spec.x, &spec.weight, spec.bias.as_ref(), spec.activation)
}

fn step_kernel(spec: &CausalConv1dUpdateSpec, step: Step) -> KernelSpec {
    kernel_spec(&STEP, spec)
        .define("VECTOR", step.vector)
        .define("ALONG_CHANNELS", u8::from(step.along_channels))
}

impl Update {
    pub(in crate::causal_conv1d) fn new(
        device: Device,
        spec: &CausalConv1dUpdateSpec,
        problem: &Problem,
    ) -> Result<Self> {
        let gpu = Gpu::get(device)?;
        let step = match Step::of(spec) {
            Some(step) => Some((gpu.kernel(&step_kernel(spec, step))?, step)),
            None => None,
        };
        let &[pool, _, state_length] = spec.conv_state.shape() else {
            unreachable!("the spec has been checked")
        };
        let params = Params {
            batch: problem.b,
            channels: problem.d,
            length: problem.l,
            width: problem.width,
            state_length,
            pool,
            x_stride: strides(Some(&spec.x)),
            y_stride: strides(Some(&spec.y)),
            state_stride: strides(Some(&spec.conv_state)),
            weight_stride: strides(Some(&spec.weight)),
            bias_stride: strides::<1>(spec.bias.as_ref())[0],
            cache_seqlens_stride: strides::<1>(spec.cache_seqlens.as_ref())[0],
            state_indices_stride: strides::<1>(spec.conv_state_indices.as_ref())[0],
            ..Params::default()
        };
        Ok(Update { any: gpu.kernel(&kernel_spec(&ANY, spec))?, step, params })
    }

    /// Threads of a block, in one line.
    pub(in crate::causal_conv1d) fn explain(&self) -> String {
        let channels = self.step.map_or(1, |(_, step)| step.vector);
        format!("{channels} channels a thread, blocks of {THREADS}")
    }

    /// Computes `y` and the new states. The caller has checked the views. Index values cannot be checked without
    /// waiting for the GPU: an index without a state counts as padding, and is reported later. If two entries have the
    /// same state, either may be written last.
    pub(in crate::causal_conv1d) fn run(
        &self,
        args: &CausalConv1dUpdateArgs<'_>,
        conv_state: &TensorMut<'_>,
        y: &TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let gpu = self.any.gpu();
        let (stream, _) = workspace.take_on(gpu, 0)?;
        let indices = args.cache_seqlens.is_some() || args.conv_state_indices.is_some();
        let params = Params {
            y: output_address(Some(y)),
            x: address(Some(&args.x)),
            state: output_address(Some(conv_state)),
            weight: address(Some(&args.weight)),
            bias: address(args.bias.as_ref()),
            cache_seqlens: address(args.cache_seqlens.as_ref()),
            state_indices: address(args.conv_state_indices.as_ref()),
            wrong: if indices { gpu.wrong_index(broken_rule)? } else { 0 },
            ..self.params
        };
        let step = self.step.and_then(|(kernel, step)| Some((kernel, step.launch(&params)?)));
        let any = || (self.any, rows_launch(params.channels, params.batch));
        let (kernel, launch) = step.unwrap_or_else(any);
        // SAFETY: `Params` is the kernel's structure (it compares its size), and views are valid on
        // this device for the strides in it.
        unsafe { kernel.launch(stream, launch, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activation, DType, TensorDesc};

    #[test]
    fn kernels_compile_without_spills() {
        let mut kernels = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for width in [4, 20] {
                let desc_of =
                    |dtype, shape: &[usize]| TensorDesc::contiguous(dtype, shape).unwrap();
                let desc = |shape: &[usize]| desc_of(dtype, shape);
                let (x, weight) = (desc(&[2, 64, 1]), desc(&[64, width]));
                let spec = CausalConv1dUpdateSpec::new(x, desc(&[2, 64, width]), weight).unwrap();
                kernels.push(kernel_spec(&ANY, &spec));
                let wide = desc_of(DType::I64, &[2]);
                let ring = spec.clone().with_cache_seqlens(wide).with_conv_state_indices(wide);
                kernels.push(kernel_spec(&ANY, &ring));
                let bias = TensorDesc::contiguous(DType::F32, &[64]).unwrap();
                let spec = spec.with_bias(bias).with_activation(Activation::Silu);
                kernels.push(kernel_spec(&ANY, &spec));
                kernels.extend(Step::of(&spec).map(|step| step_kernel(&spec, step)));
            }
        }
        crate::gpu::compile_tests::check_compiles(&kernels);
    }
}
