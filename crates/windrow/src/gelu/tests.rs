//! Every instruction set against the oracle, and every refusal.

use super::*;
use crate::TensorDesc;
use crate::{DType, Element, Layout, MAX_RANK, bf16, f16};
use proptest::prelude::*;

const FORMS: [Approximate; 2] = [Approximate::None, Approximate::Tanh];

/// A tensor in memory with gaps, in any order and direction, at an odd address.
struct Strided<T> {
    data: Vec<T>,
    offset: usize,
    layout: Layout,
}

/// How the dimensions of a [`Strided`] lie: keys to sort them by, and a step for each, negative
/// for backwards and 0 for a broadcast.
type Pattern = Vec<(u8, isize)>;

impl<T: Element> Strided<T> {
    fn new(seed: u64, shape: &[usize], pattern: &Pattern, range: f64) -> Self {
        let mut order: Vec<usize> = (0..shape.len()).collect();
        order.sort_by_key(|&d| pattern[d].0);
        let mut strides = vec![0; shape.len()];
        let mut next = 1;
        for d in order {
            strides[d] = next * pattern[d].1;
            next *= pattern[d].1.abs().max(1) * shape[d].max(1) as isize;
        }
        let layout = Layout::strided(shape, &strides).unwrap();
        let (low, high) = layout.extent().unwrap_or((0, -1));
        let offset = (1 - low) as usize;
        let len = offset + (high + 1).max(0) as usize + 1;
        let values = crate::verify::random(seed, len, -range, range);
        let data = values.into_iter().map(T::from_f64).collect();
        Strided { data, offset, layout }
    }

    fn as_ref(&self) -> TensorRef<'_> {
        TensorRef::strided(&self.data, self.offset, self.layout).unwrap()
    }

    fn as_mut(&mut self) -> TensorMut<'_> {
        TensorMut::strided(&mut self.data, self.offset, self.layout).unwrap()
    }
}

fn pattern(broadcast: bool) -> impl Strategy<Value = Pattern> {
    let steps = if broadcast { vec![1, 1, 2, -1, -3, 0] } else { vec![1, 1, 2, -1, -3] };
    prop::collection::vec((any::<u8>(), prop::sample::select(steps)), MAX_RANK)
}

/// Mostly a few small dimensions, at times one that is longer than several vectors.
fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![4 => 0usize..6, 1 => 30usize..600], 0..4)
}

#[derive(Debug, Clone)]
struct Problem {
    shape: Vec<usize>,
    patterns: [Pattern; 4],
    outputs: [Pattern; 3],
    fused: [bool; 2],
    bias_f32: bool,
    approximate: Approximate,
    threads: usize,
}

fn problem() -> impl Strategy<Value = Problem> {
    (
        shape(),
        std::array::from_fn::<_, 4, _>(|_| pattern(true)),
        std::array::from_fn::<_, 3, _>(|_| pattern(false)),
        any::<[bool; 2]>(),
        any::<bool>(),
        prop::sample::select(&FORMS[..]),
        1usize..4,
    )
        .prop_map(|(shape, patterns, outputs, fused, bias_f32, approximate, threads)| {
            Problem { shape, patterns, outputs, fused, bias_f32, approximate, threads }
        })
}

/// Runs a problem forward and backward on every instruction set.
fn check<T: Element>(p: &Problem) {
    match p.bias_f32 {
        true => check_with_bias::<T, f32>(p),
        false => check_with_bias::<T, T>(p),
    }
}

fn check_with_bias<T: Element, B: Element>(p: &Problem) {
    let [px, pgate, pdy, pbias] = &p.patterns;
    let x = Strided::<T>::new(1, &p.shape, px, 8.0);
    let gate = p.fused[0].then(|| Strided::<T>::new(2, &p.shape, pgate, 2.0));
    let dy = Strided::<T>::new(3, &p.shape, pdy, 2.0);
    let last = p.shape.last().copied();
    let bias =
        last.filter(|_| p.fused[1]).map(|n| Strided::<B>::new(4, &[n], &pbias[..1].to_vec(), 1.0));
    let args = GeluArgs {
        x: x.as_ref(),
        bias: bias.as_ref().map(Strided::as_ref),
        gate: gate.as_ref().map(Strided::as_ref),
    };
    let [mut y, mut dx, mut dgate] =
        std::array::from_fn(|i| Strided::<T>::new(0, &p.shape, &p.outputs[i], 1.0));
    let spec = GeluSpec {
        x: *args.x.desc(),
        y: *y.as_ref().desc(),
        bias: args.bias.map(|b| *b.desc()),
        gate: args.gate.map(|g| *g.desc()),
        approximate: p.approximate,
        half_math: HalfMath::Float,
    };
    let plan = GeluPlan::new(&spec, &PlanOptions::default()).unwrap();
    let inputs = plan.oracle_inputs(&args).unwrap();
    let expected = reference::forward(&inputs);
    let dy_values = dy.as_ref().to_f64_vec().unwrap();
    let expected_grads = reference::backward(&inputs, &dy_values, last.unwrap_or(1));
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    for isa in Isa::available() {
        let around = y.data.clone();
        cpu::forward(isa, p.threads, &spec, &args, y.as_mut());
        plan.expect("y", &y.as_ref(), &expected).unwrap();
        unchanged_between(&around, &y);

        let mut dbias = last.map(|n| vec![B::default(); n]);
        let grads = GeluGrads {
            dx: Some(dx.as_mut()),
            dgate: gate.is_some().then(|| dgate.as_mut()),
            dbias: dbias
                .as_mut()
                .filter(|_| bias.is_some())
                .map(|d| TensorMut::new(d, &[last.unwrap()]).unwrap()),
        };
        cpu::backward(isa, p.threads, &spec, &args, &dy.as_ref(), grads, &mut workspace).unwrap();
        plan.expect("dx", &dx.as_ref(), &expected_grads.dx).unwrap();
        if gate.is_some() {
            plan.expect("dgate", &dgate.as_ref(), &expected_grads.dgate).unwrap();
        }
        if let (Some(_), Some(dbias)) = (&bias, &dbias) {
            let got = TensorRef::new(dbias, &[last.unwrap()]).unwrap();
            plan.expect("dbias", &got, &expected_grads.dbias).unwrap();
        }
    }
}

/// Nothing between the elements of the output was written.
fn unchanged_between<T: Element>(before: &[T], after: &Strided<T>) {
    let mut inside = vec![false; before.len()];
    crate::tensor::for_each_offset(&after.layout, |o| {
        inside[(after.offset as isize + o) as usize] = true;
    });
    for ((a, b), inside) in before.iter().zip(&after.data).zip(inside) {
        assert!(inside || a == b);
    }
}

proptest! {
    #[test]
    fn any_f32_tensor_agrees_with_the_oracle(p in problem()) {
        check::<f32>(&p);
    }

    #[test]
    fn any_f16_tensor_agrees_with_the_oracle(p in problem()) {
        check::<f16>(&p);
    }

    #[test]
    fn any_bf16_tensor_agrees_with_the_oracle(p in problem()) {
        check::<bf16>(&p);
    }
}

/// Steps between two values of a half type, counted over all representable values between.
fn steps(a: u16, b: u16) -> u32 {
    let position = |bits: u16| {
        let magnitude = i32::from(bits & 0x7fff);
        if bits & 0x8000 == 0 { magnitude } else { -magnitude }
    };
    position(a).abs_diff(position(b))
}

/// All 65,536 inputs: at most one step from the f64 result rounded; counts those that are off.
fn all_inputs<T: Element>(from_bits: fn(u16) -> T, to_bits: fn(T) -> u16) {
    let x: Vec<T> = (0..=u16::MAX).map(from_bits).collect();
    for approximate in FORMS {
        let desc = TensorDesc::contiguous(T::DTYPE, &[x.len()]).unwrap();
        let spec = GeluSpec::new(desc, approximate).unwrap();
        let args = GeluArgs { x: TensorRef::new(&x, &[x.len()]).unwrap(), bias: None, gate: None };
        for isa in Isa::available() {
            let mut y = vec![T::default(); x.len()];
            cpu::forward(isa, 1, &spec, &args, TensorMut::new(&mut y, &[x.len()]).unwrap());
            let mut off = 0;
            for (&x, &y) in x.iter().zip(&y) {
                let want = T::from_f64(spec.activation().apply_f64(x.to_f64()));
                if want.to_f64().is_nan() {
                    assert!(x.to_f64().is_nan() && y.to_f64().is_nan(), "{x:?} gives {y:?}");
                    continue;
                }
                let distance = steps(to_bits(y), to_bits(want));
                assert!(
                    distance <= 1 && y.to_f64().is_sign_negative() == x.to_f64().is_sign_negative(),
                    "{} {} {x:?}: {y:?} is {distance} from {want:?}",
                    isa.name(),
                    approximate.name()
                );
                off += distance;
            }
            println!(
                "{} {} {}: {off} of 65536 differ by one",
                T::DTYPE,
                approximate.name(),
                isa.name()
            );
        }
    }
}

#[test]
fn all_f16_inputs_are_within_one_step() {
    all_inputs(f16::from_bits, f16::to_bits);
}

#[test]
fn all_bf16_inputs_are_within_one_step() {
    all_inputs(bf16::from_bits, bf16::to_bits);
}

/// Largest relative error of f32 results, in units of f32's epsilon, among normal results.
fn worst_error(isa: Isa, approximate: Approximate, x: &[f32]) -> (f64, f32) {
    let shape = [x.len()];
    let spec = GeluSpec::new(contiguous(&shape), approximate).unwrap();
    let args = GeluArgs { x: TensorRef::new(x, &shape).unwrap(), bias: None, gate: None };
    let mut y = vec![0f32; x.len()];
    cpu::forward(isa, 1, &spec, &args, TensorMut::new(&mut y, &shape).unwrap());
    let mut worst = (0.0, 0.0);
    for (&x, &y) in x.iter().zip(&y) {
        let want = spec.activation().apply_f64(f64::from(x));
        if want.is_nan() || want.is_infinite() {
            assert!(y.is_nan() && want.is_nan() || f64::from(y) == want, "{x:e}: {y:e}");
        } else if want.abs() >= f64::from(f32::MIN_POSITIVE) {
            let error = ((f64::from(y) - want) / want).abs() / f64::from(f32::EPSILON);
            if error > worst.0 {
                worst = (error, x);
            }
        } else {
            // Below the normal range half a unit of the last place comes on top.
            let half_unit = f64::from(f32::MIN_POSITIVE) * f64::from(f32::EPSILON) / 2.0;
            let bound = half_unit + 4.0 * f64::from(f32::EPSILON) * want.abs();
            assert!((f64::from(y) - want).abs() <= bound, "{x:e}: {y:e} {want:e}");
        }
        assert!(x.is_nan() || x.is_sign_negative() == y.is_sign_negative(), "{x:e}: {y:e}");
    }
    worst
}

fn check_errors(isa: Isa, x: &[f32]) {
    for approximate in FORMS {
        let worst = worst_error(isa, approximate, x);
        println!("f32 {} {}: {worst:?}", approximate.name(), isa.name());
        assert!(worst.0 <= 4.0, "{} {}: {worst:?}", approximate.name(), isa.name());
    }
}

#[test]
fn f32_sample_is_within_4_ulp() {
    let mut x: Vec<f32> = (0..=u32::MAX).step_by(16_411).map(f32::from_bits).collect();
    // Neighbours together, so that whole vectors go the same way.
    x.extend((-150_000..150_000).map(|i| i as f32 / 10_000.0));
    for isa in Isa::available() {
        check_errors(isa, &x);
    }
}

#[test]
#[ignore = "570 million inputs on every instruction set take minutes"]
fn every_f32_between_2_to_the_minus_30_and_16_is_within_4_ulp() {
    let (first, last) = ((2f32.powi(-30)).to_bits() >> 20, 16f32.to_bits() >> 20);
    for isa in Isa::available() {
        crate::cpu::parallel_for(crate::cpu::num_threads(), (last - first) as usize, |i| {
            let begin = (first + i as u32) << 20;
            let x: Vec<f32> = (begin..begin + (1 << 20))
                .flat_map(|bits| [f32::from_bits(bits), -f32::from_bits(bits)])
                .collect();
            for approximate in FORMS {
                let worst = worst_error(isa, approximate, &x);
                assert!(worst.0 <= 4.0, "{} {}: {worst:?}", approximate.name(), isa.name());
            }
        });
    }
}

fn contiguous(shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(DType::F32, shape).unwrap()
}

fn plan(spec: &GeluSpec) -> GeluPlan {
    GeluPlan::new(spec, &PlanOptions::default()).unwrap()
}

#[test]
fn in_place_is_the_same_as_out_of_place() {
    let x = crate::verify::random(7, 40_000, -6.0, 6.0);
    let x: Vec<f32> = x.into_iter().map(|v| v as f32).collect();
    let bias: Vec<f32> = (0..200).map(|i| i as f32 / 100.0).collect();
    let shape = [200, 200];
    let bias = TensorRef::new(&bias, &[200]).unwrap();
    let spec = GeluSpec::new(contiguous(&shape), Approximate::Tanh).unwrap().bias(*bias.desc());
    let options = PlanOptions { verify: Verify::On, ..PlanOptions::default() };
    let plan = GeluPlan::new(&spec, &options).unwrap();
    let mut y = vec![0f32; x.len()];
    let args = GeluArgs { x: TensorRef::new(&x, &shape).unwrap(), bias: Some(bias), gate: None };
    let mut ws = Workspace::empty();
    plan.run(&args, TensorMut::new(&mut y, &shape).unwrap(), &mut ws).unwrap();
    let mut z = x.clone();
    plan.run_in_place(TensorMut::new(&mut z, &shape).unwrap(), Some(bias), None, &mut ws).unwrap();
    assert_eq!(y, z);
}

#[test]
fn bias_gradient_is_the_same_on_any_number_of_threads() {
    for shape in [[3000, 40], [40, 3000], [20_000, 3], [2, 70_000]] {
        let n = shape[0] * shape[1];
        let [x, dy] = [1, 2].map(|seed| crate::verify::random(seed, n, -3.0, 3.0));
        let [x, dy] = [x, dy].map(|v| v.into_iter().map(|v| v as f32).collect::<Vec<_>>());
        let bias = vec![0.25f32; shape[1]];
        let args = GeluArgs {
            x: TensorRef::new(&x, &shape).unwrap(),
            bias: Some(TensorRef::new(&bias, &[shape[1]]).unwrap()),
            gate: None,
        };
        let dy = TensorRef::new(&dy, &shape).unwrap();
        let spec = GeluSpec::new(contiguous(&shape), Approximate::None).unwrap();
        let spec = spec.bias(contiguous(&[shape[1]]));
        let mut results = Vec::new();
        for threads in [1, 2, 5] {
            let options = PlanOptions {
                threads: std::num::NonZeroUsize::new(threads),
                verify: Verify::On,
                ..PlanOptions::default()
            };
            let plan = GeluPlan::new(&spec, &options).unwrap();
            let mut ws = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
            let mut dbias = vec![0f32; shape[1]];
            let grads = GeluGrads {
                dbias: Some(TensorMut::new(&mut dbias, &[shape[1]]).unwrap()),
                ..GeluGrads::default()
            };
            plan.backward(&args, &dy, grads, &mut ws).unwrap();
            results.push(dbias);
        }
        assert!(results.windows(2).all(|r| r[0] == r[1]), "{shape:?}");
    }
}

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
    for error in
        [refused(spec.bias(f16_bias)), refused(GeluSpec::new(f64_x, Approximate::None).unwrap())]
    {
        assert!(matches!(error, Error::DType { .. }), "{error}");
    }
    for error in [
        refused(spec.bias(contiguous(&[2]))),
        refused(spec.gate(contiguous(&[3, 2]))),
        refused(spec.y(contiguous(&[6]))),
    ] {
        assert!(matches!(error, Error::Shape { .. }), "{error}");
    }
    let error = refused(spec.y(TensorDesc { layout: overlap, ..x }));
    assert!(matches!(error, Error::OverlappingOutput { arg: "y", .. }), "{error}");
    let scalar = GeluSpec::new(contiguous(&[]), Approximate::None).unwrap();
    assert!(matches!(refused(scalar.bias(contiguous(&[1]))), Error::Rank { .. }));
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
    let biased = plan(&spec.bias(contiguous(&[3])));
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
    let gated = plan(&spec.gate(desc));
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
        Err(Error::Aliasing { output: "dx", input: "dgate", .. })
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
    let biased = plan(&spec.bias(contiguous(&[4])));
    let args = GeluArgs { bias: Some(view), ..args };
    let grads =
        GeluGrads { dbias: Some(TensorMut::new(&mut g, &[4]).unwrap()), ..GeluGrads::default() };
    // Nor without the workspace that the sums need.
    let error = biased.backward(&args, &view, grads, &mut Workspace::empty()).unwrap_err();
    assert!(matches!(error, Error::Parameter { name: "workspace", .. }), "{error}");
}

#[test]
fn devices_without_the_operator_are_refused() {
    let spec = GeluSpec::new(contiguous(&[4]), Approximate::None).unwrap();
    let options = PlanOptions { device: Device::Cuda(999), ..PlanOptions::default() };
    assert!(matches!(GeluPlan::new(&spec, &options), Err(Error::NoDevice { .. })));
    let ok = GeluPlan::with_algorithm(&spec, GeluAlgorithm::Cpu, &PlanOptions::default()).unwrap();
    assert_eq!(ok.algorithm().name().parse::<GeluAlgorithm>().unwrap(), GeluAlgorithm::Cpu);
    assert!("fast".parse::<GeluAlgorithm>().is_err());
    assert!(ok.explain().starts_with("gelu cpu"));
}

#[test]
fn gated_helper_multiplies() {
    let (a, b) = ([1.0f32, -1.0], [2.0f32, 10.0]);
    let (a, b) = (TensorRef::new(&a, &[2]).unwrap(), TensorRef::new(&b, &[2]).unwrap());
    let y = geglu(&a, &b, Approximate::None).unwrap().to_vec::<f32>().unwrap();
    assert!((y[0] - 1.682_689_5).abs() < 1e-6 && (y[1] + 1.586_552_5).abs() < 1e-6, "{y:?}");
    assert!(geglu(&a, &TensorRef::new(&[1.0f32], &[1]).unwrap(), Approximate::None).is_err());
}

#[test]
fn verify_cases_pass() {
    for case in crate::verify::cases(Device::Cpu).iter().filter(|c| c.op == "gelu") {
        for check in (case.run)().unwrap() {
            assert!(check.comparison.passed(), "{case:?} {}: {}", check.what, check.comparison);
        }
    }
}
