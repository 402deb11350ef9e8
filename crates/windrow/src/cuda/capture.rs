//! Captures of streams, and the graphs that come of them.

use super::stream::Symbol;
use super::{Gpu, Stream};
use crate::{Error, Result};
use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUresult, CUstream};
use std::ffi::c_void;
use std::sync::Arc;

impl Stream {
    /// The capture that the stream takes part in.
    pub(crate) fn capture_under_way(&self) -> Result<Option<Capture>> {
        type GetCaptureInfo = unsafe extern "C" fn(
            CUstream,
            *mut sys::CUstreamCaptureStatus,
            *mut u64,
            *mut CUgraph,
            *mut *const sys::CUgraphNode,
            *mut usize,
        ) -> CUresult;
        static SYMBOL: Symbol<GetCaptureInfo> = Symbol::new("cuStreamGetCaptureInfo_v2");
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph) = (0, std::ptr::null_mut());
        let none = std::ptr::null_mut::<c_void>();
        // SAFETY: the type is the documented one.
        let get = unsafe { SYMBOL.get(self.gpu())? };
        let _current = self.gpu().enter()?;
        // SAFETY: the stream is alive; the call writes to locals, and nothing through null.
        let result = unsafe {
            get(self.handle(), &mut status, &mut id, &mut graph, none.cast(), none.cast())
        };
        self.gpu().check(result, "cuStreamGetCaptureInfo")?;
        match status {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => {
                Ok(Some(Capture { id, graph, gpu: self.gpu() }))
            }
            _ => Err(Error::Backend {
                what: "capturing a stream".into(),
                device: self.device(),
                detail: "an earlier call has made the capture invalid".into(),
            }),
        }
    }

    /// Records what `work` gives to this stream into a graph, without running it. While a stream of [`Stream::new`] is
    /// captured, nobody may use the legacy default stream: the two are ordered.
    ///
    /// # Errors
    /// What `work` returns, and [`Error::Backend`]: the default stream cannot be captured.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let gpu = self.gpu();
        let _current = gpu.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive; `Open` ends the capture whatever `work` does.
        let begun = unsafe { sys::cuStreamBeginCapture_v2(self.handle(), mode) };
        gpu.check(begun, "cuStreamBeginCapture")?;
        let open = Open { stream: self };
        let outcome = work();
        let captured = open.end();
        outcome?;
        let captured = captured?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph is alive.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, captured.0, 0) };
        gpu.check(made, "cuGraphInstantiate")?;
        Ok(Graph { exec, gpu })
    }
}

/// A capture that was begun and has to be ended.
struct Open<'a> {
    stream: &'a Stream,
}

impl Open<'_> {
    fn end(self) -> Result<Captured> {
        let ended = std::mem::ManuallyDrop::new(self);
        let mut graph = Captured(std::ptr::null_mut());
        // SAFETY: ends the capture begun on this stream, once.
        let result = unsafe { sys::cuStreamEndCapture(ended.stream.handle(), &mut graph.0) };
        ended.stream.gpu().check(result, "cuStreamEndCapture")?;
        Ok(graph)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // What was captured is of no use: this is the way of a panic.
        let _ = Open { stream: self.stream }.end();
    }
}

/// A captured graph.
struct Captured(CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by ending a capture and not used after; what was instantiated from it stays.
            unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// A capture under way.
#[derive(Debug)]
pub(crate) struct Capture {
    /// No other capture of the process has had it.
    pub(crate) id: u64,
    graph: CUgraph,
    gpu: &'static Gpu,
}

impl Capture {
    /// Keeps `owner` as long as the graph, or what is instantiated from it, exists or runs. It may be dropped by a thread
    /// of the driver's, so its destructor must not call CUDA where [`is_releasing`].
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub(crate) fn retain<T: Send + Sync + 'static>(&self, owner: Arc<T>) -> Result<()> {
        unsafe extern "C" fn release<T>(owner: *mut c_void) {
            RELEASING.set(true);
            // SAFETY: made by `Arc::into_raw` below, and released once.
            drop(unsafe { Arc::from_raw(owner.cast_const().cast::<T>()) });
            RELEASING.set(false);
        }
        let _current = self.gpu.enter()?;
        let owner = Arc::into_raw(owner);
        let mut object = std::ptr::null_mut();
        let no_sync = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        let user = owner.cast_mut().cast::<c_void>();
        // SAFETY: `release` takes what `user` is, and gets it once.
        let made =
            unsafe { sys::cuUserObjectCreate(&mut object, user, Some(release::<T>), 1, no_sync) };
        if let Err(error) = self.gpu.check(made, "cuUserObjectCreate") {
            // SAFETY: the driver has not taken it.
            drop(unsafe { Arc::from_raw(owner) });
            return Err(error);
        }
        let moved = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
        // SAFETY: the graph is being captured, so it exists; the object was made above.
        let kept = unsafe { sys::cuGraphRetainUserObject(self.graph, object, 1, moved) };
        let kept = self.gpu.check(kept, "cuGraphRetainUserObject");
        if kept.is_err() {
            // SAFETY: the reference made above, which the graph has not taken.
            unsafe { sys::cuUserObjectRelease(object, 1) };
        }
        kept
    }
}

thread_local! {
    static RELEASING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// True while a graph lets go of what it has [retained](Capture::retain), on this thread: CUDA must not be called then.
pub(super) fn is_releasing() -> bool {
    RELEASING.get()
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
        self.gpu.check(unsafe { sys::cuGraphLaunch(self.exec, stream.handle()) }, "cuGraphLaunch")
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

/// Calls `f`, which uses streams of its own and may allocate and wait even while this or another thread captures
/// other streams in a mode that forbids it.
pub(crate) fn despite_captures<T>(f: impl FnOnce() -> T) -> T {
    /// The mode to put back, also after a panic.
    struct Mode(sys::CUstreamCaptureMode);

    impl Drop for Mode {
        fn drop(&mut self) {
            // SAFETY: the call exchanges the mode of this thread, which any thread may do. It cannot fail for valid modes.
            unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
        }
    }

    let mut mode = Mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
    // SAFETY: any thread may exchange its own mode; what was there is left in `mode`.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode.0) };
    f()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing without a device. Other tests use the default stream, with which blocking streams cannot be captured.
    #[test]
    fn a_capture_ends_after_an_error_and_after_a_panic() {
        let Ok(stream) = Gpu::get(0).and_then(Stream::apart) else { return };
        let failed = stream.capture(|| Err(Error::unsupported("this", "a test")));
        assert!(matches!(failed, Err(Error::Unsupported { .. })));
        let panics = std::panic::AssertUnwindSafe(|| stream.capture(|| panic!("in a capture")));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(!stream.is_capturing().unwrap());
        stream.synchronize().unwrap();
        stream.capture(|| Ok(())).unwrap();
    }

    /// Nothing without a device.
    #[test]
    fn a_graph_keeps_what_its_capture_retained() {
        let Ok(stream) = Gpu::get(0).and_then(Stream::apart) else { return };
        assert!(stream.capture_under_way().unwrap().is_none());
        let owner = Arc::new(5);
        let mut ids = Vec::new();
        let graphs = [(); 2].map(|()| {
            let work = || {
                let capture = stream.capture_under_way()?.expect("this is one");
                ids.push(capture.id);
                capture.retain(owner.clone())
            };
            stream.capture(work).unwrap()
        });
        assert_ne!(ids[0], ids[1]);
        assert_eq!(Arc::strong_count(&owner), 3);
        drop(graphs);
        // The driver lets go in a thread of its own.
        for _ in 0..1000 {
            if Arc::strong_count(&owner) == 1 {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        panic!("still held");
    }
}
