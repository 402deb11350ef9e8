//! The output of the command on standard output and standard error, and the option to be quiet.

use crate::failure::Failure;
use crate::files::escaped;
use crate::lines::lines;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

static QUIET: AtomicBool = AtomicBool::new(false);

/// Sets `--quiet`: no progress, no summary.
pub(crate) fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Writes to standard output, and so that errors show: `println!` panics where the reader has gone or the
/// device is full.
pub(crate) fn out(text: impl Display) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    write!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe => Failure::ClosedPipe,
        _ => Failure::Input(format!("standard output: {e}")),
    })
}

/// JSON with one case a line, as records are kept.
pub(crate) fn json(report: &impl Serialize) -> String {
    lines(&serde_json::to_string(report).expect("a report has nothing that JSON lacks"))
}

/// Prints as [`out`], but on standard error if standard output has other contents.
pub(crate) fn out_beside(contents: bool, text: impl Display) -> Result<(), Failure> {
    if contents {
        err(text);
        return Ok(());
    }
    out(text)
}

/// Writes to standard error.
pub(crate) fn err(text: impl Display) {
    // There is nowhere to say that nothing can be said.
    let _ = write!(io::stderr(), "{text}");
}

/// Prints what was done, unless asked to be quiet.
pub(crate) fn summary(contents: bool, text: impl Display) -> Result<(), Failure> {
    if is_quiet() { Ok(()) } else { out_beside(contents, text) }
}

/// A line on standard error that begins with the command's name. Text from files and arguments comes
/// escaped; what is left of control characters beside new lines is not for a terminal either.
pub(crate) fn note(text: impl Display) {
    let text = text.to_string();
    let lines: Vec<_> = text.lines().map(escaped).collect();
    err(format_args!("windrow: {}\n", lines.join("\n")));
}

/// A bar on stderr if that is a terminal, else nothing.
pub(crate) fn progress(len: u64) -> ProgressBar {
    if is_quiet() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}")
        .expect("the template is valid");
    ProgressBar::new(len).with_style(style)
}

/// The step that is going on, in a line on stderr if that is a terminal; removed when dropped.
pub(crate) struct Steps(ProgressBar);

impl Steps {
    pub(crate) fn new() -> Self {
        let style = ProgressStyle::with_template("{wide_msg}").expect("the template is valid");
        Steps(if is_quiet() {
            ProgressBar::hidden()
        } else {
            ProgressBar::new_spinner().with_style(style)
        })
    }

    pub(crate) fn now(&self, step: impl Display) {
        self.0.set_message(escaped(&step.to_string()).into_owned());
        self.0.tick();
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
