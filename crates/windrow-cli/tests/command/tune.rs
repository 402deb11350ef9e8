//! `windrow tune`.

use crate::folder::{Folder, refused};
use serde_json::Value;

fn folder() -> Folder {
    let folder = Folder::new();
    std::fs::write(folder.path("layers.csv"), "small,1,8,12,12,16\n").unwrap();
    folder
}

#[test]
fn tune_remembers_exports_and_imports() {
    let folder = folder();
    let tune = "tune conv2d --layers layers.csv --threads 1 --budget 0.05";
    let printed = folder.succeed(&format!("{tune} --exhaustive"));
    for expected in ["conv2d small 1x8x12x12 k16", "model", "tuned", "best ms", "kept in"] {
        assert!(printed.contains(expected), "{printed}");
    }
    assert!(printed.lines().all(|line| line.chars().count() <= 100 || line.starts_with("kept")));

    folder.succeed("tune --export table.json");
    let text = std::fs::read_to_string(folder.path("table.json")).unwrap();
    let table: Value = serde_json::from_str(&text).unwrap();
    let key = "conv2d f32 1x8x12x12 16x8x3x3 nchw-nchw fp32 1 threads";
    let configuration = table["entries"][key]["configuration"].as_str().unwrap();
    let bench = "bench conv2d --layers layers.csv --threads 1 --iterations 1 --json";
    let record: Value = serde_json::from_str(&folder.succeed(bench)).unwrap();
    assert_eq!(record["rows"][0]["configuration"], configuration);

    // Another configuration from elsewhere, and back.
    let other = |name| std::fs::write(folder.path("other.json"), text.replace(configuration, name));
    other("im2col_gemm threads=1").unwrap();
    assert!(folder.succeed("tune --import other.json").contains("1 entries"));
    let record: Value = serde_json::from_str(&folder.succeed(bench)).unwrap();
    assert_eq!(record["rows"][0]["configuration"], "im2col_gemm threads=1");

    // What no plan can take is said, left out, and takes the place of nothing.
    let of_another = text.replace(key, "fft f32 1x8x12x12");
    let damaged = text.replace(configuration, "direct tiles=x");
    let of_tomorrow = text.replace(configuration, "fft_of_tomorrow tiles=3");
    for (table, said) in [
        (of_tomorrow, "fft_of_tomorrow"),
        (of_another, "fft f32 1x8x12x12"),
        (damaged, "direct tiles=x"),
    ] {
        std::fs::write(folder.path("other.json"), table).unwrap();
        let output = folder.windrow("tune --import other.json");
        let (out, err) = (String::from_utf8(output.stdout), String::from_utf8(output.stderr));
        let (out, err) = (out.unwrap(), err.unwrap());
        assert!(output.status.success() && err.contains(said), "{err}");
        assert!(out.contains("0 entries"), "{out}");
    }
    let record: Value = serde_json::from_str(&folder.succeed(bench)).unwrap();
    assert_eq!(record["rows"][0]["configuration"], "im2col_gemm threads=1");
}

#[test]
fn without_a_cache_folder_nothing_is_kept_and_that_is_said() {
    let folder = folder();
    for args in ["", "--json", "--quiet"] {
        let tune = "tune conv2d --layers layers.csv --threads 1 --budget 0.02";
        let mut command = folder.command(&format!("{tune} {args}"));
        for variable in
            ["HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "WINDROW_CACHE_DIR", "WINDROW_TUNE_CACHE"]
        {
            command.env_remove(variable);
        }
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && said.contains("not kept"), "{args}: {said}");
    }
}

#[test]
fn a_cache_that_cannot_be_written_is_said_before_the_work() {
    let folder = folder();
    let tune = "tune conv2d --layers layers.csv --threads 1 --budget 0.02";
    let with =
        |cache: &str| folder.command(tune).env("WINDROW_TUNE_CACHE", cache).output().unwrap();
    // A file where a folder should be, and folders that nobody can make.
    for cache in ["layers.csv", "layers.csv/cache", "/proc/cache"] {
        let output = with(cache);
        refused(&output, tune, &[cache, "folder that can be written"]);
        assert!(output.stdout.is_empty(), "{output:?}");
    }
    assert!(with("cache").status.success());
    // Somebody else holds the lock and never lets go.
    let mut names = std::fs::read_dir(folder.path("cache")).unwrap().map(|e| e.unwrap().path());
    let lock = names.find(|name| name.extension().is_some_and(|e| e == "lock")).unwrap();
    let lock = std::fs::File::open(lock).unwrap();
    lock.lock().unwrap();
    let start = std::time::Instant::now();
    refused(&with("cache"), tune, &["another process holds", ".lock"]);
    assert!(start.elapsed().as_secs() < 20);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_cache_is_said() {
    let folder = folder();
    // Files may have no bytes: a lock fits, a table does not.
    let line = "ulimit -f 0; $W tune conv2d --layers layers.csv --threads 1 --budget 0.02";
    let output = folder.shell(&format!("trap '' XFSZ; {line}"));
    refused(&output, line, &["cache", "File too large"]);
    assert!(output.stdout.is_empty(), "{output:?}");
}

#[test]
fn tune_prints_json() {
    let folder = folder();
    let printed = folder.succeed("tune conv2d --layers layers.csv --budget 0.02 --json");
    let record: Value = serde_json::from_str(&printed).unwrap();
    let row = &record["rows"][0];
    assert!(row["model"]["ms"].as_f64().unwrap() > 0.0);
    assert!(row["candidates"].as_array().unwrap().len() > 5);
    assert!(row["tuned"]["configuration"].is_string() && row["best"].is_null());
    assert!(record["device"]["name"].is_string());
}

#[test]
fn tune_refuses_bad_input() {
    let folder = folder();
    std::fs::write(folder.path("bad.json"), "{\"windrow\": \"9.9.9\"}").unwrap();
    for (arguments, expected) in [
        ("tune --import bad.json", "table"),
        ("tune --import none.json", "none.json"),
        ("tune conv2d --layers none.csv", "none.csv"),
        ("tune conv2d --threads-per-block", "cuda:INDEX"),
        ("tune --budget=-1", "budget"),
        ("tune --budget x", "budget"),
        ("tune conv3d", "conv3d"),
    ] {
        folder.refuse(arguments, &[expected]);
    }
}

#[test]
fn the_log_says_which_configuration_runs() {
    let folder = folder();
    let bench = "bench conv2d --layers layers.csv --threads 1 --iterations 1 --json";
    let record: Value = serde_json::from_str(&folder.succeed(bench)).unwrap();
    let configuration = record["rows"][0]["configuration"].as_str().unwrap();
    for (log, said) in [("debug", true), ("info", false), ("off", false)] {
        let output = folder.windrow_with(log, bench);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{log}: {stderr}");
        assert_eq!(stderr.contains(configuration), said, "{log}: {stderr}");
    }
    let output = folder.windrow_with("loud", "devices");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("WINDROW_LOG is \"loud\""));
}
