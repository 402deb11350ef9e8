//! The `windrow` command, and its reader and writer of tensor files.

pub mod files;
