//! Results written to files, devices, pipes and standard output.

use super::part::Part;
use super::target::{self, Place, Target};
use super::{FileError, Format, Reason, Result, npy, safetensors};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::Path;
use windrow::{DType, Tensor};

/// Bytes that go to the system at a time.
const BUFFER: usize = 256 << 10;

/// The contents of an output.
pub enum Contents<'a> {
    /// A tensor in the format of the output, in row-major order; the name is for `.safetensors`.
    Tensor(&'a str, &'a Tensor),
    /// Bytes as they are.
    Bytes(&'a [u8]),
}

/// Files that results go to, looked at before there are any results: `-` is standard output.
#[derive(Debug)]
pub struct Outputs {
    targets: Vec<Target>,
}

impl Outputs {
    /// Outputs of any contents.
    ///
    /// # Errors
    /// Folders that do not exist or cannot be written, read-only files, one file twice.
    pub fn new<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        let mut targets: Vec<Target> = Vec::new();
        for path in paths {
            let target = Target::new(path).map_err(|reason| FileError::new(path, reason))?;
            let identity = target.identity();
            if identity.is_some() && targets.iter().any(|t| t.identity() == identity) {
                return Err(FileError::new(path, Reason::Twice));
            }
            targets.push(target);
        }
        Ok(Outputs { targets })
    }

    /// Refuses to write over a file that is read.
    ///
    /// # Errors
    /// [`Reason::IsInput`].
    pub fn spare(&self, input: &Path) -> Result<()> {
        let Ok(input) = input.canonicalize() else { return Ok(()) };
        let is_input = |target: &&Target| target.identity().is_some_and(|path| path == input);
        match self.targets.iter().find(is_input) {
            Some(target) => Err(FileError::new(&target.name, Reason::IsInput)),
            None => Ok(()),
        }
    }

    /// Outputs of tensors, whose names say the format.
    ///
    /// # Errors
    /// As [`Outputs::new`], [`Reason::Extension`], and [`Reason::Terminal`].
    pub fn of_tensors<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        let outputs = Self::new(paths)?;
        for target in &outputs.targets {
            let reason = match target.format(DType::F32) {
                Err(reason) => reason,
                Ok(_) if target.is_terminal() => Reason::Terminal,
                Ok(_) => continue,
            };
            return Err(FileError::new(&target.name, reason));
        }
        Ok(outputs)
    }

    /// Checks that tensors of these types can be written to the outputs, in their order.
    ///
    /// # Errors
    /// [`Reason::ElementType`] for bf16 in `.npy`.
    pub fn check_types(&self, dtypes: impl IntoIterator<Item = DType>) -> Result<()> {
        for (target, dtype) in self.targets.iter().zip(dtypes) {
            target.format(dtype).map_err(|reason| FileError::new(&target.name, reason))?;
        }
        Ok(())
    }

    /// Whether standard output is one of them.
    pub fn has_stdout(&self) -> bool {
        self.targets.iter().any(|t| matches!(t.place, Place::Stdout))
    }

    /// Writes to each output its contents. Regular files appear complete and all of them, with the modes that
    /// they had before, or none is touched: data go to temporary files beside them, which are renamed
    /// when everything else has been written.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn write(&self, contents: &[Contents<'_>]) -> Result<()> {
        let both = || self.targets.iter().zip(contents);
        let mut staged = Vec::new();
        for (target, contents) in both() {
            let named = |reason| FileError::new(&target.name, reason);
            if let Place::File(path, before) = &target.place {
                let (part, file) =
                    Part::beside(path, before.as_ref()).map_err(|e| named(e.into()))?;
                contents.write(target, file).map_err(named)?;
                staged.push((target, path.as_path(), part));
            }
        }
        for (target, contents) in both() {
            let file = match &target.place {
                Place::File(..) => continue,
                Place::Stdout => target::stdout(),
                Place::Stream(path) => OpenOptions::new().write(true).truncate(true).open(path),
            };
            let written = file.map_err(Reason::from).and_then(|f| contents.write(target, f));
            written.map_err(|reason| match (reason, &target.place) {
                (Reason::Io(e), Place::Stdout) if e.kind() == io::ErrorKind::BrokenPipe => {
                    FileError::new(&target.name, Reason::ClosedPipe)
                }
                (reason, _) => FileError::new(&target.name, reason),
            })?;
        }
        persist_all(&staged)
    }
}

impl Target {
    fn is_terminal(&self) -> bool {
        matches!(self.place, Place::Stdout) && io::stdout().is_terminal()
    }
}

impl Contents<'_> {
    fn write(&self, target: &Target, file: File) -> Result<(), Reason> {
        let mut file = BufWriter::with_capacity(BUFFER, file);
        match *self {
            Contents::Bytes(bytes) => file.write_all(bytes)?,
            Contents::Tensor(name, tensor) => match target.format(tensor.desc().dtype)? {
                Format::Safetensors => safetensors::write(&mut file, name, tensor)?,
                _ => npy::write(&mut file, tensor)?,
            },
        }
        // Dropped without it, the last error would be lost.
        Ok(file.flush()?)
    }
}

/// Gives all files their names. If one cannot have its name, the earlier ones get their old contents back.
fn persist_all(staged: &[(&Target, &Path, Part)]) -> Result<()> {
    let mut done: Vec<(&Path, Option<Part>)> = Vec::new();
    for (target, path, part) in staged {
        // Only what may have to be undone is kept.
        let kept = (staged.len() > 1).then(|| Part::link_to(path).ok()).flatten();
        if let Err(e) = part.persist(path) {
            undo(&done);
            return Err(FileError::new(&target.name, e));
        }
        let was_there = matches!(target.place, Place::File(_, Some(_)));
        // A file system without second names cannot bring back what was there.
        if kept.is_some() || !was_there {
            done.push((path, kept));
        }
    }
    Ok(())
}

/// Brings back what files held, or removes those that did not exist.
fn undo(done: &[(&Path, Option<Part>)]) {
    for (path, kept) in done {
        // Nothing better can be done if this fails as well.
        let _ = match kept {
            Some(kept) => kept.persist(path),
            None => std::fs::remove_file(path),
        };
    }
}

/// Writes tensors, each to its own output and under the name given: as [`Outputs::of_tensors`] and
/// [`Outputs::write`].
///
/// # Errors
/// As those.
pub fn write(files: &[(&Path, &str, &Tensor)]) -> Result<()> {
    let outputs = Outputs::of_tensors(files.iter().map(|(path, ..)| *path))?;
    outputs.check_types(files.iter().map(|(_, _, tensor)| tensor.desc().dtype))?;
    let contents: Vec<_> =
        files.iter().map(|(_, name, tensor)| Contents::Tensor(name, tensor)).collect();
    outputs.write(&contents)
}

#[cfg(test)]
mod tests {
    use super::super::read;
    use super::*;
    use windrow::{Layout, TensorDesc};

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
                    let back = read(&path).unwrap();
                    assert_eq!((back.desc(), back.as_bytes()), (t.desc(), t.as_bytes()));
                }
            }
        }
    }

    #[test]
    fn strided_tensors_are_written_row_major() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.npy");
        // One that fits a chunk, and one that does not.
        for [rows, columns] in [[2, 3], [300, 401]] {
            let layout = Layout::with_order(&[rows, columns], &[1, 0]).unwrap();
            let mut t = Tensor::uninitialised(TensorDesc::new(DType::I32, layout)).unwrap();
            for (i, b) in t.as_bytes_mut().chunks_exact_mut(4).enumerate() {
                b.copy_from_slice(&(i as i32).to_ne_bytes());
            }
            write(&[(&path, "t", &t)]).unwrap();
            let back = read(&path).unwrap();
            assert!(back.desc().layout.is_contiguous());
            let want: Vec<i32> =
                (0..rows * columns).map(|i| (i % columns * rows + i / columns) as i32).collect();
            assert_eq!(back.to_vec::<i32>().unwrap(), want);
        }
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

    #[test]
    fn a_name_that_cannot_be_had_brings_back_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let [old, new, last] = ["old", "new", "last"].map(|name| dir.path().join(name));
        std::fs::write(&old, "before").unwrap();
        let outputs = Outputs::new([&*old, &*new, &*last]).unwrap();
        // Since the names were looked at, something else came to one.
        std::fs::create_dir(&last).unwrap();
        let contents = [b"1", b"2", b"3"].map(|bytes| Contents::Bytes(bytes));
        let error = outputs.write(&contents).unwrap_err();
        assert_eq!(error.path, last);
        assert_eq!(std::fs::read_to_string(&old).unwrap(), "before");
        assert!(!new.exists());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
