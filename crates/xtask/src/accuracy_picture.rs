//! The picture of accuracy: errors against f64, of operators and of whole networks.

use crate::steps::Result;
use crate::svg::{Axis, Picture};
use crate::tables::{large_batches, number, rows, text};
use serde_json::Value;

pub(crate) const ALT: &str =
    "Dots: errors of Windrow's operators and of whole networks against f64, by element type";

/// Element types with the class of their dots and the bits of their mantissas, the hidden one counted.
const TYPES: [(&str, &str, i32); 3] = [("f32", "a", 24), ("f16", "c", 11), ("bf16", "b", 8)];

const ROW: f64 = 19.0;
const WIDTH: f64 = 900.0;
const LABELS: f64 = 215.0;

pub(crate) fn svg(cpu: &Value, gpu: &Value, models: &Value) -> Result<String> {
    let axis = Axis { least: 1e-8, most: 1.0, left: LABELS, right: WIDTH - 24.0 };
    let mut picture = Picture::new(WIDTH);
    picture.text(
        16.0,
        26.0,
        "text head",
        "Relative RMS error against f64 (logarithmic scale; left is better)",
    );
    let mut x = 16.0;
    for (name, class, _) in TYPES {
        picture.dot(x + 4.0, 46.0, class);
        picture.text(x + 14.0, 50.0, "text", name);
        x += 64.0;
    }
    picture.dot(x + 4.0, 46.0, "faint");
    picture.text(x + 14.0, 50.0, "text", "on the CPU");
    picture.dot(x + 104.0, 46.0, "open base");
    picture.text(x + 114.0, 50.0, "text", &format!("on an {}", text(models, "device")));
    picture.line((x + 252.0, 40.0), (x + 252.0, 54.0), "base dash");
    picture.text(x + 260.0, 50.0, "text", "rounding the exact result to the type, nothing else");

    let lines = operators(&[cpu, gpu]);
    let top = 98.0;
    picture.text(16.0, top - 20.0, "text head", "Operators, the worst layout");
    let bottom = grid(&mut picture, axis, top, lines.len());
    for (_, class, bits) in TYPES {
        let at = axis.at(rounding(bits));
        picture.line((at, top), (at, bottom), &format!("{class} dash"));
    }
    for (i, line) in lines.iter().enumerate() {
        let y = top + ROW * (i as f64 + 0.5) + 2.0;
        picture.text(axis.left - 10.0, y + 4.0, "text end", &line.name);
        for (&(_, class, _), [cpu, gpu]) in TYPES.iter().zip(line.errors) {
            if let Some(error) = cpu {
                picture.dot(axis.at(error), y, class);
            }
            if let Some(error) = gpu {
                picture.dot(axis.at(error), y, &format!("{class} open"));
            }
        }
    }

    let networks = networks(models);
    let top = bottom + 68.0;
    let title = format!(
        "Whole networks on an {}: Windrow (dots) and PyTorch (ticks)",
        text(models, "device")
    );
    picture.text(16.0, top - 20.0, "text head", &title);
    let bottom = grid(&mut picture, axis, top, networks.len());
    for (i, (name, class, theirs, ours)) in networks.iter().enumerate() {
        let y = top + ROW * (i as f64 + 0.5) + 2.0;
        picture.text(axis.left - 10.0, y + 4.0, "text end", name);
        picture.dot(axis.at(*ours), y, &format!("{class} open"));
        picture.bar(axis.at(*theirs) - 1.0, axis.at(*theirs) + 1.0, y - 8.0, 16.0, "text");
    }
    let note = "conv2d in f32 on the GPU: what plans take by default. Networks: element type and batch behind the name.";
    picture.text(16.0, bottom + 42.0, "faint", note);
    Ok(picture.finish(bottom + 58.0, ALT))
}

/// The relative RMS error of rounding numbers of evenly spread logarithms to so many bits.
fn rounding(bits: i32) -> f64 {
    (0.125 / std::f64::consts::LN_2).sqrt() * 2f64.powi(-bits)
}

/// Lines at the powers of ten, numbered below; returns where they end.
fn grid(picture: &mut Picture, axis: Axis, top: f64, count: usize) -> f64 {
    let bottom = top + ROW * count as f64 + 4.0;
    for power in -8..=0 {
        let at = axis.at(10f64.powi(power));
        picture.line((at, top), (at, bottom), "line");
        picture.text(at, bottom + 15.0, "faint mid", &format!("1e{power}"));
    }
    bottom
}

/// An operator's algorithm with its largest errors by type: on the CPU, on the GPU.
struct Line {
    name: String,
    errors: [[Option<f64>; 2]; 3],
}

fn operators(records: &[&Value; 2]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for (device, record) in records.iter().enumerate() {
        for r in rows(record).filter(|r| text(r, "check") == "y") {
            let Some(dtype) = TYPES.iter().position(|(name, ..)| *name == text(r, "dtype")) else {
                continue;
            };
            let (op, algorithm) = (text(r, "op"), text(r, "algorithm"));
            // The rows of a GPU join all accuracies that an algorithm was asked for, but what plans take by default.
            if (device, op, dtype) == (1, "conv2d", 0) && algorithm != "planned" {
                continue;
            }
            // GELU's kernels on a GPU differ in their accesses, not in what they compute.
            let name = match op {
                "gelu" => op.to_owned(),
                _ => format!("{op} {algorithm}"),
            };
            let at = lines.iter().position(|line| line.name == name).unwrap_or_else(|| {
                lines.push(Line { name, errors: Default::default() });
                lines.len() - 1
            });
            let error = &mut lines[at].errors[dtype][device];
            *error = Some(error.unwrap_or(0.0).max(number(r, "rms_rel_err")));
        }
    }
    lines.sort_by_key(|line| family(&line.name));
    lines
}

/// Operators in the order of the README, each with its algorithms by name.
fn family(name: &str) -> (usize, String) {
    let order =
        ["gelu", "causal_conv1d ", "causal_conv1d_update", "causal_conv1d_serving", "conv2d"];
    (order.iter().position(|start| name.starts_with(start)).unwrap_or(order.len()), name.to_owned())
}

/// Names of networks with the class of their type, PyTorch's error and Windrow's.
fn networks(record: &Value) -> Vec<(String, &'static str, f64, f64)> {
    let case = |(name, case): (&str, &Value)| {
        // f16 and bf16 at the tier `half`, and f16 beside bf16, say nothing more.
        if name.contains(" half ") || name.contains("f16_cl") && !name.contains("bf16_cl") {
            return None;
        }
        let class = TYPES.iter().rev().find(|(dtype, ..)| name.contains(dtype))?.1;
        let error = |library: &str| case["error"][library].as_f64().filter(|e| *e > 0.0);
        Some((name.replace("_cl", ""), class, error("pytorch")?, error("windrow")?))
    };
    large_batches(record).filter_map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_worst_layout_counts_on_each_device() {
        let row = |algorithm: &str, check: &str, error: f64| json!({"op": "gelu", "algorithm": algorithm, "dtype": "f16", "check": check, "rms_rel_err": error});
        let cpu =
            json!({"rows": [row("cpu", "y", 1e-4), row("cpu", "y", 3e-4), row("cpu", "dx", 1.0)]});
        let gpu = json!({"rows": [row("f16", "y", 2e-4), row("f16x8", "y", 1e-4)]});
        let lines = operators(&[&cpu, &gpu]);
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].errors, [[None; 2], [Some(3e-4), Some(2e-4)], [None; 2]]);
    }

    #[test]
    fn rounding_agrees_with_a_count() {
        // Numbers from 1 to 2 whose logarithms are evenly spread, rounded to 8 bits.
        let n = 100_000;
        let square = |i: i32| {
            let x = 2f64.powf((f64::from(i) + 0.5) / f64::from(n));
            ((x * 128.0).round() / 128.0 / x - 1.0).powi(2)
        };
        let counted = ((0..n).map(square).sum::<f64>() / f64::from(n)).sqrt();
        assert!((counted / rounding(8) - 1.0).abs() < 0.02, "{counted} {}", rounding(8));
    }
}
