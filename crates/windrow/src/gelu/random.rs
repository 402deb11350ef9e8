//! Random cases of GELU for `windrow verify --random`.

use super::reference::ExpectedGrads;
use super::{Gelu, GeluConfiguration, GeluGrads, GeluPlan, GeluSpec, HalfMath, reference};
use crate::plan::HeldInputs;
use crate::tensor::check_unique;
use crate::verification::Expected;
use crate::verification::choices::{Choices, shrink};
use crate::verification::data::{Held, Numbers, Style, options, scratch};
use crate::verification::random::{Lane, Trial};
use crate::{
    Approximate, DType, Device, MAX_RANK, PlanOptions, Result, TensorDesc, TensorMut, Workspace,
};

/// The largest numbers of elements of a tensor. The second limit is used rarely; it is more than the work of one
/// parallel task.
const ELEMENTS: [usize; 2] = [2_500, 60_000];

fn desc(
    choices: &mut Choices<'_>,
    style: Style,
    dtype: DType,
    shape: &[usize],
    input: bool,
) -> Result<TensorDesc> {
    let rows: Vec<usize> = (0..shape.len()).collect();
    let columns: Vec<usize> = rows.iter().rev().copied().collect();
    let layout = style.layout(choices, shape, &[&rows, &rows, &columns], input)?;
    Ok(TensorDesc { dtype, layout })
}

fn spec(choices: &mut Choices<'_>, style: Style, device: Device) -> Result<GeluSpec> {
    let dtype = choices.of(&[DType::F32, DType::F16, DType::BF16]);
    let rank = if choices.one_in(12) { choices.within(5..=8) } else { choices.within(0..=4) };
    let mut shape: Vec<usize> = (0..rank).map(|_| choices.size(9)).collect();
    if rank > 0 {
        let long = choices.below(rank);
        shape[long] = choices.size(5_000);
    }
    let most = ELEMENTS[choices.one_in(24) as usize];
    shrink(&mut shape, most, |s| s.iter().product());
    let approximate = choices.of(&[Approximate::None, Approximate::Tanh]);
    let mut spec = GeluSpec::new(desc(choices, style, dtype, &shape, true)?, approximate)?;
    if let (Some(&last), true) = (shape.last(), choices.one_in(2)) {
        let dtype = choices.of(&[dtype, DType::F32]);
        spec = spec.with_bias(desc(choices, style, dtype, &[last], true)?);
    }
    if choices.one_in(2) {
        spec = spec.with_gate(desc(choices, style, dtype, &shape, true)?);
    }
    match choices.below(3) {
        0 => {}
        1 if check_unique("x", &spec.x.layout).is_ok() => spec = spec.with_output(spec.x),
        _ => spec = spec.with_output(desc(choices, style, dtype, &shape, false)?),
    }
    if device != Device::Cpu && dtype.is_half() && choices.one_in(4) {
        let plain = GeluSpec { bias: None, gate: None, ..spec };
        spec = plain.with_half_math(HalfMath::Native);
    }
    Ok(spec)
}

/// An invalid spec, made from a valid one, and the name of the error that it must give. `None` if the chosen change is
/// not possible.
fn spoil(choices: &mut Choices<'_>, spec: &GeluSpec) -> Result<Option<(GeluSpec, &'static str)>> {
    let (shape, dtype) = (spec.x.shape(), spec.x.dtype);
    let mut other = shape.to_vec();
    // There is no shape longer than the longest.
    if shape.len() == MAX_RANK {
        other.pop();
    } else {
        other.push(1);
    }
    let contiguous = TensorDesc::contiguous;
    Ok(Some(match choices.below(7) {
        0 => (GeluSpec { x: TensorDesc { dtype: DType::F64, ..spec.x }, ..*spec }, "DType"),
        1 => (spec.with_output(TensorDesc { dtype: DType::I32, ..spec.y }), "DType"),
        2 => (spec.with_output(contiguous(dtype, &other)?), "Shape"),
        3 => (spec.with_gate(contiguous(dtype, &other)?), "Shape"),
        4 if !shape.is_empty() => {
            let bias = contiguous(DType::F32, &[shape[shape.len() - 1] + 1])?;
            (spec.with_bias(bias), "Shape")
        }
        4 => (spec.with_bias(contiguous(DType::F32, &[1])?), "Rank"),
        5 if !shape.is_empty() => {
            let bias = contiguous(DType::I64, &shape[shape.len() - 1..])?;
            (spec.with_bias(bias), "DType")
        }
        _ if spec.x.layout.len() > 1 => {
            let together = crate::Layout::strided(shape, &vec![0; shape.len()])?;
            (spec.with_output(TensorDesc { dtype, layout: together }), "OverlappingOutput")
        }
        _ => return Ok(None),
    }))
}

/// Operands of a case, on its device.
struct Sample {
    inputs: HeldInputs<Gelu>,
    dy: Held,
}

/// A random spec with every algorithm, forward, in place, and backward.
pub(crate) fn run(choices: &mut Choices<'_>, trial: &mut Trial) -> Result<()> {
    let device = trial.device();
    let style = Style::random(choices);
    let spec = spec(choices, style, device)?;
    let options = options(choices, device);
    if choices.one_in(16) {
        let Some((spec, kind)) = spoil(choices, &spec)? else { return Ok(()) };
        trial.describe(format!("gelu that is wrong: {spec:?}"));
        trial.expect_error("the spec", GeluPlan::new(&spec, &options), &[kind]);
        return Ok(());
    }
    let numbers = Numbers::random(choices);
    trial.describe(format!("gelu of {numbers:?} numbers, {:?} threads: {spec:?}", options.threads));
    let hold = |choices: &mut Choices<'_>, desc: TensorDesc, mut values: Vec<f64>| {
        values.iter_mut().for_each(|value| *value *= 4.0);
        Held::at(desc, &values, style.lead(choices), device)
    };
    let seed = choices.seed();
    let inputs = HeldInputs::new(&spec, |name, desc| match name {
        "x" => hold(choices, desc, numbers.data(seed, &desc, false)),
        "bias" => hold(choices, desc, Numbers::parameters(seed + 1, &desc, false)),
        _ => hold(choices, desc, Numbers::parameters(seed + 2, &desc, false)),
    })?;
    let dy = desc(choices, style, spec.x.dtype, spec.x.shape(), true)?;
    let dy = hold(choices, dy, numbers.gradients(device).data(seed + 3, &dy, false))?;
    let operands = Sample { inputs, dy };
    forward(choices, style, trial, &spec, &options, &operands)?;
    backward(choices, style, trial, &spec, &options, &operands)
}

fn plan(
    spec: &GeluSpec,
    configuration: &GeluConfiguration,
    options: &PlanOptions,
    lane: Lane,
) -> Result<(GeluPlan, Workspace)> {
    let plan = GeluPlan::on_isa(spec, configuration, options, lane.isa)?;
    let workspace = scratch(options.device, plan.workspace_bytes())?;
    Ok((plan, workspace))
}

fn forward(
    choices: &mut Choices<'_>,
    style: Style,
    trial: &mut Trial,
    spec: &GeluSpec,
    options: &PlanOptions,
    operands: &Sample,
) -> Result<()> {
    let args = operands.inputs.args();
    let mut want: Option<Expected> = None;
    let before = style.lead(choices);
    let in_place = spec.x == spec.y;
    let mut configurations: Vec<_> = GeluPlan::algorithms(spec, options.device)
        .into_iter()
        .map(GeluConfiguration::new)
        .collect();
    let candidates = GeluPlan::configurations(spec, options)?;
    configurations.push(choices.of(&candidates));
    for lane in trial.lanes() {
        for configuration in &configurations {
            let (plan, mut workspace) = plan(spec, configuration, options, lane)?;
            let want = match &want {
                Some(want) => want,
                None => want.insert(plan.oracle_forward(&plan.oracle_inputs(&args)?)?),
            };
            let how = configuration.to_string();
            let mut y = Held::at(spec.y, &[], before, options.device)?;
            plan.run(&args, y.as_mut()?, &mut workspace)?;
            workspace.synchronize()?;
            trial.compare(lane, &how, "y", &want.compare(&y.as_ref(), plan.tolerance())?);
            let bits = trial.result(lane, "y", &y)?;
            if in_place {
                let mut y = Held::at(spec.x, &args.x.to_f64_vec()?, before, options.device)?;
                plan.run_in_place(y.as_mut()?, args.bias, args.gate, &mut workspace)?;
                workspace.synchronize()?;
                if trial.result(lane, "y", &y)? != bits {
                    trial.fail(format!("{how} gives other bits in place"));
                }
            }
        }
    }
    Ok(())
}

fn backward(
    choices: &mut Choices<'_>,
    style: Style,
    trial: &mut Trial,
    spec: &GeluSpec,
    options: &PlanOptions,
    operands: &Sample,
) -> Result<()> {
    let (args, device) = (operands.inputs.args(), options.device);
    let asked = |choices: &mut Choices<'_>, dtype, shape: &[usize]| -> Result<_> {
        Ok(match choices.below(4) {
            0 => None,
            _ => Some((desc(choices, style, dtype, shape, false)?, style.lead(choices))),
        })
    };
    let (shape, dtype) = (spec.x.shape(), spec.x.dtype);
    let dx = asked(choices, dtype, shape)?;
    let dgate = spec.gate.map(|_| asked(choices, dtype, shape)).transpose()?.flatten();
    let sums = choices.of(&[dtype, DType::F32]);
    let last = shape.last().copied().unwrap_or(1);
    let dbias = spec.bias.map(|_| asked(choices, sums, &[last])).transpose()?.flatten();
    let Some(&algorithm) = GeluPlan::algorithms(spec, device).first() else { return Ok(()) };
    let mut want: Option<ExpectedGrads> = None;
    for lane in trial.lanes() {
        let (plan, mut workspace) = plan(spec, &GeluConfiguration::new(algorithm), options, lane)?;
        let make = |asked: Option<(TensorDesc, usize)>| {
            asked.map(|(desc, before)| Held::at(desc, &[], before, device)).transpose()
        };
        let [mut dx, mut dgate, mut dbias] = [make(dx)?, make(dgate)?, make(dbias)?];
        fn view(held: &mut Option<Held>) -> Result<Option<TensorMut<'_>>> {
            held.as_mut().map(Held::as_mut).transpose()
        }
        let grads =
            GeluGrads { dx: view(&mut dx)?, dgate: view(&mut dgate)?, dbias: view(&mut dbias)? };
        plan.backward(&args, &operands.dy.as_ref(), grads, &mut workspace)?;
        workspace.synchronize()?;
        let want = match &want {
            Some(want) => want,
            None => {
                let inputs = plan.oracle_inputs(&args)?;
                want.insert(reference::backward(&inputs, &operands.dy.values()?, last)?)
            }
        };
        for (what, got, want) in
            [("dx", &dx, &want.dx), ("dgate", &dgate, &want.dgate), ("dbias", &dbias, &want.dbias)]
        {
            let Some(got) = got else { continue };
            let comparison = want.compare(&got.as_ref(), plan.tolerance())?;
            trial.compare(lane, "the gradients", what, &comparison);
            trial.result(lane, what, got)?;
        }
    }
    Ok(())
}
