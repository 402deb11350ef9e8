//! `windrow tune --threads-per-block`: one time for all problems, by the threads of a block.

use super::Tune;
use super::problems::{self, GFLOPS};
use crate::failure::Failure;
use crate::operator::Operator;
use crate::print::{self, progress};
use crate::table::{Columns, digits};
use serde::Serialize;
use windrow::Device;
use windrow::tuning::Search;

const BLOCKS: [usize; 5] = [64, 128, 256, 512, 1024];
#[derive(Debug, Serialize)]
struct Row {
    threads_per_block: usize,
    ms: f64,
    rate: f64,
    unit: &'static str,
    /// Over the first row.
    speedup: f64,
}

pub(super) fn run(args: &Tune) -> Result<(), Failure> {
    let expected = "--threads-per-block: expected conv2d or gelu, and --device cuda:INDEX";
    let [operator] = args.operators[..] else { return Err(Failure::Input(expected.into())) };
    if args.device == Device::Cpu || operator == Operator::CausalConv1d {
        return Err(Failure::Input(expected.into()));
    }
    let problems = problems::all(args)?;
    let mut seconds = [0.0; BLOCKS.len()];
    let bar = progress(problems.len() as u64);
    for problem in &problems {
        bar.set_message(problem.name.clone());
        let texts = BLOCKS.map(|block| format!("{} block={block}", problem.blocked));
        let how = Search::new(super::BUDGET).with_exhaustive(true);
        let report = (problem.measure)(&texts.each_ref().map(String::as_str), &how)?;
        for (sum, measured) in seconds.iter_mut().zip(&report.candidates) {
            *sum += measured.seconds.unwrap_or(f64::NAN);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let work: f64 = problems.iter().map(|p| p.work).sum();
    let unit = problems.first().map_or(GFLOPS, |p| p.unit);
    let rows = BLOCKS.iter().zip(seconds).map(|(&threads_per_block, time)| Row {
        threads_per_block,
        ms: time * 1e3,
        rate: work / time / 1e9,
        unit,
        speedup: seconds[0] / time,
    });
    let rows: Vec<Row> = rows.collect();
    if args.json {
        return print::out(print::json(&rows));
    }
    let rate = format!(">{unit}");
    let mut table = Columns::new(&[">threads per block", ">ms, all problems", &rate, ">speed-up"]);
    for row in &rows {
        let Row { threads_per_block, ms, rate, speedup, .. } = row;
        let cells = [threads_per_block.to_string(), digits(*ms), digits(*rate)];
        table.row(cells.into_iter().chain([format!("{speedup:.3}x")]).collect());
    }
    let blocked = problems.first().map_or("", |p| p.blocked);
    let what = format!("{} by {blocked}", operator.name());
    print::out(format_args!("{what}, {} problems\n\n{table}\n", problems.len()))
}
