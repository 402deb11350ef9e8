//! Arrays of any library, borrowed through DLPack for the length of a call.

use crate::dlpack::{self, DLDataType, DLTensor, ExchangeApi};
use crate::error::{IntoPy, NotInPlace, exception};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyType};
use std::ffi::c_void;
use std::sync::Mutex;
use windrow::{DType, Device, TensorDesc, TensorMut, TensorRef};

/// The memory of an array that belongs to a Python object.
///
/// It is valid as long as the object is neither freed nor resized; functions hold their arguments
/// for the length of the call.
pub(crate) struct Array<'py> {
    arg: &'static str,
    data: *mut c_void,
    pub(crate) desc: TensorDesc,
    pub(crate) device: Device,
    pub(crate) family: Family<'py>,
    read_only: bool,
    /// Keeps what `data`, shape and strides were read from.
    _capsule: Option<Bound<'py, PyCapsule>>,
}

/// The library that an array comes from, which decides what a result is returned as.
#[derive(Clone)]
pub(crate) enum Family<'py> {
    /// A type with the C exchange functions, like PyTorch's.
    Exchange(&'static ExchangeApi, Bound<'py, PyAny>),
    /// A NumPy array of `ml_dtypes.bfloat16`, which NumPy itself cannot export: it travels as
    /// 16-bit integers.
    NumPyBf16(Bound<'py, PyAny>),
    /// Everything else: the object tells.
    Other(Bound<'py, PyAny>),
}

impl<'py> Array<'py> {
    /// Borrows the memory of an object that offers `__dlpack__`.
    pub(crate) fn import(arg: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        match exchange(object)? {
            Some(exchange) => Self::borrow(arg, object, exchange),
            None => Self::from_capsule(arg, object, None),
        }
    }

    /// [`Array::import`] where `None` means that the argument was not given.
    pub(crate) fn import_option(
        arg: &'static str,
        object: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Self>> {
        object.map(|o| Self::import(arg, o)).transpose()
    }

    fn borrow(arg: &'static str, object: &Bound<'py, PyAny>, exchange: Exchange) -> PyResult<Self> {
        let py = object.py();
        if exchange.can_be_negative && object.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            return Err(NotInPlace::new_err(format!(
                "the elements of `{arg}` are negated lazily: call resolve_neg()"
            )));
        }
        let mut tensor = std::mem::MaybeUninit::<DLTensor>::uninit();
        let borrow =
            exchange.api.borrow.expect("find_exchange returns only tables that can borrow");
        // SAFETY: the table was found on the object's type; it fills the tensor or fails.
        if unsafe { borrow(object.as_ptr(), tensor.as_mut_ptr()) } != 0 {
            let cause = PyErr::fetch(py);
            return Err(not_in_place(arg, object, &cause));
        }
        // SAFETY: filled, and shape and strides live as long as the object.
        unsafe {
            let family = Family::Exchange(exchange.api, object.clone());
            Self::from_tensor(arg, &tensor.assume_init(), false, family, None)
        }
    }

    fn from_capsule(
        arg: &'static str,
        object: &Bound<'py, PyAny>,
        bf16: Option<DLDataType>,
    ) -> PyResult<Self> {
        let py = object.py();
        let Ok(dlpack) = object.getattr(intern!(py, "__dlpack__")) else {
            return Err(PyTypeError::new_err(format!(
                "`{arg}` is {}, expected an array with `__dlpack__`",
                object.get_type().name()?
            )));
        };
        let kwargs = PyDict::new(py);
        let (device_type, _): (i32, i32) =
            object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        if device_type == dlpack::CUDA {
            // The legacy default stream, on which arrays of unknown libraries are worked on.
            kwargs.set_item(intern!(py, "stream"), 1)?;
        }
        kwargs.set_item(intern!(py, "max_version"), (1, 0))?;
        let capsule = dlpack.call((), Some(&kwargs)).or_else(|e| {
            if !e.is_instance_of::<PyTypeError>(py) {
                return Err(e);
            }
            // A library from before DLPack 1.0 does not know the argument.
            kwargs.del_item(intern!(py, "max_version"))?;
            dlpack.call((), Some(&kwargs))
        });
        let capsule = match capsule {
            Ok(capsule) => capsule.cast_into::<PyCapsule>()?,
            Err(e) if e.is_instance_of::<PyBufferError>(py) => {
                if bf16.is_none() && is_numpy_bf16(object) {
                    let bits = object.call_method1(intern!(py, "view"), ("uint16",))?;
                    let mut array = Self::from_capsule(arg, &bits, Some(DLDataType::UINT16))?;
                    array.family = Family::NumPyBf16(object.clone());
                    return Ok(array);
                }
                return Err(not_in_place(arg, object, &e));
            }
            Err(e) => return Err(e),
        };
        let family = Family::Other(object.clone());
        // SAFETY: the capsule's name says which structure it holds. The capsule is kept and not
        // taken over, so the structure lives as long as the array and is freed with the capsule.
        unsafe {
            if capsule.is_valid_checked(Some(dlpack::VERSIONED_NAME)) {
                let managed = capsule
                    .pointer_checked(Some(dlpack::VERSIONED_NAME))?
                    .cast::<dlpack::DLManagedTensorVersioned>();
                let managed = managed.as_ref();
                if managed.version.major != dlpack::VERSION.major {
                    return Err(PyBufferError::new_err(format!(
                        "`{arg}` is exported by DLPack version {}, expected 1",
                        managed.version.major
                    )));
                }
                let read_only = managed.flags & dlpack::FLAG_READ_ONLY != 0;
                let mut tensor = std::ptr::read(&raw const managed.dl_tensor);
                relabel(&mut tensor, bf16);
                Self::from_tensor(arg, &tensor, read_only, family, Some(capsule))
            } else {
                let managed = capsule
                    .pointer_checked(Some(dlpack::UNVERSIONED_NAME))?
                    .cast::<dlpack::DLManagedTensor>();
                let mut tensor = std::ptr::read(&raw const managed.as_ref().dl_tensor);
                relabel(&mut tensor, bf16);
                Self::from_tensor(arg, &tensor, false, family, Some(capsule))
            }
        }
    }

    /// # Safety
    /// The tensor's shape and strides must be readable, and its memory must be as described for as
    /// long as the array lives.
    unsafe fn from_tensor(
        arg: &'static str,
        tensor: &DLTensor,
        read_only: bool,
        family: Family<'py>,
        capsule: Option<Bound<'py, PyCapsule>>,
    ) -> PyResult<Self> {
        let Some(dtype) = tensor.dtype.dtype() else {
            return Err(PyTypeError::new_err(format!(
                "`{arg}` is {}, expected f32, f16, bf16, or i32 or i64 where the argument is an \
                 index",
                tensor.dtype.name()
            )));
        };
        let Some(device) = tensor.device.device() else {
            return Err(PyValueError::new_err(format!(
                "`{arg}` is on a device of DLPack type {}, expected the CPU or CUDA",
                tensor.device.device_type
            )));
        };
        // SAFETY: shape and strides are readable.
        let layout = unsafe { tensor.layout(arg) }.py()?;
        let data = tensor.data.wrapping_byte_add(tensor.byte_offset as usize);
        if tensor.data.is_null() && !layout.is_empty() {
            return Err(NotInPlace::new_err(format!("`{arg}` has no memory")));
        }
        if device == Device::Cpu && !data.addr().is_multiple_of(dtype.size()) {
            return Err(PyValueError::new_err(format!(
                "`{arg}` lies at an address that is no multiple of its element size ({})",
                dtype.size()
            )));
        }
        let desc = TensorDesc { dtype, layout };
        Ok(Array { arg, data, desc, device, family, read_only, _capsule: capsule })
    }

    /// The array as an input.
    pub(crate) fn view(&self) -> TensorRef<'_> {
        // SAFETY: the memory is as described while the object lives, and Python code that wrote
        // to it during the call would be racing in any library.
        unsafe { TensorRef::from_raw(self.data, self.desc, self.device) }
    }

    /// The array as an output.
    pub(crate) fn view_mut(&self) -> PyResult<TensorMut<'_>> {
        if self.read_only {
            return Err(PyValueError::new_err(format!("`{}` is read-only", self.arg)));
        }
        // SAFETY: as above; plans check that outputs do not overlap inputs.
        unsafe { TensorMut::from_raw(self.data, self.desc, self.device) }.map_err(exception)
    }
}

/// An optional array as an optional input.
pub(crate) fn view<'a>(array: &'a Option<Array<'_>>) -> Option<TensorRef<'a>> {
    array.as_ref().map(Array::view)
}

/// An optional array's type, shape and strides.
pub(crate) fn desc(array: &Option<Array<'_>>) -> Option<TensorDesc> {
    array.as_ref().map(|a| a.desc)
}

fn relabel(tensor: &mut DLTensor, bf16: Option<DLDataType>) {
    if bf16 == Some(tensor.dtype) {
        tensor.dtype = DLDataType::new(DType::BF16);
    }
}

fn not_in_place(arg: &str, object: &Bound<'_, PyAny>, cause: &PyErr) -> PyErr {
    let py = object.py();
    let kind = object.get_type().name().map(|n| n.to_string()).unwrap_or_default();
    // PyTorch appends a stack trace.
    let cause = cause.value(py).to_string();
    let cause = cause.lines().next().unwrap_or_default();
    NotInPlace::new_err(format!("`{arg}` ({kind}) cannot be used in place: {cause}"))
}

/// What a type offers beside `__dlpack__`.
#[derive(Clone, Copy)]
struct Exchange {
    api: &'static ExchangeApi,
    /// PyTorch's lazy negation, of which the C functions say nothing.
    can_be_negative: bool,
}

/// The C functions of the object's type, if it has any. Answers are kept: looking them up takes
/// longer than using them.
fn exchange(object: &Bound<'_, PyAny>) -> PyResult<Option<Exchange>> {
    static KNOWN: Mutex<Vec<(Py<PyType>, Option<Exchange>)>> = Mutex::new(Vec::new());
    /// More types than this only a program has that makes them as it runs.
    const CAPACITY: usize = 16;
    let kind = object.get_type_ptr();
    {
        let known = KNOWN.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((_, exchange)) = known.iter().find(|(t, _)| t.as_ptr() == kind.cast()) {
            return Ok(*exchange);
        }
    }
    let exchange = find_exchange(&object.get_type())?;
    let mut known = KNOWN.lock().unwrap_or_else(|e| e.into_inner());
    if known.len() < CAPACITY {
        known.push((object.get_type().unbind(), exchange));
    }
    Ok(exchange)
}

fn find_exchange(kind: &Bound<'_, PyType>) -> PyResult<Option<Exchange>> {
    let py = kind.py();
    let name = intern!(py, "__dlpack_c_exchange_api__");
    let Some(capsule) = kind.getattr_opt(name)? else { return Ok(None) };
    let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
    let table = capsule.pointer_checked(Some(dlpack::EXCHANGE_NAME))?.cast::<ExchangeApi>();
    // SAFETY: the name says what the capsule holds, and the protocol that it lives as long as the
    // process. Of another major version only the version is read.
    let api = unsafe {
        if (*table.as_ptr()).version.major != dlpack::VERSION.major {
            return Ok(None);
        }
        &*table.as_ptr()
    };
    let can_be_negative = kind.hasattr(intern!(py, "is_neg"))?;
    Ok(api.borrow.is_some().then_some(Exchange { api, can_be_negative }))
}

fn is_numpy_bf16(object: &Bound<'_, PyAny>) -> bool {
    let py = object.py();
    let dtype = || -> PyResult<bool> {
        let module = object.get_type().module()?;
        let name = object.getattr(intern!(py, "dtype"))?.getattr(intern!(py, "name"))?;
        Ok(module.to_str()? == "numpy" && name.extract::<&str>()? == "bfloat16")
    };
    dtype().unwrap_or(false)
}
