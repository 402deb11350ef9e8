//! Products of matrices by a wavefront, after the tables of AMD's matrix instruction calculator.

use crate::Fault;
use crate::float::{b, f, from_half};
use crate::inst::{Inst, Operand, Run};
use crate::wave::{Flow, Lanes, Wave};

/// Element types.
const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// Element `e` of those that a lane gives.
fn element<const TYPE: u8>(registers: &[Lanes], lane: usize, e: usize) -> f64 {
    if TYPE == F32 {
        return f(registers[e][lane]).into();
    }
    let bits = registers[e / 2][lane] >> (16 * (e % 2)) & 0xffff;
    (if TYPE == F16 { from_half(bits) } else { f(bits << 16) }).into()
}

/// D = A B + C, where A is M x K, B is K x M. Lane l gives row l % M of A and column l % M of B, at depths from
/// l / M * (K * M / 64) on. Of D and C it has column l % M: four rows at a time, from l / M * 4 on.
fn multiply<const M: usize, const K: usize, const TYPE: u8>(
    wave: &mut Wave,
    inst: &Inst,
) -> Result<Flow, Fault> {
    let (groups, of_lane) = (64 / M, K * M / 64);
    let registers = if TYPE == F32 { of_lane } else { of_lane / 2 };
    let (a, c) = (inst.vector(1)?, inst.vector(2)?);
    let (rows, columns) = (&wave.vectors[a..a + registers], &wave.vectors[c..c + registers]);
    let (mut left, mut right) = ([[0.0; M]; K], [[0.0; M]; K]);
    for lane in 0..64 {
        for e in 0..of_lane {
            let depth = lane / M * of_lane + e;
            left[depth][lane % M] = element::<TYPE>(rows, lane, e);
            right[depth][lane % M] = element::<TYPE>(columns, lane, e);
        }
    }
    let (to, count) = (inst.vector(0)?, M * M / 64);
    let mut all = [[0; 64]; 16];
    let all = &mut all[..count];
    match inst.operands[3] {
        // Compilers let sums of four registers lie over others of the addend, and no longer ones.
        Operand::Vector(register)
            if count > 4 && (1..count).contains(&to.abs_diff(register.into())) =>
        {
            return Err(inst.fault("a sum that overlaps the addend"));
        }
        Operand::Vector(register) => {
            all.copy_from_slice(&wave.vectors[register as usize..register as usize + count]);
        }
        _ => all.fill([wave.word(inst, 3); 64]),
    }
    for (r, addends) in all.iter().enumerate() {
        for group in 0..groups {
            let row = r / 4 * 4 * groups + group * 4 + r % 4;
            let mut sums = [0.0; M];
            for (left, right) in left.iter().zip(&right) {
                let x = left[row];
                sums.iter_mut().zip(right).for_each(|(sum, y)| *sum += x * y);
            }
            for (column, sum) in sums.into_iter().enumerate() {
                let lane = group * M + column;
                wave.vectors[to + r][lane] = b((f64::from(f(addends[lane])) + sum) as f32);
            }
        }
    }
    Ok(Flow::Next)
}

/// As [`multiply`] of 16 x 16 matrices by a wavefront of 32. Lane l gives row l % 16 of A and column l % 16 of B: at all
/// depths, the same as lane (l + 16) % 32, or on newer chips at every other four depths. Of D and C it has column l % 16:
/// every other row, or on newer chips eight rows, from l / 16 * 8 on.
fn multiply_by_32<const TYPE: u8>(wave: &mut Wave, inst: &Inst) -> Result<Flow, Fault> {
    if wave.lanes != 32 {
        return Err(inst.fault("a product by a wavefront of 64"));
    }
    let newer = inst.generation > 11;
    let of_lane = if newer { 8 } else { 16 };
    let (a, c, to) = (inst.vector(1)?, inst.vector(2)?, inst.vector(0)?);
    let (rows, columns) = (&wave.vectors[a..a + of_lane / 2], &wave.vectors[c..c + of_lane / 2]);
    let (mut left, mut right) = ([[0.0; 16]; 16], [[0.0; 16]; 16]);
    for lane in 0..32 {
        for e in 0..of_lane {
            let depth = if newer { e / 4 * 8 + lane / 16 * 4 + e % 4 } else { e };
            let (x, y) = (element::<TYPE>(rows, lane, e), element::<TYPE>(columns, lane, e));
            let again = !newer && lane >= 16;
            let differs = |x: f64, before: f64| x.to_bits() != before.to_bits();
            if again && (differs(x, left[depth][lane - 16]) || differs(y, right[depth][lane - 16]))
            {
                return Err(inst.fault(format_args!("lanes {} and {lane} differ", lane - 16)));
            }
            (left[depth][lane % 16], right[depth][lane % 16]) = (x, y);
        }
    }
    for r in 0..8 {
        let addends = match inst.operands[3] {
            Operand::Vector(register) => wave.vectors[register as usize + r],
            _ => [wave.word(inst, 3); 64],
        };
        for lane in 0..32 {
            let row = if newer { lane / 16 * 8 + r } else { 2 * r + lane / 16 };
            let products = left.iter().zip(&right).map(|(x, y)| x[row] * y[lane % 16]);
            let sum = f64::from(f(addends[lane])) + products.sum::<f64>();
            wave.vectors[to + r][lane] = b(sum as f32);
        }
    }
    Ok(Flow::Next)
}

pub(crate) fn find(name: &str) -> Option<Run> {
    let run: Run = match name {
        "v_mfma_f32_16x16x16_f16" | "v_mfma_f32_16x16x16f16" => {
            |w, i, _| multiply::<16, 16, F16>(w, i)
        }
        "v_mfma_f32_16x16x16_bf16" | "v_mfma_f32_16x16x16bf16_1k" => {
            |w, i, _| multiply::<16, 16, BF16>(w, i)
        }
        "v_mfma_f32_16x16x4_f32" | "v_mfma_f32_16x16x4f32" => {
            |w, i, _| multiply::<16, 4, F32>(w, i)
        }
        "v_mfma_f32_32x32x8_f16" | "v_mfma_f32_32x32x8f16" => {
            |w, i, _| multiply::<32, 8, F16>(w, i)
        }
        "v_mfma_f32_32x32x8_bf16" | "v_mfma_f32_32x32x8bf16_1k" => {
            |w, i, _| multiply::<32, 8, BF16>(w, i)
        }
        "v_mfma_f32_32x32x2_f32" | "v_mfma_f32_32x32x2f32" => {
            |w, i, _| multiply::<32, 2, F32>(w, i)
        }
        "v_wmma_f32_16x16x16_f16" => |w, i, _| multiply_by_32::<F16>(w, i),
        "v_wmma_f32_16x16x16_bf16" => |w, i, _| multiply_by_32::<BF16>(w, i),
        _ => return None,
    };
    Some(run)
}
