//! What `windrow.vllm` and `windrow.sglang` call.

use crate::array::{Array, desc, view};
use crate::call::{PlanCache, run, word_or_default};
use crate::error::IntoPy;
use crate::output::{Output, like};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use windrow::{
    CausalConv1dServingArgs, CausalConv1dServingOutputs, CausalConv1dServingPlan,
    CausalConv1dServingSpec, Layout, TensorDesc, TensorMut, TensorRef,
};

static PLANS: PlanCache<CausalConv1dServingSpec, CausalConv1dServingPlan> = PlanCache::new();

/// The next tokens of many sequences, whose states `conv_states` are walked on in place; see
/// `CausalConv1dServingSpec`. `order` names the dimensions of `x` and the result: "bdl", "bd" (a token a row), "dl" or
/// "ld" (one row). In `out` the result may be written over `x`. `intermediate_windows` and `parent_token` are written.
#[pyfunction]
#[pyo3(signature = (x, order, conv_states, weight, bias, activation, query_start_loc, conv_state_indices,
                    null_index, has_initial_state=None, num_accepted_tokens=None, initial_block=None,
                    last_block=None, first_block=None, tokens_before=None, block_size=0,
                    intermediate_windows=None, intermediate_indices=None, next_token=None, next_sibling=None,
                    parent_token=None, out=None))]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn causal_conv1d_serving<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    order: &str,
    conv_states: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    activation: Option<&str>,
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
    out: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let option = |arg, array| Array::import_option(arg, array, None);
    let x = Array::import("x", x)?;
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
    let mut y = Output::new(py, out, &x, || like(&x))?;
    let [x_desc, y_desc] = [ordered("x", &x.desc, order)?, ordered("out", &y.desc(), order)?];
    // Specs and arguments are large: handed from setter to setter they would cost more than the rest of the call.
    let mut spec = CausalConv1dServingSpec::new(x_desc, conv_states.desc, weight.desc).py()?;
    spec.y = y_desc;
    spec.activation = word_or_default(activation)?;
    spec.block_size = block_size;
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
    let plan = PLANS.get(py, &spec, x.device, CausalConv1dServingPlan::new)?;
    // SAFETY: the same elements, of which there may be dimensions of size 1 more.
    let tokens = unsafe { TensorRef::from_raw(x.view().as_ptr().cast(), x_desc, x.device) };
    let mut args = CausalConv1dServingArgs::new(tokens, weight.view());
    args.bias = view(&bias);
    args.query_start_loc = view(&query_start_loc);
    args.conv_state_indices = view(&conv_state_indices);
    args.has_initial_state = view(&has_initial_state);
    args.num_accepted_tokens = view(&num_accepted_tokens);
    args.initial_block = view(&initial_block);
    args.last_block = view(&last_block);
    args.first_block = view(&first_block);
    args.tokens_before = view(&tokens_before);
    args.intermediate_indices = view(&intermediate_indices);
    args.next_token = view(&next_token);
    args.next_sibling = view(&next_sibling);
    let mut target = y.view_mut()?;
    // SAFETY: the same elements of an exclusive view, of which there may be dimensions of size 1 more.
    let target =
        unsafe { TensorMut::from_raw(target.as_mut_ptr().cast(), y_desc, x.device) }.py()?;
    let outputs = CausalConv1dServingOutputs::new(conv_states.view_changed()?, target)
        .with_intermediate_windows(view_changed(&intermediate_windows)?)
        .with_parent_token(view_changed(&parent_token)?);
    let elements = x.desc.layout.len() * 2;
    run(py, &x, plan.workspace_bytes(), elements, |ws| plan.run(&args, outputs, ws))?;
    y.finish(py, &x.family)
}

/// An optional array as an optional output.
fn view_changed<'a>(array: &'a Option<Array<'_>>) -> PyResult<Option<TensorMut<'a>>> {
    array.as_ref().map(Array::view_changed).transpose()
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
