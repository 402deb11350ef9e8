//! The machine that the command runs on, and what it can do at most.

use serde::Serialize;
use std::time::Instant;
use windrow::{Device, Workspace, cpu};

/// Name, instruction sets and measured ceilings of the CPU.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub threads: usize,
    /// The instruction set that kernels use.
    pub isa: &'static str,
    pub isa_available: Vec<&'static str>,
    /// f32 multiply-adds on `threads` threads.
    pub peak_gflops: f64,
    /// Copying memory much larger than any cache on `threads` threads; bytes read and written.
    pub copy_gbps: f64,
}

impl Machine {
    /// Measures the ceilings, in about half a second.
    pub(crate) fn measure(threads: usize) -> Self {
        Machine {
            cpu: cpu::name(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            threads,
            isa: cpu::Isa::best().name(),
            isa_available: cpu::Isa::available().iter().map(|isa| isa.name()).collect(),
            peak_gflops: cpu::peak_gflops(threads),
            copy_gbps: copy_gbps(threads),
        }
    }

    /// One line that names the machine.
    pub(crate) fn summary(&self) -> String {
        let Machine { cpu, cores, threads, isa, peak_gflops, copy_gbps, .. } = self;
        let plural =
            |n: &usize, what: &str| format!("{n} {what}{}", if *n == 1 { "" } else { "s" });
        format!(
            "{cpu}, {}, {}, {isa}: {peak_gflops:.0} GFLOP/s of f32 FMA, copies {copy_gbps:.1} GB/s",
            plural(cores, "core"),
            plural(threads, "thread")
        )
    }
}

/// Fails, with the reason, unless plans can run on `device`.
pub(crate) fn check_device(device: Device) -> windrow::Result<()> {
    Workspace::new(device, 0).map(drop)
}

fn copy_gbps(threads: usize) -> f64 {
    const BYTES: usize = 256 << 20;
    let from = vec![1u8; BYTES];
    let mut to = vec![0u8; BYTES];
    cpu::copy(threads, &from, &mut to); // page faults
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        cpu::copy(threads, &from, &mut to);
        best = best.min(start.elapsed().as_secs_f64());
    }
    (2 * BYTES) as f64 / best / 1e9
}
