//! `CausalConvWithState`.

use crate::operator::{Kernel, Outcome};
use crate::plans::Plans;
use crate::tensors::{Attributes, Tensors, invalid, seen_as};
use std::ffi::CStr;
use windrow::{
    Activation, CausalConv1dArgs, CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dSpec, Device,
    TensorDesc, Workspace,
};

/// The operator `CausalConvWithState` as in ONNX since opset 27: input [b, c, l], weight [c, 1, k], bias [c] and the
/// state before [b, c, k - 1]; gives the output and the state after. `activation` may be any of Windrow's.
pub(crate) struct CausalConvWithState {
    activation: Activation,
    plans: Plans<CausalConv1dSpec, CausalConv1dPlan>,
}

impl Kernel for CausalConvWithState {
    const NAME: &'static CStr = c"CausalConvWithState";
    const INPUTS: &'static [bool] = &[true, true, false, false];
    const OUTPUTS: usize = 2;

    fn new(attributes: &Attributes<'_>) -> Outcome<Self> {
        let activation = attributes.word(c"activation")?;
        Ok(CausalConvWithState { activation, plans: Plans::new() })
    }

    fn compute(&self, tensors: &Tensors<'_>) -> Outcome<()> {
        let (x, weight) = (tensors.input(0)?, tensors.input(1)?);
        let (bias, past) = (tensors.optional_input(2)?, tensors.optional_input(3)?);
        let &[d, 1, width] = weight.shape() else {
            let shape = weight.shape();
            return Err(invalid(format!(
                "`weight` has shape {shape:?}, expected [channels, 1, k]"
            )));
        };
        let weight = seen_as(weight, &[d, width])?;
        let spec = CausalConv1dSpec::new(*x.desc(), *weight.desc())?;
        let y_desc = TensorDesc::contiguous(x.dtype(), x.shape())?;
        let present_desc = TensorDesc::contiguous(x.dtype(), &spec.states_shape()?)?;
        let spec = spec
            .with_output(y_desc)
            .with_activation(self.activation)
            .with_bias(bias.map(|b| *b.desc()))
            .with_initial_states(past.map(|p| *p.desc()))
            .with_final_states(present_desc);
        let plan = self.plans.get(spec, CausalConv1dPlan::new)?;
        let y = tensors.output(0, x.shape(), y_desc)?;
        let present = tensors.output(1, present_desc.shape(), present_desc)?;
        let args = CausalConv1dArgs::new(x, weight).with_bias(bias).with_initial_states(past);
        let outputs = CausalConv1dOutputs::new(y).with_final_states(present);
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
        Ok(plan.run(&args, outputs, &mut workspace)?)
    }
}
