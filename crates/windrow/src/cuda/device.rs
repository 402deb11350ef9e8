//! The number of CUDA devices, and how one is started.

use super::driver::Driver;
use super::runtime::Cuda;
use crate::gpu::{Backend, DeviceInfo, Failure, Outcome, Started, keep_freed_memory, notice_forks};
use crate::{Device, Error, Result};
use std::ffi::{CStr, c_int};
use std::ptr::null_mut;

/// `CUresult`
const NO_DEVICE: c_int = 100;

pub(crate) const BACKEND: Backend = Backend { name: "cuda", count, start };

/// The number of devices.
///
/// # Errors
/// [`Error::NoDevice`] without a driver, [`Error::Backend`].
fn count() -> Result<u32> {
    let driver = Driver::get()?;
    notice_forks();
    // SAFETY: cuInit may be called any number of times.
    match unsafe { driver.cuInit(0) } {
        Ok(()) => {}
        Err(Failure { status: NO_DEVICE, .. }) => return Ok(0),
        Err(failure) => {
            let reason = format!("the driver does not start: {}", failure.words);
            return Err(Error::NoDevice { device: "cuda".into(), reason });
        }
    }
    let mut count = 0;
    // SAFETY: the driver is initialised and writes one integer.
    unsafe { driver.cuDeviceGetCount(&mut count) }
        .map_err(|failure| failure.on(Device::Cuda(0)))?;
    Ok(count as u32)
}

/// Starts the device of this index.
///
/// # Errors
/// [`Error::NoDevice`], [`Error::Backend`].
fn start(index: u32) -> Result<Started> {
    let count = count()?;
    if index >= count {
        let reason = format!("this machine has {count} CUDA devices");
        return Err(Error::NoDevice { device: Device::Cuda(index).to_string(), reason });
    }
    start_existing(Driver::get()?, index).map_err(|failure| failure.on(Device::Cuda(index)))
}

fn start_existing(driver: &'static Driver, index: u32) -> Outcome<Started> {
    let (mut handle, mut version, mut memory) = (0, 0, 0);
    let mut name = [0; 256];
    let mut context = null_mut();
    // SAFETY: the driver is initialised, the index exists, and each call writes to a local of
    // the type and size it expects.
    unsafe {
        driver.cuDeviceGet(&mut handle, index as c_int)?;
        driver.cuDriverGetVersion(&mut version)?;
        driver.cuDeviceTotalMem_v2(&mut memory, handle)?;
        driver.cuDeviceGetName(name.as_mut_ptr(), 255, handle)?;
        driver.cuDevicePrimaryCtxRetain(&mut context, handle)?;
    }
    let attribute = |which: c_int| {
        let mut value = 0;
        // SAFETY: writes one number about a device that exists.
        unsafe { driver.cuDeviceGetAttribute(&mut value, which, handle) }.map(|()| value as u32)
    };
    // `CUdevice_attribute`
    const MULTIPROCESSOR_COUNT: c_int = 16;
    const L2_CACHE_SIZE: c_int = 38;
    const COMPUTE_CAPABILITY: [c_int; 2] = [75, 76];
    const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
    const MEMORY_POOLS_SUPPORTED: c_int = 115;
    let capability = (attribute(COMPUTE_CAPABILITY[0])?, attribute(COMPUTE_CAPABILITY[1])?);
    let info = DeviceInfo {
        index,
        // SAFETY: the driver wrote a terminated string, and the last byte stayed zero.
        name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
        compute_capability: capability,
        architecture: format!("sm_{}{}", capability.0, capability.1),
        warp: 32,
        multiprocessors: attribute(MULTIPROCESSOR_COUNT)?,
        memory,
        l2_cache: attribute(L2_CACHE_SIZE)? as usize,
        driver: (version as u32 / 1000, version as u32 % 1000 / 10),
    };
    let memory_pools = attribute(MEMORY_POOLS_SUPPORTED)? != 0;
    let compute_capability = info.compute_capability;
    let cuda = Cuda { driver, index, compute_capability, handle, context, memory_pools };
    keep_freed_memory(&cuda)?;
    let shared_bytes = attribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
    Ok(Started { info, shared_bytes, runtime: Box::new(cuda) })
}
