//! Two-dimensional convolution as candle's custom operator.

use crate::gelu::gelu_backward;
use crate::op::{Operator, apply};
use crate::storage::{Held, Order, Output, View, desc, error, options, workspace};
use candle_core::{DType, Device, Result, Shape, Storage, Tensor};
use std::sync::Arc;
use windrow::{
    Activation, Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec, PackedWeights, TensorDesc,
    TensorRef, Weights,
};

const NAME: &str = "conv2d";

pub(crate) fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    params: &Conv2dParams,
) -> Result<Tensor> {
    run(x, weight, bias, Arc::new(Prepared::new(x, weight, bias, params)?))
}

/// A plan for inputs of one type, shape and layout, and the filter packed for it, if it is used again.
#[derive(Debug)]
pub(crate) struct Prepared {
    plan: Conv2dPlan,
    packed: Option<PackedWeights>,
}

impl Prepared {
    pub fn new(
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        params: &Conv2dParams,
    ) -> Result<Self> {
        let spec = Conv2dSpec::new(desc(NAME, x)?, desc(NAME, weight)?, params);
        let mut spec = spec.map_err(error(NAME))?;
        spec.bias = bias.map(|bias| desc(NAME, bias)).transpose()?;
        let plan = Conv2dPlan::new(&spec, &options(NAME, x.device())?).map_err(error(NAME))?;
        Ok(Prepared { plan, packed: None })
    }

    /// The same with the filter packed now: later runs do not look at it.
    pub fn pack(self, weight: &Tensor) -> Result<Self> {
        let held = Held::new(weight);
        let mut ws = workspace(NAME, weight.device(), 0)?;
        let packed = self.plan.pack_weights(&held.view(NAME)?.tensor, &mut ws);
        Ok(Prepared { packed: Some(packed.map_err(error(NAME))?), ..self })
    }

    /// True if it is for inputs like `x`.
    pub fn fits(&self, x: &Tensor) -> Result<bool> {
        Ok(self.plan.spec().x == desc(NAME, x)?)
    }
}

/// `prepared` must have been made for these tensors.
pub(crate) fn run(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    prepared: Arc<Prepared>,
) -> Result<Tensor> {
    let order = Order::of(&prepared.plan.spec().y);
    let operator = Conv2d { prepared, device: x.device().clone() };
    let args: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
    order.logical(&apply(operator, &args)?)
}

struct Conv2d {
    prepared: Arc<Prepared>,
    device: Device,
}

impl Conv2d {
    fn plan(&self, spec: &Conv2dSpec) -> Result<Conv2dPlan> {
        Conv2dPlan::new(spec, &options(NAME, &self.device)?).map_err(error(NAME))
    }

    /// The output of a plan.
    fn compute(
        &self,
        plan: &Conv2dPlan,
        x: TensorRef<'_>,
        w: Weights<'_>,
        bias: Option<TensorRef<'_>>,
    ) -> Result<Output> {
        let mut y = Output::new(NAME, &self.device, plan.spec().y)?;
        let bytes = match w {
            Weights::Raw(_) => plan.workspace_bytes(),
            Weights::Packed(_) => plan.packed_workspace_bytes(),
        };
        let mut ws = workspace(NAME, &self.device, bytes)?;
        let run = plan.run(&Conv2dArgs { x, w, bias }, y.view(NAME)?.tensor(), &mut ws);
        run.map_err(error(NAME))?;
        Ok(y)
    }

    /// The gradient of the sum that the activation is applied to.
    fn through_activation(&self, args: &[&Tensor], y: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let spec = self.prepared.plan.spec();
        match spec.activation {
            Activation::Identity => return Ok(dy.clone()),
            Activation::Relu => return dy.mul(&y.gt(0f64)?.to_dtype(dy.dtype())?),
            Activation::Silu | Activation::Gelu(_) => {}
        }
        let held: Vec<_> = args.iter().map(|arg| Held::new(arg)).collect();
        let views = held.iter().map(|held| held.view(NAME)).collect::<Result<Vec<_>>>()?;
        let plan = self.plan(&Conv2dSpec { activation: Activation::Identity, ..spec.clone() })?;
        let bias = views.get(2).map(|view| view.tensor);
        let z = self.compute(&plan, views[0].tensor, Weights::Raw(views[1].tensor), bias)?;
        // SAFETY: a run writes all of its output.
        let z = unsafe { z.into_tensor() }?;
        match spec.activation {
            Activation::Gelu(approximate) => gelu_backward(&z, dy, approximate),
            _ => silu_backward(&z, dy),
        }
    }
}

/// `dy s (1 + z (1 - s))` with `s = sigmoid(z)`, in f32.
fn silu_backward(z: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let (z, gradient) = (z.to_dtype(DType::F32)?, dy.to_dtype(DType::F32)?);
    let s = candle_nn::ops::sigmoid(&z)?;
    let slope = (&s * (1.0 + z.mul(&(1.0 - &s)?)?)?)?;
    gradient.mul(&slope)?.to_dtype(dy.dtype())
}

impl Operator for Conv2d {
    const NAME: &'static str = NAME;

    fn forward(&self, views: &[View<'_>]) -> Result<(Storage, Shape)> {
        let Prepared { plan, packed } = &*self.prepared;
        let w = match packed {
            Some(packed) => Weights::Packed(packed),
            None => Weights::Raw(views[1].tensor),
        };
        let y = self.compute(plan, views[0].tensor, w, views.get(2).map(|view| view.tensor))?;
        let shape = Order::of(&plan.spec().y).shape(plan.spec().y.shape());
        // SAFETY: a run writes all of its output.
        Ok((unsafe { y.into_storage() }, shape))
    }

    fn backward(&self, args: &[&Tensor], y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let spec = self.prepared.plan.spec();
        let order = Order::of(&spec.y);
        let dz = self.through_activation(args, &order.logical(y)?, &order.logical(dy)?)?;
        // A gradient that was broadcast has elements that share memory, which no plan's output has.
        let dz = match desc(NAME, &dz)?.layout.is_unique() {
            true => dz,
            false => dz.contiguous()?,
        };
        let backward = Backward { conv2d: self, order, dz: desc(NAME, &dz)? };
        let (held, dz) = ([Held::new(args[0]), Held::new(args[1])], Held::new(&dz));
        let [x, w] = held.each_ref().map(|held| held.view(NAME));
        let (x, w, dz) = (x?, w?, dz.view(NAME)?);
        let wanted = |index: usize| args.get(index).is_some_and(|arg| arg.track_op());
        let dx = wanted(0).then(|| backward.data(&w.tensor, &dz.tensor)).transpose()?;
        let dw = wanted(1).then(|| backward.weight(&x.tensor, &dz.tensor)).transpose()?;
        let db = wanted(2).then(|| backward.bias(&dz.tensor)).transpose()?;
        Ok(vec![dx, dw, db])
    }
}

/// The gradients of a convolution without activation.
struct Backward<'a> {
    conv2d: &'a Conv2d,
    order: Order,
    dz: TensorDesc,
}

impl Backward<'_> {
    /// A plan for the gradient at hand, with this layout of x.
    fn plan(&self, x: TensorDesc) -> Result<Conv2dPlan> {
        let spec = self.conv2d.prepared.plan.spec().clone();
        let activation = Activation::Identity;
        self.conv2d.plan(&Conv2dSpec { x, y: self.dz, activation, ..spec })
    }

    fn data(&self, w: &TensorRef<'_>, dz: &TensorRef<'_>) -> Result<Tensor> {
        let x = self.conv2d.prepared.plan.spec().x;
        // The gradient of a view with gaps or repeated elements is a dense tensor all the same.
        let x = self.order.desc(NAME, x.dtype, x.shape())?;
        let plan = self.plan(x)?;
        self.compute(&plan, x, |dx, ws| plan.backward_data(w, dz, dx, ws))
    }

    fn weight(&self, x: &TensorRef<'_>, dz: &TensorRef<'_>) -> Result<Tensor> {
        let (plan, w) = (self.plan(*x.desc())?, self.conv2d.prepared.plan.spec().w);
        let dw = Order::RowMajor.desc(NAME, w.dtype, w.shape())?;
        self.compute(&plan, dw, |dw, ws| plan.backward_weight(x, dz, dw, ws))
    }

    fn bias(&self, dz: &TensorRef<'_>) -> Result<Tensor> {
        let spec = self.conv2d.prepared.plan.spec();
        let bias = spec.bias.expect("its gradient is asked for");
        let db = Order::RowMajor.desc(NAME, bias.dtype, bias.shape())?;
        let plan = self.plan(spec.x)?;
        self.compute(&plan, db, |db, ws| plan.backward_bias(dz, db, ws))
    }

    fn compute(
        &self,
        plan: &Conv2dPlan,
        desc: TensorDesc,
        run: impl FnOnce(windrow::TensorMut<'_>, &mut windrow::Workspace) -> windrow::Result<()>,
    ) -> Result<Tensor> {
        let device = &self.conv2d.device;
        let mut gradient = Output::new(NAME, device, desc)?;
        let mut ws = workspace(NAME, device, plan.backward_workspace_bytes())?;
        run(gradient.view(NAME)?.tensor(), &mut ws).map_err(error(NAME))?;
        // SAFETY: a run writes all of its output.
        unsafe { gradient.into_tensor() }
    }
}
