//! Gradients of convolutions; transposed convolutions, which are such; and the gradients of these.

use crate::array::Array;
use crate::call::{RELEASE, run, without_batch_invariant};
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
    let step = Step::back(py, [dy, x, weight], options, accuracy, of_convolution)?;
    let bytes = step.gradient_bytes(py)?;
    let Step { dy, x, weight, data, rest } = step;
    let bias = Array::import_option("bias", bias, None)?;
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
    Step::back(py, [dy, x, weight], options, accuracy, of_convolution)?.gradient_bytes(py)
}

/// The arrays of a step back, the plan for the gradient of x, and the one for the others. The gradient of x is dense,
/// which x need not be: then the plans are two.
struct Step<'py> {
    dy: Array<'py>,
    x: Array<'py>,
    weight: Array<'py>,
    data: Plan,
    rest: Plan,
}

impl<'py> Step<'py> {
    /// The gradients by the spec for the descriptions of dy, x and the filter.
    fn back(
        py: Python<'py>,
        [dy, x, weight]: [&Bound<'py, PyAny>; 3],
        options: Options<'_>,
        accuracy: Option<&str>,
        spec: fn([TensorDesc; 3], &Conv2dParams) -> windrow::Result<Conv2dSpec>,
    ) -> PyResult<Self> {
        let (accuracy, batch_invariant) = without_batch_invariant(accuracy);
        let params = params(py, options, None, accuracy)?;
        let (dy, x) = (Array::import("dy", dy)?, Array::import("x", x)?);
        let weight = Array::import("weight", weight)?;
        let plan = |x| {
            let spec = spec([dy.desc, x, weight.desc], &params).py()?;
            plan_of(py, spec, &dy, batch_invariant)
        };
        let (data, rest) = (plan(like(&x)?)?, plan(x.desc)?);
        Ok(Step { dy, x, weight, data, rest })
    }

    fn gradient_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(gradient_bytes(py, &self.data)?.max(gradient_bytes(py, &self.rest)?))
    }
}

fn of_convolution(
    [dy, x, weight]: [TensorDesc; 3],
    params: &Conv2dParams,
) -> windrow::Result<Conv2dSpec> {
    Ok(Conv2dSpec::new(x, weight, params)?.with_output(dy))
}

/// The gradient of x is the convolution of dy, and that of the filter its gradient.
fn of_transposed(
    [dy, x, weight]: [TensorDesc; 3],
    params: &Conv2dParams,
) -> windrow::Result<Conv2dSpec> {
    Ok(Conv2dSpec::new(dy, weight, params)?.with_output(x))
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
    let (x, weight, plan) = transposed(py, x, weight, options, output_padding, accuracy)?;
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
    let (.., plan) = transposed(py, x, weight, options, output_padding, accuracy)?;
    gradient_bytes(py, &plan)
}

/// The arrays of [`conv_transpose2d`], and the plan whose data gradient it is.
fn transposed<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    options: Options<'_>,
    output_padding: Pair<'_>,
    accuracy: Option<&str>,
) -> PyResult<(Array<'py>, Array<'py>, Plan)> {
    let (accuracy, batch_invariant) = without_batch_invariant(accuracy);
    let params = params(py, options, None, accuracy)?;
    let (x, weight) = (Array::import("x", x)?, Array::import("weight", weight)?);
    let output_padding = output_padding.each("output_padding")?;
    let spec = Conv2dSpec::transposed(x.desc, weight.desc, &params, output_padding).py()?;
    let plan = plan_of(py, spec, &x, batch_invariant)?;
    Ok((x, weight, plan))
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
    let step = Step::back(py, [dy, x, weight], options, accuracy, of_transposed)?;
    let bytes = transposed_bytes(py, &step, needs)?;
    let Step { dy, x, weight, data, rest } = step;
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
    let step = Step::back(py, [dy, x, weight], options, accuracy, of_transposed)?;
    transposed_bytes(py, &step, needs)
}

fn transposed_bytes(py: Python<'_>, step: &Step<'_>, needs: (bool, bool)) -> PyResult<usize> {
    let of_weight = if needs.1 { gradient_bytes(py, &step.rest)? } else { 0 };
    Ok(step.data.workspace_bytes().max(of_weight))
}

/// Filters are packed on each run.
fn plan_of(
    py: Python<'_>,
    spec: Conv2dSpec,
    like: &Array<'_>,
    batch_invariant: bool,
) -> PyResult<Plan> {
    let key = (spec, None, Filter::Changing, None, batch_invariant);
    PLANS.get(py, &key, like.device, make_plan)
}

/// Bytes of workspace for any gradient. Asking makes what computes them, on a device its kernels.
fn gradient_bytes(py: Python<'_>, plan: &windrow::Conv2dPlan) -> PyResult<usize> {
    py.detach(|| plan.backward_workspace_bytes()).py()
}
