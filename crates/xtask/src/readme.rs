//! The README's tables, made from the record that it names, so that no figure is typed by hand.
//!
//! A table stands between `<!-- NAME from RECORD -->` and `<!-- end -->`, where RECORD is a folder
//! of benchmarks/record.

use crate::record::RECORDS;
use crate::steps::{Result, root};
use serde_json::Value;
use std::fmt::Write;

const END: &str = "<!-- end -->";

pub(crate) fn write() -> Result {
    let path = root().join("README.md");
    let (_, new) = texts()?;
    std::fs::write(&path, new).map_err(|e| format!("{}: {e}", path.display()).into())
}

pub(crate) fn check() -> Result {
    let (old, new) = texts()?;
    if old == new {
        return Ok(());
    }
    Err("README.md: its tables are not those of the record; run `cargo xtask readme`".into())
}

/// The README as it is and as it should be.
fn texts() -> Result<(String, String)> {
    let old = read("README.md")?;
    let new = fill(&old, |name, record| {
        let (bench, verify) = (json(record, "bench")?, json(record, "verify")?);
        match name {
            "speed" => speed(&bench),
            "accuracy" => accuracy(&verify),
            _ => Err(format!("README.md: no table `{name}`").into()),
        }
    })?;
    Ok((old, new))
}

fn read(name: &str) -> Result<String> {
    std::fs::read_to_string(root().join(name)).map_err(|e| format!("{name}: {e}").into())
}

fn json(record: &str, file: &str) -> Result<Value> {
    let name = format!("{RECORDS}/{record}/{file}.json");
    serde_json::from_str(&read(&name)?).map_err(|e| format!("{name}: {e}").into())
}

/// Replaces what stands between the markers.
fn fill(text: &str, table: impl Fn(&str, &str) -> Result<String>) -> Result<String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("<!-- ") {
        let Some((marker, body)) = after.split_once(" -->\n") else { break };
        out += before;
        let _ = writeln!(out, "<!-- {marker} -->");
        rest = body;
        if let Some((name, record)) = marker.split_once(" from ") {
            let Some((_, after)) = body.split_once(END) else {
                return Err(format!("README.md: no `{END}` after `{marker}`").into());
            };
            out += &table(name, record)?;
            out += END;
            rest = after;
        }
    }
    Ok(out + rest)
}

fn rows(value: &Value) -> impl Iterator<Item = &Value> {
    value["rows"].as_array().into_iter().flatten()
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or("-")
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or(f64::NAN)
}

/// Cases, times and rates; of GELU the largest matrices only.
fn speed(bench: &Value) -> Result<String> {
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
            "| {} | {} {} | {} | {} | {:.3} | {rate} | {:.0}% | {:.1}x |",
            text(r, "op"),
            text(r, "case"),
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
fn accuracy(verify: &Value) -> Result<String> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn markers_are_filled_and_the_rest_stays() {
        let text = "a\n<!-- note -->\nb\n<!-- speed from r -->\nold\n<!-- end -->\nc";
        let filled = fill(text, |name, record| Ok(format!("{name} {record}\n"))).unwrap();
        assert_eq!(filled, "a\n<!-- note -->\nb\n<!-- speed from r -->\nspeed r\n<!-- end -->\nc");
        assert_eq!(fill(&filled, |name, record| Ok(format!("{name} {record}\n"))).unwrap(), filled);
        assert!(fill("<!-- speed from r -->\nold", |_, _| Ok(String::new())).is_err());
    }

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
}
