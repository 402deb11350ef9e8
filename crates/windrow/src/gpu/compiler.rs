//! The run-time compilers, NVRTC and hiprtc, which have the same functions.

use super::runtime::{Failure, Handle, Outcome};
use super::source::KernelSpec;
use crate::{Device, Result};
use std::ffi::{CString, c_char, c_int};
use std::ptr::null_mut;

/// The functions that tell the size of a compiler's output, and write it.
pub(crate) type Reading<L> = (
    unsafe fn(&L, Handle, *mut usize) -> Outcome<()>,
    unsafe fn(&L, Handle, *mut c_char) -> Outcome<()>,
);

type Create<L> = unsafe fn(
    &L,
    *mut Handle,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Outcome<()>;

/// The functions of a compiler.
pub(crate) struct Compiler<L: 'static> {
    /// Creates a program. Takes its text and name, and the number, texts and names of its headers.
    pub(crate) create: Create<L>,
    /// Compiles it. Takes the number of options and the options.
    pub(crate) compile: unsafe fn(&L, Handle, c_int, *const *const c_char) -> Outcome<()>,
    pub(crate) destroy: unsafe fn(&L, *mut Handle) -> Outcome<()>,
    /// The functions that read the compiler's messages.
    pub(crate) log: Reading<L>,
    /// The device, for errors.
    pub(crate) device: Device,
}

/// A compiled kernel.
pub(crate) struct Compiled {
    pub(crate) image: Vec<u8>,
    /// The compiler's messages.
    #[cfg_attr(not(test), allow(dead_code))] // tests read the report on registers
    pub(crate) log: String,
}

impl<L> Compiler<L> {
    /// Compiles a kernel and returns its image, which `code` reads from the compiler.
    ///
    /// # Errors
    /// [`Error::Backend`](crate::Error::Backend) with the compiler's messages.
    pub(crate) fn compile(
        &'static self,
        library: &'static L,
        spec: &KernelSpec,
        options: &[String],
        code: Reading<L>,
    ) -> Result<Compiled> {
        let c = |text: &str| CString::new(text).expect("sources and options hold no zero byte");
        let (text, name) = (c(spec.source.text), c(spec.source.name));
        let header_texts: Vec<_> = spec.headers().map(|h| c(h.text)).collect();
        let header_names: Vec<_> = spec.headers().map(|h| c(h.name)).collect();
        let options: Vec<_> = options.iter().map(|o| c(o)).collect();
        let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let failed = |failure: Failure| failure.on(self.device);
        let mut program = Program { raw: null_mut(), library, compiler: self };
        // SAFETY: the strings live until the call returns, which writes one pointer.
        let created = unsafe {
            (self.create)(
                library,
                &mut program.raw,
                text.as_ptr(),
                name.as_ptr(),
                header_texts.len() as c_int,
                pointers(&header_texts).as_ptr(),
                pointers(&header_names).as_ptr(),
            )
        };
        created.map_err(failed)?;
        // SAFETY: a program that was made; the options live until the call returns.
        let outcome = unsafe {
            let count = options.len() as c_int;
            (self.compile)(library, program.raw, count, pointers(&options).as_ptr())
        };
        let log = program.read(self.log).map_err(failed)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
        if let Err(failure) = outcome {
            let failure = Failure { words: log, ..failure };
            return Err(failure.of(format_args!("compiling kernel `{}`", spec.entry), self.device));
        }
        let image = program.read(code).map_err(failed)?;
        Ok(Compiled { image, log })
    }
}

/// Owns a program, unless it is null.
struct Program<L: 'static> {
    raw: Handle,
    library: &'static L,
    compiler: &'static Compiler<L>,
}

impl<L> Program<L> {
    fn read(&self, (size, get): Reading<L>) -> Outcome<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is alive; the second call writes as many bytes as the first says.
        unsafe {
            size(self.library, self.raw, &mut bytes)?;
            let mut out = vec![0u8; bytes];
            get(self.library, self.raw, out.as_mut_ptr().cast())?;
            Ok(out)
        }
    }
}

impl<L> Drop for Program<L> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by `create`.
            let _ = unsafe { (self.compiler.destroy)(self.library, &mut self.raw) };
        }
    }
}
