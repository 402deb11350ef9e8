//! AVX-512 with the tiles of AMX.

use super::Avx512Bf16;
use crate::cpu::tiles::{ROW_BYTES, SIDE, TileKernel, Tiles};
use std::arch::asm;
use std::sync::LazyLock;

/// AVX-512 with its BF16 extension, and AMX's products of bf16. Intel CPUs have had them since Sapphire Rapids. The
/// operating system must permit the process to use AMX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Amx(Avx512Bf16);

/// The eight tile registers.
struct AmxTiles(());

/// Bits of edx of leaf 7 of cpuid.
const AMX_BF16: u32 = 1 << 22;
const AMX_TILE: u32 = 1 << 24;
/// The state component of tile data: its bit in XCR0 (the bit before it is that of the tile configuration), and its
/// number in the request for permission.
const TILE_DATA: u32 = 18;

impl Amx {
    pub(crate) fn detect() -> Option<Self> {
        static USABLE: LazyLock<bool> = LazyLock::new(|| has_instructions() && is_permitted());
        Avx512Bf16::detect().filter(|_| *USABLE).map(Amx)
    }

    /// The instruction set without AMX.
    pub(crate) fn bf16(self) -> Avx512Bf16 {
        self.0
    }

    /// Configures the tiles, runs the kernel, and releases the tiles.
    pub(crate) fn run(self, kernel: impl TileKernel) {
        /// The tile configuration in the layout of Intel's manual.
        #[repr(C, align(64))]
        struct Shapes {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        static SHAPES: Shapes = {
            let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
            let mut tile = 0;
            while tile < 8 {
                (row_bytes[tile], rows[tile]) = (ROW_BYTES as u16, SIDE as u8);
                tile += 1;
            }
            Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
        };
        struct Release;
        impl Drop for Release {
            fn drop(&mut self) {
                // SAFETY: an `Amx` exists.
                unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
            }
        }
        // SAFETY: the machine has the instructions and the system permits them.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &SHAPES, options(nostack, preserves_flags)) };
        let _release = Release;
        kernel.run(&mut AmxTiles(()));
    }
}

fn has_instructions() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    #[target_feature(enable = "xsave")]
    fn enabled_states() -> u64 {
        #[allow(unused_unsafe)] // safe in later versions of Rust than the oldest that builds this
        // SAFETY: the machine has the instruction.
        unsafe {
            _xgetbv(0)
        }
    }
    #[allow(unused_unsafe)] // as above
    // SAFETY: every machine that detects features by it has the instruction.
    let features = unsafe { if __cpuid(0).eax < 7 { 0 } else { __cpuid_count(7, 0).edx } };
    let wanted = AMX_TILE | AMX_BF16;
    let tiles = 3 << (TILE_DATA - 1);
    features & wanted == wanted
        && is_x86_feature_detected!("xsave")
        // SAFETY: just detected.
        && unsafe { enabled_states() } & tiles == tiles
}

/// Asks the operating system for permission to use tiles, which need more memory for the state of a thread.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    // SAFETY: the call takes two numbers, and changes nothing but the permission.
    unsafe {
        libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA as libc::c_long) == 0
    }
}

/// False, because it is not known whether other systems permit AMX.
#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

// The compiler knows nothing of the tiles' registers, and uses none; statements of `asm!` stay in their order.
impl Tiles for AmxTiles {
    #[inline(always)]
    fn zero<const TILE: usize>(&mut self) {
        // SAFETY: `self` exists, so the shapes are set; this holds below as well.
        unsafe { asm!("tilezero tmm{}", const TILE, options(nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn load<const TILE: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            asm!(
                "tileloadd tmm{tile}, [{from} + {stride} * 1]",
                tile = const TILE,
                from = in(reg) from,
                stride = in(reg) stride,
                options(nostack, preserves_flags)
            );
        }
    }
    #[inline(always)]
    unsafe fn store<const TILE: usize>(&mut self, to: *mut u8, stride: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            asm!(
                "tilestored [{to} + {stride} * 1], tmm{tile}",
                tile = const TILE,
                to = in(reg) to,
                stride = in(reg) stride,
                options(nostack, preserves_flags)
            );
        }
    }
    #[inline(always)]
    fn add_products<const C: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: as for `zero`.
        unsafe {
            asm!(
                "tdpbf16ps tmm{}, tmm{}, tmm{}",
                const C,
                const A,
                const B,
                options(nostack, preserves_flags)
            );
        }
    }
    #[inline(always)]
    fn prefetch(&self, p: *const u8) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: it may be asked for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}
