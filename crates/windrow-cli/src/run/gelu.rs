//! `windrow run gelu`.

use super::{Common, Files, place, plan};
use crate::failure::Failure;
use crate::names;
use std::path::PathBuf;
use windrow::internal::PlanInputs;
use windrow::{Approximate, GeluPlan, GeluSpec, Placed, Workspace};

/// y = gelu(x + bias) * gate
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  windrow run gelu --input x.npy --output y.npy --approximate tanh
  windrow run gelu --input mlp.npz:up --gate mlp.npz:gate --output y.safetensors --verify")]
pub(crate) struct Gelu {
    /// x, any shape, f32, f16 or bf16; `-` is standard input
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Bias [last dimension of x]
    #[arg(long, value_name = "FILE")]
    bias: Option<PathBuf>,
    /// Gate of x's shape, multiplied with the result
    #[arg(long, value_name = "FILE")]
    gate: Option<PathBuf>,
    /// Form: none is exact, by erfc; tanh is the approximation by tanh
    #[arg(long, value_name = "NAME", default_value = "none", value_parser = names::approximate())]
    approximate: Approximate,
    /// Algorithm by name [default: the cost model's choice]
    #[arg(long, value_name = "NAME", value_parser = names::gelu())]
    algorithm: Option<windrow::GeluAlgorithm>,
    #[command(flatten)]
    common: Common,
}

impl Gelu {
    pub(super) fn run(&self) -> Result<(), Failure> {
        let files = Files::new([&*self.common.output])?;
        let x = files.read(&self.input)?;
        let bias = files.read_optional(self.bias.as_ref())?;
        let gate = files.read_optional(self.gate.as_ref())?;
        let mut spec = GeluSpec::new(*x.desc(), self.approximate)?;
        spec.bias = bias.as_ref().map(|t| *t.desc());
        spec.gate = gate.as_ref().map(|t| *t.desc());
        let options = self.common.options()?;
        let plan: GeluPlan = plan(&spec, self.algorithm, &options)?;
        files.start(&plan.explain(), &options, [spec.y.dtype])?;
        let device = options.device;
        let inputs = place([Some(x), bias, gate], device)?;
        let mut y = Placed::output(spec.y, device)?;
        let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
        plan.run(&PlanInputs::new(&plan, &inputs).args(), y.as_mut()?, &mut workspace)?;
        workspace.synchronize()?;
        let y = y.into_host()?;
        files.finish(&[(&self.common.output, "y", &y)], &plan.explain())
    }
}
