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
use failure::Failure;
use std::ffi::OsString;
use std::process::ExitCode;
use tracing_subscriber::filter::LevelFilter;

/// Causal conv1d, Winograd conv2d and GELU: fast on CPU and GPU, with known accuracy.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Exit status: 0, 1 if a result differs from the oracle, 2 for bad arguments or data.\n\
                  WINDROW_LOG: what is logged, error, warn (unless told otherwise), info, debug, trace or off."
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
    let level = match log_level() {
        Ok(level) => level,
        Err(failure) => return report(&failure),
    };
    // A second call finds the subscriber of the first.
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
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
        Err(failure) => report(&failure),
    }
}

/// Says what went wrong; returns the exit status.
fn report(failure: &Failure) -> u8 {
    eprintln!("windrow: {failure}");
    failure.status()
}

/// What `WINDROW_LOG` asks for: warnings, if nothing.
fn log_level() -> Result<LevelFilter, Failure> {
    let Some(level) = std::env::var_os("WINDROW_LOG") else { return Ok(LevelFilter::WARN) };
    level.to_string_lossy().parse().map_err(|_| {
        let expected = "error, warn, info, debug, trace or off";
        Failure::Input(format!("WINDROW_LOG is {level:?}, expected {expected}"))
    })
}
