//! Bad input, and what must not be written for it.

use super::*;

const F32: DType = DType::F32;

fn desc(dtype: DType, shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(dtype, shape).unwrap()
}

/// [2, 3, 5], width 4, with states.
fn spec() -> CausalConv1dSpec {
    let states = desc(F32, &[2, 3, 3]);
    CausalConv1dSpec::new(desc(F32, &[2, 3, 5]), desc(F32, &[3, 4]))
        .unwrap()
        .with_initial_states(states)
        .with_final_states(states)
}

/// The message of the error, which must name the argument.
fn message<T: std::fmt::Debug>(result: Result<T, Error>, arg: &str) -> String {
    let message = result.unwrap_err().to_string();
    assert!(message.contains(arg), "{message}");
    message
}

fn plan(spec: CausalConv1dSpec) -> Result<CausalConv1dPlan, Error> {
    CausalConv1dPlan::new(&spec, &options(2))
}

#[test]
fn specs_are_checked() {
    let new = CausalConv1dSpec::new;
    let x = desc(F32, &[2, 3, 5]);
    assert!(matches!(new(desc(F32, &[3, 5]), x), Err(Error::Rank { arg: "x", given: 2, .. })));
    let dtype = new(desc(DType::F64, &[2, 3, 5]), desc(F32, &[3, 4]));
    assert!(matches!(dtype, Err(Error::DType { arg: "x", .. })));
    assert!(matches!(new(x, desc(F32, &[4])), Err(Error::Rank { arg: "weight", .. })));
    assert!(matches!(new(x, desc(F32, &[4, 4])), Err(Error::Shape { arg: "weight", .. })));
    assert!(matches!(new(x, desc(F32, &[8, 4, 4])), Err(Error::Shape { arg: "weight", .. })));
    assert!(matches!(new(x, desc(F32, &[3, 0])), Err(Error::Shape { arg: "weight", .. })));
    assert!(matches!(new(x, desc(DType::F16, &[3, 4])), Err(Error::DType { arg: "weight", .. })));
    let half = new(desc(DType::F16, &[2, 3, 5]), desc(DType::BF16, &[3, 4]));
    assert!(matches!(half, Err(Error::DType { arg: "weight", .. })));

    message(plan(spec().with_bias(desc(F32, &[4]))), "bias");
    message(plan(spec().with_bias(desc(DType::F16, &[3]))), "bias");
    message(plan(spec().with_output(desc(F32, &[2, 3, 4]))), "y");
    message(plan(spec().with_output(desc(DType::F16, &[2, 3, 5]))), "y");
    message(plan(spec().with_seq_idx(desc(DType::I64, &[2, 5]))), "seq_idx");
    message(plan(spec().with_seq_idx(desc(DType::I32, &[2, 6]))), "seq_idx");
    message(plan(spec().with_initial_states(desc(F32, &[2, 3, 4]))), "initial_states");
    message(plan(spec().with_final_states(desc(DType::F16, &[2, 3, 3]))), "final_states");
    let overlapping = Layout::strided(&[2, 3, 5], &[0, 5, 1]).unwrap();
    let overlapping = plan(spec().with_output(TensorDesc { dtype: F32, layout: overlapping }));
    assert!(matches!(overlapping, Err(Error::OverlappingOutput { arg: "y", .. })));
    let overlapping = Layout::strided(&[2, 3, 3], &[9, 3, 0]).unwrap();
    let overlapping = TensorDesc { dtype: F32, layout: overlapping };
    message(plan(spec().with_final_states(overlapping)), "final_states");
}

#[test]
fn boundaries_are_checked() {
    let one_row = CausalConv1dSpec::new(desc(F32, &[1, 3, 5]), desc(F32, &[3, 4])).unwrap();
    message(plan(spec().with_cu_seqlens(desc(DType::I32, &[3]))), "b = 1");
    message(plan(one_row.clone().with_cu_seqlens(desc(DType::I32, &[0]))), "cu_seqlens");
    message(plan(one_row.clone().with_cu_seqlens(desc(DType::I32, &[1]))), "at least two");
    message(plan(one_row.clone().with_cu_seqlens(desc(DType::I32, &[1, 3]))), "cu_seqlens");
    message(plan(one_row.clone().with_cu_seqlens(desc(F32, &[3]))), "cu_seqlens");
    let both = one_row
        .clone()
        .with_cu_seqlens(desc(DType::I32, &[3]))
        .with_seq_idx(desc(DType::I32, &[1, 5]));
    assert!(matches!(plan(both), Err(Error::Unsupported { .. })));

    let (x, weight, mut y) = ([1f32; 15], [1f32; 12], [7f32; 15]);
    let mut run = |boundaries: &[i64]| {
        let boundaries = TensorRef::new(boundaries, &[boundaries.len()]).unwrap();
        let plan = plan(one_row.clone().with_cu_seqlens(*boundaries.desc())).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let args = CausalConv1dArgs {
            cu_seqlens: Some(boundaries),
            ..CausalConv1dArgs::new(
                TensorRef::new(&x, &[1, 3, 5]).unwrap(),
                TensorRef::new(&weight, &[3, 4]).unwrap(),
            )
        };
        let y = TensorMut::new(&mut y, &[1, 3, 5]).unwrap();
        plan.run(&args, CausalConv1dOutputs::new(y), &mut workspace)
    };
    for (bad, position) in [
        (&[1, 5][..], 0),
        (&[-1, 5], 0),
        (&[0, 4], 1),
        (&[0, 6], 1),
        (&[0, 3, 2, 5], 2),
        (&[0, i64::MAX, 5], 2),
    ] {
        let error = run(bad).unwrap_err();
        let at =
            matches!(error, Error::Index { arg: "cu_seqlens", position: p, .. } if p == position);
        assert!(at, "{bad:?}: {error}");
    }
    run(&[0, 0, 3, 3, 5, 5]).unwrap();
    assert!(y.iter().all(|&y| y != 7.0));
}

#[test]
fn algorithms_are_checked() {
    let dense = CausalConv1dSpec::new(desc(F32, &[2, 3, 5]), desc(F32, &[4, 3, 2])).unwrap();
    let direct =
        CausalConv1dPlan::with_algorithm(&dense, CausalConv1dAlgorithm::Direct, &options(1));
    assert!(matches!(direct, Err(Error::Unsupported { .. })));
    assert_eq!(
        CausalConv1dPlan::algorithms(&dense, Device::Cpu),
        [CausalConv1dAlgorithm::Im2colGemm]
    );
    for &algorithm in CausalConv1dAlgorithm::ALL {
        assert_eq!(algorithm.name().parse::<CausalConv1dAlgorithm>().unwrap(), algorithm);
    }
    assert!("fft".parse::<CausalConv1dAlgorithm>().is_err());
    let bad = CausalConv1dSpec { y: desc(F32, &[1]), ..spec() };
    assert!(CausalConv1dPlan::algorithms(&bad, Device::Cpu).is_empty());

    let wide = CausalConv1dSpec::new(desc(F32, &[1, 1, 1]), desc(F32, &[1, 1 << 58])).unwrap();
    assert!(matches!(plan(wide), Err(Error::SizeOverflow { .. })));
}

#[test]
fn views_are_checked_and_nothing_is_written() {
    let spec = spec();
    let plan = plan(spec.clone()).unwrap();
    let mut sample = Sample::new(&spec, 1).unwrap();
    let before = sample.y.as_ref().to_f64_vec().unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let args = sample.inputs.args();
    let (y, last) = (&mut sample.y, sample.final_states.as_mut().unwrap());
    let mut run = |args: &CausalConv1dArgs<'_>, y: &mut Held, last: Option<&mut Held>| {
        let outputs = CausalConv1dOutputs::new(y.as_mut().unwrap())
            .with_final_states(last.map(|last| last.as_mut().unwrap()));
        plan.run(args, outputs, &mut workspace)
    };
    let other = |dtype, shape: &[usize]| Held::new(desc(dtype, shape), &[]).unwrap();
    let (short, half) = (other(F32, &[2, 3, 4]), other(DType::F16, &[2, 3, 5]));
    message(run(&CausalConv1dArgs { x: short.as_ref(), ..args }, y, Some(last)), "x");
    message(run(&CausalConv1dArgs { x: half.as_ref(), ..args }, y, Some(last)), "x");
    message(run(&CausalConv1dArgs { weight: short.as_ref(), ..args }, y, Some(last)), "weight");
    let turned = Layout::with_order(&[2, 3, 5], &[0, 2, 1]).unwrap();
    let turned = Held::new(TensorDesc { dtype: F32, layout: turned }, &[]).unwrap();
    let error = run(&CausalConv1dArgs { x: turned.as_ref(), ..args }, y, Some(last));
    assert!(matches!(error, Err(Error::Strides { arg: "x", .. })));
    let none = CausalConv1dArgs { initial_states: None, ..args };
    message(run(&none, y, Some(last)), "initial_states");
    let bias = other(F32, &[3]);
    message(run(&CausalConv1dArgs { bias: Some(bias.as_ref()), ..args }, y, Some(last)), "bias");
    message(run(&args, y, None), "final_states");
    message(run(&args, &mut other(F32, &[2, 3, 4]), Some(last)), "y");
    message(run(&args, y, Some(&mut other(F32, &[2, 3, 4]))), "final_states");

    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes() - 1).unwrap();
    let outputs =
        CausalConv1dOutputs::new(y.as_mut().unwrap()).with_final_states(last.as_mut().unwrap());
    message(plan.run(&args, outputs, &mut workspace), "workspace");
    assert_eq!(y.as_ref().to_f64_vec().unwrap(), before);
}

#[test]
fn aliasing_is_refused() {
    let spec = CausalConv1dSpec::new(desc(F32, &[1, 2, 4]), desc(F32, &[2, 2])).unwrap();
    let plan = plan(spec.clone().with_final_states(desc(F32, &[1, 2, 1]))).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let mut memory = [0f32; 20];
    let base = memory.as_mut_ptr();
    let at = |i: usize| base.wrapping_add(i).cast();
    let mut run = |x: usize, weight: usize, y: usize, last: usize| {
        // SAFETY: all within `memory`; the plan refuses what overlaps before it touches anything.
        unsafe {
            let args = CausalConv1dArgs::new(
                TensorRef::from_raw(at(x), spec.x, Device::Cpu),
                TensorRef::from_raw(at(weight), spec.weight, Device::Cpu),
            );
            let last = TensorMut::from_raw(at(last), desc(F32, &[1, 2, 1]), Device::Cpu).unwrap();
            let y = TensorMut::from_raw(at(y), spec.y, Device::Cpu).unwrap();
            plan.run(&args, CausalConv1dOutputs::new(y).with_final_states(last), &mut workspace)
        }
    };
    run(0, 8, 12, 18).unwrap_err();
    assert!(matches!(run(0, 8, 0, 18), Err(Error::Aliasing { output: "y", input: "x", .. })));
    assert!(matches!(run(0, 12, 8, 18), Err(Error::Aliasing { input: "weight", .. })));
    assert!(matches!(run(0, 8, 12, 13), Err(Error::Aliasing { output: "final_states", .. })));
    assert!(matches!(run(0, 8, 12, 7), Err(Error::Aliasing { output: "final_states", .. })));
}

#[test]
fn gradients_are_checked() {
    let spec = spec();
    let plan = plan(spec.clone()).unwrap();
    let mut sample = Sample::new(&spec, 1).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let args = sample.inputs.args();
    let dy = sample.dy.as_ref();
    let mut run = |dy: &Held, last: Option<&Held>, grads: CausalConv1dGrads<'_>| {
        let last = last.map(Held::as_ref);
        plan.backward(&args, dy.as_ref(), last, grads, &mut workspace)
    };
    let other = |dtype, shape: &[usize]| Held::new(desc(dtype, shape), &[]).unwrap();
    let none = CausalConv1dGrads::default;
    message(run(&other(F32, &[2, 3, 4]), None, none()), "dy");
    message(run(&other(DType::F16, &[2, 3, 5]), None, none()), "dy");
    message(run(&sample.dy, Some(&other(F32, &[2, 3, 4])), none()), "dfinal_states");
    let mut bad = other(F32, &[2, 3, 4]);
    let grads = CausalConv1dGrads { dx: Some(bad.as_mut().unwrap()), ..none() };
    message(run(&sample.dy, None, grads), "dx");
    let grads = CausalConv1dGrads { dweight: Some(bad.as_mut().unwrap()), ..none() };
    message(run(&sample.dy, None, grads), "dweight");
    let grads = CausalConv1dGrads { dbias: Some(bad.as_mut().unwrap()), ..none() };
    message(run(&sample.dy, None, grads), "dbias");
    let grads = CausalConv1dGrads { dinitial_states: Some(bad.as_mut().unwrap()), ..none() };
    message(run(&sample.dy, None, grads), "dinitial_states");
    let mut half = other(DType::F16, &[2, 3, 5]);
    let grads = CausalConv1dGrads { dx: Some(half.as_mut().unwrap()), ..none() };
    message(run(&sample.dy, None, grads), "dx");
    // SAFETY: the plan refuses the overlap before it touches anything.
    let over_dy =
        unsafe { TensorMut::from_raw(dy.as_ptr().cast_mut().cast(), spec.x, Device::Cpu) };
    let grads = CausalConv1dGrads { dx: Some(over_dy.unwrap()), ..none() };
    assert!(matches!(run(&sample.dy, None, grads), Err(Error::Aliasing { input: "dy", .. })));
    let first = sample.gradients.dx.as_mut().unwrap();
    // SAFETY: the plan refuses two outputs in one memory before it touches anything.
    let again =
        unsafe { TensorMut::from_raw(first.as_ptr().cast_mut().cast(), spec.weight, Device::Cpu) };
    let grads = CausalConv1dGrads { dx: Some(first), dweight: Some(again.unwrap()), ..none() };
    assert!(matches!(run(&sample.dy, None, grads), Err(Error::Aliasing { output: "dweight", .. })));
    run(&sample.dy, None, none()).unwrap();

    // A dense convolution has as many biases as output channels.
    let dense = CausalConv1dSpec::new(desc(F32, &[2, 3, 5]), desc(F32, &[4, 3, 2])).unwrap();
    let plan = super::errors::plan(dense.clone()).unwrap();
    let sample = Sample::new(&dense, 1).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let dy = sample.dy.as_ref();
    for (channels, right) in [(3, false), (4, true)] {
        let mut dbias = other(F32, &[channels]);
        let grads = CausalConv1dGrads { dbias: Some(dbias.as_mut().unwrap()), ..none() };
        let result = plan.backward(&sample.inputs.args(), dy, None, grads, &mut workspace);
        assert_eq!(result.is_ok(), right);
    }
}

fn update_spec() -> CausalConv1dUpdateSpec {
    let (x, state) = (desc(F32, &[3, 2, 1]), desc(F32, &[4, 2, 3]));
    CausalConv1dUpdateSpec::new(x, state, desc(F32, &[2, 4]))
        .unwrap()
        .with_cache_seqlens(desc(DType::I32, &[3]))
        .with_conv_state_indices(desc(DType::I32, &[3]))
}

#[test]
fn update_specs_are_checked() {
    let new = CausalConv1dUpdateSpec::new;
    let (x, weight) = (desc(F32, &[3, 2, 1]), desc(F32, &[2, 4]));
    let state = |dtype, shape: &[usize]| new(x, desc(dtype, shape), weight);
    message(state(F32, &[3, 2]), "conv_state");
    message(state(F32, &[3, 3, 3]), "conv_state");
    message(state(F32, &[3, 2, 2]), "at least 3");
    message(state(DType::BF16, &[3, 2, 3]), "conv_state");
    message(new(x, desc(F32, &[3, 2, 3]), desc(F32, &[2, 2, 4])), "weight");
    let plan = |spec: CausalConv1dUpdateSpec| CausalConv1dUpdatePlan::new(&spec, &options(1));
    message(plan(state(F32, &[4, 2, 3]).unwrap()), "3 states");
    message(plan(update_spec().with_bias(desc(F32, &[3]))), "bias");
    message(plan(update_spec().with_output(desc(F32, &[3, 2, 2]))), "y");
    message(plan(update_spec().with_cache_seqlens(desc(DType::F32, &[3]))), "cache_seqlens");
    message(
        plan(update_spec().with_conv_state_indices(desc(DType::I32, &[4]))),
        "conv_state_indices",
    );
    let broadcast = Layout::strided(&[3, 2, 3], &[0, 3, 1]).unwrap();
    let broadcast = new(x, TensorDesc { dtype: F32, layout: broadcast }, weight);
    assert!(matches!(broadcast, Err(Error::OverlappingOutput { arg: "conv_state", .. })));
}

#[test]
fn update_indices_are_checked_and_nothing_is_written() {
    let spec = update_spec();
    let plan = CausalConv1dUpdatePlan::new(&spec, &options(1)).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let mut sample = UpdateSample::new(&spec, 1).unwrap();
    let values = |held: &Held| held.as_ref().to_f64_vec().unwrap();
    let before = [values(&sample.y), values(&sample.conv_state)];
    let mut run = |lengths: [i32; 3], indices: [i32; 3]| {
        let args = CausalConv1dUpdateArgs {
            cache_seqlens: Some(TensorRef::new(&lengths, &[3]).unwrap()),
            conv_state_indices: Some(TensorRef::new(&indices, &[3]).unwrap()),
            ..sample.inputs.args()
        };
        let conv_state = sample.conv_state.as_mut().unwrap();
        let result = plan.run(&args, conv_state, sample.y.as_mut().unwrap(), &mut workspace);
        (result, [values(&sample.y), values(&sample.conv_state)])
    };
    for (lengths, indices, arg, position) in [
        ([0, -1, 0], [0, 1, 2], "cache_seqlens", 1),
        ([0, 0, 0], [0, 1, 4], "conv_state_indices", 2),
        ([0, 0, 0], [3, i32::MAX, 2], "conv_state_indices", 1),
        ([0, 0, 0], [2, -1, 2], "conv_state_indices", 2),
    ] {
        let (result, after) = run(lengths, indices);
        let error = result.unwrap_err();
        let expected =
            matches!(error, Error::Index { arg: a, position: p, .. } if (a, p) == (arg, position));
        assert!(expected, "{error}");
        assert_eq!(after, before);
    }
    // All padding: zeros, and no state is touched.
    let (result, after) = run([i32::MAX, 0, 7], [-1, -1, i32::MIN]);
    result.unwrap();
    assert!(after[0].iter().all(|&y| y == 0.0));
    assert_eq!(after[1], before[1]);
    run([i32::MAX, 0, 7], [3, -1, 0]).0.unwrap();
}

#[test]
fn update_views_are_checked() {
    let spec = update_spec();
    let plan = CausalConv1dUpdatePlan::new(&spec, &options(1)).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let mut sample = UpdateSample::new(&spec, 1).unwrap();
    let args = sample.inputs.args();
    let (state, y) = (&mut sample.conv_state, &mut sample.y);
    let mut run = |args: &CausalConv1dUpdateArgs<'_>, state: &mut Held, y: &mut Held| {
        plan.run(args, state.as_mut().unwrap(), y.as_mut().unwrap(), &mut workspace)
    };
    let mut other = Held::new(desc(F32, &[2, 2, 2]), &[]).unwrap();
    let x = Held::new(desc(F32, &[2, 2, 2]), &[]).unwrap();
    message(run(&CausalConv1dUpdateArgs { x: x.as_ref(), ..args }, state, y), "x");
    message(run(&args, &mut other, y), "conv_state");
    message(run(&args, state, &mut other), "y");
    let none = CausalConv1dUpdateArgs { conv_state_indices: None, ..args };
    message(run(&none, state, y), "conv_state_indices");
    // SAFETY: the plan refuses the overlap before it touches anything.
    let over_state =
        unsafe { TensorRef::from_raw(state.as_ref().as_ptr().cast(), spec.x, Device::Cpu) };
    let aliased = CausalConv1dUpdateArgs { x: over_state, ..args };
    assert!(matches!(run(&aliased, state, y), Err(Error::Aliasing { output: "conv_state", .. })));
    let mut workspace = Workspace::empty();
    let result = plan.run(&args, state.as_mut().unwrap(), y.as_mut().unwrap(), &mut workspace);
    message(result, "workspace");
}

#[test]
fn no_such_device() {
    let options = PlanOptions { device: Device::Cuda(1 << 20), ..options(1) };
    assert!(matches!(CausalConv1dPlan::new(&spec(), &options), Err(Error::NoDevice { .. })));
    let update = CausalConv1dUpdatePlan::new(&update_spec(), &options);
    assert!(matches!(update, Err(Error::NoDevice { .. })));
}
