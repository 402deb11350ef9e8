//! The way of a module's later calls: what the first one found out is kept.

use crate::array::{Array, Family, desc, view};
use crate::call::{On, run_with};
use crate::conv2d::{FilterCache, Given, Named, work};
use crate::error::{IntoPy, NotInPlace};
use crate::output::{EmptyTensor, Output};
use crate::torch::nothing_to_dispatch;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use std::sync::Arc;
use windrow::{Conv2dArgs, Device, Placed, TensorRef, Weights};

/// `conv2d` of PyTorch's tensors, for images, filters, biases and residuals of the types, shapes and strides of those it
/// was made from. With other tensors, or such that PyTorch's dispatcher has something to do for, a call does nothing and
/// returns None. So it does for an image at an address for which it would need more memory. With `out` it writes there;
/// this must be like the one that the call was made for.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct Conv2dCall {
    plan: Arc<windrow::Conv2dPlan>,
    device: Device,
    kept: Option<Kept>,
    memory: Option<Memory>,
    bytes: usize,
    elements: usize,
}

/// Packed forms, and the memory of the filter that they are of.
struct Kept {
    cache: Py<FilterCache>,
    frozen: bool,
    address: usize,
    /// Lives as long as that memory.
    storage: Py<PyWeakrefReference>,
}

/// PyTorch's, on a GPU.
struct Memory {
    result: EmptyTensor,
    workspace: Option<EmptyTensor>,
}

#[pymethods]
impl Conv2dCall {
    #[new]
    #[pyo3(signature = (x, weight, bias, named, filters, residual=false, out=None))]
    #[expect(clippy::too_many_arguments, reason = "a Python signature")]
    fn new(
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        named: Named<'_>,
        filters: Option<(Py<FilterCache>, bool)>,
        residual: bool,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let given = Given::import(py, x, weight, bias, named, residual)?.with_output(out)?;
        let plan = given.plan(py, filters.is_some())?;
        let scratch = given.scratch_bytes(&plan);
        let Given { x: image, weight: filter, .. } = given;
        let kept = filters.map(|(cache, frozen)| {
            let storage = weight.call_method0(intern!(py, "untyped_storage"))?;
            let storage = PyWeakrefReference::new(&storage)?.unbind();
            PyResult::Ok(Kept { cache, frozen, address: filter.address().addr(), storage })
        });
        let kept = kept.transpose()?;
        let packed = plan.workspace_bytes() - plan.packed_workspace_bytes();
        let bytes = scratch + if kept.is_some() { 0 } else { packed };
        let memory = match image.device {
            Device::Cpu => None,
            _ => Some(Memory {
                result: EmptyTensor::beside(x, &plan.spec().y)?,
                workspace: match bytes {
                    0 => None,
                    bytes => Some(EmptyTensor::bytes_beside(x, bytes)?),
                },
            }),
        };
        let elements = work(plan.spec());
        Ok(Conv2dCall { plan, device: image.device, kept, memory, bytes, elements })
    }

    #[pyo3(signature = (x, weight, bias, residual=None, out=None))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        weight: &Bound<'py, PyAny>,
        bias: Option<&Bound<'py, PyAny>>,
        residual: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let tensors = [x, weight].into_iter().chain(bias).chain(residual).chain(out);
        if !nothing_to_dispatch(py, true, tensors)? {
            return Ok(None);
        }
        let imported = || {
            let (x, weight) = (Array::import("x", x)?, Array::import("weight", weight)?);
            let bias = Array::import_option("bias", bias, None)?;
            PyResult::Ok((x, weight, bias, Array::import_option("residual", residual, None)?))
        };
        let (x, weight, bias, residual) = match imported() {
            Err(e) if e.is_instance_of::<NotInPlace>(py) => return Ok(None),
            arrays => arrays?,
        };
        let spec = self.plan.spec();
        if x.device != self.device
            || (&x.desc, &weight.desc, &desc(&bias)) != (&spec.x, &spec.w, &spec.bias)
            || residual.is_some() != spec.residual
            || residual.as_ref().is_some_and(|residual| !residual.lies_as(&spec.y))
        {
            return Ok(None);
        }
        let Some(w) = self.weights(py, weight.view()) else { return Ok(None) };
        let residual = residual.as_ref().map(|residual| residual.view_as(&spec.y));
        let (bias, family) = (view(&bias), &x.family);
        self.run(py, w, &Tensors { x: x.view(), bias, residual, out, family })
    }
}

/// The tensors of a call beside its filter: all but `out` as the call takes them.
pub(crate) struct Tensors<'a, 'py> {
    pub(crate) x: TensorRef<'a>,
    pub(crate) bias: Option<TensorRef<'a>>,
    pub(crate) residual: Option<TensorRef<'a>>,
    pub(crate) out: Option<&'a Bound<'py, PyAny>>,
    /// The image's.
    pub(crate) family: &'a Family<'py>,
}

impl Conv2dCall {
    /// The result; None if the image lies at an address for which more memory is needed, or `out` is another.
    pub(crate) fn run<'py>(
        &self,
        py: Python<'py>,
        w: Weights<'_>,
        &Tensors { x, bias, residual, out, family }: &Tensors<'_, 'py>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if self.memory.is_some() && self.plan.workspace_bytes_for(&x, &w) > self.bytes {
            return Ok(None);
        }
        let spec = self.plan.spec();
        let mut y = match (out, &self.memory) {
            (Some(out), _) => Output::Given(Array::import("out", out)?, out.clone()),
            (None, None) => Output::Own(Placed::output(spec.y, Device::Cpu).py()?),
            (None, Some(memory)) => {
                let result = memory.result.make(py)?;
                Output::New(Array::import("out", &result)?, result)
            }
        };
        if y.desc() != spec.y {
            return Ok(None);
        }
        let args = Conv2dArgs::new(x, w).with_bias(bias).with_residual(residual);
        let target = y.view_mut()?;
        let workspace = self.memory.as_ref().and_then(|memory| memory.workspace.as_ref());
        let on = On { device: self.device, family, is_staged: false };
        run_with(py, &on, self.bytes, self.elements, workspace, |ws| {
            self.plan.run(&args, target, ws)
        })?;
        y.finish(py, family).map(Some)
    }

    pub(crate) fn plan(&self) -> &Arc<windrow::Conv2dPlan> {
        &self.plan
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// The bytes of the workspace.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of elements as [`work`] counts them.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    /// The filter for a run. None if packed forms belong to another filter.
    pub(crate) fn weights<'a>(
        &'a self,
        py: Python<'_>,
        filter: TensorRef<'a>,
    ) -> Option<Weights<'a>> {
        let is_of = self.kept.as_ref().is_none_or(|kept| kept.is_of(py, &filter));
        is_of.then(|| self.held_weights(filter))
    }

    /// [`Conv2dCall::weights`] while the caller holds [`Conv2dCall::alias`] and the filter lies where it lay.
    pub(crate) fn held_weights<'a>(&'a self, filter: TensorRef<'a>) -> Weights<'a> {
        match &self.kept {
            None => Weights::Raw(filter),
            Some(kept) => Weights::Cached(filter, kept.cache.get().frozen(kept.frozen)),
        }
    }

    /// A tensor in the memory of the filter, if there may be packed forms, which belong to it: it keeps the memory alive.
    /// The memory's own object does not with PyTorch 2.8 if it comes from a weak reference.
    pub(crate) fn alias(&self, weight: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        let detach = || weight.call_method0(intern!(weight.py(), "detach")).map(Bound::unbind);
        self.kept.is_some().then(detach).transpose()
    }
}

impl Kept {
    fn is_of(&self, py: Python<'_>, weight: &TensorRef<'_>) -> bool {
        self.address == weight.as_ptr().addr() && self.storage.bind(py).upgrade().is_some()
    }
}
