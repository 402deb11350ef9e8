//! Descriptors for the Tensor Memory Accelerator (TMA, [`Feature::BulkCopies`](super::Feature)).

use super::Gpu;
use crate::{DType, Result};

/// A kernel parameter that describes a channels-last tensor and the boxes that kernels copy from it. Elements outside
/// the tensor are read as zero. Pixels of a box are 64 bytes of channels, swizzled.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorMap([u64; 16]);

/// The arguments of a [`TensorMap`].
#[derive(Debug)]
pub(crate) struct TensorBoxes {
    /// f32, f16 or bf16.
    pub(crate) dtype: DType,
    /// The address, aligned to 16 bytes, as are all strides.
    pub(crate) address: *const u8,
    /// c, w, h, n
    pub(crate) dims: [usize; 4],
    /// The strides of w, h, n in elements; c has stride 1.
    pub(crate) strides: [usize; 3],
    /// The sizes c, w, h, n of a box.
    pub(crate) boxes: [usize; 4],
}

/// The arguments of a [`TensorMap`] in im2col mode, for convolutions. A copy loads 64 or 128 bytes of channels, swizzled, for
/// each of `pixels` consecutive pixels of the output.
#[derive(Debug)]
pub(crate) struct TensorPixels {
    /// f32, f16 or bf16.
    pub(crate) dtype: DType,
    /// Copies round f32 to the nearest TF32.
    pub(crate) tf32: bool,
    pub(crate) address: *const u8,
    /// c, w, h, n
    pub(crate) dims: [usize; 4],
    /// The strides of w, h, n in elements.
    pub(crate) strides: [usize; 3],
    /// The positions in w and h of the first tap of the first output.
    pub(crate) first: [i32; 2],
    /// The positions in w and h of the first tap of the last output, counted from the end.
    pub(crate) last: [i32; 2],
    /// The distances in w and h from an output to the next.
    pub(crate) step: [u32; 2],
    /// The numbers of channels and of pixels of a copy.
    pub(crate) channels: usize,
    pub(crate) pixels: usize,
}

impl TensorMap {
    /// A placeholder for kernels that do not use a map.
    pub(crate) const NONE: Self = TensorMap([0; 16]);

    /// The map for copies of pixels of a convolution.
    ///
    /// # Errors
    /// As [`TensorMap::new`].
    pub(crate) fn of_pixels(gpu: &Gpu, pixels: &TensorPixels) -> Result<Self> {
        // SAFETY: the device is current; the address is only stored.
        gpu.call(|runtime| unsafe { runtime.tensor_map_of_pixels(pixels) }).map(TensorMap)
    }

    /// The map for copies of boxes.
    ///
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend) if the driver rejects the arguments.
    pub(crate) fn new(gpu: &Gpu, boxes: &TensorBoxes) -> Result<Self> {
        // SAFETY: the device is current; the address is only stored.
        gpu.call(|runtime| unsafe { runtime.tensor_map(boxes) }).map(TensorMap)
    }
}
