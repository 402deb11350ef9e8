//! The functions of the CUDA driver that Windrow calls.

use crate::Device;
use crate::gpu::library::{Describe, Library, library};
use crate::gpu::{Handle, MemoryAccess};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

/// Part of the driver, so only the loader can find it.
static LIBCUDA: Library = Library {
    stem: "libcuda.so",
    // The name that programs link to; the bare one may be a toolkit's stub, which has no devices.
    versions: &[".1", ""],
    companion: None,
    places: None,
    package: "",
    since: "CUDA 12.0",
    device: Device::Cuda(0),
};

/// `CUdeviceptr`: a number as wide as a pointer, and passed as one.
type Address = *mut c_void;

/// `CUlaunchConfig`
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: Handle,
    pub(super) attributes: *mut LaunchAttribute,
    pub(super) attribute_count: c_uint,
}

/// `CUlaunchAttribute` whose value is a number.
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    pub(super) id: c_int,
    pub(super) pad: c_int,
    pub(super) value: c_int,
    pub(super) rest: [u32; 15],
}

/// `CUtensorMap`, aligned as CUDA 13 declares it; before, 64 bytes were enough.
#[repr(C, align(128))]
pub(super) struct TensorMap(pub(super) [u64; 16]);

library! {
    /// The driver.
    pub(super) struct Driver in LIBCUDA;

    fn cuGetErrorName(error: c_int, text: *mut *const c_char) -> c_int;
    fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> c_int;
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);

    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut c_int, index: c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int);
    fn cuCtxGetCurrent(context: *mut Handle);
    fn cuCtxPushCurrent_v2(context: Handle);
    fn cuCtxPopCurrent_v2(context: *mut Handle);
    fn cuCtxGetStreamPriorityRange(lowest: *mut c_int, highest: *mut c_int);

    fn cuMemAlloc_v2(memory: *mut Address, bytes: usize);
    fn cuMemFree_v2(memory: Address);
    fn cuMemAllocAsync(memory: *mut Address, bytes: usize, stream: Handle);
    fn cuMemFreeAsync(memory: Address, stream: Handle);
    fn cuDeviceGetDefaultMemPool(pool: *mut Handle, device: c_int);
    fn cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: *mut c_void);
    fn cuMemPoolSetAccess(pool: Handle, access: *const MemoryAccess, count: usize);
    fn cuMemHostAlloc(memory: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(memory: *mut c_void);
    fn cuMemcpyHtoD_v2(to: Address, from: *const c_void, bytes: usize);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: Address, bytes: usize);
    fn cuMemcpyHtoDAsync_v2(to: Address, from: *const c_void, bytes: usize, stream: Handle);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: Address, bytes: usize, stream: Handle);
    fn cuMemsetD8Async(memory: Address, value: u8, bytes: usize, stream: Handle);

    fn cuStreamCreate(stream: *mut Handle, flags: c_uint);
    fn cuStreamCreateWithPriority(stream: *mut Handle, flags: c_uint, priority: c_int);
    fn cuStreamDestroy_v2(stream: Handle);
    fn cuStreamSynchronize(stream: Handle);
    fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint);
    fn cuStreamGetId(stream: Handle, id: *mut c_ulonglong);
    fn cuEventCreate(event: *mut Handle, flags: c_uint);
    fn cuEventDestroy_v2(event: Handle);
    fn cuEventRecord(event: Handle, stream: Handle);
    fn cuEventQuery(event: Handle);
    fn cuEventSynchronize(event: Handle);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle);

    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int);
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle);
    fn cuStreamGetCaptureInfo_v2(
        stream: Handle,
        status: *mut c_int,
        id: *mut u64,
        graph: *mut Handle,
        dependencies: *mut *const Handle,
        count: *mut usize,
    );
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
    fn cuGraphInstantiateWithFlags(instance: *mut Handle, graph: Handle, flags: c_ulonglong);
    fn cuGraphLaunch(instance: Handle, stream: Handle);
    fn cuGraphDestroy(graph: Handle);
    fn cuGraphExecDestroy(instance: Handle);
    fn cuUserObjectCreate(
        object: *mut Handle,
        user: Handle,
        release: unsafe extern "C" fn(Handle),
        count: c_uint,
        flags: c_uint,
    );
    fn cuUserObjectRelease(object: Handle, count: c_uint);
    fn cuGraphRetainUserObject(graph: Handle, object: Handle, count: c_uint, flags: c_uint);

    fn cuModuleLoadData(module: *mut Handle, image: *const c_void);
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
    fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int);
    fn cuOccupancyMaxActiveClusters(
        count: *mut c_int,
        function: Handle,
        config: *const LaunchConfig,
    );
    fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: Handle,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    fn cuTensorMapEncodeIm2col(
        map: *mut TensorMap,
        element: c_int,
        rank: c_uint,
        address: *mut c_void,
        sizes: *const u64,
        strides: *const u64,
        lower_corner: *const c_int,
        upper_corner: *const c_int,
        channels: c_uint,
        pixels: c_uint,
        steps: *const u32,
        interleave: c_int,
        swizzle: c_int,
        promotion: c_int,
        fill: c_int,
    );
    fn cuTensorMapEncodeTiled(
        map: *mut TensorMap,
        element: c_int,
        rank: c_uint,
        address: *mut c_void,
        sizes: *const u64,
        strides: *const u64,
        boxes: *const u32,
        steps: *const u32,
        interleave: c_int,
        swizzle: c_int,
        promotion: c_int,
        fill: c_int,
    );
}

impl Describe for Driver {
    fn describe(&self, status: c_int) -> String {
        let text = |get: &dyn Fn(*mut *const c_char) -> c_int| {
            let mut words = std::ptr::null();
            get(&mut words);
            // SAFETY: the call writes a pointer to a static string, or null for an unknown code.
            (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) }.to_string_lossy())
        };
        // SAFETY: it takes any number.
        let name = text(&|words| unsafe { self.cuGetErrorName(status, words) });
        // SAFETY: it takes any number.
        let words = text(&|words| unsafe { self.cuGetErrorString(status, words) });
        match (name, words) {
            (Some(name), Some(words)) => format!("{name}: {words}"),
            _ => format!("error {status}"),
        }
    }
}
