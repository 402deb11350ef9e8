//! The picture of speed beside other libraries: bars of how many times faster Windrow is.

use crate::steps::Result;
use crate::svg::{Axis, Picture};
use crate::tables::{factor, large_batches, mean, members, number, rows, text};
use serde_json::Value;

pub(crate) const ALT: &str =
    "Bars: how many times faster Windrow is than other libraries, on a CPU and on an H200";

/// A bar: its name, the factor it shows, and the least of the cases behind it.
struct Bar {
    name: String,
    factor: f64,
    least: Option<f64>,
}

impl Bar {
    /// The geometric mean of some cases.
    fn of(name: String, factors: &[f64]) -> Self {
        let least = factors.iter().copied().reduce(f64::min);
        Self { name, factor: mean(factors), least: least.filter(|_| factors.len() > 1) }
    }
}

/// The places of bars, in pixels.
const ROW: f64 = 17.0;
const COLUMN: f64 = 440.0;
const LABELS: f64 = 185.0;

const NOTES: [&str; 2] = [
    "Bars: geometric means over cases, ticks: the least case.",
    "Networks, in CUDA graphs: bars for optimize, ticks for patch; training: bars for patch. Element type and batch behind \
     the name.",
];

pub(crate) fn svg(cpu: &Value, conv2d: &Value, memory: &Value, models: &Value) -> Result<String> {
    let threads = members(&cpu["threads"]).filter_map(|(n, _)| n.parse::<u32>().ok()).max();
    let threads = threads.ok_or("the record of the CPU has no threads")?.to_string();
    let gpu = text(&conv2d["machine"], "gpu");
    let left = [
        (
            format!("CPU, {threads} threads, beside the fastest of the others"),
            peers(&cpu["threads"][&threads]),
        ),
        (format!("{gpu}: beside PyTorch and causal-conv1d"), memory_bound(memory)),
    ];
    let right = [
        (format!("{gpu}: conv2d beside cuDNN"), modes(conv2d)),
        (format!("{gpu}: whole networks beside PyTorch"), networks(models)),
    ];
    let mut picture = Picture::new(2.0 * COLUMN + 20.0);
    picture.text(16.0, 26.0, "text head", "How many times faster Windrow is (logarithmic scale)");
    let mut bottom: f64 = 0.0;
    for (column, panels) in [left, right].into_iter().enumerate() {
        let mut y = 54.0;
        for (title, bars) in &panels {
            y = panel(&mut picture, 16.0 + column as f64 * COLUMN, y, title, bars);
        }
        bottom = bottom.max(y);
    }
    for (line, note) in NOTES.into_iter().enumerate() {
        picture.text(16.0, bottom + ROW * line as f64, "faint", note);
    }
    Ok(picture.finish(bottom + 16.0 + ROW, ALT))
}

/// Draws bars below a title; returns where the next panel begins.
fn panel(picture: &mut Picture, x: f64, y: f64, title: &str, bars: &[Bar]) -> f64 {
    let axis = Axis { least: 0.5, most: 64.0, left: x + LABELS, right: x + COLUMN - 60.0 };
    picture.text(x, y, "text head", title);
    let (top, bottom) = (y + 22.0, y + 26.0 + ROW * bars.len() as f64);
    for tick in [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0] {
        let at = axis.at(tick);
        picture.line((at, top), (at, bottom), if tick == 1.0 { "base" } else { "line" });
        picture.text(at, top - 5.0, "faint mid", &format!("{tick}"));
    }
    for (i, bar) in bars.iter().enumerate() {
        let y = top + 3.0 + ROW * i as f64;
        picture.text(axis.left - 8.0, y + 11.0, "text end", &bar.name);
        picture.bar(axis.at(1.0), axis.at(bar.factor), y + 2.0, ROW - 6.0, "a");
        if let Some(least) = bar.least {
            let at = axis.at(least);
            picture.line((at, y), (at, y + ROW - 2.0), "base");
        }
        let end = axis.at(bar.factor.max(1.0)) + 6.0;
        picture.text(end, y + 11.0, "text", &format!("{:.2}", bar.factor));
    }
    bottom + 34.0
}

/// Each suite and element type beside the fastest library of each case.
fn peers(suites: &Value) -> Vec<Bar> {
    let mut bars: Vec<(String, Vec<f64>)> = Vec::new();
    for (suite, cases) in members(suites).filter(|(suite, _)| *suite != "overhead") {
        for (case, times) in members(cases) {
            let mut words = case.split(' ');
            let (op, dtype) = (words.next().unwrap_or(suite), words.next().unwrap_or("-"));
            push(&mut bars, format!("{} {dtype}", readable(op)), factor(times, None));
        }
    }
    bars.sort_by_key(|(name, _)| order(name));
    bars.into_iter().map(|(name, factors)| Bar::of(name, &factors)).collect()
}

/// Operators in the order of the README, wide element types first.
fn order(name: &str) -> [Option<usize>; 2] {
    let place = |words: &[&str]| words.iter().position(|word| name.contains(word));
    [place(&["causal", "decoding", "conv2d", "GELU"]), place(&["f32", " f16", "bf16"])]
}

fn readable(op: &str) -> &str {
    match op {
        "gelu" => "GELU",
        "causal_conv1d" => "causal conv1d",
        "causal_conv1d_update" => "decoding step",
        other => other,
    }
}

fn push(bars: &mut Vec<(String, Vec<f64>)>, name: String, factor: Option<f64>) {
    match bars.iter_mut().find(|(n, _)| *n == name) {
        Some((_, factors)) => factors.extend(factor),
        None => bars.push((name, factor.into_iter().collect())),
    }
}

/// GELU beside PyTorch, causal conv1d beside the faster of PyTorch and causal-conv1d; of GELU's kernels the fastest.
fn memory_bound(record: &Value) -> Vec<Bar> {
    let mut cases: Vec<(String, String, f64)> = Vec::new();
    for r in rows(record) {
        let peers = ["torch_us", "causal_conv1d_us"].map(|key| r[key].as_f64());
        let Some(theirs) = peers.into_iter().flatten().reduce(f64::min) else { continue };
        let (op, variant) = (text(r, "op"), text(r, "variant"));
        let pass = if variant.starts_with("backward") { "gradients" } else { "" };
        let name = format!("{} {pass} {}", readable(op), text(r, "dtype")).replace("  ", " ");
        let form = variant.split(' ').next().unwrap_or_default();
        let case = format!("{name} {} {} {form}", r["shape"], text(r, "layout"));
        let factor = theirs / number(r, "us");
        match cases.iter_mut().find(|(_, c, _)| *c == case) {
            Some((_, _, best)) => *best = best.max(factor),
            None => cases.push((name, case, factor)),
        }
    }
    let mut bars = Vec::new();
    for (name, _, factor) in cases {
        push(&mut bars, name, Some(factor));
    }
    bars.sort_by_key(|(name, _)| order(name));
    bars.into_iter().map(|(name, factors)| Bar::of(name, &factors)).collect()
}

fn modes(record: &Value) -> Vec<Bar> {
    let mut bars = Vec::new();
    for r in rows(record) {
        let factor = number(r, "cudnn_ms") / number(r, "windrow_ms");
        push(&mut bars, text(r, "mode").to_owned(), Some(factor));
    }
    bars.into_iter().map(|(name, factors)| Bar::of(name, &factors)).collect()
}

/// Inference of large batches in f32 and bf16, and training in f32 and under autocast to bf16.
fn networks(record: &Value) -> Vec<Bar> {
    let bar = |(name, case): (&str, &Value)| {
        let mode = name.split(' ').nth(1)?;
        if !["f32", "bf16_cl", "amp_bf16"].contains(&mode)
            || name.contains(" half ")
            || case["error"].is_null()
        {
            return None;
        }
        let (_, times) = members(&case["ms"]).find(|(how, _)| *how != "eager")?;
        let factor = |side: &str| {
            let ms = times[side]["median"].as_f64()?;
            Some(number(&times["pytorch"], "median") / ms)
        };
        let (patched, optimized) = (factor("windrow")?, factor("optimized"));
        let name = name.replace("_cl", "");
        Some(match optimized {
            Some(optimized) => Bar { name, factor: optimized, least: Some(patched) },
            None => Bar { name, factor: patched, least: None },
        })
    };
    large_batches(record).filter_map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn bars_are_means_with_their_least_case() {
        let row =
            |mode: &str, w: f64, c: f64| json!({"mode": mode, "windrow_ms": w, "cudnn_ms": c});
        let bars = modes(
            &json!({"rows": [row("f32", 1.0, 1.0), row("f32", 1.0, 4.0), row("f16", 2.0, 1.0)]}),
        );
        assert_eq!((bars[0].name.as_str(), bars[0].factor, bars[0].least), ("f32", 2.0, Some(1.0)));
        assert_eq!((bars[1].factor, bars[1].least), (0.5, None));
    }

    #[test]
    fn of_several_kernels_the_fastest_stands_for_the_case() {
        let row = |variant: &str, us: f64| {
            json!({"op": "gelu", "variant": variant, "dtype": "f16", "layout": "contiguous",
                   "shape": [2], "us": us, "torch_us": 4.0})
        };
        let bars = memory_bound(
            &json!({"rows": [row("tanh a", 2.0), row("tanh b", 1.0), row("none a", 4.0)]}),
        );
        assert_eq!((bars.len(), bars[0].name.as_str()), (1, "GELU f16"));
        assert_eq!((bars[0].factor, bars[0].least), (2.0, Some(1.0)));
    }
}
