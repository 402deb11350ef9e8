//! The name of the CPU.

use std::io::{BufRead, BufReader};
use std::sync::LazyLock;

/// The CPU's name as the operating system gives it, or the architecture if it gives none.
pub fn name() -> String {
    static NAME: LazyLock<String> = LazyLock::new(|| {
        from_proc()
            .or_else(from_sysctl)
            .or_else(|| std::env::var("PROCESSOR_IDENTIFIER").ok())
            .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
    });
    NAME.clone()
}

/// The name on Linux. `/proc/cpuinfo` is read only up to the first name. Reading on would be slow, because Linux then
/// queries the clock rate of every core.
fn from_proc() -> Option<String> {
    let info = BufReader::new(std::fs::File::open("/proc/cpuinfo").ok()?);
    let line = info.lines().map_while(Result::ok).find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The name on macOS.
fn from_sysctl() -> Option<String> {
    if !cfg!(target_os = "macos") {
        return None;
    }
    let mut sysctl = std::process::Command::new("sysctl");
    let output = sysctl.args(["-n", "machdep.cpu.brand_string"]).output().ok()?;
    let name = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !name.is_empty()).then_some(name)
}
