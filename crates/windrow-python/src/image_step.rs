//! What a sequence computes between its convolutions: the mean of an image, its product with a gate, sums, pooling,
//! upsampling and copies; and the channels of images that it reads or writes there.

use crate::array::{Array, desc, lie_alike, view};
use crate::call::run;
use crate::error::{IntoPy, NotInPlace};
use crate::output::Output;
use crate::torch::nothing_to_dispatch;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use windrow::internal::{self, Gate, ImageOperation, Window};
use windrow::{Device, Layout, TensorDesc};

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
    /// their strides and padding; the first two of an upsampling say how often rows and columns are repeated. `out`: where
    /// results are written.
    #[staticmethod]
    #[pyo3(signature = (operation, window, x, second=None, out=None))]
    fn of(
        operation: &str,
        window: [usize; 6],
        x: &Bound<'_, PyAny>,
        second: Option<&Bound<'_, PyAny>>,
        out: Option<&Bound<'_, PyAny>>,
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
            "add" => ImageOperation::Add,
            "copy" => ImageOperation::Copy,
            "upsample" => ImageOperation::Upsample(window.size),
            other => {
                let message = format!("there is no operation {other:?} of images");
                return Err(PyValueError::new_err(message));
            }
        };
        let x = Array::import("x", x)?;
        let second = Array::import_option("second", second, None)?;
        let out = Array::import_option("out", out, None)?;
        let all = [Some(&x), second.as_ref(), out.as_ref()];
        if all.into_iter().flatten().any(|array| array.device != Device::Cpu) {
            return Ok(None);
        }
        let (x, second, out) = (x.desc, desc(&second), desc(&out));
        let step = internal::ImageStep::new(operation, &x, second.as_ref(), out.as_ref());
        Ok(step.map(|step| ImageStep { step, x, second }))
    }

    #[pyo3(signature = (x, second=None, out=None))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        second: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if !nothing_to_dispatch(py, true, [x].into_iter().chain(second).chain(out))? {
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
        let mut y = Output::new(py, out, &x, || Ok(*self.step.y()))?;
        if !lie_alike(&y.desc(), self.step.y()) {
            return Ok(None);
        }
        let (given, second, mut to) = (x.view(), view(&second), y.view_mut()?);
        run(py, &x, 0, self.elements(), |_| {
            let second = second.map_or(std::ptr::null(), |second| second.as_ptr().cast());
            // SAFETY: the tensors lie as described, and the result is new or the caller's for writing.
            unsafe { self.step.run(given.as_ptr().cast(), second, to.as_mut_ptr().cast()) };
            Ok(())
        })?;
        y.finish(py, &x.family).map(Some)
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

/// A value of a sequence that is not computed: some channels of another one, or memory for results of several steps.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct ImageView {
    /// The value of which these are channels, and the bytes from its first channel to the first of these.
    pub(crate) of: Option<(TensorDesc, usize)>,
    pub(crate) y: TensorDesc,
}

#[pymethods]
impl ImageView {
    /// Channels of `x`, an image in main memory, from `first` on. None if they do not follow each other.
    #[staticmethod]
    fn channels(x: &Bound<'_, PyAny>, first: usize, count: usize) -> PyResult<Option<Self>> {
        let Array { desc: x, device, .. } = Array::import("x", x)?;
        let (shape, strides) = (x.shape(), x.strides());
        let is_image = shape.len() == 4 && device == Device::Cpu && strides[1] == 1;
        if !is_image || first.checked_add(count).is_none_or(|end| end > shape[1]) {
            return Ok(None);
        }
        let layout = Layout::strided(&[shape[0], count, shape[2], shape[3]], strides).py()?;
        let y = TensorDesc::new(x.dtype, layout);
        Ok(Some(ImageView { of: Some((x, first * x.dtype.size())), y }))
    }

    /// Memory for a tensor like `like`. None if that is not in main memory or has gaps.
    #[staticmethod]
    fn memory(like: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let Array { desc: y, device, .. } = Array::import("like", like)?;
        let has_gaps = y
            .layout
            .extent()
            .is_some_and(|(first, last)| first != 0 || last.unsigned_abs() + 1 != y.layout.len());
        Ok((device == Device::Cpu && !has_gaps).then_some(ImageView { of: None, y }))
    }
}
