//! Activations at the edges of their range, by every operator that has them: in vectors and behind them.

use crate::cpu::Isa;
use crate::*;

const EDGES: [f32; 32] = [
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MAX,
    f32::MIN,
    1e30,
    -1e30,
    -1e4,
    -127.0,
    -126.0,
    -120.0,
    -110.0,
    -109.0,
    -108.9,
    -104.0,
    -103.5,
    -100.0,
    -95.5,
    -92.0,
    -90.0,
    -88.8,
    -88.7,
    -88.0,
    -87.1,
    -87.0,
    -86.9,
    -14.0,
    -0.0,
    0.0,
    1.0,
    87.5,
    130.0,
];

/// Relative, then the step of subnormal numbers. SiLU of sums of few products is computed with fewer operations: in f32
/// the error is that of its exponent, up to 157, which is rounded twice where no fused operations are.
fn error_allowed(dtype: DType, isa: Isa) -> (f64, f64) {
    match dtype {
        DType::F16 => (2f64.powi(-11) + 1e-4, 2f64.powi(-24)),
        DType::BF16 => (2f64.powi(-8), 2f64.powi(-133)),
        _ if isa.name() == "portable" => (1e-5, 2f64.powi(-149)),
        _ => (3e-6, 2f64.powi(-149)),
    }
}

fn check<T: Element + Into<f64>>(
    operator: &str,
    isa: Isa,
    activation: Activation,
    x: &[T],
    y: &Tensor,
) {
    let (relative, step) = error_allowed(T::DTYPE, isa);
    let what = format!("{operator} in {} on {}", T::DTYPE, isa.name());
    for (&x, y) in x.iter().zip(y.to_vec::<T>().unwrap()) {
        let (x, y): (f64, f64) = (x.into(), y.into());
        let want = activation.apply_f64(x);
        let near = (y - want).abs() <= relative * want.abs() + step;
        // What the type cannot hold is infinite.
        let far = T::from_f64(want).into() == y && y.is_infinite();
        let is_nan = y.is_nan() && want.is_nan();
        assert!(
            near || far || y == want || is_nan,
            "{what}: {activation} of {x:e}: {y:e}, not {want:e}"
        );
        // A sum that begins with +0 is +0 for -0.
        let sign = y.is_sign_negative() == want.is_sign_negative();
        assert!(
            sign || is_nan || x == 0.0 || activation.has_kinks(),
            "{what}: {activation} of {x:e}: {y:e}, not {want:e}"
        );
    }
}

/// Enough for vectors of every width, and what is behind them.
fn inputs<T: Element>() -> Vec<T> {
    let edges = EDGES.iter().map(|&x| T::from_f64(f64::from(x)));
    edges.clone().chain(edges.rev()).chain([T::from_f64(-95.0)]).collect()
}

fn every_operator<T: Element + Into<f64>>() {
    let x = inputs::<T>();
    let ones = [T::from_f64(1.0)];
    let options = PlanOptions::default();
    for isa in Isa::available() {
        for &activation in Activation::ALL {
            let image = Tensor::from_slice(&x, &[1, 1, 1, x.len()]).unwrap();
            let filter = Tensor::from_slice(&ones, &[1, 1, 1, 1]).unwrap();
            let params = Conv2dParams::default().with_activation(activation);
            let spec = Conv2dSpec::new(*image.desc(), *filter.desc(), &params).unwrap();
            for algorithm in Conv2dPlan::algorithms(&spec, Device::Cpu) {
                let configuration = Conv2dConfiguration::new(algorithm);
                let plan = match Conv2dPlan::on_isa(&spec, &configuration, &options, isa) {
                    // Algorithms are those of the best instruction set, and not every set has each method.
                    Err(Error::Unsupported { .. }) if isa != Isa::best() => continue,
                    plan => plan.unwrap(),
                };
                let mut y = Tensor::uninitialised(spec.y).unwrap();
                let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
                let args = Conv2dArgs::new(image.as_ref(), filter.as_ref());
                plan.run(&args, y.as_mut(), &mut workspace).unwrap();
                check(&format!("conv2d by {algorithm}"), isa, activation, &x, &y);
            }

            let sequence = Tensor::from_slice(&x, &[1, 1, x.len()]).unwrap();
            for weight in [&[1, 1][..], &[1, 1, 1]] {
                let weight = Tensor::from_slice(&ones, weight).unwrap();
                let spec = CausalConv1dSpec::new(*sequence.desc(), *weight.desc()).unwrap();
                let spec = spec.with_activation(activation);
                for algorithm in CausalConv1dPlan::algorithms(&spec, Device::Cpu) {
                    let configuration = CausalConv1dConfiguration::new(algorithm);
                    let plan =
                        CausalConv1dPlan::on_isa(&spec, &configuration, &options, isa).unwrap();
                    let mut y = Tensor::uninitialised(spec.y).unwrap();
                    let mut workspace =
                        Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
                    let args = CausalConv1dArgs::new(sequence.as_ref(), weight.as_ref());
                    plan.run(&args, CausalConv1dOutputs::new(y.as_mut()), &mut workspace).unwrap();
                    check(&format!("causal_conv1d by {algorithm}"), isa, activation, &x, &y);
                }
            }

            if let Activation::Gelu(approximate) = activation {
                let vector = Tensor::from_slice(&x, &[x.len()]).unwrap();
                let spec = GeluSpec::new(*vector.desc(), approximate).unwrap();
                let configuration = GeluConfiguration::new(GeluAlgorithm::Cpu);
                let plan = GeluPlan::on_isa(&spec, &configuration, &options, isa).unwrap();
                let mut y = Tensor::uninitialised(spec.y).unwrap();
                let args = GeluArgs::new(vector.as_ref());
                plan.run(&args, y.as_mut(), &mut Workspace::empty()).unwrap();
                check("gelu", isa, activation, &x, &y);
            }
        }
    }
}

#[test]
fn f32_activations_are_right_to_the_last_number() {
    every_operator::<f32>();
}

#[test]
fn f16_activations_are_right_to_the_last_number() {
    every_operator::<f16>();
}

#[test]
fn bf16_activations_are_right_to_the_last_number() {
    every_operator::<bf16>();
}
