//! Aligned memory with a cache of freed blocks.
//!
//! A fresh large block costs a page fault for every 4 KiB at first touch, which for a
//! memory-bound operator is more than the operator itself. Blocks of at least [`CACHE_FROM`] bytes
//! therefore go back to a process-wide cache and are handed out again.

use crate::{Device, Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cmp::Reverse;
use std::ptr::NonNull;
use std::sync::Mutex;

#[cfg(all(test, target_os = "linux"))]
pub(crate) mod guarded;

/// Cache line, and the widest vector load.
const ALIGN: usize = 64;
/// Smaller blocks come from the allocator, which keeps them without page faults itself.
const CACHE_FROM: usize = 64 << 10;
/// The maximum number of bytes in the cache. Above it, the blocks that were not used for the longest time are freed.
const CACHE_LIMIT: usize = 512 << 20;

/// A block of initialised memory, aligned to 64 bytes.
#[derive(Debug)]
pub(crate) struct Buffer {
    ptr: NonNull<u8>,
    block: Block,
    len: usize,
    capacity: usize,
    /// The mapping that holds the memory, if it is no block of the allocator.
    #[cfg(all(test, target_os = "linux"))]
    _pages: Option<guarded::Pages>,
}

// SAFETY: a Buffer owns plain bytes.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` gives read access only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` bytes: zeros, or what an earlier owner left.
    pub(crate) fn new(len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self::of(Block(NonNull::<Aligned>::dangling().cast()), 0, 0));
        }
        #[cfg(all(test, target_os = "linux"))]
        if let Some(pages) = guarded::Pages::asked_for(len) {
            let block = Block(pages.start());
            return Ok(Buffer { _pages: Some(pages), ..Self::of(block, len, 0) });
        }
        if len >= CACHE_FROM
            && let Some((block, capacity)) =
                CACHE.lock().unwrap_or_else(|e| e.into_inner()).take(len)
        {
            return Ok(Self::of(block, len, capacity));
        }
        let oom = || Error::OutOfMemory { device: Device::Cpu, bytes: len };
        let layout = block_layout(len).ok_or_else(oom)?;
        // SAFETY: the layout has a non-zero size.
        let block = Block(NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(oom)?);
        prefer_huge_pages(block.start(), len);
        Ok(Self::of(block, len, len))
    }

    /// The first `len` bytes of a block, whose owner it becomes unless the capacity is 0.
    fn of(block: Block, len: usize, capacity: usize) -> Self {
        Buffer {
            ptr: block.start(),
            block,
            len,
            capacity,
            #[cfg(all(test, target_os = "linux"))]
            _pages: None,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes are owned by self and borrowed.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes are owned by self and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

/// Asks for pages of 2 MiB in the parts of the block that contain such pages: packed filters and workspaces are read in
/// strides that else miss the translation buffers. A request, so a refusal does not matter.
fn prefer_huge_pages(ptr: NonNull<u8>, len: usize) {
    #[cfg(target_os = "linux")]
    {
        const HUGE: usize = 2 << 20;
        let start = (ptr.as_ptr() as usize).next_multiple_of(HUGE);
        let end = (ptr.as_ptr() as usize + len) / HUGE * HUGE;
        if start < end {
            // SAFETY: whole pages inside of the block; the advice leaves their contents alone.
            unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (ptr, len);
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.capacity == 0 {
            return;
        }
        if self.capacity < CACHE_FROM {
            return free(self.block, self.capacity);
        }
        let mut cache = CACHE.lock().unwrap_or_else(|e| e.into_inner());
        let freed = cache.give(self.block, self.capacity);
        drop(cache);
        freed.into_iter().for_each(|(capacity, block)| free(block, capacity));
    }
}

fn free(block: Block, capacity: usize) {
    let layout = block_layout(capacity).expect("the block was allocated with it");
    // SAFETY: allocated in `Buffer::new` with this layout.
    unsafe { dealloc(block.0.as_ptr(), layout) }
}

/// Room for `capacity` bytes from a multiple of [`ALIGN`] on. The allocator zeroes memory of a larger
/// alignment than its own by hand, which touches every page; without one it comes from the system as zeros,
/// and a page costs nothing before it is written.
fn block_layout(capacity: usize) -> Option<Layout> {
    Layout::from_size_align(capacity.checked_add(ALIGN)?, 1).ok()
}

#[repr(align(64))]
struct Aligned;

/// A block as the allocator gave it.
#[derive(Clone, Copy, Debug)]
struct Block(NonNull<u8>);
// SAFETY: a Block in the cache is owned by it alone.
unsafe impl Send for Block {}

impl Block {
    /// The first byte that is used.
    fn start(self) -> NonNull<u8> {
        let padding = self.0.align_offset(ALIGN);
        // SAFETY: less than the `ALIGN` bytes that the block has beside its capacity.
        unsafe { self.0.add(padding) }
    }
}

struct Cache {
    /// The freed blocks with their sizes, the oldest first.
    blocks: Vec<(usize, Block)>,
    bytes: usize,
}

static CACHE: Mutex<Cache> = Mutex::new(Cache { blocks: Vec::new(), bytes: 0 });

impl Cache {
    /// The smallest block that fits without wasting more than it uses; of several the one that was freed last, which is
    /// most likely in the processor's caches.
    fn take(&mut self, len: usize) -> Option<(Block, usize)> {
        let best = self
            .blocks
            .iter()
            .enumerate()
            .filter(|(_, (capacity, _))| *capacity >= len && *capacity / 2 <= len)
            .min_by_key(|&(i, (capacity, _))| (*capacity, Reverse(i)))?
            .0;
        let (capacity, block) = self.blocks.remove(best);
        self.bytes -= capacity;
        Some((block, capacity))
    }

    /// Adds a block, and returns those that must be freed for it: the oldest ones, or the block itself if it is too
    /// large. Without this, a process that moves on to other sizes would keep only blocks of old sizes.
    fn give(&mut self, block: Block, capacity: usize) -> Vec<(usize, Block)> {
        if capacity > CACHE_LIMIT {
            return vec![(capacity, block)];
        }
        self.bytes += capacity;
        self.blocks.push((capacity, block));
        let mut freed = 0;
        while self.bytes > CACHE_LIMIT {
            self.bytes -= self.blocks[freed].0;
            freed += 1;
        }
        self.blocks.drain(..freed).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_and_initialised() {
        for len in [0, 1, 63, 64, 4096, 1 << 20] {
            let mut b = Buffer::new(len).unwrap();
            assert_eq!(b.as_ptr() as usize % ALIGN, 0);
            assert_eq!((b.len(), b.as_mut_slice().len()), (len, len));
            b.as_mut_slice().fill(7);
        }
    }

    #[test]
    fn cache_prefers_the_closest_block_and_refuses_wasteful_ones() {
        let mut cache = Cache { blocks: Vec::new(), bytes: 0 };
        let block = || Block(NonNull::<Aligned>::dangling().cast());
        for capacity in [100, 120, 1000] {
            assert!(cache.give(block(), capacity).is_empty());
        }
        assert_eq!(cache.take(90).map(|(_, c)| c), Some(100));
        assert_eq!(cache.take(90).map(|(_, c)| c), Some(120));
        assert!(cache.take(90).is_none());
        assert_eq!(cache.bytes, 1000);
    }

    #[test]
    fn the_block_that_was_freed_last_is_taken_first() {
        let mut cache = Cache { blocks: Vec::new(), bytes: 0 };
        let mut memory = [0u8; 3];
        let all: Vec<_> = memory.iter_mut().map(|byte| Block(NonNull::from(byte))).collect();
        for &block in &all {
            cache.give(block, 100);
        }
        for block in all.into_iter().rev() {
            assert_eq!(cache.take(100).map(|(taken, _)| taken.0), Some(block.0));
        }
    }

    #[test]
    fn cache_that_is_full_frees_what_came_first() {
        let mut cache = Cache { blocks: Vec::new(), bytes: 0 };
        let mut give = |capacity| {
            let block = Block(NonNull::<Aligned>::dangling().cast());
            let freed = cache.give(block, capacity).into_iter().map(|(capacity, _)| capacity);
            (freed.collect::<Vec<_>>(), cache.bytes)
        };
        let half = CACHE_LIMIT / 2;
        assert_eq!(give(half), (vec![], half));
        assert_eq!(give(100), (vec![], half + 100));
        assert_eq!(give(half), (vec![half], half + 100));
        assert_eq!(give(CACHE_LIMIT), (vec![100, half], CACHE_LIMIT));
        assert_eq!(give(CACHE_LIMIT + 1), (vec![CACHE_LIMIT + 1], CACHE_LIMIT));
    }
}
