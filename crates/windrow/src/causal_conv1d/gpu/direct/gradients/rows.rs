//! Gradients by bulk copies of rows of whole 16-byte vectors: `backward_rows_sm90.cu`.

use super::Key;
use crate::causal_conv1d::gpu::direct::Direct;
use crate::causal_conv1d::gpu::shared::{
    GRID, Params, is_simple, kernel_spec, output_address, source, strides,
};
use crate::causal_conv1d::{CausalConv1dGrads, CausalConv1dSpec};
use crate::gpu::{Feature, Gpu, KernelSpec, Launch, Stream, params, type_name};
use crate::{DType, Result, TensorMut};

source!(ROWS, "backward_rows_sm90.cu");

const THREADS: usize = 128;
/// Tiles in shared memory: one in work, one on its way in, one on its way out.
const STAGES: usize = 3;
/// The blocks of a multiprocessor, two waves, from which a walk of f16/bf16 over more rows gains more than more blocks
/// would. f32, which is limited by memory only, gains nothing.
const BLOCKS: usize = 16;
/// With fewer blocks per multiprocessor, the chunks of `backward_channel_first` are faster.
const FEW_BLOCKS: usize = 4;

params! {
    /// `RowsParams` of backward_rows_sm90.cu.
    struct RowsParams {
        base: Params,
        dweight: usize,
        dbias: usize,
        dweight_stride: [isize; 2],
        dbias_stride: isize,
        rows: usize,
    }
}

/// Rows of the batch that a block takes, if the kernel is for these strides and addresses.
pub(super) fn rows(gpu: &Gpu, spec: &CausalConv1dSpec, params: &Params) -> Option<usize> {
    let Params { batch, channels, length, width, .. } = *params;
    let element = spec.x.dtype.size();
    let plain = spec.seq_idx.is_none()
        && spec.cu_seqlens.is_none()
        && params.initial_states == 0
        && params.dfinal_states == 0;
    let whole = |[row, channel, step]: [isize; 3], address: usize| {
        let bytes = [row, channel].map(|stride| stride * element as isize);
        step == 1 && address != 0 && address.is_multiple_of(16) && bytes.iter().all(|b| b % 16 == 0)
    };
    let vectors = length > 0
        && (length * element).is_multiple_of(16)
        && whole(params.x_stride, params.x)
        && whole(params.dy_stride, params.dy)
        && whole(params.dx_stride, params.dx);
    let fits = (2..=16 / element + 1).contains(&width)
        && length < 1 << 30
        && channels < 1 << 30
        && batch <= GRID
        && batch * channels >= gpu.round_wave(FEW_BLOCKS);
    let wanted = if spec.x.dtype.is_half() { batch * channels / gpu.round_wave(BLOCKS) } else { 1 };
    (plain && vectors && fits).then(|| wanted.clamp(1, batch))
}

pub(super) fn kernel(spec: &CausalConv1dSpec, dweight: DType, dbias: DType) -> KernelSpec {
    // More blocks of a multiprocessor hide more, where registers suffice: measured on an H200.
    let simple = is_simple(spec.activation) && spec.weight.shape()[1] <= 4;
    kernel_spec(&ROWS, "backward_rows", spec)
        .needs(Feature::BulkCopies)
        .define("MASK", 0)
        .define("THREADS", THREADS)
        .define("STAGES", STAGES)
        .define("MIN_BLOCKS", if simple { 7 } else { 1 })
        .define("DWEIGHT", type_name(dweight))
        .define("DBIAS", type_name(dbias))
        .params_as::<RowsParams>("RowsParams", "ROWS_PARAMS_AGREE")
}

impl Direct {
    /// Runs the kernel. The gradients of weight and bias are done if a block takes all rows; otherwise `partial` holds
    /// a row of sums for each part of the batch.
    ///
    /// # Safety
    /// `params` must be those of a backward run on `stream`, and `rows` what [`rows`] gave for them.
    pub(super) unsafe fn rows_gradients(
        &self,
        spec: &CausalConv1dSpec,
        params: &Params,
        rows: usize,
        grads: &CausalConv1dGrads<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let (dweight, dbias) = (grads.dweight.as_ref(), grads.dbias.as_ref());
        let dtype = |grad: Option<&TensorMut<'_>>| grad.map_or(DType::F32, TensorMut::dtype);
        let kernel = self.gradient(spec, Key::Rows(dtype(dweight), dtype(dbias)))?;
        let rows_params = RowsParams {
            base: *params,
            dweight: output_address(dweight),
            dbias: output_address(dbias),
            dweight_stride: strides(dweight.map(TensorMut::desc)),
            dbias_stride: strides::<1>(dbias.map(TensorMut::desc))[0],
            rows,
        };
        let launch = Launch {
            grid: [params.channels as u32, params.batch.div_ceil(rows) as u32, 1],
            block: [THREADS as u32, 1, 1],
        };
        // SAFETY: `RowsParams` is the kernel's structure; the rest is the caller's promise.
        unsafe { kernel.launch(stream, launch, &rows_params) }
    }
}

/// The kernel of a spec with gradients of f32 and of x's type.
#[cfg(test)]
pub(super) fn all_kernels(spec: &CausalConv1dSpec) -> Vec<KernelSpec> {
    let fits = (2..=16 / spec.x.dtype.size() + 1).contains(&spec.weight.shape()[1]);
    let of = |dtype| kernel(spec, dtype, DType::F32);
    if fits { vec![of(spec.x.dtype), of(DType::F32)] } else { Vec::new() }
}
