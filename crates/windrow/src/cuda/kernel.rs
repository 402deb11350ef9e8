//! Loaded kernels and their launches.

use super::{Gpu, KernelSpec, Stream, cache, compile, describe};
use crate::{Error, Result};
use cudarc::driver::sys::{self, CUfunction, CUresult};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{LazyLock, Mutex};

/// A kernel loaded into a device's context. Lives as long as the process.
#[derive(Debug)]
pub(crate) struct Kernel {
    name: String,
    function: CUfunction,
    shared_bytes: u32,
    overlapped: bool,
    gpu: &'static Gpu,
}

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Kernels by what they were compiled from.
#[derive(Debug, Default)]
pub(super) struct KernelCache {
    loaded: Mutex<HashMap<KernelSpec, &'static Kernel>>,
    /// The kernel launched last, to name it when the device reports a fault.
    last: AtomicPtr<Kernel>,
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
    /// The kernel of this description, compiled and loaded at first use.
    ///
    /// # Errors
    /// [`Error::Backend`] without NVRTC or if it or the driver refuses, [`Error::Unsupported`] if
    /// NVRTC does not know the device.
    pub(crate) fn kernel(&'static self, spec: &KernelSpec) -> Result<&'static Kernel> {
        let mut loaded = self.kernels.loaded.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(kernel) = loaded.get(spec) {
            return Ok(kernel);
        }
        let directory = cache::directory();
        let image = compile::image(spec, self.info.compute_capability, directory.as_deref())?;
        let kernel: &'static Kernel = Box::leak(Box::new(self.load(spec, &image)?));
        loaded.insert(spec.clone(), kernel);
        Ok(kernel)
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
        })
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
