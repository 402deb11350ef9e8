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
    let here = Here::new()?;
    let mut build = maturin(environment, &arguments, out)?;
    steps.run("wheel", build.env("CARGO_ENCODED_RUSTFLAGS", here.remapped()))?;
    let wheel = named(out, ".whl")?;
    here.leave_out(steps, environment, &wheel)?;
    Ok(wheel)
}

/// Folders of this machine, which a wheel is not to name.
struct Here {
    sources: String,
    dependencies: String,
}

impl Here {
    fn new() -> Result<Self> {
        let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from);
        let cargo = cargo.or_else(|| Some(std::env::home_dir()?.join(".cargo")));
        let name = |path: &Path| path.to_str().map(String::from).ok_or("a path that is no text");
        let dependencies = name(&cargo.ok_or("neither CARGO_HOME nor HOME is set")?)?;
        Ok(Here { sources: name(root())?, dependencies })
    }

    /// Options of the compiler.
    fn remapped(&self) -> String {
        let Here { sources, dependencies } = self;
        let pairs = [(sources, "windrow"), (dependencies, "cargo")];
        pairs.map(|(from, to)| format!("--remap-path-prefix={from}={to}")).join("\x1f")
    }

    /// Takes them out of the wheel's list of dependencies, and fails if another file has one.
    fn leave_out(&self, steps: &mut Steps, environment: &Path, wheel: &Path) -> Result {
        let out = wheel.parent().ok_or("a wheel without a folder")?;
        let unpacked = out.join("unpacked");
        let mut tool = |arguments: [&Path; 4]| {
            let mut command = Command::new(environment.join("bin/python"));
            steps.run("wheel without paths", command.args(["-m", "wheel"]).args(arguments))
        };
        tool(["unpack".as_ref(), "--dest".as_ref(), &unpacked, wheel])?;
        let package = fs::read_dir(&unpacked)?.next().ok_or("an empty wheel")??.path();
        let mut folders = vec![package.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                if path.to_string_lossy().ends_with(".cyclonedx.json") {
                    let text = fs::read_to_string(&path)?;
                    fs::write(&path, text.replace(&self.sources, ""))?;
                }
                let bytes = fs::read(&path)?;
                let names = |of: &str| bytes.windows(of.len()).any(|part| part == of.as_bytes());
                if names(&self.sources) || names(&self.dependencies) {
                    return Err(format!("{} names folders of this machine", path.display()).into());
                }
            }
        }
        tool(["pack".as_ref(), "--dest-dir".as_ref(), out, &package])?;
        Ok(fs::remove_dir_all(unpacked)?)
    }
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
