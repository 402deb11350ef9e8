//! CUDA: devices, streams, memory, and kernels compiled for the device at hand.
//!
//! Nothing of CUDA is needed to build. The driver, NVRTC and cuBLASLt are looked for at run time; a machine without
//! them gets [`Error::NoDevice`](crate::Error::NoDevice) or [`Error::Backend`](crate::Error::Backend), as does a
//! build without the feature `cuda`.
//!
//! Inside, this is a backend of `gpu`: the features of the devices, and the calls of CUDA's libraries.

#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(feature = "cuda")]
mod cudnn;
#[cfg(feature = "cuda")]
pub(crate) mod device;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod nvrtc;
#[cfg(feature = "cuda")]
mod runtime;

pub use crate::gpu::{DeviceInfo, DeviceTensor, Event, Graph, Stream, copy};

/// The CUDA devices of this machine. Empty if it has none; an error only if there is no driver or it does not answer.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) without a driver or in a build without the feature `cuda`,
/// [`Error::Backend`](crate::Error::Backend).
///
/// ```
/// match windrow::cuda::devices() {
///     Ok(devices) => devices.iter().for_each(|d| println!("cuda:{} {}", d.index, d.name)),
///     Err(reason) => println!("{reason}"),
/// }
/// ```
pub fn devices() -> crate::Result<Vec<DeviceInfo>> {
    crate::gpu::devices(Device::Cuda)
}

#[cfg(all(test, feature = "cuda"))]
pub(crate) use nvrtc::tests as compile_tests;

use crate::Device;
#[cfg(feature = "cuda")]
use crate::gpu::Feature;
#[cfg(feature = "cuda")]
use crate::gpu::library::{Library, Places};

/// The places of CUDA's libraries: toolkits and the pip packages `nvidia/*/lib`.
#[cfg(feature = "cuda")]
static PLACES: Places = Places {
    explicit: "WINDROW_CUDA_PATH",
    toolkits: &["CUDA_HOME", "CUDA_PATH"],
    installed: "/usr/local/cuda",
    directories: &["lib64", "targets/x86_64-linux/lib"],
    packages: &["nvidia/*/lib"],
};

/// A library of the toolkit.
#[cfg(feature = "cuda")]
pub(crate) const fn toolkit(stem: &'static str, package: &'static str) -> Library {
    Library {
        stem,
        versions: &["", ".13", ".12"],
        companion: None,
        places: Some(&PLACES),
        package,
        since: "CUDA 12.0",
        device: Device::Cuda(0),
    }
}

/// True if devices of a compute capability have a feature. Other code queries features only.
#[cfg(feature = "cuda")]
fn has(capability: (u32, u32), feature: Feature) -> bool {
    match feature {
        Feature::TruncatedSums => true,
        Feature::WavefrontProducts | Feature::WavefrontFloatProducts => false,
        Feature::MatrixProducts => capability >= (8, 0),
        Feature::OverlappedLaunches => capability >= (9, 0),
        // Later devices copy in bulk too, but have not run these kernels; products of warpgroups are of 9.0 alone.
        Feature::BulkCopies | Feature::WarpgroupProducts => capability == (9, 0),
    }
}
