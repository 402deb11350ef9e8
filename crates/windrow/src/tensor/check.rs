//! Checks of the tensors that a caller gives.

use super::TensorDesc;
use crate::{DType, Device, Error, Layout, Result};

/// A check: [`Error::OutOfBounds`] unless every element of `layout`, with index zero at `offset`, lies within `len`
/// elements.
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

/// A check: [`Error::OverlappingOutput`] unless every element has its own memory.
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

/// A check: [`Error::WrongDevice`] unless the two are the same.
pub(crate) fn check_device(arg: &'static str, given: Device, expected: Device) -> Result<()> {
    if given == expected { Ok(()) } else { Err(Error::WrongDevice { arg, given, expected }) }
}

/// A check: [`Error::DType`] unless the two are the same.
pub(crate) fn check_dtype(arg: &'static str, given: DType, expected: DType) -> Result<()> {
    if given == expected { Ok(()) } else { Err(Error::dtype(arg, given, expected.name())) }
}

/// A check: [`Error::Shape`] or [`Error::DType`] unless shape and element type are the expected ones. Strides are not
/// compared.
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

/// A check: [`Error::Shape`], [`Error::DType`] or [`Error::Strides`] unless a view has the shape, element type and
/// strides that a plan was made for.
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

/// A check of an optional argument: as [`check_view`] if both plan and call have it, and [`Error::Parameter`] if only
/// one of the two has it.
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
