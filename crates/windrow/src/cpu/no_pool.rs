//! In place of rayon's pool, without the feature `threads`: the caller is alone.

/// There is no pool.
pub(super) fn size() -> Option<usize> {
    None
}

/// Calls `work`.
pub(super) fn run(_helpers: usize, work: &(dyn Fn() + Sync)) {
    work();
}
