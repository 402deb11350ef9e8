//! CUDA devices behind [`Runtime`].

use super::cudnn;
use super::driver::{Address, Driver, LaunchAttribute, LaunchConfig, MemoryAccess, TensorMap};
use super::{cublaslt, nvrtc};
use crate::Result;
use crate::dtype::by_type;
use crate::gpu::{
    Convolution, ConvolutionLimits, ConvolutionSpec, Failure, Feature, Function, GemmSpec, Handle,
    KernelSpec, Launch, Operation, Outcome, Product, Recording, Runtime, StreamKind, TensorBoxes,
    made,
};
use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr::null_mut;

/// `CUresult`
const OUT_OF_MEMORY: c_int = 2;
const NOT_READY: c_int = 600;
/// `CUstreamCaptureMode`
const THREAD_LOCAL: c_int = 1;
const RELAXED: c_int = 2;

/// A device: its primary context, which torch and the runtime API share.
#[derive(Debug)]
pub(super) struct Cuda {
    pub(super) driver: &'static Driver,
    pub(super) index: u32,
    pub(super) compute_capability: (u32, u32),
    pub(super) handle: c_int,
    pub(super) context: Handle,
    /// Whether it can allocate in stream order.
    pub(super) memory_pools: bool,
}

// SAFETY: a context handle may be used from any thread.
unsafe impl Send for Cuda {}
// SAFETY: several threads may have one context current at once.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// The memory pool.
    pub(super) fn pool(&self) -> Outcome<Handle> {
        // SAFETY: the device has memory pools.
        made(|pool| unsafe { self.driver.cuDeviceGetDefaultMemPool(pool, self.handle) })
    }
}

/// The memory that a call allocates; `None` where there is not so much.
fn allocated<T>(outcome: Outcome<()>, memory: T) -> Outcome<Option<T>> {
    match outcome {
        Ok(()) => Ok(Some(memory)),
        Err(Failure { status: OUT_OF_MEMORY, .. }) => Ok(None),
        Err(failure) => Err(failure),
    }
}

impl Runtime for Cuda {
    fn has(&self, feature: Feature) -> bool {
        super::has(self.compute_capability, feature)
    }

    fn enter(&self) -> Outcome<Option<Handle>> {
        // SAFETY: the driver is initialised; the call writes one pointer.
        let current = made(|context| unsafe { self.driver.cuCtxGetCurrent(context) })?;
        if current == self.context {
            return Ok(None);
        }
        // SAFETY: the primary context is retained for the life of the process.
        unsafe { self.driver.cuCtxPushCurrent_v2(self.context) }.map(|()| Some(current))
    }

    unsafe fn leave(&self, _: Handle) {
        // The stack of contexts remembers what was current.
        // SAFETY: pops what `enter` pushed on this thread; the call writes one pointer.
        let _ = made(|context| unsafe { self.driver.cuCtxPopCurrent_v2(context) });
    }

    unsafe fn allow_access_by(&self, peer: u32) -> Outcome<()> {
        const LOCATION_DEVICE: c_int = 1;
        const READ_WRITE: c_int = 3;
        if !self.memory_pools {
            return Ok(());
        }
        let (mut other, mut linked) = (0, 0);
        // SAFETY: each call writes to a local of the type it expects; the driver checks the index.
        unsafe {
            self.driver.cuDeviceGet(&mut other, peer as c_int)?;
            self.driver.cuDeviceCanAccessPeer(&mut linked, other, self.handle)?;
        }
        if linked == 0 {
            return Ok(());
        }
        let access =
            MemoryAccess { location_type: LOCATION_DEVICE, location: other, flags: READ_WRITE };
        // SAFETY: the pool lives as long as the device; one description is given.
        unsafe { self.driver.cuMemPoolSetAccess(self.pool()?, &access, 1) }
    }

    unsafe fn allocate(&self, bytes: usize, stream: Handle) -> Outcome<Option<*mut u8>> {
        let mut address: Address = 0;
        let outcome = match self.memory_pools {
            // SAFETY: the stream is alive, says the caller; the call writes one address.
            true => unsafe { self.driver.cuMemAllocAsync(&mut address, bytes, stream) },
            // SAFETY: the device is current, says the caller; the call writes one address.
            false => unsafe { self.driver.cuMemAlloc_v2(&mut address, bytes) },
        };
        allocated(outcome, address as *mut u8)
    }

    unsafe fn free(&self, memory: *mut u8, stream: Handle) -> Outcome<()> {
        match self.memory_pools {
            // SAFETY: of `allocate`, in the same way, and used by nothing after, says the caller.
            true => unsafe { self.driver.cuMemFreeAsync(memory as Address, stream) },
            // This waits for the device.
            // SAFETY: as above.
            false => unsafe { self.driver.cuMemFree_v2(memory as Address) },
        }
    }

    unsafe fn allocate_host(&self, bytes: usize) -> Outcome<Option<*mut u8>> {
        const PORTABLE: c_uint = 1;
        let mut memory = null_mut();
        // SAFETY: the device is current, says the caller; the call writes one pointer.
        let outcome = unsafe { self.driver.cuMemHostAlloc(&mut memory, bytes, PORTABLE) };
        allocated(outcome, memory.cast())
    }

    unsafe fn free_host(&self, memory: *mut u8) -> Outcome<()> {
        // SAFETY: of `allocate_host`, and used by nothing after, says the caller.
        unsafe { self.driver.cuMemFreeHost(memory.cast()) }
    }

    unsafe fn upload(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: Option<Handle>,
    ) -> Outcome<()> {
        let (to, from) = (to as Address, from.cast::<c_void>());
        match stream {
            // SAFETY: both are so many bytes, alive until the stream is past the copy, says the caller.
            Some(stream) => unsafe { self.driver.cuMemcpyHtoDAsync_v2(to, from, bytes, stream) },
            // SAFETY: both are so many bytes, says the caller.
            None => unsafe { self.driver.cuMemcpyHtoD_v2(to, from, bytes) },
        }
    }

    unsafe fn download(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: Option<Handle>,
    ) -> Outcome<()> {
        let (to, from) = (to.cast::<c_void>(), from as Address);
        match stream {
            // SAFETY: both are so many bytes, alive until the stream is past the copy, says the caller.
            Some(stream) => unsafe { self.driver.cuMemcpyDtoHAsync_v2(to, from, bytes, stream) },
            // SAFETY: both are so many bytes, says the caller.
            None => unsafe { self.driver.cuMemcpyDtoH_v2(to, from, bytes) },
        }
    }

    unsafe fn fill(&self, memory: *mut u8, value: u8, bytes: usize, stream: Handle) -> Outcome<()> {
        // SAFETY: so many bytes, alive until the stream is past the call, says the caller.
        unsafe { self.driver.cuMemsetD8Async(memory as Address, value, bytes, stream) }
    }

    unsafe fn create_stream(&self, kind: StreamKind) -> Outcome<Handle> {
        const NON_BLOCKING: c_uint = 1;
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: the device is current, says the caller; each call writes to a local.
        made(|stream| unsafe {
            match kind {
                StreamKind::Blocking => self.driver.cuStreamCreate(stream, 0),
                StreamKind::Apart => self.driver.cuStreamCreate(stream, NON_BLOCKING),
                StreamKind::Urgent => {
                    self.driver.cuCtxGetStreamPriorityRange(&mut lowest, &mut highest)?;
                    self.driver.cuStreamCreateWithPriority(stream, 0, highest)
                }
            }
        })
    }

    unsafe fn destroy_stream(&self, stream: Handle) -> Outcome<()> {
        // SAFETY: of `create_stream`, and not used after, says the caller.
        unsafe { self.driver.cuStreamDestroy_v2(stream) }
    }

    unsafe fn synchronize_stream(&self, stream: Handle) -> Outcome<()> {
        // SAFETY: the stream is alive, says the caller.
        unsafe { self.driver.cuStreamSynchronize(stream) }
    }

    unsafe fn wait(&self, stream: Handle, event: Handle) -> Outcome<()> {
        // SAFETY: both are alive, says the caller.
        unsafe { self.driver.cuStreamWaitEvent(stream, event, 0) }
    }

    unsafe fn stream_id(&self, stream: Handle) -> Outcome<u64> {
        let mut id = 0;
        // SAFETY: the stream is alive, says the caller; the call writes one number.
        unsafe { self.driver.cuStreamGetId(stream, &mut id) }.map(|()| id)
    }

    unsafe fn create_event(&self, timed: bool) -> Outcome<Handle> {
        const DISABLE_TIMING: c_uint = 2;
        let flags = if timed { 0 } else { DISABLE_TIMING };
        // SAFETY: the device is current, says the caller; the call writes one pointer.
        made(|event| unsafe { self.driver.cuEventCreate(event, flags) })
    }

    unsafe fn destroy_event(&self, event: Handle) -> Outcome<()> {
        // SAFETY: of `create_event`, and not used after, says the caller.
        unsafe { self.driver.cuEventDestroy_v2(event) }
    }

    unsafe fn record(&self, event: Handle, stream: Handle) -> Outcome<()> {
        // SAFETY: both are alive, says the caller.
        unsafe { self.driver.cuEventRecord(event, stream) }
    }

    unsafe fn is_reached(&self, event: Handle) -> Outcome<bool> {
        // SAFETY: the event is alive, says the caller.
        match unsafe { self.driver.cuEventQuery(event) } {
            Ok(()) => Ok(true),
            Err(Failure { status: NOT_READY, .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    unsafe fn synchronize_event(&self, event: Handle) -> Outcome<()> {
        // SAFETY: the event is alive, says the caller.
        unsafe { self.driver.cuEventSynchronize(event) }
    }

    unsafe fn milliseconds(&self, start: Handle, end: Handle) -> Outcome<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both are alive, says the caller; the call writes one number.
        unsafe { self.driver.cuEventElapsedTime(&mut milliseconds, start, end) }
            .map(|()| milliseconds)
    }

    unsafe fn begin_capture(&self, stream: Handle) -> Outcome<()> {
        // SAFETY: the stream is alive, says the caller.
        unsafe { self.driver.cuStreamBeginCapture_v2(stream, THREAD_LOCAL) }
    }

    unsafe fn end_capture(&self, stream: Handle) -> Outcome<Handle> {
        // SAFETY: the stream is alive, says the caller; the call writes one pointer.
        made(|graph| unsafe { self.driver.cuStreamEndCapture(stream, graph) })
    }

    unsafe fn recording(&self, stream: Handle) -> Outcome<Recording> {
        // `CUstreamCaptureStatus`
        const NONE: c_int = 0;
        const ACTIVE: c_int = 1;
        let (mut status, mut id) = (NONE, 0);
        // SAFETY: the stream is alive, says the caller; the call writes to locals, and nothing through null.
        let graph = made(|graph| unsafe {
            let (status, id) = (&mut status, &mut id);
            self.driver.cuStreamGetCaptureInfo_v2(stream, status, id, graph, null_mut(), null_mut())
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
        let driver = self.driver;
        // SAFETY: `release` takes `owner` from any thread, says the caller; the call writes one pointer.
        let object = made(|object| unsafe {
            driver.cuUserObjectCreate(object, owner, release, 1, NO_DESTRUCTOR_SYNC)
        })
        // SAFETY: the driver has not taken it.
        .inspect_err(|_| unsafe { release(owner) })?;
        // SAFETY: the graph is alive, says the caller, and the object was made above.
        unsafe { driver.cuGraphRetainUserObject(graph, object, 1, MOVE) }.inspect_err(|_| {
            // SAFETY: the reference made above, which the graph has not taken: this calls `release`.
            let _ = unsafe { driver.cuUserObjectRelease(object, 1) };
        })
    }

    unsafe fn destroy_graph(&self, graph: Handle) -> Outcome<()> {
        // SAFETY: of `end_capture`, and not used after, says the caller.
        unsafe { self.driver.cuGraphDestroy(graph) }
    }

    unsafe fn instantiate(&self, graph: Handle) -> Outcome<Handle> {
        // SAFETY: the graph is alive, says the caller; the call writes one pointer.
        made(|instance| unsafe { self.driver.cuGraphInstantiateWithFlags(instance, graph, 0) })
    }

    unsafe fn destroy_instance(&self, instance: Handle) -> Outcome<()> {
        // SAFETY: of `instantiate`, and not used after, says the caller.
        unsafe { self.driver.cuGraphExecDestroy(instance) }
    }

    unsafe fn launch_graph(&self, instance: Handle, stream: Handle) -> Outcome<()> {
        // SAFETY: both are alive, as is the memory that the graph uses, says the caller.
        unsafe { self.driver.cuGraphLaunch(instance, stream) }
    }

    fn relax_captures(&self) -> c_int {
        let mut mode = RELAXED;
        // It cannot fail for valid modes.
        // SAFETY: the call exchanges the mode of this thread, which any thread may do.
        let _ = unsafe { self.driver.cuThreadExchangeStreamCaptureMode(&mut mode) };
        mode
    }

    fn restore_captures(&self, mut mode: c_int) {
        // SAFETY: as in `relax_captures`.
        let _ = unsafe { self.driver.cuThreadExchangeStreamCaptureMode(&mut mode) };
    }

    fn recipe(&self, spec: &KernelSpec) -> Result<(String, Vec<String>)> {
        nvrtc::recipe(spec, self.compute_capability)
    }

    fn compile(&self, spec: &KernelSpec, options: &[String]) -> Result<Vec<u8>> {
        nvrtc::compile(spec, options).map(|compiled| compiled.image)
    }

    unsafe fn load(&self, image: &[u8], entry: &str, shared_bytes: u32) -> Outcome<Handle> {
        const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
        let driver = self.driver;
        let name = CString::new(entry).expect("a C identifier");
        let image = image.as_ptr().cast();
        // SAFETY: the image is a cubin, or PTX that ends in a zero byte; the call writes one pointer.
        let module = made(|module| unsafe { driver.cuModuleLoadData(module, image) })?;
        // SAFETY: the module was loaded above and the name ends in a zero byte; the call writes one pointer.
        let function = made(|function| unsafe {
            driver.cuModuleGetFunction(function, module, name.as_ptr())
        })?;
        if shared_bytes > 0 {
            let bytes = shared_bytes as c_int;
            // SAFETY: the function was found above.
            unsafe { driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)? };
        }
        Ok(function)
    }

    unsafe fn launch(
        &self,
        function: Function,
        size: Launch,
        params: *const c_void,
        stream: Handle,
    ) -> Outcome<()> {
        const PROGRAMMATIC_STREAM_SERIALIZATION: c_int = 6;
        let mut attribute = LaunchAttribute {
            id: PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: 0,
            value: 1,
            rest: [0; 15],
        };
        let config = LaunchConfig {
            grid: size.grid,
            block: size.block,
            shared_bytes: function.shared_bytes,
            stream,
            attributes: &mut attribute,
            attribute_count: c_uint::from(function.overlapped),
        };
        let mut parameters = [params.cast_mut()];
        // SAFETY: the function and the stream are alive and `params` is the function's structure, says the
        // caller; the driver copies the attribute and the one parameter.
        unsafe {
            let parameters = parameters.as_mut_ptr();
            self.driver.cuLaunchKernelEx(&config, function.handle, parameters, null_mut())
        }
    }

    fn multiplies(&self) -> Result<()> {
        cublaslt::available()
    }

    fn product(&self, spec: &GemmSpec) -> Result<Box<dyn Product>> {
        Ok(Box::new(cublaslt::CublasLtProduct::new(self.index, spec)?))
    }

    fn convolves(&self) -> Result<String> {
        cudnn::version()
    }

    fn convolutions(
        &self,
        spec: &ConvolutionSpec,
        operation: Operation,
        limits: ConvolutionLimits,
    ) -> Result<Vec<Box<dyn Convolution>>> {
        cudnn::find(self.index, spec, operation, limits)
    }

    unsafe fn tensor_map(&self, boxes: &TensorBoxes) -> Outcome<[u64; 16]> {
        // `CUtensorMapDataType`, `CUtensorMapInterleave` and so on.
        let element = by_type!(boxes.dtype, F32 => 7, F16 => 6, BF16 => 9);
        const NOT_INTERLEAVED: c_int = 0;
        const SWIZZLE_64_BYTES: c_int = 2;
        const PROMOTE_TO_128_BYTES: c_int = 2;
        const FILL_WITH_ZEROS: c_int = 0;
        let sizes = boxes.dims.map(|d| d as u64);
        let strides = boxes.strides.map(|s| (s * boxes.dtype.size()) as u64);
        let of_box = boxes.boxes.map(|b| b as u32);
        let mut map = TensorMap([0; 16]);
        // SAFETY: the arrays are of the rank's length and the map is aligned; the address is only stored.
        unsafe {
            self.driver.cuTensorMapEncodeTiled(
                &mut map,
                element,
                4,
                boxes.address.cast_mut().cast(),
                sizes.as_ptr(),
                strides.as_ptr(),
                of_box.as_ptr(),
                [1; 4].as_ptr(),
                NOT_INTERLEAVED,
                SWIZZLE_64_BYTES,
                PROMOTE_TO_128_BYTES,
                FILL_WITH_ZEROS,
            )?;
        }
        Ok(map.0)
    }
}
