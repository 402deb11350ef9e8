//! Loaded kernels and their launches.

use super::capture::despite_captures;
use super::{Gpu, KernelSpec, Stream, cache, compile, describe};
use crate::{Error, Result};
use cudarc::driver::sys::{self, CUfunction, CUresult};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::hash::Hash;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Condvar, LazyLock, Mutex};

/// A kernel loaded into a device's context. Lives as long as the process.
#[derive(Debug)]
pub(crate) struct Kernel {
    name: String,
    function: CUfunction,
    shared_bytes: u32,
    overlapped: bool,
    gpu: &'static Gpu,
    /// What it was compiled from, and how often it was launched: for `windrow verify`.
    spec: KernelSpec,
    launches: AtomicU64,
}

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: launching does not change what the handle names, and the counter is atomic.
unsafe impl Sync for Kernel {}

/// Kernels by what they were compiled from.
#[derive(Debug, Default)]
pub(super) struct KernelCache {
    loaded: OnceEach<KernelSpec, &'static Kernel>,
    /// The kernel launched last, to name it when the device reports a fault.
    last: AtomicPtr<Kernel>,
    /// All that were launched.
    launched: Mutex<Vec<&'static Kernel>>,
}

/// Values made once for each key. Threads that want one that is being made wait for it; those that
/// want others do not.
#[derive(Debug)]
struct OnceEach<K, V> {
    /// `None` while a value is being made.
    values: Mutex<HashMap<K, Option<V>>>,
    changed: Condvar,
}

impl<K, V> Default for OnceEach<K, V> {
    fn default() -> Self {
        OnceEach { values: Mutex::default(), changed: Condvar::new() }
    }
}

impl<K: Clone + Eq + Hash, V: Copy> OnceEach<K, V> {
    /// The value of `key`, made by `make` without holding a lock. After an error or a panic the next
    /// thread tries.
    fn get_or_make(&self, key: &K, make: impl FnOnce() -> Result<V>) -> Result<V> {
        let mut values = self.values.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            match values.get(key) {
                Some(Some(value)) => return Ok(*value),
                Some(None) => {
                    values = self.changed.wait(values).unwrap_or_else(|e| e.into_inner());
                }
                None => break,
            }
        }
        values.insert(key.clone(), None);
        drop(values);
        let mut entry = Entry { all: self, key, value: None };
        entry.value = Some(make()?);
        Ok(entry.value.expect("made above"))
    }
}

/// The place of a value that is being made: filled or vacated at the end, also by a panic.
struct Entry<'a, K: Clone + Eq + Hash, V: Copy> {
    all: &'a OnceEach<K, V>,
    key: &'a K,
    value: Option<V>,
}

impl<K: Clone + Eq + Hash, V: Copy> Drop for Entry<'_, K, V> {
    fn drop(&mut self) {
        let mut values = self.all.values.lock().unwrap_or_else(|e| e.into_inner());
        match self.value {
            Some(value) => values.insert(self.key.clone(), Some(value)),
            None => values.remove(self.key),
        };
        self.all.changed.notify_all();
    }
}

/// Size of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    /// Blocks in x, y, z: at most 2^31 - 1, 65535, 65535.
    pub(crate) grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub(crate) block: [u32; 3],
}

impl Gpu {
    /// The kernel of this description, compiled and loaded at first use, also while a stream is captured.
    /// Different kernels are compiled at the same time, the same one once.
    ///
    /// # Errors
    /// [`Error::Backend`] without NVRTC or if it or the driver refuses, [`Error::Unsupported`] if
    /// NVRTC does not know the device.
    pub(crate) fn kernel(&'static self, spec: &KernelSpec) -> Result<&'static Kernel> {
        self.kernels.loaded.get_or_make(spec, || {
            let directory = cache::directory();
            let image = compile::image(spec, self.info.compute_capability, directory.as_deref())?;
            let kernel = despite_captures(|| self.load(spec, &image))?;
            Ok(&*Box::leak(Box::new(kernel)))
        })
    }

    fn load(&'static self, spec: &KernelSpec, image: &[u8]) -> Result<Kernel> {
        let _current = self.enter()?;
        let what = format!("loading kernel `{}`", spec.entry);
        let name = CString::new(spec.entry.as_str()).expect("a C identifier");
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the device is current; the image is a cubin, or PTX that ends in a zero byte.
        unsafe {
            self.check(sys::cuModuleLoadData(&mut module, image.as_ptr().cast()), &what)?;
            self.check(sys::cuModuleGetFunction(&mut function, module, name.as_ptr()), &what)?;
            if spec.shared_bytes > 0 {
                let attribute =
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                let set = sys::cuFuncSetAttribute(function, attribute, spec.shared_bytes as i32);
                self.check(set, &what)?;
            }
        }
        Ok(Kernel {
            name: spec.entry.clone(),
            function,
            shared_bytes: spec.shared_bytes,
            overlapped: spec.overlapped && self.info.compute_capability.0 >= 9,
            gpu: self,
            spec: spec.clone(),
            launches: AtomicU64::new(0),
        })
    }

    /// Every kernel that was launched, and how often.
    pub(crate) fn launches(&self) -> Vec<(KernelSpec, u64)> {
        let launched = self.kernels.launched.lock().unwrap_or_else(|e| e.into_inner());
        launched.iter().map(|k| (k.spec.clone(), k.launches.load(Ordering::Relaxed))).collect()
    }

    /// The error for a fault that the device reports, with the name of the kernel launched last.
    pub(super) fn launch_error(&self, result: CUresult) -> Error {
        let last = self.kernels.last.load(Ordering::Relaxed);
        // SAFETY: null, or a kernel that lives as long as the process.
        let what = match unsafe { last.as_ref() } {
            Some(kernel) => format!("kernel `{}` or one launched before it", kernel.name),
            None => "work on the device".into(),
        };
        Error::Backend { what, device: self.device(), detail: describe(result) }
    }
}

impl Kernel {
    /// Launches on a stream. The kernel takes one argument, a structure; `params` may be longer.
    ///
    /// With `WINDROW_CUDA_SYNC=1` in the environment every launch waits for its kernel, so that a
    /// fault is reported with the right name (not while a graph is captured).
    ///
    /// # Errors
    /// [`Error::Backend`], naming the kernel.
    ///
    /// # Safety
    /// `params` must be laid out as the kernel's parameter structure, and what it points to must
    /// be valid for the kernel on this device until it is done.
    pub(crate) unsafe fn launch<P: ?Sized>(
        &'static self,
        stream: &Stream,
        launch: Launch,
        params: &P,
    ) -> Result<()> {
        let Launch { grid, block } = launch;
        if grid.contains(&0) {
            return Ok(());
        }
        let gpu = self.gpu;
        let _current = gpu.enter()?;
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: self.shared_bytes,
            hStream: stream.handle(),
            attrs: &mut attribute,
            numAttrs: u32::from(self.overlapped),
        };
        // SAFETY: the function is loaded into the current context; the driver copies the attribute and
        // the one parameter, whose layout is the caller's promise.
        let result = unsafe {
            let nothing = std::ptr::null_mut();
            sys::cuLaunchKernelEx(&config, self.function, arguments.as_mut_ptr(), nothing)
        };
        gpu.check(result, format_args!("kernel `{}`", self.name))?;
        gpu.kernels.last.store(std::ptr::from_ref(self).cast_mut(), Ordering::Relaxed);
        if self.launches.fetch_add(1, Ordering::Relaxed) == 0 {
            gpu.kernels.launched.lock().unwrap_or_else(|e| e.into_inner()).push(self);
        }
        if *SYNCHRONOUS && !stream.is_capturing()? {
            stream.synchronize()?;
        }
        Ok(())
    }

    /// The device it is loaded on.
    pub(crate) fn gpu(&self) -> &'static Gpu {
        self.gpu
    }
}

static SYNCHRONOUS: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("WINDROW_CUDA_SYNC").is_some_and(|v| v == "1"));

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn values_are_made_side_by_side_and_each_once() {
        let (all, made) = (OnceEach::<u32, u32>::default(), AtomicU32::new(0));
        // Each of both waits for the other to be made at the same time.
        let both = Barrier::new(2);
        std::thread::scope(|s| {
            for i in 0..8 {
                let (all, made, both) = (&all, &made, &both);
                s.spawn(move || {
                    let value = all.get_or_make(&(i % 2), || {
                        both.wait();
                        made.fetch_add(1, Ordering::Relaxed);
                        Ok(i % 2 + 10)
                    });
                    assert_eq!(value.unwrap(), i % 2 + 10);
                });
            }
        });
        assert_eq!(made.into_inner(), 2);
    }

    #[test]
    fn what_fails_or_panics_is_tried_again() {
        let all = OnceEach::<u32, u32>::default();
        let refused = all.get_or_make(&1, || Err(Error::unsupported("this", "not now")));
        assert!(matches!(refused, Err(Error::Unsupported { .. })));
        let panics = || all.get_or_make(&1, || panic!("while making"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert_eq!(all.get_or_make(&1, || Ok(5)).unwrap(), 5);
        assert_eq!(all.get_or_make(&1, || Ok(6)).unwrap(), 5);
    }
}
