//! `windrow devices`: what there is to run on.

use crate::failure::Failure;
use crate::machine::Machine;
use serde::Serialize;

/// List the devices, and what this machine's cores and memory reach.
#[derive(Debug, clap::Args)]
pub(crate) struct Devices {
    /// Print JSON instead of lines
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Listed {
    device: &'static str,
    #[serde(flatten)]
    machine: Machine,
}

pub(crate) fn run(args: &Devices) -> Result<(), Failure> {
    let machine = Machine::measure(windrow::cpu::num_threads());
    if args.json {
        let devices = [Listed { device: "cpu", machine }];
        let json = serde_json::to_string_pretty(&devices).expect("devices are plain data");
        println!("{json}");
        return Ok(());
    }
    let Machine { cpu, cores, threads, isa, isa_available, peak_gflops, copy_gbps } = machine;
    println!("cpu        {cpu}");
    println!("  cores    {cores}, of which {threads} used by default (WINDROW_NUM_THREADS)");
    println!("  kernels  {isa}, of {} (WINDROW_ISA)", isa_available.join(", "));
    println!("  f32 FMA  {peak_gflops:.0} GFLOP/s");
    println!("  memory   {copy_gbps:.1} GB/s, copying: bytes read and bytes written");
    Ok(())
}
