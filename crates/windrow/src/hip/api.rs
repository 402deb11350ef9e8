//! The functions of HIP's runtime that Windrow calls.

use super::rocm;
use crate::gpu::library::{Describe, Library, library};
use crate::gpu::{Handle, MemoryAccess};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

pub(super) static LIBAMDHIP64: Library = rocm("libamdhip64.so");

/// `hipDeviceProp_t` as ROCm 6 lays it out: what is read of it. It is shorter than this.
#[repr(C, align(8))]
pub(super) struct Properties {
    pub(super) name: [c_char; 256],
    between: [u8; 1160 - 256],
    pub(super) architecture: [c_char; 256],
    rest: [u8; 4096 - 1160 - 256],
}

impl Properties {
    pub(super) const EMPTY: Self = Properties {
        name: [0; 256],
        between: [0; 1160 - 256],
        architecture: [0; 256],
        rest: [0; 4096 - 1160 - 256],
    };
}

library! {
    /// The runtime.
    pub(super) struct Api in LIBAMDHIP64;

    fn hipGetErrorName(error: c_int) -> *const c_char;
    fn hipGetErrorString(error: c_int) -> *const c_char;
    fn hipGetLastError() -> c_int;
    fn hipInit(flags: c_uint);
    fn hipRuntimeGetVersion(version: *mut c_int);

    fn hipGetDeviceCount(count: *mut c_int);
    fn hipGetDevicePropertiesR0600(properties: *mut Properties, device: c_int);
    fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    fn hipDeviceTotalMem(bytes: *mut usize, device: c_int);
    fn hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    fn hipDeviceGetStreamPriorityRange(lowest: *mut c_int, highest: *mut c_int);
    fn hipGetDevice(device: *mut c_int);
    fn hipSetDevice(device: c_int);

    fn hipMalloc(memory: *mut *mut c_void, bytes: usize);
    fn hipFree(memory: *mut c_void);
    fn hipMallocAsync(memory: *mut *mut c_void, bytes: usize, stream: Handle);
    fn hipFreeAsync(memory: *mut c_void, stream: Handle);
    fn hipDeviceGetDefaultMemPool(pool: *mut Handle, device: c_int);
    fn hipMemPoolSetAttribute(pool: Handle, attribute: c_int, value: *mut c_void);
    fn hipMemPoolSetAccess(pool: Handle, access: *const MemoryAccess, count: usize);
    fn hipHostMalloc(memory: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn hipHostFree(memory: *mut c_void);
    fn hipMemcpy(to: *mut c_void, from: *const c_void, bytes: usize, kind: c_int);
    fn hipMemcpyAsync(
        to: *mut c_void,
        from: *const c_void,
        bytes: usize,
        kind: c_int,
        stream: Handle,
    );
    fn hipMemsetAsync(memory: *mut c_void, value: c_int, bytes: usize, stream: Handle);

    fn hipStreamCreateWithFlags(stream: *mut Handle, flags: c_uint);
    fn hipStreamCreateWithPriority(stream: *mut Handle, flags: c_uint, priority: c_int);
    fn hipStreamDestroy(stream: Handle);
    fn hipStreamSynchronize(stream: Handle);
    fn hipStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint);
    fn hipEventCreateWithFlags(event: *mut Handle, flags: c_uint);
    fn hipEventDestroy(event: Handle);
    fn hipEventRecord(event: Handle, stream: Handle);
    fn hipEventQuery(event: Handle);
    fn hipEventSynchronize(event: Handle);
    fn hipEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle);

    fn hipStreamBeginCapture(stream: Handle, mode: c_int);
    fn hipStreamEndCapture(stream: Handle, graph: *mut Handle);
    fn hipStreamGetCaptureInfo_v2(
        stream: Handle,
        status: *mut c_int,
        id: *mut u64,
        graph: *mut Handle,
        dependencies: *mut *const Handle,
        count: *mut usize,
    );
    fn hipThreadExchangeStreamCaptureMode(mode: *mut c_int);
    fn hipGraphInstantiateWithFlags(instance: *mut Handle, graph: Handle, flags: c_ulonglong);
    fn hipGraphLaunch(instance: Handle, stream: Handle);
    fn hipGraphDestroy(graph: Handle);
    fn hipGraphExecDestroy(instance: Handle);
    fn hipUserObjectCreate(
        object: *mut Handle,
        user: Handle,
        release: unsafe extern "C" fn(Handle),
        count: c_uint,
        flags: c_uint,
    );
    fn hipUserObjectRelease(object: Handle, count: c_uint);
    fn hipGraphRetainUserObject(graph: Handle, object: Handle, count: c_uint, flags: c_uint);

    fn hipModuleLoadData(module: *mut Handle, image: *const c_void);
    fn hipModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
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
        extra: *mut *mut c_void,
    );
}

impl Describe for Api {
    fn describe(&self, status: c_int) -> String {
        let text = |words: *const c_char| {
            // SAFETY: a static string, or null for an unknown code.
            (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) }.to_string_lossy())
        };
        // SAFETY: they take any number. The runtime remembers the last error of a thread: others, who look for their
        // own there, as PyTorch does, are not to find this one.
        let (name, words) = unsafe {
            self.hipGetLastError();
            (text(self.hipGetErrorName(status)), text(self.hipGetErrorString(status)))
        };
        match (name, words) {
            (Some(name), Some(words)) => format!("{name}: {words}"),
            _ => format!("error {status}"),
        }
    }
}
