//! GELU of any shape and strides, with bias and gate, and its gradients.

#![no_main]

use libfuzzer_sys::fuzz_target;
use windrow::{Approximate, GeluArgs, GeluGrads, GeluPlan, GeluSpec, Tensor, Workspace};
use windrow_fuzz::{
    Result, Unstructured, compute_type, desc, f32_or, gradient, judge, one_of, options, size,
    tensor, workspace,
};

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let dtype = compute_type(u)?;
    let rank = u.int_in_range(0..=4)?;
    let shape = (0..rank).map(|_| size(u, 20)).collect::<Result<Vec<_>>>()?;
    let Some(x) = desc(u, dtype, &shape)? else { return Ok(()) };
    let approximate = one_of(u, &[Approximate::None, Approximate::Tanh])?;
    let Ok(mut spec) = GeluSpec::new(x, approximate) else { return Ok(()) };
    if u.arbitrary()? {
        let length = if u.ratio(1, 8)? { size(u, 20)? } else { *shape.last().unwrap_or(&0) };
        let dtype = f32_or(u, dtype)?;
        spec.bias = desc(u, dtype, &[length])?;
    }
    if u.arbitrary()? {
        spec.gate = desc(u, dtype, &shape)?;
    }
    if u.arbitrary()? {
        let Some(y) = desc(u, dtype, &shape)? else { return Ok(()) };
        spec.y = y;
    }
    let Ok(plan) = GeluPlan::new(&spec, &options(u)?) else { return Ok(()) };
    let (Some(x), Some(mut y)) = (tensor(1, spec.x), tensor(2, spec.y)) else { return Ok(()) };
    let bias = spec.bias.and_then(|desc| tensor(3, desc));
    let gate = spec.gate.and_then(|desc| tensor(4, desc));
    let args = GeluArgs {
        x: x.as_ref(),
        bias: bias.as_ref().map(|t| t.as_ref()),
        gate: gate.as_ref().map(|t| t.as_ref()),
    };
    judge(plan.run(&args, y.as_mut(), &mut Workspace::empty()));

    let Some(dy) = desc(u, dtype, &shape)?.and_then(|desc| tensor(5, desc)) else { return Ok(()) };
    let (mut dx, mut dgate) = (gradient(u, dtype, &shape)?, gradient(u, dtype, &shape)?);
    let sum_type = f32_or(u, dtype)?;
    let mut dbias = gradient(u, sum_type, &shape[shape.len().saturating_sub(1)..])?;
    let grads = GeluGrads {
        dx: dx.as_mut().map(Tensor::as_mut),
        dgate: dgate.as_mut().map(Tensor::as_mut),
        dbias: dbias.as_mut().map(Tensor::as_mut),
    };
    let Some(mut workspace) = workspace(plan.workspace_bytes()) else { return Ok(()) };
    judge(plan.backward(&args, &dy.as_ref(), grads, &mut workspace));
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    // Too little data is no finding.
    let _ = run(&mut Unstructured::new(data));
});
