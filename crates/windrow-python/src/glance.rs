//! The short cut for a call like one before: what its tensors are is compared with what they were, and only their
//! addresses are taken. An [`Array`](crate::array::Array) has room for eight dimensions and for copies, and moving it
//! about costs more than the rest of a small call.

use crate::access::{Access, Exchange, access, may_be_negative};
use crate::array::{Array, Family};
use crate::dlpack::{self, Borrow, DLDataType, DLDevice, DLTensor};
use pyo3::prelude::*;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use windrow::{DType, Device};

/// The description of a tensor of at most RANK dimensions, without its address.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Form<const RANK: usize> {
    device: DLDevice,
    dtype: DLDataType,
    rank: usize,
    shape: [usize; RANK],
    strides: [isize; RANK],
}

impl<const RANK: usize> Form<RANK> {
    /// None for more dimensions.
    fn of_array(array: &Array<'_>) -> Option<Self> {
        let (desc, rank) = (&array.desc, array.desc.shape().len());
        let (mut shape, mut strides) = ([0; RANK], [0; RANK]);
        shape.get_mut(..rank)?.copy_from_slice(desc.shape());
        strides[..rank].copy_from_slice(desc.strides());
        let (device, dtype) = (DLDevice::new(array.device), DLDataType::new(desc.dtype));
        Some(Form { device, dtype, rank, shape, strides })
    }

    pub(crate) fn device(&self) -> Option<Device> {
        self.device.device()
    }

    pub(crate) fn is_f32(&self) -> bool {
        self.dtype == DLDataType::new(DType::F32)
    }
}

/// Form, address and library of a tensor, however it is accessed. None for more dimensions, and where there is no access.
pub(crate) fn looked_at<'py, const RANK: usize>(
    object: &Bound<'py, PyAny>,
) -> Option<(Form<RANK>, *mut c_void, Family<'py>)> {
    if let Ok(Access::Exchange(exchange)) = access(object)
        && let Ok(Some((form, address))) = glance(object)
    {
        return Some((form, address, Family::Exchange(exchange.api, object.clone())));
    }
    let array = Array::import("tensor", object).ok()?;
    Form::of_array(&array).map(|form| (form, array.address(), array.family))
}

/// Form and address of a tensor. None where more has to be looked at than that: [`Array`](crate::array::Array) does.
pub(crate) fn glance<const RANK: usize>(
    object: &Bound<'_, PyAny>,
) -> PyResult<Option<(Form<RANK>, *mut c_void)>> {
    let Access::Exchange(exchange) = access(object)? else { return Ok(None) };
    let Some(tensor) = exchange.api.borrow.and_then(|borrow| borrowed(borrow, object)) else {
        return Ok(None);
    };
    Ok(form_of(&exchange, &tensor).map(|form| (form, address_of(&tensor))))
}

/// A tensor's form and address, which are compared with what they were.
pub(crate) struct Glance<const RANK: usize> {
    borrow: Borrow,
    form: Form<RANK>,
    address: *mut c_void,
}

// SAFETY: the address is compared only.
unsafe impl<const RANK: usize> Send for Glance<RANK> {}
// SAFETY: as above.
unsafe impl<const RANK: usize> Sync for Glance<RANK> {}

impl<const RANK: usize> Glance<RANK> {
    /// None where [`glance`] gives none.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let Access::Exchange(exchange) = access(object)? else { return Ok(None) };
        let Some(borrow) = exchange.api.borrow else { return Ok(None) };
        let seen = glance(object)?;
        Ok(seen.map(|(form, address)| Glance { borrow, form, address }))
    }

    pub(crate) fn address(&self) -> *mut c_void {
        self.address
    }

    /// True if an object, of the type of the first one, has form and address that were seen.
    pub(crate) fn is_same(&self, object: &Bound<'_, PyAny>) -> bool {
        borrowed(self.borrow, object).is_some_and(|tensor| {
            let Form { device, dtype, rank, shape, strides } = &self.form;
            let is_like = tensor.ndim as usize == *rank
                && tensor.device == *device
                && tensor.dtype == *dtype
                && address_of(&tensor) == self.address
                && !tensor.strides.is_null();
            // SAFETY: shape and strides have so many numbers, and live as long as the object.
            let lies = |d: usize| unsafe {
                *tensor.shape.add(d) as usize == shape[d]
                    && *tensor.strides.add(d) as isize == strides[d]
            };
            is_like && (0..*rank).all(lies)
        })
    }
}

/// What the library says of an array. None if it refuses.
fn borrowed(borrow: Borrow, object: &Bound<'_, PyAny>) -> Option<DLTensor> {
    let mut tensor = MaybeUninit::<DLTensor>::uninit();
    // SAFETY: the function was found on the object's type; it fills the tensor or fails.
    if unsafe { borrow(object.as_ptr(), tensor.as_mut_ptr()) } != 0 {
        drop(PyErr::take(object.py()));
        return None;
    }
    // SAFETY: filled.
    Some(unsafe { tensor.assume_init() })
}

fn address_of(tensor: &DLTensor) -> *mut c_void {
    tensor.data.wrapping_byte_add(tensor.byte_offset as usize)
}

fn form_of<const RANK: usize>(exchange: &Exchange, tensor: &DLTensor) -> Option<Form<RANK>> {
    const FLOATING_POINT: u8 = 2;
    let rank = tensor.ndim as usize;
    if rank > RANK || tensor.strides.is_null() || tensor.data.is_null() {
        return None;
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
    let misaligned = !address_of(tensor).addr().is_multiple_of(usize::from(dtype.bits / 8).max(1));
    let negative = exchange.can_be_negative
        && dtype.code == FLOATING_POINT
        && may_be_negative(&form.shape[..rank], &form.strides[..rank]);
    let special = negative || (misaligned && device.device_type == dlpack::CPU);
    (!special).then_some(form)
}
