//! Convolutions by the vendor's library (cuDNN), if it is installed.

mod fastest;

use super::runtime::{ConvolutionLimits, Handle, Outcome};
use super::{Gpu, Stream};
use crate::{DType, Error, Result};
use std::fmt::Debug;

/// `y = conv2d(x, w)` without bias. x, w and y have the same type and are dense. x and y lie in memory as [n, c, h, w]
/// or, with `channels_last`, as [n, h, w, c], and the filter as [k, c/groups, r, s] or [k, r, s, c/groups].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConvolutionSpec {
    /// The type: f32, f16 or bf16. Sums are f32.
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
    /// True if f32 operands may be rounded to TF32.
    pub(crate) tf32: bool,
}

/// Which of the library's kernels to use. All of these kernels sum in f32, round operands no more than the spec allows,
/// and are deterministic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The one that the library expects to be fastest.
    First,
    /// The fastest of the first few, measured once per process for each spec.
    Fastest,
}

/// Which tensor of a [`ConvolutionSpec`] to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// y, from x and w.
    Forward,
    /// The gradient of x, from w and the gradient of y.
    BackwardData,
    /// The gradient of w, from x and the gradient of y.
    BackwardFilter,
}

/// A prepared operation of a backend: one kernel.
pub(crate) trait Convolution: Debug + Send + Sync {
    /// Bytes of workspace that a run needs, aligned to 256.
    fn workspace_bytes(&self) -> usize;

    /// Computes the operation on w, x and y.
    ///
    /// # Safety
    /// As [`VendorConvolution::run`], with the device current.
    unsafe fn run(&self, tensors: [*mut u8; 3], workspace: *mut u8, stream: Handle) -> Outcome<()>;
}

/// The maximum workspace of a kernel in bytes.
const MAX_WORKSPACE: usize = 1 << 30;

/// An operation bound to a device and a kernel.
#[derive(Debug)]
pub(crate) struct VendorConvolution {
    gpu: &'static Gpu,
    aligned: Box<dyn Convolution>,
    /// The kernel for tensors that are not aligned to [`ALIGNMENT`](Self::ALIGNMENT), or the error if there is none.
    unaligned: Result<Box<dyn Convolution>>,
}

impl VendorConvolution {
    /// The alignment in bytes that the library's fast kernels need.
    pub(crate) const ALIGNMENT: usize = 16;

    /// Binds an operation to a device and chooses the library's kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for tensors with 2^31 elements or more, and if the library has no kernel;
    /// [`Error::Backend`] without the library, or if it fails.
    pub(crate) fn new(
        gpu: &'static Gpu,
        spec: &ConvolutionSpec,
        operation: Operation,
        choice: Choice,
    ) -> Result<Self> {
        let limits = |alignment, workspace, most| ConvolutionLimits { alignment, workspace, most };
        let find = |most| find(gpu, spec, operation, limits(Self::ALIGNMENT, MAX_WORKSPACE, most));
        let aligned = match choice {
            Choice::First => find(1)?.swap_remove(0),
            Choice::Fastest => fastest::of(gpu, spec, find)?,
        };
        let workspace = aligned.workspace_bytes();
        let unaligned = self::find(gpu, spec, operation, limits(spec.dtype.size(), workspace, 1))
            .map(|mut found| found.swap_remove(0));
        Ok(VendorConvolution { gpu, aligned, unaligned })
    }

    /// Checks that there is a forward kernel for a spec; takes less time than [`VendorConvolution::new`].
    ///
    /// # Errors
    /// As [`VendorConvolution::new`].
    pub(crate) fn check(gpu: &'static Gpu, spec: &ConvolutionSpec) -> Result<()> {
        let (alignment, workspace) = (Self::ALIGNMENT, MAX_WORKSPACE);
        let limits = ConvolutionLimits { alignment, workspace, most: 1 };
        find(gpu, spec, Operation::Forward, limits).map(drop)
    }

    /// Bytes of workspace that a run needs, aligned to 256.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.aligned.workspace_bytes()
    }

    /// True if there is a kernel for tensors at these addresses; there may be none for addresses that are not aligned
    /// to 16 bytes.
    pub(crate) fn takes(&self, tensors: [*const u8; 3]) -> bool {
        self.unaligned.is_ok() || is_aligned(tensors)
    }

    /// Computes, on `stream`, one of `tensors` from the other two. They are w, x and y, or their gradients. The call
    /// allocates no GPU memory and may be captured into a graph.
    ///
    /// # Errors
    /// [`Error::Backend`]; [`Error::Unsupported`] for addresses that it does not [take](Self::takes).
    ///
    /// # Safety
    /// The pointers must be the spec's tensors and a workspace of [`VendorConvolution::workspace_bytes`], on the device
    /// of this value and of the stream, alive until the work is done. The tensor that is written must not overlap
    /// another.
    pub(crate) unsafe fn run(
        &self,
        tensors: [*mut u8; 3],
        workspace: *mut u8,
        stream: &Stream,
    ) -> Result<()> {
        let kernel = match &self.unaligned {
            _ if is_aligned(tensors.map(<*mut u8>::cast_const)) => &self.aligned,
            Ok(unaligned) => unaligned,
            Err(error) => return Err(error.clone()),
        };
        // SAFETY: the caller's promise.
        self.gpu.call(|_| unsafe { kernel.run(tensors, workspace, stream.as_raw()) })
    }
}

fn is_aligned(tensors: [*const u8; 3]) -> bool {
    tensors.iter().all(|&t| (t as usize).is_multiple_of(VendorConvolution::ALIGNMENT))
}

/// The library's kernels in order of expected speed, the fastest first; at least one.
fn find(
    gpu: &'static Gpu,
    spec: &ConvolutionSpec,
    operation: Operation,
    limits: ConvolutionLimits,
) -> Result<Vec<Box<dyn Convolution>>> {
    let unsupported = |what: &str| {
        let reason = format!("not for {what}");
        Error::unsupported(format!("conv2d by cudnn on {}", gpu.device()), reason)
    };
    let elements = |shape: [usize; 4]| {
        shape.iter().try_fold(1usize, |a, &b| a.checked_mul(b)).unwrap_or(usize::MAX)
    };
    let sizes = [spec.x, spec.w, spec.y].map(elements);
    if sizes.iter().any(|&n| n == 0 || n > i32::MAX as usize) {
        return Err(unsupported("tensors without elements or with 2^31 and more"));
    }
    let _current = gpu.enter()?;
    match gpu.runtime.convolutions(spec, operation, limits)? {
        found if found.is_empty() => Err(unsupported("this convolution: it has no kernel")),
        found => Ok(found),
    }
}

impl Gpu {
    /// The version of the convolution library, if it can be used. The error says what to install.
    pub(crate) fn convolution_library(&self) -> Result<String> {
        self.runtime.convolution_library()
    }
}
