//! Two-dimensional convolution as candle's custom operator.

use crate::gelu::gelu_backward;
use crate::op::{Operator, apply};
use crate::storage::{Held, Order, Output, View, desc, error, options, workspace};
use candle_core::{DType, Device, Result, Shape, Storage, Tensor};
use std::sync::{Arc, Mutex};
use windrow::{
    Activation, Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec, Filter, FilterCache,
    NegativeSlope, PlanOptions, TensorDesc, TensorRef, Weights,
};

const NAME: &str = "conv2d";

pub(crate) fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    params: &Conv2dParams,
) -> Result<Tensor> {
    run(x, weight, bias, params, &Arc::default(), Filter::Changing)
}

/// The number of plans that are kept: for some layouts of the input, forward and backward.
const REMEMBERED: usize = 8;

/// The state that the calls of a layer share.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// The plans, the most recently used one last.
    plans: Mutex<Vec<Known>>,
    pub filter: FilterCache,
}

#[derive(Debug)]
struct Known {
    spec: Conv2dSpec,
    options: PlanOptions,
    plan: Arc<Conv2dPlan>,
}

impl Kept {
    /// The plan for a spec. No lock is held while a plan is made, so two threads may make the same one.
    fn plan(&self, spec: &Conv2dSpec, options: &PlanOptions) -> Result<Arc<Conv2dPlan>> {
        let lock = || self.plans.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let known = |plans: &mut Vec<Known>| {
            let is = |known: &Known| known.spec == *spec && known.options == *options;
            let found = plans.iter().position(is)?;
            plans[found..].rotate_left(1);
            plans.last().map(|known| known.plan.clone())
        };
        if let Some(plan) = known(&mut lock()) {
            return Ok(plan);
        }
        let plan = Arc::new(Conv2dPlan::new(spec, options).map_err(error(NAME))?);
        let mut plans = lock();
        if let Some(plan) = known(&mut plans) {
            return Ok(plan);
        }
        if plans.len() == REMEMBERED {
            plans.remove(0);
        }
        plans.push(Known { spec: spec.clone(), options: *options, plan: plan.clone() });
        Ok(plan)
    }
}

/// The convolution with plans of `kept`; a filter that is not changing is packed there as well.
pub(crate) fn run(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    params: &Conv2dParams,
    kept: &Arc<Kept>,
    filter: Filter,
) -> Result<Tensor> {
    let spec = Conv2dSpec::new(desc(NAME, x)?, desc(NAME, weight)?, params);
    let mut spec = spec.map_err(error(NAME))?;
    spec.bias = bias.map(|bias| desc(NAME, bias)).transpose()?;
    let options = options(NAME, x.device())?.with_filter(filter);
    let plan = kept.plan(&spec, &options)?;
    let order = Order::of(&spec.y);
    let operator = Conv2d { plan, kept: kept.clone(), options, device: x.device().clone() };
    let args: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
    order.logical(&apply(operator, &args)?)
}

struct Conv2d {
    plan: Arc<Conv2dPlan>,
    kept: Arc<Kept>,
    options: PlanOptions,
    device: Device,
}

impl Conv2d {
    fn plan(&self, spec: &Conv2dSpec) -> Result<Arc<Conv2dPlan>> {
        self.kept.plan(spec, &self.options)
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
        let bytes = plan.workspace_bytes_for(&x, &w);
        let mut ws = workspace(NAME, &self.device, bytes)?;
        let run = plan.run(&Conv2dArgs::new(x, w).with_bias(bias), y.view(NAME)?.tensor(), &mut ws);
        run.map_err(error(NAME))?;
        Ok(y)
    }

    /// The gradient of the sum that the activation is applied to.
    fn through_activation(&self, args: &[&Tensor], y: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let spec = self.plan.spec();
        match spec.activation {
            Activation::Identity => return Ok(dy.clone()),
            Activation::Relu => return dy.mul(&y.gt(0f64)?.to_dtype(dy.dtype())?),
            Activation::Relu6 => {
                let inside = y.gt(0f64)?.mul(&y.lt(6f64)?)?;
                return dy.mul(&inside.to_dtype(dy.dtype())?);
            }
            // The output has the sign of the sum.
            Activation::LeakyRelu(slope) if slope.get() >= 0.0 => {
                return leaky_relu_backward(y, dy, slope);
            }
            _ => {}
        }
        let held: Vec<_> = args.iter().map(|arg| Held::new(arg)).collect();
        let views = held.iter().map(|held| held.view(NAME)).collect::<Result<Vec<_>>>()?;
        let plan = self.plan(&spec.clone().with_activation(Activation::Identity))?;
        let bias = views.get(2).map(|view| view.tensor);
        let z = self.compute(&plan, views[0].tensor, Weights::Raw(views[1].tensor), bias)?;
        // SAFETY: a run writes all of its output.
        let z = unsafe { z.into_tensor() }?;
        match spec.activation {
            Activation::Gelu(approximate) => gelu_backward(&z, dy, approximate),
            Activation::LeakyRelu(slope) => leaky_relu_backward(&z, dy, slope),
            Activation::Hardswish => hardswish_backward(&z, dy),
            Activation::Silu => silu_backward(&z, dy),
            other => Err(error(NAME)(windrow::Error::unsupported(
                format!("the gradient of {other}"),
                "this crate does not know the activation",
            ))),
        }
    }
}

/// `dy`, times the slope where `z` is not positive.
fn leaky_relu_backward(z: &Tensor, dy: &Tensor, slope: NegativeSlope) -> Result<Tensor> {
    let gradient = dy.to_dtype(DType::F32)?;
    let scaled = (&gradient * f64::from(slope.get()))?;
    z.gt(0f64)?.where_cond(&gradient, &scaled)?.to_dtype(dy.dtype())
}

/// `dy` times a slope that rises from -1/2 at -3 to 3/2 at 3 and is 0 below and 1 above, in f32.
fn hardswish_backward(z: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let (z, gradient) = (z.to_dtype(DType::F32)?, dy.to_dtype(DType::F32)?);
    let above = z.ge(3f64)?.where_cond(&gradient, &gradient.zeros_like()?)?;
    let between = z.gt(-3f64)?.mul(&z.lt(3f64)?)?;
    let slope = ((z + 1.5)? / 3.0)?;
    between.where_cond(&gradient.mul(&slope)?, &above)?.to_dtype(dy.dtype())
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
        let (plan, w) = (&self.plan, views[1].tensor);
        let w = match self.options.filter {
            Filter::Kept => Weights::Cached(w, &self.kept.filter),
            _ => Weights::Raw(w),
        };
        let y = self.compute(plan, views[0].tensor, w, views.get(2).map(|view| view.tensor))?;
        let shape = Order::of(&plan.spec().y).shape(plan.spec().y.shape());
        // SAFETY: a run writes all of its output.
        Ok((unsafe { y.into_storage() }, shape))
    }

    fn backward(&self, args: &[&Tensor], y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let spec = self.plan.spec();
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
    /// A plan for this gradient, with this layout of x.
    fn plan(&self, x: TensorDesc) -> Result<Arc<Conv2dPlan>> {
        let spec = self.conv2d.plan.spec().clone().with_activation(Activation::Identity);
        let mut spec = spec.with_output(self.dz);
        spec.x = x;
        self.conv2d.plan(&spec)
    }

    fn data(&self, w: &TensorRef<'_>, dz: &TensorRef<'_>) -> Result<Tensor> {
        let x = self.conv2d.plan.spec().x;
        // The gradient of a view with gaps or repeated elements is a dense tensor all the same.
        let x = self.order.desc(NAME, x.dtype, x.shape())?;
        let plan = self.plan(x)?;
        self.compute(&plan, x, |dx, ws| plan.backward_data(w, dz, dx, ws))
    }

    fn weight(&self, x: &TensorRef<'_>, dz: &TensorRef<'_>) -> Result<Tensor> {
        let (plan, w) = (self.plan(*x.desc())?, self.conv2d.plan.spec().w);
        let dw = Order::RowMajor.desc(NAME, w.dtype, w.shape())?;
        self.compute(&plan, dw, |dw, ws| plan.backward_weight(x, dz, dw, ws))
    }

    fn bias(&self, dz: &TensorRef<'_>) -> Result<Tensor> {
        let spec = self.conv2d.plan.spec();
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
        let bytes = plan.backward_workspace_bytes().map_err(error(NAME))?;
        let mut ws = workspace(NAME, device, bytes)?;
        run(gradient.view(NAME)?.tensor(), &mut ws).map_err(error(NAME))?;
        // SAFETY: a run writes all of its output.
        unsafe { gradient.into_tensor() }
    }
}
