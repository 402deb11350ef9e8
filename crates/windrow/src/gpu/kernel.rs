//! Loaded kernels and their launches.

use super::runtime::{Feature, Function, Handle, Launch, Outcome};
use super::{Gpu, KernelSpec, Params, Stream, cache};
use crate::Result;
use std::any::TypeId;
use std::collections::HashMap;
use std::ffi::c_void;
use std::hash::Hash;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, OnceLock, RwLock};

/// A kernel loaded onto a device. It lives as long as the process.
#[derive(Debug)]
pub(crate) struct Kernel {
    function: Function,
    gpu: &'static Gpu,
    /// The spec of the kernel and its number of launches, for `windrow verify`.
    spec: KernelSpec,
    launches: AtomicU64,
    /// What [`Kernel::clusters`] found.
    clusters: OnceLock<usize>,
}

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: launching does not change what the handle names, and the counter is atomic.
unsafe impl Sync for Kernel {}

/// The kernels of a device, by the specs from which they were compiled.
#[derive(Debug, Default)]
pub(super) struct KernelCache {
    loaded: OnceEach<KernelSpec, &'static Kernel>,
    /// The kernel that was launched last, to name it when the device reports an error.
    last: AtomicPtr<Kernel>,
    /// The kernels that were launched.
    launched: Mutex<Vec<&'static Kernel>>,
}

impl KernelCache {
    /// A text that names the kernels that may have caused a device error.
    pub(super) fn suspect(&self) -> String {
        let last = self.last.load(Ordering::Relaxed);
        // SAFETY: null, or a kernel that lives as long as the process.
        match unsafe { last.as_ref() } {
            Some(kernel) => format!("kernel `{}` or one launched before it", kernel.spec.entry),
            None => "work on the device".into(),
        }
    }
}

/// A map whose values are made once, on first use. A thread that needs a value waits if another thread is making it,
/// but not for other values.
#[derive(Debug)]
pub(super) struct OnceEach<K, V> {
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
    /// True if the value of `key` was made.
    fn has(&self, key: &K) -> bool {
        let values = self.values.lock().unwrap_or_else(|e| e.into_inner());
        matches!(values.get(key), Some(Some(_)))
    }

    /// The value of `key`. If there is none, `make` makes it, while no lock is held. If `make` fails or panics, the
    /// next thread tries again.
    pub(super) fn get_or_make(&self, key: &K, make: impl FnOnce() -> Result<V>) -> Result<V> {
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

/// The entry of a value that is being made. Its drop stores the value; after an error or a panic it removes the entry.
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

impl Gpu {
    /// The kernel of this spec. It is compiled and loaded at its first use, even while a stream is captured. Different
    /// kernels may be compiled at the same time, but each is compiled only once.
    ///
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend) if there is no compiler, or if the compiler or the driver fails.
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the compiler does not know the device, or if the device
    /// lacks what the kernel needs.
    pub(crate) fn kernel(&'static self, spec: &KernelSpec) -> Result<&'static Kernel> {
        self.kernels.loaded.get_or_make(spec, || {
            let image = self.image(spec, cache::directory(self.device()).as_deref())?;
            let kernel = self.despite_captures(|| self.load(spec, &image))?;
            Ok(&*Box::leak(Box::new(kernel)))
        })
    }

    /// The kernels of several specs, as by [`Gpu::kernel`], compiled at the same time.
    ///
    /// # Errors
    /// As [`Gpu::kernel`]: the first error in the order of the specs.
    pub(crate) fn kernels<const N: usize>(
        &'static self,
        specs: [&KernelSpec; N],
    ) -> Result<[&'static Kernel; N]> {
        std::thread::scope(|scope| {
            let missing = specs.iter().filter(|spec| !self.kernels.loaded.has(spec));
            for spec in missing.skip(1) {
                // This thread asks for it too, and gets the error if there is one.
                scope.spawn(move || drop(self.kernel(spec)));
            }
            let found: Result<Vec<_>> = specs.iter().map(|spec| self.kernel(spec)).collect();
            Ok(found?.try_into().expect("one for each spec"))
        })
    }

    /// The compiled image of a kernel, from the cache in `directory` or from the compiler.
    fn image(&self, spec: &KernelSpec, directory: Option<&Path>) -> Result<Vec<u8>> {
        let (version, options) = self.runtime.recipe(spec)?;
        cache::get_or_make(directory, &spec.key(&version, &options), || {
            self.runtime.compile(spec, &options)
        })
    }

    fn load(&'static self, spec: &KernelSpec, image: &[u8]) -> Result<Kernel> {
        let _current = self.enter()?;
        // SAFETY: the device is current; the image comes from the device's compiler, or from the cache, which checks
        // that it is whole.
        let handle = unsafe { self.runtime.load(image, &spec.entry, spec.shared_bytes) };
        let what = format_args!("loading kernel `{}`", spec.entry);
        let function = Function {
            handle: handle.map_err(|failure| failure.of(what, self.device()))?,
            shared_bytes: spec.shared_bytes,
            overlapped: spec.overlapped && self.has(Feature::OverlappedLaunches),
        };
        let (launches, clusters) = (AtomicU64::new(0), OnceLock::new());
        Ok(Kernel { function, gpu: self, spec: spec.clone(), launches, clusters })
    }

    /// The kernels that were launched, and how often.
    pub(crate) fn launches(&self) -> Vec<(KernelSpec, u64)> {
        let launched = self.kernels.launched.lock().unwrap_or_else(|e| e.into_inner());
        launched.iter().map(|k| (k.spec.clone(), k.launches.load(Ordering::Relaxed))).collect()
    }
}

impl Kernel {
    /// Launches the kernel on a stream.
    ///
    /// With `WINDROW_CUDA_SYNC=1` or `WINDROW_HIP_SYNC=1` in the environment, every launch waits for its kernel, unless
    /// a graph is captured. An error is then reported with the right kernel's name.
    ///
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend), naming the kernel.
    ///
    /// # Safety
    /// `P` must be the structure of parameters of the kernel's spec. Memory to which `params` points must be valid for
    /// the kernel on this device until the kernel is done.
    pub(crate) unsafe fn launch<P: Params>(
        &'static self,
        stream: &Stream,
        launch: Launch,
        params: &P,
    ) -> Result<()> {
        let gpu = self.gpu;
        let _current = gpu.enter()?;
        // SAFETY: the stream is alive; the rest is the caller's promise.
        unsafe { self.give(stream.as_raw(), launch, params) }.map_err(|failure| {
            failure.of(format_args!("kernel `{}`", self.spec.entry), gpu.device())
        })?;
        if *SYNCHRONOUS && stream.capture_under_way()?.is_none() {
            stream.synchronize()?;
        }
        Ok(())
    }

    /// Launches like [`Kernel::launch`], but the device must be current already. The caller makes the error, and
    /// nothing waits for the kernel.
    ///
    /// # Safety
    /// As [`Kernel::launch`]; the stream must be alive.
    pub(super) unsafe fn give<P: Params>(
        &'static self,
        stream: Handle,
        launch: Launch,
        params: &P,
    ) -> Outcome<()> {
        debug_assert_eq!(self.spec.params, Some(TypeId::of::<P>()), "{}", self.spec.entry);
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let (kernels, params) = (&self.gpu.kernels, std::ptr::from_ref(params).cast::<c_void>());
        // SAFETY: the function is loaded on the current device, which copies the parameters; their layout is the
        // caller's promise.
        unsafe { self.gpu.runtime.launch(self.function, launch, params, stream)? };
        kernels.last.store(std::ptr::from_ref(self).cast_mut(), Ordering::Relaxed);
        if self.launches.fetch_add(1, Ordering::Relaxed) == 0 {
            kernels.launched.lock().unwrap_or_else(|e| e.into_inner()).push(self);
        }
        Ok(())
    }

    /// The number of clusters that the device holds at a time, of a kernel that has clusters of `blocks` blocks of
    /// `threads` threads; at least 1. It differs between GPUs of one kind, whose groups of multiprocessors differ.
    ///
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend).
    pub(crate) fn clusters(&'static self, blocks: usize, threads: usize) -> Result<usize> {
        if let Some(&found) = self.clusters.get() {
            return Ok(found);
        }
        let _current = self.gpu.enter()?;
        let launch = Launch::line(blocks, threads);
        // SAFETY: the function is loaded on the current device.
        let found = unsafe { self.gpu.runtime.resident_clusters(self.function, launch) };
        let found = found.map_err(|failure| {
            failure.of(format_args!("kernel `{}`", self.spec.entry), self.gpu.device())
        })?;
        Ok(*self.clusters.get_or_init(|| found.max(1)))
    }

    /// The device on which the kernel is loaded.
    pub(crate) fn gpu(&self) -> &'static Gpu {
        self.gpu
    }
}

/// Kernels that only some runs of a plan launch, such as those of gradients. Each is looked up when a run first needs
/// it, by a key that tells it from the others.
#[derive(Clone, Debug)]
pub(crate) struct Kernels<K>(Arc<RwLock<Vec<(K, &'static Kernel)>>>);

impl<K> Default for Kernels<K> {
    fn default() -> Self {
        Kernels(Arc::default())
    }
}

impl<K: Copy + PartialEq> Kernels<K> {
    /// The kernel of `key`. `spec` describes it, if it was not looked up before.
    ///
    /// # Errors
    /// As [`Gpu::kernel`].
    pub(crate) fn get(
        &self,
        gpu: &'static Gpu,
        key: K,
        spec: impl FnOnce() -> KernelSpec,
    ) -> Result<&'static Kernel> {
        let found = self.0.read().unwrap_or_else(|e| e.into_inner());
        if let Some((_, kernel)) = found.iter().find(|(of, _)| *of == key) {
            return Ok(kernel);
        }
        drop(found);
        let kernel = gpu.kernel(&spec())?;
        let mut found = self.0.write().unwrap_or_else(|e| e.into_inner());
        if found.iter().all(|(of, _)| *of != key) {
            found.push((key, kernel));
        }
        Ok(kernel)
    }
}

static SYNCHRONOUS: LazyLock<bool> = LazyLock::new(|| {
    let set = |name| std::env::var_os(name).is_some_and(|v| v == "1");
    set("WINDROW_CUDA_SYNC") || set("WINDROW_HIP_SYNC")
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::gpu::Source;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn values_are_made_side_by_side_and_each_once() {
        let (all, made) = (OnceEach::<u32, u32>::default(), AtomicU32::new(0));
        // The making of each value waits until the other is being made too.
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

    /// Nothing without a device.
    #[test]
    fn kernels_of_several_specs_are_those_of_each() {
        static FINE: Source = Source {
            name: "fine.cu",
            text: "extern \"C\" __global__ void KERNEL() {}",
            includes: &[],
        };
        static BROKEN: Source = Source { name: "broken.cu", text: "nothing", includes: &[] };
        let Ok(gpu) = Gpu::of_tests() else { return };
        let specs = ["one", "two", "three"].map(|name| KernelSpec::new(&FINE, name));
        let [one, two, three] = &specs;
        let broken = KernelSpec::new(&BROKEN, "broken");
        let refused = gpu.kernels([one, &broken, two]);
        assert!(matches!(refused, Err(Error::Backend { .. })), "{refused:?}");
        // The error has lost neither of the others.
        assert!(gpu.kernels.loaded.has(one) && gpu.kernels.loaded.has(two));
        let found = gpu.kernels([one, two, three]).unwrap();
        for (spec, kernel) in specs.iter().zip(found) {
            assert!(std::ptr::eq(gpu.kernel(spec).unwrap(), kernel));
        }
    }

    #[test]
    fn what_fails_or_panics_is_tried_again() {
        let all = OnceEach::<u32, u32>::default();
        let refused = all.get_or_make(&1, || Err(Error::unsupported("this", "not now")));
        assert!(matches!(refused, Err(Error::Unsupported { .. })));
        let panics = || all.get_or_make(&1, || panic!("while making"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        assert!(!all.has(&1));
        assert_eq!(all.get_or_make(&1, || Ok(5)).unwrap(), 5);
        assert!(all.has(&1));
        assert_eq!(all.get_or_make(&1, || Ok(6)).unwrap(), 5);
    }
}
