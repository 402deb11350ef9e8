//! Random cases of `windrow verify --random`.

use super::sample::{DTYPES, Gradients, Sample, UpdateSample, any_heads, desc, outputs, parts};
use super::verify::{Oracle, run_update_with, run_with};
use super::{
    CausalConv1dAlgorithm, CausalConv1dConfiguration, CausalConv1dPlan, CausalConv1dSpec,
    CausalConv1dUpdatePlan, CausalConv1dUpdateSpec, HeadNorm,
};
use crate::plan::HeldInputs;
use crate::verification::choices::{Choices, shrink};
use crate::verification::data::{Held, Numbers, Style, activation, options};
use crate::verification::random::{Lane, Trial};
use crate::{Activation, DType, Device, Layout, PlanOptions, Result, TensorDesc, Workspace};

/// The largest numbers of products that the oracle sums. The second limit is used rarely.
const PRODUCTS: [usize; 2] = [20_000, 600_000];

fn spec(choices: &mut Choices<'_>, style: Style) -> Result<CausalConv1dSpec> {
    let dtype = choices.of(&DTYPES);
    let dense = choices.one_in(4);
    let packing = choices.below(4);
    let width = match choices.below(8) {
        7 => choices.within(10..=40),
        6 => choices.within(1..=9),
        _ => choices.within(2..=5),
    };
    let mut sizes = [choices.size(5), choices.size(1100), choices.size(5000), choices.size(300)];
    if packing == 3 {
        sizes[0] = 1;
    }
    let most = PRODUCTS[choices.one_in(24) as usize];
    shrink(&mut sizes, most, |s| {
        let [b, d, l, d_out] = [s[0], s[1], s[2], s[3]].map(|n| n.max(1));
        // As a matrix product a depthwise one is as large as a dense one.
        (b * l * 2).max(d_out / 4) * d * width * if dense { d_out } else { 1 + d / 16 }
    });
    let [b, d, l, d_out] = sizes;
    let d_out = if dense { d_out } else { d };
    let parameter = choices.of(&[dtype, DType::F32]);
    let weight = if dense { vec![d_out, d, width] } else { vec![d, width] };
    let x = desc(choices, style, dtype, &[b, d, l], true)?;
    let mut spec = CausalConv1dSpec::new(x, desc(choices, style, parameter, &weight, true)?)?
        .with_activation(activation(choices));
    if choices.one_in(2) {
        spec.y = desc(choices, style, dtype, &[b, d_out, l], false)?;
    }
    if d_out > 1 && choices.one_in(4) {
        let channels = parts(choices, d_out);
        let mut output = |i: usize| {
            let n = channels.get(i);
            n.map(|&n| desc(choices, style, dtype, &[b, n, l], false)).transpose()
        };
        spec.y = output(0)?.unwrap_or(spec.y);
        (spec.y2, spec.y3) = (output(1)?, output(2)?);
    }
    if choices.one_in(4) {
        spec.norm = Some(any_heads(choices, spec.outputs()));
    }
    if choices.one_in(2) {
        let parameter = choices.of(&[dtype, DType::F32]);
        spec.bias = Some(desc(choices, style, parameter, &[d_out], true)?);
    }
    match packing {
        2 => spec.seq_idx = Some(desc(choices, style, DType::I32, &[b, l], false)?),
        3 => {
            let index = choices.of(&[DType::I32, DType::I64]);
            let sequences = choices.within(1..=12);
            spec.cu_seqlens = Some(desc(choices, style, index, &[sequences + 1], false)?);
        }
        _ => {}
    }
    if choices.one_in(4) {
        // States that the oracle can hold.
        let most = 100_000 / (b * d * (width - 1)).max(1);
        spec.dilation = choices.of(&[2, 3, 9, 300]).min(most.max(1));
    }
    let states = spec.states_shape()?;
    if choices.one_in(2) {
        spec.initial_states = Some(desc(choices, style, dtype, &states, true)?);
    }
    if choices.one_in(2) {
        spec.final_states = Some(desc(choices, style, dtype, &states, false)?);
    }
    Ok(spec)
}

/// An invalid spec, made from a valid one, and the name of the error that it must give.
fn spoil(
    choices: &mut Choices<'_>,
    mut spec: CausalConv1dSpec,
) -> Result<Option<(CausalConv1dSpec, &'static str)>> {
    let &[b, d, l] = spec.x.shape() else { return Ok(None) };
    let contiguous = TensorDesc::contiguous;
    let d_out = spec.weight.shape()[0];
    (spec.y, spec.y2, spec.y3, spec.norm) = (spec.whole_output()?, None, None, None);
    let kind = match choices.below(16) {
        0 => {
            spec.x.dtype = DType::F64;
            "DType"
        }
        1 => {
            spec.weight.dtype = DType::I32;
            "DType"
        }
        2 => {
            spec.weight = contiguous(spec.x.dtype, &[d + 1, 3])?;
            "Shape"
        }
        3 => {
            spec.weight = contiguous(spec.x.dtype, &[d, 0])?;
            "Shape"
        }
        4 => {
            spec.y = contiguous(spec.x.dtype, &[b, d_out, l + 1])?;
            "Shape"
        }
        5 => {
            spec.bias = Some(contiguous(DType::F32, &[d_out + 1])?);
            "Shape"
        }
        6 if spec.y.layout.len() > 1 => {
            spec.y.layout = Layout::strided(&[b, d_out, l], &[0; 3])?;
            "OverlappingOutput"
        }
        7 => {
            spec.seq_idx = Some(contiguous(DType::I32, &[b, l])?);
            spec.cu_seqlens = Some(contiguous(DType::I32, &[2])?);
            "Unsupported"
        }
        8 => {
            spec.initial_states = Some(contiguous(spec.x.dtype, &[b + 1, d, 70])?);
            "Shape"
        }
        // Too many channels, no channel in an output, a third output without a second.
        10 if d_out > 0 => {
            spec.y2 = Some(spec.y);
            "Parameter"
        }
        11 => {
            spec.y2 = Some(contiguous(spec.x.dtype, &[b, 0, l])?);
            "Parameter"
        }
        12 => {
            spec.y3 = Some(spec.y);
            "Parameter"
        }
        13 => {
            spec.dilation = 0;
            "Parameter"
        }
        14 if spec.weight.shape().last() > Some(&1) => {
            spec.dilation = usize::MAX;
            "SizeOverflow"
        }
        15 => {
            let norm = [HeadNorm::new(0), HeadNorm::new(1).with_epsilon(0.0)];
            spec.norm = Some(choices.of(&norm));
            "Parameter"
        }
        9 if b != 1 => {
            (spec.seq_idx, spec.cu_seqlens) = (None, Some(contiguous(DType::I64, &[2])?));
            "Shape"
        }
        _ => return Ok(None),
    };
    Ok(Some((spec, kind)))
}

/// Sequence numbers of rows that are cut into runs: mostly rising by one, at times padding, a number that
/// was there before, or any.
fn sequences(choices: &mut Choices<'_>, desc: &TensorDesc) -> Vec<f64> {
    let [b, l] = [desc.shape()[0], desc.shape()[1]];
    // Long runs are cut at few places, which bytes of a fuzzer can choose.
    let length = choices.of(&[2, 8, 64, 1000]);
    let first = choices.of(&[0, 0, 1, -1, i32::MAX - 1000]);
    let mut numbers = Vec::with_capacity(b * l);
    for _ in 0..b {
        let mut current = first;
        let mut end = numbers.len();
        let row = numbers.len() + l;
        while end < row {
            end = (end + choices.within(1..=length)).min(row);
            numbers.resize(end, f64::from(current));
            current = match choices.below(8) {
                7 => -1 - choices.below(2) as i32,
                6 => choices.below(3) as i32,
                5 => first,
                _ => current.wrapping_add(1),
            };
        }
    }
    numbers
}

/// Boundaries of sequences, some of them empty.
fn boundaries(choices: &mut Choices<'_>, desc: &TensorDesc, l: usize) -> Vec<f64> {
    let entries = desc.shape()[0];
    let mut values: Vec<_> = (0..entries).map(|_| choices.within(0..=l)).collect();
    values.sort_unstable();
    values[entries - 1] = l;
    values[0] = 0;
    values.into_iter().map(|value| value as f64).collect()
}

/// A random spec with every algorithm, forward and backward.
pub(crate) fn run(choices: &mut Choices<'_>, trial: &mut Trial) -> Result<()> {
    let device = trial.device();
    let style = Style::random(choices);
    let spec = spec(choices, style)?;
    let options = options(choices, device);
    if choices.one_in(16) {
        let Some((spec, kind)) = spoil(choices, spec)? else { return Ok(()) };
        trial.describe(format!("causal_conv1d that is wrong: {spec:?}"));
        trial.expect_error("the spec", CausalConv1dPlan::new(&spec, &options), &[kind]);
        return Ok(());
    }
    let numbers = Numbers::random(choices).before(spec.activation);
    let asked = std::array::from_fn(|_| !choices.one_in(4) && spec.norm.is_none());
    let (has_dfinal, staged) = (choices.one_in(2), choices.one_in(8));
    trial.describe(format!(
        "causal_conv1d of {numbers:?} numbers, {:?} threads, gradients {asked:?}, of final states \
         {has_dfinal}: {spec:?}",
        options.threads
    ));
    let mut sample = sample(choices, style, &spec, numbers, has_dfinal, device)?;
    if device == Device::Cpu && spec.cu_seqlens.is_some() && choices.one_in(16) {
        return bad_boundaries(choices, trial, &spec, &options, sample);
    }
    // Multiplying with the zeros of an expanded weight spreads NaN over channels.
    let algorithms = CausalConv1dPlan::algorithms(&spec, device);
    let spreads = algorithms.len() > 1 && numbers == Numbers::Special;
    let mut configurations: Vec<_> =
        algorithms.into_iter().map(CausalConv1dConfiguration::new).collect();
    let candidates = CausalConv1dPlan::configurations(&spec, &options)?;
    configurations.extend(candidates.get(choices.below(candidates.len().max(1))));
    configurations.retain(|c| !spreads || c.algorithm != CausalConv1dAlgorithm::Im2colGemm);
    let mut oracle = None;
    for lane in trial.lanes() {
        for configuration in &configurations {
            let plan = CausalConv1dPlan::on_isa(&spec, configuration, &options, lane.isa)?;
            let oracle = match &oracle {
                Some(oracle) => oracle,
                None => oracle.insert(Oracle::of(&plan, &sample)?),
            };
            let checks = run_with(oracle, &plan, &mut sample, asked, staged)?;
            trial.check(lane, &configuration.to_string(), checks);
            results(trial, lane, &mut sample, asked)?;
        }
    }
    Ok(())
}

/// Takes the outputs in, and makes them NaN again.
fn results(trial: &mut Trial, lane: Lane, sample: &mut Sample, asked: [bool; 4]) -> Result<()> {
    let Gradients { dx, dweight, dbias, dinitial_states } = &mut sample.gradients;
    let grads = [dx, dweight, dbias, dinitial_states];
    let grads = grads.into_iter().zip(asked).filter_map(|(held, asked)| asked.then_some(held));
    let further = sample.further.iter_mut().flatten();
    let outputs = [Some(&mut sample.y), sample.final_states.as_mut()].into_iter().flatten();
    let outputs = outputs.chain(further);
    for held in outputs.chain(grads) {
        trial.result(lane, "an output", held)?;
        held.fill_nan()?;
    }
    Ok(())
}

fn sample(
    choices: &mut Choices<'_>,
    style: Style,
    spec: &CausalConv1dSpec,
    numbers: Numbers,
    has_dfinal: bool,
    device: Device,
) -> Result<Sample> {
    let seed = choices.seed();
    // Sums of ReLU's argument are exact, so that kernels and oracle agree on its side of the kink.
    let exact = spec.activation.has_kinks();
    let dtype = spec.x.dtype;
    let hold = |choices: &mut Choices<'_>, desc, values: Vec<f64>| {
        Held::at(desc, &values, style.lead(choices), device)
    };
    let parameters = |choices: &mut Choices<'_>, i, desc: TensorDesc| {
        hold(choices, desc, Numbers::parameters(seed + i, &desc, exact))
    };
    let data = |choices: &mut Choices<'_>, i, desc: TensorDesc| {
        hold(choices, desc, numbers.data(seed + i, &desc, exact))
    };
    // An infinite gradient times a derivative of GELU below the range of f32 is NaN, not an infinity.
    let of_gradients = match spec.activation {
        Activation::Gelu(_) if numbers == Numbers::Special => Numbers::Ordinary,
        _ => numbers.gradients(device),
    };
    let gradient = |choices: &mut Choices<'_>, i, desc: TensorDesc| {
        hold(choices, desc, of_gradients.data(seed + i, &desc, exact))
    };
    let empty = |choices: &mut Choices<'_>, desc: TensorDesc| hold(choices, desc, Vec::new());
    let further = |choices: &mut Choices<'_>, desc: Option<TensorDesc>| {
        desc.map(|desc| empty(choices, desc)).transpose()
    };
    let [b, d, l] = [0, 1, 2].map(|i| spec.x.shape()[i]);
    let y_shape = spec.whole_output()?;
    let y_shape = y_shape.shape();
    let states = spec.states_shape()?;
    let (dweight, dbias) = (choices.of(&[dtype, DType::F32]), choices.of(&[dtype, DType::F32]));
    let inputs = HeldInputs::new(spec, |name, desc| match name {
        "x" => data(choices, 1, desc),
        "weight" => parameters(choices, 2, desc),
        "bias" => parameters(choices, 3, desc),
        "seq_idx" => {
            let numbers = sequences(choices, &desc);
            hold(choices, desc, numbers)
        }
        "cu_seqlens" => {
            let boundaries = boundaries(choices, &desc, l);
            hold(choices, desc, boundaries)
        }
        _ => data(choices, 4, desc),
    })?;
    let dy = desc(choices, style, dtype, y_shape, true)?;
    let dfinal = desc(choices, style, dtype, &states, true)?;
    let gradients = [
        desc(choices, style, dtype, &[b, d, l], false)?,
        desc(choices, style, dweight, spec.weight.shape(), false)?,
        desc(choices, style, dbias, &y_shape[1..2], false)?,
        desc(choices, style, dtype, &states, false)?,
    ];
    let [dx, dweight, dbias, dinitial_states] = gradients.map(|desc| empty(choices, desc));
    Ok(Sample {
        inputs,
        y: empty(choices, spec.y)?,
        further: [further(choices, spec.y2)?, further(choices, spec.y3)?],
        final_states: spec.final_states.map(|desc| empty(choices, desc)).transpose()?,
        dy: gradient(choices, 5, dy)?,
        dfinal_states: has_dfinal.then(|| gradient(choices, 6, dfinal)).transpose()?,
        gradients: Gradients {
            dx: dx?,
            dweight: dweight?,
            dbias: dbias?,
            dinitial_states: dinitial_states?,
        },
    })
}

/// Boundaries that do not rise from 0 to l must be rejected before anything is written.
fn bad_boundaries(
    choices: &mut Choices<'_>,
    trial: &mut Trial,
    spec: &CausalConv1dSpec,
    options: &PlanOptions,
    mut sample: Sample,
) -> Result<()> {
    let Some(desc) = spec.cu_seqlens else { return Ok(()) };
    let l = spec.x.shape()[2] as f64;
    let mut values = boundaries(choices, &desc, spec.x.shape()[2]);
    let at = choices.below(values.len());
    values[at] = choices.of(&[-1.0, l + 1.0, f64::from(i32::MAX), f64::from(i32::MIN)]);
    *sample.inputs.get_mut("cu_seqlens") = Held::at(desc, &values, 0, Device::Cpu)?;
    let plan = CausalConv1dPlan::new(spec, options)?;
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes())?;
    let outputs = outputs(&mut sample.y, &mut sample.further, &mut sample.final_states)?;
    let result = plan.run(&sample.inputs.args(), outputs, &mut workspace);
    trial.expect_error("bad cu_seqlens", result, &["Index"]);
    if sample.y.values()?.iter().any(|value| !value.is_nan()) {
        trial.fail("y was written before cu_seqlens was refused");
    }
    Ok(())
}

fn update_spec(choices: &mut Choices<'_>, style: Style) -> Result<CausalConv1dUpdateSpec> {
    let dtype = choices.of(&DTYPES);
    let (b, d, l) = (choices.size(40), choices.size(600), choices.size(9));
    let width = if choices.one_in(8) { choices.within(6..=20) } else { choices.within(1..=5) };
    let state_len = width - 1 + if choices.one_in(2) { choices.size(9) } else { 0 };
    let (has_lengths, has_indices) = (choices.one_in(2), choices.one_in(2));
    let pool = if has_indices { b + choices.size(9) } else { b };
    let x = desc(choices, style, dtype, &[b, d, l], true)?;
    let states = desc(choices, style, dtype, &[pool, d, state_len], false)?;
    let parameter = choices.of(&[dtype, DType::F32]);
    let weight = desc(choices, style, parameter, &[d, width], true)?;
    let mut spec =
        CausalConv1dUpdateSpec::new(x, states, weight)?.with_activation(activation(choices));
    if choices.one_in(2) {
        let parameter = choices.of(&[dtype, DType::F32]);
        spec.bias = Some(desc(choices, style, parameter, &[d], true)?);
    }
    if choices.one_in(2) {
        spec.y = desc(choices, style, dtype, &[b, d, l], false)?;
    }
    if has_lengths {
        let dtype = choices.of(&[DType::I32, DType::I64]);
        spec.cache_seqlens = Some(desc(choices, style, dtype, &[b], false)?);
    }
    if has_indices {
        let dtype = choices.of(&[DType::I32, DType::I64]);
        spec.conv_state_indices = Some(desc(choices, style, dtype, &[b], false)?);
    }
    Ok(spec)
}

/// A random decoding step: with one state for each entry, with ring buffers, or with a pool.
pub(crate) fn run_update(choices: &mut Choices<'_>, trial: &mut Trial) -> Result<()> {
    let device = trial.device();
    let style = Style::random(choices);
    let spec = update_spec(choices, style)?;
    let options = options(choices, device);
    let numbers = Numbers::random(choices).before(spec.activation);
    trial.describe(format!(
        "causal_conv1d_update of {numbers:?} numbers, {:?} threads: {spec:?}",
        options.threads
    ));
    let seed = choices.seed();
    let exact = spec.activation.has_kinks();
    let hold = |choices: &mut Choices<'_>, desc, values: Vec<f64>| {
        Held::at(desc, &values, style.lead(choices), device)
    };
    let b = spec.x.shape()[0];
    let mut lengths: Vec<f64> = (0..b)
        .map(|_| match choices.below(8) {
            7 => f64::from(i32::MAX) - choices.below(3) as f64,
            _ => choices.below(100) as f64,
        })
        .collect();
    // Different states, some entries without one.
    let mut pool: Vec<usize> = (0..spec.conv_state.shape()[0]).collect();
    let mut indices: Vec<f64> = (0..b.min(pool.len()))
        .map(|_| match choices.below(6) {
            5 => -1.0 - choices.below(3) as f64,
            _ => pool.swap_remove(choices.below(pool.len())) as f64,
        })
        .collect();
    // If there is nothing to compute, no index is read.
    let looked_at = device == Device::Cpu && !spec.x.layout.is_empty();
    let is_bad = looked_at && choices.one_in(16);
    if is_bad {
        let at = choices.below(b);
        if choices.one_in(2) {
            lengths[at] = -1.0 - choices.below(5) as f64;
        } else {
            indices[at] = (spec.conv_state.shape()[0] + choices.below(3)) as f64;
        }
    }
    let refused = lengths.iter().any(|&n| n < 0.0) && spec.cache_seqlens.is_some()
        || indices.iter().any(|&i| i >= spec.conv_state.shape()[0] as f64)
            && spec.conv_state_indices.is_some();
    let states = numbers.data(seed + 2, &spec.conv_state, exact);
    let inputs = HeldInputs::new(&spec, |name, desc| {
        let values = match name {
            "x" => numbers.data(seed, &desc, exact),
            "weight" => Numbers::parameters(seed + 1, &desc, exact),
            "bias" => Numbers::parameters(seed + 3, &desc, exact),
            "cache_seqlens" => lengths.clone(),
            _ => indices.clone(),
        };
        hold(choices, desc, values)
    })?;
    let (before_states, before_y) = (style.lead(choices), style.lead(choices));
    let fresh = || -> Result<[Held; 2]> {
        Ok([
            Held::at(spec.conv_state, &states, before_states, device)?,
            // Entries without a state keep what y held.
            Held::at(spec.y, &[], before_y, device)?,
        ])
    };
    let [conv_state, y] = fresh()?;
    let mut sample = UpdateSample { inputs, conv_state, y };
    let direct = CausalConv1dConfiguration::new(CausalConv1dAlgorithm::Direct);
    let mut oracle = None;
    for lane in trial.lanes() {
        let plan = CausalConv1dUpdatePlan::on_isa(&spec, &direct, &options, lane.isa)?;
        [sample.conv_state, sample.y] = fresh()?;
        if refused {
            let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
            let (state, y) = (sample.conv_state.as_mut()?, sample.y.as_mut()?);
            let result = plan.run(&sample.inputs.args(), state, y, &mut workspace);
            trial.expect_error("bad indices", result, &["Index"]);
            continue;
        }
        let oracle = match &oracle {
            Some(oracle) => oracle,
            None => {
                let state = sample.conv_state.as_mut()?;
                oracle.insert(plan.oracle(&sample.inputs.args(), &state)?)
            }
        };
        let checks = run_update_with(oracle, &plan, &mut sample)?;
        trial.check(lane, "direct", checks);
        trial.result(lane, "y", &sample.y)?;
        trial.result(lane, "conv_state", &sample.conv_state)?;
    }
    Ok(())
}
