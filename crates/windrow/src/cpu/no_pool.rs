//! The replacement of rayon's pool in builds without the feature `threads`: all work runs on the caller's thread.

/// The size of the pool: there is none.
pub(super) fn size() -> Option<usize> {
    None
}

/// Calls `work`.
pub(super) fn run(_helpers: usize, work: &(dyn Fn() + Sync)) {
    work();
}
