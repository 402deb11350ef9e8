//! The functions that `windrow.vllm` and `windrow.sglang` call.

use crate::array::{Array, desc};
use crate::call::{ActivationName, PlanCache, run};
use crate::causal_conv1d::head_norm;
use crate::error::IntoPy;
use crate::glance::{Form, glance};
use crate::output::{Output, like};
use crate::torch::count_changes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use windrow::{
    Activation, CausalConv1dServingArgs, CausalConv1dServingOutputs, CausalConv1dServingPlan,
    CausalConv1dServingSpec, HeadNorm, Layout, TensorDesc, TensorMut, TensorRef,
};

static PLANS: PlanCache<CausalConv1dServingSpec, CausalConv1dServingPlan> = PlanCache::new();
static CALLS: PlanCache<Call, CausalConv1dServingPlan> = PlanCache::new();

/// The most dimensions of an array.
const RANK: usize = 3;
/// The arrays of a call, in the order of its arguments.
const ARRAYS: usize = 20;

/// Their addresses; null where an array is not given.
type Addresses = [*mut c_void; ARRAYS];

/// All that the plan of a call, and whether its arrays can be computed with, depend on, but for addresses.
#[derive(Clone, PartialEq)]
struct Call {
    order: &'static str,
    activation: Activation,
    null_index: Option<i64>,
    block_size: usize,
    norm: Option<HeadNorm>,
    forms: [Option<Form<RANK>>; ARRAYS],
}

/// The next tokens of many sequences, whose states `conv_states` are walked on in place; see
/// `CausalConv1dServingSpec`. `order` names the dimensions of `x` and the result: "bdl", "bd" (a token a row), "dl" or
/// "ld" (one row). In `out` the result may be written over `x`. `intermediate_windows` and `parent_token` are written.
/// With `out2` and `out3` the channels are divided among `out` and these; the result is `out`. With a `norm`, heads of so
/// many channels of the first two are divided by their L2 norm; the second number is epsilon.
#[pyfunction]
#[pyo3(signature = (x, order, conv_states, weight, bias, activation, query_start_loc, conv_state_indices,
                    null_index, has_initial_state=None, num_accepted_tokens=None, initial_block=None,
                    last_block=None, first_block=None, tokens_before=None, block_size=0,
                    intermediate_windows=None, intermediate_indices=None, next_token=None, next_sibling=None,
                    parent_token=None, norm=None, out=None, out2=None, out3=None))]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn causal_conv1d_serving<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    order: &str,
    conv_states: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    activation: Option<ActivationName>,
    query_start_loc: Option<&Bound<'py, PyAny>>,
    conv_state_indices: Option<&Bound<'py, PyAny>>,
    null_index: Option<i64>,
    has_initial_state: Option<&Bound<'py, PyAny>>,
    num_accepted_tokens: Option<&Bound<'py, PyAny>>,
    initial_block: Option<&Bound<'py, PyAny>>,
    last_block: Option<&Bound<'py, PyAny>>,
    first_block: Option<&Bound<'py, PyAny>>,
    tokens_before: Option<&Bound<'py, PyAny>>,
    block_size: usize,
    intermediate_windows: Option<&Bound<'py, PyAny>>,
    intermediate_indices: Option<&Bound<'py, PyAny>>,
    next_token: Option<&Bound<'py, PyAny>>,
    next_sibling: Option<&Bound<'py, PyAny>>,
    parent_token: Option<&Bound<'py, PyAny>>,
    norm: Option<(i64, f32)>,
    out: Option<&Bound<'py, PyAny>>,
    out2: Option<&Bound<'py, PyAny>>,
    out3: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let orders = ["bdl", "bd", "dl", "ld"].into_iter();
    let Some(order) = orders.clone().find(|known| *known == order) else {
        return Err(PyValueError::new_err(format!("`order` is {order:?}, expected {orders:?}")));
    };
    let activation = ActivationName::or_none(activation);
    let given = [
        Some(x),
        Some(conv_states),
        Some(weight),
        bias,
        query_start_loc,
        conv_state_indices,
        has_initial_state,
        num_accepted_tokens,
        initial_block,
        last_block,
        first_block,
        tokens_before,
        intermediate_windows,
        intermediate_indices,
        next_token,
        next_sibling,
        parent_token,
        out,
        out2,
        out3,
    ];
    let forms = [const { None }; ARRAYS];
    let norm = norm.map(head_norm);
    let mut call = Call { order, activation, null_index, block_size, norm, forms };
    let mut addresses: Addresses = [null_mut(); ARRAYS];
    let is_plain = out.is_some() && look(&given, &mut call.forms, &mut addresses)?;
    let x = Array::import("x", x)?;
    if is_plain
        && let Some(out) = out
        && let Some(plan) = CALLS.find(&call, x.device)
    {
        let changed =
            [Some(conv_states), intermediate_windows, parent_token, Some(out), out2, out3];
        count_changes(py, &Vec::from_iter(changed.into_iter().flatten()))?;
        compute(py, &x, &plan, &addresses)?;
        return Ok(out.clone());
    }

    let option = |arg, array| Array::import_option(arg, array, None);
    let conv_states = Array::import("conv_states", conv_states)?;
    let weight = Array::import("weight", weight)?;
    let bias = option("bias", bias)?;
    let query_start_loc = option("query_start_loc", query_start_loc)?;
    let conv_state_indices = option("conv_state_indices", conv_state_indices)?;
    let has_initial_state = option("has_initial_state", has_initial_state)?;
    let num_accepted_tokens = option("num_accepted_tokens", num_accepted_tokens)?;
    let initial_block = option("initial_block", initial_block)?;
    let last_block = option("last_block", last_block)?;
    let first_block = option("first_block", first_block)?;
    let tokens_before = option("tokens_before", tokens_before)?;
    let intermediate_windows = option("intermediate_windows", intermediate_windows)?;
    let intermediate_indices = option("intermediate_indices", intermediate_indices)?;
    let next_token = option("next_token", next_token)?;
    let next_sibling = option("next_sibling", next_sibling)?;
    let parent_token = option("parent_token", parent_token)?;
    let (out2, out3) = (option("out2", out2)?, option("out3", out3)?);
    let mut y = Output::new(py, out, &x, || like(&x))?;
    let [x_desc, y_desc] = [ordered("x", &x.desc, order)?, ordered("out", &y.desc(), order)?];
    // Specs are large: handed from setter to setter they would cost more than the rest of the call.
    let mut spec = CausalConv1dServingSpec::new(x_desc, conv_states.desc, weight.desc).py()?;
    spec.y = y_desc;
    spec.activation = activation;
    spec.block_size = block_size;
    spec.norm = norm;
    spec.bias = desc(&bias);
    spec.query_start_loc = desc(&query_start_loc);
    spec.conv_state_indices = desc(&conv_state_indices);
    spec.null_index = null_index;
    spec.has_initial_state = desc(&has_initial_state);
    spec.num_accepted_tokens = desc(&num_accepted_tokens);
    spec.initial_block = desc(&initial_block);
    spec.last_block = desc(&last_block);
    spec.first_block = desc(&first_block);
    spec.tokens_before = desc(&tokens_before);
    spec.intermediate_windows = desc(&intermediate_windows);
    spec.intermediate_indices = desc(&intermediate_indices);
    spec.next_token = desc(&next_token);
    spec.next_sibling = desc(&next_sibling);
    spec.parent_token = desc(&parent_token);
    let further = |arg, array: &Option<Array<'_>>| {
        array.as_ref().map(|array| ordered(arg, &array.desc, order)).transpose()
    };
    (spec.y2, spec.y3) = (further("out2", &out2)?, further("out3", &out3)?);
    let plan = PLANS.get(py, &spec, x.device, CausalConv1dServingPlan::new)?;
    let address = |array: &Option<Array<'_>>| array.as_ref().map_or(null_mut(), Array::address);
    let changed = |array: &Option<Array<'_>>| -> PyResult<*mut c_void> {
        let view = array.as_ref().map(Array::view_changed).transpose()?;
        Ok(view.map_or(null_mut(), |mut view| view.as_mut_ptr().cast()))
    };
    let addresses = [
        x.address(),
        conv_states.view_changed()?.as_mut_ptr().cast(),
        weight.address(),
        address(&bias),
        address(&query_start_loc),
        address(&conv_state_indices),
        address(&has_initial_state),
        address(&num_accepted_tokens),
        address(&initial_block),
        address(&last_block),
        address(&first_block),
        address(&tokens_before),
        changed(&intermediate_windows)?,
        address(&intermediate_indices),
        address(&next_token),
        address(&next_sibling),
        changed(&parent_token)?,
        y.view_mut()?.as_mut_ptr().cast(),
        changed(&out2)?,
        changed(&out3)?,
    ];
    compute(py, &x, &plan, &addresses)?;
    if is_plain {
        CALLS.keep(py, call, x.device, plan);
    }
    y.finish(py, &x.family)
}

/// Form and address of each array that is given; false if one of them has to be looked at closely.
fn look(
    given: &[Option<&Bound<'_, PyAny>>; ARRAYS],
    forms: &mut [Option<Form<RANK>>; ARRAYS],
    addresses: &mut Addresses,
) -> PyResult<bool> {
    for ((array, form), address) in given.iter().zip(forms).zip(addresses) {
        let Some(array) = array else { continue };
        let Some(seen) = glance(array)? else { return Ok(false) };
        (*form, *address) = (Some(seen.0), seen.1);
    }
    Ok(true)
}

/// Runs the plan on arrays of its spec at these addresses, which are alive for the length of the call.
fn compute(
    py: Python<'_>,
    x: &Array<'_>,
    plan: &CausalConv1dServingPlan,
    addresses: &Addresses,
) -> PyResult<()> {
    let (spec, device) = (plan.spec(), plan.device());
    let [
        x_at,
        states_at,
        weight_at,
        bias,
        starts,
        indices,
        flags,
        accepted,
        initial,
        last,
        first,
        before,
        windows,
        slots,
        next,
        sibling,
        parents,
        y_at,
        y2_at,
        y3_at,
    ] = *addresses;
    // SAFETY: the memory of an array with this description, of which there may be dimensions of size 1 more.
    let read = |at, desc: TensorDesc| unsafe { TensorRef::from_raw(at, desc, device) };
    // SAFETY: as above, and Python code that used it during the call would be racing in any library; plans check that
    // what is written overlaps nothing.
    let write = |at, desc: TensorDesc| unsafe { TensorMut::from_raw(at, desc, device) }.py();
    let mut args = CausalConv1dServingArgs::new(read(x_at, spec.x), read(weight_at, spec.weight));
    args.bias = spec.bias.map(|desc| read(bias, desc));
    args.query_start_loc = spec.query_start_loc.map(|desc| read(starts, desc));
    args.conv_state_indices = spec.conv_state_indices.map(|desc| read(indices, desc));
    args.has_initial_state = spec.has_initial_state.map(|desc| read(flags, desc));
    args.num_accepted_tokens = spec.num_accepted_tokens.map(|desc| read(accepted, desc));
    args.initial_block = spec.initial_block.map(|desc| read(initial, desc));
    args.last_block = spec.last_block.map(|desc| read(last, desc));
    args.first_block = spec.first_block.map(|desc| read(first, desc));
    args.tokens_before = spec.tokens_before.map(|desc| read(before, desc));
    args.intermediate_indices = spec.intermediate_indices.map(|desc| read(slots, desc));
    args.next_token = spec.next_token.map(|desc| read(next, desc));
    args.next_sibling = spec.next_sibling.map(|desc| read(sibling, desc));
    let (states, y) = (write(states_at, spec.conv_states)?, write(y_at, spec.y)?);
    let mut outputs = CausalConv1dServingOutputs::new(states, y);
    outputs.intermediate_windows =
        spec.intermediate_windows.map(|desc| write(windows, desc)).transpose()?;
    outputs.parent_token = spec.parent_token.map(|desc| write(parents, desc)).transpose()?;
    outputs.y2 = spec.y2.map(|desc| write(y2_at, desc)).transpose()?;
    outputs.y3 = spec.y3.map(|desc| write(y3_at, desc)).transpose()?;
    let elements = spec.x.layout.len() * 2;
    run(py, x, plan.workspace_bytes(), elements, |ws| plan.run(&args, outputs, ws))
}

/// A tensor with dimensions of this order as [b, d, l].
fn ordered(arg: &str, given: &TensorDesc, order: &str) -> PyResult<TensorDesc> {
    let (shape, strides) = (given.shape(), given.strides());
    let (shape, strides) = match (order, shape, strides) {
        ("bdl", &[b, d, l], &[i, j, k]) => ([b, d, l], [i, j, k]),
        ("bd", &[b, d], &[i, j]) => ([b, d, 1], [i, j, 1]),
        ("dl", &[d, l], &[j, k]) => ([1, d, l], [0, j, k]),
        ("ld", &[l, d], &[k, j]) => ([1, d, l], [0, j, k]),
        _ => {
            return Err(PyValueError::new_err(format!(
                "`{arg}` has shape {shape:?}, expected its dimensions to be {order:?}"
            )));
        }
    };
    Ok(TensorDesc::new(given.dtype, Layout::strided(&shape, &strides).py()?))
}
