//! `windrow run`: one operator on tensors from files.

mod causal_conv1d;
mod conv2d;
mod conv3d;
mod gelu;

use crate::failure::Failure;
use crate::files::{self, Contents, Outputs, shown};
use crate::machine::start_threads;
use crate::print::{self, Steps};
use std::cell::Cell;
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use windrow::internal::{Configuration, Operator};
use windrow::{DType, Device, Error, Placed, Plan, PlanOptions, Tensor};

/// Run one operator on tensors from .npy, .npz or .safetensors files.
///
/// Elements are f32, f16 or bf16. PATH:NAME chooses a tensor of a .npz or .safetensors file. Outputs are
/// .npy or .safetensors files. `-` is standard input or output. The first bytes tell if the input is
/// .npy or .safetensors. The output is .npy, or .safetensors for bf16.
#[derive(Debug, clap::Subcommand)]
#[command(after_help = EXAMPLES)]
pub(crate) enum Run {
    Gelu(gelu::Gelu),
    #[command(name = "causal-conv1d", alias = "causal_conv1d")]
    CausalConv1d(causal_conv1d::CausalConv1d),
    Conv2d(conv2d::Conv2d),
    Conv3d(conv3d::Conv3d),
}

const EXAMPLES: &str = "\
Examples:
  windrow run gelu --input x.npy --output y.npy
  windrow run conv2d --input x.npy --weight model.safetensors:conv1.weight --output y.npy
  windrow run gelu --input - --output - < x.npy > y.npy";

pub(crate) fn run(command: &Run) -> Result<(), Failure> {
    match command {
        Run::Gelu(args) => args.run(),
        Run::CausalConv1d(args) => args.run(),
        Run::Conv2d(args) => args.run(),
        Run::Conv3d(args) => args.run(),
    }
}

/// The device and the destination of results: the same arguments for all operators.
#[derive(Debug, clap::Args)]
struct Common {
    /// File for the result, .npy or .safetensors, written whole or not at all; `-` is standard output
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// cpu, cuda:INDEX or hip:INDEX
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// CPU threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Compare the result with its f64 reference (the oracle) before it is written; exit status 1 if
    /// it differs
    #[arg(long)]
    verify: bool,
}

impl Common {
    fn options(&self) -> Result<PlanOptions, Failure> {
        let mut options = PlanOptions::default().with_device(self.device);
        options.threads = Some(start_threads(self.threads)?);
        if self.verify {
            options.verify = windrow::Verify::On;
        }
        Ok(options)
    }
}

/// The files of a run: outputs are looked at before anything is read.
struct Files {
    outputs: Outputs,
    stdin_is_taken: Cell<bool>,
    steps: Steps,
}

impl Files {
    fn new<'a>(outputs: impl IntoIterator<Item = &'a Path>) -> Result<Self, Failure> {
        let outputs = Outputs::of_tensors(outputs)?;
        Ok(Files { outputs, stdin_is_taken: Cell::new(false), steps: Steps::new() })
    }

    fn read(&self, source: &Path) -> Result<Tensor, Failure> {
        let text = source.to_string_lossy();
        if (text == "-" || text.starts_with("-:")) && self.stdin_is_taken.replace(true) {
            return Err(Failure::Input("-: expected one tensor from standard input".into()));
        }
        self.steps.now(format_args!("reading {text}"));
        Ok(files::read(source)?)
    }

    /// Reads the tensor of an optional argument.
    fn read_optional(&self, source: Option<&PathBuf>) -> Result<Option<Tensor>, Failure> {
        source.map(|s| self.read(s)).transpose()
    }

    /// Reads a tensor and reorders its dimensions if `order` is given: dimension `i` of the result is
    /// dimension `order[i]` in the file.
    fn read_ordered(
        &self,
        source: &Path,
        arg: &'static str,
        order: Option<&[usize]>,
    ) -> Result<Tensor, Failure> {
        let tensor = self.read(source)?;
        let Some(order) = order else { return Ok(tensor) };
        if tensor.shape().len() != order.len() {
            let expected = if order.len() == 3 { "3: [b, l, d]" } else { "4: [n, h, w, c]" };
            return Err(Error::Rank { arg, given: tensor.shape().len(), expected }.into());
        }
        Ok(tensor.permute(order))
    }

    /// Prints that the plan runs now, if its results can be written.
    fn start(
        &self,
        plan: &str,
        options: &PlanOptions,
        outputs: impl IntoIterator<Item = DType>,
    ) -> Result<(), Failure> {
        self.outputs.check_types(outputs)?;
        let verified = match options.verify {
            windrow::Verify::On => ", compared with the oracle",
            windrow::Verify::Off => "",
        };
        self.steps.now(format_args!("running {plan}{verified}"));
        Ok(())
    }

    /// Writes the results, each with its default name in `.safetensors`, and says so.
    fn finish(self, results: &[(&Path, &str, &Tensor)], plan: &str) -> Result<(), Failure> {
        let contents: Vec<_> =
            results.iter().map(|(_, name, tensor)| Contents::Tensor(name, tensor)).collect();
        self.steps.now("writing");
        self.outputs.write(&contents)?;
        drop(self.steps);
        let mut text = String::new();
        for (path, name, tensor) in results {
            let desc = tensor.desc();
            let _ = writeln!(text, "{}: {name} {} {:?}", shown(path), desc.dtype, desc.shape());
        }
        print::summary(self.outputs.has_stdout(), format_args!("{text}{plan}\n"))
    }
}

/// The tensors that a run reads, in the memory of `device`.
fn place(
    tensors: impl IntoIterator<Item = Option<Tensor>>,
    device: Device,
) -> windrow::Result<Vec<Option<Placed>>> {
    let place = |tensor: Tensor| Placed::new(tensor, device);
    tensors.into_iter().map(|tensor| tensor.map(place).transpose()).collect()
}

/// A plan with the algorithm that was named, or the cost model's choice.
fn plan<O: Operator>(
    spec: &O::Spec,
    algorithm: Option<<O::Configuration as Configuration>::Algorithm>,
    options: &PlanOptions,
) -> windrow::Result<Plan<O>> {
    match algorithm {
        Some(algorithm) => Plan::with_algorithm(spec, algorithm, options),
        None => Plan::new(spec, options),
    }
}
