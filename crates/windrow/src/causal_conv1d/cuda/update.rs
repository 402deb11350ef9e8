//! Decoding on CUDA.

use super::{INCLUDES, THREADS, address, define_operands, output_address, rows_launch, strides};
use crate::causal_conv1d::{CausalConv1dUpdateArgs, CausalConv1dUpdateSpec, Problem};
use crate::cuda::{Gpu, Kernel, KernelSpec, Source};
use crate::{Result, TensorMut, Workspace};

static SOURCE: Source =
    Source { name: "update.cu", text: include_str!("../kernels/update.cu"), includes: INCLUDES };

/// `Params` of update.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Params {
    y: usize,
    x: usize,
    state: usize,
    weight: usize,
    bias: usize,
    cache_seqlens: usize,
    state_indices: usize,
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

/// A decoding plan on a device, with its kernel compiled and loaded.
#[derive(Clone, Debug)]
pub(in crate::causal_conv1d) struct Update {
    kernel: &'static Kernel,
    params: Params,
}

fn kernel_spec(spec: &CausalConv1dUpdateSpec) -> KernelSpec {
    let entry = format!("causal_conv1d_update_{}", spec.x.dtype);
    let (width, state_length) = (spec.weight.shape()[1], spec.conv_state.shape()[2]);
    let few = width <= 9 && state_length <= 8;
    let kernel = KernelSpec::new(&SOURCE, entry)
        .define("STATE_LENGTH", if few { state_length } else { 0 })
        .define("PARAMS_SIZE", size_of::<Params>());
    define_operands(kernel, &spec.x, &spec.weight, spec.bias.as_ref(), spec.activation)
}

impl Update {
    pub(in crate::causal_conv1d) fn new(
        index: u32,
        spec: &CausalConv1dUpdateSpec,
        problem: &Problem,
    ) -> Result<Self> {
        let kernel = Gpu::get(index)?.kernel(&kernel_spec(spec))?;
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
        Ok(Update { kernel, params })
    }

    /// Threads of a block, in one line.
    pub(in crate::causal_conv1d) fn explain(&self) -> String {
        format!("one channel a thread, blocks of {THREADS}")
    }

    /// Views have been checked. Index values cannot be without waiting for the device: one of no
    /// state counts as padding, and of two entries with one state either may come last.
    pub(in crate::causal_conv1d) fn run(
        &self,
        args: &CausalConv1dUpdateArgs<'_>,
        conv_state: &TensorMut<'_>,
        y: &TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let (stream, _) = workspace.take_on(self.kernel.gpu(), 0)?;
        let params = Params {
            y: output_address(Some(y)),
            x: address(Some(&args.x)),
            state: output_address(Some(conv_state)),
            weight: address(Some(&args.weight)),
            bias: address(args.bias.as_ref()),
            cache_seqlens: address(args.cache_seqlens.as_ref()),
            state_indices: address(args.conv_state_indices.as_ref()),
            ..self.params
        };
        let launch = rows_launch(params.channels, params.batch);
        // SAFETY: `Params` is the kernel's structure (it compares its size), and views are valid on
        // this device for the strides in it.
        unsafe { self.kernel.launch(stream, launch, &params) }
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
                let desc = |shape: &[usize]| TensorDesc::contiguous(dtype, shape).unwrap();
                let (x, weight) = (desc(&[2, 64, 1]), desc(&[64, width]));
                let spec = CausalConv1dUpdateSpec::new(x, desc(&[2, 64, width]), weight).unwrap();
                kernels.push(kernel_spec(&spec));
                let bias = TensorDesc::contiguous(DType::F32, &[64]).unwrap();
                let spec = spec.with_bias(bias).with_activation(Activation::Silu);
                kernels.push(kernel_spec(&spec));
            }
        }
        crate::cuda::compile_tests::check_compiles(&kernels);
    }
}
