//! Scalar instructions: one value for all lanes.

use crate::Fault;
use crate::float::{b, f, to_unsigned};
use crate::inst::{EXEC, Inst, NOTHING, Run, VCC, Wait};
use crate::wave::{Flow, Wave};

type Done = Result<Flow, Fault>;

/// A result and, for most, what becomes of the condition.
#[inline(always)]
fn word(w: &mut Wave, i: &Inst, f: impl Fn(u32, u32, bool) -> (u32, Option<bool>)) -> Done {
    let (result, condition) = f(w.word(i, 1), w.word(i, 2), w.condition);
    w.set_scalar(i.scalar(0)?, result);
    w.condition = condition.unwrap_or(w.condition);
    Ok(Flow::Next)
}

#[inline(always)]
fn long(w: &mut Wave, i: &Inst, f: impl Fn(u64, u64, bool) -> (u64, Option<bool>)) -> Done {
    let (result, condition) = f(w.long(i, 1), w.long(i, 2), w.condition);
    w.set_pair(i.scalar(0)?, result);
    w.condition = condition.unwrap_or(w.condition);
    Ok(Flow::Next)
}

/// The condition is whether bits are left.
fn bits(x: u32) -> (u32, Option<bool>) {
    (x, Some(x != 0))
}

fn long_bits(x: u64) -> (u64, Option<bool>) {
    (x, Some(x != 0))
}

/// Changes the lanes that work, and keeps which did.
fn change_lanes(w: &mut Wave, i: &Inst, f: impl Fn(u64, u64) -> u64) -> Done {
    let (chosen, exec) = (w.mask_of(i, 1)?, w.exec());
    let result = f(chosen, exec);
    w.set_mask(i.scalar(0)?, exec);
    w.set_mask(EXEC, result);
    w.condition = result & all(w) != 0;
    Ok(Flow::Next)
}

fn all(w: &Wave) -> u64 {
    if w.lanes == 64 { !0 } else { u64::from(u32::MAX) }
}

fn compare(w: &mut Wave, i: &Inst, f: impl Fn(u32, u32) -> bool) -> Done {
    w.condition = f(w.word(i, 0), w.word(i, 1));
    Ok(Flow::Next)
}

fn compare_long(w: &mut Wave, i: &Inst, f: impl Fn(u64, u64) -> bool) -> Done {
    w.condition = f(w.long(i, 0), w.long(i, 1));
    Ok(Flow::Next)
}

fn jump(i: &Inst, taken: bool) -> Done {
    Ok(if taken { Flow::Jump(i.target) } else { Flow::Next })
}

/// A constant of 16 bits with its sign, operand `n`.
fn small(w: &Wave, i: &Inst, n: usize) -> u32 {
    w.word(i, n) as i16 as u32
}

fn shifted_sum(x: u32, n: u32, y: u32) -> (u32, Option<bool>) {
    let sum = (u64::from(x) << n) + u64::from(y);
    (sum as u32, Some(sum >> 32 != 0))
}

pub(crate) fn find(name: &str) -> Option<Run> {
    words(name).or_else(|| longs(name)).or_else(|| control(name)).or_else(|| comparisons(name))
}

fn words(name: &str) -> Option<Run> {
    let run: Run = match name {
        "s_mov_b32" => |w, i, _| word(w, i, |x, _, _| (x, None)),
        "s_movk_i32" => |w, i, _| word(w, i, |x, _, _| (x as i16 as u32, None)),
        "s_cmov_b32" => |w, i, _| {
            if w.condition {
                w.set_scalar(i.scalar(0)?, w.word(i, 1));
            }
            Ok(Flow::Next)
        },
        "s_cselect_b32" => |w, i, _| word(w, i, |x, y, c| (if c { x } else { y }, None)),
        "s_brev_b32" => |w, i, _| word(w, i, |x, _, _| (x.reverse_bits(), None)),
        "s_not_b32" => |w, i, _| word(w, i, |x, _, _| bits(!x)),
        "s_abs_i32" => |w, i, _| word(w, i, |x, _, _| bits((x as i32).wrapping_abs() as u32)),
        "s_sext_i32_i8" => |w, i, _| word(w, i, |x, _, _| (x as i8 as u32, None)),
        "s_sext_i32_i16" => |w, i, _| word(w, i, |x, _, _| (x as i16 as u32, None)),
        "s_ff1_i32_b32" | "s_ctz_i32_b32" => {
            |w, i, _| word(w, i, |x, _, _| (if x == 0 { !0 } else { x.trailing_zeros() }, None))
        }
        "s_flbit_i32_b32" | "s_clz_i32_u32" => {
            |w, i, _| word(w, i, |x, _, _| (if x == 0 { !0 } else { x.leading_zeros() }, None))
        }
        "s_bcnt1_i32_b32" => |w, i, _| word(w, i, |x, _, _| bits(x.count_ones())),
        "s_bcnt1_i32_b64" => |w, i, _| {
            let count = w.long(i, 1).count_ones();
            w.set_scalar(i.scalar(0)?, count);
            w.condition = count != 0;
            Ok(Flow::Next)
        },
        "s_ff1_i32_b64" | "s_ctz_i32_b64" => |w, i, _| {
            let x = w.long(i, 1);
            w.set_scalar(i.scalar(0)?, if x == 0 { !0 } else { x.trailing_zeros() });
            Ok(Flow::Next)
        },
        "s_flbit_i32_b64" | "s_clz_i32_u64" => |w, i, _| {
            let x = w.long(i, 1);
            w.set_scalar(i.scalar(0)?, if x == 0 { !0 } else { x.leading_zeros() });
            Ok(Flow::Next)
        },
        "s_add_u32" | "s_add_co_u32" => |w, i, _| {
            word(w, i, |x, y, _| {
                let (sum, carry) = x.overflowing_add(y);
                (sum, Some(carry))
            })
        },
        "s_sub_u32" | "s_sub_co_u32" => |w, i, _| {
            word(w, i, |x, y, _| {
                let (difference, carry) = x.overflowing_sub(y);
                (difference, Some(carry))
            })
        },
        "s_addc_u32" | "s_add_co_ci_u32" => |w, i, _| {
            word(w, i, |x, y, c| {
                let sum = u64::from(x) + u64::from(y) + u64::from(c);
                (sum as u32, Some(sum >> 32 != 0))
            })
        },
        "s_subb_u32" | "s_sub_co_ci_u32" => |w, i, _| {
            word(w, i, |x, y, c| {
                let difference = i64::from(x) - i64::from(y) - i64::from(c);
                (difference as u32, Some(difference < 0))
            })
        },
        "s_add_i32" | "s_add_co_i32" => |w, i, _| {
            word(w, i, |x, y, _| {
                let (sum, over) = (x as i32).overflowing_add(y as i32);
                (sum as u32, Some(over))
            })
        },
        "s_sub_i32" | "s_sub_co_i32" => |w, i, _| {
            word(w, i, |x, y, _| {
                let (difference, over) = (x as i32).overflowing_sub(y as i32);
                (difference as u32, Some(over))
            })
        },
        "s_addk_i32" => |w, i, _| {
            let (x, y) = (w.word(i, 0) as i32, small(w, i, 1) as i32);
            let (sum, over) = x.overflowing_add(y);
            w.set_scalar(i.scalar(0)?, sum as u32);
            w.condition = over;
            Ok(Flow::Next)
        },
        "s_mulk_i32" => |w, i, _| {
            let product = w.word(i, 0).wrapping_mul(small(w, i, 1));
            w.set_scalar(i.scalar(0)?, product);
            Ok(Flow::Next)
        },
        "s_mul_i32" => |w, i, _| word(w, i, |x, y, _| (x.wrapping_mul(y), None)),
        "s_mul_hi_u32" => {
            |w, i, _| word(w, i, |x, y, _| (((u64::from(x) * u64::from(y)) >> 32) as u32, None))
        }
        "s_mul_hi_i32" => |w, i, _| {
            word(w, i, |x, y, _| (((i64::from(x as i32) * i64::from(y as i32)) >> 32) as u32, None))
        },
        "s_and_b32" => |w, i, _| word(w, i, |x, y, _| bits(x & y)),
        "s_or_b32" => |w, i, _| word(w, i, |x, y, _| bits(x | y)),
        "s_xor_b32" => |w, i, _| word(w, i, |x, y, _| bits(x ^ y)),
        "s_xnor_b32" => |w, i, _| word(w, i, |x, y, _| bits(!(x ^ y))),
        "s_nand_b32" => |w, i, _| word(w, i, |x, y, _| bits(!(x & y))),
        "s_nor_b32" => |w, i, _| word(w, i, |x, y, _| bits(!(x | y))),
        "s_andn2_b32" | "s_and_not1_b32" => |w, i, _| word(w, i, |x, y, _| bits(x & !y)),
        "s_orn2_b32" | "s_or_not1_b32" => |w, i, _| word(w, i, |x, y, _| bits(x | !y)),
        "s_lshl_b32" => |w, i, _| word(w, i, |x, y, _| bits(x << (y & 31))),
        "s_lshr_b32" => |w, i, _| word(w, i, |x, y, _| bits(x >> (y & 31))),
        "s_ashr_i32" => |w, i, _| word(w, i, |x, y, _| bits((x as i32 >> (y & 31)) as u32)),
        "s_bfe_u32" => |w, i, _| {
            word(w, i, |x, y, _| {
                let width = (y >> 16 & 127).min(32);
                bits((u64::from(x >> (y & 31)) & ((1u64 << width) - 1)) as u32)
            })
        },
        "s_bfe_i32" => |w, i, _| {
            word(w, i, |x, y, _| {
                let (at, width) = (y & 31, (y >> 16 & 127).min(32));
                let field = i64::from(x as i32) >> at;
                bits(if width == 0 { 0 } else { (field << (64 - width) >> (64 - width)) as u32 })
            })
        },
        "s_bfm_b32" => {
            |w, i, _| word(w, i, |x, y, _| ((((1u64 << (x & 31)) - 1) as u32) << (y & 31), None))
        }
        "s_bitset0_b32" => |w, i, _| {
            let value = w.word(i, 0) & !(1 << (w.word(i, 1) & 31));
            w.set_scalar(i.scalar(0)?, value);
            Ok(Flow::Next)
        },
        "s_bitset1_b32" => |w, i, _| {
            let value = w.word(i, 0) | 1 << (w.word(i, 1) & 31);
            w.set_scalar(i.scalar(0)?, value);
            Ok(Flow::Next)
        },
        "s_min_i32" => |w, i, _| {
            word(w, i, |x, y, _| ((x as i32).min(y as i32) as u32, Some(x as i32 <= y as i32)))
        },
        "s_max_i32" => |w, i, _| {
            word(w, i, |x, y, _| ((x as i32).max(y as i32) as u32, Some(x as i32 >= y as i32)))
        },
        "s_min_u32" => |w, i, _| word(w, i, |x, y, _| (x.min(y), Some(x <= y))),
        "s_max_u32" => |w, i, _| word(w, i, |x, y, _| (x.max(y), Some(x >= y))),
        "s_lshl1_add_u32" => |w, i, _| word(w, i, |x, y, _| shifted_sum(x, 1, y)),
        "s_lshl2_add_u32" => |w, i, _| word(w, i, |x, y, _| shifted_sum(x, 2, y)),
        "s_lshl3_add_u32" => |w, i, _| word(w, i, |x, y, _| shifted_sum(x, 3, y)),
        "s_lshl4_add_u32" => |w, i, _| word(w, i, |x, y, _| shifted_sum(x, 4, y)),
        "s_cvt_f32_u32" => |w, i, _| word(w, i, |x, _, _| (b(x as f32), None)),
        "s_cvt_u32_f32" => |w, i, _| word(w, i, |x, _, _| (to_unsigned(f(x)), None)),
        "s_trunc_f32" => |w, i, _| word(w, i, |x, _, _| (b(f(x).trunc()), None)),
        "s_mul_f32" => |w, i, _| word(w, i, |x, y, _| (b(f(x) * f(y)), None)),
        "s_fmamk_f32" => |w, i, _| {
            let added = f(w.word(i, 3));
            word(w, i, |x, y, _| (b(f(x).mul_add(f(y), added)), None))
        },
        "s_pack_ll_b32_b16" => |w, i, _| word(w, i, |x, y, _| (x & 0xffff | y << 16, None)),
        "s_pack_lh_b32_b16" => |w, i, _| word(w, i, |x, y, _| (x & 0xffff | y & 0xffff_0000, None)),
        "s_pack_hh_b32_b16" => |w, i, _| word(w, i, |x, y, _| (x >> 16 | y & 0xffff_0000, None)),
        _ => return None,
    };
    Some(run)
}

fn longs(name: &str) -> Option<Run> {
    let run: Run = match name {
        "s_mov_b64" => |w, i, _| long(w, i, |x, _, _| (x, None)),
        "s_cselect_b64" => |w, i, _| long(w, i, |x, y, c| (if c { x } else { y }, None)),
        "s_add_nc_u64" => |w, i, _| long(w, i, |x, y, _| (x.wrapping_add(y), None)),
        "s_sub_nc_u64" => |w, i, _| long(w, i, |x, y, _| (x.wrapping_sub(y), None)),
        "s_mul_u64" => |w, i, _| long(w, i, |x, y, _| (x.wrapping_mul(y), None)),
        "s_brev_b64" => |w, i, _| long(w, i, |x, _, _| (x.reverse_bits(), None)),
        "s_not_b64" => |w, i, _| long(w, i, |x, _, _| long_bits(!x)),
        "s_and_b64" => |w, i, _| long(w, i, |x, y, _| long_bits(x & y)),
        "s_or_b64" => |w, i, _| long(w, i, |x, y, _| long_bits(x | y)),
        "s_xor_b64" => |w, i, _| long(w, i, |x, y, _| long_bits(x ^ y)),
        "s_xnor_b64" => |w, i, _| long(w, i, |x, y, _| long_bits(!(x ^ y))),
        "s_nand_b64" => |w, i, _| long(w, i, |x, y, _| long_bits(!(x & y))),
        "s_nor_b64" => |w, i, _| long(w, i, |x, y, _| long_bits(!(x | y))),
        "s_andn2_b64" | "s_and_not1_b64" => |w, i, _| long(w, i, |x, y, _| long_bits(x & !y)),
        "s_orn2_b64" | "s_or_not1_b64" => |w, i, _| long(w, i, |x, y, _| long_bits(x | !y)),
        "s_lshl_b64" => |w, i, _| shift(w, i, |x, n| x << n),
        "s_lshr_b64" => |w, i, _| shift(w, i, |x, n| x >> n),
        "s_ashr_i64" => |w, i, _| shift(w, i, |x, n| (x as i64 >> n) as u64),
        "s_bfe_u64" => |w, i, _| {
            let (x, how) = (w.long(i, 1), w.word(i, 2));
            let width = (how >> 16 & 127).min(64);
            let field = u128::from(x >> (how & 63)) & ((1 << width) - 1);
            w.set_pair(i.scalar(0)?, field as u64);
            w.condition = field != 0;
            Ok(Flow::Next)
        },
        "s_bfe_i64" => |w, i, _| {
            let (x, how) = (w.long(i, 1) as i64, w.word(i, 2));
            let (at, width) = (how & 63, (how >> 16 & 127).min(64));
            // Of i128, so that all 64 bits can be a field.
            let field = i128::from(x) >> at << (128 - width.max(1)) >> (128 - width.max(1));
            let field = if width == 0 { 0 } else { field as u64 };
            w.set_pair(i.scalar(0)?, field);
            w.condition = field != 0;
            Ok(Flow::Next)
        },
        "s_bfm_b64" => |w, i, _| {
            let mask = ((1u64 << (w.word(i, 1) & 63)) - 1) << (w.word(i, 2) & 63);
            w.set_pair(i.scalar(0)?, mask);
            Ok(Flow::Next)
        },
        "s_and_saveexec_b64" | "s_and_saveexec_b32" => |w, i, _| change_lanes(w, i, |x, e| x & e),
        "s_or_saveexec_b64" | "s_or_saveexec_b32" => |w, i, _| change_lanes(w, i, |x, e| x | e),
        "s_xor_saveexec_b64" | "s_xor_saveexec_b32" => |w, i, _| change_lanes(w, i, |x, e| x ^ e),
        "s_andn2_saveexec_b64" | "s_and_not1_saveexec_b64" | "s_and_not1_saveexec_b32" => {
            |w, i, _| change_lanes(w, i, |x, e| x & !e)
        }
        "s_orn2_saveexec_b64" | "s_or_not1_saveexec_b64" | "s_or_not1_saveexec_b32" => {
            |w, i, _| change_lanes(w, i, |x, e| x | !e)
        }
        _ => return None,
    };
    Some(run)
}

fn shift(w: &mut Wave, i: &Inst, f: impl Fn(u64, u32) -> u64) -> Done {
    let result = f(w.long(i, 1), w.word(i, 2) & 63);
    w.set_pair(i.scalar(0)?, result);
    w.condition = result != 0;
    Ok(Flow::Next)
}

fn wait(w: &mut Wave, wait: Wait) -> Done {
    w.wait(wait);
    Ok(Flow::Next)
}

/// The number of operations that may be outstanding.
fn count(w: &Wave, i: &Inst) -> usize {
    w.word(i, 0) as usize
}

fn control(name: &str) -> Option<Run> {
    let run: Run = match name {
        "s_nop"
        | "s_setprio"
        | "s_sleep"
        | "s_clause"
        | "s_delay_alu"
        | "s_waitcnt_depctr"
        | "s_sendmsg"
        | "s_set_inst_prefetch_distance"
        | "s_inst_prefetch"
        | "s_icache_inv"
        | "s_waitcnt_vscnt"
        | "s_round_mode"
        | "s_denorm_mode"
        | "buffer_gl0_inv"
        | "buffer_gl1_inv"
        | "buffer_wbl2"
        | "buffer_inv"
        | "buffer_invl2"
        | "buffer_wbinvl1_vol"
        | "global_inv"
        | "global_wb"
        | "s_barrier_signal"
        | "s_wait_alu"
        | "s_wait_storecnt" => |_, _, _| Ok(Flow::Next),
        "s_wait_loadcnt" => |w, i, _| wait(w, Wait { memory: count(w, i), ..NOTHING }),
        "s_wait_dscnt" => |w, i, _| wait(w, Wait { lds: count(w, i), ..NOTHING }),
        "s_wait_kmcnt" => |w, i, _| wait(w, Wait { scalar: count(w, i), ..NOTHING }),
        // Both counts in one number.
        "s_wait_storecnt_dscnt" => |w, i, _| wait(w, Wait { lds: count(w, i) & 63, ..NOTHING }),
        "s_wait_loadcnt_dscnt" => |w, i, _| {
            let (memory, lds) = (count(w, i) >> 8, count(w, i) & 63);
            wait(w, Wait { memory, lds, ..NOTHING })
        },
        "s_waitcnt" => |w, i, _| wait(w, i.wait),
        "s_getpc_b64" => |w, i, block| {
            w.set_pair(i.scalar(0)?, block.base + i.address + 4);
            Ok(Flow::Next)
        },
        "s_endpgm" => |_, _, _| Ok(Flow::End),
        "s_barrier" | "s_barrier_wait" => |_, _, _| Ok(Flow::Barrier),
        "s_branch" => |_, i, _| jump(i, true),
        "s_cbranch_scc0" => |w, i, _| jump(i, !w.condition),
        "s_cbranch_scc1" => |w, i, _| jump(i, w.condition),
        "s_cbranch_vccz" => |w, i, _| jump(i, w.mask(VCC) == 0),
        "s_cbranch_vccnz" => |w, i, _| jump(i, w.mask(VCC) != 0),
        "s_cbranch_execz" => |w, i, _| jump(i, w.exec() == 0),
        "s_cbranch_execnz" => |w, i, _| jump(i, w.exec() != 0),
        _ => return None,
    };
    Some(run)
}

fn comparisons(name: &str) -> Option<Run> {
    let run: Run = match name {
        "s_cmp_eq_u32" | "s_cmp_eq_i32" => |w, i, _| compare(w, i, |x, y| x == y),
        "s_cmp_lg_u32" | "s_cmp_lg_i32" => |w, i, _| compare(w, i, |x, y| x != y),
        "s_cmp_lt_u32" => |w, i, _| compare(w, i, |x, y| x < y),
        "s_cmp_le_u32" => |w, i, _| compare(w, i, |x, y| x <= y),
        "s_cmp_gt_u32" => |w, i, _| compare(w, i, |x, y| x > y),
        "s_cmp_ge_u32" => |w, i, _| compare(w, i, |x, y| x >= y),
        "s_cmp_lt_i32" => |w, i, _| compare(w, i, |x, y| (x as i32) < y as i32),
        "s_cmp_le_i32" => |w, i, _| compare(w, i, |x, y| x as i32 <= y as i32),
        "s_cmp_gt_i32" => |w, i, _| compare(w, i, |x, y| x as i32 > y as i32),
        "s_cmp_ge_i32" => |w, i, _| compare(w, i, |x, y| x as i32 >= y as i32),
        "s_cmp_eq_u64" => |w, i, _| compare_long(w, i, |x, y| x == y),
        "s_cmp_lg_u64" => |w, i, _| compare_long(w, i, |x, y| x != y),
        "s_cmpk_eq_i32" => |w, i, _| compare(w, i, |x, y| x == y as i16 as u32),
        "s_cmpk_lg_i32" => |w, i, _| compare(w, i, |x, y| x != y as i16 as u32),
        "s_cmpk_lt_i32" => |w, i, _| compare(w, i, |x, y| (x as i32) < i32::from(y as i16)),
        "s_cmpk_le_i32" => |w, i, _| compare(w, i, |x, y| x as i32 <= i32::from(y as i16)),
        "s_cmpk_gt_i32" => |w, i, _| compare(w, i, |x, y| x as i32 > i32::from(y as i16)),
        "s_cmpk_ge_i32" => |w, i, _| compare(w, i, |x, y| x as i32 >= i32::from(y as i16)),
        "s_cmpk_eq_u32" => |w, i, _| compare(w, i, |x, y| x == y & 0xffff),
        "s_cmpk_lg_u32" => |w, i, _| compare(w, i, |x, y| x != y & 0xffff),
        "s_cmpk_lt_u32" => |w, i, _| compare(w, i, |x, y| x < y & 0xffff),
        "s_cmpk_le_u32" => |w, i, _| compare(w, i, |x, y| x <= y & 0xffff),
        "s_cmpk_gt_u32" => |w, i, _| compare(w, i, |x, y| x > y & 0xffff),
        "s_cmpk_ge_u32" => |w, i, _| compare(w, i, |x, y| x >= y & 0xffff),
        "s_bitcmp0_b32" => |w, i, _| compare(w, i, |x, y| x >> (y & 31) & 1 == 0),
        "s_bitcmp1_b32" => |w, i, _| compare(w, i, |x, y| x >> (y & 31) & 1 == 1),
        "s_bitcmp0_b64" => |w, i, _| {
            w.condition = w.long(i, 0) >> (w.word(i, 1) & 63) & 1 == 0;
            Ok(Flow::Next)
        },
        "s_bitcmp1_b64" => |w, i, _| {
            w.condition = w.long(i, 0) >> (w.word(i, 1) & 63) & 1 == 1;
            Ok(Flow::Next)
        },
        _ => return None,
    };
    Some(run)
}
