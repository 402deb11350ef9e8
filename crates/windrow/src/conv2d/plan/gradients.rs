//! The gradients of a convolution, computed with its plan.

use super::Conv2dPlan;
use crate::conv2d::mirrored::mirrored;
use crate::conv2d::{Conv2dSpec, reference};
use crate::lists::collected;
use crate::plan::{Checks, Type, engine};
use crate::tensor::check_device;
use crate::verification::Expected;
use crate::{Activation, Error, Result, TensorMut, TensorRef, Workspace};

impl Conv2dPlan {
    /// The bytes of workspace that are enough for any one of the three gradients: of x, the filter and the bias.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], and on a GPU [`Error::Backend`], because the first call prepares the gradients.
    pub fn backward_workspace_bytes(&self) -> Result<usize> {
        engine!(self, engine => engine.gradient_bytes(self))
    }

    /// Computes `dx`, the gradient of x, from the filter and `dy`, the gradient of y. The views must have types, shapes
    /// and strides of the spec: `w` those of `spec.w`, `dy` those of `spec.y`, `dx` those of `spec.x`. For stride 1,
    /// dilation 1 and one group the gradient is itself a convolution. One of Winograd's algorithms may then compute it,
    /// if the filter is 3x3 and the spec's accuracy allows it.
    ///
    /// # Errors
    /// As [`Conv2dPlan::run`], and [`Error::Unsupported`] if the spec has an activation. In that case make a plan
    /// without activation, and multiply `dy` by the activation's derivative.
    pub fn backward_data(
        &self,
        w: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        mut dx: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let Conv2dSpec { x, w: filter, y, .. } = &self.spec;
        let mut checks = self.check_backward(workspace)?;
        checks.read("w", Some(w), Some(filter))?;
        checks.read("dy", Some(dy), Some(y))?;
        checks.write("dx", Some(&dx), Some(x))?;
        self.verified(
            &mut dx,
            workspace,
            |_| Ok(()),
            |dx, workspace| engine!(self, engine => engine.data(self, [w, dy], dx, workspace)),
            |dx, ()| {
                let want = self.expected_data(&w.to_f64_vec()?, &dy.to_f64_vec()?)?;
                let [tolerance, _, _] = self.gradient_tolerances()?;
                Ok(vec![want.check("dx", &dx.as_ref(), tolerance)?])
            },
        )
    }

    /// Computes `dw`, the gradient of the filter, [k, c/groups, r, s] with any strides, in f32 or the filter's type.
    /// The result has the same bits for any number of threads.
    ///
    /// # Errors
    /// As [`Conv2dPlan::backward_data`].
    pub fn backward_weight(
        &self,
        x: &TensorRef<'_>,
        dy: &TensorRef<'_>,
        mut dw: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let Conv2dSpec { x: input, w, y, .. } = &self.spec;
        let mut checks = self.check_backward(workspace)?;
        checks.read("x", Some(x), Some(input))?;
        checks.read("dy", Some(dy), Some(y))?;
        checks.gradient("dw", Some(&dw), Type::OrF32(w.dtype), w.shape())?;
        self.verified(
            &mut dw,
            workspace,
            |_| Ok(()),
            |dw, workspace| engine!(self, engine => engine.weight(self, [x, dy], dw, workspace)),
            |dw, ()| {
                let want = self.expected_weight(&x.to_f64_vec()?, &dy.to_f64_vec()?)?;
                let [_, tolerance, _] = self.gradient_tolerances()?;
                Ok(vec![want.check("dw", &dw.as_ref(), tolerance)?])
            },
        )
    }

    /// Computes `db`, the gradient of the bias, `[k]`, in f32 or x's type: the sums of `dy` over images and pixels.
    ///
    /// # Errors
    /// As [`Conv2dPlan::backward_data`].
    pub fn backward_bias(
        &self,
        dy: &TensorRef<'_>,
        mut db: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut checks = self.check_backward(workspace)?;
        checks.read("dy", Some(dy), Some(&self.spec.y))?;
        checks.gradient("db", Some(&db), Type::OrF32(self.spec.x.dtype), &[self.problem.k])?;
        self.verified(
            &mut db,
            workspace,
            |_| Ok(()),
            |db, workspace| engine!(self, engine => engine.bias(self, dy, db, workspace)),
            |db, ()| {
                let want = reference::backward_bias(&self.problem, &dy.to_f64_vec()?)?;
                let [_, _, tolerance] = self.gradient_tolerances()?;
                Ok(vec![want.check("db", &db.as_ref(), tolerance)?])
            },
        )
    }

    /// The oracle's data gradient, with the scales by which its tolerance of [`Self::gradient_tolerances`] is
    /// multiplied.
    pub(crate) fn expected_data(&self, w: &[f64], dy: &[f64]) -> Result<Expected> {
        self.widened_data(reference::backward_data(&self.problem, w, dy)?, w, dy)
    }

    /// The same as [`Self::expected_data`], for the oracle's result `want`.
    pub(in crate::conv2d) fn widened_data(
        &self,
        want: Expected,
        w: &[f64],
        dy: &[f64],
    ) -> Result<Expected> {
        let mut tiles = None;
        if let (Some(tile), Some(spec)) =
            (engine!(self, engine => engine.data_tile(self))?, mirrored(&self.spec, &self.problem))
            && let Ok(p) = spec.problem()
        {
            // The same as in the forward direction, with the channels of the filter swapped. The order of the taps does
            // not matter.
            let taps = p.r * p.s;
            let swapped = (0..p.k * p.c * taps)
                .map(|i| w[((i / taps % p.c) * p.k + i / taps / p.c) * taps + i % taps]);
            tiles = Some(reference::winograd_scale(&p, tile, dy, &collected(swapped)?)?);
        }
        Ok(want.widened(tiles))
    }

    /// The oracle's weight gradient, with the scales by which its tolerance of [`Self::gradient_tolerances`] is
    /// multiplied.
    pub(crate) fn expected_weight(&self, x: &[f64], dy: &[f64]) -> Result<Expected> {
        self.widened_weight(reference::backward_weight(&self.problem, x, dy)?, x, dy)
    }

    /// The same as [`Self::expected_weight`], for the oracle's result `want`.
    pub(in crate::conv2d) fn widened_weight(
        &self,
        want: Expected,
        x: &[f64],
        dy: &[f64],
    ) -> Result<Expected> {
        let tile = engine!(self, engine => engine.weight_tile(self))?;
        let tiles = tile.map(|tile| reference::winograd_weight_scale(&self.problem, tile, x, dy));
        Ok(want.widened(tiles.transpose()?))
    }

    /// The allowed errors of elements of the gradients of x, the filter and the bias, relative to their scale.
    pub(crate) fn gradient_tolerances(&self) -> Result<[f64; 3]> {
        engine!(self, engine => engine.gradient_tolerances(self))
    }

    fn check_backward(&self, workspace: &Workspace) -> Result<Checks> {
        check_device("workspace", workspace.device(), self.device())?;
        match self.spec.activation {
            Activation::Identity => Ok(Checks::new(self.device())),
            other => Err(Error::unsupported(
                format!("the gradient of conv2d with the activation {}", other.name()),
                "make a plan without it and multiply dy by its derivative first",
            )),
        }
    }
}
