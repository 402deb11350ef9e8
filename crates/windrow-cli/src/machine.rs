//! The machine that the command runs on, and what it can do at most.

use crate::failure::Failure;
use crate::print;
use rayon::ThreadPoolBuilder;
use serde::Serialize;
use std::error::Error;
use std::num::NonZeroUsize;
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

    /// Its name, cores and threads.
    pub(crate) fn summary(&self) -> String {
        let Machine { cpu, cores, threads, .. } = self;
        let plural =
            |n: &usize, what: &str| format!("{n} {what}{}", if *n == 1 { "" } else { "s" });
        format!("{cpu}, {}, {}", plural(cores, "core"), plural(threads, "thread"))
    }

    /// The limits of its speed, by its instruction set.
    pub(crate) fn ceilings(&self) -> String {
        let Machine { isa, peak_gflops, copy_gbps, .. } = self;
        format!("{isa}: {peak_gflops:.0} GFLOP/s of f32 FMA, copies {copy_gbps:.1} GB/s")
    }
}

/// Starts the threads that plans run on, and says how many each plan may use: what `--threads` asks for, or
/// `WINDROW_NUM_THREADS`, but no more than there are cores.
pub(crate) fn start_threads(asked: Option<NonZeroUsize>) -> Result<NonZeroUsize, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // As many as rayon would take, unless fewer are wanted.
    let workers = asked.map_or(0, |n| n.get().min(cores));
    if let Err(e) = ThreadPoolBuilder::new().num_threads(workers).build_global()
        // Else there are threads already, as in a program that has called an operator before.
        && e.source().is_some()
    {
        let message = format!("threads cannot be started: {e}; --threads 1 needs the fewest");
        return Err(Failure::Input(message));
    }
    let there = rayon::current_num_threads();
    let wanted = asked.map_or_else(cpu::num_threads, NonZeroUsize::get);
    if wanted > there {
        let by = if asked.is_some() { "--threads" } else { "WINDROW_NUM_THREADS" };
        print::note(format!("{by} {wanted}: there are {cores} cores, so {there} threads run"));
    }
    Ok(NonZeroUsize::new(wanted.min(there)).unwrap_or(NonZeroUsize::MIN))
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
