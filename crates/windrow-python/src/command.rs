//! The `windrow` command, for `python -m windrow.bench`.

use pyo3::prelude::*;
use std::ffi::OsString;

/// Runs `windrow ARGS`; returns the exit status.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, args: Vec<OsString>) -> u8 {
    let program = OsString::from("windrow");
    py.detach(|| windrow_cli::run(std::iter::once(program).chain(args)))
}
