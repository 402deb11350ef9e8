//! The `windrow` command, and its reader and writer of tensor files.

mod bench;
mod completions;
mod devices;
mod failure;
pub mod files;
mod lines;
mod machine;
mod memory;
mod names;
mod operator;
mod print;
mod run;
mod table;
mod tune;
mod verify;

pub use memory::Memory;

use clap::Parser;
use failure::Failure;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::filter::LevelFilter;
use windrow::Verify;

/// Causal conv1d, Winograd conv2d and GELU: fast on CPU and GPU, with known accuracy.
#[derive(Debug, Parser)]
#[command(name = "windrow", version, max_term_width = 100, after_help = AFTER_HELP)]
struct Command {
    /// Print no progress and no lines about what was done, only results, warnings and errors
    #[arg(long, short, global = true, display_order = 1000)]
    quiet: bool,
    #[command(subcommand)]
    action: Action,
}

const AFTER_HELP: &str = "\
Examples:
  windrow devices
  windrow verify --quick
  windrow bench conv2d --plot speed.svg
  windrow run conv2d --input x.npy --weight w.npy --padding 1 --output y.npy

Environment:
  WINDROW_NUM_THREADS  CPU threads [default: all cores]
  WINDROW_ISA          instruction set of the CPU's kernels [default: the fastest there is]
  WINDROW_VERIFY       1: compare every result with its f64 reference (the oracle)
  WINDROW_LOG          log level: error, warn (the default), info, debug, trace or off
  WINDROW_TUNE_CACHE   folder for what `windrow tune` finds
  WINDROW_CACHE_DIR    folder for compiled kernels, and for `tune` without WINDROW_TUNE_CACHE
  WINDROW_CUDA_PATH    folders where CUDA's libraries are looked for first
  WINDROW_CUDA_SYNC    1: wait for every kernel, so that a fault names the right kernel
  WINDROW_HIP_PATH     folders where HIP's libraries are looked for first
  WINDROW_HIP_SYNC     1: the same on AMD GPUs
  NO_COLOR             no colours on a terminal

Exit status: 0; 1 if a result differs from the oracle; 2 for bad arguments or data, or if the
device or memory is missing.";

#[derive(Debug, clap::Subcommand)]
enum Action {
    Bench(bench::Bench),
    Verify(verify::Verify),
    Tune(Box<tune::Tune>),
    Devices(devices::Devices),
    #[command(subcommand)]
    Run(run::Run),
    Completions(completions::Completions),
    Man(completions::Man),
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
    let stderr_is_terminal = std::io::stderr().is_terminal();
    // A second call finds the subscriber of the first.
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(stderr_is_terminal && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()))
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .try_init();
    let args: Vec<OsString> = args.into_iter().collect();
    let command = match Command::try_parse_from(&args) {
        Ok(command) => command,
        Err(help_or_error) => return print_help(&help_or_error, &args),
    };
    print::set_quiet(command.quiet);
    match check_verify().and_then(|()| command.action.run()) {
        Ok(()) => 0,
        Err(failure) => report(&failure),
    }
}

impl Action {
    fn run(&self) -> Result<(), Failure> {
        match self {
            Action::Bench(args) => bench::run(args),
            Action::Verify(args) => {
                machine::start_threads(None)?;
                verify::run(args)
            }
            Action::Tune(args) => tune::run(args),
            Action::Devices(args) => devices::run(args),
            Action::Run(args) => run::run(args),
            Action::Completions(args) => completions::run(args),
            Action::Man(args) => completions::man(args),
        }
    }
}

/// Prints what was asked for to standard output, or what is wrong with the arguments to standard error.
fn print_help(help_or_error: &clap::Error, args: &[OsString]) -> u8 {
    if help_or_error.use_stderr() {
        // What arguments bring along is not shown as it is: what is wrong with them is wrong with their escapes.
        let shown = args.iter().map(|arg| files::escaped(&arg.to_string_lossy()).into_owned());
        let is_run = args.iter().any(|arg| arg == "run");
        match Command::try_parse_from(shown) {
            // There is nowhere to say that nothing can be said.
            Err(error) => drop(operator::suggest(error, is_run).print()),
            Ok(_) => print::note("an argument has control characters"),
        }
        return help_or_error.exit_code() as u8;
    }
    match help_or_error.print() {
        Ok(()) => help_or_error.exit_code() as u8,
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => 0,
        Err(e) => report(&Failure::Input(format!("standard output: {e}"))),
    }
}

/// Reports a failure; returns the exit status.
fn report(failure: &Failure) -> u8 {
    if !matches!(failure, Failure::ClosedPipe) {
        print::note(failure);
    }
    failure.status()
}

/// Refuses a `WINDROW_VERIFY` that the library would have to guess at.
fn check_verify() -> Result<(), Failure> {
    match std::env::var_os("WINDROW_VERIFY") {
        Some(value) => Ok(value.to_string_lossy().parse::<Verify>().map(drop)?),
        None => Ok(()),
    }
}

/// The log level in `WINDROW_LOG`; warnings if it is not set.
fn log_level() -> Result<LevelFilter, Failure> {
    let Some(level) = std::env::var_os("WINDROW_LOG") else { return Ok(LevelFilter::WARN) };
    level.to_string_lossy().parse().map_err(|_| {
        let expected = "error, warn, info, debug, trace or off";
        Failure::Input(format!("WINDROW_LOG is {level:?}, expected {expected}"))
    })
}
