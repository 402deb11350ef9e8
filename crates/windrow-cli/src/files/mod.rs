//! Tensors in files: `.npy`, `.npz` and `.safetensors`.
//!
//! An input is named `PATH`, or `PATH:NAME` to choose a tensor of an archive; `-` is standard input.
//! Errors name the file.

mod literal;
mod names;
mod npy;
mod npz;
mod outputs;
mod part;
mod row_major;
mod safetensors;
mod source;
mod target;

pub use outputs::{Contents, Outputs, write};
pub(crate) use part::remove_all as remove_parts;
pub use source::{read, read_text};

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};
use windrow::DType;

/// Result with [`FileError`].
pub type Result<T, E = FileError> = std::result::Result<T, E>;

/// A file that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", shown(path))]
pub struct FileError {
    /// The file.
    pub path: PathBuf,
    /// The fault of the file.
    pub reason: Reason,
}

impl FileError {
    fn new(path: &Path, reason: impl Into<Reason>) -> Self {
        FileError { path: path.to_owned(), reason: reason.into() }
    }
}

/// The fault of a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The operating system refused.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The reader of standard output has gone.
    #[error("standard output is closed")]
    ClosedPipe,
    /// The name does not end in a known extension.
    #[error("unknown file type, expected a name ending in {0}")]
    Extension(&'static str),
    /// The contents do not follow the format.
    #[error("not a valid {format} file: {detail}")]
    Format {
        /// `.npy`, `.npz` or `.safetensors`.
        format: &'static str,
        /// The contents that were found.
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
        /// The value that was found.
        given: String,
        /// The known values.
        expected: &'static str,
    },
    /// An archive without the tensor asked for.
    #[error("no tensor `{name}`; the file has {available}")]
    UnknownName {
        /// The name asked for.
        name: String,
        /// The names that exist, or the nearest of them.
        available: String,
    },
    /// An archive of several tensors, none of them chosen.
    #[error("choose a tensor with {example}; the file has {available}")]
    NoName {
        /// The right way to write it.
        example: String,
        /// The names that exist, or some of them.
        available: String,
    },
    /// More text than any table or list of layers has.
    #[error("more than {limit} bytes, expected a short text")]
    TooLong {
        /// The most that is read.
        limit: u64,
    },
    /// Bytes that are no text.
    #[error("not a text in UTF-8")]
    NotText,
    /// A folder where a file is expected.
    #[error("is a folder, expected a file")]
    Folder,
    /// An output in a folder that does not exist.
    #[error("no folder {}", shown(.0))]
    NoFolder(PathBuf),
    /// An output in a folder that takes no new files.
    #[error("folder {} cannot be written", shown(.0))]
    FolderReadOnly(PathBuf),
    /// An output that may not be changed.
    #[error("is read-only")]
    ReadOnly,
    /// Two outputs that are one file.
    #[error("two outputs in one file, expected a file for each")]
    Twice,
    /// An output in place of what is read.
    #[error("is read, and an output would take its place; name another file")]
    IsInput,
    /// Binary data for a terminal.
    #[error("a tensor is no text for a terminal; redirect standard output or name a file")]
    Terminal,
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
    /// The format by the name's extension, in capitals or not.
    fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        match extension.as_str() {
            "npy" => Some(Format::Npy),
            "npz" => Some(Format::Npz),
            "safetensors" => Some(Format::Safetensors),
            _ => None,
        }
    }
}

/// A text from a file or an argument as a terminal may show it: control characters, and those that
/// change the direction of writing, as escapes.
pub fn escaped(text: &str) -> Cow<'_, str> {
    let bad =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if !text.contains(bad) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if bad(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    Cow::Owned(shown)
}

/// A path as a terminal may show it.
pub fn shown(path: &Path) -> String {
    escaped(&path.to_string_lossy()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_in_capitals() {
        for (name, format) in [
            ("x.npy", Some(Format::Npy)),
            ("x.NPY", Some(Format::Npy)),
            ("x.Npz", Some(Format::Npz)),
            ("x.SAFETENSORS", Some(Format::Safetensors)),
            ("npy", None),
            ("x.txt", None),
        ] {
            assert_eq!(Format::of(Path::new(name)), format, "{name}");
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(escaped("w.ärz"), "w.ärz");
        assert_eq!(escaped("a\u{1b}[31m\nb\u{202e}\u{9b}"), "a\\u{1b}[31m\\nb\\u{202e}\\u{9b}");
    }
}
