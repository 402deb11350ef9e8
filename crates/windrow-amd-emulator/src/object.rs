//! Code objects: ELF files with kernels, what their metadata say of them, and their image in memory.

use crate::Fault;
use crate::metadata::{Value, read};
use std::collections::HashMap;

/// `e_flags` of AMD's ELF files: the chip.
const MACHINES: [(u32, &str); 4] =
    [(0x3f, "gfx90a"), (0x4c, "gfx942"), (0x41, "gfx1100"), (0x4e, "gfx1201")];
/// `NT_AMDGPU_METADATA`
const METADATA: u32 = 32;

/// A file's segments as they lie in memory, and its kernels.
#[derive(Debug)]
pub struct Object {
    pub chip: &'static str,
    /// The file from its address 0 on; a `Vec` of words, so that it is aligned.
    image: Vec<u64>,
    pub kernels: HashMap<String, Descriptor>,
}

/// An argument's place among the bytes that a kernel gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    pub offset: usize,
    pub size: usize,
    /// `by_value`, `global_buffer`, `hidden_block_count_x` and others.
    pub kind: String,
}

/// The facts about a kernel that the chip needs.
#[derive(Clone, Debug)]
pub struct Descriptor {
    /// Address of its first instruction within the image.
    pub entry: u64,
    pub lds_bytes: usize,
    /// Private memory of a thread.
    pub scratch_bytes: usize,
    pub argument_bytes: usize,
    pub arguments: Vec<Argument>,
    /// The initial values of its scalar registers, in the order of the bits.
    pub properties: u16,
    /// `compute_pgm_rsrc2`: which coordinates of the block follow.
    pub coordinates: u32,
    pub wave_32: bool,
}

/// Numbers of a file at places that may not exist.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn part(&self, at: u64, bytes: u64) -> Result<&[u8], Fault> {
        let whole = || {
            let start = usize::try_from(at).ok()?;
            self.0.get(start..start.checked_add(usize::try_from(bytes).ok()?)?)
        };
        whole().ok_or_else(|| Fault::new(format!("a code object without {bytes} bytes at {at}")))
    }

    fn number(&self, at: u64, bytes: u64) -> Result<u64, Fault> {
        Ok(self.part(at, bytes)?.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
    }

    fn name(&self, at: u64) -> Result<String, Fault> {
        let rest = self.part(at, (self.0.len() as u64).saturating_sub(at))?;
        let name = rest.split(|&b| b == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(name).into_owned())
    }
}

/// The length of the file that starts at `image`.
///
/// # Safety
/// It must be a whole ELF file, as the linker writes it.
///
/// # Errors
/// If it is none.
pub unsafe fn length(image: *const u8) -> Result<usize, Fault> {
    // SAFETY: the caller's promise; the file's header is 64 bytes long.
    let header = unsafe { std::slice::from_raw_parts(image, 64) };
    if !header.starts_with(b"\x7fELF") {
        return Err(Fault::new("not a code object"));
    }
    let header = Bytes(header);
    let (sections, size, count) =
        (header.number(40, 8)?, header.number(58, 2)?, header.number(60, 2)?);
    // The table of sections is the end of what the linker writes.
    Ok((sections + size * count) as usize)
}

impl Object {
    /// # Errors
    /// For a file that is no code object of a known chip.
    pub fn new(file: &[u8]) -> Result<Self, Fault> {
        let bytes = Bytes(file);
        if bytes.part(0, 4)? != b"\x7fELF" {
            return Err(Fault::new("not a code object"));
        }
        let machine = bytes.number(48, 4)? as u32 & 0xff;
        let chip = MACHINES.iter().find(|(number, _)| *number == machine);
        let &(_, chip) = chip.ok_or_else(|| Fault::new(format!("unknown chip {machine:#x}")))?;
        let (mut segments, mut notes) = (Vec::new(), Vec::new());
        let table = bytes.number(32, 8)?;
        for i in 0..bytes.number(56, 2)? {
            let at = table + 56 * i;
            let kind = bytes.number(at, 4)?;
            let [offset, address, in_file, in_memory] =
                [8, 16, 32, 40].map(|field| bytes.number(at + field, 8));
            let (offset, in_file) = (offset?, in_file?);
            match kind {
                1 => segments.push((address?, in_memory?, bytes.part(offset, in_file)?)),
                4 => notes.push((offset, in_file)),
                _ => {}
            }
        }
        let end = segments.iter().map(|(address, size, _)| address + size).max().unwrap_or(0);
        let mut image = vec![0u8; (end as usize).next_multiple_of(8)];
        for (address, _, content) in segments {
            image[address as usize..][..content.len()].copy_from_slice(content);
        }
        let symbols = symbols(&bytes)?;
        let mut kernels = HashMap::new();
        for (offset, size) in notes {
            for (name, arguments) in kernels_of(&bytes, offset, size)? {
                let at = symbols.get(&format!("{name}.kd")).copied();
                let at = at.ok_or_else(|| Fault::new(format!("no descriptor of {name}")))?;
                kernels.insert(name, Descriptor::new(&Bytes(&image), at, arguments)?);
            }
        }
        let words = image.chunks_exact(8).map(|c| c.try_into().map_or(0, u64::from_le_bytes));
        Ok(Object { chip, image: words.collect(), kernels })
    }

    /// The address of the image.
    #[must_use]
    pub fn base(&self) -> usize {
        self.image.as_ptr().addr()
    }

    #[must_use]
    pub fn bytes(&self) -> usize {
        self.image.len() * 8
    }
}

impl Descriptor {
    fn new(image: &Bytes, at: u64, arguments: Vec<Argument>) -> Result<Self, Fault> {
        let properties = image.number(at + 56, 2)? as u16;
        Ok(Descriptor {
            entry: at.wrapping_add(image.number(at + 16, 8)?),
            lds_bytes: image.number(at, 4)? as usize,
            scratch_bytes: image.number(at + 4, 4)? as usize,
            argument_bytes: image.number(at + 8, 4)? as usize,
            arguments,
            properties,
            coordinates: image.number(at + 52, 4)? as u32,
            wave_32: properties >> 10 & 1 == 1,
        })
    }
}

/// Addresses of the dynamic symbols.
fn symbols(file: &Bytes) -> Result<HashMap<String, u64>, Fault> {
    const DYNAMIC_SYMBOLS: u64 = 11;
    const RELOCATIONS: u64 = 4;
    let table = file.number(40, 8)?;
    let section = |i: u64| table + 64 * i;
    let mut found = HashMap::new();
    for i in 0..file.number(60, 2)? {
        match file.number(section(i) + 4, 4)? {
            DYNAMIC_SYMBOLS => {
                let (at, size) =
                    (file.number(section(i) + 24, 8)?, file.number(section(i) + 32, 8)?);
                let names = section(file.number(section(i) + 40, 4)?);
                let names = file.number(names + 24, 8)?;
                for symbol in (at..at + size).step_by(24) {
                    let name = file.name(names + file.number(symbol, 4)?)?;
                    found.insert(name, file.number(symbol + 8, 8)?);
                }
            }
            RELOCATIONS => return Err(Fault::new("a code object with relocations")),
            _ => {}
        }
    }
    Ok(found)
}

/// Names and arguments of the kernels that the notes list.
fn kernels_of(file: &Bytes, offset: u64, size: u64) -> Result<Vec<(String, Vec<Argument>)>, Fault> {
    let mut at = offset;
    while at + 12 <= offset + size {
        let [name, content, kind] = [0, 4, 8].map(|field| file.number(at + field, 4));
        let (name, content) = (name?, content?);
        let start = at + 12 + name.next_multiple_of(4);
        if kind? == u64::from(METADATA) {
            let metadata = read(file.part(start, content)?)?;
            return metadata["amdhsa.kernels"].list().iter().map(kernel).collect();
        }
        at = start + content.next_multiple_of(4);
    }
    Ok(Vec::new())
}

fn kernel(metadata: &Value) -> Result<(String, Vec<Argument>), Fault> {
    let arguments = metadata[".args"].list().iter().map(|argument| Argument {
        offset: argument[".offset"].number() as usize,
        size: argument[".size"].number() as usize,
        kind: argument[".value_kind"].text().to_owned(),
    });
    Ok((metadata[".name"].text().to_owned(), arguments.collect()))
}
