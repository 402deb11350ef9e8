//! `windrow.conv2d` and `windrow.Conv2dPlan`.

use crate::array::{Array, desc, view};
use crate::call::{
    ActivationName, PlanCache, RELEASE, filter_of, run, without_batch_invariant, word,
    word_or_default,
};
use crate::error::IntoPy;
use crate::output::Output;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use windrow::{
    Accuracy, Conv2dAlgorithm, Conv2dArgs, Conv2dParams, Conv2dSpec, Device, Filter, PlanOptions,
    TensorDesc, Weights,
};

/// A spec, the algorithm where the caller names one, whether the packed filter is kept, how much memory it and the
/// workspace should have, and whether the bits of an image must not depend on the batch.
pub(crate) type Key = (Conv2dSpec, Option<Conv2dAlgorithm>, Filter, Option<usize>, bool);
pub(crate) static PLANS: PlanCache<Key, windrow::Conv2dPlan> = PlanCache::new();

pub(crate) fn make_plan(
    &(ref spec, algorithm, filter, memory, batch_invariant): &Key,
    options: &PlanOptions,
) -> windrow::Result<windrow::Conv2dPlan> {
    let options = options.with_filter(filter).with_memory(memory);
    let options = options.with_batch_invariant(batch_invariant);
    match algorithm {
        None => windrow::Conv2dPlan::new(spec, &options),
        Some(algorithm) => windrow::Conv2dPlan::with_algorithm(spec, algorithm, &options),
    }
}

/// A number for both directions, or one for each.
#[derive(FromPyObject)]
pub(crate) enum Pair<'py> {
    Both(usize),
    Each([usize; 2]),
    /// Anything else: an error, which names the argument.
    Other(Bound<'py, PyAny>),
}

impl Pair<'_> {
    pub(crate) fn each(self, arg: &str) -> PyResult<[usize; 2]> {
        match self {
            Pair::Both(n) => Ok([n, n]),
            Pair::Each(n) => Ok(n),
            Pair::Other(given) => {
                Err(no_number(arg, &given, "an int, or one for each direction", 2))
            }
        }
    }

    /// The number, for an argument that must be a single one.
    fn single(self, py: Python<'_>, arg: &str) -> PyResult<usize> {
        let given = match self {
            Pair::Both(n) => return Ok(n),
            Pair::Each(n) => n.into_pyobject(py)?,
            Pair::Other(given) => return Err(no_number(arg, &given, "an int", 2)),
        };
        Err(no_number(arg, &given, "an int", 2))
    }
}

/// The error for what is neither a number nor one for each of so many directions.
pub(crate) fn no_number(
    arg: &str,
    given: &Bound<'_, PyAny>,
    expected: &str,
    directions: usize,
) -> PyErr {
    let shown = given.repr().map(|r| r.to_string()).unwrap_or_default();
    let is_int = |value: &Bound<'_, PyAny>| value.is_instance_of::<PyInt>();
    let items = given.extract::<Vec<Bound<'_, PyAny>>>().unwrap_or_default();
    if is_int(given) || (items.len() == directions && items.iter().all(is_int)) {
        let expected = if shown.contains('-') { "no negative number" } else { "a smaller number" };
        return PyValueError::new_err(format!("`{arg}` is {shown}, expected {expected}"));
    }
    let message = format!("`{arg}` is {shown}, expected {expected}");
    if given.is_instance_of::<PyString>() || items.iter().all(is_int) && !items.is_empty() {
        return PyValueError::new_err(message);
    }
    PyTypeError::new_err(message)
}

/// Stride, padding, dilation and groups.
pub(crate) type Options<'py> = (Pair<'py>, Pair<'py>, Pair<'py>, Pair<'py>);

/// The options of [`conv2d`] by name, in a dictionary.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Named<'py> {
    stride: Pair<'py>,
    padding: Pair<'py>,
    dilation: Pair<'py>,
    groups: Pair<'py>,
    activation: Option<ActivationName>,
    accuracy: Option<String>,
    memory: Option<usize>,
}

impl Named<'_> {
    /// The options of a spec, the memory that a plan may take, and whether bits must not depend on the batch.
    pub(crate) fn parts(self, py: Python<'_>) -> PyResult<(Conv2dParams, Option<usize>, bool)> {
        let options = (self.stride, self.padding, self.dilation, self.groups);
        let (accuracy, batch_invariant) = without_batch_invariant(self.accuracy.as_deref());
        Ok((params(py, options, self.activation, accuracy)?, self.memory, batch_invariant))
    }
}

/// The arrays of a call with [`Named`] options, and what it computes.
pub(crate) struct Given<'py> {
    pub(crate) x: Array<'py>,
    pub(crate) weight: Array<'py>,
    spec: Conv2dSpec,
    memory: Option<usize>,
    batch_invariant: bool,
}

impl<'py> Given<'py> {
    pub(crate) fn import(
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        weight: &Bound<'py, PyAny>,
        bias: Option<&Bound<'py, PyAny>>,
        named: Named<'_>,
        residual: bool,
    ) -> PyResult<Self> {
        let (params, memory, batch_invariant) = named.parts(py)?;
        let (x, weight) = (Array::import("x", x)?, Array::import("weight", weight)?);
        let bias = Array::import_option("bias", bias, None)?;
        let spec = spec_of(&x, &weight, &bias, &params)?.with_residual(residual);
        Ok(Given { x, weight, spec, memory, batch_invariant })
    }

    /// The same with the result in an array like `out`.
    pub(crate) fn with_output(mut self, out: Option<&Bound<'py, PyAny>>) -> PyResult<Self> {
        if let Some(out) = out {
            self.spec.y = Array::import("out", out)?.desc;
        }
        Ok(self)
    }

    /// The plan that [`conv2d`] uses if the cost model chooses.
    pub(crate) fn plan(&self, py: Python<'_>, is_kept: bool) -> PyResult<Arc<windrow::Conv2dPlan>> {
        let filter = filter_of(is_kept);
        let key = (self.spec.clone(), None, filter, self.memory, self.batch_invariant);
        PLANS.get(py, &key, self.x.device, make_plan)
    }

    /// Bytes of workspace that the plan needs for x beside the packed filter.
    pub(crate) fn scratch_bytes(&self, plan: &windrow::Conv2dPlan) -> usize {
        let raw = Weights::Raw(self.weight.view());
        let saved = plan.workspace_bytes() - plan.workspace_bytes_for(&self.x.view(), &raw);
        plan.packed_workspace_bytes() - saved
    }
}

fn spec_of(
    x: &Array<'_>,
    weight: &Array<'_>,
    bias: &Option<Array<'_>>,
    params: &Conv2dParams,
) -> PyResult<Conv2dSpec> {
    Ok(Conv2dSpec::new(x.desc, weight.desc, params).py()?.with_bias(desc(bias)))
}

/// The options that all functions take.
pub(crate) fn params(
    py: Python<'_>,
    (stride, padding, dilation, groups): Options<'_>,
    activation: Option<ActivationName>,
    accuracy: Option<&str>,
) -> PyResult<Conv2dParams> {
    Ok(Conv2dParams::default()
        .with_stride(stride.each("stride")?)
        .with_padding(padding.each("padding")?)
        .with_dilation(dilation.each("dilation")?)
        .with_groups(groups.single(py, "groups")?)
        .with_activation(ActivationName::or_none(activation))
        .with_accuracy(word_or_default::<Accuracy>(accuracy)?))
}

/// A filter packed by `Conv2dPlan.pack`.
#[pyclass(module = "windrow", frozen)]
pub(crate) struct PackedWeights(windrow::PackedWeights);

/// The packed forms of one filter, right by its content.
#[pyclass(module = "windrow._native", frozen)]
#[derive(Default)]
pub(crate) struct FilterCache {
    cache: windrow::FilterCache,
    promised: AtomicUsize,
    refused: Mutex<HashMap<String, usize>>,
}

#[pymethods]
impl FilterCache {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Memory of what is packed.
    #[getter]
    fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// The bytes that `promise` has named.
    #[getter]
    fn promised(&self) -> usize {
        self.promised.load(Relaxed)
    }

    /// Says that so much is going to be packed in a graph.
    fn promise(&self, bytes: usize) {
        self.promised.store(bytes, Relaxed);
    }

    /// Says that there was no room for the filter's layer in `mode`.
    fn refuse(&self, mode: String) {
        *self.refusals().entry(mode).or_default() += 1;
    }

    /// The number of calls of `refuse`.
    fn refused(&self, mode: &str) -> usize {
        self.refusals().get(mode).copied().unwrap_or_default()
    }

    /// Drops what is packed.
    fn clear(&self, py: Python<'_>) {
        py.detach(|| self.cache.clear());
    }
}

impl FilterCache {
    fn refusals(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        // Nothing panics while it is locked.
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cache, which does or does not trust the filter to stay as it is.
    pub(crate) fn frozen(&self, frozen: bool) -> &windrow::FilterCache {
        // Setting it makes the cache compare once more.
        if self.cache.is_frozen() != frozen {
            self.cache.set_frozen(frozen);
        }
        &self.cache
    }
}

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

fn pack(
    py: Python<'_>,
    plan: &windrow::Conv2dPlan,
    weight: &Array<'_>,
) -> PyResult<windrow::PackedWeights> {
    let view = weight.view();
    run(py, weight, 0, RELEASE, |ws| plan.pack_weights(&view, ws))
}

/// The measure of a call's work, which decides if the interpreter lock is released: elements, not multiplications, so
/// that the lock is kept only if the filter is small too.
pub(crate) fn work(spec: &Conv2dSpec) -> usize {
    [&spec.x, &spec.w, &spec.y].map(|t| t.layout.len()).into_iter().max().unwrap_or(0)
}

/// Two-dimensional convolution, by Winograd if filter and stride allow it and the error stays within
/// `accuracy` (default "fp32").
///
/// x: [n, c, h, w], f32, f16 or bf16, any strides; the result [n, k, oh, ow] is channels-last if x
/// is. weight: [k, c / groups, r, s] of x's type; bias: [k], f32 or x's type.
/// stride, padding, dilation: a number for both directions, or two numbers (rows, columns).
/// residual: an array with the type, shape and strides of the result. It is added before the
/// activation.
/// activation: None, "relu", "relu6", "leaky_relu" (with another slope than 0.01: "leaky_relu(0.2)"),
/// "hardswish", "silu", "gelu" or "gelu_tanh", applied to the result.
/// accuracy: "exact" (no Winograd), "fp32", "tf32" or "half".
/// algorithm: one of `Conv2dPlan.algorithms`; None lets the cost model choose.
/// batch_invariant: if true, the bits of an image do not depend on the other images.
/// out: the array that is written and returned. device: where arrays in main memory are computed.
///
/// Raises ValueError, TypeError (element types) or NotImplementedError (an algorithm that cannot
/// compute this case).
#[pyfunction]
#[pyo3(signature = (x, weight, bias=None, *, stride=Pair::Both(1), padding=Pair::Both(0),
                    dilation=Pair::Both(1), groups=Pair::Both(1), residual=None, activation=None,
                    accuracy=None, algorithm=None, batch_invariant=false, out=None, device=None,
                    filters=None, memory=None),
       text_signature = "(x, weight, bias=None, *, stride=1, padding=0, dilation=1, groups=1, \
                         residual=None, activation=None, accuracy=None, algorithm=None, \
                         batch_invariant=False, out=None, device=None)")]
#[expect(clippy::too_many_arguments, reason = "a Python signature")]
pub(crate) fn conv2d<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    stride: Pair<'_>,
    padding: Pair<'_>,
    dilation: Pair<'_>,
    groups: Pair<'_>,
    residual: Option<&Bound<'py, PyAny>>,
    activation: Option<ActivationName>,
    accuracy: Option<&str>,
    algorithm: Option<&str>,
    batch_invariant: bool,
    out: Option<&Bound<'py, PyAny>>,
    device: Option<&str>,
    filters: Option<(PyRef<'py, FilterCache>, bool)>,
    memory: Option<usize>,
) -> PyResult<Bound<'py, PyAny>> {
    let (accuracy, is_said) = without_batch_invariant(accuracy);
    let params = params(py, (stride, padding, dilation, groups), activation, accuracy)?;
    let algorithm = algorithm.map(word).transpose()?;
    let device = device.map(word).transpose()?;
    let x = Array::import_on("x", x, device)?;
    let weight = Array::import_on("weight", weight, device)?;
    let bias = Array::import_option("bias", bias, device)?;
    let residual = Array::import_option("residual", residual, device)?;
    let mut spec = spec_of(&x, &weight, &bias, &params)?.with_residual(residual.is_some());
    let mut y = Output::new(py, out, &x, || Ok(spec.y))?;
    spec.y = y.desc();
    let elements = work(&spec);
    let filter = filter_of(filters.is_some());
    let key = (spec.clone(), algorithm, filter, memory, batch_invariant || is_said);
    let plan = PLANS.get(py, &key, x.device, make_plan)?;
    let w = match &filters {
        Some((cache, frozen)) => Weights::Cached(weight.view(), cache.frozen(*frozen)),
        None => Weights::Raw(weight.view()),
    };
    let added = residual.as_ref().map(|residual| residual.view_as(&spec.y));
    let args = Conv2dArgs::new(x.view(), w).with_bias(view(&bias)).with_residual(added);
    let target = y.view_mut()?;
    let bytes = plan.workspace_bytes_for(&args.x, &args.w);
    run(py, &x, bytes, elements, |ws| plan.run(&args, target, ws))?;
    y.finish(py, &x.family)
}

/// Name of the algorithm that [`conv2d`] takes.
#[pyfunction]
pub(crate) fn conv2d_algorithm<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    named: Named<'_>,
    is_kept: bool,
) -> PyResult<&'static str> {
    let Given { x, spec, batch_invariant, .. } = Given::import(py, x, weight, bias, named, false)?;
    let options = PlanOptions::default().with_device(x.device).with_filter(filter_of(is_kept));
    let options = options.with_batch_invariant(batch_invariant);
    let choice = py.detach(|| windrow::Conv2dPlan::choice(&spec, &options)).py()?;
    Ok(choice.name())
}

/// Memory that [`conv2d`] needs beside its tensors: for the packed filter, and for the rest.
#[pyfunction]
pub(crate) fn conv2d_bytes<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    named: Named<'_>,
    residual: bool,
    is_kept: bool,
) -> PyResult<(usize, usize)> {
    let given = Given::import(py, x, weight, bias, named, residual)?;
    let plan = given.plan(py, is_kept)?;
    let scratch = given.scratch_bytes(&plan);
    let filter = match is_kept {
        true => plan.kept_bytes(&given.weight.view()),
        false => plan.workspace_bytes() - plan.packed_workspace_bytes(),
    };
    Ok((filter, scratch))
}

/// A convolution whose algorithm is chosen once, for arrays with the types, shapes and strides of these.
///
/// The arguments are those of `conv2d`. The contents of the arrays are not read.
#[pyclass(module = "windrow", frozen)]
pub(crate) struct Conv2dPlan {
    plan: windrow::Conv2dPlan,
    device: Device,
}

#[pymethods]
impl Conv2dPlan {
    #[new]
    #[pyo3(signature = (x, weight, bias=None, *, stride=Pair::Both(1), padding=Pair::Both(0),
                        dilation=Pair::Both(1), groups=Pair::Both(1), activation=None, accuracy=None,
                        algorithm=None, batch_invariant=false, device=None),
           text_signature = "(x, weight, bias=None, *, stride=1, padding=0, dilation=1, groups=1, \
                             activation=None, accuracy=None, algorithm=None, \
                             batch_invariant=False, device=None)")]
    #[expect(clippy::too_many_arguments, reason = "a Python signature")]
    fn new(
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        stride: Pair<'_>,
        padding: Pair<'_>,
        dilation: Pair<'_>,
        groups: Pair<'_>,
        activation: Option<ActivationName>,
        accuracy: Option<&str>,
        algorithm: Option<&str>,
        batch_invariant: bool,
        device: Option<&str>,
    ) -> PyResult<Self> {
        let params = params(py, (stride, padding, dilation, groups), activation, accuracy)?;
        let algorithm = algorithm.map(word).transpose()?;
        let x = Array::import("x", x)?;
        let weight = Array::import("weight", weight)?;
        let bias = Array::import_option("bias", bias, None)?;
        let spec = spec_of(&x, &weight, &bias, &params)?;
        let device = device.map(word).transpose()?.unwrap_or(x.device);
        let options = PlanOptions::default().with_device(device);
        let key = (spec, algorithm, Filter::Kept, None, batch_invariant);
        Ok(Conv2dPlan { plan: py.detach(|| make_plan(&key, &options)).py()?, device })
    }

    /// The name of the chosen algorithm.
    #[getter]
    fn algorithm(&self) -> &'static str {
        self.plan.algorithm().name()
    }

    /// The names of all algorithms that can compute this convolution on the plan's device.
    #[getter]
    fn algorithms(&self) -> Vec<&'static str> {
        let all = windrow::Conv2dPlan::algorithms(self.plan.spec(), self.device);
        all.into_iter().map(Conv2dAlgorithm::name).collect()
    }

    /// The bytes of scratch memory of one run.
    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.plan.workspace_bytes()
    }

    /// The plan in one line: algorithm with its parameters, device and blocking.
    fn explain(&self) -> String {
        self.plan.explain()
    }

    /// Packs a filter once, for any number of runs.
    fn pack(&self, py: Python<'_>, weight: &Bound<'_, PyAny>) -> PyResult<PackedWeights> {
        let weight = Array::import_on("weight", weight, Some(self.device))?;
        Ok(PackedWeights(pack(py, &self.plan, &weight)?))
    }

    /// Runs the convolution; `weight` is an array, or what `pack` returned.
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
        let args = Conv2dArgs::new(x.view(), w).with_bias(view(&bias));
        let target = y.view_mut()?;
        let bytes = self.plan.workspace_bytes_for(&args.x, &args.w);
        run(py, &x, bytes, work(spec), |ws| self.plan.run(&args, target, ws))?;
        y.finish(py, &x.family)
    }
}
