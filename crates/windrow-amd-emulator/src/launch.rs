//! Launching a kernel: its blocks on this machine's cores, the wavefronts of a block in turn.

use crate::Fault;
use crate::inst::{Code, TTMP};
use crate::memory::Ranges;
use crate::object::{Descriptor, Object};
use crate::wave::{Block, Flow, POISON, Wave};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

/// The most instructions that a wavefront may execute.
const LONGEST: u64 = 1 << 32;
/// The most instructions in a row while other wavefronts of the block wait.
const TURN: u64 = 400;

/// A loaded code object.
#[derive(Debug)]
pub struct Module {
    pub object: Object,
    pub code: Code,
}

/// A kernel of a module.
#[derive(Clone, Debug)]
pub struct Function {
    pub module: Arc<Module>,
    pub name: String,
    pub descriptor: Descriptor,
    entry: usize,
}

/// Sizes of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
}

impl Module {
    /// # Errors
    /// As those of the object and its code.
    pub fn new(file: &[u8]) -> Result<Self, Fault> {
        let object = Object::new(file)?;
        let code = Code::new(file, object.chip)?;
        Ok(Module { object, code })
    }

    /// The kernel of this name.
    #[must_use]
    pub fn function(self: &Arc<Self>, name: &str) -> Option<Function> {
        let descriptor = self.object.kernels.get(name)?.clone();
        let entry = *self.code.at.get(&descriptor.entry)?;
        Some(Function { module: self.clone(), name: name.to_owned(), descriptor, entry })
    }
}

/// The data of a thread that runs block after block.
struct Own<'a> {
    waves: Vec<Wave>,
    block: Block<'a>,
}

/// Numbers in an order that a seed decides.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// The places of a launch's arguments and of its packet of the queue.
#[derive(Clone, Copy)]
struct Pointers {
    arguments: usize,
    packet: usize,
}

impl Size {
    /// The launch's packet in the queue: the sizes.
    fn packet(self) -> [u64; 8] {
        let [x, y, z] = self.block.map(u64::from);
        let [all_x, all_y, all_z] = [0, 1, 2].map(|i| u64::from(self.grid[i] * self.block[i]));
        [x << 32 | y << 48, z | all_x << 32, all_y | all_z << 32, 0, 0, 0, 0, 0]
    }
}

/// `WINDROW_EMULATOR_SEED`: decides in which order wavefronts get their turns.
static SEED: LazyLock<u64> = LazyLock::new(|| {
    std::env::var("WINDROW_EMULATOR_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0)
});

/// Instructions of wavefronts that were executed.
pub static STEPS: AtomicU64 = AtomicU64::new(0);

impl Function {
    /// The kernel's arguments: the caller's, and those that the runtime adds.
    fn arguments(&self, size: Size, explicit: &[u8]) -> Vec<u64> {
        let mut bytes = vec![0; self.descriptor.argument_bytes.next_multiple_of(8)];
        bytes[..explicit.len()].copy_from_slice(explicit);
        for argument in &self.descriptor.arguments {
            let value = match argument.kind.as_str() {
                "hidden_block_count_x" => size.grid[0],
                "hidden_block_count_y" => size.grid[1],
                "hidden_block_count_z" => size.grid[2],
                "hidden_group_size_x" => size.block[0],
                "hidden_group_size_y" => size.block[1],
                "hidden_group_size_z" => size.block[2],
                "hidden_grid_dims" => 3,
                "hidden_dynamic_lds_size" => size.shared_bytes,
                _ => continue,
            };
            let bytes = &mut bytes[argument.offset..][..argument.size];
            bytes.copy_from_slice(&value.to_le_bytes()[..argument.size]);
        }
        bytes.chunks_exact(8).map(|c| c.try_into().map_or(0, u64::from_le_bytes)).collect()
    }

    /// The size of the arguments that a caller gives.
    #[must_use]
    pub fn explicit_bytes(&self) -> usize {
        let all = self.descriptor.arguments.iter();
        let explicit = all.filter(|argument| !argument.kind.starts_with("hidden_"));
        explicit.map(|argument| argument.offset + argument.size).max().unwrap_or(0)
    }

    /// Runs all blocks.
    ///
    /// # Errors
    /// For what a device would fault on, and what it would do wrong without a word.
    pub fn launch(&self, size: Size, explicit: &[u8]) -> Result<(), Fault> {
        static LAUNCHES: AtomicU64 = AtomicU64::new(0);
        let launch = LAUNCHES.fetch_add(1, Ordering::Relaxed);
        let threads: u64 = size.block.iter().map(|&n| u64::from(n)).product();
        if threads == 0 || threads > 1024 {
            return Err(Fault::new(format!("kernel `{}`: blocks of {threads} threads", self.name)));
        }
        let (words, packet) = (self.arguments(size, explicit), size.packet());
        let pointers = Pointers {
            arguments: words.as_ptr().expose_provenance(),
            packet: packet.as_ptr().expose_provenance(),
        };
        let object = &self.module.object;
        let memory = Ranges::now(&[
            (pointers.arguments, size_of_val(&words[..])),
            (pointers.packet, size_of_val(&packet)),
            (object.base(), object.bytes()),
        ]);
        let blocks = size.grid.iter().map(|&n| n as usize).product::<usize>();
        let (next, stop, failed) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
        let work = || {
            let base = object.base() as u64;
            let mut own =
                Own { waves: Vec::new(), block: Block { lds: Vec::new(), memory: &memory, base } };
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= blocks || stop.load(Ordering::Relaxed) {
                    break;
                }
                let [x, y, _] = size.grid.map(|n| n as usize);
                let place = [number % x, number / x % y, number / x / y].map(|n| n as u32);
                let seed = *SEED ^ launch << 32 ^ number as u64;
                if let Err(fault) = self.block(size, place, pointers, &mut own, &mut Dice(seed)) {
                    stop.store(true, Ordering::Relaxed);
                    let [x, y, z] = place;
                    let what = format!("kernel `{}`, block ({x}, {y}, {z}), {fault}", self.name);
                    *failed.lock().unwrap_or_else(|e| e.into_inner()) = Some(Fault::new(what));
                }
            }
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 1..cores.min(blocks) {
                scope.spawn(work);
            }
            work();
        });
        failed.into_inner().unwrap_or_else(|e| e.into_inner()).map_or(Ok(()), Err)
    }

    fn block(
        &self,
        size: Size,
        place: [u32; 3],
        pointers: Pointers,
        Own { waves, block }: &mut Own,
        dice: &mut Dice,
    ) -> Result<(), Fault> {
        let bytes = self.descriptor.lds_bytes + size.shared_bytes as usize;
        block.lds.resize(bytes.next_multiple_of(4), 0);
        block.lds.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&POISON.to_le_bytes()));
        block.lds.truncate(bytes);
        let lanes = if self.descriptor.wave_32 { 32 } else { 64 };
        let threads = size.block.iter().product::<u32>() as usize;
        let vectors = self.module.code.vectors.max(1);
        waves.resize_with(threads.div_ceil(lanes), || {
            Wave::new(lanes, vectors, self.descriptor.scratch_bytes)
        });
        for (n, wave) in waves.iter_mut().enumerate() {
            self.start(wave, size.block, place, pointers, n * lanes, threads);
        }
        let (mut ready, mut waiting): (Vec<usize>, _) = ((0..waves.len()).collect(), Vec::new());
        let mut steps = 0;
        while !ready.is_empty() {
            let turn = dice.below(ready.len() as u64) as usize;
            let n = ready[turn];
            let most = if ready.len() > 1 { 1 + dice.below(TURN) } else { LONGEST };
            let (end, count) = self.run(&mut waves[n], block, most)?;
            steps += count;
            match end {
                Flow::Barrier => waiting.push(ready.swap_remove(turn)),
                Flow::End => drop(ready.swap_remove(turn)),
                _ if count >= LONGEST => return Err(Fault::new("it does not end")),
                _ => {}
            }
            if ready.is_empty() {
                std::mem::swap(&mut ready, &mut waiting);
            }
        }
        STEPS.fetch_add(steps, Ordering::Relaxed);
        Ok(())
    }

    /// A wavefront in its initial state.
    fn start(
        &self,
        wave: &mut Wave,
        block: [u32; 3],
        place: [u32; 3],
        pointers: Pointers,
        first: usize,
        threads: usize,
    ) {
        let descriptor = &self.descriptor;
        wave.reset();
        let live = (threads - first).min(wave.lanes);
        wave.set_mask(crate::inst::EXEC, if live == 64 { !0 } else { (1 << live) - 1 });
        // The values that a kernel asks for, and the number of their registers.
        const PACKET: usize = 1;
        const ARGUMENTS: usize = 3;
        let mut at = 0;
        for (bit, registers) in [4, 2, 2, 2, 2, 2, 1].into_iter().enumerate() {
            if descriptor.properties >> bit & 1 == 1 {
                match bit {
                    PACKET => wave.set_pair(at, pointers.packet as u64),
                    ARGUMENTS => wave.set_pair(at, pointers.arguments as u64),
                    _ => {}
                }
                at += registers;
            }
        }
        at = (descriptor.coordinates >> 1 & 31) as u16;
        if self.module.code.generation > 11 {
            wave.set_scalar(TTMP + 9, place[0]);
            wave.set_scalar(TTMP + 7, place[1] | place[2] << 16);
        }
        for (axis, coordinate) in place.into_iter().enumerate() {
            if descriptor.coordinates >> (7 + axis) & 1 == 1 {
                wave.set_scalar(at, coordinate);
                at += 1;
            }
        }
        let axes = descriptor.coordinates >> 11 & 3;
        for lane in 0..live {
            let thread = (first + lane) as u32;
            let [x, y] = [block[0], block[1]];
            let of_axes = [thread % x, thread / x % y, thread / x / y];
            let packed = of_axes.iter().zip(0..=axes).map(|(n, axis)| n << (10 * axis));
            wave.vectors[0][lane] = packed.sum();
        }
        wave.next = self.entry;
    }

    /// Executes up to so many instructions; says how it ended and how many there were.
    fn run(&self, wave: &mut Wave, block: &mut Block, most: u64) -> Result<(Flow, u64), Fault> {
        let insts = &self.module.code.insts;
        for count in 1..=most {
            let Some(inst) = insts.get(wave.next) else {
                return Err(Fault::new("it runs past its end"));
            };
            let flow = (inst.run)(wave, inst, block)
                .map_err(|fault| Fault::new(format!("at {:#x}: {fault}", inst.address)))?;
            match flow {
                Flow::Next => wave.next += 1,
                Flow::Jump(to) => wave.next = to,
                Flow::Barrier => {
                    wave.next += 1;
                    return Ok((Flow::Barrier, count));
                }
                Flow::End => return Ok((Flow::End, count)),
            }
        }
        Ok((Flow::Next, most))
    }
}
