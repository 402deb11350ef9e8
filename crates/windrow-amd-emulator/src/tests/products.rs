//! Products of matrices in AMD's layouts.

use super::Machine;
use crate::float::half_of;

/// D = A B + C, where A is M x K and B is K x M, as AMD's matrix instruction calculator lays them out.
struct Layout<'a> {
    chip: &'a str,
    line: &'a str,
    lanes: usize,
    m: usize,
    depth: usize,
    /// First registers of A, B, C and D; a0 is the one behind the last v that the line names.
    first: [usize; 4],
    /// The lanes that have element (i, k) of A, or (k, i) of B, and its place among those of a lane.
    element: &'a dyn Fn(usize, usize) -> (Vec<usize>, usize),
    /// Lane and register of (i, j) of C and D.
    sum: &'a dyn Fn(usize, usize) -> (usize, usize),
}

impl Layout<'_> {
    #[track_caller]
    fn check(&self) {
        let &Layout { chip, line, lanes, m, depth, first, element, sum } = self;
        let mut machine = Machine::new();
        machine.wave.lanes = lanes;
        // Small whole numbers: sums are exact.
        let a = |i: usize, k: usize| ((i * 7 + k * 3) % 11) as f32 - 5.0;
        let b = |k: usize, j: usize| ((j * 5 + k * 2) % 13) as f32 - 6.0;
        let c = |i: usize, j: usize| (i * 100 + j) as f32;
        let (bits, as_bits): (_, fn(f32) -> u32) = if line.contains("bf16") {
            (16, |x| x.to_bits() >> 16)
        } else if line.contains("f16") {
            (16, half_of)
        } else {
            (32, f32::to_bits)
        };
        for i in 0..m {
            for k in 0..depth {
                let (lanes, at) = element(i, k);
                for lane in lanes {
                    for (first, x) in [(first[0], a(i, k)), (first[1], b(k, i))] {
                        let at = at * bits;
                        let register = &mut machine.wave.vectors[first + at / 32][lane];
                        let field = (!0u32 >> (32 - bits)) << (at % 32);
                        *register = *register & !field | as_bits(x) << (at % 32);
                    }
                }
            }
            for j in 0..m {
                let (lane, register) = sum(i, j);
                machine.wave.vectors[first[2] + register][lane] = c(i, j).to_bits();
            }
        }
        machine.run_for(line, chip).unwrap();
        for i in 0..m {
            for j in 0..m {
                let (lane, register) = sum(i, j);
                let want = c(i, j) + (0..depth).map(|k| a(i, k) * b(k, j)).sum::<f32>();
                let got = f32::from_bits(machine.wave.vectors[first[3] + register][lane]);
                assert_eq!(got, want, "{line} ({i}, {j})");
            }
        }
    }
}

#[test]
fn products_of_matrices_by_wavefronts_of_64() {
    for (kind, m, depth, registers) in [
        ("16x16x16_f16", 16, 16, 2),
        ("16x16x16_bf16", 16, 16, 2),
        ("16x16x4_f32", 16, 4, 1),
        ("32x32x8_f16", 32, 8, 2),
        ("32x32x8_bf16", 32, 8, 2),
        ("32x32x2_f32", 32, 2, 1),
    ] {
        let (of_lane, last) = (depth * m / 64, m * m / 64 - 1);
        let [x, y] = if registers == 1 { ["v0", "v2"] } else { ["v[0:1]", "v[2:3]"] };
        let end = 40 + last;
        Layout {
            chip: "gfx942",
            line: &format!("v_mfma_f32_{kind} a[0:{last}], {x}, {y}, v[40:{end}]"),
            lanes: 64,
            m,
            depth,
            first: [0, 2, 40, end + 1],
            element: &|i, k| (vec![i + m * (k / of_lane)], k % of_lane),
            sum: &|i, j| (j + m * (i / 4 % (64 / m)), i / (256 / m) * 4 + i % 4),
        }
        .check();
    }
}

#[test]
fn products_of_matrices_by_wavefronts_of_32() {
    for kind in ["f16", "bf16"] {
        Layout {
            chip: "gfx1100",
            line: &format!("v_wmma_f32_16x16x16_{kind} v[40:47], v[0:7], v[8:15], v[20:27]"),
            lanes: 32,
            m: 16,
            depth: 16,
            first: [0, 8, 20, 40],
            element: &|i, k| (vec![i, i + 16], k),
            sum: &|i, j| (16 * i % 32 + j, i / 2),
        }
        .check();
        Layout {
            chip: "gfx1201",
            line: &format!("v_wmma_f32_16x16x16_{kind} v[40:47], v[0:3], v[8:11], v[20:27]"),
            lanes: 32,
            m: 16,
            depth: 16,
            first: [0, 8, 20, 40],
            element: &|i, k| (vec![i + 16 * (k / 4 % 2)], k / 8 * 4 + k % 4),
            sum: &|i, j| (16 * (i / 8) + j, i % 8),
        }
        .check();
    }
    let mut machine = Machine::new();
    machine.wave.lanes = 32;
    let line = "v_wmma_f32_16x16x16_f16 v[40:47], v[0:7], v[8:15], v[20:27]";
    let fault = machine.run_for(line, "gfx1100").unwrap_err().to_string();
    assert!(fault.contains("lanes 0 and 16 differ"), "{fault}");
}
