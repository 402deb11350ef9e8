//! CUDA devices behind [`Runtime`].

use super::cudnn;
use super::driver::{Driver, LaunchAttribute, LaunchConfig, TensorMap};
use super::{cublaslt, nvrtc};
use crate::Result;
use crate::dtype::by_type;
use crate::gpu::{
    Calls, Convolution, ConvolutionLimits, ConvolutionSpec, Driven, Feature, Function, GemmSpec,
    Handle, KernelSpec, Launch, Operation, Outcome, Product, Runtime, StreamKind, TensorBoxes,
    TensorPixels, made,
};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

/// A device: its primary context, which torch and the runtime API share.
#[derive(Debug)]
pub(super) struct Cuda {
    pub(super) driver: &'static Driver,
    pub(super) index: u32,
    pub(super) compute_capability: (u32, u32),
    pub(super) handle: c_int,
    pub(super) context: Handle,
    /// True if the device can allocate in stream order.
    pub(super) memory_pools: bool,
}

// SAFETY: a context handle may be used from any thread.
unsafe impl Send for Cuda {}
// SAFETY: several threads may have one context current at once.
unsafe impl Sync for Cuda {}

impl Driven for Cuda {
    type Library = Driver;
    const CALLS: Calls<Driver> = Calls {
        can_access_peer: Driver::cuDeviceCanAccessPeer,
        default_pool: Driver::cuDeviceGetDefaultMemPool,
        set_pool_attribute: Driver::cuMemPoolSetAttribute,
        set_pool_access: Driver::cuMemPoolSetAccess,
        allocate: Driver::cuMemAlloc_v2,
        free: Driver::cuMemFree_v2,
        allocate_async: Driver::cuMemAllocAsync,
        free_async: Driver::cuMemFreeAsync,
        allocate_host: Driver::cuMemHostAlloc,
        free_host: Driver::cuMemFreeHost,
        stream_priorities: Driver::cuCtxGetStreamPriorityRange,
        create_stream: Driver::cuStreamCreate,
        create_stream_with_priority: Driver::cuStreamCreateWithPriority,
        synchronize_stream: Driver::cuStreamSynchronize,
        wait: Driver::cuStreamWaitEvent,
        create_event: Driver::cuEventCreate,
        destroy_event: Driver::cuEventDestroy_v2,
        record: Driver::cuEventRecord,
        query_event: Driver::cuEventQuery,
        synchronize_event: Driver::cuEventSynchronize,
        elapsed: Driver::cuEventElapsedTime,
        begin_capture: Driver::cuStreamBeginCapture_v2,
        end_capture: Driver::cuStreamEndCapture,
        capture_info: Driver::cuStreamGetCaptureInfo_v2,
        exchange_capture_mode: Driver::cuThreadExchangeStreamCaptureMode,
        instantiate: Driver::cuGraphInstantiateWithFlags,
        launch_graph: Driver::cuGraphLaunch,
        destroy_graph: Driver::cuGraphDestroy,
        destroy_instance: Driver::cuGraphExecDestroy,
        create_object: Driver::cuUserObjectCreate,
        release_object: Driver::cuUserObjectRelease,
        retain_object: Driver::cuGraphRetainUserObject,
        load_module: Driver::cuModuleLoadData,
        find_function: Driver::cuModuleGetFunction,
    };

    fn library(&self) -> &'static Driver {
        self.driver
    }

    fn number(&self) -> c_int {
        self.handle
    }

    fn number_of(&self, index: u32) -> Outcome<c_int> {
        let mut number = 0;
        // SAFETY: the call writes one number; the driver checks the index.
        unsafe { self.driver.cuDeviceGet(&mut number, index as c_int) }.map(|()| number)
    }

    fn memory_pools(&self) -> bool {
        self.memory_pools
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

    unsafe fn upload(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: Option<Handle>,
    ) -> Outcome<()> {
        let (to, from) = (to.cast::<c_void>(), from.cast::<c_void>());
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
        let (to, from) = (to.cast::<c_void>(), from.cast_mut().cast());
        match stream {
            // SAFETY: both are so many bytes, alive until the stream is past the copy, says the caller.
            Some(stream) => unsafe { self.driver.cuMemcpyDtoHAsync_v2(to, from, bytes, stream) },
            // SAFETY: both are so many bytes, says the caller.
            None => unsafe { self.driver.cuMemcpyDtoH_v2(to, from, bytes) },
        }
    }

    unsafe fn fill(&self, memory: *mut u8, value: u8, bytes: usize, stream: Handle) -> Outcome<()> {
        // SAFETY: so many bytes, alive until the stream is past the call, says the caller.
        unsafe { self.driver.cuMemsetD8Async(memory.cast(), value, bytes, stream) }
    }

    unsafe fn create_stream(&self, kind: StreamKind) -> Outcome<Handle> {
        // SAFETY: the caller's promise.
        unsafe { self.new_stream(kind) }
    }

    unsafe fn destroy_stream(&self, stream: Handle) -> Outcome<()> {
        // SAFETY: of `create_stream`, and not used after, says the caller.
        unsafe { self.driver.cuStreamDestroy_v2(stream) }
    }

    unsafe fn stream_id(&self, stream: Handle) -> Outcome<u64> {
        let mut id = 0;
        // SAFETY: the stream is alive, says the caller; the call writes one number.
        unsafe { self.driver.cuStreamGetId(stream, &mut id) }.map(|()| id)
    }

    fn recipe(&self, spec: &KernelSpec) -> Result<(String, Vec<String>)> {
        nvrtc::recipe(spec, self.compute_capability)
    }

    fn compile(&self, spec: &KernelSpec, options: &[String]) -> Result<Vec<u8>> {
        nvrtc::compile(spec, options).map(|compiled| compiled.image)
    }

    unsafe fn load(&self, image: &[u8], entry: &str, shared_bytes: u32) -> Outcome<Handle> {
        const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
        // SAFETY: the caller's promise: a cubin, or PTX that ends in a zero byte.
        let function = unsafe { self.entry_point(image, entry)? };
        if shared_bytes > 0 {
            let (size, bytes) = (MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes as c_int);
            // SAFETY: the function was found above.
            unsafe { self.driver.cuFuncSetAttribute(function, size, bytes)? };
        }
        Ok(function)
    }

    unsafe fn resident_clusters(&self, function: Function, size: Launch) -> Outcome<usize> {
        let config = LaunchConfig {
            grid: size.grid,
            block: size.block,
            shared_bytes: function.shared_bytes,
            stream: null_mut(),
            attributes: null_mut(),
            attribute_count: 0,
        };
        let mut count = 0;
        // SAFETY: the function is alive, says the caller; the call writes one number.
        unsafe {
            self.driver.cuOccupancyMaxActiveClusters(&mut count, function.handle, &config)?;
        }
        Ok(usize::try_from(count).unwrap_or(0))
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

    fn check_gemm(&self) -> Result<()> {
        cublaslt::available()
    }

    fn product(&self, spec: &GemmSpec, like: Option<&GemmSpec>) -> Result<Box<dyn Product>> {
        Ok(Box::new(cublaslt::CublasLtProduct::new(self.index, spec, like)?))
    }

    fn convolution_library(&self) -> Result<String> {
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

    unsafe fn tensor_map_of_pixels(&self, pixels: &TensorPixels) -> Outcome<[u64; 16]> {
        // As above.
        const TF32: c_int = 11;
        let element = by_type!(pixels.dtype, F32 => 7, F16 => 6, BF16 => 9);
        let element = if pixels.tf32 { TF32 } else { element };
        const NOT_INTERLEAVED: c_int = 0;
        // Of 64 and of 128 bytes.
        let swizzle: c_int = if pixels.channels * pixels.dtype.size() == 64 { 2 } else { 3 };
        const PROMOTE_TO_128_BYTES: c_int = 2;
        const FILL_WITH_ZEROS: c_int = 0;
        let sizes = pixels.dims.map(|d| d as u64);
        let strides = pixels.strides.map(|s| (s * pixels.dtype.size()) as u64);
        let [w, h] = pixels.step;
        let mut map = TensorMap([0; 16]);
        // SAFETY: the arrays are of the rank's length, corners two less, and the map is aligned; the address is only stored.
        unsafe {
            self.driver.cuTensorMapEncodeIm2col(
                &mut map,
                element,
                4,
                pixels.address.cast_mut().cast(),
                sizes.as_ptr(),
                strides.as_ptr(),
                pixels.first.as_ptr(),
                pixels.last.as_ptr(),
                pixels.channels as c_uint,
                pixels.pixels as c_uint,
                [1, w, h, 1].as_ptr(),
                NOT_INTERLEAVED,
                swizzle,
                PROMOTE_TO_128_BYTES,
                FILL_WITH_ZEROS,
            )?;
        }
        Ok(map.0)
    }
}
