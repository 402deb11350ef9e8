//! The block's own memory, and exchanges between lanes that go through its unit.

use crate::Fault;
use crate::inst::{Inst, Run};
use crate::wave::{Block, Flow, Half, Kind, Lanes, Load, Wave};

type Done = Result<Flow, Fault>;

/// The `bytes` bytes of the block's memory.
#[inline(always)]
pub(crate) fn place<'a>(
    lds: &'a mut [u8],
    inst: &Inst,
    at: u32,
    bytes: usize,
) -> Result<&'a mut [u8], Fault> {
    let (start, length) = (at as usize, lds.len());
    lds.get_mut(start..start + bytes).ok_or_else(|| outside(inst, at, bytes, length))
}

#[cold]
fn outside(inst: &Inst, at: u32, bytes: usize, length: usize) -> Fault {
    inst.fault(format_args!("{bytes} bytes at {at} of the {length} of the block's memory"))
}

/// A number of up to four bytes.
#[inline(always)]
pub(crate) fn number(bytes: &[u8]) -> u32 {
    match *bytes {
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
        _ => bytes.iter().rev().fold(0, |n, &b| n << 8 | u32::from(b)),
    }
}

/// The lanes of a mask.
pub(crate) fn lanes_of(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros() as usize;
        (mask != 0).then(|| {
            mask &= mask - 1;
            lane
        })
    })
}

fn addresses(wave: &Wave, inst: &Inst, n: usize) -> Lanes {
    let mut buffer = [0; 64];
    *wave.source(inst, n, Kind::F32, &mut buffer)
}

/// Offsets of both accesses in bytes.
fn offsets<const BYTES: usize, const STRIDE: usize>(inst: &Inst, two: bool) -> [u32; 2] {
    match two {
        true => [inst.offset, inst.offset1].map(|n| n as u32 * (BYTES * STRIDE) as u32),
        false => [inst.offset as u32; 2],
    }
}

/// Whole words: one value, or with a stride two.
fn read<const BYTES: usize, const STRIDE: usize>(
    wave: &mut Wave,
    inst: &Inst,
    block: &mut Block,
) -> Done {
    let (from, mask, words) = (addresses(wave, inst, 1), wave.exec(), BYTES / 4);
    let count = if STRIDE > 0 { 2 } else { 1 };
    let offsets = offsets::<BYTES, STRIDE>(inst, STRIDE > 0);
    let mut data = wave.room(count * words);
    for (data, offset) in data.chunks_exact_mut(words).zip(offsets) {
        for lane in lanes_of(mask) {
            let at = from[lane].wrapping_add(offset);
            let bytes = place(&mut block.lds, inst, at, BYTES)?;
            for (to, bytes) in data.iter_mut().zip(bytes.chunks_exact(4)) {
                to[lane] = number(bytes);
            }
        }
    }
    wave.load_lds(Load { first: inst.vector(0)?, mask, half: Half::Whole, data });
    Ok(Flow::Next)
}

fn read_small<const BYTES: usize, const SIGNED: bool>(
    wave: &mut Wave,
    inst: &Inst,
    block: &mut Block,
    half: Half,
) -> Done {
    let (from, mask) = (addresses(wave, inst, 1), wave.exec());
    let mut data = wave.room(1);
    for lane in lanes_of(mask) {
        let at = from[lane].wrapping_add(inst.offset as u32);
        let value = number(place(&mut block.lds, inst, at, BYTES)?);
        let unused = 32 - 8 * BYTES as u32;
        data[0][lane] = if SIGNED { ((value << unused) as i32 >> unused) as u32 } else { value };
    }
    wave.load_lds(Load { first: inst.vector(0)?, mask, half, data });
    Ok(Flow::Next)
}

fn write<const BYTES: usize, const STRIDE: usize>(
    wave: &mut Wave,
    inst: &Inst,
    block: &mut Block,
) -> Done {
    let (to, count) = (addresses(wave, inst, 0), if STRIDE > 0 { 2 } else { 1 });
    let offsets = offsets::<BYTES, STRIDE>(inst, STRIDE > 0);
    let sources = [inst.vector(1)?, if count == 2 { inst.vector(2)? } else { 0 }];
    for (source, offset) in sources.into_iter().zip(offsets).take(count) {
        let values = &wave.vectors[source..source + BYTES.div_ceil(4)];
        for lane in lanes_of(wave.exec()) {
            let at = to[lane].wrapping_add(offset);
            let bytes = place(&mut block.lds, inst, at, BYTES)?;
            for (bytes, values) in bytes.chunks_mut(4).zip(values) {
                bytes.copy_from_slice(&values[lane].to_le_bytes()[..bytes.len()]);
            }
        }
    }
    wave.count_lds();
    Ok(Flow::Next)
}

/// The upper half of a register.
fn write_upper<const BYTES: usize>(wave: &mut Wave, inst: &Inst, block: &mut Block) -> Done {
    let (to, from) = (addresses(wave, inst, 0), inst.vector(1)?);
    for lane in lanes_of(wave.exec()) {
        let at = to[lane].wrapping_add(inst.offset as u32);
        let value = (wave.vectors[from][lane] >> 16).to_le_bytes();
        place(&mut block.lds, inst, at, BYTES)?.copy_from_slice(&value[..BYTES]);
    }
    wave.count_lds();
    Ok(Flow::Next)
}

/// Changes words one lane after the other; what was there goes into operand 0 where the instruction returns it.
fn change<const RETURNS: bool>(
    wave: &mut Wave,
    inst: &Inst,
    block: &mut Block,
    f: impl Fn(u32, u32) -> u32,
) -> Done {
    let first = usize::from(RETURNS);
    let (to, from, mask) = (addresses(wave, inst, first), inst.vector(first + 1)?, wave.exec());
    let mut before = [0; 64];
    for lane in lanes_of(mask) {
        let at = to[lane].wrapping_add(inst.offset as u32);
        let bytes = place(&mut block.lds, inst, at, 4)?;
        before[lane] = number(bytes);
        bytes.copy_from_slice(&f(before[lane], wave.vectors[from][lane]).to_le_bytes());
    }
    match RETURNS {
        true => {
            wave.load_lds(Load {
                first: inst.vector(0)?,
                mask,
                half: Half::Whole,
                data: vec![before],
            });
        }
        false => wave.count_lds(),
    }
    Ok(Flow::Next)
}

/// Adds to numbers of 64 bits.
fn add_long(wave: &mut Wave, inst: &Inst, block: &mut Block) -> Done {
    let (to, added) = (addresses(wave, inst, 0), wave.longs(inst, 1));
    for lane in lanes_of(wave.exec()) {
        let at = to[lane].wrapping_add(inst.offset as u32);
        let bytes = place(&mut block.lds, inst, at, 8)?;
        let before = u64::from(number(&bytes[..4])) | u64::from(number(&bytes[4..])) << 32;
        let sum = before.wrapping_add(added[lane]);
        bytes.copy_from_slice(&sum.to_le_bytes());
    }
    wave.count_lds();
    Ok(Flow::Next)
}

/// Values of other lanes.
fn exchange(wave: &mut Wave, inst: &Inst, from: impl Fn(usize) -> usize, values: &Lanes) -> Done {
    let mask = wave.exec();
    let value = |lane: usize| {
        let other = from(lane);
        if mask >> other & 1 == 1 { values[other] } else { 0 }
    };
    let data = vec![std::array::from_fn(|lane| if lane < wave.lanes { value(lane) } else { 0 })];
    wave.load_lds(Load { first: inst.vector(0)?, mask, half: Half::Whole, data });
    Ok(Flow::Next)
}

pub(crate) fn find(name: &str) -> Option<Run> {
    let run: Run = match name {
        "ds_read_b32" | "ds_load_b32" => read::<4, 0>,
        "ds_read_b64" | "ds_load_b64" => read::<8, 0>,
        "ds_read_b96" | "ds_load_b96" => read::<12, 0>,
        "ds_read_b128" | "ds_load_b128" => read::<16, 0>,
        "ds_read2_b32" | "ds_load_2addr_b32" => read::<4, 1>,
        "ds_read2_b64" | "ds_load_2addr_b64" => read::<8, 1>,
        "ds_read2st64_b32" | "ds_load_2addr_stride64_b32" => read::<4, 64>,
        "ds_read2st64_b64" | "ds_load_2addr_stride64_b64" => read::<8, 64>,
        "ds_read_u8" | "ds_load_u8" => |w, i, b| read_small::<1, false>(w, i, b, Half::Whole),
        "ds_read_i8" | "ds_load_i8" => |w, i, b| read_small::<1, true>(w, i, b, Half::Whole),
        "ds_read_u16" | "ds_load_u16" => |w, i, b| read_small::<2, false>(w, i, b, Half::Whole),
        "ds_read_i16" | "ds_load_i16" => |w, i, b| read_small::<2, true>(w, i, b, Half::Whole),
        "ds_read_u16_d16" | "ds_load_u16_d16" => {
            |w, i, b| read_small::<2, false>(w, i, b, Half::Low)
        }
        "ds_read_u16_d16_hi" | "ds_load_u16_d16_hi" => {
            |w, i, b| read_small::<2, false>(w, i, b, Half::High)
        }
        "ds_write_b8" | "ds_store_b8" => write::<1, 0>,
        "ds_write_b16" | "ds_store_b16" => write::<2, 0>,
        "ds_write_b32" | "ds_store_b32" => write::<4, 0>,
        "ds_write_b64" | "ds_store_b64" => write::<8, 0>,
        "ds_write_b96" | "ds_store_b96" => write::<12, 0>,
        "ds_write_b128" | "ds_store_b128" => write::<16, 0>,
        "ds_write2_b32" | "ds_store_2addr_b32" => write::<4, 1>,
        "ds_write2_b64" | "ds_store_2addr_b64" => write::<8, 1>,
        "ds_write2st64_b32" | "ds_store_2addr_stride64_b32" => write::<4, 64>,
        "ds_write2st64_b64" | "ds_store_2addr_stride64_b64" => write::<8, 64>,
        "ds_write_b8_d16_hi" | "ds_store_b8_d16_hi" => write_upper::<1>,
        "ds_write_b16_d16_hi" | "ds_store_b16_d16_hi" => write_upper::<2>,
        "ds_max_u32" => |w, i, b| change::<false>(w, i, b, |x, y| x.max(y)),
        "ds_add_u32" => |w, i, b| change::<false>(w, i, b, |x, y| x.wrapping_add(y)),
        "ds_add_u64" => add_long,
        "ds_or_b32" => |w, i, b| change::<false>(w, i, b, |x, y| x | y),
        "ds_max_rtn_u32" => |w, i, b| change::<true>(w, i, b, |x, y| x.max(y)),
        "ds_add_rtn_u32" => |w, i, b| change::<true>(w, i, b, |x, y| x.wrapping_add(y)),
        "ds_bpermute_b32" => |w, i, _| {
            let from = addresses(w, i, 1);
            let (offset, lanes) = (i.offset as u32, w.lanes);
            let values = addresses(w, i, 2);
            exchange(w, i, |l| from[l].wrapping_add(offset) as usize / 4 % lanes, &values)
        },
        _ => return None,
    };
    Some(run)
}
