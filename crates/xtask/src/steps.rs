//! Running programs one after the other, with a heading and the time each took.

use std::error::Error;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
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
    /// Runs steps while a program runs whose output goes to the terminal after theirs. Both together keep the cores busy
    /// where either alone would not.
    pub(crate) fn beside(
        &mut self,
        name: &'static str,
        other: &mut Command,
        steps: impl FnOnce(&mut Self) -> Result,
    ) -> Result {
        let (here, other) = std::thread::scope(|scope| {
            let other = scope.spawn(|| (Instant::now(), other.output(), Instant::now()));
            (steps(self), other.join())
        });
        let (start, other, end) = other.map_err(|_| format!("{name}: a thread panicked"))?;
        self.done.push((name, end - start));
        let other = other?;
        show(name, &other)?;
        here?;
        if other.status.success() {
            Ok(())
        } else {
            Err(format!("{name} failed beside others: {}", other.status).into())
        }
    }

    /// Runs programs, two at a time in this order. Each one's output goes to the terminal when it has ended.
    pub(crate) fn run_in_turn(&mut self, name: &'static str, commands: Vec<Command>) -> Result {
        self.announce(name);
        let start = Instant::now();
        let queue = Mutex::new(commands.into_iter());
        let worker = || {
            let mut all = Ok(());
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(mut command) = next else { return all };
                let ended = command.output().and_then(|output| {
                    show(name, &output)?;
                    Ok(output.status)
                });
                match ended {
                    Ok(status) if status.success() => {}
                    Ok(status) => all = Err(format!("{name} failed: {status}")),
                    Err(e) => all = Err(format!("{name}: {command:?}: {e}")),
                }
            }
        };
        let ended = std::thread::scope(|scope| {
            let other = scope.spawn(worker);
            [worker(), other.join().unwrap_or_else(|_| Err(format!("{name}: a thread panicked")))]
        });
        self.done.push((name, start.elapsed()));
        ended.into_iter().collect::<std::result::Result<(), _>>().map_err(Into::into)
    }

    /// Runs a program; its output goes to the terminal.
    pub(crate) fn run(&mut self, name: &'static str, command: &mut Command) -> Result {
        self.announce(name);
        let start = Instant::now();
        let status = command.status().map_err(|e| format!("{name}: {command:?}: {e}"))?;
        self.done.push((name, start.elapsed()));
        if status.success() {
            Ok(())
        } else {
            Err(format!("{name} failed: {command:?}: {status}").into())
        }
    }

    /// Writes the heading of a step.
    fn announce(&self, name: &str) {
        // The times of earlier steps stand here, so that the last line of a task is a test
        // runner's own summary.
        let done: Vec<_> =
            self.done.iter().map(|(n, t)| format!("{n} {:.0} s", t.as_secs_f64())).collect();
        let so_far =
            if done.is_empty() { String::new() } else { format!(" (done: {})", done.join(", ")) };
        eprintln!("\n== {name}{so_far}");
    }
}

/// Writes the output of a program that has ended.
fn show(name: &str, output: &Output) -> io::Result<()> {
    let (mut to, mut errors) = (io::stdout().lock(), io::stderr().lock());
    writeln!(errors, "\n== output of {name}")?;
    to.write_all(&output.stdout)?;
    errors.write_all(&output.stderr)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(code: i32) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exit {code}")]);
        command
    }

    #[test]
    fn of_two_programs_either_may_fail() {
        for (codes, good) in [([0, 0], true), ([0, 3], false), ([3, 0], false)] {
            let [mut one, mut other] = codes.map(exit);
            let mut steps = Steps::default();
            let ran = steps.beside("other", &mut other, |steps| steps.run("one", &mut one));
            assert_eq!(ran.is_ok(), good, "{codes:?}");
        }
    }

    #[test]
    fn of_programs_in_turn_any_may_fail() {
        for failing in [None, Some(0), Some(2), Some(4)] {
            let commands = (0..5).map(|i| exit(i32::from(Some(i) == failing))).collect();
            let ran = Steps::default().run_in_turn("programs", commands);
            assert_eq!(ran.is_ok(), failing.is_none(), "{failing:?}");
        }
    }

    #[test]
    fn all_programs_in_turn_run_though_one_fails() {
        let folder = std::env::temp_dir().join(format!("windrow-in-turn-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let commands = (0..5).map(|i| {
            let mut command = Command::new("sh");
            command.current_dir(&folder).args(["-c", &format!("touch {i}; exit 1")]);
            command
        });
        assert!(Steps::default().run_in_turn("programs", commands.collect()).is_err());
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 5);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
