//! The replacement of rayon's pool in builds without the feature `threads`: the caller is alone.

/// The size of the pool: there is none.
pub(super) fn size() -> Option<usize> {
    None
}

/// Calls `work`.
pub(super) fn run(_helpers: usize, work: &(dyn Fn() + Sync)) {
    work();
}
