//! The `windrow` command, and its reader and writer of tensor files.

mod bench;
mod devices;
mod failure;
pub mod files;
mod machine;
mod operator;
mod run;
mod table;
mod verify;

use clap::Parser;
use std::process::ExitCode;

/// Causal conv1d, Winograd conv2d and GELU: fast on CPU and GPU, with known accuracy.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Exit status: 0, 1 if a result differs from the oracle, 2 for bad arguments or data."
)]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    Bench(bench::Bench),
    Verify(verify::Verify),
    Devices(devices::Devices),
    #[command(subcommand)]
    Run(run::Run),
}

/// Runs the command with the process's arguments.
pub fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .init();
    let result = match &Command::parse().action {
        Action::Bench(args) => bench::run(args),
        Action::Verify(args) => verify::run(args),
        Action::Devices(args) => devices::run(args),
        Action::Run(args) => run::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("windrow: {failure}");
            ExitCode::from(failure.status())
        }
    }
}
