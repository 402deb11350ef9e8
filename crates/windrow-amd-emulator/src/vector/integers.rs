//! Integers and bits of 32 and 16 bits.

use super::{short, word};
use crate::inst::Run;
use crate::wave::Flow;

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
pub(super) fn find(name: &str) -> Option<Run> {
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
