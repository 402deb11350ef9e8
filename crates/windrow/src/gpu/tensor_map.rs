//! Descriptors for the tensor copy engine ([`Feature::BulkCopies`](super::Feature)).

use super::Gpu;
use crate::{DType, Result};

/// Describes a channels-last tensor and the boxes that kernels copy from it: a kernel parameter.
/// What lies outside the tensor is read as zero. Pixels of a box are 64 bytes of channels, swizzled.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorMap([u64; 16]);

/// The description of a [`TensorMap`].
#[derive(Debug)]
pub(crate) struct TensorBoxes {
    /// f32, f16 or bf16.
    pub(crate) dtype: DType,
    /// Aligned to 16 bytes, as are all strides.
    pub(crate) address: *const u8,
    /// c, w, h, n
    pub(crate) dims: [usize; 4],
    /// The strides of w, h, n in elements; c has stride 1.
    pub(crate) strides: [usize; 3],
    /// c, w, h, n of a box.
    pub(crate) boxes: [usize; 4],
}

/// The description, like [`TensorBoxes`], for convolutions. A copy loads 64 channels of 16 bits of pixels that follow
/// each other in the rows of the output, 128 bytes each, swizzled.
#[derive(Debug)]
pub(crate) struct TensorPixels {
    /// f16 or bf16.
    pub(crate) dtype: DType,
    pub(crate) address: *const u8,
    /// c, w, h, n
    pub(crate) dims: [usize; 4],
    /// The strides of w, h, n in elements.
    pub(crate) strides: [usize; 3],
    /// The places, in w and h, of the first tap of the first output and of the last output, the latter counted from the
    /// end; and the distance from an output to the next.
    pub(crate) first: [i32; 2],
    pub(crate) last: [i32; 2],
    pub(crate) step: [u32; 2],
    /// The pixels of a copy.
    pub(crate) pixels: usize,
}

impl TensorMap {
    /// The map for kernels that do not read it.
    pub(crate) const NONE: Self = TensorMap([0; 16]);

    /// # Errors
    /// As [`TensorMap::new`].
    pub(crate) fn of_pixels(gpu: &Gpu, pixels: &TensorPixels) -> Result<Self> {
        // SAFETY: the device is current; the address is only stored.
        gpu.call(|runtime| unsafe { runtime.tensor_map_of_pixels(pixels) }).map(TensorMap)
    }

    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend) if the driver refuses.
    pub(crate) fn new(gpu: &Gpu, boxes: &TensorBoxes) -> Result<Self> {
        // SAFETY: the device is current; the address is only stored.
        gpu.call(|runtime| unsafe { runtime.tensor_map(boxes) }).map(TensorMap)
    }
}
