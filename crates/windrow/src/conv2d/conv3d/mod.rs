//! Three-dimensional convolution: the convolutions of images, over the frames of a video.

mod args;
mod chunks;
mod frames;
mod measured;
mod plan;
pub(crate) mod random;
mod spec;
#[cfg(test)]
mod tests;
pub(crate) mod verify;
mod video;

pub use args::{Conv3dArgs, Conv3dOutputs};
pub use plan::{Conv3d, Conv3dPlan};
pub use spec::Conv3dSpec;

use super::Conv3dParams;
use crate::{Device, Filter, PlanOptions, Result, Tensor, TensorRef, Workspace};

/// The result `y = act(conv3d(x, w) + bias)`, computed on the CPU in one call. The algorithm is chosen as for a plan
/// with [`Filter::Changing`] and otherwise default options.
///
/// `x` [n, c, t, h, w] and the filter `w` [k, c/groups, kt, r, s] have the same element type: f32, f16 or bf16. `bias`
/// `[k]` has this type or f32. All three may have any strides. The result has no gaps. It is channels-last if x is,
/// otherwise NCTHW. To run the same shapes often, use a [`Conv3dPlan`].
///
/// # Errors
/// As [`Conv3dSpec::new`], [`Conv3dPlan::new`] and [`Conv3dPlan::run`], and
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
///
/// ```
/// use windrow::{Conv3dParams, Tensor, conv3d};
/// let x = Tensor::from_slice(&[1f32, 2.0, 3.0], &[1, 1, 3, 1, 1])?; // three frames of one pixel
/// let w = Tensor::from_slice(&[10f32, 1.0], &[1, 1, 2, 1, 1])?;
/// let y = conv3d(&x.as_ref(), &w.as_ref(), None, &Conv3dParams::default())?;
/// assert_eq!(y.to_vec::<f32>()?, [12.0, 23.0]);
/// # Ok::<(), windrow::Error>(())
/// ```
pub fn conv3d(
    x: &TensorRef<'_>,
    w: &TensorRef<'_>,
    bias: Option<&TensorRef<'_>>,
    params: &Conv3dParams,
) -> Result<Tensor> {
    let spec = Conv3dSpec::new(*x.desc(), *w.desc(), params)?;
    let spec = spec.with_bias(bias.map(|bias| *bias.desc()));
    let options = PlanOptions { filter: Filter::Changing, ..Default::default() };
    let plan = Conv3dPlan::new(&spec, &options)?;
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
    let mut y = Tensor::uninitialised(spec.y)?;
    plan.run(&Conv3dArgs::new(*x, *w).with_bias(bias.copied()), y.as_mut(), &mut workspace)?;
    Ok(y)
}
