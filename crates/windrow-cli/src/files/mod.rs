//! Tensors in files: `.npy`, `.npz` and `.safetensors`.
//!
//! A file is named `PATH`, or `PATH:NAME` to choose a tensor of an archive. Errors name the file.

mod npy;
mod npz;
mod safetensors;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use windrow::{DType, Tensor, bf16, f16};

/// Result with [`FileError`].
pub type Result<T, E = FileError> = std::result::Result<T, E>;

/// A file that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct FileError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: Reason,
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The operating system refused.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The name does not end in a known extension.
    #[error("unknown file type, expected a name ending in {0}")]
    Extension(&'static str),
    /// The contents do not follow the format.
    #[error("not a valid {format} file: {detail}")]
    Format {
        /// `.npy`, `.npz` or `.safetensors`.
        format: &'static str,
        /// What was found.
        detail: String,
    },
    /// The data end before the shape is filled.
    #[error("truncated: shape {shape:?} of {dtype} needs {expected} bytes, the file has {given}")]
    Truncated {
        /// Shape in the header.
        shape: Vec<usize>,
        /// Element type in the header.
        dtype: DType,
        /// Bytes that these need.
        expected: usize,
        /// Bytes that are there.
        given: u64,
    },
    /// An element type that the file format or Windrow does not know.
    #[error("element type {given}, expected {expected}")]
    ElementType {
        /// What was found.
        given: String,
        /// What is known.
        expected: &'static str,
    },
    /// An archive without the tensor asked for.
    #[error("no tensor `{name}`; the file has {available}")]
    UnknownName {
        /// The name asked for.
        name: String,
        /// The names that exist.
        available: String,
    },
    /// An archive of several tensors, none of them chosen.
    #[error("choose a tensor with {example}; the file has {available}")]
    NoName {
        /// How to write it.
        example: String,
        /// The names that exist.
        available: String,
    },
    /// A size that cannot be allocated.
    #[error("{0}")]
    Tensor(#[from] windrow::Error),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    Npy,
    Npz,
    Safetensors,
}

impl Format {
    fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "npy" => Some(Format::Npy),
            "npz" => Some(Format::Npz),
            "safetensors" => Some(Format::Safetensors),
            _ => None,
        }
    }
}

/// Reads one tensor from `PATH` or `PATH:NAME`. Fortran order in a `.npy` file becomes strides.
///
/// # Errors
/// [`FileError`] for everything that can be wrong with the file.
pub fn read(source: &str) -> Result<Tensor> {
    let (path, name) = split_name(source);
    let result = match Format::of(path) {
        Some(Format::Npy) => npy::read_file(path),
        Some(Format::Npz) => npz::read(path, name),
        Some(Format::Safetensors) => safetensors::read(path, name),
        None => Err(Reason::Extension(".npy, .npz or .safetensors")),
    };
    result.map_err(|reason| FileError { path: path.to_owned(), reason })
}

/// `PATH:NAME` means a tensor of an archive: a colon after an archive's extension.
fn split_name(source: &str) -> (&Path, Option<&str>) {
    let archive = |path: &str| Format::of(Path::new(path)).is_some_and(|f| f != Format::Npy);
    source
        .match_indices(':')
        .map(|(i, _)| (&source[..i], &source[i + 1..]))
        .find(|(path, _)| archive(path))
        .map_or((Path::new(source), None), |(path, name)| (Path::new(path), Some(name)))
}

/// Checks that a tensor of this type can be written to a file of this name.
///
/// # Errors
/// [`Reason::Extension`], and [`Reason::ElementType`] for bf16 in `.npy`.
pub fn check_output(path: &Path, dtype: DType) -> Result<()> {
    let reason = match Format::of(path) {
        Some(Format::Npy) if dtype == DType::BF16 => Reason::ElementType {
            given: "bf16".into(),
            expected: "a .safetensors name: NumPy has no bf16",
        },
        Some(Format::Npy | Format::Safetensors) => return Ok(()),
        Some(Format::Npz) | None => Reason::Extension(".npy or .safetensors"),
    };
    Err(FileError { path: path.to_owned(), reason })
}

/// Writes tensors, each to its own file and in row-major order, as `.npy`, or as `.safetensors`
/// under the name given. Either all files appear, complete, or none of them is touched: data go
/// to temporary files beside them, which are renamed at the end.
///
/// # Errors
/// As [`check_output`], and what the operating system reports.
pub fn write(files: &[(&Path, &str, &Tensor)]) -> Result<()> {
    let mut written = Vec::new();
    for &(path, name, tensor) in files {
        check_output(path, tensor.desc().dtype)?;
        let temporary = stage(path, |file| match Format::of(path) {
            Some(Format::Npy) => npy::write(file, &row_major(tensor)?),
            _ => safetensors::write(file, name, &row_major(tensor)?),
        });
        let temporary = temporary.map_err(|reason| FileError { path: path.to_owned(), reason })?;
        written.push((path, temporary));
    }
    for (path, temporary) in written {
        persist(path, temporary)?;
    }
    Ok(())
}

/// Writes a file that is not a tensor with the same care: complete or not at all.
///
/// # Errors
/// What the operating system reports.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = stage(path, |file| Ok(file.write_all(bytes)?))
        .map_err(|reason| FileError { path: path.to_owned(), reason })?;
    persist(path, temporary)
}

fn persist(path: &Path, temporary: tempfile::TempPath) -> Result<()> {
    temporary.persist(path).map_err(|e| FileError { path: path.to_owned(), reason: e.error.into() })
}

/// A complete temporary file in the folder of `path`, removed on drop.
fn stage(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> Result<(), Reason>,
) -> Result<tempfile::TempPath, Reason> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut prefix = OsString::from(".");
    prefix.push(path.file_name().unwrap_or_default());
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".part");
    #[cfg(unix)]
    {
        // A result is an ordinary file, not a secret: the user's umask decides.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut file = io::BufWriter::new(builder.tempfile_in(folder)?);
    fill(&mut file)?;
    Ok(file.into_inner().map_err(io::IntoInnerError::into_error)?.into_temp_path())
}

/// A copy of a tensor with its elements in row-major order.
fn row_major(t: &Tensor) -> windrow::Result<Tensor> {
    let shape = t.shape();
    match t.desc().dtype {
        DType::F32 => Tensor::from_slice(&t.to_vec::<f32>()?, shape),
        DType::F16 => Tensor::from_slice(&t.to_vec::<f16>()?, shape),
        DType::BF16 => Tensor::from_slice(&t.to_vec::<bf16>()?, shape),
        DType::F64 => Tensor::from_slice(&t.to_vec::<f64>()?, shape),
        DType::I32 => Tensor::from_slice(&t.to_vec::<i32>()?, shape),
        DType::I64 => Tensor::from_slice(&t.to_vec::<i64>()?, shape),
        other => Err(windrow::Error::unsupported(format!("writing {other}"), "no file format")),
    }
}

/// Picks the tensor of an archive.
fn choose<'a>(path: &Path, names: &'a [String], name: Option<&str>) -> Result<&'a str, Reason> {
    let available = || if names.is_empty() { "none".into() } else { names.join(", ") };
    match (name, names) {
        (Some(name), _) => names
            .iter()
            .map(String::as_str)
            .find(|n| *n == name)
            .ok_or_else(|| Reason::UnknownName { name: name.into(), available: available() }),
        (None, [only]) => Ok(only),
        (None, _) => Err(Reason::NoName {
            example: format!("{}:NAME", path.display()),
            available: available(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windrow::{Layout, TensorDesc};

    #[test]
    fn names_follow_an_archive_only() {
        let split = |s| {
            let (path, name) = split_name(s);
            (path.to_str().unwrap().to_owned(), name.map(str::to_owned))
        };
        assert_eq!(split("a.npy"), ("a.npy".into(), None));
        assert_eq!(split("a:b.npy"), ("a:b.npy".into(), None));
        assert_eq!(split("a:b/c.npz"), ("a:b/c.npz".into(), None));
        assert_eq!(split("c.npz:x:y"), ("c.npz".into(), Some("x:y".into())));
        assert_eq!(split("m.safetensors:x"), ("m.safetensors".into(), Some("x".into())));
    }

    #[test]
    fn every_type_survives_every_format() {
        let dir = tempfile::tempdir().unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64, DType::I32, DType::I64] {
            for shape in [&[][..], &[0, 3], &[2, 3, 4]] {
                let mut t = Tensor::zeros(dtype, shape).unwrap();
                for (i, b) in t.as_bytes_mut().iter_mut().enumerate() {
                    *b = i as u8;
                }
                for name in ["t.npy", "t.safetensors"] {
                    let path = dir.path().join(name);
                    if name == "t.npy" && dtype == DType::BF16 {
                        let message = write(&[(&path, "t", &t)]).unwrap_err().to_string();
                        assert!(message.contains("bf16") && message.contains("NumPy"), "{message}");
                        continue;
                    }
                    write(&[(&path, "t", &t)]).unwrap();
                    let back = read(path.to_str().unwrap()).unwrap();
                    assert_eq!((back.desc(), back.as_bytes()), (t.desc(), t.as_bytes()));
                }
            }
        }
    }

    #[test]
    fn strided_tensors_are_written_row_major() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.npy");
        let layout = Layout::with_order(&[2, 3], &[1, 0]).unwrap();
        let mut t = Tensor::uninitialised(TensorDesc { dtype: DType::I32, layout }).unwrap();
        for (i, b) in t.as_bytes_mut().chunks_exact_mut(4).enumerate() {
            b.copy_from_slice(&(i as i32).to_ne_bytes());
        }
        write(&[(&path, "t", &t)]).unwrap();
        let back = read(path.to_str().unwrap()).unwrap();
        assert!(back.desc().layout.is_contiguous());
        assert_eq!(back.to_vec::<i32>().unwrap(), [0, 2, 4, 1, 3, 5]);
    }

    #[test]
    fn a_failed_write_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let t = Tensor::zeros(DType::BF16, &[2]).unwrap();
        let (good, bad) = (dir.path().join("a.safetensors"), dir.path().join("b.npy"));
        assert!(write(&[(&good, "t", &t), (&bad, "t", &t)]).is_err());
        let nowhere = dir.path().join("missing/a.safetensors");
        assert!(write(&[(&good, "t", &t), (&nowhere, "t", &t)]).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
