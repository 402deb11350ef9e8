//! Gradients of convolutions; transposed convolutions, which are such; and the gradients of these.

use crate::array::Array;
use crate::call::{RELEASE, run};
use crate::conv2d::{Options, PLANS, Pair, make_plan, params};
use crate::error::IntoPy;
use crate::output::{Output, like};
use pyo3::prelude::*;
use std::sync::Arc;
use windrow::{Conv2dArgs, Conv2dParams, Conv2dSpec, Filter, TensorDesc};

type Plan = Arc<windrow::Conv2dPlan>;

/// Gradients of `conv2d` without activation, with respect to those of `x`, `weight` and `bias` that `needs` names.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn conv2d_backward<'py>(
    py: Python<'py>,
    dy: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    options: Options<'_>,
    accuracy: Option<&str>,
    needs: (bool, bool, bool),
) -> PyResult<[Option<Bound<'py, PyAny>>; 3]> {
    let params = params(py, options, None, accuracy)?;
    let [dy, x, weight] = imported(dy, x, weight)?;
    let bias = Array::import_option("bias", bias, None)?;
    let (data, rest) = backward_plans(py, &dy, &x, &weight, &params)?;
    let bytes = gradient_bytes(py, &data)?.max(gradient_bytes(py, &rest)?);
    let mut dx = Output::gradient(py, Some(&x), needs.0)?;
    let mut dweight = Output::gradient(py, Some(&weight), needs.1)?;
    let mut dbias = Output::gradient(py, bias.as_ref(), needs.2)?;
    let dx_view = Output::view_mut_option(&mut dx)?;
    let dweight_view = Output::view_mut_option(&mut dweight)?;
    let dbias_view = Output::view_mut_option(&mut dbias)?;
    let (x_view, weight_view, dy_view) = (x.view(), weight.view(), dy.view());
    run(py, &x, bytes, RELEASE, |ws| {
        if let Some(dx) = dx_view {
            data.backward_data(&weight_view, &dy_view, dx, ws)?;
        }
        if let Some(dweight) = dweight_view {
            rest.backward_weight(&x_view, &dy_view, dweight, ws)?;
        }
        if let Some(dbias) = dbias_view {
            rest.backward_bias(&dy_view, dbias, ws)?;
        }
        Ok(())
    })?;
    Output::finish_all(py, [dx, dweight, dbias], &x.family)
}

/// Memory that [`conv2d_backward`] needs beside its tensors.
#[pyfunction]
pub(crate) fn conv2d_backward_bytes<'py>(
    py: Python<'py>,
    dy: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    options: Options<'_>,
    accuracy: Option<&str>,
) -> PyResult<usize> {
    let params = params(py, options, None, accuracy)?;
    let [dy, x, weight] = imported(dy, x, weight)?;
    let (data, rest) = backward_plans(py, &dy, &x, &weight, &params)?;
    Ok(gradient_bytes(py, &data)?.max(gradient_bytes(py, &rest)?))
}

/// The plan for the gradient of x, and the one for the others. The gradient of x is dense, which x
/// need not be: then the plans are two.
fn backward_plans(
    py: Python<'_>,
    dy: &Array<'_>,
    x: &Array<'_>,
    weight: &Array<'_>,
    params: &Conv2dParams,
) -> PyResult<(Plan, Plan)> {
    let plan = |x: TensorDesc| {
        let spec = Conv2dSpec::new(x, weight.desc, params).py()?;
        plan_of(py, spec.with_output(dy.desc), dy)
    };
    Ok((plan(like(x)?)?, plan(x.desc)?))
}

/// Transposed convolution, without bias: the data gradient of the convolution of the result.
#[pyfunction]
pub(crate) fn conv_transpose2d<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    options: Options<'_>,
    output_padding: Pair<'_>,
    accuracy: Option<&str>,
) -> PyResult<Bound<'py, PyAny>> {
    let params = params(py, options, None, accuracy)?;
    let (x, weight) = (Array::import("x", x)?, Array::import("weight", weight)?);
    let plan = transposed_plan(py, &x, &weight, &params, output_padding)?;
    let bytes = gradient_bytes(py, &plan)?;
    let mut y = Output::new(py, None, &x, || Ok(plan.spec().x))?;
    let (x_view, weight_view, target) = (x.view(), weight.view(), y.view_mut()?);
    run(py, &x, bytes, RELEASE, |ws| plan.backward_data(&weight_view, &x_view, target, ws))?;
    y.finish(py, &x.family)
}

/// Memory that [`conv_transpose2d`] needs beside its tensors.
#[pyfunction]
pub(crate) fn conv_transpose2d_bytes<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    options: Options<'_>,
    output_padding: Pair<'_>,
    accuracy: Option<&str>,
) -> PyResult<usize> {
    let params = params(py, options, None, accuracy)?;
    let (x, weight) = (Array::import("x", x)?, Array::import("weight", weight)?);
    let plan = transposed_plan(py, &x, &weight, &params, output_padding)?;
    gradient_bytes(py, &plan)
}

fn transposed_plan(
    py: Python<'_>,
    x: &Array<'_>,
    weight: &Array<'_>,
    params: &Conv2dParams,
    output_padding: Pair<'_>,
) -> PyResult<Plan> {
    let output_padding = output_padding.each("output_padding")?;
    let spec = Conv2dSpec::transposed(x.desc, weight.desc, params, output_padding).py()?;
    plan_of(py, spec, x)
}

/// Gradients of [`conv_transpose2d`], with respect to those of `x` and `weight` that `needs` names.
#[pyfunction]
pub(crate) fn conv_transpose2d_backward<'py>(
    py: Python<'py>,
    dy: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    options: Options<'_>,
    accuracy: Option<&str>,
    needs: (bool, bool),
) -> PyResult<[Option<Bound<'py, PyAny>>; 2]> {
    let params = params(py, options, None, accuracy)?;
    let [dy, x, weight] = imported(dy, x, weight)?;
    let (data, rest) = transposed_backward_plans(py, &dy, &x, &weight, &params)?;
    let bytes = transposed_backward_bytes(py, &data, &rest, needs)?;
    let mut dx = Output::gradient(py, Some(&x), needs.0)?;
    let mut dweight = Output::gradient(py, Some(&weight), needs.1)?;
    let dx_view = Output::view_mut_option(&mut dx)?;
    let dweight_view = Output::view_mut_option(&mut dweight)?;
    let (x_view, weight_view, dy_view) = (x.view(), weight.view(), dy.view());
    run(py, &x, bytes, RELEASE, |ws| {
        if let Some(dx) = dx_view {
            data.run(&Conv2dArgs::new(dy_view, weight_view), dx, ws)?;
        }
        if let Some(dweight) = dweight_view {
            rest.backward_weight(&dy_view, &x_view, dweight, ws)?;
        }
        Ok(())
    })?;
    Output::finish_all(py, [dx, dweight], &x.family)
}

/// Memory that [`conv_transpose2d_backward`] needs beside its tensors.
#[pyfunction]
pub(crate) fn conv_transpose2d_backward_bytes<'py>(
    py: Python<'py>,
    dy: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    options: Options<'_>,
    accuracy: Option<&str>,
    needs: (bool, bool),
) -> PyResult<usize> {
    let params = params(py, options, None, accuracy)?;
    let [dy, x, weight] = imported(dy, x, weight)?;
    let (data, rest) = transposed_backward_plans(py, &dy, &x, &weight, &params)?;
    transposed_backward_bytes(py, &data, &rest, needs)
}

/// As [`backward_plans`]: the gradient of x is the convolution of dy, and that of the filter its gradient.
fn transposed_backward_plans(
    py: Python<'_>,
    dy: &Array<'_>,
    x: &Array<'_>,
    weight: &Array<'_>,
    params: &Conv2dParams,
) -> PyResult<(Plan, Plan)> {
    let plan = |x: TensorDesc| {
        let spec = Conv2dSpec::new(dy.desc, weight.desc, params).py()?;
        plan_of(py, spec.with_output(x), dy)
    };
    Ok((plan(like(x)?)?, plan(x.desc)?))
}

fn transposed_backward_bytes(
    py: Python<'_>,
    data: &windrow::Conv2dPlan,
    rest: &windrow::Conv2dPlan,
    needs: (bool, bool),
) -> PyResult<usize> {
    let of_weight = if needs.1 { gradient_bytes(py, rest)? } else { 0 };
    Ok(data.workspace_bytes().max(of_weight))
}

fn imported<'py>(
    dy: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
) -> PyResult<[Array<'py>; 3]> {
    Ok([Array::import("dy", dy)?, Array::import("x", x)?, Array::import("weight", weight)?])
}

/// Filters are packed on each run.
fn plan_of(py: Python<'_>, spec: Conv2dSpec, like: &Array<'_>) -> PyResult<Plan> {
    PLANS.get(py, &(spec, None, Filter::Changing), like.device, make_plan)
}

/// Bytes of workspace for any gradient. Asking makes what computes them, on a device its kernels.
fn gradient_bytes(py: Python<'_>, plan: &windrow::Conv2dPlan) -> PyResult<usize> {
    py.detach(|| plan.backward_workspace_bytes()).py()
}
