//! `cargo xtask kernels`: the Python package as a folder for the Hugging Face Hub's kernels.

use crate::python::environment;
use crate::record::commit;
use crate::steps::{Result, Steps, root, target};
use crate::wheel;
use std::process::Command;

/// The features with which the Hub's kernels must be built: for Python's stable ABI since 3.9.
const PYTHON: [&str; 2] = ["--features", "pyo3/abi3-py39"];

/// The checks by the Hub's own checker of the extension of each variant, and whether `kernels` reads its metadata and
/// finds the files of the digest.
const CHECKS: &str = r#"
import sys
from pathlib import Path
from kernel_abi_check import ObjectFile
from kernels._rust import Digest, Metadata

folder, wrong = Path(sys.argv[1]), []
variants = sorted((folder / "build").iterdir())
for variant in variants:
    for file in variant.rglob("*.so"):
        extension = ObjectFile(file)
        wrong += extension.check_python_abi("3.9") + extension.check_manylinux("manylinux_2_28")
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    size = sum(file.stat().st_size for file in variant.rglob("*") if file.is_file())
    print(f"{size / 1e6:6.2f} MB  {variant}")
sys.exit("\n".join(map(str, wrong)) or not variants)
"#;

/// Builds the extension as for a wheel, makes the folder `target/kernels/windrow` and checks it.
pub(crate) fn build() -> Result {
    let mut steps = Steps::default();
    let requirements =
        ["dist", "kernels"].map(|n| root().join(format!("crates/xtask/requirements-{n}.txt")));
    let environment = environment(&mut steps, "kernels", &requirements)?;
    let python = || Command::new(environment.join("bin/python"));
    let folder = target().join("kernels");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    let wheel = wheel::wheel(&mut steps, &environment, &folder.join("wheel"), &PYTHON)?;
    let package = folder.join("package");
    steps.run("unpack", python().args(["-m", "zipfile", "-e"]).arg(wheel).arg(&package))?;
    let (hash, is_clean) = commit()?;
    let revision = format!("{}{}", &hash[..7], if is_clean { "" } else { "_dirty" });
    let out = folder.join("windrow");
    let script = root().join("crates/windrow-python/hub-kernels/folder.py");
    steps
        .run("folder", python().arg(script).arg(package.join("windrow")).arg(&out).arg(revision))?;
    steps.run("checks", python().args(["-c", CHECKS]).arg(out))
}
