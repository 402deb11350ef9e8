//! The way from ONNX Runtime's calls to kernels in Rust.

use crate::api::{Api, FAIL, KernelContext, KernelInfo, Status, Table, VERSION};
use crate::tensors::{Attributes, Tensors};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null, null_mut};

/// A kernel that computes the nodes of one operator. A session makes one for each node, and may run it on several
/// threads.
pub(crate) trait Kernel: Sized + Send + Sync + 'static {
    const NAME: &'static CStr;
    /// For each input, whether a node must have it.
    const INPUTS: &'static [bool];
    /// The inputs of i32. All others, and the outputs, are of the element type of the operator's form.
    const INDICES: &'static [usize] = &[];
    const OUTPUTS: usize;
    /// The outputs that a node need not have: the last ones.
    const OPTIONAL_OUTPUTS: usize = 0;

    /// Reads a node's attributes.
    fn new(attributes: &Attributes<'_>) -> Outcome<Self>;

    fn compute(&self, tensors: &Tensors<'_>) -> Outcome<()>;
}

/// An error is a status of ONNX Runtime, or becomes one.
pub(crate) type Outcome<T> = Result<T, Failure>;

#[derive(Debug)]
pub(crate) enum Failure {
    /// The status of a call of ONNX Runtime.
    Status(*mut Status),
    /// `OrtErrorCode`, and what to say.
    Said(c_int, String),
}

impl From<*mut Status> for Failure {
    fn from(status: *mut Status) -> Self {
        Failure::Status(status)
    }
}

impl From<windrow::Error> for Failure {
    fn from(error: windrow::Error) -> Self {
        use windrow::Error as E;
        let code = match &error {
            E::Unsupported { .. } => crate::api::NOT_IMPLEMENTED,
            E::Rank { .. } | E::Shape { .. } | E::DType { .. } | E::Parameter { .. } => {
                crate::api::INVALID_ARGUMENT
            }
            _ => FAIL,
        };
        Failure::Said(code, error.to_string())
    }
}

/// The element types of operators, as `ONNXTensorElementDataType` numbers them: f32, f16, bf16.
const ELEMENTS: [c_int; 3] = [1, 10, 16];
/// The element type of indices: i32.
const INDEX: c_int = 6;

/// `OrtCustomOp`, and the element type of this one of an operator's forms.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CustomOp {
    version: u32,
    /// The function before version 16.
    create_kernel: Option<
        unsafe extern "C" fn(*const CustomOp, *const Table, *const KernelInfo) -> *mut c_void,
    >,
    get_name: unsafe extern "C" fn(*const CustomOp) -> *const c_char,
    get_execution_provider_type: unsafe extern "C" fn(*const CustomOp) -> *const c_char,
    get_input_type: unsafe extern "C" fn(*const CustomOp, usize) -> c_int,
    get_input_type_count: unsafe extern "C" fn(*const CustomOp) -> usize,
    get_output_type: unsafe extern "C" fn(*const CustomOp, usize) -> c_int,
    get_output_type_count: unsafe extern "C" fn(*const CustomOp) -> usize,
    /// The function before version 16.
    kernel_compute: Option<unsafe extern "C" fn(*mut c_void, *mut KernelContext)>,
    kernel_destroy: unsafe extern "C" fn(*mut c_void),
    get_input_characteristic: unsafe extern "C" fn(*const CustomOp, usize) -> c_int,
    get_output_characteristic: unsafe extern "C" fn(*const CustomOp, usize) -> c_int,
    get_input_memory_type: unsafe extern "C" fn(*const CustomOp, usize) -> c_int,
    /// The four functions for operators with any number of inputs or outputs.
    get_variadic_input_min_arity: unsafe extern "C" fn(*const CustomOp) -> c_int,
    get_variadic_input_homogeneity: unsafe extern "C" fn(*const CustomOp) -> c_int,
    get_variadic_output_min_arity: unsafe extern "C" fn(*const CustomOp) -> c_int,
    get_variadic_output_homogeneity: unsafe extern "C" fn(*const CustomOp) -> c_int,
    create_kernel_v2: unsafe extern "C" fn(
        *const CustomOp,
        *const Table,
        *const KernelInfo,
        *mut *mut c_void,
    ) -> *mut Status,
    kernel_compute_v2: unsafe extern "C" fn(*mut c_void, *mut KernelContext) -> *mut Status,
    element: c_int,
}

/// An operator for each element type.
pub(crate) const fn custom_ops<K: Kernel>() -> [CustomOp; 3] {
    [custom_op::<K>(ELEMENTS[0]), custom_op::<K>(ELEMENTS[1]), custom_op::<K>(ELEMENTS[2])]
}

const fn custom_op<K: Kernel>(element: c_int) -> CustomOp {
    CustomOp {
        version: VERSION,
        create_kernel: None,
        get_name: name::<K>,
        get_execution_provider_type: on_the_cpu,
        get_input_type: input_type::<K>,
        get_input_type_count: inputs::<K>,
        get_output_type: element_type,
        get_output_type_count: outputs::<K>,
        kernel_compute: None,
        kernel_destroy: destroy::<K>,
        get_input_characteristic: is_optional::<K>,
        get_output_characteristic: is_optional_output::<K>,
        get_input_memory_type: of_the_device,
        get_variadic_input_min_arity: one,
        get_variadic_input_homogeneity: one,
        get_variadic_output_min_arity: one,
        get_variadic_output_homogeneity: one,
        create_kernel_v2: create::<K>,
        kernel_compute_v2: compute::<K>,
        element,
    }
}

/// A node's kernel, with the functions that its runs call.
struct Node<K> {
    api: Api,
    kernel: K,
}

unsafe extern "C" fn name<K: Kernel>(_: *const CustomOp) -> *const c_char {
    K::NAME.as_ptr()
}

unsafe extern "C" fn on_the_cpu(_: *const CustomOp) -> *const c_char {
    null()
}

unsafe extern "C" fn input_type<K: Kernel>(op: *const CustomOp, index: usize) -> c_int {
    match K::INDICES.contains(&index) {
        true => INDEX,
        // SAFETY: ONNX Runtime gives what was registered.
        false => unsafe { element_type(op, index) },
    }
}

unsafe extern "C" fn element_type(op: *const CustomOp, _: usize) -> c_int {
    // SAFETY: ONNX Runtime gives what was registered.
    unsafe { (*op).element }
}

unsafe extern "C" fn inputs<K: Kernel>(_: *const CustomOp) -> usize {
    K::INPUTS.len()
}

unsafe extern "C" fn outputs<K: Kernel>(_: *const CustomOp) -> usize {
    K::OUTPUTS
}

unsafe extern "C" fn is_optional<K: Kernel>(_: *const CustomOp, index: usize) -> c_int {
    (K::INPUTS.get(index) == Some(&false)).into()
}

unsafe extern "C" fn is_optional_output<K: Kernel>(_: *const CustomOp, index: usize) -> c_int {
    (index >= K::OUTPUTS - K::OPTIONAL_OUTPUTS).into()
}

/// `OrtMemTypeDefault`.
unsafe extern "C" fn of_the_device(_: *const CustomOp, _: usize) -> c_int {
    0
}

unsafe extern "C" fn one(_: *const CustomOp) -> c_int {
    1
}

unsafe extern "C" fn create<K: Kernel>(
    _: *const CustomOp,
    table: *const Table,
    info: *const KernelInfo,
    out: *mut *mut c_void,
) -> *mut Status {
    let api = Api::given(table);
    status(&api, || {
        // SAFETY: the node's information lives as long as this call.
        let kernel = K::new(&unsafe { Attributes::of(&api, info) })?;
        // SAFETY: ONNX Runtime gives room for an address.
        unsafe { *out = Box::into_raw(Box::new(Node { api, kernel })).cast() };
        Ok(())
    })
}

unsafe extern "C" fn compute<K: Kernel>(
    kernel: *mut c_void,
    context: *mut KernelContext,
) -> *mut Status {
    // SAFETY: what `create` has made and `destroy` has not been given yet; it is only read.
    let node = unsafe { &*kernel.cast::<Node<K>>() };
    status(&node.api, || {
        // SAFETY: the context lives as long as this call.
        node.kernel.compute(&unsafe { Tensors::of(&node.api, context) })
    })
}

unsafe extern "C" fn destroy<K: Kernel>(kernel: *mut c_void) {
    // SAFETY: what `create` has made; this is the last that happens to it.
    drop(unsafe { Box::from_raw(kernel.cast::<Node<K>>()) });
}

/// Null, or what went wrong. Nothing unwinds into ONNX Runtime.
fn status(api: &Api, call: impl FnOnce() -> Outcome<()>) -> *mut Status {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => null_mut(),
        Ok(Err(Failure::Status(status))) => status,
        Ok(Err(Failure::Said(code, message))) => api.status(code, &message),
        Err(_) => api.status(FAIL, "windrow panicked"),
    }
}
