//! Matrix products by rocBLAS, if it is installed.
//!
//! No AMD device has run it: what stands in for it in tests does what its documentation says. It counts in columns, so the
//! product is asked for as `C^T = B^T A^T`, as of cuBLASLt.

use super::rocm;
use crate::dtype::by_type;
use crate::gpu::library::{Library, describe, library};
use crate::gpu::made;
use crate::gpu::{GemmOperands, GemmSpec, Handle, Outcome, Product};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// The architectures for which all of its versions are built, from ROCm 6 or from the first version that supports the
/// architecture. On others it may end the process.
pub(super) const CHIPS: [&str; 3] = ["gfx90a", "gfx942", "gfx950"];

/// The library of ROCm 7 and 6.
static LIBROCBLAS: Library = Library { versions: &["", ".5", ".4"], ..rocm("librocblas.so") };

library! {
    /// rocBLAS.
    pub(super) struct Rocblas in LIBROCBLAS;

    fn rocblas_status_to_string(status: c_int) -> *const c_char;
    fn rocblas_create_handle(handle: *mut Handle);
    fn rocblas_set_stream(handle: Handle, stream: Handle);
    fn rocblas_set_atomics_mode(handle: Handle, mode: c_int);
    fn rocblas_set_workspace(handle: Handle, memory: *mut c_void, bytes: usize);
    fn rocblas_start_device_memory_size_query(handle: Handle);
    fn rocblas_stop_device_memory_size_query(handle: Handle, bytes: *mut usize);
    fn rocblas_gemm_strided_batched_ex(
        handle: Handle,
        a_operation: c_int,
        b_operation: c_int,
        m: c_int,
        n: c_int,
        k: c_int,
        alpha: *const c_void,
        a: *const c_void,
        a_type: c_int,
        a_leading: c_int,
        a_stride: i64,
        b: *const c_void,
        b_type: c_int,
        b_leading: c_int,
        b_stride: i64,
        beta: *const c_void,
        c: *const c_void,
        c_type: c_int,
        c_leading: c_int,
        c_stride: i64,
        d: *mut c_void,
        d_type: c_int,
        d_leading: c_int,
        d_stride: i64,
        batch: c_int,
        compute_type: c_int,
        algorithm: c_int,
        solution: i32,
        flags: c_uint,
    );
}

describe!(Rocblas by rocblas_status_to_string);

/// `rocblas_operation`: as stored, and transposed.
const OPERATIONS: [c_int; 2] = [111, 112];
/// `rocblas_atomics_mode`: the same bits each time.
const NO_ATOMICS: c_int = 0;
/// `rocblas_datatype`
const F32: c_int = 151;

/// A [`GemmSpec`] of sizes that rocBLAS counts.
#[derive(Debug)]
pub(super) struct RocblasProduct {
    library: &'static Rocblas,
    state: &'static Mutex<usize>,
    spec: GemmSpec,
    sizes: Sizes,
    workspace_bytes: usize,
}

/// The matrices as rocBLAS takes them: its first operand (our B), its second (our A), and the result.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    m: c_int,
    n: c_int,
    k: c_int,
    batch: c_int,
    leading: [c_int; 3],
    strides: [i64; 3],
}

impl Sizes {
    /// `None` if a number is too large.
    fn of(spec: &GemmSpec) -> Option<Self> {
        let GemmSpec { m, n, k, batch, a, b, c, .. } = *spec;
        let [first, second, result] = [b, a, c].map(|x| c_int::try_from(x.row_stride));
        let [m, n, k, batch] = [n, m, k, batch].map(c_int::try_from);
        Some(Sizes {
            m: m.ok()?,
            n: n.ok()?,
            k: k.ok()?,
            batch: batch.ok()?,
            leading: [first.ok()?, second.ok()?, result.ok()?],
            strides: [b, a, c].map(|x| x.batch_stride as i64),
        })
    }
}

impl RocblasProduct {
    /// The product on the device of this index, which is current; `None` if rocBLAS cannot count so far.
    ///
    /// # Errors
    /// What rocBLAS says.
    pub(super) fn new(
        library: &'static Rocblas,
        index: u32,
        spec: &GemmSpec,
    ) -> Outcome<Option<Self>> {
        let Some(sizes) = Sizes::of(spec) else { return Ok(None) };
        let state = state(library, index)?;
        let mut product = RocblasProduct { library, state, spec: *spec, sizes, workspace_bytes: 0 };
        let handle = product.handle();
        let nowhere = std::ptr::null_mut();
        let operands = GemmOperands { a: nowhere, b: nowhere, c: nowhere, workspace: nowhere };
        let mut bytes = 0;
        // SAFETY: the handle is ours alone now. Between the two calls nothing is computed, and no address is looked at.
        unsafe {
            library.rocblas_start_device_memory_size_query(handle.raw())?;
            let asked = product.call(&handle, operands, false);
            library.rocblas_stop_device_memory_size_query(handle.raw(), &mut bytes)?;
            // The answers to a question: the size has grown, or has not.
            if let Err(failure) = asked
                && ![9, 10].contains(&failure.status)
            {
                return Err(failure);
            }
        }
        product.workspace_bytes = bytes.next_multiple_of(256);
        Ok(Some(product))
    }

    fn handle(&self) -> State {
        State(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// # Safety
    /// As [`Product::run`].
    unsafe fn call(&self, handle: &State, operands: GemmOperands, add: bool) -> Outcome<()> {
        let Sizes { m, n, k, batch, leading, strides } = self.sizes;
        let GemmSpec { a, b, c, .. } = self.spec;
        let (one, beta) = (1f32, if add { 1f32 } else { 0f32 });
        // `rocblas_datatype`
        let [first, second, result] =
            [b, a, c].map(|x| by_type!(x.dtype, F32 => F32, F16 => 150, BF16 => 168));
        let [of_first, of_second] = [b, a].map(|x| OPERATIONS[usize::from(x.transposed)]);
        let to = operands.c.cast();
        // SAFETY: the scalars are f32 as the type of the computation says and are read before the call returns; the rest
        // is the caller's promise.
        unsafe {
            self.library.rocblas_gemm_strided_batched_ex(
                handle.raw(),
                of_first,
                of_second,
                m,
                n,
                k,
                (&raw const one).cast(),
                operands.b.cast(),
                first,
                leading[0],
                strides[0],
                operands.a.cast(),
                second,
                leading[1],
                strides[1],
                (&raw const beta).cast(),
                to,
                result,
                leading[2],
                strides[2],
                to,
                result,
                leading[2],
                strides[2],
                batch,
                F32,
                0,
                0,
                0,
            )
        }
    }
}

impl Product for RocblasProduct {
    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    unsafe fn run(&self, operands: GemmOperands, stream: Handle, add: bool) -> Outcome<()> {
        let handle = self.handle();
        let (memory, bytes) = (operands.workspace.cast(), self.workspace_bytes);
        // SAFETY: the handle is ours alone until the product is in the stream; the rest is the caller's promise.
        unsafe {
            self.library.rocblas_set_stream(handle.raw(), stream)?;
            if bytes > 0 {
                self.library.rocblas_set_workspace(handle.raw(), memory, bytes)?;
            }
            self.call(&handle, operands, add)
        }
    }
}

/// rocBLAS's state for a device, which one thread at a time may use.
struct State(MutexGuard<'static, usize>);

impl State {
    fn raw(&self) -> Handle {
        *self.0 as Handle
    }
}

/// The state of a device, which is current. Made once, it lives as long as the process.
fn state(library: &Rocblas, index: u32) -> Outcome<&'static Mutex<usize>> {
    static STATES: LazyLock<Mutex<HashMap<u32, &'static Mutex<usize>>>> =
        LazyLock::new(Mutex::default);
    let mut states = STATES.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(match states.get(&index) {
        Some(state) => state,
        None => {
            // SAFETY: the device is current; the call writes one pointer.
            let raw = made(|raw| unsafe { library.rocblas_create_handle(raw) })?;
            // SAFETY: the handle was made now.
            unsafe { library.rocblas_set_atomics_mode(raw, NO_ATOMICS)? };
            states.entry(index).or_insert(Box::leak(Box::new(Mutex::new(raw as usize))))
        }
    })
}
