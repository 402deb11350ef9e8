//! The instruction sets of x86-64.

/// Evaluates `$body`, which uses intrinsics; `self` proves that the machine has them.
macro_rules! isa {
    ($body:expr) => {
        // SAFETY: `self` exists, so the machine has the instructions; for memory access the
        // caller's promise is passed on.
        unsafe { $body }
    };
}

/// Methods that are one intrinsic or a few, one method per line. The caller of the `unsafe` ones guarantees that the
/// memory is valid.
macro_rules! instructions {
    (
        safe { $(fn $safe:ident($this:ident $(, $a:ident: $t:ty)*) $(-> $r:ty)? { $e:expr })* }
        unsafe { $(fn $raw:ident($raw_this:ident $(, $b:ident: $u:ty)*) $(-> $q:ty)? { $f:expr })* }
    ) => {
        $(
            #[inline(always)]
            fn $safe($this $(, $a: $t)*) $(-> $r)? {
                isa!($e)
            }
        )*
        $(
            #[inline(always)]
            unsafe fn $raw($raw_this $(, $b: $u)*) $(-> $q)? {
                isa!($f)
            }
        )*
    };
}

/// Two numbers as one of twice the length.
#[inline(always)]
fn bits_of_pair(pair: [f32; 2]) -> i64 {
    (u64::from(pair[0].to_bits()) | u64::from(pair[1].to_bits()) << 32) as i64
}

mod amx;
mod avx2;
mod avx512;
mod avx512bf16;

pub(crate) use amx::Amx;
pub(crate) use avx2::Avx2;
pub(crate) use avx512::Avx512;
pub(crate) use avx512bf16::Avx512Bf16;
