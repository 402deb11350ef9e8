//! The interface of a backend: the calls of its libraries, one to one.

use super::convolution::{Convolution, ConvolutionSpec, Operation};
use super::gemm::{GemmSpec, Product};
use super::{KernelSpec, TensorBoxes, TensorPixels};
use crate::{Device, Error, Result};
use std::ffi::{c_int, c_void};
use std::fmt::{Debug, Display};

/// A stream, an event, a graph and so on of the backend's library.
pub(crate) type Handle = *mut c_void;

/// A call of a library that failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// The function's name.
    pub(crate) call: &'static str,
    pub(crate) status: c_int,
    /// The library's text for the status.
    pub(crate) words: String,
}

pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// The error, which names the call.
    pub(crate) fn on(self, device: Device) -> Error {
        let what = self.call;
        self.of(what, device)
    }

    /// The error, which names what failed instead of the call.
    pub(crate) fn of(self, what: impl Display, device: Device) -> Error {
        Error::Backend { what: what.to_string(), device, detail: self.words }
    }
}

/// The hardware features that only some GPUs have. Operators query these, never the model of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Feature {
    /// Tensor cores (`mma`): a warp multiplies blocks of f16 or bf16, and of f32 rounded to TF32.
    MatrixProducts,
    /// AMD's matrix cores (MFMA or WMMA): a wavefront multiplies blocks of f16 or bf16.
    WavefrontProducts,
    /// AMD's matrix cores with f32: a wavefront multiplies blocks of f32 too (MFMA).
    WavefrontFloatProducts,
    /// Hopper's `wgmma`: a warpgroup (four warps) multiplies blocks in shared memory.
    WarpgroupProducts,
    /// The Tensor Memory Accelerator (TMA) copies blocks of memory and boxes of tensors to shared memory.
    BulkCopies,
    /// Programmatic dependent launch: a kernel may start while the one before it ends.
    OverlappedLaunches,
    /// Tensor cores truncate (do not round) when they add products of f16 or bf16.
    TruncatedSums,
}

/// How a stream is ordered with other streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    /// Ordered with the legacy default stream.
    Blocking,
    /// Not ordered with any other stream.
    Apart,
    /// Ordered like `Blocking`. Blocks of its kernels start before waiting blocks of other streams.
    Urgent,
}

/// The state of a stream's capture.
pub(crate) enum Recording {
    No,
    /// Capturing into `graph`. `id` is unique among the captures of this process.
    Into {
        id: u64,
        graph: Handle,
    },
    /// An earlier call has made the capture invalid.
    Broken,
}

/// The size of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    /// Blocks in x, y, z: at most 2^31 - 1, 65535, 65535.
    pub(crate) grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub(crate) block: [u32; 3],
}

impl Launch {
    /// A launch with blocks and threads in x only.
    pub(crate) fn line(blocks: usize, threads: usize) -> Self {
        Launch { grid: [blocks as u32, 1, 1], block: [threads as u32, 1, 1] }
    }
}

/// The launch of a loaded kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function {
    pub(crate) handle: Handle,
    /// Bytes of dynamic shared memory.
    pub(crate) shared_bytes: u32,
    /// True if the kernel may start while the previous one ends.
    pub(crate) overlapped: bool,
}

/// The operations for which all drivers have functions of the same kind. A backend that names these functions in
/// [`Calls`](super::driver::Calls) has all of them.
///
/// # Safety
/// As for [`Runtime`].
pub(crate) trait Common {
    /// Allows kernels on the device of this index to access memory from [`Common::allocate`], if the two are linked.
    unsafe fn allow_access_by(&self, peer: u32) -> Outcome<()>;

    /// Memory aligned to 256 bytes, in the order of the stream; `None` if there is not enough memory.
    unsafe fn allocate(&self, bytes: usize, stream: Handle) -> Outcome<Option<*mut u8>>;
    unsafe fn free(&self, memory: *mut u8, stream: Handle) -> Outcome<()>;
    /// Pinned host memory; `None` if there is not enough memory.
    unsafe fn allocate_host(&self, bytes: usize) -> Outcome<Option<*mut u8>>;
    unsafe fn free_host(&self, memory: *mut u8) -> Outcome<()>;

    unsafe fn synchronize_stream(&self, stream: Handle) -> Outcome<()>;
    /// Makes later work of the stream wait for the event.
    unsafe fn wait(&self, stream: Handle, event: Handle) -> Outcome<()>;

    unsafe fn create_event(&self, timed: bool) -> Outcome<Handle>;
    unsafe fn destroy_event(&self, event: Handle) -> Outcome<()>;
    unsafe fn record(&self, event: Handle, stream: Handle) -> Outcome<()>;
    unsafe fn is_reached(&self, event: Handle) -> Outcome<bool>;
    unsafe fn synchronize_event(&self, event: Handle) -> Outcome<()>;
    unsafe fn milliseconds(&self, start: Handle, end: Handle) -> Outcome<f32>;

    /// Starts to record the work that this thread enqueues on the stream.
    unsafe fn begin_capture(&self, stream: Handle) -> Outcome<()>;
    /// Ends the capture and returns its graph.
    unsafe fn end_capture(&self, stream: Handle) -> Outcome<Handle>;
    unsafe fn recording(&self, stream: Handle) -> Outcome<Recording>;
    /// Calls `release` with `owner` on any thread when the graph and everything made of it are gone; after an error at
    /// once.
    unsafe fn retain(
        &self,
        graph: Handle,
        owner: Handle,
        release: unsafe extern "C" fn(Handle),
    ) -> Outcome<()>;
    unsafe fn destroy_graph(&self, graph: Handle) -> Outcome<()>;
    /// Makes a launchable form of a graph.
    unsafe fn instantiate(&self, graph: Handle) -> Outcome<Handle>;
    unsafe fn destroy_instance(&self, instance: Handle) -> Outcome<()>;
    unsafe fn launch_graph(&self, instance: Handle, stream: Handle) -> Outcome<()>;
    /// Allows this thread to allocate and wait while any thread captures a stream. Returns the mode to restore.
    fn relax_captures(&self) -> c_int;
    fn restore_captures(&self, mode: c_int);
}

/// A device of a backend. Implementations do not check arguments, cache or lock: [`Gpu`](super::Gpu) does that once for
/// all backends.
///
/// # Safety
/// The device must be current ([`Runtime::enter`]), except for `enter` itself, `has`, `recipe` and `compile`. Arguments
/// must belong to this device and be alive. Memory must stay alive until the stream's work that uses it has finished.
pub(crate) trait Runtime: Common + Debug + Send + Sync {
    fn has(&self, feature: Feature) -> bool;

    /// Makes the device current on this thread. Returns `Some` if another one was, for [`Runtime::leave`].
    fn enter(&self) -> Outcome<Option<Handle>>;
    unsafe fn leave(&self, previous: Handle);

    /// Copies from the host; without a stream the copy is done when it returns.
    unsafe fn upload(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: Option<Handle>,
    ) -> Outcome<()>;
    /// Copies to the host.
    unsafe fn download(
        &self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: Option<Handle>,
    ) -> Outcome<()>;
    unsafe fn fill(&self, memory: *mut u8, value: u8, bytes: usize, stream: Handle) -> Outcome<()>;

    unsafe fn create_stream(&self, kind: StreamKind) -> Outcome<Handle>;
    unsafe fn destroy_stream(&self, stream: Handle) -> Outcome<()>;
    /// A number that no other stream of the process has had.
    unsafe fn stream_id(&self, stream: Handle) -> Outcome<u64>;

    /// The compiler's version, and the options for a kernel. Together with the sources, these determine the image.
    fn recipe(&self, spec: &KernelSpec) -> Result<(String, Vec<String>)>;
    /// The image of a kernel, compiled with the options of its recipe.
    fn compile(&self, spec: &KernelSpec, options: &[String]) -> Result<Vec<u8>>;
    /// The entry point of an image, allowed to use `shared_bytes` of dynamic shared memory.
    unsafe fn load(&self, image: &[u8], entry: &str, shared_bytes: u32) -> Outcome<Handle>;
    /// The number of clusters of such a launch that the device holds at a time. A kernel without clusters has one of each
    /// block.
    unsafe fn resident_clusters(&self, function: Function, size: Launch) -> Outcome<usize>;
    /// Launches a kernel on its one argument, the structure at `params`.
    unsafe fn launch(
        &self,
        function: Function,
        size: Launch,
        params: *const c_void,
        stream: Handle,
    ) -> Outcome<()>;

    /// `Ok` if matrix products are available.
    fn check_gemm(&self) -> Result<()>;
    /// A prepared matrix product, which has elements to compute. If `like` is given, its sums have the order of that one's.
    fn product(&self, spec: &GemmSpec, like: Option<&GemmSpec>) -> Result<Box<dyn Product>>;
    /// The version of the vendor's library of convolutions.
    fn convolution_library(&self) -> Result<String>;
    /// The library's kernels for a convolution, at most `limits.most`, in order of expected speed, the fastest first.
    fn convolutions(
        &self,
        spec: &ConvolutionSpec,
        operation: Operation,
        limits: ConvolutionLimits,
    ) -> Result<Vec<Box<dyn Convolution>>>;
    /// The descriptor with which the TMA reads boxes of a tensor.
    unsafe fn tensor_map(&self, boxes: &TensorBoxes) -> Outcome<[u64; 16]>;
    /// The descriptor with which the TMA reads pixels of a convolution.
    unsafe fn tensor_map_of_pixels(&self, pixels: &TensorPixels) -> Outcome<[u64; 16]>;
}

/// The limits for kernels of a convolution.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConvolutionLimits {
    /// The alignment of every address in bytes.
    pub(crate) alignment: usize,
    pub(crate) workspace: usize,
    /// The maximum number of kernels, at least 1.
    pub(crate) most: usize,
}
