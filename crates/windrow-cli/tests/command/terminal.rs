//! The output that people see: terminals of any width, help, completions, messages with strange names.

use crate::folder::{Folder, refused};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The output of a command on a terminal of so many columns.
#[cfg(target_os = "linux")]
fn on_terminal(folder: &Folder, columns: u16, args: &str) -> String {
    on_terminal_with(folder, columns, args, &[])
}

/// The output as by [`on_terminal`], with these variables.
#[cfg(target_os = "linux")]
fn on_terminal_with(
    folder: &Folder,
    columns: u16,
    args: &str,
    variables: &[(&str, &str)],
) -> String {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::FromRawFd;
    use std::ptr::null_mut;
    let (mut ours, mut theirs) = (0, 0);
    let size = libc::winsize { ws_row: 50, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: two places for descriptors, and a size that outlives the call.
    let opened = unsafe { libc::openpty(&mut ours, &mut theirs, null_mut(), null_mut(), &size) };
    assert_eq!(opened, 0);
    // SAFETY: descriptors that were just opened, owned by nobody else.
    let (mut ours, theirs) = unsafe { (File::from_raw_fd(ours), File::from_raw_fd(theirs)) };
    let mut command = folder.command(args);
    command.stdout(theirs.try_clone().unwrap()).stderr(theirs).env("TERM", "xterm");
    command.env_remove("NO_COLOR").envs(variables.iter().copied());
    let mut child = command.spawn().unwrap();
    // The command's copies of the terminal: it ends for us when the last one is closed.
    drop(command);
    let mut shown = Vec::new();
    // An error is how a terminal says that nobody writes to it any more.
    let _ = ours.read_to_end(&mut shown);
    child.wait().unwrap();
    text(&shown)
}

#[cfg(target_os = "linux")]
#[test]
fn sixty_columns_are_enough() {
    let folder = Folder::new();
    folder.bytes("l.csv", b"a_layer_with_a_long_name,1,3,10,12,5\n");
    let bench = "bench conv2d --layers l.csv --iterations 1 --threads 1 --quiet";
    for columns in [60, 80, 100] {
        let shown = on_terminal(&folder, columns, bench);
        let rows = shown.lines().filter(|line| line.contains("winograd") || line.contains("f32"));
        for line in rows.filter(|line| !line.contains("GFLOP/s of")) {
            assert!(line.trim_end().chars().count() <= columns.into(), "{columns}: {line}");
        }
        // Errors in full, as 1.2e-7 or 0: not one of them across two lines.
        let rms = shown.split_whitespace().filter(|word| word.contains("e-")).count();
        assert!(rms >= 1, "{columns}: {shown}");
    }
    for args in ["--help", "run conv2d --help", "bench --help", "tune -h", "verify --help"] {
        let shown = on_terminal(&folder, 60, args);
        let options = shown.split("Examples:").next().unwrap();
        // A line to be copied is not broken.
        for line in options.lines().filter(|line| !line.contains("Usage:")) {
            let visible = console::strip_ansi_codes(line).trim_end().chars().count();
            assert!(visible <= 60, "{args}: {visible}: {line}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn eighty_columns_are_enough_for_everything() {
    let folder = Folder::new();
    folder.bytes("l.csv", b"a_layer_with_a_long_name,1,3,10,12,5\n");
    let bench = "bench causal-conv1d conv2d --layers l.csv --iterations 1 --threads 1 --quiet";
    let mut all = vec![bench.to_owned()];
    for of in ["", "bench", "verify", "tune", "devices", "run", "completions", "man"] {
        all.push(format!("{of} --help"));
    }
    all.extend(["gelu", "conv2d", "conv3d", "causal-conv1d"].map(|of| format!("run {of} --help")));
    for columns in [80, 100] {
        for args in &all {
            for line in on_terminal(&folder, columns, args).lines() {
                let visible = console::strip_ansi_codes(line).trim_end().chars().count();
                assert!(visible <= columns.into(), "{args} at {columns}: {visible}: {line}");
            }
        }
    }
}

/// With `NO_COLOR` or without, progress is gone at the end; with it nothing is coloured.
#[cfg(target_os = "linux")]
#[test]
fn no_color_leaves_no_colours_and_no_progress() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[5]).bytes("l.csv", b"tiny,1,3,10,12,5\n");
    for args in [
        "run gelu --input x.npy --output y.npy",
        "run gelu --input x.npy --output y.npy --algorithm f32",
        "bench conv2d --layers l.csv --iterations 1 --threads 1",
        "verify gelu --quick",
        "tune conv2d --layers l.csv --threads 1 --budget 0.02",
        "run conv2 --help",
        "--help",
    ] {
        let shown = on_terminal_with(&folder, 80, args, &[("NO_COLOR", "1")]);
        assert!(!shown.contains("\u{1b}[1m") && !shown.contains("\u{1b}[3"), "{args}: {shown:?}");
        // What is left when the last line of progress was cleared.
        let last = shown.rsplit("\r\u{1b}[2K").next().unwrap();
        assert!(!last.contains("reading x.npy") && !last.contains("0/1"), "{args}: {shown:?}");
    }
}

#[test]
fn operators_are_suggested() {
    let folder = Folder::new();
    for (args, suggested) in [
        ("run conv1d", "'causal-conv1d'"),
        ("bench conv1d", "'causal-conv1d'"),
        ("verify causal", "'causal-conv1d'"),
        ("tune CONV2D", "'conv2d'"),
        ("run causal_conv", "'causal-conv1d'"),
        ("run gleu", "'gelu'"),
        ("run conv2", "'conv2d'"),
        ("gelu", "'run gelu'"),
        ("conv1d", "'run causal-conv1d'"),
    ] {
        folder.refuse(args, &["tip", suggested]);
    }
    folder.refuse("run fft", &["fft"]);
}

#[cfg(target_os = "linux")]
#[test]
fn run_says_what_it_does() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[5]);
    let run = "run gelu --input x.npy --output y.npy";
    let shown = on_terminal(&folder, 80, run);
    assert!(shown.contains("reading x.npy") && shown.contains("running gelu by cpu"), "{shown:?}");
    assert!(shown.contains("y.npy: y f32 [5]"), "{shown:?}");
    assert_eq!(on_terminal(&folder, 80, &format!("{run} --quiet")), "");
    // No progress in files and pipes.
    assert!(folder.windrow(run).stderr.is_empty());
    let shown = on_terminal(&folder, 80, "run gelu --input x.npy --output -");
    assert!(shown.contains("no text for a terminal"), "{shown:?}");
}

#[test]
fn quiet_commands_say_nothing_of_themselves() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[5]);
    assert_eq!(folder.succeed("run gelu --input x.npy --output y.npy --quiet"), "");
    assert_eq!(folder.succeed("-q tune --export table.json"), "");
    assert!(folder.succeed("tune --export -").starts_with("{"));
    assert_eq!(folder.succeed("tune --quiet --import table.json"), "");
    refused(&folder.windrow("-q run gelu --input z.npy --output y.npy"), "-q", &["z.npy"]);
}

#[cfg(unix)]
#[test]
fn names_cannot_speak_to_the_terminal() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[5]);
    let bad = "\u{1b}[31mred\nwindrow: fine\u{7}";
    let mut outputs = Vec::new();
    for args in [
        ["run", "gelu", "--output", "y.npy", "--input", &format!("{bad}.npy")],
        ["run", "gelu", "--output", "y.npy", "--input", &format!("{bad}.txt")],
        ["run", "gelu", "--input", "x.npy", "--output", &format!("{bad}/y.npy")],
        ["run", "gelu", "--input", "x.npy", "--output", &format!("{bad}.npy")],
        ["run", "gelu", "--input", "x.npy", "--device", bad],
        ["bench", "conv2d", "--iterations", "1", "--layers", bad],
        ["bench", "conv2d", "--iterations", "1", "--plot", bad],
        ["tune", "conv2d", "--budget", "1", "--import", bad],
    ] {
        outputs.push(folder.command("").args(args).output().unwrap());
    }
    let header = "{'descr': '\u{1b}[31m', 'fortran_order': False, 'shape': (1,), }\n";
    let mut bytes = b"\x93NUMPY\x03\x00".to_vec();
    bytes.extend((header.len() as u32).to_le_bytes());
    bytes.extend(header.as_bytes());
    folder.bytes("bad.npy", &bytes);
    outputs.push(folder.windrow("run gelu --input bad.npy --output y.npy"));
    let csv = "\u{1b}[31mname,1,1,9,9,1\n";
    folder.bytes("l.csv", csv.as_bytes());
    outputs.push(folder.windrow("bench conv2d --layers l.csv --iterations 1"));
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &[0; 4]);
    let tensors = [(bad, view.unwrap())];
    folder.bytes("m.safetensors", &safetensors::serialize(tensors, None).unwrap());
    outputs.push(folder.windrow("run gelu --input m.safetensors:w --output y.npy"));
    outputs.push(folder.command("devices").env("WINDROW_LOG", bad).output().unwrap());
    for output in outputs {
        let said = text(&output.stdout) + &text(&output.stderr);
        let control = said.chars().find(|c| c.is_control() && *c != '\n');
        assert_eq!(control, None, "{said}");
        assert!(!said.contains("\nwindrow: fine"), "{said}");
        assert!(said.contains("\\u{1b}[31m"), "{said}");
    }
}

#[test]
fn no_colours_in_a_pipe() {
    let folder = Folder::new();
    folder.bytes("l.csv", b"tiny,1,3,10,12,5\n");
    let mut command = folder.command("bench conv2d --layers l.csv --iterations 1");
    let output = command.env("WINDROW_LOG", "trace").env("TERM", "xterm").output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("planned"), "{said}");
    assert!(!said.contains('\u{1b}'), "{said}");
}

#[test]
fn help_has_examples_names_and_variables() {
    let folder = Folder::new();
    for args in [
        "",
        "bench",
        "verify",
        "tune",
        "devices",
        "run",
        "run gelu",
        "run conv2d",
        "run conv3d",
        "run causal-conv1d",
        "completions",
        "man",
    ] {
        let help = folder.succeed(&format!("{args} --help"));
        assert!(help.contains("Example"), "{args}: {help}");
        assert!(
            help.contains(&format!("  windrow {args}").trim_end().to_owned()),
            "{args}: {help}"
        );
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{args}: {help}");
    }
    let help = folder.succeed("--help");
    for variable in [
        "NUM_THREADS",
        "ISA",
        "VERIFY",
        "LOG",
        "TUNE_CACHE",
        "CACHE_DIR",
        "CUDA_PATH",
        "CUDA_SYNC",
        "HIP_PATH",
        "HIP_SYNC",
    ] {
        assert!(help.contains(&format!("WINDROW_{variable}")), "{variable}: {help}");
    }
    let help = folder.succeed("run conv2d --help");
    for name in ["winograd_gemm_f6", "im2col_gemm", "gelu_tanh", "tf32", "--channels-last", "swish"]
    {
        assert!(help.contains(name), "{name}: {help}");
    }
    for args in ["run", "run gelu", "run conv2d", "run conv3d", "run causal-conv1d"] {
        let help = folder.succeed(&format!("{args} --help"));
        assert!(help.contains("f32, f16 or bf16"), "{args}: {help}");
    }
    assert!(!help.contains("--channel-last"), "{help}");
    for (args, name) in [("bench", "im2col_gemm"), ("run gelu", "f16x8_pack"), ("tune", "bf16")] {
        let help = folder.succeed(&format!("{args} --help"));
        assert!(help.contains(name), "{args}: {help}");
    }
}

#[test]
fn shells_complete_names() {
    let folder = Folder::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = folder.succeed(&format!("completions {shell}"));
        assert!(script.contains("causal-conv1d") && script.contains("channels-last"), "{shell}");
        // The others know no values of options.
        let values = ["bash", "zsh", "fish"].contains(&shell);
        assert!(!values || script.contains("winograd_gemm_f4"), "{shell}");
    }
    folder.refuse("completions csh", &["csh", "bash"]);
    let page = folder.succeed("man");
    assert!(page.contains(".TH windrow 1"), "{page}");
    let page = folder.succeed("man run conv2d");
    assert!(page.contains("channels\\-last") && page.contains("winograd_gemm_f4"), "{page}");
    folder.refuse("man fft", &["no command `fft`"]);
    assert!(folder.succeed("--version").starts_with("windrow 0"));
}

#[test]
fn one_spelling_of_channels_last() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[1, 9, 4]).ramp("w.npy", &[4, 3]);
    folder.ramp("i.npy", &[1, 5, 5, 2]).ramp("f.npy", &[3, 2, 3, 3]);
    for option in ["--channels-last", "--channel-last"] {
        folder.succeed(&format!(
            "run causal-conv1d --input x.npy --weight w.npy --output y.npy {option}"
        ));
        folder.succeed(&format!("run conv2d --input i.npy --weight f.npy --output z.npy {option}"));
        assert_eq!(
            (folder.read("y.npy").shape(), folder.read("z.npy").shape()),
            (&[1, 9, 4][..], &[1, 3, 3, 3][..])
        );
    }
}

#[test]
fn verification_by_the_environment_is_never_silently_off() {
    let folder = Folder::new();
    // A tensor that takes the oracle a moment, and the operator none.
    folder.ramp("x.npy", &[5]);
    let with = |value: &str| {
        let mut command = folder.command("run gelu --input x.npy --output y.npy");
        command.env("WINDROW_VERIFY", value).output().unwrap()
    };
    for value in ["1", "true", "TRUE", "on", "yes", "0", "false", "off", ""] {
        assert!(with(value).status.success(), "{value}");
    }
    refused(&with("maybe"), "maybe", &["WINDROW_VERIFY", "maybe", "true"]);
}

#[test]
fn accuracy_and_algorithm_agree() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[1, 3, 8, 8]).ramp("w.npy", &[2, 3, 3, 3]);
    let run = "run conv2d --input x.npy --weight w.npy --output y.npy";
    for algorithm in ["winograd_gemm_f2", "winograd_gemm_f6"] {
        let args = format!("{run} --accuracy exact --algorithm {algorithm}");
        folder.refuse(&args, &["--accuracy exact", algorithm]);
    }
    for rest in [
        "--accuracy exact",
        "--accuracy exact --algorithm direct",
        "--accuracy fp32 --algorithm winograd_gemm_f6",
        "--algorithm winograd_gemm_f6",
    ] {
        folder.succeed(&format!("{run} {rest}"));
    }
}
