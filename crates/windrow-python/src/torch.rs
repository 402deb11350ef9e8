//! The short cut past PyTorch's dispatcher.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

/// What is asked of PyTorch on each call.
struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    is_grad_enabled: Py<PyAny>,
    dispatch_modes: Py<PyAny>,
    is_tracing: Py<PyAny>,
    is_profiling: Py<PyAny>,
}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&'static Torch> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        TORCH.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            let c = torch.getattr("_C")?;
            let autograd = torch.getattr("autograd")?;
            Ok(Torch {
                tensor: torch.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
                parameter: torch.getattr("nn")?.getattr("Parameter")?.cast_into()?.unbind(),
                is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
                dispatch_modes: c.getattr("_len_torch_dispatch_stack")?.unbind(),
                is_tracing: c.getattr("_is_tracing")?.unbind(),
                is_profiling: autograd.getattr("_profiler_enabled")?.unbind(),
            })
        })
    }
}

/// True if PyTorch's dispatcher would do nothing for these tensors (or `None`s) but call the kernel:
/// plain tensors, no gradient to record, no mode, tracer or profiler that wants to see the operator.
/// Then the kernel can be called straight away, which saves most of the cost of a small call.
/// Tensors that a transform like `vmap` has wrapped are plain by type but have no memory: the kernel
/// raises [`NotInPlace`](crate::error::NotInPlace) before it does anything.
#[pyfunction]
#[pyo3(signature = (*tensors))]
pub(crate) fn is_plain(py: Python<'_>, tensors: &Bound<'_, PyTuple>) -> PyResult<bool> {
    let torch = Torch::get(py)?;
    let ask = |what: &Py<PyAny>| what.bind(py).call0()?.is_truthy();
    let mut requires_grad = false;
    for tensor in tensors.iter_borrowed() {
        let kind = tensor.get_type();
        if !kind.is(&torch.tensor) && !kind.is(&torch.parameter) {
            if tensor.is_none() {
                continue;
            }
            return Ok(false);
        }
        requires_grad =
            requires_grad || tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
    }
    Ok(!(requires_grad && ask(&torch.is_grad_enabled)?
        || ask(&torch.dispatch_modes)?
        || ask(&torch.is_tracing)?
        || ask(&torch.is_profiling)?))
}
