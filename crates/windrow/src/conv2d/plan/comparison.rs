//! What a plan's results, and the stages that lead to them, are compared with.

use super::packed::filter;
use super::{Backend, Conv2dArgs, Conv2dPlan};
use crate::conv2d::reference::{self, Expected};
use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Problem, Tile};
use crate::cuda::download;
use crate::gelu::verify::CUDA_HALF_POLYNOMIALS;
use crate::verify::Comparison;
use crate::{Activation, DType, Device, Error, Result, TensorRef};

impl Conv2dPlan {
    /// Compares a result of [`Conv2dPlan::run`] with the f64 oracle.
    ///
    /// # Errors
    /// As [`Conv2dPlan::run`] for inputs and `y` that do not fit the spec, [`Error::WrongDevice`],
    /// [`Error::Unsupported`] for a filter packed by a plan without [`Verify::On`](crate::Verify::On).
    pub fn compare(&self, args: &Conv2dArgs<'_>, y: &TensorRef<'_>) -> Result<Comparison> {
        self.check_inputs(args)?;
        self.check_view("y", y.desc(), y.device(), &self.spec.y)?;
        let w = filter(&args.w)?.ok_or_else(|| {
            let reason = "it was packed by a plan that does not verify; give the filter itself";
            Error::unsupported("comparing the result of a packed filter", reason)
        })?;
        self.comparison(args, &w, y)
    }

    pub(super) fn comparison(
        &self,
        args: &Conv2dArgs<'_>,
        w: &[f64],
        y: &TensorRef<'_>,
    ) -> Result<Comparison> {
        let want = self.expected(&args.x, w, args.bias.as_ref())?;
        compare(y, &want, self.tolerance())
    }

    /// What [`Conv2dPlan::run`] should give, with the scale that the plan's tolerance refers to.
    pub(crate) fn expected(
        &self,
        x: &TensorRef<'_>,
        w: &[f64],
        bias: Option<&TensorRef<'_>>,
    ) -> Result<Expected> {
        self.expected_of(&self.problem, x, w, bias)
    }

    /// As [`Conv2dPlan::expected`], of some images and output channels.
    pub(in crate::conv2d) fn expected_of(
        &self,
        part: &Problem,
        x: &TensorRef<'_>,
        w: &[f64],
        bias: Option<&TensorRef<'_>>,
    ) -> Result<Expected> {
        let bias = bias.map(values).transpose()?;
        let (x, activation) = (values(x)?, self.spec.activation);
        let want = reference::forward(part, &x, w, bias.as_deref(), activation);
        Ok(self.widened(&want, part, &x, w))
    }

    /// What the oracle computed of `part`, with the scale that the plan's tolerance refers to.
    pub(in crate::conv2d) fn widened(
        &self,
        want: &Expected,
        part: &Problem,
        x: &[f64],
        w: &[f64],
    ) -> Expected {
        let tile = match &self.backend {
            Backend::Cpu { engine, .. } => engine.tile().map(Tile::m),
            Backend::Cuda { engine, .. } => engine.tile(),
        };
        want.clone().widened(tile.map(|tile| reference::winograd_scale(part, tile, x, w)))
    }

    /// How far an element may be off, relative to its scale.
    pub(crate) fn tolerance(&self) -> f64 {
        let sums = match &self.backend {
            Backend::Cpu { engine, .. } => engine.tolerance(),
            Backend::Cuda { engine, .. } => engine.tolerance(),
        };
        // Slopes reach 1.13; the functions themselves are within 4 units in the last place, but on CUDA for GELU of
        // halves.
        let curved = 1.13 * sums + 8.0 * DType::F32.unit_roundoff();
        let on_cuda = matches!(self.backend, Backend::Cuda { .. });
        match self.spec.activation {
            Activation::Identity | Activation::Relu => sums,
            Activation::Gelu(_) if on_cuda && self.spec.x.dtype.is_half() => {
                curved + CUDA_HALF_POLYNOMIALS
            }
            Activation::Silu | Activation::Gelu(_) => curved,
        }
    }

    /// The im2col matrix [group, term, pixel] that the algorithm multiplies, and the oracle's; `None`
    /// for one that has none.
    pub(crate) fn im2col(&self, x: &TensorRef<'_>) -> Result<Option<(Vec<f32>, Vec<f64>)>> {
        let Backend::Cpu { engine, .. } = &self.backend else { return Ok(None) };
        let Some(matrix) = engine.im2col(x) else { return Ok(None) };
        Ok(Some((matrix, reference::im2col(&self.problem, &x.to_f64_vec()?))))
    }

    /// What the stages of Winograd's algorithm form; `None` for other algorithms.
    pub(crate) fn winograd_stages(
        &self,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        match &self.backend {
            Backend::Cpu { engine, .. } => engine.winograd_stages(w, x),
            Backend::Cuda { engine, gpu } => engine.winograd_stages(gpu, w, x),
        }
    }

    /// How far elements of U, V and M may be off, relative to their scale.
    pub(crate) fn stage_tolerances(&self, tile: Tile) -> [f64; 3] {
        // Two transforms in a row, each of up to alpha products with a rounded coefficient, and sums.
        let transforms = (4 * tile.alpha()) as f64 * DType::F32.unit_roundoff();
        let sums = self.problem.c as f64 * DType::F32.unit_roundoff();
        match &self.backend {
            // U is formed in f64, so that only the last rounding is left.
            Backend::Cpu { .. } => [1e-12, transforms, sums + transforms],
            Backend::Cuda { engine, .. } => {
                let (stored, multiplied) = engine.operand_roundings();
                let m = 2.0 * (sums + transforms + multiplied);
                [transforms + stored, transforms + stored, m]
            }
        }
    }
}

/// All elements in row-major order, from whatever device.
pub(in crate::conv2d) fn values(x: &TensorRef<'_>) -> Result<Vec<f64>> {
    match x.device() {
        Device::Cpu => x.to_f64_vec(),
        Device::Cuda(index) => download(x, index)?.as_ref().to_f64_vec(),
    }
}

/// Compares a result, on whatever device, with what the oracle says.
pub(in crate::conv2d) fn compare(
    got: &TensorRef<'_>,
    want: &Expected,
    tolerance: f64,
) -> Result<Comparison> {
    let of = |got: &TensorRef<'_>| Comparison::of(got, &want.values, &want.scale, tolerance);
    match got.device() {
        Device::Cpu => of(got),
        Device::Cuda(index) => of(&download(got, index)?.as_ref()),
    }
}
