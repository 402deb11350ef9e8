//! Matrix products by cuBLASLt: row-major, strided, batched.

use super::library::Library;
use super::{Gpu, Stream};
use crate::{DType, Error, Result};
use cudarc::cublaslt::sys::{self, cublasStatus_t as Status};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex};

/// The products `C[i] = op(A[i]) op(B[i])` for `i < batch`, each `m` x `k` by `k` x `n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GemmSpec {
    pub(crate) m: usize,
    pub(crate) n: usize,
    /// Terms of a sum, at least 1.
    pub(crate) k: usize,
    pub(crate) batch: usize,
    /// `m` x `k`, or `k` x `m` if transposed.
    pub(crate) a: Matrix,
    /// `k` x `n`, or `n` x `k` if transposed.
    pub(crate) b: Matrix,
    /// `m` x `n`, never transposed.
    pub(crate) c: Matrix,
    pub(crate) compute: GemmCompute,
}

/// How an operand lies in memory: row-major, rows of consecutive elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrix {
    /// f32, f16 or bf16; A and B have the same, C has that or f32.
    pub(crate) dtype: DType,
    /// True if the product takes the transpose of what is stored.
    pub(crate) transposed: bool,
    /// Elements from a stored row to the next: the leading dimension.
    pub(crate) row_stride: usize,
    /// Elements from a matrix of the batch to the next; 0 repeats one (not for C).
    pub(crate) batch_stride: usize,
    /// Bytes that its address is a multiple of, a power of two.
    pub(crate) alignment: usize,
}

/// Arithmetic of a product; sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GemmCompute {
    /// Products of the operands as they are.
    F32,
    /// f32 operands may be rounded to TF32.
    Tf32,
}

/// A [`GemmSpec`] bound to a device, with an algorithm of cuBLASLt chosen by its heuristic.
///
/// cuBLASLt counts in columns, as Fortran does: row-major memory of `A` (`m` x `k`) is, read that
/// way, `A^T` (`k` x `m`). Instead of transposing anything, the product is asked for as
/// `C^T = B^T A^T`: operands swapped, `m` and `n` swapped, and a stored transpose staying one.
#[derive(Debug)]
pub(crate) struct Gemm {
    gpu: &'static Gpu,
    /// `None` if there is nothing to compute.
    call: Option<Call>,
}

#[derive(Debug)]
struct Call {
    handle: Handle,
    operation: Operation,
    /// Of cuBLASLt's first operand, our B; of its second, our A; of the result.
    layouts: [Layout; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
}

impl Gemm {
    /// The most workspace that an algorithm may ask for: what cuBLAS itself takes on Hopper.
    const MAX_WORKSPACE: usize = 32 << 20;

    /// `Ok` if cuBLASLt was found.
    ///
    /// # Errors
    /// [`Error::Backend`], which says what to install.
    pub(crate) fn available() -> Result<()> {
        Library::CublasLt.require()
    }

    /// Chooses the algorithm.
    ///
    /// # Errors
    /// [`Error::Parameter`] for strides shorter than a row, `k` = 0, types or alignments other than
    /// those of [`Matrix`]; [`Error::Unsupported`] if cuBLASLt has no algorithm; [`Error::Backend`]
    /// without cuBLASLt, or if it fails.
    pub(crate) fn new(gpu: &'static Gpu, spec: &GemmSpec) -> Result<Self> {
        spec.check()?;
        if [spec.m, spec.n, spec.batch].contains(&0) {
            return Ok(Gemm { gpu, call: None });
        }
        let handle = Handle::of(gpu)?;
        let _current = gpu.enter()?;
        let GemmSpec { m, n, k, batch, a, b, c, compute } = *spec;
        let operation = Operation::new(gpu, compute, b.transposed, a.transposed)?;
        let layouts = [
            Layout::new(gpu, &b, if b.transposed { (k, n) } else { (n, k) }, batch)?,
            Layout::new(gpu, &a, if a.transposed { (m, k) } else { (k, m) }, batch)?,
            Layout::new(gpu, &c, (n, m), batch)?,
        ];
        let preference = Preference::new(gpu, [&b, &a, &c], Self::MAX_WORKSPACE)?;
        let mut found = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut count = 0;
        let [first, second, result] = [0, 1, 2].map(|i| layouts[i].0);
        // SAFETY: all descriptors are alive, and there is room for the one result asked for.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle.0,
                operation.0,
                first,
                second,
                result,
                result,
                preference.0,
                1,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if status == Status::CUBLAS_STATUS_NOT_SUPPORTED || count == 0 {
            return Err(Error::unsupported(
                format!("{batch} products of {m} x {k} by {k} x {n} on {}", gpu.device()),
                "cuBLASLt has no algorithm for them",
            ));
        }
        check(gpu, status, "cublasLtMatmulAlgoGetHeuristic")?;
        // SAFETY: the call wrote one result; all fields are numbers, and 0 is a status.
        let found = unsafe { found.assume_init() };
        check(gpu, found.state, "cublasLtMatmulAlgoGetHeuristic")?;
        let call = Call {
            handle,
            operation,
            layouts,
            algorithm: found.algo,
            workspace_bytes: found.workspaceSize.next_multiple_of(256),
        };
        Ok(Gemm { gpu, call: Some(call) })
    }

    /// Bytes of workspace that a run needs, aligned to 256; a multiple of 256, so that what follows is too.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.call.as_ref().map_or(0, |call| call.workspace_bytes)
    }

    /// Computes C on `stream`. Allocates nothing and may be captured into a graph.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// The pointers must be the spec's matrices, and [`Gemm::workspace_bytes`], on the device of the
    /// plan and of the stream, alive until the work is done; C may overlap nothing.
    pub(crate) unsafe fn run(
        &self,
        a: *const u8,
        b: *const u8,
        c: *mut u8,
        workspace: *mut u8,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.run_adding(a, b, c, workspace, stream, false) }
    }

    /// As [`Gemm::run`]; if `add`, the products are added to what C holds.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// As [`Gemm::run`].
    pub(crate) unsafe fn run_adding(
        &self,
        a: *const u8,
        b: *const u8,
        c: *mut u8,
        workspace: *mut u8,
        stream: &Stream,
        add: bool,
    ) -> Result<()> {
        let Some(call) = &self.call else { return Ok(()) };
        let _current = self.gpu.enter()?;
        let (one, beta) = (1f32, if add { 1f32 } else { 0f32 });
        let [first, second, result] = [0, 1, 2].map(|i| call.layouts[i].0);
        // SAFETY: the descriptors are alive, the scalars are f32 as the operation says and are read
        // before the call returns; the rest is the caller's promise.
        let status = unsafe {
            sys::cublasLtMatmul(
                call.handle.0,
                call.operation.0,
                (&raw const one).cast(),
                b.cast(),
                first,
                a.cast(),
                second,
                (&raw const beta).cast(),
                c.cast(),
                result,
                c.cast(),
                result,
                &call.algorithm,
                workspace.cast(),
                call.workspace_bytes,
                stream.handle().cast(),
            )
        };
        check(self.gpu, status, "cublasLtMatmul")
    }
}

impl GemmSpec {
    fn check(&self) -> Result<()> {
        let GemmSpec { m, n, k, batch, a, b, c, .. } = *self;
        if k == 0 {
            return Err(Error::parameter("k", k, "at least 1"));
        }
        if c.transposed {
            return Err(Error::parameter("c.transposed", true, "false"));
        }
        if !a.dtype.is_compute() || b.dtype != a.dtype || ![a.dtype, DType::F32].contains(&c.dtype)
        {
            let given = format!("{} x {} -> {}", a.dtype, b.dtype, c.dtype);
            return Err(Error::parameter("dtype", given, "f32, f16 or bf16 to the same or f32"));
        }
        for (x, rows, columns) in [(a, m, k), (b, k, n), (c, m, n)] {
            let columns = if x.transposed { rows } else { columns };
            if x.row_stride < columns.max(1) {
                let expected = format!("at least a row of {columns}");
                return Err(Error::parameter("row_stride", x.row_stride, expected));
            }
            if !x.alignment.is_power_of_two() || x.alignment < x.dtype.size() {
                let expected = "a power of two, at least an element";
                return Err(Error::parameter("alignment", x.alignment, expected));
            }
        }
        if batch > 1 && m > 0 && c.batch_stride < (m - 1) * c.row_stride + n {
            return Err(Error::parameter("batch_stride", c.batch_stride, "matrices apart"));
        }
        Ok(())
    }
}

fn check(gpu: &Gpu, status: Status, what: &str) -> Result<()> {
    if status == Status::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Error::Backend { what: what.into(), device: gpu.device(), detail: format!("{status:?}") })
}

/// cuBLASLt's state for a device. Made once, lives as long as the process, used by any thread.
#[derive(Clone, Copy, Debug)]
struct Handle(sys::cublasLtHandle_t);

// SAFETY: "the cuBLASLt handle can be used from any thread", says its documentation.
unsafe impl Send for Handle {}
// SAFETY: by several threads at once, says the same sentence.
unsafe impl Sync for Handle {}

impl Handle {
    fn of(gpu: &'static Gpu) -> Result<Self> {
        static HANDLES: LazyLock<Mutex<HashMap<u32, Handle>>> = LazyLock::new(Mutex::default);
        Library::CublasLt.require()?;
        let mut handles = HANDLES.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(handle) = handles.get(&gpu.info.index) {
            return Ok(*handle);
        }
        let _current = gpu.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library is loaded and the device current; the call writes one pointer.
        check(gpu, unsafe { sys::cublasLtCreate(&mut raw) }, "cublasLtCreate")?;
        handles.insert(gpu.info.index, Handle(raw));
        Ok(Handle(raw))
    }
}

/// A descriptor of cuBLASLt, destroyed when dropped. Read-only once made.
macro_rules! descriptor {
    ($name:ident, $raw:ty, $destroy:path) => {
        #[derive(Debug)]
        struct $name($raw);

        // SAFETY: plain memory that no call changes once it is made.
        unsafe impl Send for $name {}
        // SAFETY: threads that share it only read.
        unsafe impl Sync for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made by the constructor and not used after.
                unsafe { $destroy(self.0) };
            }
        }
    };
}

descriptor!(Operation, sys::cublasLtMatmulDesc_t, sys::cublasLtMatmulDescDestroy);
descriptor!(Layout, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayoutDestroy);
descriptor!(Preference, sys::cublasLtMatmulPreference_t, sys::cublasLtMatmulPreferenceDestroy);

/// A value as cuBLASLt's attributes take it.
fn bytes<V>(value: &V) -> (*const c_void, usize) {
    (std::ptr::from_ref(value).cast(), size_of::<V>())
}

impl Operation {
    fn new(gpu: &Gpu, compute: GemmCompute, first: bool, second: bool) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let compute = match compute {
            GemmCompute::F32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            GemmCompute::Tf32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one pointer.
        let made = unsafe {
            sys::cublasLtMatmulDescCreate(&mut raw, compute, sys::cudaDataType_t::CUDA_R_32F)
        };
        check(gpu, made, "cublasLtMatmulDescCreate")?;
        let operation = Operation(raw);
        for (attribute, transposed) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, first),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, second),
        ] {
            // cublasOperation_t: N, T.
            let value = i32::from(transposed);
            let (value, size) = bytes(&value);
            // SAFETY: the descriptor is alive and the value of the attribute's size.
            let set =
                unsafe { sys::cublasLtMatmulDescSetAttribute(operation.0, attribute, value, size) };
            check(gpu, set, "cublasLtMatmulDescSetAttribute")?;
        }
        Ok(operation)
    }
}

impl Layout {
    /// Of column-major `rows` x `columns`.
    fn new(gpu: &Gpu, x: &Matrix, (rows, columns): (usize, usize), batch: usize) -> Result<Self> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        use sys::cudaDataType_t as Type;
        let dtype = match x.dtype {
            DType::F16 => Type::CUDA_R_16F,
            DType::BF16 => Type::CUDA_R_16BF,
            DType::F32 => Type::CUDA_R_32F,
            DType::F64 | DType::I32 | DType::I64 => {
                unreachable!("specs allow f32, f16 and bf16")
            }
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one pointer.
        let made = unsafe {
            let stride = x.row_stride as i64;
            sys::cublasLtMatrixLayoutCreate(&mut raw, dtype, rows as u64, columns as u64, stride)
        };
        check(gpu, made, "cublasLtMatrixLayoutCreate")?;
        let layout = Layout(raw);
        let count = i32::try_from(batch)
            .map_err(|_| Error::parameter("batch", batch, "below 2^31 products"))?;
        let stride = x.batch_stride as i64;
        for (attribute, (value, size)) in [
            (Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, bytes(&count)),
            (Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, bytes(&stride)),
        ] {
            // SAFETY: the descriptor is alive and the values of the attributes' sizes.
            let set =
                unsafe { sys::cublasLtMatrixLayoutSetAttribute(layout.0, attribute, value, size) };
            check(gpu, set, "cublasLtMatrixLayoutSetAttribute")?;
        }
        Ok(layout)
    }
}

impl Preference {
    fn new(gpu: &Gpu, operands: [&Matrix; 3], workspace: usize) -> Result<Self> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call writes one pointer.
        let made = unsafe { sys::cublasLtMatmulPreferenceCreate(&mut raw) };
        check(gpu, made, "cublasLtMatmulPreferenceCreate")?;
        let preference = Preference(raw);
        // Where a sum is split, its parts stay f32 and are added in a fixed order.
        let reduction =
            sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let alignments = operands.map(|x| x.alignment.min(256) as u32);
        for (attribute, (value, size)) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes(&workspace)),
            (Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, bytes(&reduction)),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, bytes(&alignments[0])),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, bytes(&alignments[1])),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, bytes(&alignments[2])),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, bytes(&alignments[2])),
        ] {
            // SAFETY: the descriptor is alive and the values of the attributes' sizes.
            let set = unsafe {
                sys::cublasLtMatmulPreferenceSetAttribute(preference.0, attribute, value, size)
            };
            check(gpu, set, "cublasLtMatmulPreferenceSetAttribute")?;
        }
        Ok(preference)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{DeviceBuffer, DeviceTensor};
    use crate::verify::random_tensor;
    use crate::{Tensor, TensorDesc};
    use std::sync::Arc;

    fn matrix(dtype: DType, transposed: bool, [rows, columns]: [usize; 2]) -> Matrix {
        let row_stride = if transposed { rows } else { columns };
        Matrix { dtype, transposed, row_stride, batch_stride: rows * columns, alignment: 256 }
    }

    fn spec(dtype: DType, ta: bool, tb: bool) -> GemmSpec {
        let (m, n, k) = (24, 40, 16);
        GemmSpec {
            m,
            n,
            k,
            batch: 3,
            a: matrix(dtype, ta, [m, k]),
            b: matrix(dtype, tb, [k, n]),
            c: matrix(DType::F32, false, [m, n]),
            compute: GemmCompute::F32,
        }
    }

    #[test]
    fn a_wrong_spec_is_an_error() {
        let good = spec(DType::F32, false, false);
        assert!(good.check().is_ok());
        let change = |f: fn(&mut GemmSpec)| {
            let mut bad = good;
            f(&mut bad);
            matches!(bad.check(), Err(Error::Parameter { .. }))
        };
        assert!(change(|s| s.k = 0));
        assert!(change(|s| s.a.row_stride = 15));
        assert!(change(|s| s.b.dtype = DType::F16));
        assert!(change(|s| s.a.dtype = DType::I32));
        assert!(change(|s| s.c.dtype = DType::F16));
        assert!(change(|s| s.c.transposed = true));
        assert!(change(|s| s.c.batch_stride = 1));
        assert!(change(|s| s.b.alignment = 2));
        assert!(change(|s| s.b.alignment = 12));
    }

    /// Nothing without a device and cuBLASLt: then the error is typed.
    #[test]
    fn products_are_those_of_the_oracle() {
        let Ok(gpu) = Gpu::get(0) else { return };
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
                let spec = spec(dtype, ta, tb);
                let gemm = match Gemm::new(gpu, &spec) {
                    Ok(gemm) => gemm,
                    Err(error) => {
                        return assert!(matches!(error, Error::Backend { .. }), "{error}");
                    }
                };
                let random = |seed, elements: usize| {
                    let desc = TensorDesc::contiguous(dtype, &[elements]).unwrap();
                    random_tensor(seed, desc, -1.0, 1.0).unwrap()
                };
                let GemmSpec { m, n, k, batch, .. } = spec;
                let (a, b) = (random(1, batch * m * k), random(2, batch * k * n));
                let upload = |t: &Tensor| DeviceTensor::from_host(&t.as_ref(), 0).unwrap();
                let (device_a, device_b) = (upload(&a), upload(&b));
                let desc = TensorDesc::contiguous(DType::F32, &[batch * m * n]).unwrap();
                let mut c = DeviceTensor::new(desc, 0).unwrap();
                let stream = Arc::new(Stream::new(0).unwrap());
                let mut workspace = DeviceBuffer::new(&stream, gemm.workspace_bytes()).unwrap();
                let out = c.as_mut().unwrap().as_ptr().cast_mut();
                // SAFETY: the tensors are the spec's matrices, the workspace as large as asked for.
                unsafe {
                    let (a, b) = (device_a.as_ref().as_ptr(), device_b.as_ref().as_ptr());
                    gemm.run(a, b, out, workspace.as_mut_ptr(), &stream).unwrap();
                }
                stream.synchronize().unwrap();
                let got = c.to_host().unwrap().as_ref().to_f64_vec().unwrap();
                let (a, b) = (a.as_ref().to_f64_vec().unwrap(), b.as_ref().to_f64_vec().unwrap());
                for (i, got) in got.iter().enumerate() {
                    let (z, row, column) = (i / (m * n), i / n % m, i % n);
                    let term = |d: usize| {
                        let x = if ta { d * m + row } else { row * k + d };
                        let y = if tb { column * k + d } else { d * n + column };
                        a[z * m * k + x] * b[z * k * n + y]
                    };
                    let want: f64 = (0..k).map(term).sum();
                    assert!((got - want).abs() < 1e-5, "{dtype} {ta} {tb}");
                }
            }
        }
    }
}
