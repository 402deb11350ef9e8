//! Every instruction set against the oracle.

mod accuracy;
mod errors;
mod invariance;

use super::*;
use crate::cpu::Isa;
use crate::verification::Expected;
use crate::{
    DType, Device, Element, Error, Layout, MAX_RANK, TensorDesc, TensorMut, Verify, bf16, f16,
};
use proptest::prelude::*;

const FORMS: [Approximate; 2] = [Approximate::None, Approximate::Tanh];

/// A tensor in memory with gaps, in any order and direction, at an odd address.
struct Strided<T> {
    data: Vec<T>,
    offset: usize,
    layout: Layout,
}

/// The layout of a [`Strided`]: a key for each dimension to sort them by, and a step for each, negative for backwards
/// and 0 for a broadcast.
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
        let values = crate::verification::random(seed, len, -range, range);
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

/// A few small dimensions, at times one of them longer than several vectors.
fn shape() -> impl Strategy<Value = Vec<usize>> {
    let long = prop::option::weighted(0.4, (any::<prop::sample::Index>(), 30usize..600));
    (prop::collection::vec(0usize..6, 0..4), long).prop_map(|(mut shape, long)| {
        if let Some((at, n)) = long.filter(|_| !shape.is_empty()) {
            let at = at.index(shape.len());
            shape[at] = n;
        }
        shape
    })
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
    let expected = reference::forward(&inputs).unwrap();
    let dy_values = dy.as_ref().to_f64_vec().unwrap();
    let expected_grads = reference::backward(&inputs, &dy_values, last.unwrap_or(1)).unwrap();
    let mut workspace = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let right = |want: &Expected, got: &TensorRef<'_>| {
        let comparison = want.compare(got, plan.tolerance()).unwrap();
        assert!(comparison.passed(), "{comparison}");
    };
    for isa in Isa::available() {
        let around = y.data.clone();
        cpu::forward(isa, p.threads, &spec, false, &args, y.as_mut());
        right(&expected, &y.as_ref());
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
        right(&expected_grads.dx, &dx.as_ref());
        if gate.is_some() {
            right(&expected_grads.dgate, &dgate.as_ref());
        }
        if let (Some(_), Some(dbias)) = (&bias, &dbias) {
            let got = TensorRef::new(dbias, &[last.unwrap()]).unwrap();
            right(&expected_grads.dbias, &got);
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

fn contiguous(shape: &[usize]) -> TensorDesc {
    TensorDesc::contiguous(DType::F32, shape).unwrap()
}

fn plan(spec: &GeluSpec) -> GeluPlan {
    GeluPlan::new(spec, &PlanOptions::default()).unwrap()
}

#[test]
fn in_place_is_the_same_as_out_of_place() {
    let x = crate::verification::random(7, 40_000, -6.0, 6.0);
    let x: Vec<f32> = x.into_iter().map(|v| v as f32).collect();
    let bias: Vec<f32> = (0..200).map(|i| i as f32 / 100.0).collect();
    let shape = [200, 200];
    let bias = TensorRef::new(&bias, &[200]).unwrap();
    let spec =
        GeluSpec::new(contiguous(&shape), Approximate::Tanh).unwrap().with_bias(*bias.desc());
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
        let [x, dy] = [1, 2].map(|seed| crate::verification::random(seed, n, -3.0, 3.0));
        let [x, dy] = [x, dy].map(|v| v.into_iter().map(|v| v as f32).collect::<Vec<_>>());
        let bias = vec![0.25f32; shape[1]];
        let args = GeluArgs {
            x: TensorRef::new(&x, &shape).unwrap(),
            bias: Some(TensorRef::new(&bias, &[shape[1]]).unwrap()),
            gate: None,
        };
        let dy = TensorRef::new(&dy, &shape).unwrap();
        let spec = GeluSpec::new(contiguous(&shape), Approximate::None).unwrap();
        let spec = spec.with_bias(contiguous(&[shape[1]]));
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
fn infinite_gradients_sum_to_infinities() {
    const ROWS: usize = 70;
    let shape = [ROWS, 3];
    let (x, mut dy) = ([1.0f32; ROWS * 3], [0.5f32; ROWS * 3]);
    // One infinity, two of one sign, two of both.
    (dy[6], dy[10], dy[70], dy[11], dy[71]) =
        (f32::INFINITY, -f32::INFINITY, -f32::INFINITY, f32::INFINITY, -f32::INFINITY);
    let bias = [0f32; 3];
    let args = GeluArgs {
        x: TensorRef::new(&x, &shape).unwrap(),
        bias: Some(TensorRef::new(&bias, &[3]).unwrap()),
        gate: None,
    };
    let spec =
        GeluSpec::new(contiguous(&shape), Approximate::None).unwrap().with_bias(contiguous(&[3]));
    let plan = GeluPlan::new(&spec, &PlanOptions::default()).unwrap();
    let mut ws = Workspace::new(Device::Cpu, plan.workspace_bytes()).unwrap();
    let dy = TensorRef::new(&dy, &shape).unwrap();
    for isa in Isa::available() {
        let mut dbias = [0f32; 3];
        let grads = GeluGrads {
            dbias: Some(TensorMut::new(&mut dbias, &[3]).unwrap()),
            ..GeluGrads::default()
        };
        cpu::backward(isa, 2, &spec, &args, &dy, grads, &mut ws).unwrap();
        assert_eq!(dbias[..2], [f32::INFINITY, -f32::INFINITY], "{}", isa.name());
        assert!(dbias[2].is_nan(), "{}", isa.name());
    }
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
    for case in super::verify::cases(Device::Cpu) {
        for check in (case.run)().unwrap() {
            assert!(check.comparison.passed(), "{case:?} {}: {}", check.what, check.comparison);
        }
    }
}
