//! A HIP runtime and hiprtc without a device, for tests: kernels are compiled by clang, and their code objects are
//! interpreted instruction by instruction.
//!
//! The library has the functions that windrow looks up in `libamdhip64`, `libhiprtc` and `librocblas`. It is loaded in
//! their place.

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
