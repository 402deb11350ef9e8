//! The spec of a convolution of videos.

use crate::conv2d::problem::Frames;
use crate::conv2d::spec::{check_outputs, dense_beside};
use crate::conv2d::{Conv3dParams, Problem, TimePadding};
use crate::forms::setters;
use crate::tensor::{check_tensor, check_unique};
use crate::{Error, Layout, Result, TensorDesc};

/// The spec of a three-dimensional convolution (a cross-correlation, as usual in deep learning):
///
/// `y[n,k,ot,oh,ow] = act(bias[k] + residual[n,k,ot,oh,ow] + sum_{c,f,r,s} w[k,c,f,r,s] * x[n, g*(C/groups)+c, a, i, j])`
///
/// The frame is `a = ot*stride - padding + f*dilation`, and the row i and the column j follow likewise: the letters are
/// those of [`Conv2dSpec`](crate::Conv2dSpec). Elements outside of `x` count as zero.
///
/// A causal convolution ([`TimePadding::Causal`](crate::TimePadding::Causal)) reads the `(kt - 1) * dilation` frames before
/// the first one as well, its *state*. To compute a video in chunks, pass the state of each chunk from `final_frames` of the
/// one before to `initial_frames`. With the same algorithm the chunks have the bits of the whole.
///
/// ```
/// use windrow::{Conv3dParams, Conv3dSpec, DType, TensorDesc};
/// let x = TensorDesc::contiguous(DType::F32, &[1, 64, 9, 56, 56])?; // [n, c, t, h, w]
/// let w = TensorDesc::contiguous(DType::F32, &[128, 64, 3, 3, 3])?;
/// let spec = Conv3dSpec::new(x, w, &Conv3dParams::default().with_padding([1, 1, 1]))?;
/// assert_eq!(spec.y.shape(), [1, 128, 9, 56, 56]);
/// # Ok::<(), windrow::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Conv3dSpec {
    /// Input [n, c, t, h, w], f32, f16 or bf16; any strides (channels-last is a stride pattern).
    pub x: TensorDesc,
    /// Filter [k, c/groups, kt, r, s] of x's type; any strides.
    pub w: TensorDesc,
    /// Output [n, k, ot, oh, ow] of x's type; any strides with which no two elements share memory.
    pub y: TensorDesc,
    /// Bias `[k]`, f32 or x's type.
    pub bias: Option<TensorDesc>,
    /// True if a run gets a *residual*: a tensor of y's type, shape and strides, which is added before the activation.
    pub residual: bool,
    /// Strides, paddings, dilations and the other options.
    pub params: Conv3dParams,
    /// The frames before the first one, [n, c, (kt - 1) * dilation, h, w] of x's type, for a causal convolution; any
    /// strides. They are read where they lie.
    pub initial_frames: Option<TensorDesc>,
    /// The state after the last frame, of the same shape and type, which a run writes. It may be the memory of
    /// `initial_frames`, with the same strides.
    pub final_frames: Option<TensorDesc>,
}

setters! {
    Conv3dSpec {
        with_output(y: TensorDesc);
        with_residual(residual: bool);
        ? with_bias(bias: TensorDesc);
        ? with_initial_frames(initial_frames: TensorDesc);
        ? with_final_frames(final_frames: TensorDesc);
    }
}

impl Conv3dSpec {
    /// The spec of a convolution of `x` [n, c, t, h, w] by `w` [k, c/groups, kt, r, s], without bias and residual. `y`
    /// gets the shape that results from these arguments and a dense layout: channels-last if x is, otherwise NCTHW.
    ///
    /// # Errors
    /// As [`Conv2dSpec::new`](crate::Conv2dSpec::new), and [`Error::Parameter`](crate::Error::Parameter) for a causal
    /// convolution with another padding of frames.
    pub fn new(x: TensorDesc, w: TensorDesc, params: &Conv3dParams) -> Result<Self> {
        let y = dense_beside(&x, &sizes(&x, &w, params)?.video_shape())?;
        let (bias, initial_frames, final_frames) = (None, None, None);
        let (residual, params) = (false, *params);
        Ok(Conv3dSpec { x, w, y, bias, residual, params, initial_frames, final_frames })
    }

    /// The number of multiplications and additions by the definition, `2 n k ot oh ow (c/groups) kt r s`, without the
    /// savings of Winograd's algorithms.
    ///
    /// # Errors
    /// As [`Conv3dSpec::new`], because the fields are public and may have been changed since.
    pub fn flops(&self) -> Result<f64> {
        Ok(self.problem()?.flops())
    }

    /// The sizes, after a check of everything that can be checked without tensor values.
    pub(crate) fn problem(&self) -> Result<Problem> {
        let problem = sizes(&self.x, &self.w, &self.params)?;
        let shape = problem.video_shape();
        check_outputs(self.x.dtype, (&self.y, &shape), self.bias.as_ref())?;
        self.check_state(&problem)?;
        Ok(problem)
    }

    /// Checks initial and final frames. With either, the next chunk begins at the place of an output.
    fn check_state(&self, p: &Problem) -> Result<()> {
        let states =
            [("initial_frames", &self.initial_frames), ("final_frames", &self.final_frames)];
        for (name, desc) in states {
            let Some(desc) = desc else { continue };
            if self.params.time_padding == TimePadding::Zeros {
                let expected = "none without a causal time_padding";
                return Err(Error::parameter(name, format!("{:?}", desc.shape()), expected));
            }
            check_tensor(name, desc, self.x.dtype, &[p.n, p.c, p.frames.padding, p.h, p.w])?;
            let stride = p.frames.stride;
            if !p.frames.t.is_multiple_of(stride) {
                let expected = format!("a multiple of {stride} frames, the stride, with {name}");
                return Err(Error::shape("x", self.x.shape(), expected));
            }
        }
        self.final_frames.map_or(Ok(()), |desc| check_unique("final_frames", &desc.layout))
    }
}

/// The sizes; of a causal convolution, the padding of frames is that before the first one.
fn sizes(x: &TensorDesc, w: &TensorDesc, params: &Conv3dParams) -> Result<Problem> {
    let &Conv3dParams { stride, padding, dilation, groups, time_padding, .. } = params;
    let steps = [stride, padding, dilation];
    let (&[_, _, t, ..], &[_, _, kt, ..], false) =
        (x.shape(), w.shape(), time_padding == TimePadding::Zeros)
    else {
        return Problem::new(x, w, steps, groups, false);
    };
    if padding[0] > 0 {
        let expected = "0 frames for a causal convolution";
        return Err(Error::parameter("padding", format!("{padding:?}"), expected));
    }
    let before = kt.saturating_sub(1).saturating_mul(dilation[0]);
    let mut shape = x.shape().to_vec();
    shape[2] = t.saturating_add(before);
    // The sizes of a video that has these frames; where they lie does not matter.
    let layout = Layout::strided(&shape, &vec![0; shape.len()])?;
    let mut problem = Problem::new(&TensorDesc { layout, ..*x }, w, steps, groups, false)?;
    problem.frames = Frames { t, padding: before, ..problem.frames };
    Ok(problem)
}
