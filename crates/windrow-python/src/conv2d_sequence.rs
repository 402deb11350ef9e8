//! Convolutions that follow each other, in one call.

use crate::array::{Array, desc, lie_alike, view};
use crate::call::run;
use crate::conv2d_call::Conv2dCall;
use crate::error::NotInPlace;
use crate::output::Output;
use crate::torch::nothing_to_dispatch;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use windrow::{Conv2dArgs, Device, Placed, TensorDesc, TensorRef};

/// Calls on the CPU of which each reads images, or results of calls before it. With other tensors than those that the
/// calls were made for, or such that PyTorch's dispatcher has something to do for, nothing is done and None returned.
///
/// Images and results are values, numbered in this order.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct Conv2dSequence {
    images: usize,
    steps: Vec<Step>,
    results: Vec<usize>,
    bytes: usize,
    elements: usize,
}

struct Step {
    call: Py<Conv2dCall>,
    image: usize,
    residual: Option<usize>,
    /// Values that nobody reads after it.
    last_read: Vec<usize>,
}

type Filter<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

#[pymethods]
impl Conv2dSequence {
    /// Steps are calls, with the values that each reads and adds.
    #[new]
    fn new(
        images: usize,
        steps: Vec<(Py<Conv2dCall>, usize, Option<usize>)>,
        results: Vec<usize>,
    ) -> PyResult<Self> {
        let values = images + steps.len();
        let mut last = vec![None; values];
        for (i, (call, image, residual)) in steps.iter().enumerate() {
            let spec = call.get().plan().spec();
            let fits = |value: usize, desc: &TensorDesc| match value.checked_sub(images) {
                None => true,
                Some(step) => step < i && lie_alike(&steps[step].0.get().plan().spec().y, desc),
            };
            let fits_residual = residual.is_none_or(|value| fits(value, &spec.y));
            if call.get().device() != Device::Cpu
                || residual.is_some() != spec.residual
                || !fits(*image, &spec.x)
                || !fits_residual
            {
                let message = format!("step {i} does not fit those before it");
                return Err(PyValueError::new_err(message));
            }
            for value in residual.iter().chain([image]) {
                last[*value] = Some(i);
            }
        }
        let is_wrong = |(i, value): (usize, &usize)| {
            !(images..values).contains(value) || results[..i].contains(value)
        };
        if steps.is_empty() || results.iter().enumerate().any(is_wrong) {
            return Err(PyValueError::new_err("results are no different ones of steps"));
        }
        results.iter().for_each(|&value| last[value] = None);
        let bytes = steps.iter().map(|(call, ..)| call.get().bytes()).max().unwrap_or(0);
        let elements = steps.iter().map(|(call, ..)| call.get().elements()).max().unwrap_or(0);
        let steps = steps.into_iter().enumerate().map(|(i, (call, image, residual))| {
            let last_read = (images..values).filter(|&value| last[value] == Some(i)).collect();
            Step { call, image, residual, last_read }
        });
        Ok(Conv2dSequence { images, steps: steps.collect(), results, bytes, elements })
    }

    fn __call__<'py>(
        &self,
        py: Python<'py>,
        images: Vec<Bound<'py, PyAny>>,
        filters: Vec<Filter<'py>>,
    ) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let of_filters = filters.iter().flat_map(|(weight, bias)| bias.iter().chain([weight]));
        if images.len() != self.images
            || filters.len() != self.steps.len()
            || !nothing_to_dispatch(py, true, images.iter().chain(of_filters))?
        {
            return Ok(None);
        }
        let imported = || {
            let images = images.iter().map(|image| Array::import("x", image));
            let filters = filters.iter().map(|(weight, bias)| {
                let weight = Array::import("weight", weight)?;
                PyResult::Ok((weight, Array::import_option("bias", bias.as_ref(), None)?))
            });
            PyResult::Ok((
                images.collect::<PyResult<Vec<_>>>()?,
                filters.collect::<PyResult<Vec<_>>>()?,
            ))
        };
        let (images, filters) = match imported() {
            Err(e) if e.is_instance_of::<NotInPlace>(py) => return Ok(None),
            arrays => arrays?,
        };
        let mut calls = Vec::with_capacity(self.steps.len());
        for (step, (weight, bias)) in self.steps.iter().zip(&filters) {
            let call = step.call.get();
            let spec = call.plan().spec();
            let is_image = |value: usize, planned: &TensorDesc| match images.get(value) {
                None => true,
                Some(image) => image.device == Device::Cpu && image.lies_as(planned),
            };
            if !is_image(step.image, &spec.x)
                || step.residual.is_some_and(|value| !is_image(value, &spec.y))
                || weight.device != Device::Cpu
                || (&weight.desc, &desc(bias)) != (&spec.w, &spec.bias)
            {
                return Ok(None);
            }
            let Some(weights) = call.weights(py, weight) else { return Ok(None) };
            calls.push((step, call.plan(), weights, view(bias)));
        }
        let given: Vec<_> = images.iter().map(Array::view).collect();
        let computed = run(py, &images[0], self.bytes, self.elements, |workspace| {
            let mut computed: Vec<Option<Placed>> = Vec::with_capacity(calls.len());
            for (step, plan, weights, bias) in calls {
                let spec = plan.spec();
                let mut y = Placed::output(spec.y, Device::Cpu)?;
                let value = |value: usize, planned| match value.checked_sub(given.len()) {
                    None => lying_as(given[value], planned),
                    Some(i) => {
                        let value = computed[i].as_ref().expect("it goes after its last reader");
                        lying_as(value.as_ref(), planned)
                    }
                };
                let args = Conv2dArgs::new(value(step.image, &spec.x), weights)
                    .with_bias(bias)
                    .with_residual(step.residual.map(|residual| value(residual, &spec.y)));
                plan.run(&args, y.as_mut()?, workspace)?;
                computed.push(Some(y));
                step.last_read.iter().for_each(|&value| computed[value - given.len()] = None);
            }
            Ok(computed)
        });
        let mut computed = computed?;
        let finished = self.results.iter().map(|&value| {
            let result = computed[value - self.images].take();
            Output::Own(result.expect("each result is named once")).finish(py, &images[0].family)
        });
        finished.collect::<PyResult<_>>().map(Some)
    }
}

/// The tensor with the strides of `planned`, where its elements lie as those.
fn lying_as<'a>(tensor: TensorRef<'a>, planned: &TensorDesc) -> TensorRef<'a> {
    // SAFETY: the same elements: `new` has compared steps, and each call its images.
    unsafe { TensorRef::from_raw(tensor.as_ptr().cast_mut().cast(), *planned, Device::Cpu) }
}
