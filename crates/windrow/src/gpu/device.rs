//! GPUs that are in use.

use super::kernel::{KernelCache, Kernels};
use super::runtime::{Failure, Feature, Handle, Outcome, Runtime};
use super::shared::Released;
use super::wrong_index::WrongIndex;
use crate::{DType, Device, Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, Once};

/// The properties of a GPU that are known before it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Index, as in [`Device::Cuda`] and [`Device::Hip`].
    pub index: u32,
    /// The device's name as the vendor gives it, such as `NVIDIA H200`.
    pub name: String,
    /// The architecture that kernels are compiled for: `sm_90`, `gfx942`.
    pub architecture: String,
    /// Compute capability: `(9, 0)` is sm_90; on HIP the numbers that its runtime gives.
    pub compute_capability: (u32, u32),
    /// Number of streaming multiprocessors, or compute units.
    pub multiprocessors: u32,
    /// The number of threads of a warp (32) or of a wavefront (32 or 64).
    pub warp: u32,
    /// Device memory in bytes.
    pub memory: usize,
    /// L2 cache in bytes.
    pub l2_cache: usize,
    /// CUDA version of the driver, or HIP version of the runtime: `(13, 0)`.
    pub driver: (u32, u32),
}

/// The devices of this machine for the backend of `device`. Empty if it has none. It is an error only if there is no
/// driver or if the driver fails.
///
/// # Errors
/// [`Error::NoDevice`] without a driver or in a build without the backend's feature, [`Error::Backend`].
pub(crate) fn devices(of: fn(u32) -> Device) -> Result<Vec<DeviceInfo>> {
    let first = of(0);
    check_not_forked(first)?;
    let (backend, _) = backend(first)?;
    (0..(backend.count)()?).map(|i| Ok(Gpu::get(of(i))?.info.clone())).collect()
}

/// The first device of each backend, for tests that have nothing to do without one.
#[cfg(test)]
pub(crate) fn first_devices() -> Vec<Device> {
    let found = [Device::Cuda as fn(u32) -> Device, Device::Hip].into_iter();
    found.filter(|&of| devices(of).is_ok_and(|d| !d.is_empty())).map(|of| of(0)).collect()
}

/// A device that a backend has started.
pub(crate) struct Started {
    pub(crate) info: DeviceInfo,
    /// The maximum dynamic shared memory of a block, in bytes.
    pub(crate) shared_bytes: usize,
    pub(crate) runtime: Box<dyn Runtime>,
}

/// The description of a backend in the library's list, `BACKENDS`. This module itself knows no backend.
pub(crate) struct Backend {
    /// The name, as in [`Device::backend`].
    pub(crate) name: &'static str,
    /// The function that counts its devices.
    pub(crate) count: fn() -> Result<u32>,
    /// Starts the device of this index.
    pub(crate) start: fn(u32) -> Result<Started>,
}

/// The backend of a device, and the device's index there.
fn backend(device: Device) -> Result<(&'static Backend, u32)> {
    let index = match device {
        Device::Cpu => return Err(Error::parameter("device", device, "a GPU")),
        Device::Cuda(index) | Device::Hip(index) => index,
    };
    let name = device.backend();
    let found = crate::BACKENDS.iter().find(|backend| backend.name == name);
    found.map(|backend| (backend, index)).ok_or_else(|| Error::NoDevice {
        device: device.to_string(),
        reason: format!("the library was built without the feature `{name}`"),
    })
}

/// Set in a process that was forked from one that had started a GPU.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Returns an error in a process that was forked from one that had started a GPU. There the GPU's state is unusable:
/// calls fail or hang, and locks may be held by threads that do not exist in the child.
fn check_not_forked(device: Device) -> Result<()> {
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(Error::NoDevice {
        device: device.backend().into(),
        reason: "this process was forked from one that had started a GPU, which a fork does not \
                 survive: start processes by `spawn` or `forkserver`, or fork before GPUs are used"
            .into(),
    })
}

/// Registers a fork handler. A backend calls this before it starts its driver.
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
    device: Device,
    pub(crate) info: DeviceInfo,
    /// The maximum dynamic shared memory of a block, in bytes.
    pub(crate) shared_bytes: usize,
    pub(super) runtime: Box<dyn Runtime>,
    pub(super) kernels: KernelCache,
    /// The kernels of `column_sum`, by the type of the sums.
    pub(super) column_sums: Kernels<DType>,
    /// The memory and handles that have no owner any more and have not been freed yet.
    pub(super) released: Released,
    pub(super) wrong_index: WrongIndex,
}

impl Gpu {
    /// The device for tests that do not choose one.
    #[cfg(test)]
    pub(crate) fn of_tests() -> Result<&'static Gpu> {
        Gpu::get(Device::Cuda(0)).or_else(|_| Gpu::get(Device::Hip(0)))
    }

    /// The device, started at first use.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::Backend`]; [`Error::Parameter`] for the CPU.
    pub(crate) fn get(device: Device) -> Result<&'static Gpu> {
        static GPUS: LazyLock<Mutex<Vec<&'static Gpu>>> = LazyLock::new(Mutex::default);
        check_not_forked(device)?;
        let mut gpus = GPUS.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(gpu) = gpus.iter().find(|g| g.device == device) {
            return Ok(gpu);
        }
        let (backend, index) = backend(device)?;
        let Started { info, shared_bytes, runtime } = (backend.start)(index)?;
        let gpu = Box::leak(Box::new(Gpu {
            device,
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

    /// Allows kernels on `peer` to access memory of this device, if the two are linked. NCCL needs this: between
    /// devices of one process it accesses the tensors directly.
    pub(crate) fn allow_access_by(&self, peer: &Gpu) -> Result<()> {
        // SAFETY: both devices are in use.
        self.call(|runtime| unsafe { runtime.allow_access_by(peer.info.index) })
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn has(&self, feature: Feature) -> bool {
        self.runtime.has(feature)
    }

    /// The number of blocks that the device runs at once if each multiprocessor runs `blocks` of them.
    pub(crate) fn wave(&self, blocks: usize) -> usize {
        blocks * self.info.multiprocessors as usize
    }

    /// The number of blocks as in [`Gpu::wave`], rounded down to a power of two, because sizes often are powers of two.
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

    /// Calls like [`Gpu::call`], for functions that wait for the device, so that an error may be that of an earlier
    /// kernel.
    pub(super) fn wait<T>(&self, f: impl FnOnce(&dyn Runtime) -> Outcome<T>) -> Result<T> {
        let _current = self.enter()?;
        f(&*self.runtime).map_err(|failure| self.fault(failure))
    }

    /// Calls like [`Gpu::call`], for code that cannot return an error. The error was or will be reported by a call that
    /// can.
    pub(super) fn try_call(&self, f: impl FnOnce(&dyn Runtime) -> Outcome<()>) {
        let _ = self.call(f);
    }

    /// The error for a device error, with the name of the kernel that was launched last.
    fn fault(&self, failure: Failure) -> Error {
        failure.of(self.kernels.suspect(), self.device())
    }

    /// Makes the device current on this thread until the guard is dropped, which restores the previous device (torch
    /// keeps its current device there).
    ///
    /// # Errors
    /// As [`Gpu::call`].
    pub(crate) fn enter(&self) -> Result<Current<'_>> {
        check_not_forked(self.device)?;
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
    /// The previous device; it also binds the guard to its thread.
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

    /// With a driver or without, an index that does not exist is a typed error.
    #[test]
    fn a_device_that_does_not_exist_is_an_error() {
        assert!(matches!(Gpu::get(Device::Cpu), Err(Error::Parameter { .. })));
        for kind in [Device::Cuda, Device::Hip] {
            assert!(matches!(Gpu::get(kind(4000)), Err(Error::NoDevice { .. })));
            if let Ok(found) = devices(kind) {
                assert!(found.iter().enumerate().all(|(i, d)| d.index as usize == i));
            }
        }
    }

    /// Does nothing without a GPU.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_forked_process_gets_an_error() {
        let Ok(gpu) = Gpu::of_tests() else { return };
        // SAFETY: the child only asks for the device and leaves; nothing that it does takes a lock.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = |result: Result<()>| matches!(result, Err(Error::NoDevice { .. }));
            let again = Gpu::get(gpu.device).map(drop);
            let good = refused(gpu.enter().map(drop)) && refused(again);
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
