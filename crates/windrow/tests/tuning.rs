//! Tuning from several processes at once.

#![cfg(feature = "tuning")]

use std::process::{Child, Command};
use std::time::Duration;
use windrow::tuning::Search;
use windrow::{Conv2dParams, Conv2dPlan, Conv2dSpec, DType, PlanOptions, TensorDesc};

/// Set in the processes that the test starts: which problems to tune.
const FIRST: &str = "WINDROW_TEST_FIRST";
const PROBLEMS: usize = 6;
const PROCESSES: usize = 3;

fn tune(size: usize) {
    let x = TensorDesc::contiguous(DType::F32, &[1, 2, 4 + size, 5]).unwrap();
    let w = TensorDesc::contiguous(DType::F32, &[2, 2, 3, 3]).unwrap();
    let spec = Conv2dSpec::new(x, w, &Conv2dParams::default()).unwrap();
    let search = Search::new(Duration::from_millis(2));
    Conv2dPlan::tune(&spec, &PlanOptions::default(), &search).unwrap();
}

/// The child process of the test below; does nothing otherwise.
#[test]
fn one_of_several_processes() {
    if let Ok(first) = std::env::var(FIRST) {
        let first: usize = first.parse().unwrap();
        (first..first + PROBLEMS).for_each(tune);
    }
}

#[test]
fn processes_that_tune_at_once_lose_nothing() {
    let folder = std::env::temp_dir().join(format!("windrow-tune-{}", std::process::id()));
    let start = |process: usize| -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["one_of_several_processes", "--exact"])
            .env("WINDROW_TUNE_CACHE", &folder)
            .env(FIRST, (process * PROBLEMS).to_string())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    let children: Vec<Child> = (0..PROCESSES).map(start).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let tables: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .collect();
    assert_eq!(tables.len(), 1, "{tables:?}");
    let table: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&tables[0]).unwrap()).unwrap();
    let entries = table["entries"].as_object().unwrap();
    assert_eq!(entries.len(), PROCESSES * PROBLEMS, "{:?}", entries.keys());
    std::fs::remove_dir_all(&folder).unwrap();
}
