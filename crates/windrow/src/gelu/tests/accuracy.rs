//! Errors over all inputs of f16 and bf16, and over a sample of f32's.

use super::*;

/// The number of steps between two values of f16 or bf16, counted over all representable values between.
fn steps(a: u16, b: u16) -> u32 {
    let position = |bits: u16| {
        let magnitude = i32::from(bits & 0x7fff);
        if bits & 0x8000 == 0 { magnitude } else { -magnitude }
    };
    position(a).abs_diff(position(b))
}

/// The comparison of all 65,536 inputs: at most one step from the rounded f64 result. Counts those that are off.
fn all_inputs<T: Element>(from_bits: fn(u16) -> T, to_bits: fn(T) -> u16) {
    let x: Vec<T> = (0..=u16::MAX).map(from_bits).collect();
    for approximate in FORMS {
        let desc = TensorDesc::contiguous(T::DTYPE, &[x.len()]).unwrap();
        let spec = GeluSpec::new(desc, approximate).unwrap();
        let args = GeluArgs { x: TensorRef::new(&x, &[x.len()]).unwrap(), bias: None, gate: None };
        for isa in Isa::available() {
            let mut y = vec![T::default(); x.len()];
            cpu::forward(isa, 1, &spec, false, &args, TensorMut::new(&mut y, &[x.len()]).unwrap());
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

/// The largest relative error of normal f32 results, in units of f32's epsilon.
fn worst_error(isa: Isa, approximate: Approximate, x: &[f32]) -> (f64, f32) {
    let shape = [x.len()];
    let spec = GeluSpec::new(contiguous(&shape), approximate).unwrap();
    let args = GeluArgs { x: TensorRef::new(x, &shape).unwrap(), bias: None, gate: None };
    let mut y = vec![0f32; x.len()];
    cpu::forward(isa, 1, &spec, false, &args, TensorMut::new(&mut y, &shape).unwrap());
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
