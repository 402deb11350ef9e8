//! The Python wheel as it is published: for old systems, and without names of this machine.

use crate::steps::{Result, Steps, root};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The platform of what is published.
pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The oldest glibc that programs of Rust run on: what is published runs on all since.
pub(crate) const GLIBC: &str = "2.17";

/// Builds the wheel into the folder `out`, with more options of cargo.
pub(crate) fn wheel(
    steps: &mut Steps,
    environment: &Path,
    out: &Path,
    options: &[&str],
) -> Result<PathBuf> {
    // maturin fails if the extension needs a newer symbol than those of this glibc.
    let manylinux = format!("manylinux_{}", GLIBC.replace('.', "_"));
    let wheel =
        ["build", "--release", "--locked", "--strip", "--zig", "--compatibility", &manylinux];
    let target_of = ["--target", TARGET];
    let arguments = [&wheel[..], &target_of, options].concat();
    let here = Here::new()?;
    let mut build = maturin(environment, &arguments, out)?;
    steps.run("wheel", build.env("CARGO_ENCODED_RUSTFLAGS", here.remapped()))?;
    let wheel = named(out, ".whl")?;
    here.leave_out(steps, environment, &wheel)?;
    Ok(wheel)
}

/// Folders of this machine, which nothing that is published may name.
pub(crate) struct Here {
    sources: String,
    dependencies: String,
}

impl Here {
    pub(crate) fn new() -> Result<Self> {
        let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from);
        let cargo = cargo.or_else(|| Some(std::env::home_dir()?.join(".cargo")));
        let name = |path: &Path| path.to_str().map(String::from).ok_or("a path that is no text");
        let dependencies = name(&cargo.ok_or("neither CARGO_HOME nor HOME is set")?)?;
        Ok(Here { sources: name(root())?, dependencies })
    }

    /// Options of the compiler.
    pub(crate) fn remapped(&self) -> String {
        let Here { sources, dependencies } = self;
        let pairs = [(sources, "windrow"), (dependencies, "cargo")];
        pairs.map(|(from, to)| format!("--remap-path-prefix={from}={to}")).join("\x1f")
    }

    /// Fails if a file has one.
    pub(crate) fn check(&self, file: &Path) -> Result {
        let bytes = fs::read(file)?;
        let names = |of: &str| bytes.windows(of.len()).any(|part| part == of.as_bytes());
        if names(&self.sources) || names(&self.dependencies) {
            return Err(format!("{} names folders of this machine", file.display()).into());
        }
        Ok(())
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
                self.check(&path)?;
            }
        }
        tool(["pack".as_ref(), "--dest-dir".as_ref(), out, &package])?;
        Ok(fs::remove_dir_all(unpacked)?)
    }
}

pub(crate) fn maturin(environment: &Path, arguments: &[&str], out: &Path) -> Result<Command> {
    let mut command = Command::new(environment.join("bin/maturin"));
    command
        .args(arguments)
        .arg("--manifest-path")
        .arg(root().join("crates/windrow-python/Cargo.toml"));
    command.arg("--out").arg(out).env("PATH", path(environment)?);
    Ok(command)
}

/// maturin starts `python3 -m ziglang`: that of the environment.
pub(crate) fn path(environment: &Path) -> Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [environment.join("bin")].into_iter();
    Ok(std::env::join_paths(folders.chain(std::env::split_paths(&path)))?)
}

pub(crate) fn named(folder: &Path, end: &str) -> Result<PathBuf> {
    let files = fs::read_dir(folder)?.filter_map(|e| e.ok().map(|e| e.path()));
    let mut found = files.filter(|path| path.to_string_lossy().ends_with(end));
    found.next().ok_or_else(|| format!("no *{end} in {}", folder.display()).into())
}
