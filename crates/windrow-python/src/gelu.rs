//! `windrow.gelu`.

use crate::array::{Array, desc, view};
use crate::call::{PlanCache, RELEASE, run, word};
use crate::error::IntoPy;
use crate::output::{Output, like};
use pyo3::prelude::*;
use std::sync::Arc;
use windrow::{Approximate, GeluArgs, GeluGrads, GeluPlan, GeluSpec, TensorDesc};

/// The spec, and whether the bits of an element must not depend on others.
type Key = (GeluSpec, bool);

static PLANS: PlanCache<Key, GeluPlan> = PlanCache::new();

fn plan(py: Python<'_>, key: Key, x: &Array<'_>) -> PyResult<Arc<GeluPlan>> {
    PLANS.get(py, &key, x.device, |(spec, batch_invariant), options| {
        GeluPlan::new(spec, &options.with_batch_invariant(*batch_invariant))
    })
}

fn spec(
    x: &Array<'_>,
    y: TensorDesc,
    bias: &Option<Array<'_>>,
    gate: &Option<Array<'_>>,
    approximate: Approximate,
) -> windrow::Result<GeluSpec> {
    let spec = GeluSpec::new(x.desc, approximate)?;
    Ok(spec.with_output(y).with_bias(desc(bias)).with_gate(desc(gate)))
}

/// `gelu(x + bias) * gate`.
///
/// x, gate: f32, f16 or bf16, of the same shape, any strides. bias: [last dimension of x], f32 or x's
/// type. approximate: "none" is `0.5 x erfc(-x / sqrt 2)`, "tanh" the usual approximation by tanh.
/// batch_invariant: if true, the bits of an element do not depend on its place or on other elements.
/// out: the array that is written and returned; it may be `x`. device: where arrays in main memory
/// are computed.
///
/// Raises ValueError if shapes do not match, or if `out` shares memory with an input but is not `x`,
/// and TypeError for other element types.
#[pyfunction]
#[pyo3(signature = (x, bias=None, gate=None, *, approximate="none", batch_invariant=false, out=None,
                    device=None))]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn gelu<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    gate: Option<&Bound<'py, PyAny>>,
    approximate: &str,
    batch_invariant: bool,
    out: Option<&Bound<'py, PyAny>>,
    device: Option<&str>,
) -> PyResult<Bound<'py, PyAny>> {
    let device = device.map(word).transpose()?;
    let x = Array::import_on("x", x, device)?;
    let bias = Array::import_option("bias", bias, device)?;
    let gate = Array::import_option("gate", gate, device)?;
    let approximate = word(approximate)?;
    let mut y = Output::new(py, out, &x, || like(&x))?;
    let spec = spec(&x, y.desc(), &bias, &gate, approximate).py()?;
    let plan = plan(py, (spec, batch_invariant), &x)?;
    let args = GeluArgs::new(x.view()).with_bias(view(&bias)).with_gate(view(&gate));
    let target = y.view_mut()?;
    run(py, &x, plan.workspace_bytes(), x.desc.layout.len(), |ws| plan.run(&args, target, ws))?;
    y.finish(py, &x.family)
}

/// Gradients of [`gelu`] with respect to those of `x`, `bias` and `gate` that `needs` names.
#[pyfunction]
pub(crate) fn gelu_backward<'py>(
    py: Python<'py>,
    dy: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    gate: Option<&Bound<'py, PyAny>>,
    approximate: &str,
    needs: (bool, bool, bool),
) -> PyResult<[Option<Bound<'py, PyAny>>; 3]> {
    let dy = Array::import("dy", dy)?;
    let x = Array::import("x", x)?;
    let bias = Array::import_option("bias", bias, None)?;
    let gate = Array::import_option("gate", gate, None)?;
    let approximate = word(approximate)?;
    let spec = spec(&x, like(&x)?, &bias, &gate, approximate).py()?;
    let plan = plan(py, (spec, false), &x)?;
    let mut dx = Output::gradient(py, Some(&x), needs.0)?;
    let mut dbias = Output::gradient(py, bias.as_ref(), needs.1)?;
    let mut dgate = Output::gradient(py, gate.as_ref(), needs.2)?;
    let grads = GeluGrads::default()
        .with_dx(Output::view_mut_option(&mut dx)?)
        .with_dbias(Output::view_mut_option(&mut dbias)?)
        .with_dgate(Output::view_mut_option(&mut dgate)?);
    let args = GeluArgs::new(x.view()).with_bias(view(&bias)).with_gate(view(&gate));
    let dy = dy.view();
    run(py, &x, plan.workspace_bytes(), RELEASE, |ws| plan.backward(&args, &dy, grads, ws))?;
    Output::finish_all(py, [dx, dbias, dgate], &x.family)
}
