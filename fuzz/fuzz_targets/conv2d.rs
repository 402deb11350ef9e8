//! Convolutions of any shape and options by every algorithm that can compute them, and their gradients.

#![no_main]

use libfuzzer_sys::fuzz_target;
use windrow::{
    Accuracy, Activation, Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec, Device, Weights,
};
use windrow_fuzz::{
    Result, Unstructured, activation, compute_type, desc, f32_or, gradient, judge, one_of, options,
    size, tensor, workspace,
};

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let dtype = compute_type(u)?;
    let groups = if u.ratio(3, 4)? { 1 } else { size(u, 4)? };
    let (c_group, k_group) = (size(u, 20)?, size(u, 40)?);
    let (c, k) = (c_group.saturating_mul(groups), k_group.saturating_mul(groups));
    let x_shape = [size(u, 3)?, c, size(u, 20)?, size(u, 20)?];
    let filter = if u.arbitrary()? { [3, 3] } else { [size(u, 5)?, size(u, 5)?] };
    let Some(x) = desc(u, dtype, &x_shape)? else { return Ok(()) };
    let w_shape = [k, c_group, filter[0], filter[1]];
    let Some(w) = desc(u, dtype, &w_shape)? else { return Ok(()) };
    let mut pair = |max| Ok([size(u, max)?, size(u, max)?]);
    let (stride, padding, dilation) = (pair(2)?, pair(3)?, pair(2)?);
    let params = Conv2dParams {
        stride,
        padding,
        dilation,
        groups,
        activation: activation(u)?,
        accuracy: one_of(u, &[Accuracy::Exact, Accuracy::Fp32, Accuracy::Tf32, Accuracy::Half])?,
    };
    let Ok(mut spec) = Conv2dSpec::new(x, w, &params) else { return Ok(()) };
    if u.arbitrary()? {
        let dtype = f32_or(u, dtype)?;
        spec.bias = desc(u, dtype, &[k])?;
    }
    let y_shape = spec.y.shape().to_vec();
    if u.arbitrary()? {
        let Some(y) = desc(u, dtype, &y_shape)? else { return Ok(()) };
        spec.y = y;
    }
    let options = options(u)?;
    let (Some(x), Some(w)) = (tensor(1, spec.x), tensor(2, spec.w)) else { return Ok(()) };
    let bias = spec.bias.and_then(|desc| tensor(3, desc));
    for algorithm in Conv2dPlan::algorithms(&spec, Device::Cpu) {
        let Ok(plan) = Conv2dPlan::with_algorithm(&spec, algorithm, &options) else { continue };
        let Some(mut y) = tensor(4, spec.y) else { return Ok(()) };
        let bias = bias.as_ref().map(|t| t.as_ref());
        let args = Conv2dArgs { x: x.as_ref(), w: Weights::Raw(w.as_ref()), bias };
        let Some(mut workspace) = workspace(plan.workspace_bytes()) else { return Ok(()) };
        judge(plan.run(&args, y.as_mut(), &mut workspace));
    }

    // Gradients depend on no forward algorithm, and are those of the convolution alone.
    spec.activation = Activation::Identity;
    let Ok(plan) = Conv2dPlan::new(&spec, &options) else { return Ok(()) };
    let Some(mut workspace) = workspace(plan.backward_workspace_bytes()) else { return Ok(()) };
    let (Some(dy), Some(mut dx)) = (tensor(5, spec.y), tensor(6, spec.x)) else { return Ok(()) };
    let (dy, (x, w)) = (dy.as_ref(), (x.as_ref(), w.as_ref()));
    judge(plan.backward_data(&w, &dy, dx.as_mut(), &mut workspace));
    let sum_type = f32_or(u, dtype)?;
    if let Some(mut dw) = gradient(u, sum_type, &w_shape)? {
        judge(plan.backward_weight(&x, &dy, dw.as_mut(), &mut workspace));
    }
    if let Some(mut db) = gradient(u, sum_type, &[k])? {
        judge(plan.backward_bias(&dy, db.as_mut(), &mut workspace));
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    // Too little data is no finding.
    let _ = run(&mut Unstructured::new(data));
});
