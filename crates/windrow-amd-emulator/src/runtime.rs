//! The functions of libamdhip64. Everything is done when a call returns, in the thread that calls.

use crate::Fault;
use crate::launch::{Function, Module, Size};
use crate::{graphs, memory, object, rocblas};
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Instant;

pub(crate) type Handle = *mut c_void;

/// `hipError_t`
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const INVALID_DEVICE: c_int = 101;
const INVALID_IMAGE: c_int = 200;
const INVALID_HANDLE: c_int = 400;
const NOT_FOUND: c_int = 500;
const LAUNCH_FAILURE: c_int = 719;
pub(crate) const CAPTURE_UNSUPPORTED: c_int = 900;

thread_local! {
    /// The last error of this thread, and what it was about.
    static LAST: Cell<c_int> = const { Cell::new(0) };
    static WORDS: RefCell<CString> = RefCell::default();
}

/// The chip: `WINDROW_EMULATOR_CHIP`, or gfx942.
static CHIP: LazyLock<String> =
    LazyLock::new(|| std::env::var("WINDROW_EMULATOR_CHIP").unwrap_or_else(|_| "gfx942".into()));

/// `WINDROW_EMULATOR_FAIL`, as `hipMalloc=2`: each call of the function fails with the status; `hipMalloc=2@5`: the
/// fifth does.
static FAILING: LazyLock<Option<(String, c_int, Option<u64>)>> = LazyLock::new(|| {
    let text = std::env::var("WINDROW_EMULATOR_FAIL").ok()?;
    let (name, rest) = text.split_once('=')?;
    let (status, call) = rest.split_once('@').map_or((rest, None), |(s, n)| (s, n.parse().ok()));
    Some((name.to_owned(), status.parse().ok()?, call))
});

/// The status that a call is to fail with.
pub(crate) fn told_to_fail(name: &str) -> Option<c_int> {
    static CALLS: Mutex<u64> = Mutex::new(0);
    let (failing, status, which) = FAILING.as_ref()?;
    if failing != name {
        return None;
    }
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    *calls += 1;
    which.is_none_or(|n| n == *calls).then_some(*status)
}

pub(crate) fn failed(status: c_int, words: impl std::fmt::Display) -> c_int {
    LAST.set(status);
    WORDS.set(CString::new(words.to_string().replace('\0', " ")).unwrap_or_default());
    status
}

/// Work that a graph repeats.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Launch(Function, Size, Vec<u8>),
    Copy { to: usize, from: usize, bytes: usize },
    Fill { at: usize, value: u8, bytes: usize },
    Product(rocblas::Product),
}

impl Work {
    fn run(&self) -> Result<(), Fault> {
        match self {
            Work::Launch(function, size, arguments) => function.launch(*size, arguments),
            Work::Copy { to, from, bytes } => {
                // SAFETY: the caller of the runtime says that both are so many bytes.
                unsafe {
                    let from: *const u8 = std::ptr::with_exposed_provenance(*from);
                    from.copy_to(std::ptr::with_exposed_provenance_mut(*to), *bytes);
                }
                Ok(())
            }
            Work::Product(product) => product.run(),
            Work::Fill { at, value, bytes } => {
                let at: *mut u8 = std::ptr::with_exposed_provenance_mut(*at);
                // SAFETY: the caller of the runtime says that there are so many bytes.
                unsafe { at.write_bytes(*value, *bytes) };
                Ok(())
            }
        }
    }
}

struct Event(Mutex<Option<Instant>>);

/// Does the work, or keeps it for the graph that the stream records.
pub(crate) fn give(stream: Handle, work: Work) -> c_int {
    let Some(work) = graphs::record(stream, work) else { return 0 };
    work.run().map_or_else(
        |fault| {
            eprintln!("windrow-amd-emulator: {fault}");
            failed(LAUNCH_FAILURE, fault)
        },
        |()| 0,
    )
}

pub(crate) fn boxed<T>(value: T) -> Handle {
    Box::into_raw(Box::new(value)).cast()
}

macro_rules! functions {
    ($($(#[$about:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$about])*
            ///
            /// # Safety
            /// As the library says: pointers to what is read or written, and handles that are alive.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, clippy::too_many_arguments)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
                if let Some(status) = $crate::runtime::told_to_fail(stringify!($name)) {
                    return $crate::runtime::failed(status, concat!(stringify!($name), " was told to fail"));
                }
                // SAFETY: the caller's promise.
                #[allow(unused_unsafe, clippy::macro_metavars_in_unsafe)]
                unsafe { $body }
            }
        )*
    };
}

pub(crate) use functions;

/// Names for a status.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(status: c_int) -> *const c_char {
    let name = match status {
        0 => c"hipSuccess",
        INVALID_VALUE => c"hipErrorInvalidValue",
        OUT_OF_MEMORY => c"hipErrorOutOfMemory",
        INVALID_DEVICE => c"hipErrorInvalidDevice",
        INVALID_IMAGE => c"hipErrorInvalidImage",
        INVALID_HANDLE => c"hipErrorInvalidHandle",
        NOT_FOUND => c"hipErrorNotFound",
        LAUNCH_FAILURE => c"hipErrorLaunchFailure",
        CAPTURE_UNSUPPORTED => c"hipErrorStreamCaptureUnsupported",
        _ => c"hipErrorUnknown",
    };
    name.as_ptr()
}

/// The text of the thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(_: c_int) -> *const c_char {
    WORDS.with_borrow(|words| words.as_ptr())
}

/// The thread's last error, which is forgotten.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetLastError() -> c_int {
    LAST.replace(0)
}

functions! {
    /// Nothing is to be done.
    fn hipInit(_flags: c_uint) { 0 }

    /// ROCm 6.0's.
    fn hipRuntimeGetVersion(version: *mut c_int) { version.write(60_000_000); 0 }

    /// The number of devices: one.
    fn hipGetDeviceCount(count: *mut c_int) { count.write(1); 0 }

    /// Name and architecture, at their places of ROCm 6.
    fn hipGetDevicePropertiesR0600(properties: *mut u8, device: c_int) {
        if device != 0 {
            return failed(INVALID_DEVICE, "there is one device");
        }
        let write = |at: usize, text: &str| {
            let bytes = text.as_bytes();
            properties.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            properties.add(at + bytes.len()).write(0);
        };
        write(0, &format!("emulator of {}", *CHIP));
        write(1160, &CHIP);
        0
    }

    /// `hipDeviceAttribute_t`; 0 for those that nobody asks for.
    fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        let old = CHIP.starts_with("gfx9");
        value.write(match attribute {
            19 => 4 << 20,
            23 => [11, 9][usize::from(old)],
            61 => [0, 4][usize::from(*CHIP == "gfx942")],
            63 => 4,
            74 => 65536,
            87 => [32, 64][usize::from(old)],
            88 => 1,
            _ => 0,
        });
        0
    }

    /// The limit of the sum of allocations.
    fn hipDeviceTotalMem(bytes: *mut usize, _device: c_int) { bytes.write(memory::TOTAL); 0 }

    /// False: the device is alone.
    fn hipDeviceCanAccessPeer(can: *mut c_int, _device: c_int, _peer: c_int) { can.write(0); 0 }

    /// One priority.
    fn hipDeviceGetStreamPriorityRange(lowest: *mut c_int, highest: *mut c_int) {
        lowest.write(0);
        highest.write(0);
        0
    }

    /// The first.
    fn hipGetDevice(device: *mut c_int) { device.write(0); 0 }

    /// Accepts the only device.
    fn hipSetDevice(device: c_int) {
        if device == 0 { 0 } else { failed(INVALID_DEVICE, "there is one device") }
    }

    /// Memory full of poison.
    fn hipMalloc(to: *mut Handle, bytes: usize) { allocate(to, bytes) }

    /// Frees it.
    fn hipFree(from: Handle) { free(from) }

    /// Allocates as `hipMalloc`.
    fn hipMallocAsync(to: *mut Handle, bytes: usize, _stream: Handle) { allocate(to, bytes) }

    /// Frees as `hipFree`.
    fn hipFreeAsync(from: Handle, _stream: Handle) { free(from) }

    /// The only pool.
    fn hipDeviceGetDefaultMemPool(pool: *mut Handle, _device: c_int) {
        pool.write(null_mut());
        0
    }

    /// Nothing is kept.
    fn hipMemPoolSetAttribute(_pool: Handle, _attribute: c_int, _value: Handle) { 0 }

    /// No other device is there.
    fn hipMemPoolSetAccess(_pool: Handle, _access: *const c_void, _count: usize) { 0 }

    /// Memory that kernels may use too.
    fn hipHostMalloc(to: *mut Handle, bytes: usize, _flags: c_uint) { allocate(to, bytes) }

    /// Frees it.
    fn hipHostFree(from: Handle) { free(from) }

    /// Copies at once.
    fn hipMemcpy(to: Handle, from: *const c_void, bytes: usize, _kind: c_int) {
        from.cast::<u8>().copy_to(to.cast(), bytes);
        0
    }

    /// Copies.
    fn hipMemcpyAsync(
        to: Handle,
        from: *const c_void,
        bytes: usize,
        _kind: c_int,
        stream: Handle,
    ) {
        let (to, from) = (to.expose_provenance(), from.expose_provenance());
        give(stream, Work::Copy { to, from, bytes })
    }

    /// Fills.
    fn hipMemsetAsync(at: Handle, value: c_int, bytes: usize, stream: Handle) {
        give(stream, Work::Fill { at: at.expose_provenance(), value: value as u8, bytes })
    }

    /// A name for an order that is kept anyway.
    fn hipStreamCreateWithFlags(stream: *mut Handle, _flags: c_uint) {
        stream.write(boxed(0u64));
        0
    }

    /// Creates as `hipStreamCreateWithFlags`.
    fn hipStreamCreateWithPriority(stream: *mut Handle, _flags: c_uint, _priority: c_int) {
        stream.write(boxed(0u64));
        0
    }

    /// Forgets it.
    fn hipStreamDestroy(stream: Handle) {
        if stream.is_null() {
            return failed(INVALID_HANDLE, "no stream");
        }
        graphs::forget(stream);
        drop(Box::from_raw(stream.cast::<u64>()));
        0
    }

    /// Everything is done already.
    fn hipStreamSynchronize(stream: Handle) {
        if graphs::is_recorded(stream) {
            return failed(CAPTURE_UNSUPPORTED, "the stream is recorded");
        }
        0
    }

    /// Waits as `hipStreamSynchronize`.
    fn hipStreamWaitEvent(_stream: Handle, _event: Handle, _flags: c_uint) { 0 }

    /// A time.
    fn hipEventCreateWithFlags(event: *mut Handle, _flags: c_uint) {
        event.write(boxed(Event(Mutex::new(None))));
        0
    }

    /// Forgets it.
    fn hipEventDestroy(event: Handle) {
        drop(Box::from_raw(event.cast::<Event>()));
        0
    }

    /// Now.
    fn hipEventRecord(event: Handle, _stream: Handle) {
        let event = &*event.cast::<Event>();
        *event.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        0
    }

    /// The event is always reached.
    fn hipEventQuery(_event: Handle) { 0 }

    /// The event is always reached.
    fn hipEventSynchronize(_event: Handle) { 0 }

    /// The time between two events.
    fn hipEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) {
        let time = |event: Handle| {
            *(*event.cast::<Event>()).0.lock().unwrap_or_else(PoisonError::into_inner)
        };
        let (Some(start), Some(end)) = (time(start), time(end)) else {
            return failed(INVALID_HANDLE, "an event that was not recorded");
        };
        milliseconds.write(end.saturating_duration_since(start).as_secs_f32() * 1e3);
        0
    }

    /// Reads a code object; one with an instruction that is not known is refused.
    fn hipModuleLoadData(module: *mut Handle, image: *const c_void) {
        let image = image.cast::<u8>();
        let made = object::length(image)
            .and_then(|bytes| Module::new(std::slice::from_raw_parts(image, bytes)));
        match made {
            Ok(made) if made.object.chip == *CHIP => {
                module.write(boxed(Arc::new(made)));
                0
            }
            Ok(made) => failed(INVALID_IMAGE, format_args!("code for {}", made.object.chip)),
            Err(fault) => failed(INVALID_IMAGE, fault),
        }
    }

    /// A kernel by its name.
    fn hipModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) {
        let module = &*module.cast::<Arc<Module>>();
        let name = CStr::from_ptr(name).to_string_lossy();
        let Some(found) = module.function(&name) else {
            return failed(NOT_FOUND, format_args!("no kernel `{name}`"));
        };
        function.write(boxed(found));
        0
    }

    /// Interprets it. The parameters are those of one structure or more, each by its address.
    fn hipModuleLaunchKernel(
        function: Handle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: Handle,
        parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        let function = &*function.cast::<Function>();
        let mut bytes = vec![0; function.explicit_bytes()];
        let explicit = function.descriptor.arguments.iter().filter(|a| !a.kind.starts_with("hidden_"));
        for (n, argument) in explicit.enumerate() {
            let from = (*parameters.add(n)).cast::<u8>();
            let to = bytes[argument.offset..][..argument.size].as_mut_ptr();
            to.copy_from_nonoverlapping(from, argument.size);
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        give(stream, Work::Launch(function.clone(), Size { grid, block, shared_bytes }, bytes))
    }
}

/// # Safety
/// `to` can be written.
unsafe fn allocate(to: *mut Handle, bytes: usize) -> c_int {
    let Some(found) = memory::allocate(bytes) else {
        return failed(OUT_OF_MEMORY, format_args!("no {bytes} bytes are left"));
    };
    found.expose_provenance();
    // SAFETY: the caller's promise.
    unsafe { to.write(found.cast()) };
    0
}

/// # Safety
/// Nothing uses it after.
unsafe fn free(from: Handle) -> c_int {
    // SAFETY: the caller's promise.
    if from.is_null() || unsafe { memory::free(from.cast()) } {
        return 0;
    }
    failed(INVALID_VALUE, "memory that was not allocated")
}
