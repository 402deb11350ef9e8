//! The bits of an element do not depend on its place or on other elements.

use super::*;
use crate::verification::random;

const ROWS: usize = 40;
const COLUMNS: usize = 53;

/// Numbers of which some need exponentials, are tiny, or are not finite.
fn numbers<T: Element>(seed: u64) -> Vec<T> {
    let mut values = random(seed, ROWS * COLUMNS, -3.0, 3.0);
    for (i, value) in [9.0, -5.0, f64::NAN, f64::INFINITY, 1e-39, -3e-6].into_iter().enumerate() {
        values.iter_mut().skip(37 * i).step_by(401).for_each(|v| *v = value);
    }
    values.into_iter().map(T::from_f64).collect()
}

/// The number of compared elements, and of those that differ from the same elements in a larger batch.
fn compared<T: Element>(isa: Isa, with: [bool; 2], batch_invariant: bool) -> [usize; 2] {
    let [x, bias, gate] = [1, 2, 3].map(numbers::<T>);
    let mut found = [0; 2];
    for approximate in FORMS {
        let run = |rows: std::ops::Range<usize>| -> Vec<u64> {
            let shape = [rows.len(), COLUMNS];
            let part = |all: &[T]| all[rows.start * COLUMNS..rows.end * COLUMNS].to_vec();
            let (x, gate) = (part(&x), part(&gate));
            let desc = TensorDesc::contiguous(T::DTYPE, &shape).unwrap();
            let row = TensorDesc::contiguous(T::DTYPE, &[COLUMNS]).unwrap();
            let mut spec = GeluSpec::new(desc, approximate).unwrap();
            let mut args =
                GeluArgs { x: TensorRef::new(&x, &shape).unwrap(), bias: None, gate: None };
            if with[0] {
                spec = spec.with_bias(row);
                args.bias = Some(TensorRef::new(&bias[..COLUMNS], &[COLUMNS]).unwrap());
            }
            if with[1] {
                spec = spec.with_gate(desc);
                args.gate = Some(TensorRef::new(&gate, &shape).unwrap());
            }
            let mut y = vec![T::default(); rows.len() * COLUMNS];
            let out = TensorMut::new(&mut y, &shape).unwrap();
            cpu::forward(isa, 1, &spec, batch_invariant, &args, out);
            y.iter().map(|y| y.to_f64().to_bits()).collect()
        };
        let whole = run(0..ROWS);
        for (first, rows) in [(0, 1), (3, 1), (5, 2), (9, 7), (13, 27), (ROWS - 1, 1)] {
            let got = run(first..first + rows);
            let want = &whole[first * COLUMNS..][..rows * COLUMNS];
            found[0] += got.len();
            found[1] += got.iter().zip(want).filter(|(got, want)| got != want).count();
        }
    }
    found
}

#[test]
fn bits_do_not_depend_on_other_elements() {
    let mut without = 0;
    for isa in Isa::available() {
        for with in [[false, false], [true, false], [false, true]] {
            for (dtype, of) in [
                (DType::F32, compared::<f32> as fn(Isa, [bool; 2], bool) -> [usize; 2]),
                (DType::F16, compared::<f16>),
                (DType::BF16, compared::<bf16>),
            ] {
                let [count, differ] = of(isa, with, true);
                assert!(
                    count > 3000 && differ == 0,
                    "{differ} of {count}: {dtype} {isa:?} {with:?}"
                );
                without += of(isa, with, false)[1];
            }
        }
    }
    // The comparison finds them without the option, if there is an instruction set with lookups.
    let lookups = Isa::available().into_iter().any(|isa| isa.name().contains("avx512"));
    assert!(without > 0 || !lookups, "no element differs without the option");
}

/// The option is accepted, and a plan's result is that of exponentials.
#[test]
fn plans_have_the_option() {
    let spec = GeluSpec::new(contiguous(&[2, 3]), Approximate::None).unwrap();
    let options = PlanOptions::default().with_batch_invariant(true);
    let plan = GeluPlan::new(&spec, &options).unwrap();
    let (x, mut y) = ([-3.0f32, -1.0, -0.0, 0.5, 9.0, 3.0], [0.0f32; 6]);
    let args = GeluArgs::new(TensorRef::new(&x, &[2, 3]).unwrap());
    let out = TensorMut::new(&mut y, &[2, 3]).unwrap();
    plan.run(&args, out, &mut Workspace::empty()).unwrap();
    let mut alone = [0.0f32; 1];
    let one = GeluSpec::new(contiguous(&[1]), Approximate::None).unwrap();
    let args = GeluArgs::new(TensorRef::new(&x[3..4], &[1]).unwrap());
    let out = TensorMut::new(&mut alone, &[1]).unwrap();
    GeluPlan::new(&one, &options).unwrap().run(&args, out, &mut Workspace::empty()).unwrap();
    assert_eq!(alone[0].to_bits(), y[3].to_bits());
}
