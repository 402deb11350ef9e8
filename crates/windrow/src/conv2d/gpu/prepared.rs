//! A convolution whose kernels are loaded.

use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec};
use crate::gpu::{Gpu, Stream};
use crate::{DType, Result, TensorDesc, TensorRef};
use std::fmt::Debug;

/// A convolution bound to a device and a method: its kernels are compiled and loaded.
pub(crate) trait Prepared: Debug + Send + Sync {
    /// The algorithm's configuration with all parameters that this convolution runs with.
    fn configuration(&self, algorithm: Conv2dAlgorithm) -> Conv2dConfiguration {
        Conv2dConfiguration::new(algorithm)
    }

    /// The layout of the packed filter, beside its shape and algorithm.
    fn packed_form(&self) -> PackedForm;

    /// Bytes of a packed filter.
    fn packed_bytes(&self) -> usize;

    /// Bytes of scratch memory of a run, aligned to 256.
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// Bytes of scratch memory of a run for images at `x`: at most [`Prepared::scratch_bytes`].
    fn scratch_bytes_for(&self, _x: *const u8) -> usize {
        self.scratch_bytes()
    }

    /// Bytes that are kept behind a packed filter. By them [`Prepared::pack`] sees if the filter has changed. 0 if a
    /// copy takes as long as a comparison.
    fn seen_bytes(&self) -> usize {
        0
    }

    /// True if [`Prepared::run`] can read the filter at `w` as it is, without packing.
    fn reads_in_place(&self, _w: *const u8) -> bool {
        false
    }

    /// Packs the filter at `w`, which has the spec's layout.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// `w` must be the filter on the stream's device, and `to` memory there for [`Prepared::packed_bytes`] and, with a
    /// ticket, [`Prepared::seen_bytes`] more behind them.
    unsafe fn pack(&self, stream: &Stream, w: *const u8, to: PackTo) -> Result<()>;

    /// The filter at `w` in the form that [`Prepared::run`] takes: as it is, or packed to `memory`.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// As [`Prepared::pack`].
    unsafe fn packed(&self, stream: &Stream, w: *const u8, memory: *mut u8) -> Result<*const u8> {
        if self.reads_in_place(w) {
            return Ok(w);
        }
        // SAFETY: the caller's promise.
        unsafe { self.pack(stream, w, PackTo { memory, ticket: None })? };
        Ok(memory)
    }

    /// Computes y.
    ///
    /// # Errors
    /// [`crate::Error::Backend`].
    ///
    /// # Safety
    /// The operands must be tensors of the spec's layouts on the stream's device, `packed` what [`Prepared::packed`]
    /// gives, and their scratch memory [`Prepared::scratch_bytes`] there.
    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()>;

    /// The allowed error of a sum before the activation, relative to its scale.
    fn tolerance(&self) -> f64;

    /// The side of an output tile, for Winograd's algorithms.
    fn tile(&self) -> Option<usize> {
        None
    }

    /// U, V and M of tensors that agree with the spec. `None` unless the method works in stages and one chunk holds
    /// them.
    ///
    /// # Errors
    /// [`crate::Error::Backend`], [`crate::Error::OutOfMemory`].
    fn winograd_stages(
        &self,
        _gpu: &'static Gpu,
        _w: &TensorRef<'_>,
        _x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        Ok(None)
    }

    /// Relative errors of U and V of [`Prepared::winograd_stages`], as they are stored and as they are multiplied.
    fn operand_roundings(&self) -> (f64, f64) {
        (0.0, 0.0)
    }

    /// Errors of U and V in addition to [`Prepared::operand_roundings`], relative to the largest number of an output
    /// channel's filter and of an image.
    fn underflows(&self) -> [f64; 2] {
        [0.0; 2]
    }

    /// Blocking, in words.
    fn explain(&self) -> String;
}

/// The memory that a filter is packed to.
///
/// With a ticket, the packed filter is kept there. The ticket is a number that no other memory has. If the filter has
/// the content that was packed before, the packed filter is left as it is. This is decided in the order of one stream,
/// without waiting.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackTo {
    pub(crate) memory: *mut u8,
    pub(crate) ticket: Option<u64>,
}

/// The layout of a packed filter, beside its shape and algorithm. Packed filters with equal forms are read alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PackedForm {
    method: &'static str,
    dtype: DType,
    /// Products that the split operands take part in.
    products: usize,
    /// The method's number for the order of the elements.
    order: usize,
}

impl PackedForm {
    pub(crate) fn new(method: &'static str, dtype: DType, products: usize, order: usize) -> Self {
        PackedForm { method, dtype, products, order }
    }
}

/// Device addresses of a run, all on the device of the run's stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) x: *const u8,
    pub(crate) bias: Option<*const u8>,
    /// The residual, if the spec has one. Its layout is that of y.
    pub(crate) residual: Option<*const u8>,
    pub(crate) y: *mut u8,
    pub(crate) scratch: *mut u8,
}

impl Operands {
    /// The residual of a launch, null if there is none.
    pub(super) fn residual(&self) -> *const u8 {
        self.residual.unwrap_or(std::ptr::null())
    }

    /// True if y and the residual, which kernels access alike, begin at multiples of so many bytes.
    pub(super) fn is_out_aligned(&self, bytes: usize) -> bool {
        (self.y as usize | self.residual() as usize).is_multiple_of(bytes)
    }

    /// The operands after the first `images` images.
    pub(super) fn after_images(self, spec: &Conv2dSpec, images: usize) -> Self {
        let offset =
            |desc: &TensorDesc| images as isize * desc.strides()[0] * desc.dtype.size() as isize;
        let (x, y) = (offset(&spec.x), offset(&spec.y));
        Operands {
            x: self.x.wrapping_offset(x),
            residual: self.residual.map(|residual| residual.wrapping_offset(y)),
            y: self.y.wrapping_offset(y),
            ..self
        }
    }
}
