//! Streams, events and graphs.

use super::Gpu;
use super::library::Library;
use crate::{Device, Error, Result};
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUgraphExec, CUresult, CUstream};
use std::ffi::c_void;

/// An ordered queue of work on a device: made here, or borrowed from the caller.
#[derive(Debug)]
pub struct Stream {
    raw: CUstream,
    gpu: &'static Gpu,
    owned: bool,
}

// SAFETY: a stream handle may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
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
    /// # Errors
    /// [`Error::NoDevice`], [`Error::Backend`].
    ///
    /// # Safety
    /// `raw` must be a stream of CUDA device `index` that stays alive as long as this value.
    pub unsafe fn from_raw(index: u32, raw: *mut c_void) -> Result<Self> {
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

    /// Records what `work` gives to this stream into a graph, without running it.
    ///
    /// # Errors
    /// What `work` returns, and [`Error::Backend`]: the default stream cannot be captured.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let gpu = self.gpu;
        let _current = gpu.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive; the capture is ended below whatever `work` returns.
        gpu.check(unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) }, "cuStreamBeginCapture")?;
        let outcome = work();
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: ends the capture begun above.
        let ended = unsafe { sys::cuStreamEndCapture(self.raw, &mut graph) };
        outcome?;
        gpu.check(ended, "cuStreamEndCapture")?;
        // SAFETY: `graph` was made above and is not used after.
        let made = unsafe {
            let made = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            sys::cuGraphDestroy(graph);
            made
        };
        gpu.check(made, "cuGraphInstantiate")?;
        Ok(Graph { exec, gpu })
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

/// Calls `f`, which uses streams of its own and may allocate and wait even while this or another thread captures
/// other streams in a mode that forbids it.
pub(super) fn despite_captures<T>(f: impl FnOnce() -> T) -> T {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the call exchanges the mode of this thread, which any thread may do. It cannot fail for valid modes.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    let result = f();
    // SAFETY: as above; puts back what was there.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    result
}

/// A point in a stream, with the time it was reached.
#[derive(Debug)]
pub struct Event {
    raw: CUevent,
    gpu: &'static Gpu,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
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
        // SAFETY: both are alive.
        gpu.check(unsafe { sys::cuEventRecord(raw, stream.raw) }, "cuEventRecord")?;
        Ok(event)
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
        type ElapsedTime = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;
        let _current = self.gpu.enter()?;
        // SAFETY: the event is alive.
        self.gpu.check(unsafe { sys::cuEventSynchronize(self.raw) }, "cuEventSynchronize")?;
        let mut milliseconds = 0.0;
        let failed = |detail: String| Error::Backend {
            what: "cuEventElapsedTime".into(),
            device: self.gpu.device(),
            detail,
        };
        let driver = Library::Driver.open().ok_or_else(|| failed("no driver".into()))?;
        // The bindings know only the symbol of CUDA 12.8 and later; this one is in every driver.
        // SAFETY: the type is the documented one.
        let elapsed = unsafe { driver.get::<ElapsedTime>(&b"cuEventElapsedTime\0"[..]) };
        let elapsed = elapsed.map_err(|e| failed(e.to_string()))?;
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

/// Work recorded by [`Stream::capture`], to be run any number of times.
#[derive(Debug)]
pub struct Graph {
    exec: CUgraphExec,
    gpu: &'static Gpu,
}

// SAFETY: a graph handle may be used from any thread, one at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Runs the recorded work on a stream.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// The memory that the recorded work uses must still be there, and be borrowed by nobody else
    /// until the work is done.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        let _current = self.gpu.enter()?;
        // SAFETY: both are alive; the memory is the caller's promise.
        self.gpu.check(unsafe { sys::cuGraphLaunch(self.exec, stream.raw) }, "cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.enter() {
            // SAFETY: made in `capture`.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}
