//! The Python package: build the wheel, run its tests.
//!
//! Tests run in virtual environments under a cache folder, one for each set of requirements, made
//! when first needed. The wheel goes into a folder beside them, so that an environment is never
//! changed once it is made and can also be one that exists already (`WINDROW_TORCH_ENV`).

use crate::examples;
use crate::steps::{COMMANDS, Result, Steps, WHOLE, cargo, root, target};
use std::collections::hash_map::DefaultHasher;
use std::ffi::OsStr;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

/// Names cargo itself where maturin is told that this program is it.
pub(crate) const REAL_CARGO: &str = "WINDROW_XTASK_CARGO";

/// Names an environment that has what requirements-test.txt and requirements-torch.txt ask for.
const TORCH_ENV: &str = "WINDROW_TORCH_ENV";

/// Files of tests on PyTorch that take the longest: one process, which begins first.
const LONGEST: [&str; 3] = ["test_against_pytorch.py", "test_backend.py", "test_backend_check.py"];
/// Processes for the other files. Each imports PyTorch once, and two run at a time: with few of them a core waits for the
/// last one.
const PROCESSES: usize = 6;

/// Builds the wheel and runs the tests and the pages' examples on NumPy, and with `torch` those on PyTorch. `emulator` is
/// the folder of that of AMD's chips.
pub(crate) fn test(steps: &mut Steps, torch: bool, emulator: Option<&Path>) -> Result {
    let package = root().join("crates/windrow-python");
    let requirements = [package.join("requirements-test.txt")];
    let numpy = environment(steps, "numpy", &requirements)?;
    let site = build(steps, &package, &numpy)?;
    let pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"];
    let mut tests = python(&numpy, &site);
    tests.args(pytest).args(["tests", "--ignore=tests/pytorch"]).current_dir(&package);
    if let Some(folder) = emulator {
        tests.env("WINDROW_TEST_HIP", folder);
    }
    steps.run("python tests", &mut tests)?;
    examples::shell(&numpy)?;
    examples::python(false, || python(&numpy, &site))?;
    if !torch {
        return Ok(());
    }
    let environment = match env::var_os(TORCH_ENV) {
        Some(existing) => PathBuf::from(existing),
        None => {
            let [numpy] = requirements;
            environment(steps, "torch", &[numpy, package.join("requirements-torch.txt")])?
        }
    };
    let processes = torch_tests(&package.join("tests/pytorch"))?.into_iter().map(|files| {
        let mut tests = python(&environment, &site);
        tests.args(pytest).args(files).current_dir(&package);
        tests
    });
    steps.run_in_turn("torch tests", processes.collect())?;
    examples::python(true, || python(&environment, &site))?;
    for example in ["mamba_block", "train_digits", "denoise_video"] {
        let file = root().join("examples").join(example).with_extension("py");
        let mut run = python(&environment, &site);
        steps.run(example, run.arg(file).current_dir(root().join("target/xtask")))?;
    }
    Ok(())
}

/// The files of tests on PyTorch of each process.
fn torch_tests(folder: &Path) -> Result<Vec<Vec<PathBuf>>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().into_string().map_err(|name| format!("{name:?}"))?;
        if name.starts_with("test_") && name.ends_with(".py") && !LONGEST.contains(&&*name) {
            files.push(folder.join(name));
        }
    }
    files.sort();
    // Neighbours in the list test the same part, and take about as long: each goes to another process.
    let others = (0..PROCESSES).map(|i| files.iter().skip(i).step_by(PROCESSES).cloned().collect());
    Ok(std::iter::once(LONGEST.map(|name| folder.join(name)).into()).chain(others).collect())
}

/// Builds the wheel and runs the tests on a version of PyTorch. Packages whose newest versions need a newer PyTorch are
/// left out, and so are the tests that ask for them.
pub(crate) fn test_on(torch: &str) -> Result {
    let mut steps = Steps::default();
    let package = root().join("crates/windrow-python");
    let packages = [&format!("torch=={torch}"), "torchvision", "einops", "scikit-learn"];
    let requirements = [package.join("requirements-test.txt")];
    let environment =
        environment_with(&mut steps, &format!("torch-{torch}"), &requirements, &packages)?;
    let site = build(&mut steps, &package, &environment)?;
    let mut tests = python(&environment, &site);
    tests.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/pytorch"]);
    steps.run("torch tests", tests.current_dir(&package))
}

/// Builds the wheel with the environment's maturin and unpacks it into a folder for `PYTHONPATH`. The extension is that of
/// the whole workspace: alone it would compile all of the library again, for what other packages ask of common
/// dependencies.
fn build(steps: &mut Steps, package: &Path, environment: &Path) -> Result<PathBuf> {
    let folder = root().join("target/xtask");
    let (wheels, site) = (folder.join("wheels"), folder.join("site"));
    for old in [&wheels, &site] {
        if old.exists() {
            fs::remove_dir_all(old)?;
        }
    }
    let mut maturin = Command::new(environment.join("bin/maturin"));
    maturin
        .args(["build", "--quiet", "--locked", "--profile", "dev", "--interpreter"])
        .arg(environment.join("bin/python"))
        .arg("--out")
        .arg(&wheels)
        .arg("--manifest-path")
        .arg(package.join("Cargo.toml"))
        .env(REAL_CARGO, cargo(&[]).get_program())
        // By its path: the tests have built this program again, so the one that runs may be no file any more.
        .env("CARGO", target().join("debug").join(format!("xtask{}", env::consts::EXE_SUFFIX)))
        .env(WHOLE.0, WHOLE.1);
    steps.run("wheel", &mut maturin)?;
    let wheel = fs::read_dir(&wheels)?.next().ok_or("maturin built no wheel")??.path();
    let mut install = Command::new(environment.join("bin/python"));
    install
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
        .args(["--no-deps", "--no-index", "--target"])
        .arg(&site)
        .arg(wheel);
    steps.run("install", &mut install)?;
    Ok(site)
}

/// The cargo that maturin calls, except that the extension is built with the whole workspace.
pub(crate) fn as_cargo(cargo: &OsStr, args: &[&str]) -> ExitCode {
    let mut command = Command::new(cargo);
    match args {
        ["rustc", ..] => command.args(COMMANDS).args([
            "--lib",
            "--locked",
            "--message-format",
            "json-render-diagnostics",
        ]),
        _ => command.args(args),
    };
    command.env("CARGO", cargo).env_remove(REAL_CARGO);
    match command.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {}: {error}", cargo.display());
            ExitCode::FAILURE
        }
    }
}

/// The environment for these requirements; made if there is none yet.
pub(crate) fn environment(
    steps: &mut Steps,
    name: &str,
    requirements: &[PathBuf],
) -> Result<PathBuf> {
    environment_with(steps, name, requirements, &[])
}

/// The same with packages beside the requirements.
fn environment_with(
    steps: &mut Steps,
    name: &str,
    requirements: &[PathBuf],
    packages: &[&str],
) -> Result<PathBuf> {
    let interpreter = env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let version = Command::new(&interpreter).arg("--version").output()?.stdout;
    let mut hasher = DefaultHasher::new();
    version.hash(&mut hasher);
    for file in requirements {
        fs::read(file)?.hash(&mut hasher);
    }
    if !packages.is_empty() {
        packages.hash(&mut hasher);
    }
    let folder = cache()?.join(format!("python-{name}-{:016x}", hasher.finish()));
    let complete = folder.join("complete");
    if complete.exists() {
        return Ok(folder);
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    steps.run("venv", Command::new(interpreter).args(["-m", "venv"]).arg(&folder))?;
    let mut install = Command::new(folder.join("bin/python"));
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    for file in requirements {
        install.arg("-r").arg(file);
    }
    install.args(packages);
    steps.run("pip", &mut install)?;
    fs::write(complete, "")?;
    Ok(folder)
}

fn cache() -> Result<PathBuf> {
    let base = match (env::var_os("XDG_CACHE_HOME"), env::var_os("HOME")) {
        (Some(cache), _) => PathBuf::from(cache),
        (None, Some(home)) => PathBuf::from(home).join(".cache"),
        (None, None) => return Err("neither XDG_CACHE_HOME nor HOME is set".into()),
    };
    Ok(base.join("windrow-xtask"))
}

/// The environment's interpreter with the package from `site`.
fn python(environment: &Path, site: &Path) -> Command {
    let mut command = Command::new(environment.join("bin/python"));
    command.env("PYTHONPATH", site).env("PYTHONDONTWRITEBYTECODE", "1");
    // Nothing that was decided on this machine is found, or forgotten.
    command.env("WINDROW_DECISIONS", "off");
    // OpenMP's threads sleep where they wait. Two processes whose threads wait in loops take the cores from each other:
    // such tests took two to five times as long.
    command.env("OMP_WAIT_POLICY", "passive");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_of_tests_on_pytorch_is_run_once() {
        let folder = root().join("crates/windrow-python/tests/pytorch");
        let mut run: Vec<_> = torch_tests(&folder).unwrap().concat();
        run.sort();
        let all = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let is_test = |path: &PathBuf| {
            let text = fs::read_to_string(path).unwrap_or_default();
            text.lines().any(|line| line.starts_with("def test_") || line.starts_with("class Test"))
        };
        let mut tests: Vec<_> = all.filter(is_test).collect();
        tests.sort();
        assert_eq!(run, tests);
    }
}
