//! NumPy's `.npz`: a zip archive of `.npy` files, stored or deflated.

use super::{Reason, choose, npy};
use std::path::Path;
use windrow::Tensor;
use zip::ZipArchive;

pub(super) fn read(path: &Path, name: Option<&str>) -> Result<Tensor, Reason> {
    let file = std::io::BufReader::new(std::fs::File::open(path)?);
    let mut archive = ZipArchive::new(file).map_err(format_error)?;
    let mut names = Vec::new();
    for entry in archive.file_names() {
        names.extend(entry.map_err(format_error)?.strip_suffix(".npy").map(str::to_owned));
    }
    let entry = format!("{}.npy", choose(path, &names, name)?);
    let entry = archive.by_name(&entry).map_err(format_error)?;
    let size = entry.size();
    npy::read(entry, size)
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
    use zip::CompressionMethod;
    use zip::write::SimpleFileOptions;

    fn archive(names: &[&str], method: CompressionMethod) -> tempfile::TempPath {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut zip = zip::ZipWriter::new(&mut file);
        for (i, name) in names.iter().enumerate() {
            zip.start_file(*name, SimpleFileOptions::default().compression_method(method)).unwrap();
            let t = Tensor::from_slice(&vec![i as f32; 100], &[4, 25]).unwrap();
            let mut bytes = Vec::new();
            npy::write(&mut bytes, &t).unwrap();
            zip.write_all(&bytes).unwrap();
        }
        zip.finish().unwrap();
        file.into_temp_path()
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
    fn damaged_archives_are_refused() {
        let path = archive(&["a.npy"], CompressionMethod::Deflated);
        let bytes = std::fs::read(&path).unwrap();
        for end in [0, 10, bytes.len() / 2, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..end]).unwrap();
            assert!(read(&path, None).is_err(), "cut at {end}");
        }
        let mut damaged = bytes.clone();
        damaged[60] ^= 0x55; // inside the compressed data
        std::fs::write(&path, &damaged).unwrap();
        assert!(read(&path, None).is_err());
    }
}
