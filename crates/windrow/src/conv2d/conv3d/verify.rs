//! The cases of conv3d for `windrow verify`.

use super::video::Video;
use super::{Conv3dArgs, Conv3dOutputs, Conv3dPlan, Conv3dSpec, chunks};
use crate::conv2d::{
    Conv2dAlgorithm, Conv2dConfiguration, Conv3dParams, TimePadding, Weights, gpu,
};
use crate::verification::data::Held;
use crate::verification::{Case, Check, random};
use crate::{
    Accuracy, Activation, DType, Device, Layout, PlanOptions, Result, TensorDesc, TensorRef,
    Workspace,
};

/// [n, c, t, h, w], [k, kt, r, s], stride, padding, dilation, groups
type Shape = ([usize; 5], [usize; 4], [usize; 3], [usize; 3], [usize; 3], usize);

/// 3x3x3 filters of few and many channels, filters of one frame or one pixel, videos shorter than the filter, strides and
/// dilations over frames, groups, and sizes of 0.
const SHAPES: [Shape; 33] = [
    ([1, 16, 5, 9, 13], [24, 3, 3, 3], [1; 3], [1; 3], [1; 3], 1),
    ([2, 20, 3, 8, 7], [18, 3, 3, 3], [1; 3], [1; 3], [1; 3], 1),
    ([1, 33, 4, 6, 21], [40, 3, 3, 3], [1; 3], [0, 1, 1], [1; 3], 1),
    ([2, 3, 4, 9, 10], [17, 3, 3, 3], [1; 3], [1; 3], [1; 3], 1),
    ([1, 5, 6, 7, 9], [8, 2, 5, 4], [1; 3], [2, 1, 2], [1; 3], 1),
    ([1, 48, 1, 12, 12], [64, 3, 3, 3], [1; 3], [1; 3], [1; 3], 1),
    ([2, 24, 4, 7, 6], [40, 1, 3, 3], [1; 3], [0, 1, 1], [1; 3], 1),
    ([1, 24, 5, 7, 6], [40, 1, 3, 3], [2, 1, 1], [0, 1, 1], [1; 3], 1),
    ([2, 24, 5, 7, 6], [40, 1, 3, 3], [1; 3], [1, 1, 1], [1; 3], 1),
    ([1, 40, 6, 5, 6], [36, 3, 1, 1], [1; 3], [1, 0, 0], [1; 3], 1),
    ([2, 12, 6, 5, 6], [36, 3, 1, 1], [2, 1, 1], [1, 0, 0], [1; 3], 1),
    ([2, 20, 3, 5, 6], [33, 1, 1, 1], [1; 3], [0; 3], [1; 3], 1),
    ([1, 6, 7, 9, 8], [10, 3, 3, 3], [2; 3], [1; 3], [1; 3], 2),
    ([1, 16, 8, 9, 8], [16, 3, 3, 3], [2, 1, 1], [1; 3], [1; 3], 1),
    ([1, 8, 9, 9, 8], [12, 3, 3, 3], [1; 3], [2; 3], [2; 3], 1),
    ([2, 9, 4, 7, 8], [9, 3, 3, 3], [1; 3], [1; 3], [1; 3], 9),
    ([1, 3, 4, 8, 8], [32, 2, 4, 4], [2, 4, 4], [0; 3], [1; 3], 1),
    ([1, 4, 2, 3, 3], [5, 3, 3, 3], [1; 3], [4; 3], [1; 3], 1),
    ([1, 20, 2, 9, 11], [32, 3, 3, 3], [1; 3], [0, 1, 1], [1; 3], 1),
    ([2, 17, 1, 9, 11], [33, 4, 3, 3], [1; 3], [0, 1, 1], [2, 1, 1], 1),
    ([2, 16, 4, 7, 8], [24, 3, 3, 3], [2, 1, 1], [0, 1, 1], [1; 3], 1),
    ([1, 6, 4, 7, 8], [8, 3, 3, 3], [2, 1, 1], [0, 1, 1], [1; 3], 2),
    ([1, 6, 4, 7, 8], [10, 3, 3, 3], [1; 3], [0, 1, 1], [1; 3], 1),
    ([1, 24, 3, 6, 5], [32, 3, 1, 1], [1; 3], [0; 3], [2, 1, 1], 1),
    ([0, 4, 3, 6, 6], [8, 3, 3, 3], [1; 3], [1; 3], [1; 3], 1),
    ([1, 0, 3, 6, 6], [8, 3, 3, 3], [1; 3], [1; 3], [1; 3], 1),
    ([1, 4, 0, 6, 6], [8, 3, 3, 3], [1; 3], [2, 1, 1], [1; 3], 1),
    ([1, 4, 3, 6, 6], [0, 3, 3, 3], [1; 3], [1; 3], [1; 3], 1),
    ([1, 32, 4, 6, 6], [40, 3, 1, 1], [1; 3], [0; 3], [1; 3], 1),
    ([2, 64, 3, 7, 9], [72, 3, 3, 3], [1; 3], [0, 1, 1], [1; 3], 1),
    ([1, 128, 4, 6, 10], [64, 3, 3, 3], [2, 1, 1], [1; 3], [1; 3], 1),
    ([1, 96, 3, 6, 10], [136, 3, 3, 3], [1; 3], [0, 1, 1], [1; 3], 1),
    ([1, 64, 3, 6, 6], [40, 3, 1, 1], [1; 3], [0; 3], [1; 3], 1),
];

/// The layout in which x alone is channels-last.
const X_LAST: &str = "channels_last x";
/// Dense layouts, and some with gaps after everything but the innermost elements.
const LAYOUTS: [&str; 5] = ["contiguous", "channels_last", X_LAST, "gaps", "channels_last gaps"];

/// The cases: every algorithm, type, layout and shape, with bias and activations in turn, and videos in chunks.
pub(crate) fn cases(device: Device) -> Vec<Case> {
    let mut cases = chunks::cases(device);
    for (i, shape) in SHAPES.iter().enumerate() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let activation = Activation::ALL[i % Activation::ALL.len()];
            for layout in LAYOUTS {
                let Ok(spec) = spec(shape, dtype, layout, activation) else { continue };
                let algorithms = Conv3dPlan::algorithms(&spec, device).into_iter();
                for (algorithm, accuracy) in algorithms.flat_map(|a| accuracies(a, dtype)) {
                    let mut spec = spec.clone();
                    spec.params.accuracy = accuracy;
                    for configuration in configurations(&spec, algorithm) {
                        let spec = spec.clone();
                        let parameters = configuration.to_string();
                        let parameters = parameters.split_once(' ').map_or("", |(_, all)| all);
                        let (accuracy, activation) = (accuracy.name(), activation.name());
                        cases.push(Case {
                            op: "conv3d",
                            algorithm: algorithm.name().into(),
                            dtype,
                            layout: layout.into(),
                            name: format!("{shape:?} {accuracy} {activation} {parameters}")
                                .trim_end()
                                .into(),
                            elements: spec.x.layout.len(),
                            run: Box::new(move || run(&spec, &configuration, device)),
                        });
                    }
                }
            }
        }
    }
    cases
}

/// The accuracies for which an algorithm has kernels of its own.
fn accuracies(
    algorithm: Conv2dAlgorithm,
    dtype: DType,
) -> impl Iterator<Item = (Conv2dAlgorithm, Accuracy)> {
    let has_two = [Conv2dAlgorithm::WinogradRow, Conv2dAlgorithm::ImplicitGemm];
    let rounds = has_two.contains(&algorithm) && dtype == DType::F32;
    let accuracies = [Some(Accuracy::Fp32), rounds.then_some(Accuracy::Half)];
    accuracies.into_iter().flatten().map(move |accuracy| (algorithm, accuracy))
}

/// An algorithm with the cost model's parameters and, for many channels, with those that have kernels of their own.
fn configurations(spec: &Conv3dSpec, algorithm: Conv2dAlgorithm) -> Vec<Conv2dConfiguration> {
    let mut all = vec![Conv2dConfiguration::new(algorithm)];
    if let Ok(problem) = spec.problem()
        && problem.k > 128
        && let Ok(video) = Video::new(spec, &problem)
    {
        all.extend(gpu::variants((&video.spec, &problem), algorithm));
    }
    all
}

fn spec(
    &(x, [k, kt, r, s], stride, padding, dilation, groups): &Shape,
    dtype: DType,
    layout: &str,
    activation: Activation,
) -> Result<Conv3dSpec> {
    let w = TensorDesc::contiguous(dtype, &[k, x[1] / groups, kt, r, s])?;
    let last = layout.starts_with("channels_last");
    let order = |last| if last { [0, 2, 3, 4, 1] } else { [0, 1, 2, 3, 4] };
    let x = TensorDesc { dtype, layout: Layout::with_order(&x, &order(last))? };
    let order = order(last && layout != X_LAST);
    let accuracy = Accuracy::Fp32;
    // Where frames are not padded, convolutions are causal, every second with a state.
    let time_padding = match (padding[0], k % 4) {
        (0, 0 | 1) => TimePadding::Causal,
        (0, _) => TimePadding::CausalRepeat,
        _ => TimePadding::Zeros,
    };
    let params =
        Conv3dParams { stride, padding, dilation, groups, activation, accuracy, time_padding };
    let mut spec = Conv3dSpec::new(x, w, &params)?;
    spec.y.layout = Layout::with_order(spec.y.shape(), &order)?;
    if time_padding != TimePadding::Zeros && x.shape()[2].is_multiple_of(stride[0]) {
        let [n, c, _, h, w] = *x.shape() else { unreachable!("five sizes") };
        let layout = Layout::with_order(&[n, c, (kt - 1) * dilation[0], h, w], &order)?;
        let state = TensorDesc { dtype, layout };
        spec.initial_frames = k.is_multiple_of(4).then_some(state);
        spec.final_frames = Some(state);
    }
    if layout.ends_with("gaps") {
        for desc in [&mut spec.x, &mut spec.y] {
            let mut strides = desc.strides().to_vec();
            order[..4].iter().for_each(|&d| strides[d] *= 2);
            desc.layout = Layout::strided(desc.shape(), &strides)?;
        }
    }
    let sizes: usize = spec.y.shape().iter().sum();
    let spec = spec.with_residual(sizes.is_multiple_of(3));
    let bias = TensorDesc::contiguous(if k % 3 == 0 { dtype } else { DType::F32 }, &[k])?;
    Ok(if k.is_multiple_of(2) { spec.with_bias(bias) } else { spec })
}

/// A view of a tensor that may be missing.
pub(super) fn of(held: &Option<Held>) -> Option<TensorRef<'_>> {
    held.as_ref().map(Held::as_ref)
}

/// The outputs of a run.
pub(super) fn outputs<'a>(
    y: &'a mut Held,
    last: &'a mut Option<Held>,
) -> Result<Conv3dOutputs<'a>> {
    let last = last.as_mut().map(Held::as_mut).transpose()?;
    Ok(Conv3dOutputs::new(y.as_mut()?).with_final_frames(last))
}

fn run(
    spec: &Conv3dSpec,
    configuration: &Conv2dConfiguration,
    device: Device,
) -> Result<Vec<Check>> {
    let options = PlanOptions::default().with_device(device);
    let plan = Conv3dPlan::with_configuration(spec, configuration, &options)?;
    let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
    let hold = |seed, desc: TensorDesc, range: f64| {
        Held::at(desc, &random(seed, desc.layout.len(), -range, range), 0, device)
    };
    let (x, w) = (hold(1, spec.x, 1.0)?, hold(2, spec.w, 0.5)?);
    let bias = spec.bias.map(|desc| hold(3, desc, 1.0)).transpose()?;
    let residual = spec.residual.then(|| hold(4, spec.y, 1.0)).transpose()?;
    let initial = spec.initial_frames.map(|desc| hold(5, desc, 1.0)).transpose()?;
    let args = Conv3dArgs::new(x.as_ref(), Weights::Raw(w.as_ref()));
    let args = args.with_bias(of(&bias)).with_residual(of(&residual));
    let args = args.with_initial_frames(of(&initial));
    let mut y = Held::at(spec.y, &[], 0, device)?;
    let mut last = spec.final_frames.map(|desc| Held::at(desc, &[], 0, device)).transpose()?;
    plan.run(&args, outputs(&mut y, &mut last)?, &mut workspace)?;
    workspace.synchronize()?;
    plan.checks(plan.expected(&args, &w.values()?)?, &outputs(&mut y, &mut last)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_passes_on_the_cpu() {
        let cases = cases(Device::Cpu);
        assert!(cases.len() > 500, "{} cases", cases.len());
        for case in cases {
            let checks = (case.run)().unwrap();
            let bad = checks.iter().find(|check| !check.comparison.passed());
            assert!(bad.is_none(), "{case:?}: {bad:?}");
        }
    }
}
