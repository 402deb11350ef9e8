//! Memory between two inaccessible pages: an access outside ends the process.

use super::ALIGN;
use std::cell::Cell;
use std::io::Write;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

/// The end of a buffer, or of a random case's tensor, that lies at a forbidden page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Start,
    /// Buffers begin at a multiple of [`ALIGN`], so up to `ALIGN - 1` bytes lie behind them.
    End,
}

thread_local! {
    static SIDE: Cell<Option<Side>> = const { Cell::new(None) };
}

/// The end that is guarded in buffers made by this thread now.
pub(crate) fn side() -> Option<Side> {
    SIDE.get()
}

/// Runs the closure; buffers that this thread makes meanwhile are guarded.
pub(crate) fn guard<R>(side: Side, run: impl FnOnce() -> R) -> R {
    SIDE.set(Some(side));
    let result = run();
    SIDE.set(None);
    result
}

static CASE: AtomicU64 = AtomicU64::new(0);

/// Makes a memory fault print which case and side was running before it ends the process.
pub(crate) fn report_faults(case: u64, side: Side) {
    extern "C" fn report(signal: libc::c_int) {
        let (case, side) = match CASE.load(Ordering::Relaxed) {
            number if number % 2 == 0 => (number / 2, Side::Start),
            number => (number / 2, Side::End),
        };
        let mut text = [0; 120];
        let mut rest = &mut text[..];
        // Formatting a number into an array allocates nothing, as a handler must not.
        let _ = writeln!(rest, "case {case} reached outside of its memory, guarded at {side:?}");
        let unused = rest.len();
        let len = text.len() - unused;
        // SAFETY: both may be called in a handler; the fault then happens again, without one.
        unsafe {
            libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), len);
            libc::signal(signal, libc::SIG_DFL);
        }
    }
    CASE.store(2 * case + u64::from(side == Side::End), Ordering::Relaxed);
    // SAFETY: the handler does nothing that is forbidden in one.
    unsafe { libc::signal(libc::SIGSEGV, report as extern "C" fn(libc::c_int) as usize) };
}

/// Pages of zeros, the first and the last of them forbidden.
#[derive(Debug)]
pub(crate) struct Pages {
    mapping: NonNull<u8>,
    bytes: usize,
    /// The offset of the buffer in the mapping.
    offset: usize,
}

impl Pages {
    /// Room for `len` bytes, if the thread is in [`guard`].
    pub(super) fn asked_for(len: usize) -> Option<Self> {
        Some(Self::new(len, side()?))
    }

    fn new(len: usize, side: Side) -> Self {
        // SAFETY: asks for a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let inside = len.next_multiple_of(page);
        let bytes = inside + 2 * page;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, of whose pages only the inner ones are given access.
        let mapping = unsafe {
            let mapping = libc::mmap(null_mut(), bytes, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(mapping, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(mapping.byte_add(page), inside, access), 0);
            mapping
        };
        let offset = match side {
            Side::Start => page,
            Side::End => (page + inside - len) / ALIGN * ALIGN,
        };
        Pages { mapping: NonNull::new(mapping.cast()).expect("mapped above"), bytes, offset }
    }

    /// The first byte of the buffer.
    pub(super) fn start(&self) -> NonNull<u8> {
        // SAFETY: inside of the mapping.
        unsafe { self.mapping.add(self.offset) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the whole of a mapping of our own, whose buffer is dropped as well.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Buffer;

    /// The signal that ends a process which reads the byte `offset` bytes behind `start`; `None` if it lives.
    fn signal_of_reading(start: *const u8, offset: isize) -> Option<i32> {
        // SAFETY: the child reads one byte and ends without running anything else of this process.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                start.wrapping_offset(offset).read_volatile();
                libc::_exit(0);
            }
            child
        };
        let mut status = 0;
        // SAFETY: waits for the child above.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
    }

    #[test]
    fn a_read_outside_ends_the_process() {
        for len in [64, 4096, 10_048] {
            for (side, outside, inside) in
                [(Side::Start, -1, 0), (Side::End, len as isize, len as isize - 1)]
            {
                let mut buffer = guard(side, || Buffer::new(len)).unwrap();
                buffer.as_mut_slice().fill(1);
                assert_eq!(buffer.as_ptr() as usize % ALIGN, 0);
                let start = buffer.as_ptr();
                assert_eq!(
                    signal_of_reading(start, outside),
                    Some(libc::SIGSEGV),
                    "{side:?} {len}"
                );
                assert_eq!(signal_of_reading(start, inside), None, "{side:?} {len}");
            }
        }
        assert!(Buffer::new(64).unwrap()._pages.is_none());
    }
}
