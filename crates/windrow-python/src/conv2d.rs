//! `windrow.conv2d` and `windrow.Conv2dPlan`.

use crate::array::{Array, desc, view};
use crate::call::{PlanCache, RELEASE, run, word, word_or_default};
use crate::error::IntoPy;
use crate::output::{Output, like};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};
use windrow::{
    Accuracy, Conv2dAlgorithm, Conv2dArgs, Conv2dParams, Conv2dSpec, Device, PlanOptions,
    TensorDesc, Weights,
};

/// A spec, and the algorithm where the caller names one.
type Key = (Conv2dSpec, Option<Conv2dAlgorithm>);
static PLANS: PlanCache<Key, windrow::Conv2dPlan> = PlanCache::new();

fn make_plan(
    (spec, algorithm): &Key,
    options: &PlanOptions,
) -> windrow::Result<windrow::Conv2dPlan> {
    match algorithm {
        None => windrow::Conv2dPlan::new(spec, options),
        Some(algorithm) => windrow::Conv2dPlan::with_algorithm(spec, *algorithm, options),
    }
}

/// A number for both directions, or one for each.
#[derive(FromPyObject)]
pub(crate) enum Pair {
    Both(usize),
    Each([usize; 2]),
}

impl From<Pair> for [usize; 2] {
    fn from(pair: Pair) -> Self {
        match pair {
            Pair::Both(n) => [n, n],
            Pair::Each(n) => n,
        }
    }
}

/// The options that all functions of this module take.
fn params(
    [stride, padding, dilation]: [Pair; 3],
    groups: usize,
    activation: Option<&str>,
    accuracy: Option<&str>,
) -> PyResult<Conv2dParams> {
    Ok(Conv2dParams {
        stride: stride.into(),
        padding: padding.into(),
        dilation: dilation.into(),
        groups,
        activation: word_or_default(activation)?,
        accuracy: word_or_default::<Accuracy>(accuracy)?,
    })
}

/// Filters packed for the algorithm of a [`Conv2dPlan`].
#[pyclass(module = "windrow", frozen)]
pub(crate) struct PackedWeights(windrow::PackedWeights);

/// The packed forms of one filter, for the algorithms that have used it, until the filter changes.
#[pyclass(module = "windrow._native", frozen)]
#[derive(Default)]
pub(crate) struct FilterCache(Mutex<(i64, Vec<Arc<windrow::PackedWeights>>)>);

/// The plans kept for later calls, the one used last first: shapes of image and filter, and what the
/// plan does.
#[pyfunction]
pub(crate) fn conv2d_plans() -> Vec<(Vec<usize>, Vec<usize>, String)> {
    let describe = |plan: &windrow::Conv2dPlan| {
        let spec = plan.spec();
        (spec.x.shape().to_vec(), spec.w.shape().to_vec(), plan.explain())
    };
    PLANS.plans().iter().map(|plan| describe(plan)).collect()
}

#[pymethods]
impl FilterCache {
    #[new]
    fn new() -> Self {
        Self::default()
    }
}

impl FilterCache {
    /// The filter packed for `plan`; `version` tells whether what was packed earlier is stale.
    fn get(
        &self,
        py: Python<'_>,
        plan: &windrow::Conv2dPlan,
        weight: &Array<'_>,
        version: i64,
    ) -> PyResult<Arc<windrow::PackedWeights>> {
        let state = || self.0.lock().unwrap_or_else(|e| e.into_inner());
        let mut stale = None;
        {
            let mut state = state();
            if state.0 != version {
                stale = Some(std::mem::replace(&mut *state, (version, Vec::new())));
            } else if let Some(packed) = state.1.iter().find(|p| plan.accepts(p)) {
                return Ok(packed.clone());
            }
        }
        // Packing, and freeing what was packed, may wait for the device: not under the mutex.
        py.detach(|| drop(stale));
        let packed = Arc::new(pack(py, plan, weight)?);
        let mut state = state();
        if state.0 == version {
            state.1.push(packed.clone());
        }
        Ok(packed)
    }
}

fn pack(
    py: Python<'_>,
    plan: &windrow::Conv2dPlan,
    weight: &Array<'_>,
) -> PyResult<windrow::PackedWeights> {
    let view = weight.view();
    run(py, weight, 0, RELEASE, |ws| plan.pack_weights(&view, ws))
}

fn workspace_bytes(plan: &windrow::Conv2dPlan, args: &Conv2dArgs<'_>) -> usize {
    plan.workspace_bytes_for(&args.w)
}

/// What tells whether it is worth to release the interpreter lock: elements, not multiplications,
/// so that the lock is kept only where the filter is small too.
fn work(spec: &Conv2dSpec) -> usize {
    [&spec.x, &spec.w, &spec.y].map(|t| t.layout.len()).into_iter().max().unwrap_or(0)
}

/// conv2d(x, weight, bias=None, *, stride=1, padding=0, dilation=1, groups=1, activation=None, accuracy=None, algorithm=None, out=None, device=None)
///
/// Two-dimensional convolution; see the type stub.
#[pyfunction]
#[pyo3(signature = (x, weight, bias=None, *, stride=Pair::Both(1), padding=Pair::Both(0),
                    dilation=Pair::Both(1), groups=1, activation=None, accuracy=None,
                    algorithm=None, out=None, device=None, filters=None))]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn conv2d<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: usize,
    activation: Option<&str>,
    accuracy: Option<&str>,
    algorithm: Option<&str>,
    out: Option<&Bound<'py, PyAny>>,
    device: Option<&str>,
    filters: Option<(PyRef<'py, FilterCache>, i64)>,
) -> PyResult<Bound<'py, PyAny>> {
    let params = params([stride, padding, dilation], groups, activation, accuracy)?;
    let algorithm = algorithm.map(word).transpose()?;
    let device = device.map(word).transpose()?;
    let x = Array::import_on("x", x, device)?;
    let weight = Array::import_on("weight", weight, device)?;
    let bias = Array::import_option("bias", bias, device)?;
    let mut spec = Conv2dSpec::new(x.desc, weight.desc, &params).py()?;
    spec.bias = desc(&bias);
    let mut y = Output::new(py, out, &x, || Ok(spec.y))?;
    spec.y = y.desc();
    let elements = work(&spec);
    let plan = PLANS.get(py, &(spec, algorithm), x.device, make_plan)?;
    let packed = match &filters {
        Some((cache, version)) => Some(cache.get(py, &plan, &weight, *version)?),
        None => None,
    };
    let w = match &packed {
        Some(packed) => Weights::Packed(packed),
        None => Weights::Raw(weight.view()),
    };
    let args = Conv2dArgs { x: x.view(), w, bias: view(&bias) };
    let target = y.view_mut()?;
    let bytes = workspace_bytes(&plan, &args);
    run(py, &x, bytes, elements, |ws| plan.run(&args, target, ws))?;
    y.finish(py, &x.family)
}

/// Gradients of [`conv2d`] without activation, with respect to those of `x`, `weight` and `bias`
/// that `needs` names.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn conv2d_backward<'py>(
    py: Python<'py>,
    dy: &Bound<'py, PyAny>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: usize,
    accuracy: Option<&str>,
    needs: (bool, bool, bool),
) -> PyResult<[Option<Bound<'py, PyAny>>; 3]> {
    let params = params([stride, padding, dilation], groups, None, accuracy)?;
    let dy = Array::import("dy", dy)?;
    let x = Array::import("x", x)?;
    let weight = Array::import("weight", weight)?;
    let bias = Array::import_option("bias", bias, None)?;
    // The gradient of x is dense, which x need not be: then its plan is another one.
    let plan = |x: TensorDesc| {
        let spec = Conv2dSpec::new(x, weight.desc, &params).py()?;
        let spec = Conv2dSpec { y: dy.desc, ..spec };
        PLANS.get(py, &(spec, None), dy.device, make_plan)
    };
    let (data, rest) = (plan(like(&x)?)?, plan(x.desc)?);
    let bytes = data.backward_workspace_bytes().max(rest.backward_workspace_bytes());
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
    let family = &x.family;
    Ok([
        Output::finish_option(py, dx, family)?,
        Output::finish_option(py, dweight, family)?,
        Output::finish_option(py, dbias, family)?,
    ])
}

/// Conv2dPlan(x, weight, bias=None, *, stride=1, padding=0, dilation=1, groups=1, activation=None, accuracy=None, algorithm=None, device=None)
///
/// A convolution with its algorithm chosen; see the type stub.
#[pyclass(module = "windrow", frozen)]
pub(crate) struct Conv2dPlan {
    plan: windrow::Conv2dPlan,
    device: Device,
}

#[pymethods]
impl Conv2dPlan {
    #[new]
    #[pyo3(signature = (x, weight, bias=None, *, stride=Pair::Both(1), padding=Pair::Both(0),
                        dilation=Pair::Both(1), groups=1, activation=None, accuracy=None,
                        algorithm=None, device=None))]
    #[expect(clippy::too_many_arguments, reason = "a Python signature")]
    fn new(
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: usize,
        activation: Option<&str>,
        accuracy: Option<&str>,
        algorithm: Option<&str>,
        device: Option<&str>,
    ) -> PyResult<Self> {
        let params = params([stride, padding, dilation], groups, activation, accuracy)?;
        let algorithm = algorithm.map(word).transpose()?;
        let x = Array::import("x", x)?;
        let weight = Array::import("weight", weight)?;
        let mut spec = Conv2dSpec::new(x.desc, weight.desc, &params).py()?;
        spec.bias = desc(&Array::import_option("bias", bias, None)?);
        let device = device.map(word).transpose()?.unwrap_or(x.device);
        let options = PlanOptions { device, ..PlanOptions::default() };
        let plan = py.detach(|| make_plan(&(spec, algorithm), &options)).py()?;
        Ok(Conv2dPlan { plan, device })
    }

    /// The algorithm chosen, by name.
    #[getter]
    fn algorithm(&self) -> &'static str {
        self.plan.algorithm().name()
    }

    /// Names of all algorithms that can compute this convolution on the plan's device.
    #[getter]
    fn algorithms(&self) -> Vec<&'static str> {
        let all = windrow::Conv2dPlan::algorithms(self.plan.spec(), self.device);
        all.into_iter().map(Conv2dAlgorithm::name).collect()
    }

    /// Scratch memory of one run.
    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
    }

    /// One line: algorithm, blocking, threads, why.
    fn explain(&self) -> String {
        self.plan.explain()
    }

    /// Packs a filter once, for any number of runs.
    fn pack(&self, py: Python<'_>, weight: &Bound<'_, PyAny>) -> PyResult<PackedWeights> {
        let weight = Array::import_on("weight", weight, Some(self.device))?;
        Ok(PackedWeights(pack(py, &self.plan, &weight)?))
    }

    /// Runs the convolution; `weight` is an array or what `pack` returned.
    #[pyo3(signature = (x, weight, bias=None, *, out=None))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        weight: &Bound<'py, PyAny>,
        bias: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let device = Some(self.device);
        let x = Array::import_on("x", x, device)?;
        let bias = Array::import_option("bias", bias, device)?;
        let spec = self.plan.spec();
        let mut y = Output::new(py, out, &x, || Ok::<TensorDesc, PyErr>(spec.y))?;
        let packed = weight.cast::<PackedWeights>().ok();
        let raw = match packed {
            Some(_) => None,
            None => Some(Array::import_on("weight", weight, device)?),
        };
        let w = match (packed, &raw) {
            (Some(packed), _) => Weights::Packed(&packed.get().0),
            (None, Some(raw)) => Weights::Raw(raw.view()),
            (None, None) => return Err(PyTypeError::new_err("`weight` is missing")),
        };
        let args = Conv2dArgs { x: x.view(), w, bias: view(&bias) };
        let target = y.view_mut()?;
        let bytes = workspace_bytes(&self.plan, &args);
        run(py, &x, bytes, work(spec), |ws| self.plan.run(&args, target, ws))?;
        y.finish(py, &x.family)
    }
}
