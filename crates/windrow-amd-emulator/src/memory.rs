//! The device's memory: memory of this process that is known by its ranges.

use crate::wave::POISON;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// The memory of the device.
pub const TOTAL: usize = 8 << 30;

/// Allocations are aligned to this, and as many bytes behind each belong to none.
const GUARD: usize = 256;

/// Starts and lengths.
static ALLOCATED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn allocated() -> std::sync::MutexGuard<'static, BTreeMap<usize, usize>> {
    ALLOCATED.lock().unwrap_or_else(|e| e.into_inner())
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.checked_next_multiple_of(4)? + GUARD, GUARD).ok()
}

/// Memory full of poison; `None` where there is not so much.
pub fn allocate(bytes: usize) -> Option<*mut u8> {
    let mut all = allocated();
    if all.values().sum::<usize>().checked_add(bytes)? > TOTAL {
        return None;
    }
    let layout = layout(bytes)?;
    // SAFETY: the size is not 0.
    let memory = unsafe { alloc(layout) };
    if memory.is_null() {
        return None;
    }
    // SAFETY: whole words of what was allocated.
    let words = unsafe {
        std::slice::from_raw_parts_mut(
            memory.cast::<std::mem::MaybeUninit<u32>>(),
            bytes.div_ceil(4),
        )
    };
    words.fill(std::mem::MaybeUninit::new(POISON));
    all.insert(memory.addr(), bytes);
    Some(memory)
}

/// Frees what [`allocate`] gave; false if it did not.
///
/// # Safety
/// Nothing uses the memory after.
pub unsafe fn free(memory: *mut u8) -> bool {
    let Some(bytes) = allocated().remove(&memory.addr()) else { return false };
    if let Some(layout) = layout(bytes) {
        // SAFETY: allocated with the same layout.
        unsafe { dealloc(memory, layout) };
    }
    true
}

/// The memory that a kernel may read and write.
#[derive(Clone, Debug, Default)]
pub struct Ranges(Vec<(usize, usize)>);

impl Ranges {
    /// All allocations of now, and some more.
    #[must_use]
    pub fn now(more: &[(usize, usize)]) -> Self {
        let mut ranges: Vec<_> =
            allocated().iter().map(|(&start, &bytes)| (start, start + bytes)).collect();
        ranges.extend(more.iter().map(|&(start, bytes)| (start, start + bytes)));
        ranges.sort_unstable();
        Ranges(ranges)
    }

    /// Start and end of the range that holds an address.
    #[must_use]
    pub fn around(&self, address: usize) -> Option<(usize, usize)> {
        let after = self.0.partition_point(|&(start, _)| start <= address);
        let &(start, end) = self.0.get(after.checked_sub(1)?)?;
        (address < end).then_some((start, end))
    }

    /// True if all bytes belong to one range.
    #[must_use]
    pub fn hold(&self, address: usize, bytes: usize) -> bool {
        self.around(address).is_some_and(|(_, end)| end - address >= bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_poison_and_end() {
        let memory = allocate(10).unwrap();
        // SAFETY: ten bytes, filled.
        let bytes = unsafe { std::slice::from_raw_parts(memory, 10) };
        assert_eq!(bytes[..4], POISON.to_le_bytes());
        let (ranges, at) = (Ranges::now(&[(8, 8)]), memory.addr());
        assert!(ranges.hold(at, 10) && ranges.hold(at + 9, 1) && ranges.hold(8, 8));
        assert!(!ranges.hold(at, 11) && !ranges.hold(at + 10, 1) && !ranges.hold(at - 1, 2));
        assert!(!ranges.hold(16, 1) && !ranges.hold(7, 1));
        // SAFETY: of `allocate`, not used after.
        assert!(unsafe { free(memory) } && !unsafe { free(memory) });
        assert!(!Ranges::now(&[]).hold(at, 1));
        assert!(allocate(TOTAL + 1).is_none() && allocate(usize::MAX).is_none());
    }
}
