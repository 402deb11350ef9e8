//! Random cases of `windrow verify --random`.

use super::verify::{of, outputs};
use super::{Conv3dArgs, Conv3dPlan, Conv3dSpec};
use crate::conv2d::random::is_missing;
use crate::conv2d::{Conv2dConfiguration, Conv3dParams, FilterCache, TimePadding, Weights};
use crate::verification::choices::{Choices, shrink};
use crate::verification::data::{Held, Numbers, Style, activation, options, scratch};
use crate::verification::random::Trial;
use crate::{Accuracy, DType, Device, Result, TensorDesc};

/// The largest number of products that the oracle sums.
const PRODUCTS: usize = 60_000;

fn spec(choices: &mut Choices<'_>, style: Style) -> Result<Conv3dSpec> {
    let dtype = choices.of(&[DType::F32, DType::F16, DType::BF16]);
    let three = |choices: &mut Choices<'_>, most| [0; 3].map(|_| choices.within(0..=most));
    let mut params = Conv3dParams {
        activation: activation(choices),
        accuracy: choices.of(&[Accuracy::Fp32, Accuracy::Exact, Accuracy::Half]),
        ..Conv3dParams::default()
    };
    // Sizes: n, c and k of a group, t, h, w.
    let mut sizes = [
        choices.size(3),
        choices.size(130),
        choices.size(130),
        choices.size(9),
        choices.size(40),
        choices.size(60),
    ];
    let mut taps = [3, 3, 3];
    match choices.below(6) {
        // What Winograd's algorithms compute.
        0..=2 => {
            params.padding = three(choices, 1);
            taps[0] = choices.within(1..=3);
            params.stride[0] = choices.within(1..=2);
            params.dilation[0] = choices.within(1..=2);
        }
        // Frames alone.
        3 => {
            taps = [choices.within(1..=4), 1, 1];
            params.padding[0] = choices.within(0..=4);
            params.stride = three(choices, 2).map(|step| step.max(1));
        }
        _ => {
            taps = three(choices, 4).map(|taps| taps + 1);
            params.groups = choices.of(&[1, 1, 2, 3]);
            params.padding = three(choices, 5);
            params.stride = three(choices, 3).map(|step| step.max(1));
            params.dilation = three(choices, 3).map(|step| step.max(1));
        }
    }
    params.time_padding = choices.of(TimePadding::ALL);
    let is_causal = params.time_padding != TimePadding::Zeros;
    if is_causal {
        params.padding[0] = 0;
    }
    let with_state = [0; 2].map(|_| is_causal && choices.one_in(2));
    let groups = params.groups;
    let span = |d: usize| (taps[d] - 1) * params.dilation[d] + 1;
    let output = |size: usize, d: usize| {
        (size + 2 * params.padding[d]).saturating_sub(span(d)) / params.stride[d] + 1
    };
    shrink(&mut sizes, PRODUCTS, |sizes| {
        let [n, c, k, t, h, w] = [0, 1, 2, 3, 4, 5].map(|i| sizes[i].max(1));
        let outputs: usize = [t, h, w].into_iter().enumerate().map(|(d, s)| output(s, d)).product();
        n * c * k * groups * taps.iter().product::<usize>() * outputs
    });
    // The padded video holds the filter.
    if is_causal {
        sizes[3] = sizes[3].max(1);
    }
    if with_state.contains(&true) {
        sizes[3] = sizes[3].next_multiple_of(params.stride[0]);
    }
    for d in usize::from(is_causal)..3 {
        sizes[3 + d] = sizes[3 + d].max(span(d).saturating_sub(2 * params.padding[d]));
    }
    let [n, c, k, t, h, w] = sizes;
    let mut desc = |shape: &[usize], input| -> Result<TensorDesc> {
        let orders: &[&[usize]] = &[&[0, 1, 2, 3, 4], &[0, 2, 3, 4, 1]];
        Ok(TensorDesc { dtype, layout: style.layout(choices, shape, orders, input)? })
    };
    let x = desc(&[n, c * groups, t, h, w], true)?;
    let filter = desc(&[k * groups, c, taps[0], taps[1], taps[2]], true)?;
    let mut spec = Conv3dSpec::new(x, filter, &params)?;
    let y = desc(spec.y.shape(), false)?;
    let state = [n, c * groups, span(0) - 1, h, w];
    let [first, last] = [desc(&state, true)?, desc(&state, false)?];
    spec.initial_frames = with_state[0].then_some(first);
    spec.final_frames = with_state[1].then_some(last);
    if choices.one_in(3) {
        spec.y = y;
    }
    if choices.one_in(2) {
        let dtype = choices.of(&[dtype, DType::F32]);
        spec.bias = Some(TensorDesc::contiguous(dtype, &[k * groups])?);
    }
    spec.residual = choices.one_in(3);
    Ok(spec)
}

/// An invalid spec, made from a valid one, must give the error of this name.
fn spoil(choices: &mut Choices<'_>, spec: &mut Conv3dSpec) -> Result<&'static str> {
    let (mut w, mut y) = (spec.w.shape().to_vec(), spec.y.shape().to_vec());
    let dtype = spec.x.dtype;
    Ok(match choices.below(7) {
        0 => {
            spec.x.dtype = DType::F64;
            "DType"
        }
        1 => {
            w[1] += 1;
            spec.w = TensorDesc::contiguous(dtype, &w)?;
            "Shape"
        }
        2 => {
            w[2 + choices.below(3)] = 0;
            spec.w = TensorDesc::contiguous(dtype, &w)?;
            "Shape"
        }
        3 => {
            y[choices.below(5)] += 1;
            spec.y = TensorDesc::contiguous(dtype, &y)?;
            "Shape"
        }
        4 => {
            spec.params.stride[choices.below(3)] = 0;
            "Parameter"
        }
        5 => {
            spec.params.groups = 0;
            "Parameter"
        }
        _ => {
            spec.w = TensorDesc::contiguous(dtype, &w[1..])?;
            "Rank"
        }
    })
}

/// A random spec with every algorithm, on every instruction set.
pub(crate) fn run(choices: &mut Choices<'_>, trial: &mut Trial) -> Result<()> {
    let device = trial.device();
    let style = Style::random(choices);
    let mut spec = spec(choices, style)?;
    let options = options(choices, device);
    if choices.one_in(16) {
        let kind = spoil(choices, &mut spec)?;
        trial.describe(format!("conv3d that is wrong: {spec:?}"));
        trial.expect_error("the spec", Conv3dPlan::new(&spec, &options), &[kind]);
        return Ok(());
    }
    let mut numbers = Numbers::random(choices).before(spec.params.activation);
    if matches!(numbers, Numbers::Largest | Numbers::Tiny) {
        // Transforms of the largest overflow where their products would not, and products of bf16 take tiny ones for
        // zero.
        numbers = Numbers::Large;
    }
    let threads = options.threads;
    trial.describe(format!("conv3d of {numbers:?} numbers, {threads:?} threads: {spec:?}"));
    let seed = choices.seed();
    let mut hold =
        |desc: TensorDesc, values: &[f64]| Held::at(desc, values, style.lead(choices), device);
    let x = hold(spec.x, &numbers.data(seed, &spec.x, false))?;
    let w = hold(spec.w, &Numbers::parameters(seed + 1, &spec.w, false))?;
    let mut added = |desc: Option<TensorDesc>, seed| {
        desc.map(|desc| hold(desc, &Numbers::parameters(seed, &desc, false))).transpose()
    };
    let bias = added(spec.bias, seed + 2)?;
    let residual = added(spec.residual.then_some(spec.y), seed + 3)?;
    let initial = added(spec.initial_frames, seed + 4)?;
    let args = Conv3dArgs::new(x.as_ref(), Weights::Raw(w.as_ref()));
    let args = args.with_bias(of(&bias)).with_residual(of(&residual));
    let args = args.with_initial_frames(of(&initial));
    let before = style.lead(choices);
    let form = choices.of(&["raw", "packed", "cached"]);
    let cache = FilterCache::new();
    let planned = Conv3dPlan::new(&spec, &options)?.algorithm();
    if spec.params.accuracy == Accuracy::Exact && planned.is_winograd() {
        trial.fail(format!("accuracy exact is planned by {planned}"));
    }
    for lane in trial.lanes() {
        let algorithms = match device {
            Device::Cpu => Conv3dPlan::algorithms_on(&spec, lane.isa)?,
            Device::Cuda(_) | Device::Hip(_) => Conv3dPlan::algorithms(&spec, device),
        };
        for algorithm in algorithms {
            let configuration = Conv2dConfiguration::new(algorithm);
            let plan = match Conv3dPlan::on_isa(&spec, &configuration, &options, lane.isa) {
                Err(error) if is_missing(algorithm, &error) => continue,
                plan => plan?,
            };
            let mut workspace = scratch(device, plan.workspace_bytes())?;
            let mut y = Held::at(spec.y, &[], before, device)?;
            let kept;
            let w_view = match form {
                "packed" => {
                    kept = plan.pack_weights(&w.as_ref(), &mut workspace)?;
                    Weights::Packed(&kept)
                }
                "cached" => Weights::Cached(w.as_ref(), &cache),
                _ => args.w,
            };
            let args = Conv3dArgs { w: w_view, ..args };
            let last = spec.final_frames.map(|desc| Held::at(desc, &[], before, device));
            let mut last = last.transpose()?;
            plan.run(&args, outputs(&mut y, &mut last)?, &mut workspace)?;
            workspace.synchronize()?;
            let how = format!("{configuration} of a {form} filter");
            let want = plan.expected(&args, &w.values()?)?;
            let checks = plan.checks(want, &outputs(&mut y, &mut last)?)?;
            trial.check(lane, &how, checks);
            trial.result(lane, "y", &y)?;
            if let Some(last) = &last {
                trial.result(lane, "final_frames", last)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verification::random::trial;

    /// Cases of a fixed seed, on every instruction set.
    #[test]
    fn random_cases_pass() {
        for seed in 0..300 {
            let outcome = trial(run, &mut Choices::from_seed(seed), Device::Cpu);
            let failures = &outcome.failures;
            assert!(failures.is_empty(), "{seed}: {}\n{failures:#?}", outcome.description);
        }
    }
}
