//! Kernels against the oracle.

mod dilation;
mod errors;
mod extremes;
mod invariance;
mod norm;
mod split;

use super::sample::{Held, Sample, UpdateSample, outputs};
use super::verify::{self, run, run_update};
use super::*;
use crate::cpu::Isa;
use crate::verification::{Check, require};
use crate::{
    Activation, Approximate, DType, Device, Error, Layout, PlanOptions, Tensor, TensorDesc,
    TensorMut, TensorRef, Verify, Workspace,
};
use proptest::prelude::*;
use std::num::NonZeroUsize;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn options(threads: usize) -> PlanOptions {
    PlanOptions { threads: NonZeroUsize::new(threads), ..PlanOptions::default() }
}

fn pass(what: &str, checks: Vec<Check>) {
    for check in checks {
        assert!(check.comparison.passed(), "{what}: {}: {}", check.what, check.comparison);
    }
}

/// Dimensions in some order in memory, with gaps between elements, some of them reversed.
#[derive(Clone, Copy, Debug)]
struct Pattern {
    order: [usize; 3],
    gap: usize,
    reversed: [bool; 3],
}

impl Pattern {
    fn of(&self, dtype: DType, shape: [usize; 3]) -> TensorDesc {
        let mut strides = [0isize; 3];
        let mut step = 1 + (self.gap / 3) as isize;
        for d in self.order.into_iter().rev() {
            strides[d] = if self.reversed[d] { -step } else { step };
            step = step * shape[d].max(1) as isize + (self.gap % 3) as isize;
        }
        TensorDesc { dtype, layout: Layout::strided(&shape, &strides).unwrap() }
    }
}

prop_compose! {
    fn patterns()(
        order in prop_oneof![
            3 => Just([0, 1, 2]),
            3 => Just([0, 2, 1]),
            1 => Just(vec![0, 1, 2]).prop_shuffle().prop_map(|order| [order[0], order[1], order[2]]),
        ],
        gap in prop_oneof![3 => Just(0), 1 => 0usize..9],
        reversed in prop_oneof![3 => Just([false; 3]), 1 => any::<[bool; 3]>()],
    ) -> Pattern {
        Pattern { order, gap, reversed }
    }
}

prop_compose! {
    fn specs()(
        (b, d, l) in (1usize..3, 1usize..40, 0usize..90),
        width in 1usize..10,
        dtype in prop::sample::select(&DTYPES),
        activation in prop::sample::select(Activation::ALL),
        (x, y, states) in (patterns(), patterns(), patterns()),
        weight_order in prop::sample::select(vec![[0, 1, 2], [2, 0, 1]]),
        d_out in prop::option::weighted(0.3, 1usize..40),
        [f32_weight, f32_bias, bias, initial, last, wide] in any::<[bool; 6]>(),
        packing in 0usize..4,
        sequences in 1usize..9,
        dilation in prop_oneof![2 => Just(1), 1 => 2usize..6, 1 => Just(90)],
    ) -> CausalConv1dSpec {
        let b = if packing == 2 { 1 } else { b };
        let weight = match d_out {
            Some(d_out) => Layout::with_order(&[d_out, d, width], &weight_order),
            None => Layout::with_order(&[d, width], &if weight_order[0] == 0 { [0, 1] } else { [1, 0] }),
        };
        let weight = weight.unwrap();
        let d_out = d_out.unwrap_or(d);
        let parameter = |f32| if f32 { DType::F32 } else { dtype };
        let x = x.of(dtype, [b, d, l]);
        let weight = TensorDesc { dtype: parameter(f32_weight), layout: weight };
        let mut spec = CausalConv1dSpec::new(x, weight)
            .unwrap()
            .with_activation(activation)
            .with_dilation(dilation);
        if bias {
            spec.bias = Some(TensorDesc::contiguous(parameter(f32_bias), &[d_out]).unwrap());
        }
        if sequences % 2 == 0 {
            spec.y = y.of(dtype, [b, d_out, l]);
        }
        match packing {
            1 => spec.seq_idx = Some(TensorDesc::contiguous(DType::I32, &[b, l]).unwrap()),
            2 => {
                let index = if wide { DType::I64 } else { DType::I32 };
                spec.cu_seqlens = Some(TensorDesc::contiguous(index, &[sequences + 1]).unwrap());
            }
            _ => {}
        }
        let states = states.of(dtype, spec.states_shape().unwrap());
        spec.initial_states = initial.then_some(states);
        spec.final_states = last.then_some(states);
        spec
    }
}

prop_compose! {
    fn update_specs()(
        (b, d, l) in (1usize..4, 1usize..40, 0usize..6),
        (width, more) in (1usize..8, 0usize..4),
        dtype in prop::sample::select(&DTYPES),
        activation in prop::sample::select(Activation::ALL),
        (x, state) in (patterns(), patterns()),
        [f32_weight, bias, ring, pool] in any::<[bool; 4]>(),
    ) -> CausalConv1dUpdateSpec {
        let x = x.of(dtype, [b, d, l]);
        let states = if pool { b + 3 } else { b };
        let state = state.of(dtype, [states, d, width - 1 + more]);
        let parameter = if f32_weight { DType::F32 } else { dtype };
        let weight = TensorDesc::contiguous(parameter, &[d, width]).unwrap();
        let spec = CausalConv1dUpdateSpec::new(x, state, weight).unwrap();
        let indices = || TensorDesc::contiguous(DType::I32, &[b]).unwrap();
        CausalConv1dUpdateSpec {
            activation,
            bias: bias.then(|| TensorDesc::contiguous(parameter, &[d]).unwrap()),
            cache_seqlens: ring.then(indices),
            conv_state_indices: pool.then(indices),
            ..spec
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_algorithm_and_instruction_set_agrees_with_the_oracle(
        spec in specs(), seed in 0u64..1000, threads in 1usize..4,
    ) {
        for algorithm in CausalConv1dPlan::algorithms(&spec, Device::Cpu) {
            for isa in Isa::available() {
                let plan =
                    CausalConv1dPlan::on_isa(
                        &spec,
                        &CausalConv1dConfiguration::new(algorithm),
                        &options(threads),
                        isa,
                    )
                    .unwrap();
                let mut sample = Sample::new(&spec, seed).unwrap();
                pass(&plan.explain(), run(&plan, &mut sample).unwrap());
            }
        }
    }

    #[test]
    fn updates_agree_with_the_oracle(
        spec in update_specs(), seed in 0u64..1000, threads in 1usize..4,
    ) {
        let direct = CausalConv1dConfiguration::new(CausalConv1dAlgorithm::Direct);
        for isa in Isa::available() {
            let plan = CausalConv1dUpdatePlan::on_isa(&spec, &direct, &options(threads), isa).unwrap();
            let mut sample = UpdateSample::new(&spec, seed).unwrap();
            pass(&plan.explain(), run_update(&plan, &mut sample).unwrap());
        }
    }

    #[test]
    fn token_by_token_is_the_same_as_the_whole(
        d in 1usize..40, l in 1usize..20, width in 1usize..6, ring: bool, step in 1usize..4,
        dtype in prop::sample::select(&DTYPES), seed in 0u64..1000,
    ) {
        let x = TensorDesc::contiguous(dtype, &[2, d, l]).unwrap();
        let weight = TensorDesc::contiguous(dtype, &[d, width]).unwrap();
        let states = TensorDesc::contiguous(dtype, &[2, d, width - 1]).unwrap();
        let spec = CausalConv1dSpec::new(x, weight).unwrap()
            .with_activation(Activation::Silu)
            .with_initial_states(states)
            .with_final_states(states);
        let mut sample = Sample::new(&spec, seed).unwrap();
        let args = sample.inputs.args();
        let plan = CausalConv1dPlan::new(&spec, &options(1)).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let mut conv_state = Held::new(states, &args.initial_states.unwrap().to_f64_vec().unwrap()).unwrap();
        let outputs = outputs(&mut sample.y, &mut sample.further, &mut sample.final_states).unwrap();
        plan.run(&args, outputs, &mut workspace).unwrap();

        let mut y = Held::new(spec.y, &[]).unwrap();
        for t in (0..l).step_by(step) {
            let n = step.min(l - t);
            let at = |desc: &TensorDesc| {
                let layout = Layout::strided(&[2, d, n], desc.strides()).unwrap();
                TensorDesc { layout, ..*desc }
            };
            let skip = t * dtype.size();
            // SAFETY: tokens t..t + n of x and y.
            let (x_t, y_t) = unsafe {
                let x_at = args.x.as_ptr().add(skip).cast();
                let y_at = y.as_mut().unwrap().as_mut_ptr().add(skip).cast();
                (
                    TensorRef::from_raw(x_at, at(&spec.x), Device::Cpu),
                    TensorMut::from_raw(y_at, at(&spec.y), Device::Cpu).unwrap(),
                )
            };
            let mut update = CausalConv1dUpdateSpec::new(*x_t.desc(), states, weight).unwrap()
                .with_activation(Activation::Silu)
                .with_output(*y_t.desc());
            let lengths = [t as i32, t as i32];
            let lengths = TensorRef::new(&lengths, &[2]).unwrap();
            let mut update_args = CausalConv1dUpdateArgs::new(x_t, args.weight);
            if ring {
                update.cache_seqlens = Some(*lengths.desc());
                update_args.cache_seqlens = Some(lengths);
            }
            let plan = CausalConv1dUpdatePlan::new(&update, &options(1)).unwrap();
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
            plan.run(&update_args, conv_state.as_mut().unwrap(), y_t, &mut workspace).unwrap();
        }
        // The same operations in the same order: equal bit for bit.
        let values = |held: &Held| held.as_ref().to_f64_vec().unwrap();
        prop_assert_eq!(values(&y), values(&sample.y));
        if !ring {
            prop_assert_eq!(values(&conv_state), values(sample.final_states.as_ref().unwrap()));
        }
    }
}

/// Large enough to be cut into tasks, in both layouts, with every way to pack sequences.
#[test]
fn results_do_not_depend_on_threads() {
    for order in [[0, 1, 2], [0, 2, 1]] {
        for packing in 0..3 {
            let (b, d, l) = if packing == 2 { (1, 40, 4000) } else { (2, 600, 150) };
            let layout = Layout::with_order(&[b, d, l], &order).unwrap();
            let x = TensorDesc { dtype: DType::F32, layout };
            let weight = TensorDesc::contiguous(DType::F32, &[d, 4]).unwrap();
            let mut spec = CausalConv1dSpec::new(x, weight)
                .unwrap()
                .with_activation(Activation::Gelu(Approximate::Tanh));
            match packing {
                1 => spec.seq_idx = Some(TensorDesc::contiguous(DType::I32, &[b, l]).unwrap()),
                2 => spec.cu_seqlens = Some(TensorDesc::contiguous(DType::I32, &[9]).unwrap()),
                _ => {}
            }
            let run = |threads| {
                let plan = CausalConv1dPlan::new(&spec, &options(threads)).unwrap();
                let mut sample = Sample::new(&spec, 1).unwrap();
                pass(&plan.explain(), run(&plan, &mut sample).unwrap());
                let gradients = &sample.gradients;
                [&sample.y, &gradients.dx, &gradients.dweight, &gradients.dbias]
                    .map(|held| held.as_ref().to_f64_vec().unwrap())
            };
            assert_eq!(run(1), run(5));
        }
    }
}

/// `Verify::On` lets right results pass and finds one wrong element of each output.
#[test]
fn wrong_elements_are_found() {
    let options = PlanOptions { verify: Verify::On, ..options(2) };
    let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    let states = desc(&[2, 20, 3]);
    for weight in [desc(&[20, 4]), desc(&[7, 20, 4])] {
        let spec = CausalConv1dSpec::new(desc(&[2, 20, 33]), weight)
            .unwrap()
            .with_bias(desc(&weight.shape()[..1]))
            .with_initial_states(states)
            .with_final_states(states);
        let plan = CausalConv1dPlan::new(&spec, &options).unwrap();
        let mut sample = Sample::new(&spec, 3).unwrap();
        pass(&plan.explain(), run(&plan, &mut sample).unwrap());
        let args = sample.inputs.args();
        let reference = plan.reference(&args).unwrap();
        let mut check = |spoil: fn(&mut Sample) -> &mut Held, what: &str| {
            spoil_last(spoil(&mut sample));
            let outputs =
                outputs(&mut sample.y, &mut sample.further, &mut sample.final_states).unwrap();
            let (dy, dfinal) =
                (sample.dy.as_ref(), sample.dfinal_states.as_ref().map(Held::as_ref));
            let grads = sample.gradients.views().unwrap();
            let mut checks = comparison::forward_checks(&reference, &outputs).unwrap();
            checks.extend(
                comparison::backward_checks(&reference, (&dy, dfinal.as_ref()), &grads).unwrap(),
            );
            let error = require("op", checks).unwrap_err();
            assert!(
                matches!(&error, Error::Verification { op, .. } if op == &format!("op {what}"))
            );
            spoil_last(spoil(&mut sample));
        };
        check(|s| &mut s.y, "y");
        check(|s| s.final_states.as_mut().unwrap(), "final_states");
        check(|s| &mut s.gradients.dx, "dx");
        check(|s| &mut s.gradients.dweight, "dweight");
        check(|s| &mut s.gradients.dbias, "dbias");
        check(|s| &mut s.gradients.dinitial_states, "dinitial_states");
    }
    let spec = CausalConv1dUpdateSpec::new(desc(&[2, 20, 1]), states, desc(&[20, 4])).unwrap();
    let plan = CausalConv1dUpdatePlan::new(&spec, &options).unwrap();
    for (spoil, what) in [(0, "y"), (1, "conv_state")] {
        let mut sample = UpdateSample::new(&spec, 3).unwrap();
        let state = sample.conv_state.as_mut().unwrap();
        let oracle = plan.oracle(&sample.inputs.args(), &state).unwrap();
        pass(&plan.explain(), run_update(&plan, &mut sample).unwrap());
        spoil_last(if spoil == 0 { &mut sample.y } else { &mut sample.conv_state });
        let checks = oracle.checks(&sample.conv_state.as_ref(), &sample.y.as_ref()).unwrap();
        let error = require("op", checks).unwrap_err();
        assert!(matches!(&error, Error::Verification { op, .. } if op == &format!("op {what}")));
    }
}

/// Changes the sign of the last element.
fn spoil_last(held: &mut Held) {
    let mut view = held.as_mut().unwrap();
    let last: Vec<usize> = view.shape().iter().map(|n| n - 1).collect();
    let offset = view.layout().offset(&last);
    // SAFETY: an element of the tensor, of type f32.
    unsafe {
        let at = view.as_mut_ptr().cast::<f32>().offset(offset);
        at.write(-at.read());
    }
}

/// If one size is zero, the others may be larger than any memory.
#[test]
fn tensors_without_elements_take_no_memory_and_no_time() {
    const HUGE: usize = 1 << 40;
    let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    for (x, weight, bias) in [
        ([2, 0, 3], vec![5, 0, HUGE], Some([5])), // dense: the bias everywhere
        ([HUGE, 0, 3], vec![0, 4], None),
        ([HUGE, 3, 0], vec![3, 4], None),
        ([2, 0, 3], vec![0, HUGE], None),
    ] {
        let mut spec = CausalConv1dSpec::new(desc(&x), desc(&weight)).unwrap();
        spec.bias = bias.map(|shape| desc(&shape));
        for algorithm in CausalConv1dPlan::algorithms(&spec, Device::Cpu) {
            let plan = CausalConv1dPlan::with_algorithm(&spec, algorithm, &options(2)).unwrap();
            assert!(plan.workspace_bytes() < 1 << 24, "{spec:?} {algorithm:?}");
            let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
            let bias = spec.bias.map(|_| [1.0f32, 2.0, 3.0, 4.0, 5.0]);
            let bias = bias.as_ref().map(|b| TensorRef::new(b, &[5]).unwrap());
            let taps = [1.0f32; 12];
            let mut y = Tensor::uninitialised(spec.y).unwrap();
            let args = CausalConv1dArgs {
                x: TensorRef::new::<f32>(&[], &x).unwrap(),
                weight: TensorRef::new(&taps[..weight.iter().product()], &weight).unwrap(),
                bias,
                seq_idx: None,
                cu_seqlens: None,
                initial_states: None,
            };
            let outputs = CausalConv1dOutputs::new(y.as_mut());
            plan.run(&args, outputs, &mut workspace).unwrap();
            for (i, y) in y.to_vec::<f32>().unwrap().into_iter().enumerate() {
                assert_eq!(y, [1.0, 2.0, 3.0, 4.0, 5.0][i / 3 % 5]);
            }
        }
    }
    let (x, weight) = (desc(&[HUGE, 3, 0]), desc(&[3, 1]));
    let spec = CausalConv1dUpdateSpec::new(x, desc(&[HUGE, 3, 0]), weight).unwrap();
    let plan = CausalConv1dUpdatePlan::new(&spec, &options(2)).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let [mut state, mut y] = [(); 2].map(|()| Tensor::uninitialised(x).unwrap());
    let args = CausalConv1dUpdateArgs {
        x: TensorRef::new::<f32>(&[], &[HUGE, 3, 0]).unwrap(),
        weight: TensorRef::new(&[1.0f32; 3], &[3, 1]).unwrap(),
        bias: None,
        cache_seqlens: None,
        conv_state_indices: None,
    };
    plan.run(&args, state.as_mut(), y.as_mut(), &mut workspace).unwrap();
}

/// Without tokens the gradients of parameters are zero and need no memory.
#[test]
fn gradients_without_tokens_are_zero() {
    let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    let everywhere = Layout::strided(&[1 << 40, 4, 3], &[0, 0, 0]).unwrap();
    let huge = TensorDesc { dtype: DType::F32, layout: everywhere };
    let spec = CausalConv1dSpec::new(desc(&[0, 4, 8]), huge).unwrap();
    let plan = CausalConv1dPlan::new(&spec, &options(2)).unwrap();
    assert_eq!(plan.workspace_bytes(), 0);
    // So many rows that none may be looked at, or have memory in the oracle.
    for (x, weight) in [
        ([1 << 40, 4, 0], vec![4, 3]),
        ([1 << 40, 4, 0], vec![5, 4, 3]),
        ([1 << 40, 0, 1 << 12], vec![0, 3]),
        ([1 << 40, 0, 1 << 12], vec![0, 0, 3]),
    ] {
        let spec = CausalConv1dSpec::new(desc(&x), desc(&weight)).unwrap();
        let options = PlanOptions { verify: Verify::On, ..options(2) };
        let plan = CausalConv1dPlan::new(&spec, &options).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let taps = vec![1.0f32; weight.iter().product()];
        let none = TensorRef::new::<f32>(&[], &x).unwrap();
        let args = CausalConv1dArgs::new(none, TensorRef::new(&taps, &weight).unwrap());
        let mut dx = Tensor::uninitialised(spec.x).unwrap();
        let grads = CausalConv1dGrads { dx: Some(dx.as_mut()), ..Default::default() };
        let dy = TensorRef::new::<f32>(&[], spec.y.shape()).unwrap();
        plan.backward(&args, dy, None, grads, &mut workspace).unwrap();
    }
    for x in [[0, 4, 8], [2, 4, 0]] {
        let spec = CausalConv1dSpec::new(desc(&x), desc(&[5, 4, 3])).unwrap();
        let plan = CausalConv1dPlan::new(&spec, &options(2)).unwrap();
        let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
        let (x, taps) = (TensorRef::new::<f32>(&[], &x).unwrap(), [1.0f32; 60]);
        let args = CausalConv1dArgs::new(x, TensorRef::new(&taps, &[5, 4, 3]).unwrap());
        let dy = TensorRef::new::<f32>(&[], spec.y.shape()).unwrap();
        let (mut dweight, mut dbias) = ([1.0f32; 60], [1.0f32; 5]);
        let grads = CausalConv1dGrads {
            dweight: Some(TensorMut::new(&mut dweight, &[5, 4, 3]).unwrap()),
            dbias: Some(TensorMut::new(&mut dbias, &[5]).unwrap()),
            ..Default::default()
        };
        plan.backward(&args, dy, None, grads, &mut workspace).unwrap();
        assert_eq!((dweight, dbias), ([0.0; 60], [0.0; 5]));
    }
}

#[test]
fn every_case_of_verify_passes() {
    let cases = verify::cases(Device::Cpu);
    assert!(cases.len() > 400, "{}", cases.len());
    for case in cases {
        pass(&format!("{case:?}"), (case.run)().unwrap());
    }
}
