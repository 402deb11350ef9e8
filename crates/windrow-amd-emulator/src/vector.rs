//! Vector instructions: arithmetic of 32 and 16 bits, comparisons, carries, lanes.

use crate::Fault;
use crate::float::*;
use crate::inst::{Inst, Run, VCC};
use crate::wave::{Flow, Kind, Lanes, Wave};

type Done = Result<Flow, Fault>;

/// Three sources with their modifiers; 0 for those that an instruction has not.
#[inline(always)]
fn with_sources(
    wave: &mut Wave,
    inst: &Inst,
    first: usize,
    kind: Kind,
    f: impl FnOnce(&Lanes, &Lanes, &Lanes) -> Lanes,
) -> Lanes {
    let (mut x, mut y, mut z) = ([0; 64], [0; 64], [0; 64]);
    let a = wave.source(inst, first, kind, &mut x);
    let c = if inst.count > first + 1 { wave.source(inst, first + 1, kind, &mut y) } else { &y };
    let d = if inst.count > first + 2 { wave.source(inst, first + 2, kind, &mut z) } else { &z };
    f(a, c, d)
}

#[inline(always)]
fn each(wave: &mut Wave, inst: &Inst, kind: Kind, f: impl Fn(u32, u32, u32) -> u32) -> Lanes {
    with_sources(wave, inst, 1, kind, |a, c, d| {
        let mut result = [0; 64];
        for lane in 0..64 {
            result[lane] = f(a[lane], c[lane], d[lane]);
        }
        result
    })
}

/// Integers and bits.
#[inline(always)]
fn word(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32, u32) -> u32) -> Done {
    let result = each(wave, inst, Kind::F32, f);
    wave.write(inst, &result)
}

/// A result of f32, with its modifiers.
#[inline(always)]
fn float(wave: &mut Wave, inst: &Inst, g: impl Fn(f32, f32, f32) -> f32) -> Done {
    let result = each(wave, inst, Kind::F32, |a, c, d| b(g(f(a), f(c), f(d))));
    write_float(wave, inst, result)
}

#[inline(always)]
pub(crate) fn write_float(wave: &mut Wave, inst: &Inst, mut result: Lanes) -> Done {
    if inst.clamp || inst.scale != 1.0 {
        for x in &mut result {
            let scaled = f(*x) * inst.scale;
            *x = b(if inst.clamp { larger(0.0, smaller(scaled, 1.0)) } else { scaled });
        }
    }
    wave.write(inst, &result)
}

/// Sources and result of f16; `g` computes in f64, where products are exact.
#[inline(always)]
fn half(wave: &mut Wave, inst: &Inst, g: impl Fn(f64, f64, f64) -> f64) -> Done {
    let number = |x| f64::from(from_half(x));
    let mut result =
        each(wave, inst, Kind::F16, |a, c, d| to_half(g(number(a), number(c), number(d))));
    if inst.clamp {
        for x in &mut result {
            *x = half_of(larger(0.0, smaller(from_half(*x), 1.0)));
        }
    }
    wave.write_half(inst, &result)
}

/// Integers of 16 bits.
#[inline(always)]
fn short(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32, u32) -> u32) -> Done {
    let result = each(wave, inst, Kind::F16, |a, c, d| f(a & 0xffff, c & 0xffff, d & 0xffff));
    wave.write_half(inst, &result)
}

/// Sources and result of 64 bits.
fn long(wave: &mut Wave, inst: &Inst, f: impl Fn(u64, u64, u64) -> u64) -> Done {
    let source = |n| if inst.count > n { wave.longs(inst, n) } else { [0; 64] };
    let (x, y, z) = (source(1), source(2), source(3));
    let mut result = [0; 64];
    for lane in 0..64 {
        result[lane] = f(x[lane], y[lane], z[lane]);
    }
    write_longs(wave, inst, &result)
}

fn write_longs(wave: &mut Wave, inst: &Inst, values: &[u64; 64]) -> Done {
    let (mut low, mut high) = ([0; 64], [0; 64]);
    for lane in 0..64 {
        (low[lane], high[lane]) = (values[lane] as u32, (values[lane] >> 32) as u32);
    }
    write_long(wave, inst, &low, &high)
}

pub(crate) fn write_long(wave: &mut Wave, inst: &Inst, low: &Lanes, high: &Lanes) -> Done {
    let (at, mask) = (inst.vector(0)?, wave.exec());
    wave.set_vector(at, mask, low);
    wave.set_vector(at + 1, mask, high);
    Ok(Flow::Next)
}

/// A shift of 64 bits: by the first source, of the second.
fn shift(wave: &mut Wave, inst: &Inst, f: impl Fn(u64, u32) -> u64) -> Done {
    let mut buffer = [0; 64];
    let counts = wave.source(inst, 1, Kind::F32, &mut buffer);
    let mut result = wave.longs(inst, 2);
    for (x, count) in result.iter_mut().zip(counts) {
        *x = f(*x, count & 63);
    }
    write_longs(wave, inst, &result)
}

/// A sum or difference that carries: operand 1 is the mask of carries out, operand 4 of those in.
#[inline(always)]
fn carried(wave: &mut Wave, inst: &Inst, f: impl Fn(i64, i64, i64) -> i64) -> Done {
    let carries = if inst.count > 4 { wave.mask_of(inst, 4)? } else { 0 };
    let mut out = 0;
    let result = with_sources(wave, inst, 2, Kind::F32, |a, c, _| {
        let mut result = [0; 64];
        for lane in 0..64 {
            let carry = (carries >> lane & 1) as i64;
            let sum = f(a[lane].into(), c[lane].into(), carry);
            out |= u64::from(sum >> 32 != 0) << lane;
            result[lane] = sum as u32;
        }
        result
    });
    let exec = wave.exec();
    wave.write(inst, &result)?;
    wave.set_mask(inst.scalar(1)?, out & exec);
    Ok(Flow::Next)
}

/// A product of 32 bits with a sum of 64.
#[inline(always)]
fn product_and_sum(wave: &mut Wave, inst: &Inst, f: impl Fn(u32, u32) -> u64) -> Done {
    let (mut x, mut y) = ([0; 64], [0; 64]);
    let (a, c) = (wave.source(inst, 2, Kind::F32, &mut x), wave.source(inst, 3, Kind::F32, &mut y));
    let (added, mut result, mut out) = (wave.longs(inst, 4), [0; 64], 0);
    for lane in 0..64 {
        let (sum, carry) = f(a[lane], c[lane]).overflowing_add(added[lane]);
        result[lane] = sum;
        out |= u64::from(carry) << lane;
    }
    let exec = wave.exec();
    write_longs(wave, inst, &result)?;
    wave.set_mask(inst.scalar(1)?, out & exec);
    Ok(Flow::Next)
}

/// Writes the lanes for which it holds into a mask; `v_cmpx` into that of the lanes that work.
fn write_mask(wave: &mut Wave, inst: &Inst, holds: u64) -> Done {
    let result = holds & wave.exec();
    match inst.operands[0] {
        crate::inst::Operand::Scalar(register) => wave.set_mask(register, result),
        _ => return Err(inst.fault("a comparison without a mask")),
    }
    Ok(Flow::Next)
}

#[inline(always)]
fn compared(wave: &mut Wave, inst: &Inst, kind: Kind, f: impl Fn(u32, u32) -> bool) -> Done {
    // The comparisons of newer chips that write EXEC name it first, or not at all.
    let first = usize::from(inst.count > 2);
    if first == 0 {
        return Err(inst.fault("a comparison without a mask"));
    }
    let mut holds = 0;
    with_sources(wave, inst, first, kind, |a, c, _| {
        for lane in 0..64 {
            holds |= u64::from(f(a[lane], c[lane])) << lane;
        }
        [0; 64]
    });
    write_mask(wave, inst, holds)
}

fn compared_long(wave: &mut Wave, inst: &Inst, f: impl Fn(u64, u64) -> bool) -> Done {
    let (x, y) = (wave.longs(inst, 1), wave.longs(inst, 2));
    let holds = |lane: usize| f(x[lane], y[lane]);
    let holds = (0..64).fold(0, |mask, lane| mask | u64::from(holds(lane)) << lane);
    write_mask(wave, inst, holds)
}

fn low_24(x: u32) -> u32 {
    x & 0xff_ffff
}

fn signed_24(x: u32) -> u32 {
    ((x << 8) as i32 >> 8) as u32
}

fn field(x: u32, at: u32, bits: u32) -> u32 {
    (x >> (at & 31)) & (1u32 << (bits & 31)).wrapping_sub(1)
}

fn signed_field(x: u32, at: u32, bits: u32) -> u32 {
    match bits & 31 {
        0 => 0,
        n => (((x >> (at & 31)) << (32 - n)) as i32 >> (32 - n)) as u32,
    }
}

/// `v_perm_b32`: four bytes out of eight, or constants.
fn permuted(a: u32, c: u32, selectors: u32) -> u32 {
    let all = u64::from(a) << 32 | u64::from(c);
    let byte = |selector: u32| match selector {
        0..=7 => (all >> (8 * selector)) as u32 & 0xff,
        8..=11 => ((all >> (16 * (selector - 8) + 15)) as u32 & 1) * 0xff,
        12 => 0,
        _ => 0xff,
    };
    (0..4).fold(0, |bytes, n| bytes | byte(selectors >> (8 * n) & 0xff) << (8 * n))
}

fn median<T: Ord>(a: T, b: T, c: T) -> T {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    low.max(c.min(high))
}

macro_rules! compare {
    ($name:expr, $of:expr, $read:expr) => {
        match $name {
            "lt" => Some((|w, i, _| $of(w, i, |a, c| $read(a) < $read(c))) as Run),
            "le" => Some((|w, i, _| $of(w, i, |a, c| $read(a) <= $read(c))) as Run),
            "gt" => Some((|w, i, _| $of(w, i, |a, c| $read(a) > $read(c))) as Run),
            "ge" => Some((|w, i, _| $of(w, i, |a, c| $read(a) >= $read(c))) as Run),
            "eq" => Some((|w, i, _| $of(w, i, |a, c| $read(a) == $read(c))) as Run),
            "ne" | "neq" => Some((|w, i, _| $of(w, i, |a, c| $read(a) != $read(c))) as Run),
            "nlt" => Some((|w, i, _| $of(w, i, |a, c| !($read(a) < $read(c)))) as Run),
            "nle" => Some((|w, i, _| $of(w, i, |a, c| !($read(a) <= $read(c)))) as Run),
            "ngt" => Some((|w, i, _| $of(w, i, |a, c| !($read(a) > $read(c)))) as Run),
            "nge" => Some((|w, i, _| $of(w, i, |a, c| !($read(a) >= $read(c)))) as Run),
            "lg" => Some(
                (|w, i, _| $of(w, i, |a, c| $read(a) < $read(c) || $read(a) > $read(c))) as Run,
            ),
            "nlg" => Some(
                (|w, i, _| $of(w, i, |a, c| !($read(a) < $read(c) || $read(a) > $read(c)))) as Run,
            ),
            "o" => {
                Some((|w, i, _| $of(w, i, |a, c| $read(a).partial_cmp(&$read(c)).is_some())) as Run)
            }
            "u" => {
                Some((|w, i, _| $of(w, i, |a, c| $read(a).partial_cmp(&$read(c)).is_none())) as Run)
            }
            _ => None,
        }
    };
}

/// A comparison by its name without `v_cmp_`: `lt_f32`.
#[allow(clippy::neg_cmp_op_on_partial_ord, reason = "as the instructions are named")]
fn comparison(name: &str) -> Option<Run> {
    #[inline(always)]
    fn words(w: &mut Wave, i: &Inst, f: impl Fn(u32, u32) -> bool) -> Done {
        compared(w, i, Kind::F32, f)
    }
    #[inline(always)]
    fn halves(w: &mut Wave, i: &Inst, f: impl Fn(u32, u32) -> bool) -> Done {
        compared(w, i, Kind::F16, f)
    }
    let (relation, kind) = name.split_once('_')?;
    match kind {
        "f32" => compare!(relation, words, f),
        "f16" => compare!(relation, halves, from_half),
        "u32" => compare!(relation, words, |x: u32| x),
        "i32" => compare!(relation, words, |x: u32| x as i32),
        "u16" => compare!(relation, halves, |x: u32| x as u16),
        "i16" => compare!(relation, halves, |x: u32| x as i16),
        "u64" => compare!(relation, compared_long, |x: u64| x),
        "i64" => compare!(relation, compared_long, |x: u64| x as i64),
        _ => None,
    }
}

pub(crate) fn find(name: &str) -> Option<Run> {
    if let Some(rest) = name.strip_prefix("v_cmp_")
        && let Some(run) = comparison(rest)
    {
        return Some(run);
    }
    integers(name).or_else(|| floats(name)).or_else(|| others(name))
}

fn integers(name: &str) -> Option<Run> {
    let run: Run = match name {
        "v_nop" => |_, _, _| Ok(Flow::Next),
        "v_mov_b32" | "v_accvgpr_read_b32" | "v_accvgpr_write_b32" | "v_accvgpr_mov_b32" => {
            |w, i, _| word(w, i, |a, _, _| a)
        }
        "v_not_b32" => |w, i, _| word(w, i, |a, _, _| !a),
        "v_bfrev_b32" => |w, i, _| word(w, i, |a, _, _| a.reverse_bits()),
        "v_ffbh_u32" | "v_clz_i32_u32" => {
            |w, i, _| word(w, i, |a, _, _| if a == 0 { !0 } else { a.leading_zeros() })
        }
        "v_ffbl_b32" | "v_ctz_i32_b32" => {
            |w, i, _| word(w, i, |a, _, _| if a == 0 { !0 } else { a.trailing_zeros() })
        }
        "v_bcnt_u32_b32" => |w, i, _| word(w, i, |a, c, _| a.count_ones().wrapping_add(c)),
        "v_and_b32" => |w, i, _| word(w, i, |a, c, _| a & c),
        "v_or_b32" => |w, i, _| word(w, i, |a, c, _| a | c),
        "v_xor_b32" => |w, i, _| word(w, i, |a, c, _| a ^ c),
        "v_xnor_b32" => |w, i, _| word(w, i, |a, c, _| !(a ^ c)),
        "v_lshlrev_b32" => |w, i, _| word(w, i, |a, c, _| c << (a & 31)),
        "v_lshrrev_b32" => |w, i, _| word(w, i, |a, c, _| c >> (a & 31)),
        "v_ashrrev_i32" => |w, i, _| word(w, i, |a, c, _| (c as i32 >> (a & 31)) as u32),
        "v_add_u32" | "v_add_nc_u32" => |w, i, _| word(w, i, |a, c, _| a.wrapping_add(c)),
        "v_sub_u32" | "v_sub_nc_u32" => |w, i, _| word(w, i, |a, c, _| a.wrapping_sub(c)),
        "v_subrev_u32" | "v_subrev_nc_u32" => |w, i, _| word(w, i, |a, c, _| c.wrapping_sub(a)),
        "v_add_i32" | "v_add_nc_i32" => |w, i, _| word(w, i, |a, c, _| a.wrapping_add(c)),
        "v_sub_i32" | "v_sub_nc_i32" => |w, i, _| word(w, i, |a, c, _| a.wrapping_sub(c)),
        "v_mul_lo_u32" => |w, i, _| word(w, i, |a, c, _| a.wrapping_mul(c)),
        "v_mul_hi_u32" => {
            |w, i, _| word(w, i, |a, c, _| ((u64::from(a) * u64::from(c)) >> 32) as u32)
        }
        "v_mul_hi_i32" => |w, i, _| {
            word(w, i, |a, c, _| ((i64::from(a as i32) * i64::from(c as i32)) >> 32) as u32)
        },
        "v_mul_u32_u24" => |w, i, _| word(w, i, |a, c, _| low_24(a).wrapping_mul(low_24(c))),
        "v_mul_i32_i24" => |w, i, _| word(w, i, |a, c, _| signed_24(a).wrapping_mul(signed_24(c))),
        "v_mad_u32_u24" => {
            |w, i, _| word(w, i, |a, c, d| low_24(a).wrapping_mul(low_24(c)).wrapping_add(d))
        }
        "v_mad_i32_i24" => {
            |w, i, _| word(w, i, |a, c, d| signed_24(a).wrapping_mul(signed_24(c)).wrapping_add(d))
        }
        "v_mad_u32_u16" => {
            |w, i, _| word(w, i, |a, c, d| ((a & 0xffff) * (c & 0xffff)).wrapping_add(d))
        }
        "v_add3_u32" => |w, i, _| word(w, i, |a, c, d| a.wrapping_add(c).wrapping_add(d)),
        "v_lshl_add_u32" => |w, i, _| word(w, i, |a, c, d| (a << (c & 31)).wrapping_add(d)),
        "v_add_lshl_u32" => |w, i, _| word(w, i, |a, c, d| a.wrapping_add(c) << (d & 31)),
        "v_lshl_or_b32" => |w, i, _| word(w, i, |a, c, d| a << (c & 31) | d),
        "v_and_or_b32" => |w, i, _| word(w, i, |a, c, d| a & c | d),
        "v_or3_b32" => |w, i, _| word(w, i, |a, c, d| a | c | d),
        "v_xor3_b32" => |w, i, _| word(w, i, |a, c, d| a ^ c ^ d),
        "v_xad_u32" => |w, i, _| word(w, i, |a, c, d| (a ^ c).wrapping_add(d)),
        "v_bfe_u32" => |w, i, _| word(w, i, field),
        "v_bfe_i32" => |w, i, _| word(w, i, signed_field),
        "v_bfi_b32" => |w, i, _| word(w, i, |a, c, d| a & c | !a & d),
        "v_bfm_b32" => {
            |w, i, _| word(w, i, |a, c, _| (1u32 << (a & 31)).wrapping_sub(1) << (c & 31))
        }
        "v_perm_b32" => |w, i, _| word(w, i, permuted),
        "v_alignbit_b32" => {
            |w, i, _| word(w, i, |a, c, d| ((u64::from(a) << 32 | u64::from(c)) >> (d & 31)) as u32)
        }
        "v_alignbyte_b32" => |w, i, _| {
            word(w, i, |a, c, d| ((u64::from(a) << 32 | u64::from(c)) >> (8 * (d & 3))) as u32)
        },
        "v_min_u32" => |w, i, _| word(w, i, |a, c, _| a.min(c)),
        "v_max_u32" => |w, i, _| word(w, i, |a, c, _| a.max(c)),
        "v_min_i32" => |w, i, _| word(w, i, |a, c, _| (a as i32).min(c as i32) as u32),
        "v_max_i32" => |w, i, _| word(w, i, |a, c, _| (a as i32).max(c as i32) as u32),
        "v_min3_u32" => |w, i, _| word(w, i, |a, c, d| a.min(c).min(d)),
        "v_max3_u32" => |w, i, _| word(w, i, |a, c, d| a.max(c).max(d)),
        "v_min3_i32" => {
            |w, i, _| word(w, i, |a, c, d| (a as i32).min(c as i32).min(d as i32) as u32)
        }
        "v_max3_i32" => {
            |w, i, _| word(w, i, |a, c, d| (a as i32).max(c as i32).max(d as i32) as u32)
        }
        "v_med3_i32" => |w, i, _| word(w, i, |a, c, d| median(a as i32, c as i32, d as i32) as u32),
        "v_med3_u32" => |w, i, _| word(w, i, median),
        "v_add_u16" | "v_add_nc_u16" => |w, i, _| short(w, i, |a, c, _| a.wrapping_add(c)),
        "v_sub_u16" | "v_sub_nc_u16" => |w, i, _| short(w, i, |a, c, _| a.wrapping_sub(c)),
        "v_subrev_u16" => |w, i, _| short(w, i, |a, c, _| c.wrapping_sub(a)),
        "v_mul_lo_u16" => |w, i, _| short(w, i, |a, c, _| a.wrapping_mul(c)),
        "v_mad_legacy_u16" | "v_mad_u16" => {
            |w, i, _| short(w, i, |a, c, d| a.wrapping_mul(c).wrapping_add(d))
        }
        "v_lshlrev_b16" => |w, i, _| short(w, i, |a, c, _| c << (a & 15)),
        "v_lshrrev_b16" => |w, i, _| short(w, i, |a, c, _| c >> (a & 15)),
        "v_ashrrev_i16" => |w, i, _| short(w, i, |a, c, _| (c as i16 >> (a & 15)) as u32),
        "v_min_u16" => |w, i, _| short(w, i, |a, c, _| a.min(c)),
        "v_max_u16" => |w, i, _| short(w, i, |a, c, _| a.max(c)),
        "v_min_i16" => |w, i, _| short(w, i, |a, c, _| (a as i16).min(c as i16) as u32),
        "v_max_i16" => |w, i, _| short(w, i, |a, c, _| (a as i16).max(c as i16) as u32),
        "v_and_b16" => |w, i, _| short(w, i, |a, c, _| a & c),
        "v_or_b16" => |w, i, _| short(w, i, |a, c, _| a | c),
        "v_xor_b16" => |w, i, _| short(w, i, |a, c, _| a ^ c),
        "v_not_b16" => |w, i, _| short(w, i, |a, _, _| !a),
        _ => return None,
    };
    Some(run)
}

fn floats(name: &str) -> Option<Run> {
    let run: Run = match name {
        "v_cvt_f32_u32" => |w, i, _| word(w, i, |a, _, _| b(a as f32)),
        "v_cvt_f32_i32" => |w, i, _| word(w, i, |a, _, _| b(a as i32 as f32)),
        "v_cvt_f32_ubyte0" => |w, i, _| word(w, i, |a, _, _| b((a & 0xff) as f32)),
        "v_cvt_u32_f32" => |w, i, _| word(w, i, |a, _, _| to_unsigned(f(a))),
        "v_cvt_i32_f32" => |w, i, _| word(w, i, |a, _, _| to_signed(f(a))),
        "v_cvt_f16_f32" => |w, i, _| {
            let result = each(w, i, Kind::F32, |a, _, _| half_of(f(a)));
            w.write_half(i, &result)
        },
        "v_cvt_f32_f16" => |w, i, _| {
            let result = each(w, i, Kind::F16, |a, _, _| b(from_half(a)));
            write_float(w, i, result)
        },
        "v_add_f32" => |w, i, _| float(w, i, |a, c, _| a + c),
        "v_sub_f32" => |w, i, _| float(w, i, |a, c, _| a - c),
        "v_subrev_f32" => |w, i, _| float(w, i, |a, c, _| c - a),
        "v_mul_f32" => |w, i, _| float(w, i, |a, c, _| a * c),
        "v_mul_legacy_f32" => {
            |w, i, _| float(w, i, |a, c, _| if a == 0.0 || c == 0.0 { 0.0 } else { a * c })
        }
        "v_min_f32" | "v_min_num_f32" => |w, i, _| float(w, i, |a, c, _| smaller(a, c)),
        "v_max_f32" | "v_max_num_f32" => |w, i, _| float(w, i, |a, c, _| larger(a, c)),
        "v_min3_f32" => |w, i, _| float(w, i, |a, c, d| smaller(smaller(a, c), d)),
        "v_max3_f32" => |w, i, _| float(w, i, |a, c, d| larger(larger(a, c), d)),
        "v_med3_f32" => |w, i, _| {
            float(w, i, |a, c, d| {
                if a.is_nan() || c.is_nan() || d.is_nan() {
                    smaller(smaller(a, c), d)
                } else {
                    larger(smaller(a, c), smaller(larger(a, c), d))
                }
            })
        },
        "v_fma_f32" | "v_fmamk_f32" | "v_fmaak_f32" | "v_madmk_f32" | "v_madak_f32" => |w, i, _| {
            let result = with_sources(w, i, 1, Kind::F32, fused);
            write_float(w, i, result)
        },
        "v_fmac_f32" => |w, i, _| {
            let sum = w.vectors[i.vector(0)?];
            let result = with_sources(w, i, 1, Kind::F32, |a, c, _| fused(a, c, &sum));
            write_float(w, i, result)
        },
        "v_mac_f32" => |w, i, _| {
            let sum = w.vectors[i.vector(0)?];
            let result = with_sources(w, i, 1, Kind::F32, |a, c, _| {
                std::array::from_fn(|l| b(f(a[l]) * f(c[l]) + f(sum[l])))
            });
            write_float(w, i, result)
        },
        "v_rcp_f32" | "v_rcp_iflag_f32" => {
            |w, i, _| float(w, i, |a, _, _| nudged(flushed(1.0 / flushed(a))))
        }
        "v_exp_f32" => |w, i, _| float(w, i, |a, _, _| nudged(flushed(f64::from(a).exp2() as f32))),
        "v_log_f32" => |w, i, _| float(w, i, |a, _, _| nudged(f64::from(flushed(a)).log2() as f32)),
        "v_sqrt_f32" => |w, i, _| float(w, i, |a, _, _| nudged(a.sqrt())),
        "v_rsq_f32" => {
            |w, i, _| float(w, i, |a, _, _| nudged((1.0 / f64::from(flushed(a)).sqrt()) as f32))
        }
        "v_trunc_f32" => |w, i, _| float(w, i, |a, _, _| a.trunc()),
        "v_rndne_f32" => |w, i, _| float(w, i, |a, _, _| a.round_ties_even()),
        "v_floor_f32" => |w, i, _| float(w, i, |a, _, _| a.floor()),
        "v_ceil_f32" => |w, i, _| float(w, i, |a, _, _| a.ceil()),
        "v_fract_f32" => |w, i, _| float(w, i, |a, _, _| a - a.floor()),
        "v_ldexp_f32" => |w, i, _| {
            let result = each(w, i, Kind::F32, |a, c, _| b(scaled(f(a), c as i32)));
            write_float(w, i, result)
        },
        "v_frexp_mant_f32" => |w, i, _| {
            float(w, i, |a, _, _| if a == 0.0 || !a.is_finite() { a } else { libm_frexp(a).0 })
        },
        "v_frexp_exp_i32_f32" => |w, i, _| {
            word(w, i, |a, _, _| {
                let a = f(a);
                if a == 0.0 || !a.is_finite() { 0 } else { libm_frexp(a).1 as u32 }
            })
        },
        "v_add_f16" => |w, i, _| half(w, i, |a, c, _| a + c),
        "v_sub_f16" => |w, i, _| half(w, i, |a, c, _| a - c),
        "v_subrev_f16" => |w, i, _| half(w, i, |a, c, _| c - a),
        "v_mul_f16" => |w, i, _| half(w, i, |a, c, _| a * c),
        "v_fma_f16" => |w, i, _| half(w, i, |a, c, d| a * c + d),
        "v_fmac_f16" => |w, i, _| {
            let sum = w.vectors[i.vector(0)?];
            let number = |x| f64::from(from_half(x));
            let result = with_sources(w, i, 1, Kind::F16, |a, c, _| {
                std::array::from_fn(|l| to_half(number(a[l]) * number(c[l]) + number(sum[l])))
            });
            w.write_half(i, &result)
        },
        "v_max_f16" => |w, i, _| half(w, i, |a, c, _| f64::from(larger(a as f32, c as f32))),
        "v_min_f16" => |w, i, _| half(w, i, |a, c, _| f64::from(smaller(a as f32, c as f32))),
        "v_pack_b32_f16" => |w, i, _| {
            let result = each(w, i, Kind::F16, |a, c, _| a & 0xffff | c << 16);
            w.write(i, &result)
        },
        "v_cvt_pkrtz_f16_f32" | "v_cvt_pk_rtz_f16_f32" => {
            |w, i, _| word(w, i, |a, c, _| half_towards_zero(f(a)) | half_towards_zero(f(c)) << 16)
        }
        "v_div_fixup_f32" => |w, i, _| word(w, i, division_end),
        "v_div_fmas_f32" => |w, i, _| {
            let rescale = w.mask(VCC);
            let result = with_sources(w, i, 1, Kind::F32, |a, c, d| {
                std::array::from_fn(|l| division_step(a[l], c[l], d[l], rescale >> l & 1 == 1))
            });
            w.write(i, &result)
        },
        _ => return None,
    };
    Some(run)
}

/// Mantissa from 1/2 to 1, and exponent.
fn libm_frexp(x: f32) -> (f32, i32) {
    let x = f64::from(x);
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1022;
    ((x * 2f64.powi(-exponent)) as f32, exponent)
}

fn half_towards_zero(x: f32) -> u32 {
    let rounded = half_of(x);
    let away = from_half(rounded).abs() > x.abs();
    if away && x.is_finite() { rounded - 1 } else { rounded }
}

fn others(name: &str) -> Option<Run> {
    let run: Run = match name {
        "v_cndmask_b32" => |w, i, _| {
            let chosen = w.mask_of(i, 3)?;
            let result = with_sources(w, i, 1, Kind::F32, |a, c, _| {
                std::array::from_fn(|l| if chosen >> l & 1 == 1 { c[l] } else { a[l] })
            });
            w.write(i, &result)
        },
        "v_cmp_class_f32" => |w, i, _| compared(w, i, Kind::F32, |a, c| class(f(a)) & c != 0),
        "v_mbcnt_lo_u32_b32" => |w, i, _| {
            let result = with_sources(w, i, 1, Kind::F32, |a, c, _| {
                let below = |l: usize| ((1u64 << l.min(32)) - 1) as u32;
                std::array::from_fn(|l| (a[l] & below(l)).count_ones().wrapping_add(c[l]))
            });
            w.write(i, &result)
        },
        "v_mbcnt_hi_u32_b32" => |w, i, _| {
            let result = with_sources(w, i, 1, Kind::F32, |a, c, _| {
                let below = |l: usize| ((1u64 << l.saturating_sub(32)) - 1) as u32;
                std::array::from_fn(|l| (a[l] & below(l)).count_ones().wrapping_add(c[l]))
            });
            w.write(i, &result)
        },
        "v_mov_b64" => |w, i, _| long(w, i, |a, _, _| a),
        "v_lshl_add_u64" => |w, i, _| {
            // The shift is of 32 bits: the upper half of what stands for it is not looked at.
            let mut buffer = [0; 64];
            let counts = w.source(i, 2, Kind::F32, &mut buffer);
            let (mut result, added) = (w.longs(i, 1), w.longs(i, 3));
            for lane in 0..64 {
                result[lane] = (result[lane] << (counts[lane] & 7)).wrapping_add(added[lane]);
            }
            write_longs(w, i, &result)
        },
        "v_lshlrev_b64" => |w, i, _| shift(w, i, |x, n| x << n),
        "v_lshrrev_b64" => |w, i, _| shift(w, i, |x, n| x >> n),
        "v_ashrrev_i64" => |w, i, _| shift(w, i, |x, n| (x as i64 >> n) as u64),
        "v_mad_u64_u32" | "v_mad_co_u64_u32" => {
            |w, i, _| product_and_sum(w, i, |a, c| u64::from(a) * u64::from(c))
        }
        "v_mad_i64_i32" | "v_mad_co_i64_i32" => |w, i, _| {
            product_and_sum(w, i, |a, c| (i64::from(a as i32) * i64::from(c as i32)) as u64)
        },
        "v_add_co_u32" | "v_addc_co_u32" | "v_add_co_ci_u32" => {
            |w, i, _| carried(w, i, |a, c, carry| a + c + carry)
        }
        "v_sub_co_u32" | "v_subb_co_u32" | "v_sub_co_ci_u32" => {
            |w, i, _| carried(w, i, |a, c, carry| a - c - carry)
        }
        "v_subrev_co_u32" | "v_subbrev_co_u32" | "v_subrev_co_ci_u32" => {
            |w, i, _| carried(w, i, |a, c, carry| c - a - carry)
        }
        "v_div_scale_f32" => |w, i, _| {
            let mut flags = 0;
            let result = with_sources(w, i, 2, Kind::F32, |a, c, d| {
                std::array::from_fn(|l| {
                    let (scaled, flag) = division_scale(a[l], c[l], d[l]);
                    flags |= u64::from(flag) << l;
                    scaled
                })
            });
            let exec = w.exec();
            w.write(i, &result)?;
            w.set_mask(i.scalar(1)?, flags & exec);
            Ok(Flow::Next)
        },
        "v_readfirstlane_b32" => |w, i, _| {
            let exec = w.exec();
            let lane = if exec == 0 { 0 } else { exec.trailing_zeros() as usize };
            let mut buffer = [0; 64];
            let value = w.source(i, 1, Kind::F32, &mut buffer)[lane];
            w.set_scalar(i.scalar(0)?, value);
            Ok(Flow::Next)
        },
        "v_s_rcp_f32" => |w, i, _| {
            let result = nudged(flushed(1.0 / flushed(f(w.word(i, 1)))));
            w.set_scalar(i.scalar(0)?, b(result));
            Ok(Flow::Next)
        },
        "v_readlane_b32" => |w, i, _| {
            let lane = w.word(i, 2) as usize % w.lanes;
            let value = w.vectors[i.vector(1)?][lane];
            w.set_scalar(i.scalar(0)?, value);
            Ok(Flow::Next)
        },
        "v_writelane_b32" => |w, i, _| {
            let (value, lane) = (w.word(i, 1), w.word(i, 2) as usize % w.lanes);
            w.vectors[i.vector(0)?][lane] = value;
            Ok(Flow::Next)
        },
        "v_swap_b32" => |w, i, _| {
            let (a, c, mask) = (i.vector(0)?, i.vector(1)?, w.exec());
            let (x, y) = (w.vectors[a], w.vectors[c]);
            w.set_vector(a, mask, &y);
            w.set_vector(c, mask, &x);
            Ok(Flow::Next)
        },
        _ => return None,
    };
    Some(run)
}
