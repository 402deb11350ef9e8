//! Compiling kernels with NVRTC.

use super::cache;
use super::library::Library;
use crate::{DType, Device, Error, Result};
use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use std::ffi::{CStr, CString, c_char};
use std::hash::{Hash, Hasher};
use std::path::Path;

/// Device code embedded in the binary. Each is a static of its own: two are the same if their
/// addresses are.
#[derive(Debug)]
pub(crate) struct Source {
    /// File name, for the compiler's messages.
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// Headers of its room; those of the wing may always be included.
    pub(crate) includes: &'static [Source],
}

impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Source {}

impl Hash for Source {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::ptr::hash(self, state);
    }
}

const fn header(name: &'static str, text: &'static str) -> Source {
    Source { name, text, includes: &[] }
}

/// What every source may include.
const HEADERS: &[Source] = &[
    header("windrow.cuh", include_str!("kernels/windrow.cuh")),
    header("intrinsics.cuh", include_str!("kernels/intrinsics.cuh")),
    header("activation.cuh", include_str!("kernels/activation.cuh")),
    header("copy_engine_sm90.cuh", include_str!("kernels/copy_engine_sm90.cuh")),
];

/// One kernel: a source, the name that its entry point gets (the macro `KERNEL`), and constants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KernelSpec {
    pub(super) source: &'static Source,
    pub(super) entry: String,
    /// Bytes of dynamic shared memory that launches will ask for.
    pub(super) shared_bytes: u32,
    /// Whether launches overlap the end of the kernel before.
    pub(super) overlapped: bool,
    /// Compile for exactly this architecture (`sm_90a`), whose own instructions the source uses.
    only_for: Option<&'static str>,
    defines: Vec<(&'static str, String)>,
}

impl KernelSpec {
    /// The source must define `extern "C" __global__ void KERNEL(...)`.
    pub(crate) fn new(source: &'static Source, entry: impl Into<String>) -> Self {
        KernelSpec {
            source,
            entry: entry.into(),
            shared_bytes: 0,
            overlapped: false,
            only_for: None,
            defines: Vec::new(),
        }
    }

    /// Defines a macro for the source.
    pub(crate) fn define(mut self, name: &'static str, value: impl ToString) -> Self {
        self.defines.push((name, value.to_string()));
        self
    }

    /// From sm_90 on, blocks may start while the kernel launched before still runs: the source calls
    /// `wait_for_previous` before anything else. With `early` they also make way for the next
    /// kernel's from their start on, not only at their end: for launches of a wave or two.
    pub(crate) fn overlapped(mut self, early: bool) -> Self {
        self.overlapped = true;
        self.define("EARLY", u8::from(early))
    }

    /// The source compiles to one architecture only, as `sm_90a`: for files that use instructions
    /// of one generation.
    pub(crate) fn only_for(mut self, architecture: &'static str) -> Self {
        self.only_for = Some(architecture);
        self
    }

    /// Dynamic shared memory of a launch, which may exceed 48 KiB.
    pub(crate) fn shared_bytes(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// Its file and its entry point.
    pub(crate) fn name(&self) -> (&'static str, &str) {
        (self.source.name, &self.entry)
    }

    /// What a macro is defined as for it.
    pub(crate) fn value_of(&self, name: &str) -> Option<&str> {
        let found = self.defines.iter().find(|(defined, _)| *defined == name);
        found.map(|(_, value)| value.as_str())
    }

    fn headers(&self) -> impl Iterator<Item = &'static Source> {
        HEADERS.iter().chain(self.source.includes)
    }

    fn options(&self, target: &Target) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={}", target.name),
            "--std=c++17".into(),
            "--device-as-default-execution-space".into(),
            "--generate-line-info".into(),
            format!("--define-macro=KERNEL={}", self.entry),
        ];
        options.extend(self.defines.iter().map(|(n, v)| format!("--define-macro={n}={v}")));
        options
    }
}

/// The name of an element type in device code.
///
/// # Panics
/// For types that no kernel takes as elements.
pub(crate) fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::BF16 => "Bf16",
        DType::F64 | DType::I32 | DType::I64 => {
            unreachable!("specs allow f32, f16 and bf16")
        }
    }
}

/// What code is generated for.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    /// `sm_90`, `sm_90a`: machine code; `compute_120`: PTX that the driver finishes.
    name: String,
}

impl Target {
    /// For a device of this compute capability: its machine code if the compiler knows it, else
    /// PTX for the newest architecture that the compiler knows and the device can run.
    fn of(spec: &KernelSpec, (major, minor): (u32, u32), supported: &[u32]) -> Result<Self> {
        let number = major * 10 + minor;
        if let Some(name) = spec.only_for {
            let matches =
                name.trim_start_matches("sm_").trim_end_matches('a') == number.to_string();
            if !matches {
                return Err(Error::unsupported(
                    format!("kernel `{}` on sm_{number}", spec.entry),
                    format!("it is written for {name}"),
                ));
            }
            return Ok(Target { name: name.into() });
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

    fn is_ptx(&self) -> bool {
        self.name.starts_with("compute_")
    }
}

/// The image of a kernel for a device of this compute capability, from the cache at `directory` or
/// compiled.
pub(super) fn image(
    spec: &KernelSpec,
    capability: (u32, u32),
    directory: Option<&Path>,
) -> Result<Vec<u8>> {
    Library::Nvrtc.require()?;
    let target = Target::of(spec, capability, &supported_architectures()?)?;
    let options = spec.options(&target);
    let version = version()?;
    let parts = [version.as_str(), spec.source.text]
        .into_iter()
        .chain(spec.headers().map(|h| h.text))
        .chain(options.iter().map(String::as_str));
    let key = cache::key(parts);
    if let Some(image) = directory.and_then(|d| cache::load(d, &key)) {
        return Ok(image);
    }
    let compiled = compile(spec, &target, &options)?;
    if let Some(Err(error)) = directory.map(|d| cache::store(d, &key, &compiled.image)) {
        tracing::debug!(%error, "a compiled kernel was not cached");
    }
    Ok(compiled.image)
}

/// What the compiler made.
struct Compiled {
    image: Vec<u8>,
    /// Its messages.
    #[cfg_attr(not(test), allow(dead_code))] // tests read the report on registers
    log: String,
}

fn version() -> Result<String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: NVRTC is loaded and writes two integers.
    nvrtc(unsafe { sys::nvrtcVersion(&mut major, &mut minor) }, "nvrtcVersion")?;
    Ok(format!("{major}.{minor}"))
}

fn supported_architectures() -> Result<Vec<u32>> {
    let mut count = 0;
    // SAFETY: NVRTC is loaded; the second call writes as many integers as the first says.
    unsafe {
        nvrtc(sys::nvrtcGetNumSupportedArchs(&mut count), "nvrtcGetNumSupportedArchs")?;
        let mut list = vec![0; count as usize];
        nvrtc(sys::nvrtcGetSupportedArchs(list.as_mut_ptr()), "nvrtcGetSupportedArchs")?;
        Ok(list.into_iter().map(|a| a as u32).collect())
    }
}

fn compile(spec: &KernelSpec, target: &Target, options: &[String]) -> Result<Compiled> {
    let c = |text: &str| CString::new(text).expect("sources and options hold no zero byte");
    let (text, name) = (c(spec.source.text), c(spec.source.name));
    let header_texts: Vec<_> = spec.headers().map(|h| c(h.text)).collect();
    let header_names: Vec<_> = spec.headers().map(|h| c(h.name)).collect();
    let options: Vec<_> = options.iter().map(|o| c(o)).collect();
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();

    let mut program = Program(std::ptr::null_mut());
    // SAFETY: NVRTC is loaded; the strings live until the call returns.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &mut program.0,
            text.as_ptr(),
            name.as_ptr(),
            header_texts.len() as i32,
            pointers(&header_texts).as_ptr(),
            pointers(&header_names).as_ptr(),
        )
    };
    nvrtc(created, "nvrtcCreateProgram")?;
    let option_pointers = pointers(&options);
    // SAFETY: a program that was made; the options live until the call returns.
    let result = unsafe {
        sys::nvrtcCompileProgram(program.0, options.len() as i32, option_pointers.as_ptr())
    };
    let log = program.read(sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog)?;
    let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
    if result != nvrtcResult::NVRTC_SUCCESS {
        return Err(Error::Backend {
            what: format!("compiling kernel `{}` for {}", spec.entry, target.name),
            device: Device::Cuda(0),
            detail: log,
        });
    }
    let image = if target.is_ptx() {
        program.read(sys::nvrtcGetPTXSize, sys::nvrtcGetPTX)?
    } else {
        program.read(sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN)?
    };
    Ok(Compiled { image, log })
}

/// Owns an NVRTC program.
struct Program(nvrtcProgram);

impl Program {
    fn read(
        &self,
        size: unsafe fn(nvrtcProgram, *mut usize) -> nvrtcResult,
        get: unsafe fn(nvrtcProgram, *mut c_char) -> nvrtcResult,
    ) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is alive; the second call writes as many bytes as the first says.
        unsafe {
            nvrtc(size(self.0, &mut bytes), "reading NVRTC's result")?;
            let mut out = vec![0u8; bytes];
            nvrtc(get(self.0, out.as_mut_ptr().cast()), "reading NVRTC's result")?;
            Ok(out)
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by nvrtcCreateProgram.
            unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
        }
    }
}

fn nvrtc(result: nvrtcResult, what: &str) -> Result<()> {
    if result == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: the call returns a static string for any code.
    let words = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
    Err(Error::Backend {
        what: what.into(),
        device: Device::Cuda(0),
        detail: words.to_string_lossy().into_owned(),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rayon::prelude::*;
    use std::collections::{HashMap, HashSet};

    /// Compiles for several generations, or the one that a spec is for, and fails if a kernel spills
    /// registers. Without NVRTC it does nothing, unless `WINDROW_REQUIRE_NVRTC` is set. `WINDROW_PTXAS=1` shows the assembler's report.
    pub(crate) fn check_compiles(specs: &[KernelSpec]) {
        let all = specs.iter().flat_map(|spec| {
            GENERATIONS.into_iter().filter(|&c| may_compile(spec, c)).map(move |c| (spec, c))
        });
        all.for_each(|(spec, capability)| check_compiles_for(spec, capability));
    }

    /// As [`check_compiles`], each kernel once: the distinct kernels of a file take the generations in turn, so
    /// that every file meets all of them and many variants cost little.
    pub(crate) fn check_compiles_in_turn(specs: &[KernelSpec]) {
        let (mut seen, mut turns) = (HashSet::new(), HashMap::new());
        let distinct = specs.iter().filter(|spec| seen.insert(*spec));
        let all: Vec<_> = distinct
            .map(|spec| {
                let all = GENERATIONS.into_iter().filter(|&c| may_compile(spec, c));
                let turn: &mut usize = turns.entry(spec.source.name).or_default();
                *turn += 1;
                let capability = all.cycle().nth(*turn).expect("kernels are for one of these");
                (spec, capability)
            })
            .collect();
        all.into_par_iter().for_each(|(spec, capability)| check_compiles_for(spec, capability));
    }

    const GENERATIONS: [(u32, u32); 3] = [(8, 0), (9, 0), (10, 0)];

    fn may_compile(spec: &KernelSpec, (major, minor): (u32, u32)) -> bool {
        let name = format!("sm_{major}{minor}");
        spec.only_for.is_none_or(|only| only.trim_end_matches('a') == name)
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

    /// The target's name and the assembler's report; `None` without NVRTC.
    fn report(spec: &KernelSpec, capability: (u32, u32)) -> Option<(String, String)> {
        if let Err(missing) = Library::Nvrtc.require() {
            assert!(std::env::var_os("WINDROW_REQUIRE_NVRTC").is_none(), "{missing}");
            eprintln!("not checked: {missing}");
            return None;
        }
        let target = Target::of(spec, capability, &supported_architectures().unwrap()).unwrap();
        let mut options = spec.options(&target);
        options.push("--ptxas-options=-v".into());
        let compiled = compile(spec, &target, &options).unwrap_or_else(|e| panic!("{e}"));
        let log = compiled.log;
        assert!(compiled.image.len() > 500 && log.contains(&spec.entry), "{log}");
        if std::env::var_os("WINDROW_PTXAS").is_some() {
            eprintln!("{:?} {} {log}", spec.defines, target.name);
        }
        Some((target.name.to_string(), log))
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
        let hopper = spec.only_for("sm_90a");
        assert_eq!(name(&hopper, (9, 0)).unwrap(), "sm_90a");
        assert!(matches!(name(&hopper, (10, 0)), Err(Error::Unsupported { .. })));
    }

    #[test]
    fn broken_source_is_reported_with_the_compilers_words() {
        static BROKEN: Source =
            Source { name: "broken.cu", text: "int f() { return nothing; }", includes: &[] };
        if Library::Nvrtc.require().is_err() {
            return;
        }
        let error = image(&KernelSpec::new(&BROKEN, "broken"), (9, 0), None).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("broken.cu(1)") && message.contains("nothing"), "{message}");
    }

    #[test]
    fn a_damaged_cache_entry_is_rebuilt() {
        static GOOD: Source = Source {
            name: "good.cu",
            text: "extern \"C\" __global__ void KERNEL(int i) {}",
            includes: &[],
        };
        if Library::Nvrtc.require().is_err() {
            return;
        }
        let dir = std::env::temp_dir().join(format!("windrow-compile-{}", std::process::id()));
        let spec = KernelSpec::new(&GOOD, "good");
        let first = image(&spec, (9, 0), Some(&dir)).unwrap();
        let entry = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
        let whole = std::fs::read(&entry).unwrap();
        std::fs::write(&entry, &whole[..whole.len() / 2]).unwrap();
        assert_eq!(image(&spec, (9, 0), Some(&dir)).unwrap(), first);
        assert_eq!(std::fs::read(&entry).unwrap(), whole);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
