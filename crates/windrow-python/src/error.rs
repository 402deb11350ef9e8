//! Errors of the library as Python exceptions, with the same message.

use pyo3::exceptions::{
    PyIndexError, PyMemoryError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError,
};
use pyo3::{PyErr, create_exception};
use windrow::Error;

create_exception!(
    _native,
    NotInPlace,
    PyValueError,
    "An array whose memory cannot be used where and as it is."
);

/// Lets `?` turn a library error into an exception.
pub(crate) trait IntoPy<T> {
    fn py(self) -> Result<T, PyErr>;
}

impl<T> IntoPy<T> for windrow::Result<T> {
    fn py(self) -> Result<T, PyErr> {
        self.map_err(exception)
    }
}

pub(crate) fn exception(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::DType { .. } => PyTypeError::new_err(message),
        Error::Index { .. } => PyIndexError::new_err(message),
        Error::OutOfMemory { .. } => PyMemoryError::new_err(message),
        // A RuntimeError in Python's hierarchy.
        Error::Unsupported { .. } => PyNotImplementedError::new_err(message),
        Error::Rank { .. }
        | Error::Shape { .. }
        | Error::Strides { .. }
        | Error::OverlappingOutput { .. }
        | Error::Aliasing { .. }
        | Error::OutOfBounds { .. }
        | Error::Parameter { .. }
        | Error::SizeOverflow { .. }
        | Error::WrongDevice { .. } => PyValueError::new_err(message),
        _ => PyRuntimeError::new_err(message),
    }
}
