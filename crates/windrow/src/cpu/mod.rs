//! CPU support: the choice of an instruction set, the number of threads, and (for the operators) SIMD vectors,
//! activations and matrix products.
//!
//! A kernel is written once, generic over `Simd`, as a type that implements `Kernel`. `dispatch` compiles it for every
//! instruction set and calls the one that is asked for. A value of an instruction set's type can be made only on a
//! machine that has the set, so calling a kernel with it is safe.

mod bf16;
mod cache;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod compiled;
mod crew;
mod element;
mod float_mode;
pub(crate) mod gemm;
pub(crate) mod images;
mod isa;
mod lanes;
pub(crate) mod math;
mod name;
mod peak;
#[cfg_attr(not(feature = "threads"), path = "no_pool.rs")]
mod pool;
pub(crate) mod prefetch;
mod simd;
mod threads;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use bf16::{Bf16Kernel, Bf16Products, Row};
pub(crate) use cache::{last_level_cache, second_level_cache};
pub use crew::with_team;
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

/// Marks a branch as unlikely for the compiler.
#[cold]
#[inline]
pub(crate) fn seldom() {}
