//! Streams and events.

use super::Gpu;
use super::library::Library;
use crate::{Device, Error, Result};
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult, CUstream};
use std::ffi::c_void;

/// An ordered queue of work on a device: made here, or borrowed from the caller.
#[derive(Debug)]
pub struct Stream {
    raw: CUstream,
    gpu: &'static Gpu,
    owned: bool,
}

/// The handle that means another stream in each thread (`cudaStreamPerThread`).
const PER_THREAD: usize = 2;

// SAFETY: a stream handle may be used from any thread; the one that means another stream in each is refused.
unsafe impl Send for Stream {}
// SAFETY: the driver orders the calls of several threads that give work to one stream.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream on CUDA device `index`. It is ordered with the legacy default stream.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::Backend`].
    pub fn new(index: u32) -> Result<Self> {
        let gpu = Gpu::get(index)?;
        let _current = gpu.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device is current; 0 is the default flag.
        gpu.check(unsafe { sys::cuStreamCreate(&mut raw, 0) }, "cuStreamCreate")?;
        Ok(Stream { raw, gpu, owned: true })
    }

    /// As [`Stream::new`], but not ordered with the legacy default stream either.
    pub(crate) fn apart(gpu: &'static Gpu) -> Result<Self> {
        let _current = gpu.enter()?;
        let mut raw = std::ptr::null_mut();
        let flag = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the device is current; the call writes the handle.
        gpu.check(unsafe { sys::cuStreamCreate(&mut raw, flag) }, "cuStreamCreate")?;
        Ok(Stream { raw, gpu, owned: true })
    }

    /// As [`Stream::new`], with the highest priority: blocks of its kernels start before waiting
    /// blocks of other streams.
    pub(crate) fn with_priority(index: u32) -> Result<Self> {
        let gpu = Gpu::get(index)?;
        let _current = gpu.enter()?;
        let (mut lowest, mut highest) = (0, 0);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device is current, each call writes to a local, and 0 is the default flag.
        unsafe {
            let range = sys::cuCtxGetStreamPriorityRange(&mut lowest, &mut highest);
            gpu.check(range, "cuCtxGetStreamPriorityRange")?;
            let made = sys::cuStreamCreateWithPriority(&mut raw, 0, highest);
            gpu.check(made, "cuStreamCreateWithPriority")?;
        }
        Ok(Stream { raw, gpu, owned: true })
    }

    /// A `cudaStream_t` / `CUstream` that somebody else owns; null is the legacy default stream.
    ///
    /// A stream made with `cudaStreamNonBlocking`, as PyTorch's are, is not ordered with the legacy default
    /// stream, nor with the streams of [`Stream::new`]: what other streams write and this one reads has to be
    /// ordered by events or by waiting.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::Backend`]; [`Error::Parameter`] for the per-thread default stream
    /// (2, `cudaStreamPerThread`), which is another one in each thread.
    ///
    /// # Safety
    /// `raw` must be a stream of CUDA device `index` that stays alive as long as this value.
    pub unsafe fn from_raw(index: u32, raw: *mut c_void) -> Result<Self> {
        if raw as usize == PER_THREAD {
            return Err(Error::parameter(
                "stream",
                "2, the per-thread default stream",
                "a stream that is the same one in every thread",
            ));
        }
        Ok(Stream { raw: raw.cast(), gpu: Gpu::get(index)?, owned: false })
    }

    /// The handle, as a `cudaStream_t`.
    pub fn as_raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// The device it belongs to.
    pub fn device(&self) -> Device {
        self.gpu.device()
    }

    pub(super) fn handle(&self) -> CUstream {
        self.raw
    }

    pub(crate) fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// Sets memory to zero, in the order of the stream.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// `ptr` must be `bytes` bytes on the stream's device, alive until the work is done.
    pub(crate) unsafe fn zero(&self, ptr: *mut u8, bytes: usize) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemsetD8Async(ptr as u64, 0, bytes, self.raw) };
        self.gpu.check(result, "cuMemsetD8Async")
    }

    /// Waits until all work given to the stream so far is done.
    ///
    /// # Errors
    /// [`Error::Backend`] if a kernel failed since the last check: it names the last kernel
    /// launched on the device.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamSynchronize(self.raw) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(self.gpu.launch_error(error)),
        }
    }

    /// Work given to the stream from here on starts when the event has happened.
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: both are alive.
        self.gpu
            .check(unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) }, "cuStreamWaitEvent")
    }

    /// True while the stream's work is captured into a graph.
    pub(super) fn is_capturing(&self) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive.
        let result = unsafe { sys::cuStreamIsCapturing(self.raw, &mut status) };
        self.gpu.check(result, "cuStreamIsCapturing")?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// A number that no other stream of the process has had.
    pub(crate) fn id(&self) -> Result<u64> {
        let _current = self.gpu.enter()?;
        let mut id = 0;
        // SAFETY: the stream is alive; the call writes a number.
        self.gpu.check(unsafe { sys::cuStreamGetId(self.raw, &mut id) }, "cuStreamGetId")?;
        Ok(id)
    }
}

/// A function of the driver that the bindings know under another name or not at all.
pub(super) struct Symbol<F> {
    name: &'static str,
    found: std::sync::OnceLock<Option<F>>,
}

impl<F: Copy> Symbol<F> {
    pub(super) const fn new(name: &'static str) -> Self {
        Symbol { name, found: std::sync::OnceLock::new() }
    }

    /// # Errors
    /// [`Error::Backend`] if the driver has no such function.
    ///
    /// # Safety
    /// `F` must be the function's type.
    pub(super) unsafe fn get(&self, gpu: &Gpu) -> Result<F> {
        let found = self.found.get_or_init(|| {
            let driver = Library::Driver.open()?;
            // SAFETY: the caller's promise. The driver stays loaded: the bindings hold it.
            unsafe { driver.get::<F>(self.name.as_bytes()) }.ok().map(|function| *function)
        });
        found.ok_or_else(|| Error::Backend {
            what: self.name.into(),
            device: gpu.device(),
            detail: "the driver has no such function".into(),
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_current) = self.gpu.enter()
        {
            // SAFETY: made in `new`; the driver finishes the work given to it first.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A point in a stream, with the time it was reached.
#[derive(Debug)]
pub struct Event {
    raw: CUevent,
    gpu: &'static Gpu,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: the driver takes calls for one event from several threads at once.
unsafe impl Sync for Event {}

impl Event {
    /// The point that the stream has reached when all work given to it so far is done.
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub fn record(stream: &Stream) -> Result<Self> {
        Self::with_flags(stream, CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// As [`Event::record`], without the time: for order alone. With times a gather between two
    /// H200s takes 4 us more.
    ///
    /// # Errors
    /// As [`Event::record`].
    pub(crate) fn mark(stream: &Stream) -> Result<Self> {
        Self::with_flags(stream, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(stream: &Stream, flags: CUevent_flags) -> Result<Self> {
        let gpu = stream.gpu;
        let _current = gpu.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device is current; the call writes the handle.
        gpu.check(unsafe { sys::cuEventCreate(&mut raw, flags as u32) }, "cuEventCreate")?;
        let event = Event { raw, gpu };
        event.mark_again(stream)?;
        Ok(event)
    }

    /// From here on the event is the point that `stream`, of the same device, has reached now.
    ///
    /// # Errors
    /// As [`Event::record`].
    pub(crate) fn mark_again(&self, stream: &Stream) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: both are alive.
        self.gpu.check(unsafe { sys::cuEventRecord(self.raw, stream.raw) }, "cuEventRecord")
    }

    /// True once the point has been reached.
    ///
    /// # Errors
    /// [`Error::Backend`] if a kernel failed before it.
    pub fn is_reached(&self) -> Result<bool> {
        let _current = self.gpu.enter()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            error => Err(self.gpu.launch_error(error)),
        }
    }

    /// Waits until the point has been reached.
    ///
    /// # Errors
    /// [`Error::Backend`] if a kernel failed before it.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventSynchronize(self.raw) } {
            CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(self.gpu.launch_error(error)),
        }
    }

    /// Milliseconds from `start` to this event; waits for this event.
    ///
    /// # Errors
    /// [`Error::Backend`], also for an event of [`crate::parallel`]: they hold no time.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32> {
        // The bindings know only the symbol of CUDA 12.8 and later; this one is in every driver.
        type ElapsedTime = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;
        static SYMBOL: Symbol<ElapsedTime> = Symbol::new("cuEventElapsedTime");
        // SAFETY: the type is the documented one.
        let elapsed = unsafe { SYMBOL.get(self.gpu)? };
        let _current = self.gpu.enter()?;
        // SAFETY: the event is alive.
        self.gpu.check(unsafe { sys::cuEventSynchronize(self.raw) }, "cuEventSynchronize")?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive and recorded.
        let result = unsafe { elapsed(&mut milliseconds, start.raw, self.raw) };
        self.gpu.check(result, "cuEventElapsedTime")?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.enter() {
            // SAFETY: made in `record`.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a device it is refused before one is asked for.
    #[test]
    fn the_stream_of_each_thread_is_refused() {
        // SAFETY: a handle that always exists.
        let refused = unsafe { Stream::from_raw(0, PER_THREAD as *mut c_void) };
        assert!(matches!(refused, Err(Error::Parameter { name: "stream", .. })));
    }
}
