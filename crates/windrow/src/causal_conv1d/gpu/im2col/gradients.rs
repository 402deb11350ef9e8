//! Gradients of a dense convolution on GPUs, as products of f32 matrices over all positions.
//!
//! With A the im2col matrix [n, width*d], B the weight as a matrix [d_out, width*d] and G [n, d_out] the
//! gradient before the activation, for which C is computed again: the weight's gradient is `Gᵀ A`, the
//! bias's the sums of G's columns, and `G B` holds the share of each tap in the gradient of its input.

use super::{GemmParams, Im2colGemm, kernel_spec, operand};
use crate::causal_conv1d::gpu::shared::{
    GRID, INPUT, Params, THREADS, output_address, plain_launch, rows_launch, source, strides,
};
use crate::causal_conv1d::{CausalConv1dArgs, CausalConv1dGrads, CausalConv1dSpec, Problem};
use crate::gpu::{
    Gemm, GemmCompute, GemmOperands, GemmSpec, KernelSpec, Kernels, Launch, Matrix, column_sum,
    params, type_name,
};
use crate::{DType, Device, Result, TensorRef, Workspace};
use std::sync::Arc;

source!(GRADIENT, "dense_gradient.cu");
source!(WEIGHT_GRADIENT, "dense_weight_gradient.cu");

params! {
    /// `Params` of dense_weight_gradient.cu.
    struct WeightParams {
        matrix: usize,
        out: usize,
        outputs: usize,
        channels: usize,
        width: usize,
        stride: [isize; 3],
    }
}

/// The kernels of a plan's gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    BeforeActivation,
    /// The weight's gradient in this type.
    Weight(DType),
    Input,
    InitialStates,
}

impl Key {
    fn spec(self, spec: &CausalConv1dSpec) -> KernelSpec {
        match self {
            Key::BeforeActivation => gradient_kernel(spec),
            Key::Weight(out) => weight_kernel(out),
            Key::Input => input_kernel(spec, false),
            Key::InitialStates => input_kernel(spec, true),
        }
    }
}

/// The products of a plan; `None` if there is nothing to sum.
#[derive(Clone, Debug)]
pub(in crate::causal_conv1d) struct DenseBackward {
    forward: Im2colGemm,
    weight: Option<Arc<Gemm>>,
    input: Option<Arc<Gemm>>,
    /// Bytes of `Gᵀ A`, and of the larger product's own workspace.
    parts: [usize; 2],
    kernels: Kernels<Key>,
}

impl DenseBackward {
    /// # Errors
    /// As [`Im2colGemm::new`].
    pub(in crate::causal_conv1d) fn new(
        device: Device,
        spec: &CausalConv1dSpec,
        problem: &Problem,
    ) -> Result<Self> {
        let forward = Im2colGemm::with_operands(device, spec, problem, DType::F32)?;
        let Problem { b, d, d_out, l, width, .. } = *problem;
        // Products that `forward` has found to be in range.
        let (rows, terms) = (b * l, width * d);
        let gemm = |[m, n, k]: [usize; 3], a: Matrix, b: Matrix| {
            let c = operand(DType::F32, false, n.max(1));
            let spec = GemmSpec { m, n, k, batch: 1, a, b, c, compute: GemmCompute::F32 };
            (k > 0).then(|| Gemm::new(forward.gpu, &spec).map(Arc::new)).transpose()
        };
        let matrix =
            |transposed, row_stride: usize| operand(DType::F32, transposed, row_stride.max(1));
        let weight = gemm([d_out, terms, rows], matrix(true, d_out), matrix(false, terms))?;
        let input = gemm([rows, terms, d_out], matrix(false, d_out), matrix(false, terms))?;
        let own = |gemm: &Option<Arc<Gemm>>| gemm.as_ref().map_or(0, |gemm| gemm.workspace_bytes());
        let parts = match rows {
            0 => [0; 2],
            _ => [
                (d_out * terms * size_of::<f32>()).next_multiple_of(256),
                own(&weight).max(own(&input)),
            ],
        };
        Ok(DenseBackward { forward, weight, input, parts, kernels: Kernels::default() })
    }

    pub(in crate::causal_conv1d) fn workspace_bytes(&self) -> usize {
        self.forward.workspace_bytes() + self.parts.iter().sum::<usize>()
    }

    /// Computes the gradients. Their kernels are compiled at the first call. The caller has checked the views.
    pub(in crate::causal_conv1d) fn run(
        &self,
        spec: &CausalConv1dSpec,
        args: &CausalConv1dArgs<'_>,
        (dy, dfinal_states): (&TensorRef<'_>, Option<&TensorRef<'_>>),
        grads: &CausalConv1dGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let gpu = self.forward.gpu;
        let (stream, scratch) = workspace.take_on(gpu, self.workspace_bytes())?;
        let mut params = self.forward.product(args, scratch, stream)?;
        params.base = params.base.with_gradients(dy, dfinal_states, grads);
        let Params { batch, channels, length, width, sequences, .. } = params.base;
        let GemmParams { a, b, c, outputs, .. } = params;
        let kernel = |key: Key| self.kernels.get(gpu, key, || key.spec(spec));
        let rows = batch * length;
        let matrix = scratch.wrapping_add(self.forward.workspace_bytes());
        let workspace = matrix.wrapping_add(self.parts[0]);
        // Products of G.
        let operands = |right: usize, out: *mut u8| GemmOperands {
            a: c as *const u8,
            b: right as *const u8,
            c: out,
            workspace,
        };
        // SAFETY: the structures are the kernels' (they compare their sizes); views are valid on this
        // device for the strides in them, and the workspace holds the matrices.
        unsafe {
            if rows * outputs > 0 {
                let kernel = kernel(Key::BeforeActivation)?;
                kernel.launch(stream, self.forward.tiles(outputs), &params)?;
            }
            if let Some(dweight) = &grads.dweight {
                if let Some(gemm) = &self.weight {
                    gemm.run(operands(a, matrix), stream, false)?;
                }
                let weight_params = WeightParams {
                    matrix: if self.weight.is_some() { matrix as usize } else { 0 },
                    out: output_address(Some(dweight)),
                    outputs,
                    channels,
                    width,
                    stride: strides(Some(dweight.desc())),
                };
                let launch = Launch {
                    grid: [
                        (width * channels).div_ceil(THREADS) as u32,
                        outputs.min(GRID) as u32,
                        1,
                    ],
                    block: [THREADS as u32, 1, 1],
                };
                if outputs > 0 {
                    let kernel = kernel(Key::Weight(dweight.dtype()))?;
                    kernel.launch(stream, launch, &weight_params)?;
                }
            }
            if let Some(dbias) = grads.dbias.as_ref().filter(|_| outputs > 0) {
                column_sum(gpu, stream, c as *const f32, [rows, outputs, outputs], dbias)?;
            }
            if let Some(gemm) = self
                .input
                .as_ref()
                .filter(|_| rows > 0)
                .filter(|_| params.base.dx != 0 || params.base.dinitial_states != 0)
            {
                // A is no longer needed.
                gemm.run(operands(b, a as *mut u8), stream, false)?;
            }
            if grads.dx.is_some() && rows > 0 {
                let kernel = kernel(Key::Input)?;
                kernel.launch(stream, plain_launch(&params.base), &params)?;
            }
            if grads.dinitial_states.is_some() && width > 1 {
                let kernel = kernel(Key::InitialStates)?;
                kernel.launch(stream, rows_launch(channels, sequences), &params)?;
            }
        }
        Ok(())
    }
}

fn gradient_kernel(spec: &CausalConv1dSpec) -> KernelSpec {
    kernel_spec(&GRADIENT, "dense_gradient", spec, DType::F32)
}

fn weight_kernel(out: DType) -> KernelSpec {
    KernelSpec::new(&WEIGHT_GRADIENT, format!("causal_conv1d_dense_dweight_{out}"))
        .define("OUT", type_name(out))
        .params::<WeightParams>()
        .overlapped(true)
}

/// The kernel of dx, or of the initial states' gradient.
fn input_kernel(spec: &CausalConv1dSpec, states: bool) -> KernelSpec {
    let name = if states { "dense_dinitial_states" } else { "dense_dx" };
    kernel_spec(&INPUT, name, spec, DType::F32).define("STATES", u8::from(states))
}

/// The kernels that a spec of this kind may need.
#[cfg(test)]
pub(super) fn all_kernels(spec: &CausalConv1dSpec) -> Vec<KernelSpec> {
    let weight = weight_kernel(spec.x.dtype);
    vec![gradient_kernel(spec), weight, input_kernel(spec, false), input_kernel(spec, true)]
}
