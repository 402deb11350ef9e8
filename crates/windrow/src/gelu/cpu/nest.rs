//! Loops over several strided operands of the same shape.

use crate::MAX_RANK;

/// A loop nest over `N` operands. Neighbouring dimensions that all operands can traverse as one are merged. The
/// innermost dimension is the one to vectorise.
#[derive(Clone, Debug)]
pub(crate) struct Nest<const N: usize> {
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [[isize; N]; MAX_RANK],
}

impl<const N: usize> Nest<N> {
    /// A nest over `shape`. Each operand has its strides in elements, all zero if it is absent. Dimensions are sorted
    /// by the strides of the first operand, then of the others. Then the dimension in which most operands have stride 0
    /// or 1 is made the innermost.
    pub(crate) fn new(shape: &[usize], operands: [&[isize]; N]) -> Self {
        let mut dims = [(1usize, [0isize; N]); MAX_RANK];
        let mut count = 0;
        for (d, &n) in shape.iter().enumerate().filter(|&(_, &n)| n != 1) {
            dims[count] = (n, operands.map(|strides| strides[d]));
            count += 1;
        }
        let dims = &mut dims[..count];
        dims.sort_unstable_by_key(|(_, s)| std::cmp::Reverse(s.map(isize::unsigned_abs)));
        // The dimension with the most operands of stride 0 or 1; among equals the innermost.
        let unit = |strides: &[isize; N]| strides.iter().filter(|s| matches!(s, 0 | 1)).count();
        if let Some(best) = (0..count).max_by_key(|&d| unit(&dims[d].1)) {
            dims[best..].rotate_left(1);
        }
        let mut nest = Nest { rank: 0, shape: [1; MAX_RANK], strides: [[0; N]; MAX_RANK] };
        for &mut (n, strides) in dims {
            if nest.rank > 0 {
                let outer = nest.rank - 1;
                if nest.strides[outer] == strides.map(|s| s * n as isize) {
                    nest.shape[outer] *= n;
                    nest.strides[outer] = strides;
                    continue;
                }
            }
            nest.shape[nest.rank] = n;
            nest.strides[nest.rank] = strides;
            nest.rank += 1;
        }
        nest.rank = nest.rank.max(1);
        nest
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.shape[..self.rank].iter().product()
    }

    /// Strides of the innermost dimension.
    pub(crate) fn inner_strides(&self) -> [isize; N] {
        self.strides[self.rank - 1]
    }

    /// The elements `begin..end`, counted in the nest's order, divided into runs: contiguous pieces of the innermost
    /// dimension.
    #[inline(always)]
    pub(crate) fn runs(&self, begin: usize, end: usize) -> Runs<'_, N> {
        let mut index = [0; MAX_RANK];
        let mut rest = begin;
        for d in (0..self.rank).rev() {
            index[d] = rest % self.shape[d].max(1);
            rest /= self.shape[d].max(1);
        }
        Runs { nest: self, index, left: end - begin }
    }
}

/// See [`Nest::runs`].
pub(crate) struct Runs<'a, const N: usize> {
    nest: &'a Nest<N>,
    index: [usize; MAX_RANK],
    left: usize,
}

impl<const N: usize> Iterator for Runs<'_, N> {
    /// Offset of the first element in each operand, and the number of elements.
    type Item = ([isize; N], usize);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let Nest { rank, shape, strides } = self.nest;
        let mut offsets = [0; N];
        for (d, &i) in self.index.iter().enumerate().take(*rank) {
            for (operand, offset) in offsets.iter_mut().enumerate() {
                *offset += i as isize * strides[d][operand];
            }
        }
        let inner = rank - 1;
        let len = (shape[inner] - self.index[inner]).min(self.left);
        self.left -= len;
        self.index[inner] += len;
        for d in (1..*rank).rev() {
            if self.index[d] < shape[d] {
                break;
            }
            self.index[d] = 0;
            self.index[d - 1] += 1;
        }
        Some((offsets, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offsets<const N: usize>(nest: &Nest<N>, cuts: &[usize]) -> Vec<[isize; N]> {
        let mut out = Vec::new();
        for pair in cuts.windows(2) {
            for (offsets, len) in nest.runs(pair[0], pair[1]) {
                let strides = nest.inner_strides();
                out.extend(
                    (0..len as isize)
                        .map(|i| std::array::from_fn::<_, N, _>(|k| offsets[k] + i * strides[k])),
                );
            }
        }
        out
    }

    #[test]
    fn dimensions_that_lie_alike_are_merged() {
        let nest = Nest::new(&[2, 3, 4], [&[12, 4, 1], &[12, 4, 1]]);
        assert_eq!((nest.rank, nest.shape[0]), (1, 24));
        let channels_last = Nest::new(&[2, 3, 4, 5], [&[60, 1, 15, 3], &[60, 1, 15, 3]]);
        assert_eq!((channels_last.rank, channels_last.shape[0]), (1, 120));
        let bias = Nest::new(&[2, 3, 4], [&[12, 4, 1], &[0, 0, 1]]);
        assert_eq!((bias.rank, &bias.shape[..2]), (2, &[6, 4][..]));
        let scalar = Nest::<2>::new(&[], [&[], &[]]);
        assert_eq!((scalar.len(), scalar.inner_strides()), (1, [0, 0]));
        assert_eq!(Nest::new(&[2, 0], [&[1, 1]]).len(), 0);
    }

    proptest! {
        #[test]
        fn every_element_is_visited_once(
            dims in prop::collection::vec((0usize..5, -9isize..9, -9isize..9), 0..5),
            cut in 0.0..1.0f64,
        ) {
            let shape: Vec<_> = dims.iter().map(|d| d.0).collect();
            let a: Vec<_> = dims.iter().map(|d| d.1).collect();
            let b: Vec<_> = dims.iter().map(|d| d.2).collect();
            let nest = Nest::new(&shape, [&a, &b]);
            let cut = (cut * nest.len() as f64) as usize;
            let mut got = offsets(&nest, &[0, cut, nest.len()]);
            let mut want = vec![[0isize; 2]];
            for (n, a, b) in dims {
                want = want
                    .iter()
                    .flat_map(|o| (0..n as isize).map(move |i| [o[0] + i * a, o[1] + i * b]))
                    .collect();
            }
            got.sort_unstable();
            want.sort_unstable();
            prop_assert_eq!(got, want);
        }
    }
}
