//! Vector instructions on pairs: of f32, of 16 bits, and those that mix f16 with f32.

use crate::Fault;
use crate::float::*;
use crate::inst::{Inst, Operand, Run};
use crate::vector::{write_float, write_long};
use crate::wave::{Flow, Lanes, Wave};

type Done = Result<Flow, Fault>;

/// Register or constant `step` words behind the operand.
fn behind(w: &Wave, i: &Inst, n: usize, step: u16) -> Lanes {
    match i.operands[n] {
        Operand::Vector(register) => w.vectors[(register + step) as usize],
        Operand::Scalar(register) => [w.scalars[(register + step) as usize]; 64],
        _ => [w.word(i, n); 64],
    }
}

/// The low or high one of a source's two f32 numbers.
fn single(w: &Wave, i: &Inst, n: usize, high: bool) -> Lanes {
    let (selected, negated) =
        if high { (i.op_sel_hi, i.negated_high) } else { (i.op_sel, i.negated_low) };
    let mut values = behind(w, i, n, (selected >> (n - 1) & 1).into());
    if negated >> (n - 1) & 1 == 1 {
        values.iter_mut().for_each(|x| *x ^= 1 << 31);
    }
    values
}

#[inline(always)]
fn singles(w: &mut Wave, i: &Inst, g: impl Fn(&Lanes, &Lanes, &Lanes) -> Lanes) -> Done {
    let [low, high] = [false, true].map(|high| {
        let source = |n| if i.count > n { single(w, i, n, high) } else { [0; 64] };
        g(&source(1), &source(2), &source(3))
    });
    write_long(w, i, &low, &high)
}

fn of_each(a: &Lanes, c: &Lanes, g: impl Fn(f32, f32) -> f32) -> Lanes {
    std::array::from_fn(|l| b(g(f(a[l]), f(c[l]))))
}

/// A source of two values of 16 bits.
fn pair(w: &Wave, i: &Inst, n: usize) -> Lanes {
    match i.operands[n] {
        // Constants are in the lower half only.
        Operand::Float(value) => [to_half(value); 64],
        _ => behind(w, i, n, 0),
    }
}

/// The low or high 16 bits of a source, with the sign changed if that is asked for.
fn picked(x: u32, i: &Inst, n: usize, high: bool, sign: u32) -> u32 {
    let (selected, negated) =
        if high { (i.op_sel_hi, i.negated_high) } else { (i.op_sel, i.negated_low) };
    let half = x >> (16 * u32::from(selected >> (n - 1) & 1)) & 0xffff;
    half ^ (sign * u32::from(negated >> (n - 1) & 1))
}

#[inline(always)]
fn pairs(w: &mut Wave, i: &Inst, sign: u32, g: impl Fn(u32, u32, u32) -> u32) -> Done {
    let source = |n| if i.count > n { pair(w, i, n) } else { [0; 64] };
    let (a, c, d) = (source(1), source(2), source(3));
    let mut result = [0; 64];
    for (l, to) in result.iter_mut().enumerate() {
        let [low, high] = [false, true].map(|high| {
            let pick = |x, n| picked(x, i, n, high, sign);
            g(pick(a[l], 1), pick(c[l], 2), pick(d[l], 3)) & 0xffff
        });
        *to = low | high << 16;
    }
    w.write(i, &result)
}

#[inline(always)]
fn halves(w: &mut Wave, i: &Inst, g: impl Fn(f64, f64, f64) -> f64) -> Done {
    let number = |x| f64::from(from_half(x));
    pairs(w, i, 0x8000, |a, c, d| {
        let value = g(number(a), number(c), number(d));
        to_half(if i.clamp { larger(0.0, smaller(value as f32, 1.0)).into() } else { value })
    })
}

/// f32, or the half of a word that is f16.
fn mixed(w: &Wave, i: &Inst, n: usize) -> Lanes {
    let bit = |bits: u8| bits >> (n - 1) & 1 == 1;
    let (is_half, upper) = (bit(i.op_sel_hi), bit(i.op_sel));
    let mut values = if is_half { pair(w, i, n) } else { behind(w, i, n, 0) };
    for x in &mut values {
        if is_half {
            *x = b(from_half(*x >> (16 * u32::from(upper))));
        }
        if i.absolute >> n & 1 == 1 {
            *x &= !(1 << 31);
        }
        if i.negated >> n & 1 == 1 {
            *x ^= 1 << 31;
        }
    }
    values
}

fn mix(w: &Wave, i: &Inst) -> Lanes {
    fused(&mixed(w, i, 1), &mixed(w, i, 2), &mixed(w, i, 3))
}

fn write_mixed(w: &mut Wave, i: &Inst, shift: u32) -> Done {
    let (sums, old) = (mix(w, i), w.vectors[i.vector(0)?]);
    let kept = !(0xffff << shift);
    let clamped = |x| if i.clamp { larger(0.0, smaller(x, 1.0)) } else { x };
    let result = std::array::from_fn(|l| old[l] & kept | half_of(clamped(f(sums[l]))) << shift);
    w.set_vector(i.vector(0)?, w.exec(), &result);
    Ok(Flow::Next)
}

pub(crate) fn find(name: &str) -> Option<Run> {
    let run: Run = match name {
        "v_pk_fma_f32" => |w, i, _| singles(w, i, fused),
        "v_pk_mul_f32" => |w, i, _| singles(w, i, |a, c, _| of_each(a, c, |a, c| a * c)),
        "v_pk_add_f32" => |w, i, _| singles(w, i, |a, c, _| of_each(a, c, |a, c| a + c)),
        "v_pk_mov_b32" => |w, i, _| {
            let low = behind(w, i, 1, (i.op_sel & 1).into());
            let high = behind(w, i, 2, (i.op_sel >> 1 & 1).into());
            write_long(w, i, &low, &high)
        },
        "v_pk_fma_f16" => |w, i, _| halves(w, i, |a, c, d| a * c + d),
        "v_pk_mul_f16" => |w, i, _| halves(w, i, |a, c, _| a * c),
        "v_pk_add_f16" => |w, i, _| halves(w, i, |a, c, _| a + c),
        "v_pk_max_f16" => |w, i, _| halves(w, i, |a, c, _| larger(a as f32, c as f32).into()),
        "v_pk_min_f16" => |w, i, _| halves(w, i, |a, c, _| smaller(a as f32, c as f32).into()),
        "v_pk_add_u16" | "v_pk_add_i16" => |w, i, _| pairs(w, i, 0, |a, c, _| a.wrapping_add(c)),
        "v_pk_sub_u16" | "v_pk_sub_i16" => |w, i, _| pairs(w, i, 0, |a, c, _| a.wrapping_sub(c)),
        "v_pk_mul_lo_u16" => |w, i, _| pairs(w, i, 0, |a, c, _| a.wrapping_mul(c)),
        "v_pk_mad_u16" => |w, i, _| pairs(w, i, 0, |a, c, d| a.wrapping_mul(c).wrapping_add(d)),
        "v_pk_lshlrev_b16" => |w, i, _| pairs(w, i, 0, |a, c, _| c << (a & 15)),
        "v_pk_lshrrev_b16" => |w, i, _| pairs(w, i, 0, |a, c, _| c >> (a & 15)),
        "v_pk_ashrrev_i16" => |w, i, _| pairs(w, i, 0, |a, c, _| (c as i16 >> (a & 15)) as u32),
        "v_pk_max_u16" => |w, i, _| pairs(w, i, 0, |a, c, _| a.max(c)),
        "v_pk_min_u16" => |w, i, _| pairs(w, i, 0, |a, c, _| a.min(c)),
        "v_pk_max_i16" => |w, i, _| pairs(w, i, 0, |a, c, _| (a as i16).max(c as i16) as u32),
        "v_pk_min_i16" => |w, i, _| pairs(w, i, 0, |a, c, _| (a as i16).min(c as i16) as u32),
        "v_fma_mix_f32" => |w, i, _| {
            let sums = mix(w, i);
            write_float(w, i, sums)
        },
        "v_fma_mixlo_f16" => |w, i, _| write_mixed(w, i, 0),
        "v_fma_mixhi_f16" => |w, i, _| write_mixed(w, i, 16),
        _ => return None,
    };
    Some(run)
}
