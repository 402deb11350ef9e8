//! Operands of instructions, read from their words.

use super::{
    ACCUMULATORS, EXEC, FLAT_SCRATCH, M0, NULL, Operand, PRIVATE_APERTURE, Part, SHARED_APERTURE,
    TTMP, VCC,
};

pub(super) fn register(text: &str) -> Option<Operand> {
    let (kind, rest) = match text.strip_prefix("ttmp") {
        Some(rest) => ("ttmp", rest),
        None => text.split_at_checked(1)?,
    };
    let number = match rest.strip_prefix('[') {
        Some(range) => range.trim_end_matches(']').split(':').next()?,
        None => rest,
    };
    let number: u16 = number.parse().ok()?;
    match kind {
        "s" => Some(Operand::Scalar(number)),
        "ttmp" => Some(Operand::Scalar(TTMP + number)),
        "v" => Some(Operand::Vector(number)),
        "a" => Some(Operand::Vector(ACCUMULATORS + number)),
        _ => None,
    }
}

pub(super) fn operand(text: &str) -> Option<Operand> {
    Some(match text {
        "vcc" | "vcc_lo" => Operand::Scalar(VCC),
        "vcc_hi" => Operand::Scalar(VCC + 1),
        "exec" | "exec_lo" => Operand::Scalar(EXEC),
        "exec_hi" => Operand::Scalar(EXEC + 1),
        "m0" => Operand::Scalar(M0),
        "null" => Operand::Scalar(NULL),
        "flat_scratch" | "flat_scratch_lo" => Operand::Scalar(FLAT_SCRATCH),
        "flat_scratch_hi" => Operand::Scalar(FLAT_SCRATCH + 1),
        "off" => Operand::Nothing,
        "src_shared_base" => Operand::Integer(i64::from(SHARED_APERTURE) << 32),
        "src_private_base" => Operand::Integer(i64::from(PRIVATE_APERTURE) << 32),
        _ => {
            if let Some(register) = register(text) {
                register
            } else if let Some(digits) = text.strip_prefix("0x") {
                Operand::Integer(u64::from_str_radix(digits, 16).ok()? as i64)
            } else if let Ok(number) = text.parse() {
                Operand::Integer(number)
            } else {
                Operand::Float(text.parse().ok()?)
            }
        }
    })
}

/// The bits of `[0,1,1]`.
pub(super) fn bits(list: &str) -> u8 {
    let digits = list.chars().filter(char::is_ascii_digit).enumerate();
    digits.fold(0, |bits, (n, digit)| bits | u8::from(digit == '1') << n)
}

pub(super) fn part(text: &str) -> Part {
    match text {
        "BYTE_0" => Part::Byte(0),
        "BYTE_1" => Part::Byte(1),
        "BYTE_2" => Part::Byte(2),
        "BYTE_3" => Part::Byte(3),
        "WORD_0" => Part::Word(0),
        "WORD_1" => Part::Word(1),
        _ => Part::Whole,
    }
}
