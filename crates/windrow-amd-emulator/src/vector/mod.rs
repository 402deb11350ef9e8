//! Vector instructions: what they have in common, masks, carries, 64 bits, lanes.

mod comparisons;
mod floats;
mod integers;

use crate::Fault;
use crate::float::*;
use crate::inst::{Inst, Run};
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
pub(crate) fn find(name: &str) -> Option<Run> {
    if let Some(rest) = name.strip_prefix("v_cmp_")
        && let Some(run) = comparisons::find(rest)
    {
        return Some(run);
    }
    integers::find(name).or_else(|| floats::find(name)).or_else(|| others(name))
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
