//! hiprtc's functions: clang and lld of version 19 make the code objects, with a prelude in place of HIP's headers.

use crate::runtime::{Handle, boxed, functions};
use std::ffi::{CStr, CString, c_char, c_int};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// The compiler of kernels.
pub const CLANG: &str = "clang-19";
/// The command that installs the missing programs.
pub const INSTALL: &str = "apt-get install clang-19 lld-19 llvm-19";

const PRELUDE: &str = include_str!("prelude.h");

/// `hiprtcResult`
const OUT_OF_MEMORY: c_int = 1;
const INVALID_INPUT: c_int = 3;
const INVALID_PROGRAM: c_int = 4;
const COMPILATION: c_int = 6;

/// A source with what was made of it.
struct Program {
    name: String,
    text: Vec<u8>,
    headers: Vec<(String, Vec<u8>)>,
    log: CString,
    code: Vec<u8>,
}

/// Files of one compilation, deleted at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> std::io::Result<Self> {
        Self::within(&std::env::temp_dir())
    }

    fn within(folder: &Path) -> std::io::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        // The library may be loaded twice, under both of its names.
        let library = (&raw const COUNT).addr();
        let name = format!("windrow-amd-emulator-{}-{library:x}-{count}", std::process::id());
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder)?;
        Ok(Folder(folder))
    }

    pub(crate) fn write(&self, name: &str, text: &[u8]) -> std::io::Result<PathBuf> {
        let path = self.0.join(Path::new(name).file_name().unwrap_or_default());
        std::fs::File::create(&path)?.write_all(text)?;
        Ok(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Program {
    /// The code object, or what the compiler says.
    fn compile(&self, options: &[String]) -> Result<Vec<u8>, String> {
        let from = (PRELUDE, &self.name, &self.text, &self.headers, options);
        kept(from, || self.compile_anew(options))
    }

    fn compile_anew(&self, options: &[String]) -> Result<Vec<u8>, String> {
        let wrong = |error: std::io::Error| format!("compiling {}: {error}", self.name);
        let folder = Folder::new().map_err(wrong)?;
        for (name, text) in &self.headers {
            folder.write(name, text).map_err(wrong)?;
        }
        let prelude = folder.write("built_in.h", PRELUDE.as_bytes()).map_err(wrong)?;
        let source = folder.write(&self.name, &self.text).map_err(wrong)?;
        let code = folder.0.join("code");
        let mut clang = Command::new(CLANG);
        clang.args(["-x", "hip", "--offload-device-only", "--no-gpu-bundle-output"]);
        clang.args(["-nostdinc", "-nogpuinc", "-nogpulib", "-fdeclspec", "-Wno-pass-failed"]);
        clang
            .arg("-include")
            .arg(prelude)
            .args(options)
            .arg(source)
            .arg("-o")
            .arg(&code)
            .stdin(Stdio::null());
        let output = clang.output().map_err(|e| format!("{CLANG}: {e}; `{INSTALL}`"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        std::fs::read(code).map_err(wrong)
    }
}

/// What a tool of LLVM makes `from` something, or what the tool says. In the folder `WINDROW_EMULATOR_CACHE` it is kept:
/// a tool takes longer to start than most kernels run.
pub(crate) fn kept(
    from: impl Hash,
    make: impl FnOnce() -> Result<Vec<u8>, String>,
) -> Result<Vec<u8>, String> {
    let path = std::env::var_os("WINDROW_EMULATOR_CACHE").map(|folder| {
        let mut hash = DefaultHasher::new();
        from.hash(&mut hash);
        Path::new(&folder).join(format!("{:016x}", hash.finish()))
    });
    if let Some(made) = path.as_ref().and_then(|path| std::fs::read(path).ok()) {
        return Ok(made);
    }
    let made = make()?;
    if let Some(path) = path {
        keep(&path, &made).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(made)
}

/// Writes a file that other processes see whole or not at all.
fn keep(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let unfinished = Folder::within(folder)?;
    std::fs::rename(unfinished.write("code", code)?, path)
}

/// # Safety
/// A string that ends in a zero byte.
unsafe fn text(from: *const c_char) -> Vec<u8> {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(from) }.to_bytes().to_vec()
}

/// # Safety
/// As many strings that end in a zero byte.
unsafe fn texts(from: *const *const c_char, count: c_int) -> Vec<Vec<u8>> {
    // SAFETY: the caller's promise.
    (0..count.max(0) as usize).map(|i| unsafe { text(*from.add(i)) }).collect()
}

/// Words for a status.
#[unsafe(no_mangle)]
pub extern "C" fn hiprtcGetErrorString(status: c_int) -> *const c_char {
    let words = match status {
        0 => c"HIPRTC_SUCCESS",
        OUT_OF_MEMORY => c"HIPRTC_ERROR_OUT_OF_MEMORY",
        INVALID_INPUT => c"HIPRTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"HIPRTC_ERROR_INVALID_PROGRAM",
        COMPILATION => c"HIPRTC_ERROR_COMPILATION",
        _ => c"unknown status of hiprtc",
    };
    words.as_ptr()
}

functions! {
    /// The version: clang's and a number of the prelude, so that cached kernels of other compilers are not mixed with
    /// this one's.
    fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) {
        major.write(19);
        minor.write(PRELUDE.bytes().fold(0, |n, byte| (n * 31 + c_int::from(byte)) % 99_991));
        0
    }

    /// A source with headers.
    fn hiprtcCreateProgram(
        program: *mut Handle,
        source: *const c_char,
        name: *const c_char,
        count: c_int,
        headers: *const *const c_char,
        names: *const *const c_char,
    ) {
        if program.is_null() || source.is_null() {
            return INVALID_INPUT;
        }
        let name = if name.is_null() { b"kernel.hip".to_vec() } else { text(name) };
        let names = texts(names, count);
        program.write(boxed(Program {
            name: String::from_utf8_lossy(&name).into_owned(),
            text: text(source),
            headers: names
                .iter()
                .map(|n| String::from_utf8_lossy(n).into_owned())
                .zip(texts(headers, count))
                .collect(),
            log: CString::default(),
            code: Vec::new(),
        }));
        0
    }

    /// Makes the program's code object, or the compiler's messages.
    fn hiprtcCompileProgram(program: Handle, count: c_int, options: *const *const c_char) {
        let Some(program) = program.cast::<Program>().as_mut() else { return INVALID_PROGRAM };
        let options = texts(options, count);
        let options: Vec<_> = options.iter().map(|o| String::from_utf8_lossy(o).into_owned()).collect();
        match program.compile(&options) {
            Ok(code) => {
                program.code = code;
                0
            }
            Err(log) => {
                program.log = CString::new(log.replace('\0', " ")).unwrap_or_default();
                COMPILATION
            }
        }
    }

    /// Forgets it.
    fn hiprtcDestroyProgram(program: *mut Handle) {
        if program.is_null() || (*program).is_null() {
            return INVALID_PROGRAM;
        }
        drop(Box::from_raw((*program).cast::<Program>()));
        program.write(std::ptr::null_mut());
        0
    }

    /// Bytes of the messages.
    fn hiprtcGetProgramLogSize(program: Handle, bytes: *mut usize) {
        let Some(program) = program.cast::<Program>().as_ref() else { return INVALID_PROGRAM };
        bytes.write(program.log.as_bytes_with_nul().len());
        0
    }

    /// The messages.
    fn hiprtcGetProgramLog(program: Handle, log: *mut c_char) {
        let Some(program) = program.cast::<Program>().as_ref() else { return INVALID_PROGRAM };
        let words = program.log.as_bytes_with_nul();
        log.copy_from_nonoverlapping(words.as_ptr().cast(), words.len());
        0
    }

    /// Bytes of the code object.
    fn hiprtcGetCodeSize(program: Handle, bytes: *mut usize) {
        let Some(program) = program.cast::<Program>().as_ref() else { return INVALID_PROGRAM };
        bytes.write(program.code.len());
        0
    }

    /// The code object.
    fn hiprtcGetCode(program: Handle, code: *mut c_char) {
        let Some(program) = program.cast::<Program>().as_ref() else { return INVALID_PROGRAM };
        code.copy_from_nonoverlapping(program.code.as_ptr().cast(), program.code.len());
        0
    }
}
