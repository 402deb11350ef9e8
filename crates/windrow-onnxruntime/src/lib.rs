//! Windrow's operators as custom operators of [ONNX Runtime](https://onnxruntime.ai), on the CPU.
//!
//! A session loads this library, or the extension of the Python package, which is the same in this respect
//! (`SessionOptions.register_custom_ops_library`). From then on nodes of the domain `ai.windrow` are computed here:
//! `Conv`, `Gelu`, `CausalConvWithState` and `VarlenCausalConvWithState`. Each has the inputs, outputs and attributes of
//! the operator of its name of ONNX, the last of ONNX Runtime (domain `com.microsoft`, which has no kernel for the CPU).
//! The convolutions have an attribute `activation`, which is one of Windrow's names.

mod api;
mod causal_conv;
mod conv;
mod gelu;
mod operator;
mod plans;
mod tensors;
mod varlen_causal_conv;

use api::{Api, ApiBase, CustomOpDomain, SessionOptions, Status, VERSION};
use operator::{CustomOp, custom_ops};
use std::ffi::CStr;
use std::ptr::null_mut;

/// The domain of the operators.
const DOMAIN: &CStr = c"ai.windrow";

/// The entry of a session's options that says that they have the domain: ONNX Runtime refuses to add it twice, and options
/// may be given the library by a program and by a library of its.
const REGISTERED: &CStr = c"ai.windrow.registered";

static GELU: [CustomOp; 3] = custom_ops::<gelu::Gelu>();
static CONV: [CustomOp; 3] = custom_ops::<conv::Conv>();
static CAUSAL_CONV: [CustomOp; 3] = custom_ops::<causal_conv::CausalConvWithState>();
static VARLEN: [CustomOp; 3] = custom_ops::<varlen_causal_conv::VarlenCausalConvWithState>();

/// The function that ONNX Runtime calls when a session's options name this library.
///
/// Returns null, or a status that says why nothing was registered: ONNX Runtime before 1.16.
///
/// # Safety
/// Both pointers are those that ONNX Runtime gives; the options live as long as the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn RegisterCustomOps(
    options: *mut SessionOptions,
    base: *const ApiBase,
) -> *mut Status {
    // SAFETY: the caller's promise.
    let Some(api) = (unsafe { Api::of(base, VERSION) }) else {
        // SAFETY: the base that ONNX Runtime gives; every version has what makes a status.
        return match unsafe { Api::of(base, 1) } {
            Some(api) => api.status(api::FAIL, "windrow needs ONNX Runtime 1.16 or later"),
            None => null_mut(),
        };
    };
    // SAFETY: options that live as long as this call, says the caller.
    match unsafe { register(&api, options) } {
        Ok(()) => null_mut(),
        Err(status) => status,
    }
}

/// # Safety
/// As [`RegisterCustomOps`].
unsafe fn register(api: &Api, options: *mut SessionOptions) -> Result<(), *mut Status> {
    let mut is_registered = 0;
    // SAFETY: the options, and a key that lives as long as the process.
    unsafe { api.has_session_config_entry(options, REGISTERED.as_ptr(), &mut is_registered)? };
    if is_registered != 0 {
        return Ok(());
    }
    let mut domain: *mut CustomOpDomain = null_mut();
    // SAFETY: what is registered lives as long as the process. The domain is never released: sessions refer to it, and
    // nobody says when the last of them has ended.
    unsafe {
        api.create_custom_op_domain(DOMAIN.as_ptr(), &mut domain)?;
        for op in GELU.iter().chain(&CONV).chain(&CAUSAL_CONV).chain(&VARLEN) {
            api.custom_op_domain_add(domain, op)?;
        }
        api.add_custom_op_domain(options, domain)?;
        api.add_session_config_entry(options, REGISTERED.as_ptr(), c"1".as_ptr())
    }
}
