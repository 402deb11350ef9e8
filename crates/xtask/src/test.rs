//! `cargo xtask test`: everything that has to pass before a change is merged.

use crate::steps::{Result, Steps, cargo};
use crate::{python, readme};

/// `torch` adds what needs PyTorch.
pub(crate) fn run(torch: bool) -> Result {
    let mut steps = Steps::default();
    steps.run("format", &mut cargo(&["fmt", "--all", "--check"]))?;
    readme::check()?;
    let clippy = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    steps.run("clippy", &mut cargo(&clippy))?;
    let docs = ["doc", "--workspace", "--no-deps"];
    steps.run("docs", cargo(&docs).env("RUSTDOCFLAGS", "-D warnings"))?;
    steps.run("doc tests", &mut cargo(&["test", "--workspace", "--doc"]))?;
    if has_nextest() {
        let tests = ["nextest", "run", "--workspace", "--no-fail-fast", "--status-level", "fail"];
        steps.run("tests", &mut cargo(&tests))?;
    } else {
        let tests = ["test", "--workspace", "--lib", "--bins", "--tests", "--examples"];
        steps.run("tests", cargo(&tests).arg("--no-fail-fast"))?;
    }
    python::test(&mut steps, torch)
}

fn has_nextest() -> bool {
    let version = cargo(&["nextest", "--version"]).output();
    version.is_ok_and(|output| output.status.success())
}
