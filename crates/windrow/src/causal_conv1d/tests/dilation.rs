//! Taps that are some tokens apart.

use super::*;

fn desc(dtype: DType, shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(dtype, shape).unwrap()
}

/// Depthwise and dense specs in both layouts, as a large and as a small dilation finds them.
fn specs() -> Vec<CausalConv1dSpec> {
    let mut specs = Vec::new();
    for dtype in DTYPES {
        for order in [[0, 1, 2], [0, 2, 1]] {
            for weight in [&[35, 4][..], &[5, 35, 3]] {
                let layout = Layout::with_order(&[2, 35, 90], &order).unwrap();
                let x = TensorDesc { dtype, layout };
                let spec = CausalConv1dSpec::new(x, desc(dtype, weight)).unwrap();
                specs.push(spec.with_activation(Activation::Silu));
            }
        }
    }
    specs
}

/// The output and the final states, if the spec has them, computed by an algorithm on an instruction set.
fn computed(
    spec: &CausalConv1dSpec,
    isa: Isa,
    algorithm: CausalConv1dAlgorithm,
    [x, weight]: [&TensorRef<'_>; 2],
    initial: Option<&TensorRef<'_>>,
) -> (Tensor, Option<Tensor>) {
    let of = CausalConv1dConfiguration::new(algorithm);
    let plan = CausalConv1dPlan::on_isa(spec, &of, &options(2), isa).unwrap();
    let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes()).unwrap();
    let mut y = Tensor::uninitialised(spec.y).unwrap();
    let mut states = spec.final_states.map(|desc| Tensor::uninitialised(desc).unwrap());
    let args = CausalConv1dArgs::new(*x, *weight).with_initial_states(initial.copied());
    let outputs =
        CausalConv1dOutputs::new(y.as_mut()).with_final_states(states.as_mut().map(Tensor::as_mut));
    plan.run(&args, outputs, &mut workspace).unwrap();
    (y, states)
}

/// Each `dilation`th element of the last dimension from `first` on.
fn every<'a>(view: &TensorRef<'a>, first: usize, dilation: usize) -> TensorRef<'a> {
    let rest = view.narrow(2, first..view.shape()[2]).unwrap();
    let &[b, d, l] = rest.shape() else { unreachable!() };
    let &[row, channel, token] = rest.strides() else { unreachable!() };
    let strides = [row, channel, token * dilation as isize];
    let layout = Layout::strided(&[b, d, l.div_ceil(dilation)], &strides).unwrap();
    let desc = TensorDesc { dtype: rest.dtype(), layout };
    // SAFETY: elements of the view.
    unsafe { TensorRef::from_raw(rest.as_ptr().cast(), desc, Device::Cpu) }
}

fn values(view: &TensorRef<'_>) -> Vec<u64> {
    view.to_f64_vec().unwrap().into_iter().map(f64::to_bits).collect()
}

/// The tokens whose distances are multiples of the dilation are a sequence of their own, which is convolved without
/// dilation. Their states are those tokens of the states.
#[test]
fn each_phase_has_the_bits_of_a_convolution_without_dilation() {
    for spec in specs() {
        for dilation in [2, 7, 40, 1000] {
            let mut spec = spec.clone().with_dilation(dilation);
            let states = desc(spec.x.dtype, &spec.states_shape().unwrap());
            spec = spec.with_initial_states(states).with_final_states(states);
            let sample = Sample::new(&spec, 5).unwrap();
            let args = sample.inputs.args();
            let initial = args.initial_states.unwrap();
            for isa in Isa::available() {
                for algorithm in CausalConv1dPlan::algorithms(&spec, Device::Cpu) {
                    let inputs = [&args.x, &args.weight];
                    let (y, last) = computed(&spec, isa, algorithm, inputs, Some(&initial));
                    let l = spec.x.shape()[2];
                    for phase in 0..dilation.min(l) {
                        let x = every(&args.x, phase, dilation);
                        let initial = every(&initial, phase, dilation);
                        let mut plain = CausalConv1dSpec::new(*x.desc(), *args.weight.desc())
                            .unwrap()
                            .with_activation(spec.activation)
                            .with_initial_states(*initial.desc());
                        plain.final_states = Some(desc(x.dtype(), initial.shape()));
                        let inputs = [&x, &args.weight];
                        let (want, end) = computed(&plain, isa, algorithm, inputs, Some(&initial));
                        let got = values(&every(&y.as_ref(), phase, dilation));
                        assert_eq!(got, values(&want.as_ref()), "{algorithm} {isa:?} {dilation}");
                        // The history of the first token of this phase behind the last token.
                        let n = want.shape()[2];
                        let last = last.as_ref().unwrap().as_ref();
                        let last = every(&last, phase + n * dilation - l, dilation);
                        assert_eq!(values(&last), values(&end.unwrap().as_ref()));
                    }
                }
            }
        }
    }
}

/// Parts of a sequence, with the states between them, have the bits of the whole.
#[test]
fn chunks_have_the_bits_of_the_whole() {
    for spec in specs() {
        let spec = spec.with_dilation(9);
        let sample = Sample::new(&spec, 6).unwrap();
        let args = sample.inputs.args();
        for algorithm in CausalConv1dPlan::algorithms(&spec, Device::Cpu) {
            let isa = Isa::available()[0];
            let (whole, _) = computed(&spec, isa, algorithm, [&args.x, &args.weight], None);
            for chunk in [1, 7, 64] {
                let l = spec.x.shape()[2];
                let mut states: Option<Tensor> = None;
                for first in (0..l).step_by(chunk) {
                    let tokens = first..(first + chunk).min(l);
                    let x = args.x.narrow(2, tokens.clone()).unwrap();
                    let mut part = CausalConv1dSpec::new(*x.desc(), spec.weight)
                        .unwrap()
                        .with_activation(spec.activation)
                        .with_dilation(9);
                    part.final_states = Some(desc(x.dtype(), &part.states_shape().unwrap()));
                    part.initial_states = part.final_states.filter(|_| states.is_some());
                    let initial = states.as_ref().map(Tensor::as_ref);
                    let inputs = [&x, &args.weight];
                    let (y, last) = computed(&part, isa, algorithm, inputs, initial.as_ref());
                    let want = whole.as_ref().narrow(2, tokens).unwrap();
                    assert_eq!(values(&y.as_ref()), values(&want), "{algorithm} {chunk}");
                    states = last;
                }
            }
        }
    }
}

/// A row has the same bits alone and in a batch, on any number of threads.
#[test]
fn rows_have_the_bits_that_they_have_alone() {
    for spec in specs() {
        let spec = spec.with_dilation(5);
        let sample = Sample::new(&spec, 7).unwrap();
        let args = sample.inputs.args();
        for threads in [1, 3] {
            let options = options(threads).with_batch_invariant(true);
            let of = |x: &TensorRef<'_>| {
                let spec = CausalConv1dSpec::new(*x.desc(), spec.weight)
                    .unwrap()
                    .with_activation(spec.activation)
                    .with_dilation(5);
                let plan = CausalConv1dPlan::new(&spec, &options).unwrap();
                let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes()).unwrap();
                let mut y = Tensor::uninitialised(spec.y).unwrap();
                let args = CausalConv1dArgs::new(*x, args.weight);
                plan.run(&args, CausalConv1dOutputs::new(y.as_mut()), &mut workspace).unwrap();
                y
            };
            let all = of(&args.x);
            for row in 0..2 {
                let alone = of(&args.x.narrow(0, row..row + 1).unwrap());
                let beside = all.as_ref().narrow(0, row..row + 1).unwrap();
                assert_eq!(values(&alone.as_ref()), values(&beside));
            }
        }
    }
}

/// Memory follows the width and the tokens, not the distance of the taps.
#[test]
fn taps_far_apart_need_no_memory() {
    let spec = CausalConv1dSpec::new(desc(DType::F32, &[1, 3, 20]), desc(DType::F32, &[3, 4]));
    let spec = spec.unwrap().with_dilation(1 << 50);
    for algorithm in CausalConv1dPlan::algorithms(&spec, Device::Cpu) {
        let plan = CausalConv1dPlan::with_algorithm(&spec, algorithm, &options(2)).unwrap();
        assert!(plan.workspace_bytes() < 1 << 20, "{algorithm}: {}", plan.workspace_bytes());
        let mut sample = Sample::new(&spec.clone().with_dilation(100), 1).unwrap();
        sample.gradients.dinitial_states =
            Held::at(desc(DType::F32, &[1, 3, 0]), &[], 0, Device::Cpu).unwrap();
        let args = sample.inputs.args();
        let (y, _) = computed(&spec, Isa::available()[0], algorithm, [&args.x, &args.weight], None);
        let last = args.weight.narrow(1, 3..4).unwrap().to_f64_vec().unwrap();
        let x = args.x.to_f64_vec().unwrap();
        let want: Vec<_> = x.iter().enumerate().map(|(i, x)| (x * last[i / 20]) as f32).collect();
        assert_eq!(y.to_vec::<f32>().unwrap(), want);
        let mut workspace = Workspace::new(plan.device(), plan.workspace_bytes()).unwrap();
        let grads = sample.gradients.some_views([true, true, false, false]).unwrap();
        plan.backward(&args, sample.dy.as_ref(), None, grads, &mut workspace).unwrap();
    }
}

#[test]
fn bad_dilations_are_refused() {
    let spec = CausalConv1dSpec::new(desc(DType::F32, &[1, 3, 20]), desc(DType::F32, &[3, 4]));
    let spec = spec.unwrap();
    let error = |dilation| {
        let spec = spec.clone().with_dilation(dilation);
        CausalConv1dPlan::new(&spec, &options(1)).unwrap_err()
    };
    assert!(matches!(error(0), Error::Parameter { .. }), "{}", error(0));
    for large in [usize::MAX, usize::MAX / 3, 1 << 62] {
        assert!(matches!(error(large), Error::SizeOverflow { .. }), "{}", error(large));
    }
    let states = desc(DType::F32, &[1, 3, 3]);
    let wrong = spec.clone().with_dilation(2).with_initial_states(states);
    let error = CausalConv1dPlan::new(&wrong, &options(1)).unwrap_err();
    assert!(matches!(error, Error::Shape { arg: "initial_states", .. }), "{error}");
}
