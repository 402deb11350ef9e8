//! In place of rayon's pool, without the feature `threads`: the caller is alone.

/// There is no pool.
pub(super) fn size() -> Option<usize> {
    None
}

/// Calls `work(0)`.
pub(super) fn run(_helpers: usize, work: &(dyn Fn(usize) + Sync)) {
    work(0);
}
