//! The gradients of a causal convolution, computed with its plan.

use super::CausalConv1dPlan;
use crate::causal_conv1d::{CausalConv1dArgs, CausalConv1dGrads, comparison};
use crate::plan::{Type, engine};
use crate::{Error, Result, TensorRef, Workspace};

impl CausalConv1dPlan {
    /// Computes the gradients in `grads` from `dy` [b, d_out, l], the gradient of y; if the outputs are split, of all
    /// their channels in one tensor. If the loss depends on the final states, give their gradient as `dfinal_states`,
    /// of their shape. Both have x's type and may have any strides. The sums before the activation are computed again from `args`, so `y` is not needed.
    ///
    /// # Errors
    /// As [`CausalConv1dPlan::run`], and [`Error::Unsupported`] with a norm.
    pub fn backward(
        &self,
        args: &CausalConv1dArgs<'_>,
        dy: TensorRef<'_>,
        dfinal_states: Option<TensorRef<'_>>,
        mut grads: CausalConv1dGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let given = (&dy, dfinal_states.as_ref());
        self.check_grads(args, given, &grads, workspace)?;
        self.verified(
            &mut grads,
            workspace,
            |_| Ok(()),
            |grads, workspace| {
                engine!(self, engine => engine.backward(self, args, given, grads, workspace))
            },
            |grads, ()| comparison::backward_checks(&self.reference(args)?, given, grads),
        )
    }

    fn check_grads(
        &self,
        args: &CausalConv1dArgs<'_>,
        (dy, dfinal_states): (&TensorRef<'_>, Option<&TensorRef<'_>>),
        grads: &CausalConv1dGrads<'_>,
        workspace: &Workspace,
    ) -> Result<()> {
        if self.spec.norm.is_some() {
            return Err(Error::unsupported(
                "gradients of causal_conv1d with a norm",
                "make a plan without it, and compute the norm and its gradient behind the convolution",
            ));
        }
        let (problem, dtype) = (&self.problem, self.spec.x.dtype);
        let states = self.spec.states_shape()?;
        let mut checks = self.check_run(args, workspace)?;
        checks.read_strided("dy", dy, dtype, &problem.y_shape())?;
        if let Some(dfinal_states) = dfinal_states {
            checks.read_strided("dfinal_states", dfinal_states, dtype, &states)?;
        }
        let CausalConv1dGrads { dx, dweight, dbias, dinitial_states } = grads;
        let (own, sum) = (Type::Exactly(dtype), Type::OrF32(dtype));
        checks.gradient("dx", dx.as_ref(), own, self.spec.x.shape())?;
        checks.gradient("dweight", dweight.as_ref(), sum, self.spec.weight.shape())?;
        checks.gradient("dbias", dbias.as_ref(), sum, &[problem.d_out])?;
        checks.gradient("dinitial_states", dinitial_states.as_ref(), own, &states)
    }
}
