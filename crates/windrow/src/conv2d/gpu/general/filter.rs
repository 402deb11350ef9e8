//! The filter as the general algorithms read it: a dense copy (`pack_filter.cu`).

use crate::conv2d::frame_reads::FrameReads;
use crate::conv2d::gpu::shared::parameters::one_thread_each;
use crate::conv2d::gpu::{ALIGNMENT, kernel, source, strides};
use crate::conv2d::{Conv2dSpec, Problem};
use crate::gpu::{Gpu, Kernel, KernelSpec, Source, Stream, params};
use crate::{DType, Result};

static PACK_FILTER: Source = source!("pack_filter.cu");

/// A filter copied to [k, r, s, c], or to [k, c, r, s]; that of a video to so many of these, one for each of its frames.
#[derive(Debug)]
pub(crate) struct DenseFilter {
    kernel: &'static Kernel,
    dtype: DType,
    strides: [i64; 4],
    /// k, c, r, s
    shape: [usize; 4],
    pub(super) channels_last: bool,
    frames: usize,
    frame_stride: isize,
}

params! {
    struct FilterParams {
        w: *const u8,
        out: *mut u8,
        strides as [w_k, w_c, w_r, w_s]: [i64; 4],
        elements: i64,
        c: i32,
        r: i32,
        s: i32,
    }
}

impl DenseFilter {
    pub(crate) fn new(
        gpu: &'static Gpu,
        spec: &Conv2dSpec,
        p: &Problem,
        channels_last: bool,
    ) -> Result<Self> {
        let dtype = spec.w.dtype;
        let kernel = gpu.kernel(&pack_kernel(dtype))?;
        let shape = [p.k, p.c_group(), p.r, p.s];
        let strides = strides(&spec.w);
        let (frames, frame_stride) = (1, 0);
        Ok(DenseFilter { kernel, dtype, strides, shape, channels_last, frames, frame_stride })
    }

    /// The same with the frames of a video's filter, if any are given.
    pub(super) fn with_frames(mut self, reads: Option<&FrameReads>) -> Self {
        if let Some(reads) = reads {
            (self.frames, self.frame_stride) = (reads.frames.kt, reads.filter);
        }
        self
    }

    /// Elements of a frame.
    pub(super) fn frame_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// True if the filter has the layout that its copy would have.
    pub(crate) fn is_packed(&self) -> bool {
        let dense = self.packed_strides();
        let follow = self.frames == 1 || self.frame_stride == self.frame_elements() as isize;
        follow && (0..4).all(|d| self.shape[d] == 1 || self.strides[d] == dense[d])
    }

    pub(crate) fn bytes(&self) -> usize {
        (self.frames * self.frame_elements() * self.dtype.size()).next_multiple_of(ALIGNMENT)
    }

    /// Strides along k, c, r, s of the copy.
    pub(super) fn packed_strides(&self) -> [i64; 4] {
        let [_, c, r, s] = self.shape.map(|d| d as i64);
        if self.channels_last { [r * s * c, 1, s * c, c] } else { [c * r * s, r * s, s, 1] }
    }

    /// # Safety
    /// As [`Prepared::pack`].
    pub(crate) unsafe fn pack(&self, stream: &Stream, w: *const u8, packed: *mut u8) -> Result<()> {
        let ([k_stride, c_stride, r_stride, s_stride], [_, c, r, s]) = (self.strides, self.shape);
        // The kernel's innermost dimension of the copy is c, then come s and r.
        let (strides, [c, r, s]) = match self.channels_last {
            true => (self.strides, [c, r, s]),
            false => ([k_stride, s_stride, c_stride, r_stride], [s, c, r]),
        };
        let (elements, size) = (self.frame_elements(), self.dtype.size());
        for frame in 0..self.frames {
            let from = (frame as isize).wrapping_mul(self.frame_stride * size as isize);
            let params = FilterParams {
                w: w.wrapping_offset(from),
                out: packed.wrapping_add(frame * elements * size),
                strides,
                elements: elements as i64,
                c: c as i32,
                r: r as i32,
                s: s as i32,
            };
            // SAFETY: the structure is the kernel's, and the caller's promise covers what it points to.
            unsafe { self.kernel.launch(stream, one_thread_each(elements), &params)? };
        }
        Ok(())
    }
}

pub(super) fn pack_kernel(dtype: DType) -> KernelSpec {
    kernel(&PACK_FILTER, "pack_filter", dtype).params::<FilterParams>()
}
