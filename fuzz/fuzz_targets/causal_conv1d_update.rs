//! Decoding steps with ring buffers and state pools, indices in and out of range.

#![no_main]

use libfuzzer_sys::fuzz_target;
use windrow::{CausalConv1dUpdateArgs, CausalConv1dUpdatePlan, CausalConv1dUpdateSpec};
use windrow_fuzz::{
    Result, Unstructured, activation, compute_type, desc, f32_or, integers, judge, options, size,
    tensor, workspace,
};

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let dtype = compute_type(u)?;
    let (b, d, l, width) = (size(u, 3)?, size(u, 40)?, size(u, 5)?, size(u, 6)?);
    let pool = if u.arbitrary()? { b } else { size(u, 6)? };
    let Some(x) = desc(u, dtype, &[b, d, l])? else { return Ok(()) };
    let weight_type = f32_or(u, dtype)?;
    let Some(weight) = desc(u, weight_type, &[d, width])? else { return Ok(()) };
    let state_len = size(u, 9)?;
    let Some(conv_state) = desc(u, dtype, &[pool, d, state_len])? else { return Ok(()) };
    let Ok(spec) = CausalConv1dUpdateSpec::new(x, conv_state, weight) else { return Ok(()) };
    let mut spec = spec.with_activation(activation(u)?);
    if u.arbitrary()? {
        let dtype = f32_or(u, dtype)?;
        spec.bias = desc(u, dtype, &[d])?;
    }
    let (mut cache_seqlens, mut conv_state_indices) = (None, None);
    if u.arbitrary()? {
        cache_seqlens = integers(u, &[b], -2, 100)?;
    }
    if u.arbitrary()? {
        conv_state_indices = integers(u, &[b], -2, 7)?;
    }
    spec.cache_seqlens = cache_seqlens.as_ref().map(|t| *t.desc());
    spec.conv_state_indices = conv_state_indices.as_ref().map(|t| *t.desc());
    let Ok(plan) = CausalConv1dUpdatePlan::new(&spec, &options(u)?) else { return Ok(()) };
    let (Some(x), Some(weight)) = (tensor(1, spec.x), tensor(2, spec.weight)) else {
        return Ok(());
    };
    let (Some(mut state), Some(mut y)) = (tensor(3, spec.conv_state), tensor(4, spec.y)) else {
        return Ok(());
    };
    let bias = spec.bias.and_then(|desc| tensor(5, desc));
    let args = CausalConv1dUpdateArgs {
        x: x.as_ref(),
        weight: weight.as_ref(),
        bias: bias.as_ref().map(|t| t.as_ref()),
        cache_seqlens: cache_seqlens.as_ref().map(|t| t.as_ref()),
        conv_state_indices: conv_state_indices.as_ref().map(|t| t.as_ref()),
    };
    let Some(mut workspace) = workspace(plan.workspace_bytes()) else { return Ok(()) };
    judge(plan.run(&args, state.as_mut(), y.as_mut(), &mut workspace));
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    // Too little data is no finding.
    let _ = run(&mut Unstructured::new(data));
});
