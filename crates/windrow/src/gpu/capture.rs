//! Stream capture, and graphs.

use super::runtime::{Handle, Recording};
use super::{Gpu, Stream};
use crate::{Error, Result};
use std::sync::Arc;

impl Stream {
    /// The capture that the stream takes part in.
    pub(crate) fn capture_under_way(&self) -> Result<Option<Capture>> {
        match self.recording()? {
            Recording::No => Ok(None),
            Recording::Into { id, graph } => Ok(Some(Capture { id, graph, gpu: self.gpu() })),
            Recording::Broken => Err(Error::Backend {
                what: "capturing a stream".into(),
                device: self.device(),
                detail: "an earlier call has made the capture invalid".into(),
            }),
        }
    }

    /// Records the work that `work` enqueues on this stream as a graph, without running it. A stream of [`Stream::new`]
    /// is ordered with the legacy default stream, so no thread may use that stream during the capture.
    ///
    /// # Errors
    /// What `work` returns, and [`Error::Backend`], for example for the legacy default stream, which cannot be
    /// captured.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let gpu = self.gpu();
        // SAFETY: the stream is alive; `Open` ends the capture whatever `work` does.
        gpu.call(|runtime| unsafe { runtime.begin_capture(self.as_raw()) })?;
        let open = Open { stream: self };
        let outcome = work();
        let captured = open.end();
        outcome?;
        let captured = captured?;
        // SAFETY: the graph is alive.
        let instance = gpu.call(|runtime| unsafe { runtime.instantiate(captured.graph) })?;
        Ok(Graph { instance, gpu })
    }
}

/// A capture that was begun and must be ended.
struct Open<'a> {
    stream: &'a Stream,
}

impl Open<'_> {
    fn end(self) -> Result<Captured> {
        let ended = std::mem::ManuallyDrop::new(self);
        let gpu = ended.stream.gpu();
        // SAFETY: ends the capture begun on this stream, once.
        let graph = gpu.call(|runtime| unsafe { runtime.end_capture(ended.stream.as_raw()) })?;
        Ok(Captured { graph, gpu })
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // What was captured is of no use: this is the way of a panic.
        let _ = Open { stream: self.stream }.end();
    }
}

/// A captured graph.
struct Captured {
    graph: Handle,
    gpu: &'static Gpu,
}

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: made by ending a capture and not used after; what was instantiated from it stays.
        self.gpu.try_call(|runtime| unsafe { runtime.destroy_graph(self.graph) });
    }
}

/// A capture in progress.
#[derive(Debug)]
pub(crate) struct Capture {
    /// An id, unique among the captures of this process.
    pub(crate) id: u64,
    graph: Handle,
    gpu: &'static Gpu,
}

impl Capture {
    /// Keeps `owner` as long as the graph, or what is instantiated from it, exists or runs. `owner` may be dropped on a
    /// thread of the driver. So its destructor must not call the backend while [`is_releasing`] is true.
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub(crate) fn retain<T: Send + Sync + 'static>(&self, owner: Arc<T>) -> Result<()> {
        unsafe extern "C" fn release<T>(owner: Handle) {
            RELEASING.set(true);
            // SAFETY: made by `Arc::into_raw` below, and released once.
            drop(unsafe { Arc::from_raw(owner.cast_const().cast::<T>()) });
            RELEASING.set(false);
        }
        self.gpu.call(|runtime| {
            let user = Arc::into_raw(owner).cast_mut().cast();
            // SAFETY: the graph is being captured, so it exists; `release` takes what `user` is, and gets it once.
            unsafe { runtime.retain(self.graph, user, release::<T>) }
        })
    }
}

thread_local! {
    static RELEASING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// True on a thread that is dropping what a destroyed graph had [retained](Capture::retain). It must not call the
/// backend then.
pub(super) fn is_releasing() -> bool {
    RELEASING.get()
}

/// Work recorded by [`Stream::capture`], to be run any number of times.
#[derive(Debug)]
pub struct Graph {
    instance: Handle,
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
    /// The memory that the recorded work uses must still be allocated, and nothing else may access it until the work is
    /// done.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both are alive; the memory is the caller's promise.
        self.gpu.call(|runtime| unsafe { runtime.launch_graph(self.instance, stream.as_raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `capture`.
        self.gpu.try_call(|runtime| unsafe { runtime.destroy_instance(self.instance) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does nothing without a GPU. Other tests use the default stream, with which blocking streams cannot be captured.
    #[test]
    fn a_capture_ends_after_an_error_and_after_a_panic() {
        let Ok(stream) = Gpu::of_tests().and_then(Stream::apart) else { return };
        let failed = stream.capture(|| Err(Error::unsupported("this", "a test")));
        assert!(matches!(failed, Err(Error::Unsupported { .. })));
        let panics = std::panic::AssertUnwindSafe(|| stream.capture(|| panic!("in a capture")));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(stream.capture_under_way().unwrap().is_none());
        stream.synchronize().unwrap();
        stream.capture(|| Ok(())).unwrap();
    }

    /// Does nothing without a GPU.
    #[test]
    fn a_graph_keeps_what_its_capture_retained() {
        let Ok(stream) = Gpu::of_tests().and_then(Stream::apart) else { return };
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
        // The driver drops it on a thread of its own.
        for _ in 0..1000 {
            if Arc::strong_count(&owner) == 1 {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        panic!("still held");
    }
}
