//! Convolutions by cuDNN, if it is installed, through its graph interface.

mod descriptor;

use self::descriptor::{Cudnn, Descriptor, Kind, State, Value, with_state};
use super::cublaslt;
use crate::dtype::by_type;
use crate::gpu::{Convolution, ConvolutionLimits, ConvolutionSpec, Handle, Operation, Outcome};
use crate::{DType, Device, Result};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

/// `cudnnDataType_t`
const FLOAT: c_int = 0;
const HALF: c_int = 2;
const BFLOAT16: c_int = 9;
/// `cudnnConvolutionMode_t`
const CROSS_CORRELATION: c_int = 1;
/// The values of `cudnnBackendHeurMode_t`: a model of speed, then a fallback for cases that the model does not know.
const HEURISTICS: [c_int; 2] = [3, 2];
/// `cudnnBackendNumericalNote_t`
const TENSOR_CORE: c_int = 0;
const DOWN_CONVERT_INPUTS: c_int = 1;
/// The notes of unwanted kernels: sums rounded to f16, transforms, bits that differ between runs.
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

/// The numbers of the tensors in a graph: w, x, y, in the order of the operations' attributes.
const NUMBERS: [i64; 3] = [1, 2, 3];

fn library() -> Result<&'static Cudnn> {
    // cuDNN opens it by bare name.
    cublaslt::available()?;
    Cudnn::get()
}

/// The library's version, as in `9.19.0`.
///
/// # Errors
/// [`Error::Backend`](crate::Error::Backend), which says what to install.
pub(super) fn version() -> Result<String> {
    library().map(Cudnn::version)
}

/// An operation by one kernel.
#[derive(Debug)]
struct Execution {
    library: &'static Cudnn,
    index: u32,
    plan: Descriptor,
    /// Held while a thread gives the plan to a stream: cuDNN does not say that two may.
    given: Mutex<()>,
    /// The descriptors of the plan, in the order in which they may be dropped.
    _config: Descriptor,
    _graph: Arc<Graph>,
    workspace_bytes: usize,
}

/// A graph of one operation.
#[derive(Debug)]
struct Graph {
    graph: Descriptor,
    /// The descriptors of the graph, in the order in which they may be dropped.
    _parts: Vec<Descriptor>,
}

/// The kernels that cuDNN's heuristic names and the spec allows, on the device of this index, which is current.
///
/// # Errors
/// [`Error::Backend`](crate::Error::Backend).
pub(super) fn find(
    index: u32,
    spec: &ConvolutionSpec,
    operation: Operation,
    limits: ConvolutionLimits,
) -> Result<Vec<Box<dyn Convolution>>> {
    let library = library()?;
    with_state(library, index, |state| executions(library, index, state, spec, operation, limits))
        .map_err(|failure| failure.on(Device::Cuda(index)))
}

fn executions(
    library: &'static Cudnn,
    index: u32,
    state: State,
    spec: &ConvolutionSpec,
    operation: Operation,
    limits: ConvolutionLimits,
) -> Outcome<Vec<Box<dyn Convolution>>> {
    let graph = Arc::new(Graph::new(library, state, spec, operation, limits.alignment)?);
    let mut found: Vec<Box<dyn Convolution>> = Vec::new();
    for mode in HEURISTICS {
        // Neither all modes nor all that they name exists for an operation.
        let Ok(configs) = configs(library, &graph.graph, mode) else { continue };
        for config in configs {
            if !allows(spec, &config)? {
                continue;
            }
            let Ok(plan) = execution_plan(library, state, &config) else { continue };
            let workspace_bytes = plan.integer(attribute::PLAN_WORKSPACE)? as usize;
            if workspace_bytes > limits.workspace {
                continue;
            }
            let _graph = graph.clone();
            let given = Mutex::default();
            found.push(Box::new(Execution {
                library,
                index,
                plan,
                given,
                _config: config,
                _graph,
                workspace_bytes,
            }));
            if found.len() == limits.most {
                return Ok(found);
            }
        }
        if !found.is_empty() {
            break;
        }
    }
    Ok(found)
}

impl Convolution for Execution {
    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    unsafe fn run(&self, tensors: [*mut u8; 3], workspace: *mut u8, stream: Handle) -> Outcome<()> {
        let workspace = if self.workspace_bytes > 0 { workspace } else { std::ptr::null_mut() };
        with_state(self.library, self.index, |state| {
            let (tensors, workspace) = (tensors.map(|t| t.cast::<c_void>()), [workspace.cast()]);
            let pack = [
                (attribute::PACK_ADDRESSES, Value::Addresses(&tensors)),
                (attribute::PACK_NUMBERS, Value::Integers(&NUMBERS)),
                (attribute::PACK_WORKSPACE, Value::Addresses(&workspace)),
            ];
            let pack = Descriptor::new(self.library, Kind::VariantPack, &pack)?;
            let _given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: the caller's promise.
            unsafe { self.plan.execute(state, &pack, stream) }
        })
    }
}

/// Kernels for a graph, with their settings, the fastest first.
fn configs(library: &'static Cudnn, graph: &Descriptor, mode: c_int) -> Outcome<Vec<Descriptor>> {
    let heuristic = [
        (attribute::HEURISTIC_GRAPH, Value::Descriptor(graph)),
        (attribute::HEURISTIC_MODE, Value::HeuristicMode(mode)),
    ];
    Descriptor::new(library, Kind::Heuristic, &heuristic)?
        .descriptors(attribute::HEURISTIC_RESULTS, Kind::EngineConfig)
}

fn execution_plan(
    library: &'static Cudnn,
    state: State,
    config: &Descriptor,
) -> Outcome<Descriptor> {
    let plan = [
        (attribute::PLAN_HANDLE, Value::State(state)),
        (attribute::PLAN_CONFIG, Value::Descriptor(config)),
    ];
    Descriptor::new(library, Kind::ExecutionPlan, &plan)
}

impl Graph {
    fn new(
        library: &'static Cudnn,
        state: State,
        spec: &ConvolutionSpec,
        operation: Operation,
        alignment: usize,
    ) -> Outcome<Self> {
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
        let convolution = Descriptor::new(library, Kind::Convolution, &convolution)?;
        let tensors = [spec.w, spec.x, spec.y];
        let mut parts = Vec::new();
        for (number, shape) in NUMBERS.into_iter().zip(tensors) {
            parts.push(tensor(library, spec, number, shape, alignment)?);
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
        let operation = Descriptor::new(library, kind, &operation)?;
        let graph = [
            (attribute::GRAPH_HANDLE, Value::State(state)),
            (attribute::GRAPH_OPERATIONS, Value::Descriptor(&operation)),
        ];
        let graph = Descriptor::new(library, Kind::Graph, &graph)?;
        parts.insert(0, convolution);
        parts.insert(0, operation);
        Ok(Graph { graph, _parts: parts })
    }
}

fn tensor(
    library: &'static Cudnn,
    spec: &ConvolutionSpec,
    number: i64,
    shape: [usize; 4],
    alignment: usize,
) -> Outcome<Descriptor> {
    let dtype = by_type!(spec.dtype, F32 => FLOAT, F16 => HALF, BF16 => BFLOAT16);
    let [_, c, h, w] = shape;
    let strides =
        if spec.channels_last { [h * w * c, 1, w * c, c] } else { [c * h * w, h * w, w, 1] };
    let [shape, strides] = [shape, strides].map(|of| of.map(|v| v as i64));
    let [number, alignment] = [[number], [alignment as i64]];
    let attributes = [
        (attribute::TENSOR_TYPE, Value::DataType(dtype)),
        (attribute::TENSOR_SHAPE, Value::Integers(&shape)),
        (attribute::TENSOR_STRIDES, Value::Integers(&strides)),
        (attribute::TENSOR_NUMBER, Value::Integers(&number)),
        (attribute::TENSOR_ALIGNMENT, Value::Integers(&alignment)),
    ];
    Descriptor::new(library, Kind::Tensor, &attributes)
}

/// True if a kernel sums products of the operands as they are, in f32 and always in the same order.
fn allows(spec: &ConvolutionSpec, config: &Descriptor) -> Outcome<bool> {
    let engines = config.descriptors(attribute::CONFIG_ENGINE, Kind::Engine)?;
    let strict = spec.dtype == DType::F32 && !spec.tf32;
    for engine in engines {
        let notes = engine.notes(attribute::ENGINE_NOTES)?;
        let rounds = [TENSOR_CORE, DOWN_CONVERT_INPUTS].iter().any(|n| notes.contains(n));
        if notes.iter().any(|n| UNWANTED.contains(n)) || (strict && rounds) {
            return Ok(false);
        }
    }
    Ok(true)
}
