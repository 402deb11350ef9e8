//! GELU as candle's custom operator.

use crate::in_place::in_place;
use crate::op::{Operator, apply};
use crate::storage::{Held, Order, Output, View, desc, error, options, workspace};
use candle_core::{Device, Result, Shape, Storage, Tensor};
use windrow::{Approximate, GeluArgs, GeluGrads, GeluPlan, GeluSpec};

const NAME: &str = "gelu";

/// `gelu(x + bias) * gate`. candle's arguments are x and those of bias and gate that are given.
struct Gelu {
    plan: GeluPlan,
    device: Device,
}

pub(crate) fn gelu(
    x: &Tensor,
    bias: Option<&Tensor>,
    gate: Option<&Tensor>,
    approximate: Approximate,
) -> Result<Tensor> {
    let args: Vec<&Tensor> = [Some(x), bias, gate].into_iter().flatten().collect();
    apply(Gelu::new(x, bias, gate, approximate)?, &args)
}

pub(crate) fn gelu_in_place(
    x: &Tensor,
    bias: Option<&Tensor>,
    gate: Option<&Tensor>,
    approximate: Approximate,
) -> Result<()> {
    let spec = spec(x, bias, gate, approximate)?.with_output(desc(NAME, x)?);
    let plan = GeluPlan::new(&spec, &options(NAME, x.device())?).map_err(error(NAME))?;
    let mut ws = workspace(NAME, x.device(), plan.workspace_bytes())?;
    let sources: Vec<_> =
        [("bias", bias), ("gate", gate)].into_iter().filter_map(|(n, t)| Some((n, t?))).collect();
    in_place(NAME, ("x", x), &sources, |views, x| {
        let (bias, gate) = optional(&spec, views);
        plan.run_in_place(x.tensor(), bias, gate, &mut ws).map_err(error(NAME))
    })
}

/// The derivative of GELU at `x` times `dy`.
pub(crate) fn gelu_backward(x: &Tensor, dy: &Tensor, approximate: Approximate) -> Result<Tensor> {
    let gelu = Gelu::new(x, None, None, approximate)?;
    let mut gradients = gelu.gradients(&[x], dy, |_| true)?;
    Ok(gradients.pop().flatten().expect("one argument has one gradient"))
}

/// The operator with a row-major output, which is what candle's custom operators return.
fn spec(
    x: &Tensor,
    bias: Option<&Tensor>,
    gate: Option<&Tensor>,
    approximate: Approximate,
) -> Result<GeluSpec> {
    let x = desc(NAME, x)?;
    let y = Order::RowMajor.desc(NAME, x.dtype, x.shape())?;
    let mut spec = GeluSpec::new(x, approximate).map_err(error(NAME))?.with_output(y);
    spec.bias = bias.map(|bias| desc(NAME, bias)).transpose()?;
    spec.gate = gate.map(|gate| desc(NAME, gate)).transpose()?;
    Ok(spec)
}

/// Bias and gate of a list of those that are given.
fn optional<'a>(
    spec: &GeluSpec,
    views: &[View<'a>],
) -> (Option<windrow::TensorRef<'a>>, Option<windrow::TensorRef<'a>>) {
    let mut views = views.iter().map(|view| view.tensor);
    let bias = spec.bias.and_then(|_| views.next());
    (bias, spec.gate.and_then(|_| views.next()))
}

impl Gelu {
    fn new(
        x: &Tensor,
        bias: Option<&Tensor>,
        gate: Option<&Tensor>,
        approximate: Approximate,
    ) -> Result<Self> {
        let spec = spec(x, bias, gate, approximate)?;
        let plan = GeluPlan::new(&spec, &options(NAME, x.device())?).map_err(error(NAME))?;
        Ok(Gelu { plan, device: x.device().clone() })
    }

    fn args<'a>(&self, views: &[View<'a>]) -> GeluArgs<'a> {
        let (bias, gate) = optional(self.plan.spec(), &views[1..]);
        GeluArgs::new(views[0].tensor).with_bias(bias).with_gate(gate)
    }

    /// The gradients that are asked for.
    fn gradients(
        &self,
        args: &[&Tensor],
        dy: &Tensor,
        wanted: impl Fn(&Tensor) -> bool,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut outputs = Vec::with_capacity(args.len());
        for arg in args {
            let like = desc(NAME, arg)?;
            let dense = Order::RowMajor.desc(NAME, like.dtype, like.shape())?;
            let wanted = wanted(arg);
            outputs.push(wanted.then(|| Output::new(NAME, &self.device, dense)).transpose()?);
        }
        let (held, dy): (Vec<_>, _) =
            (args.iter().map(|arg| Held::new(arg)).collect(), Held::new(dy));
        let views = held.iter().map(|held| held.view(NAME)).collect::<Result<Vec<_>>>()?;
        let mut targets = outputs
            .iter_mut()
            .map(|output| output.as_mut().map(|output| output.view(NAME)).transpose())
            .collect::<Result<Vec<_>>>()?;
        let mut targets_of = targets.iter_mut().map(|target| Some(target.as_mut()?.tensor()));
        let spec = self.plan.spec();
        let dx = targets_of.next().flatten();
        let dbias = spec.bias.and_then(|_| targets_of.next().flatten());
        let dgate = spec.gate.and_then(|_| targets_of.next().flatten());
        let mut ws = workspace(NAME, &self.device, self.plan.workspace_bytes())?;
        let grads = GeluGrads::default().with_dx(dx).with_dgate(dgate).with_dbias(dbias);
        let dy = dy.view(NAME)?;
        self.plan.backward(&self.args(&views), &dy.tensor, grads, &mut ws).map_err(error(NAME))?;
        drop(targets);
        // SAFETY: a run writes all of its outputs.
        let tensor = |output: Output| unsafe { output.into_tensor() };
        outputs.into_iter().map(|output| output.map(tensor).transpose()).collect()
    }
}

impl Operator for Gelu {
    const NAME: &'static str = NAME;

    fn forward(&self, views: &[View<'_>]) -> Result<(Storage, Shape)> {
        let spec = self.plan.spec();
        let mut y = Output::new(NAME, &self.device, spec.y)?;
        let mut ws = workspace(NAME, &self.device, 0)?;
        let run = self.plan.run(&self.args(views), y.view(NAME)?.tensor(), &mut ws);
        run.map_err(error(NAME))?;
        // SAFETY: a run writes all of its output.
        Ok((unsafe { y.into_storage() }, Shape::from(spec.x.shape())))
    }

    fn backward(&self, args: &[&Tensor], _y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        self.gradients(args, dy, Tensor::track_op)
    }
}
