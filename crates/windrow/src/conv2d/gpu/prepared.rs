//! A convolution whose kernels are loaded.

use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dAlgorithm, Conv2dConfiguration, Conv2dSpec};
use crate::gpu::{Gpu, Stream};
use crate::{DType, Result, TensorDesc, TensorRef};
use std::fmt::Debug;

/// A convolution bound to a GPU and a method: its kernels are compiled and loaded.
pub(crate) trait Prepared: Debug + Send + Sync {
    /// The algorithm's configuration with all parameters that this convolution runs with.
    fn configuration(&self, algorithm: Conv2dAlgorithm) -> Conv2dConfiguration {
        Conv2dConfiguration::new(algorithm)
    }

    /// The properties that, with the filter's shape and the algorithm, decide the layout of the packed filter.
    fn packed_form(&self) -> PackedForm;

    /// Bytes of a packed filter.
    fn packed_bytes(&self) -> usize;

    /// Bytes of scratch memory of a run, aligned to 256.
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// Bytes of scratch memory of a run for images, and initial frames if there are any, at these addresses: at most
    /// [`Prepared::scratch_bytes`].
    fn scratch_bytes_for(&self, _x: *const u8, _initial: Option<*const u8>) -> usize {
        self.scratch_bytes()
    }

    /// The size in bytes of the checksums that are stored after a packed filter. [`Prepared::pack`] compares them with
    /// those of the filter, and packs only what has changed. 0 if there are none, because a copy takes no longer than a
    /// comparison.
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
    /// `w` must be the filter on the stream's GPU. `to` must be memory of [`Prepared::packed_bytes`] bytes there, and
    /// with a ticket (see [`PackTo`]) of [`Prepared::seen_bytes`] bytes more.
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
    /// The operands must be tensors of the spec's layouts on the stream's GPU. `packed` must come from
    /// [`Prepared::packed`]. The scratch memory must have [`Prepared::scratch_bytes`] bytes there.
    unsafe fn run(&self, stream: &Stream, packed: *const u8, operands: Operands) -> Result<()>;

    /// The allowed error of a sum before the activation, relative to its scale.
    fn tolerance(&self) -> f64;

    /// The side of an output tile, for Winograd's algorithms.
    fn tile(&self) -> Option<usize> {
        None
    }

    /// Winograd's intermediate tensors, for tensors that agree with the spec: the transformed filter U, the transformed
    /// input V and their products M. `None` if the method does not store them, or computes them in several chunks.
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

    /// The relative rounding error of the elements of U and V: first of the stored numbers, then of the numbers that
    /// are multiplied.
    fn operand_roundings(&self) -> (f64, f64) {
        (0.0, 0.0)
    }

    /// The errors of U and V that underflow adds to [`Prepared::operand_roundings`]. That of U is relative to the
    /// largest magnitude of an output channel's filter, that of V to the largest magnitude of an image.
    fn underflows(&self) -> [f64; 2] {
        [0.0; 2]
    }

    /// A description of how the work is divided into blocks.
    fn explain(&self) -> String;
}

/// The memory that a filter is packed to.
///
/// If there is a ticket, the memory may hold a packed filter of an earlier run, with its checksums. The packing kernel
/// compares these with the checksums of the filter, and packs only what has changed. So the host does not wait. The
/// ticket is a number that belongs to this memory alone. It is part of the checksums, so that what else was in the
/// memory before is never taken for a packed filter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackTo {
    pub(crate) memory: *mut u8,
    pub(crate) ticket: Option<u64>,
}

/// The properties that, with the filter's shape and the algorithm, decide the layout of a packed filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PackedForm {
    method: &'static str,
    dtype: DType,
    /// The number of low-precision products that make up one product of f32 operands; 1 if operands are not split.
    products: usize,
    /// A number by which the method distinguishes its orders of elements.
    order: usize,
}

impl PackedForm {
    pub(crate) fn new(method: &'static str, dtype: DType, products: usize, order: usize) -> Self {
        PackedForm { method, dtype, products, order }
    }
}

/// The addresses of a run's tensors, all on the GPU of the run's stream. In a data gradient, `x` is dy and `y` is dx.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) x: *const u8,
    pub(crate) bias: Option<*const u8>,
    /// The residual, if the spec has one. Its layout is that of y.
    pub(crate) residual: Option<*const u8>,
    /// The frames before a video, if the task reads such.
    pub(crate) initial: Option<*const u8>,
    pub(crate) y: *mut u8,
    pub(crate) scratch: *mut u8,
}

impl Operands {
    /// The residual of a launch, null if there is none.
    pub(super) fn residual(&self) -> *const u8 {
        self.residual.unwrap_or(std::ptr::null())
    }

    /// True if y and the residual, which kernels access in the same way, begin at multiples of `bytes`.
    pub(super) fn is_out_aligned(&self, bytes: usize) -> bool {
        (self.y as usize | self.residual() as usize).is_multiple_of(bytes)
    }

    /// The operands without the first `images` images.
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
