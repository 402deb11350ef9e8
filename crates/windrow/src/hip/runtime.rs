//! HIP devices behind [`Runtime`].

use super::api::{Api, MemoryAccess};
use super::hiprtc;
use crate::gpu::{
    BlockProduct, Convolution, ConvolutionLimits, ConvolutionSpec, Failure, Feature, Function,
    GemmSpec, Gpu, Handle, KernelSpec, Launch, Operation, Outcome, Product, Recording, Runtime,
    StreamKind, TensorBoxes, made,
};
use crate::{Device, Error, Result};
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// `hipError_t`
const OUT_OF_MEMORY: c_int = 2;
const NOT_READY: c_int = 600;
/// `hipStreamCaptureMode`
const THREAD_LOCAL: c_int = 1;
const RELAXED: c_int = 2;

/// No stream's address is so large.
static NEXT_STREAM: AtomicU64 = AtomicU64::new(1 << 63);

/// A device, with the context that PyTorch uses too.
#[derive(Debug)]
pub(super) struct Hip {
    api: &'static Api,
    index: u32,
    architecture: String,
    /// Whether it can allocate in stream order.
    memory_pools: bool,
    /// The numbers of its streams, by their addresses.
    streams: Mutex<HashMap<usize, u64>>,
}

impl Hip {
    pub(super) fn new(
        api: &'static Api,
        index: u32,
        architecture: String,
        memory_pools: bool,
    ) -> Self {
        Hip { api, index, architecture, memory_pools, streams: Mutex::default() }
    }

    fn streams(&self) -> MutexGuard<'_, HashMap<usize, u64>> {
        self.streams.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The memory pool.
    fn pool(&self) -> Outcome<Handle> {
        // SAFETY: the device has memory pools.
        made(|pool| unsafe { self.api.hipDeviceGetDefaultMemPool(pool, self.index as c_int) })
    }

    /// Lets the memory pool keep what is freed: by default every synchronisation gives it back to
    /// the system, and the next allocation pays for it again.
    pub(super) fn keep_freed_memory(&self) -> Outcome<()> {
        const RELEASE_THRESHOLD: c_int = 4;
        let mut threshold = u64::MAX;
        // SAFETY: the device has memory pools and is current; the attribute is a 64-bit number.
        unsafe {
            let value = (&raw mut threshold).cast();
            self.api.hipMemPoolSetAttribute(self.pool()?, RELEASE_THRESHOLD, value)
        }
    }

    /// # Safety
    /// Both are so many bytes, alive until the stream is past the copy.
    unsafe fn copy(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        kind: c_int,
        stream: Option<Handle>,
    ) -> Outcome<()> {
        let (to, from) = (to.cast(), from.cast());
        match stream {
            // SAFETY: the caller's promise.
            Some(stream) => unsafe { self.api.hipMemcpyAsync(to, from, bytes, kind, stream) },
            // SAFETY: the caller's promise.
            None => unsafe { self.api.hipMemcpy(to, from, bytes, kind) },
        }
    }

    fn missing(&self, what: &str, why: &str) -> Error {
        Error::unsupported(format!("{what} on {}", Device::Hip(self.index)), why)
    }
}

/// The memory that a call allocates; `None` where there is not so much.
fn allocated(outcome: Outcome<()>, memory: *mut c_void) -> Outcome<Option<*mut u8>> {
    match outcome {
        Ok(()) => Ok(Some(memory.cast())),
        Err(Failure { status: OUT_OF_MEMORY, .. }) => Ok(None),
        Err(failure) => Err(failure),
    }
}

impl Runtime for Hip {
    /// None: these are NVIDIA's. What the chips of AMD's have the sources ask of the compiler.
    fn has(&self, _: Feature) -> bool {
        false
    }

    fn enter(&self) -> Outcome<Option<Handle>> {
        let (mut current, index) = (0, self.index as c_int);
        // SAFETY: the runtime is initialised; the call writes one number.
        unsafe { self.api.hipGetDevice(&mut current)? };
        if current == index {
            return Ok(None);
        }
        // SAFETY: the device exists.
        unsafe { self.api.hipSetDevice(index)? };
        Ok(Some(std::ptr::without_provenance_mut(current as usize)))
    }

    unsafe fn leave(&self, previous: Handle) {
        // SAFETY: a device that was current.
        let _ = unsafe { self.api.hipSetDevice(previous.addr() as c_int) };
    }

    unsafe fn allow_access_by(&self, peer: u32) -> Outcome<()> {
        const LOCATION_DEVICE: c_int = 1;
        const READ_WRITE: c_int = 3;
        if !self.memory_pools {
            return Ok(());
        }
        let (peer, mut linked) = (peer as c_int, 0);
        // SAFETY: the call writes one number; the runtime checks the indices.
        unsafe { self.api.hipDeviceCanAccessPeer(&mut linked, peer, self.index as c_int)? };
        if linked == 0 {
            return Ok(());
        }
        let access =
            MemoryAccess { location_type: LOCATION_DEVICE, location: peer, flags: READ_WRITE };
        // SAFETY: the pool lives as long as the device; one description is given.
        unsafe { self.api.hipMemPoolSetAccess(self.pool()?, &access, 1) }
    }

    unsafe fn allocate(&self, bytes: usize, stream: Handle) -> Outcome<Option<*mut u8>> {
        let mut memory = null_mut();
        let outcome = match self.memory_pools {
            // SAFETY: the stream is alive, says the caller; the call writes one pointer.
            true => unsafe { self.api.hipMallocAsync(&mut memory, bytes, stream) },
            // SAFETY: the device is current, says the caller; the call writes one pointer.
            false => unsafe { self.api.hipMalloc(&mut memory, bytes) },
        };
        allocated(outcome, memory)
    }

    unsafe fn free(&self, memory: *mut u8, stream: Handle) -> Outcome<()> {
        match self.memory_pools {
            // SAFETY: of `allocate`, in the same way, and used by nothing after, says the caller.
            true => unsafe { self.api.hipFreeAsync(memory.cast(), stream) },
            // This waits for the device.
            // SAFETY: as above.
            false => unsafe { self.api.hipFree(memory.cast()) },
        }
    }

    unsafe fn allocate_host(&self, bytes: usize) -> Outcome<Option<*mut u8>> {
        const PORTABLE: c_uint = 1;
        let mut memory = null_mut();
        // SAFETY: the device is current, says the caller; the call writes one pointer.
        let outcome = unsafe { self.api.hipHostMalloc(&mut memory, bytes, PORTABLE) };
        allocated(outcome, memory)
    }

    unsafe fn free_host(&self, memory: *mut u8) -> Outcome<()> {
        // SAFETY: of `allocate_host`, and used by nothing after, says the caller.
        unsafe { self.api.hipHostFree(memory.cast()) }
    }

    unsafe fn upload(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: Option<Handle>,
    ) -> Outcome<()> {
        const HOST_TO_DEVICE: c_int = 1;
        // SAFETY: the caller's promise.
        unsafe { self.copy(to, from, bytes, HOST_TO_DEVICE, stream) }
    }

    unsafe fn download(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: Option<Handle>,
    ) -> Outcome<()> {
        const DEVICE_TO_HOST: c_int = 2;
        // SAFETY: the caller's promise.
        unsafe { self.copy(to, from, bytes, DEVICE_TO_HOST, stream) }
    }

    unsafe fn fill(&self, memory: *mut u8, value: u8, bytes: usize, stream: Handle) -> Outcome<()> {
        // SAFETY: so many bytes, alive until the stream is past the call, says the caller.
        unsafe { self.api.hipMemsetAsync(memory.cast(), value.into(), bytes, stream) }
    }

    unsafe fn create_stream(&self, kind: StreamKind) -> Outcome<Handle> {
        const NON_BLOCKING: c_uint = 1;
        let (mut lowest, mut highest) = (0, 0);
        // SAFETY: the device is current, says the caller; each call writes to a local.
        let stream = made(|stream| unsafe {
            match kind {
                StreamKind::Blocking => self.api.hipStreamCreateWithFlags(stream, 0),
                StreamKind::Apart => self.api.hipStreamCreateWithFlags(stream, NON_BLOCKING),
                StreamKind::Urgent => {
                    self.api.hipDeviceGetStreamPriorityRange(&mut lowest, &mut highest)?;
                    self.api.hipStreamCreateWithPriority(stream, 0, highest)
                }
            }
        })?;
        self.streams().insert(stream.addr(), NEXT_STREAM.fetch_add(1, Ordering::Relaxed));
        Ok(stream)
    }

    unsafe fn destroy_stream(&self, stream: Handle) -> Outcome<()> {
        self.streams().remove(&stream.addr());
        // SAFETY: of `create_stream`, and not used after, says the caller.
        unsafe { self.api.hipStreamDestroy(stream) }
    }

    unsafe fn synchronize_stream(&self, stream: Handle) -> Outcome<()> {
        // SAFETY: the stream is alive, says the caller.
        unsafe { self.api.hipStreamSynchronize(stream) }
    }

    unsafe fn wait(&self, stream: Handle, event: Handle) -> Outcome<()> {
        // SAFETY: both are alive, says the caller.
        unsafe { self.api.hipStreamWaitEvent(stream, event, 0) }
    }

    unsafe fn stream_id(&self, stream: Handle) -> Outcome<u64> {
        // HIP has no numbers of streams. Those of other libraries are told apart by their addresses, which are below
        // the first number.
        let address = stream.addr();
        Ok(self.streams().get(&address).copied().unwrap_or(address as u64))
    }

    unsafe fn create_event(&self, timed: bool) -> Outcome<Handle> {
        const DISABLE_TIMING: c_uint = 2;
        let flags = if timed { 0 } else { DISABLE_TIMING };
        // SAFETY: the device is current, says the caller; the call writes one pointer.
        made(|event| unsafe { self.api.hipEventCreateWithFlags(event, flags) })
    }

    unsafe fn destroy_event(&self, event: Handle) -> Outcome<()> {
        // SAFETY: of `create_event`, and not used after, says the caller.
        unsafe { self.api.hipEventDestroy(event) }
    }

    unsafe fn record(&self, event: Handle, stream: Handle) -> Outcome<()> {
        // SAFETY: both are alive, says the caller.
        unsafe { self.api.hipEventRecord(event, stream) }
    }

    unsafe fn is_reached(&self, event: Handle) -> Outcome<bool> {
        // SAFETY: the event is alive, says the caller.
        match unsafe { self.api.hipEventQuery(event) } {
            Ok(()) => Ok(true),
            Err(Failure { status: NOT_READY, .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    unsafe fn synchronize_event(&self, event: Handle) -> Outcome<()> {
        // SAFETY: the event is alive, says the caller.
        unsafe { self.api.hipEventSynchronize(event) }
    }

    unsafe fn milliseconds(&self, start: Handle, end: Handle) -> Outcome<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both are alive, says the caller; the call writes one number.
        unsafe { self.api.hipEventElapsedTime(&mut milliseconds, start, end) }
            .map(|()| milliseconds)
    }

    unsafe fn begin_capture(&self, stream: Handle) -> Outcome<()> {
        // SAFETY: the stream is alive, says the caller.
        unsafe { self.api.hipStreamBeginCapture(stream, THREAD_LOCAL) }
    }

    unsafe fn end_capture(&self, stream: Handle) -> Outcome<Handle> {
        // SAFETY: the stream is alive, says the caller; the call writes one pointer.
        made(|graph| unsafe { self.api.hipStreamEndCapture(stream, graph) })
    }

    unsafe fn recording(&self, stream: Handle) -> Outcome<Recording> {
        // `hipStreamCaptureStatus`
        const NONE: c_int = 0;
        const ACTIVE: c_int = 1;
        let (mut status, mut id) = (NONE, 0);
        // SAFETY: the stream is alive, says the caller; the call writes to locals, and nothing through null.
        let graph = made(|graph| unsafe {
            let (status, id) = (&mut status, &mut id);
            self.api.hipStreamGetCaptureInfo_v2(stream, status, id, graph, null_mut(), null_mut())
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
        let api = self.api;
        // SAFETY: `release` takes `owner` from any thread, says the caller; the call writes one pointer.
        let object = made(|object| unsafe {
            api.hipUserObjectCreate(object, owner, release, 1, NO_DESTRUCTOR_SYNC)
        })
        // SAFETY: the runtime has not taken it.
        .inspect_err(|_| unsafe { release(owner) })?;
        // SAFETY: the graph is alive, says the caller, and the object was made above.
        unsafe { api.hipGraphRetainUserObject(graph, object, 1, MOVE) }.inspect_err(|_| {
            // SAFETY: the reference made above, which the graph has not taken: this calls `release`.
            let _ = unsafe { api.hipUserObjectRelease(object, 1) };
        })
    }

    unsafe fn destroy_graph(&self, graph: Handle) -> Outcome<()> {
        // SAFETY: of `end_capture`, and not used after, says the caller.
        unsafe { self.api.hipGraphDestroy(graph) }
    }

    unsafe fn instantiate(&self, graph: Handle) -> Outcome<Handle> {
        // SAFETY: the graph is alive, says the caller; the call writes one pointer.
        made(|instance| unsafe { self.api.hipGraphInstantiateWithFlags(instance, graph, 0) })
    }

    unsafe fn destroy_instance(&self, instance: Handle) -> Outcome<()> {
        // SAFETY: of `instantiate`, and not used after, says the caller.
        unsafe { self.api.hipGraphExecDestroy(instance) }
    }

    unsafe fn launch_graph(&self, instance: Handle, stream: Handle) -> Outcome<()> {
        // SAFETY: both are alive, as is the memory that the graph uses, says the caller.
        unsafe { self.api.hipGraphLaunch(instance, stream) }
    }

    fn relax_captures(&self) -> c_int {
        let mut mode = RELAXED;
        // It cannot fail for valid modes.
        // SAFETY: the call exchanges the mode of this thread, which any thread may do.
        let _ = unsafe { self.api.hipThreadExchangeStreamCaptureMode(&mut mode) };
        mode
    }

    fn restore_captures(&self, mut mode: c_int) {
        // SAFETY: as in `relax_captures`.
        let _ = unsafe { self.api.hipThreadExchangeStreamCaptureMode(&mut mode) };
    }

    fn recipe(&self, spec: &KernelSpec) -> Result<(String, Vec<String>)> {
        hiprtc::recipe(spec, &self.architecture)
    }

    fn compile(&self, spec: &KernelSpec, options: &[String]) -> Result<Vec<u8>> {
        hiprtc::compile(spec, options)
    }

    unsafe fn load(&self, image: &[u8], entry: &str, _: u32) -> Outcome<Handle> {
        let name = CString::new(entry).expect("a C identifier");
        let image = image.as_ptr().cast();
        // SAFETY: the image is a code object; the call writes one pointer.
        let module = made(|module| unsafe { self.api.hipModuleLoadData(module, image) })?;
        // SAFETY: the module was loaded above and the name ends in a zero byte; the call writes one pointer.
        made(|function| unsafe { self.api.hipModuleGetFunction(function, module, name.as_ptr()) })
    }

    unsafe fn launch(
        &self,
        function: Function,
        size: Launch,
        params: *const c_void,
        stream: Handle,
    ) -> Outcome<()> {
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (size.grid, size.block);
        let mut parameters = [params.cast_mut()];
        // SAFETY: the function and the stream are alive and `params` is the function's structure, says the
        // caller; the runtime copies the one parameter.
        unsafe {
            self.api.hipModuleLaunchKernel(
                function.handle,
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                function.shared_bytes,
                stream,
                parameters.as_mut_ptr(),
                null_mut(),
            )
        }
    }

    fn multiplies(&self) -> Result<()> {
        Ok(())
    }

    fn product(&self, spec: &GemmSpec) -> Result<Box<dyn Product>> {
        Ok(Box::new(BlockProduct::new(Gpu::get(Device::Hip(self.index))?, spec)?))
    }

    fn convolves(&self) -> Result<String> {
        Err(self.missing("convolutions of the vendor's", "MIOpen is not called"))
    }

    fn convolutions(
        &self,
        _: &ConvolutionSpec,
        _: Operation,
        _: ConvolutionLimits,
    ) -> Result<Vec<Box<dyn Convolution>>> {
        Err(self.missing("convolutions of the vendor's", "MIOpen is not called"))
    }

    unsafe fn tensor_map(&self, _: &TensorBoxes) -> Outcome<[u64; 16]> {
        let words = "AMD's chips have no engine that copies boxes of tensors".into();
        Err(Failure { call: "tensor_map", status: -1, words })
    }
}
