//! The gradients of GELU, computed with its plan.

use super::GeluPlan;
use crate::gelu::{GeluArgs, GeluGrads, GeluSpec, reference};
use crate::plan::{Checks, Type, engine};
use crate::verification::Check;
use crate::{Error, Result, TensorRef, Workspace};

impl GeluPlan {
    /// Computes the gradients that `grads` holds as `Some`, from `dy`, the gradient of the output (shape and type of
    /// `y`, any strides). The gradients must not share memory with inputs or with each other.
    ///
    /// # Errors
    /// As [`GeluPlan::run`], and [`Error::Unsupported`] if the gradient of a bias or a gate is requested and the spec
    /// has none.
    pub fn backward(
        &self,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        mut grads: GeluGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let mut checks = self.check_run(args, workspace)?;
        self.check_grads(&mut checks, dy, &grads)?;
        self.verified(
            &mut grads,
            workspace,
            |_| Ok(()),
            |grads, workspace| engine!(self, engine => engine.backward(self, args, dy, grads, workspace)),
            |grads, ()| self.grads_checks(args, dy, grads),
        )
    }

    fn check_grads(
        &self,
        checks: &mut Checks,
        dy: &TensorRef<'_>,
        grads: &GeluGrads<'_>,
    ) -> Result<()> {
        let GeluSpec { x, bias, gate, .. } = &self.spec;
        let (dtype, shape) = (x.dtype, x.shape());
        for (name, grad, input, planned) in [
            ("dgate", &grads.dgate, "gate", gate.is_some()),
            ("dbias", &grads.dbias, "bias", bias.is_some()),
        ] {
            if grad.is_some() && !planned {
                return Err(Error::unsupported(name, format!("the plan has no {input}")));
            }
        }
        checks.read_strided("dy", dy, dtype, shape)?;
        checks.gradient("dx", grads.dx.as_ref(), Type::Exactly(dtype), shape)?;
        checks.gradient("dgate", grads.dgate.as_ref(), Type::Exactly(dtype), shape)?;
        let last = &shape[shape.len().saturating_sub(1)..];
        checks.gradient("dbias", grads.dbias.as_ref(), Type::OrF32(dtype), last)
    }

    /// The comparisons of the requested gradients with the oracle.
    fn grads_checks(
        &self,
        args: &GeluArgs<'_>,
        dy: &TensorRef<'_>,
        grads: &GeluGrads<'_>,
    ) -> Result<Vec<Check>> {
        // Without elements there may be no memory for a gradient that is not requested.
        let summed = grads.dbias.is_some() || !self.spec.x.layout.is_empty();
        let last = self.spec.x.shape().last().copied().unwrap_or(1);
        let last = if summed { last } else { 0 };
        let want = reference::backward(&self.oracle_inputs(args)?, &dy.to_f64_vec()?, last)?;
        [
            ("dx", &grads.dx, &want.dx),
            ("dgate", &grads.dgate, &want.dgate),
            ("dbias", &grads.dbias, &want.dbias),
        ]
        .into_iter()
        .filter_map(|(what, got, want)| {
            Some(want.check(what, &got.as_ref()?.as_ref(), self.tolerance()))
        })
        .collect()
    }
}
