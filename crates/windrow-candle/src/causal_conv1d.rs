//! Causal convolution as candle's custom operators.

use crate::in_place::in_place;
use crate::op::{Operator, apply};
use crate::storage::{
    Held, Order, Output, View, ViewMut, desc, error, options, same_device, workspace,
};
use candle_core::op::BackpropOp;
use candle_core::{Device, Error, Result, Shape, Storage, Tensor};
use std::sync::{Arc, Mutex};
use windrow::{
    Activation, CausalConv1dArgs, CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dPlan,
    CausalConv1dSpec, CausalConv1dUpdateArgs, CausalConv1dUpdatePlan, CausalConv1dUpdateSpec,
    TensorDesc, TensorRef,
};

const NAME: &str = "causal_conv1d";
const UPDATE: &str = "causal_conv1d_update";

/// The optional arguments of [`causal_conv1d`](crate::TensorExt::causal_conv1d); by default none is given.
#[derive(Clone, Copy, Debug)]
pub struct CausalConv1dOptions<'a> {
    /// The bias `[d_out]`, f32 or x's type.
    pub bias: Option<&'a Tensor>,
    /// The activation after the bias.
    pub activation: Activation,
    /// The number of each token's sequence [b, l], i32 or u32; a negative number is padding.
    pub seq_idx: Option<&'a Tensor>,
    /// Boundaries of packed sequences [sequences + 1], i32, i64 or u32, with b = 1.
    pub cu_seqlens: Option<&'a Tensor>,
    /// Tokens before each sequence [b or sequences, d, (width-1) * dilation], of x's type.
    pub initial_states: Option<&'a Tensor>,
    /// The distance of neighbouring taps in tokens; by default 1.
    pub dilation: usize,
}

impl Default for CausalConv1dOptions<'_> {
    fn default() -> Self {
        CausalConv1dOptions {
            bias: None,
            activation: Activation::default(),
            seq_idx: None,
            cu_seqlens: None,
            initial_states: None,
            dilation: 1,
        }
    }
}

/// The optional arguments of [`causal_conv1d_update`](crate::TensorExt::causal_conv1d_update); by default none is
/// given.
#[derive(Clone, Copy, Debug, Default)]
pub struct CausalConv1dUpdateOptions<'a> {
    /// The bias `[d]`, f32 or x's type.
    pub bias: Option<&'a Tensor>,
    /// The activation after the bias.
    pub activation: Activation,
    /// The number of earlier tokens `[b]`, i32, i64 or u32. If it is given, the state is a ring buffer.
    pub cache_seqlens: Option<&'a Tensor>,
    /// The index of the state of each row of x, `[b]`, i32, i64 or u32; a negative index is padding.
    pub conv_state_indices: Option<&'a Tensor>,
}

/// The meaning of candle's third argument. candle's operators have at most three arguments, and gradients flow to these
/// only.
#[derive(Clone, Copy, PartialEq)]
enum Third {
    None,
    Bias,
    States,
    /// Bias and initial states one after the other in a flat tensor.
    Joined,
}

struct CausalConv1d {
    plan: CausalConv1dPlan,
    device: Device,
    third: Third,
    held: HeldArgs,
    final_states: FinalStates,
}

/// The inputs that are not arguments of candle's operator.
struct HeldArgs {
    bias: Option<Tensor>,
    initial_states: Option<Tensor>,
    seq_idx: Option<Tensor>,
    cu_seqlens: Option<Tensor>,
}

/// The place in which a run leaves the final states, if the plan has them.
type FinalStates = Arc<Mutex<Option<Storage>>>;

pub(crate) fn causal_conv1d(
    x: &Tensor,
    weight: &Tensor,
    options: &CausalConv1dOptions<'_>,
) -> Result<Tensor> {
    Ok(run(x, weight, options, false)?.0)
}

pub(crate) fn causal_conv1d_with_states(
    x: &Tensor,
    weight: &Tensor,
    options: &CausalConv1dOptions<'_>,
) -> Result<(Tensor, Tensor)> {
    let (y, states) = run(x, weight, options, true)?;
    Ok((y, states.expect("asked for and computed")))
}

fn run(
    x: &Tensor,
    weight: &Tensor,
    given: &CausalConv1dOptions<'_>,
    with_states: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let &CausalConv1dOptions { bias, activation, seq_idx, cu_seqlens, initial_states, dilation } =
        given;
    let mut spec = CausalConv1dSpec::new(desc(NAME, x)?, desc(NAME, weight)?)
        .map_err(error(NAME))?
        .with_activation(activation)
        .with_dilation(dilation);
    for (name, tensor, slot) in [
        ("bias", bias, &mut spec.bias),
        ("seq_idx", seq_idx, &mut spec.seq_idx),
        ("cu_seqlens", cu_seqlens, &mut spec.cu_seqlens),
        ("initial_states", initial_states, &mut spec.initial_states),
    ] {
        let Some(tensor) = tensor else { continue };
        same_device(NAME, name, tensor, x)?;
        *slot = Some(desc(NAME, tensor)?);
    }
    let needs_gradient = |tensor: Option<&Tensor>| tensor.is_some_and(Tensor::track_op);
    let (third, argument) = match (bias, initial_states) {
        (Some(bias), Some(states)) if needs_gradient(Some(bias)) && states.track_op() => {
            (Third::Joined, Some(Tensor::cat(&[bias.flatten_all()?, states.flatten_all()?], 0)?))
        }
        (_, Some(states)) if states.track_op() => (Third::States, Some(states.clone())),
        (Some(bias), _) => (Third::Bias, Some(bias.clone())),
        (None, _) => (Third::None, None),
    };
    if third == Third::Joined {
        for part in [&mut spec.bias, &mut spec.initial_states].into_iter().flatten() {
            *part = Order::RowMajor.desc(NAME, part.dtype, part.shape())?;
        }
    }
    let states_shape = spec.states_shape().map_err(error(NAME))?;
    if with_states {
        spec.final_states = Some(Order::RowMajor.desc(NAME, spec.x.dtype, &states_shape)?);
    }
    let plan = CausalConv1dPlan::new(&spec, &options(NAME, x.device())?).map_err(error(NAME))?;
    let final_states = FinalStates::default();
    let joined = third == Third::Joined;
    let operator = CausalConv1d {
        plan,
        device: x.device().clone(),
        third,
        held: HeldArgs {
            bias: bias.filter(|_| third != Third::Bias && !joined).cloned(),
            initial_states: initial_states.filter(|_| third != Third::States && !joined).cloned(),
            seq_idx: seq_idx.cloned(),
            cu_seqlens: cu_seqlens.cloned(),
        },
        final_states: final_states.clone(),
    };
    let args: Vec<&Tensor> = [x, weight].into_iter().chain(&argument).collect();
    let y = Order::of(&spec.y).logical(&apply(operator, &args)?)?;
    let states = final_states.lock().expect("no run panics").take();
    let tensor = |storage| Tensor::from_storage(storage, &states_shape, BackpropOp::none(), false);
    Ok((y, states.map(tensor)))
}

impl CausalConv1d {
    /// Calls `work` with views of all inputs, of which candle gives `views`.
    fn with_args<R>(
        &self,
        views: &[View<'_>],
        work: impl FnOnce(&CausalConv1dArgs<'_>) -> Result<R>,
    ) -> Result<R> {
        let HeldArgs { bias, initial_states, seq_idx, cu_seqlens } = &self.held;
        let held = [bias, initial_states, seq_idx, cu_seqlens].map(|t| t.as_ref().map(Held::new));
        let held = held.each_ref().map(|held| held.as_ref().map(|held| held.view(NAME)));
        let [bias, initial_states, seq_idx, cu_seqlens] = held.map(Option::transpose);
        let (bias, initial_states) = (bias?, initial_states?);
        let (seq_idx, cu_seqlens) = (seq_idx?, cu_seqlens?);
        fn tensor<'a>(view: &Option<View<'a>>) -> Option<TensorRef<'a>> {
            view.as_ref().map(|view| view.tensor)
        }
        let mut args = CausalConv1dArgs::new(views[0].tensor, views[1].tensor)
            .with_bias(tensor(&bias))
            .with_seq_idx(tensor(&seq_idx))
            .with_cu_seqlens(tensor(&cu_seqlens))
            .with_initial_states(tensor(&initial_states));
        match (self.third, views.get(2)) {
            (Third::None, _) | (_, None) => {}
            (Third::Bias, Some(view)) => args.bias = Some(view.tensor),
            (Third::States, Some(view)) => args.initial_states = Some(view.tensor),
            (Third::Joined, Some(view)) => {
                let (bias, states) = self.split(&view.tensor)?;
                (args.bias, args.initial_states) = (Some(bias), Some(states));
            }
        }
        work(&args)
    }

    /// Bias and initial states in the tensor that joins them.
    fn split<'a>(&self, joined: &TensorRef<'a>) -> Result<(TensorRef<'a>, TensorRef<'a>)> {
        let spec = self.plan.spec();
        let (Some(bias), Some(states)) = (spec.bias, spec.initial_states) else {
            unreachable!("joined from both");
        };
        let (d, len) = (bias.layout.len(), joined.layout().len());
        let bias = joined.narrow(0, 0..d).map_err(error(NAME))?;
        let rest = joined.narrow(0, d..len).map_err(error(NAME))?;
        // SAFETY: dense, and as many elements as were joined after the bias.
        Ok((bias, unsafe { rest.with_layout(states.layout) }))
    }
}

impl Operator for CausalConv1d {
    const NAME: &'static str = NAME;

    fn forward(&self, views: &[View<'_>]) -> Result<(Storage, Shape)> {
        let spec = self.plan.spec();
        let mut y = Output::new(NAME, &self.device, spec.y)?;
        let states = spec.final_states.map(|desc| Output::new(NAME, &self.device, desc));
        let mut states = states.transpose()?;
        let mut ws = workspace(NAME, &self.device, self.plan.workspace_bytes())?;
        self.with_args(views, |args| {
            let mut y = y.view(NAME)?;
            let mut states = states.as_mut().map(|states| states.view(NAME)).transpose()?;
            let outputs = CausalConv1dOutputs::new(y.tensor())
                .with_final_states(states.as_mut().map(|states| states.tensor()));
            self.plan.run(args, outputs, &mut ws).map_err(error(NAME))
        })?;
        // SAFETY: a run writes all of its outputs.
        let states = states.map(|states| unsafe { states.into_storage() });
        *self.final_states.lock().expect("no run panics") = states;
        // SAFETY: the run has written all of y.
        Ok((unsafe { y.into_storage() }, Order::of(&spec.y).shape(spec.y.shape())))
    }

    fn backward(&self, args: &[&Tensor], _y: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let spec = self.plan.spec();
        let dy = Order::of(&spec.y).logical(dy)?;
        let output = |wanted: bool, desc: Option<TensorDesc>| {
            let Some(desc) = desc.filter(|_| wanted) else { return Ok(None) };
            Output::new(NAME, &self.device, desc).map(Some)
        };
        let dense = |desc: &TensorDesc| Order::RowMajor.desc(NAME, desc.dtype, desc.shape());
        let third = args.get(2).is_some_and(|third| third.track_op());
        let is = |of: Third| third && (self.third == of || self.third == Third::Joined);
        let x = Order::of(&spec.y).desc(NAME, spec.x.dtype, spec.x.shape())?;
        let mut outputs = [
            output(args[0].track_op(), Some(x))?,
            output(args[1].track_op(), Some(dense(&spec.weight)?))?,
            output(is(Third::Bias), spec.bias.as_ref().map(dense).transpose()?)?,
            output(is(Third::States), spec.initial_states.as_ref().map(dense).transpose()?)?,
        ];
        let (held, dy) =
            (args.iter().map(|arg| Held::new(arg)).collect::<Vec<_>>(), Held::new(&dy));
        let views = held.iter().map(|held| held.view(NAME)).collect::<Result<Vec<_>>>()?;
        let dy = dy.view(NAME)?;
        let mut ws = workspace(NAME, &self.device, self.plan.workspace_bytes())?;
        self.with_args(&views, |args| {
            let targets = outputs.each_mut().map(|o| o.as_mut().map(|o| o.view(NAME)).transpose());
            let [dx, dweight, dbias, dstates] = targets;
            let (mut dx, mut dweight, mut dbias, mut dstates) = (dx?, dweight?, dbias?, dstates?);
            let grads = CausalConv1dGrads::default()
                .with_dx(dx.as_mut().map(ViewMut::tensor))
                .with_dweight(dweight.as_mut().map(ViewMut::tensor))
                .with_dbias(dbias.as_mut().map(ViewMut::tensor))
                .with_dinitial_states(dstates.as_mut().map(ViewMut::tensor));
            self.plan.backward(args, dy.tensor, None, grads, &mut ws).map_err(error(NAME))
        })?;
        // SAFETY: a run writes all of its outputs.
        let tensors = outputs.map(|o| o.map(|o| unsafe { o.into_tensor() }).transpose());
        let [dx, dweight, dbias, dstates] = tensors;
        let third = match (dbias?, dstates?) {
            (Some(bias), Some(states)) => {
                Some(Tensor::cat(&[bias.flatten_all()?, states.flatten_all()?], 0)?)
            }
            (bias, states) => bias.or(states),
        };
        Ok(vec![dx?, dweight?, third])
    }
}

pub(crate) fn causal_conv1d_update(
    x: &Tensor,
    conv_state: &Tensor,
    weight: &Tensor,
    given: &CausalConv1dUpdateOptions<'_>,
) -> Result<Tensor> {
    let &CausalConv1dUpdateOptions { bias, activation, cache_seqlens, conv_state_indices } = given;
    let descs = (desc(UPDATE, x)?, desc(UPDATE, conv_state)?, desc(UPDATE, weight)?);
    let mut spec = CausalConv1dUpdateSpec::new(descs.0, descs.1, descs.2)
        .map_err(error(UPDATE))?
        .with_activation(activation);
    let mut sources = vec![("x", x), ("weight", weight)];
    same_device(UPDATE, "conv_state", conv_state, x)?;
    same_device(UPDATE, "weight", weight, x)?;
    for (name, tensor, slot) in [
        ("bias", bias, &mut spec.bias),
        ("cache_seqlens", cache_seqlens, &mut spec.cache_seqlens),
        ("conv_state_indices", conv_state_indices, &mut spec.conv_state_indices),
    ] {
        let Some(tensor) = tensor else { continue };
        same_device(UPDATE, name, tensor, x)?;
        *slot = Some(desc(UPDATE, tensor)?);
        sources.push((name, tensor));
    }
    let options = options(UPDATE, x.device())?;
    let plan = CausalConv1dUpdatePlan::new(&spec, &options).map_err(error(UPDATE))?;
    let mut ws = workspace(UPDATE, x.device(), plan.workspace_bytes())?;
    let mut y = Output::new(UPDATE, x.device(), spec.y)?;
    in_place(UPDATE, ("conv_state", conv_state), &sources, |views, conv_state| {
        let mut rest = views[2..].iter().map(|view| view.tensor);
        let args = CausalConv1dUpdateArgs::new(views[0].tensor, views[1].tensor)
            .with_bias(spec.bias.and_then(|_| rest.next()))
            .with_cache_seqlens(spec.cache_seqlens.and_then(|_| rest.next()))
            .with_conv_state_indices(spec.conv_state_indices.and_then(|_| rest.next()));
        let run = plan.run(&args, conv_state.tensor(), y.view(UPDATE)?.tensor(), &mut ws);
        run.map_err(error(UPDATE))
    })?;
    let order = Order::of(&spec.y);
    // SAFETY: a run writes all of its output.
    let result = (unsafe { y.into_storage() }, order.shape(spec.y.shape()));
    let step = Step(Mutex::new(Some(result)));
    order.logical(&apply(step, &[x, weight])?)
}

/// The result of a step. A backward pass through it is an error, because a step has no gradient.
struct Step(Mutex<Option<(Storage, Shape)>>);

impl Operator for Step {
    const NAME: &'static str = UPDATE;

    fn forward(&self, _: &[View<'_>]) -> Result<(Storage, Shape)> {
        Ok(self.0.lock().expect("no run panics").take().expect("candle runs an operator once"))
    }

    fn backward(&self, _: &[&Tensor], _: &Tensor, _: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Err(Error::BackwardNotSupported { op: UPDATE }.bt())
    }
}
