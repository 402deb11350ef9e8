//! Times conv2d on a CUDA device over a file of layers, in every mode: for `benchmarks/h200_conv2d.py`.
//!
//! `cargo run --release --example conv2d_layers -- benchmarks/layers/cnn18.csv` prints a line of CSV for each layer and
//! mode, by the algorithm that the cost model chooses or, for each one named after the file (`winograd_row
//! winograd_gemm_f4 cudnn`), by that. A time is the median of replays of a graph of several runs with the filter packed
//! once, which take turns between two sets of tensors; `checked_ms` is the same with a filter that each run compares
//! with what was packed (`FilterCache`), and the replays of both take turns.

use std::error::Error;
use windrow::cuda::{DeviceTensor, Event, Stream};
use windrow::{
    Accuracy, Conv2dAlgorithm, Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec, DType, Device,
    FilterCache, Layout, PlanOptions, TensorDesc, TensorRef, Weights, Workspace, bf16, f16, verify,
};

const LAYOUTS: [(&str, [usize; 4]); 2] = [("NCHW", [0, 1, 2, 3]), ("channels-last", [0, 2, 3, 1])];
const MODES: [(DType, &[(&str, Accuracy)]); 3] = [
    (DType::F32, &[("f32", Accuracy::Fp32), ("TF32", Accuracy::Tf32)]),
    (DType::F16, &[("f16", Accuracy::Half)]),
    (DType::BF16, &[("bf16", Accuracy::Half)]),
];
const REPLAYS: usize = 11;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: conv2d_layers LAYERS.csv [ALGORITHM ...]")?;
    let named: Vec<_> =
        std::env::args().skip(2).map(|a| a.parse().map(Some)).collect::<Result<_, _>>()?;
    let algorithms = if named.is_empty() { vec![None] } else { named };
    println!("layer,mode,ms,tflops,checked_ms,plan");
    for line in std::fs::read_to_string(path)?.lines().filter(|l| !l.starts_with('#')) {
        let fields: Vec<_> = line.split(',').collect();
        let &[name, ref sizes @ ..] = fields.as_slice() else { continue };
        let sizes: Vec<usize> = sizes.iter().map(|s| s.parse()).collect::<Result<_, _>>()?;
        let &[n, c, h, w, k] = sizes.as_slice() else { return Err("name,n,c,h,w,k".into()) };
        for ((dtype, accuracies), (layout, order)) in
            MODES.into_iter().flat_map(|mode| LAYOUTS.map(|layout| (mode, layout)))
        {
            let x = TensorDesc::new(dtype, Layout::with_order(&[n, c, h, w], &order)?);
            let filter = TensorDesc::contiguous(dtype, &[k, c, 3, 3])?;
            let spec = Conv2dSpec::new(x, filter, &Conv2dParams::default())?;
            let mut tensors = Tensors {
                xs: [upload(1, &spec.x)?, upload(2, &spec.x)?],
                w: upload(3, &spec.w)?,
                ys: [DeviceTensor::new(spec.y, 0)?, DeviceTensor::new(spec.y, 0)?],
            };
            for &(mode, accuracy) in accuracies {
                let spec = spec.clone().with_accuracy(accuracy);
                for &algorithm in &algorithms {
                    let ([packed, checked], plan) = time(&spec, algorithm, &mut tensors)?;
                    let tflops = spec.flops()? / f64::from(packed) * 1e-9;
                    println!(
                        "{name},{mode} {layout},{packed:.5},{tflops:.1},{checked:.5},\"{plan}\""
                    );
                }
            }
        }
    }
    Ok(())
}

/// Two inputs and outputs, which runs take in turns.
struct Tensors {
    xs: [DeviceTensor; 2],
    w: DeviceTensor,
    ys: [DeviceTensor; 2],
}

/// Milliseconds of a run with the filter packed once and of one that compares it, and what the plan says of itself.
fn time(
    spec: &Conv2dSpec,
    algorithm: Option<Conv2dAlgorithm>,
    Tensors { xs, w, ys }: &mut Tensors,
) -> Result<([f32; 2], String), Box<dyn Error>> {
    let options = PlanOptions::default().with_device(Device::Cuda(0));
    let plan = match algorithm {
        Some(algorithm) => Conv2dPlan::with_algorithm(spec, algorithm, &options)?,
        None => Conv2dPlan::new(spec, &options)?,
    };
    let stream = Stream::new(0)?;
    // SAFETY: the stream lives until the end of this function, as the workspace does.
    let mut workspace =
        unsafe { Workspace::on_stream(0, stream.as_raw(), plan.workspace_bytes())? };
    let packed = plan.pack_weights(&w.as_ref(), &mut workspace)?;
    let cache = FilterCache::default();
    let weights = [Weights::Packed(&packed), Weights::Cached(w.as_ref(), &cache)];
    let mut run = |i: usize, w| {
        let args = Conv2dArgs::new(xs[i % 2].as_ref(), w);
        plan.run(&args, ys[i % 2].as_mut()?, &mut workspace)
    };
    let start = Event::record(&stream)?;
    (0..4).try_for_each(|i| run(i, weights[i % 2]))?;
    let estimate = Event::record(&stream)?.milliseconds_since(&start)? / 4.0;
    let runs = ((4.0 / estimate) as usize).clamp(2, 40);
    let mut capture = |w| stream.capture(|| (0..runs).try_for_each(|i| run(i, w)));
    let graphs = [capture(weights[0])?, capture(weights[1])?];
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..REPLAYS {
        for (graph, times) in graphs.iter().zip(&mut times) {
            let start = Event::record(&stream)?;
            // SAFETY: all tensors and the workspace are alive, and used by nothing else.
            unsafe { graph.launch(&stream)? };
            times.push(Event::record(&stream)?.milliseconds_since(&start)? / runs as f32);
        }
    }
    let median = |mut times: Vec<f32>| {
        times.sort_by(f32::total_cmp);
        times[REPLAYS / 2]
    };
    Ok((times.map(median), plan.explain()))
}

/// A tensor of random numbers between -1 and 1, which repeat after a prime number of elements.
fn upload(seed: u64, desc: &TensorDesc) -> windrow::Result<DeviceTensor> {
    let values = verify::random(seed, 1_000_003, -1.0, 1.0);
    match desc.dtype {
        DType::F16 => repeated(&values, f16::from_f64, desc),
        DType::BF16 => repeated(&values, bf16::from_f64, desc),
        DType::F32 => repeated(&values, |v| v as f32, desc),
        other => unreachable!("layers are of f32, f16 and bf16, not {other}"),
    }
}

fn repeated<T: windrow::Element>(
    values: &[f64],
    convert: impl Fn(f64) -> T,
    desc: &TensorDesc,
) -> windrow::Result<DeviceTensor> {
    let period: Vec<T> = values.iter().map(|&v| convert(v)).collect();
    let data: Vec<T> = period.iter().cycle().take(desc.layout.len()).copied().collect();
    DeviceTensor::from_host(&TensorRef::strided(&data, 0, desc.layout)?, 0)
}
