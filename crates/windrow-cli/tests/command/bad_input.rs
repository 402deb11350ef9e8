//! Bad input: a clear message on stderr, exit status 2, no output file.

use crate::folder::Folder;

fn conv2d() -> Folder {
    let folder = Folder::new();
    folder.ramp("x.npy", &[1, 3, 8, 8]).ramp("w.npy", &[2, 3, 3, 3]).ramp("bias.npy", &[2]);
    folder
}

const CONV2D: &str = "run conv2d --input x.npy --weight w.npy --output y.npy";

fn conv1d() -> Folder {
    let folder = Folder::new();
    folder.ramp("x.npy", &[1, 3, 8]).ramp("w.npy", &[3, 4]).ramp("bias.npy", &[3]);
    folder
}

const CONV1D: &str = "run causal-conv1d --input x.npy --weight w.npy --output y.npy";

const GELU: &str = "run gelu --input x.npy --output y.npy";

#[test]
fn the_good_input_is_good() {
    conv2d().succeed(&format!("{CONV2D} --bias bias.npy"));
    conv1d().succeed(&format!("{CONV1D} --bias bias.npy"));
    conv1d().succeed(GELU);
}

#[test]
fn wrong_rank() {
    let folder = conv2d();
    folder.ramp("x.npy", &[3, 8, 8]).refuse(CONV2D, &["`x`", "3 dimensions"]);
    folder.refuse(&format!("{CONV2D} --channels-last"), &["`x`", "3 dimensions", "[n, h, w, c]"]);
    conv2d().ramp("w.npy", &[2, 3, 3]).refuse(CONV2D, &["`w`", "3 dimensions"]);
    let folder = conv1d();
    folder.ramp("x.npy", &[3, 8]).refuse(CONV1D, &["`x`", "2 dimensions"]);
    folder.refuse(&format!("{CONV1D} --channels-last"), &["`x`", "2 dimensions", "[b, l, d]"]);
    conv1d().ramp("w.npy", &[3]).refuse(CONV1D, &["`weight`", "1 dimension"]);
}

#[test]
fn mismatched_channels() {
    conv2d().ramp("w.npy", &[2, 4, 3, 3]).refuse(CONV2D, &["`w`", "[2, 4, 3, 3]"]);
    let bias = format!("{CONV2D} --bias bias.npy");
    conv2d().ramp("bias.npy", &[3]).refuse(&bias, &["`bias`", "[3]"]);
    conv1d().ramp("w.npy", &[4, 4]).refuse(CONV1D, &["`weight`", "[4, 4]"]);
    let gelu = format!("{GELU} --bias bias.npy");
    conv1d().refuse(&gelu, &["`bias`", "[3]", "[8]"]);
    conv1d().ramp("gate.npy", &[3, 8]).refuse(&format!("{GELU} --gate gate.npy"), &["`gate`"]);
}

#[test]
fn groups_that_do_not_divide() {
    for groups in ["0", "2", "18446744073709551615"] {
        conv2d().refuse(&format!("{CONV2D} --groups {groups}"), &["groups", groups]);
    }
}

#[test]
fn zero_sizes() {
    conv2d().ramp("w.npy", &[2, 3, 0, 3]).refuse(CONV2D, &["`w`", "[2, 3, 0, 3]"]);
    conv1d().ramp("w.npy", &[3, 0]).refuse(CONV1D, &["`weight`", "[3, 0]"]);
}

#[test]
fn a_filter_larger_than_the_input() {
    conv2d().ramp("x.npy", &[1, 3, 2, 8]).refuse(CONV2D, &["[2, 3, 3, 3]"]);
}

#[test]
fn negative_or_huge_padding() {
    for padding in ["-1", "1,-2", "1.5", "1,2,3", "99999999999999999999"] {
        conv2d().refuse(&format!("{CONV2D} --padding {padding}"), &["--padding", "at least 0"]);
    }
    for padding in ["18446744073709551615", "9223372036854775807", "4611686018427387904,0"] {
        conv2d().refuse(&format!("{CONV2D} --padding {padding}"), &["overflow"]);
    }
}

#[test]
fn an_output_larger_than_memory() {
    conv2d().refuse(&format!("{CONV2D} --padding 33554432"), &["memory"]);
}

#[test]
fn stride_and_dilation_of_zero() {
    conv2d().refuse(&format!("{CONV2D} --stride 0"), &["stride", "at least 1"]);
    conv2d().refuse(&format!("{CONV2D} --dilation 1,0"), &["dilation", "at least 1"]);
}

#[test]
fn indices_out_of_range() {
    let packed = format!("{CONV1D} --cu-seqlens cu.npy");
    for (cu, position) in [([0, 5, 9], "[2]"), ([0, 6, 3], "[2]"), ([1, 5, 8], "[0]")] {
        conv1d().tensor::<i32>("cu.npy", &cu, &[3]).refuse(&packed, &["`cu_seqlens`", position]);
    }
    conv1d().tensor("cu.npy", &[0.0f32, 8.0], &[2]).refuse(&packed, &["`cu_seqlens`", "f32"]);
    let indexed = format!("{CONV1D} --seq-idx idx.npy");
    conv1d().tensor("idx.npy", &[0i32; 7], &[1, 7]).refuse(&indexed, &["`seq_idx`", "[1, 7]"]);
}

#[test]
fn states_of_another_shape() {
    let folder = conv1d();
    folder.ramp("s.npy", &[1, 3, 4]);
    folder.refuse(&format!("{CONV1D} --initial-states s.npy"), &["`initial_states`", "[1, 3, 3]"]);
}

#[test]
fn size_overflow_in_a_file() {
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }\n";
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    conv1d().bytes("x.npy", &bytes).refuse(GELU, &["x.npy", "overflows"]);
}

#[test]
fn unreadable_files() {
    conv1d()
        .refuse("run gelu --input missing.npy --output y.npy", &["missing.npy", "No such file"]);
    conv1d().refuse("run gelu --input x.txt --output y.npy", &["x.txt", ".safetensors"]);
    let folder = conv1d();
    std::fs::create_dir(folder.path("d.npy")).unwrap();
    folder.refuse("run gelu --input d.npy --output y.npy", &["d.npy"]);
    for name in ["x.npy", "x.npz", "x.safetensors"] {
        let args = format!("run gelu --input {name} --output y.npy");
        conv1d().bytes(name, b"not a tensor").refuse(&args, &[name, "not a valid"]);
        conv1d().bytes(name, b"").refuse(&args, &[name, "not a valid"]);
    }
}

#[test]
fn truncated_files() {
    for name in ["x.npy", "x.safetensors"] {
        let folder = conv1d();
        folder.ramp(name, &[1, 3, 8]);
        let bytes = std::fs::read(folder.path(name)).unwrap();
        folder.bytes(name, &bytes[..bytes.len() - 1]);
        folder.refuse(&format!("run gelu --input {name} --output y.npy"), &[name]);
    }
}

#[test]
fn wrong_element_types() {
    conv1d().tensor("x.npy", &[1i32; 4], &[4]).refuse(GELU, &["`x`", "i32", "f32"]);
    conv1d().tensor("x.npy", &[1f64; 4], &[4]).refuse(GELU, &["`x`", "f64"]);
    conv2d()
        .tensor("w.npy", &[windrow::f16::ONE; 54], &[2, 3, 3, 3])
        .refuse(CONV2D, &["`w`", "f16"]);
    let bf16 = [windrow::bf16::ONE; 4];
    conv1d().tensor("x.safetensors", &bf16, &[4]).refuse(
        "run gelu --input x.safetensors --output y.npy",
        &["y.npy", "bf16", ".safetensors"],
    );
}

#[test]
fn unknown_tensor_names() {
    let folder = conv1d();
    folder.ramp("m.safetensors", &[4]);
    let args = "run gelu --input m.safetensors:weight --output y.npy";
    folder.refuse(args, &["m.safetensors", "`weight`", "has x"]);
}

#[test]
fn outputs_that_cannot_be_written() {
    conv1d().refuse("run gelu --input x.npy --output y.txt", &["y.txt", ".npy"]);
    conv1d().refuse("run gelu --input x.npy --output nowhere/y.npy", &["nowhere"]);
    let args = format!("{CONV1D} --final-states nowhere/s.npy");
    conv1d().refuse(&args, &["nowhere"]);
    conv2d().refuse("bench conv2d --plot plot.jpg", &["plot.jpg", ".svg"]);
}

#[test]
fn unknown_and_unsuitable_algorithms() {
    conv2d().refuse(&format!("{CONV2D} --algorithm fft"), &["fft", "im2col_gemm"]);
    let strided = format!("{CONV2D} --stride 2 --algorithm winograd_gemm_f4");
    conv2d().refuse(&strided, &["winograd_gemm_f4", "not supported"]);
    conv2d().refuse("bench --algorithm fft", &["fft"]);
}

#[test]
fn devices_that_do_not_exist() {
    conv1d().refuse(&format!("{GELU} --device gpu"), &["gpu", "cuda:INDEX"]);
    conv1d().refuse(&format!("{GELU} --device cuda:99"), &["no device cuda"]);
    conv1d().refuse("verify --device cuda:99", &["no device cuda"]);
    conv1d().refuse("bench --device cuda:99", &["no device cuda"]);
    conv1d().refuse("bench conv2d --devices 99", &["no device cuda"]);
    conv1d().refuse("bench conv2d --devices 0,x", &["--devices"]);
    conv1d().refuse("bench gelu --devices 0,1", &["conv2d"]);
    conv1d().refuse("bench conv2d --gather", &["--devices"]);
}

#[test]
fn bad_layer_files() {
    let folder = conv2d();
    folder.refuse("bench conv2d --layers l.csv", &["l.csv", "No such file"]);
    folder.bytes("l.csv", b"a,1,2,3\n").refuse("bench conv2d --layers l.csv", &["name,n,c,h,w,k"]);
    folder.bytes("l.csv", b"# none\n").refuse("bench conv2d --layers l.csv", &["no layers"]);
    folder.bytes("l.csv", b"a,1,1,2,2,1\n").refuse("bench conv2d --layers l.csv", &["`w`"]);
    folder.bytes("l.csv", b"a,1,1,9,9,1\n").refuse("bench conv2d --dtype f64", &["f64"]);
}
