//! A tensor that is compared with what it was.

use crate::array::Array;
use crate::glance::Glance;
use crate::torch_memory::Words;
use pyo3::prelude::*;
use windrow::{Device, TensorDesc, TensorRef};

/// Dimensions of tensors that are compared at a glance: those of filters.
const RANK: usize = 5;
const LINE: usize = 64;

/// A tensor with type, shape, strides, device and address as they were.
pub(crate) struct Seen {
    object: Py<PyAny>,
    kind: usize,
    /// None for other libraries' arrays.
    words: Option<Words>,
    /// None if more has to be looked at.
    glance: Option<Glance<RANK>>,
    /// None for types that the library does not know.
    known: Option<(TensorDesc, Device)>,
    address: usize,
}

impl Seen {
    pub(crate) fn of(arg: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (glance, array) = (Glance::of(object)?, Array::import(arg, object));
        let known = array.as_ref().ok().map(|array| (array.desc, array.device));
        let address = match (&glance, array) {
            (Some(glance), _) => glance.address(),
            (None, array) => array?.address(),
        };
        Ok(Seen {
            object: object.clone().unbind(),
            kind: object.get_type_ptr().addr(),
            words: Words::of(object)?,
            glance,
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

    /// True if the tensor is as it was and nobody has counted a write. False says nothing.
    pub(crate) fn is_untouched(&self, py: Python<'_>) -> bool {
        // SAFETY: the object lives.
        let are_same = |words: &Words| unsafe { words.are_same() };
        self.bind(py).get_type_ptr().addr() == self.kind
            && self.words.as_ref().is_some_and(are_same)
    }

    /// True if the tensor is as it was. Its content may be another.
    pub(crate) fn is_same(&self, py: Python<'_>) -> PyResult<bool> {
        if self.is_untouched(py) {
            return Ok(true);
        }
        let object = self.bind(py);
        if object.get_type_ptr().addr() != self.kind {
            return Ok(false);
        }
        if let Some(glance) = &self.glance {
            return Ok(glance.is_same(object));
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

    /// The cache lines that a comparison reads.
    pub(crate) fn lines(&self) -> impl Iterator<Item = usize> {
        let object = [(self.object.as_ptr().addr(), 2 * size_of::<usize>())];
        let reads = object.into_iter().chain(self.words.iter().flat_map(Words::reads));
        reads
            .flat_map(|(start, bytes)| start / LINE..=(start + bytes - 1) / LINE)
            .map(|line| line * LINE)
    }
}
