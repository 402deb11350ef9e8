//! Comparison with the oracle, and the room's cases for `windrow verify`.

use super::cpu::dense_backward::most_tokens;
use super::cpu::epilogue::HALF_ERROR;
use super::reference::{Expected, Reference, UpdateReference};
use super::sample::{Sample, UpdateSample};
use super::{
    CausalConv1dAlgorithm, CausalConv1dGrads, CausalConv1dOutputs, CausalConv1dPlan,
    CausalConv1dSpec, CausalConv1dUpdatePlan, CausalConv1dUpdateSpec, Problem,
};
use crate::cpu::gemm::MAX_TERMS;
use crate::verify::{Case, Check, Comparison};
use crate::{
    Activation, DType, Device, Layout, PlanOptions, Result, TensorDesc, TensorMut, TensorRef,
    Workspace,
};

/// Most additions in a row that form an element of a sum of `terms` products: of a matrix product's
/// block, then of the blocks.
fn additions(terms: usize) -> usize {
    terms.min(MAX_TERMS + terms.div_ceil(MAX_TERMS))
}

/// Additions of the sum before the activation.
fn forward_additions(problem: &Problem) -> usize {
    additions(if problem.dense { problem.width * problem.d } else { problem.width })
}

/// Roundings of a sum of products and a bias, in units of f32, and of the activation (4 units in the
/// last place, 8 roundings' worth), whose slope is at most 1.2. For half types SiLU is only
/// computed to the few bits more that they need.
fn forward_tolerance(problem: &Problem, activation: Activation, y: DType) -> f64 {
    let sum = forward_additions(problem) as f64 + 1.0;
    let f32_error = (1.2 * sum + 8.0) * DType::F32.unit_roundoff();
    match activation {
        Activation::Silu if y.is_half() => f32_error + HALF_ERROR,
        _ => f32_error,
    }
}

/// As [`forward_tolerance`], with the derivative's roundings (9) and a sum of `additions` products in
/// addition.
fn backward_tolerance(problem: &Problem, additions: usize) -> f64 {
    ((forward_additions(problem) + additions) as f64 + 12.0) * DType::F32.unit_roundoff()
}

fn check(
    what: &'static str,
    got: &TensorRef<'_>,
    want: &Expected,
    tolerance: f64,
) -> Result<Check> {
    Ok(Check { what, comparison: Comparison::of(got, &want.values, &want.scale, tolerance)? })
}

/// Equal bit for bit, but for the sign of a zero and the bits of a NaN.
fn check_equal(what: &'static str, got: &TensorRef<'_>, want: &[f64]) -> Result<Check> {
    Ok(Check { what, comparison: Comparison::of(got, want, &vec![0.0; want.len()], 0.0)? })
}

/// `y` of a run.
pub(crate) fn compare_output(reference: &Reference, y: &TensorRef<'_>) -> Result<Comparison> {
    let want = reference.forward();
    let tolerance = forward_tolerance(&reference.problem, reference.activation, y.dtype());
    Comparison::of(y, &want.values, &want.scale, tolerance)
}

/// The outputs of a run.
pub(crate) fn forward_checks(
    reference: &Reference,
    outputs: &CausalConv1dOutputs<'_>,
) -> Result<Vec<Check>> {
    let comparison = compare_output(reference, &outputs.y.as_ref())?;
    let mut checks = vec![Check { what: "y", comparison }];
    if let Some(states) = &outputs.final_states {
        checks.push(check_equal("final_states", &states.as_ref(), &reference.final_states())?);
    }
    Ok(checks)
}

/// The gradients that were asked for.
pub(crate) fn backward_checks(
    reference: &Reference,
    (dy, dfinal_states): (&TensorRef<'_>, Option<&TensorRef<'_>>),
    grads: &CausalConv1dGrads<'_>,
) -> Result<Vec<Check>> {
    let problem = &reference.problem;
    let dfinal_states = dfinal_states.map(TensorRef::to_f64_vec).transpose()?;
    let asked = [grads.dbias.is_some(), grads.dinitial_states.is_some()];
    let want = reference.backward(&dy.to_f64_vec()?, dfinal_states.as_deref(), asked);
    // Sums over taps, and over tokens: these go through tiles of 64 and pieces of 1024 tokens, or 8
    // widths, in f32, or through matrix products.
    let (taps, tokens) = match problem.dense {
        true => (additions(problem.d_out) + problem.width, additions(most_tokens(problem.width))),
        false => (problem.width + 1, 64 + 16 + problem.width / 8),
    };
    let checks = [
        ("dx", &grads.dx, want.dx, taps),
        ("dweight", &grads.dweight, want.dweight, tokens),
        ("dbias", &grads.dbias, want.dbias, tokens),
        ("dinitial_states", &grads.dinitial_states, want.dinitial_states, taps),
    ];
    let given = checks.into_iter().filter_map(|(what, got, want, additions)| {
        let got = got.as_ref()?.as_ref();
        Some(check(what, &got, &want, backward_tolerance(problem, additions)))
    });
    given.collect()
}

/// The result of an update that began with the states `conv_state`.
pub(crate) fn update_checks(
    reference: &UpdateReference,
    conv_state: &mut [f64],
    got_state: &TensorMut<'_>,
    y: &TensorMut<'_>,
) -> Result<Vec<Check>> {
    let want = reference.run(conv_state);
    let tolerance = forward_tolerance(&reference.problem, reference.activation, y.dtype());
    Ok(vec![
        check("y", &y.as_ref(), &want, tolerance)?,
        check_equal("conv_state", &got_state.as_ref(), conv_state)?,
    ])
}

/// [`Error::Verification`](crate::Error::Verification) for the first check that fails, named after
/// `op`.
pub(crate) fn require(op: &str, checks: Vec<Check>) -> Result<()> {
    checks
        .into_iter()
        .try_for_each(|check| check.comparison.into_result(&format!("{op} {}", check.what)))
}

/// The stages of [`CausalConv1dAlgorithm::Im2colGemm`]: both operands of the product, which are
/// copies.
pub(crate) fn stage_checks(
    reference: &Reference,
    im2col: &[f32],
    weight: &[f32],
) -> Result<Vec<Check>> {
    let Problem { b, .. } = reference.problem;
    let want: Vec<f64> = (0..b).flat_map(|b| reference.im2col(b)).collect();
    Ok(vec![
        check_equal("im2col", &TensorRef::new(im2col, &[im2col.len()])?, &want)?,
        check_equal(
            "expanded weight",
            &TensorRef::new(weight, &[weight.len()])?,
            &reference.expanded_weight(),
        )?,
    ])
}

/// Runs forward, stages and backward of a plan on a sample of its spec.
pub(crate) fn run(plan: &CausalConv1dPlan, sample: &mut Sample) -> Result<Vec<Check>> {
    let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes())?;
    let args = sample.inputs.args();
    let reference = plan.reference(&args)?;
    let mut outputs = CausalConv1dOutputs {
        y: sample.y.as_mut()?,
        final_states: sample.final_states.as_mut().map(|states| states.as_mut()).transpose()?,
    };
    let written = CausalConv1dOutputs {
        y: outputs.y.reborrow(),
        final_states: outputs.final_states.as_mut().map(TensorMut::reborrow),
    };
    plan.run(&args, written, &mut workspace)?;
    workspace.synchronize()?;
    let mut checks = forward_checks(&reference, &outputs)?;
    if let Some((im2col, weight)) = plan.stages(&args)? {
        checks.extend(stage_checks(&reference, &im2col, &weight)?);
    }
    if let Some(product) = plan.product(&args)? {
        let got = TensorRef::new(&product, &[product.len()])?;
        // Sums of f32, whatever y's type.
        let tolerance = forward_tolerance(&reference.problem, Activation::Identity, DType::F32);
        checks.push(check("product", &got, &reference.product(), tolerance)?);
    }
    let (dy, dfinal) = (sample.dy.as_ref(), sample.dfinal_states.as_ref());
    let dfinal = dfinal.map(|states| states.as_ref());
    plan.backward(&args, dy, dfinal, sample.gradients.views()?, &mut workspace)?;
    workspace.synchronize()?;
    let grads = sample.gradients.views()?;
    checks.extend(backward_checks(&reference, (&dy, dfinal.as_ref()), &grads)?);
    Ok(checks)
}

/// Runs an update on a sample of its spec.
pub(crate) fn run_update(
    plan: &CausalConv1dUpdatePlan,
    sample: &mut UpdateSample,
) -> Result<Vec<Check>> {
    let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes())?;
    let args = sample.inputs.args();
    let mut conv_state = sample.conv_state.as_mut()?;
    let mut y = sample.y.as_mut()?;
    let (reference, mut before) = plan.reference(&args, &conv_state)?;
    plan.run(&args, conv_state.reborrow(), y.reborrow(), &mut workspace)?;
    workspace.synchronize()?;
    update_checks(&reference, &mut before, &conv_state, &y)
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Dimensions in memory, outermost first.
const LAYOUTS: [(&str, [usize; 3]); 2] =
    [("channel_first", [0, 1, 2]), ("channel_last", [0, 2, 1])];

/// [b, d, l] and width, with their edge cases: nothing, one element, no token, fewer tokens than
/// taps, less than a vector, the source document's case, several tasks.
const SHAPES: [([usize; 3], usize); 9] = [
    ([0, 3, 5], 4),
    ([1, 1, 1], 1),
    ([2, 3, 0], 3),
    ([2, 5, 2], 4),
    ([1, 7, 33], 9),
    ([3, 40, 70], 2),
    ([1, 64, 2048], 4),
    ([2, 96, 300], 3),
    ([1, 530, 131], 4),
];

/// From these sizes on devices run other kernels: many rows with more than a tile each, walks over several
/// rows of the batch, long walks of large tensors.
const LARGE: [([usize; 3], usize, &str); 4] = [
    ([3, 200, 2312], 4, "silu bias"),
    ([2, 2056, 72], 3, "silu bias"),
    ([1, 520, 16392], 4, "silu bias"),
    ([1, 520, 16392], 4, "silu bias seq_idx"),
];

/// Bias, activation, packed sequences and states, by words. Packed sequences run other kernels with states
/// than without.
const OPTIONS: [&str; 6] = [
    "plain",
    "silu bias states",
    "gelu seq_idx states",
    "relu bias cu_seqlens states",
    "silu bias seq_idx",
    "silu bias cu_seqlens",
];
const DENSE_OPTIONS: [&str; 3] =
    ["silu bias states", "gelu seq_idx states", "relu bias cu_seqlens states"];

/// Every algorithm, type, layout and shape, depthwise and with three output channels, with every option, forward and backward, and updates.
pub(crate) fn cases(device: Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for (layout, order) in LAYOUTS {
            for (shape, width) in SHAPES {
                let [_, d, _] = shape;
                let depthwise = OPTIONS.map(|option| (option, "", vec![d, width]));
                let dense = DENSE_OPTIONS.map(|option| (option, "dense ", vec![3, d, width]));
                for (option, kind, weight) in depthwise.into_iter().chain(dense) {
                    let Ok(spec) = spec(dtype, &order, shape, &weight, option) else { continue };
                    push_forward(&mut cases, spec, layout, device, &format!("{kind}{option}"), 2);
                }
            }
            let large = if device == Device::Cpu { &[][..] } else { &LARGE };
            for &(shape, width, option) in large {
                let spec = spec(dtype, &order, shape, &[shape[1], width], option);
                let Ok(spec) = spec else { continue };
                push_forward(&mut cases, spec, layout, device, option, 1);
            }
            for (shape, width) in [([1, 1, 1], 1), ([4, 70, 1], 4), ([3, 33, 5], 3)] {
                for option in ["state", "ring", "pool"] {
                    let Ok(spec) = update_spec(dtype, &order, shape, width, option) else {
                        continue;
                    };
                    let options = PlanOptions { device, ..PlanOptions::default() };
                    if CausalConv1dUpdatePlan::new(&spec, &options).is_err() {
                        continue;
                    }
                    cases.push(Case {
                        op: "causal_conv1d_update",
                        algorithm: CausalConv1dAlgorithm::Direct.name().into(),
                        dtype,
                        layout: layout.into(),
                        name: format!("{shape:?} width {width} {option}"),
                        run: Box::new(move || {
                            let plan = CausalConv1dUpdatePlan::new(&spec, &options)?;
                            run_update(&plan, &mut UpdateSample::on(&spec, 1, device)?)
                        }),
                    });
                }
            }
        }
    }
    cases
}

fn push_forward(
    cases: &mut Vec<Case>,
    spec: CausalConv1dSpec,
    layout: &str,
    device: Device,
    option: &str,
    most: usize,
) {
    let width = spec.weight.shape().last().copied().unwrap_or(0);
    for algorithm in CausalConv1dPlan::algorithms(&spec, device).into_iter().take(most) {
        let spec = spec.clone();
        cases.push(Case {
            op: "causal_conv1d",
            algorithm: algorithm.name().into(),
            dtype: spec.x.dtype,
            layout: layout.into(),
            name: format!("{:?} width {width} {option}", spec.x.shape()),
            run: Box::new(move || {
                let options = PlanOptions { device, ..PlanOptions::default() };
                let plan = CausalConv1dPlan::with_algorithm(&spec, algorithm, &options)?;
                run(&plan, &mut Sample::on(&spec, 1, device)?)
            }),
        });
    }
}

fn spec(
    dtype: DType,
    order: &[usize; 3],
    shape: [usize; 3],
    weight: &[usize],
    option: &str,
) -> Result<CausalConv1dSpec> {
    let [b, _, l] = shape;
    let x = TensorDesc { dtype, layout: Layout::with_order(&shape, order)? };
    let spec = CausalConv1dSpec::new(x, TensorDesc::contiguous(dtype, weight)?)?;
    let has = |word| option.split(' ').any(|w| w == word);
    let mut spec = spec.with_activation(match option {
        _ if has("silu") => Activation::Silu,
        _ if has("relu") => Activation::Relu,
        _ if has("gelu") => Activation::Gelu(crate::Approximate::None),
        _ => Activation::Identity,
    });
    if has("bias") {
        spec.bias = Some(TensorDesc::contiguous(DType::F32, &weight[..1])?);
    }
    if has("seq_idx") {
        spec.seq_idx = Some(TensorDesc::contiguous(DType::I32, &[b, l])?);
    }
    if has("cu_seqlens") {
        spec.cu_seqlens = Some(TensorDesc::contiguous(DType::I64, &[6])?);
    }
    // Such as more rows than boundaries are for.
    let layout = Layout::with_order(&spec.states_shape()?, order)?;
    if has("states") {
        spec.initial_states = Some(TensorDesc { dtype, layout });
        spec.final_states = spec.initial_states;
    }
    Ok(spec)
}

fn update_spec(
    dtype: DType,
    order: &[usize; 3],
    shape: [usize; 3],
    width: usize,
    option: &str,
) -> Result<CausalConv1dUpdateSpec> {
    let [b, d, _] = shape;
    let x = TensorDesc { dtype, layout: Layout::with_order(&shape, order)? };
    let pool = if option == "pool" { 2 * b } else { b };
    let state_len = if option == "state" { width - 1 } else { width };
    let layout = Layout::with_order(&[pool, d, state_len], order)?;
    let weight = TensorDesc::contiguous(DType::F32, &[d, width])?;
    let indices = TensorDesc::contiguous(DType::I32, &[b])?;
    let spec = CausalConv1dUpdateSpec::new(x, TensorDesc { dtype, layout }, weight)?
        .with_bias(TensorDesc::contiguous(DType::F32, &[d])?)
        .with_activation(Activation::Silu);
    Ok(match option {
        "ring" => spec.with_cache_seqlens(indices),
        "pool" => spec.with_cache_seqlens(indices).with_conv_state_indices(indices),
        _ => spec,
    })
}
