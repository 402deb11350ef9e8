//! The picture of the ways to run a network: dots of how many times as fast as PyTorch each is.

use crate::steps::Result;
use crate::svg::{Axis, Picture};
use crate::tables::{members, number, text};
use serde_json::Value;

pub(crate) const ALT: &str =
    "Dots: the speed of networks by patch, optimize, the backend and torch.compile";

/// The ways: as a reader and as records name them, and how their dots look.
const WAYS: [(&str, &str, &str); 4] = [
    ("torch.compile", "compiled", "b"),
    ("patch", "windrow", "a open"),
    ("optimize", "optimized", "c"),
    ("backend=\"windrow\"", "backend", "a"),
];

/// A network: its name, and how many times as fast as PyTorch it is in each of the ways.
type Row = (String, [f64; WAYS.len()]);

/// The places of dots, in pixels.
const ROW: f64 = 17.0;
const COLUMN: f64 = 440.0;
const LABELS: f64 = 130.0;
const TOP: f64 = 84.0;

/// `models`: of a GPU, whose networks in bf16 are taken; `networks`: of a CPU.
pub(crate) fn svg(models: &Value, networks: &Value) -> Result<String> {
    let panels = [
        (format!("{}, bf16, in CUDA graphs", text(models, "device")), on_gpu(models)),
        (format!("CPU, {} threads, f32, one image", networks["threads"]), on_cpu(networks)),
    ];
    if panels.iter().any(|(_, rows)| rows.is_empty()) {
        return Err("a record has no network that ran in all ways".into());
    }
    let mut picture = Picture::new(2.0 * COLUMN + 20.0);
    picture.text(16.0, 26.0, "text head", "How many times as fast as PyTorch (logarithmic scale)");
    for (i, (name, _, class)) in WAYS.into_iter().enumerate() {
        let x = COLUMN - 20.0 + 110.0 * i as f64;
        picture.dot(x, 22.0, class);
        picture.text(x + 9.0, 26.0, "text", name);
    }
    let most = panels.iter().map(|(_, rows)| rows.len()).max().unwrap_or(0);
    let bottom = TOP + 4.0 + ROW * most as f64;
    for (column, (title, rows)) in panels.iter().enumerate() {
        panel(&mut picture, 16.0 + column as f64 * COLUMN, title, rows);
    }
    Ok(picture.finish(bottom + 14.0, ALT))
}

fn panel(picture: &mut Picture, x: f64, title: &str, rows: &[Row]) {
    let axis = Axis { least: 0.5, most: 8.0, left: x + LABELS, right: x + COLUMN - 40.0 };
    picture.text(x, 56.0, "text head", title);
    let bottom = TOP + 4.0 + ROW * rows.len() as f64;
    for tick in [0.5, 1.0, 2.0, 4.0, 8.0] {
        let at = axis.at(tick);
        picture.line((at, TOP), (at, bottom), if tick == 1.0 { "base" } else { "line" });
        picture.text(at, TOP - 5.0, "faint mid", &format!("{tick}"));
    }
    for (i, (name, factors)) in rows.iter().enumerate() {
        let y = TOP + 11.0 + ROW * i as f64;
        picture.text(axis.left - 8.0, y + 4.0, "text end", name);
        for ((_, _, class), factor) in WAYS.into_iter().zip(factors) {
            picture.dot(axis.at(*factor), y, class);
        }
    }
}

/// The networks in bf16 and channels-last that ran in all ways.
fn on_gpu(record: &Value) -> Vec<Row> {
    let row = |(name, case): (&str, &Value)| {
        let (network, mode) = name.split_once(" bf16_cl ")?;
        let is_plain = mode.parse::<u32>().is_ok();
        Some((network.to_owned(), factors(&case["ms"]["graph"])?)).filter(|_| is_plain)
    };
    members(&record["cases"]).filter_map(row).collect()
}

/// The networks that ran without other programs beside them.
fn on_cpu(record: &Value) -> Vec<Row> {
    let alone = members(&record["cases"]).filter(|(_, case)| case["programs"] == 0);
    let row = |(name, case): (&str, &Value)| {
        let name = name.split(',').next().unwrap_or(name);
        Some((name.to_owned(), factors(&case["ms"])?))
    };
    alone.filter_map(row).collect()
}

/// PyTorch's time over that of each way; None if one of them did not run.
fn factors(ms: &Value) -> Option<[f64; WAYS.len()]> {
    let theirs = number(&ms["pytorch"], "median");
    let found = WAYS.map(|(_, key, _)| theirs / number(&ms[key], "median"));
    Some(found).filter(|all| all.iter().all(|factor| factor.is_finite()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn networks_that_ran_in_all_ways_have_a_row() {
        let ms = |of: f64| json!({"median": of});
        let all = json!({"pytorch": ms(8.0), "compiled": ms(4.0), "windrow": ms(8.0),
                         "optimized": ms(2.0), "backend": ms(1.0)});
        let some = json!({"pytorch": ms(8.0), "windrow": ms(8.0)});
        let of = |ms: &Value| json!({"ms": {"graph": ms}});
        let record = json!({"cases": {"a bf16_cl 4": of(&all), "b bf16_cl 4": of(&some),
                                      "c bf16_cl half 4": of(&all), "d f32 4": of(&all)}});
        assert_eq!(on_gpu(&record), [("a".to_owned(), [2.0, 1.0, 4.0, 8.0])]);
        let record = json!({"cases": {"a, alone": {"ms": all, "programs": 0},
                                      "a, beside 3": {"ms": all, "programs": 3}}});
        assert_eq!(on_cpu(&record).len(), 1);
    }
}
