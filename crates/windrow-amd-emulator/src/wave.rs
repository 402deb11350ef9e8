//! The state of a wavefront, and how instructions read and write it.

use crate::Fault;
use crate::inst::{EXEC, Exchange, Inst, NULL, Operand, Part, SCALARS, VCC, Wait};
use crate::memory::Ranges;
use std::collections::VecDeque;

/// A value for each lane. Wavefronts of 32 use the lower ones.
pub type Lanes = [u32; 64];

/// The contents of registers and memory to which nothing was written, and of registers that a load has not filled: NaN
/// as f32, and two NaNs as f16 and bf16; no address.
pub const POISON: u32 = 0x7fd5_7fd5;

/// The next step after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Next,
    Jump(usize),
    Barrier,
    End,
}

/// The format of numbers, and the place of their sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// f32, and integers.
    F32,
    F16,
}

/// The state that the wavefronts of a block share.
#[derive(Debug)]
pub struct Block<'a> {
    pub lds: Vec<u8>,
    pub memory: &'a Ranges,
    /// The address of the code object.
    pub base: u64,
}

/// The part of a register that a load fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    Whole,
    Low,
    High,
}

/// A load whose values are not yet to be seen.
#[derive(Clone, Debug)]
pub struct Load {
    pub first: usize,
    pub mask: u64,
    pub half: Half,
    pub data: Vec<Lanes>,
}

#[derive(Debug)]
pub struct Wave {
    pub scalars: [u32; SCALARS],
    pub vectors: Vec<Lanes>,
    pub condition: bool,
    pub next: usize,
    /// 64 or 32.
    pub lanes: usize,
    /// Each lane's private memory, one after the other.
    pub scratch: Vec<u8>,
    /// Outstanding operations in their order; `None` for those that write no register.
    memory_loads: VecDeque<Option<Load>>,
    lds_loads: VecDeque<Option<Load>>,
    scalar_loads: Vec<(u16, Vec<u32>)>,
    /// The buffers of loads that have ended.
    spare: Vec<Vec<Lanes>>,
}

impl Wave {
    #[must_use]
    pub fn new(lanes: usize, vectors: usize, scratch_bytes: usize) -> Self {
        let mut wave = Wave {
            scalars: [POISON; SCALARS],
            vectors: vec![[POISON; 64]; vectors],
            condition: false,
            next: 0,
            lanes,
            scratch: vec![0; lanes * scratch_bytes],
            memory_loads: VecDeque::new(),
            lds_loads: VecDeque::new(),
            scalar_loads: Vec::new(),
            spare: Vec::new(),
        };
        wave.reset();
        wave
    }

    /// Restores the initial state, with all lanes working.
    pub fn reset(&mut self) {
        self.scalars.fill(POISON);
        self.vectors.fill([POISON; 64]);
        for (byte, poison) in self.scratch.iter_mut().zip(POISON.to_le_bytes().iter().cycle()) {
            *byte = *poison;
        }
        (self.condition, self.next) = (false, 0);
        self.memory_loads.clear();
        self.lds_loads.clear();
        self.scalar_loads.clear();
        self.set_mask(EXEC, !0);
    }

    #[must_use]
    pub fn pair(&self, register: u16) -> u64 {
        let at = register as usize;
        if register == NULL {
            return 0;
        }
        u64::from(self.scalars[at]) | u64::from(self.scalars[at + 1]) << 32
    }

    pub fn set_pair(&mut self, register: u16, value: u64) {
        self.set_scalar(register, value as u32);
        self.set_scalar(register + 1, (value >> 32) as u32);
    }

    pub fn set_scalar(&mut self, register: u16, value: u32) {
        if register != NULL && register != NULL + 1 {
            self.scalars[register as usize] = value;
        }
    }

    /// One bit for each lane.
    #[must_use]
    pub fn mask(&self, register: u16) -> u64 {
        match self.lanes {
            64 => self.pair(register),
            _ => self.scalars[register as usize].into(),
        }
    }

    pub fn set_mask(&mut self, register: u16, value: u64) {
        match self.lanes {
            64 => self.set_pair(register, value),
            _ => self.set_scalar(register, value as u32),
        }
    }

    /// The lanes that work.
    #[must_use]
    pub fn exec(&self) -> u64 {
        self.mask(EXEC)
    }

    /// The mask that an operand is; without one that of VCC.
    pub fn mask_of(&self, inst: &Inst, n: usize) -> Result<u64, Fault> {
        match inst.operands[n] {
            Operand::Scalar(register) => Ok(self.mask(register)),
            Operand::Integer(value) => Ok(value as u64),
            Operand::Nothing if inst.count <= n => Ok(self.mask(VCC)),
            _ => Err(inst.fault("a mask that is no scalar")),
        }
    }

    /// An operand that is the same for all lanes; of vectors the first lane's.
    #[must_use]
    pub fn word(&self, inst: &Inst, n: usize) -> u32 {
        match inst.operands[n] {
            Operand::Scalar(NULL) | Operand::Nothing => 0,
            Operand::Scalar(register) => self.scalars[register as usize],
            Operand::Vector(register) => self.vectors[register as usize][0],
            Operand::Integer(value) => value as u32,
            Operand::Float(value) => (value as f32).to_bits(),
        }
    }

    /// The register as [`Wave::word`], of 64 bits.
    #[must_use]
    pub fn long(&self, inst: &Inst, n: usize) -> u64 {
        match inst.operands[n] {
            Operand::Scalar(register) => self.pair(register),
            Operand::Integer(value) => value as u64,
            Operand::Float(value) => value.to_bits(),
            Operand::Vector(_) | Operand::Nothing => 0,
        }
    }

    /// A source of a vector instruction, in the buffer unless it is a register without modifiers.
    #[inline(always)]
    pub fn source<'a>(
        &'a self,
        inst: &Inst,
        n: usize,
        kind: Kind,
        buffer: &'a mut Lanes,
    ) -> &'a Lanes {
        match inst.operands[n] {
            Operand::Vector(register) if inst.is_plain() => &self.vectors[register as usize],
            Operand::Scalar(_) | Operand::Integer(_) if inst.is_plain() => {
                *buffer = [self.word(inst, n); 64];
                buffer
            }
            _ => {
                self.modified(inst, n, kind, buffer);
                buffer
            }
        }
    }

    fn modified(&self, inst: &Inst, n: usize, kind: Kind, buffer: &mut Lanes) {
        *buffer = match inst.operands[n] {
            Operand::Vector(register) => self.vectors[register as usize],
            Operand::Float(value) if kind == Kind::F16 => {
                [half::f16::from_f64(value).to_bits().into(); 64]
            }
            _ => [self.word(inst, n); 64],
        };
        if let (Some(dpp), 1) = (inst.dpp, n) {
            let before = *buffer;
            for (lane, to) in buffer.iter_mut().enumerate() {
                *to = from(dpp.exchange, lane).map_or(0, |lane| before[lane]);
            }
        }
        let part = if n == 1 || n == 2 { inst.parts[n] } else { Part::Whole };
        let bit = |bits: u8| bits >> n & 1 == 1;
        let (extended, sign) =
            (bit(inst.extended), if kind == Kind::F16 { 0x8000 } else { 1 << 31 });
        let upper = kind == Kind::F16 && inst.op_sel >> (n - 1) & 1 == 1;
        for x in buffer {
            *x = match part {
                Part::Byte(b) if extended => (*x >> (8 * b)) as i8 as u32,
                Part::Byte(b) => *x >> (8 * b) & 0xff,
                Part::Word(h) if extended => (*x >> (16 * h)) as i16 as u32,
                Part::Word(h) => *x >> (16 * h) & 0xffff,
                Part::Whole if upper => *x >> 16,
                Part::Whole => *x,
            };
            if bit(inst.absolute) {
                *x &= !sign;
            }
            if bit(inst.negated) {
                *x ^= sign;
            }
        }
    }

    /// A source of 64 bits, of every lane.
    #[must_use]
    #[inline(always)]
    pub fn longs(&self, inst: &Inst, n: usize) -> [u64; 64] {
        let Operand::Vector(register) = inst.operands[n] else { return [self.long(inst, n); 64] };
        let (low, high) = (&self.vectors[register as usize], &self.vectors[register as usize + 1]);
        let mut result = [0; 64];
        for (lane, to) in result.iter_mut().enumerate() {
            *to = u64::from(low[lane]) | u64::from(high[lane]) << 32;
        }
        result
    }

    /// The lanes that an instruction writes.
    #[must_use]
    pub fn written(&self, inst: &Inst) -> u64 {
        let Some(dpp) = inst.dpp else { return self.exec() };
        let writes = |lane: usize| {
            let chosen = dpp.rows >> (lane / 16) & 1 == 1 && dpp.banks >> (lane % 16 / 4) & 1 == 1;
            let source = from(dpp.exchange, lane).filter(|&l| self.exec() >> l & 1 == 1);
            chosen && (dpp.zero || source.is_some())
        };
        let lanes = (0..self.lanes).filter(|&lane| writes(lane));
        lanes.fold(0, |mask, lane| mask | 1 << lane) & self.exec()
    }

    /// Writes the result of a vector instruction, operand 0.
    #[inline(always)]
    pub fn write(&mut self, inst: &Inst, values: &Lanes) -> Result<Flow, Fault> {
        let Operand::Vector(register) = inst.operands[0] else {
            return Err(inst.fault("a result that is no vector register"));
        };
        let at = register as usize;
        if inst.dpp.is_some() || inst.parts[0] != Part::Whole {
            let mask = self.written(inst);
            let (shift, field) = match inst.parts[0] {
                Part::Byte(b) => (8 * b, 0xff),
                Part::Word(h) => (16 * h, 0xffff),
                Part::Whole => (0, !0),
            };
            let mut placed = *values;
            for (lane, x) in placed.iter_mut().enumerate() {
                let rest = if inst.keeps_rest { self.vectors[at][lane] } else { 0 };
                *x = rest & !(field << shift) | (*x & field) << shift;
            }
            self.set_vector(at, mask, &placed);
        } else {
            self.set_vector(at, self.exec(), values);
        }
        Ok(Flow::Next)
    }

    /// Writes as [`Wave::write`], 16 bits: the upper half becomes 0 on older chips and stays on newer ones.
    #[inline(always)]
    pub fn write_half(&mut self, inst: &Inst, values: &Lanes) -> Result<Flow, Fault> {
        let at = inst.vector(0)?;
        let (upper, mut whole) = (inst.op_sel >> 3 & 1 == 1, *values);
        for (lane, x) in whole.iter_mut().enumerate() {
            let old = self.vectors[at][lane];
            *x = match (upper, inst.keeps_upper()) {
                (true, _) => old & 0xffff | *x << 16,
                (false, true) => old & 0xffff_0000 | *x & 0xffff,
                (false, false) => *x & 0xffff,
            };
        }
        self.write(inst, &whole)
    }

    #[inline(always)]
    pub fn set_vector(&mut self, register: usize, mask: u64, values: &Lanes) {
        let to = &mut self.vectors[register];
        if mask == !0 {
            *to = *values;
        } else {
            for (lane, (to, from)) in to.iter_mut().zip(values).enumerate() {
                let bits = 0u32.wrapping_sub((mask >> lane & 1) as u32);
                *to = *to & !bits | from & bits;
            }
        }
    }

    /// Registers for the values of a load, with arbitrary contents.
    #[must_use]
    pub fn room(&mut self, registers: usize) -> Vec<Lanes> {
        let mut room = self.spare.pop().unwrap_or_default();
        room.resize(registers, [0; 64]);
        room
    }

    /// Starts a load of the device's memory: until it is waited for, its registers are poison.
    pub fn load(&mut self, load: Load) {
        self.poison(&load);
        self.memory_loads.push_back(Some(load));
    }

    /// The same for the block's memory.
    pub fn load_lds(&mut self, load: Load) {
        self.poison(&load);
        self.lds_loads.push_back(Some(load));
    }

    pub fn load_scalars(&mut self, first: u16, values: Vec<u32>) {
        for n in 0..values.len() {
            self.set_scalar(first + n as u16, POISON);
        }
        self.scalar_loads.push((first, values));
    }

    /// An operation on the device's memory that writes no register. From the tenth generation on they have a counter
    /// of their own, which is of no consequence here: what they write can be seen at once.
    pub fn count_memory(&mut self, inst: &Inst) {
        if inst.generation == 9 {
            self.memory_loads.push_back(None);
        }
    }

    pub fn count_lds(&mut self) {
        self.lds_loads.push_back(None);
    }

    fn poison(&mut self, load: &Load) {
        for n in 0..load.data.len() {
            self.fill_register(load, n, &[POISON; 64]);
        }
    }

    fn fill(&mut self, load: Load) {
        for (n, values) in load.data.iter().enumerate() {
            self.fill_register(&load, n, values);
        }
        self.spare.push(load.data);
    }

    fn fill_register(&mut self, load: &Load, n: usize, values: &Lanes) {
        let at = load.first + n;
        if load.half == Half::Whole {
            return self.set_vector(at, load.mask, values);
        }
        let mut whole = self.vectors[at];
        for (to, from) in whole.iter_mut().zip(values) {
            *to = match load.half {
                Half::High => *to & 0xffff | from << 16,
                _ => *to & 0xffff_0000 | from & 0xffff,
            };
        }
        self.set_vector(at, load.mask, &whole);
    }

    /// Waits until no more than so many operations are outstanding. Scalar loads end in any order, those of the
    /// block's memory in their own.
    pub fn wait(&mut self, wait: Wait) {
        while self.memory_loads.len() > wait.memory {
            if let Some(Some(load)) = self.memory_loads.pop_front() {
                self.fill(load);
            }
        }
        while self.lds_loads.len() > wait.lds {
            if let Some(Some(load)) = self.lds_loads.pop_front() {
                self.fill(load);
            }
        }
        if wait.scalar == 0 {
            for (first, values) in std::mem::take(&mut self.scalar_loads) {
                for (n, value) in values.into_iter().enumerate() {
                    self.set_scalar(first + n as u16, value);
                }
            }
        }
    }
}

/// The lane that a lane gets a value from.
fn from(exchange: Exchange, lane: usize) -> Option<usize> {
    let (row, place) = (lane / 16 * 16, lane % 16);
    let within = |place: usize| (place < 16).then_some(row + place);
    match exchange {
        Exchange::Quads(lanes) => Some(lane / 4 * 4 + lanes[lane % 4] as usize),
        Exchange::RowRight(n) => place.checked_sub(n as usize).map(|place| row + place),
        Exchange::RowLeft(n) => within(place + n as usize),
        Exchange::RowRotate(n) => Some(row + (place + 16 - n as usize) % 16),
        Exchange::RowMirror => Some(row + 15 - place),
        Exchange::HalfMirror => Some(lane / 8 * 8 + 7 - lane % 8),
        Exchange::Broadcast15 => row.checked_sub(1),
        Exchange::Broadcast31 => (lane >= 32).then_some(31),
        Exchange::RowShare(n) => Some(row + n as usize),
        Exchange::RowXor(n) => Some(row + (place ^ n as usize)),
    }
}
