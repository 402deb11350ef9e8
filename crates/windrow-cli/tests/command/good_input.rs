//! The commands on good input.

use crate::folder::Folder;
use serde_json::Value;
use windrow::{DType, bf16};

#[test]
fn run_gelu() {
    let folder = Folder::new();
    folder.tensor("x.npy", &[-1.0f32, 0.0, 1.0, 2.0], &[2, 2]);
    folder.tensor("bias.npy", &[1.0f32, -1.0], &[2]);
    folder.tensor("gate.npy", &[2.0f32, 2.0, 1.0, 0.5], &[2, 2]);
    let printed = folder.succeed("run gelu --input x.npy --output y.npy --verify");
    assert!(printed.contains("y.npy: y f32 [2, 2]"), "{printed}");
    let y = folder.read("y.npy").to_vec::<f32>().unwrap();
    let gelu = [-0.15865526f32, 0.0, 0.8413447, 1.9544997];
    assert!(y.iter().zip(gelu).all(|(a, b)| (a - b).abs() < 1e-6), "{y:?}");
    folder.succeed(
        "run gelu --input x.npy --bias bias.npy --gate gate.npy --approximate tanh --threads 1 \
         --output z.safetensors",
    );
    let z = folder.read("z.safetensors:y").to_vec::<f32>().unwrap();
    let expected = [0.0, 2.0 * -0.158808, 1.954598, 0.5 * 0.841192];
    assert!(z.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{z:?}");
}

#[test]
fn run_conv2d_in_both_layouts() {
    let folder = Folder::new();
    // The same image as [n, c, h, w] and as [n, h, w, c].
    let pixel = |c: usize, i: usize| ((7 * c + 3 * i) % 11) as f32;
    let planar: Vec<f32> = (0..2 * 20).map(|i| pixel(i / 20, i % 20)).collect();
    let packed: Vec<f32> = (0..2 * 20).map(|i| pixel(i % 2, i / 2)).collect();
    folder.tensor("p.npy", &planar, &[1, 2, 4, 5]).tensor("q.npy", &packed, &[1, 4, 5, 2]);
    folder.ramp("w.npy", &[3, 2, 3, 3]).ramp("bias.npy", &[3]);
    // And what is added.
    let planar: Vec<f32> = (0..3 * 12).map(|i| pixel(i / 12, i % 12) - 5.0).collect();
    let packed: Vec<f32> = (0..3 * 12).map(|i| pixel(i % 3, i / 3) - 5.0).collect();
    folder.tensor("r.npy", &planar, &[1, 3, 4, 3]).tensor("s.npy", &packed, &[1, 4, 3, 3]);
    let options = "--weight w.npy --bias bias.npy --padding 1,0 --activation relu --verify";
    folder.succeed(&format!("run conv2d --input p.npy --residual r.npy --output y.npy {options}"));
    folder.succeed(&format!(
        "run conv2d --input q.npy --residual s.npy --output z.npy --channels-last {options}"
    ));
    let (y, z) = (folder.read("y.npy"), folder.read("z.npy"));
    assert_eq!((y.shape(), z.shape()), (&[1, 3, 4, 3][..], &[1, 4, 3, 3][..]));
    let z = z.permute(&[0, 3, 1, 2]).to_vec::<f32>().unwrap();
    let y = y.to_vec::<f32>().unwrap();
    assert!(y.iter().zip(&z).all(|(a, b)| (a - b).abs() < 1e-4), "{y:?} {z:?}");
}

#[test]
fn run_conv3d_in_chunks() {
    let folder = Folder::new();
    let frames = |first: u8, last: u8| (first..=last).map(f32::from).collect::<Vec<_>>();
    folder.tensor("first.npy", &frames(0, 3), &[1, 1, 4, 1, 1]);
    folder.tensor("second.npy", &frames(4, 5), &[1, 1, 2, 1, 1]);
    folder.tensor("w.npy", &[100.0f32, 10.0, 1.0], &[1, 1, 3, 1, 1]);
    let run = "run conv3d --weight w.npy --time-padding causal --verify";
    let printed =
        folder.succeed(&format!("{run} --input first.npy --final-frames state.npy --output y.npy"));
    assert!(printed.contains("state.npy: final_frames f32 [1, 1, 2, 1, 1]"), "{printed}");
    assert_eq!(folder.read("y.npy").to_vec::<f32>().unwrap(), [0.0, 1.0, 12.0, 123.0]);
    folder.succeed(&format!("{run} --input second.npy --initial-frames state.npy --output z.npy"));
    assert_eq!(folder.read("z.npy").to_vec::<f32>().unwrap(), [234.0, 345.0]);
    folder.ramp("x.npy", &[2, 4, 5, 9, 10]).ramp("f.npy", &[6, 2, 3, 3, 2]);
    let options = "--stride 1,2,1 --padding 1,1,0 --dilation 2,1,1 --groups 2 --activation silu";
    folder.succeed(&format!(
        "run conv3d --input x.npy --weight f.npy --output y.npy --verify {options} \
         --algorithm im2col_gemm --accuracy exact"
    ));
    assert_eq!(folder.read("y.npy").shape(), [2, 6, 3, 5, 9]);
}

#[test]
fn run_conv2d_with_every_option() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[2, 4, 9, 10]).ramp("w.npy", &[6, 2, 3, 2]);
    let options = "--stride 2,1 --padding 1 --dilation 1,2 --groups 2 --activation gelu_tanh";
    for extra in ["--algorithm direct", "--algorithm im2col_gemm", "--accuracy exact"] {
        folder.succeed(&format!(
            "run conv2d --input x.npy --weight w.npy --output y.npy --verify {options} {extra}"
        ));
        assert_eq!(folder.read("y.npy").shape(), [2, 6, 5, 10]);
    }
}

#[test]
fn run_with_any_slope_of_leaky_relu() {
    let folder = Folder::new();
    folder.tensor("x.npy", &[-2.0f32, -1.0, 0.0, 4.0], &[1, 1, 1, 4]);
    folder.tensor("w.npy", &[1.0f32], &[1, 1, 1, 1]).tensor("t.npy", &[1.0f32], &[1, 1]);
    folder.tensor("r.npy", &[-2.0f32, -1.0, 0.0, 4.0], &[1, 1, 4]);
    for (slope, want) in [("(0.25)", [-0.5, -0.25]), ("(-1.5)", [3.0, 1.5]), ("", [-0.02, -0.01])] {
        let conv2d = "run conv2d --input x.npy --weight w.npy";
        let causal = "run causal-conv1d --input r.npy --weight t.npy";
        for run in [conv2d, causal] {
            let activation = format!("--activation leaky_relu{slope}");
            folder.succeed(&format!("{run} --output y.npy --verify {activation}"));
            let y = folder.read("y.npy").to_vec::<f32>().unwrap();
            assert_eq!(y, [want[0], want[1], 0.0, 4.0], "{slope}");
        }
    }
    let run = "run conv2d --input x.npy --weight w.npy --output z.npy --activation";
    folder.refuse(&format!("{run} leaky_relu(inf)"), &["`negative_slope` is inf", "finite"]);
    folder.refuse(&format!("{run} leaky_relu(a)"), &["`activation` is leaky_relu(a)", "hardswish"]);
    folder.refuse(&format!("{run} leakyrelu"), &["leaky_relu", "hardswish"]);
}

#[test]
fn run_causal_conv1d_in_two_halves() {
    let folder = Folder::new();
    let x: Vec<f32> = (0..2 * 3 * 10).map(|i| (i % 7) as f32 - 3.0).collect();
    let half = |from: usize| -> Vec<f32> {
        x.chunks_exact(10).flat_map(|row| &row[from..from + 5]).copied().collect()
    };
    folder.tensor("x.npy", &x, &[2, 3, 10]).ramp("w.npy", &[3, 4]).ramp("b.npy", &[3]);
    folder.tensor("x0.npy", &half(0), &[2, 3, 5]).tensor("x1.npy", &half(5), &[2, 3, 5]);
    let run = "run causal-conv1d --weight w.npy --bias b.npy --activation silu --verify";
    folder.succeed(&format!("{run} --input x.npy --output y.npy"));
    folder.succeed(&format!("{run} --input x0.npy --output y0.npy --final-states s.npy"));
    folder.succeed(&format!("{run} --input x1.npy --output y1.npy --initial-states s.npy"));
    let read = |name| folder.read(name).to_vec::<f32>().unwrap();
    let (y, y0, y1) = (read("y.npy"), read("y0.npy"), read("y1.npy"));
    for (i, row) in y.chunks_exact(10).enumerate() {
        let halves = y0[5 * i..5 * i + 5].iter().chain(&y1[5 * i..5 * i + 5]);
        assert!(row.iter().zip(halves).all(|(a, b)| (a - b).abs() < 1e-5), "row {i}");
    }
}

#[test]
fn run_causal_conv1d_with_dilation() {
    let folder = Folder::new();
    folder.tensor("x.npy", &[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 4]);
    folder.tensor("w.npy", &[10.0f32, 1.0], &[1, 2]);
    let run = "run causal-conv1d --input x.npy --weight w.npy --verify --dilation";
    folder.succeed(&format!("{run} 2 --output y.npy --final-states s.npy"));
    let read = |name| folder.read(name).to_vec::<f32>().unwrap();
    assert_eq!((read("y.npy"), read("s.npy")), (vec![1.0, 2.0, 13.0, 24.0], vec![3.0, 4.0]));
    folder.refuse(&format!("{run} 0 --output z.npy"), &["dilation", "at least 1"]);
}

#[test]
fn run_causal_conv1d_on_packed_channel_last_sequences() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[1, 9, 4]).ramp("w.npy", &[4, 3]);
    folder.tensor("cu.npy", &[0i64, 4, 9], &[3]);
    folder.tensor("idx.npy", &[0i32, 0, 0, 0, 1, 1, 1, 1, 1], &[1, 9]);
    let run = "run causal-conv1d --input x.npy --weight w.npy --channels-last --verify";
    folder.succeed(&format!("{run} --cu-seqlens cu.npy --output y.npy --final-states s.npy"));
    folder.succeed(&format!("{run} --seq-idx idx.npy --output z.npy --algorithm direct"));
    assert_eq!(
        (folder.read("y.npy").shape(), folder.read("s.npy").shape()),
        (&[1, 9, 4][..], &[2, 4, 2][..])
    );
    assert_eq!(folder.read("y.npy").as_bytes(), folder.read("z.npy").as_bytes());
}

#[test]
fn bf16_goes_through_safetensors() {
    let folder = Folder::new();
    folder.tensor("x.safetensors", &[bf16::ONE; 6], &[6]);
    folder.succeed("run gelu --input x.safetensors:x --output y.safetensors");
    let y = folder.read("y.safetensors");
    assert_eq!(
        (y.desc().dtype, y.to_vec::<bf16>().unwrap()[0]),
        (DType::BF16, bf16::from_f32(0.8413447))
    );
}

#[test]
fn an_empty_batch_gives_an_empty_result() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[0, 3, 8, 8]).ramp("w.npy", &[2, 3, 3, 3]);
    folder.succeed("run conv2d --input x.npy --weight w.npy --output y.npy");
    assert_eq!(folder.read("y.npy").shape(), [0, 2, 6, 6]);
}

#[test]
fn an_existing_output_is_replaced() {
    let folder = Folder::new();
    folder.ramp("x.npy", &[5]).bytes("y.npy", b"old");
    folder.succeed("run gelu --input x.npy --output y.npy");
    assert_eq!(folder.read("y.npy").shape(), [5]);
    assert_eq!(folder.names(), ["x.npy", "y.npy"]);
}

#[test]
fn bench_reports_every_figure() {
    let folder = Folder::new();
    folder.bytes("layers.csv", b"tiny,2,3,10,12,5\nsmall,1,16,14,14,16\n");
    let bench = "bench conv2d --layers layers.csv --iterations 3 --threads 1";
    let json = folder.succeed(&format!("{bench} --json --csv rows.csv --plot plot.svg"));
    let record: Value = serde_json::from_str(&json).unwrap();
    let rows = record["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        for key in ["op", "device", "dtype", "algorithm", "shape"] {
            assert!(row[key].is_string(), "{key}: {row}");
        }
        for key in [
            "ms_median",
            "ms_min",
            "ms_p25",
            "ms_p75",
            "ms_p95",
            "ms_sd",
            "cv",
            "gflops",
            "speedup",
            "peak_share",
            "max_abs_err",
            "max_rel_err",
            "rms_rel_err",
        ] {
            assert!(row[key].as_f64().is_some_and(|v| v >= 0.0), "{key}: {row}");
        }
        assert_eq!((&row["verified"], &row["iterations"]), (&Value::Bool(true), &Value::from(3)));
    }
    assert_eq!(rows[0]["shape"], "2x3x10x12 k5");
    let csv = std::fs::read_to_string(folder.path("rows.csv")).unwrap();
    assert_eq!(csv.lines().count(), 3);
    assert!(csv.starts_with("op,case,device,"), "{csv}");
    let svg = std::fs::read_to_string(folder.path("plot.svg")).unwrap();
    assert!(svg.contains("<svg") && svg.contains("tiny 2x3x10x12 k5 f32"), "{svg}");
    let table = if cfg!(feature = "png") {
        let table = folder.succeed(&format!("{bench} --plot plot.png"));
        assert!(std::fs::read(folder.path("plot.png")).unwrap().starts_with(b"\x89PNG"));
        table
    } else {
        folder.refuse(&format!("{bench} --plot plot.png"), &["plot.png", "feature `png`"]);
        folder.succeed(bench)
    };
    assert!(table.contains("small 1x16x14x14 k16"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
}

#[test]
fn bench_algorithms_can_be_named() {
    let folder = Folder::new();
    folder.bytes("layers.csv", b"tiny,2,3,10,12,5\n");
    let json = folder.succeed(
        "bench conv2d --layers layers.csv --iterations 1 --algorithm im2col_gemm --dtype f32,f16 --json",
    );
    let record: Value = serde_json::from_str(&json).unwrap();
    let rows = record["rows"].as_array().unwrap();
    assert!(rows.iter().all(|r| r["algorithm"] == "im2col_gemm"), "{json}");
    assert_eq!((&rows[0]["dtype"], &rows[1]["dtype"]), (&"f32".into(), &"f16".into()));
}

#[test]
fn verify_passes_and_says_what_it_compared() {
    let folder = Folder::new();
    let text = folder.succeed("verify gelu --quick");
    assert!(text.contains("gelu on cpu") && text.contains(" 0 failures"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let report: Value =
        serde_json::from_str(&folder.succeed("verify gelu --quick --json")).unwrap();
    assert!(report["rows"].as_array().is_some_and(|rows| !rows.is_empty()));
    assert!(report["failures"].as_array().is_some_and(Vec::is_empty));
}

#[test]
fn devices_names_the_cpu() {
    let folder = Folder::new();
    let text = folder.succeed("devices");
    assert!(text.contains("cpu") && text.contains("GFLOP/s"), "{text}");
    let devices: Value = serde_json::from_str(&folder.succeed("devices --json")).unwrap();
    assert_eq!(devices[0]["device"], "cpu");
    assert!(devices[0]["peak_gflops"].as_f64().unwrap() > 0.0);
}
