//! Work on the threads of PyTorch's OpenMP runtime.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::ffi::{c_uint, c_void};
use std::sync::OnceLock;

/// `GOMP_parallel` of GCC's runtime, which LLVM's and Intel's have too: calls the function with `data`
/// on each thread of a team of `threads` (0: as many as OpenMP's settings say) and waits for all.
type Parallel = unsafe extern "C" fn(
    function: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
    threads: c_uint,
    flags: c_uint,
);

static PARALLEL: OnceLock<Parallel> = OnceLock::new();

/// Splits work over the threads of the OpenMP runtime whose `GOMP_parallel` is at this address, from
/// now on.
#[pyfunction]
pub(crate) fn use_openmp(gomp_parallel: usize) -> PyResult<()> {
    if gomp_parallel == 0 {
        return Err(PyValueError::new_err("`gomp_parallel` is no address"));
    }
    let address = std::ptr::with_exposed_provenance::<()>(gomp_parallel);
    // SAFETY: the caller gives the address of a function of this type.
    let parallel = unsafe { std::mem::transmute::<*const (), Parallel>(address) };
    PARALLEL.get_or_init(|| parallel);
    windrow::cpu::use_team(team);
    Ok(())
}

type Work<'a> = &'a (dyn Fn() + Sync);

fn team(work: Work<'_>) {
    unsafe extern "C" fn call(work: *mut c_void) {
        // SAFETY: `team` passes the address of its argument and waits until all calls are done.
        let work = unsafe { *work.cast::<Work<'_>>() };
        work();
    }
    match PARALLEL.get() {
        // SAFETY: `call` gets what it expects, and may be called from any thread.
        Some(parallel) => unsafe { parallel(call, (&raw const work).cast_mut().cast(), 0, 0) },
        None => work(),
    }
}
