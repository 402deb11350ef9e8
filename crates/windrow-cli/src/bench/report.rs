//! Rows as tables, JSON and CSV.

use super::row::Row;
use crate::machine::Machine;
use crate::print;
use crate::table::{Columns, digits, percent, scientific, wrapped};
use serde::Serialize;
use std::fmt::Write;

/// A record: the machine and the rows, pretty-printed.
pub(crate) fn json(machine: &Machine, rows: &[Row]) -> String {
    #[derive(Serialize)]
    struct Record<'a> {
        windrow: &'static str,
        machine: &'a Machine,
        rows: &'a [Row],
    }
    let record = Record { windrow: env!("CARGO_PKG_VERSION"), machine, rows };
    print::json(&record)
}

/// A line for each row, with a heading.
pub(crate) fn csv(rows: &[Row]) -> Vec<u8> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(row).expect("a row is flat");
    }
    writer.into_inner().expect("writing to memory succeeds")
}

/// The tables: for each operator one of speed and error, and one of the spread of the timings.
pub(crate) fn tables(machine: &Machine, rows: &[Row]) -> String {
    let [summary, ceilings] = [machine.summary(), machine.ceilings()].map(|line| wrapped(&line));
    let mut text = format!("{summary}\n{ceilings}\n");
    for group in rows.chunk_by(|a, b| a.op == b.op) {
        write_group(&mut text, group);
    }
    text
}

fn write_group(text: &mut String, rows: &[Row]) {
    let Row { op, direct, .. } = &rows[0];
    let (_, unit) = rows[0].rate();
    let meaning = match unit {
        "GFLOP/s" => "GFLOP/s of direct convolution; peak: f32 FMA",
        _ => "GB/s, each byte once; peak: a copy of as many bytes",
    };
    let heading = wrapped(&format!("{op}: {meaning}; gain: over {direct}"));
    let _ = writeln!(text, "\n{heading}\n");
    let rate_heading = format!(">{unit}");
    let mut speed = Columns::new(&[
        "case",
        "type",
        "algorithm",
        ">ms",
        &rate_heading,
        ">peak",
        ">gain",
        ">max abs",
        ">rms rel",
        "",
    ]);
    let mut spread = Columns::new(&[
        "case", "type", ">n", ">min ms", ">P25", ">median", ">P75", ">P95", ">sd", ">CV",
    ]);
    for r in rows {
        let case =
            if r.case == r.shape { r.case.clone() } else { format!("{} {}", r.case, r.shape) };
        speed.row(vec![
            case.clone(),
            r.dtype.into(),
            r.algorithm.clone(),
            digits(r.ms_median),
            digits(r.rate().0),
            percent(r.peak_share),
            format!("{:.2}x", r.speedup),
            scientific(r.max_abs_err),
            scientific(r.rms_rel_err),
            if r.verified { "ok".into() } else { "FAIL".into() },
        ]);
        let mut cells = vec![case, r.dtype.into(), r.iterations.to_string()];
        let times = [r.ms_min, r.ms_p25, r.ms_median, r.ms_p75, r.ms_p95, r.ms_sd];
        cells.extend(times.map(digits));
        cells.push(percent(r.cv));
        spread.row(cells);
    }
    let _ = writeln!(text, "{speed}\n{spread}");
    let checked: usize = rows.iter().map(|r| r.checked_elements).sum();
    let total: usize = rows.iter().map(|r| r.elements).sum();
    let errors: usize = rows.iter().map(|r| r.error_count).sum();
    let sampled = if rows.iter().any(|r| r.sampled) { ", a sample" } else { "" };
    let compared = format!(
        "{checked} of {total} outputs compared with the f64 oracle{sampled}: {errors} outside tolerance"
    );
    let _ = writeln!(text, "{}", wrapped(&compared));
}
