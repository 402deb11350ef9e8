//! Whole kernels through the functions of the libraries: right ones, and wrong ones that a device would run without a
//! word. They need clang-19, lld-19 and llvm-19; without them nothing is tested here.

#![allow(missing_docs, reason = "tests")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::process::Command;
use std::ptr::{null, null_mut};
use windrow_amd_emulator::hiprtc::*;
use windrow_amd_emulator::inst::DISASSEMBLER;
use windrow_amd_emulator::runtime::*;

fn tools() -> bool {
    let found = [CLANG, DISASSEMBLER, "ld.lld-19"]
        .iter()
        .all(|tool| Command::new(tool).arg("--version").output().is_ok_and(|o| o.status.success()));
    if !found {
        eprintln!("nothing is tested: `{INSTALL}`");
    }
    found
}

/// The code object, or the compiler's messages.
fn compile(source: &str) -> Result<Vec<u8>, String> {
    let source = CString::new(source).unwrap();
    let mut program = null_mut();
    let options = [c"--offload-arch=gfx942", c"-O3", c"-std=c++17"].map(CStr::as_ptr);
    // SAFETY: strings that end in a zero byte; as many bytes are written as are asked for.
    unsafe {
        let name = c"test.hip".as_ptr();
        assert_eq!(hiprtcCreateProgram(&mut program, source.as_ptr(), name, 0, null(), null()), 0);
        let status = hiprtcCompileProgram(program, options.len() as i32, options.as_ptr());
        let mut bytes = 0;
        let result = if status == 0 {
            assert_eq!(hiprtcGetCodeSize(program, &mut bytes), 0);
            let mut code = vec![0u8; bytes];
            assert_eq!(hiprtcGetCode(program, code.as_mut_ptr().cast()), 0);
            Ok(code)
        } else {
            assert_eq!(hiprtcGetProgramLogSize(program, &mut bytes), 0);
            let mut log = vec![0u8; bytes];
            assert_eq!(hiprtcGetProgramLog(program, log.as_mut_ptr().cast::<c_char>()), 0);
            Err(String::from_utf8_lossy(&log).into_owned())
        };
        assert_eq!(hiprtcDestroyProgram(&mut program), 0);
        result
    }
}

/// Runs `kernel` of the source on a block of threads with one buffer and its length; the buffer afterwards, or the
/// words of the error.
fn run(source: &str, grid: u32, block: u32, data: &[u32]) -> Result<Vec<u32>, String> {
    let code = compile(source).unwrap();
    let (mut module, mut function, mut memory) = (null_mut(), null_mut(), null_mut());
    let bytes = size_of_val(data);
    let words = |status| {
        // SAFETY: a string of this thread.
        let words = unsafe { CStr::from_ptr(hipGetErrorString(status)) };
        words.to_string_lossy().into_owned()
    };
    // SAFETY: handles of the calls before, and buffers of these sizes.
    unsafe {
        let status = hipModuleLoadData(&mut module, code.as_ptr().cast());
        if status != 0 {
            return Err(words(status));
        }
        assert_eq!(hipModuleGetFunction(&mut function, module, c"absent".as_ptr()), 500);
        assert_eq!(hipModuleGetFunction(&mut function, module, c"kernel".as_ptr()), 0);
        assert_eq!(hipMalloc(&mut memory, bytes), 0);
        assert_eq!(hipMemcpy(memory, data.as_ptr().cast(), bytes, 1), 0);
        let mut length = data.len() as u32;
        let mut parameters = [(&raw mut memory).cast::<c_void>(), (&raw mut length).cast()];
        let parameters = parameters.as_mut_ptr();
        let status = hipModuleLaunchKernel(
            function,
            grid,
            1,
            1,
            block,
            1,
            1,
            0,
            null_mut(),
            parameters,
            null_mut(),
        );
        let mut result = vec![0; data.len()];
        assert_eq!(hipMemcpy(result.as_mut_ptr().cast(), memory, bytes, 2), 0);
        assert_eq!(hipFree(memory), 0);
        if status == 0 { Ok(result) } else { Err(words(status)) }
    }
}

const REVERSED: &str = r#"extern "C" __global__ void kernel(unsigned *x, unsigned n) {
    __shared__ unsigned kept[256];
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) kept[threadIdx.x] = x[i];
    BARRIER
    if (i < n) x[i] = kept[blockDim.x - 1 - threadIdx.x] + gridDim.x;
}"#;

#[test]
fn a_kernel_with_a_barrier_is_right_in_any_order() {
    if !tools() {
        return;
    }
    let data: Vec<u32> = (0..1024).collect();
    let want: Vec<u32> = data.chunks(256).flat_map(|c| c.iter().rev().map(|x| x + 4)).collect();
    assert_eq!(
        run(&REVERSED.replace("BARRIER", "__syncthreads();"), 4, 256, &data),
        Ok(want.clone())
    );
    // The wavefronts that come late are not yet to be seen by those that come early.
    let wrong =
        run(&REVERSED.replace("BARRIER", "__builtin_amdgcn_wave_barrier();"), 4, 256, &data);
    assert_ne!(wrong, Ok(want));
}

#[test]
fn the_packet_of_the_queue_has_the_sizes() {
    if !tools() {
        return;
    }
    let source = r#"extern "C" __global__ void kernel(unsigned *x, unsigned n) {
        const unsigned *sizes = (const unsigned *)__builtin_amdgcn_dispatch_ptr();
        if (threadIdx.x < 5) x[threadIdx.x] = sizes[1 + threadIdx.x];
    }"#;
    assert_eq!(run(source, 3, 64, &[7; 5]), Ok(vec![64 | 1 << 16, 1, 192, 1, 1]));
}

#[test]
fn what_lies_outside_is_a_fault() {
    if !tools() {
        return;
    }
    let source = r#"extern "C" __global__ void kernel(unsigned *x, unsigned n) {
        const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i <= n) x[i] = i;
    }"#;
    let fault = run(source, 2, 64, &[7; 100]).unwrap_err();
    assert!(fault.contains("kernel `kernel`, block (1, 0, 0)"), "{fault}");
    assert!(fault.contains("lane 36: 4 bytes at") && fault.contains("global_store"), "{fault}");
}

#[test]
fn what_is_never_written_is_poison() {
    if !tools() {
        return;
    }
    let source = r#"extern "C" __global__ void kernel(unsigned *x, unsigned n) {
        __shared__ unsigned kept[64];
        if (threadIdx.x < 32) kept[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = kept[threadIdx.x];
    }"#;
    let found = run(source, 1, 64, &[3; 64]).unwrap();
    assert_eq!(found[..32], [3; 32]);
    assert_eq!(found[32..], [windrow_amd_emulator::wave::POISON; 32]);
}

#[test]
fn what_does_not_compile_says_why() {
    if !tools() {
        return;
    }
    let log = compile("no kernel").unwrap_err();
    assert!(log.contains("test.hip") && log.contains("error"), "{log}");
}

#[test]
fn what_is_no_code_object_is_refused() {
    let mut module = null_mut();
    // SAFETY: 64 bytes, as many as a header has.
    let status = unsafe { hipModuleLoadData(&mut module, [0u8; 64].as_ptr().cast()) };
    assert_eq!(status, 200);
}
