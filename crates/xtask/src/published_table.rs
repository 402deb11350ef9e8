//! The table of published networks, from a record of `benchmarks/published.py`.

use crate::steps::Result;
use crate::tables::{number, text};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The ways to run a network, as the record names them and as a reader does.
const WAYS: [(&str, &str); 3] = [
    ("patched", "`patch`"),
    ("optimized", "`optimize`"),
    ("compiled", "`torch.compile(backend=\"windrow\")`"),
];

/// Times PyTorch's own error, by what computes: what is fastest, and Windrow wherever it can.
const ALLOWED: [(&str, f64); 2] = [("fastest", 2.0), ("forced", 4.0)];

/// How far results are from f64, each way to run the networks that the record has; and what `torch.compile` made of them.
pub(crate) fn table(record: &Value) -> Result<String> {
    let all: Vec<_> = record["cases"].as_array().into_iter().flatten().collect();
    let crashed = all.iter().filter(|case| !case["crash"].is_null()).count();
    let mut out = format!(
        "{}, PyTorch {}: {} networks, {crashed} of which crashed. Errors are multiples of PyTorch's own.\n\n\
         | run by | networks | error at most 2x | most | Windrow's kernels wherever they can: at most 4x | most |\n\
         |---|--:|--:|--:|--:|--:|\n",
        text(record, "cpu"),
        text(record, "torch"),
        all.len()
    );
    for (way, name) in WAYS {
        let errors = |how: &str| -> Vec<f64> {
            all.iter().map(|case| number(&case[how], way)).filter(|x| !x.is_nan()).collect()
        };
        if errors("fastest").is_empty() {
            continue;
        }
        let _ = write!(out, "| {name} | {}", errors("fastest").len());
        for (how, allowed) in ALLOWED {
            let found = errors(how);
            let within = found.iter().filter(|x| **x <= allowed).count();
            let _ =
                write!(out, " | {within} | {:.1}x", found.iter().fold(0.0, |a: f64, b| a.max(*b)));
        }
        out += " |\n";
    }
    out += &compiled(&all);
    Ok(out)
}

/// The graphs and the convolutions of the networks that were compiled, in a sentence each.
fn compiled(cases: &[&Value]) -> String {
    let cases: Vec<_> = cases.iter().filter(|case| !case["graphs"].is_null()).collect();
    if cases.is_empty() {
        return String::new();
    }
    let breaks = |who: &str| -> f64 {
        cases.iter().filter_map(|case| case["graphs"][who][1].as_f64()).sum()
    };
    let more = cases
        .iter()
        .filter(|case| {
            let of = |who: &str| case["graphs"][who][1].as_u64();
            of("windrow") > of("eager")
        })
        .count();
    let whole: f64 = cases.iter().map(|case| number(&case["graphs"], "gflop")).sum();
    let share = |of: &dyn Fn(&Value) -> f64| {
        let weighted = |case: &&&Value| number(&case["graphs"], "gflop") * of(case);
        100.0 * cases.iter().map(weighted).sum::<f64>() / whole
    };
    let by_windrow = |how: &str| share(&|case| number(&case[how], "compiled_by_windrow"));
    let mut passes = BTreeMap::<&str, f64>::new();
    for case in &cases {
        for (pass, part) in case["graphs"]["passes"].as_object().into_iter().flatten() {
            let gflop = number(&case["graphs"], "gflop") * part.as_f64().unwrap_or(0.0);
            *passes.entry(pass).or_default() += 100.0 * gflop / whole;
        }
    }
    let mut passes: Vec<_> = passes.into_iter().collect();
    passes.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let passes: String =
        passes.iter().map(|(pass, part)| format!("| {pass} | {part:.1} % |\n")).collect();
    format!(
        "\n- Graph breaks of `torch.compile`: {}, and {} with the backend `eager`; more than there in {more} networks.\n\
         - Of the operations of convolutions, Windrow computed {:.1} % by its choice, and {:.1} % wherever it can.\n\
         \n| pass | of the convolutions' operations |\n|---|--:|\n{passes}",
        breaks("windrow"),
        breaks("eager"),
        by_windrow("fastest"),
        by_windrow("forced")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_way_and_the_graphs_are_summed() {
        let of =
            |x: f64, by: f64| json!({"patched": x, "compiled": x + 1.0, "compiled_by_windrow": by});
        let graphs = |gflop: f64, ours: u64| json!({"windrow": [1, ours], "eager": [1, 1], "gflop": gflop, "passes": {"fuse": 0.5, "fold": 0.5}});
        let a = json!({"fastest": of(1.5, 0.5), "forced": of(5.0, 1.0), "graphs": graphs(3.0, 1)});
        let b = json!({"fastest": of(0.5, 0.0), "forced": of(1.0, 1.0), "graphs": graphs(1.0, 2)});
        let cases = [a, b, json!({"crash": "exit -11"})];
        let table = table(&json!({"cpu": "C", "torch": "2", "cases": cases})).unwrap();
        assert!(table.starts_with("C, PyTorch 2: 3 networks, 1 of which crashed."), "{table}");
        assert!(table.contains("| `patch` | 2 | 2 | 1.5x | 1 | 5.0x |\n"), "{table}");
        assert!(table.contains("(backend=\"windrow\")` | 2 | 1 | 2.5x | 1 | 6.0x |\n"), "{table}");
        assert!(!table.contains("optimize"), "{table}");
        assert!(
            table.contains(": 3, and 2 with the backend `eager`; more than there in 1 networks."),
            "{table}"
        );
        assert!(
            table.contains("Windrow computed 37.5 % by its choice, and 100.0 % wherever"),
            "{table}"
        );
        assert!(table.ends_with("|---|--:|\n| fold | 50.0 % |\n| fuse | 50.0 % |\n"), "{table}");
        assert_eq!(compiled(&[]), "");
    }
}
