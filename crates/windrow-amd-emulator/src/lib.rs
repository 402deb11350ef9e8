//! A HIP runtime and hiprtc without a device, for tests: kernels are compiled by clang, and their code objects are
//! interpreted instruction by instruction.
//!
//! The library has the functions that windrow looks up in `libamdhip64`, `libhiprtc` and `librocblas`. It is loaded in
//! their place by `WINDROW_HIP_PATH`. It says nothing about speed.
//!
//! ```text
//! hiprtc.rs      clang-19 and lld-19 make the code object, with prelude.h in place of HIP's headers
//! object.rs      ELF -> image in memory, kernels, their arguments (metadata.rs)
//! inst.rs        llvm-objdump-19's text -> instructions, each with the function that executes it
//! launch.rs      blocks on this machine's cores; a block's wavefronts take turns in an order that a seed decides
//! wave.rs        registers, the lanes that work, loads that are under way
//! scalar vector packed matrix lds access    what instructions do, one file for each kind
//! runtime.rs     memory (memory.rs), streams, events, modules; a call is done when it returns
//! graphs.rs      recorded streams and graphs
//! rocblas.rs     products of matrices by plain loops
//! ```
//!
//! - Instructions are read from LLVM's own disassembly, once for each module. An unknown name or modifier is an error.
//! - Registers and memory start as NaN in every type. A load's registers hold NaN until the `s_waitcnt` that allows
//!   their use, so a value that is read too early shows in the result, or as an address outside of all allocations.
//! - An access outside of an allocation ends the launch; the error names lane, block and instruction. Wavefronts change
//!   after a random number of instructions (`WINDROW_EMULATOR_SEED`), so that a missing barrier shows.
//! - `WINDROW_EMULATOR_NUDGE=1` moves reciprocals, roots, exponentials and logarithms by a unit in the last place, as
//!   chips may, but not the reciprocal that the compiler divides integers by (`v_rcp_iflag_f32`).
//! - `WINDROW_EMULATOR_FAIL=hipMalloc=2@5` lets the fifth call of a function fail. `WINDROW_EMULATOR_CHIP` chooses the
//!   chip, `WINDROW_EMULATOR_CACHE` a folder for code objects and their disassembly.

#![allow(missing_docs, reason = "it has no users but tests")]

mod access;
mod fault;
mod float;
pub mod graphs;
pub mod hiprtc;
pub mod inst;
pub mod launch;
mod lds;
mod matrix;
pub mod memory;
pub mod metadata;
pub mod object;
mod packed;
pub mod rocblas;
pub mod runtime;
mod scalar;
#[cfg(test)]
mod tests;
mod vector;
pub mod wave;

pub use fault::Fault;
