//! Compiling kernels with NVRTC.

use super::toolkit;
use crate::gpu::library::{Library, describe, library};
use crate::gpu::{Compiled, Compiler, Failure, Feature, Handle, KernelSpec, Reading};
use crate::{Device, Error, Result};
use std::ffi::{c_char, c_int};

static LIBNVRTC: Library = Library {
    // It opens the companion by bare name.
    companion: Some("libnvrtc-builtins.so"),
    ..toolkit("libnvrtc.so", "nvidia-cuda-nvrtc")
};

library! {
    /// The compiler.
    pub(super) struct Nvrtc in LIBNVRTC;

    fn nvrtcGetErrorString(status: c_int) -> *const c_char;
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    fn nvrtcGetNumSupportedArchs(count: *mut c_int);
    fn nvrtcGetSupportedArchs(list: *mut c_int);
    fn nvrtcCreateProgram(
        program: *mut Handle,
        text: *const c_char,
        name: *const c_char,
        count: c_int,
        headers: *const *const c_char,
        names: *const *const c_char,
    );
    fn nvrtcCompileProgram(program: Handle, count: c_int, options: *const *const c_char);
    fn nvrtcDestroyProgram(program: *mut Handle);
    fn nvrtcGetProgramLogSize(program: Handle, bytes: *mut usize);
    fn nvrtcGetProgramLog(program: Handle, log: *mut c_char);
    fn nvrtcGetPTXSize(program: Handle, bytes: *mut usize);
    fn nvrtcGetPTX(program: Handle, ptx: *mut c_char);
    fn nvrtcGetCUBINSize(program: Handle, bytes: *mut usize);
    fn nvrtcGetCUBIN(program: Handle, cubin: *mut c_char);
}

static COMPILER: Compiler<Nvrtc> = Compiler {
    create: Nvrtc::nvrtcCreateProgram,
    compile: Nvrtc::nvrtcCompileProgram,
    destroy: Nvrtc::nvrtcDestroyProgram,
    log: (Nvrtc::nvrtcGetProgramLogSize, Nvrtc::nvrtcGetProgramLog),
    device: Device::Cuda(0),
};

describe!(Nvrtc by nvrtcGetErrorString);

/// The target of generated code.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    /// `sm_90`, `sm_90a`: machine code; `compute_120`: PTX that the driver finishes.
    name: String,
}

impl Target {
    /// The target for a device of this compute capability: its machine code if the compiler knows it, otherwise PTX for
    /// the newest architecture that the compiler knows and the device can run.
    fn of(spec: &KernelSpec, (major, minor): (u32, u32), supported: &[u32]) -> Result<Self> {
        let number = major * 10 + minor;
        if let Some(feature) = spec.needs {
            if !super::has((major, minor), feature) {
                return Err(Error::unsupported(
                    format!("kernel `{}` on sm_{number}", spec.entry),
                    format!("it needs {feature:?}"),
                ));
            }
            // What only one generation has is not in the instructions that later ones share.
            let own = if feature == Feature::WarpgroupProducts { "a" } else { "" };
            if feature != Feature::MatrixProducts {
                return Ok(Target { name: format!("sm_{number}{own}") });
            }
        }
        if supported.contains(&number) {
            return Ok(Target { name: format!("sm_{number}") });
        }
        match supported.iter().filter(|&&s| s < number).max() {
            Some(newest) => Ok(Target { name: format!("compute_{newest}") }),
            None => Err(Error::unsupported(
                format!("compute capability {major}.{minor}"),
                format!("this NVRTC compiles for {supported:?}; an older CUDA version may do"),
            )),
        }
    }
}

/// The compiler's version and the options for a kernel on devices of this compute capability.
///
/// # Errors
/// [`Error::Backend`] without NVRTC, [`Error::Unsupported`] if it does not know the device or the device lacks what the
/// kernel needs.
pub(super) fn recipe(spec: &KernelSpec, capability: (u32, u32)) -> Result<(String, Vec<String>)> {
    let nvrtc = Nvrtc::get()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the call writes two integers.
    unsafe { nvrtc.nvrtcVersion(&mut major, &mut minor) }.map_err(error)?;
    let target = Target::of(spec, capability, &supported_architectures(nvrtc)?)?;
    let mut options = vec![
        format!("--gpu-architecture={}", target.name),
        "--std=c++17".into(),
        "--device-as-default-execution-space".into(),
        "--generate-line-info".into(),
        // It has no `offsetof`.
        "--define-macro=OFFSET_OF(s,f)=__INTADDR__(&((s*)0)->f)".into(),
        format!("--define-macro=KERNEL={}", spec.entry),
    ];
    options.extend(spec.defines.iter().map(|(n, v)| format!("--define-macro={n}={v}")));
    Ok((format!("{major}.{minor}"), options))
}

fn supported_architectures(nvrtc: &Nvrtc) -> Result<Vec<u32>> {
    let mut count = 0;
    // SAFETY: the second call writes as many integers as the first says.
    unsafe {
        nvrtc.nvrtcGetNumSupportedArchs(&mut count).map_err(error)?;
        let mut list = vec![0; count as usize];
        nvrtc.nvrtcGetSupportedArchs(list.as_mut_ptr()).map_err(error)?;
        Ok(list.into_iter().map(|a| a as u32).collect())
    }
}

/// # Errors
/// [`Error::Backend`] without NVRTC, or with its messages.
pub(super) fn compile(spec: &KernelSpec, options: &[String]) -> Result<Compiled> {
    let is_ptx = options.iter().any(|o| o.starts_with("--gpu-architecture=compute_"));
    let code: Reading<Nvrtc> = match is_ptx {
        true => (Nvrtc::nvrtcGetPTXSize, Nvrtc::nvrtcGetPTX),
        false => (Nvrtc::nvrtcGetCUBINSize, Nvrtc::nvrtcGetCUBIN),
    };
    COMPILER.compile(Nvrtc::get()?, spec, options, code)
}

fn error(failure: Failure) -> Error {
    failure.on(Device::Cuda(0))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::gpu::Source;
    use rayon::prelude::*;
    use std::collections::{HashMap, HashSet};

    /// Compiles for several generations, or the one that a spec is for, and fails if a kernel spills
    /// registers. Without NVRTC it does nothing, unless `WINDROW_REQUIRE_NVRTC` is set. `WINDROW_PTXAS=1` shows the assembler's report.
    pub(crate) fn check_compiles(specs: &[KernelSpec]) {
        let mut seen = HashSet::new();
        for spec in specs.iter().filter(|spec| seen.insert(*spec)) {
            for capability in GENERATIONS.into_iter().filter(|&c| may_compile(spec, c)) {
                check_compiles_for(spec, capability);
            }
        }
    }

    /// Compiles as [`check_compiles`], each kernel once. The distinct kernels of a file take the generations in turn,
    /// so every file meets all of them and many variants cost little.
    pub(crate) fn check_compiles_in_turn(specs: &[KernelSpec]) {
        let (mut seen, mut turns) = (HashSet::new(), HashMap::new());
        let distinct = specs.iter().filter(|spec| seen.insert(*spec));
        let all: Vec<_> = distinct
            .filter_map(|spec| {
                let all = GENERATIONS.into_iter().filter(|&c| may_compile(spec, c));
                let turn: &mut usize = turns.entry(spec.source.name).or_default();
                *turn += 1;
                Some((spec, all.cycle().nth(*turn)?))
            })
            .collect();
        all.into_par_iter().for_each(|(spec, capability)| check_compiles_for(spec, capability));
    }

    const GENERATIONS: [(u32, u32); 3] = [(8, 0), (9, 0), (10, 0)];

    fn may_compile(spec: &KernelSpec, capability: (u32, u32)) -> bool {
        spec.needs.is_none_or(|feature| crate::cuda::has(capability, feature))
    }

    fn check_compiles_for(spec: &KernelSpec, capability: (u32, u32)) {
        let Some((target, log)) = report(spec, capability) else { return };
        assert_eq!(spilled_bytes(&log), 0, "{spec:?} {target}: {log}");
        assert!(log.contains("0 bytes stack frame"), "{spec:?} {target}: {log}");
    }

    /// Compiles for one generation and fails if the kernel spills more than so many bytes.
    pub(crate) fn check_spills(spec: &KernelSpec, capability: (u32, u32), most: u32) {
        let Some((target, log)) = report(spec, capability) else { return };
        assert!(spilled_bytes(&log) <= most, "{spec:?} {target}: {log}");
    }

    /// The compiler's messages for a kernel; empty if it has none, `None` without NVRTC.
    pub(crate) fn message(spec: &KernelSpec) -> Option<String> {
        Nvrtc::get().ok()?;
        let (_, options) = recipe(spec, (9, 0)).unwrap();
        let error = compile(spec, &options).err();
        Some(error.map_or(String::new(), |error| error.to_string()))
    }

    /// The target's name and the assembler's report; `None` without NVRTC.
    fn report(spec: &KernelSpec, capability: (u32, u32)) -> Option<(String, String)> {
        if let Err(missing) = Nvrtc::get() {
            assert!(std::env::var_os("WINDROW_REQUIRE_NVRTC").is_none(), "{missing}");
            eprintln!("not checked: {missing}");
            return None;
        }
        let (_, mut options) = recipe(spec, capability).unwrap();
        let target = options[0].clone();
        options.push("--ptxas-options=-v".into());
        let compiled = compile(spec, &options).unwrap_or_else(|e| panic!("{e}"));
        let log = compiled.log;
        assert!(compiled.image.len() > 500 && log.contains(&spec.entry), "{log}");
        if std::env::var_os("WINDROW_PTXAS").is_some() {
            eprintln!("{:?} {target} {log}", spec.defines);
        }
        Some((target, log))
    }

    /// Bytes of registers that a kernel stores to make room, as the assembler reports them.
    fn spilled_bytes(log: &str) -> u32 {
        let (before, _) = log.split_once(" bytes spill stores").expect("the assembler's report");
        before.rsplit(' ').next().and_then(|n| n.parse().ok()).expect("a number of bytes")
    }

    #[test]
    fn targets() {
        static SOURCE: Source = Source { name: "x.cu", text: "", includes: &[] };
        let spec = KernelSpec::new(&SOURCE, "x");
        let name = |spec: &KernelSpec, capability| {
            Target::of(spec, capability, &[75, 80, 90, 100]).map(|t| t.name)
        };
        assert_eq!(name(&spec, (9, 0)).unwrap(), "sm_90");
        assert_eq!(name(&spec, (8, 9)).unwrap(), "compute_80");
        assert_eq!(name(&spec, (13, 0)).unwrap(), "compute_100");
        assert!(matches!(name(&spec, (7, 0)), Err(Error::Unsupported { .. })));
        let copies = spec.clone().needs(Feature::BulkCopies);
        assert_eq!(name(&copies, (9, 0)).unwrap(), "sm_90");
        let products = spec.needs(Feature::WarpgroupProducts);
        assert_eq!(name(&products, (9, 0)).unwrap(), "sm_90a");
        assert!(matches!(name(&products, (10, 0)), Err(Error::Unsupported { .. })));
    }

    #[test]
    fn broken_source_is_reported_with_the_compilers_words() {
        static BROKEN: Source =
            Source { name: "broken.cu", text: "int f() { return nothing; }", includes: &[] };
        if Nvrtc::get().is_err() {
            return;
        }
        let spec = KernelSpec::new(&BROKEN, "broken");
        let message = message(&spec).unwrap();
        assert!(message.contains("broken.cu(1)") && message.contains("nothing"), "{message}");
    }
}
