//! Memory and threads: how much is used, and what happens where there is none.
#![cfg(target_os = "linux")]

use crate::folder::{Folder, refused};
use std::io::{PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use windrow::{DType, Tensor};

/// Writes zeros of this shape; returns their bytes.
fn zeros(folder: &Folder, name: &str, shape: &[usize]) -> usize {
    let tensor = Tensor::zeros(DType::F32, shape).unwrap();
    windrow_cli::files::write(&[(&folder.path(name), "x", &tensor)]).unwrap();
    tensor.desc().bytes()
}

/// Fills a pipe, so that the next one to write waits.
fn fill(pipe: &mut PipeWriter) {
    // SAFETY: an open descriptor; the flags are put back below.
    let flags = unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_GETFL) };
    // SAFETY: an open descriptor, and its flags but for one.
    unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
    for chunk in [4096, 1] {
        while pipe.write(&vec![b'.'; chunk]).is_ok() {}
    }
    // SAFETY: an open descriptor, and the flags that it had.
    unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, flags) };
}

/// Peak resident bytes of a command when its output is there. What it says then goes to a pipe that is full,
/// which keeps it alive.
fn peak(folder: &Folder, args: &str, output: &str) -> usize {
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    fill(&mut writer);
    let mut command = folder.command(&format!("{args} --output {output}"));
    let mut child = command.stdout(writer).stderr(Stdio::null()).spawn().unwrap();
    drop(command);
    let start = Instant::now();
    while !folder.path(output).exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "{args}: no output");
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).unwrap();
    assert!(child.wait().unwrap().success(), "{}", String::from_utf8_lossy(&rest));
    std::fs::remove_file(folder.path(output)).unwrap();
    1024 * line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
}

#[test]
fn peak_memory_is_that_of_inputs_and_outputs() {
    let folder = Folder::new();
    let x = zeros(&folder, "x.npy", &[16, 8, 128, 512]);
    zeros(&folder, "x.safetensors", &[16, 8, 128, 512]);
    zeros(&folder, "w.npy", &[8, 8, 3, 3]);
    let l = zeros(&folder, "l.npy", &[1, 1024, 8192]);
    zeros(&folder, "f.npy", &[1024, 4]);
    for (args, output, bytes) in [
        ("run gelu --input x.npy", "y.npy", 2 * x),
        ("run gelu --input x.safetensors", "y.safetensors", 2 * x),
        ("run causal-conv1d --input l.npy --weight f.npy", "y.npy", 2 * l),
        ("run conv2d --input x.npy --weight w.npy --padding 1", "y.safetensors", 2 * x),
    ] {
        let times = peak(&folder, args, output) as f64 / bytes as f64;
        assert!(times <= 1.3, "{args} --output {output}: {times:.2} times");
    }
}

/// Runs with at most so many bytes of addresses.
fn limited(mut command: Command, bytes: u64) -> std::process::Output {
    // SAFETY: `setrlimit` may be called between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
            match libc::setrlimit(libc::RLIMIT_AS, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    command.output().unwrap()
}

#[test]
fn no_memory_is_an_error() {
    let folder = Folder::new();
    zeros(&folder, "x.npy", &[16 << 20]);
    folder.bytes("y.npy", b"before");
    let before = folder.names();
    for args in [
        "run gelu --input x.npy --output y.npy --threads 1",
        "run gelu --input x.npy --output y.npy --threads 1 --verify",
        "bench gelu --iterations 1 --threads 1",
    ] {
        for megabytes in [80, 110, 140] {
            let output = limited(folder.command(args), megabytes << 20);
            // The stack of a thread may be what there is no room for.
            let said = String::from_utf8_lossy(&output.stderr);
            let threads = said.contains("threads cannot be started");
            refused(&output, args, &[if threads { "threads" } else { "memory" }]);
        }
    }
    assert_eq!(std::fs::read(folder.path("y.npy")).unwrap(), b"before");
    assert_eq!(folder.names(), before);
}

#[test]
fn no_threads_is_an_error() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[5]);
    for args in ["devices", "run gelu --input x.npy --output y.npy", "verify gelu --quick"] {
        let run = || {
            let mut command = folder.command(args);
            // Each wants two megabytes of stack.
            command.env("RAYON_NUM_THREADS", "2000");
            limited(command, 1 << 30)
        };
        // Threads that began before the limit was met may take the last memory, which is another error then. Where one
        // that has begun finds none for what a thread needs, Rust's library or the system's ends the process.
        let is_for_memory = |output: &std::process::Output| {
            let said = String::from_utf8_lossy(&output.stderr);
            let others = ["out of memory", "failed to allocate an alternative stack"];
            let is_other = || others.iter().any(|other| said.contains(other));
            output.status.code().is_none_or(|code| code == 2 && is_other())
        };
        let output =
            (0..9).map(|_| run()).find(|output| !is_for_memory(output)).unwrap_or_else(run);
        refused(&output, args, &["threads cannot be started", "--threads"]);
    }
}

#[test]
fn more_threads_than_cores_are_not_taken() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[1, 3, 8]).ramp("w.npy", &[3, 3, 4]);
    let run = "run causal-conv1d --input x.npy --weight w.npy --output y.npy";
    let start = Instant::now();
    for threads in ["100000", "200000", "18446744073709551615"] {
        let output = folder.windrow(&format!("{run} --threads {threads}"));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        assert!(said.contains(&format!("--threads {threads}: there are")), "{said}");
    }
    let output = folder.command(run).env("WINDROW_NUM_THREADS", "200000").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("WINDROW_NUM_THREADS 200000"), "{said}");
    assert!(start.elapsed().as_secs() < 10);
    let output = folder.windrow(&format!("{run} --threads 1"));
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
