//! The floating-point mode of a thread: how it rounds, and whether it treats subnormal numbers as zero.
//!
//! A caller may change the mode of its thread (`torch.set_flush_denormal` does). Helper threads adopt the caller's mode
//! for its tasks, so that results do not depend on which thread computes them.

/// The bits of the thread's control register that change results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FloatMode(Register);

impl FloatMode {
    /// The mode of this thread.
    pub(super) fn current() -> Self {
        FloatMode(read() & RESULTS)
    }

    /// Sets this mode on the thread until the guard is dropped.
    pub(super) fn enter(self) -> Entered {
        let before = FloatMode::current();
        let changed = (before != self).then_some(before);
        if changed.is_some() {
            self.set();
        }
        Entered(changed)
    }

    fn set(self) {
        write(read() & !RESULTS | self.0);
    }

    /// This mode with subnormal operands and results flushed to zero.
    #[cfg(test)]
    pub(super) fn flushing(self) -> Self {
        FloatMode(self.0 | FLUSH)
    }
}

/// A guard that restores the thread's own mode.
#[derive(Debug)]
pub(super) struct Entered(Option<FloatMode>);

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            before.set();
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod register {
    use std::arch::asm;

    /// The register MXCSR.
    pub(super) type Register = u32;

    /// The mask of FTZ, RC and DAZ (flush to zero, rounding control, denormals are zero). It leaves out the masks and
    /// the flags of exceptions.
    pub(super) const RESULTS: Register = 0xe040;
    #[cfg(test)]
    pub(super) const FLUSH: Register = 0x8040;

    pub(super) fn read() -> Register {
        let mut value = 0u32;
        // SAFETY: writes the 4 bytes that are given.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
        value
    }

    pub(super) fn write(value: Register) {
        // SAFETY: the value comes from a thread's register, so no reserved bit is set. Kernels are right in each mode:
        // between two changes, only tasks run, in the mode that they would have on the caller's thread.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack)) };
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod register {
    use std::arch::asm;

    /// The register FPCR.
    pub(super) type Register = u64;

    /// The mask of FIZ, AH, NEP, FZ16, rounding mode, FZ, DN and AHP. It leaves out traps.
    pub(super) const RESULTS: Register = 0x07c8_0007;
    #[cfg(test)]
    pub(super) const FLUSH: Register = 1 << 24;

    pub(super) fn read() -> Register {
        let value;
        // SAFETY: reads a register that every thread may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nomem, nostack, preserves_flags)) };
        value
    }

    pub(super) fn write(value: Register) {
        // SAFETY: the value comes from a thread's register. Kernels are right in each mode: between two changes, only
        // tasks run, in the mode that they would have on the caller's thread.
        unsafe { asm!("msr fpcr, {}", in(reg) value, options(nostack)) };
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod register {
    /// The mode register of targets that have only one mode.
    pub(super) type Register = u32;
    pub(super) const RESULTS: Register = 0;
    #[cfg(test)]
    pub(super) const FLUSH: Register = 0;

    pub(super) fn read() -> Register {
        0
    }

    pub(super) fn write(_: Register) {}
}

#[cfg(test)]
use register::FLUSH;
use register::{RESULTS, Register, read, write};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_is_put_back() {
        let before = FloatMode::current();
        {
            let _outer = before.flushing().enter();
            assert_eq!(FloatMode::current(), before.flushing());
            drop(before.enter());
            assert_eq!(FloatMode::current(), before.flushing());
        }
        assert_eq!(FloatMode::current(), before);
    }
}
