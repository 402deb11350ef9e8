//! `windrow devices`: what there is to run on.

use crate::failure::Failure;
use crate::machine::{Machine, start_threads};
use crate::print;
use serde::Serialize;
use windrow::Device;
use windrow::cuda::DeviceInfo;

/// List the devices, and the speed of this machine's cores and memory.
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
    Gpu(Gpu),
}

/// A GPU, as its driver describes it.
#[derive(Serialize)]
struct Gpu {
    /// The device's name as `--device` takes it.
    device: String,
    name: String,
    architecture: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    compute_capability: Option<String>,
    multiprocessors: u32,
    warp: u32,
    memory_bytes: usize,
    l2_cache_bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    driver_cuda: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime_hip: Option<String>,
}

impl Gpu {
    /// All of this machine: none without a driver.
    fn all() -> Vec<Self> {
        let version = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        let gpu = |d: DeviceInfo, device: Device| {
            let is_cuda = matches!(device, Device::Cuda(_));
            let of_cuda = |value| is_cuda.then(|| version(value));
            Gpu {
                device: device.to_string(),
                name: d.name.clone(),
                architecture: d.architecture.clone(),
                compute_capability: of_cuda(d.compute_capability),
                multiprocessors: d.multiprocessors,
                warp: d.warp,
                memory_bytes: d.memory,
                l2_cache_bytes: d.l2_cache,
                driver_cuda: of_cuda(d.driver),
                runtime_hip: (!is_cuda).then(|| version(d.driver)),
            }
        };
        let cuda = windrow::cuda::devices().unwrap_or_default();
        let hip = windrow::hip::devices().unwrap_or_default();
        let cuda = cuda.into_iter().map(|d| (Device::Cuda(d.index), d));
        let all = cuda.chain(hip.into_iter().map(|d| (Device::Hip(d.index), d)));
        all.map(|(device, d)| gpu(d, device)).collect()
    }
}

pub(crate) fn run(args: &Devices) -> Result<(), Failure> {
    let machine = Machine::measure(start_threads(None)?.get());
    if args.json {
        let cpu = [Listed::Cpu { device: "cpu", machine }];
        let gpus = Gpu::all().into_iter().map(Listed::Gpu);
        let devices: Vec<_> = cpu.into_iter().chain(gpus).collect();
        return print::out(print::json(&devices));
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
        let processors = gpu.multiprocessors;
        let kernels = match &gpu.compute_capability {
            Some(capability) => {
                format!("compute capability {capability}, {processors} multiprocessors")
            }
            None => {
                let (chip, warp) = (&gpu.architecture, gpu.warp);
                format!("{chip}, {processors} compute units, wavefronts of {warp}")
            }
        };
        let driver = match (&gpu.driver_cuda, &gpu.runtime_hip) {
            (Some(cuda), _) => format!("CUDA {cuda}"),
            (_, hip) => format!("HIP {}", hip.as_deref().unwrap_or_default()),
        };
        let (memory, l2) = (gpu.memory_bytes as f64 / 1e9, gpu.l2_cache_bytes as f64 / 1e6);
        lines.extend([
            format!("{:<10} {}", gpu.device, gpu.name),
            format!("  kernels  {kernels}"),
            format!("  memory   {memory:.0} GB, L2 cache {l2:.0} MB"),
            format!("  driver   {driver}"),
        ]);
    }
    print::out(format_args!("{}\n", lines.join("\n")))
}
