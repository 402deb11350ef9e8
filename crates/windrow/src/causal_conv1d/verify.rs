//! Cases of causal convolution for `windrow verify`.

use super::comparison::{
    UpdateOracle, backward_checks_with, check_equal, forward_checks_with, forward_tolerance,
};
use super::reference::{Gradients, Reference};
use super::sample::{Held, Sample, UpdateSample, heads, outputs, thirds};
use super::{
    CausalConv1dAlgorithm, CausalConv1dPlan, CausalConv1dSpec, CausalConv1dUpdatePlan,
    CausalConv1dUpdateSpec,
};
use crate::verification::data::scratch;
use crate::verification::{Case, Check, Expected};
use crate::{Activation, DType, Device, Error, Layout, PlanOptions, Result, TensorDesc, TensorRef};
use std::sync::{Arc, OnceLock};

/// The stages of [`CausalConv1dAlgorithm::Im2colGemm`]: both operands of the product, which are
/// copies.
pub(crate) fn stage_checks(
    reference: &Reference,
    im2col: &[f32],
    weight: &[f32],
) -> Result<Vec<Check>> {
    Ok(vec![
        check_equal("im2col", &TensorRef::new(im2col, &[im2col.len()])?, reference.im2col()?)?,
        check_equal(
            "expanded weight",
            &TensorRef::new(weight, &[weight.len()])?,
            reference.expanded_weight()?,
        )?,
    ])
}

/// The oracle's results of a sample, the same for all layouts and algorithms.
pub(crate) struct Oracle {
    reference: Reference,
    forward: Expected,
    gradients: Gradients,
}

impl Oracle {
    pub(crate) fn of(plan: &CausalConv1dPlan, sample: &Sample) -> Result<Self> {
        let reference = plan.reference(&sample.inputs.args())?;
        let dfinal = sample.dfinal_states.as_ref().map(Held::values).transpose()?;
        let gradients = reference.backward(&sample.dy.values()?, dfinal.as_deref(), [true; 2])?;
        Ok(Oracle { forward: reference.forward()?, reference, gradients })
    }
}

/// Runs forward, stages and backward of a plan on a sample of its spec.
#[cfg(test)]
pub(crate) fn run(plan: &CausalConv1dPlan, sample: &mut Sample) -> Result<Vec<Check>> {
    let oracle = Oracle::of(plan, sample)?;
    run_with(&oracle, plan, sample, [true; 4], true)
}

/// Does the same as [`run`], with the wanted gradients in the order of [`CausalConv1dGrads`](super::CausalConv1dGrads),
/// and the stages if `staged`.
pub(crate) fn run_with(
    oracle: &Oracle,
    plan: &CausalConv1dPlan,
    sample: &mut Sample,
    asked: [bool; 4],
    staged: bool,
) -> Result<Vec<Check>> {
    let mut workspace = scratch(plan.device(), plan.workspace_bytes())?;
    let args = sample.inputs.args();
    let reference = &oracle.reference;
    plan.run(
        &args,
        outputs(&mut sample.y, &mut sample.further, &mut sample.final_states)?,
        &mut workspace,
    )?;
    workspace.synchronize()?;
    let written = outputs(&mut sample.y, &mut sample.further, &mut sample.final_states)?;
    let mut checks = forward_checks_with(&oracle.forward, reference, &written)?;
    if staged && let Some((im2col, weight)) = plan.stages(&args)? {
        checks.extend(stage_checks(reference, &im2col, &weight)?);
    }
    if staged && let Some(product) = plan.product(&args)? {
        let got = TensorRef::new(&product, &[product.len()])?;
        // Sums of f32, whatever y's type.
        let tolerance = forward_tolerance(&reference.problem, Activation::Identity, DType::F32);
        checks.push(reference.product()?.check("product", &got, tolerance)?);
    }
    if plan.spec().norm.is_some() {
        return Ok(checks);
    }
    let (dy, dfinal) = (sample.dy.as_ref(), sample.dfinal_states.as_ref());
    let dfinal = dfinal.map(|states| states.as_ref());
    plan.backward(&args, dy, dfinal, sample.gradients.some_views(asked)?, &mut workspace)?;
    workspace.synchronize()?;
    let grads = sample.gradients.some_views(asked)?;
    checks.extend(backward_checks_with(&oracle.gradients, reference, &grads)?);
    Ok(checks)
}

/// Runs an update on a sample of its spec.
pub(crate) fn run_update(
    plan: &CausalConv1dUpdatePlan,
    sample: &mut UpdateSample,
) -> Result<Vec<Check>> {
    let oracle = plan.oracle(&sample.inputs.args(), &sample.conv_state.as_mut()?)?;
    run_update_with(&oracle, plan, sample)
}

/// Does the same as [`run_update`], for a sample for which `oracle` has computed the results.
pub(crate) fn run_update_with(
    oracle: &UpdateOracle,
    plan: &CausalConv1dUpdatePlan,
    sample: &mut UpdateSample,
) -> Result<Vec<Check>> {
    let mut workspace = scratch(plan.device(), plan.workspace_bytes())?;
    let (conv_state, y) = (sample.conv_state.as_mut()?, sample.y.as_mut()?);
    plan.run(&sample.inputs.args(), conv_state, y, &mut workspace)?;
    workspace.synchronize()?;
    oracle.checks(&sample.conv_state.as_ref(), &sample.y.as_ref())
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Dimensions in memory, outermost first.
const LAYOUTS: [(&str, [usize; 3]); 2] =
    [("channel_first", [0, 1, 2]), ("channel_last", [0, 2, 1])];

/// [b, d, l] and width, with their edge cases: nothing, no channel, one element, no token, fewer tokens than
/// taps, less than a vector, the source document's case, several tasks.
const SHAPES: [([usize; 3], usize); 10] = [
    ([0, 3, 5], 4),
    ([2, 0, 9], 3),
    ([1, 1, 1], 1),
    ([2, 3, 0], 3),
    ([2, 5, 2], 4),
    ([1, 7, 33], 9),
    ([3, 40, 70], 2),
    ([1, 64, 2048], 4),
    ([2, 96, 300], 3),
    ([1, 530, 131], 4),
];

/// Elements of the largest shape that every algorithm computes.
const LARGEST: usize = 150_000;

/// For these sizes GPUs run other kernels: many rows with more than a tile each, with and without the gradient of x,
/// walks over several rows of the batch, long walks of large tensors, also of few channels, more rows than a grid has
/// blocks, many taps with weights of x's type and of f32, split outputs, norms.
const LARGE: [([usize; 3], usize, &str); 23] = [
    ([3, 200, 2312], 4, "silu bias"),
    ([3, 200, 2312], 3, "silu bias dx"),
    ([1, 520, 264], 4, "silu bias dx"),
    ([5, 1032, 40], 2, "gelu dx"),
    ([2, 2056, 72], 3, "silu bias"),
    ([1, 520, 16392], 4, "silu bias"),
    ([1, 520, 16392], 4, "silu bias seq_idx"),
    ([1, 520, 16392], 4, "silu bias split"),
    ([1, 520, 16392], 4, "silu bias seq_idx split"),
    ([1, 520, 16392], 7, "silu bias"),
    ([1, 1024, 8200], 4, "silu bias norm"),
    ([1, 264, 33_800], 4, "silu bias dx"),
    ([1, 16, 530_003], 3, "silu bias"),
    ([2, 70, 304], 24, "silu bias"),
    ([2, 70, 304], 24, "silu bias split"),
    ([2, 70, 304], 7, "silu bias f32 weight"),
    ([1, 9, 777], 65, "silu bias"),
    ([3, 33, 1030], 250, "silu bias"),
    ([3, 33, 1030], 16, "silu bias states f32 weight"),
    ([65_540, 2, 3], 3, "silu bias"),
    ([65_540, 2, 3], 3, "silu seq_idx"),
    ([65_540, 2, 3], 3, "silu bias split"),
    ([65_540, 2, 3], 3, "silu bias norm"),
];

/// [b, d, l] and width of updates: channels that fill no vector, and that fill some.
const UPDATES: [([usize; 3], usize); 4] =
    [([1, 1, 1], 1), ([4, 70, 1], 4), ([4, 72, 1], 4), ([3, 33, 5], 3)];

const OPTIONS: [&str; 18] = [
    "plain",
    "silu bias",
    "silu bias states",
    "silu seq_idx",
    "gelu seq_idx states",
    "relu cu_seqlens",
    "relu cu_seqlens states",
    "initial states",
    "final states",
    "silu bias split",
    "gelu seq_idx states split",
    "relu cu_seqlens split",
    "silu bias states dilation",
    "gelu seq_idx states dilation",
    "relu cu_seqlens states dilation split",
    "silu bias split norm",
    "gelu seq_idx states norm",
    "relu cu_seqlens split norm",
];
const DENSE_OPTIONS: [&str; 9] = [
    "silu bias states",
    "silu seq_idx",
    "gelu seq_idx states",
    "relu cu_seqlens",
    "relu cu_seqlens states",
    "silu bias states split",
    "gelu seq_idx states dilation",
    "relu cu_seqlens states dilation",
    "silu bias split norm",
];

/// The gradients that a case requests, in the order of [`CausalConv1dGrads`](super::CausalConv1dGrads): each option
/// with and without that of x.
fn asked(option: &str) -> [bool; 4] {
    let dx = !["silu bias", "relu cu_seqlens"].contains(&option);
    [dx, true, true, true]
}

/// Every algorithm, type, layout and shape, depthwise and with three output channels, with every option,
/// forward and backward, and updates.
pub(crate) fn cases(device: Device) -> Vec<Case> {
    let mut cases = Vec::new();
    let large = if device == Device::Cpu { &[][..] } else { &LARGE };
    for dtype in DTYPES {
        for (shape, width) in SHAPES {
            let [_, d, _] = shape;
            for option in OPTIONS {
                push_forward(&mut cases, dtype, shape, &[d, width], option, device);
            }
            for option in DENSE_OPTIONS {
                push_forward(&mut cases, dtype, shape, &[3, d, width], option, device);
            }
        }
        for &(shape, width, option) in large {
            push_forward(&mut cases, dtype, shape, &[shape[1], width], option, device);
        }
        for (layout, order) in LAYOUTS {
            for (shape, width) in UPDATES {
                for option in ["state", "slots", "ring", "pool"] {
                    let Ok(spec) = update_spec(dtype, &order, shape, width, option) else {
                        continue;
                    };
                    let options = PlanOptions { device, ..PlanOptions::default() };
                    cases.push(Case {
                        op: "causal_conv1d_update",
                        algorithm: CausalConv1dAlgorithm::Direct.name().into(),
                        dtype,
                        layout: layout.into(),
                        name: format!("{shape:?} width {width} {option}"),
                        elements: shape.iter().product(),
                        run: Box::new(move || {
                            let plan = CausalConv1dUpdatePlan::new(&spec, &options)?;
                            run_update(&plan, &mut UpdateSample::on(&spec, 1, device)?)
                        }),
                    });
                }
            }
        }
    }
    cases.extend(super::serving::verify::cases(device));
    cases
}

/// Both layouts with every algorithm, which share an oracle.
fn push_forward(
    cases: &mut Vec<Case>,
    dtype: DType,
    shape: [usize; 3],
    weight: &[usize],
    option: &'static str,
    device: Device,
) {
    let oracle = Arc::new(OnceLock::new());
    let kind = if weight.len() == 3 { "dense " } else { "" };
    for (layout, order) in LAYOUTS {
        let Ok(spec) = spec(dtype, &order, shape, weight, option) else { continue };
        // Large ones by the first algorithm only.
        let most = if shape.iter().product::<usize>() > LARGEST { 1 } else { 2 };
        for algorithm in CausalConv1dPlan::algorithms(&spec, device).into_iter().take(most) {
            let (spec, oracle) = (spec.clone(), Arc::clone(&oracle));
            cases.push(Case {
                op: "causal_conv1d",
                algorithm: algorithm.name().into(),
                dtype,
                layout: layout.into(),
                name: format!("{shape:?} width {} {kind}{option}", weight[weight.len() - 1]),
                elements: shape.iter().product(),
                run: Box::new(move || {
                    let options = PlanOptions { device, ..PlanOptions::default() };
                    let plan = CausalConv1dPlan::with_algorithm(&spec, algorithm, &options)?;
                    let mut sample = Sample::on(&spec, 1, device)?;
                    let oracle: &Result<Oracle> = oracle.get_or_init(|| Oracle::of(&plan, &sample));
                    let oracle = oracle.as_ref().map_err(Error::clone)?;
                    run_with(oracle, &plan, &mut sample, asked(option), true)
                }),
            });
        }
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
    let has = |word: &str| option.contains(word);
    let parameter = if has("f32 weight") { DType::F32 } else { dtype };
    let spec = CausalConv1dSpec::new(x, TensorDesc::contiguous(parameter, weight)?)?;
    let activation = match () {
        _ if has("silu") => Activation::Silu,
        _ if has("gelu") => Activation::Gelu(crate::Approximate::None),
        _ if has("relu") => Activation::Relu,
        _ => Activation::Identity,
    };
    let mut spec = spec.with_activation(activation);
    if has("bias") || has("cu_seqlens") {
        spec.bias = Some(TensorDesc::contiguous(DType::F32, &weight[..1])?);
    }
    if has("seq_idx") {
        spec.seq_idx = Some(TensorDesc::contiguous(DType::I32, &[b, l])?);
    } else if has("cu_seqlens") {
        spec.cu_seqlens = Some(TensorDesc::contiguous(DType::I64, &[6])?);
    }
    if has("dilation") {
        spec.dilation = 3;
    }
    let layout = Layout::with_order(&spec.states_shape()?, order)?;
    let states = Some(TensorDesc { dtype, layout });
    spec.initial_states = states.filter(|_| has("states") && !has("final"));
    spec.final_states = states.filter(|_| has("states") && !has("initial"));
    let spec = if has("split") { spec.with_split(&thirds(weight[0]))? } else { spec };
    let norm = has("norm").then(|| heads(spec.outputs()));
    Ok(spec.with_norm(norm))
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
    let pool = if ["slots", "pool"].contains(&option) { 2 * b } else { b };
    let state_len = if option == "state" { width - 1 } else { width };
    let layout = Layout::with_order(&[pool, d, state_len], order)?;
    let weight = TensorDesc::contiguous(DType::F32, &[d, width])?;
    let indices = TensorDesc::contiguous(DType::I32, &[b])?;
    let spec = CausalConv1dUpdateSpec::new(x, TensorDesc { dtype, layout }, weight)?
        .with_bias(TensorDesc::contiguous(DType::F32, &[d])?)
        .with_activation(Activation::Silu);
    Ok(match option {
        "slots" => spec.with_conv_state_indices(indices),
        "ring" => spec.with_cache_seqlens(indices),
        "pool" => spec.with_cache_seqlens(indices).with_conv_state_indices(indices),
        _ => spec,
    })
}
