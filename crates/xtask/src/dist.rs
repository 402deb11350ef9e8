//! `cargo xtask dist`: everything that a release publishes, made in `target/dist` and checked in clean places.

use crate::python::environment;
use crate::steps::{Result, Steps, cargo, root, target};
use crate::test::packages;
use crate::wheel::{GLIBC, Here, TARGET, maturin, named, path, wheel};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One call of each operator on the installed wheel, and the version it says it has.
const WHEEL_CHECK: &str = r#"
import sys
import numpy as np
import windrow

assert windrow.__version__ == sys.argv[1], windrow.__version__
x = np.linspace(-4, 4, 2 * 8 * 16, dtype=np.float32).reshape(2, 8, 16)
assert windrow.gelu(x).shape == x.shape
ones = np.ones((8, 4), np.float32)
assert np.allclose(windrow.causal_conv1d(x, ones)[0, 0, 3], x[0, 0, :4].sum(), atol=1e-5)
image = x.reshape(1, 4, 8, 8)
assert windrow.conv2d(image, np.ones((2, 4, 3, 3), np.float32), padding=1).shape == (1, 2, 8, 8)
"#;

/// Makes and checks the release.
pub(crate) fn build() -> Result {
    let mut steps = Steps::default();
    let requirements = [root().join("crates/xtask/requirements-dist.txt")];
    let environment = environment(&mut steps, "dist", &requirements)?;
    let out = target().join("dist");
    if out.exists() {
        fs::remove_dir_all(&out)?;
    }
    fs::create_dir_all(&out)?;
    let folder = target().join("dist-checks");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    let wheel = wheel(&mut steps, &environment, &out, &[])?;
    let sdist = sdist(&mut steps, &environment, &out, &folder)?;
    causal_conv1d(&mut steps, &environment, &out)?;
    packages(&mut steps, Some(&out))?;
    let command = command(&mut steps, &environment, &out)?;
    let version = env!("CARGO_PKG_VERSION");
    check_wheel(&mut steps, &wheel, &folder.join("wheel"), version)?;
    check_wheel(&mut steps, &sdist, &folder.join("sdist"), version)?;
    check_command(&mut steps, &command, &folder.join("command"), version)?;
    fs::remove_dir_all(folder)?;
    checksums(&mut steps, &out)
}

/// The source package in `out`; gives the wheel that it builds from itself.
fn sdist(steps: &mut Steps, environment: &Path, out: &Path, folder: &Path) -> Result<PathBuf> {
    steps.run("sdist", &mut maturin(environment, &["sdist"], out)?)?;
    let mut build = pip_wheel(environment, folder, &named(out, ".tar.gz")?);
    // Unoptimised: the question is whether it builds and runs.
    build
        .arg("--no-build-isolation")
        .env("MATURIN_PEP517_ARGS", "--profile dev")
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "0")
        .env("PATH", path(environment)?);
    steps.run("wheel from the sdist", &mut build)?;
    named(folder, ".whl")
}

/// The distribution `windrow-causal-conv1d`, a wheel of Python alone.
fn causal_conv1d(steps: &mut Steps, environment: &Path, out: &Path) -> Result {
    let package = root().join("crates/windrow-python/causal-conv1d");
    steps.run("windrow-causal-conv1d", &mut pip_wheel(environment, out, &package))
}

fn pip_wheel(environment: &Path, out: &Path, package: &Path) -> Command {
    let mut command = Command::new(environment.join("bin/python"));
    command
        .args(["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"])
        .arg("--wheel-dir")
        .arg(out)
        .arg(package);
    command
}

/// The `windrow` command with its licences, packed in `out`.
fn command(steps: &mut Steps, environment: &Path, out: &Path) -> Result<PathBuf> {
    let here = Here::new()?;
    let triple = format!("{TARGET}.{GLIBC}");
    let mut build = cargo(&["zigbuild", "--release", "--locked", "--package", "windrow-cli"]);
    build
        .args(["--bin", "windrow", "--target", &triple])
        .env("CARGO_ENCODED_RUSTFLAGS", here.remapped())
        .env("CARGO_PROFILE_RELEASE_STRIP", "true")
        .env("PATH", path(environment)?);
    steps.run("command", &mut build)?;
    let binary = target().join(TARGET).join("release/windrow");
    here.check(&binary)?;
    let needed = newest_glibc(&fs::read(&binary)?);
    if needed > version(GLIBC) {
        return Err(format!("the command needs glibc {needed:?}, not {GLIBC}").into());
    }
    let name = format!("windrow-{}-{TARGET}", env!("CARGO_PKG_VERSION"));
    let folder = out.join(&name);
    fs::create_dir(&folder)?;
    fs::copy(&binary, folder.join("windrow"))?;
    for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        fs::copy(root().join("crates/windrow-cli").join(file), folder.join(file))?;
    }
    let packed = out.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--owner=0", "--group=0", "-czf"]).arg(&packed).arg("-C").arg(out).arg(&name);
    steps.run("tar", &mut tar)?;
    fs::remove_dir_all(folder)?;
    Ok(packed)
}

/// The newest `GLIBC_X.Y` among a program's symbol versions.
fn newest_glibc(program: &[u8]) -> (u32, u32) {
    const NAME: &[u8] = b"\0GLIBC_";
    let found = program.windows(NAME.len()).enumerate().filter(|(_, bytes)| *bytes == NAME);
    let versions = found.filter_map(|(at, _)| {
        let rest = &program[at + NAME.len()..];
        let end = rest.iter().position(|byte| *byte == 0)?;
        Some(version(std::str::from_utf8(&rest[..end]).ok()?))
    });
    versions.max().unwrap_or_default()
}

/// `2.17` as numbers that can be compared.
fn version(text: &str) -> (u32, u32) {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// Installs a wheel into a new environment, and calls it.
fn check_wheel(steps: &mut Steps, wheel: &Path, folder: &Path, version: &str) -> Result {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    steps.run("new environment", Command::new(python).args(["-m", "venv"]).arg(folder))?;
    let clean = || {
        let mut python = Command::new(folder.join("bin/python"));
        python.current_dir(folder).env_remove("PYTHONPATH");
        python
    };
    let mut install = clean();
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "numpy"]);
    steps.run("install", install.arg(wheel))?;
    steps.run("installed wheel", clean().args(["-c", WHEEL_CHECK, version]))?;
    steps.run("installed command", Command::new(folder.join("bin/windrow")).arg("--version"))
}

/// Unpacks the command into a new folder, and runs it there without any variable of the environment.
fn check_command(steps: &mut Steps, packed: &Path, folder: &Path, version: &str) -> Result {
    fs::create_dir(folder)?;
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(packed).args(["--strip-components=1", "-C"]).arg(folder);
    steps.run("unpack", &mut tar)?;
    let clean = || {
        let mut command = Command::new(folder.join("windrow"));
        command.env_clear().current_dir(folder);
        command
    };
    let says = clean().arg("--version").output()?.stdout;
    if says.trim_ascii() != format!("windrow {version}").as_bytes() {
        return Err(format!("the command says {}", String::from_utf8_lossy(&says)).into());
    }
    steps.run("unpacked command", clean().args(["verify", "gelu", "--quick"]))
}

/// Writes SHA256SUMS, and prints the size of each file.
fn checksums(steps: &mut Steps, out: &Path) -> Result {
    let mut files = Vec::new();
    for file in fs::read_dir(out)? {
        let path = file?.path();
        let name = path.file_name().ok_or("a file without a name")?.to_owned();
        files.push((name, fs::metadata(&path)?.len()));
    }
    files.sort();
    let names = files.iter().map(|(name, _)| name);
    let sums = Command::new("sha256sum").args(names).current_dir(out).output()?;
    fs::write(out.join("SHA256SUMS"), sums.stdout)?;
    let mut check = Command::new("sha256sum");
    steps.run("SHA256SUMS", check.args(["--check", "--quiet", "SHA256SUMS"]).current_dir(out))?;
    for (name, bytes) in files {
        println!("{:>7.2} MB  {}", bytes as f64 / 1e6, out.join(name).display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_glibc_is_found() {
        let program = b"\x7fELF\0GLIBC_2.2.5\0GLIBC_2.17\0memcpy\0GLIBC_2.9\0GLIBC_PRIVATE\0";
        assert_eq!(newest_glibc(program), (2, 17));
        assert!(newest_glibc(b"\0GLIBC_2.34\0") > version(GLIBC));
        assert_eq!(newest_glibc(b"none"), (0, 0));
    }
}
