//! Temporary files that never outlive the command: not an error, and not a signal that ends it.

use super::target::folder;
use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A file beside another that it will replace; removed unless it does.
#[derive(Debug)]
pub(super) struct Part {
    path: PathBuf,
    _listed: Listed,
}

impl Part {
    /// An empty file with the mode and, if permitted, the owner of the file that it replaces.
    pub(super) fn beside(target: &Path, before: Option<&Metadata>) -> io::Result<(Self, File)> {
        let path = free_name(target);
        // Listed before it exists, so that no signal can come in between.
        let listed = Listed::new(&path);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        if before.is_some() {
            // Nobody may read it before it has its mode.
            use std::os::unix::fs::OpenOptionsExt;
            options.mode(0o600);
        }
        let file = options.open(&path)?;
        let part = Part { path, _listed: listed };
        if let Some(before) = before {
            #[cfg(unix)]
            {
                use std::os::unix::fs::MetadataExt;
                // Only the superuser may give files away.
                let _ = std::os::unix::fs::fchown(&file, Some(before.uid()), Some(before.gid()));
            }
            file.set_permissions(before.permissions())?;
        }
        Ok((part, file))
    }

    /// A second name for a file, to which it can be brought back.
    pub(super) fn link_to(target: &Path) -> io::Result<Self> {
        let path = free_name(target);
        let listed = Listed::new(&path);
        std::fs::hard_link(target, &path)?;
        Ok(Part { path, _listed: listed })
    }

    /// Gives the file the name `target`, and replaces the file that has it.
    pub(super) fn persist(&self, target: &Path) -> io::Result<()> {
        std::fs::rename(&self.path, target)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // It has been renamed, or there is nothing better to do.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The longest name that file systems have.
const LONGEST: usize = 255;

/// `.NAME.PROCESS.COUNT.part` in the same folder; without the name if it is too long for that.
fn free_name(target: &Path) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let end = format!(".{}.{count}.part", std::process::id());
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    if name.len() + end.len() > LONGEST {
        name = ".windrow".into();
    }
    name.push(end);
    folder(target).join(name)
}

#[cfg(unix)]
use unix::Listed;
#[cfg(unix)]
pub use unix::remove_all;

#[cfg(unix)]
mod unix {
    use std::ffi::{CString, c_char, c_int};
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;
    use std::ptr::null_mut;
    use std::sync::Once;
    use std::sync::atomic::{AtomicPtr, Ordering};

    /// A number larger than that of the files that one command writes at a time.
    const SLOTS: usize = 16;
    /// Names of the files that exist. Whoever takes a name out of its slot owns it.
    static PATHS: [AtomicPtr<c_char>; SLOTS] = [const { AtomicPtr::new(null_mut()) }; SLOTS];
    /// Signals that end a process.
    const SIGNALS: [c_int; 6] =
        [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGXCPU, libc::SIGXFSZ];

    /// A file that is removed if a signal ends the process.
    #[derive(Debug)]
    pub(super) struct Listed(Option<(usize, *mut c_char)>);

    impl Listed {
        pub(super) fn new(path: &Path) -> Self {
            catch_signals();
            let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return Listed(None) };
            let path = path.into_raw();
            let free = |slot: &AtomicPtr<c_char>| {
                slot.compare_exchange(null_mut(), path, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            };
            if let Some(slot) = PATHS.iter().position(free) {
                return Listed(Some((slot, path)));
            }
            // SAFETY: from `into_raw` above, in no slot.
            drop(unsafe { CString::from_raw(path) });
            Listed(None)
        }
    }

    impl Drop for Listed {
        fn drop(&mut self) {
            let Some((slot, path)) = self.0 else { return };
            let taken =
                PATHS[slot].compare_exchange(path, null_mut(), Ordering::SeqCst, Ordering::SeqCst);
            if taken.is_ok() {
                // SAFETY: from `into_raw`, and the exchange has taken it from the slot, so nobody else will.
                drop(unsafe { CString::from_raw(path) });
            }
        }
    }

    /// Removes all temporary files, also from within a signal handler.
    pub fn remove_all() {
        for slot in &PATHS {
            let path = slot.swap(null_mut(), Ordering::SeqCst);
            if !path.is_null() {
                // SAFETY: a name out of its slot, which is not freed any more; `unlink` may be called in handlers.
                unsafe { libc::unlink(path) };
            }
        }
    }

    extern "C" fn end(signal: c_int) {
        remove_all();
        // SAFETY: both may be called in handlers. The signal is blocked here and ends the process on return.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }

    /// Once, for the signals that would end the process: one that is ignored (nohup) or handled by others
    /// (Python) stays so.
    fn catch_signals() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            for signal in SIGNALS {
                // SAFETY: zeros are an action; the handler calls nothing but what handlers may.
                unsafe {
                    let mut action: libc::sigaction = std::mem::zeroed();
                    let known = libc::sigaction(signal, std::ptr::null(), &mut action) == 0;
                    if known && action.sa_sigaction == libc::SIG_DFL {
                        action.sa_sigaction = end as *const () as libc::sighandler_t;
                        libc::sigaction(signal, &action, null_mut());
                    }
                }
            }
        });
    }
}

#[cfg(not(unix))]
#[derive(Debug)]
struct Listed;

#[cfg(not(unix))]
impl Listed {
    fn new(_: &Path) -> Self {
        Listed
    }
}

/// Nothing: only Unix ends processes by signals.
#[cfg(not(unix))]
pub fn remove_all() {}
