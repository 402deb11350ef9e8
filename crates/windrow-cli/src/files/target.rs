//! The destination of a result, and the check that it can be written: before the work, not after it.

use super::{Format, Reason};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use windrow::DType;

/// Links to links that are followed.
const LINKS: usize = 40;

/// An output.
#[derive(Debug)]
pub(super) struct Target {
    /// The name as the user wrote it.
    pub(super) name: PathBuf,
    pub(super) place: Place,
}

#[derive(Debug)]
pub(super) enum Place {
    /// `-`, or a name of whatever standard output is.
    Stdout,
    /// A device, a pipe or what a process has open: written as it is, for it cannot be replaced.
    Stream(PathBuf),
    /// A regular file behind all links, and what was there before.
    File(PathBuf, Option<Metadata>),
}

impl Target {
    pub(super) fn new(name: &Path) -> Result<Self, Reason> {
        Ok(Target { name: name.to_owned(), place: Place::new(name)? })
    }

    /// The format that a tensor has there: by the name; `.npy` on standard output and in devices and
    /// pipes of other names, but for bf16, which it lacks.
    pub(super) fn format(&self, dtype: DType) -> Result<Format, Reason> {
        match (Format::of(&self.name), &self.place) {
            (Some(Format::Npy), _) if dtype == DType::BF16 => Err(Reason::ElementType {
                given: "bf16".into(),
                expected: "a .safetensors name: NumPy has no bf16",
            }),
            (Some(format @ (Format::Npy | Format::Safetensors)), _) => Ok(format),
            (None, Place::Stdout | Place::Stream(_)) if dtype == DType::BF16 => {
                Ok(Format::Safetensors)
            }
            (None, Place::Stdout | Place::Stream(_)) => Ok(Format::Npy),
            (Some(Format::Npz), _) | (None, Place::File(..)) => {
                Err(Reason::Extension(".npy or .safetensors"))
            }
        }
    }

    /// The identity that two outputs must not share: the file behind the name; `None` for devices, which take anything.
    pub(super) fn identity(&self) -> Option<PathBuf> {
        match &self.place {
            Place::Stdout => Some("-".into()),
            Place::Stream(path) => {
                let pipe = std::fs::metadata(path).is_ok_and(|m| !is_device(&m));
                pipe.then(|| path.canonicalize().ok()).flatten()
            }
            Place::File(path, _) => Some(folder(path).canonicalize().ok()?.join(path.file_name()?)),
        }
    }
}

impl Place {
    fn new(name: &Path) -> Result<Self, Reason> {
        if name == Path::new("-") {
            return Ok(Place::Stdout);
        }
        let (path, open) = follow(name)?;
        let metadata = match std::fs::metadata(&path) {
            Ok(metadata) => metadata,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let folder = folder(&path);
                return match std::fs::metadata(folder) {
                    Ok(m) if m.is_dir() && may_write(folder) => Ok(Place::File(path, None)),
                    Ok(m) if m.is_dir() => Err(Reason::FolderReadOnly(folder.to_owned())),
                    _ => Err(Reason::NoFolder(folder.to_owned())),
                };
            }
            Err(e) => return Err(e.into()),
        };
        if metadata.is_dir() {
            return Err(Reason::Folder);
        }
        if is_stdout(&metadata) {
            return Ok(Place::Stdout);
        }
        if open || !metadata.is_file() {
            return Ok(Place::Stream(path));
        }
        // The mode decides for the superuser as well, who may write anything.
        if metadata.permissions().readonly() {
            return Err(Reason::ReadOnly);
        }
        OpenOptions::new().write(true).open(&path)?;
        if !may_write(folder(&path)) {
            return Err(Reason::FolderReadOnly(folder(&path).to_owned()));
        }
        Ok(Place::File(path, Some(metadata)))
    }
}

/// The file behind all links of a name, and whether a process has it open: renaming over such a file would not reach
/// the process.
fn follow(name: &Path) -> Result<(PathBuf, bool), Reason> {
    let mut path = name.to_owned();
    for _ in 0..LINKS {
        if !std::fs::symlink_metadata(&path).is_ok_and(|m| m.is_symlink()) {
            return Ok((path, false));
        }
        if folder(&path).canonicalize().is_ok_and(|folder| folder.starts_with("/proc")) {
            return Ok((path, true));
        }
        let link = std::fs::read_link(&path)?;
        path = folder(&path).join(link);
    }
    Err(io::Error::other("too many links").into())
}

pub(super) fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn may_write(folder: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let Ok(folder) = std::ffi::CString::new(folder.as_os_str().as_bytes()) else {
            return false;
        };
        // SAFETY: a string that ends in a zero.
        unsafe { libc::access(folder.as_ptr(), libc::W_OK | libc::X_OK) == 0 }
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        true
    }
}

/// Whether this is the pipe or file that standard output goes to.
fn is_stdout(metadata: &Metadata) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let stdout = stdout().and_then(|file| file.metadata());
        stdout.is_ok_and(|out| {
            !is_device(metadata) && (out.dev(), out.ino()) == (metadata.dev(), metadata.ino())
        })
    }
    #[cfg(not(unix))]
    {
        let _ = metadata;
        false
    }
}

fn is_device(metadata: &Metadata) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        metadata.file_type().is_char_device() || metadata.file_type().is_block_device()
    }
    #[cfg(not(unix))]
    {
        let _ = metadata;
        false
    }
}

/// Standard output as a file of its own, without a buffer.
pub(super) fn stdout() -> io::Result<File> {
    #[cfg(unix)]
    {
        use std::os::fd::AsFd;
        Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?))
    }
    #[cfg(windows)]
    {
        use std::os::windows::io::AsHandle;
        Ok(File::from(io::stdout().as_handle().try_clone_to_owned()?))
    }
}
