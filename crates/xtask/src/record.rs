//! `cargo xtask record`: this machine's speed and accuracy as files.

use crate::date::today;
use crate::lines::lines;
use crate::steps::{Result, cargo, root};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The folder of records, below the root.
pub(crate) const RECORDS: &str = "benchmarks/record";

pub(crate) fn run() -> Result {
    let verify = windrow(&["verify", "--json"])?;
    let bench = windrow(&["bench", "--json"])?;
    let name = format!("{}-{}", today(), machine_name(&bench)?);
    let mut records = vec![("verify.json".to_owned(), verify), ("bench.json".to_owned(), bench)];
    // CUDA's are measured beside PyTorch, by a program of their own.
    for device in amd_gpus(&windrow(&["devices", "--json"])?) {
        for task in ["verify", "bench"] {
            let record = windrow(&[task, "--json", "--device", device])?;
            records.push((format!("{task}-{}.json", device.replace(':', "-")), record));
        }
    }
    let (commit, clean) = commit()?;
    let folder = root().join(RECORDS).join(&name);
    let io = |e: std::io::Error| format!("{}: {e}", folder.display());
    std::fs::create_dir_all(&folder).map_err(io)?;
    for (file, record) in &mut records {
        record["commit"] = commit.as_str().into();
        record["clean"] = clean.into();
        write(&folder.join(file), record)?;
    }
    println!("{RECORDS}/{name}");
    Ok(())
}

/// AMD's GPUs among the devices that the command lists, as `--device` takes them.
fn amd_gpus(devices: &Value) -> Vec<&str> {
    let names = devices.as_array().into_iter().flatten().filter_map(|d| d["device"].as_str());
    names.filter(|name| name.starts_with("hip:")).collect()
}

/// The commit that is checked out, and whether nothing differs from it.
pub(crate) fn commit() -> Result<(String, bool)> {
    let git = |args: &[&str]| -> Result<String> {
        let output = Command::new("git").args(args).current_dir(root()).output();
        let output = output.map_err(|e| format!("git {args:?}: {e}"))?;
        if !output.status.success() {
            return Err(format!("git {args:?}: {}", output.status).into());
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Ok((git(&["rev-parse", "HEAD"])?, clean))
}

/// Runs the command in release mode and reads the JSON that it prints.
fn windrow(args: &[&str]) -> Result<Value> {
    let command = ["run", "--release", "--quiet", "--package", "windrow-cli", "--"];
    let output = cargo(&[&command, args].concat())
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|e| format!("windrow {args:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("windrow {args:?}: {}", output.status).into());
    }
    serde_json::from_slice(&output.stdout).map_err(|e| format!("windrow {args:?}: {e}").into())
}

/// The CPU's name and the number of threads, fit for a folder: `amd-epyc-9354-2-threads`.
fn machine_name(bench: &Value) -> Result<String> {
    let machine = &bench["machine"];
    let (Some(cpu), Some(threads)) = (machine["cpu"].as_str(), machine["threads"].as_u64()) else {
        return Err("the benchmark names no machine".into());
    };
    let words = cpu.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
    let cpu = words.collect::<Vec<_>>().join("-").to_lowercase();
    Ok(format!("{cpu}-{threads}-threads"))
}

pub(crate) fn write(path: &Path, value: &Value) -> Result {
    let text = lines(&value.to_string());
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn machines_become_folder_names() {
        let bench = json!({"machine": {"cpu": "AMD EPYC 9354 (32-Core)", "threads": 2}});
        assert_eq!(machine_name(&bench).unwrap(), "amd-epyc-9354-32-core-2-threads");
        assert!(machine_name(&json!({})).is_err());
    }

    #[test]
    fn amd_gpus_are_those_of_hip() {
        let devices = json!(["cpu", "cuda:0", "hip:0", "hip:1"].map(|d| json!({"device": d})));
        assert_eq!(amd_gpus(&devices), ["hip:0", "hip:1"]);
        assert!(amd_gpus(&json!([])).is_empty());
    }
}
