//! Three-dimensional convolution as candle's custom operator.

use crate::op::{Operator, apply};
use crate::storage::{Order, Output, View, desc, error, options, workspace};
use candle_core::{Device, Result, Shape, Storage, Tensor};
use windrow::{Conv3dArgs, Conv3dParams, Conv3dPlan, Conv3dSpec, Filter};

const NAME: &str = "conv3d";

pub(crate) fn conv3d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    params: &Conv3dParams,
) -> Result<Tensor> {
    let spec = Conv3dSpec::new(desc(NAME, x)?, desc(NAME, weight)?, params).map_err(error(NAME))?;
    let spec = spec.with_bias(bias.map(|bias| desc(NAME, bias)).transpose()?);
    let options = options(NAME, x.device())?.with_filter(Filter::Changing);
    let plan = Conv3dPlan::new(&spec, &options).map_err(error(NAME))?;
    let order = Order::of(&spec.y);
    let operator = Conv3d { plan, device: x.device().clone() };
    let args: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
    order.logical(&apply(operator, &args)?)
}

struct Conv3d {
    plan: Conv3dPlan,
    device: Device,
}

impl Operator for Conv3d {
    const NAME: &'static str = NAME;

    fn forward(&self, views: &[View<'_>]) -> Result<(Storage, Shape)> {
        let (plan, y) = (&self.plan, self.plan.spec().y);
        let bias = views.get(2).map(|view| view.tensor);
        let args = Conv3dArgs::new(views[0].tensor, views[1].tensor).with_bias(bias);
        let mut ws = workspace(NAME, &self.device, plan.workspace_bytes_for(&args))?;
        let mut output = Output::new(NAME, &self.device, y)?;
        plan.run(&args, output.view(NAME)?.tensor(), &mut ws).map_err(error(NAME))?;
        let shape = Order::of(&y).shape(y.shape());
        // SAFETY: a run writes all of its output.
        Ok((unsafe { output.into_storage() }, shape))
    }

    fn backward(&self, _: &[&Tensor], _: &Tensor, _: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let what = "this crate computes gradients of one and two dimensions";
        Err(error(NAME)(windrow::Error::unsupported("the gradient of conv3d", what)))
    }
}
