//! Checks that kernels compile, for the tests of operators: with NVRTC, and with hiprtc for the architectures that
//! `WINDROW_COMPILE_FOR` lists (such as `gfx942,gfx1100`).

use super::KernelSpec;

/// Checks that all kernels compile.
pub(crate) fn check_compiles(specs: &[KernelSpec]) {
    #[cfg(feature = "cuda")]
    crate::cuda::compile_tests::check_compiles(specs);
    check_compiles_for_hip(specs);
}

/// Checks like [`check_compiles`], but with NVRTC each kernel only for one compute capability, which changes from
/// kernel to kernel.
pub(crate) fn check_compiles_in_turn(specs: &[KernelSpec]) {
    #[cfg(feature = "cuda")]
    crate::cuda::compile_tests::check_compiles_in_turn(specs);
    check_compiles_for_hip(specs);
}

/// Fails if the kernel, compiled by NVRTC for `capability`, spills more than `most` bytes of registers.
pub(crate) fn check_spills(spec: &KernelSpec, capability: (u32, u32), most: u32) {
    #[cfg(feature = "cuda")]
    crate::cuda::compile_tests::check_spills(spec, capability, most);
    let _ = (capability, most);
    check_compiles_for_hip(std::slice::from_ref(spec));
}

/// NVRTC's messages for a kernel; empty if it has none, `None` without NVRTC.
pub(crate) fn message(spec: &KernelSpec) -> Option<String> {
    #[cfg(feature = "cuda")]
    return crate::cuda::compile_tests::message(spec);
    #[cfg(not(feature = "cuda"))]
    return Some(spec).and(None);
}

/// Checks with hiprtc alone.
pub(crate) fn check_compiles_for_hip(specs: &[KernelSpec]) {
    #[cfg(feature = "hip")]
    crate::hip::compile_tests::check_compiles(specs);
    let _ = specs;
}
