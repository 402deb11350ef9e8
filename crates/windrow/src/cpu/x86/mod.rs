//! The instruction sets of x86-64.

/// `$body` with intrinsics of an instruction set that the token proves.
macro_rules! isa {
    ($body:expr) => {
        // SAFETY: `self` exists, so the machine has the instructions; for memory access the
        // caller's promise is passed on.
        unsafe { $body }
    };
}

mod avx2;
mod avx512;
mod avx512bf16;

pub(crate) use avx2::Avx2;
pub(crate) use avx512::Avx512;
pub(crate) use avx512bf16::Avx512Bf16;
