//! Compiling kernels with hiprtc.

use super::rocm;
use crate::gpu::library::{Library, describe, library};
use crate::gpu::{Compiler, Handle, KernelSpec, Reading};
use crate::{Device, Error, Result};
use std::ffi::{c_char, c_int};

pub(super) static LIBHIPRTC: Library = rocm("libhiprtc.so");

library! {
    /// The compiler.
    pub(super) struct Hiprtc in LIBHIPRTC;

    fn hiprtcGetErrorString(status: c_int) -> *const c_char;
    fn hiprtcVersion(major: *mut c_int, minor: *mut c_int);
    fn hiprtcCreateProgram(
        program: *mut Handle,
        text: *const c_char,
        name: *const c_char,
        count: c_int,
        headers: *const *const c_char,
        names: *const *const c_char,
    );
    fn hiprtcCompileProgram(program: Handle, count: c_int, options: *const *const c_char);
    fn hiprtcDestroyProgram(program: *mut Handle);
    fn hiprtcGetProgramLogSize(program: Handle, bytes: *mut usize);
    fn hiprtcGetProgramLog(program: Handle, log: *mut c_char);
    fn hiprtcGetCodeSize(program: Handle, bytes: *mut usize);
    fn hiprtcGetCode(program: Handle, code: *mut c_char);
}

static COMPILER: Compiler<Hiprtc> = Compiler {
    create: Hiprtc::hiprtcCreateProgram,
    compile: Hiprtc::hiprtcCompileProgram,
    destroy: Hiprtc::hiprtcDestroyProgram,
    log: (Hiprtc::hiprtcGetProgramLogSize, Hiprtc::hiprtcGetProgramLog),
    device: Device::Hip(0),
};

describe!(Hiprtc by hiprtcGetErrorString);

/// The compiler's version and the options for a kernel on devices of this architecture.
///
/// # Errors
/// [`Error::NoDevice`] without hiprtc, [`Error::Unsupported`] if the device lacks what the kernel needs.
pub(super) fn recipe(spec: &KernelSpec, architecture: &str) -> Result<(String, Vec<String>)> {
    recipe_by(Hiprtc::get()?, spec, architecture)
}

pub(super) fn recipe_by(
    hiprtc: &Hiprtc,
    spec: &KernelSpec,
    architecture: &str,
) -> Result<(String, Vec<String>)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the call writes two integers.
    unsafe { hiprtc.hiprtcVersion(&mut major, &mut minor) }
        .map_err(|failure| failure.on(Device::Hip(0)))?;
    Ok((format!("{major}.{minor}"), options(spec, architecture)?))
}

/// Whatever the version.
pub(super) fn options(spec: &KernelSpec, architecture: &str) -> Result<Vec<String>> {
    if let Some(feature) = spec.needs.filter(|&feature| !super::has(architecture, feature)) {
        return Err(Error::unsupported(
            format!("kernel `{}` on {architecture}", spec.entry),
            format!("it needs {feature:?}"),
        ));
    }
    let mut options = vec![
        format!("--offload-arch={architecture}"),
        "-std=c++17".into(),
        "-O3".into(),
        // Where a rounding is measured the sources forbid to fuse it away.
        "-ffp-contract=fast-honor-pragmas".into(),
        "-DOFFSET_OF(s,f)=__builtin_offsetof(s,f)".into(),
        // Structures that inherit fields are laid out as on the host, although C++ does not promise it.
        "-Wno-invalid-offsetof".into(),
        format!("-DKERNEL={}", spec.entry),
    ];
    options.extend(spec.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    Ok(options)
}

/// # Errors
/// [`Error::NoDevice`] without hiprtc, [`Error::Backend`] with its messages.
pub(super) fn compile(spec: &KernelSpec, options: &[String]) -> Result<Vec<u8>> {
    compile_by(Hiprtc::get()?, spec, options)
}

pub(super) fn compile_by(
    hiprtc: &'static Hiprtc,
    spec: &KernelSpec,
    options: &[String],
) -> Result<Vec<u8>> {
    let code: Reading<Hiprtc> = (Hiprtc::hiprtcGetCodeSize, Hiprtc::hiprtcGetCode);
    COMPILER.compile(hiprtc, spec, options, code).map(|compiled| compiled.image)
}

#[cfg(test)]
pub(crate) mod compile_tests {
    use super::*;
    use crate::gpu::Source;
    use rayon::prelude::*;
    use std::collections::HashSet;
    use std::hash::{DefaultHasher, Hash, Hasher};
    use std::sync::{LazyLock, Mutex};

    /// Compiles for each chip of `WINDROW_COMPILE_FOR` those that need nothing that it has not; of `gfx90a/20@7` about one
    /// in 20, which the seed 7 chooses. With the variable `WINDROW_COMPILED` the file of that name gets a line for each.
    pub(crate) fn check_compiles(specs: &[KernelSpec]) {
        let Ok(chips) = std::env::var("WINDROW_COMPILE_FOR") else { return };
        static DONE: LazyLock<Mutex<HashSet<(String, KernelSpec)>>> = LazyLock::new(Mutex::default);
        let all: Vec<_> = chips
            .split(',')
            .flat_map(|chip| {
                specs.iter().filter_map(move |spec| Some((share(chip, spec)?, spec.clone())))
            })
            .filter(|(chip, spec)| spec.needs.is_none_or(|f| crate::hip::has(chip, f)))
            .filter(|pair| DONE.lock().unwrap().insert(pair.clone()))
            .collect();
        all.into_par_iter().for_each(|(chip, spec)| {
            let options = options(&spec, &chip).unwrap();
            let image = compile(&spec, &options).unwrap_or_else(|e| panic!("{chip} {spec:?} {e}"));
            assert!(image.starts_with(b"\x7fELF") || image.starts_with(b"__CLANG_OFFLOAD"));
            record(&format!("{chip} {} {}\n", spec.source.name, spec.entry));
        });
    }

    /// The chip, if the kernel is of its share.
    fn share(chip: &str, spec: &KernelSpec) -> Option<String> {
        let Some((chip, share)) = chip.split_once('/') else { return Some(chip.to_owned()) };
        let (one_in, seed) = share.split_once('@').expect("a number and a seed");
        let mut hash = DefaultHasher::new();
        (chip, seed, spec.name(), &spec.defines).hash(&mut hash);
        let one_in: u64 = one_in.parse().expect("a number");
        hash.finish().is_multiple_of(one_in).then(|| chip.to_owned())
    }

    #[test]
    fn a_share_is_the_seeds() {
        static SOURCE: Source = Source { name: "x.cu", text: "", includes: &[] };
        let specs = (0..4000).map(|n| KernelSpec::new(&SOURCE, format!("k{n}")));
        let specs: Vec<_> = specs.collect();
        let of = |chip| specs.iter().filter(|spec| share(chip, spec).is_some()).collect::<Vec<_>>();
        assert_eq!(of("gfx942").len(), 4000);
        let few = of("gfx90a/20@7");
        assert!((100..300).contains(&few.len()), "{}", few.len());
        assert!(few == of("gfx90a/20@7") && few != of("gfx90a/20@8") && few != of("gfx1100/20@7"));
    }

    fn record(line: &str) {
        use std::io::Write;
        if let Some(path) = std::env::var_os("WINDROW_COMPILED") {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
            file.and_then(|mut file| file.write_all(line.as_bytes())).unwrap();
        }
    }
}
