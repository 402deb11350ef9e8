//! `windrow devices`: what there is to run on.

use crate::failure::Failure;
use crate::machine::{Machine, start_threads};
use crate::print;
use serde::Serialize;

/// List the devices, and what this machine's cores and memory reach.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  windrow devices\n  windrow devices --json")]
pub(crate) struct Devices {
    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Listed {
    Cpu {
        device: &'static str,
        #[serde(flatten)]
        machine: Machine,
    },
    Cuda(Gpu),
}

/// A CUDA device, as its driver describes it.
#[derive(Serialize)]
struct Gpu {
    /// As `--device` takes it.
    device: String,
    name: String,
    compute_capability: String,
    multiprocessors: u32,
    memory_bytes: usize,
    l2_cache_bytes: usize,
    driver_cuda: String,
}

impl Gpu {
    /// All of this machine: none without a driver.
    fn all() -> Vec<Self> {
        let found = windrow::cuda::devices().unwrap_or_default();
        let version = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        let gpu = |d: windrow::cuda::DeviceInfo| Gpu {
            device: format!("cuda:{}", d.index),
            name: d.name.clone(),
            compute_capability: version(d.compute_capability),
            multiprocessors: d.multiprocessors,
            memory_bytes: d.memory,
            l2_cache_bytes: d.l2_cache,
            driver_cuda: version(d.driver),
        };
        found.into_iter().map(gpu).collect()
    }
}

pub(crate) fn run(args: &Devices) -> Result<(), Failure> {
    let machine = Machine::measure(start_threads(None)?.get());
    if args.json {
        let cpu = [Listed::Cpu { device: "cpu", machine }];
        let gpus = Gpu::all().into_iter().map(Listed::Cuda);
        let devices: Vec<_> = cpu.into_iter().chain(gpus).collect();
        let json = serde_json::to_string_pretty(&devices).expect("devices are plain data");
        return print::out(format_args!("{json}\n"));
    }
    let Machine { cpu, cores, threads, isa, isa_available, peak_gflops, copy_gbps } = machine;
    let mut lines = vec![
        format!("cpu        {cpu}"),
        format!("  cores    {cores}, of which {threads} used by default (WINDROW_NUM_THREADS)"),
        format!("  kernels  {isa}, of {} (WINDROW_ISA)", isa_available.join(", ")),
        format!("  f32 FMA  {peak_gflops:.0} GFLOP/s"),
        format!("  memory   {copy_gbps:.1} GB/s, copying: bytes read and bytes written"),
    ];
    for gpu in Gpu::all() {
        let (capability, processors) = (gpu.compute_capability, gpu.multiprocessors);
        let (memory, l2) = (gpu.memory_bytes as f64 / 1e9, gpu.l2_cache_bytes as f64 / 1e6);
        lines.extend([
            format!("{:<10} {}", gpu.device, gpu.name),
            format!("  kernels  compute capability {capability}, {processors} multiprocessors"),
            format!("  memory   {memory:.0} GB, L2 cache {l2:.0} MB"),
            format!("  driver   CUDA {}", gpu.driver_cuda),
        ]);
    }
    print::out(format_args!("{}\n", lines.join("\n")))
}
