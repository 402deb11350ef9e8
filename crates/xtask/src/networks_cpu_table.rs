//! The tables of networks on the CPU beside other libraries, from a record of `benchmarks/networks_cpu.py`.

use crate::steps::Result;
use crate::tables::{members, number, text};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write;

/// What a user calls, as the record names it.
const OURS: [&str; 3] = ["windrow", "optimized", "backend"];

/// The other libraries, each with its settings in the record, of which the faster one counts.
const PEERS: [(&str, &[&str]); 4] = [
    ("PyTorch", &["pytorch"]),
    ("torch.compile", &["compiled"]),
    ("ONNX Runtime", &["onnxruntime", "onnxruntime-sleeping"]),
    ("OpenVINO", &["openvino", "openvino-unpinned"]),
];

/// The median of the fastest of these contestants, in milliseconds. Infinite if the record has none of them.
fn fastest(case: &Value, of: &[&str]) -> f64 {
    of.iter().map(|side| number(&case["ms"][side], "median")).fold(f64::INFINITY, f64::min)
}

/// The time of others over that of the fastest of Windrow's three ways: a table for networks alone, and one for each
/// number of busy programs beside them.
pub(crate) fn tables(record: &Value) -> Result<String> {
    let version = |library: &str| text(&record["versions"], library);
    let mut out = format!(
        "{}, {} threads, f32, one image; torch {}, onnxruntime {}, openvino {}.\n",
        text(record, "device"),
        record["threads"],
        version("torch"),
        version("onnxruntime"),
        version("openvino"),
    );
    let programs: BTreeSet<_> =
        members(&record["cases"]).filter_map(|(_, case)| case["programs"].as_u64()).collect();
    if programs.is_empty() {
        return Err("the record has no network".into());
    }
    for programs in programs {
        if programs > 0 {
            let _ = write!(out, "\nBeside {programs} programs that keep the cores busy:\n");
        }
        let of = |case: &Value| case["programs"].as_u64() == Some(programs);
        let cases: Vec<_> = members(&record["cases"]).filter(|(_, case)| of(case)).collect();
        out += &table(&cases);
    }
    Ok(out)
}

fn table(cases: &[(&str, &Value)]) -> String {
    let mut out = "\n| network | ours, ms |".to_owned();
    PEERS.iter().for_each(|(name, _)| out += &format!(" {name} |"));
    out += "\n|---|--:|--:|--:|--:|--:|\n";
    let mut ratios = [const { Vec::new() }; PEERS.len()];
    for (name, case) in cases {
        let ours = fastest(case, &OURS);
        let name = name.split(',').next().unwrap_or(name);
        let _ = write!(out, "| {name} | {ours:.2} |");
        for ((_, sides), ratios) in PEERS.iter().zip(&mut ratios) {
            let ratio = fastest(case, sides) / ours;
            out += &if ratio.is_finite() { format!(" {ratio:.2}x |") } else { " - |".into() };
            ratios.extend(Some(ratio).filter(|r| r.is_finite()));
        }
        out += "\n";
    }
    let of = |of: &dyn Fn(&Vec<f64>) -> f64| -> String {
        let cell =
            |r: &Vec<f64>| if r.is_empty() { " - |".into() } else { format!(" {:.2}x |", of(r)) };
        ratios.iter().map(cell).collect()
    };
    let mean = |r: &Vec<f64>| (r.iter().map(|x| x.ln()).sum::<f64>() / r.len() as f64).exp();
    let _ = writeln!(out, "| geometric mean | |{}", of(&mean));
    let _ =
        writeln!(out, "| least | |{}", of(&|r| r.iter().copied().fold(f64::INFINITY, f64::min)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_faster_setting_counts_and_loads_have_tables_of_their_own() {
        let median = |ms: f64| json!({"median": ms});
        let case = |programs: u64, ours: f64| {
            json!({"programs": programs, "ms": {
                "windrow": median(9.0), "optimized": median(ours), "pytorch": median(8.0),
                "onnxruntime": median(6.0), "onnxruntime-sleeping": median(5.0),
            }})
        };
        let cases = json!({"a": case(0, 4.0), "b": case(0, 1.0), "a, 3 busy": case(3, 4.0)});
        let record = json!({"device": "C", "threads": 2, "versions": {}, "cases": cases});
        let tables = tables(&record).unwrap();
        assert!(tables.contains("| a | 4.00 | 2.00x | - | 1.25x | - |\n"), "{tables}");
        assert!(tables.contains("| geometric mean | | 4.00x | - | 2.50x | - |\n"), "{tables}");
        let loaded = "\nBeside 3 programs that keep the cores busy:\n\n| network |";
        assert!(tables.contains(loaded), "{tables}");
        assert!(tables.ends_with("| least | | 2.00x | - | 1.25x | - |\n"), "{tables}");
        assert!(super::tables(&json!({"cases": {}})).is_err());
    }
}
