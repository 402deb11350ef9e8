//! Convolutions by the vendor's library, where it is installed.

mod fastest;

use super::runtime::{ConvolutionLimits, Handle, Outcome};
use super::{Gpu, Stream};
use crate::{DType, Error, Result};
use std::fmt::Debug;

/// `y = conv2d(x, w)` without bias. x, w and y have one type and are dense: [n, c, h, w] or, with
/// `channels_last`, [n, h, w, c]; the filter [k, c/groups, r, s] in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConvolutionSpec {
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

/// The kernel to use among those that the library names, in its order. All sum in f32, multiply operands that are no
/// less exact than the spec asks for, and give the same bits every time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The first.
    First,
    /// The fastest of the first few, measured once for a spec in a process.
    Fastest,
}

/// The sum of products to compute from the tensors of a [`ConvolutionSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// y of x and w.
    Forward,
    /// The gradient of x, of w and that of y.
    BackwardData,
    /// The gradient of w, of x and that of y.
    BackwardFilter,
}

/// A prepared operation of a backend: one kernel.
pub(crate) trait Convolution: Debug + Send + Sync {
    /// Bytes of workspace that a run needs, aligned to 256.
    fn workspace_bytes(&self) -> usize;

    /// Computes what the operation says of w, x, y.
    ///
    /// # Safety
    /// As [`VendorConvolution::run`], with the device current.
    unsafe fn run(&self, tensors: [*mut u8; 3], workspace: *mut u8, stream: Handle) -> Outcome<()>;
}

/// The most workspace that a kernel may ask for.
const MAX_WORKSPACE: usize = 1 << 30;

/// An operation bound to a device and a kernel.
#[derive(Debug)]
pub(crate) struct VendorConvolution {
    gpu: &'static Gpu,
    aligned: Box<dyn Convolution>,
    /// The kernel for tensors at other addresses, if there is one.
    unaligned: Result<Box<dyn Convolution>>,
}

impl VendorConvolution {
    /// The alignment of tensors that it has its fast kernels for, in bytes.
    pub(crate) const ALIGNMENT: usize = 16;

    /// # Errors
    /// [`Error::Unsupported`] for tensors with 2^31 elements or more and for what the library has no
    /// kernel for; [`Error::Backend`] without it, or if it fails.
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

    /// Computes one of `tensors`, which are w, x and y or their gradients, of the others on `stream`. Allocates nothing
    /// on the device and may be captured into a graph.
    ///
    /// # Errors
    /// [`Error::Backend`]; [`Error::Unsupported`] for addresses that it does not [take](Self::takes).
    ///
    /// # Safety
    /// The pointers must be the spec's tensors and [`VendorConvolution::workspace_bytes`] on the device of
    /// the plan and of the stream, alive until the work is done; what is written may overlap nothing.
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

/// The kernels, at least one, the fastest as expected first.
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
    /// The version of the library behind [`VendorConvolution`]; an error says what to install.
    pub(crate) fn convolves(&self) -> Result<String> {
        self.runtime.convolves()
    }
}
