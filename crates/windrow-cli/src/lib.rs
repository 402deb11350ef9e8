//! The `windrow` command, and its reader and writer of tensor files.

mod bench;
mod devices;
mod failure;
pub mod files;
mod machine;
mod operator;
mod placed;
mod run;
mod table;
mod tune;
mod verify;

use clap::Parser;
use std::ffi::OsString;
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
    Tune(Box<tune::Tune>),
    Devices(devices::Devices),
    #[command(subcommand)]
    Run(run::Run),
}

/// Runs the command with the process's arguments.
pub fn main() -> ExitCode {
    ExitCode::from(run(std::env::args_os()))
}

/// Runs the command with these arguments, of which the first names the program; returns the exit
/// status.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    // A second call finds the subscriber of the first.
    let _ = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .try_init();
    let command = match Command::try_parse_from(args) {
        Ok(command) => command,
        Err(help_or_error) => {
            // Nothing can be said where printing fails.
            let _ = help_or_error.print();
            return help_or_error.exit_code() as u8;
        }
    };
    let result = match &command.action {
        Action::Bench(args) => bench::run(args),
        Action::Verify(args) => verify::run(args),
        Action::Tune(args) => tune::run(args),
        Action::Devices(args) => devices::run(args),
        Action::Run(args) => run::run(args),
    };
    match result {
        Ok(()) => 0,
        Err(failure) => {
            eprintln!("windrow: {failure}");
            failure.status()
        }
    }
}
