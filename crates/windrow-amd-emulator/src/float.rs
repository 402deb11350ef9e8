//! Arithmetic of single lanes, after AMD's "Instruction Set Architecture" of CDNA 3.

use crate::wave::Lanes;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

pub fn f(x: u32) -> f32 {
    f32::from_bits(x)
}

pub fn b(x: f32) -> u32 {
    x.to_bits()
}

/// The number that the lower 16 bits are as f16.
#[inline(always)]
pub fn from_half(h: u32) -> f32 {
    let magnitude = f32::from_bits((h & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | (h & 0x8000) << 16)
}

/// Rounded to f16, to nearest even.
#[inline(always)]
pub fn to_half(x: f64) -> u32 {
    let sign = (x.to_bits() >> 48) as u32 & 0x8000;
    if x.is_nan() {
        return sign | 0x7e00;
    }
    let size = x.abs();
    if size >= 65520.0 {
        return sign | 0x7c00;
    }
    // The exponent of the unit in the last place, at least that of subnormal numbers.
    let exponent = ((size.to_bits() >> 52) as i64 - 1023).max(-14);
    let units = size * f64::from_bits(((10 - exponent + 1023) as u64) << 52);
    // Adding and subtracting 2^52 rounds to a whole number.
    let whole = (units + 4_503_599_627_370_496.0 - 4_503_599_627_370_496.0) as u32;
    // A whole number of 2048 or more, and 1024 where the number is normal, carries into the exponent by itself.
    sign | (whole + (((exponent + 14) as u32) << 10))
}

#[inline(always)]
pub fn half_of(x: f32) -> u32 {
    to_half(x.into())
}

/// The smaller number; the other one where one is NaN; -0 is smaller than +0.
#[inline(always)]
pub fn smaller(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() {
        a
    } else if a == b {
        f32::from_bits(a.to_bits() | b.to_bits())
    } else if a < b {
        a
    } else {
        b
    }
}

#[inline(always)]
pub fn larger(a: f32, b: f32) -> f32 {
    -smaller(-a, -b)
}

/// The number with subnormal ones turned to 0, as reciprocals and exponentials take and give it.
pub fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// A result that is allowed to be wrong by a unit in the last place: with `WINDROW_EMULATOR_NUDGE=1` it is, at random.
pub fn nudged(x: f32) -> f32 {
    static ON: LazyLock<bool> =
        LazyLock::new(|| std::env::var("WINDROW_EMULATOR_NUDGE").is_ok_and(|value| value == "1"));
    static STATE: AtomicU64 = AtomicU64::new(0x2545_f491_4f6c_dd1d);
    if !*ON {
        return x;
    }
    let state = STATE.load(Ordering::Relaxed);
    let next =
        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    STATE.store(next, Ordering::Relaxed);
    moved(x, (next >> 33) as u32 % 3)
}

/// The number moved one unit down for 0, not at all for 1, one unit up for 2. Numbers that are not normal, or would
/// become so, stay.
fn moved(x: f32, by: u32) -> f32 {
    let moved = f32::from_bits(x.to_bits().wrapping_add(by).wrapping_sub(1));
    if x.is_normal() && moved.is_normal() { moved } else { x }
}

/// The whole numbers that conversions give: 0 for NaN, the nearest one where it is out of range.
pub fn to_unsigned(x: f32) -> u32 {
    x as u32
}

pub fn to_signed(x: f32) -> u32 {
    x as i32 as u32
}

/// x * 2^n
pub fn scaled(x: f32, n: i32) -> f32 {
    (f64::from(x) * 2f64.powi(n.clamp(-1000, 1000))) as f32
}

fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23 & 255) as i32
}

/// `v_div_scale_f32`: the operand, scaled where the quotient would leave the range, and whether the end must undo it.
pub fn division_scale(s0: u32, denominator: u32, numerator: u32) -> (u32, bool) {
    let (x, d, n) = (f(s0), f(denominator), f(numerator));
    let (up, down) = (b(scaled(x, 64)), b(scaled(x, -64)));
    let of_denominator = s0 == denominator;
    let reciprocal = (1.0 / f64::from(d)).abs() < f64::from(f32::MIN_POSITIVE);
    let quotient = ((f64::from(n) / f64::from(d)).abs() as f32).is_subnormal();
    if n == 0.0 || d == 0.0 {
        (b(f32::NAN), false)
    } else if exponent(n) - exponent(d) >= 96 {
        (if of_denominator { up } else { s0 }, true)
    } else if d.is_subnormal() {
        (up, false)
    } else if reciprocal && quotient {
        // The manual says 2^64, which would overflow.
        (if of_denominator { down } else { s0 }, true)
    } else if reciprocal {
        (down, false)
    } else if quotient {
        (if s0 == numerator { up } else { s0 }, true)
    } else if exponent(n) <= 23 {
        (up, false)
    } else {
        (s0, false)
    }
}

/// `v_div_fmas_f32`
pub fn division_step(a: u32, c: u32, d: u32, rescale: bool) -> u32 {
    if !rescale {
        return b(f(a).mul_add(f(c), f(d)));
    }
    let by = if exponent(f(d)) > 127 { 64 } else { -64 };
    // The product is exact, and the result is rounded once, also where it is subnormal.
    let sum = f64::from(f(a)) * f64::from(f(c)) + f64::from(f(d));
    b((sum * 2f64.powi(by)) as f32)
}

/// `v_div_fixup_f32`: the quotient with its special cases.
pub fn division_end(quotient: u32, denominator: u32, numerator: u32) -> u32 {
    let (q, d, n) = (f(quotient), f(denominator), f(numerator));
    let sign = if (denominator ^ numerator) >> 31 == 1 { -1.0f32 } else { 1.0 };
    let undefined = d == 0.0 && n == 0.0 || d.is_infinite() && n.is_infinite();
    b(if n.is_nan() || d.is_nan() || undefined {
        f32::NAN
    } else if d == 0.0 || n.is_infinite() || exponent(n) - exponent(d) > 128 {
        sign * f32::INFINITY
    } else if d.is_infinite() || n == 0.0 || exponent(n) - exponent(d) < -150 {
        sign * 0.0
    } else {
        sign * q.abs()
    })
}

/// `v_cmp_class_f32`: the bit of a number's class.
pub fn class(x: f32) -> u32 {
    let negative = x.is_sign_negative();
    match x.classify() {
        std::num::FpCategory::Nan => 1 | 2,
        std::num::FpCategory::Infinite => {
            if negative {
                4
            } else {
                512
            }
        }
        std::num::FpCategory::Normal => {
            if negative {
                8
            } else {
                256
            }
        }
        std::num::FpCategory::Subnormal => {
            if negative {
                16
            } else {
                128
            }
        }
        std::num::FpCategory::Zero => {
            if negative {
                32
            } else {
                64
            }
        }
    }
}

/// a * b + c for each lane, rounded once.
#[inline]
pub fn fused(a: &Lanes, c: &Lanes, d: &Lanes) -> Lanes {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has these instructions.
        return unsafe { fused_by_vectors(a, c, d) };
    }
    fused_plainly(a, c, d)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fused_by_vectors(a: &Lanes, c: &Lanes, d: &Lanes) -> Lanes {
    fused_plainly(a, c, d)
}

#[inline(always)]
fn fused_plainly(a: &Lanes, c: &Lanes, d: &Lanes) -> Lanes {
    let mut sums = [0; 64];
    for (lane, sum) in sums.iter_mut().enumerate() {
        *sum = b(f(a[lane]).mul_add(f(c[lane]), f(d[lane])));
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_converted_as_the_crate_half_does() {
        for bits in 0..=0xffffu16 {
            let want = half::f16::from_bits(bits).to_f32();
            let got = from_half(bits.into());
            assert!(
                got == want && got.is_sign_negative() == want.is_sign_negative()
                    || got.is_nan() && want.is_nan()
            );
            let back = to_half(want.into());
            assert!(
                back == bits.into() || want.is_nan() && back & 0x7e00 == 0x7e00,
                "{bits:#x} {back:#x}"
            );
        }
        let mut x = 1u32;
        for _ in 0..1_000_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f(x);
            let want = half::f16::from_f32(value);
            assert!(want.is_nan() || half_of(value) == u32::from(want.to_bits()), "{value}");
        }
    }

    #[test]
    fn normal_numbers_are_moved_by_a_unit() {
        for x in [1.0, -3.7, 1e-30, 2.0f32.powi(127)] {
            let [down, same, up] = [0, 1, 2].map(|by| moved(x, by));
            let gap = 2.0f32.powi(exponent(x) - 127) * f32::EPSILON;
            assert_eq!((same, up.abs() - x.abs()), (x, gap));
            let below = if x.abs().log2().fract() == 0.0 { gap / 2.0 } else { gap };
            assert_eq!(x.abs() - down.abs(), below, "{x}");
        }
        for (x, by) in [(0.0, 2), (f32::INFINITY, 0), (f32::MAX, 2), (f32::MIN_POSITIVE, 0)] {
            assert_eq!(moved(x, by), x);
        }
        assert!(moved(f32::NAN, 2).is_nan());
    }

    #[test]
    fn divisions_are_those_of_ieee() {
        let values = [0.0, -0.0, 1.0, -3.0, 7e37, 1e-38, 1e-44, f32::MAX, f32::INFINITY, f32::NAN];
        let mut pairs: Vec<_> = values.iter().flat_map(|&n| values.map(|d| (n, d))).collect();
        let mut x = 1u32;
        pairs.extend((0..100_000).map(|_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let d = x;
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (f(x), f(d))
        }));
        for (n, d) in pairs {
            // As the compiler divides.
            let (a, _) = division_scale(b(d), b(d), b(n));
            let (c, rescale) = division_scale(b(n), b(d), b(n));
            let r = 1.0 / f(a);
            let r = (-f(a)).mul_add(r, 1.0).mul_add(r, r);
            let q = f(c) * r;
            let q = (-f(a)).mul_add(q, f(c)).mul_add(r, q);
            let e = (-f(a)).mul_add(q, f(c));
            let got = f(division_end(division_step(b(e), b(r), b(q), rescale), b(d), b(n)));
            let want = n / d;
            assert!(
                got == want || got.is_nan() && want.is_nan(),
                "{n:e} / {d:e} = {got:e}, not {want:e}"
            );
        }
    }
}
