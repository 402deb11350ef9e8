//! A convolution of videos as convolutions of images.

use super::Conv3dSpec;
use crate::conv2d::conv3d::Conv3dArgs;
use crate::conv2d::cpu::{self, FrameTaps};
use crate::conv2d::frame_reads::{Before, FrameReads};
use crate::conv2d::gpu::{self, Operands};
use crate::conv2d::problem::Frames;
use crate::conv2d::{Conv2dSpec, Conv3dParams, Problem, TimePadding};
use crate::cpu::Isa;
use crate::gpu::Gpu;
use crate::{Layout, PlanOptions, Result, TensorDesc, TensorMut, TensorRef};
use std::sync::Arc;

/// A convolution of videos as one of images for each video, or as one of all images where the filter has one frame and
/// the strides allow it. Images are the frames of the output.
#[derive(Clone, Debug)]
pub(super) struct Video {
    pub spec: Conv2dSpec,
    problem: Problem,
    /// The frames that an image reads; `None` if it reads the one of its own number.
    reads: Option<FrameReads>,
    /// The number of convolutions of images, and the distances in x and y from one to the next.
    pub runs: usize,
    x_run: isize,
    y_run: isize,
    /// The initial frames of a video, and the distance from one video to the next.
    initial: Option<(TensorDesc, isize)>,
}

/// The strides of a tensor with five dimensions, of which the first and the third are 0 if there is only one of it.
fn strides(desc: &TensorDesc) -> [isize; 5] {
    std::array::from_fn(|d| match d {
        0 | 2 if desc.shape()[d] <= 1 => 0,
        _ => desc.strides()[d],
    })
}

/// The tensor of images, `stride` apart, of the last two dimensions and the second of a video.
fn images(desc: &TensorDesc, count: usize, stride: isize) -> Result<TensorDesc> {
    let (shape, strides) = (desc.shape(), desc.strides());
    let shape = [count, shape[1], shape[3], shape[4]];
    let layout = Layout::strided(&shape, &[stride, strides[1], strides[3], strides[4]])?;
    Ok(TensorDesc { dtype: desc.dtype, layout })
}

impl Video {
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory);
    /// [`Error::SizeOverflow`](crate::Error::SizeOverflow).
    pub(super) fn new(spec: &Conv3dSpec, p: &Problem) -> Result<Self> {
        let Conv3dSpec { x, w, y, bias, residual, params, initial_frames, .. } = spec;
        let &Conv3dParams { activation, accuracy, .. } = params;
        let (x_strides, y_strides) = (strides(x), strides(y));
        let Frames { t, kt, ot, stride, padding, .. } = p.frames;
        let [x_image, y_image] = [x_strides[2].wrapping_mul(stride as isize), y_strides[2]];
        let one_each = kt == 1 && padding == 0;
        // The images of all videos follow each other.
        let follow = |video: isize, image: isize| image.checked_mul(ot as isize) == Some(video);
        let merges =
            p.n == 1 || ot == 1 || follow(x_strides[0], x_image) && follow(y_strides[0], y_image);
        let (runs, count) = if one_each && merges { (1, p.n * ot) } else { (p.n, ot) };
        let [x_image, y_image] = match runs == 1 && p.n > 1 && ot == 1 {
            true => [x_strides[0], y_strides[0]],
            false => [x_image, y_image],
        };
        let reads = match one_each {
            true => None,
            false => {
                let before = match (initial_frames, params.time_padding) {
                    (Some(initial), _) => {
                        let [_, channel, frame, row, column] = strides(initial);
                        Before::Initial(padding, [frame, channel, row, column])
                    }
                    (None, TimePadding::CausalRepeat) => Before::First,
                    (None, TimePadding::Zeros | TimePadding::Causal) => Before::Zeros,
                };
                let (x, filter) = (x_strides[2], w.strides()[2]);
                Some(FrameReads { frames: p.frames, before, x, filter })
            }
        };
        // Those from which an image is counted exist.
        let x_count = if one_each { count } else { t.div_ceil(stride) };
        let w_strides = w.strides();
        let filter = Layout::strided(
            &[p.k, p.c_group(), p.r, p.s],
            &[w_strides[0], w_strides[1], w_strides[3], w_strides[4]],
        )?;
        Ok(Video {
            spec: Conv2dSpec {
                x: images(x, x_count, x_image)?,
                w: TensorDesc { dtype: w.dtype, layout: filter },
                y: images(y, count, y_image)?,
                bias: *bias,
                residual: *residual,
                stride: p.stride,
                padding: p.padding,
                dilation: p.dilation,
                groups: p.groups,
                activation,
                accuracy,
            },
            problem: Problem {
                n: count,
                frames: if one_each { Frames::IMAGE } else { Frames { ot: 1, ..p.frames } },
                ..*p
            },
            reads,
            runs,
            x_run: x_strides[0],
            y_run: y_strides[0],
            initial: match initial_frames.filter(|_| !one_each) {
                Some(desc) => {
                    let of = strides(&desc);
                    Some((images(&desc, padding, of[2])?, of[0]))
                }
                None => None,
            },
        })
    }

    /// The convolution of images that is given to methods on the CPU.
    pub(super) fn task(&self, isa: Isa, threads: usize) -> Result<cpu::Task<'_>> {
        let task = cpu::Task::new(&self.spec, &self.problem, isa, threads)?;
        let taps = self.reads.as_ref().map(FrameTaps::new).transpose()?;
        Ok(task.with_frames(taps.map(Arc::new)))
    }

    /// The convolution of images that is given to methods on a GPU.
    pub(super) fn gpu_task(&self, gpu: &Gpu, options: &PlanOptions) -> gpu::Task<'_> {
        gpu::Task::new(gpu, &self.spec, &self.problem, options).with_frames(self.reads)
    }

    /// The frames before the first one.
    pub(super) fn before(&self) -> Before {
        self.reads.map_or(Before::Zeros, |reads| reads.before)
    }

    /// The addresses of a run's tensors on a GPU.
    pub(super) fn operands(
        &self,
        args: &Conv3dArgs<'_>,
        y: &mut TensorMut<'_>,
        run: usize,
        scratch: *mut u8,
    ) -> Result<Operands> {
        let residual = args.residual.as_ref().map(|residual| self.residual(residual, run));
        let initial = self.initial(args.initial_frames.as_ref(), run);
        Ok(Operands {
            x: self.x(&args.x, run).as_ptr(),
            bias: args.bias.as_ref().map(TensorRef::as_ptr),
            residual: residual.as_ref().map(TensorRef::as_ptr),
            initial: initial.as_ref().map(TensorRef::as_ptr),
            y: self.y(y, run)?.as_mut_ptr(),
            scratch,
        })
    }

    /// The images of a tensor like y, or of x, in a run.
    fn view<'a>(&self, tensor: &TensorRef<'a>, desc: TensorDesc, offset: isize) -> TensorRef<'a> {
        let bytes = offset * desc.dtype.size() as isize;
        let start = tensor.as_ptr().wrapping_offset(bytes);
        // SAFETY: images of the tensor.
        unsafe { TensorRef::from_raw(start.cast(), desc, tensor.device()) }
    }

    /// The images of x that a run reads.
    pub(super) fn x<'a>(&self, x: &TensorRef<'a>, run: usize) -> TensorRef<'a> {
        self.view(x, self.spec.x, run as isize * self.x_run)
    }

    /// The initial frames that a run reads.
    pub(super) fn initial<'a>(
        &self,
        initial: Option<&TensorRef<'a>>,
        run: usize,
    ) -> Option<TensorRef<'a>> {
        let (desc, stride) = self.initial?;
        Some(self.view(initial?, desc, run as isize * stride))
    }

    /// The images of the residual that a run reads.
    pub(super) fn residual<'a>(&self, residual: &TensorRef<'a>, run: usize) -> TensorRef<'a> {
        self.view(residual, self.spec.y, run as isize * self.y_run)
    }

    /// The images of y that a run writes.
    pub(super) fn y<'a>(&self, y: &'a mut TensorMut<'_>, run: usize) -> Result<TensorMut<'a>> {
        let bytes = run as isize * self.y_run * y.dtype().size() as isize;
        let start = y.as_mut_ptr().wrapping_offset(bytes);
        // SAFETY: images of y, which is borrowed mutably.
        unsafe { TensorMut::from_raw(start.cast(), self.spec.y, y.device()) }
    }

    /// The filter without its frames.
    pub(super) fn filter<'a>(&self, w: &TensorRef<'a>) -> TensorRef<'a> {
        self.view(w, self.spec.w, 0)
    }
}
