//! The `windrow` command.

fn main() {}
