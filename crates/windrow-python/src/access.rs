//! The access to the memory of arrays: what their types offer, and what their libraries say about them.

use crate::dlpack::{self, ExchangeApi};
use crate::error::NotInPlace;
use pyo3::ffi::{PyObject, PyObject_CallMethodObjArgs, PyTypeObject};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyString, PyType};
use std::borrow::Cow;
use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::Mutex;

/// False where asking would be a waste of time, which counts in a small call: PyTorch negates lazily
/// only the imaginary part of a conjugated tensor, and in such a view every stride is even.
pub(crate) fn may_be_negative(shape: &[usize], strides: &[isize]) -> bool {
    shape.iter().zip(strides).all(|(&n, &s)| n < 2 || s % 2 == 0)
}

/// Refuses elements that PyTorch negates lazily.
pub(crate) fn refuse_negative(arg: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
    if call_method0(object, intern!(object.py(), "is_neg"))?.is_truthy()? {
        return Err(NotInPlace::new_err(format!(
            "the elements of `{arg}` are negated lazily: call resolve_neg()"
        )));
    }
    Ok(())
}

/// The error of an array whose memory cannot be used where it is.
pub(crate) fn not_in_place(arg: &str, object: &Bound<'_, PyAny>, cause: PyErr) -> PyErr {
    let py = object.py();
    let kind = object.get_type().name().map(|n| n.to_string()).unwrap_or_default();
    // PyTorch appends a stack trace.
    let cause = cause.value(py).to_string();
    let cause = cause.lines().next().unwrap_or_default();
    NotInPlace::new_err(format!("`{arg}` ({kind}) cannot be used in place: {cause}"))
}

/// The way to access the memory of a type's objects.
#[derive(Clone, Copy)]
pub(crate) enum Access {
    /// The C functions that the type offers.
    Exchange(Exchange),
    /// PyTorch's attributes.
    Torch,
    /// `__dlpack__`.
    Capsule,
}

#[derive(Clone, Copy)]
pub(crate) struct Exchange {
    pub(crate) api: &'static ExchangeApi,
    /// PyTorch's lazy negation, of which the C functions say nothing.
    pub(crate) can_be_negative: bool,
}

/// `object.name()` without making the bound method, which PyO3 does where the stable ABI of old
/// Python versions is asked for.
fn call_method0<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: valid objects, arguments ended by null; the result is a new reference or null with
    // an exception set.
    unsafe {
        let end = null_mut::<PyObject>();
        let result = PyObject_CallMethodObjArgs(object.as_ptr(), name.as_ptr(), end);
        Bound::from_owned_ptr_or_err(object.py(), result)
    }
}

/// The way to access the object's memory. Answers are cached, because looking them up takes longer than using them.
pub(crate) fn access(object: &Bound<'_, PyAny>) -> PyResult<Access> {
    /// Types that are held for good, so that their addresses stay theirs.
    static KNOWN: Mutex<Vec<(Py<PyType>, Access)>> = Mutex::new(Vec::new());
    /// More types than this only a program has that makes them as it runs.
    const CAPACITY: usize = 16;
    thread_local! {
        /// The one of `KNOWN` asked for last.
        static LAST: Cell<Option<(*mut PyTypeObject, Access)>> = const { Cell::new(None) };
    }
    let kind = object.get_type_ptr();
    if let Some((last, access)) = LAST.get()
        && last == kind
    {
        return Ok(access);
    }
    let found = {
        let known = KNOWN.lock().unwrap_or_else(|e| e.into_inner());
        known.iter().find(|(t, _)| t.as_ptr() == kind.cast()).map(|(_, access)| *access)
    };
    if let Some(access) = found {
        LAST.set(Some((kind, access)));
        return Ok(access);
    }
    let access = find_access(&object.get_type())?;
    let mut known = KNOWN.lock().unwrap_or_else(|e| e.into_inner());
    if known.len() < CAPACITY {
        known.push((object.get_type().unbind(), access));
    }
    Ok(access)
}

fn find_access(kind: &Bound<'_, PyType>) -> PyResult<Access> {
    let py = kind.py();
    let Some(capsule) = kind.getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))? else {
        let modules = py.import("sys")?.getattr("modules")?;
        let torch = modules.call_method1("get", ("torch",))?;
        let is_torch = !torch.is_none() && kind.is_subclass(&torch.getattr("Tensor")?)?;
        return Ok(if is_torch { Access::Torch } else { Access::Capsule });
    };
    let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(Access::Capsule) };
    let table = capsule.pointer_checked(Some(dlpack::EXCHANGE_NAME))?.cast::<ExchangeApi>();
    // SAFETY: the name says what the capsule holds, and the protocol that it lives as long as the
    // process. Of another major version only the version is read.
    let api = unsafe {
        if (*table.as_ptr()).version.major != dlpack::VERSION.major {
            return Ok(Access::Capsule);
        }
        &*table.as_ptr()
    };
    if api.borrow.is_none() {
        return Ok(Access::Capsule);
    }
    let can_be_negative = kind.hasattr(intern!(py, "is_neg"))?;
    Ok(Access::Exchange(Exchange { api, can_be_negative }))
}

/// Whether an array is JAX's.
pub(crate) fn is_jax(object: &Bound<'_, PyAny>) -> bool {
    let module = object.get_type().module();
    module.is_ok_and(|m| m.to_cow().is_ok_and(|m| m.starts_with("jax")))
}

/// Whether PyTorch, which is imported, is built for ROCm.
pub(crate) fn is_for_rocm(py: Python<'_>) -> PyResult<bool> {
    let version = py.import(intern!(py, "torch"))?.getattr(intern!(py, "version"))?;
    Ok(!version.getattr(intern!(py, "hip"))?.is_none())
}

/// Whether an array is one of NumPy's of bf16, in this machine's order of bytes.
pub(crate) fn is_numpy_bf16(object: &Bound<'_, PyAny>) -> bool {
    let py = object.py();
    let dtype = || -> PyResult<bool> {
        let module = object.get_type().module()?;
        let dtype = object.getattr(intern!(py, "dtype"))?;
        let name = dtype.getattr(intern!(py, "name"))?;
        // Of the other byte order NumPy exports no type, and neither is this one read as 16-bit integers.
        let is_native = dtype.getattr(intern!(py, "isnative"))?.is_truthy()?;
        let is_bf16 = name.extract::<Cow<'_, str>>()? == "bfloat16";
        Ok(module.to_cow()? == "numpy" && is_bf16 && is_native)
    };
    dtype().unwrap_or(false)
}
