//! Running out of memory as an error like others.
//!
//! Libraries ask for small pieces of memory in ways that cannot fail, so that the process is aborted where
//! there is none. The command ends with its own message and status instead.

use crate::files;
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;

/// The system's allocator for the command itself: where it has no memory, the process ends with exit
/// status 2.
pub struct Memory;

// SAFETY: the system's allocator does everything; no call returns where that has failed.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.realloc(ptr, layout, size) }, size)
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

fn checked(ptr: *mut u8, bytes: usize) -> *mut u8 {
    if ptr.is_null() {
        end(bytes);
    }
    ptr
}

/// Ends without asking for memory, and without what is done at a usual end: other threads go on meanwhile.
#[cold]
fn end(bytes: usize) -> ! {
    files::remove_parts();
    let mut text = [0; 128];
    let mut rest = &mut text[..];
    // The text is shorter than its room.
    let _ = writeln!(rest, "windrow: out of memory: {bytes} bytes were asked for");
    let len = 128 - rest.len();
    #[cfg(unix)]
    // SAFETY: a buffer of this length; neither call allocates.
    unsafe {
        libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), len);
        libc::_exit(2)
    }
    #[cfg(not(unix))]
    {
        let _ = std::io::stderr().write_all(&text[..len]);
        std::process::exit(2)
    }
}
