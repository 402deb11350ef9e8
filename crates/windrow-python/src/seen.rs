//! A tensor that is compared with what it was.

use crate::array::Array;
use crate::glance::{Form, glance};
use pyo3::intern;
use pyo3::prelude::*;
use windrow::{Device, TensorDesc, TensorRef};

/// Dimensions of tensors that are compared at a glance: those of filters.
const RANK: usize = 5;
/// The bytes that a comparison reads of a Python object, of PyTorch's structure behind it and of that of its memory. With
/// other numbers it takes a different time only.
const READ: [usize; 3] = [48, 192, 48];
const LINE: usize = 64;

/// A tensor with type, shape, strides, device and address as they were.
pub(crate) struct Seen {
    object: Py<PyAny>,
    kind: usize,
    /// None if more has to be looked at.
    form: Option<Form<RANK>>,
    /// None for types that the library does not know.
    known: Option<(TensorDesc, Device)>,
    address: usize,
}

impl Seen {
    pub(crate) fn of(arg: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (form, array) = (glance(object)?, Array::import(arg, object));
        let known = array.as_ref().ok().map(|array| (array.desc, array.device));
        let address = match (&form, array) {
            (Some((_, address)), _) => *address,
            (None, array) => array?.address(),
        };
        Ok(Seen {
            object: object.clone().unbind(),
            kind: object.get_type_ptr().addr(),
            form: form.map(|(form, _)| form),
            known,
            address: address.addr(),
        })
    }

    pub(crate) fn bind<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.object.bind(py)
    }

    /// The description of a tensor in main memory.
    pub(crate) fn on_cpu(&self) -> Option<&TensorDesc> {
        match &self.known {
            Some((desc, Device::Cpu)) => Some(desc),
            _ => None,
        }
    }

    /// True if the tensor is as it was. Its content may be another.
    pub(crate) fn is_same(&self, py: Python<'_>) -> PyResult<bool> {
        let object = self.bind(py);
        if object.get_type_ptr().addr() != self.kind {
            return Ok(false);
        }
        if let Some(form) = &self.form {
            let now = glance(object)?;
            return Ok(now.is_some_and(|(now, at)| at.addr() == self.address && now == *form));
        }
        let now = Array::import("tensor", object)?;
        let is_known = Some((now.desc, now.device)) == self.known;
        Ok(is_known && now.address().addr() == self.address)
    }

    /// The tensor on the CPU, of which [`Seen::is_same`] has just said that it is as it was.
    pub(crate) fn view(&self) -> Option<TensorRef<'_>> {
        let at = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: the object lives, and its memory is as described.
        self.on_cpu().map(|desc| unsafe { TensorRef::from_raw(at, *desc, Device::Cpu) })
    }

    /// Adds the cache lines that a comparison reads.
    pub(crate) fn add_lines(&self, py: Python<'_>, lines: &mut Vec<usize>) -> PyResult<()> {
        let (object, cdata) = (self.bind(py), intern!(py, "_cdata"));
        let mut add = |start: usize, bytes: usize| {
            lines.extend((start / LINE..=(start + bytes - 1) / LINE).map(|line| line * LINE));
        };
        add(object.as_ptr().addr(), READ[0]);
        // Only PyTorch's tensors have these.
        if let Some(tensor) = object.getattr_opt(cdata)? {
            add(tensor.extract()?, READ[1]);
            let memory = object.call_method0(intern!(py, "untyped_storage"))?;
            add(memory.getattr(cdata)?.extract()?, READ[2]);
        }
        Ok(())
    }
}
