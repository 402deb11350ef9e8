//! Products of matrices, by AMD's own tables of where their elements lie.

use super::Machine;
use crate::float::half_of;
use std::collections::HashMap;

/// Row and column of the elements of a matrix that each lane has.
type Table = Vec<Vec<[usize; 2]>>;

/// Matrices of `layouts.txt`, and the chips and instructions that lay them out so.
struct Layout<'a> {
    of: Vec<(&'a str, &'a str)>,
    tables: HashMap<&'a str, Table>,
}

fn layouts() -> impl Iterator<Item = Layout<'static>> {
    let text = include_str!("layouts.txt");
    text.split("\n\n").filter(|part| !part.starts_with('#')).map(|part| {
        let mut layout = Layout { of: Vec::new(), tables: HashMap::new() };
        let mut table = None;
        for line in part.lines() {
            if let Some(matrix) = line.strip_suffix(':') {
                table = Some(layout.tables.entry(matrix).or_default());
            } else if let Some(table) = &mut table {
                let number = |text: &str| text.parse::<usize>().unwrap();
                let elements = line.split(' ').map(|element| element.split_once('.').unwrap());
                table.push(elements.map(|(i, j)| [number(i), number(j)]).collect());
            } else {
                layout.of.push(line.split_once(' ').unwrap());
            }
        }
        layout
    })
}

/// Whether the instruction computes D = A B + C in the layout.
fn check(chip: &str, name: &str, tables: &HashMap<&str, Table>) {
    let [a, b, c] = ["A", "B", "C, D"].map(|matrix| &tables[matrix]);
    let mut machine = Machine::new();
    machine.wave.lanes = a.len();
    // Small whole numbers: sums are exact.
    let left = |i: usize, k: usize| ((i * 7 + k * 3) % 11) as f32 - 5.0;
    let right = |k: usize, j: usize| ((j * 5 + k * 2) % 13) as f32 - 6.0;
    let added = |i: usize, j: usize| (i * 100 + j) as f32;
    let (bits, as_bits): (_, fn(f32) -> u32) = if name.contains("bf16") {
        (16, |x| x.to_bits() >> 16)
    } else if name.ends_with("f16") {
        (16, half_of)
    } else {
        (32, f32::to_bits)
    };
    let mut put =
        |table: &Table, first: usize, bits: usize, value: &dyn Fn(usize, usize) -> u32| {
            for (lane, elements) in table.iter().enumerate() {
                for (n, &[i, j]) in elements.iter().enumerate() {
                    let at = n * bits;
                    let register = &mut machine.wave.vectors[first + at / 32][lane];
                    let field = (!0u32 >> (32 - bits)) << (at % 32);
                    *register = *register & !field | value(i, j) << (at % 32);
                }
            }
        };
    put(a, 0, bits, &|i, k| as_bits(left(i, k)));
    put(b, 8, bits, &|k, j| as_bits(right(k, j)));
    put(c, 20, 32, &|i, j| added(i, j).to_bits());
    let (factor, sum) = (a[0].len() * bits / 32, c[0].len());
    // As the disassembler writes registers.
    let registers = |kind: &str, first: usize, count: usize| match count {
        1 => format!("{kind}{first}"),
        _ => format!("{kind}[{first}:{}]", first + count - 1),
    };
    // a0 is the register behind the last v that the line names.
    let (to, first) = if name.contains("mfma") { ("a", 0) } else { ("v", 40) };
    let line = format!(
        "{name} {}, {}, {}, {}",
        registers(to, first, sum),
        registers("v", 0, factor),
        registers("v", 8, factor),
        registers("v", 20, sum)
    );
    machine.run_for(&line, chip).unwrap();
    let result = if to == "a" { 20 + sum } else { first };
    let depths = a.iter().flatten().map(|&[_, k]| k + 1).max().unwrap();
    for (lane, elements) in c.iter().enumerate() {
        for (n, &[i, j]) in elements.iter().enumerate() {
            let want = added(i, j) + (0..depths).map(|k| left(i, k) * right(k, j)).sum::<f32>();
            let got = f32::from_bits(machine.wave.vectors[result + n][lane]);
            assert_eq!(got, want, "{chip}: {line} ({i}, {j})");
        }
    }
}

#[test]
fn matrices_lie_where_the_tables_say() {
    let mut checked = 0;
    for layout in layouts() {
        for (chip, name) in layout.of {
            check(chip, name, &layout.tables);
            checked += 1;
        }
    }
    assert_eq!(checked, 16);
}

/// Sums of four registers may lie over others of the addend, longer ones may not.
#[test]
fn short_sums_may_overlap_the_addend() {
    let product = |line| {
        let mut machine = Machine::new();
        machine.wave.lanes = 64;
        for (n, register) in machine.wave.vectors[..40].iter_mut().enumerate() {
            *register = std::array::from_fn(|lane| ((n * 64 + lane) as f32).to_bits());
        }
        machine.run_for(line, "gfx942").map(|_| machine.wave.vectors)
    };
    let apart = product("v_mfma_f32_16x16x4_f32 v[40:43], v0, v8, v[20:23]").unwrap();
    for (line, first) in [
        ("v_mfma_f32_16x16x4_f32 v[22:25], v0, v8, v[20:23]", 22),
        ("v_mfma_f32_16x16x4_f32 v[19:22], v0, v8, v[20:23]", 19),
        ("v_mfma_f32_16x16x4_f32 v[20:23], v0, v8, v[20:23]", 20),
    ] {
        let over = product(line).unwrap();
        assert_eq!(over[first..first + 4], apart[40..44], "{line}");
    }
    let fault = product("v_mfma_f32_32x32x2_f32 v[22:37], v0, v8, v[20:35]").unwrap_err();
    assert!(fault.to_string().contains("overlaps the addend"), "{fault}");
}

#[test]
fn halves_of_a_wavefront_have_to_agree() {
    let mut machine = Machine::new();
    machine.wave.lanes = 32;
    let line = "v_wmma_f32_16x16x16_f16 v[40:47], v[0:7], v[8:15], v[20:27]";
    let fault = machine.run_for(line, "gfx1100").unwrap_err().to_string();
    assert!(fault.contains("lanes 0 and 16 differ"), "{fault}");
}
