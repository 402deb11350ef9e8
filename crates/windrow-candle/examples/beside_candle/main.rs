//! Windrow beside candle's own operators in one run, interleaved.
//!
//! ```sh
//! cargo run --release -p windrow-candle --example beside_candle -- [--device cpu|cuda] [--op NAME]
//!     [--dtype NAME] [--seconds S] [--full] [--json FILE]
//! ```
//!
//! Each case is computed by both and compared, then timed in turns: `S` seconds (default 1) or five rounds a case, medians.
//! conv2d runs a sixteenth of the batch of its layers, on the CPU or without `--full`.
//!
//! `peer CASE` times candle alone, for other benchmarks, and prints a line of JSON. A case is
//! `gelu DTYPE none|tanh SIZE`, `conv2d DTYPE N C H W K`, `causal_conv1d DTYPE B D L` or
//! `causal_conv1d_update DTYPE B D`.

mod cases;

use candle_core::{DType, Device, Result, Tensor};
use cases::{Case, Pair};
use serde_json::{Value, json};
use std::time::Instant;

/// A sample repeats a short call for about this long.
const SAMPLE_SECONDS: f64 = 4e-3;

struct Options {
    device: Device,
    op: Option<String>,
    dtype: Option<DType>,
    seconds: f64,
    full: bool,
    json: Option<String>,
}

fn main() -> Result<()> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|first| first == "peer") {
        return peer(&args[1..]);
    }
    let mut options = Options {
        device: Device::Cpu,
        op: None,
        dtype: None,
        seconds: 1.0,
        full: false,
        json: None,
    };
    while !args.is_empty() {
        let flag = args.remove(0);
        if flag == "--full" {
            options.full = true;
            continue;
        }
        if args.is_empty() {
            candle_core::bail!("{flag}: unknown, or without a value")
        }
        let value = args.remove(0);
        match flag.as_str() {
            "--device" if value == "cpu" => {}
            "--device" if value == "cuda" => options.device = Device::new_cuda(0)?,
            "--op" => options.op = Some(value),
            "--dtype" => options.dtype = Some(cases::dtype(&value)?),
            "--seconds" => options.seconds = cases::number(&value)?,
            "--json" => options.json = Some(value),
            _ => candle_core::bail!("{flag} {value}: unknown"),
        }
    }
    compare(&options)
}

/// Times candle alone.
fn peer(args: &[String]) -> Result<()> {
    let case = Case::parse(args)?;
    let pair = case.prepare(&Device::Cpu)?;
    let times = measure(&[&*pair.candle], &Device::Cpu, 1.0)?;
    println!(
        "{}",
        json!({ "engine": "candle", "case": case.to_string(), "ms_median": median(&times[0]) })
    );
    Ok(())
}

fn compare(options: &Options) -> Result<()> {
    let Options { device, seconds, .. } = options;
    println!("{}", machine(device));
    println!(
        "{:<46} {:>10} {:>10} {:>8} {:>9} {:>9}",
        "case", "candle ms", "windrow ms", "ratio", "GFLOP/s", "differ"
    );
    let mut rows = Vec::new();
    for case in cases::all(device.is_cuda(), options.full) {
        let wanted = options.op.as_ref().is_none_or(|op| op == case.op())
            && options.dtype.is_none_or(|dtype| dtype == case.dtype());
        if !wanted {
            continue;
        }
        let pair = case.prepare(device)?;
        let difference = difference(&pair)?;
        let times = measure(&[&*pair.candle, &*pair.windrow], device, *seconds)?;
        let (candle, windrow) = (median(&times[0]), median(&times[1]));
        let (ratio, gflops) = (candle / windrow, case.flops() / windrow * 1e-6);
        let name = case.to_string();
        println!(
            "{name:<46} {candle:>10.4} {windrow:>10.4} {ratio:>8.2} {gflops:>9.1} {difference:>9.1e}"
        );
        rows.push((
            case.group(),
            json!({
                "op": case.op(), "case": name, "ms_candle": candle, "ms_windrow": windrow,
                "ratio": ratio, "gflops_windrow": gflops, "largest_difference": difference,
            }),
            ratio,
        ));
    }
    let mut means = serde_json::Map::new();
    let mut groups: Vec<&str> = rows.iter().map(|row| row.0.as_str()).collect();
    groups.dedup();
    for group in groups {
        let logs: Vec<f64> = rows.iter().filter(|r| r.0 == group).map(|r| r.2.ln()).collect();
        let (mean, count) = ((logs.iter().sum::<f64>() / logs.len() as f64).exp(), logs.len());
        println!("{group}: {mean:.2} times candle's speed in geometric mean over {count} cases");
        means.insert(group.into(), json!(mean));
    }
    if let Some(file) = &options.json {
        let rows: Vec<Value> = rows.into_iter().map(|row| row.1).collect();
        let record =
            json!({ "machine": machine(device), "geometric_mean_ratio": means, "rows": rows });
        std::fs::write(
            file,
            serde_json::to_string_pretty(&record).map_err(candle_core::Error::wrap)?,
        )?;
    }
    Ok(())
}

/// Largest difference of the two results, relative to the largest element.
fn difference(pair: &Pair) -> Result<f32> {
    let wide = |y: Tensor| y.to_dtype(DType::F32)?.flatten_all();
    let (ours, theirs) = (wide((pair.windrow)()?)?, wide((pair.candle)()?)?);
    let largest = |t: Tensor| t.abs()?.max_all()?.to_scalar::<f32>();
    Ok(largest(ours.sub(&theirs)?)? / largest(theirs)?)
}

/// Milliseconds of each call in samples taken in turns.
fn measure(
    calls: &[&dyn Fn() -> Result<Tensor>],
    device: &Device,
    seconds: f64,
) -> Result<Vec<Vec<f64>>> {
    let sample = |call: &dyn Fn() -> Result<Tensor>, count: usize| -> Result<f64> {
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..count {
            call()?;
        }
        device.synchronize()?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut counts = Vec::new();
    for call in calls {
        let once = sample(*call, 1)?.min(sample(*call, 1)?);
        counts.push((SAMPLE_SECONDS / once).ceil() as usize);
    }
    let mut times = vec![Vec::new(); calls.len()];
    let start = Instant::now();
    while times[0].len() < 5 || start.elapsed().as_secs_f64() < seconds {
        for ((call, &count), times) in calls.iter().zip(&counts).zip(&mut times) {
            times.push(sample(*call, count)? * 1e3 / count as f64);
        }
    }
    Ok(times)
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn machine(device: &Device) -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cpu = format!("{}, {} threads", cpu.map_or("CPU", |c| c.1), windrow::cpu::num_threads());
    if device.is_cpu() {
        return cpu;
    }
    let gpu =
        windrow::cuda::devices().ok().and_then(|devices| Some(format!("{:?}", devices.first()?)));
    let cudnn = if cfg!(feature = "cudnn") { "cuDNN" } else { "im2col" };
    format!("{}; candle's conv2d by {cudnn}; {cpu}", gpu.unwrap_or_default())
}
