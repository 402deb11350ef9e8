//! The sources of tensors and texts: files, devices, pipes and standard input.

use super::{FileError, Format, Reason, Result, npy, npz, safetensors};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufReader, Chain, Cursor, Read, Seek};
use std::path::Path;
use windrow::Tensor;

/// The first bytes tell the formats apart.
const SIGNATURE: usize = 8;
/// The longest table or list of layers.
const TEXT_LIMIT: u64 = 16 << 20;

/// An open input. Nothing is believed of its length but what the file system says.
pub(super) struct Source {
    reader: Chain<Cursor<Vec<u8>>, BufReader<File>>,
    /// Bytes of a regular file; `None` for a pipe or a device, which may have no end.
    len: Option<u64>,
}

impl Source {
    pub(super) fn open(path: &Path) -> Result<Self, Reason> {
        let mut file = if is_stdin(path) { stdin()? } else { File::open(path)? };
        let metadata = file.metadata()?;
        if metadata.is_dir() {
            return Err(Reason::Folder);
        }
        // One that was read from before is as good as a pipe.
        let regular = metadata.is_file() && file.stream_position()? == 0;
        let len = regular.then_some(metadata.len());
        Ok(Source { reader: Cursor::new(Vec::new()).chain(BufReader::new(file)), len })
    }

    pub(super) fn len(&self) -> Option<u64> {
        self.len
    }

    /// The format that the contents look like. The position does not move.
    fn format(&mut self) -> io::Result<Format> {
        let mut start = Vec::new();
        self.reader.get_mut().1.by_ref().take(SIGNATURE as u64).read_to_end(&mut start)?;
        let format = match start.as_slice() {
            [0x93, b'N', b'U', ..] => Format::Npy,
            [b'P', b'K', 3 | 5, ..] => Format::Npz,
            _ => Format::Safetensors,
        };
        *self.reader.get_mut().0 = Cursor::new(start);
        Ok(format)
    }

    /// Skips the next `count` bytes, without reading them if possible.
    pub(super) fn skip(&mut self, count: u64) -> io::Result<()> {
        let (start, file) = self.reader.get_mut();
        match (self.len, i64::try_from(count)) {
            (Some(_), Ok(step)) if start.get_ref().is_empty() => file.seek_relative(step),
            _ => io::copy(&mut self.reader.by_ref().take(count), &mut io::sink()).map(drop),
        }
    }

    /// The file from its beginning, to be read in any order; `None` for a pipe or a device.
    pub(super) fn into_file(self) -> io::Result<Option<BufReader<File>>> {
        let mut file = self.reader.into_inner().1;
        Ok(match self.len {
            Some(_) => {
                file.rewind()?;
                Some(file)
            }
            None => None,
        })
    }
}

impl Read for Source {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.reader.read(to)
    }
}

/// Standard input as a file of its own.
fn stdin() -> io::Result<File> {
    #[cfg(unix)]
    {
        use std::os::fd::AsFd;
        Ok(File::from(io::stdin().as_fd().try_clone_to_owned()?))
    }
    #[cfg(windows)]
    {
        use std::os::windows::io::AsHandle;
        Ok(File::from(io::stdin().as_handle().try_clone_to_owned()?))
    }
}

/// Reads one tensor from `PATH` or `PATH:NAME`; `-` is standard input. Fortran order in a `.npy` file
/// becomes strides. What has no known extension is told by its first bytes if it is standard input, a
/// pipe or a device.
///
/// # Errors
/// [`FileError`] for everything that can be wrong with the file.
pub fn read(source: impl AsRef<OsStr>) -> Result<Tensor> {
    let (path, name) = split_name(source.as_ref());
    let read = || {
        let special = || is_stdin(path) || std::fs::metadata(path).is_ok_and(|m| !m.is_file());
        let named = Format::of(path);
        if named.is_none() && !special() {
            return Err(Reason::Extension(".npy, .npz or .safetensors"));
        }
        let mut source = Source::open(path)?;
        match named.map_or_else(|| source.format(), Ok)? {
            Format::Npy => {
                let len = source.len;
                npy::read(source, len)
            }
            Format::Npz => npz::read(path, source, name),
            Format::Safetensors => safetensors::read(path, source, name),
        }
    };
    read().map_err(|reason| FileError::new(path, reason))
}

/// Reads a text that is no longer than people write; `-` is standard input.
///
/// # Errors
/// What the operating system reports, [`Reason::TooLong`], [`Reason::NotText`].
pub fn read_text(path: &Path) -> Result<String> {
    let read = || {
        let mut bytes = Vec::new();
        Source::open(path)?.take(TEXT_LIMIT + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > TEXT_LIMIT {
            return Err(Reason::TooLong { limit: TEXT_LIMIT });
        }
        String::from_utf8(bytes).map_err(|_| Reason::NotText)
    };
    read().map_err(|reason| FileError::new(path, reason))
}

/// `PATH:NAME` means a tensor of an archive: a colon after an archive's extension, or after `-`.
fn split_name(source: &OsStr) -> (&Path, Option<&str>) {
    let archive = |path: &Path| {
        is_stdin(path) || matches!(Format::of(path), Some(Format::Npz | Format::Safetensors))
    };
    let bytes = source.as_encoded_bytes();
    for (i, _) in bytes.iter().enumerate().filter(|(_, byte)| **byte == b':') {
        // SAFETY: the parts of a string that was cut at a colon, which is a whole character.
        let [path, name] = [&bytes[..i], &bytes[i + 1..]]
            .map(|part| unsafe { OsStr::from_encoded_bytes_unchecked(part) });
        if let (true, Some(name)) = (archive(Path::new(path)), name.to_str()) {
            return (Path::new(path), Some(name));
        }
    }
    (Path::new(source), None)
}

fn is_stdin(path: &Path) -> bool {
    path == Path::new("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_an_archive_only() {
        let split = |s: &str| {
            let (path, name) = split_name(OsStr::new(s));
            (path.to_str().unwrap().to_owned(), name.map(str::to_owned))
        };
        assert_eq!(split("a.npy"), ("a.npy".into(), None));
        assert_eq!(split("a:b.npy"), ("a:b.npy".into(), None));
        assert_eq!(split("a:b/c.npz"), ("a:b/c.npz".into(), None));
        assert_eq!(split("c.npz:x:y"), ("c.npz".into(), Some("x:y".into())));
        assert_eq!(split("m.SafeTensors:x"), ("m.SafeTensors".into(), Some("x".into())));
        assert_eq!(split("-:x"), ("-".into(), Some("x".into())));
        assert_eq!(split("-"), ("-".into(), None));
    }

    #[test]
    fn texts_are_short() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        std::fs::write(&path, "text").unwrap();
        assert_eq!(read_text(&path).unwrap(), "text");
        std::fs::write(&path, [0xff]).unwrap();
        assert!(matches!(read_text(&path).unwrap_err().reason, Reason::NotText));
        File::create(&path).unwrap().set_len(TEXT_LIMIT + 1).unwrap();
        assert!(matches!(read_text(&path).unwrap_err().reason, Reason::TooLong { .. }));
    }
}
