//! `bench causal-conv1d --case amd`: a causal conv1d as a product of matrices, a test for AMD's matrix cores. It has
//! batch 1, 2048 positions, 64 channels and 4 taps, in f16.
//!
//! It runs in two modes. The first compares both matrices that are made on the device, and the result. The second
//! compares the result only.

use crate::failure::Failure;
use crate::print;
use windrow::verify::{self, Check, Comparison, random_tensor};
use windrow::{
    CausalConv1dAlgorithm, CausalConv1dArgs, CausalConv1dOutputs, CausalConv1dPlan,
    CausalConv1dSpec, DType, Error, Placed, PlanOptions, TensorDesc, Workspace,
};

/// Positions, channels and taps.
const HI: usize = 2048;
const CI: usize = 64;
const HK: usize = 4;

/// The cases that have a name of their own.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Named {
    /// A causal conv1d as a product of matrices in f16, a test for AMD's matrix cores
    Amd,
}

pub(super) fn run(options: &PlanOptions) -> Result<(), Failure> {
    let device = options.device;
    let mut lines = vec![format!(
        "causal_conv1d on {device}: batch 1, hi {HI}, ci {CI}, hk {HK}, f16, im2col_gemm",
    )];
    let mut wrong = 0;
    let mut say = |mode: &str, what: &str, comparison: &Comparison| {
        let (errors, elements) = (comparison.errors(), comparison.count());
        let largest = comparison.max_abs();
        wrong += errors;
        lines.push(format!("{mode} {what:<15} errors {errors}/{elements}, largest {largest:.1e}"));
    };
    for Check { what, comparison, .. } in verifying(options)? {
        say("verifying ", what, &comparison);
    }
    say("production", "y", &production(options)?);
    lines.push(format!(
        "m {HI}, n {CI}, k {}: {}",
        HK * CI,
        if wrong == 0 { "valid" } else { "wrong" }
    ));
    print::out(format_args!("{}\n", lines.join("\n")))?;
    match wrong {
        0 => Ok(()),
        n => Err(Failure::Verification(format!("{n} elements differ from the oracle"))),
    }
}

/// The case of this name among those of verification: both matrices, the product and the result.
fn verifying(options: &PlanOptions) -> windrow::Result<Vec<Check>> {
    let name = format!("{:?} width {HK} plain", [1, CI, HI]);
    let found = verify::cases(options.device).into_iter().find(|case| {
        case.op == "causal_conv1d"
            && case.algorithm == CausalConv1dAlgorithm::Im2colGemm.name()
            && case.dtype == DType::F16
            && case.layout == "channel_first"
            && case.name == name
    });
    let missing = || Error::unsupported(format!("the document's case on {}", options.device), name);
    let mut checks = (found.ok_or_else(missing)?.run)()?;
    // The document has no gradients.
    checks.retain(|check| ["im2col", "expanded weight", "product", "y"].contains(&check.what));
    Ok(checks)
}

/// Runs a plan once; the comparison says what is wrong with the result.
fn production(options: &PlanOptions) -> windrow::Result<Comparison> {
    let device = options.device;
    let x = TensorDesc::contiguous(DType::F16, &[1, CI, HI])?;
    let weight = TensorDesc::contiguous(DType::F16, &[CI, HK])?;
    let spec = CausalConv1dSpec::new(x, weight)?;
    let plan = CausalConv1dPlan::with_algorithm(&spec, CausalConv1dAlgorithm::Im2colGemm, options)?;
    let place = |seed, desc| Placed::new(random_tensor(seed, desc, -1.0, 1.0)?, device);
    let (x, weight) = (place(1, x)?, place(2, weight)?);
    let mut y = Placed::output(spec.y, device)?;
    let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
    let args = CausalConv1dArgs::new(x.as_ref(), weight.as_ref());
    plan.run(&args, CausalConv1dOutputs::new(y.as_mut()?), &mut workspace)?;
    workspace.synchronize()?;
    plan.compare(&args, &y.as_ref())
}
