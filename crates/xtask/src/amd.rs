//! `cargo xtask amd`: the kernels for AMD's chips, compiled by clang and executed by the emulator.

use crate::date::today;
use crate::record::{RECORDS, commit, write};
use crate::steps::{Result, Steps, cargo, root, target};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::iter;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

/// Compiled for in full, and executed.
const CHIP: &str = "gfx942";
/// Compiled for by a sample, about one kernel in `SAMPLE`.
const OTHERS: [&str; 3] = ["gfx90a", "gfx1100", "gfx1201"];
const SAMPLE: u64 = 40;
/// What the names of the tests that compile kernels have.
const NAMES: [&str; 2] = ["compile", "spill"];
/// Random cases that call most functions of the runtime.
const FEW_CASES: [&str; 5] = ["--random", "--seed", "1", "--cases", "3"];
const TOOLS: [&str; 3] = ["clang-19", "ld.lld-19", "llvm-objdump-19"];
const INSTALL: &str = "apt-get install clang-19 lld-19 llvm-19";

/// A tool that is needed and not there.
fn missing() -> Option<&'static str> {
    let runs = |tool: &&str| {
        let mut command = Command::new(tool);
        command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    TOOLS.into_iter().find(|tool| !runs(tool))
}

/// What is said where a tool is missing.
fn how_to_install(tool: &str) -> String {
    format!("{tool} was not found: `{INSTALL}`")
}

/// With `all` every kernel is compiled for every chip, and the result is written into the records.
pub(crate) fn run(all: bool) -> Result {
    match missing() {
        Some(tool) => Err(how_to_install(tool).into()),
        None => check(&mut Steps::default(), all),
    }
}

/// A step of the tests, left out without a word of failure where a tool is missing.
pub(crate) fn test(steps: &mut Steps) -> Result {
    match missing() {
        Some(tool) => {
            eprintln!("\nAMD's kernels are NOT compiled and executed: {}", how_to_install(tool));
            Ok(())
        }
        None => check(steps, false),
    }
}

fn check(steps: &mut Steps, all: bool) -> Result {
    let emulator = Emulator::build(steps)?;
    let compiled = compile(steps, &emulator, all)?;
    let report = verify(steps, &emulator)?;
    nudged(steps, &emulator)?;
    let (survived, broken) = failing_calls(&emulator)?;

    let count = |rows: &Value, key: &str| {
        rows.as_array().into_iter().flatten().filter_map(|row| row[key].as_u64()).sum::<u64>()
    };
    let failures = report["failures"].as_array().map_or(0, Vec::len) as u64;
    let missed = kernels(&report, "missed").chain(kernels(&report, "not listed"));
    let missed: Vec<_> = missed.collect();
    let launched = kernels(&report, "launched").count() as u64;
    for (chip, kernels) in &compiled {
        println!("{chip}: {} kernels compiled", kernels.len());
    }
    println!(
        "{CHIP}: {launched} kernels executed, {} elements compared, {} outside of the tolerance",
        count(&report["rows"], "elements"),
        count(&report["rows"], "error_count"),
    );
    for failure in report["failures"].as_array().into_iter().flatten() {
        println!("failed: {}\n  {}", failure["case"], failure["detail"]);
    }
    missed.iter().for_each(|kernel| println!("never executed: {kernel}"));
    println!("{survived} functions of the runtime failed in turn, and were reported");
    broken.iter().for_each(|what| println!("failed: {what}"));
    let failed = failures + (missed.len() + broken.len()) as u64;
    if failed == 0 {
        record(&emulator, &compiled, &report, all)?;
    }
    let variants = compiled.values().map(Vec::len).sum::<usize>() as u64;
    let passed = variants + count(&report["rows"], "cases") - failures + launched + survived;
    println!("{passed} passed, {failed} failed");
    if failed > 0 { Err("the emulator found errors".into()) } else { Ok(()) }
}

fn kernels<'a>(report: &'a Value, status: &'a str) -> impl Iterator<Item = &'a str> {
    let kernels = report["kernels"].as_array().into_iter().flatten();
    kernels.filter(move |k| k["status"] == status).filter_map(|k| k["kernel"].as_str())
}

/// Where the emulator lies under the names of what it stands for.
struct Emulator {
    folder: PathBuf,
}

impl Emulator {
    fn build(steps: &mut Steps) -> Result<Self> {
        // One of the tests is named so that features are those that tests are built with: what `cargo xtask test`
        // has built serves here.
        let build = ["build", "--quiet", "--workspace", "--lib", "--bins", "--test", "kernels"];
        steps.run("emulator", &mut cargo(&build))?;
        let folder = target().join("amd");
        fs::create_dir_all(&folder)?;
        let library = target().join("debug/libwindrow_amd_emulator.so");
        for name in ["libamdhip64.so", "libhiprtc.so"] {
            fs::copy(&library, folder.join(name))
                .map_err(|e| format!("{}: {e}", library.display()))?;
        }
        Ok(Emulator { folder })
    }

    /// Lets a command find the emulator, and keep what it compiles here.
    fn stand_in<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("WINDROW_HIP_PATH", &self.folder)
            .env("WINDROW_CACHE_DIR", self.folder.join("cache"))
            .env("WINDROW_EMULATOR_CACHE", self.folder.join("objects"))
            .env("WINDROW_EMULATOR_CHIP", CHIP)
    }
}

/// Files and entry points of the kernels that were compiled for each chip.
fn compile(
    steps: &mut Steps,
    emulator: &Emulator,
    all: bool,
) -> Result<BTreeMap<String, Vec<String>>> {
    let list = emulator.folder.join("compiled.txt");
    if list.exists() {
        fs::remove_file(&list)?;
    }
    let day = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400;
    let share = |chip: &str| if all { chip.to_owned() } else { format!("{chip}/{SAMPLE}@{day}") };
    let chips: Vec<_> = iter::once(CHIP.to_owned()).chain(OTHERS.map(share)).collect();
    if !all {
        eprintln!(
            "\none kernel in {SAMPLE} for each of {}, chosen by seed {day}",
            OTHERS.join(", ")
        );
    }
    let tests = [&["test", "--quiet", "--workspace", "--lib", "--"][..], &NAMES].concat();
    let mut tests = cargo(&tests);
    emulator.stand_in(&mut tests).env("WINDROW_COMPILED", &list);
    steps.run("compile", tests.env("WINDROW_COMPILE_FOR", chips.join(",")))?;
    let mut compiled = BTreeMap::<_, Vec<_>>::new();
    for line in fs::read_to_string(&list)?.lines() {
        if let Some((chip, kernel)) = line.split_once(' ') {
            compiled.entry(chip.to_owned()).or_default().push(kernel.to_owned());
        }
    }
    Ok(compiled)
}

/// What `windrow verify` says of the emulator.
fn verify(steps: &mut Steps, emulator: &Emulator) -> Result<Value> {
    let file = emulator.folder.join("verify.json");
    let mut verify = Command::new(target().join("debug/windrow"));
    verify.current_dir(root()).args(["verify", "--json", "--quiet", "--kernels"]);
    verify.args(["--device", "hip:0"]);
    emulator.stand_in(&mut verify).stdout(fs::File::create(&file)?);
    // Failures are in the report.
    let ended = steps.run("verify", &mut verify);
    let report = serde_json::from_str(&fs::read_to_string(&file)?);
    report.map_err(|e| ended.err().unwrap_or_else(|| e.into()))
}

/// GELU's cases with reciprocals and exponentials that are wrong by a unit in the last place, as a chip's may be.
fn nudged(steps: &mut Steps, emulator: &Emulator) -> Result {
    let mut verify = Command::new(target().join("debug/windrow"));
    verify.current_dir(root()).args(["verify", "gelu", "--kernels"]);
    verify.args(["--device", "hip:0"]).env("WINDROW_EMULATOR_NUDGE", "1");
    steps.run("nudged", emulator.stand_in(&mut verify))
}

/// Lets each function of the runtime fail in a run of the command. It has to end with an error that names the function;
/// those that it does not call are not counted.
fn failing_calls(emulator: &Emulator) -> Result<(u64, Vec<String>)> {
    let source = include_str!("../../windrow-amd-emulator/src/runtime.rs");
    let names =
        source.lines().filter_map(|line| line.strip_prefix("    fn hip")?.split('(').next());
    let (mut survived, mut broken) = (0, Vec::new());
    for name in names.map(|name| format!("hip{name}")) {
        let mut verify = Command::new(target().join("debug/windrow"));
        verify.current_dir(root()).args(["verify", "--device", "hip:0"]).args(FEW_CASES);
        verify.env("WINDROW_EMULATOR_FAIL", format!("{name}=1"));
        let output = emulator.stand_in(&mut verify).output()?;
        let words = [output.stdout, output.stderr].concat();
        let named = String::from_utf8_lossy(&words).contains(&format!("{name} was told to fail"));
        match (output.status.code(), named) {
            (Some(0), false) => {}
            (Some(1..=100), true) => survived += 1,
            _ => broken.push(format!("a run in which {name} fails: {}", output.status)),
        }
    }
    Ok((survived, broken))
}

/// Writes what was compiled and executed: into the records if all was compiled, else into the emulator's folder.
fn record(
    emulator: &Emulator,
    compiled: &BTreeMap<String, Vec<String>>,
    report: &Value,
    all: bool,
) -> Result {
    let (commit, clean) = commit()?;
    let name = format!("{}-amd-emulator", today());
    let folder = if all { root().join(RECORDS).join(name) } else { emulator.folder.join(name) };
    fs::create_dir_all(&folder)?;
    let compiled: BTreeMap<_, _> = compiled.iter().map(|(chip, k)| (chip, k.len())).collect();
    let result = json!({
        "commit": commit, "clean": clean, "all": all, "chip": CHIP, "compiled": compiled,
        "rows": report["rows"], "kernels": report["kernels"],
    });
    write(&folder.join("verify.json"), &result)
}
