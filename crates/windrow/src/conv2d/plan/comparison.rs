//! The comparison of a plan's results with the oracle, and that of intermediate results: the im2col matrix and the
//! stages of Winograd's algorithms. The *scale* of an element is the sum of the magnitudes of its terms; allowed errors
//! are relative to it.

use super::{Conv2dArgs, Conv2dPlan, Cpu, Weights, filter};
use crate::conv2d::winograd_reference::Stages;
use crate::conv2d::{Conv2dSpec, Problem, Tile, reference};
use crate::plan::{Backend, engine};
use crate::verification::Expected;
use crate::{Activation, DType, Error, Result, TensorRef};
use std::borrow::Cow;

/// The allowed error of the activation of sums with this error: that of the sums, and 8 roundings of the result.
pub(in crate::conv2d) fn activated(sums: f64, activation: Activation) -> f64 {
    match activation.bounds() {
        Some(_) => sums,
        None => {
            let roundings = 8.0 * DType::F32.unit_roundoff() * activation.most_enlarged();
            activation.steepest_slope() * sums + roundings
        }
    }
}

/// The same on GPUs, for a convolution of images. The vector functions are within 4 units in the last place. GELU of f16
/// and bf16 is the exception.
pub(in crate::conv2d) fn activated_on_gpus(sums: f64, spec: &Conv2dSpec) -> f64 {
    let activation = spec.activation;
    let activated = activated(sums, activation);
    match activation.bounds() {
        None if spec.x.dtype.is_half() => activated + activation.half_error_on_gpus(),
        _ => activated,
    }
}

impl Conv2dPlan {
    /// The original filter; an error if it was packed by a plan without [`Verify::On`](crate::Verify::On).
    pub(in crate::conv2d) fn known_filter<'a>(&self, w: &Weights<'a>) -> Result<Cow<'a, [f64]>> {
        self.check_packed(w)?;
        filter(w)?.ok_or_else(|| {
            let reason = "it was packed by a plan that does not verify; give the filter itself";
            Error::unsupported("comparing the result of a packed filter", reason)
        })
    }

    /// The oracle's result for [`Conv2dPlan::run`], with the scales by which [`Conv2dPlan::tolerance`] is multiplied.
    pub(crate) fn expected(&self, args: &Conv2dArgs<'_>, w: &[f64]) -> Result<Expected> {
        self.expected_of(&self.problem, args, w)
    }

    /// The same as [`Conv2dPlan::expected`], for the images and output channels of `part` only.
    pub(in crate::conv2d) fn expected_of(
        &self,
        part: &Problem,
        args: &Conv2dArgs<'_>,
        w: &[f64],
    ) -> Result<Expected> {
        let added = [&args.bias, &args.residual].map(Option::as_ref);
        let [bias, residual] = added.map(|view| view.map(TensorRef::to_f64_vec).transpose());
        let (bias, residual) = (bias?, residual?);
        let (x, activation) = (args.x.to_f64_vec()?, self.spec.activation);
        let added = [bias.as_deref(), residual.as_deref()];
        let want = reference::forward(part, &x, w, added, activation)?;
        self.widened(want, part, &x, w)
    }

    /// The oracle's result `want` for `part`. If the plan uses one of Winograd's algorithms, the scale of each
    /// element's output tile is added to the element's scale.
    pub(in crate::conv2d) fn widened(
        &self,
        want: Expected,
        part: &Problem,
        x: &[f64],
        w: &[f64],
    ) -> Result<Expected> {
        let tile = engine!(self, engine => engine.tile());
        let tiles = tile.map(|tile| reference::winograd_scale(part, tile, x, w));
        Ok(want.widened(tiles.transpose()?))
    }

    /// The allowed error of an element, relative to its scale.
    pub(crate) fn tolerance(&self) -> f64 {
        let sums = engine!(self, engine => engine.tolerance());
        match self.backend {
            Backend::Gpu(_) => activated_on_gpus(sums, &self.spec),
            Backend::Cpu(_) => activated(sums, self.spec.activation),
        }
    }

    /// The im2col matrix [group, term, pixel] of the algorithm, and that of the oracle. `None` on GPUs, and for
    /// algorithms without such a matrix.
    pub(crate) fn im2col(&self, x: &TensorRef<'_>) -> Result<Option<(Vec<f32>, Vec<f64>)>> {
        let Backend::Cpu(Cpu { prepared, .. }) = &self.backend else { return Ok(None) };
        let Some(matrix) = prepared.im2col(x)? else { return Ok(None) };
        Ok(Some((matrix, reference::im2col(&self.problem, &x.to_f64_vec()?)?)))
    }

    /// The stages of Winograd's algorithm; `None` for other algorithms.
    pub(crate) fn winograd_stages(
        &self,
        w: &TensorRef<'_>,
        x: &TensorRef<'_>,
    ) -> Result<Option<Stages<Vec<f32>>>> {
        engine!(self, engine => engine.winograd_stages(w, x))
    }

    /// The errors by underflow of the transformed filter U and of the transformed input V, which are allowed in
    /// addition to the tolerances. That of U is relative to the largest magnitude of an output channel's filter, that
    /// of V to the largest magnitude of an image.
    pub(crate) fn stage_underflows(&self) -> [f64; 2] {
        match &self.backend {
            Backend::Cpu(_) => [0.0; 2],
            Backend::Gpu(gpu) => gpu.underflows(),
        }
    }

    /// The allowed errors of elements of the transformed filter U, the transformed input V and their products M,
    /// relative to their scale.
    pub(crate) fn stage_tolerances(&self, tile: Tile) -> [f64; 3] {
        // Two transforms in a row, each of up to alpha products with a rounded coefficient, and sums.
        let transforms = (4 * tile.alpha()) as f64 * DType::F32.unit_roundoff();
        let sums = self.problem.c as f64 * DType::F32.unit_roundoff();
        engine!(self, engine => engine.stage_tolerances(transforms, sums))
    }
}
