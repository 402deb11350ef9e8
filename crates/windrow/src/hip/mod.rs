//! HIP: AMD GPUs, by kernels compiled for the device at hand.
//!
//! Nothing of ROCm is needed to build. `libamdhip64` and `hiprtc` are looked for at run time, in ROCm's folders and in
//! PyTorch's ROCm wheels; a machine without them gets [`Error::NoDevice`](crate::Error::NoDevice), as does a build
//! without the feature `hip`.
//!
//! No device of AMD's has run this yet: its kernels were executed instruction by instruction in an emulator. `docs/amd.md`
//! says which, and how to help.

#[cfg(feature = "hip")]
mod api;
#[cfg(feature = "hip")]
pub(crate) mod device;
#[cfg(feature = "hip")]
mod hiprtc;
#[cfg(feature = "hip")]
mod rocblas;
#[cfg(feature = "hip")]
mod runtime;
#[cfg(all(test, feature = "hip", target_os = "linux"))]
mod tests;

#[cfg(all(test, feature = "hip"))]
pub(crate) use hiprtc::compile_tests;

pub use crate::gpu::{DeviceInfo, DeviceTensor, Event, Graph, Stream, copy};

use crate::Device;
#[cfg(feature = "hip")]
use crate::gpu::Feature;
#[cfg(feature = "hip")]
use crate::gpu::library::{Library, Places};

/// The HIP devices of this machine. Empty if it has none; an error only if there is no runtime or it does not answer.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) without ROCm or in a build without the feature `hip`,
/// [`Error::Backend`](crate::Error::Backend).
///
/// ```
/// match windrow::hip::devices() {
///     Ok(devices) => devices.iter().for_each(|d| println!("hip:{} {}", d.index, d.name)),
///     Err(reason) => println!("{reason}"),
/// }
/// ```
pub fn devices() -> crate::Result<Vec<DeviceInfo>> {
    crate::gpu::devices(Device::Hip)
}

/// The places of ROCm's libraries: its folders, and the wheels of PyTorch and of ROCm itself.
#[cfg(feature = "hip")]
static PLACES: Places = Places {
    explicit: "WINDROW_HIP_PATH",
    toolkits: &["ROCM_HOME", "ROCM_PATH", "HIP_PATH"],
    installed: "/opt/rocm",
    directories: &["lib", "lib64"],
    packages: &["torch/lib", "_rocm_sdk_core/lib"],
};

/// A library of ROCm. Kernels are of no use without a device, so that one of them missing is as a missing driver.
#[cfg(feature = "hip")]
const fn rocm(stem: &'static str) -> Library {
    Library {
        stem,
        versions: &["", ".7", ".6"],
        companion: None,
        places: Some(&PLACES),
        package: "",
        since: "ROCm 6.0",
        device: Device::Hip(0),
    }
}

/// True if GPUs of an architecture have a feature. `hip.cuh` tells kernels the same about matrix cores.
#[cfg(feature = "hip")]
fn has(architecture: &str, feature: Feature) -> bool {
    let mfma = ["gfx90a", "gfx942", "gfx950"].contains(&architecture);
    let wmma = architecture.starts_with("gfx11") || ["gfx1200", "gfx1201"].contains(&architecture);
    match feature {
        Feature::WavefrontProducts => mfma || wmma,
        Feature::WavefrontFloatProducts => mfma,
        Feature::MatrixProducts
        | Feature::WarpgroupProducts
        | Feature::BulkCopies
        | Feature::OverlappedLaunches
        | Feature::TruncatedSums => false,
    }
}
