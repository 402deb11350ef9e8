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
    like: Likeness,
}

/// What a tensor was, without the tensor.
pub(crate) struct Likeness {
    /// The address of the Python object, and its type.
    object: usize,
    kind: usize,
    /// None for other libraries' arrays.
    words: Option<Words>,
    /// None if more has to be looked at.
    glance: Option<Glance<RANK>>,
    /// None for types that the library does not know.
    known: Option<(TensorDesc, Device)>,
    address: usize,
}

impl Likeness {
    pub(crate) fn of(arg: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (glance, array) = (Glance::of(object)?, Array::import(arg, object));
        let known = array.as_ref().ok().map(|array| (array.desc, array.device));
        let address = match (&glance, array) {
            (Some(glance), _) => glance.address(),
            (None, array) => array?.address(),
        };
        Ok(Likeness {
            object: object.as_ptr().addr(),
            kind: object.get_type_ptr().addr(),
            words: Words::of(object)?,
            glance,
            known,
            address: address.addr(),
        })
    }

    /// The address of the tensor's object.
    pub(crate) fn place(&self) -> usize {
        self.object
    }

    /// True if an object has the place and the type of that one.
    fn is_at(&self, object: &Bound<'_, PyAny>) -> bool {
        object.as_ptr().addr() == self.object && object.get_type_ptr().addr() == self.kind
    }

    /// True if the object is that tensor, which is as it was, and nobody has counted a write. False says nothing.
    fn is_untouched(&self, object: &Bound<'_, PyAny>) -> bool {
        // SAFETY: an object of its type lives at its place.
        let are_same = |words: &Words| unsafe { words.are_same() };
        self.is_at(object) && self.words.as_ref().is_some_and(are_same)
    }

    /// True if the object lies at the same place and is as that one was. Its content may be another.
    pub(crate) fn is_same(&self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        if self.is_untouched(object) {
            return Ok(true);
        }
        if !self.is_at(object) {
            return Ok(false);
        }
        if let Some(glance) = &self.glance {
            return Ok(glance.is_same(object));
        }
        let now = Array::import("tensor", object)?;
        let is_known = Some((now.desc, now.device)) == self.known;
        Ok(is_known && now.address().addr() == self.address)
    }
}

impl Seen {
    pub(crate) fn of(arg: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Seen { object: object.clone().unbind(), like: Likeness::of(arg, object)? })
    }

    pub(crate) fn bind<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.object.bind(py)
    }

    /// The tensor's description and device; None for types that the library does not know.
    pub(crate) fn known(&self) -> Option<(TensorDesc, Device)> {
        self.like.known
    }

    /// The description of a tensor in main memory.
    pub(crate) fn on_cpu(&self) -> Option<&TensorDesc> {
        match &self.like.known {
            Some((desc, Device::Cpu)) => Some(desc),
            _ => None,
        }
    }

    /// [`Likeness::is_untouched`] of the tensor.
    pub(crate) fn is_untouched(&self, py: Python<'_>) -> bool {
        self.like.is_untouched(self.bind(py))
    }

    /// [`Likeness::is_same`] of the tensor.
    pub(crate) fn is_same(&self, py: Python<'_>) -> PyResult<bool> {
        self.like.is_same(self.bind(py))
    }

    /// The tensor, of which [`Seen::is_same`] has just said that it is as it was. None for types that the library does
    /// not know.
    pub(crate) fn view(&self) -> Option<TensorRef<'_>> {
        let at = std::ptr::with_exposed_provenance_mut(self.like.address);
        // SAFETY: the object lives, and its memory is as described.
        self.like.known.as_ref().map(|(desc, on)| unsafe { TensorRef::from_raw(at, *desc, *on) })
    }

    /// The cache lines that a comparison reads.
    pub(crate) fn lines(&self) -> impl Iterator<Item = usize> {
        let object = [(self.object.as_ptr().addr(), 2 * size_of::<usize>())];
        let reads = object.into_iter().chain(self.like.words.iter().flat_map(Words::reads));
        reads
            .flat_map(|(start, bytes)| start / LINE..=(start + bytes - 1) / LINE)
            .map(|line| line * LINE)
    }
}
