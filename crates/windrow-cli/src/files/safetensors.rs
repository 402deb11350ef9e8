//! Hugging Face's `.safetensors`.

use super::{Reason, choose};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::io::Write;
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

pub(super) fn read(path: &Path, name: Option<&str>) -> Result<Tensor, Reason> {
    let bytes = std::fs::read(path)?;
    let file = SafeTensors::deserialize(&bytes).map_err(format_error)?;
    let mut names: Vec<String> = file.names().iter().map(ToString::to_string).collect();
    names.sort();
    let view = file.tensor(choose(path, &names, name)?).map_err(format_error)?;
    let (_, dtype) =
        TYPES.into_iter().find(|(t, _)| *t == view.dtype()).ok_or_else(|| Reason::ElementType {
            given: format!("{:?}", view.dtype()),
            expected: "F32, F16, BF16, F64, I32 or I64",
        })?;
    let mut tensor = Tensor::uninitialised(TensorDesc::contiguous(dtype, view.shape())?)?;
    tensor.as_bytes_mut().copy_from_slice(view.data());
    swap_on_big_endian(&mut tensor);
    Ok(tensor)
}

pub(super) fn write(file: &mut dyn Write, name: &str, tensor: &Tensor) -> Result<(), Reason> {
    let mut little = Tensor::uninitialised(*tensor.desc())?;
    little.as_bytes_mut().copy_from_slice(tensor.as_bytes());
    swap_on_big_endian(&mut little);
    let (dtype, _) =
        TYPES.into_iter().find(|(_, d)| *d == tensor.desc().dtype).ok_or_else(|| {
            Reason::ElementType {
                given: tensor.desc().dtype.name().into(),
                expected: "a type that .safetensors has",
            }
        })?;
    let view = TensorView::new(dtype, tensor.shape().to_vec(), little.as_bytes());
    let bytes = view.and_then(|v| safetensors::serialize([(name, v)], None));
    Ok(file.write_all(&bytes.map_err(format_error)?)?)
}

/// The format is little-endian.
fn swap_on_big_endian(tensor: &mut Tensor) {
    if cfg!(target_endian = "big") {
        let size = tensor.desc().dtype.size();
        tensor.as_bytes_mut().chunks_exact_mut(size).for_each(<[u8]>::reverse);
    }
}

fn format_error(e: safetensors::SafeTensorError) -> Reason {
    Reason::Format { format: ".safetensors", detail: e.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(names: &[&str], dtype: Dtype) -> tempfile::TempPath {
        let data = [0u8; 8];
        let views =
            names.iter().map(|n| (*n, TensorView::new(dtype, vec![2, 1], &data[..]).unwrap()));
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes = safetensors::serialize(views, None).unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file.into_temp_path()
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
    fn truncated_files_are_refused() {
        let path = file(&["x"], Dtype::F32);
        let bytes = std::fs::read(&path).unwrap();
        for end in 0..bytes.len() {
            std::fs::write(&path, &bytes[..end]).unwrap();
            assert!(read(&path, None).is_err(), "cut at {end}");
        }
    }
}
