//! Outputs that are divided by the norm of their heads.

use super::*;
use crate::verification::ulp;

/// Values that a norm of heads of `width` channels gives of `z` [b, channels, l].
fn divided(z: &[f64], [b, channels, l]: [usize; 3], norm: HeadNorm) -> Vec<f64> {
    let at = |b: usize, c: usize, t: usize| z[(b * channels + c) * l + t];
    let mut y = Vec::new();
    for b in 0..b {
        for c in 0..channels {
            let first = c / norm.width() * norm.width();
            for t in 0..l {
                let squares = (first..first + norm.width()).map(|j| at(b, j, t) * at(b, j, t));
                let sum = squares.sum::<f64>() + f64::from(norm.epsilon());
                y.push(at(b, c, t) / sum.sqrt());
            }
        }
    }
    y
}

/// What a separate norm behind the convolution gives, up to roundings of f32: on every instruction set, by every
/// algorithm, with the same bits in all layouts.
#[test]
fn a_norm_is_that_of_the_rounded_outputs() {
    let shape = [2, 96, 45];
    for dtype in DTYPES {
        for (width, channels) in
            [(16, &[96][..]), (1, &[5, 91]), (24, &[48, 24, 24]), (9, &[9, 27, 60])]
        {
            let norm = HeadNorm::new(width).with_epsilon(1e-3);
            for (isa, by) in Isa::available()
                .into_iter()
                .flat_map(|isa| CausalConv1dAlgorithm::ALL.iter().map(move |&by| (isa, by)))
            {
                let mut bits = Vec::new();
                for order in [[0, 1, 2], [0, 2, 1], [2, 1, 0]] {
                    let layout = |n: usize| Layout::with_order(&[2, n, 45], &order).unwrap();
                    let x = TensorDesc { dtype, layout: layout(96) };
                    let weight = TensorDesc::contiguous(DType::F32, &[96, 4]).unwrap();
                    let spec = CausalConv1dSpec::new(x, weight)
                        .unwrap()
                        .with_activation(Activation::Silu)
                        .with_split(channels)
                        .unwrap();
                    let to = |i: usize| {
                        channels.get(i).map(|&n| TensorDesc { dtype, layout: layout(n) })
                    };
                    let spec = spec.with_output(to(0).unwrap()).with_y2(to(1)).with_y3(to(2));
                    let values = |spec: &CausalConv1dSpec| {
                        let by = CausalConv1dConfiguration::new(by);
                        let plan = CausalConv1dPlan::on_isa(spec, &by, &options(2), isa).unwrap();
                        let mut sample = Sample::new(spec, 3).unwrap();
                        pass(&plan.explain(), run(&plan, &mut sample).unwrap());
                        let further = sample.further.iter().flatten().map(|y| y.values().unwrap());
                        Vec::from_iter([sample.y.values().unwrap()].into_iter().chain(further))
                    };
                    let (z, y) = (values(&spec), values(&spec.clone().with_norm(norm)));
                    for (i, (z, y)) in z.iter().zip(&y).enumerate() {
                        let want = match i {
                            2 => z.clone(),
                            _ => divided(z, [shape[0], channels[i], shape[2]], norm),
                        };
                        for (got, want) in y.iter().zip(want) {
                            let slack = 0.5 * ulp(dtype, want) + 20.0 * 6e-8 * want.abs();
                            assert!((got - want).abs() <= slack, "{dtype} {i}: {got} {want}");
                        }
                    }
                    bits.push(y);
                }
                assert!(bits.iter().all(|y| *y == bits[0]), "{dtype} {isa:?} {by}");
            }
        }
    }
}

#[test]
fn bad_norms_are_refused() {
    let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    let spec = CausalConv1dSpec::new(desc(&[2, 12, 5]), desc(&[12, 4])).unwrap();
    let serving = CausalConv1dServingSpec::new(spec.x, desc(&[2, 12, 3]), spec.weight).unwrap();
    let plan = |channels: &[usize], norm: HeadNorm| {
        let options = options(1);
        let spec = spec.clone().with_split(channels).unwrap().with_norm(norm);
        let serving = serving.clone().with_split(channels).unwrap().with_norm(norm);
        [
            CausalConv1dPlan::new(&spec, &options).map(|_| ()),
            CausalConv1dServingPlan::new(&serving, &options).map(|_| ()),
        ]
    };
    let norm = HeadNorm::new(4);
    for (channels, norm) in [
        (&[12][..], HeadNorm::new(0)),
        (&[12], HeadNorm::new(5)),
        (&[12], HeadNorm::new(usize::MAX)),
        (&[4, 6, 2], norm),
        (&[6, 4, 2], norm),
        (&[12], norm.with_epsilon(0.0)),
        (&[12], norm.with_epsilon(-1.0)),
        (&[12], norm.with_epsilon(f32::NAN)),
        (&[12], norm.with_epsilon(f32::INFINITY)),
    ] {
        for result in plan(channels, norm) {
            assert!(matches!(&result, Err(Error::Parameter { name: "norm", .. })), "{result:?}");
        }
    }
    // The third output has no norm.
    for result in plan(&[4, 4, 4], norm).into_iter().chain(plan(&[4, 8], norm)) {
        result.unwrap();
    }
    for result in plan(&[4, 3, 5], HeadNorm::new(1)) {
        result.unwrap();
    }
}

#[test]
fn gradients_with_a_norm_are_refused() {
    let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    let spec = CausalConv1dSpec::new(desc(&[1, 4, 2]), desc(&[4, 1])).unwrap();
    let plan = CausalConv1dPlan::new(&spec.with_norm(HeadNorm::new(2)), &options(1)).unwrap();
    let (x, weight) = ([1f32; 8], [2f32; 4]);
    let args = CausalConv1dArgs::new(
        TensorRef::new(&x, &[1, 4, 2]).unwrap(),
        TensorRef::new(&weight, &[4, 1]).unwrap(),
    );
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let dy = TensorRef::new(&x, &[1, 4, 2]).unwrap();
    let result = plan.backward(&args, dy, None, CausalConv1dGrads::default(), &mut workspace);
    assert!(matches!(result, Err(Error::Unsupported { .. })), "{result:?}");
}

/// Heads without a number, with zeros alone, and with squares beyond the range of f32.
#[test]
fn extreme_heads_have_defined_norms() {
    let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    let spec = CausalConv1dSpec::new(desc(&[1, 8, 1]), desc(&[8, 1])).unwrap();
    let plan = CausalConv1dPlan::new(&spec.with_norm(HeadNorm::new(2)), &options(1)).unwrap();
    let x = [f32::NAN, 1.0, 0.0, 0.0, 1e25, 1.0, f32::INFINITY, 1.0];
    let (weight, mut y) = ([1f32; 8], [7f32; 8]);
    let args = CausalConv1dArgs::new(
        TensorRef::new(&x, &[1, 8, 1]).unwrap(),
        TensorRef::new(&weight, &[8, 1]).unwrap(),
    );
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let outputs = CausalConv1dOutputs::new(TensorMut::new(&mut y, &[1, 8, 1]).unwrap());
    plan.run(&args, outputs, &mut workspace).unwrap();
    assert!(y[0].is_nan() && y[1].is_nan() && y[6].is_nan());
    assert_eq!((y[2], y[3], y[4], y[5], y[7]), (0.0, 0.0, 0.0, 0.0, 0.0));
}
