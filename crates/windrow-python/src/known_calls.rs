//! The calls that a convolution with one filter has had, and what computes them.

use crate::array::{Array, Family};
use crate::conv2d_call::{Conv2dCall, Tensors};
use crate::glance::{Form, looked_at};
use crate::seen::Seen;
use crate::torch::{is_autocast, is_capturing, nothing_to_dispatch};
use pyo3::prelude::*;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use windrow::{Device, TensorRef};

/// Dimensions of images and videos.
const RANK: usize = 5;
/// The most kinds of calls, for images of different sizes in turns.
const MOST: usize = 256;

/// A call of a convolution with its filter and bias: a [`Conv2dCall`], or a function of the same arguments.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct BoundCall {
    call: Py<PyAny>,
    weight: Seen,
    bias: Option<Seen>,
    /// [`Conv2dCall::alias`].
    _alias: Option<Py<PyAny>>,
    /// True if it is a [`Conv2dCall`] of this filter and this bias.
    fits: bool,
}

#[pymethods]
impl BoundCall {
    #[new]
    #[pyo3(signature = (call, weight, bias=None))]
    fn new(
        call: Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let py = call.py();
        let weight = Seen::of("weight", weight)?;
        let bias = bias.map(|bias| Seen::of("bias", bias)).transpose()?;
        let native = call.cast::<Conv2dCall>().ok().map(Bound::get);
        let fits = native.is_some_and(|native| {
            let (spec, device) = (native.plan().spec(), native.device());
            let is_of = |seen: &Seen, desc| seen.known() == Some((desc, device));
            let is_bias = match (&bias, spec.bias) {
                (Some(bias), Some(desc)) => is_of(bias, desc),
                (bias, desc) => bias.is_none() && desc.is_none(),
            };
            let filter = weight.view().filter(|_| is_of(&weight, spec.w) && is_bias);
            filter.is_some_and(|filter| native.weights(py, filter).is_some())
        });
        let alias = native.map(|native| native.alias(weight.bind(py))).transpose()?.flatten();
        Ok(BoundCall { call: call.unbind(), weight, bias, _alias: alias, fits })
    }

    #[getter]
    fn call<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.call.bind(py)
    }

    #[getter]
    fn weight<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.weight.bind(py)
    }

    #[getter]
    fn bias<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        self.bias.as_ref().map(|bias| bias.bind(py))
    }

    #[pyo3(signature = (x, residual=None, out=None))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        residual: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let call = self.call(py);
        match out {
            None => call.call1((x, self.weight(py), self.bias(py), residual)),
            Some(out) => call.call1((x, self.weight(py), self.bias(py), residual, out)),
        }
    }
}

impl BoundCall {
    /// The [`Conv2dCall`], if it takes tensors like these with its filter and bias.
    fn fitting(&self, py: Python<'_>, x: &Array<'_>, residual: Option<&Array<'_>>) -> bool {
        self.native(py).is_some_and(|call| {
            let spec = call.plan().spec();
            (x.device, x.desc) == (call.device(), spec.x)
                && residual.is_some() == spec.residual
                && residual.is_none_or(|r| r.device == x.device && r.lies_as(&spec.y))
        })
    }

    fn native<'a>(&'a self, py: Python<'a>) -> Option<&'a Conv2dCall> {
        self.call.bind(py).cast::<Conv2dCall>().ok().map(Bound::get).filter(|_| self.fits)
    }

    /// The result for tensors that [fit](BoundCall::fitting), at these addresses. None if filter or bias are not as they
    /// were, and where the call gives none.
    fn run<'py>(
        &self,
        py: Python<'py>,
        (x, family): (*mut c_void, &Family<'py>),
        residual: Option<*mut c_void>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(call) = self.native(py) else { return Ok(None) };
        for seen in self.bias.iter().chain([&self.weight]) {
            if !seen.is_same(py)? {
                return Ok(None);
            }
        }
        let Some(filter) = self.weight.view() else { return Ok(None) };
        let (spec, device) = (call.plan().spec(), call.device());
        // SAFETY: the objects live, and their memory is as described.
        let view = |at, desc| unsafe { TensorRef::from_raw(at, desc, device) };
        let tensors = Tensors {
            x: view(x, spec.x),
            bias: self.bias.as_ref().and_then(Seen::view),
            residual: residual.map(|residual| view(residual, spec.y)),
            out,
            family,
        };
        call.run(py, call.held_weights(filter), &tensors)
    }
}

/// What tells calls apart.
#[derive(PartialEq)]
struct Kind {
    x: Form<RANK>,
    residual: Option<Form<RANK>>,
    out: Option<Form<RANK>>,
    in_tf32: bool,
    /// True if the call goes into a CUDA graph, false if it may precede a capture, None if it does neither.
    in_graph: Option<bool>,
}

/// A function of image and residual, and for some of `out`, that computes calls of a kind.
struct Known {
    kind: Kind,
    run: Py<PyAny>,
    /// The same, if the kind [fits](BoundCall::fitting).
    bound: Option<Py<BoundCall>>,
}

/// The calls of a convolution with one filter and one bias, by the tensors that they were for.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct KnownCalls {
    weight: Py<PyAny>,
    bias: Option<Py<PyAny>>,
    may_use_tf32: Py<PyAny>,
    /// The one used last comes first.
    known: Mutex<Vec<Arc<Known>>>,
}

/// A call's tensors as they are now.
struct Now<'py> {
    kind: Kind,
    x: (*mut c_void, Family<'py>),
    residual: Option<*mut c_void>,
}

#[pymethods]
impl KnownCalls {
    /// `may_use_tf32` says if PyTorch's own operator may compute f32 on CUDA in TF32.
    #[new]
    #[pyo3(signature = (weight, bias, may_use_tf32))]
    fn new(weight: Py<PyAny>, bias: Option<Py<PyAny>>, may_use_tf32: Py<PyAny>) -> Self {
        KnownCalls { weight, bias, may_use_tf32, known: Mutex::default() }
    }

    /// The result by what computed a call like this one. None if there was none with this filter and this bias, if
    /// PyTorch's dispatcher is needed, or if what computed it takes these tensors no more.
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
        if !self.are_of(weight, bias)
            || is_autocast(py)?
            || !nothing_to_dispatch(py, true, tensors)?
        {
            return Ok(None);
        }
        self.recalled(py, x, residual, out)
    }

    /// True if the calls are of this filter and this bias.
    #[pyo3(signature = (weight, bias))]
    fn are_of(&self, weight: &Bound<'_, PyAny>, bias: Option<&Bound<'_, PyAny>>) -> bool {
        let own = self.bias.as_ref().map(Py::as_ptr);
        weight.as_ptr() == self.weight.as_ptr() && bias.map(Bound::as_ptr) == own
    }

    /// Remembers that `run` computes calls like this one.
    #[pyo3(signature = (run, x, residual=None, out=None))]
    fn keep(
        &self,
        py: Python<'_>,
        run: Bound<'_, PyAny>,
        x: &Bound<'_, PyAny>,
        residual: Option<&Bound<'_, PyAny>>,
        out: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let Some(Now { kind, .. }) = self.now(py, x, residual, out)? else { return Ok(()) };
        let image = Array::import("x", x)?;
        let beside = Array::import_option("residual", residual, None)?;
        let bound = run.cast::<BoundCall>().ok();
        let bound = bound.filter(|bound| bound.get().fitting(py, &image, beside.as_ref()));
        let bound = bound.map(|bound| bound.clone().unbind());
        let new = Arc::new(Known { kind, run: run.unbind(), bound });
        let gone = {
            let mut known = self.lock();
            let gone = known.extract_if(.., |old| old.kind == new.kind).collect::<Vec<_>>();
            known.insert(0, new);
            (gone, if known.len() > MOST { known.pop() } else { None })
        };
        // After the lock: this may call Python.
        drop(gone);
        Ok(())
    }

    /// The function that computes calls like this one, if one was remembered.
    #[pyo3(signature = (x, residual=None, out=None))]
    fn find<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        residual: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let now = self.now(py, x, residual, out)?;
        let known = now.and_then(|now| self.known(&now.kind));
        Ok(known.map(|known| known.run.bind(py).clone()))
    }

    /// Forgets all calls.
    fn clear(&self) {
        let gone = std::mem::take(&mut *self.lock());
        // After the lock: this may call Python.
        drop(gone);
    }
}

impl KnownCalls {
    /// The result by what computed a call like this one, of tensors for which PyTorch's dispatcher has nothing to do.
    pub(crate) fn recalled<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        residual: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let now = self.now(py, x, residual, out)?;
        let Some(Now { kind, x: (address, family), residual: beside }) = now else {
            return Ok(None);
        };
        let Some(known) = self.known(&kind) else { return Ok(None) };
        let result = match (&known.bound, out) {
            (Some(bound), _) => bound.get().run(py, (address, &family), beside, out)?,
            (None, None) => Some(known.run.bind(py).call1((x, residual))?),
            (None, Some(out)) => Some(known.run.bind(py).call1((x, residual, out))?),
        };
        let result = result.filter(|y| !y.is_none());
        if result.is_none() {
            self.clear();
        }
        Ok(result)
    }

    /// None for tensors of more dimensions, and for those that Windrow has no access to.
    fn now<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        residual: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Now<'py>>> {
        let Some((form, address, family)) = looked_at(x) else { return Ok(None) };
        let (mut beside, mut place) = (None, None);
        if let Some(residual) = residual {
            let Some((form, address, _)) = looked_at(residual) else { return Ok(None) };
            beside = Some((form, address));
        }
        if let Some(out) = out {
            let Some((form, ..)) = looked_at(out) else { return Ok(None) };
            place = Some(form);
        }
        let (mut in_tf32, mut in_graph) = (false, None);
        if let Some(gpu @ (Device::Cuda(_) | Device::Hip(_))) = form.device() {
            in_tf32 = form.is_f32() && self.may_use_tf32.bind(py).call0()?.is_truthy()?;
            // The default stream cannot be captured.
            if family.current_stream(gpu)?.is_some_and(|stream| !stream.is_null()) {
                in_graph = Some(is_capturing(py)?);
            }
        }
        let (residual, beside) = beside.unzip();
        let kind = Kind { x: form, residual, out: place, in_tf32, in_graph };
        Ok(Some(Now { kind, x: (address, family), residual: beside }))
    }

    fn known(&self, kind: &Kind) -> Option<Arc<Known>> {
        let mut known = self.lock();
        let at = known.iter().position(|known| known.kind == *kind)?;
        known[..=at].rotate_right(1);
        Some(known[0].clone())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Known>>> {
        // Nothing panics while it is locked.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
