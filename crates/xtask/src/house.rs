//! The plan of the sources: the order of layers, no circles, files that can be read at once, and how many files a change
//! of each kind touches (docs/ARCHITECTURE.md).

use crate::imports::{Imports, Module};
use crate::steps::{Result, Steps, cargo, root, target};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Modules of the library, the lowest layer first; the root is `""`. A module imports its own layer and lower ones.
const LAYERS: [&[&str]; 5] = [
    &[
        "activation",
        "buffer",
        "device",
        "dtype",
        "error",
        "folder",
        "forms",
        "try_once_lock",
        "layout",
        "lists",
        "tensor",
    ],
    &["cpu", "cuda", "gpu", "hip"],
    &["plan", "tuning", "verification"],
    &["causal_conv1d", "conv2d", "gelu"],
    &["", "internal", "parallel", "verify"],
];

/// Lists of members of a higher layer (docs/ARCHITECTURE.md, Lists): who reads one, and what it names.
const LISTS: [(&str, &[&str]); 2] = [("gpu/device", &["BACKENDS"]), ("tuning", &["TUNABLE"])];

/// The operators. Their files have no circle of imports, and import nothing of another operator.
const OPERATORS: [&str; 3] = ["causal_conv1d", "conv2d", "gelu"];

/// The most lines of a file of Rust.
const LINES: usize = 500;

/// The page with a table of capabilities and their tests, and the rows that it has to have.
const RELIABILITY: &str = "docs/reliability.md";
const ROWS: [(char, usize); 3] = [('A', 8), ('B', 10), ('C', 8)];

/// The page with the lists of files that a change touches.
const ARCHITECTURE: &str = "docs/ARCHITECTURE.md";

/// Folders that its paths are relative to.
const BASES: [&str; 3] = ["", "crates/windrow/src/", "crates/windrow-python/python/windrow/"];

/// A change that is kept as a patch, so that the list of files for changes like it stays true.
struct Sample {
    patch: &'static str,
    /// The heading of its list.
    heading: &'static str,
    /// The most files beside new ones, and the most of Python.
    most: usize,
    most_python: usize,
}

const SAMPLES: [Sample; 3] = [
    Sample { patch: "activation.patch", heading: "### An activation", most: 8, most_python: 1 },
    Sample { patch: "element_type.patch", heading: "### An element type", most: 8, most_python: 0 },
    Sample {
        patch: "method.patch",
        heading: "### A method (one way to compute a convolution)",
        most: 3,
        most_python: 0,
    },
];

/// Crates that the samples are compiled with.
const CRATES: [&str; 4] = ["windrow", "windrow-cli", "windrow-candle", "windrow-python"];

/// Fails with every import that the plan forbids, and every file that is too long.
pub(crate) fn check() -> Result {
    let imports = Imports::of(&root().join("crates/windrow/src"))?;
    let mut faults = upwards(&imports);
    faults.extend(across(&imports));
    faults.extend(circles(&imports));
    long_files(&root().join("crates"), &mut faults)?;
    faults.extend(untested(&fs::read_to_string(root().join(RELIABILITY))?));
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n").into()) }
}

/// Rows of the table of capabilities that are missing, or name a test that does not exist.
fn untested(page: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for row in
        ROWS.iter().flat_map(|&(letter, last)| (1..=last).map(move |n| format!("{letter}{n}")))
    {
        let start = format!("| {row} |");
        let Some(line) = page.lines().find(|line| line.starts_with(&start)) else {
            faults.push(format!("{RELIABILITY}: no row {row}"));
            continue;
        };
        let tests: Vec<_> = line.split('`').skip(1).step_by(2).collect();
        if tests.is_empty() {
            faults.push(format!("{RELIABILITY}: no test of {row}"));
        }
        let missing = tests.into_iter().filter(|test| !is_test(test));
        faults.extend(missing.map(|test| format!("{RELIABILITY}: {row}: there is no {test}")));
    }
    faults
}

/// True for `FILE: NAME` where the file, from the library's folder on, has a test of that name.
fn is_test(test: &str) -> bool {
    let Some((file, name)) = test.split_once(": ") else { return false };
    let text = fs::read_to_string(root().join("crates/windrow").join(file)).unwrap_or_default();
    ["fn", "def"].iter().any(|word| text.contains(&format!("{word} {name}(")))
}

/// Imports from a lower layer to a higher one.
fn upwards(imports: &Imports) -> Vec<String> {
    let layer = |module: &Module| {
        let name = module.first().map_or("", |name| name);
        LAYERS.iter().position(|layer| layer.contains(&name)).ok_or_else(|| name.to_owned())
    };
    let mut faults = BTreeSet::new();
    for ((from, to), names) in &imports.0 {
        let at = from.join("/");
        let listed = |name: &String| {
            LISTS.iter().any(|(reader, members)| *reader == at && members.contains(&&**name))
        };
        match (layer(from), layer(to)) {
            (Err(name), _) | (_, Err(name)) => {
                faults.insert(format!(
                    "the module {name} is in no layer of crates/xtask/src/house.rs"
                ));
            }
            (Ok(low), Ok(high)) if low < high && !names.iter().all(listed) => {
                let names: Vec<_> = names.iter().map(|name| &**name).collect();
                let (to, names) = (to.join("/"), names.join(", "));
                faults.insert(format!("{at} imports {names} of {to}, which is of a higher layer"));
            }
            _ => {}
        }
    }
    faults.into_iter().collect()
}

/// Imports of one operator by another. What two operators need belongs to a lower layer.
fn across(imports: &Imports) -> Vec<String> {
    let operator =
        |module: &Module| module.first().filter(|name| OPERATORS.contains(&&***name)).cloned();
    let pairs = imports
        .0
        .keys()
        .filter(|(from, to)| operator(from).zip(operator(to)).is_some_and(|(from, to)| from != to));
    pairs
        .map(|(from, to)| {
            format!("{} imports {}, of another operator", from.join("/"), to.join("/"))
        })
        .collect()
}

/// Circles between files of a folder.
fn circles(imports: &Imports) -> Vec<String> {
    let all = imports.circles().into_iter();
    all.filter(|(folder, _)| folder.first().is_some_and(|name| OPERATORS.contains(&&**name)))
        .map(|(folder, ring)| {
            format!("{}: a circle of imports: {}", folder.join("/"), ring.join(", "))
        })
        .collect()
}

/// Files of Rust in a folder that have too many lines.
fn long_files(folder: &Path, faults: &mut Vec<String>) -> Result {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            long_files(&path, faults)?;
        } else if path.extension().is_some_and(|end| end == "rs") {
            let lines = fs::read_to_string(&path)?.lines().count();
            let path = path.strip_prefix(root()).unwrap_or(&path);
            if lines > LINES {
                faults.push(format!("{}: {lines} lines; at most {LINES}", path.display()));
            }
        }
    }
    Ok(())
}

/// Applies each sample to a copy of the sources and compiles it, and compares its files with those that the page names.
pub(crate) fn samples(steps: &mut Steps) -> Result {
    let page = fs::read_to_string(root().join(ARCHITECTURE))?;
    let copy = target().join("samples");
    copy_sources(&copy)?;
    for sample in &SAMPLES {
        let path = root().join("crates/xtask/samples").join(sample.patch);
        let faults = faults(sample, &fs::read_to_string(&path)?, &page);
        if !faults.is_empty() {
            return Err(format!("{}: {}", sample.patch, faults.join("; ")).into());
        }
        let apply = |options: &[&str]| {
            let mut git = Command::new("git");
            git.arg("apply").args(options).arg(&path).current_dir(&copy);
            // The copy is no part of the repository around it.
            git.env("GIT_CEILING_DIRECTORIES", target());
            git
        };
        steps.run(sample.patch, &mut apply(&[]))?;
        let packages = CRATES.map(|name| ["--package", name]).concat();
        let mut check = cargo(&[&["check", "--quiet"], &packages[..]].concat());
        check.current_dir(&copy).env("CARGO_TARGET_DIR", target());
        steps.run("sample, checked", &mut check)?;
        steps.run("sample, taken back", &mut apply(&["--reverse"]))?;
    }
    Ok(fs::remove_dir_all(copy)?)
}

/// Copies what cargo needs to a folder.
fn copy_sources(to: &Path) -> Result {
    if to.exists() {
        fs::remove_dir_all(to)?;
    }
    let list = ["ls-files", "-co", "--exclude-standard", "--", "Cargo.toml", "Cargo.lock"];
    let folders = ["crates", "docs", "examples", "README.md"];
    let list = Command::new("git").args(list).args(folders).current_dir(root()).output()?;
    for name in String::from_utf8(list.stdout)?.lines().filter(|name| root().join(name).is_file()) {
        let path = to.join(name);
        fs::create_dir_all(path.parent().unwrap_or(to))?;
        fs::copy(root().join(name), path)?;
    }
    Ok(())
}

/// The faults of a sample: more files than allowed, or files that the page does not name.
fn faults(sample: &Sample, patch: &str, page: &str) -> Vec<String> {
    let listed = listed(page, sample.heading);
    let touched = touched(patch);
    let mut faults = Vec::new();
    if listed.is_empty() {
        faults.push(format!("{ARCHITECTURE} has no list {:?}", sample.heading));
    }
    if touched.len() > sample.most {
        faults.push(format!("{} files, at most {}", touched.len(), sample.most));
    }
    let python = touched.iter().filter(|path| path.ends_with(".py") || path.ends_with(".pyi"));
    let python = python.count();
    if python > sample.most_python {
        faults.push(format!("{python} files of Python, at most {}", sample.most_python));
    }
    let named = |path: &&str| {
        let is = |name: &String| {
            BASES.iter().any(|base| path.strip_prefix(base).is_some_and(|rest| rest == name))
        };
        listed.iter().any(is)
    };
    let others = touched.iter().filter(|path| !named(path));
    faults.extend(others.map(|path| format!("{ARCHITECTURE} does not name {path}")));
    faults
}

/// Paths in inline code of the list below a heading.
fn listed(page: &str, heading: &str) -> Vec<String> {
    let below = page.lines().skip_while(|line| *line != heading).skip(1);
    let list: Vec<_> = below.take_while(|line| !line.starts_with('#')).collect();
    let spans = list.iter().flat_map(|line| line.split('`').skip(1).step_by(2));
    spans.filter(|span| span.contains('.')).map(str::to_owned).collect()
}

/// Files that a patch changes; new ones do not count.
fn touched(patch: &str) -> Vec<&str> {
    let mut before = "";
    let mut touched = Vec::new();
    for line in patch.lines() {
        if let Some(path) = line.strip_prefix("+++ b/")
            && before != "--- /dev/null"
        {
            touched.push(path);
        }
        before = line;
    }
    touched
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_compared_with_its_list() {
        let page = "### A thing\n\n1. `dtype.rs`: one. `torch/_x.py`.\n\n### Another\n\n`y.rs`\n";
        let sample = Sample { patch: "", heading: "### A thing", most: 2, most_python: 0 };
        let of = |files: &[&str]| {
            let patch: String =
                files.iter().map(|path| format!("--- a/{path}\n+++ b/{path}\n@@\n")).collect();
            faults(&sample, &patch, page)
        };
        let library = "crates/windrow/src/dtype.rs";
        assert!(of(&[library]).is_empty());
        assert_eq!(of(&["crates/windrow/src/y.rs"]).len(), 1, "of another list");
        let python = "crates/windrow-python/python/windrow/torch/_x.py";
        assert_eq!(of(&[library, python]), ["1 files of Python, at most 0"]);
        assert_eq!(of(&[library, library, library])[0], "3 files, at most 2");
        let new = "--- /dev/null\n+++ b/crates/windrow/src/new.rs\n";
        assert!(touched(new).is_empty());
    }

    #[test]
    fn rows_without_a_test_are_found() {
        let row = |name: &str| {
            let test = format!("| A1 | x | `src/activation/names.rs: {name}` |\n");
            untested(&test).iter().filter(|fault| fault.contains("A1")).count()
        };
        assert_eq!((row("names_parse_back"), row("names_parse_forth")), (0, 1));
        assert_eq!(untested("").len(), 26);
    }

    #[test]
    fn layers_and_circles_are_found() {
        let module = |path: &str| path.split('/').map(str::to_owned).collect::<Vec<_>>();
        let imports = |from: &str, to: &str, name: &str| {
            let names = BTreeSet::from([name.to_owned()]);
            Imports([((module(from), module(to)), names)].into())
        };
        assert!(upwards(&imports("conv2d/spec", "tensor", "Tensor")).is_empty());
        assert_eq!(upwards(&imports("tensor", "conv2d/spec", "Conv2dSpec")).len(), 1);
        assert!(upwards(&imports("tuning", "", "TUNABLE")).is_empty(), "a list");
        assert_eq!(upwards(&imports("tuning", "conv2d/plan", "Conv2dPlan")).len(), 1);
        assert_eq!(upwards(&imports("attention", "tensor", "Tensor")).len(), 1, "in no layer");
        let mut both = imports("conv2d/spec", "conv2d/problem", "Problem");
        both.0.extend(imports("conv2d/problem", "conv2d/spec", "Spec").0);
        assert_eq!(circles(&both).len(), 1);
        assert!(across(&both).is_empty());
        assert!(across(&imports("conv2d/spec", "activation", "Activation")).is_empty());
        assert_eq!(across(&imports("conv2d/spec", "gelu/spec", "GeluSpec")).len(), 1);
    }
}
