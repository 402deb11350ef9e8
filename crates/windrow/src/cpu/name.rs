//! The name of the CPU.

use std::io::{BufRead, BufReader};
use std::sync::LazyLock;

/// The CPU's name as the operating system gives it, else the architecture.
pub fn name() -> String {
    static NAME: LazyLock<String> = LazyLock::new(|| {
        from_proc()
            .or_else(from_sysctl)
            .or_else(|| std::env::var("PROCESSOR_IDENTIFIER").ok())
            .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
    });
    NAME.clone()
}

/// Linux. Read only up to the first name: the kernel asks every core for its clock rate to write the rest.
fn from_proc() -> Option<String> {
    let info = BufReader::new(std::fs::File::open("/proc/cpuinfo").ok()?);
    let line = info.lines().map_while(Result::ok).find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// macOS.
fn from_sysctl() -> Option<String> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    let mut sysctl = std::process::Command::new("sysctl");
    let output = sysctl.args(["-n", "machdep.cpu.brand_string"]).output().ok()?;
    let name = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !name.is_empty()).then_some(name)
}
