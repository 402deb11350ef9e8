//! `windrow run`: one operator on tensors from files.

mod causal_conv1d;
mod conv2d;
mod gelu;

use crate::failure::Failure;
use crate::files;
use crate::placed::Placed;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use windrow::{Device, Error, PlanOptions, Tensor, TensorRef};

/// Run one operator on tensors from .npy, .npz or .safetensors files.
///
/// A tensor of an archive is chosen by PATH:NAME. Outputs are .npy or .safetensors files.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Run {
    Gelu(gelu::Gelu),
    #[command(name = "causal-conv1d", alias = "causal_conv1d")]
    CausalConv1d(causal_conv1d::CausalConv1d),
    Conv2d(conv2d::Conv2d),
}

pub(crate) fn run(command: &Run) -> Result<(), Failure> {
    match command {
        Run::Gelu(args) => args.run(),
        Run::CausalConv1d(args) => args.run(),
        Run::Conv2d(args) => args.run(),
    }
}

/// Where to run and where results go: the same for all operators.
#[derive(Debug, clap::Args)]
struct Common {
    /// File for the result, .npy or .safetensors; written whole or not at all
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// cpu or cuda:INDEX
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// CPU threads [default: all cores]
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    /// Compare the result with the f64 oracle before it is written (exit status 1 if it differs)
    #[arg(long)]
    verify: bool,
}

impl Common {
    fn options(&self) -> PlanOptions {
        let mut options = PlanOptions { device: self.device, ..Default::default() };
        options.threads = self.threads;
        if self.verify {
            options.verify = windrow::Verify::On;
        }
        options
    }
}

/// Reads the tensor of an optional argument.
fn read_optional(source: Option<&String>) -> files::Result<Option<Tensor>> {
    source.map(|s| files::read(s)).transpose()
}

/// An optional tensor in the memory of `device`.
fn place(tensor: Option<Tensor>, device: Device) -> windrow::Result<Option<Placed>> {
    tensor.map(|tensor| Placed::new(tensor, device)).transpose()
}

fn view(tensor: &Option<Placed>) -> Option<TensorRef<'_>> {
    tensor.as_ref().map(Placed::as_ref)
}

/// Reads a tensor and reorders its dimensions if `order` is given: dimension `i` of the result is
/// dimension `order[i]` in the file.
fn read_ordered(
    source: &str,
    arg: &'static str,
    order: Option<&[usize]>,
) -> Result<Tensor, Failure> {
    let tensor = files::read(source)?;
    let Some(order) = order else { return Ok(tensor) };
    if tensor.shape().len() != order.len() {
        let expected = if order.len() == 3 { "3: [b, l, d]" } else { "4: [n, h, w, c]" };
        return Err(Error::Rank { arg, given: tensor.shape().len(), expected }.into());
    }
    Ok(tensor.permute(order))
}

/// Writes the results, each with its default name in `.safetensors`, and says so.
fn finish(results: &[(&Path, &str, &Tensor)], plan: &str) -> Result<(), Failure> {
    files::write(results)?;
    for (path, name, tensor) in results {
        let desc = tensor.desc();
        println!("{}: {name} {} {:?}", path.display(), desc.dtype, desc.shape());
    }
    println!("{plan}");
    Ok(())
}
