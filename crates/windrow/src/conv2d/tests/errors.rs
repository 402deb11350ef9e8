//! Convolutions that must be rejected.

use super::*;
use crate::Accuracy;

fn desc(shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(DType::F32, shape).unwrap()
}

fn new(x: &[usize], w: &[usize], params: Conv2dParams) -> Result<Conv2dSpec> {
    Conv2dSpec::new(desc(x), desc(w), &params)
}

/// A valid spec to change.
fn valid() -> Conv2dSpec {
    new(&[2, 4, 6, 5], &[8, 4, 3, 3], Conv2dParams::default()).unwrap()
}

fn plan_error(spec: &Conv2dSpec) -> Error {
    assert!(Conv2dPlan::algorithms(spec, Device::Cpu).is_empty());
    Conv2dPlan::new(spec, &PlanOptions::default()).unwrap_err()
}

#[test]
fn wrong_rank() {
    let params = Conv2dParams::default();
    assert!(matches!(
        new(&[4, 6, 5], &[8, 4, 3, 3], params),
        Err(Error::Rank { arg: "x", given: 3, .. })
    ));
    assert!(matches!(
        new(&[2, 4, 6, 5], &[8, 4, 9], params),
        Err(Error::Rank { arg: "w", given: 3, .. })
    ));
}

#[test]
fn wrong_types() {
    let of = |dtype, shape: &[usize]| TensorDesc::contiguous(dtype, shape).unwrap();
    let new = |x, w| {
        let (x, w) = (of(x, &[2, 4, 6, 5]), of(w, &[8, 4, 3, 3]));
        Conv2dSpec::new(x, w, &Conv2dParams::default())
    };
    assert!(matches!(new(DType::F64, DType::F64), Err(Error::DType { arg: "x", .. })));
    assert!(matches!(new(DType::F32, DType::F16), Err(Error::DType { arg: "w", .. })));
    let spec = valid().with_output(of(DType::F16, &[2, 8, 4, 3]));
    assert!(matches!(plan_error(&spec), Error::DType { arg: "y", .. }));
    let spec = valid().with_bias(of(DType::F16, &[8]));
    assert!(matches!(plan_error(&spec), Error::DType { arg: "bias", .. }));
}

#[test]
fn mismatched_channels() {
    let params = Conv2dParams::default();
    let error = new(&[2, 4, 6, 5], &[8, 3, 3, 3], params).unwrap_err();
    assert!(error.to_string().contains("x has 4 channels in 1 groups"), "{error}");
    for groups in [0, 3, 5, usize::MAX] {
        let params = Conv2dParams { groups, ..params };
        assert!(matches!(
            new(&[2, 6, 6, 5], &[10, 2, 3, 3], params),
            Err(Error::Parameter { name: "groups", .. })
        ));
    }
    assert!(matches!(plan_error(&valid().with_bias(desc(&[7]))), Error::Shape { arg: "bias", .. }));
}

#[test]
fn zero_stride_and_dilation() {
    let params = Conv2dParams { stride: [1, 0], ..Default::default() };
    assert!(matches!(
        new(&[2, 4, 6, 5], &[8, 4, 3, 3], params),
        Err(Error::Parameter { name: "stride", .. })
    ));
    let params = Conv2dParams { dilation: [0, 1], ..Default::default() };
    assert!(matches!(
        new(&[2, 4, 6, 5], &[8, 4, 3, 3], params),
        Err(Error::Parameter { name: "dilation", .. })
    ));
}

#[test]
fn filters_that_do_not_fit() {
    let params = Conv2dParams::default();
    for filter in [[8, 4, 7, 3], [8, 4, 3, 6], [8, 4, 0, 3], [8, 4, 3, 0]] {
        let refused = new(&[2, 4, 6, 5], &filter, params);
        assert!(matches!(refused, Err(Error::Shape { arg: "w", .. })), "{filter:?}");
    }
    let params = Conv2dParams { dilation: [3, 1], ..params };
    let error = new(&[2, 4, 6, 5], &[8, 4, 3, 3], params).unwrap_err().to_string();
    assert!(error.contains("its 3 taps cover 7"), "{error}");
    assert!(new(&[2, 4, 6, 5], &[8, 4, 3, 3], Conv2dParams { padding: [1, 0], ..params }).is_ok());
}

#[test]
fn sizes_that_overflow() {
    let huge = usize::MAX / 2;
    for params in [
        Conv2dParams { padding: [huge, 0], ..Default::default() },
        Conv2dParams { padding: [0, usize::MAX], ..Default::default() },
        Conv2dParams { dilation: [usize::MAX, 1], ..Default::default() },
        Conv2dParams { stride: [1, usize::MAX], ..Default::default() },
        // Each dimension fits, the tensor does not.
        Conv2dParams { padding: [1 << 40, 1 << 40], ..Default::default() },
    ] {
        let refused = new(&[2, 4, 6, 5], &[8, 4, 3, 3], params);
        assert!(matches!(refused, Err(Error::SizeOverflow { .. })), "{params:?}: {refused:?}");
    }
}

#[test]
fn outputs_that_do_not_fit() {
    let spec = valid().with_output(desc(&[2, 8, 4, 4]));
    assert!(matches!(plan_error(&spec), Error::Shape { arg: "y", .. }));
    let layout = Layout::strided(&[2, 8, 4, 3], &[12, 12, 3, 1]).unwrap();
    let spec = valid().with_output(TensorDesc { dtype: DType::F32, layout });
    assert!(matches!(plan_error(&spec), Error::OverlappingOutput { arg: "y", .. }));
}

#[test]
fn algorithms_that_cannot() {
    let spec =
        new(&[2, 4, 6, 5], &[8, 4, 3, 3], Conv2dParams { stride: [2, 1], ..Default::default() })
            .unwrap();
    let options = PlanOptions::default();
    for tile in Tile::ALL {
        let algorithm = Conv2dAlgorithm::WinogradGemm(tile);
        let refused = Conv2dPlan::with_algorithm(&spec, algorithm, &options);
        assert!(matches!(refused, Err(Error::Unsupported { .. })));
    }
    assert!("winograd".parse::<Conv2dAlgorithm>().is_err());
    for &algorithm in Conv2dAlgorithm::ALL {
        assert_eq!(algorithm.name().parse::<Conv2dAlgorithm>().unwrap(), algorithm);
    }
}

/// `direct` is the first of the direct methods that computes a spec, and each of them can be named.
#[test]
fn methods_of_direct_have_names() {
    use Conv2dAlgorithm::{
        Direct, DirectGrouped, DirectPlanar, DirectPlane, DirectRuns, DirectTransposed,
    };
    let options = PlanOptions::default();
    let spec = new(&[2, 4, 6, 5], &[8, 4, 3, 3], Conv2dParams::default()).unwrap();
    let depthwise = Conv2dParams { groups: 64, ..Default::default() };
    let depthwise = new(&[2, 64, 6, 5], &[64, 1, 3, 3], depthwise).unwrap();
    let order = Layout::with_order(&[2, 4, 6, 5], &[0, 2, 3, 1]).unwrap();
    let last = TensorDesc::new(DType::F32, order);
    let last = Conv2dSpec::new(last, desc(&[32, 4, 3, 3]), &Conv2dParams::default()).unwrap();
    for isa in crate::cpu::Isa::available() {
        let plan = |spec: &Conv2dSpec, algorithm| {
            Conv2dPlan::on_isa(spec, &Conv2dConfiguration::new(algorithm), &options, isa)
        };
        for (spec, first) in
            [(&spec, DirectPlanar), (&depthwise, DirectTransposed), (&last, DirectRuns)]
        {
            let first = if isa.is_small() { DirectPlanar } else { first };
            let direct = plan(spec, Direct).unwrap();
            assert_eq!((direct.algorithm(), direct.configuration().algorithm), (Direct, first));
            assert!(direct.explain().contains(first.name()), "{}", direct.explain());
            let named = plan(spec, first).unwrap();
            let bytes =
                |plan: &Conv2dPlan| plan.explain().split_once(" on ").map(|s| s.1.to_owned());
            assert_eq!(bytes(&named), bytes(&direct));
            for other in [DirectRuns, DirectGrouped, DirectTransposed, DirectPlane, DirectPlanar] {
                let computes = match first {
                    DirectTransposed => {
                        [DirectTransposed, DirectPlane, DirectPlanar].contains(&other)
                    }
                    DirectRuns => [DirectRuns, DirectGrouped, DirectPlanar].contains(&other),
                    _ => other == DirectPlanar,
                };
                match plan(spec, other) {
                    Ok(_) => assert!(computes, "{other} on {isa:?}"),
                    Err(Error::Unsupported { .. }) => assert!(!computes, "{other} on {isa:?}"),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

#[test]
fn exact_means_no_transform() {
    let params = Conv2dParams { accuracy: Accuracy::Exact, ..Default::default() };
    let spec = new(&[8, 64, 34, 34], &[64, 64, 3, 3], params).unwrap();
    let plan = Conv2dPlan::new(&spec, &PlanOptions::default()).unwrap();
    assert_eq!(plan.algorithm().tile(), None);
    let spec = Conv2dSpec { accuracy: Accuracy::Fp32, ..spec };
    let plan = Conv2dPlan::new(&spec, &PlanOptions::default()).unwrap();
    assert!(plan.algorithm().tile().is_some(), "{}", plan.explain());
}

/// Runs the valid spec, with a bias and a residual, on other arguments; `y` must not be touched.
fn run_error(change: impl for<'a> Fn(&mut Conv2dArgs<'a>, &'a Tensors)) -> Error {
    let tensors = Tensors::new();
    let spec = valid().with_bias(desc(&[8])).with_residual(true);
    let plan = Conv2dPlan::new(&spec, &PlanOptions::default()).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let mut args = Conv2dArgs::new(tensors.x.as_ref(), tensors.w.as_ref())
        .with_bias(tensors.bias.as_ref())
        .with_residual(tensors.residual.as_ref());
    change(&mut args, &tensors);
    let mut y = Tensor::zeros(DType::F32, &[2, 8, 4, 3]).unwrap();
    let error = plan.run(&args, y.as_mut(), &mut workspace).unwrap_err();
    assert!(y.to_vec::<f32>().unwrap().iter().all(|&y| y == 0.0), "half-written: {error}");
    error
}

struct Tensors {
    x: Tensor,
    w: Tensor,
    bias: Tensor,
    residual: Tensor,
    other: Tensor,
    channels_last: Tensor,
}

impl Tensors {
    fn new() -> Self {
        let of = |shape: &[usize]| Tensor::zeros(DType::F32, shape).unwrap();
        let layout = Layout::with_order(&[2, 4, 6, 5], &[0, 2, 3, 1]).unwrap();
        Tensors {
            x: of(&[2, 4, 6, 5]),
            w: of(&[8, 4, 3, 3]),
            bias: of(&[8]),
            residual: of(&[2, 8, 4, 3]),
            other: of(&[3, 4, 6, 5]),
            channels_last: Tensor::uninitialised(TensorDesc { dtype: DType::F32, layout }).unwrap(),
        }
    }
}

#[test]
fn views_unlike_the_spec() {
    let shape = run_error(|args, t| args.x = t.other.as_ref());
    assert!(matches!(shape, Error::Shape { arg: "x", .. }), "{shape}");
    let strides = run_error(|args, t| args.x = t.channels_last.as_ref());
    assert!(matches!(strides, Error::Strides { arg: "x", .. }), "{strides}");
    let filter = run_error(|args, t| args.w = Weights::Raw(t.x.as_ref()));
    assert!(matches!(filter, Error::Shape { arg: "w", .. }), "{filter}");
    let bias = run_error(|args, _| args.bias = None);
    assert!(matches!(bias, Error::Parameter { name: "bias", .. }), "{bias}");
    let bias = run_error(|args, t| args.bias = Some(t.x.as_ref()));
    assert!(matches!(bias, Error::Shape { arg: "bias", .. }), "{bias}");
    let residual = run_error(|args, _| args.residual = None);
    assert!(matches!(residual, Error::Parameter { name: "residual", .. }), "{residual}");
    let residual = run_error(|args, t| args.residual = Some(t.x.as_ref()));
    assert!(matches!(residual, Error::Shape { arg: "residual", .. }), "{residual}");
}

#[test]
fn a_bias_too_many() {
    let t = Tensors::new();
    let plan = Conv2dPlan::new(&valid(), &PlanOptions::default()).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let bias = Some(t.bias.as_ref());
    let args = Conv2dArgs::new(t.x.as_ref(), t.w.as_ref()).with_bias(bias);
    let mut y = Tensor::zeros(DType::F32, &[2, 8, 4, 3]).unwrap();
    let refused = plan.run(&args, y.as_mut(), &mut workspace);
    assert!(matches!(refused, Err(Error::Parameter { name: "bias", .. })));
}

#[test]
fn a_workspace_too_small() {
    let t = Tensors::new();
    let plan = Conv2dPlan::new(&valid(), &PlanOptions::default()).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes() - 1).unwrap();
    let args = Conv2dArgs::new(t.x.as_ref(), t.w.as_ref());
    let mut y = Tensor::zeros(DType::F32, &[2, 8, 4, 3]).unwrap();
    let refused = plan.run(&args, y.as_mut(), &mut workspace);
    assert!(matches!(refused, Err(Error::WorkspaceTooSmall { .. })));
}

#[test]
fn an_output_over_its_input() {
    let spec = new(&[1, 4, 6, 6], &[4, 4, 1, 1], Conv2dParams::default()).unwrap();
    let plan = Conv2dPlan::new(&spec, &PlanOptions::default()).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let w = Tensor::zeros(DType::F32, &[4, 4, 1, 1]).unwrap();
    let mut data = vec![0f32; 200];
    let ptr = data.as_mut_ptr();
    // SAFETY: both views lie in `data`; the plan must refuse to use them together.
    let (x, y) = unsafe {
        (
            TensorRef::from_raw(ptr.cast(), spec.x, Device::Cpu),
            TensorMut::from_raw(ptr.add(40).cast(), spec.y, Device::Cpu).unwrap(),
        )
    };
    let args = Conv2dArgs::new(x, w.as_ref());
    let refused = plan.run(&args, y, &mut workspace);
    assert!(matches!(refused, Err(Error::Aliasing { output: "y", input: "x", .. })));
}

#[test]
fn a_filter_packed_for_another_plan() {
    let options = PlanOptions::default();
    let plan = |algorithm| Conv2dPlan::with_algorithm(&valid(), algorithm, &options).unwrap();
    let direct = plan(Conv2dAlgorithm::Direct);
    let gemm = plan(Conv2dAlgorithm::Im2colGemm);
    let t = Tensors::new();
    let mut workspace = Workspace::new(Device::Cpu, gemm.workspace_bytes()).unwrap();
    let packed = direct.pack_weights(&t.w.as_ref(), &mut workspace).unwrap();
    assert_eq!(packed.algorithm(), Conv2dAlgorithm::Direct);
    let args = Conv2dArgs::new(t.x.as_ref(), &packed);
    let mut y = Tensor::zeros(DType::F32, &[2, 8, 4, 3]).unwrap();
    let refused = gemm.run(&args, y.as_mut(), &mut workspace);
    assert!(matches!(refused, Err(Error::ForeignPack { .. })));
    let refused = gemm.pack_weights(&t.x.as_ref(), &mut workspace);
    assert!(matches!(refused, Err(Error::Shape { arg: "w", .. })));
}

/// A filter of one shape lies otherwise in two groups than in one.
#[test]
fn a_filter_packed_for_other_groups() {
    let plan = |groups| {
        let x = TensorDesc::contiguous(DType::F32, &[1, 2 * groups, 6, 6]).unwrap();
        let w = TensorDesc::contiguous(DType::F32, &[8, 2, 3, 3]).unwrap();
        let params = Conv2dParams { groups, ..Default::default() };
        let spec = Conv2dSpec::new(x, w, &params).unwrap();
        Conv2dPlan::with_algorithm(&spec, Conv2dAlgorithm::Direct, &PlanOptions::default()).unwrap()
    };
    let [one, two] = [1, 2].map(plan);
    let w = Tensor::zeros(DType::F32, &[8, 2, 3, 3]).unwrap();
    let mut workspace =
        Workspace::new(Device::Cpu, one.workspace_bytes().max(two.workspace_bytes())).unwrap();
    let packed = two.pack_weights(&w.as_ref(), &mut workspace).unwrap();
    assert!(two.accepts(&packed) && !one.accepts(&packed));
    let x = Tensor::zeros(DType::F32, &[1, 2, 6, 6]).unwrap();
    let mut y = Tensor::zeros(DType::F32, &[1, 8, 4, 4]).unwrap();
    let refused = one.run(&Conv2dArgs::new(x.as_ref(), &packed), y.as_mut(), &mut workspace);
    assert!(matches!(refused, Err(Error::ForeignPack { .. })));
}

/// A filter packed for products of bf16 holds no f32.
#[test]
fn a_filter_packed_for_another_type() {
    let plan = |dtype, accuracy| {
        let x = TensorDesc::contiguous(dtype, &[1, 3, 9, 9]).unwrap();
        let w = TensorDesc::contiguous(dtype, &[8, 3, 3, 3]).unwrap();
        let params = Conv2dParams { accuracy, ..Default::default() };
        let spec = Conv2dSpec::new(x, w, &params).unwrap();
        Conv2dPlan::with_algorithm(&spec, Conv2dAlgorithm::Direct, &PlanOptions::default()).unwrap()
    };
    let [half, exact] = [Accuracy::Fp32, Accuracy::Exact].map(|a| plan(DType::BF16, a));
    let x = Tensor::zeros(DType::BF16, &[1, 3, 9, 9]).unwrap();
    let w = Tensor::zeros(DType::BF16, &[8, 3, 3, 3]).unwrap();
    let mut y = Tensor::zeros(DType::BF16, &[1, 8, 7, 7]).unwrap();
    let mut workspace =
        Workspace::new(Device::Cpu, exact.workspace_bytes().max(half.workspace_bytes())).unwrap();
    let packed = half.pack_weights(&w.as_ref(), &mut workspace).unwrap();
    let args = Conv2dArgs::new(x.as_ref(), &packed);
    half.run(&args, y.as_mut(), &mut workspace).unwrap();
    let result = exact.run(&args, y.as_mut(), &mut workspace);
    let isa = crate::cpu::Isa::best();
    if isa.has_bf16_products() || isa.has_tiles() {
        assert!(matches!(result, Err(Error::ForeignPack { .. })));
    } else {
        result.unwrap();
    }
}

#[test]
fn gradients_unlike_the_spec() {
    let t = Tensors::new();
    let plan = Conv2dPlan::new(&valid(), &PlanOptions::default()).unwrap();
    let mut workspace =
        Workspace::new(Device::Cpu, plan.backward_workspace_bytes().unwrap()).unwrap();
    let dy = Tensor::zeros(DType::F32, &[2, 8, 4, 3]).unwrap();
    let (w, dy) = (t.w.as_ref(), dy.as_ref());
    let mut dx = Tensor::uninitialised(*t.channels_last.desc()).unwrap();
    let refused = plan.backward_data(&w, &dy, dx.as_mut(), &mut workspace);
    assert!(matches!(refused, Err(Error::Strides { arg: "dx", .. })));
    let mut dw = Tensor::zeros(DType::F16, &[8, 4, 3, 3]).unwrap();
    let refused = plan.backward_weight(&t.x.as_ref(), &dy, dw.as_mut(), &mut workspace);
    assert!(matches!(refused, Err(Error::DType { arg: "dw", .. })));
    let mut db = Tensor::zeros(DType::F32, &[9]).unwrap();
    let refused = plan.backward_bias(&dy, db.as_mut(), &mut workspace);
    assert!(matches!(refused, Err(Error::Shape { arg: "db", .. })));

    let spec = Conv2dSpec { activation: Activation::Relu, ..valid() };
    let plan = Conv2dPlan::new(&spec, &PlanOptions::default()).unwrap();
    let mut dx = Tensor::zeros(DType::F32, &[2, 4, 6, 5]).unwrap();
    let refused = plan.backward_data(&w, &dy, dx.as_mut(), &mut workspace);
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
}

#[test]
fn transposed_convolutions() {
    let of = |y: &[usize], w: &[usize], params: &Conv2dParams, output_padding| {
        Conv2dSpec::transposed(desc(y), desc(w), params, output_padding)
    };
    let (y, w) = ([2, 8, 6, 5], [8, 4, 3, 3]);
    let twice = Conv2dParams::default().with_stride([2, 2]);
    let spec = of(&y, &w, &twice, [1, 0]).unwrap();
    assert_eq!((spec.x.shape(), spec.y.shape()), (&[2, 4, 14, 11][..], &y[..]));
    assert!(spec.problem().is_ok());
    assert!(matches!(of(&y[1..], &w, &twice, [0, 0]), Err(Error::Rank { arg: "y", .. })));
    assert!(matches!(of(&y, &w[1..], &twice, [0, 0]), Err(Error::Rank { arg: "w", .. })));
    for wrong in [[2, 7, 6, 5], [2, 8, 0, 5], [2, 8, 6, 0]] {
        let refused = of(&wrong, &w, &twice, [0, 0]);
        assert!(matches!(refused, Err(Error::Shape { arg: "y", .. })), "{refused:?}");
    }
    assert!(matches!(of(&y, &[8, 4, 0, 3], &twice, [0, 0]), Err(Error::Shape { arg: "w", .. })));
    for (output_padding, stride, dilation) in
        [([2, 0], [2, 2], [1, 9]), ([0, 1], [2, 1], [9, 1]), ([0, 3], [1, 2], [1, 3])]
    {
        let params = twice.with_stride(stride).with_dilation(dilation);
        let refused = of(&y, &w, &params, output_padding);
        assert!(matches!(refused, Err(Error::Parameter { name: "output_padding", .. })));
    }
    // Zeros after y.
    let params = twice.with_stride([1, 2]).with_dilation([4, 6]);
    let spec = of(&y, &w, &params, [3, 5]).unwrap();
    assert_eq!((spec.x.shape(), spec.y.shape()), (&[2, 4, 17, 26][..], &[2, 8, 9, 7][..]));
    // No images, so rows and columns need not exist.
    let spec = of(&[0, 8, 4, 0], &w, &twice, [1, 1]).unwrap();
    assert_eq!((spec.x.shape(), spec.y.shape()), (&[0, 4, 10, 2][..], &[0, 8, 4, 0][..]));
    assert!(spec.problem().is_ok());
    let refused = Conv2dSpec::new(spec.x, spec.w, &twice);
    assert!(matches!(refused, Err(Error::Shape { arg: "w", .. })), "{refused:?}");
    assert!(of(&[0, 8, 4, 0], &w, &twice.with_padding([0, 2]), [0, 0]).is_err());
    let huge = usize::MAX;
    for (params, name) in [
        (twice.with_stride([0, 2]), "stride"),
        (twice.with_dilation([1, 0]), "dilation"),
        (twice.with_padding([7, 0]), "padding"),
        (twice.with_groups(0), "groups"),
        (twice.with_groups(3), "groups"),
    ] {
        let refused = of(&y, &w, &params, [0, 0]);
        let Err(Error::Parameter { name: given, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(given, name);
    }
    for params in [
        twice.with_stride([huge, 1]),
        twice.with_padding([huge, 0]),
        twice.with_dilation([1, huge]),
        twice.with_groups(huge),
    ] {
        let refused = of(&y, &w, &params, [0, 0]);
        assert!(matches!(refused, Err(Error::SizeOverflow { .. })), "{params:?}: {refused:?}");
    }
    let wide = |dtype, shape: &[usize]| TensorDesc::contiguous(dtype, shape).unwrap();
    let refused =
        Conv2dSpec::transposed(wide(DType::F64, &y), wide(DType::F64, &w), &twice, [0, 0]);
    assert!(matches!(refused, Err(Error::DType { arg: "y", .. })));
    let refused = Conv2dSpec::transposed(wide(DType::F16, &y), desc(&w), &twice, [0, 0]);
    assert!(matches!(refused, Err(Error::DType { arg: "w", .. })));
}
