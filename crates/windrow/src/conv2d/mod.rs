//! Two-dimensional convolution, and with frames three-dimensional convolution (`conv3d`).

mod configuration;
pub(crate) mod conv3d;
mod cpu;
mod frame_reads;
mod gpu;
mod mirrored;
mod networks;
mod params;
mod plan;
mod problem;
pub(crate) mod random;
mod reference;
mod spec;
#[cfg(test)]
mod tests;
mod tuning;
pub(crate) mod verify;
pub(crate) mod winograd;
pub(crate) mod winograd_reference;

pub use configuration::Conv2dConfiguration;
pub use conv3d::{Conv3d, Conv3dArgs, Conv3dOutputs, Conv3dPlan, Conv3dSpec, conv3d};
pub(crate) use gpu::kernels as gpu_kernels;
pub use params::{Conv2dParams, Conv3dParams, TimePadding};
pub use plan::{
    Conv2d, Conv2dArgs, Conv2dChain, Conv2dLink, Conv2dPlan, FilterCache, PackedWeights, Weights,
};
pub(crate) use problem::Problem;
pub use spec::{Conv2dAlgorithm, Conv2dSpec, Tile};

use crate::{Device, Filter, PlanOptions, Result, Tensor, TensorRef, Workspace};

/// The result `y = act(conv2d(x, w) + bias)`, computed on the CPU in one call. The algorithm is chosen as for a plan
/// with [`Filter::Changing`] and otherwise default options.
///
/// `x` [n, c, h, w] and the filter `w` [k, c/groups, r, s] have the same element type: f32, f16 or bf16. `bias` `[k]`
/// has this type or f32. All three may have any strides. The result has no gaps. It is channels-last if x is, otherwise
/// NCHW. To run the same shapes often, use a [`Conv2dPlan`]: its runs write into memory of the caller, and it can
/// convert the filter once for many runs.
///
/// # Errors
/// As [`Conv2dSpec::new`], [`Conv2dPlan::new`] and [`Conv2dPlan::run`], and
/// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
///
/// ```
/// use windrow::{Conv2dParams, Tensor, conv2d};
/// let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], &[1, 1, 3, 3])?;
/// let w = Tensor::from_slice(&[1f32, 0.0, 0.0, -1.0], &[1, 1, 2, 2])?;
/// let y = conv2d(&x.as_ref(), &w.as_ref(), None, &Conv2dParams::default())?;
/// assert_eq!(y.to_vec::<f32>()?, [-4.0; 4]);
/// # Ok::<(), windrow::Error>(())
/// ```
pub fn conv2d(
    x: &TensorRef<'_>,
    w: &TensorRef<'_>,
    bias: Option<&TensorRef<'_>>,
    params: &Conv2dParams,
) -> Result<Tensor> {
    let mut spec = Conv2dSpec::new(*x.desc(), *w.desc(), params)?;
    spec.bias = bias.map(|bias| *bias.desc());
    let options = PlanOptions { filter: Filter::Changing, ..Default::default() };
    let plan = Conv2dPlan::new(&spec, &options)?;
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
    let mut y = Tensor::uninitialised(spec.y)?;
    let args = Conv2dArgs::new(*x, *w).with_bias(bias.copied());
    plan.run(&args, y.as_mut(), &mut workspace)?;
    Ok(y)
}
