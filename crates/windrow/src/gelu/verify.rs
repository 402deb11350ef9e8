//! Cases of GELU for `windrow verify`.

use super::{GeluAlgorithm, GeluArgs, GeluGrads, GeluPlan, GeluSpec, HalfMath, reference};
use crate::verification::{Case, Check, Expected, random_tensor};
use crate::{
    Approximate, DType, Device, Layout, Placed, PlanOptions, Result, TensorDesc, Workspace,
};

/// Shapes with edge cases: a scalar, empty tensors, one element, less than one SIMD vector, more than the work of one
/// parallel task, four dimensions.
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
                            spec = spec.with_bias(bias).with_gate(x);
                        }
                        let native = spec.with_half_math(HalfMath::Native);
                        let specs = [Some(spec), dtype.is_half().then_some(native)];
                        for spec in specs.into_iter().flatten() {
                            for algorithm in GeluPlan::algorithms(&spec, device) {
                                let native = spec.half_math == HalfMath::Native;
                                cases.push(Case {
                                    op: "gelu",
                                    algorithm: algorithm.name().into(),
                                    dtype,
                                    layout: layout_name.into(),
                                    name: format!(
                                        "{shape:?} {}{}{}",
                                        approximate.name(),
                                        if fused { " bias gate" } else { "" },
                                        if native { " native" } else { "" }
                                    ),
                                    elements: spec.x.layout.len(),
                                    run: Box::new(move || run(&spec, algorithm, device)),
                                });
                            }
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
    let place = |seed, desc, low, high| Placed::new(random_tensor(seed, desc, low, high)?, device);
    let x = place(1, spec.x, -8.0, 8.0)?;
    let dy = place(2, spec.y, -2.0, 2.0)?;
    let bias = spec.bias.map(|desc| place(3, desc, -1.0, 1.0)).transpose()?;
    let gate = spec.gate.map(|desc| place(4, desc, -2.0, 2.0)).transpose()?;
    let args = GeluArgs {
        x: x.as_ref(),
        bias: bias.as_ref().map(Placed::as_ref),
        gate: gate.as_ref().map(Placed::as_ref),
    };
    let inputs = plan.oracle_inputs(&args)?;
    let tolerance = plan.tolerance();
    let check =
        |what, got: &Placed, expected: &Expected| expected.check(what, &got.as_ref(), tolerance);

    let mut y = Placed::output(spec.y, device)?;
    plan.run(&args, y.as_mut()?, &mut workspace)?;
    workspace.synchronize()?;
    let mut checks = vec![check("y", &y, &plan.oracle_forward(&inputs)?)?];

    let output = |desc| Placed::output(desc, device);
    let mut dx = output(spec.x)?;
    let mut dgate = spec.gate.map(output).transpose()?;
    let mut dbias = spec.bias.map(output).transpose()?;
    let grads = GeluGrads {
        dx: Some(dx.as_mut()?),
        dgate: dgate.as_mut().map(Placed::as_mut).transpose()?,
        dbias: dbias.as_mut().map(Placed::as_mut).transpose()?,
    };
    plan.backward(&args, &dy.as_ref(), grads, &mut workspace)?;
    workspace.synchronize()?;
    let last = spec.x.shape().last().copied().unwrap_or(1);
    let expected = reference::backward(&inputs, &dy.as_ref().to_f64_vec()?, last)?;
    checks.push(check("dx", &dx, &expected.dx)?);
    if let Some(dgate) = &dgate {
        checks.push(check("dgate", dgate, &expected.dgate)?);
    }
    if let Some(dbias) = &dbias {
        checks.push(check("dbias", dbias, &expected.dbias)?);
    }
    Ok(checks)
}
