//! Many threads, and sizes beyond what tests of results reach.

#[path = "../common/mod.rs"]
mod common;
mod concurrency;
#[cfg(target_os = "linux")]
mod far_apart;
mod sizes;
