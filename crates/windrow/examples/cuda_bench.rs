//! Times GELU and causal conv1d on the first CUDA device; `benchmarks/h200.py` runs it beside
//! PyTorch. One JSON object a line.
//!
//! Medians of graph replays; inputs rotate through more memory than the L2 cache holds.

use windrow::cuda::{self, DeviceTensor, Event, Stream};
use windrow::{
    Activation, Approximate, CausalConv1dArgs, CausalConv1dGrads, CausalConv1dOutputs,
    CausalConv1dPlan, CausalConv1dSpec, CausalConv1dUpdateArgs, CausalConv1dUpdatePlan,
    CausalConv1dUpdateSpec, DType, Device, GeluArgs, GeluPlan, GeluSpec, Layout, PlanOptions,
    Result, Tensor, TensorDesc, TensorRef, Workspace, verify,
};

const REPLAYS: usize = 20;
/// Several times the largest L2 cache.
const ROTATE: usize = 300 << 20;
/// Bytes of random numbers.
const PATTERN: usize = 4 << 20;
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn options() -> PlanOptions {
    PlanOptions::default().with_device(Device::Cuda(0)).with_verify(windrow::Verify::Off)
}

fn main() -> Result<()> {
    let device = &cuda::devices()?[0];
    println!(
        "{{\"device\": {:?}, \"driver\": \"{}.{}\"}}",
        device.name, device.driver.0, device.driver.1
    );
    let stream = Stream::new(0)?;
    let sizes = [1024, 2048, 4096].into_iter();
    let mut shapes: Vec<_> =
        sizes.clone().flat_map(|s| sizes.clone().map(move |k| [s, k])).collect();
    shapes.push([16384, 8192]);
    for shape in shapes {
        for dtype in DTYPES {
            gelu(&stream, shape, dtype)?;
        }
    }
    let usual = [[1, 64, 2048], [1, 2048, 2048], [8, 4096, 2048], [2, 8192, 8192]];
    // Few channels, odd lengths, and channels that fill no blocks.
    let odd = [[1, 16, 1_000_000], [1, 6144, 777], [2, 5376, 1024]];
    let wide = [5, 7, 9, 16, 32, 64, 128, 256].map(|width| ([8, 4096, 2048], width));
    for (shape, width) in usual.into_iter().chain(odd).map(|shape| (shape, 4)).chain(wide) {
        for dtype in DTYPES {
            for (layout, order) in [("channel_first", [0, 1, 2]), ("channel_last", [0, 2, 1])] {
                causal_conv1d(&stream, shape, width, dtype, layout, order)?;
            }
        }
    }
    for channels in [16, 64, 256, 1024] {
        im2col_gemm(&stream, [1, channels, 2048])?;
    }
    DTYPES.into_iter().try_for_each(|dtype| update(&stream, dtype))
}

/// Tensors of random numbers: as many as keep `bytes` of each turn out of the cache.
fn sets(desc: TensorDesc, bytes: usize, low: f64, high: f64) -> Result<Vec<DeviceTensor>> {
    let count = (ROTATE / bytes.max(1)).clamp(1, 48) + 1;
    // One pattern of numbers, repeated and uploaded often: making them costs more than all runs.
    let mut host = Tensor::uninitialised(desc)?;
    let few = host.as_bytes().len().min(PATTERN) / desc.dtype.size();
    let few = TensorDesc::contiguous(desc.dtype, &[few.max(1)])?;
    let pattern = verify::random_tensor(1, few, low, high)?;
    for part in host.as_bytes_mut().chunks_mut(few.bytes()) {
        part.copy_from_slice(&pattern.as_bytes()[..part.len()]);
    }
    (0..count).map(|_| DeviceTensor::from_host(&host.as_ref(), 0)).collect()
}

/// Median microseconds of `call(turn)` over graphs of `turns` calls.
fn time(stream: &Stream, turns: usize, mut call: impl FnMut(usize) -> Result<()>) -> Result<f32> {
    let calls = turns.max(8);
    (0..calls).try_for_each(|i| call(i % turns))?;
    stream.synchronize()?;
    let graph = stream.capture(|| (0..calls).try_for_each(|i| call(i % turns)))?;
    let mut times = Vec::new();
    for _ in 0..REPLAYS + 2 {
        let start = Event::record(stream)?;
        // SAFETY: the tensors that the calls use outlive this function and nobody else uses them.
        unsafe { graph.launch(stream)? };
        times.push(Event::record(stream)?.milliseconds_since(&start)? * 1000.0 / calls as f32);
    }
    times.drain(..2);
    times.sort_by(f32::total_cmp);
    Ok(times[times.len() / 2])
}

fn report(
    op: &str,
    what: &str,
    dtype: DType,
    layout: &str,
    shape: &[usize],
    us: f32,
    bytes: usize,
) {
    println!(
        "{{\"op\": \"{op}\", \"variant\": \"{what}\", \"dtype\": \"{dtype}\", \"layout\": \"{layout}\", \
         \"shape\": {shape:?}, \"us\": {us:.3}, \"gbps\": {:.1}}}",
        bytes as f32 / us / 1e3
    );
}

fn gelu(stream: &Stream, shape: [usize; 2], dtype: DType) -> Result<()> {
    let desc = TensorDesc::contiguous(dtype, &shape)?;
    let bytes = 2 * desc.bytes();
    let xs = sets(desc, bytes, -6.0, 6.0)?;
    let mut ys = xs.iter().map(|_| DeviceTensor::new(desc, 0)).collect::<Result<Vec<_>>>()?;
    let us = time(stream, xs.len(), |i| cuda::copy(&xs[i].as_ref(), &mut ys[i].as_mut()?, stream))?;
    report("copy", "16 bytes", dtype, "contiguous", &shape, us, bytes);
    // SAFETY: the stream outlives the workspace.
    let mut workspace = unsafe { Workspace::on_stream(0, stream.as_raw(), 0)? };
    for approximate in [Approximate::Tanh, Approximate::None] {
        let spec = GeluSpec::new(desc, approximate)?;
        for algorithm in GeluPlan::algorithms(&spec, Device::Cuda(0)) {
            let plan = GeluPlan::with_algorithm(&spec, algorithm, &options())?;
            let us = time(stream, xs.len(), |i| {
                let args = GeluArgs::new(xs[i].as_ref());
                plan.run(&args, ys[i].as_mut()?, &mut workspace)
            })?;
            let what = format!("{} {}", approximate.name(), algorithm.name());
            report("gelu", &what, dtype, "contiguous", &shape, us, bytes);
        }
    }
    Ok(())
}

fn causal_conv1d(
    stream: &Stream,
    shape: [usize; 3],
    width: usize,
    dtype: DType,
    layout: &str,
    order: [usize; 3],
) -> Result<()> {
    let x = TensorDesc::new(dtype, Layout::with_order(&shape, &order)?);
    let bytes = 2 * x.bytes();
    let weight = TensorDesc::contiguous(dtype, &[shape[1], width])?;
    let bias = TensorDesc::contiguous(dtype, &[shape[1]])?;
    let spec = CausalConv1dSpec::new(x, weight)?.with_bias(bias).with_activation(Activation::Silu);
    let xs = sets(x, bytes, -2.0, 2.0)?;
    let mut ys = xs.iter().map(|_| DeviceTensor::new(x, 0)).collect::<Result<Vec<_>>>()?;
    if x.layout.is_contiguous() {
        let copy = |i: usize| cuda::copy(&xs[i].as_ref(), &mut ys[i].as_mut()?, stream);
        report("copy", "16 bytes", dtype, layout, &shape, time(stream, xs.len(), copy)?, bytes);
    }
    let (weight, bias) = (sets(weight, ROTATE, -1.0, 1.0)?, sets(bias, ROTATE, -1.0, 1.0)?);
    let plan = CausalConv1dPlan::new(&spec, &options())?;
    // SAFETY: the stream outlives the workspace.
    let mut workspace =
        unsafe { Workspace::on_stream(0, stream.as_raw(), plan.workspace_bytes())? };
    let args = |x: &DeviceTensor| -> [TensorRef<'_>; 3] {
        // SAFETY: the tensors live until the end of this function.
        [x, &weight[0], &bias[0]].map(|t| unsafe {
            TensorRef::from_raw(t.as_ref().as_ptr().cast(), *t.desc(), t.device())
        })
    };
    let us = time(stream, xs.len(), |i| {
        let [x, weight, bias] = args(&xs[i]);
        let args = CausalConv1dArgs::new(x, weight).with_bias(bias);
        let outputs = CausalConv1dOutputs::new(ys[i].as_mut()?);
        plan.run(&args, outputs, &mut workspace)
    })?;
    if width != 4 {
        let what = format!("bias silu width {width}");
        report("causal_conv1d", &what, dtype, layout, &shape, us, bytes);
        return Ok(());
    }
    report("causal_conv1d", "bias silu", dtype, layout, &shape, us, bytes);

    let [_, weight0, bias0] = args(&xs[0]);
    let mut dweight = DeviceTensor::new(spec.weight, 0)?;
    let mut dbias = DeviceTensor::new(*bias0.desc(), 0)?;
    let us = time(stream, xs.len(), |i| {
        let args = CausalConv1dArgs::new(xs[i].as_ref(), weight0).with_bias(bias0);
        let dy = xs[(i + 1) % xs.len()].as_ref();
        let grads = CausalConv1dGrads::default()
            .with_dx(ys[i].as_mut()?)
            .with_dweight(dweight.as_mut()?)
            .with_dbias(dbias.as_mut()?);
        plan.backward(&args, dy, None, grads, &mut workspace)
    })?;
    report("causal_conv1d", "backward bias silu", dtype, layout, &shape, us, bytes / 2 * 3);
    Ok(())
}

/// A depthwise convolution as a matrix product: 2048 x 64 by 256 is the case of channels = 64.
fn im2col_gemm(stream: &Stream, shape: [usize; 3]) -> Result<()> {
    let dtype = DType::F16;
    let x = TensorDesc::contiguous(dtype, &shape)?;
    let weight = TensorDesc::contiguous(dtype, &[shape[1], 4])?;
    let bias = TensorDesc::contiguous(dtype, &[shape[1]])?;
    let spec = CausalConv1dSpec::new(x, weight)?.with_bias(bias).with_activation(Activation::Silu);
    let xs = sets(x, 2 * x.bytes(), -2.0, 2.0)?;
    let mut ys = xs.iter().map(|_| DeviceTensor::new(x, 0)).collect::<Result<Vec<_>>>()?;
    let (weight, bias) = (sets(weight, ROTATE, -1.0, 1.0)?, sets(bias, ROTATE, -1.0, 1.0)?);
    for algorithm in CausalConv1dPlan::algorithms(&spec, Device::Cuda(0)) {
        let plan = CausalConv1dPlan::with_algorithm(&spec, algorithm, &options())?;
        // SAFETY: the stream outlives the workspace.
        let mut workspace =
            unsafe { Workspace::on_stream(0, stream.as_raw(), plan.workspace_bytes())? };
        let us = time(stream, xs.len(), |i| {
            let args = CausalConv1dArgs::new(xs[i].as_ref(), weight[0].as_ref())
                .with_bias(bias[0].as_ref());
            let outputs = CausalConv1dOutputs::new(ys[i].as_mut()?);
            plan.run(&args, outputs, &mut workspace)
        })?;
        let what = format!("{algorithm} bias silu");
        report("causal_conv1d", &what, dtype, "channel_first", &shape, us, 2 * x.bytes());
    }
    Ok(())
}

fn update(stream: &Stream, dtype: DType) -> Result<()> {
    let shape = [64, 4096, 1];
    let x = TensorDesc::contiguous(dtype, &shape)?;
    let state = TensorDesc::contiguous(dtype, &[64, 4096, 3])?;
    let weight = TensorDesc::contiguous(dtype, &[4096, 4])?;
    let bias = TensorDesc::contiguous(dtype, &[4096])?;
    let spec = CausalConv1dUpdateSpec::new(x, state, weight)?
        .with_bias(bias)
        .with_activation(Activation::Silu);
    let bytes = 2 * x.bytes() + 2 * state.bytes();
    let mut states = sets(state, bytes, -2.0, 2.0)?;
    let xs = sets(x, bytes, -2.0, 2.0)?;
    let mut ys = xs.iter().map(|_| DeviceTensor::new(x, 0)).collect::<Result<Vec<_>>>()?;
    let (weight, bias) = (sets(weight, ROTATE, -1.0, 1.0)?, sets(bias, ROTATE, -1.0, 1.0)?);
    let plan = CausalConv1dUpdatePlan::new(&spec, &options())?;
    // SAFETY: the stream outlives the workspace.
    let mut workspace = unsafe { Workspace::on_stream(0, stream.as_raw(), 0)? };
    let us = time(stream, xs.len(), |i| {
        let args = CausalConv1dUpdateArgs::new(xs[i].as_ref(), weight[0].as_ref())
            .with_bias(bias[0].as_ref());
        plan.run(&args, states[i].as_mut()?, ys[i].as_mut()?, &mut workspace)
    })?;
    report("causal_conv1d_update", "bias silu", dtype, "channel_first", &shape, us, bytes);
    Ok(())
}
