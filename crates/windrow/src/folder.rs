//! The folders in which the library keeps files.

use std::path::PathBuf;

/// The path that an environment variable names, if it is set.
pub(crate) fn from_env(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// `WINDROW_CACHE_DIR`, or `windrow` in the user's cache folder. `None` if there is no such place.
pub(crate) fn cache() -> Option<PathBuf> {
    from_env("WINDROW_CACHE_DIR")
        .or_else(|| from_env("XDG_CACHE_HOME").map(|d| d.join("windrow")))
        .or_else(|| from_env("HOME").map(|d| d.join(".cache/windrow")))
        .or_else(|| from_env("LOCALAPPDATA").map(|d| d.join("windrow")))
}
