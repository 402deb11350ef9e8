//! The folders in which the library keeps files.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The path that an environment variable names, if it is set.
pub(crate) fn from_env(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// `WINDROW_CACHE_DIR`, or `windrow` in the user's cache folder. `None` if there is no such place.
pub(crate) fn cache() -> Option<PathBuf> {
    from_env("WINDROW_CACHE_DIR")
        .or_else(|| from_env("XDG_CACHE_HOME").map(|d| d.join("windrow")))
        .or_else(|| from_env("HOME").map(|d| d.join(".cache/windrow")))
        .or_else(|| from_env("LOCALAPPDATA").map(|d| d.join("windrow")))
}

/// The bytes of a regular file of at most `limit` bytes. Anything else with the name is an error at once: a pipe that
/// nobody writes to, a device without an end, a folder.
pub(crate) fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open(path, OpenOptions::new().read(true))?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("more than {limit} bytes"),
        ));
    }
    Ok(bytes)
}

/// A regular file, made if there is none, to be locked.
#[cfg(feature = "tuning")]
pub(crate) fn open_lock(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().write(true).create(true).truncate(false))
}

/// A regular file, without waiting for anybody.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NONBLOCK);
    }
    let no_file = || io::Error::other("no regular file");
    // Before it is opened: opening a device may have effects, and elsewhere than on Linux a pipe waits.
    if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err(no_file());
    }
    let file = options.open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(no_file()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_limited_size_are_read() {
        let path = std::env::temp_dir().join(format!("windrow-folder-{}", std::process::id()));
        std::fs::write(&path, [7; 10]).unwrap();
        assert_eq!(read(&path, 10).unwrap(), [7; 10]);
        assert_eq!(read(&path, 9).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read(&path, 10).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(read(&std::env::temp_dir(), 10).is_err());
        #[cfg(target_os = "linux")]
        {
            assert!(read(Path::new("/dev/zero"), 10).is_err());
            let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
            // SAFETY: a string that ends in a zero.
            assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
            assert!(read(&path, 10).is_err());
            #[cfg(feature = "tuning")]
            assert!(open_lock(&path).is_err());
            std::fs::remove_file(&path).unwrap();
        }
    }
}
