//! Convolutions by cuDNN, where it is installed, through its graph interface.

mod descriptor;
mod fastest;

use self::descriptor::{Api, Descriptor, Handle, Kind, Value, with_handle};
use super::{Gpu, Stream};
use crate::{DType, Error, Result};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// `cudnnDataType_t`
const FLOAT: c_int = 0;
const HALF: c_int = 2;
const BFLOAT16: c_int = 9;
/// `cudnnConvolutionMode_t`
const CROSS_CORRELATION: c_int = 1;
/// `cudnnBackendHeurMode_t`: by a model of speed, then what works where that knows nothing.
const HEURISTICS: [c_int; 2] = [3, 2];
/// `cudnnBackendNumericalNote_t`
const TENSOR_CORE: c_int = 0;
const DOWN_CONVERT_INPUTS: c_int = 1;
/// Sums rounded to halves, transforms, bits that differ between runs.
const UNWANTED: [c_int; 7] = [2, 3, 4, 5, 6, 7, 8];

/// `cudnnBackendAttributeName_t`
mod attribute {
    use std::ffi::c_int;

    pub(super) const CONVOLUTION_COMPUTE_TYPE: c_int = 100;
    pub(super) const CONVOLUTION_MODE: c_int = 101;
    pub(super) const CONVOLUTION_DILATIONS: c_int = 102;
    pub(super) const CONVOLUTION_STRIDES: c_int = 103;
    pub(super) const CONVOLUTION_POST_PADDINGS: c_int = 104;
    pub(super) const CONVOLUTION_PRE_PADDINGS: c_int = 105;
    pub(super) const CONVOLUTION_SPATIAL_DIMS: c_int = 106;
    pub(super) const HEURISTIC_MODE: c_int = 200;
    pub(super) const HEURISTIC_GRAPH: c_int = 201;
    pub(super) const HEURISTIC_RESULTS: c_int = 202;
    pub(super) const CONFIG_ENGINE: c_int = 300;
    pub(super) const PLAN_HANDLE: c_int = 400;
    pub(super) const PLAN_CONFIG: c_int = 401;
    pub(super) const PLAN_WORKSPACE: c_int = 402;
    /// alpha, beta, convolution, w, x, y
    pub(super) const FORWARD: [c_int; 6] = [700, 701, 702, 703, 704, 705];
    /// alpha, beta, convolution, w, dx, dy
    pub(super) const BACKWARD_DATA: [c_int; 6] = [706, 707, 708, 709, 710, 711];
    /// alpha, beta, convolution, dw, x, dy
    pub(super) const BACKWARD_FILTER: [c_int; 6] = [712, 713, 714, 715, 716, 717];
    pub(super) const GRAPH_HANDLE: c_int = 800;
    pub(super) const GRAPH_OPERATIONS: c_int = 801;
    pub(super) const TENSOR_ALIGNMENT: c_int = 900;
    pub(super) const TENSOR_TYPE: c_int = 901;
    pub(super) const TENSOR_SHAPE: c_int = 902;
    pub(super) const TENSOR_STRIDES: c_int = 903;
    pub(super) const TENSOR_NUMBER: c_int = 906;
    pub(super) const PACK_NUMBERS: c_int = 1000;
    pub(super) const PACK_ADDRESSES: c_int = 1001;
    pub(super) const PACK_WORKSPACE: c_int = 1003;
    pub(super) const ENGINE_NOTES: c_int = 1303;
}

/// `y = conv2d(x, w)` without bias. x, w and y have one type and are dense: [n, c, h, w] or, with
/// `channels_last`, [n, h, w, c]; the filter [k, c/groups, r, s] in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// f32 operands may be rounded to TF32.
    pub(crate) tf32: bool,
}

/// Which of the kernels that cuDNN's heuristic names, in its order, is taken. All sum in f32, multiply operands no less
/// exact than the spec asks for, and give the same bits every time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CudnnKernel {
    /// The first.
    First,
    /// The fastest of the first few, measured once for a spec in a process.
    Fastest,
}

/// Which sum of products of the tensors of a [`CudnnConv2dSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    /// y of x and w.
    Forward,
    /// The gradient of x, of w and that of y.
    BackwardData,
    /// The gradient of w, of x and that of y.
    BackwardFilter,
}

/// The numbers of the tensors in a graph: w, x, y, in the order of the operations' attributes.
const NUMBERS: [i64; 3] = [1, 2, 3];
/// The alignment of tensors that cuDNN has its fast kernels for.
const ALIGNMENT: usize = 16;

/// An operation bound to a device and a kernel.
#[derive(Debug)]
struct Plan {
    gpu: &'static Gpu,
    aligned: Execution,
    /// For tensors at other addresses, if there is a kernel for them.
    unaligned: Result<Execution>,
}

/// An operation by one kernel.
#[derive(Debug)]
struct Execution {
    plan: Descriptor,
    /// What the plan was made of, in the order in which it may be dropped.
    _config: Descriptor,
    _graph: Arc<Graph>,
    workspace_bytes: usize,
}

/// A graph of one operation.
#[derive(Debug)]
struct Graph {
    graph: Descriptor,
    /// What the graph was made of, in the order in which it may be dropped.
    _parts: Vec<Descriptor>,
}

/// A convolution.
#[derive(Debug)]
pub(crate) struct CudnnConv2d(Plan);

/// The data gradient of a [`CudnnConv2dSpec`].
#[derive(Debug)]
pub(crate) struct CudnnDataGrad(Plan);

/// The weight gradient of a [`CudnnConv2dSpec`]: dw has x's type and the filter's order.
#[derive(Debug)]
pub(crate) struct CudnnWeightGrad(Plan);

impl CudnnConv2d {
    /// Bytes to whose multiples addresses are aligned where its fast kernels can be taken.
    pub(crate) const ALIGNMENT: usize = ALIGNMENT;

    /// `Ok` if cuDNN was found.
    ///
    /// # Errors
    /// [`Error::Backend`], which says what to install.
    pub(crate) fn available() -> Result<()> {
        Api::get().map(|_| ())
    }

    /// # Errors
    /// [`Error::Unsupported`] for tensors with 2^31 elements or more and for what cuDNN has no
    /// kernel for; [`Error::Backend`] without cuDNN, or if it fails.
    pub(crate) fn new(
        gpu: &'static Gpu,
        spec: &CudnnConv2dSpec,
        kernel: CudnnKernel,
    ) -> Result<Self> {
        Plan::new(gpu, spec, Operation::Forward, kernel).map(CudnnConv2d)
    }

    /// Whether it has a kernel for a spec, in less time than [`CudnnConv2d::new`].
    ///
    /// # Errors
    /// As [`CudnnConv2d::new`].
    pub(crate) fn check(gpu: &'static Gpu, spec: &CudnnConv2dSpec) -> Result<()> {
        spec.check(gpu)?;
        let (operation, most) = (Operation::Forward, Execution::MAX_WORKSPACE);
        Execution::find(gpu, spec, operation, ALIGNMENT, most, 1).map(drop)
    }

    /// The library's version, as in `9.19.0`.
    ///
    /// # Errors
    /// As [`CudnnConv2d::available`].
    pub(crate) fn version() -> Result<String> {
        Api::get().map(Api::version)
    }

    /// Bytes of workspace that a run needs, aligned to 256.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.0.aligned.workspace_bytes
    }

    /// Whether there is a kernel for tensors at these addresses: for those that are not aligned to 16 bytes there may
    /// be none.
    pub(crate) fn takes(&self, tensors: [*const u8; 3]) -> bool {
        self.0.takes(tensors)
    }

    /// Computes y on `stream`. Allocates nothing on the device and may be captured into a graph.
    ///
    /// # Errors
    /// [`Error::Backend`]; [`Error::Unsupported`] for addresses that it does not [take](Self::takes).
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
        // SAFETY: the caller's promise.
        unsafe { self.0.run([w.cast_mut(), x.cast_mut(), y], workspace, stream) }
    }
}

impl CudnnDataGrad {
    /// # Errors
    /// As [`CudnnConv2d::new`].
    pub(crate) fn new(gpu: &'static Gpu, spec: &CudnnConv2dSpec) -> Result<Self> {
        Plan::new(gpu, spec, Operation::BackwardData, CudnnKernel::First).map(CudnnDataGrad)
    }

    /// Bytes of workspace that a run needs, aligned to 256.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.0.aligned.workspace_bytes
    }

    /// As [`CudnnConv2d::takes`].
    pub(crate) fn takes(&self, tensors: [*const u8; 3]) -> bool {
        self.0.takes(tensors)
    }

    /// Computes dx on `stream`.
    ///
    /// # Errors
    /// As [`CudnnConv2d::run`].
    ///
    /// # Safety
    /// As [`CudnnConv2d::run`].
    pub(crate) unsafe fn run(
        &self,
        w: *const u8,
        dy: *const u8,
        dx: *mut u8,
        workspace: *mut u8,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.0.run([w.cast_mut(), dx, dy.cast_mut()], workspace, stream) }
    }
}

impl CudnnWeightGrad {
    /// # Errors
    /// As [`CudnnConv2d::new`].
    pub(crate) fn new(gpu: &'static Gpu, spec: &CudnnConv2dSpec) -> Result<Self> {
        Plan::new(gpu, spec, Operation::BackwardFilter, CudnnKernel::First).map(CudnnWeightGrad)
    }

    /// Bytes of workspace that a run needs, aligned to 256.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.0.aligned.workspace_bytes
    }

    /// As [`CudnnConv2d::takes`].
    pub(crate) fn takes(&self, tensors: [*const u8; 3]) -> bool {
        self.0.takes(tensors)
    }

    /// Computes dw on `stream`.
    ///
    /// # Errors
    /// As [`CudnnConv2d::run`].
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
        // SAFETY: the caller's promise.
        unsafe { self.0.run([dw, x.cast_mut(), dy.cast_mut()], workspace, stream) }
    }
}

impl Plan {
    fn new(
        gpu: &'static Gpu,
        spec: &CudnnConv2dSpec,
        operation: Operation,
        kernel: CudnnKernel,
    ) -> Result<Self> {
        spec.check(gpu)?;
        let find =
            |most| Execution::find(gpu, spec, operation, ALIGNMENT, Execution::MAX_WORKSPACE, most);
        let aligned = match kernel {
            CudnnKernel::First => find(1)?.swap_remove(0),
            CudnnKernel::Fastest => fastest::of(gpu, spec, find)?,
        };
        let workspace = aligned.workspace_bytes;
        let unaligned = Execution::find(gpu, spec, operation, spec.dtype.size(), workspace, 1)
            .map(|mut found| found.swap_remove(0));
        Ok(Plan { gpu, aligned, unaligned })
    }

    fn takes(&self, tensors: [*const u8; 3]) -> bool {
        self.unaligned.is_ok() || is_aligned(tensors)
    }

    /// # Safety
    /// As [`CudnnConv2d::run`], for w, x and y.
    unsafe fn run(&self, tensors: [*mut u8; 3], workspace: *mut u8, stream: &Stream) -> Result<()> {
        let is_aligned = is_aligned(tensors.map(<*mut u8>::cast_const));
        let execution = match &self.unaligned {
            _ if is_aligned => &self.aligned,
            Ok(unaligned) => unaligned,
            Err(error) => return Err(error.clone()),
        };
        // SAFETY: the caller's promise.
        unsafe { execution.run(self.gpu, tensors, workspace, stream) }
    }
}

fn is_aligned(tensors: [*const u8; 3]) -> bool {
    tensors.iter().all(|&t| (t as usize).is_multiple_of(ALIGNMENT))
}

impl Execution {
    const MAX_WORKSPACE: usize = 1 << 30;

    /// By the first `most` of the kernels that cuDNN's heuristic names and the spec allows: at least one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if there is none, [`Error::Backend`].
    fn find(
        gpu: &'static Gpu,
        spec: &CudnnConv2dSpec,
        operation: Operation,
        alignment: usize,
        max_workspace: usize,
        most: usize,
    ) -> Result<Vec<Self>> {
        with_handle(gpu, |handle| {
            let graph = Arc::new(Graph::new(gpu, handle, spec, operation, alignment)?);
            let mut found = Vec::new();
            for mode in HEURISTICS {
                // Neither all modes nor all that they name exists for an operation.
                let Ok(configs) = configs(gpu, &graph.graph, mode) else { continue };
                for config in configs {
                    if !spec.allows(gpu, &config)? {
                        continue;
                    }
                    let Ok(plan) = execution_plan(gpu, handle, &config) else { continue };
                    let workspace_bytes = plan.integer(gpu, attribute::PLAN_WORKSPACE)? as usize;
                    if workspace_bytes > max_workspace {
                        continue;
                    }
                    let _graph = graph.clone();
                    found.push(Execution { plan, _config: config, _graph, workspace_bytes });
                    if found.len() == most {
                        return Ok(found);
                    }
                }
                if !found.is_empty() {
                    return Ok(found);
                }
            }
            Err(unsupported(gpu, "this convolution: it has no kernel"))
        })
    }

    /// # Safety
    /// As [`CudnnConv2d::run`], for w, x and y.
    unsafe fn run(
        &self,
        gpu: &'static Gpu,
        tensors: [*mut u8; 3],
        workspace: *mut u8,
        stream: &Stream,
    ) -> Result<()> {
        let workspace = if self.workspace_bytes > 0 { workspace } else { std::ptr::null_mut() };
        with_handle(gpu, |handle| {
            let (tensors, workspace) = (tensors.map(|t| t.cast::<c_void>()), [workspace.cast()]);
            let pack = [
                (attribute::PACK_ADDRESSES, Value::Addresses(&tensors)),
                (attribute::PACK_NUMBERS, Value::Integers(&NUMBERS)),
                (attribute::PACK_WORKSPACE, Value::Addresses(&workspace)),
            ];
            let pack = Descriptor::new(gpu, Kind::VariantPack, &pack)?;
            // SAFETY: the caller's promise.
            unsafe { self.plan.execute(gpu, handle, &pack, stream) }
        })
    }
}

/// Kernels for a graph, with their settings, the fastest first.
fn configs(gpu: &'static Gpu, graph: &Descriptor, mode: c_int) -> Result<Vec<Descriptor>> {
    let heuristic = [
        (attribute::HEURISTIC_GRAPH, Value::Descriptor(graph)),
        (attribute::HEURISTIC_MODE, Value::HeuristicMode(mode)),
    ];
    Descriptor::new(gpu, Kind::Heuristic, &heuristic)?.descriptors(
        gpu,
        attribute::HEURISTIC_RESULTS,
        Kind::EngineConfig,
    )
}

fn execution_plan(gpu: &'static Gpu, handle: Handle, config: &Descriptor) -> Result<Descriptor> {
    let plan = [
        (attribute::PLAN_HANDLE, Value::Handle(handle)),
        (attribute::PLAN_CONFIG, Value::Descriptor(config)),
    ];
    Descriptor::new(gpu, Kind::ExecutionPlan, &plan)
}

impl Graph {
    fn new(
        gpu: &'static Gpu,
        handle: Handle,
        spec: &CudnnConv2dSpec,
        operation: Operation,
        alignment: usize,
    ) -> Result<Self> {
        let [padding, dilation, stride] =
            [spec.padding, spec.dilation, spec.stride].map(|of| of.map(|v| v as i64));
        let convolution = [
            (attribute::CONVOLUTION_SPATIAL_DIMS, Value::Integers(&[2])),
            (attribute::CONVOLUTION_COMPUTE_TYPE, Value::DataType(FLOAT)),
            (attribute::CONVOLUTION_MODE, Value::ConvolutionMode(CROSS_CORRELATION)),
            (attribute::CONVOLUTION_PRE_PADDINGS, Value::Integers(&padding)),
            (attribute::CONVOLUTION_POST_PADDINGS, Value::Integers(&padding)),
            (attribute::CONVOLUTION_DILATIONS, Value::Integers(&dilation)),
            (attribute::CONVOLUTION_STRIDES, Value::Integers(&stride)),
        ];
        let convolution = Descriptor::new(gpu, Kind::Convolution, &convolution)?;
        let tensors = [spec.w, spec.x, spec.y];
        let mut parts = Vec::new();
        for (number, shape) in NUMBERS.into_iter().zip(tensors) {
            parts.push(spec.tensor(gpu, number, shape, alignment)?);
        }
        let (kind, names) = match operation {
            Operation::Forward => (Kind::Forward, attribute::FORWARD),
            Operation::BackwardData => (Kind::BackwardData, attribute::BACKWARD_DATA),
            Operation::BackwardFilter => (Kind::BackwardFilter, attribute::BACKWARD_FILTER),
        };
        let operation = [
            (names[0], Value::Float(1.0)),
            (names[1], Value::Float(0.0)),
            (names[2], Value::Descriptor(&convolution)),
            (names[3], Value::Descriptor(&parts[0])),
            (names[4], Value::Descriptor(&parts[1])),
            (names[5], Value::Descriptor(&parts[2])),
        ];
        let operation = Descriptor::new(gpu, kind, &operation)?;
        let graph = [
            (attribute::GRAPH_HANDLE, Value::Handle(handle)),
            (attribute::GRAPH_OPERATIONS, Value::Descriptor(&operation)),
        ];
        let graph = Descriptor::new(gpu, Kind::Graph, &graph)?;
        parts.insert(0, convolution);
        parts.insert(0, operation);
        Ok(Graph { graph, _parts: parts })
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

    fn tensor(
        &self,
        gpu: &Gpu,
        number: i64,
        shape: [usize; 4],
        alignment: usize,
    ) -> Result<Descriptor> {
        let dtype = match self.dtype {
            DType::F16 => HALF,
            DType::BF16 => BFLOAT16,
            DType::F32 => FLOAT,
            DType::F64 | DType::I32 | DType::I64 => {
                unreachable!("specs allow f32, f16 and bf16")
            }
        };
        let [_, c, h, w] = shape;
        let strides =
            if self.channels_last { [h * w * c, 1, w * c, c] } else { [c * h * w, h * w, w, 1] };
        let [shape, strides] = [shape, strides].map(|of| of.map(|v| v as i64));
        let [number, alignment] = [[number], [alignment as i64]];
        let attributes = [
            (attribute::TENSOR_TYPE, Value::DataType(dtype)),
            (attribute::TENSOR_SHAPE, Value::Integers(&shape)),
            (attribute::TENSOR_STRIDES, Value::Integers(&strides)),
            (attribute::TENSOR_NUMBER, Value::Integers(&number)),
            (attribute::TENSOR_ALIGNMENT, Value::Integers(&alignment)),
        ];
        Descriptor::new(gpu, Kind::Tensor, &attributes)
    }

    /// True if a kernel sums products of the operands as they are, in f32 and always in the same order.
    fn allows(&self, gpu: &Gpu, config: &Descriptor) -> Result<bool> {
        let engines = config.descriptors(gpu, attribute::CONFIG_ENGINE, Kind::Engine)?;
        let strict = self.dtype == DType::F32 && !self.tf32;
        for engine in engines {
            let notes = engine.notes(gpu, attribute::ENGINE_NOTES)?;
            let rounds = [TENSOR_CORE, DOWN_CONVERT_INPUTS].iter().any(|n| notes.contains(n));
            if notes.iter().any(|n| UNWANTED.contains(n)) || (strict && rounds) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn unsupported(gpu: &Gpu, what: &str) -> Error {
    Error::unsupported(format!("conv2d by cudnn on {}", gpu.device()), format!("not for {what}"))
}
