//! The report of a tuning, as tables and JSON.

use super::problems::Problem;
use crate::failure::Failure;
use crate::print;
use crate::table::{Columns, digits};
use serde::Serialize;
use std::fmt::Write;
use windrow::Device;
use windrow::tuning::{self, Measured, Report};

/// Candidates that are listed for a problem; JSON has all.
const LISTED: usize = 6;

/// A configuration and its time.
#[derive(Clone, Debug, Serialize)]
struct Timed {
    configuration: String,
    ms: Option<f64>,
    /// The rate in the problem's unit.
    rate: Option<f64>,
    /// Time that the model expects, relative to that of its choice.
    expected: f64,
    samples: usize,
    refused: Option<String>,
}

/// A problem: the model's choice, the search's, and the best of all if all were measured; times are then of
/// that run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    op: &'static str,
    case: String,
    shape: String,
    problem: String,
    unit: &'static str,
    model: Timed,
    tuned: Timed,
    best: Option<Timed>,
    /// The candidates by rising time.
    candidates: Vec<Timed>,
}

impl Row {
    pub(super) fn new(problem: &Problem, found: &Report, all: Option<&Report>) -> Self {
        let timed = |m: &Measured| Timed {
            configuration: m.configuration.clone(),
            ms: m.seconds.map(|s| s * 1e3),
            rate: m.seconds.map(|s| problem.work / s / 1e9),
            expected: m.expected,
            samples: m.samples,
            refused: m.refused.clone(),
        };
        let measured = all.unwrap_or(found);
        // The search's winner, with its time in the last run.
        let tuned = &found.winner().configuration;
        let tuned = measured.candidates.iter().find(|c| c.configuration == *tuned);
        let mut candidates: Vec<Timed> = measured.candidates.iter().map(timed).collect();
        let ms = |t: &Timed| t.ms.unwrap_or(f64::INFINITY);
        candidates.sort_by(|a, b| ms(a).total_cmp(&ms(b)));
        Row {
            op: problem.op,
            case: problem.name.clone(),
            shape: problem.shape.clone(),
            problem: found.problem.clone(),
            unit: problem.unit,
            model: timed(measured.model()),
            tuned: timed(tuned.unwrap_or(found.winner())),
            best: all.map(|_| candidates[0].clone()),
            candidates,
        }
    }

    /// The ratio of two configurations' times.
    fn over(slow: &Timed, fast: &Timed) -> f64 {
        match (slow.ms, fast.ms) {
            (Some(slow), Some(fast)) => slow / fast,
            _ => 1.0,
        }
    }
}

/// A record: the device's table and the rows.
pub(super) fn json(device: Device, rows: &[Row]) -> Result<String, Failure> {
    #[derive(Serialize)]
    struct Record<'a> {
        windrow: &'static str,
        device: serde_json::Value,
        rows: &'a [Row],
    }
    let table: serde_json::Value = serde_json::from_str(&tuning::export(device)?)
        .map_err(|e| Failure::Input(e.to_string()))?;
    let (windrow, device) = (env!("CARGO_PKG_VERSION"), table["device"].clone());
    let record = Record { windrow, device, rows };
    Ok(print::json(&record))
}

/// A ranking for each problem, and a summary.
pub(super) fn tables(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        let _ = writeln!(text, "{} {} {}\n\n{}", row.op, row.case, row.shape, ranking(row));
    }
    for group in rows.chunk_by(|a, b| a.op == b.op) {
        let _ = writeln!(text, "{}\n", summary(group));
    }
    text
}

fn ranking(row: &Row) -> String {
    let rate = format!(">{}", row.unit);
    let mut table = Columns::new(&["", "configuration", ">ms", &rate, ">time", ">expected", ">n"]);
    for (rank, c) in row.candidates.iter().enumerate() {
        let is = |t: &Timed| t.configuration == c.configuration;
        let mark = match (is(&row.model), is(&row.tuned)) {
            (true, true) => "model, tuned",
            (true, false) => "model",
            (false, true) => "tuned",
            (false, false) if rank < LISTED && c.ms.is_some() => "",
            (false, false) => continue,
        };
        table.row(vec![
            format!("{} {mark}", rank + 1),
            c.configuration.clone(),
            c.ms.map(digits).unwrap_or_default(),
            c.rate.map(digits).unwrap_or_default(),
            format!("{:.2}x", Row::over(c, &row.model)),
            format!("{:.2}x", c.expected),
            c.samples.to_string(),
        ]);
    }
    table.to_string()
}

fn summary(rows: &[Row]) -> String {
    let Row { op, best, .. } = &rows[0];
    let mut headings = vec!["case", "tuned configuration", ">model ms", ">tuned ms", ">gain"];
    if best.is_some() {
        headings.extend([">best ms", ">missed"]);
    }
    let mut table = Columns::new(&headings);
    let (mut gains, mut losses) = (Vec::new(), Vec::new());
    for row in rows {
        let gain = Row::over(&row.model, &row.tuned);
        let ms = |t: &Timed| t.ms.map(digits).unwrap_or_default();
        let mut cells = vec![
            format!("{} {}", row.case, row.shape),
            row.tuned.configuration.clone(),
            ms(&row.model),
            ms(&row.tuned),
            format!("{gain:.2}x"),
        ];
        gains.push(gain);
        if let Some(best) = &row.best {
            let missed = Row::over(&row.tuned, best);
            cells.extend([ms(best), format!("{missed:.2}x")]);
            losses.push(Row::over(&row.model, best));
        }
        table.row(cells);
    }
    let mean = |x: &[f64]| (x.iter().map(|x| x.ln()).sum::<f64>() / x.len() as f64).exp();
    let mut text = format!("{op}: {:.3}x gained over the model in geometric mean", mean(&gains));
    if !losses.is_empty() {
        let _ = write!(text, "; the best of all is {:.3}x ahead of the model", mean(&losses));
    }
    format!("{text}\n\n{table}")
}
