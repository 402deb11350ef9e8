//! CUDA devices.

use super::kernel::KernelCache;
use super::library::Library;
use super::shared::Released;
use super::{check, describe};
use crate::{Device, Error, Result};
use cudarc::driver::sys::{self, CUcontext, CUdevice_attribute as Attribute, CUresult};
use std::ffi::{CStr, c_int};
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, Once};

/// What there is to know of a CUDA device before using it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Index, as in [`Device::Cuda`].
    pub index: u32,
    /// The vendor's name.
    pub name: String,
    /// Compute capability: `(9, 0)` is sm_90.
    pub compute_capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Device memory in bytes.
    pub memory: usize,
    /// L2 cache in bytes.
    pub l2_cache: usize,
    /// CUDA version of the driver: `(13, 0)`.
    pub driver: (u32, u32),
}

/// All CUDA devices of this machine. Empty if it has none; an error only if there is no driver or
/// it does not answer.
///
/// # Errors
/// [`Error::NoDevice`] without a driver, [`Error::Backend`].
///
/// ```
/// match windrow::cuda::devices() {
///     Ok(devices) => devices.iter().for_each(|d| println!("cuda:{} {}", d.index, d.name)),
///     Err(reason) => println!("{reason}"),
/// }
/// ```
pub fn devices() -> Result<Vec<DeviceInfo>> {
    (0..count()?).map(|i| Ok(Gpu::get(i)?.info.clone())).collect()
}

fn count() -> Result<u32> {
    check_not_forked()?;
    Library::Driver.require()?;
    notice_forks();
    let mut count = 0;
    // SAFETY: the driver is loaded; cuInit may be called any number of times.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        CUresult::CUDA_ERROR_NO_DEVICE => return Ok(0),
        error => {
            let reason = format!("the driver does not start: {}", describe(error));
            return Err(Error::NoDevice { device: "cuda".into(), reason });
        }
    }
    // SAFETY: the driver is initialised and writes one integer.
    check(unsafe { sys::cuDeviceGetCount(&mut count) }, "cuDeviceGetCount", Device::Cuda(0))?;
    Ok(count as u32)
}

/// Set in a process that was forked from one that had started CUDA.
static FORKED: AtomicBool = AtomicBool::new(false);

/// CUDA does not survive a fork: in the child its calls fail or hang, and locks may be held by threads that are not there.
fn check_not_forked() -> Result<()> {
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(Error::NoDevice {
        device: "cuda".into(),
        reason: "this process was forked from one that had started CUDA, which a fork does not \
                 survive: start processes by `spawn` or `forkserver`, or fork before CUDA is used"
            .into(),
    })
}

fn notice_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        #[cfg(target_os = "linux")]
        {
            extern "C" fn in_child() {
                FORKED.store(true, Ordering::Relaxed);
            }
            // SAFETY: the handler only stores to a static.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        }
    });
}

/// A device in use: its primary context, which torch and the runtime API share, and the kernels
/// loaded into it. Lives as long as the process.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) info: DeviceInfo,
    context: Context,
    /// Whether it can allocate in stream order.
    pub(super) memory_pools: bool,
    pub(super) kernels: KernelCache,
    /// What nobody owns any longer, until it is freed.
    pub(super) released: Released,
}

#[derive(Debug)]
struct Context(CUcontext);
// SAFETY: a context handle may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: several threads may have one context current at once.
unsafe impl Sync for Context {}

impl Gpu {
    /// The device of this index, started at first use.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::Backend`].
    pub(crate) fn get(index: u32) -> Result<&'static Gpu> {
        static GPUS: LazyLock<Mutex<Vec<&'static Gpu>>> = LazyLock::new(Mutex::default);
        check_not_forked()?;
        let mut gpus = GPUS.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(gpu) = gpus.iter().find(|g| g.info.index == index) {
            return Ok(gpu);
        }
        let gpu = Box::leak(Box::new(Gpu::start(index)?));
        gpus.push(gpu);
        Ok(gpu)
    }

    fn start(index: u32) -> Result<Gpu> {
        let count = count()?;
        let device = Device::Cuda(index);
        if index >= count {
            let reason = format!("this machine has {count} CUDA devices");
            return Err(Error::NoDevice { device: device.to_string(), reason });
        }
        let (mut handle, mut driver, mut memory) = (0, 0, 0);
        let mut name = [0; 256];
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is initialised, the index exists, and each call writes to a local of
        // the type and size it expects.
        unsafe {
            check(sys::cuDeviceGet(&mut handle, index as c_int), "cuDeviceGet", device)?;
            check(sys::cuDriverGetVersion(&mut driver), "cuDriverGetVersion", device)?;
            check(sys::cuDeviceTotalMem_v2(&mut memory, handle), "cuDeviceTotalMem", device)?;
            let get_name = sys::cuDeviceGetName(name.as_mut_ptr(), 255, handle);
            check(get_name, "cuDeviceGetName", device)?;
            let retain = sys::cuDevicePrimaryCtxRetain(&mut context, handle);
            check(retain, "cuDevicePrimaryCtxRetain", device)?;
        }
        let attribute = |which| -> Result<u32> {
            let mut value = 0;
            // SAFETY: writes one number about a device that exists.
            let result = unsafe { sys::cuDeviceGetAttribute(&mut value, which, handle) };
            check(result, "cuDeviceGetAttribute", device)?;
            Ok(value as u32)
        };
        let info = DeviceInfo {
            index,
            // SAFETY: the driver wrote a terminated string, and the last byte stayed zero.
            name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
            compute_capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory,
            l2_cache: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            driver: (driver as u32 / 1000, driver as u32 % 1000 / 10),
        };
        let memory_pools = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0;
        let gpu = Gpu {
            info,
            context: Context(context),
            memory_pools,
            kernels: KernelCache::default(),
            released: Released::default(),
        };
        if memory_pools {
            gpu.keep_freed_memory(handle)?;
        }
        Ok(gpu)
    }

    /// Lets the memory pool keep what is freed: by default every synchronisation gives it back to
    /// the system, and the next allocation pays for it again.
    fn keep_freed_memory(&self, handle: sys::CUdevice) -> Result<()> {
        let mut pool = std::ptr::null_mut();
        let mut threshold = u64::MAX;
        let _current = self.enter()?;
        // SAFETY: the device has memory pools; the attribute is a 64-bit number.
        unsafe {
            self.check(
                sys::cuDeviceGetDefaultMemPool(&mut pool, handle),
                "cuDeviceGetDefaultMemPool",
            )?;
            let set = sys::cuMemPoolSetAttribute(
                pool,
                sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut threshold).cast(),
            );
            self.check(set, "cuMemPoolSetAttribute")
        }
    }

    /// Lets kernels on `peer` reach what is allocated from this device's pool, if the two are linked:
    /// between devices of one process, NCCL reads and writes the tensors themselves.
    pub(crate) fn allow_access_by(&self, peer: &Gpu) -> Result<()> {
        if !self.memory_pools {
            return Ok(());
        }
        let (mut own, mut other, mut linked) = (0, 0, 0);
        let mut pool = std::ptr::null_mut();
        let _current = self.enter()?;
        // SAFETY: both devices exist, and each call writes to a local of the type it expects.
        unsafe {
            self.check(sys::cuDeviceGet(&mut own, self.info.index as c_int), "cuDeviceGet")?;
            self.check(sys::cuDeviceGet(&mut other, peer.info.index as c_int), "cuDeviceGet")?;
            let linked = sys::cuDeviceCanAccessPeer(&mut linked, other, own);
            self.check(linked, "cuDeviceCanAccessPeer")?;
            let get_pool = sys::cuDeviceGetDefaultMemPool(&mut pool, own);
            self.check(get_pool, "cuDeviceGetDefaultMemPool")?;
        }
        if linked == 0 {
            return Ok(());
        }
        let access = sys::CUmemAccessDesc {
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: other,
            },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the pool lives as long as the device; one description is given.
        self.check(unsafe { sys::cuMemPoolSetAccess(pool, &access, 1) }, "cuMemPoolSetAccess")
    }

    pub(crate) fn device(&self) -> Device {
        Device::Cuda(self.info.index)
    }

    /// `Ok`, or an error that names the call.
    pub(super) fn check(&self, result: CUresult, what: impl Display) -> Result<()> {
        check(result, what, self.device())
    }

    /// Makes the device current on this thread until the guard is dropped; what was current before
    /// (torch keeps its current device there) is current again then.
    ///
    /// # Errors
    /// [`Error::NoDevice`] in a process that was forked since CUDA was started; [`Error::Backend`].
    pub(crate) fn enter(&self) -> Result<Current> {
        check_not_forked()?;
        let mut current = std::ptr::null_mut();
        // SAFETY: the driver is initialised.
        self.check(unsafe { sys::cuCtxGetCurrent(&mut current) }, "cuCtxGetCurrent")?;
        let pushed = current != self.context.0;
        if pushed {
            // SAFETY: the primary context is retained for the life of the process.
            let push = unsafe { sys::cuCtxPushCurrent_v2(self.context.0) };
            self.check(push, "cuCtxPushCurrent")?;
        }
        Ok(Current { pushed, thread_bound: std::marker::PhantomData })
    }
}

/// See [`Gpu::enter`].
pub(crate) struct Current {
    pushed: bool,
    /// A guard must be dropped on the thread that made it.
    thread_bound: std::marker::PhantomData<*const ()>,
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pops what `enter` pushed on this thread.
            unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a driver or without: an index that does not exist is a typed error.
    #[test]
    fn a_device_that_does_not_exist_is_an_error() {
        assert!(matches!(Gpu::get(4000), Err(Error::NoDevice { .. })));
        if let Ok(found) = devices() {
            assert!(found.iter().enumerate().all(|(i, d)| d.index as usize == i));
        }
    }

    /// Nothing without a device.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_forked_process_gets_an_error() {
        let Ok(gpu) = Gpu::get(0) else { return };
        // SAFETY: the child only asks for the device and leaves; nothing that it does takes a lock.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = |result: Result<()>| matches!(result, Err(Error::NoDevice { .. }));
            let good = refused(gpu.enter().map(drop)) && refused(Gpu::get(0).map(drop));
            // SAFETY: leaves without running anything of the parent's.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0);
        assert!(gpu.enter().is_ok(), "the parent goes on");
    }
}
