//! The host's side with a stand-in for the runtime: what it says and refuses.

use super::api::{Api, LIBAMDHIP64, Properties};
use super::device::{count_of, start_by};
use super::hiprtc::{Hiprtc, LIBHIPRTC, compile_by, options, recipe_by};
use super::rocblas::{Rocblas, RocblasProduct};
use crate::gpu::library::Absent;
use crate::gpu::{
    Feature, GemmCompute, GemmOperands, GemmSpec, KernelSpec, Matrix, Product, Source, Started,
    StreamKind,
};
use crate::{DType, Device, Error, Result};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

thread_local! {
    /// The function that fails on this thread, and its status.
    static FAILING: Cell<(&str, c_int)> = const { Cell::new(("", 0)) };
    static VERSION: Cell<c_int> = const { Cell::new(60_443_483) };
    static WARP: Cell<c_int> = const { Cell::new(64) };
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
    static CAPTURED: Cell<c_int> = const { Cell::new(0) };
    /// The last product by rocBLAS: operations, sizes, types, leading dimensions, strides, and what is added.
    static MULTIPLIED: Cell<([c_int; 13], [i64; 3], f32)> = const { Cell::new(([0; 13], [0; 3], 0.0)) };
}

/// The status of a function that has done its work, unless it is to fail.
fn status(name: &str) -> c_int {
    let (failing, status) = FAILING.get();
    if failing == name { status } else { 0 }
}

/// Writes a result if the function succeeds.
fn give<T>(name: &str, to: *mut T, value: T) -> c_int {
    if status(name) == 0 {
        // SAFETY: the runtime's callers give locals.
        unsafe { to.write(value) };
    }
    status(name)
}

macro_rules! stand_ins {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        $(
            #[allow(non_snake_case, unused_variables)]
            extern "C" fn $name($($argument: $type),*) -> $result {
                #[allow(dead_code)]
                const NAME: &str = stringify!($name);
                $body
            }
        )*

        /// Functions that are not needed are never called.
        fn find(name: &'static str) -> Option<*const c_void> {
            extern "C" fn never_called() {}
            match name {
                $(stringify!($name) => Some($name as *const c_void),)*
                _ => Some(never_called as *const c_void),
            }
        }
    };
}

stand_ins! {
    fn hipGetErrorName(error: c_int) -> *const c_char { c"hipErrorOfTests".as_ptr() }
    fn hipGetErrorString(error: c_int) -> *const c_char { c"it was told to fail".as_ptr() }
    fn hipGetLastError() -> c_int { 0 }
    fn hipInit(flags: u32) -> c_int { status(NAME) }
    fn hipRuntimeGetVersion(version: *mut c_int) -> c_int { give(NAME, version, VERSION.get()) }
    fn hipGetDeviceCount(count: *mut c_int) -> c_int { give(NAME, count, 2) }
    fn hipGetDevicePropertiesR0600(properties: *mut Properties, device: c_int) -> c_int {
        let mut found = Properties::EMPTY;
        let write = |field: &mut [c_char; 256], text: &CStr| {
            for (to, from) in field.iter_mut().zip(text.to_bytes()) {
                *to = *from as c_char;
            }
        };
        write(&mut found.name, c"AMD Instinct of tests");
        write(&mut found.architecture, c"gfx942:sramecc+:xnack-");
        give(NAME, properties, found)
    }
    fn hipDeviceTotalMem(bytes: *mut usize, device: c_int) -> c_int { give(NAME, bytes, 1 << 30) }
    fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
        give(NAME, value, match attribute {
            23 => 9,
            61 => 4,
            63 => 304,
            74 => 65536,
            87 => WARP.get(),
            88 => 1,
            _ => 0,
        })
    }
    fn hipGetDevice(device: *mut c_int) -> c_int { give(NAME, device, CURRENT.get()) }
    fn hipSetDevice(device: c_int) -> c_int {
        if status(NAME) == 0 {
            CURRENT.set(device);
        }
        status(NAME)
    }
    fn hipDeviceGetDefaultMemPool(pool: *mut *mut c_void, device: c_int) -> c_int {
        give(NAME, pool, null_mut())
    }
    fn hipMemPoolSetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void) -> c_int {
        status(NAME)
    }
    fn hipMallocAsync(memory: *mut *mut c_void, bytes: usize, stream: *mut c_void) -> c_int {
        give(NAME, memory, std::ptr::without_provenance_mut(256))
    }
    fn hipStreamCreateWithFlags(stream: *mut *mut c_void, flags: u32) -> c_int {
        give(NAME, stream, std::ptr::without_provenance_mut(4096))
    }
    fn hipStreamDestroy(stream: *mut c_void) -> c_int { status(NAME) }
    fn hipEventQuery(event: *mut c_void) -> c_int { status(NAME) }
    fn hipStreamGetCaptureInfo_v2(
        stream: *mut c_void,
        capture: *mut c_int,
        id: *mut u64,
        graph: *mut *mut c_void,
        dependencies: *mut c_void,
        count: *mut c_void
    ) -> c_int {
        give(NAME, id, 7);
        give(NAME, capture, CAPTURED.get())
    }
    fn hipModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> c_int { status(NAME) }
    fn hipModuleGetFunction(
        function: *mut *mut c_void,
        module: *mut c_void,
        name: *const c_char
    ) -> c_int { status(NAME) }

    fn rocblas_status_to_string(status: c_int) -> *const c_char { c"rocblas_status_of_tests".as_ptr() }
    fn rocblas_create_handle(handle: *mut *mut c_void) -> c_int {
        give(NAME, handle, std::ptr::without_provenance_mut(64))
    }
    fn rocblas_set_stream(handle: *mut c_void, stream: *mut c_void) -> c_int { status(NAME) }
    fn rocblas_set_atomics_mode(handle: *mut c_void, mode: c_int) -> c_int { mode }
    fn rocblas_set_workspace(handle: *mut c_void, memory: *mut c_void, bytes: usize) -> c_int { status(NAME) }
    fn rocblas_start_device_memory_size_query(handle: *mut c_void) -> c_int { status(NAME) }
    fn rocblas_stop_device_memory_size_query(handle: *mut c_void, bytes: *mut usize) -> c_int {
        give(NAME, bytes, 300)
    }
    fn rocblas_gemm_strided_batched_ex(
        handle: *mut c_void,
        a_operation: c_int,
        b_operation: c_int,
        m: c_int,
        n: c_int,
        k: c_int,
        alpha: *const c_void,
        a: *const c_void,
        a_type: c_int,
        a_leading: c_int,
        a_stride: i64,
        b: *const c_void,
        b_type: c_int,
        b_leading: c_int,
        b_stride: i64,
        beta: *const c_void,
        c: *const c_void,
        c_type: c_int,
        c_leading: c_int,
        c_stride: i64,
        d: *mut c_void,
        d_type: c_int,
        d_leading: c_int,
        d_stride: i64,
        batch: c_int,
        compute_type: c_int,
        algorithm: c_int,
        solution: i32,
        flags: u32
    ) -> c_int {
        let numbers = [
            a_operation, b_operation, m, n, k, batch, a_type, b_type, c_type, compute_type,
            a_leading, b_leading, c_leading,
        ];
        assert_eq!((c.addr(), c_type, c_leading, c_stride), (d.addr(), d_type, d_leading, d_stride));
        // SAFETY: scalars of f32.
        unsafe {
            assert_eq!(*alpha.cast::<f32>(), 1.0);
            MULTIPLIED.set((numbers, [a_stride, b_stride, c_stride], *beta.cast::<f32>()));
        }
        status(NAME)
    }

    fn hiprtcGetErrorString(status: c_int) -> *const c_char { c"HIPRTC_ERROR_OF_TESTS".as_ptr() }
    fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
        give(NAME, minor, 4);
        give(NAME, major, 9)
    }
    fn hiprtcCreateProgram(
        program: *mut *mut c_void,
        text: *const c_char,
        name: *const c_char,
        count: c_int,
        headers: *const *const c_char,
        names: *const *const c_char
    ) -> c_int {
        give(NAME, program, std::ptr::without_provenance_mut(64))
    }
    fn hiprtcCompileProgram(
        program: *mut c_void,
        count: c_int,
        options: *const *const c_char
    ) -> c_int { status(NAME) }
    fn hiprtcDestroyProgram(program: *mut *mut c_void) -> c_int { status(NAME) }
    fn hiprtcGetProgramLogSize(program: *mut c_void, bytes: *mut usize) -> c_int {
        give(NAME, bytes, 6)
    }
    fn hiprtcGetProgramLog(program: *mut c_void, log: *mut c_char) -> c_int {
        give(NAME, log.cast(), *b"x.cu:7")
    }
    fn hiprtcGetCodeSize(program: *mut c_void, bytes: *mut usize) -> c_int { give(NAME, bytes, 4) }
    fn hiprtcGetCode(program: *mut c_void, code: *mut c_char) -> c_int {
        give(NAME, code.cast(), *b"code")
    }
}

fn api() -> &'static Api {
    // SAFETY: those that the tests reach have the types of the headers.
    Box::leak(Box::new(unsafe { Api::of(find) }.unwrap()))
}

fn failing<T>(name: &'static str, status: c_int, f: impl FnOnce() -> T) -> T {
    FAILING.set((name, status));
    let result = f();
    FAILING.set(("", 0));
    result
}

fn started() -> Started {
    start_by(api(), 1).unwrap()
}

#[test]
fn a_device_is_described() {
    let Started { info, shared_bytes, .. } = started();
    assert_eq!((info.index, &*info.name), (1, "AMD Instinct of tests"));
    assert_eq!((&*info.architecture, info.compute_capability), ("gfx942", (9, 4)));
    assert_eq!((info.multiprocessors, info.warp, info.driver), (304, 64, (6, 4)));
    assert_eq!((info.memory, shared_bytes), (1 << 30, 65536));
    assert_eq!(CURRENT.get(), 0, "what was current is current again");
}

#[test]
fn a_missing_or_old_library_is_no_device() {
    let missing = LIBAMDHIP64.error(&Absent::NotFound);
    let message = missing.to_string();
    assert!(matches!(missing, Error::NoDevice { .. }), "{message}");
    assert!(message.contains("libamdhip64") && message.contains("WINDROW_HIP_PATH"), "{message}");
    let lacks = "hipGetDevicePropertiesR0600";
    // SAFETY: nothing is called.
    let old = unsafe { Api::of(|name| (name != lacks).then(|| find(name)).flatten()) };
    let error = LIBAMDHIP64.error(&old.map(drop).unwrap_err());
    let message = error.to_string();
    assert!(matches!(error, Error::NoDevice { .. }), "{message}");
    assert!(message.contains(lacks) && message.contains("ROCm 6.0"), "{message}");
    VERSION.set(50_731_921);
    let message = no_device(count_of(api()).map(drop));
    assert!(message.contains("HIP 5.7 is too old"), "{message}");
}

/// The words of an error that must be of this kind.
fn no_device(result: Result<()>) -> String {
    match result {
        Err(Error::NoDevice { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_a_device_there_is_none() {
    const NO_DEVICE: c_int = 100;
    for call in ["hipInit", "hipGetDeviceCount"] {
        assert_eq!(failing(call, NO_DEVICE, || count_of(api())).unwrap().0, 0, "{call}");
        let reason = no_device(failing(call, NO_DEVICE, || start_by(api(), 0)).map(drop));
        assert_eq!(reason, "this machine has 0 HIP devices", "{call}");
    }
    let reason = no_device(start_by(api(), 2).map(drop));
    assert_eq!(reason, "this machine has 2 HIP devices");
    let reason = no_device(failing("hipInit", 3, || count_of(api())).map(drop));
    assert!(reason.contains("hipErrorOfTests: it was told to fail"), "{reason}");
}

#[test]
fn a_call_that_fails_is_named() {
    for call in [
        "hipRuntimeGetVersion",
        "hipGetDeviceCount",
        "hipGetDevicePropertiesR0600",
        "hipDeviceTotalMem",
        "hipDeviceGetAttribute",
        "hipGetDevice",
        "hipSetDevice",
        "hipDeviceGetDefaultMemPool",
        "hipMemPoolSetAttribute",
    ] {
        match failing(call, 999, || start_by(api(), 1)).map(drop) {
            Err(Error::Backend { what, device: Device::Hip(_), detail }) => {
                assert_eq!((&*what, &*detail), (call, "hipErrorOfTests: it was told to fail"));
            }
            other => panic!("{call}: {other:?}"),
        }
        CURRENT.set(0);
    }
}

#[test]
fn other_wavefronts_are_refused() {
    WARP.set(16);
    let refused = start_by(api(), 0).map(drop);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    WARP.set(32);
    assert_eq!(start_by(api(), 0).unwrap().info.warp, 32);
}

#[test]
fn memory_events_and_captures_tell_errors_from_answers() {
    let runtime = started().runtime;
    let none = null_mut();
    // SAFETY: the stand-ins take any handle.
    unsafe {
        assert!(runtime.allocate(8, none).unwrap().is_some());
        assert!(failing("hipMallocAsync", 2, || runtime.allocate(8, none)).unwrap().is_none());
        assert!(failing("hipMallocAsync", 1, || runtime.allocate(8, none)).is_err());
        assert!(runtime.is_reached(none).unwrap());
        assert!(!failing("hipEventQuery", 600, || runtime.is_reached(none)).unwrap());
        let failure = failing("hipEventQuery", 719, || runtime.is_reached(none)).unwrap_err();
        assert_eq!((failure.call, failure.status), ("hipEventQuery", 719));
        use crate::gpu::Recording;
        assert!(matches!(runtime.recording(none), Ok(Recording::No)));
        CAPTURED.set(1);
        assert!(matches!(runtime.recording(none), Ok(Recording::Into { id: 7, .. })));
        CAPTURED.set(2);
        assert!(matches!(runtime.recording(none), Ok(Recording::Broken)));
        for call in ["hipModuleLoadData", "hipModuleGetFunction"] {
            let failure = failing(call, 209, || runtime.load(b"code", "entry", 0)).unwrap_err();
            assert_eq!(failure.call, call);
        }
    }
}

#[test]
fn streams_of_one_address_have_numbers_of_their_own() {
    let runtime = started().runtime;
    // SAFETY: the stand-ins take any handle.
    unsafe {
        let foreign = std::ptr::without_provenance_mut(4096);
        assert_eq!(runtime.stream_id(foreign).unwrap(), 4096);
        let numbers = [(); 2].map(|()| {
            let stream = runtime.create_stream(StreamKind::Apart).unwrap();
            let number = runtime.stream_id(stream).unwrap();
            runtime.destroy_stream(stream).unwrap();
            number
        });
        assert!(numbers[0] != numbers[1] && !numbers.contains(&4096), "{numbers:?}");
    }
}

static SOURCE: Source = Source { name: "x.cu", text: "", includes: &[] };

#[test]
fn a_missing_compiler_is_no_device() {
    let missing = LIBHIPRTC.error(&Absent::NotFound);
    let message = missing.to_string();
    assert!(matches!(missing, Error::NoDevice { .. }), "{message}");
    assert!(message.contains("libhiprtc") && message.contains("WINDROW_HIP_PATH"), "{message}");
}

#[test]
fn a_compiler_that_fails_says_what_of() {
    // SAFETY: all of its functions are among those above.
    let hiprtc: &_ = Box::leak(Box::new(unsafe { Hiprtc::of(find) }.unwrap()));
    let spec = KernelSpec::new(&SOURCE, "x");
    let (version, options) = recipe_by(hiprtc, &spec, "gfx942").unwrap();
    assert_eq!(version, "9.4");
    assert_eq!(compile_by(hiprtc, &spec, &options).unwrap(), b"code");
    let failed = |call: &'static str| {
        let result = failing(call, 6, || {
            recipe_by(hiprtc, &spec, "gfx942")?;
            compile_by(hiprtc, &spec, &options)
        });
        match result {
            Err(Error::Backend { what, device: Device::Hip(_), detail }) => (what, detail),
            other => panic!("{call}: {other:?}"),
        }
    };
    for call in [
        "hiprtcVersion",
        "hiprtcCreateProgram",
        "hiprtcGetProgramLogSize",
        "hiprtcGetProgramLog",
        "hiprtcGetCodeSize",
        "hiprtcGetCode",
    ] {
        assert_eq!(failed(call), (call.into(), "HIPRTC_ERROR_OF_TESTS".into()));
    }
    assert_eq!(failed("hiprtcCompileProgram"), ("compiling kernel `x`".into(), "x.cu:7".into()));
}

#[test]
fn kernels_are_compiled_for_the_chip_and_what_it_has() {
    let spec = KernelSpec::new(&SOURCE, "x").define("N", 3);
    let found = options(&spec, "gfx1100").unwrap();
    assert!(
        ["--offload-arch=gfx1100", "-DKERNEL=x", "-DN=3"]
            .iter()
            .all(|&o| found.contains(&o.into()))
    );
    let chips = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "gfx1030", "gfx906"];
    let compiling = |feature| {
        let spec = spec.clone().needs(feature);
        chips.map(|chip| match options(&spec, chip) {
            Ok(_) => 1,
            Err(Error::Unsupported { .. }) => 0,
            Err(other) => panic!("{other}"),
        })
    };
    assert_eq!(compiling(Feature::WavefrontProducts), [1, 1, 1, 1, 1, 0, 0]);
    assert_eq!(compiling(Feature::WavefrontFloatProducts), [1, 1, 1, 0, 0, 0, 0]);
    assert_eq!(compiling(Feature::MatrixProducts), [0; 7]);
}

/// Operands and sizes change their places: rocBLAS counts in columns.
#[test]
fn products_are_asked_of_rocblas_in_columns() {
    // SAFETY: all of its functions are among those above.
    let rocblas: &_ = Box::leak(Box::new(unsafe { Rocblas::of(find) }.unwrap()));
    let matrix = |dtype, transposed, row_stride, batch_stride| Matrix {
        dtype,
        transposed,
        row_stride,
        batch_stride,
        alignment: 16,
    };
    let spec = GemmSpec {
        m: 5,
        n: 6,
        k: 7,
        batch: 3,
        a: matrix(DType::BF16, false, 8, 40),
        b: matrix(DType::BF16, true, 9, 54),
        c: matrix(DType::F32, false, 10, 50),
        compute: GemmCompute::F32,
    };
    let multiplied = || RocblasProduct::new(rocblas, 0, &spec).map(|product| product.unwrap());
    let product = multiplied().unwrap();
    assert_eq!(product.workspace_bytes(), 512);
    let at = |address| std::ptr::without_provenance_mut(address);
    let operands = GemmOperands { a: at(256), b: at(512), c: at(1024), workspace: at(4096) };
    // SAFETY: the stand-ins look at no memory.
    unsafe { product.run(operands, null_mut(), true) }.unwrap();
    let numbers = [112, 111, 6, 5, 7, 3, 168, 168, 151, 151, 9, 8, 10];
    assert_eq!(MULTIPLIED.get(), (numbers, [54, 40, 50], 1.0));

    for (call, status) in [
        ("rocblas_start_device_memory_size_query", 1),
        ("rocblas_stop_device_memory_size_query", 8),
        ("rocblas_gemm_strided_batched_ex", 6),
    ] {
        let failure = failing(call, status, multiplied).unwrap_err();
        assert_eq!((failure.call, failure.words.as_str()), (call, "rocblas_status_of_tests"));
    }
    for answer in [9, 10] {
        assert!(failing("rocblas_gemm_strided_batched_ex", answer, multiplied).is_ok());
    }
    for call in ["rocblas_set_stream", "rocblas_set_workspace", "rocblas_gemm_strided_batched_ex"] {
        // SAFETY: the stand-ins look at no memory.
        let failure = failing(call, 5, || unsafe { product.run(operands, null_mut(), false) });
        assert_eq!(failure.unwrap_err().call, call);
    }
    let large = GemmSpec { m: 1 << 31, ..spec };
    assert!(RocblasProduct::new(rocblas, 0, &large).unwrap().is_none(), "it counts by i32");
}
