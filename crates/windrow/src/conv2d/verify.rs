//! The room's cases for `windrow verify`.

use super::plan::{compare, values};
use super::winograd_reference::stages;
use super::{
    Conv2dAlgorithm, Conv2dArgs, Conv2dParams, Conv2dPlan, Conv2dSpec, Weights, networks, reference,
};
use crate::verify::{Case, Check, Comparison, Placed, random_tensor};
use crate::{
    Accuracy, Activation, Approximate, DType, Device, Layout, PlanOptions, Result, TensorDesc,
    TensorRef, Workspace,
};

/// [n, c, h, w], [k, r, s], stride, padding, dilation, groups
type Shape = ([usize; 4], [usize; 3], usize, usize, usize, usize);

/// 3x3 filters with few and many channels, sizes that fill no block, images smaller than a tile, and
/// every other option.
const SHAPES: [Shape; 17] = [
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
    ([0, 4, 6, 6], [8, 3, 3], 1, 1, 1, 1),
    ([2, 0, 6, 6], [8, 3, 3], 1, 1, 1, 1),
    ([2, 4, 6, 6], [0, 3, 3], 1, 1, 1, 1),
];

/// Every algorithm, type, layout and shape; bias and activations in turn; on CUDA each accuracy.
pub(crate) fn cases(device: Device) -> Vec<Case> {
    let accuracies: &[Accuracy] = match device {
        Device::Cpu => &[Accuracy::Fp32],
        Device::Cuda(_) => &[Accuracy::Fp32, Accuracy::Half],
    };
    let mut cases = networks::cases(device);
    for (i, shape) in SHAPES.iter().enumerate() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (layout, order) in [("contiguous", [0, 1, 2, 3]), ("channels_last", [0, 2, 3, 1])] {
                for &accuracy in accuracies {
                    let activation = [
                        Activation::Identity,
                        Activation::Relu,
                        Activation::Silu,
                        Activation::Gelu(Approximate::None),
                        Activation::Gelu(Approximate::Tanh),
                    ][i % 5];
                    let Ok(spec) = spec(shape, dtype, &order, accuracy, activation) else {
                        continue;
                    };
                    for algorithm in Conv2dPlan::algorithms(&spec, device) {
                        let spec = spec.clone();
                        cases.push(Case {
                            op: "conv2d",
                            algorithm: algorithm.name().into(),
                            dtype,
                            layout: layout.into(),
                            name: format!("{shape:?} {} {}", accuracy.name(), activation.name()),
                            run: Box::new(move || run(&spec, algorithm, device)),
                        });
                    }
                }
            }
        }
    }
    cases
}

fn spec(
    &(x, [k, r, s], stride, padding, dilation, groups): &Shape,
    dtype: DType,
    order: &[usize],
    accuracy: Accuracy,
    activation: Activation,
) -> Result<Conv2dSpec> {
    let w = TensorDesc::contiguous(dtype, &[k, x[1] / groups, r, s])?;
    let x = TensorDesc { dtype, layout: Layout::with_order(&x, order)? };
    let params = Conv2dParams {
        stride: [stride; 2],
        padding: [padding; 2],
        dilation: [dilation; 2],
        groups,
        activation,
        accuracy,
    };
    let spec = Conv2dSpec::new(x, w, &params)?;
    // Every second has a bias, of either type.
    Ok(match (k % 2, k % 3) {
        (0, 0) => spec.with_bias(TensorDesc::contiguous(dtype, &[k])?),
        (0, _) => spec.with_bias(TensorDesc::contiguous(DType::F32, &[k])?),
        _ => spec,
    })
}

fn run(spec: &Conv2dSpec, algorithm: Conv2dAlgorithm, device: Device) -> Result<Vec<Check>> {
    let options = PlanOptions { device, ..PlanOptions::default() };
    let plan = Conv2dPlan::with_algorithm(spec, algorithm, &options)?;
    let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
    let place =
        |seed, desc, range: f64| Placed::new(random_tensor(seed, desc, -range, range)?, device);
    let (x, w) = (place(1, spec.x, 1.0)?, place(2, spec.w, 0.5)?);
    let bias = spec.bias.map(|desc| place(3, desc, 1.0)).transpose()?;
    let mut y = Placed::output(spec.y, device)?;
    let bias = bias.as_ref().map(Placed::as_ref);
    let args = Conv2dArgs { x: x.as_ref(), w: Weights::Raw(w.as_ref()), bias };
    plan.run(&args, y.as_mut(), &mut workspace)?;
    workspace.synchronize()?;
    let mut checks = vec![Check { what: "y", comparison: plan.compare(&args, &y.as_ref())? }];
    if device == Device::Cpu
        && let Some((got, want)) = plan.im2col(&x.as_ref())?
    {
        // Copies: nothing may differ.
        let got = TensorRef::new(&got, &[got.len()])?;
        let scale = vec![0.0; want.len()];
        let comparison = Comparison::of(&got, &want, &scale, 0.0)?;
        checks.push(Check { what: "im2col", comparison });
    }
    if !spec.y.layout.is_empty() {
        checks.extend(winograd_stages(&plan, &w.as_ref(), &x.as_ref())?);
    }
    // Gradients do not depend on the algorithm.
    if algorithm == Conv2dAlgorithm::Direct {
        checks.extend(gradients(spec, &options, &x, &w)?);
    }
    Ok(checks)
}

/// U, V and M as the algorithm forms them; nothing for one that has no such stages.
fn winograd_stages(plan: &Conv2dPlan, w: &TensorRef<'_>, x: &TensorRef<'_>) -> Result<Vec<Check>> {
    let Some(tile) = plan.algorithm().tile() else { return Ok(Vec::new()) };
    let Some(got) = plan.winograd_stages(w, x)? else { return Ok(Vec::new()) };
    let problem = plan.spec().problem()?;
    let want = stages(&problem, tile, &values(x)?, &values(w)?);
    let [u, v, m] = plan.stage_tolerances(tile);
    [("U", got.u, want.u, u), ("V", got.v, want.v, v), ("M", got.m, want.m, m)]
        .into_iter()
        .map(|(what, got, want, tolerance)| {
            let got = TensorRef::new(&got, &[got.len()])?;
            let comparison = Comparison::of(&got, &want.values, &want.scale, tolerance)?;
            Ok(Check { what, comparison })
        })
        .collect()
}

fn gradients(
    spec: &Conv2dSpec,
    options: &PlanOptions,
    x: &Placed,
    w: &Placed,
) -> Result<Vec<Check>> {
    let spec = Conv2dSpec { activation: Activation::Identity, ..spec.clone() };
    let plan = Conv2dPlan::new(&spec, options)?;
    let problem = spec.problem()?;
    let device = options.device;
    let mut workspace = Workspace::new(device, plan.backward_workspace_bytes())?;
    let dy = Placed::new(random_tensor(4, spec.y, -1.0, 1.0)?, device)?;
    let (mut dx, mut dw) = (Placed::output(spec.x, device)?, Placed::output(spec.w, device)?);
    let mut db = Placed::output(TensorDesc::contiguous(DType::F32, &[problem.k])?, device)?;
    let (x, w, dy) = (x.as_ref(), w.as_ref(), dy.as_ref());
    plan.backward_data(&w, &dy, dx.as_mut(), &mut workspace)?;
    plan.backward_weight(&x, &dy, dw.as_mut(), &mut workspace)?;
    plan.backward_bias(&dy, db.as_mut(), &mut workspace)?;
    workspace.synchronize()?;
    let (x, w, dy) = (values(&x)?, values(&w)?, values(&dy)?);
    let db_want = reference::backward_bias(&problem, &dy);
    [
        ("dx", dx, plan.expected_data(&w, &dy)?, plan.data_tolerance()?),
        ("dw", dw, plan.expected_weight(&x, &dy)?, plan.weight_tolerance()?),
        ("db", db, db_want, plan.bias_tolerance()?),
    ]
    .into_iter()
    .map(|(what, got, want, tolerance)| {
        Ok(Check { what, comparison: compare(&got.as_ref(), &want, tolerance)? })
    })
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

    /// Nothing without a device.
    #[test]
    fn every_case_passes_on_cuda() {
        if crate::cuda::devices().is_ok_and(|d| !d.is_empty()) {
            run_all(Device::Cuda(0));
        }
    }
}
