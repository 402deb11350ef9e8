//! Pinned host memory, which the copy engine reads and writes beside kernels.

use super::{Gpu, Stream};
use crate::{Device, Error, Result};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use std::ffi::c_void;

/// A block of pinned host memory.
#[derive(Debug)]
pub(crate) struct PinnedBuffer {
    ptr: *mut u8,
    len: usize,
    gpu: &'static Gpu,
}

// SAFETY: a PinnedBuffer owns plain bytes.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// `len` bytes of zeros, at least one.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Backend`].
    pub(crate) fn new(gpu: &'static Gpu, len: usize) -> Result<Self> {
        let _current = gpu.enter()?;
        let mut ptr: *mut c_void = std::ptr::null_mut();
        // SAFETY: the device is current; any context of the process may use the memory.
        let result = unsafe { sys::cuMemHostAlloc(&mut ptr, len, sys::CU_MEMHOSTALLOC_PORTABLE) };
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { device: Device::Cpu, bytes: len });
        }
        gpu.check(result, "cuMemHostAlloc")?;
        let ptr = ptr.cast::<u8>();
        // SAFETY: allocated above.
        unsafe { ptr.write_bytes(0, len) };
        Ok(PinnedBuffer { ptr, len, gpu })
    }

    /// The bytes. No copy of the device's may be under way.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: initialised in `new`, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }

    /// Copies the first `bytes` bytes to the device in the order of the stream.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// `bytes` bytes at `dst` must be writable on the stream's device, and the buffer be alive and
    /// unchanged until the stream has come past the copy.
    pub(crate) unsafe fn send(&self, dst: *mut u8, bytes: usize, stream: &Stream) -> Result<()> {
        assert!(bytes <= self.len);
        let _current = self.gpu.enter()?;
        // SAFETY: the caller's promise.
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(dst as CUdeviceptr, self.ptr.cast(), bytes, stream.handle())
        };
        self.gpu.check(result, "copying to the device")
    }

    /// Copies `bytes` bytes from the device in the order of the stream.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// As [`PinnedBuffer::send`], for reading at `src`.
    pub(crate) unsafe fn receive(
        &mut self,
        src: *const u8,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        assert!(bytes <= self.len);
        let _current = self.gpu.enter()?;
        // SAFETY: the caller's promise.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(self.ptr.cast(), src as CUdeviceptr, bytes, stream.handle())
        };
        self.gpu.check(result, "copying from the device")
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.enter() {
            // SAFETY: allocated in `new`.
            unsafe { sys::cuMemFreeHost(self.ptr.cast()) };
        }
    }
}
