//! The part of ONNX Runtime's C interface, version 16, that is used here.
//!
//! `OrtApi` is a table of functions that only grows: a function keeps its place in all later versions. So a place and a
//! type is all that is declared of each.

use std::ffi::{CString, c_char, c_int, c_void};
use std::marker::{PhantomData, PhantomPinned};

/// The version whose table and [`CustomOp`](crate::operator::CustomOp) are meant: that of ONNX Runtime 1.16, the first
/// whose operators say what went wrong.
pub(crate) const VERSION: u32 = 16;

/// A value of `OrtErrorCode`.
pub(crate) const FAIL: c_int = 1;
/// A value of `OrtErrorCode`.
pub(crate) const INVALID_ARGUMENT: c_int = 2;
/// A value of `OrtErrorCode`.
pub(crate) const NOT_IMPLEMENTED: c_int = 9;

/// Declares types of which only addresses are known here.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Debug)]
            pub struct $name {
                _data: [u8; 0],
                _marker: PhantomData<(*mut u8, PhantomPinned)>,
            }
        )*
    };
}

opaque! {
    /// `OrtSessionOptions`.
    SessionOptions;
    /// `OrtStatus`: what went wrong.
    Status;
    CustomOpDomain;
    KernelInfo;
    KernelContext;
    TypeAndShape;
    Value;
}

/// `OrtApiBase`.
#[repr(C)]
#[derive(Debug)]
pub struct ApiBase {
    get_api: unsafe extern "C" fn(u32) -> *const Table,
    get_version_string: unsafe extern "C" fn() -> *const c_char,
}

/// The beginning of `OrtApi`, as long as what is used of it.
#[repr(C)]
#[derive(Debug)]
pub struct Table([*const c_void; PLACES]);

const PLACES: usize = 250;

/// The functions of a version that ONNX Runtime has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Api(*const Table);

/// Functions by their place. One that returns a status gives it as an error where it is not null.
macro_rules! functions {
    ($($place:literal $name:ident($($arg:ident: $type:ty),*);)*) => {
        impl Api {
            $(
                /// # Safety
                /// As in ONNX Runtime's documentation.
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> Result<(), *mut Status> {
                    const { assert!($place < PLACES) };
                    type Function = unsafe extern "C" fn($($type),*) -> *mut Status;
                    // SAFETY: this is the function's place and type in the table, which lives as long as the process.
                    let status = unsafe {
                        let function = std::mem::transmute::<*const c_void, Function>((*self.0).0[$place]);
                        function($($arg),*)
                    };
                    if status.is_null() { Ok(()) } else { Err(status) }
                }
            )*
        }
    };
}

functions! {
    26 create_custom_op_domain(name: *const c_char, out: *mut *mut CustomOpDomain);
    27 custom_op_domain_add(domain: *mut CustomOpDomain, op: *const crate::operator::CustomOp);
    28 add_custom_op_domain(options: *mut SessionOptions, domain: *mut CustomOpDomain);
    51 get_tensor_mutable_data(value: *mut Value, out: *mut *mut c_void);
    60 get_tensor_element_type(info: *const TypeAndShape, out: *mut c_int);
    61 get_dimensions_count(info: *const TypeAndShape, out: *mut usize);
    62 get_dimensions(info: *const TypeAndShape, values: *mut i64, count: usize);
    65 get_tensor_type_and_shape(value: *const Value, out: *mut *mut TypeAndShape);
    85 get_attribute_float(info: *const KernelInfo, name: *const c_char, out: *mut f32);
    86 get_attribute_int(info: *const KernelInfo, name: *const c_char, out: *mut i64);
    87 get_attribute_string(info: *const KernelInfo, name: *const c_char, out: *mut c_char, size: *mut usize);
    88 get_input_count(context: *const KernelContext, out: *mut usize);
    89 get_output_count(context: *const KernelContext, out: *mut usize);
    90 get_input(context: *const KernelContext, index: usize, out: *mut *const Value);
    91 get_output(
        context: *mut KernelContext, index: usize, dims: *const i64, rank: usize, out: *mut *mut Value
    );
    130 add_session_config_entry(options: *mut SessionOptions, key: *const c_char, value: *const c_char);
    162 get_attribute_floats(info: *const KernelInfo, name: *const c_char, out: *mut f32, size: *mut usize);
    163 get_attribute_ints(info: *const KernelInfo, name: *const c_char, out: *mut i64, size: *mut usize);
    237 has_session_config_entry(options: *const SessionOptions, key: *const c_char, out: *mut c_int);
    249 get_constant_input(
        info: *const KernelInfo, index: usize, is_constant: *mut c_int, out: *mut *const Value
    );
}

/// The functions that do not return a status.
const CREATE_STATUS: usize = 0;
const RELEASE_STATUS: usize = 93;
const RELEASE_TYPE_AND_SHAPE: usize = 99;

impl Api {
    /// The interface of this version; None if this ONNX Runtime is older.
    ///
    /// # Safety
    /// `base` is what ONNX Runtime gives.
    pub(crate) unsafe fn of(base: *const ApiBase, version: u32) -> Option<Api> {
        // SAFETY: the caller's promise.
        let table = unsafe { ((*base).get_api)(version) };
        (!table.is_null()).then_some(Api(table))
    }

    /// The table of a call that ONNX Runtime makes.
    pub(crate) fn given(table: *const Table) -> Api {
        Api(table)
    }

    pub(crate) fn status(&self, code: c_int, message: &str) -> *mut Status {
        type Function = unsafe extern "C" fn(c_int, *const c_char) -> *mut Status;
        let message = CString::new(message.replace('\0', "?")).unwrap_or_default();
        // SAFETY: the function's place and type; it copies the message.
        unsafe {
            let function =
                std::mem::transmute::<*const c_void, Function>((*self.0).0[CREATE_STATUS]);
            function(code, message.as_ptr())
        }
    }

    /// Frees a status that says nothing of interest.
    pub(crate) fn release_status(&self, status: *mut Status) {
        self.release(RELEASE_STATUS, status.cast());
    }

    pub(crate) fn release_type_and_shape(&self, info: *mut TypeAndShape) {
        self.release(RELEASE_TYPE_AND_SHAPE, info.cast());
    }

    fn release(&self, place: usize, object: *mut c_void) {
        type Function = unsafe extern "C" fn(*mut c_void);
        // SAFETY: the functions at these places take an object of their kind, which nobody uses after this.
        unsafe {
            let function = std::mem::transmute::<*const c_void, Function>((*self.0).0[place]);
            function(object);
        }
    }
}
