//! `windrow tune`: measures the configurations of each problem, shows how they rank, and remembers the
//! winners.

mod blocks;
mod import;
mod problems;
mod report;

use crate::bench::layers::{self, Layer};
use crate::failure::Failure;
use crate::files::{Contents, Outputs, shown};
use crate::machine::{check_device, start_threads};
use crate::names;
use crate::operator::Operator;
use crate::print::{self, progress};
use problems::Problem;
use report::Row;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;
use windrow::tuning::{self, Report, Search};
use windrow::{Accuracy, DType, Device, PlanOptions};

/// Measure the configurations of every problem and store the fastest for later plans.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  windrow tune conv2d --budget 60
  windrow tune --layers layers.csv --dtype f16 --device cuda:0 --exhaustive
  windrow tune --export table.json
  windrow tune --import table.json")]
pub(crate) struct Tune {
    /// Operators to tune [default: all]
    #[arg(value_parser = Operator::tuned())]
    operators: Vec<Operator>,
    /// Layer file for conv2d, lines of name,n,c,h,w,k; `-` is standard input [default: the 18 layers
    /// that ship with it]
    #[arg(long, value_name = "FILE")]
    layers: Option<PathBuf>,
    /// Take the 18 layers with their full batch instead of a sixteenth
    #[arg(long)]
    full: bool,
    /// Element types
    #[arg(long, value_name = "TYPE", value_delimiter = ',', default_value = "f32", value_parser = names::dtype())]
    dtype: Vec<DType>,
    /// Accuracy that the algorithms of conv2d must have
    #[arg(long, value_name = "NAME", default_value = "fp32", value_parser = names::accuracy())]
    accuracy: Accuracy,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// cpu, cuda:INDEX or hip:INDEX
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Seconds of measuring, for all problems together [default: one for each problem]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    budget: Option<Duration>,
    /// After the search, measure every configuration equally often, to see what the cost model and the
    /// search missed
    #[arg(long)]
    exhaustive: bool,
    /// Only print the times of conv2d or gelu on CUDA with 64 to 1024 threads per block
    #[arg(long, conflicts_with_all = ["exhaustive", "export", "import"])]
    threads_per_block: bool,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
    /// Only write what was found for the device on this machine to a file; `-` is standard output
    #[arg(long, value_name = "FILE", conflicts_with = "import")]
    export: Option<PathBuf>,
    /// Only add the entries of an exported file to this machine's table; `-` is standard input
    #[arg(long, value_name = "FILE")]
    import: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|e| format!("{e}"))?;
    Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())
}

/// Time for a problem unless told otherwise.
const BUDGET: Duration = Duration::from_secs(1);

pub(crate) fn run(args: &Tune) -> Result<(), Failure> {
    if let Some(path) = &args.import {
        return import::run(path);
    }
    check_device(args.device)?;
    if let Some(path) = &args.export {
        let file = Outputs::new([&**path])?;
        file.write(&[Contents::Bytes(tuning::export(args.device)?.as_bytes())])?;
        let said = format!("{}: what was found for {}\n", shown(path), args.device);
        return print::summary(file.has_stdout(), said);
    }
    if args.threads_per_block {
        return blocks::run(args);
    }
    let problems = problems::all(args)?;
    if problems.is_empty() {
        return Err(Failure::Input(format!("nothing to tune on {}", args.device)));
    }
    let table = tuning::table_path(args.device)?;
    if table.is_none() {
        let place = "HOME, XDG_CACHE_HOME or WINDROW_TUNE_CACHE names one";
        print::note(format!("there is no cache folder, so what is found is not kept; {place}"));
    } else {
        // What is known, written once more: whatever is in the way shows before the work.
        tuning::import(&tuning::export(args.device)?)?;
    }
    let budget = args.budget.map_or(BUDGET, |total| total / problems.len() as u32);
    let bar = progress(problems.len() as u64);
    let mut rows = Vec::with_capacity(problems.len());
    for problem in &problems {
        bar.set_message(problem.name.clone());
        let found = (problem.tune)(&Search::new(budget))?;
        if let (Some(reason), Some(path)) = (&found.not_kept, &table) {
            let path = shown(path);
            return Err(Failure::Input(format!("{path}: what was found cannot be kept: {reason}")));
        }
        let all = args
            .exhaustive
            .then(|| problem.measure(&found, &Search::new(budget).with_exhaustive(true)))
            .transpose()?;
        rows.push(Row::new(problem, &found, all.as_ref()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    if args.json {
        return print::out(report::json(args.device, &rows)?);
    }
    print::out(report::tables(&rows))?;
    match table {
        Some(path) => print::summary(false, format_args!("kept in {}\n", shown(&path))),
        None => Ok(()),
    }
}

impl Tune {
    fn options(&self) -> Result<PlanOptions, Failure> {
        let threads = start_threads(self.threads)?;
        Ok(PlanOptions::default().with_device(self.device).with_threads(threads))
    }

    fn layers(&self) -> Result<Vec<Layer>, Failure> {
        match &self.layers {
            Some(path) => layers::read(path),
            None if self.full => Ok(layers::cnn18()),
            None => Ok(layers::cnn18().into_iter().map(Layer::reduced).collect()),
        }
    }
}

impl Problem {
    /// Every configuration measured alike. The search's winner is one of them.
    fn measure(&self, found: &Report, how: &Search) -> windrow::Result<Report> {
        let all: Vec<&str> = found.candidates.iter().map(|c| c.configuration.as_str()).collect();
        (self.measure)(&all, how)
    }
}
