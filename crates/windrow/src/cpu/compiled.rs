//! A check of compiled code: whether the loops of a kernel hold their sums in registers.
//!
//! A branch in a loop, or one accumulator too many, makes the compiler spill accumulators to memory. The results stay
//! the same, but the kernel runs at half the speed. So tests disassemble the AVX2 and AVX-512 code of a kernel in their
//! own executable with `objdump`, which comes with the linker. They run in a release build, because overflow checks
//! also need registers.

use super::Kernel;
use super::isa::{with_avx2, with_avx512};
use super::x86::{Avx2, Avx512};
use std::fs::File;
use std::io::Read;
use std::process::Command;

/// The maximum size of a kernel's code in bytes.
const LONGEST: usize = 1 << 18;

/// An innermost loop with multiply-adds.
#[derive(Debug, Default)]
pub(crate) struct Loop {
    /// The number of multiply-add instructions.
    multiplies: usize,
    calls: usize,
    /// Instructions that store vectors on the stack. They show that an accumulator was spilled; a spilled constant is
    /// only loaded.
    stores: Vec<String>,
}

/// Fails if a loop of `K` stores more vectors on the stack than `allowed` says for AVX2 and for AVX-512, or if the loop
/// with the most multiply-adds calls a function. Other loops may contain calls, for rarely used activations.
pub(crate) fn assert_in_registers<K: Kernel>(allowed: [usize; 2]) {
    for ((isa, code), allowed) in codes::<K>().into_iter().zip(allowed) {
        let name = std::any::type_name::<K>();
        if let Err(what) = in_registers(&code, allowed) {
            panic!("{name} for {isa}: {what}");
        }
    }
}

fn in_registers(code: &[Instruction], allowed: usize) -> Result<(), String> {
    let loops = loops(code);
    let largest = loops.iter().max_by_key(|l| (l.multiplies, l.calls == 0));
    let largest = largest.ok_or("no loop multiplies and adds")?;
    if largest.calls > 0 {
        return Err(format!("the loop of {} multiply-adds calls", largest.multiplies));
    }
    match loops.iter().find(|l| l.calls == 0 && l.stores.len() > allowed) {
        Some(Loop { multiplies, stores, .. }) => {
            Err(format!("a loop of {multiplies} multiply-adds stores\n{}", stores.join("\n")))
        }
        None => Ok(()),
    }
}

/// Machine code of `K` for AVX2 and AVX-512, an instruction a line.
fn codes<K: Kernel>() -> [(&'static str, Vec<Instruction>); 2] {
    let avx2: unsafe fn(Avx2, K) -> K::Output = with_avx2::<K>;
    let avx512: unsafe fn(Avx512, K) -> K::Output = with_avx512::<K>;
    [("avx2", disassembled(avx2 as usize)), ("avx512", disassembled(avx512 as usize))]
}

#[derive(Debug)]
struct Instruction {
    at: usize,
    text: String,
}

/// The function that begins at an address of this process.
fn disassembled(address: usize) -> Vec<Instruction> {
    let program = std::env::current_exe().expect("this program has a file");
    let start = address - offset(&program);
    let mut objdump = Command::new("objdump");
    objdump
        .args(["--disassemble", "--disassembler-options=intel", "--no-show-raw-insn"])
        .arg(format!("--start-address={start:#x}"))
        .arg(format!("--stop-address={:#x}", start + LONGEST))
        .arg(program);
    let output = objdump.output().expect("objdump, a part of binutils");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().skip_while(|line| !line.ends_with(">:")).skip(1);
    // Up to the next symbol.
    let code: Vec<_> =
        lines.take_while(|line| !line.ends_with(">:")).filter_map(instruction).collect();
    assert!(code.first().is_some_and(|first| first.at == start), "no function at {start:#x}");
    code
}

/// Parses a line of objdump's output, such as `  ce0c90:\tpush   rbp`.
fn instruction(line: &str) -> Option<Instruction> {
    let (at, text) = line.split_once(":\t")?;
    let at = usize::from_str_radix(at.trim(), 16).ok()?;
    Some(Instruction { at, text: text.trim().into() })
}

/// The difference between the program's addresses in memory and in its file.
fn offset(program: &std::path::Path) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the process has memory");
    let program = program.to_str().expect("a path in UTF-8");
    let first = maps.lines().find(|line| line.ends_with(program)).expect("the program's memory");
    let start = first.split('-').next().and_then(|start| usize::from_str_radix(start, 16).ok());
    let mut header = [0; 17];
    File::open(program).and_then(|mut file| file.read_exact(&mut header)).expect("the program");
    const FIXED: u8 = 2;
    if header[16] == FIXED { 0 } else { start.expect("an address") }
}

/// The innermost loops of a function that multiply and add: what lies between a jump backwards and its target.
fn loops(code: &[Instruction]) -> Vec<Loop> {
    let start = code.first().map_or(0, |first| first.at);
    let spans: Vec<_> = code
        .iter()
        .filter_map(|i| Some((target(&i.text)?, i.at)))
        .filter(|&(to, at)| (start..=at).contains(&to))
        .collect();
    let holds = |outer: (usize, usize), inner: (usize, usize)| {
        outer != inner && outer.0 <= inner.0 && inner.1 <= outer.1
    };
    let innermost = spans.iter().filter(|&&span| !spans.iter().any(|&other| holds(span, other)));
    // Without a frame, rbp is a register like others.
    let frame = code.iter().take(12).any(|i| i.text.replace(' ', "") == "movrbp,rsp");
    innermost
        .map(|&(from, to)| {
            let body = code.iter().filter(|i| (from..=to).contains(&i.at));
            let mut found = Loop::default();
            for Instruction { text, .. } in body {
                found.multiplies += usize::from(is_multiply_add(text));
                found.calls += usize::from(text.starts_with("call"));
                if is_vector_store(text, frame) {
                    found.stores.push(text.clone());
                }
            }
            found
        })
        .filter(|found| found.multiplies > 0)
        .collect()
}

/// The target of a jump, if the instruction's text names one.
fn target(text: &str) -> Option<usize> {
    let (jump, to) = text.split_once(' ')?;
    let to = to.trim().split(' ').next()?;
    if jump.starts_with('j') { usize::from_str_radix(to, 16).ok() } else { None }
}

fn is_multiply_add(text: &str) -> bool {
    ["vfmadd", "vfmsub", "vfnmadd", "vfnmsub"].iter().any(|name| text.starts_with(name))
}

/// True for an instruction that stores a vector on the stack, such as `vmovaps ZMMWORD PTR [rsp+0x40],zmm0`. With
/// `frame`, rbp points to the stack too.
fn is_vector_store(text: &str, frame: bool) -> bool {
    let Some((_, operands)) = text.split_once(' ') else { return false };
    let Some((to, _)) = operands.trim_start().split_once(',') else { return false };
    let is_vector = ["XMMWORD", "YMMWORD", "ZMMWORD"].iter().any(|kind| to.starts_with(kind));
    is_vector && (to.contains("[rsp") || frame && to.contains("[rbp"))
}

mod tests {
    use super::*;
    use crate::cpu::Simd;

    /// `N` sums over the rows of a matrix of vectors.
    pub(super) struct Sums<const N: usize> {
        rows: usize,
        matrix: *const f32,
        to: *mut f32,
    }

    impl<const N: usize> Kernel for Sums<N> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let mut sums = [s.zero(); N];
            // SAFETY: never run: this is code to look at.
            unsafe {
                let mut row = self.matrix;
                for _ in 0..self.rows {
                    let x = s.load(row);
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum = s.mul_add(s.load(row.add(i * S::LANES)), x, *sum);
                    }
                    row = row.add(N * S::LANES);
                }
                for (i, sum) in sums.into_iter().enumerate() {
                    s.store(self.to.add(i * S::LANES), sum);
                }
            }
        }
    }

    /// A kernel whose loop calls a function for each element.
    struct Calls<'a>(&'a dyn Fn(usize) -> f32, usize, *mut f32);

    impl Kernel for Calls<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let mut sum = s.zero();
            for i in 0..self.1 {
                let x = s.splat((self.0)(i));
                sum = s.mul_add(x, x, sum);
            }
            // SAFETY: never run: this is code to look at.
            unsafe { s.store(self.2, sum) };
        }
    }

    fn of<K: Kernel>() -> [bool; 2] {
        codes::<K>().map(|(_, code)| in_registers(&code, 0).is_ok())
    }

    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build")]
    fn sums_that_fit_are_in_registers_and_more_are_not() {
        // AVX2 has 16, AVX-512 has 32.
        assert_eq!(of::<Sums<12>>(), [true, true]);
        assert_eq!(of::<Sums<20>>(), [false, true]);
        assert_eq!(of::<Sums<40>>(), [false, false]);
    }

    #[test]
    #[cfg_attr(debug_assertions, ignore = "of a release build")]
    fn loops_that_call_are_not_in_registers() {
        assert_eq!(of::<Calls<'static>>(), [false, false]);
    }

    #[test]
    fn sums_in_registers_are_told_by_text() {
        let code = "
  10:\tpush   rbp
  11:\tmov    rbp,rsp
  20:\tvmovaps zmm1,ZMMWORD PTR [rsp+0x40]
  30:\tvfmadd231ps zmm0,zmm1,DWORD BCST [rax]
  38:\tvmovaps ZMMWORD PTR [rbp-0x40],zmm0
  40:\tjne    30 <f+0x20>
  48:\tcall   99 <g>
  50:\tjb     10 <f>
  60:\tret";
        let code: Vec<_> = code.lines().filter_map(instruction).collect();
        assert_eq!(code.len(), 9);
        let [Loop { multiplies: 1, calls: 0, stores }] = &loops(&code)[..] else {
            panic!("{code:?}")
        };
        assert_eq!(stores.len(), 1, "{stores:?}");
        assert!(in_registers(&code, 0).is_err() && in_registers(&code, 1).is_ok());
    }
}
