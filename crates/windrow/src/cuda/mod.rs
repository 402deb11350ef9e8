//! The CUDA wing: devices, streams, memory, and kernels compiled for the device at hand.
//!
//! Nothing of CUDA is needed to build. The driver, NVRTC and cuBLASLt are looked for at run time
//! (see `Library`); a machine without them gets [`Error::NoDevice`] or [`Error::Backend`].
//!
//! Kernels are CUDA C++ in `kernels/*.cu` of each room, embedded in the binary. A `KernelSpec`
//! names a source, an entry point and constants; `Gpu::kernel` compiles it with NVRTC for the
//! device's architecture, or takes it from the cache on disk, and keeps it loaded. This happens
//! when a plan is made, for gradients when it first computes one, and may happen while a stream is
//! captured. Runs allocate nothing, do not synchronise and can be captured into a graph.

mod cache;
mod capture;
mod column_sum;
mod compile;
mod copy;
mod cudnn;
mod device;
mod gemm;
mod kernel;
mod library;
mod memory;
mod pinned;
mod shared;
mod stream;
mod tensor_map;

pub use capture::Graph;
pub use copy::copy;
pub use device::{DeviceInfo, devices};
pub use memory::DeviceTensor;
pub use stream::{Event, Stream};

pub(crate) use capture::despite_captures;
pub(crate) use column_sum::column_sum;
#[cfg(test)]
pub(crate) use compile::tests as compile_tests;
pub(crate) use compile::{KernelSpec, Source, type_name};
pub(crate) use cudnn::{CudnnConv2d, CudnnConv2dSpec, CudnnDataGrad, CudnnKernel, CudnnWeightGrad};
pub(crate) use device::Gpu;
pub(crate) use gemm::{Gemm, GemmCompute, GemmSpec, Matrix};
pub(crate) use kernel::{Kernel, Launch};
pub(crate) use library::{Library, NCCL};
pub(crate) use memory::{DeviceBuffer, download};
pub(crate) use pinned::PinnedBuffer;
pub(crate) use shared::SharedBuffer;
pub(crate) use tensor_map::TensorMap;

use crate::{Device, Error, Result};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::CStr;
use std::fmt::Display;

/// What the driver says of a call: `Ok`, or an error that names the call.
fn check(result: CUresult, what: impl Display, device: Device) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::Backend { what: what.to_string(), device, detail: describe(result) })
}

/// The driver's name and words for an error.
fn describe(result: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut words = std::ptr::null();
        // SAFETY: the call writes a pointer to a static string, or null for an unknown code.
        unsafe { get(result, &mut words) };
        // SAFETY: a static string that ends with a zero.
        (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) }.to_string_lossy())
    };
    match (text(sys::cuGetErrorName), text(sys::cuGetErrorString)) {
        (Some(name), Some(words)) => format!("{name}: {words}"),
        _ => format!("error {}", result as u32),
    }
}
