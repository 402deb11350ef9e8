//! What a call depends on, compared with what it was.
//!
//! A network leaves nothing of Python's objects in the caches. One after the other, comparisons of hundreds of them take
//! longer than some of its layers. Here they are loops of a few instructions, whose reads the processor does at the same
//! time, and what tensors lead to is asked for before.

use crate::seen::Seen;
use pyo3::exceptions::PyValueError;
use pyo3::ffi::{Py_tp_descr_get, PyDict_Size, PyObject, PyType_GetSlot, descrgetfunc};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::c_void;
use windrow::internal::prefetch;

/// Dictionaries, modules and tensors with what they were.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct Unchanged {
    dicts: Versions,
    empty: Vec<Py<PyDict>>,
    /// Objects with their types.
    kinds: Vec<(Py<PyAny>, usize)>,
    tensors: Vec<Tensor>,
    lines: Vec<usize>,
}

/// Dictionaries with their version numbers.
struct Versions {
    dicts: Vec<(Py<PyDict>, u64)>,
    /// The function that gives the number; None if it is where [`VERSION`] says.
    function: Option<Py<PyAny>>,
}

struct Tensor {
    seen: Seen,
    /// The number of writes, and what reads it. None for tensors from inference mode, which do not count them.
    writes: Option<(Writes, i64)>,
}

/// The place of the version number in a dictionary of CPython before 3.12, which is the first with another: behind the
/// header of an object and the number of keys.
const VERSION: usize = size_of::<PyObject>() + size_of::<usize>();
const LAST_WITH_VERSION: (u8, u8) = (3, 11);

#[pymethods]
impl Unchanged {
    /// `version` is PyTorch's function that gives the version number of a dictionary. `empty` are dictionaries without
    /// keys, and `modules` objects of which the types are compared.
    #[new]
    fn new(
        dicts: Vec<Bound<'_, PyDict>>,
        version: &Bound<'_, PyAny>,
        empty: Vec<Bound<'_, PyDict>>,
        modules: Vec<Bound<'_, PyAny>>,
        tensors: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let py = version.py();
        let tensors = tensors.iter().map(|tensor| {
            let writes = match tensor.call_method0(intern!(py, "is_inference"))?.is_truthy()? {
                true => None,
                false => {
                    let writes = Writes::of(tensor)?;
                    let before = writes.read(tensor)?;
                    Some((writes, before))
                }
            };
            PyResult::Ok(Tensor { seen: Seen::of("tensor", tensor)?, writes })
        });
        let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
        if empty.iter().any(|dict| !dict.is_empty()) {
            return Err(PyValueError::new_err("a dictionary of `empty` is not empty"));
        }
        let mut lines: Vec<_> = tensors.iter().flat_map(|tensor| tensor.seen.lines()).collect();
        lines.sort_unstable();
        lines.dedup();
        let kinds = modules.into_iter().map(|m| {
            let kind = m.get_type_ptr().addr();
            (m.unbind(), kind)
        });
        Ok(Unchanged {
            dicts: Versions::new(dicts, version)?,
            empty: empty.into_iter().map(Bound::unbind).collect(),
            kinds: kinds.collect(),
            tensors,
            lines,
        })
    }

    /// True if all is as it was. The content of tensors that do not count writes is not compared.
    fn __call__(&self, py: Python<'_>) -> PyResult<bool> {
        prefetch(&self.lines);
        // SAFETY: dictionaries; the caller holds the interpreter lock.
        let is_empty = |dict: &Py<PyDict>| unsafe { PyDict_Size(dict.as_ptr()) == 0 };
        let is_of =
            |(object, kind): &(Py<PyAny>, usize)| object.bind(py).get_type_ptr().addr() == *kind;
        if !self.dicts.are_same(py)?
            || !self.empty.iter().all(is_empty)
            || !self.kinds.iter().all(is_of)
        {
            return Ok(false);
        }
        for tensor in self.tensors.iter().filter(|tensor| !tensor.seen.is_untouched(py)) {
            if !tensor.seen.is_same(py)? {
                return Ok(false);
            }
            if let Some((writes, before)) = &tensor.writes
                && writes.read(tensor.seen.bind(py))? != *before
            {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Versions {
    fn new(dicts: Vec<Bound<'_, PyDict>>, version: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = version.py();
        let dicts = dicts.into_iter().map(|dict| {
            let number = version.call1((&dict,))?.extract()?;
            PyResult::Ok((dict.unbind(), number))
        });
        let dicts = dicts.collect::<PyResult<Vec<(Py<PyDict>, u64)>>>()?;
        let info = py.version_info();
        let is_known = (info.major, info.minor) <= LAST_WITH_VERSION;
        let is_there = is_known && dicts.iter().all(|(dict, number)| version_of(dict) == *number);
        Ok(Versions { dicts, function: (!is_there).then(|| version.clone().unbind()) })
    }

    fn are_same(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(function) = &self.function else {
            return Ok(self.dicts.iter().all(|(dict, before)| version_of(dict) == *before));
        };
        for (dict, before) in &self.dicts {
            if function.call1(py, (dict,))?.extract::<u64>(py)? != *before {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn version_of(dict: &Py<PyDict>) -> u64 {
    // SAFETY: dictionaries of all versions of CPython have a word there.
    unsafe { dict.as_ptr().byte_add(VERSION).cast::<u64>().read() }
}

/// The attribute of a tensor with the number of writes. To look it up takes longer than to read it.
struct Writes {
    attribute: Py<PyAny>,
    /// What reads a tensor's attribute.
    get: descrgetfunc,
}

impl Writes {
    fn of(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let attribute = tensor.get_type().getattr(intern!(tensor.py(), "_version"))?;
        // SAFETY: a type; a slot that it has is a function of the type that goes with the slot.
        let get = unsafe {
            let get = PyType_GetSlot(attribute.get_type_ptr(), Py_tp_descr_get);
            std::mem::transmute::<*mut c_void, Option<descrgetfunc>>(get)
        };
        let get = get.ok_or_else(|| PyValueError::new_err("`_version` of a type is a value"))?;
        Ok(Writes { attribute: attribute.unbind(), get })
    }

    fn read(&self, tensor: &Bound<'_, PyAny>) -> PyResult<i64> {
        let (py, kind) = (tensor.py(), tensor.get_type_ptr());
        // SAFETY: the function of the attribute's type, for a tensor; it gives a new object or sets an exception.
        let read = unsafe {
            let read = (self.get)(self.attribute.as_ptr(), tensor.as_ptr(), kind.cast());
            Bound::from_owned_ptr_or_err(py, read)?
        };
        read.extract()
    }
}

/// Words of memory with what they were.
#[pyclass(module = "windrow._native", frozen)]
pub(crate) struct Words(Vec<(usize, u64)>);

#[pymethods]
impl Words {
    /// `places` are addresses of words of 8 bytes. The caller promises that they may be read, now and in each call.
    #[new]
    fn new(mut places: Vec<usize>) -> PyResult<Self> {
        places.sort_unstable();
        match places.iter().find(|place| !place.is_multiple_of(size_of::<u64>()) || **place == 0) {
            Some(place) => Err(PyValueError::new_err(format!("{place} is no address of a word"))),
            None => Ok(Words(places.into_iter().map(|place| (place, word(place))).collect())),
        }
    }

    /// True if all are as they were.
    fn __call__(&self) -> bool {
        self.0.iter().all(|&(place, before)| word(place) == before)
    }
}

fn word(place: usize) -> u64 {
    // SAFETY: an aligned address, which may be read, as whoever has made `Words` promises. Another thread may write there.
    unsafe { std::ptr::with_exposed_provenance::<u64>(place).read_volatile() }
}
