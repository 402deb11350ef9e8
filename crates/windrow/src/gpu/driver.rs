//! The functions that the CUDA and HIP drivers have in common, under different names. The types and the status codes
//! are the same in both.

use super::runtime::Common;
use super::{Failure, Handle, Outcome, Recording, Runtime, StreamKind};
use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::null_mut;

/// The status for out of memory, in `CUresult` and `hipError_t`.
const OUT_OF_MEMORY: c_int = 2;
const NOT_READY: c_int = 600;

/// The structure `CUmemAccessDesc` or `hipMemAccessDesc`.
#[repr(C)]
pub(crate) struct MemoryAccess {
    location_type: c_int,
    location: c_int,
    flags: c_int,
}

macro_rules! calls {
    ($($function:ident($($argument:ty),* $(,)?);)*) => {
        /// Functions of a driver.
        pub(crate) struct Calls<L> {
            $(pub(crate) $function: unsafe fn(&L, $($argument),*) -> Outcome<()>,)*
        }
    };
}

calls! {
    can_access_peer(*mut c_int, c_int, c_int);
    default_pool(*mut Handle, c_int);
    set_pool_attribute(Handle, c_int, *mut c_void);
    set_pool_access(Handle, *const MemoryAccess, usize);
    allocate(*mut *mut c_void, usize);
    free(*mut c_void);
    allocate_async(*mut *mut c_void, usize, Handle);
    free_async(*mut c_void, Handle);
    allocate_host(*mut *mut c_void, usize, c_uint);
    free_host(*mut c_void);

    stream_priorities(*mut c_int, *mut c_int);
    create_stream(*mut Handle, c_uint);
    create_stream_with_priority(*mut Handle, c_uint, c_int);
    synchronize_stream(Handle);
    wait(Handle, Handle, c_uint);
    create_event(*mut Handle, c_uint);
    destroy_event(Handle);
    record(Handle, Handle);
    query_event(Handle);
    synchronize_event(Handle);
    elapsed(*mut f32, Handle, Handle);

    begin_capture(Handle, c_int);
    end_capture(Handle, *mut Handle);
    capture_info(Handle, *mut c_int, *mut u64, *mut Handle, *mut *const Handle, *mut usize);
    exchange_capture_mode(*mut c_int);
    instantiate(*mut Handle, Handle, c_ulonglong);
    launch_graph(Handle, Handle);
    destroy_graph(Handle);
    destroy_instance(Handle);
    create_object(*mut Handle, Handle, unsafe extern "C" fn(Handle), c_uint, c_uint);
    release_object(Handle, c_uint);
    retain_object(Handle, Handle, c_uint, c_uint);

    load_module(*mut Handle, *const c_void);
    find_function(*mut Handle, Handle, *const c_char);
}

/// What [`Common`] needs to know of a device.
pub(crate) trait Driven {
    type Library: 'static;
    const CALLS: Calls<Self::Library>;

    fn library(&self) -> &'static Self::Library;
    /// The driver's number of the device.
    fn number(&self) -> c_int;
    /// The number of the device with another index.
    fn number_of(&self, index: u32) -> Outcome<c_int>;
    /// True if the device can allocate in stream order.
    fn memory_pools(&self) -> bool;

    /// The default memory pool of a device for which [`Driven::memory_pools`] is true.
    fn pool(&self) -> Outcome<Handle> {
        // SAFETY: the device has memory pools, says the caller.
        made(|pool| unsafe { (Self::CALLS.default_pool)(self.library(), pool, self.number()) })
    }

    /// # Safety
    /// As [`Runtime::create_stream`].
    unsafe fn new_stream(&self, kind: StreamKind) -> Outcome<Handle> {
        const NON_BLOCKING: c_uint = 1;
        let (calls, library) = (Self::CALLS, self.library());
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: the device is current, says the caller; each call writes to a local.
        made(|stream| unsafe {
            match kind {
                StreamKind::Blocking => (calls.create_stream)(library, stream, 0),
                StreamKind::Apart => (calls.create_stream)(library, stream, NON_BLOCKING),
                StreamKind::Urgent => {
                    (calls.stream_priorities)(library, &mut lowest, &mut highest)?;
                    (calls.create_stream_with_priority)(library, stream, 0, highest)
                }
            }
        })
    }

    /// The entry point of an image.
    ///
    /// # Safety
    /// As [`Runtime::load`].
    unsafe fn entry_point(&self, image: &[u8], entry: &str) -> Outcome<Handle> {
        let (calls, library) = (Self::CALLS, self.library());
        let name = CString::new(entry).expect("a C identifier");
        let image = image.as_ptr().cast();
        // SAFETY: an image of the backend's compiler; the call writes one pointer.
        let module = made(|module| unsafe { (calls.load_module)(library, module, image) })?;
        // SAFETY: the module was loaded above and the name ends in a zero byte; the call writes one pointer.
        made(|function| unsafe { (calls.find_function)(library, function, module, name.as_ptr()) })
    }
}

/// Makes the memory pool keep freed memory, if the device has a pool. By default every synchronization returns it to
/// the system, and the next allocation pays for it again.
pub(crate) fn keep_freed_memory<D: Driven + Runtime>(device: &D) -> Outcome<()> {
    const RELEASE_THRESHOLD: c_int = 4;
    if !device.memory_pools() {
        return Ok(());
    }
    let previous = device.enter()?;
    let mut threshold = u64::MAX;
    let value = (&raw mut threshold).cast();
    let kept = device.pool().and_then(|pool| {
        // SAFETY: the device is current; the attribute is a 64-bit number.
        unsafe { (D::CALLS.set_pool_attribute)(device.library(), pool, RELEASE_THRESHOLD, value) }
    });
    if let Some(previous) = previous {
        // SAFETY: undoes `enter` above.
        unsafe { device.leave(previous) };
    }
    kept
}

/// The handle that a call writes.
pub(crate) fn made(make: impl FnOnce(&mut Handle) -> Outcome<()>) -> Outcome<Handle> {
    let mut handle = null_mut();
    make(&mut handle).map(|()| handle)
}

/// The memory that a call allocates; `None` if there is not enough memory.
fn allocated(make: impl FnOnce(&mut Handle) -> Outcome<()>) -> Outcome<Option<*mut u8>> {
    match made(make) {
        Ok(memory) => Ok(Some(memory.cast())),
        Err(Failure { status: OUT_OF_MEMORY, .. }) => Ok(None),
        Err(failure) => Err(failure),
    }
}

impl<D: Driven> Common for D {
    unsafe fn allow_access_by(&self, peer: u32) -> Outcome<()> {
        const LOCATION_DEVICE: c_int = 1;
        const READ_WRITE: c_int = 3;
        if !self.memory_pools() {
            return Ok(());
        }
        let (calls, library) = (Self::CALLS, self.library());
        let (location, mut linked) = (self.number_of(peer)?, 0);
        // SAFETY: the call writes one number; the driver checks the devices.
        unsafe { (calls.can_access_peer)(library, &mut linked, location, self.number())? };
        if linked == 0 {
            return Ok(());
        }
        let access = MemoryAccess { location_type: LOCATION_DEVICE, location, flags: READ_WRITE };
        // SAFETY: the pool lives as long as the device; one description is given.
        unsafe { (calls.set_pool_access)(library, self.pool()?, &access, 1) }
    }

    unsafe fn allocate(&self, bytes: usize, stream: Handle) -> Outcome<Option<*mut u8>> {
        let (calls, library) = (Self::CALLS, self.library());
        allocated(|memory| match self.memory_pools() {
            // SAFETY: the stream is alive, says the caller; the call writes one pointer.
            true => unsafe { (calls.allocate_async)(library, memory, bytes, stream) },
            // SAFETY: the device is current, says the caller; the call writes one pointer.
            false => unsafe { (calls.allocate)(library, memory, bytes) },
        })
    }

    unsafe fn free(&self, memory: *mut u8, stream: Handle) -> Outcome<()> {
        match self.memory_pools() {
            // SAFETY: of `allocate`, in the same way, and used by nothing after, says the caller.
            true => unsafe { (Self::CALLS.free_async)(self.library(), memory.cast(), stream) },
            // This waits for the device.
            // SAFETY: of `allocate` on a device without pools, and used by nothing after, says the caller.
            false => unsafe { (Self::CALLS.free)(self.library(), memory.cast()) },
        }
    }

    unsafe fn allocate_host(&self, bytes: usize) -> Outcome<Option<*mut u8>> {
        const PORTABLE: c_uint = 1;
        // SAFETY: the device is current, says the caller; the call writes one pointer.
        allocated(|memory| unsafe {
            (Self::CALLS.allocate_host)(self.library(), memory, bytes, PORTABLE)
        })
    }

    unsafe fn free_host(&self, memory: *mut u8) -> Outcome<()> {
        // SAFETY: of `allocate_host`, and used by nothing after, says the caller.
        unsafe { (Self::CALLS.free_host)(self.library(), memory.cast()) }
    }

    unsafe fn synchronize_stream(&self, stream: Handle) -> Outcome<()> {
        // SAFETY: the stream is alive, says the caller.
        unsafe { (Self::CALLS.synchronize_stream)(self.library(), stream) }
    }

    unsafe fn wait(&self, stream: Handle, event: Handle) -> Outcome<()> {
        // SAFETY: both are alive, says the caller.
        unsafe { (Self::CALLS.wait)(self.library(), stream, event, 0) }
    }

    unsafe fn create_event(&self, timed: bool) -> Outcome<Handle> {
        const DISABLE_TIMING: c_uint = 2;
        let flags = if timed { 0 } else { DISABLE_TIMING };
        // SAFETY: the device is current, says the caller; the call writes one pointer.
        made(|event| unsafe { (Self::CALLS.create_event)(self.library(), event, flags) })
    }

    unsafe fn destroy_event(&self, event: Handle) -> Outcome<()> {
        // SAFETY: of `create_event`, and not used after, says the caller.
        unsafe { (Self::CALLS.destroy_event)(self.library(), event) }
    }

    unsafe fn record(&self, event: Handle, stream: Handle) -> Outcome<()> {
        // SAFETY: both are alive, says the caller.
        unsafe { (Self::CALLS.record)(self.library(), event, stream) }
    }

    unsafe fn is_reached(&self, event: Handle) -> Outcome<bool> {
        // SAFETY: the event is alive, says the caller.
        match unsafe { (Self::CALLS.query_event)(self.library(), event) } {
            Ok(()) => Ok(true),
            Err(Failure { status: NOT_READY, .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    unsafe fn synchronize_event(&self, event: Handle) -> Outcome<()> {
        // SAFETY: the event is alive, says the caller.
        unsafe { (Self::CALLS.synchronize_event)(self.library(), event) }
    }

    unsafe fn milliseconds(&self, start: Handle, end: Handle) -> Outcome<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both are alive, says the caller; the call writes one number.
        unsafe { (Self::CALLS.elapsed)(self.library(), &mut milliseconds, start, end) }
            .map(|()| milliseconds)
    }

    unsafe fn begin_capture(&self, stream: Handle) -> Outcome<()> {
        // `CUstreamCaptureMode`
        const THREAD_LOCAL: c_int = 1;
        // SAFETY: the stream is alive, says the caller.
        unsafe { (Self::CALLS.begin_capture)(self.library(), stream, THREAD_LOCAL) }
    }

    unsafe fn end_capture(&self, stream: Handle) -> Outcome<Handle> {
        // SAFETY: the stream is alive, says the caller; the call writes one pointer.
        made(|graph| unsafe { (Self::CALLS.end_capture)(self.library(), stream, graph) })
    }

    unsafe fn recording(&self, stream: Handle) -> Outcome<Recording> {
        // `CUstreamCaptureStatus`
        const NONE: c_int = 0;
        const ACTIVE: c_int = 1;
        let (calls, library) = (Self::CALLS, self.library());
        let (mut status, mut id) = (NONE, 0);
        // SAFETY: the stream is alive, says the caller; the call writes to locals, and nothing through null.
        let graph = made(|graph| unsafe {
            let (status, id) = (&mut status, &mut id);
            (calls.capture_info)(library, stream, status, id, graph, null_mut(), null_mut())
        })?;
        Ok(match status {
            NONE => Recording::No,
            ACTIVE => Recording::Into { id, graph },
            _ => Recording::Broken,
        })
    }

    unsafe fn retain(
        &self,
        graph: Handle,
        owner: Handle,
        release: unsafe extern "C" fn(Handle),
    ) -> Outcome<()> {
        const NO_DESTRUCTOR_SYNC: c_uint = 1;
        const MOVE: c_uint = 1;
        let (calls, library) = (Self::CALLS, self.library());
        // SAFETY: `release` takes `owner` from any thread, says the caller; the call writes one pointer.
        let object = made(|object| unsafe {
            (calls.create_object)(library, object, owner, release, 1, NO_DESTRUCTOR_SYNC)
        })
        // SAFETY: the driver has not taken it.
        .inspect_err(|_| unsafe { release(owner) })?;
        // SAFETY: the graph is alive, says the caller, and the object was made above.
        unsafe { (calls.retain_object)(library, graph, object, 1, MOVE) }.inspect_err(|_| {
            // SAFETY: the reference made above, which the graph has not taken: this calls `release`.
            let _ = unsafe { (calls.release_object)(library, object, 1) };
        })
    }

    unsafe fn destroy_graph(&self, graph: Handle) -> Outcome<()> {
        // SAFETY: of `end_capture`, and not used after, says the caller.
        unsafe { (Self::CALLS.destroy_graph)(self.library(), graph) }
    }

    unsafe fn instantiate(&self, graph: Handle) -> Outcome<Handle> {
        // SAFETY: the graph is alive, says the caller; the call writes one pointer.
        made(|instance| unsafe { (Self::CALLS.instantiate)(self.library(), instance, graph, 0) })
    }

    unsafe fn destroy_instance(&self, instance: Handle) -> Outcome<()> {
        // SAFETY: of `instantiate`, and not used after, says the caller.
        unsafe { (Self::CALLS.destroy_instance)(self.library(), instance) }
    }

    unsafe fn launch_graph(&self, instance: Handle, stream: Handle) -> Outcome<()> {
        // SAFETY: both are alive, as is the memory that the graph uses, says the caller.
        unsafe { (Self::CALLS.launch_graph)(self.library(), instance, stream) }
    }

    fn relax_captures(&self) -> c_int {
        // `CUstreamCaptureMode`
        const RELAXED: c_int = 2;
        let mut mode = RELAXED;
        // It cannot fail for valid modes.
        // SAFETY: the call exchanges the mode of this thread, which any thread may do.
        let _ = unsafe { (Self::CALLS.exchange_capture_mode)(self.library(), &mut mode) };
        mode
    }

    fn restore_captures(&self, mut mode: c_int) {
        // SAFETY: the call exchanges the mode of this thread, which any thread may do.
        let _ = unsafe { (Self::CALLS.exchange_capture_mode)(self.library(), &mut mode) };
    }
}
