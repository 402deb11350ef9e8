//! Outputs of some channels each.

use super::*;

/// The values of the outputs beside each other, [b, d_out, l].
fn joined(outputs: &[&Held], [b, _, l]: [usize; 3]) -> Vec<f64> {
    let values: Vec<_> = outputs.iter().map(|held| held.values().unwrap()).collect();
    let rows = (0..b).flat_map(|b| {
        let row = |values: &Vec<f64>, held: &Held| {
            let n = held.as_ref().shape()[1] * l;
            values[b * n..(b + 1) * n].to_vec()
        };
        values.iter().zip(outputs).flat_map(|(v, held)| row(v, held)).collect::<Vec<_>>()
    });
    rows.collect()
}

/// Every algorithm and instruction set gives the bits of one output, wherever the bounds lie.
#[test]
fn parts_have_the_bits_of_one_output() {
    let shape = [2, 70, 45];
    for dtype in DTYPES {
        for order in [[0, 1, 2], [0, 2, 1]] {
            let x = TensorDesc { dtype, layout: Layout::with_order(&shape, &order).unwrap() };
            let weight = TensorDesc::contiguous(DType::F32, &[70, 4]).unwrap();
            let states = TensorDesc::contiguous(dtype, &[2, 70, 3]).unwrap();
            let numbers = TensorDesc::contiguous(DType::I32, &[2, 45]).unwrap();
            let spec = CausalConv1dSpec::new(x, weight)
                .unwrap()
                .with_activation(Activation::Silu)
                .with_initial_states(states);
            for spec in [spec.clone(), spec.with_seq_idx(numbers)] {
                for isa in Isa::available() {
                    for algorithm in CausalConv1dPlan::algorithms(&spec, Device::Cpu) {
                        let of = CausalConv1dConfiguration::new(algorithm);
                        let values = |spec: &CausalConv1dSpec| {
                            let plan =
                                CausalConv1dPlan::on_isa(spec, &of, &options(2), isa).unwrap();
                            let mut sample = Sample::new(spec, 3).unwrap();
                            pass(&plan.explain(), run(&plan, &mut sample).unwrap());
                            let further = sample.further.iter().flatten();
                            joined(&Vec::from_iter([&sample.y].into_iter().chain(further)), shape)
                        };
                        let whole = values(&spec);
                        for channels in [&[70][..], &[1, 69], &[16, 54], &[32, 37, 1], &[64, 3, 3]]
                        {
                            let split = spec.clone().with_split(channels).unwrap();
                            assert_eq!(values(&split), whole, "{algorithm} {channels:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn bad_splits_are_refused() {
    let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    let spec = CausalConv1dSpec::new(desc(&[2, 6, 5]), desc(&[6, 4])).unwrap();
    let states = desc(&[2, 6, 3]);
    let serving = CausalConv1dServingSpec::new(spec.x, states, spec.weight).unwrap();
    for bad in [&[][..], &[0, 6], &[6, 0], &[5], &[1, 2, 2], &[1, 2, 4], &[1, 2, 2, 1]] {
        for result in
            [spec.clone().with_split(bad).map(|_| ()), serving.clone().with_split(bad).map(|_| ())]
        {
            assert!(
                matches!(&result, Err(Error::Parameter { name: "split", .. })),
                "{bad:?}: {result:?}"
            );
        }
    }
    assert!(spec.clone().with_split(&[usize::MAX, 7]).is_err());
    let plan = |spec: CausalConv1dSpec| CausalConv1dPlan::new(&spec, &options(1));
    let third = plan(spec.clone().with_y3(desc(&[2, 6, 5])));
    assert!(matches!(third, Err(Error::Parameter { name: "y3", .. })));
    let more = plan(spec.clone().with_y2(desc(&[2, 1, 5])));
    assert!(matches!(more, Err(Error::Parameter { name: "split", .. })));
    let split = spec.clone().with_split(&[1, 2, 3]).unwrap();
    let flat = plan(split.clone().with_y2(desc(&[2, 10])));
    assert!(matches!(flat, Err(Error::Rank { arg: "y2", given: 2, .. })));
    let short = plan(split.clone().with_y3(desc(&[2, 3, 4])));
    assert!(matches!(short, Err(Error::Shape { arg: "y3", .. })));
    let half = TensorDesc::contiguous(DType::F16, &[2, 2, 5]).unwrap();
    let half = plan(split.clone().with_y2(half));
    assert!(matches!(half, Err(Error::DType { arg: "y2", .. })));
    let same = TensorDesc::new(DType::F32, Layout::strided(&[2, 2, 5], &[5, 0, 1]).unwrap());
    assert!(matches!(plan(split.with_y2(same)), Err(Error::OverlappingOutput { arg: "y2", .. })));
}

#[test]
fn outputs_of_a_split_share_no_memory() {
    let desc = |shape: &[usize]| TensorDesc::contiguous(DType::F32, shape).unwrap();
    let spec = CausalConv1dSpec::new(desc(&[1, 4, 2]), desc(&[4, 1])).unwrap();
    let split = spec.clone().with_split(&[2, 2]).unwrap();
    let (x, weight) = ([1f32; 8], [2f32; 4]);
    let args = CausalConv1dArgs::new(
        TensorRef::new(&x, &[1, 4, 2]).unwrap(),
        TensorRef::new(&weight, &[4, 1]).unwrap(),
    );
    let mut workspace = Workspace::new(Device::Cpu, 1 << 20).unwrap();
    let mut memory = [0f32; 8];
    let base = memory.as_mut_ptr();
    let mut run = |spec: &CausalConv1dSpec, second: Option<usize>| {
        let at = |i: usize, desc: TensorDesc| {
            // SAFETY: within `memory`; the plan refuses what overlaps before it touches anything.
            unsafe { TensorMut::from_raw(base.wrapping_add(i).cast(), desc, Device::Cpu).unwrap() }
        };
        let y2 = second.map(|second| at(second, desc(&[1, 2, 2])));
        let outputs = CausalConv1dOutputs::new(at(0, spec.y)).with_y2(y2);
        CausalConv1dPlan::new(spec, &options(1))?.run(&args, outputs, &mut workspace)
    };
    let shared = run(&split, Some(3));
    assert!(matches!(shared, Err(Error::Aliasing { output: "y2", input: "y", .. })));
    for (spec, second) in [(&split, None), (&spec, Some(4))] {
        let missing = run(spec, second);
        assert!(matches!(missing, Err(Error::Parameter { name: "y2", .. })), "{missing:?}");
    }
    run(&split, Some(4)).unwrap();
    assert_eq!(memory, [2.0; 8]);
}
