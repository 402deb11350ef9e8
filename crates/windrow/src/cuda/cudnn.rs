//! Convolutions by cuDNN, where it is installed: the few calls that are needed, loaded at run time.

use super::library::Library;
use super::{Gpu, Stream};
use crate::{DType, Device, Error, Result};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{LazyLock, Mutex, OnceLock};

type Status = c_int;
/// A handle or descriptor.
type Raw = *mut c_void;

const SUCCESS: Status = 0;
/// `cudnnTensorFormat_t`
const NCHW: c_int = 0;
const NHWC: c_int = 1;
/// `cudnnDataType_t`
const FLOAT: c_int = 0;
const HALF: c_int = 2;
const BFLOAT16: c_int = 9;
/// `cudnnMathType_t`
const DEFAULT_MATH: c_int = 0;
const TENSOR_OP_MATH: c_int = 1;
const FMA_MATH: c_int = 3;
/// `cudnnConvolutionMode_t`
const CROSS_CORRELATION: c_int = 1;
/// `cudnnDeterminism_t`
const DETERMINISTIC: c_int = 1;
/// `cudnnConvolutionFwdAlgo_t`: the implicit matrix products.
const IMPLICIT_GEMMS: [c_int; 2] = [0, 1];

macro_rules! api {
    ($($name:ident: $symbol:literal fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// The functions of the library, which stays loaded for the life of the process.
        struct Api { $($name: unsafe extern "C" fn($($arg),*) -> $ret,)* }

        impl Api {
            fn load() -> Result<Self, String> {
                let library = Library::Cudnn.open().ok_or("not found")?;
                // It must outlive the functions.
                let library: &'static libloading::Library = Box::leak(Box::new(library));
                // SAFETY: the types are those of the headers, unchanged since version 7.
                Ok(unsafe { Api { $($name: *library.get($symbol).map_err(|e| e.to_string())?,)* } })
            }
        }
    };
}

api! {
    create: b"cudnnCreate\0" fn(*mut Raw) -> Status;
    set_stream: b"cudnnSetStream\0" fn(Raw, *mut c_void) -> Status;
    error_string: b"cudnnGetErrorString\0" fn(Status) -> *const c_char;
    create_tensor: b"cudnnCreateTensorDescriptor\0" fn(*mut Raw) -> Status;
    set_tensor: b"cudnnSetTensor4dDescriptor\0" fn(Raw, c_int, c_int, c_int, c_int, c_int, c_int) -> Status;
    destroy_tensor: b"cudnnDestroyTensorDescriptor\0" fn(Raw) -> Status;
    create_filter: b"cudnnCreateFilterDescriptor\0" fn(*mut Raw) -> Status;
    set_filter: b"cudnnSetFilter4dDescriptor\0" fn(Raw, c_int, c_int, c_int, c_int, c_int, c_int) -> Status;
    destroy_filter: b"cudnnDestroyFilterDescriptor\0" fn(Raw) -> Status;
    create_convolution: b"cudnnCreateConvolutionDescriptor\0" fn(*mut Raw) -> Status;
    set_convolution: b"cudnnSetConvolution2dDescriptor\0" fn(Raw, c_int, c_int, c_int, c_int, c_int, c_int, c_int, c_int) -> Status;
    set_groups: b"cudnnSetConvolutionGroupCount\0" fn(Raw, c_int) -> Status;
    set_math: b"cudnnSetConvolutionMathType\0" fn(Raw, c_int) -> Status;
    destroy_convolution: b"cudnnDestroyConvolutionDescriptor\0" fn(Raw) -> Status;
    choose: b"cudnnGetConvolutionForwardAlgorithm_v7\0" fn(Raw, Raw, Raw, Raw, Raw, c_int, *mut c_int, *mut Choice) -> Status;
    forward: b"cudnnConvolutionForward\0" fn(Raw, *const f32, Raw, *const u8, Raw, *const u8, Raw, c_int, *mut u8, usize, *const f32, Raw, *mut u8) -> Status;
    choose_weight: b"cudnnGetConvolutionBackwardFilterAlgorithm_v7\0" fn(Raw, Raw, Raw, Raw, Raw, c_int, *mut c_int, *mut Choice) -> Status;
    backward_filter: b"cudnnConvolutionBackwardFilter\0" fn(Raw, *const f32, Raw, *const u8, Raw, *const u8, Raw, c_int, *mut u8, usize, *const f32, Raw, *mut u8) -> Status;
}

impl Api {
    /// # Errors
    /// [`Error::Backend`], which says what to install.
    fn get() -> Result<&'static Api> {
        static API: OnceLock<Result<Api, String>> = OnceLock::new();
        // cuDNN opens it by bare name.
        Library::CublasLt.require()?;
        Library::Cudnn.require()?;
        API.get_or_init(Api::load).as_ref().map_err(|detail| Error::Backend {
            what: "loading libcudnn".into(),
            device: Device::Cuda(0),
            detail: detail.clone(),
        })
    }

    fn check(&self, gpu: &Gpu, status: Status, what: &str) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: any number may be asked for; the words are a static string.
        let words = unsafe { (self.error_string)(status) };
        let detail = if words.is_null() {
            format!("error {status}")
        } else {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
        };
        Err(Error::Backend { what: what.into(), device: gpu.device(), detail })
    }
}

/// `y = conv2d(x, w)` without bias. x, w and y have one type and are dense: [n, c, h, w] or, with
/// `channels_last`, [n, h, w, c]; the filter [k, c/groups, r, s] in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudnnConv2dSpec {
    /// f32, f16 or bf16; sums are f32.
    pub(crate) dtype: DType,
    pub(crate) channels_last: bool,
    /// n, c, h, w
    pub(crate) x: [usize; 4],
    /// k, c/groups, r, s
    pub(crate) w: [usize; 4],
    /// n, k, oh, ow
    pub(crate) y: [usize; 4],
    pub(crate) stride: [usize; 2],
    pub(crate) padding: [usize; 2],
    pub(crate) dilation: [usize; 2],
    pub(crate) groups: usize,
    /// f32 operands may be rounded to TF32.
    pub(crate) tf32: bool,
}

/// A [`CudnnConv2dSpec`] bound to a device, with an algorithm chosen by cuDNN's heuristic among
/// those that sum the products of the operands as they are: no transforms.
#[derive(Debug)]
pub(crate) struct CudnnConv2d {
    gpu: &'static Gpu,
    x: Tensor,
    w: Filter,
    y: Tensor,
    convolution: Convolution,
    algorithm: c_int,
    workspace_bytes: usize,
}

/// What the heuristic says of an algorithm: `cudnnConvolutionFwdAlgoPerf_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Choice {
    algorithm: c_int,
    status: Status,
    time: f32,
    memory: usize,
    determinism: c_int,
    math: c_int,
    reserved: [c_int; 3],
}

/// All algorithms, the one that should be fastest first.
#[derive(Default)]
struct Choices {
    found: [Choice; 8],
    count: c_int,
}

impl Choices {
    const MAX_WORKSPACE: usize = 1 << 30;

    /// The first that works, gives the same bits every time, and is one of those wanted.
    fn first(&self, wanted: &[c_int]) -> Option<&Choice> {
        self.found[..self.count as usize].iter().find(|choice| {
            choice.status == SUCCESS
                && choice.determinism == DETERMINISTIC
                && choice.memory <= Self::MAX_WORKSPACE
                && wanted.contains(&choice.algorithm)
        })
    }
}

impl Choice {
    fn math(&self, spec: &CudnnConv2dSpec) -> c_int {
        if self.math == TENSOR_OP_MATH { TENSOR_OP_MATH } else { spec.math() }
    }
}

impl CudnnConv2d {
    /// `Ok` if cuDNN was found.
    ///
    /// # Errors
    /// [`Error::Backend`], which says what to install.
    pub(crate) fn available() -> Result<()> {
        Api::get().map(|_| ())
    }

    /// Chooses the algorithm.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for tensors with 2^31 elements or more and for what cuDNN has no
    /// algorithm for; [`Error::Backend`] without cuDNN, or if it fails.
    pub(crate) fn new(gpu: &'static Gpu, spec: &CudnnConv2dSpec) -> Result<Self> {
        spec.check(gpu)?;
        let api = Api::get()?;
        let (x, y) = (Tensor::new(api, gpu, spec, spec.x)?, Tensor::new(api, gpu, spec, spec.y)?);
        let (w, convolution) = (Filter::new(api, gpu, spec)?, Convolution::new(api, gpu, spec)?);
        let mut choices = Choices::default();
        with_handle(api, gpu, |handle| {
            // SAFETY: the descriptors are alive, and there is room for as many results as asked for;
            // `Choice` is laid out as the result.
            let status = unsafe {
                (api.choose)(
                    handle,
                    x.0,
                    w.0,
                    convolution.0,
                    y.0,
                    choices.found.len() as c_int,
                    &mut choices.count,
                    choices.found.as_mut_ptr(),
                )
            };
            api.check(gpu, status, "cudnnGetConvolutionForwardAlgorithm")
        })?;
        let choice = choices
            .first(&IMPLICIT_GEMMS)
            .ok_or_else(|| unsupported(gpu, "this convolution: it has no algorithm"))?;
        convolution.set_math(api, gpu, choice.math(spec))?;
        let (algorithm, workspace_bytes) = (choice.algorithm, choice.memory);
        Ok(CudnnConv2d { gpu, x, w, y, convolution, algorithm, workspace_bytes })
    }

    /// Bytes of workspace that a run needs, aligned to 256.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Computes y on `stream`. Allocates nothing and may be captured into a graph.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// The pointers must be the spec's tensors and [`CudnnConv2d::workspace_bytes`] on the device of
    /// the plan and of the stream, alive until the work is done; y may overlap nothing.
    pub(crate) unsafe fn run(
        &self,
        x: *const u8,
        w: *const u8,
        y: *mut u8,
        workspace: *mut u8,
        stream: &Stream,
    ) -> Result<()> {
        let (api, one, zero) = (Api::get()?, 1f32, 0f32);
        with_handle(api, self.gpu, |handle| {
            // SAFETY: the handle is alive and used by nobody else meanwhile.
            let set = unsafe { (api.set_stream)(handle, stream.as_raw()) };
            api.check(self.gpu, set, "cudnnSetStream")?;
            // SAFETY: the descriptors are alive, the scalars f32 and read before the call returns;
            // the rest is the caller's promise.
            let status = unsafe {
                (api.forward)(
                    handle,
                    &one,
                    self.x.0,
                    x,
                    self.w.0,
                    w,
                    self.convolution.0,
                    self.algorithm,
                    workspace,
                    self.workspace_bytes,
                    &zero,
                    self.y.0,
                    y,
                )
            };
            api.check(self.gpu, status, "cudnnConvolutionForward")
        })
    }
}

/// The weight gradient of a [`CudnnConv2dSpec`]: dw has x's type and the filter's order.
#[derive(Debug)]
pub(crate) struct CudnnWeightGrad {
    gpu: &'static Gpu,
    x: Tensor,
    dw: Filter,
    dy: Tensor,
    convolution: Convolution,
    workspace_bytes: usize,
}

impl CudnnWeightGrad {
    /// A product of matrices, the only one of its algorithms that sums in a fixed order without a
    /// transform.
    const ALGORITHM: c_int = 1;

    /// # Errors
    /// As [`CudnnConv2d::new`].
    pub(crate) fn new(gpu: &'static Gpu, spec: &CudnnConv2dSpec) -> Result<Self> {
        spec.check(gpu)?;
        let api = Api::get()?;
        let (x, dy) = (Tensor::new(api, gpu, spec, spec.x)?, Tensor::new(api, gpu, spec, spec.y)?);
        let (dw, convolution) = (Filter::new(api, gpu, spec)?, Convolution::new(api, gpu, spec)?);
        let mut choices = Choices::default();
        with_handle(api, gpu, |handle| {
            // SAFETY: as for the forward direction.
            let status = unsafe {
                (api.choose_weight)(
                    handle,
                    x.0,
                    dy.0,
                    convolution.0,
                    dw.0,
                    choices.found.len() as c_int,
                    &mut choices.count,
                    choices.found.as_mut_ptr(),
                )
            };
            api.check(gpu, status, "cudnnGetConvolutionBackwardFilterAlgorithm")
        })?;
        let choice = choices
            .first(&[Self::ALGORITHM])
            .ok_or_else(|| unsupported(gpu, "this weight gradient: it has no algorithm"))?;
        convolution.set_math(api, gpu, choice.math(spec))?;
        Ok(CudnnWeightGrad { gpu, x, dw, dy, convolution, workspace_bytes: choice.memory })
    }

    /// Bytes of workspace that a run needs, aligned to 256.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Computes dw on `stream`.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// As [`CudnnConv2d::run`].
    pub(crate) unsafe fn run(
        &self,
        x: *const u8,
        dy: *const u8,
        dw: *mut u8,
        workspace: *mut u8,
        stream: &Stream,
    ) -> Result<()> {
        let (api, one, zero) = (Api::get()?, 1f32, 0f32);
        with_handle(api, self.gpu, |handle| {
            // SAFETY: the handle is alive and used by nobody else meanwhile.
            let set = unsafe { (api.set_stream)(handle, stream.as_raw()) };
            api.check(self.gpu, set, "cudnnSetStream")?;
            // SAFETY: as for the forward direction.
            let status = unsafe {
                (api.backward_filter)(
                    handle,
                    &one,
                    self.x.0,
                    x,
                    self.dy.0,
                    dy,
                    self.convolution.0,
                    Self::ALGORITHM,
                    workspace,
                    self.workspace_bytes,
                    &zero,
                    self.dw.0,
                    dw,
                )
            };
            api.check(self.gpu, status, "cudnnConvolutionBackwardFilter")
        })
    }
}

impl CudnnConv2dSpec {
    fn check(&self, gpu: &Gpu) -> Result<()> {
        let elements = |shape: [usize; 4]| {
            shape.iter().try_fold(1usize, |a, &b| a.checked_mul(b)).unwrap_or(usize::MAX)
        };
        let sizes = [self.x, self.w, self.y].map(elements);
        if sizes.iter().any(|&n| n == 0 || n > i32::MAX as usize) {
            return Err(unsupported(gpu, "tensors without elements or with 2^31 and more"));
        }
        Ok(())
    }

    fn data_type(&self) -> c_int {
        match self.dtype {
            DType::F16 => HALF,
            DType::BF16 => BFLOAT16,
            _ => FLOAT,
        }
    }

    fn format(&self) -> c_int {
        if self.channels_last { NHWC } else { NCHW }
    }

    fn math(&self) -> c_int {
        match (self.dtype, self.tf32) {
            (DType::F32, false) => FMA_MATH,
            (DType::F32, true) => DEFAULT_MATH,
            _ => TENSOR_OP_MATH,
        }
    }
}

fn unsupported(gpu: &Gpu, what: &str) -> Error {
    Error::unsupported(format!("conv2d by cudnn on {}", gpu.device()), format!("not for {what}"))
}

struct Handle(Raw);

// SAFETY: any thread may use a handle, one at a time: it is behind a mutex.
unsafe impl Send for Handle {}

/// Calls `f` with the device current and its handle, which is made once, lives as long as the
/// process, and is used by one thread at a time.
fn with_handle(api: &Api, gpu: &'static Gpu, f: impl FnOnce(Raw) -> Result<()>) -> Result<()> {
    static HANDLES: LazyLock<Mutex<HashMap<u32, Handle>>> = LazyLock::new(Mutex::default);
    let _current = gpu.enter()?;
    let mut handles = HANDLES.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(handle) = handles.get(&gpu.info.index) {
        return f(handle.0);
    }
    let mut raw = std::ptr::null_mut();
    // SAFETY: the device is current; the call writes one pointer.
    api.check(gpu, unsafe { (api.create)(&mut raw) }, "cudnnCreate")?;
    handles.insert(gpu.info.index, Handle(raw));
    f(raw)
}

/// A descriptor of cuDNN, destroyed when dropped. Read-only once a plan is made.
macro_rules! descriptor {
    ($name:ident, $create:ident, $destroy:ident) => {
        #[derive(Debug)]
        struct $name(Raw);

        // SAFETY: plain memory that no call changes once a plan is made.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl $name {
            fn create(api: &Api, gpu: &Gpu) -> Result<Self> {
                let mut raw = std::ptr::null_mut();
                // SAFETY: the call writes one pointer.
                api.check(gpu, unsafe { (api.$create)(&mut raw) }, stringify!($create))?;
                Ok($name(raw))
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                if let Ok(api) = Api::get() {
                    // SAFETY: made by `create` and not used after.
                    unsafe { (api.$destroy)(self.0) };
                }
            }
        }
    };
}

descriptor!(Tensor, create_tensor, destroy_tensor);
descriptor!(Filter, create_filter, destroy_filter);
descriptor!(Convolution, create_convolution, destroy_convolution);

impl Tensor {
    fn new(api: &Api, gpu: &Gpu, spec: &CudnnConv2dSpec, shape: [usize; 4]) -> Result<Self> {
        let tensor = Tensor::create(api, gpu)?;
        let [n, c, h, w] = shape.map(|d| d as c_int);
        // SAFETY: the descriptor is alive.
        let set =
            unsafe { (api.set_tensor)(tensor.0, spec.format(), spec.data_type(), n, c, h, w) };
        api.check(gpu, set, "cudnnSetTensor4dDescriptor")?;
        Ok(tensor)
    }
}

impl Filter {
    fn new(api: &Api, gpu: &Gpu, spec: &CudnnConv2dSpec) -> Result<Self> {
        let filter = Filter::create(api, gpu)?;
        let [k, c, r, s] = spec.w.map(|d| d as c_int);
        // SAFETY: the descriptor is alive.
        let set =
            unsafe { (api.set_filter)(filter.0, spec.data_type(), spec.format(), k, c, r, s) };
        api.check(gpu, set, "cudnnSetFilter4dDescriptor")?;
        Ok(filter)
    }
}

impl Convolution {
    fn new(api: &Api, gpu: &Gpu, spec: &CudnnConv2dSpec) -> Result<Self> {
        let convolution = Convolution::create(api, gpu)?;
        let [pad_h, pad_w] = spec.padding.map(|d| d as c_int);
        let [stride_h, stride_w] = spec.stride.map(|d| d as c_int);
        let [dilation_h, dilation_w] = spec.dilation.map(|d| d as c_int);
        // SAFETY: the descriptor is alive.
        let set = unsafe {
            (api.set_convolution)(
                convolution.0,
                pad_h,
                pad_w,
                stride_h,
                stride_w,
                dilation_h,
                dilation_w,
                CROSS_CORRELATION,
                FLOAT,
            )
        };
        api.check(gpu, set, "cudnnSetConvolution2dDescriptor")?;
        // SAFETY: as above.
        let set = unsafe { (api.set_groups)(convolution.0, spec.groups as c_int) };
        api.check(gpu, set, "cudnnSetConvolutionGroupCount")?;
        convolution.set_math(api, gpu, spec.math())?;
        Ok(convolution)
    }

    fn set_math(&self, api: &Api, gpu: &Gpu, math: c_int) -> Result<()> {
        // SAFETY: the descriptor is alive, and the plan not made yet.
        let set = unsafe { (api.set_math)(self.0, math) };
        api.check(gpu, set, "cudnnSetConvolutionMathType")
    }
}
