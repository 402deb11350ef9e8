//! A node's attributes and tensors.

use crate::api::{
    Api, INVALID_ARGUMENT, KernelContext, KernelInfo, NOT_IMPLEMENTED, Status, TypeAndShape, Value,
};
use crate::operator::{Failure, Outcome};
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::{null, null_mut, without_provenance_mut};
use std::str::FromStr;
use windrow::{DType, Device, TensorDesc, TensorMut, TensorRef};

/// The attributes of a node.
pub(crate) struct Attributes<'a> {
    api: &'a Api,
    info: *const KernelInfo,
}

impl<'a> Attributes<'a> {
    /// # Safety
    /// `info` is what ONNX Runtime gave to the call in which this is used.
    pub(crate) unsafe fn of(api: &'a Api, info: *const KernelInfo) -> Self {
        Attributes { api, info }
    }

    pub(crate) fn int(&self, name: &CStr, default: i64) -> Outcome<i64> {
        let mut value = 0;
        // SAFETY: the node's information, a name, and room for the value.
        let found = unsafe { self.api.get_attribute_int(self.info, name.as_ptr(), &mut value) };
        Ok(if self.is_there(name, found)? { value } else { default })
    }

    /// The attribute; None if the node does not have it.
    pub(crate) fn ints(&self, name: &CStr) -> Outcome<Option<Vec<i64>>> {
        let mut size = 0;
        let read = |values: *mut i64, size: &mut usize| {
            // SAFETY: the node's information, and a name; without room for values only their number is written.
            unsafe { self.api.get_attribute_ints(self.info, name.as_ptr(), values, size) }
        };
        if !self.is_there(name, read(null_mut(), &mut size))? {
            return Ok(None);
        }
        let mut values = vec![0; size];
        if size > 0 {
            read(values.as_mut_ptr(), &mut size)?;
        }
        Ok(Some(values))
    }

    /// A word, or the type's default where the node does not have it.
    pub(crate) fn word<T>(&self, name: &CStr) -> Outcome<T>
    where
        T: FromStr<Err = windrow::Error> + Default,
    {
        match self.string(name)? {
            None => Ok(T::default()),
            Some(word) => Ok(word.parse()?),
        }
    }

    pub(crate) fn string(&self, name: &CStr) -> Outcome<Option<String>> {
        let mut size = 0;
        let read = |word: *mut u8, size: &mut usize| {
            // SAFETY: the node's information, and a name; the size counts the zero at the end.
            unsafe { self.api.get_attribute_string(self.info, name.as_ptr(), word.cast(), size) }
        };
        if !self.is_there(name, read(null_mut(), &mut size))? {
            return Ok(None);
        }
        let mut bytes = vec![0; size];
        read(bytes.as_mut_ptr(), &mut size)?;
        let word = CString::from_vec_with_nul(bytes).unwrap_or_default();
        Ok(Some(word.to_string_lossy().into_owned()))
    }

    /// Whether an input is part of the model, so that every run sees the same values.
    pub(crate) fn is_constant(&self, input: usize) -> Outcome<bool> {
        let (mut is_constant, mut value) = (0, null());
        // SAFETY: the node's information, and room for both results; the value is not used.
        unsafe { self.api.get_constant_input(self.info, input, &mut is_constant, &mut value)? };
        Ok(is_constant != 0)
    }

    /// False if the node does not have the attribute; an error if it has one of another type.
    fn is_there(&self, name: &CStr, found: Result<(), *mut Status>) -> Outcome<bool> {
        if self.is_ok(found) {
            return Ok(true);
        }
        let (api, info, at) = (self.api, self.info, name.as_ptr());
        let (mut int, mut float, mut size) = (0, 0.0, 0);
        // SAFETY: the node's information, the name, and room for a value, or for the number of them.
        let of_any_type = unsafe {
            [
                api.get_attribute_int(info, at, &mut int),
                api.get_attribute_ints(info, at, null_mut(), &mut size),
                api.get_attribute_float(info, at, &mut float),
                api.get_attribute_floats(info, at, null_mut(), &mut size),
                api.get_attribute_string(info, at, null_mut(), &mut size),
            ]
        };
        // Every one of them, since each has to be released.
        let types = of_any_type.into_iter().filter(|found| self.is_ok(*found)).count();
        let name = name.to_string_lossy();
        if types == 0 { Ok(false) } else { Err(invalid(format!("`{name}` is of another type"))) }
    }

    fn is_ok(&self, found: Result<(), *mut Status>) -> bool {
        found.map_err(|status| self.api.release_status(status)).is_ok()
    }
}

/// The inputs and outputs of one run of a node.
pub(crate) struct Tensors<'a> {
    api: &'a Api,
    context: *mut KernelContext,
}

impl<'a> Tensors<'a> {
    /// # Safety
    /// `context` is what ONNX Runtime gave to the call in which this is used.
    pub(crate) unsafe fn of(api: &'a Api, context: *mut KernelContext) -> Self {
        Tensors { api, context }
    }

    pub(crate) fn input(&self, index: usize) -> Outcome<TensorRef<'_>> {
        self.optional_input(index)?.ok_or_else(|| invalid(format!("input {index} is missing")))
    }

    /// The input; None if the node does not have it.
    pub(crate) fn optional_input(&self, index: usize) -> Outcome<Option<TensorRef<'_>>> {
        let (mut count, mut value, mut data) = (0, null(), null_mut());
        // SAFETY: the run's context, and room for what is asked for.
        unsafe {
            self.api.get_input_count(self.context, &mut count)?;
            if index >= count {
                return Ok(None);
            }
            self.api.get_input(self.context, index, &mut value)?;
            if value.is_null() {
                return Ok(None);
            }
            let desc = self.describe(value)?;
            // The function has no other form; the values are only read.
            self.api.get_tensor_mutable_data(value.cast_mut(), &mut data)?;
            // ONNX Runtime's tensors are dense, aligned, and stay as they are until the node has run.
            Ok(Some(TensorRef::from_raw(address(data, &desc), desc, Device::Cpu)))
        }
    }

    /// Whether the node has as many outputs that output `index` may be one of them.
    pub(crate) fn has_output(&self, index: usize) -> Outcome<bool> {
        let mut count = 0;
        // SAFETY: the run's context, and room for the number.
        unsafe { self.api.get_output_count(self.context, &mut count)? };
        Ok(index < count)
    }

    /// Memory for an output of this shape, seen as `desc`: as many elements, dense.
    pub(crate) fn output(
        &self,
        index: usize,
        shape: &[usize],
        desc: TensorDesc,
    ) -> Outcome<TensorMut<'_>> {
        let expected = TensorDesc::contiguous(desc.dtype, shape)?;
        if !same_memory(&expected, &desc) {
            return Err(invalid(format!(
                "output {index} of shape {shape:?} is seen as {:?}",
                desc.shape()
            )));
        }
        let dims: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let (mut value, mut data) = (null_mut(), null_mut());
        // SAFETY: the run's context, and room for what is asked for; the memory is this run's own.
        unsafe {
            self.api.get_output(self.context, index, dims.as_ptr(), dims.len(), &mut value)?;
            if self.describe(value)? != expected {
                return Err(invalid(format!("output {index} is not of the type of the inputs")));
            }
            self.api.get_tensor_mutable_data(value, &mut data)?;
            Ok(TensorMut::from_raw(address(data, &desc), desc, Device::Cpu)?)
        }
    }

    /// # Safety
    /// The value lives.
    unsafe fn describe(&self, value: *const Value) -> Outcome<TensorDesc> {
        let mut info = null_mut();
        // SAFETY: the caller's promise.
        unsafe { self.api.get_tensor_type_and_shape(value, &mut info)? };
        let desc = self.read(info);
        self.api.release_type_and_shape(info);
        desc
    }

    fn read(&self, info: *const TypeAndShape) -> Outcome<TensorDesc> {
        let (mut element, mut rank): (c_int, usize) = (0, 0);
        // SAFETY: `describe` has just been given it.
        unsafe {
            self.api.get_tensor_element_type(info, &mut element)?;
            self.api.get_dimensions_count(info, &mut rank)?;
        }
        let mut dims = vec![0i64; rank];
        // SAFETY: information that lives until `describe` releases it, and room for the dimensions.
        unsafe { self.api.get_dimensions(info, dims.as_mut_ptr(), rank)? };
        let shape: Vec<usize> = dims.iter().map(|&n| n as usize).collect();
        let dtype = match element {
            1 => DType::F32,
            6 => DType::I32,
            10 => DType::F16,
            16 => DType::BF16,
            other => return Err(invalid(format!("tensors of ONNX's element type {other}"))),
        };
        Ok(TensorDesc::contiguous(dtype, &shape)?)
    }
}

/// The same elements as a dense tensor of another shape.
pub(crate) fn seen_as<'a>(x: TensorRef<'a>, shape: &[usize]) -> Outcome<TensorRef<'a>> {
    let desc = TensorDesc::contiguous(x.dtype(), shape)?;
    if !same_memory(x.desc(), &desc) {
        return Err(invalid(format!("{:?} does not have the elements of {shape:?}", x.shape())));
    }
    // SAFETY: both are dense, and have the same number of elements.
    Ok(unsafe { TensorRef::from_raw(x.as_ptr().cast(), desc, x.device()) })
}

fn same_memory(a: &TensorDesc, b: &TensorDesc) -> bool {
    a.bytes() == b.bytes() && a.layout.is_contiguous() && b.layout.is_contiguous()
}

/// An empty tensor may have no memory, and so no address.
fn address(data: *mut c_void, desc: &TensorDesc) -> *mut c_void {
    if desc.bytes() == 0 { without_provenance_mut(size_of::<f64>()) } else { data }
}

pub(crate) fn invalid(message: String) -> Failure {
    Failure::Said(INVALID_ARGUMENT, message)
}

pub(crate) fn unsupported(message: String) -> Failure {
    Failure::Said(NOT_IMPLEMENTED, message)
}
