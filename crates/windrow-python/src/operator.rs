//! The way of a compiled graph's calls of Windrow's operators past PyTorch's dispatcher.

use crate::error::NotInPlace;
use crate::known_calls::KnownCalls;
use crate::seen::Likeness;
use crate::torch::{is_autocast, is_seen_by_modes, nothing_to_dispatch};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The arguments of a fused convolution: image, filter, bias and residual, then stride, padding, dilation, groups,
/// activation and accuracy, and for some the tensor to write to.
const REST: usize = 4;
const OUT: usize = 10;
/// The most modules of a filter, whose biases may be others on each call.
const MOST: usize = 16;

/// The modules of convolutions that graphs call by an operator, without a module: by filter, bias and all arguments
/// behind the residual.
#[pyclass(module = "windrow._native", frozen)]
#[derive(Default)]
pub(crate) struct Layers {
    /// By the address of the filter's object.
    layers: Mutex<HashMap<usize, Arc<Vec<Arc<Layer>>>>>,
}

struct Layer {
    weight: Likeness,
    bias: Option<Likeness>,
    rest: Py<PyTuple>,
    module: Py<PyAny>,
    calls: Py<KnownCalls>,
}

#[pymethods]
impl Layers {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// The module of a convolution, as long as filter and bias lie where they lay.
    #[pyo3(signature = (weight, bias, rest))]
    fn find<'py>(
        &self,
        weight: &Bound<'py, PyAny>,
        bias: Option<&Bound<'py, PyAny>>,
        rest: &Bound<'py, PyTuple>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let found = self.found(weight, bias, rest)?;
        Ok(found.map(|layer| layer.module.bind(weight.py()).clone()))
    }

    /// Remembers the module of a convolution and its calls, until `drop`. Another one with these arguments is dropped.
    #[pyo3(signature = (weight, bias, rest, module, calls))]
    fn keep(
        &self,
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        rest: Bound<'_, PyTuple>,
        module: Py<PyAny>,
        calls: Py<KnownCalls>,
    ) -> PyResult<()> {
        let bias = bias.map(|bias| Likeness::of("bias", bias)).transpose();
        // Windrow has no access to some tensors.
        let (Ok(filter), Ok(bias)) = (Likeness::of("weight", weight), bias) else { return Ok(()) };
        let new = Layer { weight: filter, bias, rest: rest.unbind(), module, calls };
        let place = weight.as_ptr().addr();
        let before = self.of(place);
        let mut layers = vec![Arc::new(new)];
        for old in before.iter().flat_map(|layers| layers.iter()) {
            let is_replaced = old.bias.as_ref().map(Likeness::place)
                == layers[0].bias.as_ref().map(Likeness::place)
                && old.rest.bind(py).eq(&layers[0].rest)?;
            if !is_replaced && layers.len() < MOST {
                layers.push(old.clone());
            }
        }
        let gone = self.lock().insert(place, Arc::new(layers));
        // After the lock: this may call Python.
        drop(gone);
        Ok(())
    }

    /// Forgets the modules of the filter that was at an address.
    fn drop(&self, place: usize) {
        let gone = self.lock().remove(&place);
        // After the lock: this may call Python.
        drop(gone);
    }
}

impl Layers {
    fn found(
        &self,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        rest: &Bound<'_, PyTuple>,
    ) -> PyResult<Option<Arc<Layer>>> {
        let py = weight.py();
        let Some(layers) = self.of(weight.as_ptr().addr()) else { return Ok(None) };
        for layer in layers.iter() {
            let is_bias = match (&layer.bias, bias) {
                (Some(before), Some(bias)) => before.is_same(bias).unwrap_or(false),
                (before, bias) => before.is_none() && bias.is_none(),
            };
            let is_of = is_bias && layer.weight.is_same(weight).unwrap_or(false);
            if is_of && layer.rest.bind(py).eq(rest)? {
                return Ok(Some(layer.clone()));
            }
        }
        Ok(None)
    }

    fn of(&self, place: usize) -> Option<Arc<Vec<Arc<Layer>>>> {
        self.lock().get(&place).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Arc<Vec<Arc<Layer>>>>> {
        // Nothing panics while it is locked.
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The function by which an operator is called, as code that Inductor made calls it. Where the dispatcher would only
/// call the kernel, it does so itself, or has the result computed as that of an earlier call.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct ShortOperator {
    /// PyTorch's function, by its dispatcher.
    dispatched: Py<PyAny>,
    /// None for an operator that writes to an argument, which the dispatcher has to know.
    kernel: Option<Py<PyAny>>,
    /// The number of tensors that the arguments begin with.
    tensors: usize,
    layers: Option<Py<Layers>>,
}

#[pymethods]
impl ShortOperator {
    /// `layers` belong to an operator of fused convolutions.
    #[new]
    #[pyo3(signature = (dispatched, kernel, tensors, layers=None))]
    fn new(
        dispatched: Py<PyAny>,
        kernel: Option<Py<PyAny>>,
        tensors: usize,
        layers: Option<Py<Layers>>,
    ) -> Self {
        ShortOperator { dispatched, kernel, tensors, layers }
    }

    #[pyo3(signature = (*args, **kwargs))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if kwargs.is_none() {
            match self.straight(py, args) {
                // The dispatcher may have a way to make it a plain tensor.
                Err(e) if e.is_instance_of::<NotInPlace>(py) => {}
                Ok(None) => {}
                result => return result.map(|result| result.expect("compared above")),
            }
        }
        self.dispatched.bind(py).call(args, kwargs)
    }
}

impl ShortOperator {
    /// The result; None if the dispatcher has to be called.
    fn straight<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let is_whole = self.layers.is_none() || args.len() >= OUT;
        if !is_whole || is_autocast(py)? || is_seen_by_modes(py)? {
            return Ok(None);
        }
        let out = self.layers.as_ref().map(|_| OUT);
        let given = args.iter().enumerate();
        let tensors = given.filter(|(i, _)| *i < self.tensors || Some(*i) == out);
        let tensors: Vec<_> = tensors.map(|(_, arg)| arg).filter(|arg| !arg.is_none()).collect();
        if !nothing_to_dispatch(py, true, &tensors)? {
            return Ok(None);
        }
        if let Some(layers) = &self.layers
            && let Some(result) = recalled(layers.get(), args)?
        {
            return Ok(Some(result));
        }
        self.kernel.as_ref().map(|kernel| kernel.bind(py).call1(args)).transpose()
    }
}

/// The result of a fused convolution like an earlier one.
fn recalled<'py>(
    layers: &Layers,
    args: &Bound<'py, PyTuple>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = args.py();
    let of = |i| args.get_item(i).map(|arg| Some(arg).filter(|arg| !arg.is_none()));
    let (Some(x), Some(weight)) = (of(0)?, of(1)?) else { return Ok(None) };
    let (bias, residual) = (of(2)?, of(3)?);
    let out = if args.len() > OUT { of(OUT)? } else { None };
    let found = layers.found(&weight, bias.as_ref(), &args.get_slice(REST, OUT))?;
    let Some(layer) = found else { return Ok(None) };
    let result = layer.calls.get().recalled(py, &x, residual.as_ref(), out.as_ref())?;
    // What writes to an argument returns nothing.
    Ok(result.map(|y| if out.is_some() { py.None().into_bound(py) } else { y }))
}
