//! The number of HIP devices, and how one is started.

use super::api::{Api, Properties};
use super::runtime::Hip;
use crate::gpu::{Backend, DeviceInfo, Failure, Outcome, Started, keep_freed_memory, notice_forks};
use crate::{Device, Error, Result};
use std::ffi::{CStr, c_char, c_int};

/// `hipError_t`
const NO_DEVICE: c_int = 100;
/// HIP's version numbers: major * 10^7 + minor * 10^5 + patch.
const OLDEST: c_int = 60_000_000;

pub(crate) const BACKEND: Backend = Backend { name: "hip", count, start };

/// The number of devices.
///
/// # Errors
/// [`Error::NoDevice`] without a runtime, or with one that is too old; [`Error::Backend`].
fn count() -> Result<u32> {
    Ok(count_of(Api::get()?)?.0)
}

/// The number of devices, and the runtime's version.
pub(super) fn count_of(api: &Api) -> Result<(u32, c_int)> {
    let none = |reason| Error::NoDevice { device: "hip".into(), reason };
    notice_forks();
    let (mut count, mut version) = (0, 0);
    // SAFETY: hipInit may be called any number of times.
    match unsafe { api.hipInit(0) } {
        Ok(()) => {}
        Err(Failure { status: NO_DEVICE, .. }) => return Ok((0, 0)),
        Err(failure) => return Err(none(format!("HIP does not start: {}", failure.words))),
    }
    // SAFETY: the runtime is initialised and writes one integer.
    unsafe { api.hipRuntimeGetVersion(&mut version) }
        .map_err(|failure| failure.on(Device::Hip(0)))?;
    if version < OLDEST {
        let (major, minor) = numbers(version);
        return Err(none(format!("HIP {major}.{minor} is too old; ROCm 6.0 and later are known")));
    }
    // SAFETY: the call writes one integer.
    match unsafe { api.hipGetDeviceCount(&mut count) } {
        Ok(()) => Ok((count as u32, version)),
        Err(Failure { status: NO_DEVICE, .. }) => Ok((0, version)),
        Err(failure) => Err(failure.on(Device::Hip(0))),
    }
}

fn numbers(version: c_int) -> (u32, u32) {
    (version as u32 / 10_000_000, version as u32 / 100_000 % 100)
}

/// Starts the device of this index.
///
/// # Errors
/// [`Error::NoDevice`], [`Error::Backend`]; [`Error::Unsupported`] for a device whose wavefronts have neither 32 nor 64
/// threads.
fn start(index: u32) -> Result<Started> {
    start_by(Api::get()?, index)
}

pub(super) fn start_by(api: &'static Api, index: u32) -> Result<Started> {
    let (count, version) = count_of(api)?;
    let device = Device::Hip(index);
    if index >= count {
        let reason = format!("this machine has {count} HIP devices");
        return Err(Error::NoDevice { device: device.to_string(), reason });
    }
    let started = start_existing(api, index, version).map_err(|failure| failure.on(device))?;
    match started.info.warp {
        32 | 64 => Ok(started),
        other => Err(Error::unsupported(
            format!("{} with wavefronts of {other}", started.info.name),
            "kernels are written for 32 and 64 threads",
        )),
    }
}

fn start_existing(api: &'static Api, index: u32, version: c_int) -> Outcome<Started> {
    let number = index as c_int;
    let mut properties = Properties::EMPTY;
    let mut memory = 0;
    // SAFETY: the index exists, and each call writes to a local of the type and size it expects.
    unsafe {
        api.hipGetDevicePropertiesR0600(&mut properties, number)?;
        api.hipDeviceTotalMem(&mut memory, number)?;
    }
    let attribute = |which: c_int| {
        let mut value = 0;
        // SAFETY: writes one number about a device that exists.
        unsafe { api.hipDeviceGetAttribute(&mut value, which, number) }.map(|()| value as u32)
    };
    // `hipDeviceAttribute_t`
    const L2_CACHE_SIZE: c_int = 19;
    const COMPUTE_CAPABILITY: [c_int; 2] = [23, 61];
    const MULTIPROCESSOR_COUNT: c_int = 63;
    const MAX_SHARED_MEMORY_PER_BLOCK: c_int = 74;
    const WARP_SIZE: c_int = 87;
    const MEMORY_POOLS_SUPPORTED: c_int = 88;
    // `gfx942:sramecc+:xnack-`: code for the chip runs whatever is set there.
    let architecture = text(&properties.architecture);
    let architecture = architecture.split(':').next().unwrap_or_default().to_owned();
    let info = DeviceInfo {
        index,
        name: text(&properties.name),
        architecture: architecture.clone(),
        compute_capability: (attribute(COMPUTE_CAPABILITY[0])?, attribute(COMPUTE_CAPABILITY[1])?),
        multiprocessors: attribute(MULTIPROCESSOR_COUNT)?,
        warp: attribute(WARP_SIZE)?,
        memory,
        l2_cache: attribute(L2_CACHE_SIZE)? as usize,
        driver: numbers(version),
    };
    let memory_pools = attribute(MEMORY_POOLS_SUPPORTED)? != 0;
    let shared_bytes = attribute(MAX_SHARED_MEMORY_PER_BLOCK)? as usize;
    let hip = Hip::new(api, index, architecture, memory_pools);
    keep_freed_memory(&hip)?;
    Ok(Started { info, shared_bytes, runtime: Box::new(hip) })
}

/// The text in a field of fixed length. The field's last byte ends it, whatever was written there.
fn text(field: &[c_char; 256]) -> String {
    let mut bytes = field.map(|c| c as u8);
    bytes[255] = 0;
    CStr::from_bytes_until_nul(&bytes).map_or(String::new(), |s| s.to_string_lossy().into_owned())
}
