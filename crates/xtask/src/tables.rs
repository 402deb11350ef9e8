//! Tables of the pages, each from one file of a record.

use crate::steps::Result;
use serde_json::Value;
use std::fmt::Write;

pub(crate) fn rows(value: &Value) -> impl Iterator<Item = &Value> {
    value["rows"].as_array().into_iter().flatten()
}

pub(crate) fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or("-")
}

pub(crate) fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or(f64::NAN)
}

/// Cases, times and rates; of GELU the largest matrices only.
pub(crate) fn speed(bench: &Value) -> Result<String> {
    let machine = &bench["machine"];
    let mut out = format!(
        "{}, {} threads, {}; f32 FMA {:.0} GFLOP/s, copies {:.1} GB/s, both measured in the same run.\n\n",
        text(machine, "cpu"),
        machine["threads"],
        text(machine, "isa"),
        number(machine, "peak_gflops"),
        number(machine, "copy_gbps"),
    );
    out += "| operator | case | dtype | algorithm | median ms | rate | of peak | speed-up |\n";
    out += "|---|---|---|---|--:|--:|--:|--:|\n";
    let shown = |r: &&Value| text(r, "op") != "gelu" || text(r, "shape") == "4096x4096";
    for r in rows(bench).filter(shown) {
        let rate = match r["gflops"].as_f64() {
            Some(gflops) => format!("{gflops:.0} GFLOP/s"),
            None => format!("{:.1} GB/s", number(r, "gbps")),
        };
        let _ = writeln!(
            out,
            "| {} | {} {} | {} | {} | {:.3} | {rate} | {:.0}% | {:.2}x |",
            text(r, "op"),
            // Older records name layouts in the singular.
            text(r, "case").replace("channel-", "channels-"),
            text(r, "shape"),
            text(r, "dtype"),
            text(r, "algorithm"),
            number(r, "ms_median"),
            100.0 * number(r, "peak_share"),
            number(r, "speedup"),
        );
    }
    Ok(out)
}

/// The largest errors of each operator, algorithm and element type over all cases and layouts.
pub(crate) fn accuracy(verify: &Value) -> Result<String> {
    struct Line<'a> {
        key: [&'a str; 3],
        elements: u64,
        errors: u64,
        max_abs: f64,
        rms_rel: f64,
    }
    let mut lines: Vec<Line<'_>> = Vec::new();
    for r in rows(verify).filter(|r| text(r, "check") == "y") {
        let key = [text(r, "op"), text(r, "algorithm"), text(r, "dtype")];
        let i = lines.iter().position(|l| l.key == key).unwrap_or_else(|| {
            lines.push(Line { key, elements: 0, errors: 0, max_abs: 0.0, rms_rel: 0.0 });
            lines.len() - 1
        });
        let line = &mut lines[i];
        line.elements += r["elements"].as_u64().unwrap_or(0);
        line.errors += r["error_count"].as_u64().unwrap_or(0);
        line.max_abs = line.max_abs.max(number(r, "max_abs_err"));
        line.rms_rel = line.rms_rel.max(number(r, "rms_rel_err"));
    }
    let mut out = String::from(
        "| operator | algorithm | dtype | elements | outside tolerance | max abs error | relative RMS error |\n|---|---|---|--:|--:|--:|--:|\n",
    );
    for Line { key: [op, algorithm, dtype], elements, errors, max_abs, rms_rel } in lines {
        let _ = writeln!(
            out,
            "| {op} | {algorithm} | {dtype} | {elements} | {errors} | {max_abs:.1e} | {rms_rel:.1e} |"
        );
    }
    Ok(out)
}

/// Kernels that were compiled for AMD's chips and executed by the emulator.
pub(crate) fn amd(result: &Value) -> Result<String> {
    let mut out = String::from(
        "| chip | variants compiled | kernels executed | elements compared | outside tolerance |\n\
         |---|--:|--:|--:|--:|\n",
    );
    for (chip, compiled) in members(&result["compiled"]) {
        let report = &result["executed"][chip];
        let sum = |key: &str| rows(report).filter_map(|row| row[key].as_u64()).sum::<u64>();
        let kernels = report["kernels"].as_array().into_iter().flatten();
        let launched = kernels.filter(|kernel| text(kernel, "status") == "launched").count();
        let executed = match launched {
            0 => "- | - | -".to_owned(),
            n => format!("{n} | {} | {}", sum("elements"), sum("error_count")),
        };
        let _ = writeln!(out, "| {chip} | {compiled} | {executed} |");
    }
    Ok(out)
}

/// How many times faster than other libraries on the CPU, by suite, element type and number of
/// threads: the fastest of each case, then each library. Only operators whose names begin with `op`.
pub(crate) fn peers(cpu: &Value, op: &str) -> Result<String> {
    let libraries = ["torch", "onnxruntime", "ncnn", "candle"];
    let mut out = format!("{}.\n\n", text(cpu, "machine").replace('-', " "));
    out += "| operator | dtype | threads | cases | fastest of them | least | PyTorch | ONNX Runtime | ncnn | candle |\n";
    out += "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n";
    for (threads, suites) in members(&cpu["threads"]) {
        let wanted = |suite: &str| suite != "overhead" && suite.starts_with(op);
        for (suite, cases) in members(suites).filter(|(suite, _)| wanted(suite)) {
            let dtype = |case: &str| case.split(' ').nth(1).unwrap_or("-").to_owned();
            let mut dtypes: Vec<String> = members(cases).map(|(case, _)| dtype(case)).collect();
            dtypes.dedup();
            for wanted in dtypes {
                let of: Vec<&Value> =
                    members(cases).filter(|(c, _)| dtype(c) == wanted).map(|(_, v)| v).collect();
                let factors = |library: Option<&str>| -> Vec<f64> {
                    of.iter().filter_map(|times| factor(times, library)).collect()
                };
                let best = factors(None);
                let least = best.iter().copied().fold(f64::INFINITY, f64::min);
                let _ = write!(
                    out,
                    "| {} | {wanted} | {threads} | {} | {} | {least:.2}x |",
                    suite.trim_end_matches(&format!("-{wanted}")),
                    best.len(),
                    times(&best)
                );
                for library in libraries {
                    let _ = write!(out, " {} |", times(&factors(Some(library))));
                }
                out += "\n";
            }
        }
    }
    Ok(out)
}

/// The time of a library, or of the fastest one, over Windrow's in one case.
pub(crate) fn factor(case: &Value, library: Option<&str>) -> Option<f64> {
    let least = |wanted: &dyn Fn(&str) -> bool| {
        members(case)
            .filter(|(call, _)| wanted(call.split(' ').next().unwrap_or_default()))
            .filter_map(|(_, time)| time["median"].as_f64())
            .reduce(f64::min)
    };
    let theirs = least(&|name| library.map_or(name != "windrow", |l| name == l))?;
    Some(theirs / least(&|name| name == "windrow")?)
}

/// The geometric mean as a factor.
fn times(factors: &[f64]) -> String {
    if factors.is_empty() { "-".into() } else { format!("{:.2}x", mean(factors)) }
}

pub(crate) fn mean(values: &[f64]) -> f64 {
    (values.iter().map(|v| v.ln()).sum::<f64>() / values.len() as f64).exp()
}

pub(crate) fn members(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    value.as_object().into_iter().flatten().map(|(k, v)| (k.as_str(), v))
}

/// Geometric means of conv2d's rates over all layers, beside cuDNN.
pub(crate) fn cuda_conv2d(record: &Value) -> Result<String> {
    let cudnn = record["machine"]["cudnn"].as_u64().ok_or("the record does not name its cuDNN")?;
    let mut out = format!(
        "{}, cuDNN {}.{}, PyTorch {}; geometric means over the layers,\n\
         and layers at no less than 0.98 of cuDNN's rate.\n\n",
        text(&record["machine"], "gpu"),
        cudnn / 10_000,
        cudnn % 10_000 / 100,
        text(&record["machine"], "torch"),
    );
    out +=
        "| conv2d | Windrow, TFLOP/s | cuDNN | | layers at least level |\n|---|--:|--:|--:|--:|\n";
    let mut modes: Vec<&str> = Vec::new();
    for mode in rows(record).map(|r| text(r, "mode")) {
        if !modes.contains(&mode) {
            modes.push(mode);
        }
    }
    for mode in modes {
        let of: Vec<&Value> = rows(record).filter(|r| text(r, "mode") == mode).collect();
        let rate = |key| mean(&of.iter().map(|r| number(r, key)).collect::<Vec<_>>());
        let (ours, theirs) = (rate("windrow_tflops"), rate("cudnn_tflops"));
        // Where a plan takes cuDNN the same kernel runs on both sides, and timings differ by so much.
        let level = |r: &&&Value| number(r, "cudnn_ms") >= 0.98 * number(r, "windrow_ms");
        let level = of.iter().filter(level).count();
        let _ = writeln!(
            out,
            "| {mode} | {ours:.0} | {theirs:.0} | {:.2}x | {level} of {} |",
            ours / theirs,
            of.len()
        );
    }
    Ok(out)
}

/// GELU and causal conv1d of the largest shape of each kind: bytes a second, beside a copy and others. Only the
/// operator whose name begins with `wanted`.
pub(crate) fn cuda_memory(record: &Value, wanted: &str) -> Result<String> {
    let shown = |r: &&Value| {
        let (op, shape) = (text(r, "op"), r["shape"].to_string());
        let largest = (op == "gelu" && shape == "[16384,8192]")
            || (op == "causal_conv1d" && shape == "[8,4096,2048]");
        largest && op.starts_with(wanted)
    };
    let mut out = format!(
        "{}, PyTorch {}.\n\n",
        text(&record["machine"], "device"),
        text(&record["machine"], "torch")
    );
    out += "| operator | shape | dtype | | TB/s | of a copy | PyTorch | causal-conv1d |\n";
    out += "|---|---|---|---|--:|--:|--:|--:|\n";
    let mut lines: Vec<(String, &Value)> = Vec::new();
    for r in rows(record).filter(shown) {
        // Of GELU's kernels the fastest: its form is the first word.
        let form = match text(r, "op") {
            "gelu" => text(r, "variant").split(' ').next().unwrap_or("-").replace("none", "exact"),
            _ => {
                let pass = text(r, "variant").strip_suffix("bias silu").unwrap_or("-").trim();
                let pass = if pass.is_empty() { "forward" } else { pass };
                format!("{}, {pass}", text(r, "layout").replace("channel_", "channels-"))
            }
        };
        let key = format!(
            "| {} | {} | {} | {form} |",
            text(r, "op"),
            r["shape"].to_string().replace(',', ", "),
            text(r, "dtype")
        );
        match lines.iter_mut().find(|(k, _)| *k == key) {
            Some((_, best)) if number(r, "us") < number(best, "us") => *best = r,
            Some(_) => {}
            None => lines.push((key, r)),
        }
    }
    for (key, r) in lines {
        let copy = rows(record)
            .find(|c| {
                text(c, "op") == "copy" && c["shape"] == r["shape"] && c["dtype"] == r["dtype"]
            })
            .map_or(f64::NAN, |c| number(c, "gbps"));
        let beside = |name: &str| {
            r[name].as_f64().map_or("-".into(), |us| format!("{:.2}x", us / number(r, "us")))
        };
        let _ = writeln!(
            out,
            "{key} {:.2} | {:.1}% | {} | {} |",
            number(r, "gbps") / 1e3,
            100.0 * number(r, "gbps") / copy,
            beside("torch_us"),
            beside("causal_conv1d_us")
        );
    }
    Ok(out)
}

/// Whole networks beside PyTorch, called as they are and, where there are such times, in CUDA graphs: PyTorch's times in
/// ms, those of the patched and the optimized network beside them, peak memory as a share of PyTorch's. Of all `modes`,
/// or of those named: `f32, bf16_cl`.
pub(crate) fn models(record: &Value, modes: &str) -> Result<String> {
    let mut out = format!("{}, {}.\n\n", text(record, "device"), versions(record));
    let shown = |name: &str| {
        modes.is_empty()
            || name.split(' ').nth(1).is_some_and(|m| modes.split(", ").any(|of| of == m))
    };
    let has_graphs = members(&record["cases"]).any(|(_, case)| !case["ms"]["graph"].is_null());
    let columns = if has_graphs { " graph, ms | patched | optimized |" } else { "" };
    let lines = "--:|".repeat(if has_graphs { 7 } else { 4 });
    let _ = writeln!(
        out,
        "| network, mode, batch |{columns} called, ms | patched | optimized | memory |\n|---|{lines}"
    );
    for (name, case) in members(&record["cases"]).filter(|(name, _)| shown(name)) {
        let bytes = |library: &str| number(&case["peak_bytes"], library);
        let memory = |side: &str| {
            let share = bytes(side) / bytes("pytorch");
            // Of what needs so little, or is shared with what ran before, a ratio says nothing.
            let says = share > 0.0 && bytes("pytorch") >= f64::from(64 << 20);
            if says { format!("{share:.2}x") } else { "-".into() }
        };
        let times = |how: &str| {
            let times = &case["ms"][how];
            let theirs = number(&times["pytorch"], "median");
            let beside = |side: &str| match number(&times[side], "median") {
                ms if ms > 0.0 => format!("{:.2}x", theirs / ms),
                _ => "-".into(),
            };
            let shown = if theirs > 0.0 { format!("{theirs:.2}") } else { "-".into() };
            format!("{shown} | {} | {}", beside("windrow"), beside("optimized"))
        };
        let called = if case["ms"]["train"].is_null() { "eager" } else { "train" };
        let graph = if has_graphs { format!(" {} |", times("graph")) } else { String::new() };
        let called = times(called);
        let memory = [memory("windrow"), memory("optimized")].join(", ").replace(", -", "");
        let _ = writeln!(out, "| {name} |{graph} {called} | {memory} |");
    }
    Ok(out)
}

/// Networks in a mode by torch.compile, with its own backend and with Windrow's, captured in CUDA graphs.
pub(crate) fn compiled(record: &Value, mode: &str) -> Result<String> {
    let mut out = format!("{}, {}.\n\n", text(record, "device"), versions(record));
    out +=
        "| network, mode, batch | PyTorch, ms | torch.compile, ms | backend=\"windrow\", ms | |\n";
    out += "|---|--:|--:|--:|--:|\n";
    let (mut sum, mut least, mut count) = (0.0, f64::INFINITY, 0);
    for (name, case) in members(&record["cases"]) {
        let ms = |side: &str| number(&case["ms"]["graph"][side], "median");
        let (theirs, ours) = (ms("compiled"), ms("backend"));
        if name.split(' ').nth(1) != Some(mode) || !(theirs > 0.0 && ours > 0.0) {
            continue;
        }
        let ratio = theirs / ours;
        (sum, least, count) = (sum + ratio.ln(), least.min(ratio), count + 1);
        let pytorch = ms("pytorch");
        let _ = writeln!(out, "| {name} | {pytorch:.2} | {theirs:.2} | {ours:.2} | {ratio:.2}x |");
    }
    if count == 0 {
        return Err(format!("no network was compiled in {mode}").into());
    }
    let mean = (sum / f64::from(count)).exp();
    let _ = writeln!(out, "\nGeometric mean {mean:.2}x, least {least:.2}x.");
    Ok(out)
}

/// Networks in their modes, each with its largest batch.
pub(crate) fn large_batches(record: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let parts = |name: &str| {
        let (network, rest) =
            name.trim_end_matches(" train").rsplit_once(' ').unwrap_or((name, ""));
        (network.to_owned(), rest.parse::<u32>().unwrap_or(0), name.ends_with(" train"))
    };
    members(&record["cases"]).filter(move |(name, _)| {
        let (network, batch, train) = parts(name);
        let larger = |other: &str| {
            let (same, of, step) = parts(other);
            same == network && step == train && of > batch
        };
        !members(&record["cases"]).any(|(other, _)| larger(other))
    })
}

/// Errors of whole networks against f64, Windrow's and PyTorch's.
pub(crate) fn model_errors(record: &Value) -> Result<String> {
    let mut out = format!("{}, {}.\n\n", text(record, "device"), versions(record));
    out += "| network, mode, batch | PyTorch | Windrow | Windrow's of PyTorch's |\n|---|--:|--:|--:|\n";
    for (name, case) in large_batches(record) {
        if case["error"].is_null() {
            continue;
        }
        let error = |library: &str| number(&case["error"], library);
        let (theirs, ours) = (error("pytorch"), error("windrow"));
        let _ = writeln!(out, "| {name} | {theirs:.1e} | {ours:.1e} | {:.2}x |", ours / theirs);
    }
    Ok(out)
}

fn versions(record: &Value) -> String {
    let of = |library: &str| format!("{library} {}", text(&record["versions"], library));
    let known = ["torch", "torchvision", "diffusers"];
    known.map(of).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn layouts_share_a_line() {
        let row = |layout: &str, check: &str, rms: f64| {
            json!({"op": "gelu", "algorithm": "cpu", "dtype": "f32", "layout": layout, "check": check,
                   "elements": 10, "error_count": 0, "max_abs_err": 1e-7, "rms_rel_err": rms})
        };
        let verify =
            json!({"rows": [row("a", "y", 1e-8), row("b", "y", 3e-8), row("b", "dx", 1.0)]});
        let table = accuracy(&verify).unwrap();
        assert!(table.ends_with("| gelu | cpu | f32 | 20 | 0 | 1.0e-7 | 3.0e-8 |\n"), "{table}");
    }

    #[test]
    fn peers_are_compared_with_the_fastest_and_with_each() {
        let t = |ms: f64| json!({"median": ms});
        let cpu = json!({"machine": "a-b", "threads": {"2": {"gelu": {
            "gelu f32 tanh 8x8": {"windrow": t(2.0), "windrow out=": t(1.0), "torch": t(4.0), "ncnn": t(3.0)},
            "gelu f32 none 8x8": {"windrow": t(1.0), "torch": t(1.0)},
        }}}});
        let table = peers(&cpu, "").unwrap();
        assert!(table.starts_with("a b.\n"), "{table}");
        let line = "| gelu | f32 | 2 | 2 | 1.73x | 1.00x | 2.00x | - | 3.00x | - |\n";
        assert!(table.ends_with(line), "{table}");
        assert_eq!(peers(&cpu, "conv2d").unwrap().lines().count(), 4);
    }

    #[test]
    fn compiled_networks_stand_beside_torch_compile() {
        let case = |compiled: f64, ours: f64| {
            let median = |ms: f64| json!({"median": ms});
            let (compiled, ours) = (median(compiled), median(ours));
            json!({"ms": {"graph": {"pytorch": median(9.0), "compiled": compiled, "backend": ours}}})
        };
        let alone = json!({"ms": {"graph": {"pytorch": {"median": 1.0}}}});
        let cases = json!({"a bf16 8": case(4.0, 1.0), "b bf16 8": case(1.0, 1.0), "a f32 8": case(1.0, 2.0), "a bf16 1": alone});
        let record = json!({"device": "G", "versions": {}, "cases": cases});
        let table = compiled(&record, "bf16").unwrap();
        assert!(table.contains("| a bf16 8 | 9.00 | 4.00 | 1.00 | 4.00x |\n"), "{table}");
        assert!(!table.contains("f32 8") && !table.contains("bf16 1 "), "{table}");
        assert!(table.ends_with("\nGeometric mean 2.00x, least 1.00x.\n"), "{table}");
        assert!(compiled(&record, "tf32").is_err());
    }

    #[test]
    fn networks_stand_beside_pytorch() {
        let both = |p: f64, w: f64| json!({"pytorch": p, "windrow": w});
        let median = |ms: f64| json!({"median": ms});
        let graph =
            json!({"pytorch": median(3.0), "windrow": median(1.5), "optimized": median(1.0)});
        let train = json!({"pytorch": median(2.0), "windrow": median(2.0)});
        let case = json!({"ms": {"graph": graph, "eager": train}, "peak_bytes": both(2e9, 1e9), "error": both(1e-6, 3e-6)});
        let step = json!({"ms": {"train": train}, "peak_bytes": both(2e6, 4e6)});
        let cases = json!({"net f32 64": case, "net f32 64 train": step});
        let record = json!({"device": "G", "versions": {}, "cases": cases});
        let table = models(&record, "").unwrap();
        assert_eq!(models(&record, "bf16, f32").unwrap(), table);
        assert!(!models(&record, "bf16, f3").unwrap().contains("| net f32"));
        let line = "| net f32 64 | 3.00 | 2.00x | 3.00x | 2.00 | 1.00x | - | 0.50x |\n";
        assert!(table.contains(line), "{table}");
        let line = "| net f32 64 train | - | - | - | 2.00 | 1.00x | - | - |\n";
        assert!(table.contains(line), "{table}");
        let cpu = json!({"device": "C", "versions": {}, "cases": {"net f32 1": {"ms": {"eager": train}}}});
        let table = models(&cpu, "").unwrap();
        assert!(
            table.ends_with("|---|--:|--:|--:|--:|\n| net f32 1 | 2.00 | 1.00x | - | - |\n"),
            "{table}"
        );
        let small =
            json!({"net f32 8": {}, "net f32 64": {}, "net f32 64 train": {}, "net bf16 1": {}});
        let names: Vec<_> =
            large_batches(&json!({"cases": small})).map(|(name, _)| name.to_owned()).collect();
        assert_eq!(names, ["net bf16 1", "net f32 64", "net f32 64 train"]);
        let errors = model_errors(&record).unwrap();
        assert!(errors.ends_with("| net f32 64 | 1.0e-6 | 3.0e-6 | 3.00x |\n"), "{errors}");
    }

    #[test]
    fn gpu_tables_take_means_and_the_fastest_kernel() {
        let row = |w: f64, c: f64| json!({"mode": "f32 NCHW", "windrow_tflops": w, "cudnn_tflops": c, "windrow_ms": 1.0 / w, "cudnn_ms": 1.0 / c});
        let record = json!({"machine": {"gpu": "G", "cudnn": 91_900, "torch": "t"}, "rows": [row(1.0, 2.0), row(16.0, 2.0)]});
        let table = cuda_conv2d(&record).unwrap();
        assert!(table.ends_with("| f32 NCHW | 4 | 2 | 2.00x | 1 of 2 |\n"), "{table}");
        let row = |op: &str, variant: &str, us: f64| {
            json!({"op": op, "variant": variant, "dtype": "f16", "layout": "contiguous",
                   "shape": [16384, 8192], "us": us, "gbps": 4000.0 / us, "torch_us": 2.0})
        };
        let rows =
            [row("copy", "16 bytes", 1.0), row("gelu", "none a", 2.0), row("gelu", "none b", 1.0)];
        let record = json!({"machine": {"device": "G", "torch": "t"}, "rows": rows});
        let table = cuda_memory(&record, "gelu").unwrap();
        let line = "| gelu | [16384, 8192] | f16 | exact | 4.00 | 100.0% | 2.00x | - |\n";
        assert!(table.ends_with(line) && table.matches("gelu").count() == 1, "{table}");
    }
}
