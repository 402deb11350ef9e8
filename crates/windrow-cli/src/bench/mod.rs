//! `windrow bench`: speed beside the machine's own ceiling and the direct algorithm, error beside
//! the oracle.

pub(crate) mod causal_conv1d;
pub(crate) mod conv2d;
mod conv3d;
mod document;
pub(crate) mod gelu;
pub(crate) mod layers;
mod measure;
mod parallel;
mod plot;
mod report;
mod row;
mod stats;
mod subject;

pub(crate) use crate::print::progress;

use crate::failure::Failure;
use crate::files::{Contents, Outputs};
use crate::machine::{Machine, check_device, start_threads};
use crate::names;
use crate::operator::Operator;
use crate::print;
use measure::Limits;
use row::Row;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;
use windrow::verify::Comparison;
use windrow::{DType, Device, PlanOptions};

/// Measure speed and error, of all operators in about a minute.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  windrow bench
  windrow bench conv2d --full --threads 1 --csv rows.csv --plot rates.svg
  windrow bench gelu causal-conv1d --device cuda:0 --dtype f16,bf16 --json > record.json
  windrow bench causal-conv1d --device hip:0 --case amd
  windrow bench conv2d --devices 0,1 --gather")]
pub(crate) struct Bench {
    /// Operators to run [default: all]
    operators: Vec<Operator>,
    /// Layer file for conv2d, lines of name,n,c,h,w,k; `-` is standard input [default: the 18 layers
    /// that ship with it]
    #[arg(long, value_name = "FILE")]
    layers: Option<PathBuf>,
    /// Measure the 18 layers with their full batch instead of a sixteenth, longer causal convolutions, and whole layers
    /// of video decoders
    #[arg(long)]
    full: bool,
    /// Element types [default: chosen for each case]
    #[arg(long, value_name = "TYPE", value_delimiter = ',', value_parser = names::dtype())]
    dtype: Vec<DType>,
    /// Algorithm by name; cases that it cannot compute are left out [default: the cost model's choice]
    #[arg(long, value_name = "NAME", value_parser = names::any_algorithm())]
    algorithm: Option<String>,
    /// Run only this special case, which compares its stages with the oracle
    #[arg(long, value_name = "NAME", conflicts_with_all = ["layers", "full", "dtype", "algorithm", "devices", "json", "csv", "plot"])]
    case: Option<document::Named>,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Number of measurements of each case [default: as many as fit into its time]
    #[arg(long, value_name = "N")]
    iterations: Option<NonZeroUsize>,
    /// cpu, cuda:INDEX or hip:INDEX
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// CUDA devices over which conv2d's batch is split; not needed under torchrun
    #[arg(long, value_name = "INDEX", value_delimiter = ',', conflicts_with_all = ["device", "threads", "csv", "plot"])]
    devices: Vec<u32>,
    /// With several devices: also gather the whole output on each
    #[arg(long)]
    gather: bool,
    /// With several devices: fail if one does not answer for this long
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    timeout: u64,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
    /// Also write the rows as CSV. With `-` the CSV goes to standard output, tables to standard error
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    #[cfg_attr(feature = "png", doc = "Also draw the rates to FILE.svg or FILE.png")]
    #[cfg_attr(not(feature = "png"), doc = "Also draw the rates to FILE.svg")]
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// The arguments that all operators have in common.
struct Selection<'a> {
    dtypes: &'a [DType],
    algorithm: Option<&'a str>,
    full: bool,
    options: PlanOptions,
}

impl Selection<'_> {
    /// The element types asked for, else those of the case.
    fn dtypes<'a>(&'a self, default: &'a [DType]) -> &'a [DType] {
        if self.dtypes.is_empty() { default } else { self.dtypes }
    }
}

/// A case to be measured, made when its turn comes and dropped after it.
type Entry = Box<dyn Fn() -> windrow::Result<Box<dyn Case>>>;

/// An operator with one set of inputs.
trait Case {
    fn describe(&self) -> Description;
    /// The plan under test, once; on a device until the result is there.
    fn run(&mut self) -> windrow::Result<()>;
    /// Runs the program with which the speed-up compares, once.
    fn run_direct(&mut self) -> windrow::Result<()>;
    /// A copy of as many bytes as the operator moves, for [`Work::Bytes`].
    fn copy(&mut self) -> windrow::Result<()> {
        Ok(())
    }
    /// The latest output of [`run`](Case::run), or a sample of it, against the oracle.
    fn compare(&mut self) -> windrow::Result<Comparison>;
    /// Elements of the output.
    fn elements(&self) -> usize;
}

/// The description of a case.
#[derive(Clone)]
struct Description {
    op: &'static str,
    name: String,
    device: Device,
    dtype: DType,
    algorithm: String,
    /// Algorithm and parameters.
    configuration: String,
    shape: String,
    plan: String,
    work: Work,
    /// The name of the program that [`Case::run_direct`] runs.
    direct: &'static str,
}

/// The resource that bounds an operator, which gives its ceiling.
#[derive(Clone, Copy)]
enum Work {
    /// Operations of the direct algorithm.
    Flops(f64),
    /// Bytes that must be read and written, once each.
    Bytes(f64),
}

/// Time for measuring, over all cases of a run.
const BUDGET: Duration = Duration::from_secs(40);
/// Time for measuring with `--full`, over all cases of a run.
const FULL_BUDGET: Duration = Duration::from_secs(400);

pub(crate) fn run(args: &Bench) -> Result<(), Failure> {
    if let Some(plot) = &args.plot {
        plot::check_name(plot)?;
    }
    let files = Outputs::new([&args.csv, &args.plot].into_iter().flatten().map(|p| &**p))?;
    if let Some(layers) = &args.layers {
        files.spare(layers)?;
    }
    if let Some(ranks) = parallel::Ranks::of(args)? {
        let timeout = Duration::from_secs(args.timeout);
        return parallel::run(args, ranks, &layers(args)?, timeout);
    }
    check_device(args.device)?;
    let threads = start_threads(args.threads)?;
    let options = PlanOptions::default().with_device(args.device).with_threads(threads);
    if let Some(document::Named::Amd) = args.case {
        return match args.operators[..] {
            [] | [Operator::CausalConv1d] => document::run(&options),
            _ => Err(Failure::Input("--case amd: expected the operator causal-conv1d".into())),
        };
    }
    let selection = Selection {
        dtypes: &args.dtype,
        algorithm: args.algorithm.as_deref(),
        full: args.full,
        options,
    };
    let entries = entries(args, &selection)?;
    if entries.is_empty() {
        let name = args.algorithm.as_deref().unwrap_or("the cost model's choice");
        return Err(Failure::Input(format!("no case on {} for algorithm {name}", args.device)));
    }
    let machine = Machine::measure(threads.get());
    let limits = limits(args, entries.len());

    let bar = progress(entries.len() as u64);
    let mut rows = Vec::with_capacity(entries.len());
    for entry in entries {
        let mut case = entry()?;
        let Description { op, name, dtype, .. } = case.describe();
        bar.set_message(format!("{op} {name} {dtype}"));
        rows.push(Row::measure(case.as_mut(), &machine, &limits)?);
        bar.inc(1);
    }
    bar.finish_and_clear();

    let csv = args.csv.as_ref().map(|_| report::csv(&rows));
    let plot = args.plot.as_ref().map(|path| plot::draw(path, &machine, &rows)).transpose()?;
    // Files first: they outlast whoever reads the tables.
    let contents: Vec<_> =
        [&csv, &plot].into_iter().flatten().map(|bytes| Contents::Bytes(bytes)).collect();
    files.write(&contents)?;
    let printed = match args.json {
        true => report::json(&machine, &rows),
        false => report::tables(&machine, &rows),
    };
    let printed = print::out_beside(files.has_stdout(), printed);
    match rows.iter().filter(|r| !r.verified).count() {
        0 => printed,
        n => Err(Failure::Verification(format!(
            "{n} of {} cases differ from the oracle",
            rows.len()
        ))),
    }
}

fn entries(args: &Bench, selection: &Selection<'_>) -> Result<Vec<Entry>, Failure> {
    let mut entries = Vec::new();
    for operator in Operator::chosen(&args.operators) {
        entries.extend(match operator {
            Operator::Gelu => gelu::entries(selection)?,
            Operator::CausalConv1d => causal_conv1d::entries(selection)?,
            Operator::Conv2d => conv2d::entries(selection, layers(args)?)?,
            Operator::Conv3d => conv3d::entries(selection)?,
        });
    }
    Ok(entries)
}

fn layers(args: &Bench) -> Result<Vec<layers::Layer>, Failure> {
    match &args.layers {
        Some(path) => layers::read(path),
        None if args.full => Ok(layers::cnn18()),
        None => Ok(layers::cnn18().into_iter().map(layers::Layer::reduced).collect()),
    }
}

/// `[4, 64, 112, 112]` as `4x64x112x112`.
pub(crate) fn by_x(sizes: &[usize]) -> String {
    sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

fn limits(args: &Bench, cases: usize) -> Limits {
    if let Some(n) = args.iterations {
        return Limits { budget: Duration::ZERO, min: n.get(), max: n.get() };
    }
    let total = if args.full { FULL_BUDGET } else { BUDGET };
    // A case has two or three contestants with the same budget each.
    let budget = (total / cases as u32 / 3).min(Duration::from_secs(1));
    Limits { budget, min: 3, max: 2000 }
}
