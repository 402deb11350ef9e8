//! Random cases of `windrow verify --random`.

use super::cpu::{self, flushes};
use super::reference;
use super::verify::{im2col_check, stage_checks};
use super::{
    Conv2dAlgorithm, Conv2dArgs, Conv2dConfiguration, Conv2dParams, Conv2dPlan, Conv2dSpec,
    FilterCache, Problem, Weights,
};
use crate::cpu::Isa;
use crate::tensor::check_unique;
use crate::verification::Check;
use crate::verification::choices::{Choices, shrink};
use crate::verification::data::{Held, Numbers, Style, activation, options, scratch};
use crate::verification::random::Trial;
use crate::{
    Accuracy, Activation, DType, Device, Error, Layout, PlanOptions, Result, TensorDesc, TensorRef,
};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// The largest numbers of products that the oracle sums. The second limit is used rarely.
const PRODUCTS: [usize; 2] = [40_000, 1_000_000];

/// NCHW, channels-last, or any other order.
fn desc(
    choices: &mut Choices<'_>,
    style: Style,
    dtype: DType,
    shape: &[usize],
    input: bool,
) -> Result<TensorDesc> {
    let layout = match shape.len() {
        1 => style.layout(choices, shape, &[&[0]], input)?,
        _ => style.layout(choices, shape, &[&[0, 1, 2, 3], &[0, 2, 3, 1]], input)?,
    };
    Ok(TensorDesc { dtype, layout })
}

fn spec(choices: &mut Choices<'_>, style: Style) -> Result<Conv2dSpec> {
    let dtype = choices.of(&DTYPES);
    let pair = |choices: &mut Choices<'_>, most| [0; 2].map(|_| choices.within(0..=most));
    let mut params = Conv2dParams {
        activation: activation(choices),
        accuracy: choices.of(&[Accuracy::Fp32, Accuracy::Exact, Accuracy::Tf32, Accuracy::Half]),
        ..Conv2dParams::default()
    };
    let kind = choices.below(8);
    let [mut r, mut s] = [3, 3];
    // Sizes: n, c and k of a group, h, w.
    let mut sizes = [
        choices.size(6),
        choices.size(300),
        choices.size(300),
        choices.size(64),
        choices.size(130),
    ];
    match kind {
        // What Winograd's algorithms compute.
        0..=2 => params.padding = pair(choices, 1),
        3 => params.padding = pair(choices, 4),
        // Pointwise.
        4 => {
            [r, s] = [1, 1];
            params.stride = pair(choices, 2).map(|step| step.max(1));
        }
        // A depthwise convolution: every channel is a group.
        5 => {
            [r, s] = pair(choices, 6).map(|taps| taps + 1);
            params.groups = choices.size(70).max(1);
            params.padding = pair(choices, 3);
            params.stride = pair(choices, 3).map(|step| step.max(1));
            params.dilation = pair(choices, 2).map(|step| step.max(1));
            [sizes[1], sizes[2]] = [1, choices.within(1..=2)];
        }
        // Groups of few channels.
        6 => {
            [r, s] = pair(choices, 4).map(|taps| taps + 1);
            params.groups = choices.size(20).max(1);
            params.padding = pair(choices, 2);
            params.stride = pair(choices, 2).map(|step| step.max(1));
            sizes[1] = choices.of(&[1, 2, 4, 8, 12, 16]);
            sizes[2] = if choices.one_in(2) { sizes[1] } else { choices.of(&[2, 8, 16, 32]) };
        }
        // Anything, with paddings larger than the filter.
        _ => {
            [r, s] = pair(choices, 6).map(|taps| taps + 1);
            params.groups = choices.of(&[1, 1, 2, 3, 4]);
            params.padding = pair(choices, 9);
            params.stride = pair(choices, 4).map(|step| step.max(1));
            params.dilation = pair(choices, 3).map(|step| step.max(1));
        }
    }
    let groups = params.groups;
    let most = PRODUCTS[choices.one_in(24) as usize];
    let output = |size: usize, taps: usize, d: usize| {
        let span = (taps - 1) * params.dilation[d] + 1;
        (size + 2 * params.padding[d]).saturating_sub(span) / params.stride[d] + 1
    };
    shrink(&mut sizes, most, |sizes| {
        let [n, c, k, h, w] = [0, 1, 2, 3, 4].map(|i| sizes[i].max(1));
        n * c * k * groups * r * s * output(h, r, 0) * output(w, s, 1)
    });
    // The padded image holds the filter.
    for (d, taps) in [(0, r), (1, s)] {
        let span = (taps - 1) * params.dilation[d] + 1;
        sizes[3 + d] = sizes[3 + d].max(span.saturating_sub(2 * params.padding[d]));
    }
    let [n, c, k, h, w] = sizes;
    let x = desc(choices, style, dtype, &[n, c * groups, h, w], true)?;
    let filter = desc(choices, style, dtype, &[k * groups, c, r, s], true)?;
    let mut spec = Conv2dSpec::new(x, filter, &params)?;
    if choices.one_in(2) {
        let parameter = choices.of(&[dtype, DType::F32]);
        spec.bias = Some(desc(choices, style, parameter, &[k * groups], true)?);
    }
    spec.residual = choices.one_in(3);
    if choices.one_in(3) {
        let shape = spec.y.shape().to_vec();
        spec.y = desc(choices, style, dtype, &shape, false)?;
    }
    Ok(spec)
}

/// An invalid spec, made from a valid one, and the name of the error that it must give.
fn spoil(
    choices: &mut Choices<'_>,
    mut spec: Conv2dSpec,
) -> Result<Option<(Conv2dSpec, &'static str)>> {
    let contiguous = TensorDesc::contiguous;
    let mut w = spec.w.shape().to_vec();
    let mut y = spec.y.shape().to_vec();
    let dtype = spec.x.dtype;
    let kind = match choices.below(10) {
        0 => {
            spec.x.dtype = DType::F64;
            "DType"
        }
        1 => {
            spec.w.dtype = if dtype == DType::F32 { DType::F16 } else { DType::F32 };
            "DType"
        }
        2 => {
            w[1] += 1;
            spec.w = contiguous(dtype, &w)?;
            "Shape"
        }
        3 => {
            w[2 + choices.below(2)] = 0;
            spec.w = contiguous(dtype, &w)?;
            "Shape"
        }
        4 => {
            y[choices.below(4)] += 1;
            spec.y = contiguous(dtype, &y)?;
            "Shape"
        }
        5 => {
            spec.bias = Some(contiguous(DType::F32, &[y[1] + 1])?);
            "Shape"
        }
        6 => {
            spec.stride[choices.below(2)] = 0;
            "Parameter"
        }
        7 => {
            spec.dilation[choices.below(2)] = 0;
            "Parameter"
        }
        8 => {
            spec.groups = 0;
            "Parameter"
        }
        9 if spec.y.layout.len() > 1 => {
            spec.y.layout = Layout::strided(&y, &[0; 4])?;
            "OverlappingOutput"
        }
        _ => return Ok(None),
    };
    Ok(Some((spec, kind)))
}

/// Operands of a case, on its device, and the same in f64.
struct Sample {
    style: Style,
    numbers: Numbers,
    problem: Problem,
    x: Held,
    w: Held,
    bias: Option<Held>,
    residual: Option<Held>,
    values: [Vec<f64>; 2],
}

impl Sample {
    fn args(&self) -> Conv2dArgs<'_> {
        let [bias, residual] = [&self.bias, &self.residual].map(|h| h.as_ref().map(Held::as_ref));
        Conv2dArgs { x: self.x.as_ref(), w: Weights::Raw(self.w.as_ref()), bias, residual }
    }
}

/// A random spec with every algorithm, and the gradients.
pub(crate) fn run(choices: &mut Choices<'_>, trial: &mut Trial) -> Result<()> {
    let device = trial.device();
    let style = Style::random(choices);
    let mut spec = spec(choices, style)?;
    let options = options(choices, device);
    if choices.one_in(16) {
        let Some((spec, kind)) = spoil(choices, spec)? else { return Ok(()) };
        trial.describe(format!("conv2d that is wrong: {spec:?}"));
        trial.expect_error("the spec", Conv2dPlan::new(&spec, &options), &[kind]);
        return Ok(());
    }
    let problem = spec.problem()?;
    let mut numbers = Numbers::random(choices).before(spec.activation);
    let is_split = || Isa::tested().into_iter().any(|isa| flushes(&spec, &problem, isa));
    if numbers == Numbers::Tiny && spec.x.dtype == DType::BF16 {
        // Products of bf16 take such numbers for zero.
        numbers = Numbers::Ordinary;
    } else if numbers == Numbers::Tiny && device == Device::Cpu && is_split() {
        // So do those of parts of f32, except for exact sums.
        spec.accuracy = Accuracy::Exact;
    }
    if numbers == Numbers::Largest
        && Conv2dPlan::algorithms(&spec, device).iter().any(|a| a.is_winograd())
    {
        // Transforms of such numbers overflow where their products would not.
        numbers = Numbers::Large;
    }
    trial.describe(format!(
        "conv2d of {numbers:?} numbers, {:?} threads: {spec:?}",
        options.threads
    ));
    let seed = choices.seed();
    let hold = |choices: &mut Choices<'_>, desc, values: Vec<f64>| {
        Held::at(desc, &values, style.lead(choices), device)
    };
    let x = hold(choices, spec.x, numbers.data(seed, &spec.x, false))?;
    let w = hold(choices, spec.w, Numbers::parameters(seed + 1, &spec.w, false))?;
    let mut added = |desc: Option<TensorDesc>, seed| {
        let held = |d| hold(choices, d, Numbers::parameters(seed, &d, false));
        desc.map(held).transpose()
    };
    let bias = added(spec.bias, seed + 2)?;
    let residual = added(spec.residual.then_some(spec.y), seed + 4)?;
    let values = [x.values()?, w.values()?];
    let operands = Sample { style, numbers, problem, x, w, bias, residual, values };
    forward(choices, trial, &spec, &options, &operands)?;
    let dy = match numbers {
        // What a NaN in dy or x may reach in gradients is nowhere promised.
        Numbers::Special => return Ok(()),
        Numbers::Ordinary | Numbers::Tiny | Numbers::Large | Numbers::Largest | Numbers::Zero => {
            hold(choices, spec.y, Numbers::parameters(seed + 3, &spec.y, false))?
        }
    };
    let spec = Conv2dSpec { activation: Activation::Identity, ..spec };
    backward(choices, trial, &spec, &options, &operands, &dy)
}

/// cuDNN says only when it is asked whether it has a kernel.
pub(super) fn is_missing(algorithm: Conv2dAlgorithm, error: &Error) -> bool {
    algorithm == Conv2dAlgorithm::Cudnn
        && matches!(error, Error::Unsupported { .. } | Error::Backend { .. })
}

fn forward(
    choices: &mut Choices<'_>,
    trial: &mut Trial,
    spec: &Conv2dSpec,
    options: &PlanOptions,
    operands: &Sample,
) -> Result<()> {
    let Sample { style, numbers, problem, .. } = operands;
    let planned = Conv2dPlan::new(spec, options)?.algorithm();
    if spec.accuracy == Accuracy::Exact && planned.is_winograd() {
        trial.fail(format!("accuracy exact is planned by {planned}"));
    }
    let args = operands.args();
    let [x, w] = &operands.values;
    let added = [&args.bias, &args.residual].map(Option::as_ref);
    let [bias, residual] = added.map(|view| view.map(TensorRef::to_f64_vec).transpose());
    let (bias, residual) = (bias?, residual?);
    let added = [bias.as_deref(), residual.as_deref()];
    let want = reference::forward(problem, x, w, added, spec.activation)?;
    let candidates = Conv2dPlan::configurations(spec, options)?;
    let candidate = candidates.get(choices.below(candidates.len().max(1)));
    let form = choices.of(&["raw", "packed", "cached"]);
    let other = Numbers::parameters(choices.seed(), &spec.w, false);
    let other = Held::at(spec.w, &other, style.lead(choices), options.device)?;
    let cache = FilterCache::new();
    let staged = choices.one_in(8) && *numbers != Numbers::Special;
    let before = style.lead(choices);
    for (i, lane) in trial.lanes().into_iter().enumerate() {
        let algorithms = match options.device {
            Device::Cpu => cpu::algorithms(spec, problem, lane.isa)?,
            device => Conv2dPlan::algorithms(spec, device),
        };
        let configurations = algorithms.into_iter().map(Conv2dConfiguration::new);
        // Candidates are those of the best instruction set.
        for configuration in configurations.chain(candidate.copied().filter(|_| i == 0)) {
            let plan = match Conv2dPlan::on_isa(spec, &configuration, options, lane.isa) {
                Err(error) if is_missing(configuration.algorithm, &error) => continue,
                plan => plan?,
            };
            let mut workspace = scratch(options.device, plan.workspace_bytes())?;
            let mut y = Held::at(spec.y, &[], before, options.device)?;
            let how = format!("{configuration} of a {form} filter");
            let w_view = operands.w.as_ref();
            let kept;
            let weights = match form {
                "packed" => {
                    kept = plan.pack_weights(&w_view, &mut workspace)?;
                    Weights::Packed(&kept)
                }
                "cached" => {
                    // What it finds there is of another filter, algorithm or instruction set.
                    let weights = Weights::Cached(other.as_ref(), &cache);
                    plan.run(&Conv2dArgs { w: weights, ..args }, y.as_mut()?, &mut workspace)?;
                    Weights::Cached(w_view, &cache)
                }
                _ => args.w,
            };
            plan.run(&Conv2dArgs { w: weights, ..args }, y.as_mut()?, &mut workspace)?;
            workspace.synchronize()?;
            let want = plan.widened(want.copy()?, problem, x, w)?;
            trial.compare(lane, &how, "y", &want.compare(&y.as_ref(), plan.tolerance())?);
            trial.result(lane, "y", &y)?;
            if staged && !spec.y.layout.is_empty() {
                let (x, w) = (operands.x.as_ref(), operands.w.as_ref());
                trial.check(lane, &how, im2col_check(&plan, &x)?.into_iter().collect());
                trial.check(lane, &how, stage_checks(&plan, &w, &x)?);
            }
        }
    }
    Ok(())
}

fn backward(
    choices: &mut Choices<'_>,
    trial: &mut Trial,
    spec: &Conv2dSpec,
    options: &PlanOptions,
    operands: &Sample,
    dy: &Held,
) -> Result<()> {
    let Sample { style, problem, .. } = operands;
    let style = *style;
    let (dtype, device) = (spec.x.dtype, options.device);
    let dx = check_unique("x", &spec.x.layout).is_ok() && !choices.one_in(4);
    let dx = dx.then(|| (spec.x, style.lead(choices)));
    let mut sum = |shape: &[usize]| -> Result<_> {
        if choices.one_in(4) {
            return Ok(None);
        }
        let dtype = choices.of(&[dtype, DType::F32]);
        Ok(Some((desc(choices, style, dtype, shape, false)?, style.lead(choices))))
    };
    let (dw, db) = (sum(spec.w.shape())?, sum(&[problem.k])?);
    let ([x, w], dy_values) = (&operands.values, dy.values()?);
    let want = [
        reference::backward_data(problem, w, &dy_values)?,
        reference::backward_weight(problem, x, &dy_values)?,
        reference::backward_bias(problem, &dy_values)?,
    ];
    // On GPUs these plans have separate gradients.
    let own = [Conv2dAlgorithm::Direct, Conv2dAlgorithm::Cudnn, Conv2dAlgorithm::ImplicitGemm];
    let mut algorithms = Conv2dPlan::algorithms(spec, device);
    algorithms.retain(|a| own.contains(a));
    for (lane, algorithm) in
        trial.lanes().into_iter().flat_map(|lane| algorithms.iter().map(move |&a| (lane, a)))
    {
        let configuration = Conv2dConfiguration::new(algorithm);
        let plan = match Conv2dPlan::on_isa(spec, &configuration, options, lane.isa) {
            Err(error) if is_missing(algorithm, &error) => continue,
            plan => plan?,
        };
        let mut workspace = scratch(device, plan.backward_workspace_bytes()?)?;
        let make = |wanted: Option<(TensorDesc, usize)>| {
            wanted.map(|(desc, before)| Held::at(desc, &[], before, device)).transpose()
        };
        let [mut dx, mut dw, mut db] = [make(dx)?, make(dw)?, make(db)?];
        let (dy, x_view, w_view) = (dy.as_ref(), operands.x.as_ref(), operands.w.as_ref());
        if let Some(dx) = &mut dx {
            plan.backward_data(&w_view, &dy, dx.as_mut()?, &mut workspace)?;
        }
        if let Some(dw) = &mut dw {
            plan.backward_weight(&x_view, &dy, dw.as_mut()?, &mut workspace)?;
        }
        if let Some(db) = &mut db {
            plan.backward_bias(&dy, db.as_mut()?, &mut workspace)?;
        }
        workspace.synchronize()?;
        let wanted = [
            plan.widened_data(want[0].copy()?, w, &dy_values)?,
            plan.widened_weight(want[1].copy()?, x, &dy_values)?,
            want[2].copy()?,
        ];
        let tolerances = plan.gradient_tolerances()?;
        for (i, (what, got)) in [("dx", &dx), ("dw", &dw), ("db", &db)].into_iter().enumerate() {
            let Some(got) = got else { continue };
            let comparison = wanted[i].compare(&got.as_ref(), tolerances[i])?;
            trial.check(lane, algorithm.name(), vec![Check { what, comparison }]);
            trial.result(lane, what, got)?;
        }
    }
    Ok(())
}
