//! The room's cases for `windrow verify`.

use super::{GeluAlgorithm, GeluArgs, GeluGrads, GeluPlan, GeluSpec, reference};
use crate::verify::{Case, Check, Comparison, random_tensor};
use crate::{
    Approximate, DType, Device, Layout, PlanOptions, Result, Tensor, TensorDesc, Workspace,
};

/// Largest relative error of a kernel before it rounds to the output type.
///
/// f32: 4 units in the last place of the activation (8 roundings' worth) and one rounding each for
/// the bias, the gate and the product with `dy`. The half types are computed in f32 as well.
pub(crate) fn tolerance(_dtype: DType) -> f64 {
    11.0 * DType::F32.unit_roundoff()
}

/// Shapes with their edge cases: a scalar, nothing, one element, less than a vector, more than a
/// task, four dimensions.
const SHAPES: [&[usize]; 8] =
    [&[], &[0], &[3, 0, 2], &[1], &[7], &[5, 33], &[130, 517], &[2, 9, 5, 6]];

/// Every algorithm, type, form, layout and shape, forward and backward.
pub(crate) fn cases(device: Device) -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in SHAPES {
        for (layout_name, order) in orders(shape.len()) {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for approximate in [Approximate::None, Approximate::Tanh] {
                    for fused in [false, true] {
                        let layout = Layout::with_order(shape, &order).expect("a permutation");
                        let x = TensorDesc { dtype, layout };
                        let Ok(mut spec) = GeluSpec::new(x, approximate) else { continue };
                        if fused {
                            let Some(&last) = shape.last() else { continue };
                            let Ok(bias) = TensorDesc::contiguous(DType::F32, &[last]) else {
                                continue;
                            };
                            spec = spec.bias(bias).gate(x);
                        }
                        for algorithm in GeluPlan::algorithms(&spec, device) {
                            cases.push(Case {
                                op: "gelu",
                                algorithm: algorithm.name().into(),
                                dtype,
                                layout: layout_name.into(),
                                name: format!(
                                    "{shape:?} {}{}",
                                    approximate.name(),
                                    if fused { " bias gate" } else { "" }
                                ),
                                run: Box::new(move || run(&spec, algorithm, device)),
                            });
                        }
                    }
                }
            }
        }
    }
    cases
}

fn orders(rank: usize) -> Vec<(&'static str, Vec<usize>)> {
    let mut orders = vec![("contiguous", (0..rank).collect())];
    match rank {
        2 => orders.push(("transposed", vec![1, 0])),
        4 => orders.push(("channels_last", vec![0, 2, 3, 1])),
        _ => {}
    }
    orders
}

fn run(spec: &GeluSpec, algorithm: GeluAlgorithm, device: Device) -> Result<Vec<Check>> {
    let plan = GeluPlan::with_algorithm(
        spec,
        algorithm,
        &PlanOptions { device, ..PlanOptions::default() },
    )?;
    let mut workspace = Workspace::new(device, plan.workspace_bytes())?;
    let x = random_tensor(1, spec.x, -8.0, 8.0)?;
    let dy = random_tensor(2, spec.y, -2.0, 2.0)?;
    let bias = spec.bias.map(|desc| random_tensor(3, desc, -1.0, 1.0)).transpose()?;
    let gate = spec.gate.map(|desc| random_tensor(4, desc, -2.0, 2.0)).transpose()?;
    let args = GeluArgs {
        x: x.as_ref(),
        bias: bias.as_ref().map(Tensor::as_ref),
        gate: gate.as_ref().map(Tensor::as_ref),
    };
    let inputs = plan.oracle_inputs(&args)?;

    let mut y = Tensor::uninitialised(spec.y)?;
    plan.run(&args, y.as_mut(), &mut workspace)?;
    let mut checks = vec![check("y", &y, &reference::forward(&inputs))?];

    let mut dx = Tensor::uninitialised(spec.x)?;
    let mut dgate = spec.gate.map(Tensor::uninitialised).transpose()?;
    let mut dbias = spec.bias.map(Tensor::uninitialised).transpose()?;
    let grads = GeluGrads {
        dx: Some(dx.as_mut()),
        dgate: dgate.as_mut().map(Tensor::as_mut),
        dbias: dbias.as_mut().map(Tensor::as_mut),
    };
    plan.backward(&args, &dy.as_ref(), grads, &mut workspace)?;
    let last = spec.x.shape().last().copied().unwrap_or(1);
    let expected = reference::backward(&inputs, &dy.as_ref().to_f64_vec()?, last);
    checks.push(check("dx", &dx, &expected.dx)?);
    if let Some(dgate) = &dgate {
        checks.push(check("dgate", dgate, &expected.dgate)?);
    }
    if let Some(dbias) = &dbias {
        checks.push(check("dbias", dbias, &expected.dbias)?);
    }
    Ok(checks)
}

fn check(what: &'static str, got: &Tensor, expected: &reference::Expected) -> Result<Check> {
    let tolerance = tolerance(got.desc().dtype);
    let comparison = Comparison::of(&got.as_ref(), &expected.want, &expected.scale, tolerance)?;
    Ok(Check { what, comparison })
}
