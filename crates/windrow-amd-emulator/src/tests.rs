//! Single instructions, as the disassembler writes them, against plain computation.

#![allow(clippy::needless_range_loop, reason = "lanes of several registers")]

mod memory;
mod products;

use crate::Fault;
use crate::float::{from_half, half_of};
use crate::inst::{Code, EXEC, TTMP, VCC};
use crate::memory::{Ranges, allocate, free};
use crate::wave::{Block, Flow, POISON, Wave};
use crate::{graphs, runtime};

/// A wavefront with numbers in v0 to v7 and s0 to s7.
struct Machine {
    wave: Wave,
    lds: Vec<u8>,
}

impl Machine {
    fn new() -> Self {
        let mut wave = Wave::new(64, 128, 64);
        let mut x = 12345u32;
        let mut next = || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            x
        };
        for register in &mut wave.vectors[..8] {
            register.fill_with(&mut next);
        }
        wave.scalars[..8].fill_with(&mut next);
        Machine { wave, lds: vec![0; 1024] }
    }

    /// Numbers of f32 in v0 to v7, and pairs of f16 made of them in v8 to v15.
    fn with_floats() -> Self {
        let mut machine = Machine::new();
        for lane in 0..64 {
            for register in 0..8 {
                let vectors = &mut machine.wave.vectors;
                let value = (vectors[register][lane] as i32 >> 8) as f32 / 65536.0;
                vectors[register][lane] = value.to_bits();
                vectors[register + 8][lane] = half_of(value) | half_of(1.0 - value) << 16;
            }
        }
        machine
    }

    /// Executes the lines, which end by `;`.
    fn run(&mut self, lines: &str) -> Result<Flow, Fault> {
        self.run_for(lines, "gfx942")
    }

    fn run_for(&mut self, lines: &str, chip: &str) -> Result<Flow, Fault> {
        let lines = lines.split("; ").enumerate();
        let text: String =
            lines.map(|(n, line)| format!("\t{line} // {:012X}:\n", 8 * n)).collect();
        let memory = Ranges::now(&[]);
        let lds = std::mem::take(&mut self.lds);
        let mut block = Block { lds, memory: &memory, base: 0x1000 };
        let code = Code::parse(&text, chip)?;
        let mut flow = Ok(Flow::Next);
        for inst in &code.insts {
            if flow.is_ok() {
                flow = (inst.run)(&mut self.wave, inst, &mut block);
            }
        }
        self.lds = block.lds;
        flow
    }

    fn long(&self, register: usize, lane: usize) -> u64 {
        let [low, high] = [0, 1].map(|n| u64::from(self.wave.vectors[register + n][lane]));
        low | high << 32
    }
}

const SOME: u64 = 0xffff_0000_ffff_fffe;

/// The test that v20 has this value after the instruction, given v0, v1 and v2. Lanes that do not work keep their
/// values.
#[track_caller]
fn words(line: &str, want: impl Fn(u32, u32, u32) -> u32) {
    let mut machine = Machine::new();
    machine.wave.set_mask(EXEC, SOME);
    machine.run(line).unwrap();
    let v = &machine.wave.vectors;
    for lane in 0..64 {
        let works = SOME >> lane & 1 == 1;
        let want = if works { want(v[0][lane], v[1][lane], v[2][lane]) } else { POISON };
        assert_eq!(v[20][lane], want, "{line}, lane {lane}");
    }
}

#[track_caller]
fn floats(line: &str, want: impl Fn(f32, f32, f32) -> f32) {
    let mut machine = Machine::with_floats();
    machine.run(line).unwrap();
    let v = &machine.wave.vectors;
    for lane in 0..64 {
        let [a, c, d] = [0, 1, 2].map(|n| f32::from_bits(v[n][lane]));
        assert_eq!(f32::from_bits(v[20][lane]), want(a, c, d), "{line}, lane {lane}");
    }
}

/// The test for pairs of f16 in v8, v9 and v10.
#[track_caller]
fn halves(line: &str, want: impl Fn([f32; 2], [f32; 2], [f32; 2]) -> [f32; 2]) {
    let mut machine = Machine::with_floats();
    machine.run(line).unwrap();
    let v = &machine.wave.vectors;
    for lane in 0..64 {
        let [a, c, d] = [8, 9, 10].map(|n| [0, 16].map(|s| from_half(v[n][lane] >> s)));
        let [low, high] = want(a, c, d).map(half_of);
        assert_eq!(v[20][lane], low | high << 16, "{line}, lane {lane}");
    }
}

#[test]
fn integers() {
    words("v_add_u32_e32 v20, v0, v1", |a, c, _| a.wrapping_add(c));
    words("v_subrev_u32_e32 v20, v0, v1", |a, c, _| c.wrapping_sub(a));
    words("v_mul_hi_u32 v20, v0, v1", |a, c, _| ((u64::from(a) * u64::from(c)) >> 32) as u32);
    words("v_mul_hi_i32 v20, v0, v1", |a, c, _| {
        ((i64::from(a as i32) * i64::from(c as i32)) >> 32) as u32
    });
    words("v_mad_u32_u24 v20, v0, v1, v2", |a, c, d| {
        (a % (1 << 24)).wrapping_mul(c % (1 << 24)).wrapping_add(d)
    });
    words("v_mul_i32_i24_e32 v20, v0, v1", |a, c, _| {
        let [a, c] = [a, c].map(|x| (x as i32) << 8 >> 8);
        a.wrapping_mul(c) as u32
    });
    words("v_lshl_add_u32 v20, v0, 3, v1", |a, c, _| (a << 3).wrapping_add(c));
    words("v_lshlrev_b32_e32 v20, 5, v0", |a, _, _| a << 5);
    words("v_ashrrev_i32_e32 v20, v0, v1", |a, c, _| (c as i32 >> (a % 32)) as u32);
    words("v_bfe_i32 v20, v0, 4, 8", |a, _, _| (a >> 4) as i8 as u32);
    words("v_bfe_u32 v20, v0, 4, 8", |a, _, _| a >> 4 & 255);
    words("v_bfi_b32 v20, v0, v1, v2", |a, c, d| (a & c) | (!a & d));
    words("v_perm_b32 v20, v0, v1, v2", |a, c, d| {
        let all = [c.to_le_bytes(), a.to_le_bytes()].concat();
        u32::from_le_bytes(d.to_le_bytes().map(|s| match s {
            0..8 => all[s as usize],
            8..12 => (all[2 * (s as usize - 8) + 1] as i8 >> 7) as u8,
            12 => 0,
            _ => 255,
        }))
    });
    words("v_perm_b32 v20, v0, v1, 0xc0a0400", |a, c, _| {
        (c & 0xff) | (a & 0xff) << 8 | if a >> 15 & 1 == 1 { 0xff << 16 } else { 0 }
    });
    words("v_alignbit_b32 v20, v0, v1, 7", |a, c, _| a << 25 | c >> 7);
    words("v_med3_i32 v20, v0, v1, v2", |a, c, d| {
        let mut all = [a, c, d].map(|x| x as i32);
        all.sort_unstable();
        all[1] as u32
    });
    words("v_max3_u32 v20, v0, v1, v2", |a, c, d| a.max(c).max(d));
    words("v_add_u16_e32 v20, v0, v1", |a, c, _| a.wrapping_add(c) & 0xffff);
    words("v_ashrrev_i16_e32 v20, 3, v0", |a, _, _| (a as i16 >> 3) as u16 as u32);
    words("v_pk_add_u16 v20, v0, v1", |a, c, _| {
        a.wrapping_add(c) & 0xffff | (a >> 16).wrapping_add(c >> 16) << 16
    });
    words("v_pk_lshlrev_b16 v20, 2, v0 op_sel_hi:[0,1]", |a, _, _| {
        (a & 0x3fff) << 2 | (a & 0x3fff_0000) << 2
    });
    words("v_mov_b32_e32 v20, 0x12345678", |_, _, _| 0x1234_5678);
    words("v_mov_b32_e32 v20, 0.5", |_, _, _| 0.5f32.to_bits());
    words("v_cvt_f32_u32_e32 v20, v0", |a, _, _| (a as f32).to_bits());
    words("v_cvt_u32_f32_e32 v20, v0", |a, _, _| f32::from_bits(a) as u32);
    words("v_accvgpr_write_b32 a3, v0; v_accvgpr_read_b32 v20, a3", |a, _, _| a);
}

#[test]
fn parts_of_registers() {
    let rest = "src0_sel:BYTE_1 src1_sel:WORD_1";
    words(
        &format!("v_lshlrev_b32_sdwa v20, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD {rest}"),
        |a, c, _| (c >> 16) << (a >> 8 & 31),
    );
    let rest = "dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:BYTE_3";
    words(&format!("v_add_u32_sdwa v20, v0, sext(v1) dst_sel:WORD_1 {rest}"), |a, c, _| {
        (a & 0xffff).wrapping_add((c as i32 >> 24) as u32) << 16
    });
    let rest = "dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD";
    words(&format!("v_or_b32_sdwa v20, v0, v1 dst_sel:BYTE_2 {rest}"), |a, c, _| {
        POISON & 0xff00_ffff | ((a | c) & 0xff) << 16
    });
}

#[test]
fn lanes_are_exchanged() {
    let check = |line: &str, want: &dyn Fn(usize) -> Option<usize>| {
        let mut machine = Machine::new();
        machine.run(line).unwrap();
        let v = &machine.wave.vectors;
        for lane in 0..64 {
            let want = want(lane).map_or(POISON, |from| v[0][from]);
            assert_eq!(v[20][lane], want, "{line}, lane {lane}");
        }
    };
    let all = "row_mask:0xf bank_mask:0xf";
    check(&format!("v_mov_b32_dpp v20, v0 quad_perm:[1,0,3,2] {all}"), &|l| Some(l ^ 1));
    check(&format!("v_mov_b32_dpp v20, v0 row_shr:3 {all}"), &|l| (l % 16 >= 3).then(|| l - 3));
    check(&format!("v_mov_b32_dpp v20, v0 row_mirror {all}"), &|l| Some(l ^ 15));
    check("v_mov_b32_dpp v20, v0 row_half_mirror row_mask:0x2 bank_mask:0xf", &|l| {
        (l / 16 == 1).then_some(l ^ 7)
    });
    check(
        "v_lshlrev_b32_e32 v9, 2, v8; ds_bpermute_b32 v20, v9, v0; s_waitcnt lgkmcnt(0)",
        &|_| Some((POISON as usize) % 64),
    );
}

#[test]
fn floating_point() {
    floats("v_fma_f32 v20, v0, -v1, |v2|", |a, c, d| a.mul_add(-c, d.abs()));
    floats("v_sub_f32_e32 v20, 1.0, v0", |a, _, _| 1.0 - a);
    floats("v_add_f32_e64 v20, v0, v1 clamp", |a, c, _| (a + c).clamp(0.0, 1.0));
    floats("v_mul_f32_e64 v20, v0, v1 mul:4", |a, c, _| a * c * 4.0);
    floats("v_mov_b32_e32 v20, v2; v_fmac_f32_e32 v20, v0, v1", f32::mul_add);
    floats("v_mov_b32_e32 v20, v2; v_mac_f32_e32 v20, v0, v1", |a, c, d| a * c + d);
    floats("v_fmamk_f32 v20, v0, 0x40000000, v1", |a, c, _| a.mul_add(2.0, c));
    floats("v_fmaak_f32 v20, v0, v1, 0x40000000", |a, c, _| a.mul_add(c, 2.0));
    floats("v_min_f32_e32 v20, v0, v1", |a, c, _| a.min(c));
    floats("v_med3_f32 v20, v0, v1, v2", |a, c, d| a.min(c).max(a.max(c).min(d)));
    floats("v_rcp_f32_e32 v20, v0", |a, _, _| 1.0 / a);
    floats("v_exp_f32_e32 v20, v0", |a, _, _| f64::from(a).exp2() as f32);
    floats("v_rndne_f32_e32 v20, v0", |a, _, _| a.round_ties_even());
    floats("v_ldexp_f32 v20, v0, 3", |a, _, _| a * 8.0);
    floats("v_cvt_f16_f32_e32 v21, v0; v_cvt_f32_f16_e32 v20, v21", |a, _, _| {
        from_half(half_of(a))
    });
}

#[test]
fn pairs() {
    let each = |a: [f32; 2], c: [f32; 2], f: fn(f32, f32) -> f32| [f(a[0], c[0]), f(a[1], c[1])];
    halves("v_pk_add_f16 v20, v8, v9", |a, c, _| each(a, c, |a, c| a + c));
    halves("v_pk_mul_f16 v20, v8, v9 op_sel:[1,0] op_sel_hi:[0,1]", |a, c, _| {
        each([a[1], a[0]], c, |a, c| a * c)
    });
    halves("v_pk_fma_f16 v20, v8, v9, v10 neg_lo:[0,0,1] neg_hi:[0,0,1]", |a, c, d| {
        [a[0] * c[0] - d[0], a[1] * c[1] - d[1]]
    });
    halves("v_pk_max_f16 v20, v8, v9", |a, c, _| each(a, c, f32::max));
    halves("v_add_f16_e32 v20, v8, v9", |a, c, _| [a[0] + c[0], 0.0]);
    halves("v_pack_b32_f16 v20, v8, v9 op_sel:[1,0,0]", |a, c, _| [a[1], c[0]]);
    halves(
        "v_fma_mixlo_f16 v20, v8, v9, v10 op_sel_hi:[1,1,1]; \
         v_fma_mixhi_f16 v20, v8, v9, v10 op_sel:[1,1,1] op_sel_hi:[1,1,1]",
        |a, c, d| [a[0].mul_add(c[0], d[0]), a[1].mul_add(c[1], d[1])],
    );
    let mut machine = Machine::with_floats();
    machine.run("v_pk_fma_f32 v[20:21], v[0:1], v[2:3], v[4:5] op_sel:[0,1,0]").unwrap();
    let v = &machine.wave.vectors;
    for lane in 0..64 {
        let f = |n: usize| f32::from_bits(v[n][lane]);
        assert_eq!([f(20), f(21)], [f(0).mul_add(f(3), f(4)), f(1).mul_add(f(3), f(5))]);
    }
}

#[test]
fn long_numbers() {
    let mut machine = Machine::new();
    let lines = "v_mad_u64_u32 v[20:21], s[10:11], v0, v1, v[2:3]; v_lshl_add_u64 v[22:23], v[2:3], 2, v[4:5]; \
                 v_ashrrev_i64 v[24:25], 9, v[2:3]; v_add_co_u32_e32 v26, vcc, v2, v4; \
                 v_addc_co_u32_e32 v27, vcc, v3, v5, vcc; v_cmp_lt_u64_e64 s[12:13], v[2:3], v[4:5]";
    machine.run(lines).unwrap();
    for lane in 0..64 {
        let v = |n: usize| u64::from(machine.wave.vectors[n][lane]);
        let (x, y) = (machine.long(2, lane), machine.long(4, lane));
        let (sum, carry) = (v(0) * v(1)).overflowing_add(x);
        assert_eq!(machine.long(20, lane), sum);
        assert_eq!(machine.wave.pair(10) >> lane & 1 == 1, carry);
        assert_eq!(machine.long(22, lane), (x << 2).wrapping_add(y));
        assert_eq!(machine.long(24, lane), (x as i64 >> 9) as u64);
        let (sum, carry) = x.overflowing_add(y);
        assert_eq!((machine.long(26, lane), machine.wave.pair(VCC) >> lane & 1 == 1), (sum, carry));
        assert_eq!(machine.wave.pair(12) >> lane & 1 == 1, x < y);
    }
}

#[test]
fn comparisons_and_choices() {
    let mut machine = Machine::with_floats();
    machine.wave.vectors[1][5] = f32::NAN.to_bits();
    machine.wave.set_mask(EXEC, SOME);
    let lines = "v_cmp_nlt_f32_e32 vcc, v0, v1; v_cndmask_b32_e32 v20, v2, v3, vcc; \
                 v_cmp_class_f32_e64 s[10:11], v1, 3; v_cmp_gt_i32_e64 s[12:13], s0, v0";
    machine.run(lines).unwrap();
    let (wave, v) = (&machine.wave, &machine.wave.vectors);
    let mut want = 0;
    for lane in 0..64 {
        let f = |n: usize| f32::from_bits(v[n][lane]);
        let holds = f(0).partial_cmp(&f(1)) != Some(std::cmp::Ordering::Less);
        if SOME >> lane & 1 == 1 {
            want |= u64::from(holds) << lane;
            assert_eq!(v[20][lane], if holds { v[3][lane] } else { v[2][lane] });
            let greater = wave.scalars[0] as i32 > v[0][lane] as i32;
            assert_eq!(wave.pair(12) >> lane & 1 == 1, greater);
        }
    }
    assert_eq!(wave.pair(VCC), want);
    assert_eq!(wave.pair(10), 1 << 5);
}

#[test]
fn scalars() {
    let mut machine = Machine::new();
    let [a, c] = [machine.wave.scalars[0], machine.wave.scalars[1]];
    let long = machine.wave.pair(2);
    let lines = "s_add_u32 s10, s0, s1; s_addc_u32 s11, 0, 0; s_mul_hi_u32 s12, s0, s1; s_bfe_u32 s13, s0, 0x80004; \
                 s_lshl_b64 s[14:15], s[2:3], 7; s_cmp_lt_i32 s0, s1; s_cselect_b32 s16, s0, s1; s_movk_i32 s17, 0xfffe; \
                 s_lshl2_add_u32 s18, s0, s1; s_andn2_b64 s[20:21], s[2:3], s[0:1]; s_ff1_i32_b64 s22, s[2:3]; \
                 s_getpc_b64 s[24:25]; s_bfe_i64 s[26:27], s[2:3], 0x200000; s_bfe_i64 s[28:29], s[2:3], 0x280014";
    machine.run(lines).unwrap();
    let s = &machine.wave.scalars;
    let (sum, carry) = a.overflowing_add(c);
    assert_eq!((s[10], s[11]), (sum, carry.into()));
    assert_eq!((s[12], s[13]), (((u64::from(a) * u64::from(c)) >> 32) as u32, a >> 4 & 255));
    assert_eq!(machine.wave.pair(14), long << 7);
    assert_eq!(s[16], if (a as i32) < c as i32 { a } else { c });
    assert_eq!((s[17], s[18]), (-2i32 as u32, (a << 2).wrapping_add(c)));
    assert_eq!(machine.wave.pair(20), long & !(u64::from(a) | u64::from(c) << 32));
    assert_eq!((s[22], machine.wave.pair(24)), (long.trailing_zeros(), 0x1000 + 11 * 8 + 4));
    let fields = [long as i32 as i64, (long as i64) << 4 >> 24];
    assert_eq!([26, 28].map(|at| machine.wave.pair(at) as i64), fields);
}

#[test]
fn lanes_are_switched_off_and_on() {
    let mut machine = Machine::new();
    machine.wave.set_mask(VCC, 0xff00);
    machine
        .run(
            "s_and_saveexec_b64 s[10:11], vcc; v_mov_b32_e32 v20, 7; s_or_b64 exec, exec, s[10:11]",
        )
        .unwrap();
    assert_eq!((machine.wave.pair(10), machine.wave.exec()), (!0, !0));
    for lane in 0..64 {
        assert_eq!(machine.wave.vectors[20][lane] == 7, (8..16).contains(&lane));
    }
    machine.wave.set_mask(VCC, 0);
    machine.run("s_and_saveexec_b64 s[10:11], vcc").unwrap();
    assert!(!machine.wave.condition && machine.wave.exec() == 0);
    machine.run("v_mbcnt_lo_u32_b32 v21, -1, 0; v_mov_b32_e32 v20, 8").unwrap();
    assert!(machine.wave.vectors[20].iter().all(|&x| x != 8));
    machine.wave.set_mask(EXEC, !0);
    machine.run("v_mbcnt_lo_u32_b32 v20, -1, 0; v_mbcnt_hi_u32_b32 v20, -1, v20; v_readlane_b32 s10, v20, 9; v_readfirstlane_b32 s11, v20").unwrap();
    assert_eq!(machine.wave.vectors[20], std::array::from_fn(|lane| lane as u32));
    assert_eq!((machine.wave.scalars[10], machine.wave.scalars[11]), (9, 0));
}

#[test]
fn wavefronts_of_32() {
    let mut machine = Machine::new();
    machine.wave.lanes = 32;
    machine.wave.set_mask(EXEC, 0xffff);
    let lines = "v_add_nc_u32_e32 v20, v0, v1; v_cmp_gt_u32_e32 vcc_lo, v0, v1; v_cvt_f16_f32_e32 v21, 1.0; \
                 v_mad_u64_u32 v[22:23], null, v0, v1, v[2:3]";
    machine.run_for(lines, "gfx1100").unwrap();
    let wave = &machine.wave;
    for lane in 0..16 {
        let [a, c] = [0, 1].map(|n| wave.vectors[n][lane]);
        assert_eq!(wave.vectors[20][lane], a.wrapping_add(c));
        assert_eq!(wave.scalars[106] >> lane & 1 == 1, a > c);
        assert_eq!(wave.vectors[21][lane], POISON & 0xffff_0000 | 0x3c00, "the upper half stays");
    }
    assert_eq!((wave.vectors[20][16], wave.scalars[106] >> 16), (POISON, 0));
}

/// Counts by kind, arithmetic of scalars, what is named otherwise.
#[test]
fn instructions_of_the_twelfth_generation() {
    let memory = allocate(512).unwrap();
    let mut machine = Machine::new();
    machine.wave.lanes = 32;
    machine.wave.set_pair(10, memory.expose_provenance() as u64);
    machine.wave.set_scalar(TTMP + 9, 3);
    machine.wave.vectors[16] = std::array::from_fn(|lane| 4 * lane as u32);
    machine.wave.vectors[17] = machine.wave.vectors[16];
    let lines = "global_load_b32 v20, v16, s[10:11]; global_store_b32 v16, v0, s[10:11] scope:SCOPE_DEV; \
                 s_wait_loadcnt 0x1; v_mov_b32_e32 v21, v20; global_load_b32 v20, v16, s[10:11]; \
                 ds_store_b32 v17, v1; ds_load_b32 v22, v17; s_wait_loadcnt_dscnt 0x1; \
                 v_mov_b32_e32 v23, v22; s_wait_dscnt 0x0; s_load_b32 s12, s[10:11], 0x0; \
                 s_mov_b32 s13, s12; s_wait_kmcnt 0x0; s_mov_b32 s14, ttmp9; global_inv scope:SCOPE_SE; \
                 s_load_u16 s15, s[10:11], 0x2; s_load_i8 s16, s[10:11], 0x1; s_wait_kmcnt 0x0";
    machine.run_for(lines, "gfx1201").unwrap();
    let (v, s) = (&machine.wave.vectors, &machine.wave.scalars);
    for lane in 0..32 {
        let words = [20, 21, 22, 23].map(|n| v[n][lane]);
        assert_eq!(words, [v[0][lane], POISON, v[1][lane], POISON]);
    }
    assert_eq!([s[12], s[13], s[14]], [v[0][0], POISON, 3]);
    assert_eq!([s[15], s[16]], [v[0][0] >> 16, (v[0][0] >> 8) as i8 as u32]);
    // SAFETY: of `allocate`, not used after.
    assert!(unsafe { free(memory) });

    let lines = "s_mul_u64 s[20:21], s[0:1], s[2:3]; s_add_nc_u64 s[22:23], s[0:1], s[2:3]; \
                 s_sub_nc_u64 s[24:25], s[0:1], s[2:3]; s_cvt_f32_u32 s26, 7; s_mul_f32 s27, s26, 0.5; \
                 s_trunc_f32 s28, s27; s_fmamk_f32 s29, s28, 0x40000000, s26; s_cvt_u32_f32 s30, s29; \
                 v_s_rcp_f32 s31, 4.0; v_max_num_f32_e32 v24, 1.0, v0; \
                 v_mad_co_u64_u32 v[26:27], null, s0, v1, v[2:3]";
    machine.run_for(lines, "gfx1201").unwrap();
    let (wave, [x, y]) = (&machine.wave, [0, 2].map(|n| machine.wave.pair(n)));
    assert_eq!(wave.pair(20), x.wrapping_mul(y));
    assert_eq!((wave.pair(22), wave.pair(24)), (x.wrapping_add(y), x.wrapping_sub(y)));
    let floats = [26, 27, 28, 29, 31].map(|n| f32::from_bits(wave.scalars[n]));
    assert_eq!((floats, wave.scalars[30]), ([7.0, 3.5, 3.0, 13.0, 0.25], 13));
    let number = f32::from_bits(wave.vectors[0][5]);
    assert_eq!(wave.vectors[24][5], number.max(1.0).to_bits());
    let product = (x & 0xffff_ffff) * u64::from(wave.vectors[1][5]);
    assert_eq!(machine.long(26, 5), product.wrapping_add(machine.long(2, 5)));
    assert_eq!(
        machine.run_for("s_barrier_signal -1; s_barrier_wait 0xffff", "gfx1201").unwrap(),
        Flow::Barrier
    );
}

#[test]
fn two_instructions_in_one() {
    let mut machine = Machine::new();
    machine.wave.lanes = 32;
    let [a, c] = [0, 1].map(|n| machine.wave.vectors[n]);
    let line = "v_dual_mov_b32 v0, v1 :: v_dual_add_nc_u32 v1, v0, v1";
    machine.run_for(line, "gfx1100").unwrap();
    assert_eq!(machine.wave.vectors[0][..32], c[..32]);
    assert_eq!(machine.wave.vectors[1][7], a[7].wrapping_add(c[7]));
    machine.run_for("v_cmpx_eq_u64_e32 0, v[2:3]", "gfx1100").unwrap();
    assert_eq!(machine.wave.exec(), 0);
}

#[test]
fn what_is_not_known_is_an_error() {
    for (line, what) in [
        ("v_unheard_of v0, v1", "unknown instruction `v_unheard_of`"),
        ("v_mov_b32_e32 v0, v1 strange:1", "modifier `strange:1`"),
        ("v_mov_b32_e32 v0, w1", "`w1`"),
        ("s_waitcnt soon(0)", "`soon(0)`"),
        ("s_branch 100", "a branch to no instruction"),
    ] {
        let fault = Machine::new().run(line).unwrap_err().to_string();
        assert!(fault.contains(what), "{fault}");
    }
    assert!(Code::parse("\tv_mov_b32_e32 v0, v1\n", "gfx942").is_err());
}

#[test]
fn branches_and_ends() {
    let mut machine = Machine::new();
    machine.wave.condition = true;
    assert_eq!(machine.run("s_cbranch_scc0 65535; s_cbranch_scc1 65533").unwrap(), Flow::Jump(0));
    assert_eq!(machine.run("s_barrier").unwrap(), Flow::Barrier);
    assert_eq!(machine.run("s_endpgm").unwrap(), Flow::End);
}

#[test]
fn a_stream_that_is_destroyed_is_recorded_no_longer() {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the handle is written, and used before it is destroyed but in the question whether it is known.
    let asked = unsafe {
        assert_eq!(runtime::hipStreamCreateWithFlags(&raw mut stream, 0), 0);
        assert_eq!(graphs::hipStreamBeginCapture(stream, 0), 0);
        let before = graphs::is_recorded(stream);
        assert_eq!(runtime::hipStreamDestroy(stream), 0);
        (before, graphs::is_recorded(stream))
    };
    assert_eq!(asked, (true, false));
}
