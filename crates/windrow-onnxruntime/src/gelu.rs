//! `Gelu`.

use crate::operator::{Kernel, Outcome};
use crate::plans::Plans;
use crate::tensors::{Attributes, Tensors};
use std::ffi::CStr;
use windrow::{Approximate, Device, GeluArgs, GeluPlan, GeluSpec, Workspace};

/// The operator `Gelu` as in ONNX since opset 20: `approximate` is "none" or "tanh".
pub(crate) struct Gelu {
    approximate: Approximate,
    plans: Plans<GeluSpec, GeluPlan>,
}

impl Kernel for Gelu {
    const NAME: &'static CStr = c"Gelu";
    const INPUTS: &'static [bool] = &[true];
    const OUTPUTS: usize = 1;

    fn new(attributes: &Attributes<'_>) -> Outcome<Self> {
        Ok(Gelu { approximate: attributes.word(c"approximate")?, plans: Plans::new() })
    }

    fn compute(&self, tensors: &Tensors<'_>) -> Outcome<()> {
        let x = tensors.input(0)?;
        let spec = GeluSpec::new(*x.desc(), self.approximate)?;
        let y = tensors.output(0, x.shape(), spec.y)?;
        let plan = self.plans.get(spec, GeluPlan::new)?;
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
        Ok(plan.run(&GeluArgs::new(x), y, &mut workspace)?)
    }
}
