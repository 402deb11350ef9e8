//! The runs of a plan that a benchmark measures, and their comparison with the oracle.

use super::{Conv3d, Conv3dArgs, Conv3dPlan, Conv3dSpec};
use crate::conv2d::plan::filter;
use crate::conv2d::{PackedWeights, Weights};
use crate::plan::{Measured, PlanInputs};
use crate::verification::Comparison;
use crate::{Error, Result, TensorDesc, TensorMut, TensorRef, Workspace};
use std::ops::Range;

/// The number of output channels that are compared if no number is given: the first ones, and as many of the last ones.
const SAMPLED_CHANNELS: usize = 2;

impl Measured for Conv3d {
    /// The packed filter.
    type SearchData = Option<PackedWeights>;

    fn y(spec: &Conv3dSpec) -> &TensorDesc {
        &spec.y
    }

    /// Activations as after a ReLU, and weights of mean zero.
    fn range(input: &'static str) -> (f64, f64) {
        (if input == "x" || input == "initial_frames" { 0.0 } else { -1.0 }, 1.0)
    }

    fn prepare(
        bound: &PlanInputs<'_, Conv3d>,
        kept: &mut Option<PackedWeights>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        if let Weights::Raw(w) = bound.args().w {
            *kept = Some(bound.plan.pack_weights(&w, workspace)?);
        }
        Ok(())
    }

    fn run(
        bound: &PlanInputs<'_, Conv3d>,
        kept: &Option<PackedWeights>,
        y: TensorMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut args = bound.args();
        if let Some(packed) = kept {
            args.w = Weights::Packed(packed);
        }
        bound.plan.run(&args, y, workspace)
    }

    fn compare(plan: &Conv3dPlan, args: &Conv3dArgs<'_>, y: &TensorRef<'_>) -> Result<Comparison> {
        let w = filter(&args.w)?.ok_or_else(|| {
            let reason = "it was packed by a plan that does not verify; give the filter itself";
            Error::unsupported("comparing the result of a packed filter", reason)
        })?;
        let [want, _] = plan.expected(args, &w)?;
        want.compare(y, plan.tolerance())
    }

    /// The first and the last output channels of all videos. Groups of channels belong to inputs of their own, so all of
    /// them are compared.
    fn compare_ends(
        plan: &Conv3dPlan,
        args: &Conv3dArgs<'_>,
        y: &TensorRef<'_>,
        count: Option<usize>,
    ) -> Result<Comparison> {
        let k = y.shape()[1];
        let count = count.unwrap_or(SAMPLED_CHANNELS);
        let Weights::Raw(w) = args.w else { return Self::compare(plan, args, y) };
        if plan.spec.params.groups > 1 || 2 * count >= k {
            return Self::compare(plan, args, y);
        }
        let part = |channels: Range<usize>| {
            let w = w.narrow(0, channels.clone())?;
            let bias = args.bias.map(|b| b.narrow(0, channels.clone())).transpose()?;
            let residual = args.residual.map(|r| r.narrow(1, channels.clone())).transpose()?;
            let args = Conv3dArgs { w: Weights::Raw(w), bias, residual, ..*args };
            let [want, _] = plan.expected_of(channels.len(), &args, &w.to_f64_vec()?)?;
            want.compare(&y.narrow(1, channels.clone())?, plan.tolerance())
        };
        let mut comparison = part(0..count)?;
        comparison.merge(&part(k - count..k)?);
        Ok(comparison)
    }
}
