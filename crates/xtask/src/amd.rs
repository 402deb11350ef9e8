//! `cargo xtask amd`: the kernels for AMD's chips, compiled by clang and executed by the emulator.

use crate::date::today;
use crate::record::{RECORDS, commit, write};
use crate::steps::{ALL, COMMANDS, Result, Steps, cargo, root, target};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::iter;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

/// Compiled for in full, and executed.
const CHIP: &str = "gfx942";
/// Compiled for by a sample, about one kernel in `SAMPLE`.
const OTHERS: [&str; 3] = ["gfx90a", "gfx1100", "gfx1201"];
const SAMPLE: u64 = 40;
/// The one of the others that a sample of the cases is executed on.
const WAVE_32: &str = "gfx1100";
/// The parts of names of tests that compile kernels.
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

/// The message about a missing tool.
fn how_to_install(tool: &str) -> String {
    format!("{tool} was not found: `{INSTALL}`")
}

/// Runs the checks for AMD. With `all` every kernel is compiled for every chip, and the result is written into the
/// records.
pub(crate) fn run(all: bool) -> Result {
    match missing() {
        Some(tool) => Err(how_to_install(tool).into()),
        None => check(&mut Steps::default(), all).map(drop),
    }
}

/// A step of the tests, left out without a word of failure where a tool is missing. Gives the folder with the emulator.
pub(crate) fn test(steps: &mut Steps) -> Result<Option<PathBuf>> {
    match missing() {
        Some(tool) => {
            eprintln!("\nAMD's kernels are NOT compiled and executed: {}", how_to_install(tool));
            Ok(None)
        }
        None => check(steps, false).map(Some),
    }
}

fn check(steps: &mut Steps, all: bool) -> Result<PathBuf> {
    let emulator = Emulator::build(steps)?;
    let day = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400;
    let compiled = compile(steps, &emulator, all, day)?;
    let mut reports = BTreeMap::from([(CHIP, verify(steps, &emulator, CHIP, &[])?)]);
    if all {
        for chip in OTHERS {
            reports.insert(chip, verify(steps, &emulator, chip, &[])?);
        }
    } else {
        // Those of causal conv1d are large: some small ones, others each day.
        reports.insert(WAVE_32, verify(steps, &emulator, WAVE_32, &["gelu", "conv2d", "conv3d"])?);
        let seed = day.to_string();
        let few = ["verify", "causal-conv1d", "--random", "--seed", &seed, "--cases", "20"];
        eprintln!("\n20 cases of causal conv1d on {WAVE_32}, chosen by seed {day}");
        steps.run("sample", &mut windrow(&emulator, WAVE_32, &few))?;
    }
    nudged(steps, &emulator)?;
    for chip in reports.keys() {
        document(steps, &emulator, chip)?;
    }
    let (mut survived, mut broken) = failing_calls(&emulator);
    match products_by_rocblas(steps, &emulator)? {
        None => survived += 1,
        Some(what) => broken.push(what),
    }
    let (found, lost) = found_in_places(&emulator)?;
    broken.extend(lost);

    for (chip, kernels) in &compiled {
        println!("{chip}: {} kernels compiled", kernels.len());
    }
    let (mut passed, mut failed) = (survived + found, broken.len() as u64);
    for (chip, report) in &reports {
        let sum = |key: &str| {
            let rows = report["rows"].as_array().into_iter().flatten();
            rows.filter_map(|row| row[key].as_u64()).sum::<u64>()
        };
        let failures = report["failures"].as_array().map_or(&[][..], Vec::as_slice);
        let missed: Vec<_> =
            kernels(report, "missed").chain(kernels(report, "not listed")).collect();
        let launched = kernels(report, "launched").count() as u64;
        println!(
            "{chip}: {launched} kernels executed, {} elements compared, {} outside of the tolerance",
            sum("elements"),
            sum("error_count"),
        );
        for failure in failures {
            println!("failed: {}\n  {}", failure["case"], failure["detail"]);
        }
        missed.iter().for_each(|kernel| println!("never executed: {kernel}"));
        failed += (failures.len() + missed.len()) as u64;
        passed += sum("cases") - failures.len() as u64 + launched;
    }
    println!("{survived} functions of the libraries failed in turn, and were reported");
    println!("the libraries were found in {found} places");
    broken.iter().for_each(|what| println!("failed: {what}"));
    if failed == 0 {
        record(&emulator, &compiled, &reports, all)?;
    }
    passed += compiled.values().map(Vec::len).sum::<usize>() as u64;
    println!("{passed} passed, {failed} failed");
    if failed > 0 { Err("the emulator found errors".into()) } else { Ok(emulator.folder) }
}

fn kernels<'a>(report: &'a Value, status: &'a str) -> impl Iterator<Item = &'a str> {
    let kernels = report["kernels"].as_array().into_iter().flatten();
    kernels.filter(move |k| k["status"] == status).filter_map(|k| k["kernel"].as_str())
}

/// Where the emulator lies under the names of what it stands for.
struct Emulator {
    folder: PathBuf,
    /// The same with rocBLAS.
    with_rocblas: PathBuf,
}

impl Emulator {
    fn build(steps: &mut Steps) -> Result<Self> {
        steps.run("emulator", &mut cargo(&[&COMMANDS[..], &["--lib"]].concat()))?;
        let folder = target().join("amd");
        let with_rocblas = folder.join("rocblas");
        fs::create_dir_all(&with_rocblas)?;
        let library = target().join("debug/libwindrow_amd_emulator.so");
        let copied = |to: PathBuf| {
            fs::copy(&library, &to).map_err(|e| format!("{}: {e}", library.display()))?;
            Result::Ok(to)
        };
        for name in ["libamdhip64.so", "libhiprtc.so"] {
            copied(folder.join(name))?;
        }
        // One file is loaded once: all of its names share their memory.
        let runtime = copied(with_rocblas.join("libamdhip64.so"))?;
        for name in ["libhiprtc.so", "librocblas.so"] {
            let name = with_rocblas.join(name);
            if name.exists() {
                fs::remove_file(&name)?;
            }
            fs::hard_link(&runtime, name)?;
        }
        Ok(Emulator { folder, with_rocblas })
    }

    /// Lets a command find the emulator, and keep what it compiles here.
    fn stand_in<'a>(&self, chip: &str, command: &'a mut Command) -> &'a mut Command {
        command
            .env("WINDROW_HIP_PATH", &self.folder)
            .env("WINDROW_CACHE_DIR", self.folder.join("cache"))
            .env("WINDROW_EMULATOR_CACHE", self.folder.join("objects"))
            .env("WINDROW_EMULATOR_CHIP", chip)
    }
}

/// Files and entry points of the kernels that were compiled for each chip.
fn compile(
    steps: &mut Steps,
    emulator: &Emulator,
    all: bool,
    day: u64,
) -> Result<BTreeMap<String, Vec<String>>> {
    let list = emulator.folder.join("compiled.txt");
    if list.exists() {
        fs::remove_file(&list)?;
    }
    let share = |chip: &str| if all { chip.to_owned() } else { format!("{chip}/{SAMPLE}@{day}") };
    let chips: Vec<_> = iter::once(CHIP.to_owned()).chain(OTHERS.map(share)).collect();
    if !all {
        eprintln!(
            "\none kernel in {SAMPLE} for each of {}, chosen by seed {day}",
            OTHERS.join(", ")
        );
    }
    let tests = [&["test", "--quiet", "--lib"], &ALL[..], &["--"], &NAMES].concat();
    let mut tests = cargo(&tests);
    emulator.stand_in(CHIP, &mut tests).env("WINDROW_COMPILED", &list);
    steps.run("compile", tests.env("WINDROW_COMPILE_FOR", chips.join(",")))?;
    let mut compiled = BTreeMap::<_, Vec<_>>::new();
    for line in fs::read_to_string(&list)?.lines() {
        if let Some((chip, kernel)) = line.split_once(' ') {
            compiled.entry(chip.to_owned()).or_default().push(kernel.to_owned());
        }
    }
    Ok(compiled)
}

/// The command on the emulator of a chip.
fn windrow(emulator: &Emulator, chip: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(target().join("debug/windrow"));
    command.current_dir(root()).args(arguments).args(["--device", "hip:0"]);
    emulator.stand_in(chip, &mut command);
    command
}

/// What `windrow verify` says of the emulator.
fn verify(steps: &mut Steps, emulator: &Emulator, chip: &str, operators: &[&str]) -> Result<Value> {
    let file = emulator.folder.join("verify.json");
    let arguments = [&["verify", "--json", "--quiet", "--kernels"], operators].concat();
    let mut verify = windrow(emulator, chip, &arguments);
    verify.stdout(fs::File::create(&file)?);
    // Failures are in the report.
    let ended = steps.run("verify", &mut verify);
    let report = serde_json::from_str(&fs::read_to_string(&file)?);
    report.map_err(|e| ended.err().unwrap_or_else(|| e.into()))
}

/// GELU's cases, and some with every activation, with reciprocals and exponentials that are wrong by a unit in the last
/// place, as a chip's may be.
fn nudged(steps: &mut Steps, emulator: &Emulator) -> Result {
    let random = ["causal-conv1d", "conv2d", "--random", "--seed", "1", "--cases", "20"];
    for cases in [&["gelu", "--kernels"][..], &random] {
        let mut verify = windrow(emulator, CHIP, &[&["verify"], cases].concat());
        steps.run("nudged", verify.env("WINDROW_EMULATOR_NUDGE", "1"))?;
    }
    Ok(())
}

/// The program of the document that is about AMD's matrix cores.
fn document(steps: &mut Steps, emulator: &Emulator, chip: &str) -> Result {
    steps
        .run("document", &mut windrow(emulator, chip, &["bench", "causal-conv1d", "--case", "amd"]))
}

/// Cases whose products of matrices rocBLAS's stand-in computes, and that it does: what is wrong, if not.
fn products_by_rocblas(steps: &mut Steps, emulator: &Emulator) -> Result<Option<String>> {
    let products = |command: &mut Command| {
        command.env("WINDROW_HIP_PATH", &emulator.with_rocblas);
    };
    let cases = ["verify", "causal-conv1d", "conv2d", "--random", "--seed", "1", "--cases", "12"];
    let mut verify = windrow(emulator, CHIP, &cases);
    products(&mut verify);
    steps.run("rocblas", &mut verify)?;
    let mut fails = windrow(emulator, CHIP, &cases);
    products(&mut fails);
    let name = "rocblas_gemm_strided_batched_ex";
    let output = fails.env("WINDROW_EMULATOR_FAIL", format!("{name}=6")).output()?;
    let words = [output.stdout, output.stderr].concat();
    let words = String::from_utf8_lossy(&words);
    let is_named = words.contains(name) && words.contains("rocblas_status_internal_error");
    let is_reported = is_named && !output.status.success();
    Ok((!is_reported).then(|| format!("a run in which {name} fails: {}", output.status)))
}

/// Where the libraries are found without being told: by variables for the loader, for ROCm's folders and for Python's
/// environments, whose wheels are PyTorch's and ROCm's own, under the names of each version. Counts these, and says which
/// of them failed.
fn found_in_places(emulator: &Emulator) -> Result<(u64, Vec<String>)> {
    let places = [
        ("LD_LIBRARY_PATH", "", ".6"),
        ("ROCM_HOME", "lib", ".7"),
        ("ROCM_PATH", "lib64", ".6"),
        ("HIP_PATH", "lib", ""),
        ("VIRTUAL_ENV", "lib/python3.12/site-packages/torch/lib", ""),
        ("CONDA_PREFIX", "lib/python3.12/site-packages/_rocm_sdk_core/lib", ".7"),
    ];
    let (mut found, mut lost) = (0, Vec::new());
    for (variable, path, version) in places {
        let root = emulator.folder.join("places").join(variable);
        let folder = root.join(path);
        fs::create_dir_all(&folder)?;
        for name in ["libamdhip64.so", "libhiprtc.so"] {
            fs::copy(emulator.folder.join(name), folder.join(format!("{name}{version}")))?;
        }
        let mut command = windrow(emulator, CHIP, &[&["verify"], &FEW_CASES[..]].concat());
        for (other, _, _) in places {
            command.env_remove(other);
        }
        command.env_remove("WINDROW_HIP_PATH").env(variable, &root);
        let output = command.output()?;
        if output.status.success() {
            found += 1;
        } else {
            let words = String::from_utf8_lossy(&output.stderr);
            lost.push(format!("the libraries in {variable}'s {path}: {words}"));
        }
    }
    let mut devices = Command::new(target().join("debug/windrow"));
    let output = emulator.stand_in(CHIP, devices.arg("devices")).output()?;
    let line = format!("hip:0      emulator of {CHIP}");
    if !String::from_utf8_lossy(&output.stdout).contains(&line) {
        lost.push(format!("`windrow devices` without `{line}`: {}", output.status));
    }
    Ok((found, lost))
}

/// Lets each function of the runtime and of the compiler fail in a run of the command, and where that does not call it in
/// tests of the library, which record graphs. They have to end with an error that names the function; those that neither
/// calls, or whose failure has no consequence, are not counted. Tests are not run with functions that destroy: they look
/// for what is left.
fn failing_calls(emulator: &Emulator) -> (u64, Vec<String>) {
    let sources = concat!(
        include_str!("../../windrow-amd-emulator/src/runtime.rs"),
        include_str!("../../windrow-amd-emulator/src/graphs.rs"),
        include_str!("../../windrow-amd-emulator/src/hiprtc.rs")
    );
    let names =
        sources.lines().filter_map(|line| line.strip_prefix("    fn hip")?.split('(').next());
    let names: Vec<_> = names.map(|name| format!("hip{name}")).collect();
    let next = AtomicUsize::new(0);
    // Each run takes one core.
    let worker = |cold: PathBuf| {
        let (mut survived, mut broken) = (0, Vec::new());
        while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
            match failing_call(emulator, name, &cold) {
                Ok(None) => {}
                Ok(Some(Ok(()))) => survived += 1,
                Ok(Some(Err(status))) => {
                    broken.push(format!("a run in which {name} fails: {status}"));
                }
                Err(error) => broken.push(format!("a run in which {name} fails: {error}")),
            }
        }
        (survived, broken)
    };
    let found = thread::scope(|scope| {
        let workers = ["cold-0", "cold-1"].map(|cold| {
            let cold = emulator.folder.join(cold);
            scope.spawn(|| worker(cold))
        });
        workers.map(|worker| worker.join().expect("it does not panic"))
    });
    let (survived, broken): (Vec<u64>, Vec<_>) = found.into_iter().unzip();
    (survived.iter().sum(), broken.concat())
}

/// A run in which a function fails, whose caches are in `cold` if nothing would be compiled else: whether it ended as
/// it has to, if the failure had a consequence.
fn failing_call(
    emulator: &Emulator,
    name: &str,
    cold: &Path,
) -> io::Result<Option<std::result::Result<(), ExitStatus>>> {
    let verify = windrow(emulator, CHIP, &[&["verify"], &FEW_CASES[..]].concat());
    let tests = [&["test", "--quiet", "--lib"], &ALL[..], &["--", "gpu::"]].concat();
    let mut tests = cargo(&tests);
    emulator.stand_in(CHIP, &mut tests);
    let gives_back = name.ends_with("Destroy");
    let of_compiler = name.starts_with("hiprtc");
    let what = match name {
        // The error has the compiler's messages.
        "hiprtcCompileProgram" => "compiling kernel".to_owned(),
        _ if of_compiler => name.to_owned(),
        _ => format!("{name} was told to fail"),
    };
    for mut command in iter::once(verify).chain((!gives_back).then_some(tests)) {
        if of_compiler {
            if cold.exists() {
                fs::remove_dir_all(cold)?;
            }
            command.env("WINDROW_CACHE_DIR", cold);
        }
        let output = command.env("WINDROW_EMULATOR_FAIL", format!("{name}=1")).output()?;
        let words = [output.stdout, output.stderr].concat();
        let named = String::from_utf8_lossy(&words).contains(&what);
        match (output.status.code(), named) {
            (Some(0), false) => {}
            (Some(1..=101), true) => return Ok(Some(Ok(()))),
            _ => return Ok(Some(Err(output.status))),
        }
    }
    Ok(None)
}

/// Writes what was compiled and executed: into the records if all was compiled, else into the emulator's folder.
fn record(
    emulator: &Emulator,
    compiled: &BTreeMap<String, Vec<String>>,
    reports: &BTreeMap<&str, Value>,
    all: bool,
) -> Result {
    let (commit, clean) = commit()?;
    let name = format!("{}-amd-emulator", today());
    let folder = if all { root().join(RECORDS).join(name) } else { emulator.folder.join(name) };
    fs::create_dir_all(&folder)?;
    let compiled: BTreeMap<_, _> = compiled.iter().map(|(chip, k)| (chip, k.len())).collect();
    let executed: BTreeMap<_, _> = reports
        .iter()
        .map(|(chip, report)| (chip, json!({"rows": report["rows"], "kernels": report["kernels"]})))
        .collect();
    let result = json!({
        "commit": commit, "clean": clean, "all": all, "compiled": compiled, "executed": executed,
    });
    write(&folder.join("verify.json"), &result)
}
