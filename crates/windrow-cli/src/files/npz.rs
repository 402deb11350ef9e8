//! NumPy's `.npz`: a zip archive of `.npy` files, stored or deflated.

use super::source::Source;
use super::{Reason, names::choose, npy};
use std::io::{Read, Seek};
use std::path::Path;
use windrow::Tensor;
use zip::{CompressionMethod, ZipArchive};

/// Deflate codes at most 258 bytes in two bits.
const DEFLATE: u64 = 1032;

pub(super) fn read(path: &Path, source: Source, name: Option<&str>) -> Result<Tensor, Reason> {
    let len = source.len();
    let (Some(file), Some(len)) = (source.into_file()?, len) else {
        let detail = "its index is at its end, so it cannot be read from a pipe or a device";
        return Err(Reason::Format { format: ".npz", detail: detail.into() });
    };
    let mut archive = ZipArchive::new(file).map_err(format_error)?;
    let mut members = Vec::new();
    for member in archive.file_names() {
        members.push(member.map_err(format_error)?.into_owned());
    }
    members.retain(|member| member.ends_with(".npy") || is_array(&mut archive, member));
    // By the whole name, as NumPy does, or without the extension.
    let is_member = |name: &&str| members.iter().any(|member| member == name);
    let member = match name.filter(is_member) {
        Some(member) => member.to_owned(),
        None => {
            let without =
                |member: &String| member.strip_suffix(".npy").unwrap_or(member).to_owned();
            let names: Vec<_> = members.iter().map(without).collect();
            let name = choose(path, &names, name)?;
            let named = format!("{name}.npy");
            if members.contains(&named) { named } else { name.to_owned() }
        }
    };
    let mut entry = archive.by_name(&member).map_err(format_error)?;
    // What the file says of its sizes is true only as far as it reaches.
    let stored = entry.compressed_size().min(len);
    let most = match entry.compression() {
        CompressionMethod::Stored => stored,
        _ => stored.saturating_mul(DEFLATE),
    };
    let size = entry.size().min(most);
    let tensor = npy::read(&mut entry, Some(size)).map_err(damaged)?;
    // The checksum is compared at the end.
    match entry.read(&mut [0]).map_err(|e| damaged(e.into()))? {
        0 => Ok(tensor),
        _ => Err(Reason::Format { format: ".npz", detail: "bytes after the array".into() }),
    }
}

/// Whether a member that is not named so is an array all the same.
fn is_array(archive: &mut ZipArchive<impl Read + Seek>, member: &str) -> bool {
    let mut start = [0; npy::MAGIC.len()];
    let read = archive.by_name(member).map(|mut entry| entry.read_exact(&mut start));
    matches!(read, Ok(Ok(()))) && start == npy::MAGIC
}

/// The errors of decompressor and checksum, as the format's error.
fn damaged(reason: Reason) -> Reason {
    match reason {
        Reason::Io(e) if e.kind() != std::io::ErrorKind::Other && e.raw_os_error().is_none() => {
            Reason::Format { format: ".npz", detail: e.to_string() }
        }
        other => other,
    }
}

fn format_error(e: zip::result::ZipError) -> Reason {
    match e {
        zip::result::ZipError::Io(e) => Reason::Io(e),
        e => Reason::Format { format: ".npz", detail: e.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use windrow::DType;
    use zip::write::SimpleFileOptions;

    fn archive(names: &[&str], method: CompressionMethod) -> tempfile::TempPath {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut zip = zip::ZipWriter::new(&mut file);
        for (i, name) in names.iter().enumerate() {
            zip.start_file(*name, SimpleFileOptions::default().compression_method(method)).unwrap();
            if name.ends_with(".txt") {
                continue;
            }
            let t = Tensor::from_slice(&vec![i as f32; 100], &[4, 25]).unwrap();
            let mut bytes = Vec::new();
            npy::write(&mut bytes, &t).unwrap();
            zip.write_all(&bytes).unwrap();
        }
        zip.finish().unwrap();
        file.into_temp_path()
    }

    fn read(path: &Path, name: Option<&str>) -> Result<Tensor, Reason> {
        super::read(path, Source::open(path)?, name)
    }

    #[test]
    fn stored_and_deflated() {
        for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
            let path = archive(&["a.npy", "b/c.npy"], method);
            let t = read(&path, Some("b/c")).unwrap();
            assert_eq!((t.desc().dtype, t.shape()), (DType::F32, &[4, 25][..]));
            assert_eq!(t.to_vec::<f32>().unwrap(), [1.0; 100]);
        }
    }

    #[test]
    fn names_are_asked_for_and_listed() {
        let path = archive(&["a.npy", "b.npy", "readme.txt"], CompressionMethod::Stored);
        let message = read(&path, None).unwrap_err().to_string();
        assert!(message.contains(":NAME") && message.contains("a, b"), "{message}");
        let message = read(&path, Some("c")).unwrap_err().to_string();
        assert!(message.contains("no tensor `c`") && message.contains("a, b"), "{message}");
        assert!(read(&archive(&["x.npy"], CompressionMethod::Stored), None).is_ok());
        let message = read(&archive(&[], CompressionMethod::Stored), None).unwrap_err();
        assert!(message.to_string().contains("none"), "{message}");
    }

    #[test]
    fn members_are_named_as_in_numpy() {
        let path =
            archive(&["a.npy", "b", "c.npy.npy", "c.npy", "d.txt"], CompressionMethod::Stored);
        for (name, number) in
            [("a", 0.0), ("a.npy", 0.0), ("b", 1.0), ("c.npy.npy", 2.0), ("c.npy", 3.0), ("c", 3.0)]
        {
            let t = read(&path, Some(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(t.to_vec::<f32>().unwrap()[0], number, "{name}");
        }
        let one = archive(&["a"], CompressionMethod::Deflated);
        assert!(read(&one, None).is_ok());
        assert!(read(&one, Some("a.npy")).is_err());
    }

    #[test]
    fn damaged_archives_are_refused() {
        let path = archive(&["a.npy"], CompressionMethod::Deflated);
        let bytes = std::fs::read(&path).unwrap();
        for end in [0, 10, bytes.len() / 2, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..end]).unwrap();
            assert!(read(&path, None).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn a_flipped_bit_is_found() {
        for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
            let path = archive(&["a.npy"], method);
            let bytes = std::fs::read(&path).unwrap();
            let whole = read(&path, None).unwrap();
            let mut refused = 0;
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << (at % 8);
                std::fs::write(&path, &damaged).unwrap();
                match read(&path, None) {
                    // Some bits say nothing of the contents: dates, versions.
                    Ok(t) => assert_eq!(t.as_bytes(), whole.as_bytes(), "{method} byte {at}"),
                    Err(_) => refused += 1,
                }
            }
            assert!(refused > bytes.len() / 2, "{method}: {refused} of {}", bytes.len());
        }
    }

    #[test]
    fn sizes_that_the_file_does_not_have_are_not_believed() {
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2500000000,), }";
        for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            let mut zip = zip::ZipWriter::new(&mut file);
            let options = SimpleFileOptions::default().compression_method(method);
            zip.start_file("a.npy", options).unwrap();
            let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
            bytes.extend((header.len() as u16).to_le_bytes());
            bytes.extend(header.as_bytes());
            zip.write_all(&bytes).unwrap();
            zip.finish().unwrap();
            let mut bytes = std::fs::read(file.path()).unwrap();
            // The uncompressed size in the index, 24 bytes after its signature.
            let index = bytes.windows(4).rposition(|w| w == b"PK\x01\x02").unwrap();
            bytes[index + 24..index + 28].copy_from_slice(&u32::MAX.wrapping_sub(1).to_le_bytes());
            std::fs::write(file.path(), bytes).unwrap();
            let message = read(file.path(), None).unwrap_err().to_string();
            assert!(message.contains("truncated") || message.contains("not a valid"), "{message}");
        }
    }
}
