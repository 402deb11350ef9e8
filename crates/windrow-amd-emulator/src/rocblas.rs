//! The functions of librocblas: products of matrices as its documentation describes them, by plain loops.

use crate::Fault;
use crate::float::{f, from_half, to_half};
use crate::memory::Ranges;
use crate::runtime::{Handle, Work, boxed, functions, give};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// `rocblas_status`
const MEMORY: c_int = 5;
const SIZE_INCREASED: c_int = 9;
const INVALID_VALUE: c_int = 11;

/// The workspace that each product asks for, so that callers have to provide it.
const WORKSPACE: usize = 1024;

/// State of a caller.
struct State {
    stream: Handle,
    /// Whether products are asked for what they need, and what that was so far.
    asked: Option<usize>,
    workspace: usize,
}

/// `rocblas_datatype`: f16, f32, bf16.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Type {
    F16,
    F32,
    Bf16,
}

impl Type {
    fn of(code: c_int) -> Option<Self> {
        match code {
            150 => Some(Type::F16),
            151 => Some(Type::F32),
            168 => Some(Type::Bf16),
            _ => None,
        }
    }

    fn bytes(self) -> usize {
        if self == Type::F32 { 4 } else { 2 }
    }
}

/// A matrix of a batch, in columns.
#[derive(Clone, Copy, Debug)]
struct Matrix {
    address: usize,
    dtype: Type,
    /// Elements from a column to the next, and from a matrix to the next.
    leading: usize,
    stride: usize,
    transposed: bool,
}

impl Matrix {
    /// Address of an element of the matrix as it is used.
    fn at(&self, matrix: usize, row: usize, column: usize) -> usize {
        let (row, column) = if self.transposed { (column, row) } else { (row, column) };
        self.address + (matrix * self.stride + column * self.leading + row) * self.dtype.bytes()
    }

    /// # Safety
    /// The element is the caller's.
    unsafe fn read(&self, at: usize) -> f64 {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                Type::F32 => std::ptr::with_exposed_provenance::<f32>(at).read_unaligned().into(),
                half => {
                    let bits =
                        u32::from(std::ptr::with_exposed_provenance::<u16>(at).read_unaligned());
                    (if half == Type::F16 { from_half(bits) } else { f(bits << 16) }).into()
                }
            }
        }
    }

    /// # Safety
    /// As [`Matrix::read`].
    unsafe fn write(&self, at: usize, value: f64) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                Type::F32 => {
                    std::ptr::with_exposed_provenance_mut::<f32>(at).write_unaligned(value as f32)
                }
                Type::F16 => {
                    std::ptr::with_exposed_provenance_mut::<u16>(at)
                        .write_unaligned(to_half(value) as u16);
                }
                Type::Bf16 => {
                    let rounded = half::bf16::from_f64(value).to_bits();
                    std::ptr::with_exposed_provenance_mut::<u16>(at).write_unaligned(rounded);
                }
            }
        }
    }
}

/// `D = alpha A B + beta C`.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    sizes: [usize; 4],
    alpha: f32,
    beta: f32,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    d: Matrix,
}

impl Product {
    pub(crate) fn run(&self) -> Result<(), Fault> {
        let [m, n, k, batch] = self.sizes;
        let ranges = Ranges::now(&[]);
        let inside = |x: &Matrix, at: usize| {
            if ranges.hold(at, x.dtype.bytes()) {
                return Ok(at);
            }
            Err(Fault::new(format!("rocblas_gemm_strided_batched_ex: {at:#x} is in no allocation")))
        };
        for i in 0..batch * n * m {
            let (matrix, column, row) = (i / m / n, i / m % n, i % m);
            let mut sum = 0.0;
            for depth in 0..k {
                let left = inside(&self.a, self.a.at(matrix, row, depth))?;
                let right = inside(&self.b, self.b.at(matrix, depth, column))?;
                // SAFETY: of allocations.
                sum += unsafe { self.a.read(left) * self.b.read(right) };
            }
            let mut result = f64::from(self.alpha) * sum;
            if self.beta != 0.0 {
                let addend = inside(&self.c, self.c.at(matrix, row, column))?;
                // SAFETY: of an allocation.
                result += f64::from(self.beta) * unsafe { self.c.read(addend) };
            }
            let to = inside(&self.d, self.d.at(matrix, row, column))?;
            // SAFETY: of an allocation.
            unsafe { self.d.write(to, result) };
        }
        Ok(())
    }
}

/// # Safety
/// A handle of [`rocblas_create_handle`], which nobody else uses now.
unsafe fn state<'a>(handle: Handle) -> &'a mut State {
    // SAFETY: the caller's promise.
    unsafe { &mut *handle.cast::<State>() }
}

/// A name for a status.
#[unsafe(no_mangle)]
pub extern "C" fn rocblas_status_to_string(status: c_int) -> *const c_char {
    let name = match status {
        MEMORY => c"rocblas_status_memory_error",
        SIZE_INCREASED => c"rocblas_status_size_increased",
        INVALID_VALUE => c"rocblas_status_invalid_value",
        _ => c"rocblas_status_internal_error",
    };
    name.as_ptr()
}

functions! {
    /// State for the device.
    fn rocblas_create_handle(handle: *mut Handle) {
        handle.write(boxed(State { stream: std::ptr::null_mut(), asked: None, workspace: 0 }));
        0
    }

    /// Products go there from here on.
    fn rocblas_set_stream(handle: Handle, stream: Handle) {
        state(handle).stream = stream;
        0
    }

    /// Sums are in order anyway.
    fn rocblas_set_atomics_mode(_handle: Handle, mode: c_int) { if mode == 0 { 0 } else { INVALID_VALUE } }

    /// Memory of the caller's.
    fn rocblas_set_workspace(handle: Handle, memory: *mut c_void, bytes: usize) {
        let is_there = Ranges::now(&[]).hold(memory.addr(), bytes);
        state(handle).workspace = if is_there { bytes } else { 0 };
        if is_there { 0 } else { MEMORY }
    }

    /// Products say what they need from here on, and do nothing.
    fn rocblas_start_device_memory_size_query(handle: Handle) {
        state(handle).asked = Some(0);
        0
    }

    /// The most that one of them needs.
    fn rocblas_stop_device_memory_size_query(handle: Handle, bytes: *mut usize) {
        bytes.write(state(handle).asked.take().unwrap_or(0));
        0
    }

    /// `D = alpha op(A) op(B) + beta C` of each matrix of a batch.
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
        _algorithm: c_int,
        _solution: i32,
        _flags: c_uint,
    ) {
        let state = state(handle);
        if let Some(bytes) = &mut state.asked {
            *bytes = WORKSPACE;
            return SIZE_INCREASED;
        }
        if state.workspace < WORKSPACE {
            return MEMORY;
        }
        let matrix = |address: usize, dtype: c_int, leading: c_int, stride: i64, operation: c_int| {
            let transposed = match operation {
                111 => false,
                112 => true,
                _ => return None,
            };
            let (leading, stride) = (leading.try_into().ok()?, stride.try_into().ok()?);
            Some(Matrix { address, dtype: Type::of(dtype)?, leading, stride, transposed })
        };
        let made = || {
            let [m, n, k, batch] = [m, n, k, batch].map(usize::try_from);
            Some(Product {
                sizes: [m.ok()?, n.ok()?, k.ok()?, batch.ok()?],
                alpha: alpha.cast::<f32>().read(),
                beta: beta.cast::<f32>().read(),
                a: matrix(a.expose_provenance(), a_type, a_leading, a_stride, a_operation)?,
                b: matrix(b.expose_provenance(), b_type, b_leading, b_stride, b_operation)?,
                c: matrix(c.expose_provenance(), c_type, c_leading, c_stride, 111)?,
                d: matrix(d.expose_provenance(), d_type, d_leading, d_stride, 111)?,
            })
        };
        match made().filter(|_| Type::of(compute_type) == Some(Type::F32)) {
            Some(product) => give(state.stream, Work::Product(product)),
            None => INVALID_VALUE,
        }
    }
}
