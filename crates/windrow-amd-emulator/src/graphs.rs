//! The functions of libamdhip64 that record streams into graphs and repeat these.

use crate::runtime::{CAPTURE_UNSUPPORTED, Handle, Work, boxed, failed, functions, give};
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_ulonglong};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

thread_local! {
    /// `hipStreamCaptureMode`
    static MODE: Cell<c_int> = const { Cell::new(0) };
}

/// Called with an object of the user's when its last graph is gone.
struct UserObject {
    user: Handle,
    release: unsafe extern "C" fn(Handle),
}

// SAFETY: who makes one lets it be released from any thread.
unsafe impl Send for UserObject {}
// SAFETY: it is looked at when it is dropped only.
unsafe impl Sync for UserObject {}

impl Drop for UserObject {
    fn drop(&mut self) {
        // SAFETY: the maker's promise.
        unsafe { (self.release)(self.user) };
    }
}

#[derive(Clone, Default)]
struct Graph {
    work: Vec<Work>,
    objects: Vec<Arc<UserObject>>,
}

/// A capture under way: its number and its graph.
struct Capture {
    id: u64,
    graph: *mut Graph,
}

// SAFETY: graphs belong to whoever captures.
unsafe impl Send for Capture {}

/// The captures by the addresses of the streams.
static CAPTURES: LazyLock<Mutex<HashMap<usize, Capture>>> = LazyLock::new(Mutex::default);

fn captures() -> MutexGuard<'static, HashMap<usize, Capture>> {
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn is_recorded(stream: Handle) -> bool {
    captures().contains_key(&stream.addr())
}

/// Ends the capture of a stream that is destroyed. Another stream may get its address.
pub(crate) fn forget(stream: Handle) {
    let capture = captures().remove(&stream.addr());
    if let Some(capture) = capture {
        // SAFETY: made when the capture began, and handed to nobody.
        drop(unsafe { Box::from_raw(capture.graph) });
    }
}

/// Keeps the work for the graph that the stream records; if it records none, the work is given back.
pub(crate) fn record(stream: Handle, work: Work) -> Option<Work> {
    let captures = captures();
    let Some(capture) = captures.get(&stream.addr()) else { return Some(work) };
    // SAFETY: alive until the capture ends.
    unsafe { &mut *capture.graph }.work.push(work);
    None
}

functions! {
    /// Starts a graph of the work that is given from now on.
    fn hipStreamBeginCapture(stream: Handle, _mode: c_int) {
        static NEXT: Mutex<u64> = Mutex::new(1);
        let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
        let mut captures = captures();
        if stream.is_null() || captures.contains_key(&stream.addr()) {
            return failed(CAPTURE_UNSUPPORTED, "the stream cannot be recorded");
        }
        let graph = Box::into_raw(Box::<Graph>::default());
        captures.insert(stream.addr(), Capture { id: *next, graph });
        *next += 1;
        0
    }

    /// The graph.
    fn hipStreamEndCapture(stream: Handle, graph: *mut Handle) {
        let mut captures = captures();
        let Some(capture) = captures.remove(&stream.addr()) else {
            return failed(CAPTURE_UNSUPPORTED, "the stream is not recorded");
        };
        graph.write(capture.graph.cast());
        0
    }

    /// Whether a stream is recorded, and into what.
    fn hipStreamGetCaptureInfo_v2(
        stream: Handle,
        status: *mut c_int,
        id: *mut u64,
        graph: *mut Handle,
        _dependencies: *mut *const Handle,
        _count: *mut usize,
    ) {
        let captures = captures();
        let capture = captures.get(&stream.addr());
        status.write(c_int::from(capture.is_some()));
        if let Some(capture) = capture {
            id.write(capture.id);
            graph.write(capture.graph.cast());
        }
        0
    }

    /// The capture mode of this thread.
    fn hipThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        mode.write(MODE.replace(mode.read()));
        0
    }

    /// A copy of the graph.
    fn hipGraphInstantiateWithFlags(
        instance: *mut Handle,
        graph: Handle,
        _flags: c_ulonglong,
    ) {
        instance.write(boxed((*graph.cast::<Graph>()).clone()));
        0
    }

    /// Does the graph's work in the order in which it was given.
    fn hipGraphLaunch(instance: Handle, stream: Handle) {
        for work in &(*instance.cast::<Graph>()).work {
            let status = give(stream, work.clone());
            if status != 0 {
                return status;
            }
        }
        0
    }

    /// Forgets it.
    fn hipGraphDestroy(graph: Handle) {
        drop(Box::from_raw(graph.cast::<Graph>()));
        0
    }

    /// Forgets it.
    fn hipGraphExecDestroy(instance: Handle) {
        drop(Box::from_raw(instance.cast::<Graph>()));
        0
    }

    /// An object that is released with the last graph that keeps it.
    fn hipUserObjectCreate(
        object: *mut Handle,
        user: Handle,
        release: unsafe extern "C" fn(Handle),
        _count: c_uint,
        _flags: c_uint,
    ) {
        object.write(boxed(Arc::new(UserObject { user, release })));
        0
    }

    /// The user's own share.
    fn hipUserObjectRelease(object: Handle, _count: c_uint) {
        drop(Box::from_raw(object.cast::<Arc<UserObject>>()));
        0
    }

    /// The graph takes the user's share.
    fn hipGraphRetainUserObject(graph: Handle, object: Handle, _count: c_uint, _flags: c_uint) {
        let object = Box::from_raw(object.cast::<Arc<UserObject>>());
        (*graph.cast::<Graph>()).objects.push(*object);
        0
    }
}
