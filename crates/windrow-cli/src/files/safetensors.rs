//! Hugging Face's `.safetensors`.

use super::source::Source;
use super::{Reason, names::choose, row_major};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::io::{self, Read, Write};
use std::path::Path;
use windrow::{DType, Tensor, TensorDesc};

const TYPES: [(Dtype, DType); 6] = [
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::BF16),
    (Dtype::F64, DType::F64),
    (Dtype::I32, DType::I32),
    (Dtype::I64, DType::I64),
];
/// The longest header that the format allows.
const HEADER_LIMIT: u64 = 100_000_000;

/// Reads the header and the bytes of one tensor.
pub(super) fn read(path: &Path, mut source: Source, name: Option<&str>) -> Result<Tensor, Reason> {
    let mut size = [0; 8];
    source.read_exact(&mut size).map_err(cut)?;
    let size = u64::from_le_bytes(size);
    let rest = source.len().map(|len| len.saturating_sub(8));
    if size > rest.unwrap_or(u64::MAX).min(HEADER_LIMIT) {
        let limit = rest.unwrap_or(u64::MAX).min(HEADER_LIMIT);
        let why = if limit == HEADER_LIMIT { "the format allows" } else { "the file has for it" };
        return Err(format_error(format!("a header of {size} bytes, {why} {limit}")));
    }
    let mut header = Vec::new();
    source.by_ref().take(size).read_to_end(&mut header)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(format_error)?;
    drop(header);
    let claimed = metadata.data_len() as u64;
    if let Some(given) = rest.map(|rest| rest - size).filter(|&given| given != claimed) {
        return Err(format_error(format!("data of {given} bytes, the header says {claimed}")));
    }
    let mut names = metadata.offset_keys();
    names.sort();
    let info = metadata.info(choose(path, &names, name)?).ok_or_else(|| format_error("no data"))?;
    let (_, dtype) =
        TYPES.into_iter().find(|(t, _)| *t == info.dtype).ok_or_else(|| Reason::ElementType {
            given: format!("{:?}", info.dtype),
            expected: "F32, F16, BF16, F64, I32 or I64",
        })?;
    let mut tensor = Tensor::uninitialised(TensorDesc::contiguous(dtype, &info.shape)?)?;
    source.skip(info.data_offsets.0 as u64)?;
    source.read_exact(tensor.as_bytes_mut()).map_err(cut)?;
    if cfg!(target_endian = "big") {
        tensor.as_bytes_mut().chunks_exact_mut(dtype.size()).for_each(<[u8]>::reverse);
    }
    Ok(tensor)
}

/// Writes one tensor in row-major order.
pub(super) fn write(file: &mut dyn Write, name: &str, tensor: &Tensor) -> Result<(), Reason> {
    let (dtype, _) =
        TYPES.into_iter().find(|(_, d)| *d == tensor.desc().dtype).ok_or_else(|| {
            Reason::ElementType {
                given: tensor.desc().dtype.name().into(),
                expected: "a type that .safetensors has",
            }
        })?;
    let bytes = tensor.desc().bytes();
    let info = TensorInfo { dtype, shape: tensor.shape().to_vec(), data_offsets: (0, bytes) };
    let metadata = Metadata::new(None, vec![(name.to_owned(), info)]).map_err(format_error)?;
    let mut header = serde_json::to_string(&metadata).map_err(format_error)?;
    // Data begin at a multiple of 8.
    let padding = header.len().next_multiple_of(8) - header.len();
    header.extend(std::iter::repeat_n(' ', padding));
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    Ok(row_major::write(file, tensor)?)
}

fn cut(e: io::Error) -> Reason {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => format_error("it ends too early"),
        _ => e.into(),
    }
}

fn format_error(detail: impl ToString) -> Reason {
    Reason::Format { format: ".safetensors", detail: detail.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    fn file(names: &[&str], dtype: Dtype) -> tempfile::TempPath {
        let data = [0u8; 8];
        let views =
            names.iter().map(|n| (*n, TensorView::new(dtype, vec![2, 1], &data[..]).unwrap()));
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes = safetensors::serialize(views, None).unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file.into_temp_path()
    }

    fn read(path: &Path, name: Option<&str>) -> Result<Tensor, Reason> {
        super::read(path, Source::open(path)?, name)
    }

    #[test]
    fn names_are_asked_for_and_listed() {
        let path = file(&["w.bias", "w"], Dtype::F32);
        assert_eq!(read(&path, Some("w.bias")).unwrap().shape(), [2, 1]);
        let message = read(&path, None).unwrap_err().to_string();
        assert!(message.contains("w, w.bias"), "{message}");
        let message = read(&path, Some("b")).unwrap_err().to_string();
        assert!(message.contains("no tensor `b`"), "{message}");
    }

    #[test]
    fn unknown_types_are_named() {
        let message = read(&file(&["x"], Dtype::U32), None).unwrap_err().to_string();
        assert!(message.contains("U32"), "{message}");
    }

    #[test]
    fn the_limit_of_a_header_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [&u64::MAX.to_le_bytes()[..], &[0; 20]].concat()).unwrap();
        let message = read(file.path(), None).unwrap_err().to_string();
        assert!(
            message.contains("of 18446744073709551615 bytes, the file has for it 20"),
            "{message}"
        );
        file.as_file().set_len(1 << 40).unwrap();
        let message = read(file.path(), None).unwrap_err().to_string();
        assert!(message.contains("bytes, the format allows 100000000"), "{message}");
    }

    #[test]
    fn truncated_files_are_refused() {
        let path = file(&["x"], Dtype::F32);
        let bytes = std::fs::read(&path).unwrap();
        for end in 0..bytes.len() {
            std::fs::write(&path, &bytes[..end]).unwrap();
            assert!(read(&path, None).is_err(), "cut at {end}");
        }
    }
}
