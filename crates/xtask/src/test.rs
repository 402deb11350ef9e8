//! `cargo xtask test`: everything that has to pass before a change is merged.

use crate::steps::{ALL, Result, Steps, cargo, root, target};
use crate::{amd, api, figures, filled, form, house, python, records};
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

/// The features of `windrow`.
const FEATURES: [&str; 5] = ["cuda", "hip", "parallel", "threads", "tuning"];

/// `torch` adds what needs PyTorch.
pub(crate) fn run(torch: bool) -> Result {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let mut steps = Steps::default();
    steps.run("format", &mut cargo(&["fmt", "--all", "--check"]))?;
    pages()?;
    house::check()?;
    // Most checks wait for one crate, on one core, and a release has a folder and a lock of its own.
    match registers() {
        Some(mut registers) => steps.beside("registers", &mut registers, checks)?,
        None => checks(&mut steps)?,
    }
    steps.run("doc tests", &mut cargo(&[&["test", "--doc"], &ALL[..]].concat()))?;
    let mut tests = if has(&["nextest", "--version"]) {
        let tests = ["nextest", "run", "--no-fail-fast", "--status-level", "fail"];
        cargo(&[&tests[..], &ALL].concat())
    } else {
        let tests = ["test", "--lib", "--bins", "--tests", "--examples", "--no-fail-fast"];
        cargo(&[&tests[..], &ALL].concat())
    };
    // macOS has no NVRTC, and so no CUDA kernels to compile.
    if !cfg!(target_os = "macos") {
        let requirements = root().join("crates/xtask/requirements-nvrtc.txt");
        let nvrtc = python::environment(&mut steps, "nvrtc", &[requirements])?;
        tests.env("VIRTUAL_ENV", nvrtc).env("WINDROW_REQUIRE_NVRTC", "1");
    }
    steps.run("tests", &mut tests)?;
    // Other cases on each day, the same ones for all who test on it.
    let day = (now.as_secs() / 86_400).to_string();
    // The command as the tests have built it: alone, without candle's features of what both depend on, all of
    // the library would be compiled again.
    let mut random = Command::new(target().join("debug/windrow"));
    random.current_dir(root()).args(["verify", "--random", "60", "--seed", &day]);
    eprintln!("\nrandom cases of seed {day}");
    steps.run("random cases", &mut random)?;
    let emulator = amd::test(&mut steps)?;
    python::test(&mut steps, torch, emulator.as_deref())
}

/// What is compiled in part or documented, and hardly run.
fn checks(steps: &mut Steps) -> Result {
    let clippy = [&["clippy"], &ALL[..], &["--all-targets", "--", "-D", "warnings"]].concat();
    steps.run("clippy", &mut cargo(&clippy))?;
    if has(&["deny", "--version"]) {
        steps.run("dependencies", &mut cargo(&["deny", "check", "licenses", "bans", "sources"]))?;
    }
    let docs = ["doc", "--workspace", "--no-deps"];
    steps.run("docs", cargo(&docs).env("RUSTDOCFLAGS", "-D warnings"))?;
    api::check()?;
    packages(steps, None)?;
    house::samples(steps)?;
    features(steps)
}

/// Checks every crate that is published from its package, as who takes it from the registry has it. Cargo's own
/// check of packages would compile all of them. Packages are kept in `out` if there is one.
pub(crate) fn packages(steps: &mut Steps, out: Option<&Path>) -> Result {
    let private =
        ["pages", "windrow-amd-emulator", "windrow-onnxruntime", "windrow-python", "xtask"]
            .map(|name| ["--exclude", name])
            .concat();
    let package = ["package", "--quiet", "--workspace", "--allow-dirty", "--no-verify"];
    let folder = target().join("packages");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    let mut package = cargo(&[&package[..], &private].concat());
    steps.run("packages", package.env("CARGO_TARGET_DIR", &folder))?;
    let sources = folder.join("sources");
    std::fs::create_dir(&sources)?;
    let mut manifest =
        String::from("[workspace]\nresolver = \"3\"\nmembers = [\"*\"]\n\n[patch.crates-io]\n");
    for file in std::fs::read_dir(folder.join("package"))? {
        let path = file?.path();
        if path.extension().is_none_or(|end| end != "crate") {
            continue;
        }
        if let (Some(out), Some(name)) = (out, path.file_name()) {
            std::fs::copy(&path, out.join(name))?;
        }
        // As of now: cargo would take what it has compiled of older files for what they are.
        let mut unpack = Command::new("tar");
        unpack.arg("xmzf").arg(&path).arg("-C").arg(&sources);
        steps.run("unpack", &mut unpack)?;
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let package = stem.ok_or_else(|| format!("{}", path.display()))?;
        let name = package.rsplit_once('-').ok_or("a package without a version")?.0;
        manifest.push_str(&format!("{name} = {{ path = \"{package}\" }}\n"));
    }
    std::fs::write(sources.join("Cargo.toml"), manifest)?;
    std::fs::copy(root().join("Cargo.lock"), sources.join("Cargo.lock"))?;
    let mut check = cargo(&["check", "--quiet", "--workspace"]);
    // What clippy has checked of their dependencies serves here as well.
    check.current_dir(&sources).env("CARGO_TARGET_DIR", target());
    steps.run("packages, checked", &mut check)?;
    Ok(std::fs::remove_dir_all(folder)?)
}

/// Checks the library with each feature alone and with none; the operators' tests run without any.
fn features(steps: &mut Steps) -> Result {
    // Compiled only, or run on little: not worth the time that optimising takes.
    let plain = ["--config", "profile.dev.package.windrow.opt-level=0"];
    let none = ["--package", "windrow", "--no-default-features"];
    for feature in FEATURES {
        let check = [&["check", "--quiet", "--features", feature], &none[..], &plain].concat();
        steps.run(feature, &mut cargo(&check))?;
    }
    let test = [&["test", "--quiet", "--lib"], &none[..], &plain, &["--", "gelu::"]].concat();
    steps.run("no features", &mut cargo(&test))
}

/// Whether the kernels of a release hold their sums in registers.
fn registers() -> Option<Command> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return None;
    }
    let test = ["test", "--quiet", "--release", "--package", "windrow", "--lib"];
    let kernels = ["--no-default-features", "--features", "threads", "--", "in_registers"];
    Some(cargo(&[&test[..], &kernels].concat()))
}

/// The checks of the pages that run nothing.
pub(crate) fn pages() -> Result {
    filled::check()?;
    figures::check()?;
    records::check()?;
    form::check()
}

/// True if this machine's cargo has the command.
fn has(command: &[&str]) -> bool {
    cargo(command).output().is_ok_and(|output| output.status.success())
}
