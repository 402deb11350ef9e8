//! The elements of a tensor in row-major order, whatever its strides, without a copy of it.

use std::io::{self, Write};
use windrow::Tensor;

/// Bytes that are gathered before they are written.
const CHUNK: usize = 64 << 10;

/// Writes all elements, little-endian.
pub(super) fn write(to: &mut dyn Write, tensor: &Tensor) -> io::Result<()> {
    let (layout, size) = (tensor.desc().layout, tensor.desc().dtype.size());
    let bytes = tensor.as_bytes();
    if layout.is_contiguous() && cfg!(target_endian = "little") {
        return to.write_all(bytes);
    }
    let (shape, strides) = (layout.shape(), layout.strides());
    let mut index = vec![0; shape.len()];
    let mut chunk = Vec::with_capacity(CHUNK);
    for _ in 0..layout.len() {
        // A tensor's strides are not negative, and its elements lie in its memory.
        let offset: isize = index.iter().zip(strides).map(|(&i, s)| i as isize * s).sum();
        let start = offset as usize * size;
        let element = &bytes[start..start + size];
        if cfg!(target_endian = "big") {
            chunk.extend(element.iter().rev());
        } else {
            chunk.extend_from_slice(element);
        }
        if chunk.len() + size > CHUNK {
            to.write_all(&chunk)?;
            chunk.clear();
        }
        for (i, &n) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < n {
                break;
            }
            *i = 0;
        }
    }
    to.write_all(&chunk)
}
