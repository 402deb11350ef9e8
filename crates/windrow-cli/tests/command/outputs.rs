//! The destinations of results: links, devices, pipes, modes, all or nothing.
#![cfg(unix)]

use crate::folder::{Folder, refused};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Stdio;
use std::time::{Duration, Instant};

const BENCH: &str = "bench conv2d --layers l.csv --iterations 1 --threads 1";
const GELU: &str = "run gelu --input x.npy --output";

fn folder() -> Folder {
    let folder = Folder::new();
    folder.bytes("l.csv", b"tiny,1,3,10,12,5\n").ramp("x.npy", &[5]);
    folder
}

fn conv1d() -> Folder {
    let folder = Folder::new();
    folder.ramp("x.npy", &[1, 3, 8]).ramp("w.npy", &[3, 4]);
    folder
}

const CONV1D: &str = "run causal-conv1d --input x.npy --weight w.npy";

#[test]
fn links_stay_links() {
    let folder = folder();
    std::fs::create_dir(folder.path("real")).unwrap();
    symlink("real/y.npy", folder.path("link.npy")).unwrap();
    symlink("link.npy", folder.path("again.npy")).unwrap();
    // The target does not exist at first, and does then.
    for name in ["link.npy", "again.npy"] {
        folder.succeed(&format!("{GELU} {name}"));
        assert!(folder.path(name).symlink_metadata().unwrap().is_symlink());
        assert!(folder.path("real/y.npy").symlink_metadata().unwrap().is_file());
        assert_eq!(folder.read("real/y.npy").shape(), [5]);
    }
    symlink("loop.npy", folder.path("loop.npy")).unwrap();
    folder.refuse(&format!("{GELU} loop.npy"), &["loop.npy"]);
    symlink("nowhere/y.npy", folder.path("bad.npy")).unwrap();
    folder.refuse(&format!("{GELU} bad.npy"), &["no folder", "nowhere"]);
}

#[test]
fn devices_and_pipes_are_written_not_replaced() {
    let folder = folder();
    let null = || std::fs::metadata("/dev/null").unwrap().file_type().is_char_device();
    folder.succeed(&format!("{GELU} /dev/null"));
    folder.succeed("tune --export /dev/null");
    folder.succeed(&format!("{BENCH} --csv /dev/null"));
    assert!(null());
    for args in [format!("{GELU} /dev/full"), format!("{BENCH} --csv /dev/full")] {
        refused(&folder.windrow(&args), &args, &["/dev/full", "No space left"]);
    }
    let read = folder.shell(&format!("mkfifo p; cat p > got.npy & $W {GELU} p; wait"));
    assert!(read.status.success(), "{read:?}");
    assert!(folder.path("p").symlink_metadata().unwrap().file_type().is_fifo());
    assert_eq!(folder.read("got.npy").shape(), [5]);
}

#[test]
fn standard_output_by_its_name() {
    let folder = folder();
    for name in ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
        for redirected in ["> y.npy", "| cat > y.npy"] {
            let output = folder.shell(&format!("set -o pipefail; $W {GELU} {name} {redirected}"));
            assert!(output.status.success(), "{name} {redirected}: {output:?}");
            assert_eq!(folder.read("y.npy").shape(), [5], "{name} {redirected}");
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(said.contains("gelu by cpu"), "{name} {redirected}: {said}");
        }
    }
    let output = folder.shell(&format!("$W {BENCH} --csv /dev/stdout"));
    assert!(output.stdout.starts_with(b"op,case"), "{output:?}");
    // By another descriptor of a file that the shell has open.
    let output = folder.shell(&format!("$W {GELU} /dev/fd/3 3> z.npy && ls -A"));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(folder.read("z.npy").shape(), [5]);
}

#[test]
fn two_outputs_are_two_files() {
    let folder = conv1d();
    symlink("y.npy", folder.path("link.npy")).unwrap();
    for states in ["y.npy", "./y.npy", "link.npy"] {
        let args = format!("{CONV1D} --output y.npy --final-states {states}");
        folder.refuse(&args, &["two outputs in one file"]);
    }
    folder.refuse(&format!("{CONV1D} --output - --final-states -"), &["two outputs"]);
    folder.refuse(&format!("{BENCH} --csv a.svg --plot a.svg"), &["two outputs"]);
    folder.succeed(&format!("{CONV1D} --output /dev/null --final-states /dev/null"));
}

#[test]
fn both_outputs_or_none() {
    let folder = conv1d();
    folder.bytes("y.npy", b"before");
    for states in ["nowhere/s.npy", "/dev/full", "s.txt", "."] {
        let args = format!("{CONV1D} --output y.npy --final-states {states}");
        refused(&folder.windrow(&args), &args, &[states]);
        assert_eq!(std::fs::read(folder.path("y.npy")).unwrap(), b"before");
        assert_eq!(folder.names(), ["w.npy", "x.npy", "y.npy"]);
    }
    folder.succeed(&format!("{CONV1D} --output y.npy --final-states s.npy"));
    assert_eq!(folder.names(), ["s.npy", "w.npy", "x.npy", "y.npy"]);
}

#[test]
fn modes_are_kept_and_read_only_is_respected() {
    let folder = folder();
    let chmod = |mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(folder.path("y.npy"), permissions).unwrap();
    };
    folder.succeed(&format!("{GELU} y.npy"));
    for mode in [0o600, 0o640, 0o664, 0o755] {
        chmod(mode);
        folder.succeed(&format!("{GELU} y.npy"));
        let metadata = folder.path("y.npy").metadata().unwrap();
        assert_eq!(metadata.mode() & 0o7777, mode, "{mode:o}");
    }
    folder.bytes("y.npy", b"before");
    chmod(0o444);
    folder.refuse(&format!("{GELU} y.npy"), &["y.npy", "read-only"]);
    assert_eq!(std::fs::read(folder.path("y.npy")).unwrap(), b"before");
}

#[test]
fn what_is_missing_is_missed_before_the_work() {
    let folder = conv1d();
    // The layers are not even looked at.
    for args in [
        "bench conv2d --layers none.csv --csv nowhere/a.csv",
        "bench conv2d --layers none.csv --plot nowhere/a.svg",
        "run gelu --input none.npy --output nowhere/y.npy",
        "tune --export nowhere/table.json",
    ] {
        folder.refuse(args, &["nowhere"]);
    }
    folder.refuse("bench --layers none.csv --csv .", &["is a folder"]);
    // By the name itself, before the missing input is.
    folder.refuse("run gelu --input none.npy --output y.txt", &["y.txt"]);
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let folder = folder();
    for args in ["devices", "--help", "run --help", "completions bash", "man", BENCH] {
        // The reader has gone before anything is written.
        let line = format!("$W {args} | true; echo ${{PIPESTATUS[0]}}");
        let output = folder.shell(&line);
        assert_eq!(output.stdout, b"0\n", "{args}: {output:?}");
        assert!(output.stderr.is_empty(), "{args}: {output:?}");
    }
    folder.ramp("x.npy", &[1 << 20]);
    let output = folder.shell(&format!("$W {GELU} - --quiet | head -c 10 | wc -c"));
    assert_eq!((output.stdout, output.stderr), (b"10\n".to_vec(), Vec::new()));
}

#[test]
fn a_full_device_is_an_error_and_files_are_kept() {
    let folder = folder();
    for args in ["devices", "--help", "completions bash", "man"] {
        let output = folder.shell(&format!("$W {args} > /dev/full"));
        refused(&output, args, &["standard output", "No space left"]);
    }
    let output = folder.shell(&format!("$W {BENCH} --csv r.csv --plot r.svg > /dev/full"));
    refused(&output, BENCH, &["standard output"]);
    assert_eq!(std::fs::read_to_string(folder.path("r.csv")).unwrap().lines().count(), 2);
    assert!(folder.path("r.svg").exists());
    // Where nothing can be said, nothing is.
    let output = folder.shell(&format!("$W {GELU} nowhere/y.npy 2> /dev/full"));
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn signals_leave_no_temporary_files() {
    for (signal, name) in [(libc::SIGTERM, "TERM"), (libc::SIGINT, "INT"), (libc::SIGHUP, "HUP")] {
        let folder = conv1d();
        folder.bytes("y.npy", b"before").shell("mkfifo pipe.npy");
        // The first output is complete beside its place; the second waits for somebody to read the pipe.
        let mut command =
            folder.command(&format!("{CONV1D} --output y.npy --final-states pipe.npy"));
        // SAFETY: `signal` may be called between fork and exec. Who runs tests may ignore some signals.
        unsafe {
            command.pre_exec(move || {
                libc::signal(signal, libc::SIG_DFL);
                Ok(())
            });
        }
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        let part = || folder.names().into_iter().any(|name| name.ends_with(".part"));
        let start = Instant::now();
        while !part() {
            assert!(start.elapsed() < Duration::from_secs(20), "no temporary file");
            std::thread::sleep(Duration::from_millis(5));
        }
        // SAFETY: a child of our own that has not been waited for.
        unsafe { libc::kill(child.id() as i32, signal) };
        assert_eq!(child.wait().unwrap().signal(), Some(signal), "{name}");
        assert!(!part(), "{name}: {:?}", folder.names());
        assert_eq!(std::fs::read(folder.path("y.npy")).unwrap(), b"before");
    }
}

/// File systems allow 255 bytes, and the temporary file beside has a name of its own.
#[test]
fn long_names_are_written() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[5]);
    for bytes in [200, 245, 250, 251, 255] {
        let name = format!("{}.npy", "y".repeat(bytes - 4));
        for _ in 0..2 {
            folder.succeed(&format!("run gelu --input x.npy --output {name}"));
        }
        assert_eq!(folder.read(&name).shape(), [5], "{bytes}");
        std::fs::remove_file(folder.path(&name)).unwrap();
    }
    assert_eq!(folder.names(), ["x.npy"]);
}

#[test]
fn a_list_of_layers_is_not_written_over() {
    let folder = Folder::new();
    let layers = b"tiny,1,3,10,12,5\n";
    folder.bytes("l.csv", layers);
    let bench = "bench conv2d --iterations 1 --layers l.csv";
    let mut outputs = vec!["--csv l.csv", "--csv ./l.csv"];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("l.csv", folder.path("l.svg")).unwrap();
        outputs.push("--csv a.csv --plot l.svg");
    }
    for output in outputs {
        folder.refuse(&format!("{bench} {output}"), &["is read"]);
        assert_eq!(std::fs::read(folder.path("l.csv")).unwrap(), layers);
    }
}

/// An output without elements differs in none of them.
#[test]
fn an_empty_batch_is_no_failure() {
    let folder = Folder::new();
    folder.bytes("l.csv", b"none,0,2,9,9,2\nsome,1,2,9,9,2\n");
    let printed = folder.succeed("bench conv2d --layers l.csv --iterations 1");
    assert!(printed.contains("ok") && !printed.contains("FAIL"), "{printed}");
}
