//! Running programs one after the other, with a heading and the time each took.

use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

pub(crate) type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// The root of the workspace, where all programs run.
pub(crate) fn root() -> &'static Path {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    crates.and_then(Path::parent).expect("this crate lies two folders below the root")
}

/// The folder in which cargo builds.
pub(crate) fn target() -> PathBuf {
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// Incremental builds repeat the kernels' inlined functions in many more units: compiling the library's tests
/// from scratch takes half as long again.
pub(crate) const WHOLE: (&str, &str) = ("CARGO_INCREMENTAL", "0");

/// Packages and features of all that is tested.
pub(crate) const ALL: [&str; 3] = ["--workspace", "--features", "windrow-cli/png"];

/// Builds the commands. One of the tests is named so that features are those that tests are built with: what they
/// have compiled serves again, all of the library above all.
pub(crate) const COMMANDS: [&str; 8] =
    ["build", "--quiet", ALL[0], ALL[1], ALL[2], "--bins", "--test", "kernels"];

/// `cargo` with arguments, the same one that runs this task.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).current_dir(root()).env(WHOLE.0, WHOLE.1);
    command
}

/// The steps of a task.
#[derive(Default)]
pub(crate) struct Steps {
    done: Vec<(&'static str, Duration)>,
}

impl Steps {
    /// Runs a program while another one runs, whose output goes to the terminal after this one's.
    pub(crate) fn run_beside(
        &mut self,
        name: &'static str,
        command: &mut Command,
        beside: &mut Command,
    ) -> Result {
        let (here, beside) = std::thread::scope(|scope| {
            let other = scope.spawn(|| beside.output());
            (self.run(name, command), other.join())
        });
        let beside = beside.map_err(|_| format!("{name}: a thread panicked"))??;
        std::io::stdout().write_all(&beside.stdout)?;
        std::io::stderr().write_all(&beside.stderr)?;
        here?;
        if beside.status.success() {
            Ok(())
        } else {
            Err(format!("{name} beside others failed: {}", beside.status).into())
        }
    }

    /// Runs a program; its output goes to the terminal.
    pub(crate) fn run(&mut self, name: &'static str, command: &mut Command) -> Result {
        // The times of earlier steps stand here, so that the last line of a task is a test
        // runner's own summary.
        let done: Vec<_> =
            self.done.iter().map(|(n, t)| format!("{n} {:.0} s", t.as_secs_f64())).collect();
        let so_far =
            if done.is_empty() { String::new() } else { format!(" (done: {})", done.join(", ")) };
        eprintln!("\n== {name}{so_far}");
        let start = Instant::now();
        let status = command.status().map_err(|e| format!("{name}: {command:?}: {e}"))?;
        self.done.push((name, start.elapsed()));
        if status.success() {
            Ok(())
        } else {
            Err(format!("{name} failed: {command:?}: {status}").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_programs_either_may_fail() {
        for (codes, good) in [([0, 0], true), ([0, 3], false), ([3, 0], false)] {
            let [mut one, mut other] = codes.map(|code| {
                let mut command = Command::new("sh");
                command.args(["-c", &format!("exit {code}")]);
                command
            });
            let ran = Steps::default().run_beside("a step", &mut one, &mut other);
            assert_eq!(ran.is_ok(), good, "{codes:?}");
        }
    }
}
