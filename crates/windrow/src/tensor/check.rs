//! Checks of the tensors that a caller gives.

use super::TensorDesc;
use crate::{DType, Device, Error, Layout, Result};

/// Checks that all elements of a layout, with index zero at `offset`, lie within a slice of `len` elements. Returns
/// [`Error::OutOfBounds`] if not.
pub(super) fn check_bounds(
    arg: &'static str,
    len: usize,
    offset: usize,
    layout: &Layout,
) -> Result<()> {
    let Some((low, high)) = layout.extent() else { return Ok(()) };
    let (first, last) = (offset as i128 + low as i128, offset as i128 + high as i128);
    if first < 0 || last >= len as i128 {
        return Err(Error::OutOfBounds { arg, first, last, len });
    }
    Ok(())
}

/// Checks that no two elements share memory. Returns [`Error::OverlappingOutput`] if they do.
pub(crate) fn check_unique(arg: &'static str, layout: &Layout) -> Result<()> {
    if layout.is_unique() {
        return Ok(());
    }
    Err(Error::OverlappingOutput {
        arg,
        shape: layout.shape().to_vec(),
        strides: layout.strides().to_vec(),
    })
}

/// Checks that two devices are the same. Returns [`Error::WrongDevice`] if not.
pub(crate) fn check_device(arg: &'static str, given: Device, expected: Device) -> Result<()> {
    if given == expected { Ok(()) } else { Err(Error::WrongDevice { arg, given, expected }) }
}

/// Checks that two element types are the same. Returns [`Error::DType`] if not.
pub(crate) fn check_dtype(arg: &'static str, given: DType, expected: DType) -> Result<()> {
    if given == expected { Ok(()) } else { Err(Error::dtype(arg, given, expected.name())) }
}

/// Checks shape and element type, but not strides. Returns [`Error::Shape`] or [`Error::DType`] if one differs.
pub(crate) fn check_tensor(
    arg: &'static str,
    given: &TensorDesc,
    dtype: DType,
    shape: &[usize],
) -> Result<()> {
    if given.shape() != shape {
        return Err(Error::shape(arg, given.shape(), format!("{shape:?}")));
    }
    check_dtype(arg, given.dtype, dtype)
}

/// Checks that a view has the shape, element type and strides that the plan was made for. Returns [`Error::Shape`],
/// [`Error::DType`] or [`Error::Strides`] if not.
pub(crate) fn check_view(
    arg: &'static str,
    given: &TensorDesc,
    planned: &TensorDesc,
) -> Result<()> {
    check_tensor(arg, given, planned.dtype, planned.shape())?;
    if given.layout == planned.layout {
        return Ok(());
    }
    Err(Error::Strides {
        arg,
        given: given.strides().to_vec(),
        expected: format!("{:?}, as planned", planned.strides()),
    })
}

/// Checks an optional argument, as [`check_view`] does if both plan and call have it. Returns [`Error::Parameter`] if
/// only one of the two has it.
pub(crate) fn check_optional_view(
    arg: &'static str,
    given: Option<&TensorDesc>,
    planned: Option<&TensorDesc>,
) -> Result<()> {
    match (given, planned) {
        (Some(given), Some(planned)) => check_view(arg, given, planned),
        (None, None) => Ok(()),
        (None, Some(_)) => Err(Error::parameter(arg, "missing", "a tensor, as planned")),
        (Some(_), None) => Err(Error::parameter(arg, "given", "none, as planned")),
    }
}
