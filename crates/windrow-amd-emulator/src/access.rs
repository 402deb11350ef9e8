//! Reading and writing the device's memory, and that of single threads.

use crate::Fault;
use crate::inst::{Inst, Operand, PRIVATE_APERTURE, Run, SHARED_APERTURE};
use crate::lds::{lanes_of, number, place};
use crate::wave::{Block, Flow, Half, Kind, Load, Wave};
use std::sync::atomic::{AtomicU32, Ordering};

type Done = Result<Flow, Fault>;

/// The address space of an address.
const GLOBAL: u8 = 0;
/// Anywhere: two ranges of addresses stand for the block's and the thread's memory.
const FLAT: u8 = 1;
const SCRATCH: u8 = 2;
/// A thread's memory by a descriptor, which is not looked at: kernels have no other buffers.
const BUFFER: u8 = 3;

/// The conversion of a value that is read.
const WHOLE: u8 = 0;
const SIGNED: u8 = 1;
const LOW: u8 = 2;
const HIGH: u8 = 3;

/// The address of each lane; `n` is the operand of the addresses, `base` that of what is added.
fn addresses<const SPACE: u8>(wave: &Wave, inst: &Inst, n: usize, base: usize) -> [u64; 64] {
    let offset = inst.offset as u64;
    let words = || {
        let mut buffer = [0; 64];
        *wave.source(inst, n, Kind::F32, &mut buffer)
    };
    let mut found = [0; 64];
    match (SPACE, inst.operands[base]) {
        (SCRATCH | BUFFER, _) => {
            let added = wave.word(inst, if SPACE == BUFFER { base + 1 } else { base });
            let words = if inst.operands[n] == Operand::Nothing { [0; 64] } else { words() };
            for (to, word) in found.iter_mut().zip(words) {
                *to = u64::from(word.wrapping_add(added)).wrapping_add(offset);
            }
        }
        (_, Operand::Scalar(register)) => {
            let start = wave.pair(register).wrapping_add(offset);
            for (to, word) in found.iter_mut().zip(words()) {
                *to = start.wrapping_add(word.into());
            }
        }
        _ => {
            for (to, start) in found.iter_mut().zip(wave.longs(inst, n)) {
                *to = start.wrapping_add(offset);
            }
        }
    }
    found
}

/// The bytes of one lane's access.
enum Place<'a> {
    /// Within an allocation.
    Memory(*mut u8),
    Own(&'a mut [u8]),
}

/// The last range that an access was in: most stay in one.
struct Last(usize, usize);

impl Last {
    fn holds(&mut self, block: &Block, at: usize, bytes: usize) -> bool {
        if at < self.0 || at >= self.1 {
            let Some((start, end)) = block.memory.around(at) else { return false };
            (self.0, self.1) = (start, end);
        }
        self.1 - at >= bytes
    }
}

#[inline(always)]
fn find_place<'a, const SPACE: u8>(
    scratch: &'a mut [u8],
    lanes: usize,
    inst: &Inst,
    block: &'a mut Block,
    last: &mut Last,
    (lane, at, bytes): (usize, u64, usize),
) -> Result<Place<'a>, Fault> {
    let aperture = (at >> 32) as u32;
    if SPACE == FLAT && aperture == SHARED_APERTURE {
        return Ok(Place::Own(place(&mut block.lds, inst, at as u32, bytes)?));
    }
    if SPACE == SCRATCH || SPACE == BUFFER || SPACE == FLAT && aperture == PRIVATE_APERTURE {
        let (each, at) = (scratch.len() / lanes, at as u32 as usize);
        let own = &mut scratch[lane * each..(lane + 1) * each];
        return match own.get_mut(at..at.saturating_add(bytes)) {
            Some(own) => Ok(Place::Own(own)),
            None => Err(inst.fault(format_args!(
                "lane {lane}: {bytes} bytes at {at} of a thread's {each} bytes"
            ))),
        };
    }
    if last.holds(block, at as usize, bytes) {
        return Ok(Place::Memory(std::ptr::with_exposed_provenance_mut(at as usize)));
    }
    Err(outside(inst, lane, at, bytes))
}

#[cold]
fn outside(inst: &Inst, lane: usize, at: u64, bytes: usize) -> Fault {
    inst.fault(format_args!("lane {lane}: {bytes} bytes at {at:#x}, outside of every allocation"))
}

fn load<const SPACE: u8, const BYTES: usize, const HOW: u8>(
    wave: &mut Wave,
    inst: &Inst,
    block: &mut Block,
) -> Done {
    let (from, mask) = (addresses::<SPACE>(wave, inst, 1, 2), wave.exec());
    let mut data = wave.room(BYTES.div_ceil(4));
    let mut last = Last(0, 0);
    let lanes = wave.lanes;
    for lane in lanes_of(mask) {
        let access = (lane, from[lane], BYTES);
        let mut bytes = [0; BYTES];
        match find_place::<SPACE>(&mut wave.scratch, lanes, inst, block, &mut last, access)? {
            // SAFETY: it was found to lie within an allocation.
            Place::Memory(at) => unsafe { bytes = at.cast::<[u8; BYTES]>().read_unaligned() },
            Place::Own(own) => bytes.copy_from_slice(own),
        }
        for (to, bytes) in data.iter_mut().zip(bytes.chunks(4)) {
            to[lane] = number(bytes);
        }
        if HOW == SIGNED {
            let unused = 32 - 8 * BYTES as u32;
            data[0][lane] = ((data[0][lane] << unused) as i32 >> unused) as u32;
        }
    }
    let half = match HOW {
        LOW => Half::Low,
        HIGH => Half::High,
        _ => Half::Whole,
    };
    wave.load(Load { first: inst.vector(0)?, mask, half, data });
    if SPACE == FLAT {
        wave.count_lds();
    }
    Ok(Flow::Next)
}

fn store<const SPACE: u8, const BYTES: usize, const HOW: u8>(
    wave: &mut Wave,
    inst: &Inst,
    block: &mut Block,
) -> Done {
    // Buffers' values come before the address.
    let [at, from] = if SPACE == BUFFER { [1, 0] } else { [0, 1] };
    let (to, from) = (addresses::<SPACE>(wave, inst, at, 2), inst.vector(from)?);
    let mut last = Last(0, 0);
    let values = &wave.vectors[from..from + BYTES.div_ceil(4)];
    for lane in lanes_of(wave.exec()) {
        let mut bytes = [0; BYTES];
        for (bytes, values) in bytes.chunks_mut(4).zip(values) {
            let value = values[lane] >> if HOW == HIGH { 16 } else { 0 };
            bytes.copy_from_slice(&value.to_le_bytes()[..bytes.len()]);
        }
        let (lanes, access) = (wave.lanes, (lane, to[lane], BYTES));
        match find_place::<SPACE>(&mut wave.scratch, lanes, inst, block, &mut last, access)? {
            // SAFETY: it was found to lie within an allocation.
            Place::Memory(at) => unsafe { at.cast::<[u8; BYTES]>().write_unaligned(bytes) },
            Place::Own(own) => own.copy_from_slice(&bytes),
        }
    }
    wave.count_memory(inst);
    if SPACE == FLAT {
        wave.count_lds();
    }
    Ok(Flow::Next)
}

/// Changes words of the device's memory at once.
fn change(
    wave: &mut Wave,
    inst: &Inst,
    block: &mut Block,
    f: impl Fn(u32, u32, u32) -> u32,
) -> Done {
    // With a result: result, address, value, base; without: address, value, base.
    let first = usize::from(inst.returns);
    let to = addresses::<GLOBAL>(wave, inst, first, first + 2);
    let (from, mask) = (inst.vector(first + 1)?, wave.exec());
    let mut before = [0; 64];
    let mut last = Last(0, 0);
    for lane in lanes_of(mask) {
        let (at, value) = (to[lane] as usize, wave.vectors[from][lane]);
        let second = wave.vectors.get(from + 1).map_or(0, |values| values[lane]);
        if !at.is_multiple_of(4) || !last.holds(block, at, 4) {
            return Err(inst.fault(format_args!("lane {lane}: a word at {at:#x}")));
        }
        // SAFETY: an aligned word within an allocation.
        let word = unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(at)) };
        let changed = word
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| Some(f(old, value, second)));
        before[lane] = changed.unwrap_or_else(|old| old);
    }
    match inst.returns {
        true => {
            wave.load(Load { first: inst.vector(0)?, mask, half: Half::Whole, data: vec![before] });
        }
        false => wave.count_memory(inst),
    }
    Ok(Flow::Next)
}

/// The address of a scalar load, if all of it lies within an allocation.
fn scalar_address(wave: &Wave, inst: &Inst, block: &Block, bytes: usize) -> Result<usize, Fault> {
    let offset = match inst.operands[2] {
        Operand::Integer(n) if inst.negated >> 2 & 1 == 1 => n.wrapping_neg() as u64,
        Operand::Integer(n) => n as u64,
        _ => wave.word(inst, 2).into(),
    };
    let at = wave.long(inst, 1).wrapping_add(offset).wrapping_add(inst.offset as u64) as usize;
    let at = at & !(bytes.min(4) - 1);
    match block.memory.hold(at, bytes) {
        true => Ok(at),
        false => {
            Err(inst.fault(format_args!("{bytes} bytes at {at:#x}, outside of every allocation")))
        }
    }
}

fn load_scalars<const WORDS: usize>(wave: &mut Wave, inst: &Inst, block: &mut Block) -> Done {
    let at = scalar_address(wave, inst, block, 4 * WORDS)?;
    let from: *const [u32; WORDS] = std::ptr::with_exposed_provenance(at);
    // SAFETY: it lies within an allocation.
    let values = unsafe { from.read_unaligned() };
    wave.load_scalars(inst.scalar(0)?, values.to_vec());
    Ok(Flow::Next)
}

/// Part of a word.
fn load_scalar<T: Copy>(
    wave: &mut Wave,
    inst: &Inst,
    block: &mut Block,
    extended: fn(T) -> u32,
) -> Done {
    let at = scalar_address(wave, inst, block, size_of::<T>())?;
    let from: *const T = std::ptr::with_exposed_provenance(at);
    // SAFETY: it lies within an allocation.
    let value = unsafe { from.read_unaligned() };
    wave.load_scalars(inst.scalar(0)?, vec![extended(value)]);
    Ok(Flow::Next)
}

pub(crate) fn find(name: &str) -> Option<Run> {
    if let Some(rest) = name.strip_prefix("s_load_") {
        return Some(match rest {
            "u8" => |w, i, b| load_scalar::<u8>(w, i, b, u32::from),
            "i8" => |w, i, b| load_scalar::<i8>(w, i, b, |x| x as u32),
            "u16" => |w, i, b| load_scalar::<u16>(w, i, b, u32::from),
            "i16" => |w, i, b| load_scalar::<i16>(w, i, b, |x| x as u32),
            "dword" | "b32" => load_scalars::<1>,
            "dwordx2" | "b64" => load_scalars::<2>,
            "dwordx3" | "b96" => load_scalars::<3>,
            "dwordx4" | "b128" => load_scalars::<4>,
            "dwordx8" | "b256" => load_scalars::<8>,
            "dwordx16" | "b512" => load_scalars::<16>,
            _ => return None,
        });
    }
    match name.split_once('_')? {
        ("global", rest) => atomic(rest).or_else(|| plain::<GLOBAL>(rest)),
        ("flat", rest) => plain::<FLAT>(rest),
        ("scratch", rest) => plain::<SCRATCH>(rest),
        ("buffer", rest) => plain::<BUFFER>(rest),
        _ => None,
    }
}

fn plain<const SPACE: u8>(name: &str) -> Option<Run> {
    let run: Run = match name {
        "load_ubyte" | "load_u8" => load::<SPACE, 1, WHOLE>,
        "load_sbyte" | "load_i8" => load::<SPACE, 1, SIGNED>,
        "load_ushort" | "load_u16" => load::<SPACE, 2, WHOLE>,
        "load_sshort" | "load_i16" => load::<SPACE, 2, SIGNED>,
        "load_short_d16" | "load_d16_b16" => load::<SPACE, 2, LOW>,
        "load_short_d16_hi" | "load_d16_hi_b16" => load::<SPACE, 2, HIGH>,
        "load_ubyte_d16" | "load_d16_u8" => load::<SPACE, 1, LOW>,
        "load_ubyte_d16_hi" | "load_d16_hi_u8" => load::<SPACE, 1, HIGH>,
        "load_dword" | "load_b32" => load::<SPACE, 4, WHOLE>,
        "load_dwordx2" | "load_b64" => load::<SPACE, 8, WHOLE>,
        "load_dwordx3" | "load_b96" => load::<SPACE, 12, WHOLE>,
        "load_dwordx4" | "load_b128" => load::<SPACE, 16, WHOLE>,
        "store_byte" | "store_b8" => store::<SPACE, 1, WHOLE>,
        "store_byte_d16_hi" | "store_d16_hi_b8" => store::<SPACE, 1, HIGH>,
        "store_short" | "store_b16" => store::<SPACE, 2, WHOLE>,
        "store_short_d16_hi" | "store_d16_hi_b16" => store::<SPACE, 2, HIGH>,
        "store_dword" | "store_b32" => store::<SPACE, 4, WHOLE>,
        "store_dwordx2" | "store_b64" => store::<SPACE, 8, WHOLE>,
        "store_dwordx3" | "store_b96" => store::<SPACE, 12, WHOLE>,
        "store_dwordx4" | "store_b128" => store::<SPACE, 16, WHOLE>,
        _ => return None,
    };
    Some(run)
}

fn atomic(name: &str) -> Option<Run> {
    let run: Run = match name {
        "atomic_umax" | "atomic_max_u32" => |w, i, b| change(w, i, b, |x, y, _| x.max(y)),
        "atomic_umin" | "atomic_min_u32" => |w, i, b| change(w, i, b, |x, y, _| x.min(y)),
        "atomic_add" | "atomic_add_u32" => |w, i, b| change(w, i, b, |x, y, _| x.wrapping_add(y)),
        "atomic_cmpswap" | "atomic_cmpswap_b32" => {
            |w, i, b| change(w, i, b, |x, y, expected| if x == expected { y } else { x })
        }
        "atomic_or" | "atomic_or_b32" => |w, i, b| change(w, i, b, |x, y, _| x | y),
        "atomic_add_f32" => {
            |w, i, b| change(w, i, b, |x, y, _| (f32::from_bits(x) + f32::from_bits(y)).to_bits())
        }
        _ => return None,
    };
    Some(run)
}
