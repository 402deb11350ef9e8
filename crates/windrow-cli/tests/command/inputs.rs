//! The sources of tensors and tables: archives, pipes, devices, damaged and endless files.

use crate::folder::{Folder, refused};
use std::io::Write;
use std::process::Stdio;
use std::time::Instant;
use windrow::Tensor;

/// A `.npz` with one stored array, and where its data begin.
fn npz(folder: &Folder) -> (Vec<u8>, usize) {
    folder.ramp("a.npy", &[64]);
    let array = std::fs::read(folder.path("a.npy")).unwrap();
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    zip.start_file("a.npy", options).unwrap();
    zip.write_all(&array).unwrap();
    let bytes = zip.finish().unwrap().into_inner();
    let data = bytes.windows(array.len()).position(|w| w == array).unwrap() + array.len() - 256;
    (bytes, data)
}

#[test]
fn a_flipped_bit_of_an_archive_is_found() {
    let folder = Folder::new();
    let (mut bytes, data) = npz(&folder);
    folder.bytes("x.npz", &bytes).succeed("run gelu --input x.npz --output y.npy");
    std::fs::remove_file(folder.path("y.npy")).unwrap();
    bytes[data + 100] ^= 1;
    folder.bytes("x.npz", &bytes);
    folder.refuse("run gelu --input x.npz --output y.npy", &["x.npz", "checksum"]);
}

#[test]
fn sizes_are_believed_as_far_as_the_file_reaches() {
    let folder = Folder::new();
    let (mut bytes, _) = npz(&folder);
    // The header of the array, and the index of the archive, claim ten gigabytes.
    let shape = bytes.windows(5).position(|w| w == b"(64,)").unwrap();
    bytes[shape..shape + 14].copy_from_slice(b"(2500000000,)}");
    let index = bytes.windows(4).rposition(|w| w == b"PK\x01\x02").unwrap();
    bytes[index + 24..index + 28].copy_from_slice(&0xffff_fffe_u32.to_le_bytes());
    let start = Instant::now();
    folder.bytes("x.npz", &bytes).refuse("run gelu --input x.npz --output y.npy", &["x.npz"]);
    assert!(start.elapsed().as_secs() < 5);
}

#[test]
fn one_tensor_of_a_large_file_is_one_range() {
    let folder = Folder::new();
    // Ten gigabytes with a hole between two tensors of eight bytes.
    let far: u64 = 10 << 30;
    let header = format!(
        "{{\"a\":{{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}},\
         \"hole\":{{\"dtype\":\"U8\",\"shape\":[{0}],\"data_offsets\":[8,{1}]}},\
         \"b\":{{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[{1},{2}]}}}}",
        far - 8,
        far,
        far + 8
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    folder.bytes("m.safetensors", &bytes);
    let file = std::fs::OpenOptions::new().write(true).open(folder.path("m.safetensors")).unwrap();
    file.set_len(bytes.len() as u64 + far + 8).unwrap();
    let start = Instant::now();
    folder.succeed("run gelu --input m.safetensors:b --output y.npy");
    assert!(start.elapsed().as_secs() < 5);
    assert_eq!(folder.read("y.npy").shape(), [2]);
    folder.refuse("run gelu --input m.safetensors:c --output z.npy", &["a, b, hole"]);
}

#[test]
fn names_of_an_archive_are_few_and_near() {
    let folder = Folder::new();
    let data = [0u8; 4];
    let views = (0..5000).map(|i| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &data);
        (format!("layers.{i}.mlp.gate_proj.weight"), view.unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    folder.bytes("m.safetensors", &bytes);
    let args = "run gelu --input m.safetensors:layers.77.mlp.gate_prj.weight --output y.npy";
    folder.refuse(args, &["has layers.77.mlp.gate_proj.weight,", "4992 more"]);
    assert!(folder.windrow(args).stderr.len() < 1000);
    folder.refuse("run gelu --input m.safetensors --output y.npy", &[":NAME", "4992 more"]);
}

#[test]
fn headers_are_read_as_they_are_written() {
    let folder = Folder::new();
    let file = |order: &str, shape: &str| {
        let header = format!("{{'descr': '<f4', 'fortran_order': {order}, 'shape': {shape}, }}\n");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend([0; 80]);
        bytes
    };
    folder.bytes("x.NPY", &file("False", "(4L, 5L)"));
    folder.succeed("run gelu --input x.NPY --output y.Npy");
    assert_eq!(folder.read("y.Npy").shape(), [4, 5]);
    folder.bytes("x.npy", &file("banana", "(4, 5)"));
    folder.refuse("run gelu --input x.npy --output z.npy", &["fortran_order", "banana", "True"]);
}

#[cfg(target_os = "linux")]
#[test]
fn names_need_not_be_text() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new();
    folder.ramp("x.npy", &[5]);
    let name = OsStr::from_bytes(b"\xff\xfe.npy");
    std::fs::rename(folder.path("x.npy"), folder.path(".").join(name)).unwrap();
    let output = folder.command("run gelu --output y.npy --input").arg(name).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut command = folder.command("run gelu --input y.npy --output");
    assert!(command.arg(OsStr::from_bytes(b"\xfd.npy")).output().unwrap().status.success());
}

/// Runs with this on standard input.
fn fed(folder: &Folder, args: &str, bytes: &[u8]) -> std::process::Output {
    let mut command = folder.command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // One that is refused is not read to its end.
    let _ = child.stdin.take().unwrap().write_all(bytes);
    child.wait_with_output().unwrap()
}

#[test]
fn standard_input_and_output() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[3, 5]).ramp("x.safetensors", &[3, 5]);
    folder.succeed("run gelu --input x.npy --output y.npy");
    let want = std::fs::read(folder.path("y.npy")).unwrap();
    for (name, source) in [("x.npy", "-"), ("x.safetensors", "-"), ("x.safetensors", "-:x")] {
        let bytes = std::fs::read(folder.path(name)).unwrap();
        let output = fed(&folder, &format!("run gelu --input={source} --output -"), &bytes);
        assert_eq!(output.stdout, want, "{name} {output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("-: y f32 [3, 5]"), "{said}");
    }
    // bf16 goes out as .safetensors, which the next command knows by its beginning.
    folder.tensor("b.safetensors", &[windrow::bf16::ONE; 6], &[6]);
    let bytes = std::fs::read(folder.path("b.safetensors")).unwrap();
    let once = fed(&folder, "run gelu --input - --output - --quiet", &bytes);
    assert!(once.status.success() && once.stderr.is_empty(), "{once:?}");
    let twice = fed(&folder, "run gelu --input - --output z.safetensors", &once.stdout);
    assert!(twice.status.success(), "{twice:?}");
    assert_eq!(folder.read("z.safetensors").shape(), [6]);
    let both = fed(&folder, "run gelu --input - --gate - --output y.npy", &want);
    refused(&both, "-", &["one tensor from standard input"]);
    let cut = fed(&folder, "run gelu --input - --output y.npy", &want[..want.len() - 1]);
    refused(&cut, "-", &["truncated"]);
    let zip = fed(&folder, "run gelu --input - --output y.npy", &npz(&folder).0);
    refused(&zip, "-", &["cannot be read from a pipe"]);
    let layers = fed(
        &folder,
        "bench conv2d --layers - --iterations 1 --csv - --json",
        b"tiny,2,3,10,12,5\n",
    );
    assert!(layers.status.success(), "{layers:?}");
    assert!(layers.stdout.starts_with(b"op,case,device") && layers.stderr.starts_with(b"{"));
}

#[cfg(unix)]
#[test]
fn endless_inputs_end() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[4]);
    for name in ["z.npy", "z.npz", "z.safetensors", "z.csv"] {
        std::os::unix::fs::symlink("/dev/zero", folder.path(name)).unwrap();
    }
    let start = Instant::now();
    for name in ["z.npy", "z.npz", "z.safetensors", "/dev/zero", "/dev/null"] {
        folder.refuse(&format!("run gelu --input {name} --output y.npy"), &[name, "not a valid"]);
    }
    for args in ["bench conv2d --layers z.csv", "tune --import /dev/zero"] {
        folder.refuse(args, &["more than 16777216 bytes"]);
    }
    assert!(start.elapsed().as_secs() < 20);
    // An array with no end behind it is read as far as it goes.
    let line = "(cat x.npy; cat /dev/zero) | $W run gelu --input - --output y.npy";
    assert!(folder.shell(line).status.success());
    let line = "$W run gelu --input <(cat x.npy) --output y.npy && rm y.npy";
    assert!(folder.shell(line).status.success());
}

#[test]
fn as_many_sequences_as_tokens_are_verified_in_no_time() {
    let folder = Folder::new();
    let tokens = 70_000;
    let cu: Vec<i32> = (0..=tokens).collect();
    let x = Tensor::zeros(windrow::DType::F32, &[1, 2, tokens as usize]).unwrap();
    windrow_cli::files::write(&[(&folder.path("x.npy"), "x", &x)]).unwrap();
    folder.ramp("w.npy", &[2, 4]).tensor("cu.npy", &cu, &[cu.len()]);
    let start = Instant::now();
    let run = "run causal-conv1d --input x.npy --weight w.npy --cu-seqlens cu.npy";
    folder.succeed(&format!("{run} --output y.npy --verify"));
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

#[test]
fn tiny_and_infinite_numbers_are_no_false_alarms() {
    let folder = Folder::new();
    let noise = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 504.0 - 1.0;
    let noise = |len: usize, scale: f32| (0..len).map(|i| scale * noise(i)).collect::<Vec<f32>>();
    folder.tensor("tiny.npy", &noise(2048, 1e-39), &[1, 8, 16, 16]);
    let mut special = noise(2048, 1.0);
    special[85] = f32::INFINITY;
    special[900] = f32::NEG_INFINITY;
    special[1500] = f32::NAN;
    folder.tensor("special.npy", &special, &[1, 8, 16, 16]);
    folder.tensor("w.npy", &noise(576, 1.0), &[8, 8, 3, 3]);
    folder.tensor("small.npy", &noise(576, 1e-6), &[8, 8, 3, 3]);
    for x in ["tiny", "special"] {
        for w in ["w", "small"] {
            for algorithm in [
                "direct",
                "im2col_gemm",
                "winograd_gemm_f2",
                "winograd_gemm_f4",
                "winograd_gemm_f6",
            ] {
                folder.succeed(&format!(
                    "run conv2d --input {x}.npy --weight {w}.npy --padding 1 --output y.npy \
                     --algorithm {algorithm} --verify"
                ));
            }
        }
    }
    folder.tensor("x.npy", &noise(256, 1e-39), &[2, 4, 32]).tensor(
        "f.npy",
        &noise(16, 1.0),
        &[4, 4],
    );
    for activation in ["identity", "silu", "gelu"] {
        folder.succeed(&format!(
            "run causal-conv1d --input x.npy --weight f.npy --output y.npy --verify \
             --activation {activation}"
        ));
    }
}
