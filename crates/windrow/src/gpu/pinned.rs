//! Pinned host memory, which the GPU's DMA engine can copy while kernels run.

use super::{Gpu, Stream};
use crate::{Device, Error, Result};

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
        // SAFETY: the device is current.
        let memory = gpu.call(|runtime| unsafe { runtime.allocate_host(len) })?;
        let ptr = memory.ok_or(Error::OutOfMemory { device: Device::Cpu, bytes: len })?;
        // SAFETY: allocated above.
        unsafe { ptr.write_bytes(0, len) };
        Ok(PinnedBuffer { ptr, len, gpu })
    }

    /// Returns the memory, which is then never freed.
    pub(super) fn leak(self) -> *mut u8 {
        std::mem::ManuallyDrop::new(self).ptr
    }

    /// The bytes. No copy by the device may be in progress.
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
    /// `bytes` bytes at `dst` must be writable on the stream's device. The buffer must be alive and unchanged until the
    /// copy is done.
    pub(crate) unsafe fn send(&self, dst: *mut u8, bytes: usize, stream: &Stream) -> Result<()> {
        assert!(bytes <= self.len);
        // SAFETY: the caller's promise.
        self.gpu
            .call(|runtime| unsafe { runtime.upload(dst, self.ptr, bytes, Some(stream.as_raw())) })
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
        // SAFETY: the caller's promise.
        self.gpu.call(|runtime| unsafe {
            runtime.download(self.ptr, src, bytes, Some(stream.as_raw()))
        })
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`.
        self.gpu.try_call(|runtime| unsafe { runtime.free_host(self.ptr) });
    }
}
