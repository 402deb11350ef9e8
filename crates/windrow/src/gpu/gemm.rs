//! Matrix products by the vendor's library (on AMD GPUs, if it is not used, by Windrow's own kernel): row-major,
//! strided, batched.

use super::runtime::{Handle, Outcome};
use super::{Gpu, Stream};
use crate::{DType, Error, Result};
use std::fmt::Debug;

/// The products `C[i] = op(A[i]) op(B[i])` for `i < batch`, each `m` x `k` by `k` x `n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GemmSpec {
    pub(crate) m: usize,
    pub(crate) n: usize,
    /// The number of terms of a sum, at least 1.
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

/// The layout of an operand in memory: row-major, with rows of consecutive elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrix {
    /// f32, f16 or bf16; A and B have the same, C has that or f32.
    pub(crate) dtype: DType,
    /// True if the product takes the transpose of what is stored.
    pub(crate) transposed: bool,
    /// Elements from a stored row to the next: the leading dimension.
    pub(crate) row_stride: usize,
    /// Elements from a matrix of the batch to the next; 0 uses the same matrix for the whole batch (not for C).
    pub(crate) batch_stride: usize,
    /// The alignment of its address in bytes, a power of two.
    pub(crate) alignment: usize,
}

/// The arithmetic of a product. Sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GemmCompute {
    /// Operands are not rounded.
    F32,
    /// Operands in f32 may be rounded to TF32.
    Tf32,
}

/// A [`GemmSpec`] bound to a device, with an algorithm of the vendor's library chosen.
#[derive(Debug)]
pub(crate) struct Gemm {
    gpu: &'static Gpu,
    /// `None` if there is nothing to compute.
    product: Option<Box<dyn Product>>,
}

/// A prepared [`GemmSpec`] of a backend.
pub(crate) trait Product: Debug + Send + Sync {
    /// Bytes of workspace that a run needs, aligned to 256; a multiple of 256.
    fn workspace_bytes(&self) -> usize;

    /// Computes C, or adds the products to it.
    ///
    /// # Safety
    /// As [`Gemm::run`], with the device current.
    unsafe fn run(&self, operands: GemmOperands, stream: Handle, add: bool) -> Outcome<()>;
}

/// Addresses of A, B, C and the workspace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmOperands {
    pub(crate) a: *const u8,
    pub(crate) b: *const u8,
    pub(crate) c: *mut u8,
    pub(crate) workspace: *mut u8,
}

impl Gemm {
    /// Binds a product to a device and chooses the library's algorithm.
    ///
    /// # Errors
    /// [`Error::Parameter`] for strides shorter than a row, `k` = 0, types or alignments other than
    /// those of [`Matrix`]; [`Error::Unsupported`] if the library has no algorithm; [`Error::Backend`]
    /// without the library, or if it fails.
    pub(crate) fn new(gpu: &'static Gpu, spec: &GemmSpec) -> Result<Self> {
        Self::with_order(gpu, spec, None)
    }

    /// The product as by [`Gemm::new`]. If `like` is given, each sum has the order that it has in the product `like`, which
    /// differs in `m` and `n` alone: the library's algorithm is the one that it chooses for `like`.
    ///
    /// # Errors
    /// As [`Gemm::new`]; [`Error::Unsupported`] too if the algorithm does not compute a product of this size.
    pub(crate) fn with_order(
        gpu: &'static Gpu,
        spec: &GemmSpec,
        like: Option<&GemmSpec>,
    ) -> Result<Self> {
        spec.check()?;
        if [spec.m, spec.n, spec.batch].contains(&0) {
            return Ok(Gemm { gpu, product: None });
        }
        let _current = gpu.enter()?;
        Ok(Gemm { gpu, product: Some(gpu.runtime.product(spec, like)?) })
    }

    /// Bytes of workspace that a run needs, aligned to 256; a multiple of 256, so that memory after it is aligned too.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.product.as_ref().map_or(0, |p| p.workspace_bytes())
    }

    /// Computes C on `stream`; if `add`, the products are added to what it holds. The call allocates no memory and may
    /// be captured into a graph.
    ///
    /// # Errors
    /// [`Error::Backend`].
    ///
    /// # Safety
    /// The pointers must be the spec's matrices and a workspace of [`Gemm::workspace_bytes`], on the device of this
    /// value and of the stream, alive until the work is done. C must not overlap the other memory.
    pub(crate) unsafe fn run(
        &self,
        operands: GemmOperands,
        stream: &Stream,
        add: bool,
    ) -> Result<()> {
        let Some(product) = &self.product else { return Ok(()) };
        // SAFETY: the caller's promise.
        self.gpu.call(|_| unsafe { product.run(operands, stream.as_raw(), add) })
    }
}

impl Gpu {
    /// Checks that matrix products are available. The error says what to install.
    pub(crate) fn check_gemm(&self) -> Result<()> {
        self.runtime.check_gemm()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::gpu::{DeviceBuffer, DeviceTensor};
    use crate::verification::random_tensor;
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

    /// Without a GPU and cuBLASLt, only checks that the error is typed.
    #[test]
    fn products_are_those_of_the_oracle() {
        for device in [Device::Cuda(0), Device::Hip(0)] {
            compare_with_oracle(device);
        }
    }

    fn compare_with_oracle(device: Device) {
        let Ok(gpu) = Gpu::get(device) else { return };
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
                let upload = |t: &Tensor| DeviceTensor::from_host(&t.as_ref(), device).unwrap();
                let (device_a, device_b) = (upload(&a), upload(&b));
                let desc = TensorDesc::contiguous(DType::F32, &[batch * m * n]).unwrap();
                let mut c = DeviceTensor::new(desc, device).unwrap();
                let stream = Arc::new(Stream::new(device).unwrap());
                let mut workspace = DeviceBuffer::new(&stream, gemm.workspace_bytes()).unwrap();
                let out = c.as_mut().unwrap().as_ptr().cast_mut();
                // SAFETY: the tensors are the spec's matrices, the workspace as large as asked for.
                unsafe {
                    let (a, b) = (device_a.as_ref().as_ptr(), device_b.as_ref().as_ptr());
                    let workspace = workspace.as_mut_ptr();
                    let operands = GemmOperands { a, b, c: out, workspace };
                    gemm.run(operands, &stream, false).unwrap();
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
