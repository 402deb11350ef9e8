//! The rows of a batch that belong to each rank, and their place in memory.

use crate::{Error, Result, TensorMut, TensorRef};
use std::ops::Range;

/// The rows of `0..n` that belong to rank `index` of `world`: in order, the first `n % world` ranks
/// get one row more; ranks beyond the last row get an empty range.
///
/// ```
/// use windrow::parallel::shard;
/// assert_eq!([0, 1, 2].map(|rank| shard(7, rank, 3)), [0..3, 3..5, 5..7]);
/// assert_eq!(shard(1, 2, 3), 1..1);
/// ```
///
/// # Panics
/// Unless `index < world`.
pub fn shard(n: usize, index: usize, world: usize) -> Range<usize> {
    assert!(index < world, "rank {index} of {world}");
    let (each, extra) = (n / world, n % world);
    let start = index * each + index.min(extra);
    start..start + each + usize::from(index < extra)
}

/// Rows `rows` of y [n, ..], in the same memory.
///
/// # Errors
/// [`Error::Parameter`] if the range leaves y.
pub(super) fn rows_of<'a>(y: &'a mut TensorMut<'_>, rows: Range<usize>) -> Result<TensorMut<'a>> {
    let (desc, address) = {
        let part = y.as_ref().narrow(0, rows)?;
        (*part.desc(), part.as_ptr() as usize)
    };
    let from_origin = address.wrapping_sub(y.as_ptr() as usize);
    let ptr = y.as_mut_ptr().wrapping_add(from_origin);
    // SAFETY: a part of y's elements, borrowed mutably as long as y is.
    unsafe { TensorMut::from_raw(ptr.cast(), desc, y.device()) }
}

/// Bytes of each rank's rows of y [n, ..], from y's lowest address; in the order of the ranks and
/// without gaps, so that they cover y.
///
/// # Errors
/// [`Error::Rank`] without dimensions, [`Error::Strides`] unless each row is a dense block and the
/// blocks follow one another. The order of the other dimensions does not matter.
pub(super) fn blocks(y: &TensorRef<'_>, world: usize) -> Result<Vec<Range<usize>>> {
    let Some(&n) = y.shape().first() else {
        return Err(Error::Rank { arg: "y", given: 0, expected: "a batch dimension" });
    };
    let row = y.desc().bytes() / n.max(1);
    let follows = n <= 1 || row == 0 || y.strides()[0] * y.dtype().size() as isize == row as isize;
    if !(follows && is_dense(y)) {
        return Err(Error::Strides {
            arg: "y",
            given: y.strides().to_vec(),
            expected: "rows of the batch as dense blocks, one after the other".into(),
        });
    }
    let bytes = |rows: Range<usize>| rows.start * row..rows.end * row;
    Ok((0..world).map(|index| bytes(shard(n, index, world))).collect())
}

/// True if the elements fill the memory from the lowest to the highest address.
pub(super) fn is_dense(x: &TensorRef<'_>) -> bool {
    x.layout().is_unique()
        && x.address_range().is_none_or(|(low, high)| high - low == x.desc().bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Layout, Tensor, TensorDesc};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_cover_the_batch_in_order(n in 0usize..200, world in 1usize..20) {
            let shards: Vec<_> = (0..world).map(|index| shard(n, index, world)).collect();
            prop_assert_eq!(shards[0].start, 0);
            prop_assert_eq!(shards[world - 1].end, n);
            prop_assert!(shards.windows(2).all(|s| s[0].end == s[1].start));
            let sizes: Vec<_> = shards.iter().map(Range::len).collect();
            prop_assert!(sizes.iter().all(|s| s.abs_diff(n / world) <= 1));
            prop_assert!(sizes.is_sorted_by(|a, b| a >= b));
        }

        /// Each rank writes its own rows of a tensor of its own. The blocks of all ranks together are the tensor that
        /// one rank alone writes.
        #[test]
        fn blocks_of_all_ranks_merge(n in 0usize..9, c in 1usize..4, l in 0usize..5, world in 1usize..6, channels_last: bool) {
            let order = if channels_last { [0, 2, 1] } else { [0, 1, 2] };
            let layout = Layout::with_order(&[n, c, l], &order).unwrap();
            let desc = TensorDesc { dtype: DType::F32, layout };
            let mut merged = Tensor::uninitialised(desc).unwrap();
            merged.as_bytes_mut().fill(0xff);
            for index in 0..world {
                let mut own = Tensor::uninitialised(desc).unwrap();
                let rows = shard(n, index, world);
                let mut y = own.as_mut();
                write(rows_of(&mut y, rows.clone()).unwrap(), rows.start);
                let block = blocks(&own.as_ref(), world).unwrap()[index].clone();
                merged.as_bytes_mut()[block.clone()].copy_from_slice(&own.as_bytes()[block]);
            }
            let mut whole = Tensor::uninitialised(desc).unwrap();
            write(whole.as_mut(), 0);
            prop_assert_eq!(merged.as_bytes(), whole.as_bytes());
        }
    }

    /// Numbers every element of y [rows, c, l] by its indices, the first row being row `first`.
    fn write(mut y: TensorMut<'_>, first: usize) {
        let [n, c, l] = [0, 1, 2].map(|d| y.shape()[d]);
        let layout = *y.layout();
        let ptr = y.as_mut_ptr().cast::<f32>();
        for (i, j, k) in
            (0..n).flat_map(|i| (0..c).flat_map(move |j| (0..l).map(move |k| (i, j, k))))
        {
            // SAFETY: an offset of y's layout, and y is f32.
            unsafe {
                *ptr.offset(layout.offset(&[i, j, k])) = (100 * (first + i) + 10 * j + k) as f32
            };
        }
    }

    #[test]
    fn rows_that_are_no_blocks_are_refused() {
        let data = [0f32; 64];
        for (shape, strides) in [
            (&[4, 4][..], &[1isize, 4][..]), // rows interleaved
            (&[4, 4], &[8, 1]),              // gaps between rows
            (&[4, 2], &[4, 2]),              // gaps inside of rows
            (&[4, 4], &[0, 1]),              // all rows the same
        ] {
            let layout = Layout::strided(shape, strides).unwrap();
            let y = TensorRef::strided(&data, 0, layout).unwrap();
            assert!(matches!(blocks(&y, 2), Err(Error::Strides { .. })), "{shape:?} {strides:?}");
        }
        let scalar = TensorRef::new(&data, &[]).unwrap();
        assert!(matches!(blocks(&scalar, 2), Err(Error::Rank { .. })));
        let one = Layout::strided(&[1, 4], &[77, 1]).unwrap();
        let one = TensorRef::strided(&data, 0, one).unwrap();
        assert_eq!(blocks(&one, 2).unwrap(), [0..16, 16..16]);
    }
}
