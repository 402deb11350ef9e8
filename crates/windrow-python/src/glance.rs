//! The short cut for a call like one before: what its tensors are is compared with what they were, and only their
//! addresses are taken. An [`Array`](crate::array::Array) has room for eight dimensions and for copies, and moving it
//! about costs more than the rest of a small call.

use crate::access::{Access, access, may_be_negative};
use crate::dlpack::{self, DLDataType, DLDevice, DLTensor};
use pyo3::prelude::*;
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// The description of a tensor of at most RANK dimensions, without its address.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Form<const RANK: usize> {
    device: DLDevice,
    dtype: DLDataType,
    rank: usize,
    shape: [usize; RANK],
    strides: [isize; RANK],
}

/// Form and address of a tensor. None where more has to be looked at than that: [`Array`](crate::array::Array) does.
pub(crate) fn glance<const RANK: usize>(
    object: &Bound<'_, PyAny>,
) -> PyResult<Option<(Form<RANK>, *mut c_void)>> {
    const FLOATING_POINT: u8 = 2;
    let Access::Exchange(exchange) = access(object)? else { return Ok(None) };
    let Some(borrow) = exchange.api.borrow else { return Ok(None) };
    let mut tensor = MaybeUninit::<DLTensor>::uninit();
    // SAFETY: the table was found on the object's type; it fills the tensor or fails.
    if unsafe { borrow(object.as_ptr(), tensor.as_mut_ptr()) } != 0 {
        drop(PyErr::take(object.py()));
        return Ok(None);
    }
    // SAFETY: filled.
    let tensor = unsafe { tensor.assume_init() };
    let rank = tensor.ndim as usize;
    if rank > RANK || tensor.strides.is_null() || tensor.data.is_null() {
        return Ok(None);
    }
    let (device, dtype) = (tensor.device, tensor.dtype);
    let mut form = Form { device, dtype, rank, shape: [0; RANK], strides: [0; RANK] };
    for d in 0..rank {
        // SAFETY: shape and strides have so many numbers, and live as long as the object.
        unsafe {
            form.shape[d] = *tensor.shape.add(d) as usize;
            form.strides[d] = *tensor.strides.add(d) as isize;
        }
    }
    let address = tensor.data.wrapping_byte_add(tensor.byte_offset as usize);
    let misaligned = !address.addr().is_multiple_of(usize::from(dtype.bits / 8).max(1));
    let negative = exchange.can_be_negative
        && dtype.code == FLOATING_POINT
        && may_be_negative(&form.shape[..rank], &form.strides[..rank]);
    let special = negative || (misaligned && device.device_type == dlpack::CPU);
    Ok((!special).then_some((form, address)))
}
