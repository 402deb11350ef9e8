//! The code that operators share on the CPU: the machine's instruction sets, vectors over them, threads.
//!
//! A kernel is written once, generic over `Simd`, as a type that implements `Kernel`;
//! `dispatch` compiles it for every instruction set and calls the one asked for. Instruction
//! sets are tokens that exist only if the machine has them, so calling a kernel is safe.

mod bf16;
mod cache;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod compiled;
mod element;
mod float_mode;
pub(crate) mod gemm;
mod isa;
mod lanes;
pub(crate) mod math;
mod name;
mod peak;
#[cfg_attr(not(feature = "threads"), path = "no_pool.rs")]
mod pool;
mod simd;
mod threads;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use bf16::{Bf16Kernel, Bf16Products, Row};
pub(crate) use cache::last_level_cache;
pub(crate) use element::SimdElement;
pub use isa::Isa;
pub(crate) use isa::{Kernel, dispatch, dispatch_bf16, dispatch_tiles};
pub use name::name;
pub use peak::{copy, peak_gflops};
pub(crate) use simd::{MAX_LANES, Simd, array};
pub(crate) use threads::{
    MANY_THREADS, SendPtr, has_many_cores, parallel_for, parallel_for_workers, resolve_threads,
};
pub use threads::{Team, num_threads, use_team};
pub(crate) use tiles::{
    ROW_BYTES, SIDE, TERMS, TILE_BYTES, TileKernel, Tiles, add_block, load_left, load_right,
};

/// Tells the compiler that the way through here is seldom taken.
#[cold]
#[inline]
pub(crate) fn seldom() {}
