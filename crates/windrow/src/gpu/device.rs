//! GPUs in use.

use super::kernel::{KernelCache, Kernels};
use super::runtime::{Failure, Feature, Handle, Outcome, Runtime};
use super::shared::Released;
use super::wrong_index::WrongIndex;
use crate::{DType, Device, Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, Once};

/// What there is to know of a CUDA device before using it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
/// [`Error::NoDevice`] without a driver or in a build without the feature `cuda`, [`Error::Backend`].
///
/// ```
/// match windrow::cuda::devices() {
///     Ok(devices) => devices.iter().for_each(|d| println!("cuda:{} {}", d.index, d.name)),
///     Err(reason) => println!("{reason}"),
/// }
/// ```
pub fn devices() -> Result<Vec<DeviceInfo>> {
    check_not_forked()?;
    (0..backend::count()?).map(|i| Ok(Gpu::get(i)?.info.clone())).collect()
}

/// A device that a backend has started.
pub(crate) struct Started {
    pub(crate) info: DeviceInfo,
    /// Dynamic shared memory that a block may have, in bytes.
    pub(crate) shared_bytes: usize,
    pub(crate) runtime: Box<dyn Runtime>,
}

#[cfg(feature = "cuda")]
use crate::cuda::device as backend;

/// In the place of a backend where none is built in.
#[cfg(not(feature = "cuda"))]
mod backend {
    use super::Started;
    use crate::{Device, Error, Result};

    pub(super) fn count() -> Result<u32> {
        start(0).map(|_| 0)
    }

    pub(super) fn start(index: u32) -> Result<Started> {
        Err(Error::NoDevice {
            device: Device::Cuda(index).to_string(),
            reason: "the library was built without the feature `cuda`".into(),
        })
    }
}

/// Set in a process that was forked from one that had started a GPU.
static FORKED: AtomicBool = AtomicBool::new(false);

/// CUDA does not survive a fork: in the child its calls fail or hang, and locks may be held by threads that are not there.
fn check_not_forked() -> Result<()> {
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(Error::NoDevice {
        device: Device::Cuda(0).backend().into(),
        reason: "this process was forked from one that had started CUDA, which a fork does not \
                 survive: start processes by `spawn` or `forkserver`, or fork before CUDA is used"
            .into(),
    })
}

/// For a backend, before it starts its driver.
pub(crate) fn notice_forks() {
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

/// A device in use, and the kernels loaded into it. Lives as long as the process.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) info: DeviceInfo,
    /// Dynamic shared memory that a block may have, in bytes.
    pub(crate) shared_bytes: usize,
    pub(super) runtime: Box<dyn Runtime>,
    pub(super) kernels: KernelCache,
    /// Of `column_sum`, by the type of the sums.
    pub(super) column_sums: Kernels<DType>,
    /// What nobody owns any longer, until it is freed.
    pub(super) released: Released,
    pub(super) wrong_index: WrongIndex,
}

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
        let Started { info, shared_bytes, runtime } = backend::start(index)?;
        let gpu = Box::leak(Box::new(Gpu {
            info,
            shared_bytes,
            runtime,
            kernels: KernelCache::default(),
            column_sums: Kernels::default(),
            released: Released::default(),
            wrong_index: WrongIndex::default(),
        }));
        gpus.push(gpu);
        Ok(gpu)
    }

    /// Lets kernels on `peer` reach what is allocated on this device, if the two are linked: between devices of one
    /// process, NCCL reads and writes the tensors themselves.
    pub(crate) fn allow_access_by(&self, peer: &Gpu) -> Result<()> {
        // SAFETY: both devices are in use.
        self.call(|runtime| unsafe { runtime.allow_access_by(peer.info.index) })
    }

    pub(crate) fn device(&self) -> Device {
        Device::Cuda(self.info.index)
    }

    pub(crate) fn has(&self, feature: Feature) -> bool {
        self.runtime.has(feature)
    }

    /// Blocks of a launch that the device runs at once, so many on a multiprocessor.
    pub(crate) fn wave(&self, blocks: usize) -> usize {
        blocks * self.info.multiprocessors as usize
    }

    /// As [`Gpu::wave`], down to a power of two, as sizes often are.
    pub(crate) fn round_wave(&self, blocks: usize) -> usize {
        1 << self.wave(blocks).max(1).ilog2()
    }

    /// Calls the backend with the device current.
    ///
    /// # Errors
    /// [`Error::NoDevice`] in a process that was forked since the device was started; [`Error::Backend`].
    pub(super) fn call<T>(&self, f: impl FnOnce(&dyn Runtime) -> Outcome<T>) -> Result<T> {
        let _current = self.enter()?;
        f(&*self.runtime).map_err(|failure| failure.on(self.device()))
    }

    /// As [`Gpu::call`] for calls that wait for the device: an error may be of a kernel.
    pub(super) fn wait<T>(&self, f: impl FnOnce(&dyn Runtime) -> Outcome<T>) -> Result<T> {
        let _current = self.enter()?;
        f(&*self.runtime).map_err(|failure| self.fault(failure))
    }

    /// As [`Gpu::call`], where nobody can be told of an error: it was or will be told by a call that can return it.
    pub(super) fn try_call(&self, f: impl FnOnce(&dyn Runtime) -> Outcome<()>) {
        let _ = self.call(f);
    }

    /// The error for a fault that the device reports, with the name of the kernel launched last.
    fn fault(&self, failure: Failure) -> Error {
        failure.of(self.kernels.suspect(), self.device())
    }

    /// Makes the device current on this thread until the guard is dropped; what was current before
    /// (torch keeps its current device there) is current again then.
    ///
    /// # Errors
    /// As [`Gpu::call`].
    pub(crate) fn enter(&self) -> Result<Current<'_>> {
        check_not_forked()?;
        let previous = self.runtime.enter().map_err(|failure| failure.on(self.device()))?;
        Ok(Current { gpu: self, previous })
    }

    /// Calls `f`, which uses streams of its own and may allocate and wait even while this or another thread captures
    /// other streams in a mode that forbids it.
    pub(crate) fn despite_captures<T>(&self, f: impl FnOnce() -> T) -> T {
        /// The mode to put back, also after a panic.
        struct Mode<'a>(&'a dyn Runtime, std::ffi::c_int);

        impl Drop for Mode<'_> {
            fn drop(&mut self) {
                self.0.restore_captures(self.1);
            }
        }

        let _mode = Mode(&*self.runtime, self.runtime.relax_captures());
        f()
    }
}

/// See [`Gpu::enter`].
pub(crate) struct Current<'a> {
    gpu: &'a Gpu,
    /// It binds the guard to its thread, too.
    previous: Option<Handle>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: undoes `enter` on this thread.
            unsafe { self.gpu.runtime.leave(previous) };
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
