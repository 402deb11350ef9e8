//! Loads and stores, and what waits for them.

use super::*;

#[test]
fn memory_of_the_block() {
    let mut machine = Machine::new();
    machine.wave.vectors[16] = std::array::from_fn(|lane| 8 * lane as u32);
    let lines = "ds_write_b64 v16, v[0:1]; ds_write_b16 v16, v2 offset:4; ds_write_b8_d16_hi v16, v3 offset:7; \
                 s_waitcnt lgkmcnt(0); ds_read2_b32 v[20:21], v16 offset0:1 offset1:0; \
                 ds_read_i16 v22, v16 offset:4; ds_read_u16_d16_hi v23, v16 offset:4; s_waitcnt lgkmcnt(0)";
    machine.run(lines).unwrap();
    let v = &machine.wave.vectors;
    for lane in 0..64 {
        let word = v[2][lane] & 0xffff | v[1][lane] & 0xff_0000 | (v[3][lane] >> 16 & 0xff) << 24;
        assert_eq!((v[20][lane], v[21][lane]), (word, v[0][lane]));
        assert_eq!(v[22][lane], word as i16 as u32);
        assert_eq!(v[23][lane], POISON & 0xffff | word << 16);
    }
    machine.run("ds_write2st64_b32 v17, v0, v1 offset0:0 offset1:3").unwrap_err();
    machine.wave.vectors[17] = [0; 64];
    machine.wave.set_mask(EXEC, 1);
    machine.run("ds_write2st64_b32 v17, v0, v1 offset0:0 offset1:3; ds_max_u32 v17, v1").unwrap();
    let [a, c] = [0, 1].map(|n| machine.wave.vectors[n][0]);
    assert_eq!(machine.lds[..4], a.max(c).to_le_bytes());
    assert_eq!(machine.lds[768..772], c.to_le_bytes());
    machine.run("ds_write_b64 v17, v[0:1]; ds_add_u64 v17, v[2:3]").unwrap();
    let sum = machine.long(0, 0).wrapping_add(machine.long(2, 0));
    assert_eq!(machine.lds[..8], sum.to_le_bytes());
    let fault = machine.run("ds_read_b128 v[20:23], v17 offset:1020").unwrap_err().to_string();
    assert!(fault.contains("16 bytes at 1020 of the 1024"), "{fault}");
}

#[test]
fn memory_of_the_device() {
    let memory = allocate(64 * 16).unwrap();
    let mut machine = Machine::new();
    machine.wave.set_pair(10, memory.expose_provenance() as u64);
    machine.wave.vectors[16] = std::array::from_fn(|lane| 16 * lane as u32);
    let lines = "global_store_dwordx3 v16, v[0:2], s[10:11]; global_store_short_d16_hi v16, v3, s[10:11] offset:12; \
                 global_load_dwordx4 v[20:23], v16, s[10:11]; global_load_sbyte v24, v16, s[10:11] offset:1; \
                 global_load_short_d16 v25, v16, s[10:11] offset:2; s_waitcnt vmcnt(0)";
    machine.run(lines).unwrap();
    let v = &machine.wave.vectors;
    for lane in 0..64 {
        assert!((0..3).all(|n| v[20 + n][lane] == v[n][lane]));
        assert_eq!(v[23][lane], POISON & 0xffff_0000 | v[3][lane] >> 16);
        assert_eq!(v[24][lane], (v[0][lane] >> 8) as i8 as u32);
        assert_eq!(v[25][lane], POISON & 0xffff_0000 | v[0][lane] >> 16);
    }
    machine.run("v_mov_b32_e32 v26, 0; global_atomic_umax v26, v0, s[10:11]; s_load_dwordx2 s[12:13], s[10:11], 0x0; s_waitcnt lgkmcnt(0)").unwrap();
    assert_eq!(machine.wave.scalars[12], machine.wave.vectors[0].into_iter().max().unwrap());
    for line in [
        "global_load_dword v20, v16, s[10:11] offset:16",
        "global_store_dwordx2 v16, v[0:1], s[10:11] offset:12",
        "s_load_dwordx4 s[12:15], s[10:11], 0x3f4",
    ] {
        let fault = machine.run(line).unwrap_err().to_string();
        assert!(fault.contains("outside of every allocation"), "{fault}");
    }
    // SAFETY: of `allocate`, not used after.
    assert!(unsafe { free(memory) });
    machine.run("global_load_dword v20, v16, s[10:11]").unwrap_err();
}

#[test]
fn memory_of_a_thread() {
    let mut machine = Machine::new();
    let lines = "scratch_store_dwordx2 off, v[0:1], off offset:8; scratch_load_dword v20, off, off offset:12; s_waitcnt vmcnt(0)";
    machine.run(lines).unwrap();
    assert_eq!(machine.wave.vectors[20], machine.wave.vectors[1]);
    let lines = "s_mov_b32 s20, 4; buffer_store_dword v2, off, s[0:3], 0 offset:16; v_mov_b32_e32 v21, 8; \
                 buffer_load_dword v22, v21, s[0:3], s20 offen offset:4; s_waitcnt vmcnt(0)";
    machine.run(lines).unwrap();
    assert_eq!(machine.wave.vectors[22], machine.wave.vectors[2]);
    for line in [
        "scratch_load_dword v20, off, off offset:64",
        "buffer_load_dword v20, off, s[0:3], 0 offset:64",
    ] {
        let fault = machine.run(line).unwrap_err().to_string();
        assert!(fault.contains("of a thread's 64 bytes"), "{fault}");
    }
}

#[test]
fn what_is_not_waited_for_is_poison() {
    let memory = allocate(512).unwrap();
    let mut machine = Machine::new();
    machine.wave.set_pair(10, memory.expose_provenance() as u64);
    machine.wave.vectors[16] = std::array::from_fn(|lane| 4 * lane as u32);
    let lines = "global_store_dword v16, v0, s[10:11]; global_load_dword v20, v16, s[10:11]; global_load_dword v21, v16, s[10:11]; \
                 s_waitcnt vmcnt(1); v_mov_b32_e32 v22, v20; v_mov_b32_e32 v23, v21; \
                 s_load_dword s12, s[10:11], 0x0; s_waitcnt lgkmcnt(1); s_mov_b32 s13, s12; s_waitcnt lgkmcnt(0); s_mov_b32 s14, s12";
    machine.run(lines).unwrap();
    let wave = &machine.wave;
    assert_eq!((wave.vectors[22], wave.vectors[23]), (wave.vectors[0], [POISON; 64]));
    assert_eq!((wave.scalars[13], wave.scalars[14]), (POISON, wave.vectors[0][0]));
    // SAFETY: of `allocate`, not used after.
    assert!(unsafe { free(memory) });
}
