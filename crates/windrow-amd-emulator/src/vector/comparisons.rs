//! Comparisons, whose results are masks.

use super::{Done, compared, compared_long};
use crate::float::*;
use crate::inst::{Inst, Run};
use crate::wave::{Kind, Wave};

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
pub(super) fn find(name: &str) -> Option<Run> {
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
