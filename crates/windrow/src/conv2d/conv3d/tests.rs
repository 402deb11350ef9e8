//! Errors, and results that are known without the oracle.

use crate::cpu::Isa;
use crate::*;

fn f32s(shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(DType::F32, shape).unwrap()
}

fn specs(x: &[usize], w: &[usize], params: Conv3dParams) -> Result<Conv3dSpec> {
    Conv3dSpec::new(f32s(x), f32s(w), &params)
}

fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn wrong_specs_are_errors() {
    let params = Conv3dParams::default();
    let (x, w) = ([1, 4, 5, 6, 7], [8, 4, 3, 3, 3]);
    assert!(specs(&x, &w, params).is_ok());
    for (given, expected) in [
        (specs(&x[1..], &w, params), "`x` has 4 dimensions, expected 5"),
        (specs(&x, &w[1..], params), "`w` has 4 dimensions, expected 5"),
        (specs(&x, &[8, 3, 3, 3, 3], params), "[k, 4, kt, r, s]: x has 4 channels in 1 groups"),
        (specs(&x, &[8, 4, 0, 3, 3], params), "a filter of at least 1 x 1 x 1"),
        (specs(&x, &[8, 4, 6, 3, 3], params), "covers at most 5 positions"),
        (specs(&x, &w, params.with_stride([1, 0, 1])), "`stride` is [1, 0, 1]"),
        (specs(&x, &w, params.with_dilation([0, 1, 1])), "`dilation` is [0, 1, 1]"),
        (specs(&x, &w, params.with_groups(3)), "a divisor of 4 input and 8 output channels"),
        (specs(&x, &w, params.with_padding([usize::MAX, 0, 0])), "padded input"),
    ] {
        let message = message(given);
        assert!(message.contains(expected), "{message}");
    }
    let causal = params.with_time_padding(TimePadding::Causal);
    let message_of = |spec: Conv3dSpec| message(spec.problem());
    let given = message(specs(&x, &w, causal.with_padding([1, 1, 1])));
    assert!(given.contains("expected 0 frames for a causal convolution"), "{given}");
    let state = f32s(&[1, 4, 2, 6, 7]);
    let spec = specs(&x, &w, params).unwrap().with_final_frames(state);
    let given = message_of(spec);
    assert!(given.contains("`final_frames`") && given.contains("causal"), "{given}");
    let spec = specs(&x, &w, causal).unwrap();
    assert!(spec.clone().with_initial_frames(state).with_final_frames(state).problem().is_ok());
    for wrong in [f32s(&[1, 4, 1, 6, 7]), TensorDesc { dtype: DType::F16, ..state }] {
        assert!(spec.clone().with_initial_frames(wrong).problem().is_err());
    }
    let layout = Layout::strided(&[1, 4, 2, 6, 7], &[0; 5]).unwrap();
    let spec = spec.with_final_frames(TensorDesc { layout, ..state });
    assert!(matches!(spec.problem(), Err(Error::OverlappingOutput { .. })));
    let spec = specs(&x, &w, causal.with_stride([2, 1, 1])).unwrap();
    assert!(spec.problem().is_ok());
    let given = message_of(spec.with_initial_frames(state));
    assert!(given.contains("a multiple of 2 frames, the stride, with initial_frames"), "{given}");
    let mut spec = specs(&x, &w, params).unwrap();
    spec.y = f32s(&[1, 8, 3, 4, 6]);
    assert!(matches!(spec.problem(), Err(Error::Shape { arg: "y", .. })));
    let spec = specs(&x, &w, params).unwrap().with_bias(f32s(&[7]));
    assert!(matches!(spec.problem(), Err(Error::Shape { arg: "bias", .. })));
}

/// A GPU that does not exist is an error, and not a plan on the CPU.
#[test]
fn a_gpu_must_exist() {
    let spec = specs(&[1, 4, 5, 6, 7], &[8, 4, 3, 3, 3], Conv3dParams::default()).unwrap();
    for device in [Device::Cuda(99), Device::Hip(99)] {
        let options = PlanOptions::default().with_device(device);
        let error = Conv3dPlan::new(&spec, &options).unwrap_err();
        assert!(matches!(error, Error::NoDevice { .. }), "{error}");
        assert!(Conv3dPlan::algorithms(&spec, device).is_empty());
    }
}

/// Tensors that do not agree with the spec, and too little memory, before anything is written.
#[test]
fn wrong_runs_are_errors() {
    let spec = specs(&[1, 1, 2, 3, 3], &[1, 1, 2, 3, 3], Conv3dParams::default()).unwrap();
    let plan = Conv3dPlan::new(&spec, &PlanOptions::default()).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let (x, w, mut y) = ([1f32; 18], [1f32; 18], [7f32]);
    let x = TensorRef::new(&x, &[1, 1, 2, 3, 3]).unwrap();
    let w = TensorRef::new(&w, &[1, 1, 2, 3, 3]).unwrap();
    let mut run = |args: &Conv3dArgs<'_>, workspace: &mut Workspace| {
        plan.run(args, TensorMut::new(&mut y, &[1, 1, 1, 1, 1]).unwrap(), workspace)
    };
    let args = Conv3dArgs::new(x, w);
    let bias = [1f32];
    let bias = TensorRef::new(&bias, &[1]).unwrap();
    let error = run(&args.with_bias(bias), &mut workspace);
    assert!(matches!(error, Err(Error::Parameter { .. })), "{error:?}");
    let narrow = x.narrow(2, 0..1).unwrap();
    let error = run(&Conv3dArgs::new(narrow, w), &mut workspace);
    assert!(matches!(error, Err(Error::Shape { arg: "x", .. })), "{error:?}");
    if plan.workspace_bytes() > 0 {
        let error = run(&args, &mut Workspace::empty());
        assert!(matches!(error, Err(Error::WorkspaceTooSmall { .. })), "{error:?}");
    }
    assert_eq!(y, [7.0]);
}

/// One frame through the middle of a filter is conv2d, bit for bit, by every algorithm that both have.
#[test]
fn a_filter_of_one_frame_is_conv2d_of_its_frames() {
    let x = verify::random_tensor(1, f32s(&[2, 20, 3, 9, 10]), -1.0, 1.0).unwrap();
    let w = verify::random_tensor(2, f32s(&[24, 20, 1, 3, 3]), -1.0, 1.0).unwrap();
    let params = Conv3dParams::default().with_padding([0, 1, 1]);
    let spec = Conv3dSpec::new(*x.desc(), *w.desc(), &params).unwrap();
    let params = Conv2dParams::default().with_padding([1, 1]);
    let options = PlanOptions::default();
    for algorithm in Conv3dPlan::algorithms_on(&spec, Isa::best()).unwrap() {
        let plan = Conv3dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let mut y = Tensor::uninitialised(spec.y).unwrap();
        plan.run(&Conv3dArgs::new(x.as_ref(), w.as_ref()), y.as_mut(), &mut workspace).unwrap();
        let y = y.to_vec::<f32>().unwrap();
        let all = x.to_vec::<f32>().unwrap();
        let w = w.as_slice::<f32>().unwrap();
        let w = TensorRef::new(w, &[24, 20, 3, 3]).unwrap();
        for (n, t) in (0..2).flat_map(|n| (0..3).map(move |t| (n, t))) {
            let strides = Layout::strided(&[1, 20, 9, 10], &[0, 270, 10, 1]).unwrap();
            let frame = TensorRef::strided(&all, n * 20 * 270 + t * 90, strides).unwrap();
            let spec = Conv2dSpec::new(*frame.desc(), *w.desc(), &params).unwrap();
            let plan = Conv2dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
            let mut image = Tensor::uninitialised(spec.y).unwrap();
            plan.run(&Conv2dArgs::new(frame, w), image.as_mut(), &mut workspace).unwrap();
            for (i, &value) in image.to_vec::<f32>().unwrap().iter().enumerate() {
                let (k, pixel) = (i / 90, i % 90);
                assert_eq!(value, y[((n * 24 + k) * 3 + t) * 90 + pixel], "{algorithm} {n} {t}");
            }
        }
    }
}

/// Results do not depend on the number of threads.
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let x = verify::random_tensor(1, f32s(&[1, 40, 5, 13, 15]), -1.0, 1.0).unwrap();
    let w = verify::random_tensor(2, f32s(&[70, 40, 3, 3, 3]), -1.0, 1.0).unwrap();
    let params = Conv3dParams::default().with_padding([1, 1, 1]);
    let spec = Conv3dSpec::new(*x.desc(), *w.desc(), &params).unwrap();
    for algorithm in Conv3dPlan::algorithms_on(&spec, Isa::best()).unwrap() {
        let of = |threads| {
            let options = PlanOptions::default().with_threads(std::num::NonZeroUsize::new(threads));
            let plan = Conv3dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
            let mut y = Tensor::uninitialised(spec.y).unwrap();
            let args = Conv3dArgs::new(x.as_ref(), w.as_ref());
            plan.run(&args, y.as_mut(), &mut workspace).unwrap();
            y.to_vec::<f32>().unwrap()
        };
        let one = of(1);
        assert!([2, 3, 16].into_iter().all(|threads| of(threads) == one), "{algorithm}");
    }
}

/// With `Verify::On` a run compares itself.
#[test]
fn runs_compare_themselves() {
    let x = verify::random_tensor(1, f32s(&[2, 6, 4, 7, 8]), -1.0, 1.0).unwrap();
    let w = verify::random_tensor(2, f32s(&[5, 6, 3, 3, 3]), -1.0, 1.0).unwrap();
    let params = Conv3dParams::default().with_padding([1, 1, 1]);
    let spec = Conv3dSpec::new(*x.desc(), *w.desc(), &params).unwrap();
    let options = PlanOptions::default().with_verify(Verify::On);
    for algorithm in Conv3dPlan::algorithms_on(&spec, Isa::best()).unwrap() {
        let plan = Conv3dPlan::with_algorithm(&spec, algorithm, &options).unwrap();
        assert!(
            plan.explain().starts_with(&format!("conv3d by {algorithm}")),
            "{}",
            plan.explain()
        );
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let mut y = Tensor::uninitialised(spec.y).unwrap();
        let args = Conv3dArgs::new(x.as_ref(), w.as_ref());
        plan.run(&args, y.as_mut(), &mut workspace).unwrap();
        let mut wrong = y.to_vec::<f32>().unwrap();
        wrong[17] += 1.0;
        let wrong = TensorRef::new(&wrong, spec.y.shape()).unwrap();
        let [want, _] = plan.expected(&args, &w.as_ref().to_f64_vec().unwrap()).unwrap();
        assert!(!want.compare(&wrong, plan.tolerance()).unwrap().passed());
    }
}

/// Final frames that share memory with initial frames in another way, or with y, are refused.
#[test]
fn final_frames_are_apart_or_the_initial_frames() {
    let params = Conv3dParams::default().with_time_padding(TimePadding::Causal);
    let state = f32s(&[1, 1, 2, 1, 1]);
    let spec = specs(&[1, 1, 4, 1, 1], &[1, 1, 3, 1, 1], params).unwrap();
    let spec = spec.with_initial_frames(state).with_final_frames(state);
    let plan = Conv3dPlan::new(&spec, &PlanOptions::default()).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let (x, w, mut y) = ([1f32, 2.0, 3.0, 4.0], [100f32, 10.0, 1.0], [0f32; 4]);
    let mut memory = [5f32, 6.0, 7.0];
    let at = |first: usize, start: *mut f32| {
        let start = start.wrapping_add(first);
        // SAFETY: two elements of the memory, whose views are used in the run only.
        let initial = unsafe { TensorRef::from_raw(start.cast(), state, Device::Cpu) };
        Conv3dArgs::new(
            TensorRef::new(&x, &[1, 1, 4, 1, 1]).unwrap(),
            TensorRef::new(&w, &[1, 1, 3, 1, 1]).unwrap(),
        )
        .with_initial_frames(initial)
    };
    let start = memory.as_mut_ptr();
    for (first, is_right) in [(1, false), (0, true)] {
        // SAFETY: as above.
        let last = unsafe { TensorMut::from_raw(start.cast(), state, Device::Cpu) }.unwrap();
        let y = TensorMut::new(&mut y, &[1, 1, 4, 1, 1]).unwrap();
        let outputs = Conv3dOutputs::new(y).with_final_frames(last);
        let result = plan.run(&at(first, start), outputs, &mut workspace);
        match is_right {
            true => result.unwrap(),
            false => assert!(matches!(result, Err(Error::Aliasing { .. })), "{result:?}"),
        }
    }
    assert_eq!(y, [561.0, 612.0, 123.0, 234.0]);
    assert_eq!(memory, [3.0, 4.0, 7.0]);
}

/// Videos alone and in a batch, by filters of one frame and of several.
#[test]
fn bits_do_not_depend_on_other_videos() {
    let options = PlanOptions::default().with_batch_invariant(true);
    for (frames, [c, k, side]) in [(1, [64, 64, 9]), (3, [20, 24, 7]), (1, [3, 8, 20])] {
        let x = verify::random_tensor(1, f32s(&[9, c, 4, side, side]), -1.0, 1.0).unwrap();
        let w = verify::random_tensor(2, f32s(&[k, c, frames, 3, 3]), -1.0, 1.0).unwrap();
        let params = Conv3dParams::default().with_padding([0, 1, 1]);
        let bits = |x: TensorRef<'_>| {
            let spec = Conv3dSpec::new(*x.desc(), *w.desc(), &params).unwrap();
            let plan = Conv3dPlan::new(&spec, &options).unwrap();
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
            let mut y = Tensor::uninitialised(spec.y).unwrap();
            plan.run(&Conv3dArgs::new(x, w.as_ref()), y.as_mut(), &mut workspace).unwrap();
            let y = y.to_vec::<f32>().unwrap();
            y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let all = bits(x.as_ref());
        for (video, want) in all.chunks(all.len() / 9).enumerate() {
            assert_eq!(bits(x.as_ref().narrow(0, video..video + 1).unwrap()), want, "{frames}");
        }
    }
}

/// Methods that have the same name for a user, of several instruction sets, with one cache.
#[test]
fn packed_filters_belong_to_a_method() {
    let bf16 = |shape: &[usize], order: &[usize]| TensorDesc {
        dtype: DType::BF16,
        layout: Layout::with_order(shape, order).unwrap(),
    };
    let x = bf16(&[3, 7, 1, 16, 21], &[0, 2, 3, 4, 1]);
    let x = verify::random_tensor(1, x, -1.0, 1.0).unwrap();
    let w = bf16(&[32, 7, 1, 1, 1], &[0, 1, 2, 3, 4]);
    let w = verify::random_tensor(2, w, -1.0, 1.0).unwrap();
    let params = Conv3dParams::default().with_stride([1, 2, 2]);
    let spec = Conv3dSpec::new(*x.desc(), *w.desc(), &params).unwrap();
    let (configuration, cache) =
        (Conv2dConfiguration::new(Conv2dAlgorithm::Direct), FilterCache::new());
    for isa in Isa::available() {
        let options = PlanOptions::default();
        let plan = Conv3dPlan::on_isa(&spec, &configuration, &options, isa).unwrap();
        let run = |weights: Weights<'_>| {
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
            let mut y = Tensor::uninitialised(spec.y).unwrap();
            let args = Conv3dArgs::new(x.as_ref(), weights);
            plan.run(&args, y.as_mut(), &mut workspace).unwrap();
            y.as_ref().to_f64_vec().unwrap()
        };
        let raw = run(Weights::Raw(w.as_ref()));
        assert_eq!(run(Weights::Cached(w.as_ref(), &cache)), raw, "{}", isa.name());
    }
}
