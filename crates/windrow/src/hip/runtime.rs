//! HIP devices behind [`Runtime`].

use super::api::Api;
use super::hiprtc;
use super::rocblas::{self, Rocblas, RocblasProduct};
use crate::gpu::{
    BlockProduct, Calls, Convolution, ConvolutionLimits, ConvolutionSpec, Driven, Failure, Feature,
    Function, GemmSpec, Gpu, Handle, KernelSpec, Launch, Operation, Outcome, Product, Runtime,
    StreamKind, TensorBoxes, TensorPixels,
};
use crate::{Device, Error, Result};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// No stream's address is so large.
static NEXT_STREAM: AtomicU64 = AtomicU64::new(1 << 63);

/// A device, with the context that PyTorch uses too.
#[derive(Debug)]
pub(super) struct Hip {
    api: &'static Api,
    index: u32,
    architecture: String,
    /// True if the device can allocate in stream order.
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

impl Driven for Hip {
    type Library = Api;
    const CALLS: Calls<Api> = Calls {
        can_access_peer: Api::hipDeviceCanAccessPeer,
        default_pool: Api::hipDeviceGetDefaultMemPool,
        set_pool_attribute: Api::hipMemPoolSetAttribute,
        set_pool_access: Api::hipMemPoolSetAccess,
        allocate: Api::hipMalloc,
        free: Api::hipFree,
        allocate_async: Api::hipMallocAsync,
        free_async: Api::hipFreeAsync,
        allocate_host: Api::hipHostMalloc,
        free_host: Api::hipHostFree,
        stream_priorities: Api::hipDeviceGetStreamPriorityRange,
        create_stream: Api::hipStreamCreateWithFlags,
        create_stream_with_priority: Api::hipStreamCreateWithPriority,
        synchronize_stream: Api::hipStreamSynchronize,
        wait: Api::hipStreamWaitEvent,
        create_event: Api::hipEventCreateWithFlags,
        destroy_event: Api::hipEventDestroy,
        record: Api::hipEventRecord,
        query_event: Api::hipEventQuery,
        synchronize_event: Api::hipEventSynchronize,
        elapsed: Api::hipEventElapsedTime,
        begin_capture: Api::hipStreamBeginCapture,
        end_capture: Api::hipStreamEndCapture,
        capture_info: Api::hipStreamGetCaptureInfo_v2,
        exchange_capture_mode: Api::hipThreadExchangeStreamCaptureMode,
        instantiate: Api::hipGraphInstantiateWithFlags,
        launch_graph: Api::hipGraphLaunch,
        destroy_graph: Api::hipGraphDestroy,
        destroy_instance: Api::hipGraphExecDestroy,
        create_object: Api::hipUserObjectCreate,
        release_object: Api::hipUserObjectRelease,
        retain_object: Api::hipGraphRetainUserObject,
        load_module: Api::hipModuleLoadData,
        find_function: Api::hipModuleGetFunction,
    };

    fn library(&self) -> &'static Api {
        self.api
    }

    fn number(&self) -> c_int {
        self.index as c_int
    }

    fn number_of(&self, index: u32) -> Outcome<c_int> {
        Ok(index as c_int)
    }

    fn memory_pools(&self) -> bool {
        self.memory_pools
    }
}

impl Runtime for Hip {
    fn has(&self, feature: Feature) -> bool {
        super::has(&self.architecture, feature)
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
        // SAFETY: the caller's promise.
        let stream = unsafe { self.new_stream(kind)? };
        self.streams().insert(stream.addr(), NEXT_STREAM.fetch_add(1, Ordering::Relaxed));
        Ok(stream)
    }

    unsafe fn destroy_stream(&self, stream: Handle) -> Outcome<()> {
        self.streams().remove(&stream.addr());
        // SAFETY: of `create_stream`, and not used after, says the caller.
        unsafe { self.api.hipStreamDestroy(stream) }
    }

    unsafe fn stream_id(&self, stream: Handle) -> Outcome<u64> {
        // HIP has no numbers of streams. Those of other libraries are told apart by their addresses, which are below
        // the first number.
        let address = stream.addr();
        Ok(self.streams().get(&address).copied().unwrap_or(address as u64))
    }

    fn recipe(&self, spec: &KernelSpec) -> Result<(String, Vec<String>)> {
        hiprtc::recipe(spec, &self.architecture)
    }

    fn compile(&self, spec: &KernelSpec, options: &[String]) -> Result<Vec<u8>> {
        hiprtc::compile(spec, options)
    }

    unsafe fn load(&self, image: &[u8], entry: &str, _: u32) -> Outcome<Handle> {
        // SAFETY: the caller's promise.
        unsafe { self.entry_point(image, entry) }
    }

    /// HIP has no clusters, and its blocks are held by a number that nothing asks for.
    unsafe fn resident_clusters(&self, _: Function, size: Launch) -> Outcome<usize> {
        Ok(size.grid[0] as usize)
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

    fn check_gemm(&self) -> Result<()> {
        Ok(())
    }

    fn product(&self, spec: &GemmSpec, like: Option<&GemmSpec>) -> Result<Box<dyn Product>> {
        let device = Device::Hip(self.index);
        // rocBLAS chooses by the sizes. Windrow's kernel adds the terms of every sum one after the other.
        if like.is_none()
            && rocblas::CHIPS.contains(&&*self.architecture)
            && let Ok(library) = Rocblas::get()
            && let Some(product) = RocblasProduct::new(library, self.index, spec)
                .map_err(|failure| failure.on(device))?
        {
            return Ok(Box::new(product));
        }
        Ok(Box::new(BlockProduct::new(Gpu::get(device)?, spec)?))
    }

    fn convolution_library(&self) -> Result<String> {
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

    unsafe fn tensor_map_of_pixels(&self, _: &TensorPixels) -> Outcome<[u64; 16]> {
        let words = "AMD's chips have no engine that copies pixels of convolutions".into();
        Err(Failure { call: "tensor_map_of_pixels", status: -1, words })
    }
}
