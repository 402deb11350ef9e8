//! Causal convolutions with packed sequences and states, right and wrong ones, and their gradients.

#![no_main]

use libfuzzer_sys::fuzz_target;
use windrow::{
    CausalConv1dArgs, CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dPlan, CausalConv1dSpec,
    Device, Tensor,
};
use windrow_fuzz::{
    Result, Unstructured, activation, compute_type, desc, f32_or, gradient, integers, judge,
    options, size, tensor, workspace,
};

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let dtype = compute_type(u)?;
    let (b, d, l, width) = (size(u, 3)?, size(u, 20)?, size(u, 40)?, size(u, 6)?);
    let dense = u.ratio(1, 4)?;
    let Some(x) = desc(u, dtype, &[b, d, l])? else { return Ok(()) };
    let d_out = if dense { size(u, 20)? } else { d };
    let weight_shape = if dense { vec![d_out, d, width] } else { vec![d, width] };
    let weight_type = f32_or(u, dtype)?;
    let Some(weight) = desc(u, weight_type, &weight_shape)? else { return Ok(()) };
    let Ok(spec) = CausalConv1dSpec::new(x, weight) else { return Ok(()) };
    let mut spec = spec.with_activation(activation(u)?);
    if u.arbitrary()? {
        let dtype = f32_or(u, dtype)?;
        spec.bias = desc(u, dtype, &[d_out])?;
    }
    let high = i32::try_from(l).unwrap_or(i32::MAX).saturating_add(1).max(1);
    let (mut seq_idx, mut cu_seqlens) = (None, None);
    let mut sequences = b;
    match u.int_in_range(0..=2)? {
        0 => seq_idx = integers(u, &[b, l], -1, 3)?,
        1 => {
            sequences = u.int_in_range(0..=4)?;
            cu_seqlens = integers(u, &[sequences + 1], -1, high)?;
        }
        _ => {}
    }
    spec.seq_idx = seq_idx.as_ref().map(|t| *t.desc());
    spec.cu_seqlens = cu_seqlens.as_ref().map(|t| *t.desc());
    let states = [sequences, d, width.saturating_sub(1)];
    if u.arbitrary()? {
        spec.initial_states = desc(u, dtype, &states)?;
    }
    if u.arbitrary()? {
        spec.final_states = desc(u, dtype, &states)?;
    }
    let options = options(u)?;
    let (Some(x), Some(weight)) = (tensor(1, spec.x), tensor(2, spec.weight)) else {
        return Ok(());
    };
    let bias = spec.bias.and_then(|desc| tensor(3, desc));
    let initial_states = spec.initial_states.and_then(|desc| tensor(4, desc));
    for algorithm in CausalConv1dPlan::algorithms(&spec, Device::Cpu) {
        let Ok(plan) = CausalConv1dPlan::with_algorithm(&spec, algorithm, &options) else {
            continue;
        };
        let Some(mut y) = tensor(5, spec.y) else { return Ok(()) };
        let mut final_states = spec.final_states.and_then(|desc| tensor(6, desc));
        let args = CausalConv1dArgs {
            x: x.as_ref(),
            weight: weight.as_ref(),
            bias: bias.as_ref().map(|t| t.as_ref()),
            seq_idx: seq_idx.as_ref().map(|t| t.as_ref()),
            cu_seqlens: cu_seqlens.as_ref().map(|t| t.as_ref()),
            initial_states: initial_states.as_ref().map(|t| t.as_ref()),
        };
        let outputs = CausalConv1dOutputs {
            y: y.as_mut(),
            final_states: final_states.as_mut().map(|t| t.as_mut()),
        };
        let Some(mut workspace) = workspace(plan.workspace_bytes()) else { return Ok(()) };
        judge(plan.run(&args, outputs, &mut workspace));

        let Some(dy) = desc(u, dtype, &[b, d_out, l])?.and_then(|desc| tensor(7, desc)) else {
            continue;
        };
        let dfinal_states = gradient(u, dtype, &states)?;
        let (mut dx, sum_type) = (gradient(u, dtype, &[b, d, l])?, f32_or(u, dtype)?);
        let mut dweight = gradient(u, sum_type, &weight_shape)?;
        let mut dbias = gradient(u, sum_type, &[d_out])?;
        let mut dinitial_states = gradient(u, dtype, &states)?;
        let grads = CausalConv1dGrads {
            dx: dx.as_mut().map(Tensor::as_mut),
            dweight: dweight.as_mut().map(Tensor::as_mut),
            dbias: dbias.as_mut().map(Tensor::as_mut),
            dinitial_states: dinitial_states.as_mut().map(Tensor::as_mut),
        };
        let dfinal_states = dfinal_states.as_ref().map(Tensor::as_ref);
        judge(plan.backward(&args, dy.as_ref(), dfinal_states, grads, &mut workspace));
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    // Too little data is no finding.
    let _ = run(&mut Unstructured::new(data));
});
