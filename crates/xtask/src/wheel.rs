//! `cargo xtask wheel`: what goes to the Python registry.

use crate::python::environment;
use crate::steps::{Result, Steps, root, target};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the wheel for every Linux on x86-64 since glibc 2.28 and the source package, in release, and builds the
/// source package once; prints their sizes.
pub(crate) fn build() -> Result {
    let mut steps = Steps::default();
    let requirements = [root().join("crates/xtask/requirements-wheel.txt")];
    let environment = environment(&mut steps, "wheel", &requirements)?;
    let out = target().join("wheels");
    if out.exists() {
        fs::remove_dir_all(&out)?;
    }
    let wheel = wheel(&mut steps, &environment, &out, &[])?;
    steps.run("sdist", &mut maturin(&environment, &["sdist"], &out)?)?;
    let sdist = named(&out, ".tar.gz")?;
    let mut from_sdist = Command::new(environment.join("bin/python"));
    from_sdist
        .args(["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"])
        .args(["--no-build-isolation", "--wheel-dir"])
        .arg(out.join("from-sdist"))
        .arg(&sdist)
        // Unoptimised, unlike the workspace's tests: whether it builds is the question.
        .env("MATURIN_PEP517_ARGS", "--profile dev")
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "0")
        .env("PATH", path(&environment)?);
    steps.run("wheel from the sdist", &mut from_sdist)?;
    let mut package = Command::new(environment.join("bin/python"));
    package
        .args(["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"])
        .arg("--wheel-dir")
        .arg(out.join("causal-conv1d"))
        .arg(root().join("crates/windrow-python/causal-conv1d"));
    steps.run("windrow-causal-conv1d", &mut package)?;
    for file in [wheel, named(&out.join("causal-conv1d"), ".whl")?, sdist] {
        let bytes = fs::metadata(&file)?.len();
        println!("{:>6.2} MB  {}", bytes as f64 / 1e6, file.display());
    }
    Ok(())
}

/// Builds the wheel into the folder `out`, with more options of cargo.
pub(crate) fn wheel(
    steps: &mut Steps,
    environment: &Path,
    out: &Path,
    options: &[&str],
) -> Result<PathBuf> {
    let wheel =
        ["build", "--release", "--locked", "--strip", "--zig", "--compatibility", "manylinux_2_28"];
    let target_of = ["--target", "x86_64-unknown-linux-gnu"];
    let arguments = [&wheel[..], &target_of, options].concat();
    steps.run("wheel", &mut maturin(environment, &arguments, out)?)?;
    named(out, ".whl")
}

fn maturin(environment: &Path, arguments: &[&str], out: &Path) -> Result<Command> {
    let mut command = Command::new(environment.join("bin/maturin"));
    command
        .args(arguments)
        .arg("--manifest-path")
        .arg(root().join("crates/windrow-python/Cargo.toml"));
    command.arg("--out").arg(out).env("PATH", path(environment)?);
    Ok(command)
}

/// maturin starts `python3 -m ziglang`: that of the environment.
fn path(environment: &Path) -> Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [environment.join("bin")].into_iter();
    Ok(std::env::join_paths(folders.chain(std::env::split_paths(&path)))?)
}

fn named(folder: &Path, end: &str) -> Result<PathBuf> {
    let files = fs::read_dir(folder)?.filter_map(|e| e.ok().map(|e| e.path()));
    let mut found = files.filter(|path| path.to_string_lossy().ends_with(end));
    found.next().ok_or_else(|| format!("no *{end} in {}", folder.display()).into())
}
