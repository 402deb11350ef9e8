//! The convolution as one matrix product of the vendor's library on GPUs, for dense convolutions too.

pub(crate) mod gradients;

use super::shared::{GRID, NormBehind, Params, rows_launch, source, states_kernel, strides};
use crate::causal_conv1d::{CausalConv1dArgs, CausalConv1dOutputs, CausalConv1dSpec, Problem};
use crate::gpu::{
    Gemm, GemmCompute, GemmOperands, GemmSpec, Gpu, Kernel, KernelSpec, Launch, Matrix, Source,
    Stream, params, type_name,
};
use crate::{DType, Device, Error, Result, TensorDesc, TensorRef, Workspace};
use std::sync::Arc;

source!(IM2COL, "causal_im2col.cu");
source!(EXPAND, "expand_depthwise_weight.cu");
source!(EPILOGUE, "im2col_epilogue.cu");

/// Positions and channels of a block's tile, and its threads.
const TILE: usize = 32;
const TILE_THREADS: usize = 256;

params! {
    /// `GemmParams` of im2col.cuh.
    #[derive(Default)]
    pub(crate) struct GemmParams {
        pub(crate) base: Params,
        pub(crate) a: usize,
        pub(crate) b: usize,
        pub(crate) c: usize,
        pub(crate) outputs: usize,
        weight_stride: [isize; 3],
    }
}

/// A plan on a GPU, with its kernels compiled and the product's algorithm chosen.
#[derive(Clone, Debug)]
pub(in crate::causal_conv1d) struct Im2colGemm {
    pub(crate) gpu: &'static Gpu,
    /// The product; `None` without input channels, because there is nothing to sum.
    gemm: Option<Arc<Gemm>>,
    params: GemmParams,
    /// Bytes of A, B, C and the product's own.
    parts: [usize; 4],
    /// Element type of A and B.
    dtype: DType,
    im2col: &'static Kernel,
    expand: &'static Kernel,
    epilogue: &'static Kernel,
    states: Option<&'static Kernel>,
    norm: Option<NormBehind>,
}

/// A matrix of the workspace.
pub(crate) fn operand(dtype: DType, transposed: bool, row_stride: usize) -> Matrix {
    Matrix { dtype, transposed, row_stride, batch_stride: 0, alignment: 256 }
}

/// A and B have x's type, or f32 if the weight is f32: f16 or bf16 would round it.
fn operand_type(spec: &CausalConv1dSpec) -> DType {
    if spec.weight.dtype == DType::F32 { DType::F32 } else { spec.x.dtype }
}

/// A kernel of this method with operands of this type.
pub(crate) fn kernel_spec(
    source: &'static Source,
    name: &str,
    spec: &CausalConv1dSpec,
    operands: DType,
) -> KernelSpec {
    let width = spec.weight.shape().last().copied().unwrap_or(0);
    let packed = spec.seq_idx.is_some() || spec.cu_seqlens.is_some();
    super::shared::kernel_spec(source, name, spec)
        .define("G", type_name(operands))
        .params_as::<GemmParams>("GemmParams", "GEMM_PARAMS_AGREE")
        .define("SHARED", u8::from((1..=9).contains(&width) && !packed && spec.dilation == 1))
        .define("DENSE", u8::from(spec.weight.shape().len() == 3))
}

/// The kernels of a spec: of A, B and y.
fn kernels(spec: &CausalConv1dSpec, operands: DType) -> [KernelSpec; 3] {
    [
        kernel_spec(&IM2COL, "im2col", spec, operands),
        kernel_spec(&EXPAND, "expand_weight", spec, operands),
        kernel_spec(&EPILOGUE, "im2col_epilogue", spec, operands),
    ]
}

impl Im2colGemm {
    /// # Errors
    /// [`Error::SizeOverflow`], [`Error::Unsupported`] with too many channels, and those of kernels and of the
    /// product.
    pub(in crate::causal_conv1d) fn new(
        device: Device,
        spec: &CausalConv1dSpec,
        problem: &Problem,
    ) -> Result<Self> {
        Self::with_operands(device, spec, problem, operand_type(spec))
    }

    /// The method as by [`Im2colGemm::new`], with A and B of this type.
    pub(crate) fn with_operands(
        device: Device,
        spec: &CausalConv1dSpec,
        problem: &Problem,
        dtype: DType,
    ) -> Result<Self> {
        let gpu = Gpu::get(device)?;
        let Problem { b, d, d_out, l, width, .. } = *problem;
        let overflow = || Error::SizeOverflow {
            what: "im2col matrix",
            detail: format!("[{b} * {l}, {width} * {d}] with {d_out} outputs"),
        };
        let matrix = |rows: usize, columns: usize, dtype: DType| {
            let bytes = rows.checked_mul(columns)?.checked_mul(dtype.size())?;
            bytes.checked_next_multiple_of(256).filter(|&bytes| bytes <= isize::MAX as usize / 4)
        };
        let rows = b.checked_mul(l).ok_or_else(overflow)?;
        let terms = width.checked_mul(d).ok_or_else(overflow)?;
        let sizes = [(rows, terms, dtype), (d_out, terms, dtype), (rows, d_out, DType::F32)];
        let [a, b_bytes, c] = sizes.map(|(rows, columns, dtype)| matrix(rows, columns, dtype));
        let (Some(a), Some(b_bytes), Some(c)) = (a, b_bytes, c) else { return Err(overflow()) };
        if d.max(d_out) > GRID * TILE {
            return Err(Error::unsupported(
                format!("causal_conv1d im2col_gemm of {d} to {d_out} channels on {device}"),
                format!("it takes {} channels at most", GRID * TILE),
            ));
        }
        let gemm = GemmSpec {
            m: rows,
            n: d_out,
            k: terms,
            batch: 1,
            a: operand(dtype, false, terms),
            b: operand(dtype, true, terms),
            c: operand(DType::F32, false, d_out.max(1)),
            compute: GemmCompute::F32,
        };
        let gemm = (terms > 0).then(|| Gemm::new(gpu, &gemm).map(Arc::new)).transpose()?;
        let own = gemm.as_ref().map_or(0, |gemm| gemm.workspace_bytes());
        // Without a row there is no product, however large the weight is.
        let parts = if rows == 0 { [0; 4] } else { [a, b_bytes, c, own] };
        let load = |kernel: KernelSpec| gpu.kernel(&kernel);
        let [im2col, expand, epilogue] = kernels(spec, dtype);
        let weight = spec.weight.strides();
        let params = GemmParams {
            base: Params::of(spec, problem)?,
            outputs: d_out,
            // Only the diagonal is read of a depthwise weight.
            weight_stride: match *weight {
                [channel, tap] => [0, channel, tap],
                _ => strides(Some(&spec.weight)),
            },
            ..GemmParams::default()
        };
        Ok(Im2colGemm {
            gpu,
            gemm,
            params,
            parts,
            dtype,
            im2col: load(im2col)?,
            expand: load(expand)?,
            epilogue: load(epilogue)?,
            states: states_kernel(spec, false).map(load).transpose()?,
            norm: NormBehind::of(gpu, spec.norm, spec.outputs())?,
        })
    }

    pub(in crate::causal_conv1d) fn workspace_bytes(&self) -> usize {
        self.parts.iter().sum()
    }

    /// A description of the product, in one line.
    pub(in crate::causal_conv1d) fn explain(&self) -> String {
        let Params { batch, channels, length, width, .. } = self.params.base;
        let (rows, terms) = (batch * length, width * channels);
        format!(
            "one product of {rows} x {terms} by {terms} x {} in {}",
            self.params.outputs, self.dtype
        )
    }

    /// Computes the outputs. The caller has checked the views.
    pub(in crate::causal_conv1d) fn run(
        &self,
        args: &CausalConv1dArgs<'_>,
        outputs: &CausalConv1dOutputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let (stream, scratch) = workspace.take_on(self.gpu, self.workspace_bytes())?;
        let mut params = self.product(args, scratch, stream)?;
        params.base = params.base.with_outputs(outputs);
        let Params { channels, sequences, .. } = params.base;
        // SAFETY: `GemmParams` is the kernels' structure (they compare its size), as is its first
        // part that of the states' kernel; views are valid on this device for the strides in it.
        unsafe {
            self.epilogue.launch(stream, self.tiles(params.outputs), &params)?;
            if let Some(norm) =
                self.norm.as_ref().filter(|_| params.base.batch * params.base.length > 0)
            {
                norm.run(stream, &outputs.y, [outputs.y2.as_ref(), outputs.y3.as_ref()])?;
            }
            match self.states {
                Some(states) => {
                    states.launch(stream, rows_launch(channels, sequences), &params.base)
                }
                None => Ok(()),
            }
        }
    }

    /// A, B and C in `scratch`.
    pub(crate) fn product(
        &self,
        args: &CausalConv1dArgs<'_>,
        scratch: *mut u8,
        stream: &Stream,
    ) -> Result<GemmParams> {
        let [a, b, c, _] = self.parts;
        let at = [0, a, a + b, a + b + c].map(|offset| scratch.wrapping_add(offset));
        let params = GemmParams {
            base: self.params.base.with_inputs(self.gpu, args)?,
            a: at[0] as usize,
            b: at[1] as usize,
            c: at[2] as usize,
            ..self.params
        };
        let Params { batch, length, channels, width, .. } = params.base;
        if batch * length == 0 {
            return Ok(params);
        }
        let expand = Launch {
            grid: [
                (width * channels).div_ceil(TILE_THREADS) as u32,
                params.outputs.min(GRID) as u32,
                1,
            ],
            block: [TILE_THREADS as u32, 1, 1],
        };
        // SAFETY: `GemmParams` is the kernels' structure (they compare its size), the views are valid on this device
        // for the strides in it, and the workspace holds the matrices and what the product needs.
        unsafe {
            match &self.gemm {
                Some(gemm) => {
                    self.im2col.launch(stream, self.tiles(channels), &params)?;
                    self.expand.launch(stream, expand, &params)?;
                    let [a, b, c, workspace] = at;
                    let operands =
                        GemmOperands { a: a.cast_const(), b: b.cast_const(), c, workspace };
                    gemm.run(operands, stream, false)?;
                }
                None => stream.zero(at[2], c)?,
            }
        }
        Ok(params)
    }

    /// A block for each tile of positions and channels.
    pub(crate) fn tiles(&self, channels: usize) -> Launch {
        let Params { batch, length, .. } = self.params.base;
        Launch {
            grid: [
                length.div_ceil(TILE) as u32,
                channels.div_ceil(TILE) as u32,
                batch.min(GRID) as u32,
            ],
            block: [TILE_THREADS as u32, 1, 1],
        }
    }

    /// A, B and C of these inputs, on the host.
    pub(in crate::causal_conv1d) fn stages(
        &self,
        args: &CausalConv1dArgs<'_>,
        device: Device,
    ) -> Result<[Vec<f32>; 3]> {
        let mut workspace = Workspace::new(device, self.workspace_bytes())?;
        let (stream, scratch) = workspace.take_on(self.gpu, self.workspace_bytes())?;
        let GemmParams { base, a, b, c, outputs, .. } = self.product(args, scratch, stream)?;
        workspace.synchronize()?;
        let (rows, terms) = (base.batch * base.length, base.width * base.channels);
        let read = |address: usize, shape: [usize; 2], dtype| {
            let desc = TensorDesc::contiguous(dtype, &shape)?;
            // SAFETY: the matrix lies in the workspace, and nothing writes there any more.
            let view = unsafe { TensorRef::from_raw(address as *mut _, desc, device) };
            Ok(view.to_f64_vec()?.into_iter().map(|v| v as f32).collect())
        };
        Ok([
            read(a, [rows, terms], self.dtype)?,
            read(b, [outputs, terms], self.dtype)?,
            read(c, [rows, outputs], DType::F32)?,
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Activation;

    #[test]
    fn kernels_compile_without_spills() {
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for shape in [&[64, 4][..], &[48, 64, 3], &[64, 20]] {
                let x = TensorDesc::contiguous(dtype, &[2, 64, 100]).unwrap();
                for weight in [dtype, DType::F32] {
                    let weight = TensorDesc::contiguous(weight, shape).unwrap();
                    let spec = CausalConv1dSpec::new(x, weight).unwrap();
                    all.extend(kernels(&spec, operand_type(&spec)));
                    if shape.len() == 3 {
                        all.extend(gradients::all_kernels(&spec));
                    }
                    let split = spec.clone().with_split(&[1, shape[0] - 1]).unwrap();
                    all.extend(kernels(&split, operand_type(&split)));
                    let dilated = spec.clone().with_dilation(3);
                    all.extend(kernels(&dilated, operand_type(&dilated)));
                    if shape.len() == 3 {
                        all.extend(gradients::all_kernels(&dilated));
                    }
                    let seq_idx = TensorDesc::contiguous(DType::I32, &[2, 100]).unwrap();
                    let spec = spec.with_seq_idx(seq_idx).with_activation(Activation::Silu);
                    all.extend(kernels(&spec, operand_type(&spec)));
                    if shape.len() == 3 {
                        all.extend(gradients::all_kernels(&spec));
                    }
                }
            }
        }
        crate::gpu::compile_tests::check_compiles_in_turn(&all);
    }
}
