//! `windrow run gelu`.

use super::{Common, Placed, finish, place, read_optional, view};
use crate::failure::Failure;
use crate::files;
use windrow::{Approximate, GeluArgs, GeluPlan, GeluSpec, Workspace};

/// y = gelu(x + bias) * gate
#[derive(Debug, clap::Args)]
pub(crate) struct Gelu {
    /// x, any shape
    #[arg(long, value_name = "FILE")]
    input: String,
    /// Bias [last dimension of x]
    #[arg(long, value_name = "FILE")]
    bias: Option<String>,
    /// Gate of x's shape, multiplied with the result
    #[arg(long, value_name = "FILE")]
    gate: Option<String>,
    /// none (exact) or tanh
    #[arg(long, default_value = "none")]
    approximate: Approximate,
    /// Algorithm by name [default: the planner's choice]
    #[arg(long, value_name = "NAME")]
    algorithm: Option<windrow::GeluAlgorithm>,
    #[command(flatten)]
    common: Common,
}

impl Gelu {
    pub(super) fn run(&self) -> Result<(), Failure> {
        let x = files::read(&self.input)?;
        let (bias, gate) = (read_optional(self.bias.as_ref())?, read_optional(self.gate.as_ref())?);
        let mut spec = GeluSpec::new(*x.desc(), self.approximate)?;
        spec.bias = bias.as_ref().map(|t| *t.desc());
        spec.gate = gate.as_ref().map(|t| *t.desc());
        let options = self.common.options();
        let plan = match self.algorithm {
            Some(algorithm) => GeluPlan::with_algorithm(&spec, algorithm, &options)?,
            None => GeluPlan::new(&spec, &options)?,
        };
        files::check_output(&self.common.output, spec.y.dtype)?;
        let device = options.device;
        let (x, bias, gate) = (Placed::new(x, device)?, place(bias, device)?, place(gate, device)?);
        let mut y = Placed::output(spec.y, device)?;
        let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
        let args = GeluArgs { x: x.as_ref(), bias: view(&bias), gate: view(&gate) };
        plan.run(&args, y.as_mut()?, &mut workspace)?;
        workspace.synchronize()?;
        let y = y.into_host()?;
        finish(&[(&self.common.output, "y", &y)], &plan.explain())
    }
}
