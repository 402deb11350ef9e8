//! Gradients of a depthwise convolution on GPUs.

mod rows;

use super::Direct;
use crate::causal_conv1d::gpu::shared::{
    GRID, INPUT, MASK, Params, THREADS, along_channels, is_simple, kernel_spec, plain_launch,
    rows_launch, source,
};
use crate::causal_conv1d::{CausalConv1dArgs, CausalConv1dGrads, CausalConv1dSpec};
use crate::gpu::{Feature, Gpu, Kernel, KernelSpec, Launch, Stream, column_sum};
use crate::{DType, Result, TensorRef, Workspace};

source!(CHANNEL_FIRST, "backward_channel_first.cu");
source!(CHANNEL_LAST, "backward_channel_last.cu");
source!(CHANNEL_LAST_SM90, "backward_channel_last_sm90.cu");
source!(WEIGHT, "backward_weight.cu");

/// The warps of a block of the channels-last kernel, which walk along neighbouring chunks.
const WARPS: usize = 4;
/// The blocks of that kernel that a multiprocessor holds, for f16/bf16 and for f32.
const BLOCKS_HALF: usize = 3;
const BLOCKS_F32: usize = 4;

/// The channels of a block of the channels-last kernel with tiles in shared memory, the positions of a tile, and the
/// number of tiles.
const SHARED_CHANNELS: usize = 4 * THREADS;
const SHARED_ROWS: usize = 8;
const SHARED_TILES: usize = 3;
/// Its blocks on a multiprocessor, and the fewest positions of a block that pay for filling its tiles: 1x2048x2048, where
/// they are 16, took 27.2 us on an H200 in place of 19.0, and 8x4096x2048, where they are 256, 116.7 in place of 128.2.
const SHARED_BLOCKS: usize = 4;
const LEAST_SHARED: usize = 8 * SHARED_ROWS;

/// The kernels that compute dx and partial sums of the other gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Whole vectors along l, copied in bulk; this number of rows of the batch per block.
    Rows { rows: usize },
    /// Vectors along l in one pass; `cut` if rows begin between vectors.
    ChannelFirst { cut: bool },
    /// One pass in which a thread walks along l with `vector` channels.
    ChannelLast { vector: usize },
    /// Tiles of d and l in shared memory, copied in bulk, of blocks that walk along l.
    ChannelLastShared,
    /// Two passes: one for dx with a thread for each element, and one for the sums.
    Plain,
}

impl Form {
    /// The form that the strides and addresses in `params` allow.
    fn of(gpu: &Gpu, spec: &CausalConv1dSpec, params: &Params) -> Self {
        if spec.dilation > 1 {
            return Form::Plain;
        }
        if gpu.has(Feature::BulkCopies)
            && let Some(rows) = rows::rows(gpu, spec, params)
        {
            return Form::Rows { rows };
        }
        let Params { batch, channels, length, width, .. } = *params;
        let packed = spec.seq_idx.is_some() || spec.cu_seqlens.is_some();
        let states = params.initial_states != 0 || params.dfinal_states != 0;
        if packed && states || length >= 1 << 30 || batch > GRID {
            return Form::Plain;
        }
        let element = spec.x.dtype.size();
        let wanted = params.dx != 0;
        let dx = if wanted { params.dx_stride } else { params.x_stride };
        let all = [params.x_stride, params.dy_stride, dx];
        // The first vector of a row that begins between vectors reaches before it, where the inputs of
        // an initial state would lie.
        let guide = if wanted { params.dx } else { params.x };
        let cut = [guide as isize, dx[0] * element as isize, dx[1] * element as isize]
            .into_iter()
            .any(|bytes| bytes % 16 != 0);
        if all.iter().all(|s| s[2] == 1)
            && (2..=16 / element + 1).contains(&width)
            && channels <= GRID
            && !(cut && params.initial_states != 0)
        {
            return Form::ChannelFirst { cut };
        }
        if all.iter().all(|s| s[1] == 1) && (2..=5).contains(&width) {
            let whole = |s: &[isize; 3]| s[0] % 8 == 0 && s[2] % 8 == 0;
            if gpu.has(Feature::BulkCopies)
                && spec.x.dtype.is_half()
                && !(packed || states)
                && wanted
                && channels.is_multiple_of(8)
                && channels >= SHARED_CHANNELS / 2
                && Form::ChannelLastShared.chunk(gpu, spec, params) >= LEAST_SHARED
                && all.iter().all(whole)
                && (params.x | params.dy | params.dx).is_multiple_of(16)
            {
                return Form::ChannelLastShared;
            }
            let mut vector = 8 / element;
            let fits = |vector: usize| {
                let multiple = |s: isize| s % vector as isize == 0;
                all.iter().all(|s| multiple(s[0]) && multiple(s[2]))
                    && channels.is_multiple_of(vector)
                    && (params.x | params.dy | params.dx).is_multiple_of(vector * element)
            };
            while !fits(vector) {
                vector /= 2;
            }
            return Form::ChannelLast { vector };
        }
        Form::Plain
    }

    /// Positions that a warp, or for the last form a block, walks along. They depend only on sizes and on the number of
    /// multiprocessors. So the result has the same bits on all GPUs of a model.
    fn chunk(self, gpu: &Gpu, spec: &CausalConv1dSpec, params: &Params) -> usize {
        let Params { batch, channels, length, .. } = *params;
        match self {
            Form::ChannelFirst { .. } => {
                let block = 32 * 16 / spec.x.dtype.size();
                // Long chunks repeat least; short ones keep the GPU filled.
                let mut chunk = 16 * block;
                while chunk > block && batch * channels * length.div_ceil(chunk) < 4096 {
                    chunk /= 2;
                }
                chunk
            }
            Form::ChannelLast { .. } => {
                // The number of blocks that fills up to three waves of the GPU best.
                let half = spec.x.dtype.is_half();
                let wave = gpu.wave(if half { BLOCKS_HALF } else { BLOCKS_F32 });
                let columns = (batch * channels.div_ceil(32 * 8 / spec.x.dtype.size())).max(1);
                let filled = |waves: usize| {
                    let blocks = (waves * wave / columns).max(1) * columns;
                    blocks * 1000 / blocks.next_multiple_of(wave)
                };
                let waves = (1..=3).rev().max_by_key(|&waves| filled(waves)).unwrap_or(1);
                let chunk = length.div_ceil((waves * wave / columns).max(1) * WARPS);
                // Steps go in groups of eight, and chunks need WIDTH - 1 more.
                chunk.max(8).next_multiple_of(8) + 5
            }
            Form::ChannelLastShared => {
                // A wave of blocks; tiles are whole with the WIDTH - 1 positions more.
                let columns = (batch * channels.div_ceil(SHARED_CHANNELS)).max(1);
                let blocks = (gpu.wave(SHARED_BLOCKS) / columns).max(1);
                let reach = length.div_ceil(blocks) + params.width - 1;
                reach.max(2 * SHARED_ROWS).next_multiple_of(SHARED_ROWS) - (params.width - 1)
            }
            Form::Rows { .. } => length,
            Form::Plain => (batch * length).div_ceil(256).clamp(256, 4096),
        }
    }

    /// Partial sums of a row. A row that begins between vectors reaches before its start.
    fn parts(self, gpu: &Gpu, spec: &CausalConv1dSpec, params: &Params) -> usize {
        let chunk = self.chunk(gpu, spec, params);
        match self {
            Form::ChannelFirst { cut } => {
                let before = if cut { 16 / spec.x.dtype.size() - 1 } else { 0 };
                (params.length + before).div_ceil(chunk)
            }
            Form::ChannelLast { .. } => params.length.div_ceil(chunk * WARPS),
            Form::ChannelLastShared | Form::Rows { .. } | Form::Plain => {
                params.length.div_ceil(chunk)
            }
        }
    }
}

/// The kernels of a plan's gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// The kernel for dx, with a thread for each element.
    Input,
    InitialStates,
    Weight,
    Mask,
    Vector(Form, bool),
    /// The kernel over rows, with gradients of weight and bias of these types.
    Rows(DType, DType),
}

impl Key {
    fn spec(self, spec: &CausalConv1dSpec) -> KernelSpec {
        match self {
            Key::Input => input_kernel(spec, false),
            Key::InitialStates => input_kernel(spec, true),
            Key::Weight => weight_kernel(spec),
            Key::Mask => kernel_spec(&MASK, "mask", spec),
            Key::Vector(form, dx) => vector_kernel(spec, form, dx),
            Key::Rows(dweight, dbias) => rows::kernel(spec, dweight, dbias),
        }
    }
}

/// Bytes of partial sums, enough for all strides of the gradients.
pub(super) fn partial_bytes(gpu: &Gpu, spec: &CausalConv1dSpec, params: &Params) -> usize {
    let forms = [
        Form::ChannelFirst { cut: true },
        Form::ChannelLast { vector: 1 },
        Form::ChannelLastShared,
        Form::Plain,
    ];
    let parts = forms.map(|form| form.parts(gpu, spec, params)).into_iter().max().unwrap_or(0);
    parts * params.batch * params.channels * (params.width + 1) * size_of::<f32>()
}

impl Direct {
    /// Computes the gradients. Their kernels are compiled at the first call. The caller has checked the views.
    pub(in crate::causal_conv1d) fn backward(
        &self,
        spec: &CausalConv1dSpec,
        args: &CausalConv1dArgs<'_>,
        (dy, dfinal_states): (&TensorRef<'_>, Option<&TensorRef<'_>>),
        grads: &CausalConv1dGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let (stream, scratch) = workspace.take_on(self.gpu, self.workspace_bytes())?;
        let mut params = Params {
            mask: scratch as usize,
            partial: scratch as usize + self.mask_bytes(),
            ..self.params.with_inputs(self.gpu, args)?.with_gradients(dy, dfinal_states, grads)
        };
        let form = Form::of(self.gpu, spec, &params);
        params.chunk = form.chunk(self.gpu, spec, &params);
        params.chunks = form.parts(self.gpu, spec, &params);
        let Params { batch, channels, length, width, sequences, .. } = params;
        let sums = grads.dweight.is_some() || grads.dbias.is_some();
        // SAFETY: `Params` is the kernels' structure (they compare its size), the views are valid on this device for
        // the strides in it, and the workspace holds the mask and the partial sums.
        unsafe {
            if grads.dinitial_states.is_some() && width > 1 {
                let kernel = self.gradient(spec, Key::InitialStates)?;
                kernel.launch(stream, rows_launch(channels, sequences), &params)?;
            }
            if channels == 0 || !(sums || grads.dx.is_some()) {
                return Ok(());
            }
            let mut parts = batch * params.chunks;
            match form {
                Form::Plain => self.plain_gradients(spec, &params, sums, stream)?,
                Form::Rows { rows } => {
                    self.rows_gradients(spec, &params, rows, grads, stream)?;
                    if rows == batch {
                        return Ok(());
                    }
                    parts = batch.div_ceil(rows);
                }
                Form::ChannelFirst { .. } | Form::ChannelLast { .. } | Form::ChannelLastShared => {
                    if spec.seq_idx.is_some() || spec.cu_seqlens.is_some() {
                        let mask = self.gradient(spec, Key::Mask)?;
                        mask.launch(stream, rows_launch(length, batch), &params)?;
                    }
                    let launch = vector_launch(form, &params);
                    let kernel = self.gradient(spec, Key::Vector(form, params.dx != 0))?;
                    kernel.launch(stream, launch, &params)?;
                }
            }
            let stride = channels * (width + 1);
            let partial = params.partial as *const f32;
            if let Some(dweight) = &grads.dweight {
                column_sum(self.gpu, stream, partial, [parts, channels * width, stride], dweight)?;
            }
            if let Some(dbias) = &grads.dbias {
                let partial = partial.wrapping_add(channels * width);
                column_sum(self.gpu, stream, partial, [parts, channels, stride], dbias)?;
            }
        }
        Ok(())
    }

    pub(super) fn gradient(&self, spec: &CausalConv1dSpec, key: Key) -> Result<&'static Kernel> {
        self.gradients.get(self.gpu, key, || key.spec(spec))
    }

    /// # Safety
    /// `params` must be those of a backward run on `stream`.
    unsafe fn plain_gradients(
        &self,
        spec: &CausalConv1dSpec,
        params: &Params,
        sums: bool,
        stream: &Stream,
    ) -> Result<()> {
        let Params { batch, channels, length, width, chunks, .. } = *params;
        // SAFETY: the caller's promise.
        unsafe {
            if params.dx != 0 && batch * length > 0 {
                let kernel = self.gradient(spec, Key::Input)?;
                kernel.launch(stream, plain_launch(params), params)?;
            }
            if !sums {
                return Ok(());
            }
            let across = if along_channels(spec.y.strides()) { THREADS } else { 1 };
            let tasks = batch * chunks * (width + 1).div_ceil(taps_of_thread(width));
            let launch = Launch {
                grid: [channels.div_ceil(across) as u32, tasks.min(GRID) as u32, 1],
                block: [THREADS as u32, 1, 1],
            };
            self.gradient(spec, Key::Weight)?.launch(stream, launch, params)
        }
    }
}

fn vector_kernel(spec: &CausalConv1dSpec, form: Form, dx: bool) -> KernelSpec {
    let packed = spec.seq_idx.is_some() || spec.cu_seqlens.is_some();
    // More blocks of a multiprocessor hide more, where registers suffice: measured on an H200.
    let simple = !packed && is_simple(spec.activation) && spec.weight.shape()[1] <= 4;
    let ahead = match spec.x.dtype.is_half() {
        true if simple => 8,
        true => 4,
        false => 6,
    };
    let kernel = match form {
        Form::ChannelLast { vector } => kernel_spec(&CHANNEL_LAST, "backward_channel_last", spec)
            .define("VECTOR", vector)
            .define("AHEAD", ahead)
            .define("MIN_BLOCKS", if simple { 3 } else { 1 }),
        Form::ChannelLastShared => {
            let name = "backward_channel_last_sm90";
            let tile = SHARED_ROWS * SHARED_CHANNELS * spec.x.dtype.size();
            let kernel = kernel_spec(&CHANNEL_LAST_SM90, name, spec)
                .needs(Feature::BulkCopies)
                .shared_bytes((2 * SHARED_TILES * tile) as u32)
                .define("THREADS", THREADS)
                .define("VECTOR", SHARED_CHANNELS / THREADS)
                .define("ROWS", SHARED_ROWS)
                .define("STAGES", SHARED_TILES)
                .define("MIN_BLOCKS", if simple { SHARED_BLOCKS } else { 1 });
            return kernel.define("MASK", 0);
        }
        _ => kernel_spec(&CHANNEL_FIRST, "backward_channel_first", spec)
            .define("AHEAD", 1)
            .define("MIN_BLOCKS", if simple { 7 } else { 1 }),
    };
    kernel.define("DX", u8::from(dx)).define("MASK", u8::from(packed))
}

fn vector_launch(form: Form, params: &Params) -> Launch {
    let Params { batch, channels, chunks, .. } = *params;
    match form {
        Form::ChannelLast { vector } => Launch {
            grid: [channels.div_ceil(32 * vector) as u32, chunks as u32, batch as u32],
            block: [32 * WARPS as u32, 1, 1],
        },
        Form::ChannelLastShared => Launch {
            grid: [channels.div_ceil(SHARED_CHANNELS) as u32, chunks as u32, batch as u32],
            block: [THREADS as u32, 1, 1],
        },
        _ => {
            let across = chunks.next_power_of_two().min(THREADS / 32);
            let down = THREADS / 32 / across;
            Launch {
                grid: [
                    chunks.div_ceil(across) as u32,
                    channels.div_ceil(down) as u32,
                    batch as u32,
                ],
                block: [32 * across as u32, down as u32, 1],
            }
        }
    }
}

/// The kernel of dx, or of the initial states' gradient.
fn input_kernel(spec: &CausalConv1dSpec, states: bool) -> KernelSpec {
    let name = if states { "dinitial_states" } else { "dx" };
    kernel_spec(&INPUT, name, spec).define("STATES", u8::from(states)).define("DENSE", 0)
}

/// The number of taps that a thread of the weight's gradient computes.
fn taps_of_thread(width: usize) -> usize {
    if width <= 4 { width + 1 } else { 1 }
}

fn weight_kernel(spec: &CausalConv1dSpec) -> KernelSpec {
    kernel_spec(&WEIGHT, "dweight", spec).define("TAPS", taps_of_thread(spec.weight.shape()[1]))
}

/// The kernels that a spec of this kind may need.
#[cfg(test)]
pub(super) fn all_kernels(spec: &CausalConv1dSpec) -> Vec<KernelSpec> {
    let width = spec.weight.shape()[1];
    let mut kernels = vec![input_kernel(spec, false), input_kernel(spec, true)];
    kernels.push(weight_kernel(spec));
    kernels.extend(rows::all_kernels(spec));
    let element = spec.x.dtype.size();
    let last = Form::ChannelLast { vector: 8 / element };
    if along_channels(spec.y.strides()) {
        let fits = (2..=5).contains(&width);
        kernels.extend(fits.then(|| vector_kernel(spec, last, true)));
        let shared = fits && spec.x.dtype.is_half();
        kernels.extend(shared.then(|| vector_kernel(spec, Form::ChannelLastShared, true)));
    } else if (2..=16 / element + 1).contains(&width) {
        kernels.push(vector_kernel(spec, Form::ChannelFirst { cut: true }, true));
    }
    kernels
}
