//! The cases of conv2d for `windrow verify`.

use super::winograd_reference::stages;
use super::{
    Conv2dAlgorithm, Conv2dArgs, Conv2dConfiguration, Conv2dParams, Conv2dPlan, Conv2dSpec,
    Weights, gpu, networks, reference,
};
use crate::verification::data::Held;
use crate::verification::{Case, Check, Expected, random};
use crate::{
    Accuracy, Activation, DType, Device, Error, Layout, PlanOptions, Result, TensorDesc, TensorRef,
    Workspace,
};
use std::sync::{Arc, OnceLock};

/// [n, c, h, w], [k, r, s], stride, padding, dilation, groups
type Shape = ([usize; 4], [usize; 3], usize, usize, usize, usize);

/// 3x3 filters with few and many channels, sizes that fill no block, images smaller than a tile, and
/// every other option.
const SHAPES: [Shape; 38] = [
    ([2, 16, 9, 22], [64, 3, 3], 1, 1, 1, 1),
    ([1, 64, 10, 14], [48, 3, 3], 1, 0, 1, 1),
    ([2, 3, 13, 9], [7, 3, 3], 1, 1, 1, 1),
    ([3, 5, 4, 31], [8, 3, 3], 1, 2, 1, 1),
    ([5, 40, 8, 8], [72, 3, 3], 1, 0, 1, 1),
    ([9, 32, 3, 3], [16, 3, 3], 1, 0, 1, 1),
    ([1, 130, 4, 20], [66, 3, 3], 1, 1, 1, 1),
    ([1, 1, 3, 3], [1, 3, 3], 1, 0, 1, 1),
    ([2, 8, 1, 40], [96, 3, 3], 1, 1, 1, 1),
    ([2, 12, 11, 13], [10, 5, 2], 2, 3, 1, 2),
    ([2, 6, 9, 10], [6, 3, 3], 1, 2, 2, 6),
    ([2, 20, 7, 7], [33, 1, 1], 1, 0, 1, 1),
    ([1, 4, 16, 15], [8, 7, 7], 3, 3, 2, 1),
    ([2, 32, 6, 6], [64, 3, 3], 2, 1, 1, 1),
    ([2, 72, 8, 6], [132, 1, 1], 1, 0, 1, 1),
    ([1, 36, 9, 7], [132, 3, 3], 2, 1, 1, 1),
    ([2, 7, 12, 12], [14, 3, 3], 1, 1, 1, 7),
    ([2, 48, 7, 6], [96, 3, 3], 1, 1, 1, 6),
    ([1, 20, 5, 6], [144, 1, 1], 1, 0, 1, 2),
    ([2, 33, 9, 13], [33, 3, 3], 1, 1, 1, 33),
    ([1, 48, 15, 14], [48, 5, 5], 2, 2, 1, 48),
    ([1, 40, 7, 11], [40, 7, 7], 1, 3, 1, 40),
    ([2, 24, 10, 9], [24, 3, 3], 2, 1, 1, 6),
    ([1, 32, 8, 16], [32, 3, 3], 1, 1, 1, 4),
    ([1, 12, 9, 10], [32, 3, 3], 1, 1, 1, 2),
    ([0, 4, 6, 6], [8, 3, 3], 1, 1, 1, 1),
    ([2, 0, 6, 6], [8, 3, 3], 1, 1, 1, 1),
    ([2, 4, 6, 6], [0, 3, 3], 1, 1, 1, 1),
    ([2, 128, 5, 6], [264, 3, 3], 1, 1, 1, 1),
    ([1, 256, 4, 5], [256, 3, 3], 1, 1, 1, 1),
    ([2, 72, 9, 15], [72, 3, 3], 1, 1, 1, 3),
    ([2, 128, 9, 13], [128, 3, 3], 2, 1, 1, 2),
    ([2, 3, 9, 8], [64, 3, 3], 1, 1, 1, 1),
    ([1, 2, 6, 5], [12, 2, 3], 2, 0, 1, 1),
    ([2, 16, 9, 9], [20, 3, 3], 1, 1, 1, 2),
    ([2, 96, 6, 10], [192, 3, 3], 1, 2, 2, 1),
    ([24, 48, 14, 40], [48, 3, 3], 1, 1, 1, 24),
    ([24, 48, 28, 40], [48, 3, 3], 2, 1, 1, 24),
];
/// The index of the first shape that is also run in the last of the layouts.
const SHAPES_APART: usize = 32;
/// The index of the first shape that fills a GPU. Such shapes are run on CUDA only: an emulator takes minutes for them.
const SHAPES_LARGE: usize = 36;

/// Dense layouts, some with gaps after images, which other libraries do not accept, and one with a gap after each
/// element.
const LAYOUTS: [&str; 5] =
    ["contiguous", "channels_last", "gaps", "channels_last gaps", "elements apart"];

/// The cases: every algorithm, type, layout and shape; bias and activations in turn; on CUDA each accuracy.
pub(crate) fn cases(device: Device) -> Vec<Case> {
    let accuracies: &[Accuracy] = match device {
        Device::Cpu => &[Accuracy::Fp32],
        Device::Cuda(_) | Device::Hip(_) => &[Accuracy::Fp32, Accuracy::Half],
    };
    let shapes =
        if matches!(device, Device::Cuda(_)) { &SHAPES[..] } else { &SHAPES[..SHAPES_LARGE] };
    let mut cases = networks::cases(device);
    for (i, shape) in shapes.iter().enumerate() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let oracle = Arc::new(OnceLock::new());
            let activation = Activation::ALL[i % Activation::ALL.len()];
            for layout in &LAYOUTS[..if i < SHAPES_APART { 4 } else { 5 }] {
                for &accuracy in accuracies {
                    let Ok(spec) = spec(shape, dtype, layout, accuracy, activation) else {
                        continue;
                    };
                    for (configuration, memory) in configurations(&spec, device) {
                        let (spec, oracle) = (spec.clone(), Arc::clone(&oracle));
                        let (accuracy, activation) = (accuracy.name(), activation.name());
                        let parameters = configuration.to_string();
                        let parameters = parameters.split_once(' ').map_or("", |(_, all)| all);
                        let pieces = memory.map_or("", |_| " in pieces");
                        cases.push(Case {
                            op: "conv2d",
                            algorithm: configuration.algorithm.name().into(),
                            dtype,
                            layout: (*layout).into(),
                            name: format!("{shape:?} {accuracy} {activation} {parameters}{pieces}")
                                .trim_end()
                                .into(),
                            elements: spec.x.layout.len(),
                            run: Box::new(move || {
                                let oracle: &Result<Oracle> =
                                    oracle.get_or_init(|| Oracle::of(&spec));
                                let oracle = oracle.as_ref().map_err(Error::clone)?;
                                run(oracle, &spec, &configuration, memory, device)
                            }),
                        });
                    }
                }
            }
        }
    }
    cases
}

/// The configurations of a spec: every algorithm with the cost model's parameters, and with other parameters for which
/// separate kernels are compiled. If several images are copied, they are also copied in the least memory.
fn configurations(spec: &Conv2dSpec, device: Device) -> Vec<(Conv2dConfiguration, Option<usize>)> {
    let algorithms = Conv2dPlan::algorithms(spec, device);
    let cuts = match spec.problem() {
        Ok(p) if p.k > 128 => {
            algorithms.iter().flat_map(|&a| gpu::variants((spec, &p), a)).collect()
        }
        _ => Vec::new(),
    };
    let copied = algorithms.contains(&Conv2dAlgorithm::WinogradRow) && spec.x.shape()[0] > 1;
    let copied = copied.then(|| (Conv2dConfiguration::new(Conv2dAlgorithm::WinogradRow), Some(0)));
    let whole = algorithms.into_iter().map(Conv2dConfiguration::new).chain(cuts);
    whole.map(|configuration| (configuration, None)).chain(copied).collect()
}

/// Inputs in f64 and what the oracle makes of them: the same for all layouts, accuracies and algorithms.
struct Oracle {
    x: Vec<f64>,
    w: Vec<f64>,
    dy: Vec<f64>,
    y: Expected,
    gradients: [Expected; 3],
}

/// The inputs of a case on a device: x, w, dy, and bias and residual.
fn inputs(spec: &Conv2dSpec, device: Device) -> Result<([Held; 3], [Option<Held>; 2])> {
    let hold = |seed, desc: TensorDesc, range: f64| {
        Held::at(desc, &random(seed, desc.layout.len(), -range, range), 0, device)
    };
    let bias = spec.bias.map(|desc| hold(3, desc, 1.0)).transpose()?;
    let residual = spec.residual.then(|| hold(5, spec.y, 1.0)).transpose()?;
    let tensors = [hold(1, spec.x, 1.0)?, hold(2, spec.w, 0.5)?, hold(4, spec.y, 1.0)?];
    Ok((tensors, [bias, residual]))
}

impl Oracle {
    fn of(spec: &Conv2dSpec) -> Result<Self> {
        let problem = spec.problem()?;
        let ([x, w, dy], added) = inputs(spec, Device::Cpu)?;
        let [x, w, dy] = [x.values()?, w.values()?, dy.values()?];
        let [bias, residual] = added.map(|held| held.map(|held| held.values()).transpose());
        let (bias, residual) = (bias?, residual?);
        let added = [bias.as_deref(), residual.as_deref()];
        Ok(Oracle {
            y: reference::forward(&problem, &x, &w, added, spec.activation)?,
            gradients: [
                reference::backward_data(&problem, &w, &dy)?,
                reference::backward_weight(&problem, &x, &dy)?,
                reference::backward_bias(&problem, &dy)?,
            ],
            x,
            w,
            dy,
        })
    }
}

fn spec(
    &(x, [k, r, s], stride, padding, dilation, groups): &Shape,
    dtype: DType,
    layout: &str,
    accuracy: Accuracy,
    activation: Activation,
) -> Result<Conv2dSpec> {
    let w = TensorDesc::contiguous(dtype, &[k, x[1] / groups, r, s])?;
    let last = layout.starts_with("channels_last");
    let order = if last { [0, 2, 3, 1] } else { [0, 1, 2, 3] };
    let x = TensorDesc { dtype, layout: Layout::with_order(&x, &order)? };
    let params = Conv2dParams {
        stride: [stride; 2],
        padding: [padding; 2],
        dilation: [dilation; 2],
        groups,
        activation,
        accuracy,
    };
    let mut spec = Conv2dSpec::new(x, w, &params)?;
    // Space for another image, or another element, after each.
    let doubled = match layout {
        "elements apart" => 4,
        _ => usize::from(layout.ends_with("gaps")),
    };
    for desc in [&mut spec.x, &mut spec.y].into_iter().filter(|_| doubled > 0) {
        let mut strides = desc.strides().to_vec();
        strides[..doubled].iter_mut().for_each(|stride| *stride *= 2);
        desc.layout = Layout::strided(desc.shape(), &strides)?;
    }
    // Every second has a bias, of either type, and every third shape adds a residual.
    let sizes: usize = spec.y.shape().iter().sum();
    let spec = spec.with_residual(sizes.is_multiple_of(3));
    Ok(match (k % 2, k % 3) {
        (0, 0) => spec.with_bias(TensorDesc::contiguous(dtype, &[k])?),
        (0, _) => spec.with_bias(TensorDesc::contiguous(DType::F32, &[k])?),
        _ => spec,
    })
}

fn run(
    oracle: &Oracle,
    spec: &Conv2dSpec,
    configuration: &Conv2dConfiguration,
    memory: Option<usize>,
    device: Device,
) -> Result<Vec<Check>> {
    let options = PlanOptions { device, memory, ..PlanOptions::default() };
    let plan = Conv2dPlan::with_configuration(spec, configuration, &options)?;
    let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
    let ([x, w, dy], added) = inputs(spec, device)?;
    let mut y = Held::at(spec.y, &[], 0, device)?;
    let [bias, residual] = added.each_ref().map(|held| held.as_ref().map(Held::as_ref));
    let args = Conv2dArgs { x: x.as_ref(), w: Weights::Raw(w.as_ref()), bias, residual };
    plan.run(&args, y.as_mut()?, &mut workspace)?;
    workspace.synchronize()?;
    let want = plan.widened(oracle.y.copy()?, &spec.problem()?, &oracle.x, &oracle.w)?;
    let mut checks = vec![want.check("y", &y.as_ref(), plan.tolerance())?];
    checks.extend(im2col_check(&plan, &x.as_ref())?);
    if !spec.y.layout.is_empty() {
        checks.extend(stage_checks(&plan, &w.as_ref(), &x.as_ref())?);
    }
    // Gradients depend on the algorithm in these plans alone.
    let asked = *configuration == Conv2dConfiguration::new(Conv2dAlgorithm::ImplicitGemm);
    if configuration.algorithm == Conv2dAlgorithm::Direct || asked {
        let algorithm = asked.then_some(configuration.algorithm);
        checks.extend(gradients(oracle, spec, algorithm, &options, [&x, &w, &dy])?);
    }
    Ok(checks)
}

/// The im2col matrix, where the algorithm has one on the CPU. It is a copy: nothing may differ.
pub(super) fn im2col_check(plan: &Conv2dPlan, x: &TensorRef<'_>) -> Result<Option<Check>> {
    let Some((got, want)) = plan.im2col(x)? else { return Ok(None) };
    let got = TensorRef::new(&got, &[got.len()])?;
    Expected::exactly(want)?.check("im2col", &got, 0.0).map(Some)
}

/// U, V and M as the algorithm forms them; nothing for one that has no such stages.
pub(super) fn stage_checks(
    plan: &Conv2dPlan,
    w: &TensorRef<'_>,
    x: &TensorRef<'_>,
) -> Result<Vec<Check>> {
    let Some(tile) = plan.algorithm().tile() else { return Ok(Vec::new()) };
    let Some(got) = plan.winograd_stages(w, x)? else { return Ok(Vec::new()) };
    let problem = plan.spec().problem()?;
    let [u, v, m] = plan.stage_tolerances(tile);
    let [u_lost, v_lost] = plan.stage_underflows();
    // As shares of scales.
    let lost = [u_lost / u, v_lost / v];
    let want = stages(&problem, tile, &x.to_f64_vec()?, &w.to_f64_vec()?, lost)?;
    [("U", got.u, want.u, u), ("V", got.v, want.v, v), ("M", got.m, want.m, m)]
        .into_iter()
        .map(|(what, got, want, tolerance)| {
            let got = TensorRef::new(&got, &[got.len()])?;
            want.check(what, &got, tolerance)
        })
        .collect()
}

fn gradients(
    oracle: &Oracle,
    spec: &Conv2dSpec,
    algorithm: Option<Conv2dAlgorithm>,
    options: &PlanOptions,
    [x, w, dy]: [&Held; 3],
) -> Result<Vec<Check>> {
    let spec = Conv2dSpec { activation: Activation::Identity, ..spec.clone() };
    let plan = match algorithm {
        Some(algorithm) => Conv2dPlan::with_algorithm(&spec, algorithm, options)?,
        None => Conv2dPlan::new(&spec, options)?,
    };
    let device = options.device;
    let mut workspace = Workspace::new(device, plan.backward_workspace_bytes()?)?;
    let output = |desc| Held::at(desc, &[], 0, device);
    let in_f32 = |shape: &[usize]| output(TensorDesc::contiguous(DType::F32, shape)?);
    let [mut dx, mut dw] = [output(spec.x)?, output(spec.w)?];
    let [mut dw_f32, mut db] = [in_f32(spec.w.shape())?, in_f32(&spec.y.shape()[1..2])?];
    let (x, w, dy) = (x.as_ref(), w.as_ref(), dy.as_ref());
    plan.backward_data(&w, &dy, dx.as_mut()?, &mut workspace)?;
    for dw in [&mut dw, &mut dw_f32] {
        plan.backward_weight(&x, &dy, dw.as_mut()?, &mut workspace)?;
    }
    plan.backward_bias(&dy, db.as_mut()?, &mut workspace)?;
    workspace.synchronize()?;
    let [dx_want, dw_want, db_want] = &oracle.gradients;
    let dw_want = plan.widened_weight(dw_want.copy()?, &oracle.x, &oracle.dy)?;
    let [data, weight, bias] = plan.gradient_tolerances()?;
    [
        ("dx", dx, plan.widened_data(dx_want.copy()?, &oracle.w, &oracle.dy)?, data),
        ("dw", dw, dw_want.copy()?, weight),
        ("dw in f32", dw_f32, dw_want, weight),
        ("db", db, db_want.copy()?, bias),
    ]
    .into_iter()
    .map(|(what, got, want, tolerance)| want.check(what, &got.as_ref(), tolerance))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_all(device: Device) {
        let failed: Vec<_> = cases(device)
            .iter()
            .filter_map(|case| match (case.run)() {
                Ok(checks) => {
                    let bad = checks.iter().find(|c| !c.comparison.passed())?;
                    Some(format!("{case:?}: {:?}", bad.comparison))
                }
                Err(error) => Some(format!("{case:?}: {error}")),
            })
            .collect();
        assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
    }

    #[test]
    fn every_case_passes_on_the_cpu() {
        run_all(Device::Cpu);
    }

    /// Without a GPU the test does nothing.
    #[test]
    fn every_case_passes_on_cuda() {
        if crate::cuda::devices().is_ok_and(|d| !d.is_empty()) {
            run_all(Device::Cuda(0));
        }
    }
}
