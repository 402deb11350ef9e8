//! `windrow.causal_conv1d` and `windrow.causal_conv1d_update`.

use crate::array::{Array, desc, view};
use crate::call::{ActivationName, PlanCache, RELEASE, run, word};
use crate::error::{IntoPy, NotInPlace};
use crate::output::{Output, like};
use crate::torch::nothing_to_dispatch;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::Arc;
use windrow::{
    Activation, CausalConv1dArgs, CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dPlan,
    CausalConv1dSpec, CausalConv1dUpdateArgs, CausalConv1dUpdatePlan, CausalConv1dUpdateSpec,
    HeadNorm, Layout, TensorDesc, TensorMut,
};

/// A spec, and whether the bits of a sequence must not depend on the batch.
type Key = (CausalConv1dSpec, bool);
static PLANS: PlanCache<Key, CausalConv1dPlan> = PlanCache::new();
static UPDATE_PLANS: PlanCache<CausalConv1dUpdateSpec, CausalConv1dUpdatePlan> = PlanCache::new();

/// The inputs of a prefill call, forward or backward.
struct Inputs<'py> {
    x: Array<'py>,
    weight: Array<'py>,
    bias: Option<Array<'py>>,
    seq_idx: Option<Array<'py>>,
    cu_seqlens: Option<Array<'py>>,
    initial_states: Option<Array<'py>>,
    activation: Activation,
    dilation: usize,
}

impl<'py> Inputs<'py> {
    fn import(
        [x, weight]: [&Bound<'py, PyAny>; 2],
        [bias, seq_idx, cu_seqlens, initial_states]: [Option<&Bound<'py, PyAny>>; 4],
        activation: Option<ActivationName>,
        dilation: i64,
        device: Option<&str>,
    ) -> PyResult<Self> {
        let device = device.map(word).transpose()?;
        let option = |arg, array| Array::import_option(arg, array, device);
        Ok(Inputs {
            x: Array::import_on("x", x, device)?,
            weight: Array::import_on("weight", weight, device)?,
            bias: option("bias", bias)?,
            seq_idx: option("seq_idx", seq_idx)?,
            cu_seqlens: option("cu_seqlens", cu_seqlens)?,
            initial_states: option("initial_states", initial_states)?,
            activation: ActivationName::or_none(activation),
            // A negative number is as wrong as zero.
            dilation: usize::try_from(dilation).unwrap_or(0),
        })
    }

    /// The spec without final states, and with the default output.
    fn spec(&self) -> PyResult<CausalConv1dSpec> {
        Ok(CausalConv1dSpec::new(self.x.desc, self.weight.desc)
            .py()?
            .with_bias(desc(&self.bias))
            .with_activation(self.activation)
            .with_dilation(self.dilation)
            .with_seq_idx(desc(&self.seq_idx))
            .with_cu_seqlens(desc(&self.cu_seqlens))
            .with_initial_states(desc(&self.initial_states)))
    }

    fn args(&self) -> CausalConv1dArgs<'_> {
        CausalConv1dArgs::new(self.x.view(), self.weight.view())
            .with_bias(view(&self.bias))
            .with_seq_idx(view(&self.seq_idx))
            .with_cu_seqlens(view(&self.cu_seqlens))
            .with_initial_states(view(&self.initial_states))
    }
}

/// `y[b,d,t] = act(bias[d] + sum_k weight[d,k] x[b,d,t-(width-1)+k])`.
///
/// x: [b, d, l], f32, f16 or bf16, any strides, so also a view of a channels-last array.
/// weight: [d, width], or [d_out, d, width] for a dense convolution. bias: [d], or [d_out] if dense.
/// Both are f32 or of x's type.
/// activation: None, "relu", "relu6", "leaky_relu" (with another slope than 0.01: "leaky_relu(0.2)"),
/// "hardswish", "silu", "gelu" or "gelu_tanh".
/// A row may hold several sequences. `seq_idx` [b, l] i32 gives each token the number of its sequence
/// (a negative number is padding, whose result is zero). Or, with b = 1, `cu_seqlens` [sequences + 1]
/// i32 or i64 gives the boundaries.
/// dilation: the distance of neighbouring taps in tokens: tap k reads token `t - (width - 1 - k) * dilation`.
/// initial_states: [b or sequences, d, (width - 1) * dilation], the inputs before each sequence; by
/// default zeros.
/// return_final_states: if true, the result is `(y, final_states)`. final_states has the shape of
/// initial_states.
/// batch_invariant: if true, the bits of a sequence do not depend on the other sequences.
/// out: the array that is written and returned. device: where arrays in main memory are computed.
///
/// Raises ValueError, TypeError (element types) or IndexError (`cu_seqlens` that does not rise from 0
/// to l).
#[pyfunction]
#[pyo3(signature = (x, weight, bias=None, *, activation=None, seq_idx=None, cu_seqlens=None,
                    initial_states=None, return_final_states=false, batch_invariant=false,
                    dilation=1, out=None, device=None))]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn causal_conv1d<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    activation: Option<ActivationName>,
    seq_idx: Option<&Bound<'py, PyAny>>,
    cu_seqlens: Option<&Bound<'py, PyAny>>,
    initial_states: Option<&Bound<'py, PyAny>>,
    return_final_states: bool,
    batch_invariant: bool,
    dilation: i64,
    out: Option<&Bound<'py, PyAny>>,
    device: Option<&str>,
) -> PyResult<Bound<'py, PyAny>> {
    let options = [bias, seq_idx, cu_seqlens, initial_states];
    let inputs = Inputs::import([x, weight], options, activation, dilation, device)?;
    let of = (inputs.spec()?, batch_invariant);
    let mut results = forward(py, &inputs, of, return_final_states, out)?;
    match results.len() {
        1 => Ok(results.swap_remove(0)),
        _ => Ok(PyTuple::new(py, results)?.into_any()),
    }
}

/// [`causal_conv1d`] whose output channels are divided among one to three new arrays of these numbers of channels. The
/// result has these arrays, and behind them the final states if they are wanted. With a `norm`, heads of so many
/// channels of the first two are divided by their L2 norm; the second number is epsilon.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn causal_conv1d_split<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    activation: Option<ActivationName>,
    seq_idx: Option<&Bound<'py, PyAny>>,
    cu_seqlens: Option<&Bound<'py, PyAny>>,
    initial_states: Option<&Bound<'py, PyAny>>,
    return_final_states: bool,
    split: Vec<i64>,
    batch_invariant: bool,
    dilation: i64,
    norm: Option<(i64, f32)>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let options = [bias, seq_idx, cu_seqlens, initial_states];
    let inputs = Inputs::import([x, weight], options, activation, dilation, None)?;
    // A negative number is as wrong as a zero.
    let channels: Vec<_> = split.iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect();
    let spec = inputs.spec()?.with_split(&channels).py()?.with_norm(norm.map(head_norm));
    forward(py, &inputs, (spec, batch_invariant), return_final_states, None)
}

/// The norm of heads of so many channels, with this epsilon.
pub(crate) fn head_norm((width, epsilon): (i64, f32)) -> HeadNorm {
    HeadNorm::new(usize::try_from(width).unwrap_or(0)).with_epsilon(epsilon)
}

/// The outputs of a spec, and behind them its final states if they are wanted. `out` takes the first output.
fn forward<'py>(
    py: Python<'py>,
    inputs: &Inputs<'py>,
    (mut spec, batch_invariant): Key,
    return_final_states: bool,
    out: Option<&Bound<'py, PyAny>>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let mut y = Output::new(py, out, &inputs.x, || Ok(spec.y))?;
    spec.y = y.desc();
    let further = |desc: Option<TensorDesc>| {
        desc.map(|desc| Output::new(py, None, &inputs.x, || Ok(desc))).transpose()
    };
    let (mut y2, mut y3) = (further(spec.y2)?, further(spec.y3)?);
    (spec.y2, spec.y3) = (y2.as_ref().map(Output::desc), y3.as_ref().map(Output::desc));
    let mut states = None;
    if return_final_states {
        // Channels innermost, as decoding reads them.
        let layout = Layout::with_order(&spec.states_shape().py()?, &[0, 2, 1]).py()?;
        let given =
            Output::new(py, None, &inputs.x, || Ok(TensorDesc::new(inputs.x.desc.dtype, layout)))?;
        spec.final_states = Some(given.desc());
        states = Some(given);
    }
    let plan = plan(py, (spec, batch_invariant), &inputs.x)?;
    let outputs = CausalConv1dOutputs::new(y.view_mut()?)
        .with_final_states(Output::view_mut_option(&mut states)?)
        .with_y2(Output::view_mut_option(&mut y2)?)
        .with_y3(Output::view_mut_option(&mut y3)?);
    let (args, elements) = (inputs.args(), inputs.x.desc.layout.len());
    run(py, &inputs.x, plan.workspace_bytes(), elements, |ws| plan.run(&args, outputs, ws))?;
    let results = [Some(y), y2, y3, states].into_iter().flatten();
    results.map(|result| result.finish(py, &inputs.x.family)).collect()
}

fn plan(py: Python<'_>, key: Key, x: &Array<'_>) -> PyResult<Arc<CausalConv1dPlan>> {
    PLANS.get(py, &key, x.device, |(spec, batch_invariant), options| {
        CausalConv1dPlan::new(spec, &options.with_batch_invariant(*batch_invariant))
    })
}

/// Gradients of [`causal_conv1d`] with respect to those of `x`, `weight`, `bias` and
/// `initial_states` that `needs` names.
#[pyfunction]
#[pyo3(signature = (dy, dfinal_states, x, weight, bias, activation, seq_idx, cu_seqlens, initial_states, needs,
                    dilation=1))]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn causal_conv1d_backward<'py>(
    py: Python<'py>,
    dy: &Bound<'py, PyAny>,
    dfinal_states: Option<&Bound<'py, PyAny>>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    activation: Option<ActivationName>,
    seq_idx: Option<&Bound<'py, PyAny>>,
    cu_seqlens: Option<&Bound<'py, PyAny>>,
    initial_states: Option<&Bound<'py, PyAny>>,
    needs: (bool, bool, bool, bool),
    dilation: i64,
) -> PyResult<[Option<Bound<'py, PyAny>>; 4]> {
    let dy = Array::import("dy", dy)?;
    let dfinal_states = Array::import_option("dfinal_states", dfinal_states, None)?;
    let options = [bias, seq_idx, cu_seqlens, initial_states];
    let inputs = Inputs::import([x, weight], options, activation, dilation, None)?;
    // Gradients that come in may have any strides, like those of a sum; outputs may not.
    let final_states = dfinal_states.as_ref().map(like).transpose()?;
    let spec = inputs.spec()?.with_final_states(final_states);
    let plan = plan(py, (spec, false), &inputs.x)?;
    let mut dx = Output::gradient(py, Some(&inputs.x), needs.0)?;
    let mut dweight = Output::gradient(py, Some(&inputs.weight), needs.1)?;
    let mut dbias = Output::gradient(py, inputs.bias.as_ref(), needs.2)?;
    let mut dinitial = Output::gradient(py, inputs.initial_states.as_ref(), needs.3)?;
    let grads = CausalConv1dGrads::default()
        .with_dx(Output::view_mut_option(&mut dx)?)
        .with_dweight(Output::view_mut_option(&mut dweight)?)
        .with_dbias(Output::view_mut_option(&mut dbias)?)
        .with_dinitial_states(Output::view_mut_option(&mut dinitial)?);
    let args = inputs.args();
    let (dy, dfinal_states) = (dy.view(), view(&dfinal_states));
    run(py, &inputs.x, plan.workspace_bytes(), RELEASE, |ws| {
        plan.backward(&args, dy, dfinal_states, grads, ws)
    })?;
    Output::finish_all(py, [dx, dweight, dbias, dinitial], &inputs.x.family)
}

/// The next step or steps of a causal convolution; `conv_state` is updated in place.
///
/// x: [b, d] or [b, d, l].
/// conv_state: [b, d, state_len] of x's type, with state_len at least width - 1: the latest inputs,
/// oldest first.
/// cache_seqlens: [b] i32 or i64, the number of earlier inputs. With it, conv_state is a ring buffer,
/// whose next position is `cache_seqlens % state_len`.
/// conv_state_indices: [b] i32 or i64. With it, conv_state is a pool [entries, d, state_len], and row i
/// uses entry `conv_state_indices[i]`. If that is negative, the row is padding and its result is zero.
/// weight, bias, activation, out and device are those of `causal_conv1d`, but weight is [d, width].
///
/// Raises ValueError, TypeError (element types) or IndexError (a negative value of cache_seqlens, or
/// an entry that is not in the pool).
#[pyfunction]
#[pyo3(signature = (x, conv_state, weight, bias=None, activation=None, cache_seqlens=None,
                    conv_state_indices=None, *, out=None, device=None))]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn causal_conv1d_update<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    conv_state: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    activation: Option<ActivationName>,
    cache_seqlens: Option<&Bound<'py, PyAny>>,
    conv_state_indices: Option<&Bound<'py, PyAny>>,
    out: Option<&Bound<'py, PyAny>>,
    device: Option<&str>,
) -> PyResult<Bound<'py, PyAny>> {
    let device = device.map(word).transpose()?;
    let option = |arg, array| Array::import_option(arg, array, device);
    let mut x = Array::import_on("x", x, device)?;
    let conv_state = Array::import_on("conv_state", conv_state, device)?;
    let weight = Array::import_on("weight", weight, device)?;
    let bias = option("bias", bias)?;
    let activation = ActivationName::or_none(activation);
    let cache_seqlens = option("cache_seqlens", cache_seqlens)?;
    let conv_state_indices = option("conv_state_indices", conv_state_indices)?;
    let mut y = Output::new(py, out, &x, || like(&x))?;
    let mut y_desc = y.desc();
    for desc in [&mut x.desc, &mut y_desc] {
        if let (&[b, d], &[b_stride, d_stride]) = (desc.shape(), desc.strides()) {
            desc.layout = Layout::strided(&[b, d, 1], &[b_stride, d_stride, 1]).py()?;
        }
    }
    let spec = CausalConv1dUpdateSpec::new(x.desc, conv_state.desc, weight.desc)
        .py()?
        .with_output(y_desc)
        .with_activation(activation)
        .with_bias(desc(&bias))
        .with_cache_seqlens(desc(&cache_seqlens))
        .with_conv_state_indices(desc(&conv_state_indices));
    let plan = UPDATE_PLANS.get(py, &spec, x.device, CausalConv1dUpdatePlan::new)?;
    let args = CausalConv1dUpdateArgs::new(x.view(), weight.view())
        .with_bias(view(&bias))
        .with_cache_seqlens(view(&cache_seqlens))
        .with_conv_state_indices(view(&conv_state_indices));
    let state = conv_state.view_changed()?;
    let mut target = y.view_mut()?;
    // SAFETY: the same elements of an exclusive view, with a dimension of size 1 more.
    let target =
        unsafe { TensorMut::from_raw(target.as_mut_ptr().cast(), y_desc, x.device) }.py()?;
    let elements = conv_state.desc.layout.len().min(x.desc.layout.len() * 8);
    run(py, &x, plan.workspace_bytes(), elements, |ws| plan.run(&args, state, target, ws))?;
    conv_state.fetch(py)?;
    y.finish(py, &x.family)
}

/// [`causal_conv1d_update`] of PyTorch tensors if nothing is lost by going past its dispatcher,
/// else None, and nothing has been done: what `is_plain` and the function do in two calls.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn causal_conv1d_update_if_plain<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    conv_state: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    activation: Option<ActivationName>,
    cache_seqlens: Option<&Bound<'py, PyAny>>,
    conv_state_indices: Option<&Bound<'py, PyAny>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let given = [Some(x), Some(conv_state), Some(weight), bias, cache_seqlens, conv_state_indices];
    if !nothing_to_dispatch(py, false, given.into_iter().flatten())? {
        return Ok(None);
    }
    let y = causal_conv1d_update(
        py,
        x,
        conv_state,
        weight,
        bias,
        activation,
        cache_seqlens,
        conv_state_indices,
        None,
        None,
    );
    match y {
        Err(e) if e.is_instance_of::<NotInPlace>(py) => Ok(None),
        y => y.map(Some),
    }
}
