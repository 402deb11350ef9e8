//! A folder of tensor files, and the command run in it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use windrow::{Element, Tensor};

pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a tensor.
    pub fn tensor<T: Element>(&self, name: &str, data: &[T], shape: &[usize]) -> &Self {
        let tensor = Tensor::from_slice(data, shape).unwrap();
        windrow_cli::files::write(&[(&self.path(name), "x", &tensor)]).unwrap();
        self
    }

    /// Writes a tensor of f32 that count up in eighths from -1.
    pub fn ramp(&self, name: &str, shape: &[usize]) -> &Self {
        let data: Vec<f32> =
            (0..shape.iter().product()).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
        self.tensor(name, &data, shape)
    }

    pub fn bytes(&self, name: &str, bytes: &[u8]) -> &Self {
        std::fs::write(self.path(name), bytes).unwrap();
        self
    }

    pub fn read(&self, name: &str) -> Tensor {
        windrow_cli::files::read(self.path(name).to_str().unwrap()).unwrap()
    }

    /// Runs `windrow` in this folder; arguments are separated by blanks.
    pub fn windrow(&self, args: &str) -> Output {
        self.windrow_with("warn", args)
    }

    /// Runs as [`Folder::windrow`], with this value of `WINDROW_LOG`.
    pub fn windrow_with(&self, log: &str, args: &str) -> Output {
        self.command(args).env("WINDROW_LOG", log).output().unwrap()
    }

    /// `windrow` to be run in this folder.
    pub fn command(&self, args: &str) -> Command {
        let mut command = Command::new(Path::new(env!("CARGO_BIN_EXE_windrow")));
        command
            .args(args.split_whitespace())
            .current_dir(self.0.path())
            // Nothing that was tuned on this machine.
            .env("WINDROW_TUNE_CACHE", self.path("cache"))
            .env("WINDROW_LOG", "warn")
            .env_remove("WINDROW_VERIFY")
            .env_remove("WINDROW_NUM_THREADS")
            .env_remove("COLUMNS");
        command
    }

    /// Runs a line of the shell in this folder, in which `$W` is `windrow`.
    #[cfg(unix)]
    pub fn shell(&self, line: &str) -> Output {
        Command::new("bash")
            .args(["-c", line])
            .current_dir(self.0.path())
            .env("W", env!("CARGO_BIN_EXE_windrow"))
            .env("WINDROW_TUNE_CACHE", self.path("cache"))
            .env("WINDROW_LOG", "warn")
            .output()
            .unwrap()
    }

    /// Runs `windrow` and expects success; returns what it printed.
    pub fn succeed(&self, args: &str) -> String {
        let output = self.windrow(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "windrow {args}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `windrow` and expects it to refuse: exit status 2, a message on stderr with these
    /// parts, nothing on stdout, and no file that was not there before.
    pub fn refuse(&self, args: &str, parts: &[&str]) {
        let before = self.names();
        let output = self.windrow(args);
        assert!(output.stdout.is_empty());
        refused(&output, args, parts);
        assert_eq!(self.names(), before, "windrow {args} left files");
    }

    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Checks that a command has ended with status 2 and a message with these parts.
pub fn refused(output: &Output, args: &str, parts: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args}: {stderr}");
    assert!(!stderr.contains("panicked"), "{args}: {stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{args}: no `{part}` in: {stderr}");
    }
}
