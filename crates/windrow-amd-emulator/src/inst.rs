//! Instructions, read from the lines of LLVM's disassembler.

mod operands;

use self::operands::{bits, operand, part};
use crate::hiprtc::{Folder, INSTALL, kept};
use crate::wave::{Block, Flow, Wave};
use crate::{Fault, access, lds, matrix, packed, scalar, vector};
use std::collections::HashMap;
use std::process::{Command, Stdio};

/// The disassembler.
pub const DISASSEMBLER: &str = "llvm-objdump-19";

/// Executes an instruction for a wavefront.
pub type Run = fn(&mut Wave, &Inst, &mut Block) -> Result<Flow, Fault>;

/// Numbers of scalar registers.
pub const VCC: u16 = 106;
pub const FLAT_SCRATCH: u16 = 102;
pub const TTMP: u16 = 108;
pub const M0: u16 = 124;
pub const EXEC: u16 = 126;
/// A register that no chip has: a value written there is lost.
pub const NULL: u16 = 128;
/// The number of scalar registers.
pub const SCALARS: usize = 130;

/// The upper 32 bits of addresses in a block's and in a thread's own memory.
pub const SHARED_APERTURE: u32 = 0x0010_0000;
pub const PRIVATE_APERTURE: u32 = 0x0020_0000;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operand {
    /// `off`, or a name that is not looked at.
    Nothing,
    Scalar(u16),
    /// Accumulation registers follow the others.
    Vector(u16),
    Integer(i64),
    Float(f64),
}

/// The part of a register that an operand of SDWA is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Byte(u32),
    Word(u32),
    Whole,
}

/// The exchange of lanes in the first source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    Quads([u8; 4]),
    RowRight(u32),
    RowLeft(u32),
    RowRotate(u32),
    RowMirror,
    HalfMirror,
    /// The last lane of each row into the next row.
    Broadcast15,
    /// Lane 31 into the upper half.
    Broadcast31,
    RowShare(u32),
    RowXor(u32),
}

/// The modifier DPP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dpp {
    pub exchange: Exchange,
    pub rows: u32,
    pub banks: u32,
    /// Lanes without a source read 0; else they keep what they hold.
    pub zero: bool,
}

/// The number of operations that may be outstanding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    pub memory: usize,
    pub lds: usize,
    pub scalar: usize,
}

/// Waits for nothing.
pub(crate) const NOTHING: Wait = Wait { memory: usize::MAX, lds: usize::MAX, scalar: usize::MAX };

#[derive(Clone, Debug)]
pub struct Inst {
    pub address: u64,
    pub text: String,
    pub name: String,
    pub operands: [Operand; 6],
    pub count: usize,
    /// Bits: of the operand with this number.
    pub negated: u8,
    pub absolute: u8,
    pub extended: u8,
    /// Bits: of the source with this number, from 0.
    pub op_sel: u8,
    pub op_sel_hi: u8,
    pub negated_low: u8,
    pub negated_high: u8,
    pub clamp: bool,
    pub scale: f32,
    /// The parts of the result and the sources.
    pub parts: [Part; 3],
    pub keeps_rest: bool,
    pub dpp: Option<Dpp>,
    pub offset: i64,
    pub offset1: i64,
    pub wait: Wait,
    /// Whether an atomic operation returns what was there.
    pub returns: bool,
    /// The target of a branch: the number of the instruction.
    pub target: usize,
    /// The generation of the chip: 9, 11 or 12.
    pub generation: u32,
    /// Two instructions in one, which read before either writes.
    pub pair: Option<Box<[Inst; 2]>>,
    pub run: Run,
}

/// The instructions of an object.
#[derive(Debug)]
pub struct Code {
    pub insts: Vec<Inst>,
    pub at: HashMap<u64, usize>,
    /// The number of vector registers.
    pub vectors: usize,
    /// The generation, as [`Inst::generation`].
    pub generation: u32,
}

impl Inst {
    /// Whether sources are more than registers.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.negated | self.absolute | self.extended == 0
            && self.dpp.is_none()
            && self.parts == [Part::Whole; 3]
            && self.op_sel == 0
    }

    /// Whether 16-bit results leave the upper half of a register as it is.
    #[must_use]
    pub fn keeps_upper(&self) -> bool {
        self.generation > 9
    }

    pub fn fault(&self, what: impl std::fmt::Display) -> Fault {
        Fault::new(format!("{what} (`{}`)", self.text))
    }

    /// The number of the scalar register that operand `n` is.
    pub fn scalar(&self, n: usize) -> Result<u16, Fault> {
        match self.operands[n] {
            Operand::Scalar(register) => Ok(register),
            _ => Err(self.fault(format_args!("operand {n} is no scalar register"))),
        }
    }

    pub fn vector(&self, n: usize) -> Result<usize, Fault> {
        match self.operands[n] {
            Operand::Vector(register) => Ok(register.into()),
            _ => Err(self.fault(format_args!("operand {n} is no vector register"))),
        }
    }
}

impl Code {
    /// Disassembles a code object's file.
    ///
    /// # Errors
    /// Without a disassembler; for an instruction that is not known, which is named.
    pub fn new(file: &[u8], chip: &str) -> Result<Self, Fault> {
        let text = kept((DISASSEMBLER, chip, file), || disassemble(file, chip));
        Self::parse(&String::from_utf8_lossy(&text.map_err(Fault::new)?), chip)
    }

    /// Reads the disassembler's text.
    ///
    /// # Errors
    /// For an instruction that is not known.
    pub fn parse(text: &str, chip: &str) -> Result<Self, Fault> {
        let generation = generation(chip);
        let lines = text.lines().filter(|line| line.starts_with('\t'));
        let mut insts = lines
            .filter(|line| !line.contains("s_code_end"))
            .map(|line| Line::inst(line, generation))
            .collect::<Result<Vec<_>, _>>()?;
        let at: HashMap<_, _> = insts.iter().enumerate().map(|(n, i)| (i.address, n)).collect();
        let of = |kind: char| largest(text, kind);
        let (vectors, accumulators) = (of('v'), of('a'));
        for inst in &mut insts {
            for operand in &mut inst.operands {
                if let Operand::Vector(n) = operand
                    && *n >= ACCUMULATORS
                {
                    *n = *n - ACCUMULATORS + vectors as u16;
                }
            }
            if inst.name == "s_branch" || inst.name.starts_with("s_cbranch") {
                let Operand::Integer(words) = inst.operands[0] else {
                    return Err(inst.fault("a branch without a target"));
                };
                let to = inst.address.wrapping_add_signed(4 + 4 * i64::from(words as i16));
                inst.target =
                    *at.get(&to).ok_or_else(|| inst.fault("a branch to no instruction"))?;
            }
        }
        Ok(Code { insts, at, vectors: vectors + accumulators, generation })
    }
}

/// The disassembler's text for a code object's file, or what it says is wrong.
fn disassemble(file: &[u8], chip: &str) -> Result<Vec<u8>, String> {
    let wrong = |e: std::io::Error| format!("{DISASSEMBLER}: {e}; `{INSTALL}`");
    let folder = Folder::new().map_err(wrong)?;
    let path = folder.write("code", file).map_err(wrong)?;
    let mut command = Command::new(DISASSEMBLER);
    command.args(["-d", "--no-show-raw-insn"]).arg(format!("--mcpu={chip}")).arg(path);
    let output = command.stdin(Stdio::null()).output().map_err(wrong)?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// The chip's: that of gfx942 is 9, of gfx1100 11.
fn generation(chip: &str) -> u32 {
    let digits = chip.trim_start_matches("gfx").get(..2).unwrap_or_default();
    digits.parse().ok().filter(|&n| (10..20).contains(&n)).unwrap_or(9)
}

/// The bit of accumulation registers until the number of the others is known.
const ACCUMULATORS: u16 = 1 << 12;

/// One more than the largest number of a register of this kind in the text.
fn largest(text: &str, kind: char) -> usize {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '[' || c == ':'));
    let numbers = words.filter_map(|word| {
        let number = word.strip_prefix(kind)?;
        let last = number.strip_prefix('[').map_or(number, |n| n.rsplit(':').next().unwrap_or(n));
        last.parse::<usize>().ok()
    });
    numbers.map(|n| n + 1).max().unwrap_or(0)
}

/// Both instructions of a pair: what the first one writes is to be seen after the second.
fn both(wave: &mut Wave, inst: &Inst, block: &mut Block) -> Result<Flow, Fault> {
    let Some([first, second]) = inst.pair.as_deref() else { return Ok(Flow::Next) };
    let at = first.vector(0)?;
    let before = wave.vectors[at];
    (first.run)(wave, first, block)?;
    let after = std::mem::replace(&mut wave.vectors[at], before);
    let flow = (second.run)(wave, second, block)?;
    wave.vectors[at] = after;
    Ok(flow)
}

/// A line of the disassembler's that is being read.
struct Line {
    inst: Inst,
}

impl Line {
    fn inst(line: &str, generation: u32) -> Result<Inst, Fault> {
        let wrong = || Fault::new(format!("an instruction that cannot be read: `{}`", line.trim()));
        let (text, comment) = line.trim().split_once("//").ok_or_else(wrong)?;
        let address = comment.trim().split([':', ' ']).next().unwrap_or_default();
        let address = u64::from_str_radix(address, 16).map_err(|_| wrong())?;
        let text = text.trim();
        if let Some((first, second)) = text.split_once(" :: ") {
            let half = |text: &str| {
                let line = format!("{} // {address:X}:", text.replacen("v_dual_", "v_", 1));
                Self::inst(&line, generation)
            };
            let pair = [half(first)?, half(second)?];
            let both = Inst { text: text.to_owned(), run: both, ..pair[0].clone() };
            return Ok(Inst { pair: Some(Box::new(pair)), ..both });
        }
        let (full, rest) = text.split_once(' ').unwrap_or((text, ""));
        let name = ["_e32", "_e64", "_sdwa", "_dpp", "_e64_dpp"].iter();
        let name = name.fold(full, |name, suffix| name.strip_suffix(suffix).unwrap_or(name));
        // Newer chips write the result of such a comparison into EXEC, and do not name it.
        let into_exec = name.strip_prefix("v_cmpx_").filter(|_| generation > 9);
        let run = match into_exec {
            Some(rest) => Self::run(&format!("v_cmp_{rest}")),
            None => Self::run(name),
        };
        let run = run.ok_or_else(|| {
            Fault::new(format!("unknown instruction `{name}` at {address:#x}: `{text}`"))
        })?;
        let is_packed = name.starts_with("v_pk_");
        let inst = Inst {
            address,
            text: text.to_owned(),
            name: name.to_owned(),
            operands: [Operand::Nothing; 6],
            count: 0,
            negated: 0,
            absolute: 0,
            extended: 0,
            op_sel: 0,
            op_sel_hi: if is_packed { 7 } else { 0 },
            negated_low: 0,
            negated_high: 0,
            clamp: false,
            scale: 1.0,
            parts: [Part::Whole; 3],
            keeps_rest: false,
            dpp: None,
            offset: 0,
            offset1: 0,
            wait: NOTHING,
            returns: false,
            target: 0,
            generation,
            pair: None,
            run,
        };
        let mut line = Line { inst };
        if into_exec.is_some() {
            line.operand("exec_lo");
        }
        for (word, is_operand) in words(rest) {
            let known = match name {
                "s_waitcnt" => line.wait(&word),
                "s_delay_alu" | "s_waitcnt_depctr" | "s_sendmsg" | "s_setreg_imm32_b32"
                | "s_waitcnt_vscnt" => Some(()),
                _ if is_operand && !is_of_caches(name) => line.operand(&word),
                _ => line.modifier(&word),
            };
            known.ok_or_else(|| {
                Fault::new(format!("unknown operand or modifier `{word}` of `{text}`"))
            })?;
        }
        Ok(line.inst)
    }

    fn run(name: &str) -> Option<Run> {
        scalar::find(name)
            .or_else(|| vector::find(name))
            .or_else(|| packed::find(name))
            .or_else(|| matrix::find(name))
            .or_else(|| lds::find(name))
            .or_else(|| access::find(name))
    }

    fn wait(&mut self, word: &str) -> Option<()> {
        let (counter, count) = word.trim_end_matches(')').split_once('(')?;
        let count = count.parse().ok()?;
        match counter {
            "vmcnt" => self.inst.wait.memory = count,
            "lgkmcnt" => (self.inst.wait.lds, self.inst.wait.scalar) = (count, count),
            "expcnt" => {}
            _ => return None,
        }
        Some(())
    }

    fn operand(&mut self, word: &str) -> Option<()> {
        let inst = &mut self.inst;
        let (n, mut text) = (inst.count, word);
        if text.parse::<f64>().is_err() {
            if let Some(rest) = text.strip_prefix('-') {
                inst.negated |= 1 << n;
                text = rest;
            }
            if let Some(rest) = text.strip_prefix('|') {
                inst.absolute |= 1 << n;
                text = rest.strip_suffix('|')?;
            }
            if let Some(rest) = text.strip_prefix("sext(") {
                inst.extended |= 1 << n;
                text = rest.strip_suffix(')')?;
            }
        }
        *inst.operands.get_mut(n)? = operand(text)?;
        inst.count += 1;
        Some(())
    }

    fn modifier(&mut self, word: &str) -> Option<()> {
        let inst = &mut self.inst;
        let Some((key, value)) = word.split_once(':') else {
            match word {
                // How caches are used.
                "nt" | "sc1" | "slc" | "dlc" => {}
                "sc0" | "glc" => inst.returns = true,
                "clamp" => inst.clamp = true,
                // Of buffers: the address is a register and the offset.
                "offen" => {}
                "row_mirror" => self.exchange(Exchange::RowMirror),
                "row_half_mirror" => self.exchange(Exchange::HalfMirror),
                _ => return None,
            }
            return Some(());
        };
        let number = || value.parse::<i64>().ok();
        match key {
            "offset" | "offset0" => inst.offset = number()?,
            "offset1" => inst.offset1 = number()?,
            "op_sel" => inst.op_sel = bits(value),
            "op_sel_hi" => inst.op_sel_hi = bits(value),
            "neg_lo" => inst.negated_low = bits(value),
            "neg_hi" => inst.negated_high = bits(value),
            "mul" => inst.scale = number()? as f32,
            "div" => inst.scale = 1.0 / number()? as f32,
            "dst_sel" => inst.parts[0] = part(value),
            "src0_sel" => inst.parts[1] = part(value),
            "src1_sel" => inst.parts[2] = part(value),
            "dst_unused" => inst.keeps_rest = value == "UNUSED_PRESERVE",
            "quad_perm" => {
                let digits: Vec<_> = value.bytes().filter(u8::is_ascii_digit).collect();
                let lanes = <[u8; 4]>::try_from(digits).ok()?.map(|digit| digit - b'0');
                self.exchange(Exchange::Quads(lanes));
            }
            "row_shr" => self.exchange(Exchange::RowRight(number()? as u32)),
            "row_shl" => self.exchange(Exchange::RowLeft(number()? as u32)),
            "row_ror" => self.exchange(Exchange::RowRotate(number()? as u32)),
            "row_share" | "row_newbcast" => self.exchange(Exchange::RowShare(number()? as u32)),
            "row_xmask" => self.exchange(Exchange::RowXor(number()? as u32)),
            "th" => inst.returns |= value.ends_with("RETURN"),
            "scope" => {}
            "row_bcast" if value == "15" => self.exchange(Exchange::Broadcast15),
            "row_bcast" if value == "31" => self.exchange(Exchange::Broadcast31),
            "row_mask" => inst.dpp.as_mut()?.rows = hexadecimal(value)?,
            "bank_mask" => inst.dpp.as_mut()?.banks = hexadecimal(value)?,
            "bound_ctrl" => inst.dpp.as_mut()?.zero = true,
            _ => return None,
        }
        Some(())
    }

    fn exchange(&mut self, exchange: Exchange) {
        self.inst.dpp = Some(Dpp { exchange, rows: 15, banks: 15, zero: false });
    }
}

fn hexadecimal(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// True for instructions that write caches back or empty them, which have no operands.
fn is_of_caches(name: &str) -> bool {
    let of = |start: &str| name.strip_prefix(start).is_some_and(|rest| !rest.contains('_'));
    of("buffer_") || of("buffer_gl0_") || of("buffer_gl1_") || of("global_")
}

/// Operands end at commas; modifiers follow the last one after blanks.
fn words(text: &str) -> Vec<(String, bool)> {
    let (mut found, mut word, mut depth, mut after_comma) = (Vec::new(), String::new(), 0, true);
    for c in text.chars().chain([' ']) {
        match c {
            '[' | '(' => depth += 1,
            ']' | ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 && (c == ',' || c == ' ') {
            if !word.is_empty() {
                found.push((std::mem::take(&mut word), after_comma));
                after_comma = false;
            }
            after_comma |= c == ',';
        } else {
            word.push(c);
        }
    }
    found
}
