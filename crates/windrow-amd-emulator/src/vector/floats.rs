//! Arithmetic of f32 and f16, and conversions.

use super::{each, float, half, with_sources, word, write_float};
use crate::float::*;
use crate::inst::{Run, VCC};
use crate::wave::Kind;

pub(super) fn find(name: &str) -> Option<Run> {
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
        "v_rcp_f32" => |w, i, _| float(w, i, |a, _, _| nudged(flushed(1.0 / flushed(a)))),
        // The compiler's divisions of integers, which hold for what chips give.
        "v_rcp_iflag_f32" => |w, i, _| float(w, i, |a, _, _| flushed(1.0 / flushed(a))),
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
