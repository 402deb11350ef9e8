//! The short cut past PyTorch's dispatcher.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

/// The functions of PyTorch that every call needs.
struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    is_grad_enabled: Py<PyAny>,
    is_autocast: Py<PyAny>,
    function_modes: Py<PyAny>,
    /// None in builds for the CPU.
    is_capturing: Option<Py<PyAny>>,
    dispatch_modes: Py<PyAny>,
    is_tracing: Py<PyAny>,
    transforms: Py<PyAny>,
    profiler: Py<PyModule>,
    forward_ad: Py<PyModule>,
    increment_version: Py<PyAny>,
    /// True if `increment_version` takes a tuple of tensors, not a tensor.
    takes_many: bool,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    /// The functions; None as long as nobody has imported PyTorch.
    fn if_imported(py: Python<'_>) -> PyResult<Option<&'static Torch>> {
        if let Some(torch) = TORCH.get(py) {
            return Ok(Some(torch));
        }
        let modules = py.import("sys")?.getattr("modules")?;
        if modules.contains("torch")? { Torch::get(py).map(Some) } else { Ok(None) }
    }

    fn get(py: Python<'_>) -> PyResult<&'static Torch> {
        TORCH.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            let c = torch.getattr("_C")?;
            // Newer versions have a function in C++ that takes several; that of Python is slower.
            let several = c.getattr_opt("_increment_version")?;
            let several = several.filter(|f| f.call1((PyTuple::empty(py),)).is_ok());
            let takes_many = several.is_some();
            let increment_version = match several {
                Some(function) => function,
                None => py.import("torch.autograd.graph")?.getattr("increment_version")?,
            };
            Ok(Torch {
                tensor: torch.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
                parameter: torch.getattr("nn")?.getattr("Parameter")?.cast_into()?.unbind(),
                is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
                is_autocast: c.getattr("_is_any_autocast_enabled")?.unbind(),
                function_modes: c.getattr("_len_torch_function_stack")?.unbind(),
                is_capturing: c.getattr_opt("_cuda_isCurrentStreamCapturing")?.map(Bound::unbind),
                dispatch_modes: c.getattr("_len_torch_dispatch_stack")?.unbind(),
                is_tracing: c.getattr("_is_tracing")?.unbind(),
                transforms: c.getattr("_are_functorch_transforms_active")?.unbind(),
                profiler: py.import("torch.autograd.profiler")?.unbind(),
                forward_ad: py.import("torch.autograd.forward_ad")?.unbind(),
                increment_version: increment_version.unbind(),
                takes_many,
            })
        })
    }
}

/// True if PyTorch's dispatcher would do nothing for these tensors but call the kernel: plain
/// tensors, no gradient to record, no forward-mode derivative, no mode, tracer or profiler that
/// wants to see the operator. Then the kernel can be called straight away, which saves most of the
/// cost of a small call.
/// Tensors that a transform like `vmap` has wrapped are plain by type but have no memory: the kernel
/// raises [`NotInPlace`](crate::error::NotInPlace) before it does anything.
///
/// `differentiable` says whether there is a gradient that might be wanted.
pub(crate) fn nothing_to_dispatch<'a, 'py: 'a>(
    py: Python<'py>,
    differentiable: bool,
    tensors: impl IntoIterator<Item = &'a Bound<'py, PyAny>>,
) -> PyResult<bool> {
    let torch = Torch::get(py)?;
    let ask = |what: &Py<PyAny>| what.bind(py).call0()?.is_truthy();
    let records = differentiable && ask(&torch.is_grad_enabled)?;
    for tensor in tensors {
        let kind = tensor.get_type_ptr().cast();
        if kind != torch.tensor.as_ptr() && kind != torch.parameter.as_ptr() {
            return Ok(false);
        }
        if records && tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
            return Ok(false);
        }
    }
    let profiler = torch.profiler.bind(py);
    let is_profiling = || profiler.getattr(intern!(py, "_is_profiler_enabled"))?.is_truthy();
    // Inside of a level, tensors may carry forward-mode derivatives.
    let level = torch.forward_ad.bind(py).getattr(intern!(py, "_current_level"))?;
    let no_level = level.extract::<i64>()? < 0;
    Ok(no_level && !(ask(&torch.dispatch_modes)? || ask(&torch.is_tracing)? || is_profiling()?))
}

/// True if autocast is on.
pub(crate) fn is_autocast(py: Python<'_>) -> PyResult<bool> {
    Torch::get(py)?.is_autocast.bind(py).call0()?.is_truthy()
}

/// True if a mode sees calls of PyTorch's functions.
pub(crate) fn is_seen_by_modes(py: Python<'_>) -> PyResult<bool> {
    Torch::get(py)?.function_modes.bind(py).call0()?.is_truthy()
}

/// True if a CUDA graph captures the current stream.
pub(crate) fn is_capturing(py: Python<'_>) -> PyResult<bool> {
    let ask = Torch::get(py)?.is_capturing.as_ref();
    ask.map_or(Ok(false), |ask| ask.bind(py).call0()?.is_truthy())
}

/// Counts a change of a tensor's memory, so that PyTorch notices where a gradient needs what was
/// there before. Nothing happens for arrays of other libraries.
pub(crate) fn count_change(array: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = array.py();
    if let Some(torch) = Torch::if_imported(py)?
        && array.is_instance(torch.tensor.bind(py))?
    {
        let increment_version = torch.increment_version.bind(py);
        match torch.takes_many {
            true => increment_version.call1(((array,),))?,
            false => increment_version.call1((array,))?,
        };
    }
    Ok(())
}

/// [`count_change`] of several tensors, in one call where PyTorch takes them so.
pub(crate) fn count_changes(py: Python<'_>, arrays: &[&Bound<'_, PyAny>]) -> PyResult<()> {
    let Some(torch) = Torch::if_imported(py)? else { return Ok(()) };
    let plain = |array: &&Bound<'_, PyAny>| array.get_type_ptr().cast() == torch.tensor.as_ptr();
    if torch.takes_many && arrays.iter().all(plain) {
        torch.increment_version.bind(py).call1((PyTuple::new(py, arrays)?,))?;
        return Ok(());
    }
    arrays.iter().try_for_each(|array| count_change(array))
}

/// [`nothing_to_dispatch`] for tensors, and `None`s among them.
#[pyfunction]
#[pyo3(signature = (*tensors))]
pub(crate) fn is_plain(py: Python<'_>, tensors: &Bound<'_, PyTuple>) -> PyResult<bool> {
    let tensors: Vec<_> = tensors.iter().filter(|t| !t.is_none()).collect();
    nothing_to_dispatch(py, true, &tensors)
}

/// True if PyTorch's dispatcher would call the kernel and record it for gradients, and nothing else: no transform of
/// `torch.func` either, which has its own way to do so.
#[pyfunction]
#[pyo3(signature = (*tensors))]
pub(crate) fn is_only_recorded(py: Python<'_>, tensors: &Bound<'_, PyTuple>) -> PyResult<bool> {
    let tensors: Vec<_> = tensors.iter().filter(|t| !t.is_none()).collect();
    let transforms = Torch::get(py)?.transforms.bind(py).call0()?.is_truthy()?;
    Ok(!transforms && nothing_to_dispatch(py, false, &tensors)?)
}
