//! Streams and events.

use super::Gpu;
use super::runtime::{Handle, Recording, StreamKind};
use crate::{Device, Error, Result};
use std::ffi::c_void;

/// An ordered queue of work on a device: made here, or borrowed from the caller.
#[derive(Debug)]
pub struct Stream {
    raw: Handle,
    gpu: &'static Gpu,
    owned: bool,
}

/// The handle of the per-thread default stream (`cudaStreamPerThread`).
const PER_THREAD: usize = 2;

// SAFETY: a stream handle may be used from any thread; the one that means another stream in each is refused.
unsafe impl Send for Stream {}
// SAFETY: the driver orders the calls of several threads that give work to one stream.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream on a GPU, ordered with the legacy default stream. An integer as `device` is the index of a CUDA
    /// device.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::Backend`].
    pub fn new(device: impl Into<Device>) -> Result<Self> {
        Self::of_kind(Gpu::get(device.into())?, StreamKind::Blocking)
    }

    /// A stream like that of [`Stream::new`], but not ordered with the legacy default stream.
    pub(crate) fn apart(gpu: &'static Gpu) -> Result<Self> {
        Self::of_kind(gpu, StreamKind::Apart)
    }

    /// A stream like that of [`Stream::new`], with the highest priority: blocks of its kernels start before waiting
    /// blocks of other streams.
    pub(crate) fn with_priority(gpu: &'static Gpu) -> Result<Self> {
        Self::of_kind(gpu, StreamKind::Urgent)
    }

    fn of_kind(gpu: &'static Gpu, kind: StreamKind) -> Result<Self> {
        // SAFETY: the device is current.
        let raw = gpu.call(|runtime| unsafe { runtime.create_stream(kind) })?;
        Ok(Stream { raw, gpu, owned: true })
    }

    /// A `cudaStream_t`, `CUstream` or `hipStream_t` that the caller owns; null is the legacy default stream. An
    /// integer as `device` is the index of a CUDA device.
    ///
    /// A stream made with `cudaStreamNonBlocking`, as PyTorch's are, is not ordered with the legacy default stream, nor
    /// with the streams of [`Stream::new`]. If this stream reads what another one writes, the two must be ordered by
    /// events or by waiting.
    ///
    /// # Errors
    /// [`Error::NoDevice`], [`Error::Backend`]; [`Error::Parameter`] for the per-thread default stream (2,
    /// `cudaStreamPerThread`), which is a different stream in each thread.
    ///
    /// # Safety
    /// `raw` must be a stream of the device that stays alive as long as this value.
    pub unsafe fn from_raw(device: impl Into<Device>, raw: *mut c_void) -> Result<Self> {
        if raw as usize == PER_THREAD {
            return Err(Error::parameter(
                "stream",
                "2, the per-thread default stream",
                "a stream that is the same one in every thread",
            ));
        }
        Ok(Stream { raw, gpu: Gpu::get(device.into())?, owned: false })
    }

    /// The handle, as a `cudaStream_t` or `hipStream_t`.
    pub fn as_raw(&self) -> *mut c_void {
        self.raw
    }

    /// The device it belongs to.
    pub fn device(&self) -> Device {
        self.gpu.device()
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
        // SAFETY: the caller's promise.
        self.gpu.call(|runtime| unsafe { runtime.fill(ptr, 0, bytes, self.raw) })
    }

    /// Waits until all work enqueued on the stream so far is done.
    ///
    /// # Errors
    /// [`Error::Backend`] if a kernel failed since the last check: it names the kernel that was launched last on the
    /// device.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        self.gpu.wait(|runtime| unsafe { runtime.synchronize_stream(self.raw) })
    }

    /// Makes later work of the stream wait for the event.
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both are alive.
        self.gpu.call(|runtime| unsafe { runtime.wait(self.raw, event.raw) })
    }

    /// The state of the stream's capture.
    pub(super) fn recording(&self) -> Result<Recording> {
        // SAFETY: the stream is alive.
        self.gpu.call(|runtime| unsafe { runtime.recording(self.raw) })
    }

    /// A number that no other stream of the process has had.
    pub(crate) fn id(&self) -> Result<u64> {
        // SAFETY: the stream is alive.
        self.gpu.call(|runtime| unsafe { runtime.stream_id(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: made in `of_kind`; the driver finishes the work given to it first.
            self.gpu.try_call(|runtime| unsafe { runtime.destroy_stream(self.raw) });
        }
    }
}

/// A point in a stream. An event of [`Event::record`] also has the time at which it was reached.
#[derive(Debug)]
pub struct Event {
    raw: Handle,
    gpu: &'static Gpu,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: the driver takes calls for one event from several threads at once.
unsafe impl Sync for Event {}

impl Event {
    /// The point that the stream reaches when all work enqueued on it so far is done.
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub fn record(stream: &Stream) -> Result<Self> {
        Self::new(stream, true)
    }

    /// An event like that of [`Event::record`] without the time, for order alone. With times, a gather between two
    /// H200s took 4 us more (no record is kept).
    ///
    /// # Errors
    /// As [`Event::record`].
    pub(crate) fn mark(stream: &Stream) -> Result<Self> {
        Self::new(stream, false)
    }

    fn new(stream: &Stream, timed: bool) -> Result<Self> {
        let gpu = stream.gpu;
        // SAFETY: the device is current.
        let raw = gpu.call(|runtime| unsafe { runtime.create_event(timed) })?;
        let event = Event { raw, gpu };
        event.mark_again(stream)?;
        Ok(event)
    }

    /// Moves the event to the point that `stream`, of the same device, has reached now.
    ///
    /// # Errors
    /// As [`Event::record`].
    pub(crate) fn mark_again(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are alive.
        self.gpu.call(|runtime| unsafe { runtime.record(self.raw, stream.raw) })
    }

    /// True once the point has been reached.
    ///
    /// # Errors
    /// [`Error::Backend`] if a kernel failed before it.
    pub fn is_reached(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        self.gpu.wait(|runtime| unsafe { runtime.is_reached(self.raw) })
    }

    /// Waits until the point has been reached.
    ///
    /// # Errors
    /// [`Error::Backend`] if a kernel failed before it.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the event is alive.
        self.gpu.wait(|runtime| unsafe { runtime.synchronize_event(self.raw) })
    }

    /// Milliseconds from `start` to this event; waits for this event.
    ///
    /// # Errors
    /// [`Error::Backend`], also for an event of [`crate::parallel`], because these have no time.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32> {
        self.synchronize()?;
        // SAFETY: both events are alive and recorded.
        self.gpu.call(|runtime| unsafe { runtime.milliseconds(start.raw, self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `new`.
        self.gpu.try_call(|runtime| unsafe { runtime.destroy_event(self.raw) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workspace;

    /// Runs in any of these workspaces are executed in order. Does nothing without a GPU.
    #[test]
    fn workspaces_share_a_stream() {
        let Ok(gpu) = Gpu::of_tests() else { return };
        let [first, second] = [(); 2].map(|()| Workspace::new(gpu.device(), 64).unwrap());
        let of = |workspace: &Workspace| workspace.stream().unwrap().as_raw();
        assert!(of(&first).is_null() && of(&second).is_null());
    }

    /// The stream is rejected even on machines without a GPU, because the check comes first.
    #[test]
    fn the_stream_of_each_thread_is_refused() {
        // SAFETY: a handle that always exists.
        let refused = unsafe { Stream::from_raw(0, PER_THREAD as *mut c_void) };
        assert!(matches!(refused, Err(Error::Parameter { name: "stream", .. })));
    }
}
