//! Gradients: checks and dispatch.

use super::{Algorithm, CausalConv1dArgs, CausalConv1dPlan, Gradient};
use crate::causal_conv1d::cpu::Operand;
use crate::causal_conv1d::cpu::backward::Gradients;
use crate::causal_conv1d::cuda;
use crate::causal_conv1d::sequences::Sequences;
use crate::causal_conv1d::verify;
use crate::cpu::SimdElement;
use crate::dtype::with_element;
use crate::tensor::{check_device, check_disjoint, check_dtype, check_tensor};
use crate::{DType, Result, TensorMut, TensorRef, Verify, Workspace};

/// The gradients that a backward run computes: those that are given. Strides are free, without
/// overlap.
#[derive(Debug, Default)]
pub struct CausalConv1dGrads<'a> {
    /// Gradient of `x`: its shape and type.
    pub dx: Option<TensorMut<'a>>,
    /// Gradient of the weight: its shape, f32 or x's type. The same bits on any number of
    /// threads.
    pub dweight: Option<TensorMut<'a>>,
    /// Gradient of the bias `[d_out]`, f32 or x's type. The same bits on any number of threads.
    pub dbias: Option<TensorMut<'a>>,
    /// Gradient of the initial states [b or sequences, d, width-1], of x's type.
    pub dinitial_states: Option<TensorMut<'a>>,
}

impl CausalConv1dPlan {
    /// Computes gradients for `dy` [b, d_out, l] and, if final states were used, `dfinal_states`
    /// [b or sequences, d, width-1], both of x's type and with any strides. The pre-activation is
    /// computed again from `args`; `y` is not needed.
    ///
    /// # Errors
    /// As [`CausalConv1dPlan::run`].
    pub fn backward(
        &self,
        args: &CausalConv1dArgs<'_>,
        dy: TensorRef<'_>,
        dfinal_states: Option<TensorRef<'_>>,
        mut grads: CausalConv1dGrads<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.check_args(args)?;
        self.check_grads(args, &dy, dfinal_states.as_ref(), &grads)?;
        let given = (&dy, dfinal_states.as_ref());
        let spec = &self.spec;
        if let Algorithm::Cuda(direct) = &self.algorithm {
            direct.backward(spec, args, given, &grads, workspace)?;
        } else if let Algorithm::CudaIm2colGemm(_, gradients) = &self.algorithm {
            match gradients {
                cuda::Gradients::Depthwise(direct) => {
                    direct.backward(spec, args, given, &grads, workspace)?;
                }
                cuda::Gradients::Dense(dense) => {
                    dense.run(spec, args, given, &grads, workspace)?;
                }
            }
        } else {
            let sequences = self.sequences(args)?;
            let scratch = workspace.take(self.workspace_bytes())?.as_mut_ptr();
            with_element!(self.spec.x.dtype, T => {
                self.backward_as::<T>(args, sequences, given, &mut grads, scratch);
            });
        }
        if self.options.verify == Verify::On {
            workspace.synchronize()?;
            let checks = verify::backward_checks(&self.reference(args)?, given, &grads)?;
            verify::require("causal_conv1d backward", checks)?;
        }
        Ok(())
    }

    fn backward_as<T: SimdElement>(
        &self,
        args: &CausalConv1dArgs<'_>,
        sequences: Sequences<'_>,
        (dy, dfinal_states): (&TensorRef<'_>, Option<&TensorRef<'_>>),
        grads: &mut CausalConv1dGrads<'_>,
        scratch: *mut u8,
    ) {
        let gradients = Gradients::<T> {
            dy: Operand::input(dy),
            dfinal_states: dfinal_states.map(Operand::input),
            dx: grads.dx.as_mut().map(Operand::output),
            dinitial_states: grads.dinitial_states.as_mut().map(Operand::output),
        };
        let sums = (
            grads.dweight.as_mut().map(TensorMut::reborrow),
            grads.dbias.as_mut().map(TensorMut::reborrow),
        );
        // SAFETY: views, aliasing, indices and the size of the workspace have been checked.
        unsafe {
            let inputs = self.inputs(args, sequences);
            match &self.backward {
                Gradient::Depthwise(backward) => {
                    backward.run(self.isa, &inputs, &gradients, sums, scratch);
                }
                Gradient::Dense(backward) => backward.run(&inputs, &gradients, sums, scratch),
                Gradient::Cuda => unreachable!("runs on a device go another way"),
            }
        }
    }

    fn check_grads(
        &self,
        args: &CausalConv1dArgs<'_>,
        dy: &TensorRef<'_>,
        dfinal_states: Option<&TensorRef<'_>>,
        grads: &CausalConv1dGrads<'_>,
    ) -> Result<()> {
        let (problem, dtype) = (&self.problem, self.spec.x.dtype);
        let states = self.spec.states_shape()?;
        let inputs =
            [("dy", Some(dy), &problem.y_shape()), ("dfinal_states", dfinal_states, &states)];
        for (name, view, shape) in inputs {
            let Some(view) = view else { continue };
            check_device(name, view.device(), self.options.device)?;
            check_tensor(name, view.desc(), dtype, shape)?;
        }
        let x = [problem.b, problem.d, problem.l];
        let outputs: [(_, _, &[usize], bool); 4] = [
            ("dx", &grads.dx, &x, false),
            ("dweight", &grads.dweight, self.spec.weight.shape(), true),
            ("dbias", &grads.dbias, &[problem.d_out], true),
            ("dinitial_states", &grads.dinitial_states, &states, false),
        ];
        for (i, (name, output, shape, may_be_f32)) in outputs.iter().enumerate() {
            let Some(output) = output else { continue };
            check_tensor(name, output.desc(), output.dtype(), shape)?;
            if !(*may_be_f32 && output.dtype() == DType::F32) {
                check_dtype(name, output.dtype(), dtype)?;
            }
            self.check_output(name, output, args)?;
            check_disjoint(name, output, "dy", dy)?;
            if let Some(dfinal_states) = dfinal_states {
                check_disjoint(name, output, "dfinal_states", dfinal_states)?;
            }
            for (other_name, other, ..) in &outputs[..i] {
                if let Some(other) = other {
                    check_disjoint(name, output, other_name, &other.as_ref())?;
                }
            }
        }
        Ok(())
    }
}
