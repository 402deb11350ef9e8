//! A checksum of a filter's content.

use crate::TensorRef;
use crate::cpu::{SendPtr, parallel_for};
use crate::tensor::for_each_offset;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// The number of bytes in one parallel task: so many that reading them takes longer than starting the task.
const PART: usize = 128 << 10;
/// The largest number of parts. Their checksums are in an array on the stack.
const MAX_PARTS: usize = 64;

/// A 128-bit checksum, made with XXH3, of the elements of a tensor in host memory. It is formed in the order of memory
/// or, if the tensor has gaps or shared elements, in row-major order. It does not depend on the number of threads.
/// Tensors with equal descriptors and equal checksums are taken to be equal.
pub(super) fn checksum(x: &TensorRef<'_>, threads: usize) -> u128 {
    let Some((low, high)) = x.address_range() else { return 0 };
    if !x.layout().is_unique() || high - low != x.desc().bytes() {
        return checksum_of_elements(x);
    }
    let start = x.as_ptr().wrapping_sub(x.as_ptr() as usize - low);
    // SAFETY: the elements fill the range without a gap, and may be read by the view's contract.
    checksum_of_bytes(unsafe { std::slice::from_raw_parts(start, high - low) }, threads)
}

fn checksum_of_bytes(bytes: &[u8], threads: usize) -> u128 {
    let parts = bytes.len().div_ceil(PART).clamp(1, MAX_PARTS);
    let size = bytes.len().div_ceil(parts);
    let mut sums = [[0; size_of::<u128>()]; MAX_PARTS];
    let to = SendPtr(sums.as_mut_ptr());
    parallel_for(threads, parts, |i| {
        let part = &bytes[(i * size).min(bytes.len())..((i + 1) * size).min(bytes.len())];
        // SAFETY: there are at most `MAX_PARTS` parts, each of one task.
        unsafe { to.get().add(i).write(xxh3_128(part).to_le_bytes()) };
    });
    xxh3_128(sums[..parts].as_flattened())
}

/// The checksum of the elements in row-major order, without the bytes between them.
fn checksum_of_elements(x: &TensorRef<'_>) -> u128 {
    let (mut hash, size) = (Xxh3::new(), x.dtype().size());
    let mut buffer = [0; 4096];
    let mut filled = 0;
    for_each_offset(x.layout(), |offset| {
        let from = x.as_ptr().wrapping_offset(offset * size as isize);
        // SAFETY: an element of the view.
        let element = unsafe { std::slice::from_raw_parts(from, size) };
        buffer[filled..filled + size].copy_from_slice(element);
        filled += size;
        // Sizes of elements divide that of the buffer.
        if filled == buffer.len() {
            hash.update(&buffer);
            filled = 0;
        }
    });
    hash.update(&buffer[..filled]);
    hash.digest128()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verification::random;
    use crate::{Layout, bf16};

    #[test]
    fn every_bit_counts_on_any_number_of_threads() {
        for len in [1, 9, 4096, PART / 4 + 3, 5 * PART / 4, (MAX_PARTS + 7) * PART / 4 + 1] {
            let mut data: Vec<f32> = random(1, len, -1.0, 1.0).iter().map(|&v| v as f32).collect();
            let sum = |data: &[f32], threads| {
                checksum(&TensorRef::new(data, &[1, len]).unwrap(), threads)
            };
            let before = sum(&data, 1);
            assert_eq!(before, sum(&data, 3));
            for i in (0..len).step_by(len.div_ceil(50)).chain([len - 1]) {
                for bit in [0, 31] {
                    let old = data[i];
                    data[i] = f32::from_bits(old.to_bits() ^ (1 << bit));
                    assert_ne!(before, sum(&data, 2), "bit {bit} of element {i} of {len}");
                    data[i] = old;
                }
            }
            assert_eq!(before, sum(&data, 2));
        }
    }

    #[test]
    fn gaps_do_not_count_and_neither_does_the_address() {
        let sum = |data: &[bf16], offset, layout| {
            checksum(&TensorRef::strided(data, offset, layout).unwrap(), 2)
        };
        let layout = Layout::strided(&[50, 60], &[200, 3]).unwrap();
        let data: Vec<bf16> =
            random(1, 11_000, -1.0, 1.0).into_iter().map(bf16::from_f64).collect();
        let before = sum(&data, 0, layout);
        let mut moved = [vec![bf16::ONE; 7], data.clone()].concat();
        assert_eq!(before, sum(&moved, 7, layout));
        moved[7 + 1] = bf16::ZERO;
        assert_eq!(before, sum(&moved, 7, layout), "a gap");
        moved[7 + 3] = bf16::NEG_ONE;
        assert_ne!(before, sum(&moved, 7, layout));
        let broadcast = Layout::strided(&[4, 5], &[0, 1]).unwrap();
        assert_ne!(sum(&data, 0, broadcast), sum(&data, 1, broadcast));
        let empty = Layout::contiguous(&[0, 5]).unwrap();
        assert_eq!(sum(&data, 0, empty), sum(&[], 0, empty));
    }
}
