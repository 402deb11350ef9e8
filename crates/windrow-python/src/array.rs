//! Arrays of any library, borrowed through DLPack for the length of a call.

use crate::access::{
    Access, Exchange, access, is_for_rocm, is_jax, is_numpy_bf16, may_be_negative, not_in_place,
    refuse_negative,
};
use crate::dlpack::{self, DLDataType, DLTensor, ExchangeApi};
use crate::error::{IntoPy, NotInPlace, exception};
use crate::torch::count_change;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::borrow::Cow;
use std::ffi::c_void;
use windrow::cuda::DeviceTensor;
use windrow::{DType, Device, MAX_RANK, TensorDesc, TensorMut, TensorRef};

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
    staged: Option<Staged>,
}

/// A copy on a GPU that the call works with, and the element at index zero of its origin.
struct Staged {
    tensor: DeviceTensor,
    host: *mut u8,
}

/// The library that an array comes from, which decides what a result is returned as.
#[derive(Clone)]
pub(crate) enum Family<'py> {
    /// A type with the C exchange functions, like PyTorch's.
    Exchange(&'static ExchangeApi, Bound<'py, PyAny>),
    /// A tensor of PyTorch before 2.10, which has none. Its `__dlpack__` refuses tensors that require
    /// a gradient and changes strides, so it is asked for its parts instead.
    Torch(Bound<'py, PyAny>),
    /// A NumPy array of `ml_dtypes.bfloat16`, which NumPy itself cannot export: it travels as
    /// 16-bit integers.
    NumPyBf16(Bound<'py, PyAny>),
    /// Everything else: the object tells.
    Other(Bound<'py, PyAny>),
}

impl<'py> Array<'py> {
    /// Borrows the memory of an object that offers `__dlpack__`.
    pub(crate) fn import(arg: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        match access(object)? {
            Access::Exchange(exchange) => Self::borrow(arg, object, exchange),
            Access::Torch => Self::from_torch(arg, object),
            Access::Capsule => Self::from_capsule(arg, object, None),
        }
    }

    /// [`Array::import`] for work on `device`, if one is named: an array in main memory is copied
    /// there.
    pub(crate) fn import_on(
        arg: &'static str,
        object: &Bound<'py, PyAny>,
        device: Option<Device>,
    ) -> PyResult<Self> {
        let array = Self::import(arg, object)?;
        match device {
            Some(device) if device == array.device => Ok(array),
            Some(gpu) if array.device == Device::Cpu => array.stage(object.py(), gpu),
            Some(device) => Err(PyValueError::new_err(format!(
                "`{arg}` is on {}, expected {device}",
                array.device
            ))),
            None => Ok(array),
        }
    }

    /// [`Array::import_on`] where `None` means that the argument was not given.
    pub(crate) fn import_option(
        arg: &'static str,
        object: Option<&Bound<'py, PyAny>>,
        device: Option<Device>,
    ) -> PyResult<Option<Self>> {
        object.map(|o| Self::import_on(arg, o, device)).transpose()
    }

    fn stage(mut self, py: Python<'_>, gpu: Device) -> PyResult<Self> {
        let view = self.view();
        let tensor = py.detach(|| DeviceTensor::from_host(&view, gpu)).py()?;
        let host = self.data.cast();
        self.data = tensor.as_ref().as_ptr().cast_mut().cast();
        self.device = tensor.device();
        self.staged = Some(Staged { tensor, host });
        Ok(self)
    }

    /// True if the array is a copy of one in main memory.
    pub(crate) fn is_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// Brings what was written on a GPU into the caller's memory, if that is elsewhere.
    pub(crate) fn fetch(&self, py: Python<'_>) -> PyResult<()> {
        match &self.staged {
            Some(staged) => fetch(py, &staged.tensor, staged.host).py(),
            None => Ok(()),
        }
    }

    fn borrow(arg: &'static str, object: &Bound<'py, PyAny>, exchange: Exchange) -> PyResult<Self> {
        let py = object.py();
        let mut tensor = std::mem::MaybeUninit::<DLTensor>::uninit();
        let borrow = exchange.api.borrow.expect("find_access returns only tables that can borrow");
        // SAFETY: the table was found on the object's type; it fills the tensor or fails.
        if unsafe { borrow(object.as_ptr(), tensor.as_mut_ptr()) } != 0 {
            let cause = PyErr::fetch(py);
            return Err(not_in_place(arg, object, cause));
        }
        // SAFETY: filled, and shape and strides live as long as the object.
        unsafe {
            let family = Family::Exchange(exchange.api, object.clone());
            let array = Self::from_tensor(arg, &tensor.assume_init(), false, family, None)?;
            if exchange.can_be_negative && may_be_negative(array.desc.shape(), array.desc.strides())
            {
                refuse_negative(arg, object)?;
            }
            Ok(array)
        }
    }

    fn from_torch(arg: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let parts = || -> PyResult<_> {
            let device = object.getattr(intern!(py, "device"))?;
            let device_type = device.getattr(intern!(py, "type"))?;
            let device_type = match &*device_type.extract::<Cow<'_, str>>()? {
                "cpu" => dlpack::CPU,
                // PyTorch's build for ROCm calls its devices so, too.
                "cuda" if is_for_rocm(py)? => dlpack::ROCM,
                "cuda" => dlpack::CUDA,
                other => {
                    return Err(PyBufferError::new_err(format!("its device is {other}")));
                }
            };
            let device_id: Option<i32> = device.getattr(intern!(py, "index"))?.extract()?;
            let dtype = object.getattr(intern!(py, "dtype"))?.str()?;
            let dtype = dtype.to_cow()?;
            let dtype = dtype.trim_start_matches("torch.");
            let dtype = DLDataType::from_name(dtype)
                .ok_or_else(|| PyTypeError::new_err(format!("`{arg}` is {dtype}")))?;
            let data: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
            let shape: Vec<i64> = object.getattr(intern!(py, "shape"))?.extract()?;
            let strides: Vec<i64> = object.call_method0(intern!(py, "stride"))?.extract()?;
            let device = dlpack::DLDevice { device_type, device_id: device_id.unwrap_or(0) };
            Ok((data, device, dtype, shape, strides))
        };
        let (data, device, dtype, mut shape, mut strides) =
            parts().map_err(|e| not_in_place(arg, object, e))?;
        refuse_negative(arg, object)?;
        let tensor = DLTensor {
            data: std::ptr::with_exposed_provenance_mut(data),
            device,
            ndim: shape.len() as i32,
            dtype,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        // SAFETY: shape and strides have one number for each dimension, and the memory is the
        // object's.
        unsafe { Self::from_tensor(arg, &tensor, false, Family::Torch(object.clone()), None) }
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
        // The legacy default stream, on which arrays of unknown libraries are worked on: DLPack has a number for each
        // kind of device.
        match device_type {
            dlpack::CUDA => kwargs.set_item(intern!(py, "stream"), 1)?,
            dlpack::ROCM => kwargs.set_item(intern!(py, "stream"), 0)?,
            _ => {}
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
                return Err(not_in_place(arg, object, e));
            }
            Err(e) => return Err(e),
        };
        let family = Family::Other(object.clone());
        // JAX says of its arrays that they cannot be changed, but not through DLPack.
        let immutable = is_jax(object);
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
                let read_only = immutable || managed.flags & dlpack::FLAG_READ_ONLY != 0;
                let mut tensor = std::ptr::read(&raw const managed.dl_tensor);
                relabel(&mut tensor, bf16);
                Self::from_tensor(arg, &tensor, read_only, family, Some(capsule))
            } else {
                let managed = capsule
                    .pointer_checked(Some(dlpack::UNVERSIONED_NAME))?
                    .cast::<dlpack::DLManagedTensor>();
                let mut tensor = std::ptr::read(&raw const managed.as_ref().dl_tensor);
                relabel(&mut tensor, bf16);
                Self::from_tensor(arg, &tensor, immutable, family, Some(capsule))
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
                "`{arg}` is on a device of DLPack type {}, expected the CPU, CUDA or ROCm",
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
        let desc = TensorDesc::new(dtype, layout);
        Ok(Array { arg, data, desc, device, family, read_only, _capsule: capsule, staged: None })
    }

    /// The address of the element at index zero.
    pub(crate) fn address(&self) -> *mut c_void {
        self.data
    }

    /// The array as an input.
    pub(crate) fn view(&self) -> TensorRef<'_> {
        // SAFETY: the memory is as described while the object lives, and Python code that wrote
        // to it during the call would be racing in any library.
        unsafe { TensorRef::from_raw(self.data, self.desc, self.device) }
    }

    /// True if its elements have the type and lie as those of a tensor that `desc` describes, whatever the strides of
    /// dimensions of one element.
    pub(crate) fn lies_as(&self, desc: &TensorDesc) -> bool {
        lie_alike(&self.desc, desc)
    }

    /// [`Array::view`], with the strides of `desc` if it lies so.
    pub(crate) fn view_as(&self, desc: &TensorDesc) -> TensorRef<'_> {
        if !self.lies_as(desc) {
            return self.view();
        }
        // SAFETY: as there; the same elements.
        unsafe { TensorRef::from_raw(self.data, *desc, self.device) }
    }

    /// The caller's array as an output: a change that its library is told of.
    pub(crate) fn view_changed(&self) -> PyResult<TensorMut<'_>> {
        let view = self.view_mut()?;
        match &self.family {
            Family::Exchange(_, object) | Family::Torch(object) => count_change(object)?,
            Family::NumPyBf16(_) | Family::Other(_) => {}
        }
        Ok(view)
    }

    /// The array as an output.
    pub(crate) fn view_mut(&self) -> PyResult<TensorMut<'_>> {
        if self.read_only {
            return Err(PyValueError::new_err(format!("`{}` is read-only", self.arg)));
        }
        // SAFETY: the memory is as described while the object lives, and may be written; plans check that
        // outputs do not overlap inputs.
        unsafe { TensorMut::from_raw(self.data, self.desc, self.device) }.map_err(exception)
    }
}

/// True if tensors of these types, shapes and strides have the same elements at the same addresses.
pub(crate) fn lie_alike(a: &TensorDesc, b: &TensorDesc) -> bool {
    let strides_agree = |d: usize| a.shape()[d] < 2 || a.strides()[d] == b.strides()[d];
    a.dtype == b.dtype && a.shape() == b.shape() && (0..a.shape().len()).all(strides_agree)
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

/// Copies the elements of `tensor` to where `to` is the element at index zero and strides are the
/// same.
pub(crate) fn fetch(py: Python<'_>, tensor: &DeviceTensor, to: *mut u8) -> windrow::Result<()> {
    let elements = py.detach(|| tensor.to_host())?;
    let layout = &tensor.desc().layout;
    let (shape, size) = (layout.shape(), tensor.desc().dtype.size());
    let mut index = [0; MAX_RANK];
    for element in elements.as_bytes().chunks_exact(size) {
        let offset = layout.offset(&index[..shape.len()]) * size as isize;
        // SAFETY: `to` is the origin of memory with this layout, which may be written.
        unsafe { to.offset(offset).copy_from_nonoverlapping(element.as_ptr(), size) };
        for d in (0..shape.len()).rev() {
            index[d] += 1;
            if index[d] < shape[d] {
                break;
            }
            index[d] = 0;
        }
    }
    Ok(())
}
