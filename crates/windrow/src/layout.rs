//! Shapes and strides.

use crate::{Error, Result};

/// The largest number of dimensions of a tensor.
pub const MAX_RANK: usize = 8;

/// Shape and strides of a tensor. Strides are in elements, may be negative or zero, and are
/// checked: the number of elements and every offset fit in `isize`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [isize; MAX_RANK],
}

impl Layout {
    /// Row-major layout: the last dimension has stride 1.
    ///
    /// # Errors
    /// [`Error::Rank`] above [`MAX_RANK`] dimensions, [`Error::SizeOverflow`].
    pub fn contiguous(shape: &[usize]) -> Result<Self> {
        let mut order = [0; MAX_RANK];
        for (i, o) in order.iter_mut().enumerate() {
            *o = i;
        }
        Self::with_order(shape, &order[..shape.len().min(MAX_RANK)])
    }

    /// Dense layout whose dimensions lie in memory in the order given, outermost first:
    /// `[0, 2, 3, 1]` for an `[n, c, h, w]` shape is channels-last.
    ///
    /// # Errors
    /// As [`Layout::contiguous`], and [`Error::Parameter`] if `order` is no permutation.
    pub fn with_order(shape: &[usize], order: &[usize]) -> Result<Self> {
        let mut seen = [false; MAX_RANK];
        check_rank(shape.len())?;
        if order.len() != shape.len()
            || !order.iter().all(|&d| d < shape.len() && !std::mem::replace(&mut seen[d], true))
        {
            return Err(Error::parameter(
                "order",
                format!("{order:?}"),
                format!("a permutation of 0..{}", shape.len()),
            ));
        }
        let mut strides = [0isize; MAX_RANK];
        let mut step = 1usize;
        for &d in order.iter().rev() {
            strides[d] = isize::try_from(step).map_err(|_| overflow(shape))?;
            step = step.checked_mul(shape[d].max(1)).ok_or_else(|| overflow(shape))?;
        }
        Self::strided(shape, &strides[..shape.len()])
    }

    /// A layout of any strides, in elements.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::Strides`] if the two lengths differ, [`Error::SizeOverflow`].
    pub fn strided(shape: &[usize], strides: &[isize]) -> Result<Self> {
        check_rank(shape.len())?;
        if strides.len() != shape.len() {
            return Err(Error::Strides {
                arg: "strides",
                given: strides.to_vec(),
                expected: format!("one for each of {} dimensions", shape.len()),
            });
        }
        let mut layout = Layout { rank: shape.len(), shape: [1; MAX_RANK], strides: [0; MAX_RANK] };
        layout.shape[..shape.len()].copy_from_slice(shape);
        layout.strides[..shape.len()].copy_from_slice(strides);
        let mut len = 1usize;
        let mut reach = 0isize;
        for (&n, &s) in shape.iter().zip(strides) {
            // The product over the non-zero sizes must fit, so that partial products do too.
            len = len.checked_mul(n.max(1)).ok_or_else(|| overflow(shape))?;
            let steps = isize::try_from(n.max(1) - 1).map_err(|_| overflow(shape))?;
            reach = steps
                .checked_mul(s.checked_abs().ok_or_else(|| overflow(shape))?)
                .and_then(|r| reach.checked_add(r))
                .ok_or_else(|| overflow(shape))?;
        }
        // Eight bytes an element at most: byte offsets fit as well.
        if len > isize::MAX as usize / 8 || reach > isize::MAX / 8 {
            return Err(overflow(shape));
        }
        Ok(layout)
    }

    /// Number of dimensions.
    #[inline]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Size of each dimension.
    #[inline]
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Stride of each dimension, in elements.
    #[inline]
    pub fn strides(&self) -> &[isize] {
        &self.strides[..self.rank]
    }

    /// Number of elements.
    #[inline]
    #[allow(clippy::len_without_is_empty)] // `is_empty` is below
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// True if there are no elements.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Lowest and highest element offset from the first element; `None` if there are no elements.
    pub fn extent(&self) -> Option<(isize, isize)> {
        if self.is_empty() {
            return None;
        }
        let (mut low, mut high) = (0, 0);
        for (&n, &s) in self.shape().iter().zip(self.strides()) {
            let reach = (n as isize - 1) * s;
            if reach < 0 { low += reach } else { high += reach }
        }
        Some((low, high))
    }

    /// True if the elements lie row-major without gaps. Strides of dimensions of size 1 do not
    /// count.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1;
        for (&n, &s) in self.shape().iter().zip(self.strides()).rev() {
            if n == 0 {
                return true;
            }
            if n != 1 {
                if s != step {
                    return false;
                }
                step *= n as isize;
            }
        }
        true
    }

    /// True if every element has its own memory. Sufficient: nested or interleaved stride patterns
    /// that are unique without one dimension enclosing the other count as overlapping.
    pub fn is_unique(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let mut dims = [(0usize, 0usize); MAX_RANK];
        let mut count = 0;
        for (&n, &s) in self.shape().iter().zip(self.strides()) {
            if n > 1 {
                dims[count] = (s.unsigned_abs(), n);
                count += 1;
            }
        }
        let dims = &mut dims[..count];
        dims.sort_unstable();
        let mut reach = 0;
        dims.iter().all(|&(s, n)| {
            let ok = s > reach;
            reach += s * (n - 1);
            ok
        })
    }

    /// The same elements with the dimensions in another order: dimension `i` of the result is
    /// dimension `order[i]` of this.
    ///
    /// # Panics
    /// If `order` is no permutation of the dimensions.
    pub fn permute(&self, order: &[usize]) -> Self {
        assert_eq!(order.len(), self.rank, "permute: order must name every dimension");
        let mut seen = [false; MAX_RANK];
        let mut out = *self;
        for (i, &d) in order.iter().enumerate() {
            assert!(!std::mem::replace(&mut seen[d], true), "permute: dimension {d} named twice");
            out.shape[i] = self.shape()[d];
            out.strides[i] = self.strides[d];
        }
        out
    }

    /// Offset of the element at `index`, in elements. `index` must have the layout's rank.
    #[inline]
    pub fn offset(&self, index: &[usize]) -> isize {
        debug_assert_eq!(index.len(), self.rank);
        index.iter().zip(self.strides()).map(|(&i, &s)| i as isize * s).sum()
    }
}

impl std::fmt::Debug for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.shape())?;
        if !self.is_contiguous() {
            write!(f, " strides {:?}", self.strides())?;
        }
        Ok(())
    }
}

fn check_rank(rank: usize) -> Result<()> {
    if rank <= MAX_RANK {
        Ok(())
    } else {
        Err(Error::Rank { arg: "shape", given: rank, expected: "at most 8" })
    }
}

fn overflow(shape: &[usize]) -> Error {
    Error::SizeOverflow { what: "tensor", detail: format!("shape {shape:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn contiguous_and_channels_last() {
        let a = Layout::contiguous(&[2, 3, 4]).unwrap();
        assert_eq!(a.strides(), [12, 4, 1]);
        assert!(a.is_contiguous() && a.is_unique());
        let b = Layout::with_order(&[2, 3, 4, 5], &[0, 2, 3, 1]).unwrap();
        assert_eq!(b.strides(), [60, 1, 15, 3]);
        assert!(!b.is_contiguous() && b.is_unique());
        assert!(b.permute(&[0, 2, 3, 1]).is_contiguous());
        assert_eq!(Layout::contiguous(&[]).unwrap().len(), 1);
    }

    #[test]
    fn empty_has_no_extent() {
        let a = Layout::contiguous(&[3, 0, 2]).unwrap();
        assert!(a.is_empty() && a.is_contiguous() && a.is_unique());
        assert_eq!((a.len(), a.extent()), (0, None));
    }

    #[test]
    fn negative_strides_reach_below() {
        let a = Layout::strided(&[3, 2], &[-2, 1]).unwrap();
        assert_eq!(a.extent(), Some((-4, 1)));
        assert!(a.is_unique());
    }

    #[test]
    fn bad_layouts_are_refused() {
        assert!(matches!(Layout::contiguous(&[1; 9]), Err(Error::Rank { given: 9, .. })));
        for shape in [&[usize::MAX, 2][..], &[1 << 62, 4], &[0, usize::MAX, 3], &[1 << 61]] {
            assert!(
                matches!(Layout::contiguous(shape), Err(Error::SizeOverflow { .. })),
                "{shape:?}"
            );
        }
        assert!(matches!(
            Layout::strided(&[3], &[isize::MAX / 2]),
            Err(Error::SizeOverflow { .. })
        ));
        assert!(matches!(Layout::strided(&[3], &[isize::MIN]), Err(Error::SizeOverflow { .. })));
        assert!(matches!(Layout::strided(&[3, 2], &[1]), Err(Error::Strides { .. })));
        assert!(matches!(Layout::with_order(&[2, 3], &[0, 0]), Err(Error::Parameter { .. })));
        assert!(matches!(Layout::with_order(&[2, 3], &[0]), Err(Error::Parameter { .. })));
    }

    proptest! {
        #[test]
        fn unique_means_unique(dims in prop::collection::vec((0usize..4, -9isize..9), 0..4)) {
            let (shape, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
            let layout = Layout::strided(&shape, &strides).unwrap();
            let mut offsets = vec![0isize];
            for (&n, &s) in shape.iter().zip(&strides) {
                offsets = offsets
                    .iter()
                    .flat_map(|&o| (0..n as isize).map(move |i| o + i * s))
                    .collect();
            }
            let distinct = offsets.iter().collect::<HashSet<_>>().len();
            prop_assert_eq!(layout.len(), offsets.len());
            if layout.is_unique() {
                prop_assert_eq!(distinct, offsets.len());
            }
            if let Some((low, high)) = layout.extent() {
                prop_assert_eq!(low, *offsets.iter().min().unwrap());
                prop_assert_eq!(high, *offsets.iter().max().unwrap());
            }
        }
    }
}
