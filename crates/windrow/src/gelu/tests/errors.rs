//! Calls that must be rejected.

use super::*;

#[test]
fn wrong_specs_are_refused() {
    let x = contiguous(&[2, 3]);
    let spec = GeluSpec::new(x, Approximate::None).unwrap();
    let refused = |spec: GeluSpec| {
        assert!(GeluPlan::algorithms(&spec, Device::Cpu).is_empty());
        GeluPlan::new(&spec, &PlanOptions::default()).unwrap_err()
    };
    let f16_bias = TensorDesc::contiguous(DType::F16, &[3]).unwrap();
    let overlap = Layout::strided(&[2, 3], &[0, 1]).unwrap();
    let f64_x = TensorDesc::contiguous(DType::F64, &[2]).unwrap();
    for error in [
        refused(spec.with_bias(f16_bias)),
        refused(GeluSpec::new(f64_x, Approximate::None).unwrap()),
    ] {
        assert!(matches!(error, Error::DType { .. }), "{error}");
    }
    for error in [
        refused(spec.with_bias(contiguous(&[2]))),
        refused(spec.with_gate(contiguous(&[3, 2]))),
        refused(spec.with_output(contiguous(&[6]))),
    ] {
        assert!(matches!(error, Error::Shape { .. }), "{error}");
    }
    let error = refused(spec.with_output(TensorDesc { layout: overlap, ..x }));
    assert!(matches!(error, Error::OverlappingOutput { arg: "y", .. }), "{error}");
    let scalar = GeluSpec::new(contiguous(&[]), Approximate::None).unwrap();
    assert!(matches!(refused(scalar.with_bias(contiguous(&[1]))), Error::Rank { .. }));
    // A broadcast input gets an output of its own layout.
    let broadcast = TensorDesc { layout: overlap, ..x };
    assert!(GeluSpec::new(broadcast, Approximate::None).unwrap().y.layout.is_contiguous());
}

#[test]
fn wrong_views_are_refused() {
    let x = [0f32; 12];
    let mut y = [0f32; 12];
    let ws = &mut Workspace::empty();
    let view = TensorRef::new(&x[..6], &[2, 3]).unwrap();
    let none = GeluArgs { x: view, bias: None, gate: None };
    let spec = GeluSpec::new(contiguous(&[2, 3]), Approximate::None).unwrap();
    let plain = plan(&spec);
    let biased = plan(&spec.with_bias(contiguous(&[3])));
    let mut run = |plan: &GeluPlan, args: GeluArgs<'_>, shape: &[usize]| {
        let n = shape.iter().product();
        plan.run(&args, TensorMut::new(&mut y[..n], shape).unwrap(), ws)
    };
    run(&plain, none, &[2, 3]).unwrap();
    assert!(matches!(run(&plain, none, &[3, 2]), Err(Error::Shape { arg: "y", .. })));
    assert!(matches!(run(&biased, none, &[2, 3]), Err(Error::Parameter { name: "bias", .. })));
    let extra = GeluArgs { gate: Some(view), ..none };
    assert!(matches!(run(&plain, extra, &[2, 3]), Err(Error::Parameter { name: "gate", .. })));
    let strided = Layout::strided(&[2, 3], &[6, 2]).unwrap();
    let other = GeluArgs { x: TensorRef::strided(&x, 0, strided).unwrap(), ..none };
    assert!(matches!(run(&plain, other, &[2, 3]), Err(Error::Strides { arg: "x", .. })));
    let half = [f16::ZERO; 6];
    let other = GeluArgs { x: TensorRef::new(&half, &[2, 3]).unwrap(), ..none };
    assert!(matches!(run(&plain, other, &[2, 3]), Err(Error::DType { arg: "x", .. })));
}

#[test]
fn shared_memory_is_refused() {
    let mut data = [0f32; 8];
    let desc = contiguous(&[4]);
    let p = data.as_mut_ptr();
    // SAFETY: all within `data`, which is touched through these pointers only.
    let (at, to) = unsafe {
        (
            |i: usize| TensorRef::from_raw(p.add(i).cast(), desc, Device::Cpu),
            |i: usize| TensorMut::from_raw(p.add(i).cast(), desc, Device::Cpu).unwrap(),
        )
    };
    let spec = GeluSpec::new(desc, Approximate::None).unwrap();
    let ws = &mut Workspace::empty();
    let args = GeluArgs { x: at(0), bias: None, gate: None };
    plan(&spec).run(&args, to(0), ws).unwrap();
    let shifted = plan(&spec).run(&args, to(1), ws);
    assert!(matches!(shifted, Err(Error::Aliasing { output: "y", input: "x", .. })));
    let gated = plan(&spec.with_gate(desc));
    let shared = GeluArgs { gate: Some(at(4)), ..args };
    assert!(matches!(
        gated.run(&shared, to(4), ws),
        Err(Error::Aliasing { output: "y", input: "gate", .. })
    ));
    let dy = [0f32; 4];
    let dy = TensorRef::new(&dy, &[4]).unwrap();
    let both = GeluGrads { dx: Some(to(2)), ..GeluGrads::default() };
    assert!(matches!(
        plan(&spec).backward(&args, &dy, both, ws),
        Err(Error::Aliasing { output: "dx", input: "x", .. })
    ));
    let twice = GeluGrads { dx: Some(to(4)), dgate: Some(to(4)), dbias: None };
    let apart = [0f32; 4];
    let apart = TensorRef::new(&apart, &[4]).unwrap();
    let shared = GeluArgs { gate: Some(apart), ..args };
    assert!(matches!(
        gated.backward(&shared, &dy, twice, ws),
        Err(Error::Aliasing { output: "dgate", input: "dx", .. })
    ));
}

#[test]
fn gradients_of_what_is_not_there_are_refused() {
    let (x, mut g) = ([0f32; 4], [0f32; 4]);
    let view = TensorRef::new(&x, &[4]).unwrap();
    let spec = GeluSpec::new(contiguous(&[4]), Approximate::None).unwrap();
    let args = GeluArgs { x: view, bias: None, gate: None };
    let grads =
        GeluGrads { dbias: Some(TensorMut::new(&mut g, &[4]).unwrap()), ..GeluGrads::default() };
    let error = plan(&spec).backward(&args, &view, grads, &mut Workspace::empty()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let biased = plan(&spec.with_bias(contiguous(&[4])));
    let args = GeluArgs { bias: Some(view), ..args };
    let grads =
        GeluGrads { dbias: Some(TensorMut::new(&mut g, &[4]).unwrap()), ..GeluGrads::default() };
    // Nor without the workspace that the sums need.
    let error = biased.backward(&args, &view, grads, &mut Workspace::empty()).unwrap_err();
    assert!(matches!(error, Error::WorkspaceTooSmall { .. }), "{error}");
}

#[test]
fn devices_without_the_operator_are_refused() {
    let spec = GeluSpec::new(contiguous(&[4]), Approximate::None).unwrap();
    let options = PlanOptions { device: Device::Cuda(999), ..PlanOptions::default() };
    assert!(matches!(GeluPlan::new(&spec, &options), Err(Error::NoDevice { .. })));
    let ok = GeluPlan::with_algorithm(&spec, GeluAlgorithm::Cpu, &PlanOptions::default()).unwrap();
    assert_eq!(ok.algorithm().name().parse::<GeluAlgorithm>().unwrap(), GeluAlgorithm::Cpu);
    assert!("fast".parse::<GeluAlgorithm>().is_err());
    assert!(ok.explain().starts_with("gelu by cpu"));
}
