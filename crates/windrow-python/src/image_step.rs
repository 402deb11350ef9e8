//! What a sequence computes between its convolutions: the mean of an image, its product with a gate, pooling, and the
//! copy of its image.

use crate::array::{Array, lie_alike};
use crate::call::run;
use crate::error::{IntoPy, NotInPlace};
use crate::output::Output;
use crate::torch::nothing_to_dispatch;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use windrow::internal::{self, Gate, ImageOperation, Window};
use windrow::{Device, Placed, TensorDesc};

/// An operation of images of one size, in f32 on the CPU. With other tensors than those that it was
/// made for, or such that PyTorch's dispatcher has something to do for, a call does nothing and returns None.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct ImageStep {
    step: internal::ImageStep,
    x: TensorDesc,
    second: Option<TensorDesc>,
}

#[pymethods]
impl ImageStep {
    /// None if the operation is computed for other tensors only. `window`: height and width of a pooling's windows,
    /// their strides and padding.
    #[staticmethod]
    fn of(
        operation: &str,
        window: [usize; 6],
        x: &Bound<'_, PyAny>,
        second: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Self>> {
        let [h, w, down, right, top, left] = window;
        let window = Window { size: [h, w], stride: [down, right], padding: [top, left] };
        let operation = match operation {
            "mean" => ImageOperation::Mean,
            "sigmoid" => ImageOperation::Gate(Gate::Sigmoid),
            "hardsigmoid" => ImageOperation::Gate(Gate::HardSigmoid),
            "max_pool2d" => ImageOperation::MaxPool(window),
            "avg_pool2d" => ImageOperation::AveragePool(window),
            "channels_last" => ImageOperation::ChannelsLast,
            other => {
                let message = format!("there is no operation {other:?} of images");
                return Err(PyValueError::new_err(message));
            }
        };
        let x = Array::import("x", x)?;
        let second = Array::import_option("second", second, None)?;
        if [Some(&x), second.as_ref()].into_iter().flatten().any(|a| a.device != Device::Cpu) {
            return Ok(None);
        }
        let (x, second) = (x.desc, second.map(|second| second.desc));
        let step = internal::ImageStep::new(operation, &x, second.as_ref());
        Ok(step.map(|step| ImageStep { step, x, second }))
    }

    #[pyo3(signature = (x, second=None))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        second: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if !nothing_to_dispatch(py, true, [x].into_iter().chain(second))? {
            return Ok(None);
        }
        let imported = || {
            let second = Array::import_option("second", second, None)?;
            PyResult::Ok((Array::import("x", x)?, second))
        };
        let (x, second) = match imported() {
            Err(e) if e.is_instance_of::<NotInPlace>(py) => return Ok(None),
            arrays => arrays?,
        };
        let is_like = |array: &Array<'_>, desc: &TensorDesc| {
            array.device == Device::Cpu && array.lies_as(desc)
        };
        let seconds_agree = match (&second, &self.second) {
            (Some(array), Some(desc)) => is_like(array, desc),
            (None, None) => true,
            _ => false,
        };
        if !is_like(&x, &self.x) || !seconds_agree {
            return Ok(None);
        }
        let mut y = Placed::output(*self.step.y(), Device::Cpu).py()?;
        let (given, gate) = (x.view(), second.as_ref().map(Array::view));
        run(py, &x, 0, self.elements(), |_| {
            let gate = gate.map_or(std::ptr::null(), |gate| gate.as_ptr().cast());
            let to = y.as_mut()?.as_mut_ptr().cast();
            // SAFETY: the tensors lie as described, and the result is new.
            unsafe { self.step.run(given.as_ptr().cast(), gate, to) };
            Ok(())
        })?;
        Output::Own(y).finish(py, &x.family).map(Some)
    }
}

impl ImageStep {
    pub(crate) fn step(&self) -> &internal::ImageStep {
        &self.step
    }

    pub(crate) fn x(&self) -> &TensorDesc {
        &self.x
    }

    pub(crate) fn second(&self) -> Option<&TensorDesc> {
        self.second.as_ref()
    }

    /// True if the result may be written over a value that lies as the image, which nobody reads after it.
    pub(crate) fn may_replace(&self, value: &TensorDesc) -> bool {
        self.step.may_be_in_place() && value == self.step.y() && lie_alike(value, &self.x)
    }

    pub(crate) fn elements(&self) -> usize {
        self.x.layout.len()
    }
}
