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

pub(crate) fn exception(mut error: Error) -> PyErr {
    name_as_in_python(&mut error);
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
        | Error::WorkspaceTooSmall { .. }
        | Error::ForeignPack { .. }
        | Error::WrongDevice { .. } => PyValueError::new_err(message),
        _ => PyRuntimeError::new_err(message),
    }
}

/// Gives arguments the names that the functions here have for them.
fn name_as_in_python(error: &mut Error) {
    let rename = |name: &mut &'static str| match *name {
        "y" => *name = "out",
        "w" => *name = "weight",
        _ => {}
    };
    match error {
        Error::Rank { arg, .. }
        | Error::Shape { arg, .. }
        | Error::DType { arg, .. }
        | Error::Strides { arg, .. }
        | Error::OverlappingOutput { arg, .. }
        | Error::OutOfBounds { arg, .. }
        | Error::Index { arg, .. }
        | Error::ForeignPack { arg, .. }
        | Error::WrongDevice { arg, .. } => rename(arg),
        Error::Parameter { name, .. } => rename(name),
        Error::Aliasing { output, input, .. } => {
            rename(output);
            rename(input);
        }
        _ => {}
    }
}
