//! The interfaces of a method that computes a gradient on a GPU, and of a gradient whose kernels are loaded.

use super::prepared::Operands;
use super::task::Task;
use crate::gpu::{Gpu, Stream};
use crate::{Result, TensorDesc};
use std::fmt::Debug;

/// A way to compute a gradient.
pub(crate) trait GradientMethod<G: ?Sized>: Sync {
    /// The variants of its own kernels, as lines of `verify/kernels.txt`.
    fn kernels(&self) -> &'static [&'static str] {
        &[]
    }

    /// The gradient bound to the GPU. `None` if another method is expected to be faster, or if there is no kernel.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    fn prepare(&self, gpu: &'static Gpu, task: &Task<'_>) -> Result<Option<Box<G>>>;
}

/// A gradient of x whose kernels are loaded.
pub(crate) trait DataGradient: Debug + Send + Sync {
    /// True if [`DataGradient::run`] takes the mirrored filter (rotated by 180 degrees).
    fn is_mirrored(&self) -> bool {
        false
    }

    /// The side of an output tile, for Winograd's algorithms.
    fn tile(&self) -> Option<usize> {
        None
    }

    /// Bytes of scratch memory of a run.
    fn scratch_bytes(&self) -> usize;

    /// The allowed error of an element, relative to its scale.
    fn tolerance(&self) -> f64;

    /// Computes dx from dy. `operands.x` is dy, and `operands.y` is dx.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// The filter at `w` and the operands must have the spec's layouts and be on the stream's GPU, with
    /// [`DataGradient::scratch_bytes`] of scratch memory.
    unsafe fn run(&self, stream: &Stream, w: *const u8, operands: Operands) -> Result<()>;
}

/// A gradient of the filter whose kernels are loaded.
pub(crate) trait WeightGradient: Debug + Send + Sync {
    /// The side of an output tile, for Winograd's algorithms.
    fn tile(&self) -> Option<usize> {
        None
    }

    /// Bytes of scratch memory of a run.
    fn scratch_bytes(&self) -> usize;

    /// The allowed error of an element, relative to its scale.
    fn tolerance(&self) -> f64;

    /// Computes `dw`, which has its own strides and type, from `x` and `dy`.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// `x` and `dy` must have the spec's layouts, and `dw` that of `operands.desc`. All must be on the stream's GPU,
    /// with [`WeightGradient::scratch_bytes`] of scratch memory.
    unsafe fn run(&self, stream: &Stream, operands: &WeightOperands<'_>) -> Result<()>;
}

/// The addresses of a weight gradient's tensors, all on the GPU of the run's stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightOperands<'a> {
    pub(crate) x: *const u8,
    pub(crate) dy: *const u8,
    pub(crate) dw: *mut u8,
    /// The strides and the type of dw.
    pub(crate) desc: &'a TensorDesc,
    pub(crate) scratch: *mut u8,
}
